/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory ABI between libbacksight (the writer) and the node daemon.
 *
 * Each process that attaches gets three memfds of its own over the daemon's
 * Unix socket; no process ever maps another's. The daemon creates, sizes and
 * seals them (F_SEAL_GROW | F_SEAL_SHRINK), so neither side can make the other
 * fault by truncation. The client maps all three MADV_DONTDUMP, MADV_DONTFORK.
 *
 *   arena    ARENA_SEGMENTS x 64 KiB, sparse: the records themselves
 *   channel  grants of segments (node -> threads), finished runs (thread ->
 *            node), the doorbell
 *   context  one slot a thread with its current trace, and the trigger queue.
 *            Apart from the channel because it becomes a BPF_F_MMAPABLE array
 *            map when kernel probes are on, and can be replaced while running
 *
 *
 * The arena is a log of segments
 * ------------------------------
 *
 *   arena    |  segment 0  |  segment 1  |  segment 2  | ...
 *
 *   segment  | segment header | run | run | run | ... | (run still open) | ?
 *            0               64                                      65536
 *
 *   run      | run header | record | record | ... |
 *            0           32        committed bytes ^
 *
 *   record   | bs_record_header | payload | pad to 8 |
 *
 * A thread owns one segment and appends to it. A *run* is what one handle
 * wrote into one segment without a break. Nothing is rounded up to a buffer,
 * so a trace costs its bytes and a header per run. A thread has at most one
 * open run, and it is the last in its segment.
 *
 * Life of a segment (state kept by the node, in its own memory):
 *
 *     FREE --grant--> STOCK --thread takes it--> ACTIVE --thread takes the
 *      ^                                           |       next one--> SEALED
 *      |                                           |                     |
 *      +------------- reclaim, oldest first -------+--- process died ----+
 *
 *   FREE    no memory behind it (or about to be granted again)
 *   STOCK   backed by memory that the node pre-faulted; waits in the grant ring
 *   ACTIVE  a thread appends to it; never reclaimed
 *   SEALED  full; waits, in the order of sealing over all arenas of the node,
 *           to be reclaimed
 *
 * Each grant gives the segment a new generation, which every run header
 * repeats: what an earlier life of the segment left in memory is told from
 * what is new by its generation, and the end of the log is where no valid
 * header of this generation stands.
 *
 * The log is the truth; the ring of finished runs is only news about it. When
 * the ring is full, the writer drops the news and counts it; the node sees the
 * gap between what was announced and where the next run starts, and reads the
 * run headers instead. The same walk rebuilds the index after a restart of the
 * daemon, and finds the open run of a process that was killed.
 *
 *
 * Who writes what (everything else is read-only to that side)
 * -----------------------------------------------------------
 *
 *   channel header, grant entries and grant head, segment headers,
 *   run-ring tails, trigger-queue cells being freed               node
 *   grant tail (compare and swap), thread areas, run entries,
 *   run headers and records, thread slots, trigger cells          client
 *
 * The node believes nothing that it reads here: indexes, offsets, lengths and
 * generations are checked against its own copies before use, read once, and
 * a client that lies loses only its own data.
 *
 *
 * The doorbell
 * ------------
 *
 * The node sleeps on the futex word `doorbell.rung` (futex_waitv over its
 * clients). Nobody writes an fd: a daemonising application may have closed it
 * and got the number back for something else.
 *
 *   node                                client
 *   ----                                ------
 *   WRITE_ONCE(sleeping, 1)             publish work (store_release)
 *   full_fence()                        full_fence()
 *   look for work once more             if READ_ONCE(sleeping):
 *   if none: futex_wait(rung, r)            fetch_add(rung, 1); futex_wake
 *   (r read before sleeping was set)
 *
 * Either the client sees sleeping == 1 and rings, or its publication came
 * before the node's second look (tests/unit/test_doorbell_model.py explores
 * all interleavings under TSO). Only three things ring: a trigger, a run ring
 * that is a quarter full, a stock of segments that is half used. Plain runs
 * do not: the node drains them before it answers any question, so an idle
 * node sleeps.
 */
#ifndef BS_ABI_H
#define BS_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "backsight.h"

/* "BSGT" read as a little-endian integer; both sides run on one machine. */
#define BS_ABI_MAGIC 0x54475342u

