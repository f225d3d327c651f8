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
 *            0           16 or 20   committed bytes ^
 *
 *   record   | bs_record_header | payload | pad to 4 |     (backsight.h)
 *
 * A thread owns one segment and appends to it. A *run* is what one handle
 * wrote into one segment without a break. Nothing is rounded up to a buffer: a
 * trace of one record costs, beside its bytes, 12 for the record's header, 16
 * for the run's and 8 for the entry. A thread has at most one open run, and it
 * is the last in its segment. A segment is full where the next run and its
 * entry would meet.
 *
 * The directory
 * -------------
 *
 * One word a run. Entry i stands at BS_SEGMENT_BYTES - 8 * (i + 1):
 *
 *   63            18 17         4 3     0
 *   | fingerprint  | offset / 4 | flags |
 *
 * The offset is that of the run header in the segment. So whoever looks for a
 * trace reads 8 bytes a run, side by side, and a run header only where the
 * fingerprint is met.
 *
 * The trace id
 * ------------
 *
 * Nothing of it is there twice. bs_trace_mix() makes 64 bits of an id, and given
 * the id's upper half (hi), the lower one (lo) can be computed back:
 *
 *   entry        the upper 46 bits of the mix: the fingerprint
 *   run header   the lower 18 bits of the mix, in `word`; and hi
 *
 *   word   31                 18 17                  0
 *          | committed bytes / 4 | 18 bits of the mix |
 *
 * An entry and a run header make an id whatever stands in them: nothing tells
 * that they are not each other's. That they are, the order of stores sees to:
 *
 *   writer                                 reader
 *   ------                                 ------
 *   run header; entry
 *   store_release(runs, i + 1)             load_acquire(runs)
 *                                          entries below it are there, and
 *                                          their run headers
 *   records; store_release(word)           load_acquire(word)
 *   at close: store_release(entry with     load_acquire(entry): CLOSED means
 *     CLOSED, and LAST, LOSSY as they are)   that `word` is final
 *
 * - An entry that can be read has its header. Both are written before `runs`
 *   counts them, and what a segment held in an earlier life is counted by a
 *   `runs` of then, which is set to 0 before the generation is told.
 * - What changes later does not change the id: of the entry the flags but FIRST,
 *   of the header the committed length, each with one store of the whole word.
 * - A writer that is killed leaves what it stored up to there, in that order.
 *
 * What is left is a client that lies, in an entry, a header or an offset. He can
 * let his bytes pass for a run of any trace, as he can by writing to it. Of
 * another's trace he spoils nothing: handles count by process.
 *
 * Life of a segment (the node keeps the state, in memory of its own):
 *
 *     FREE --grant--> STOCK --a thread takes it--> ACTIVE --it is full--> SEALED
 *      ^                                            |  ^                     |
 *      |                      the thread is idle    |  |  another one        |
 *      |                                            v  |  goes on            |
 *      |                                           PARKED                    |
 *      |                                             |                       |
 *      +----------- reclaim, oldest first -----------+-----------------------+
 *
 *   FREE    not granted; has no memory
 *   STOCK   waits in the grant ring; memory comes when it is first touched
 *   ACTIVE  a thread appends to it; never reclaimed
 *   PARKED  has room, and no thread: the next that needs a segment goes on
 *           there, unless the node reclaims it before
 *   SEALED  full, or its process is gone
 *
 * What is sealed or parked waits, in that order over all arenas of the node, to be
 * reclaimed.
 *
 * The thread that takes a segment from the ring writes its header: `runs` 0, its
 * slot, and then, with store_release, its life: the generation of the grant.
 * Before that the node takes the segment for empty, and entries from `runs` on are
 * never read: what an earlier life left is out of reach. Which segments are granted,
 * to whom and when, the node keeps where no client can write.
 *
 * What a process does with a segment afterwards stands beside the generation, in
 * the same word, so that a swap never meets a later life:
 *
 *     HELD ----it is full---------> SEALED
 *     HELD ----its thread is idle-> PARKED
 *     PARKED --a thread goes on---> HELD        by compare and swap
 *     PARKED --the node needs it--> TAKEN_BACK  likewise, by the node
 *
 * Each step of the process is counted in bs_grant_ring.moves, after it was made.
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

