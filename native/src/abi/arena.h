/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena: the log of one process. A sparse memfd of whole segments.
 *
 *   arena    |  segment 0  |  segment 1  |  segment 2  | ...
 *
 *   segment  | header | run | run | run (open) |  free  | e2 | e1 | e0 |
 *            0       64                                               65536
 *                                         directory: grows down from the end
 *
 *   run      | run header | record | record | ... |
 *            0           32        committed bytes ^
 *
 *   record   | bs_record_header | payload | pad to 8 |     (backsight.h)
 *
 * A thread owns one segment and appends to it. A *run* is what one handle
 * wrote into one segment without a break. Nothing is rounded up to a buffer:
 * a trace costs its bytes, a header and a directory entry a run. A thread has
 * at most one open run, and it is the last in its segment. A segment is full
 * where the next run and its entry would meet.
 *
 * The directory
 * -------------
 *
 * One word a run. Entry i stands at BS_SEGMENT_BYTES - 8 * (i + 1):
 *
 *   63            17 16         4 3     0
 *   | fingerprint  | offset / 8 | flags |
 *
 * The fingerprint is bs_fingerprint() of the trace id, the offset that of the
 * run header in the segment. So whoever looks for a trace reads 8 bytes a run,
 * side by side, and a run header only where the fingerprint is met.
 *
 *   writer                                 reader
 *   ------                                 ------
 *   run header; entry
 *   store_release(runs, i + 1)             load_acquire(runs)
 *                                          entries below it are there
 *   records; store_release(committed)      load_acquire(committed)
 *   at close: store_release(entry with     load_acquire(entry): CLOSED means
 *     CLOSED, and LAST, LOSSY as they are)   that `committed` is final
 *
 * Life of a segment (the node keeps the state, in memory of its own):
 *
 *     FREE --grant--> STOCK --a thread takes it--> ACTIVE --the thread takes
 *      ^                                              |       the next--> SEALED
 *      |                                              |                     |
 *      +--------------- reclaim, oldest first --------+---- process died ---+
 *
 *   FREE    not granted; has no memory
 *   STOCK   waits in the grant ring; memory comes when it is first touched
 *   ACTIVE  a thread appends to it; never reclaimed
 *   SEALED  full; waits, in the order of sealing over all arenas of the node,
 *           to be reclaimed
 *
 * The thread that takes a segment writes its header: `runs` 0, its slot, and
 * then, with store_release, the generation of the grant. Before that the node
 * takes the segment for empty, and entries from `runs` on are never read: what
 * an earlier life left is out of reach. Which segments are granted, to whom
 * and when, the node keeps where no client can write.
 */
#ifndef BS_ABI_ARENA_H
#define BS_ABI_ARENA_H

#include <stddef.h>

#include "abi/types.h"
#include "backsight.h"

/* 64 KiB: large against a record (little waste at the end, a system call or a
 * grant per 64 KiB is nothing), small against a pool of 100 MB and up. */
#define BS_SEGMENT_BYTES 65536u

/* No segment. */
#define BS_SEGMENT_NONE 0xffffffffu

struct bs_segment_header {
	uint32_t generation; /* of the grant (struct bs_grant); written last */
	uint32_t slot;	     /* of the thread that took it */
	uint32_t runs;	     /* entries in the directory; store_release */
	uint32_t zero;
	uint64_t reserved[6];
};

struct bs_run_header {
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint32_t committed_bytes; /* of whole records; store_release */
	uint32_t handle;	  /* differs among the handles of a process */
	uint32_t seq;		  /* 0, 1, 2, ... within the handle: a gap is a
				   * loss, whoever looks */
	uint32_t zero;
};

/* Flags of an entry. FIRST and LAST bracket a handle: a run with both holds all
 * of it. */
#define BS_RUN_FIRST 0x1u  /* the handle's first run */
#define BS_RUN_LAST 0x2u   /* the handle was closed at the run's end */
#define BS_RUN_LOSSY 0x4u  /* records of the handle were lost before or in it */
#define BS_RUN_CLOSED 0x8u /* nothing will be appended */

#define BS_ENTRY_FLAGS 0xfull
#define BS_ENTRY_OFFSET_SHIFT 4
#define BS_ENTRY_OFFSET_MASK 0x1fffull /* of offset / 8: 0 to 8191 */
#define BS_ENTRY_FINGERPRINT_SHIFT 17
#define BS_FINGERPRINT_BITS (64 - BS_ENTRY_FINGERPRINT_SHIFT)

/* What stands for a trace id in a directory. Two multiplications: ids of a
 * counter must differ as ids of a random generator do. */
static inline uint64_t bs_fingerprint(uint64_t hi, uint64_t lo)
{
	uint64_t h = (hi ^ (lo >> 32)) * 0x9e3779b97f4a7c15ull;

	h = (h ^ (h >> 32) ^ lo) * 0xff51afd7ed558ccdull;
	return (h ^ (h >> 29)) >> BS_ENTRY_FINGERPRINT_SHIFT;
}

static inline uint64_t bs_entry(uint64_t fingerprint, uint32_t offset,
				uint32_t flags)
{
	return fingerprint << BS_ENTRY_FINGERPRINT_SHIFT |
	       (uint64_t)(offset / 8) << BS_ENTRY_OFFSET_SHIFT | flags;
}

static inline uint32_t bs_entry_flags(uint64_t entry)
{
	return (uint32_t)(entry & BS_ENTRY_FLAGS);
}

static inline uint32_t bs_entry_offset(uint64_t entry)
{
	return (uint32_t)(entry >> BS_ENTRY_OFFSET_SHIFT &
			  BS_ENTRY_OFFSET_MASK) *
	       8;
}

static inline uint64_t bs_entry_fingerprint(uint64_t entry)
{
	return entry >> BS_ENTRY_FINGERPRINT_SHIFT;
}

/* Entry i of a segment. */
static inline uint64_t *bs_directory(void *segment, uint32_t i)
{
	return (uint64_t *)((unsigned char *)segment + BS_SEGMENT_BYTES) - 1 -
	       i;
}

/* As many runs as can be in a segment: without records, side by side. */
#define BS_SEGMENT_RUNS_MAX                                                    \
	((BS_SEGMENT_BYTES - (uint32_t)sizeof(struct bs_segment_header)) /     \
	 ((uint32_t)sizeof(struct bs_run_header) + 8u))

_Static_assert(sizeof(struct bs_segment_header) == 64, "ABI");
_Static_assert(sizeof(struct bs_run_header) == 32, "ABI");
_Static_assert(sizeof(struct bs_record_header) == 16, "ABI");
_Static_assert(BS_SEGMENT_BYTES / 8 <= BS_ENTRY_OFFSET_MASK + 1,
	       "an offset fits in an entry");

#endif