/* Raised with every change of this file that an old peer would misread.
 * A daemon refuses a client of another version, with a message. */
#define BS_ABI_VERSION 1u

#define BS_CACHE_LINE 64u

/* 64 KiB: large against a record (little waste at the end, a system call or a
 * grant per 64 KiB is nothing), small against a pool of 100 MB and up. */
#define BS_SEGMENT_BYTES 65536u

/* Threads of one process that can write at the same time. More are counted
 * and write nothing. A slot costs no memory before its first use. */
#define BS_THREAD_SLOTS 256u

/* Finished runs that a thread can announce while the node is away; a quarter
 * of it rings the doorbell. 2048 x 32 bytes = one segment's size. */
#define BS_RUN_RING_ENTRIES 2048u

/* Granted segments that can wait: 1024 x 64 KiB = 64 MiB, 5 ms of writing at
 * the 13 GB/s at which a core fills memory. */
#define BS_GRANT_RING_ENTRIES 1024u

/* Triggers that can wait. The node takes them within milliseconds; a process
 * that fires faster is over any rate limit anyway. */
#define BS_TRIGGER_CELLS 256u

/* ------------------------------------------------------------- arena --- */

struct bs_segment_header {
	uint32_t magic;
	uint16_t generation; /* of this grant; 0 is never valid */
	uint16_t zero;
	uint32_t segment;    /* its own number */
	uint32_t slot;	     /* written by the thread that took it */
	uint64_t granted_ns; /* CLOCK_MONOTONIC; orders segments at recovery */
	uint64_t reserved[5];
};

/* Run flags. FIRST/LAST bracket a handle: the trace is open on the node while
 * it has seen more FIRSTs than LASTs. */
#define BS_RUN_FIRST 0x0001u /* the handle's first run */
#define BS_RUN_LAST 0x0002u  /* the handle was closed at the run's end */
#define BS_RUN_LOSSY                                                           \
	0x0004u /* records of this handle were dropped before or
			       * in this run */
#define BS_RUN_CLOSED                                                          \
	0x8000u /* nothing will be appended (header only; set
			       * before the entry is announced) */

struct bs_run_header {
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint32_t committed_bytes; /* of whole records; store_release */
	uint32_t handle;	  /* differs among the handles of a process */
	uint32_t seq;		  /* 0, 1, 2, ... within the handle: a gap is a
				   * loss, whoever looks */
	uint16_t generation;	  /* of the segment; store_release, last of all
				   * header fields */
	uint16_t flags;
};

/* ----------------------------------------------------------- channel --- */

/*
 *   0      channel header   (node writes)
 *   4096   grant ring       heads on own lines, then entries
 *   16384  thread area 0    area header, then its run ring
 *   ...    thread area 255
 */
struct bs_doorbell {
	uint32_t rung;	   /* futex word; counts rings */
	uint32_t sleeping; /* node is about to sleep */
	uint32_t pad[14];
};

struct bs_channel_header {
	uint32_t magic;
	uint32_t version;
	uint64_t arena_bytes;
	uint32_t clock_is_counter; /* what record ticks are: 0: CLOCK_MONOTONIC
				    * ns; 1: the CPU's counter */
	uint32_t zero;
	uint64_t ticks_per_s;
	uint64_t node_id;
	uint64_t cluster_seed; /* of the three hashes, see hash.h */
	/* The next two may change at any time (bsn_set_sampling()). Each is a
	 * word of its own that orders nothing: the node says WRITE_ONCE, threads
	 * READ_ONCE. */
	uint64_t percentage_threshold; /* record iff hash < this, or all-ones;
					* read when a handle is opened, which is
					* recorded as a whole or not at all */
	uint32_t trust_incoming;       /* honour triggers that come with a
					* request; read when one comes */
	uint32_t client_number;	       /* for who looks; the node has its own */
	char node_name[64];
	struct bs_doorbell doorbell;
	uint64_t untied_to_ns; /* for the node's successor: the latest loss of
				* nobody knows which trace; 0: none */
};

struct bs_grant {
	uint32_t segment;
	uint16_t generation;
	uint16_t fresh; /* the client has not touched its pages yet: populate */
};

struct bs_grant_ring {
	uint32_t head; /* node; never wrapped, entry = head % ENTRIES */
	uint32_t pad0[15];
	uint32_t tail; /* threads, by compare and swap */
	uint32_t pad1[15];
	struct bs_grant entries[BS_GRANT_RING_ENTRIES];
};

