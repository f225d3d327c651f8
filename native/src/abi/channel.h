/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The channel: what one process and the node tell each other about the arena.
 *
 *   offset
 *        0  channel header   who the node is, its clock, the doorbell
 *     4096  grant ring       segments that may be written to (node -> threads)
 *    73728  open handles     which handles are open (threads -> node)
 *   335872  thread area 0    place in the log, counters, ring of losses
 *      ...  thread area 255
 *
 * Who writes what (everything else is read-only to that side)
 * -----------------------------------------------------------
 *
 *   channel header, grant entries and grant head, loss tails     node
 *   grant tail (compare and swap; the node too, when it takes
 *     grants back), open handles, thread areas, loss entries     client
 *
 * The node believes nothing that it reads here.
 *
 * Grants
 * ------
 *
 * The node keeps a stock of segments in the ring that lasts for ten seconds at
 * the process's own rate, so that nothing is lost while the daemon is stopped,
 * starved or restarted. A segment costs memory when it is touched, so the node
 * does not write to it: whoever takes it writes its header (arena.h).
 *
 * Threads take from the tail. From the head the node takes back what it granted
 * last, when a process needs fewer:
 *
 *   node, grants                        thread, takes
 *   ------------                        -------------
 *   write entry h                       t = load_acquire(tail)
 *   store_release(head, h + 1)          h = load_acquire(head)
 *                                       if h - t is 0, or more than
 *   node, takes entry h - 1 back          BS_GRANT_RING_ENTRIES: empty
 *   ----------------------------        read entry t
 *   t = READ_ONCE(tail)                 compare_and_swap(tail, t, t + 1),
 *   WRITE_ONCE(head, h - 1)               or all again from the tail that
 *   compare_and_swap(tail, t, t)          it was given
 *   if it failed, or h - 1 - t is not
 *     above 0: store_release(head, h)
 *
 * The head goes back, so a thread that took the last entry meanwhile can see it
 * behind the tail: that is an empty ring too, and no entry may be read. The node's
 * swap changes nothing; but who moves the tail after it, or finds it moved, sees
 * the head that goes with it.
 *
 * Idle threads
 * ------------
 *
 * A segment that a thread has taken and writes nothing to is of use to nobody. The
 * client's library takes it back from the thread after some seconds, and parks it
 * (arena.h): so a process has about as many segments in use as threads that write,
 * and not as threads. What is parked the node may reclaim in its turn.
 *
 * Losses
 * ------
 *
 * A run that finds no segment has no place in the log. Its thread tells of it in
 * a ring of its own: when its first record is lost, since the process may be
 * killed before the run is closed; and again if it was the handle's last. So it
 * does of a record that is too large, where no run is open to say so. What finds
 * no room in the ring is counted.
 *
 * Open handles
 * ------------
 *
 * When the oldest segment is reclaimed, the runs of handles that are still
 * open are kept. Which are: the thread-local trace of each thread stands in
 * its area (own_handle); the handles of bs_open() in the table. A handle's
 * number names its place there:
 *
 *   number   | slot that drew it : 9 | count : 23 |   256: by a thread
 *                                                     without a slot
 *   place    (slot * 256 + count) % BS_OPEN_HANDLES
 *
 * bs_open() draws counts until a place is free (it is 0) and takes it by
 * compare and swap; whoever closes the handle writes 0. After
 * BS_OPEN_PROBES places it goes without: then it is counted
 * (handles_unlisted), and its first runs go when their segments go.
 *
 * The doorbell
 * ------------
 *
 * The node sleeps on the futex word `rung`. Nobody writes an fd: a daemonising
 * application may have closed it and got the number back for something else.
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
 * before the node's second look. Two things ring: a trigger, and a stock of
 * which one part in BS_STOCK_TOLD is used: what is left lasts while the node
 * wakes up, or is away. (A library may ring later. Then its stock is made
 * larger, if that is possible.) What is written does not ring.
 */
#ifndef BS_ABI_CHANNEL_H
#define BS_ABI_CHANNEL_H

#include <stddef.h>

#include "abi/types.h"

/* Threads of one process that can write at the same time. More are counted
 * and write nothing. A slot costs no memory before its first use. */
#define BS_THREAD_SLOTS 256u

/* Segments that a process can have parked: of each thread one. */
#define BS_PARKED_MAX BS_THREAD_SLOTS

/* Granted segments that can wait: 8192 x 64 KiB = 512 MiB, ten seconds at 50
 * MB/s; a process that writes faster has a shorter stock. */
#define BS_GRANT_RING_ENTRIES 8192u

/* See the doorbell. A thread at full speed uses an eighth of 256 MiB in 3 ms:
 * then it rings 330 times a second, which costs less than writing. */
#define BS_STOCK_TOLD 8u

/* Handles of bs_open() that are protected from eviction while they are open. */
#define BS_OPEN_HANDLES 65536u
#define BS_OPEN_PROBES 64u

/* Losses that a thread can tell of while the node is away. */
#define BS_LOSS_RING_ENTRIES 64u

struct bs_doorbell {
	uint32_t rung;	   /* futex word; counts rings */
	uint32_t sleeping; /* node is about to sleep */
	uint32_t pad[14];
};