enum bs_segment_state {
	BS_SEGMENT_HELD = 0, /* a thread appends to it */
	BS_SEGMENT_PARKED = 1,
	BS_SEGMENT_SEALED = 2,	   /* nobody will append to it */
	BS_SEGMENT_TAKEN_BACK = 3, /* likewise: the node took it */
};

struct bs_segment_header {
	uint64_t life; /* bs_life() of the grant's generation; written last */
	uint32_t slot; /* of the thread that took it, or goes on in it */
	uint32_t runs; /* entries in the directory; store_release */
	uint64_t reserved[6];
};

static inline uint64_t bs_life(uint32_t generation, uint32_t state)
{
	return (uint64_t)state << 32 | generation;
}

static inline uint32_t bs_life_generation(uint64_t life)
{
	return (uint32_t)life;
}

static inline uint32_t bs_life_state(uint64_t life)
{
	return (uint32_t)(life >> 32);
}

/* Aligned to 4, and so are its 64 bits. */
struct bs_run_header {
	uint32_t trace_hi[2]; /* lower half first */
	uint32_t word;	 /* committed bytes of whole records, and 18 bits of
			       * the mix; store_release */
	uint32_t handle; /* differs among the handles of a process */
	uint32_t seq;	 /* 0, 1, 2, ... within the handle: a gap is a loss,
			       * whoever looks. Not there where the entry says
			       * FIRST: it is 0, and records follow the handle */
};

/* Flags of an entry. FIRST and LAST bracket a handle: a run with both holds all
 * of it. */
#define BS_RUN_FIRST 0x1u  /* the handle's first run */
#define BS_RUN_LAST 0x2u   /* the handle was closed at the run's end */
#define BS_RUN_LOSSY 0x4u  /* records of the handle were lost before or in it */
#define BS_RUN_CLOSED 0x8u /* nothing will be appended */

#define BS_ENTRY_FLAGS 0xfull
#define BS_ENTRY_OFFSET_SHIFT 4
#define BS_ENTRY_OFFSET_MASK 0x3fffull /* of offset / 4: 0 to 16383 */
#define BS_ENTRY_FINGERPRINT_SHIFT 18
#define BS_FINGERPRINT_BITS (64 - BS_ENTRY_FINGERPRINT_SHIFT)

#define BS_WORD_MIX_BITS 18
#define BS_WORD_MIX_MASK ((1u << BS_WORD_MIX_BITS) - 1)

#define BS_MIX_HI 0x9e3779b97f4a7c15ull
#define BS_MIX_LO 0xff51afd7ed558ccdull
#define BS_MIX_LO_INVERSE 0x4f74430c22a54005ull /* modulo 2^64 */

/*
 * 64 bits that stand for a trace id, so that ids of a counter differ as ids of a
 * random generator do, whichever half it counts in. A product has its best bits
 * at the top, and the next multiplication carries upwards only: so those of the
 * upper half of the id are turned to the bottom.
 */
static inline uint64_t bs_trace_mix(uint64_t hi, uint64_t lo)
{
	uint64_t x = __builtin_bswap64(hi * BS_MIX_HI) ^ lo;

	x = (x ^ x >> 32) * BS_MIX_LO;
	return x ^ x >> 29;
}

/* The lower half of the id that has this mix, and this upper half. */
static inline uint64_t bs_trace_lo(uint64_t hi, uint64_t mix)
{
	uint64_t x = (mix ^ mix >> 29 ^ mix >> 58) * BS_MIX_LO_INVERSE;

	return x ^ x >> 32 ^ __builtin_bswap64(hi * BS_MIX_HI);
}

/* What stands for a trace id in a directory. */
static inline uint64_t bs_fingerprint(uint64_t hi, uint64_t lo)
{
	return bs_trace_mix(hi, lo) >> BS_ENTRY_FINGERPRINT_SHIFT;
}