/* A run that was lost has no segment; its entry carries the loss alone. */
#define BS_SEGMENT_NONE 0xffffffffu

struct bs_run_entry {
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint32_t segment;
	uint16_t generation;
	uint16_t flags;
	uint32_t offset;	  /* of the run header in its segment */
	uint32_t committed_bytes; /* segment NONE: payload bytes lost */
};

struct bs_thread_area {
	/* The writer's lines. */
	uint32_t owner_tid;	   /* 0: free; claimed by compare and swap */
	uint32_t run_head;	   /* store_release after the entry */
	uint32_t runs_unannounced; /* ring full: read the log instead */
	uint32_t segment;	   /* being appended to, or BS_SEGMENT_NONE */
	uint32_t cursor;	   /* valid while the area is free: where the
				  * next owner goes on in `segment` */
	uint32_t zero;
	uint64_t runs; /* counters, for metrics only */
	uint64_t runs_lost;
	uint64_t records_lost;
	uint64_t payload_bytes;
	uint64_t payload_bytes_lost;
	uint64_t records_oversized;
	uint8_t pad0[128 - 4 * 6 - 8 * 6];
	/* The node's line. */
	uint32_t run_tail;
	uint32_t node_private[15]; /* how far it got, for its successor */
	struct bs_run_entry entries[BS_RUN_RING_ENTRIES];
};

#define BS_CHANNEL_GRANTS_OFFSET 4096u
#define BS_CHANNEL_AREAS_OFFSET 16384u
#define BS_CHANNEL_BYTES                                                       \
	(BS_CHANNEL_AREAS_OFFSET +                                             \
	 (size_t)BS_THREAD_SLOTS * sizeof(struct bs_thread_area))

/* ----------------------------------------------------------- context --- */

/* What a thread works on, for BPF programs and the node. Written with plain
 * stores on every begin and end. Slot i belongs to thread area i. */
struct bs_thread_slot {
	uint32_t tid;
	uint32_t flags;
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint64_t span_id;
	uint64_t reserved[4];
};

/*
 * The trigger queue: bounded, many producers (threads, later BPF programs),
 * one consumer (the node). Cell i starts with seq == i.
 *
 *   producer  claim position p by compare and swap of head, when
 *             load_acquire(cell[p % N].seq) == p; fill;
 *             store_release(seq, p + 1)
 *   consumer  cell is ready when load_acquire(seq) == t + 1; copy; t++ (t is
 *             the node's own); store_release(seq, t + N) when the trigger is
 *             seen to, so that it outlives the death of the daemon
 *
 * A producer that was killed between claim and commit would stop the queue:
 * the node skips a claimed cell after 100 ms, and counts it.
 */
struct bs_trigger_cell {
	uint32_t seq;
	uint16_t n_laterals;
	uint8_t source; /* enum bs_trigger_source */
	uint8_t zero;
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint64_t ticks;
	char name[BS_TRIGGER_NAME_MAX + 1]; /* NUL-padded */
	char why[BS_TRIGGER_WHY_MAX + 1];   /* NUL-padded */
	struct bs_trace_id laterals[BS_LATERALS_MAX];
	uint8_t pad[32];
};

enum bs_trigger_source {
	BS_TRIGGER_APPLICATION = 1,
	BS_TRIGGER_CONTEXT = 2, /* fired upstream, came with the request */
	BS_TRIGGER_KERNEL = 3,
};

struct bs_context_segment {
	uint32_t magic;
	uint32_t version;
	uint32_t thread_slots;
	uint32_t trigger_cells;
	uint8_t pad0[BS_CACHE_LINE - 16];
	uint32_t trigger_head; /* producers */
	uint32_t triggers_lost;
	uint64_t records_unattributed; /* lost by threads without a slot */
	uint8_t pad1[BS_CACHE_LINE - 16];
	struct bs_thread_slot slots[BS_THREAD_SLOTS];
	struct bs_trigger_cell cells[BS_TRIGGER_CELLS];
};

/* ------------------------------------------------------------ attach --- */