/* What record ticks are. */
enum bs_clock {
	BS_CLOCK_MONOTONIC = 0, /* CLOCK_MONOTONIC, ns */
	BS_CLOCK_COUNTER = 1,	/* the CPU's: TSC, CNTVCT_EL0 */
};

struct bs_channel_header {
	uint32_t magic;
	uint32_t version;
	uint64_t arena_bytes;
	uint32_t clock;		/* enum bs_clock */
	uint32_t client_number; /* for who looks; the node has its own */
	uint64_t ticks_per_s;
	uint64_t node_id;
	uint64_t cluster_seed; /* of the three hashes, see hash.h */
	uint8_t pad[16];
	char node_name[64];
	struct bs_doorbell doorbell;
};

struct bs_grant {
	uint32_t segment;    /* and BS_GRANT_FRESH */
	uint32_t generation; /* as in the segment's header */
};

/* It has no memory, or none that this process has met: populate it before use. */
#define BS_GRANT_FRESH 0x80000000u

struct bs_grant_ring {
	uint32_t head; /* node; never wrapped, entry = head % ENTRIES */
	uint32_t pad0[15];
	uint32_t tail;	 /* by compare and swap */
	uint32_t losses; /* fetch_add after each loss, told or not: where it has
			  * not moved, the node need not look at the areas */
	uint32_t moves;	 /* fetch_add after segments were parked, sealed or gone
			 * on with: likewise for the headers of segments */
	uint32_t pad1[13];
	struct bs_grant entries[BS_GRANT_RING_ENTRIES];
};

struct bs_loss {
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint32_t handle;
	uint32_t flags;		/* FIRST, LAST as of the run that was lost */
	uint64_t payload_bytes; /* so far; of metrics, the areas have the sum */
};

struct bs_thread_area {
	/* The writer's lines. */
	uint32_t owner_tid;	/* 0: free; claimed by compare and swap */
	uint32_t segment;	/* that the thread appended to last, or
			      * BS_SEGMENT_NONE; after the segment's `slot`, with
			      * store_release */
	uint32_t own_handle;	/* of the thread-local trace; 0: none is open */
	uint32_t loss_head;	/* store_release after the entry */
	uint32_t losses_untold; /* the ring was full */
	uint32_t zero;
	uint64_t runs; /* counters, for metrics only */
	uint64_t runs_lost;
	uint64_t records_lost;
	uint64_t payload_bytes;
	uint64_t payload_bytes_lost;
	uint64_t records_oversized;
	uint64_t handles_unlisted;
	uint8_t pad0[128 - 4 * 6 - 8 * 7];
	/* The node's line. */
	uint32_t loss_tail;
	uint32_t loss_tail_seen; /* what loss_tail is from the commit on */
	uint64_t loss_commit;	 /* of the node's report store; 0: none */
	uint32_t pad1[12];
	struct bs_loss losses[BS_LOSS_RING_ENTRIES];
};

#define BS_CHANNEL_GRANTS_OFFSET 4096u
#define BS_CHANNEL_HANDLES_OFFSET 73728u
#define BS_CHANNEL_AREAS_OFFSET                                                \
	(BS_CHANNEL_HANDLES_OFFSET +                                           \
	 BS_OPEN_HANDLES * (uint32_t)sizeof(uint32_t))
#define BS_CHANNEL_BYTES                                                       \
	(BS_CHANNEL_AREAS_OFFSET +                                             \
	 (size_t)BS_THREAD_SLOTS * sizeof(struct bs_thread_area))

/* A handle's number. */
#define BS_HANDLE_COUNT_BITS 23
#define BS_HANDLE_COUNT_MASK ((1u << BS_HANDLE_COUNT_BITS) - 1)

static inline uint32_t bs_handle_slot(uint32_t handle)
{
	return handle >> BS_HANDLE_COUNT_BITS;
}

static inline uint32_t bs_handle_place(uint32_t handle)
{
	return (bs_handle_slot(handle) * 256 +
		(handle & BS_HANDLE_COUNT_MASK)) %
	       BS_OPEN_HANDLES;
}

_Static_assert(sizeof(struct bs_doorbell) == BS_CACHE_LINE, "ABI");
_Static_assert(offsetof(struct bs_channel_header, node_name) == 64, "ABI");
_Static_assert(offsetof(struct bs_channel_header, doorbell) == 128, "ABI");
_Static_assert(sizeof(struct bs_grant) == 8, "ABI");
_Static_assert(offsetof(struct bs_grant_ring, tail) == BS_CACHE_LINE, "ABI");
_Static_assert(BS_CHANNEL_GRANTS_OFFSET + sizeof(struct bs_grant_ring) <=
		       BS_CHANNEL_HANDLES_OFFSET,
	       "the grant ring fits before the open handles");
_Static_assert(sizeof(struct bs_loss) == 32, "ABI");
_Static_assert(offsetof(struct bs_thread_area, loss_tail) == 128, "ABI");
_Static_assert(sizeof(struct bs_thread_area) % BS_CACHE_LINE == 0, "ABI");

#endif
