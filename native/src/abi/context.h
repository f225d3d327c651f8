/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) OR Apache-2.0 */
/*
 * The context: what a process shows of its threads, and its trigger queue.
 *
 * A segment of its own and of fixed size, because it may be a memfd or a
 * BPF_F_MMAPABLE array map, which BPF programs read and push into, and because
 * it can be replaced while the process runs (attach.h).
 *
 *   | header | slot 0 .. slot 255 | trigger cell 0 .. trigger cell 255 |
 *
 * Slot i belongs to thread area i of the channel. It is written with plain
 * stores on every begin and end, and by bs_show(), and orders nothing. Only whoever
 * closes a handle that another thread shows takes the id out there, word by word.
 *
 * The trigger queue: bounded, many producers (threads, BPF programs), one
 * consumer (the node). Cell i starts with seq == i.
 *
 *   producer  claim position p by compare and swap of head, from p to p + 1, when
 *             load_acquire(cell[p % N].seq) == p; fill;
 *             commit by compare and swap of seq, from p to p + 1
 *   consumer  cell is ready when load_acquire(seq) == t + 1; copy; t++ (t is
 *             the node's own); store_release(seq, t + N) when the trigger is
 *             seen to, so that it outlives the death of the daemon
 *
 * Both swaps acquire and release. A producer that was killed between claim and
 * commit would stop the queue: after 100 ms the node skips a claimed cell, by
 * compare and swap of seq from t to t + BS_CELL_SKIPPED, and counts it. So of
 * commit and skip one alone succeeds. If it is the skip, the trigger is lost,
 * and the producer counts it (triggers_lost). A commit by a store would tell
 * nobody, and could stop the queue when the cell comes round again.
 *
 * What a swap cannot prevent: a producer that was only held up for so long may
 * fill a cell that is another one's by now. Then that one's trigger can have
 * fields of both. That it may have come to this the count of skipped cells says.
 *
 * What producers do is written once, for C and for BPF C, in abi/trigger_queue.h.
 */
#ifndef BS_ABI_CONTEXT_H
#define BS_ABI_CONTEXT_H

#include "abi/kernel_event.h"
#include "abi/types.h"

#define BS_CONTEXT_SLOTS 256u

/* Triggers that can wait. The node takes them within milliseconds; a process
 * that fires faster is over any rate limit anyway. */
#define BS_TRIGGER_CELLS 256u

/* Of seq, beside t (free) and t + 1 (ready): neither, until the cell is given back. */
#define BS_CELL_SKIPPED 2u

/* Of a cell: BS_TRIGGER_NAME_MAX, BS_TRIGGER_WHY_MAX and a NUL each, and
 * BS_LATERALS_MAX, of backsight.h. */
#define BS_CELL_NAME_BYTES 32u
#define BS_CELL_WHY_BYTES 96u
#define BS_CELL_LATERALS 32u

struct bs_thread_slot {
	uint32_t tid;
	uint32_t flags;
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint64_t span_id;
	uint64_t reserved[4];
};

struct bs_cell_trace {
	uint64_t hi;
	uint64_t lo;
};

struct bs_trigger_cell {
	uint32_t seq;
	uint16_t n_laterals;
	uint8_t source; /* enum bs_trigger_source */
	uint8_t zero;
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint64_t ticks; /* of the kernel: CLOCK_MONOTONIC, in ns */
	char name[BS_CELL_NAME_BYTES]; /* NUL-padded */
	union {
		char why[BS_CELL_WHY_BYTES]; /* NUL-padded */
		struct bs_kernel_event
			event; /* of the kernel, which writes no text */
	};
	struct bs_cell_trace laterals[BS_CELL_LATERALS];
	uint8_t pad[32];
};

enum bs_trigger_source {
	BS_TRIGGER_APPLICATION = 1,
	BS_TRIGGER_CONTEXT = 2, /* fired upstream, came with the request */
	BS_TRIGGER_KERNEL = 3,
	BS_TRIGGER_NODE = 4, /* the node daemon itself; never in a queue */
};

struct bs_context_segment {
	uint32_t magic;
	uint32_t version;
	uint32_t thread_slots;
	uint32_t trigger_cells;
	/* Counts threads that took a slot: who has sought one in vain need not do so
	 * again before it changes. 0: of a library that does not count. */
	uint32_t slots_taken;
	uint8_t pad0[44];
	uint32_t trigger_head;	       /* producers */
	uint32_t triggers_lost;	       /* no cell was free, or it was skipped */
	uint64_t records_unattributed; /* lost by threads without a slot */
	uint8_t pad1[48];
	struct bs_thread_slot slots[BS_CONTEXT_SLOTS];
	struct bs_trigger_cell cells[BS_TRIGGER_CELLS];
};

_Static_assert(sizeof(struct bs_thread_slot) == BS_CACHE_LINE, "ABI");
_Static_assert(sizeof(struct bs_trigger_cell) == 704, "ABI: eleven lines");
_Static_assert(sizeof(struct bs_kernel_event) == BS_CELL_WHY_BYTES, "ABI");
_Static_assert(__builtin_offsetof(struct bs_context_segment, trigger_head) ==
		       BS_CACHE_LINE,
	       "ABI");
_Static_assert(__builtin_offsetof(struct bs_context_segment, slots) ==
		       2 * BS_CACHE_LINE,
	       "ABI");

#endif