/*
 * Over SOCK_SEQPACKET, one packet each way:
 *
 *   client  bs_attach_request
 *   node    bs_attach_reply + SCM_RIGHTS [arena, channel, context]
 *
 * and then silence: the client's thread blocks in recv. A hang-up means that
 * the daemon went away; the client goes on writing into what it has, connects
 * again, and names its token. A daemon that got the memfds back from the fd
 * store answers `resumed` (no fds), and nothing changes for the writers; any
 * other daemon hands out a fresh attachment, to which each thread moves at its
 * next begin.
 */
struct bs_attach_request {
	uint32_t magic;
	uint32_t version;
	int32_t pid;
	uint32_t zero;
	uint64_t token[2]; /* zero: a first attachment */
	char service[64];
};

struct bs_attach_reply {
	uint32_t magic;
	uint32_t version;
	int32_t status; /* 0, or a negative errno, with the reason below */
	uint32_t resumed;
	uint64_t token[2];
	uint64_t arena_bytes;
	char message[128];
};

/* ------------------------------------------------------------ slices --- */

/*
 * A slice is what one node holds of one trace, as bytes that can be sent,
 * resumed at any offset and decoded anywhere: a sequence of pieces, each a
 * header and `bytes` of content, appended in the order in which the node
 * copied them out of the log. The pieces of a run that grew while it was
 * copied share (client, handle, seq) and differ in `from`.
 */
enum bs_piece_kind {
	BS_PIECE_RUN = 1,     /* whole records of a run */
	BS_PIECE_CLOCK = 2,   /* struct bs_clock_pair: for records near to it */
	BS_PIECE_PROCESS = 3, /* struct bs_piece_process of `client` */
	BS_PIECE_LOSS = 4,    /* no content: records of this client's part of
			       * the trace were dropped */
	BS_PIECE_EXIT = 5,    /* no content: the process is gone; what it had
			       * open stays unfinished */
};

struct bs_piece_header {
	uint32_t bytes; /* of content; a multiple of 8 */
	uint16_t kind;
	uint16_t flags;	 /* BS_RUN_* of the run so far */
	uint32_t client; /* a process's number on its node */
	uint32_t handle;
	uint32_t seq;
	uint32_t from; /* offset of the content in its run */
};

struct bs_clock_pair {
	uint64_t ticks;
	uint64_t realtime_ns; /* Unix time at `ticks` */
	uint64_t ticks_per_s;
};

struct bs_piece_process {
	uint32_t pid;
	uint32_t zero;
	char service[64];
};

_Static_assert(sizeof(struct bs_record_header) == 16, "ABI");
_Static_assert(sizeof(struct bs_segment_header) == 64, "ABI");
_Static_assert(sizeof(struct bs_run_header) == 32, "ABI");
_Static_assert(sizeof(struct bs_run_entry) == 32, "ABI");
_Static_assert(sizeof(struct bs_grant) == 8, "ABI");
_Static_assert(sizeof(struct bs_doorbell) == BS_CACHE_LINE, "ABI");
_Static_assert(offsetof(struct bs_channel_header, doorbell) == 128, "ABI");
_Static_assert(offsetof(struct bs_grant_ring, tail) == BS_CACHE_LINE, "ABI");
_Static_assert(BS_CHANNEL_GRANTS_OFFSET + sizeof(struct bs_grant_ring) <=
		       BS_CHANNEL_AREAS_OFFSET,
	       "the grant ring fits before the thread areas");
_Static_assert(offsetof(struct bs_thread_area, run_tail) == 128, "ABI");
_Static_assert(sizeof(struct bs_thread_area) % BS_CACHE_LINE == 0, "ABI");
_Static_assert(sizeof(struct bs_thread_slot) == BS_CACHE_LINE, "ABI");
_Static_assert(sizeof(struct bs_trigger_cell) == 704, "ABI: eleven lines");
_Static_assert(offsetof(struct bs_context_segment, slots) % BS_CACHE_LINE == 0,
	       "ABI");
_Static_assert(sizeof(struct bs_piece_header) == 24, "ABI");
_Static_assert(sizeof(struct bs_clock_pair) == 24, "ABI");
_Static_assert(sizeof(struct bs_span_start) == 32, "ABI");
_Static_assert(sizeof(struct bs_span_end) == 24, "ABI");
_Static_assert(sizeof(struct bs_hop) == 24, "ABI");
_Static_assert(sizeof(struct bs_attribute_header) == 4, "ABI");

#endif
