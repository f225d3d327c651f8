/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs and records.
 *
 * A thread's position is (cursor, limit) in its segment. A run is opened by its
 * first record, so begin and end without records cost no memory; it is closed
 * when its trace ends, when the thread writes for another trace, or when the
 * segment is full.
 *
 * The null segment has no memory behind it: a run that is BS_RUN_LOST counts
 * its records, holds its number in the handle's sequence, and is announced
 * like any other when it is closed.
 */
#ifndef BS_WRITER_H
#define BS_WRITER_H

#include <string.h>

#include "client.h"

/* A payload may be gathered from several places. */
struct bs_part {
	const void *bytes;
	size_t n;
};

/* Append a record to a trace. As bs_record_at(). */
int bs_append(struct bs_thread *t, struct bs_trace *trace, uint16_t type,
	      uint16_t flags, uint64_t ticks, const struct bs_part *parts,
	      int n_parts);

/* The trace is over: the last of its runs here says so. */
void bs_append_last(struct bs_thread *t, struct bs_trace *trace);

/* Take the next granted segment, if there is one. */
bool bs_segment_take(struct bs_thread *t);

/* The ring is as full as we knew it last: look again, ring the doorbell at
 * each quarter. False when there is no room. */
bool bs_run_ring_look(struct bs_thread *t);

#define BS_RUN_RING_QUARTER (BS_RUN_RING_ENTRIES / 4)

/* bs_trace.handle_seq: the handle in the upper half, and the next run's number
 * in the lower one, so that threads which share a handle draw both at once. */
static inline uint32_t bs_trace_handle(uint64_t handle_seq)
{
	return (uint32_t)(handle_seq >> 32);
}

static inline uint64_t bs_trace_next(uint64_t handle_seq)
{
	return (handle_seq & ~0xffffffffull) | (uint32_t)(handle_seq + 1);
}

static inline void bs_run_announce(struct bs_thread *t, uint32_t segment,
				   uint16_t generation, uint16_t flags,
				   uint32_t offset, uint32_t committed_bytes)
{
	struct bs_thread_area *area = t->area;
	struct bs_run_entry *e;

	if (unlikely(t->run_head - t->run_tail >= BS_RUN_RING_QUARTER) &&
	    !bs_run_ring_look(t)) {
		store_release(&area->runs_unannounced,
			      area->runs_unannounced + 1);
		return;
	}
	e = &area->entries[t->run_head % BS_RUN_RING_ENTRIES];
	e->trace_hi = t->run_id.hi;
	e->trace_lo = t->run_id.lo;
	e->segment = segment;
	e->generation = generation;
	e->flags = flags;
	e->offset = offset;
	e->committed_bytes = committed_bytes;
	store_release(&area->run_head, ++t->run_head);
}

static inline uint32_t bs_segment_offset(const struct bs_thread *t,
					 const void *p)
{
	return (uint32_t)(BS_SEGMENT_BYTES -
			  (size_t)(t->limit - (const unsigned char *)p));
}

/* flags: BS_RUN_LAST or 0. A run must be open. */
static inline void bs_run_close(struct bs_thread *t, uint16_t flags)
{
	struct bs_thread_area *area = t->area;
	struct bs_run_header *run = t->run;
	uint32_t committed;

	flags |= t->run_flags;
	if (unlikely(t->run_state == BS_RUN_LOST)) {
		BS_COUNT(area->runs_lost, 1);
		bs_run_announce(t, BS_SEGMENT_NONE, 0, flags, 0,
				t->lost_bytes < UINT32_MAX
					? (uint32_t)t->lost_bytes
					: UINT32_MAX);
		t->run_state = BS_RUN_NONE;
		return;
	}
	if (t->run_is_own) {
		t->cursor = bs_writer.cursor;
		bs_writer.cursor = NULL;
		bs_writer.limit = NULL;
	} else {
		t->cursor = t->writer.cursor;
	}
	t->run_state = BS_RUN_NONE;
	committed = (uint32_t)(t->cursor - (unsigned char *)(run + 1));
	/* Who walks the log looks for the next header once it sees CLOSED. What
	 * stands there is left from an earlier life of the segment, perhaps a
	 * payload in which this generation's number happens to stand. */
	if (likely((size_t)(t->limit - t->cursor) >= sizeof(*run)))
		WRITE_ONCE(((struct bs_run_header *)t->cursor)->generation, 0);
	store_release(&run->flags, (uint16_t)(flags | BS_RUN_CLOSED));
	BS_COUNT(area->runs, 1);
	BS_COUNT(area->payload_bytes, committed);
	bs_run_announce(t, t->segment, t->generation, flags,
			bs_segment_offset(t, run), committed);
}

#endif