static inline uint64_t bs_entry(uint64_t fingerprint, uint32_t offset,
				uint32_t flags)
{
	return fingerprint << BS_ENTRY_FINGERPRINT_SHIFT |
	       (uint64_t)(offset / BS_RECORD_ALIGN) << BS_ENTRY_OFFSET_SHIFT |
	       flags;
}

static inline uint32_t bs_entry_flags(uint64_t entry)
{
	return (uint32_t)(entry & BS_ENTRY_FLAGS);
}

static inline uint32_t bs_entry_offset(uint64_t entry)
{
	return (uint32_t)(entry >> BS_ENTRY_OFFSET_SHIFT &
			  BS_ENTRY_OFFSET_MASK) *
	       BS_RECORD_ALIGN;
}

static inline uint64_t bs_entry_fingerprint(uint64_t entry)
{
	return entry >> BS_ENTRY_FINGERPRINT_SHIFT;
}

/* Of a run whose entry has these flags. */
static inline uint32_t bs_run_header_bytes(uint32_t flags)
{
	return flags & BS_RUN_FIRST ? offsetof(struct bs_run_header, seq)
				    : sizeof(struct bs_run_header);
}

static inline uint32_t bs_word(uint64_t mix, uint32_t committed_bytes)
{
	return committed_bytes / BS_RECORD_ALIGN << BS_WORD_MIX_BITS |
	       (uint32_t)(mix & BS_WORD_MIX_MASK);
}

static inline uint32_t bs_word_committed(uint32_t word)
{
	return (word >> BS_WORD_MIX_BITS) * BS_RECORD_ALIGN;
}

static inline struct bs_trace_id
bs_run_trace_id(uint64_t entry, const uint32_t trace_hi[2], uint32_t word)
{
	uint64_t hi = (uint64_t)trace_hi[1] << 32 | trace_hi[0];
	uint64_t mix = bs_entry_fingerprint(entry)
			       << BS_ENTRY_FINGERPRINT_SHIFT |
		       (word & BS_WORD_MIX_MASK);

	return (struct bs_trace_id){hi, bs_trace_lo(hi, mix)};
}

/* Entry i of a segment. */
static inline uint64_t *bs_directory(void *segment, uint32_t i)
{
	return (uint64_t *)((unsigned char *)segment + BS_SEGMENT_BYTES) - 1 -
	       i;
}

/* Of a record with its header and padding. */
static inline size_t bs_record_bytes(size_t payload_bytes)
{
	return (sizeof(struct bs_record_header) + payload_bytes +
		BS_RECORD_ALIGN - 1) &
	       ~(size_t)(BS_RECORD_ALIGN - 1);
}

/* As many runs as can be in a segment: without records, side by side. */
#define BS_SEGMENT_RUNS_MAX                                                    \
	((BS_SEGMENT_BYTES - (uint32_t)sizeof(struct bs_segment_header)) /     \
	 ((uint32_t)offsetof(struct bs_run_header, seq) + 8u))

_Static_assert(sizeof(struct bs_segment_header) == 64, "ABI");
_Static_assert(sizeof(struct bs_run_header) == 20, "ABI");
_Static_assert(offsetof(struct bs_run_header, seq) == 16, "ABI");
_Static_assert(sizeof(struct bs_record_header) == 12, "ABI");
_Static_assert(BS_MIX_LO *BS_MIX_LO_INVERSE == 1, "the mix can be undone");
_Static_assert(BS_SEGMENT_BYTES / BS_RECORD_ALIGN <= BS_ENTRY_OFFSET_MASK + 1,
	       "an offset fits in an entry");
_Static_assert(BS_WORD_MIX_BITS + BS_FINGERPRINT_BITS == 64,
	       "entry and word hold all of the mix");
_Static_assert(BS_SEGMENT_BYTES / BS_RECORD_ALIGN <=
		       1u << (32 - BS_WORD_MIX_BITS),
	       "committed bytes fit in a word");

#endif
