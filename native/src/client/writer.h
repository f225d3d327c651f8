/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs and records.
 *
 * A thread's room in its segment is from `cursor` to `floor`, where the
 * directory ends. A run is opened by its first record, so begin and end without
 * records cost no memory; it is closed when its trace ends, when the thread
 * writes for another trace, or when the segment is full.
 *
 * The null segment has no memory behind it: a run that is BS_RUN_LOST counts
 * its records and holds its number in the handle's sequence; when it is closed,
 * the ring of losses tells of it.
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
int bs_append(struct bs_thread *t, struct bs_trace *trace, uint8_t type,
	      uint8_t flags, uint64_t ticks, const struct bs_part *parts,
	      int n_parts);

/* The trace is over: the last of its runs here says so. */
void bs_append_last(struct bs_thread *t, struct bs_trace *trace);

/* Take a segment with room for a run of so many bytes, if there is one: one that
 * is parked, or the next that is granted. */
bool bs_segment_take(struct bs_thread *t, size_t bytes);

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

/* Something was written to it, or lost. */
static inline bool bs_trace_has_run(const struct bs_trace *trace)
{
	return (uint32_t)READ_ONCE(trace->handle_seq) ||
	       READ_ONCE(trace->flags) & BS_RUN_LOSSY;
}

/*
 * Lines are asked for before they are written. They were last used as long ago
 * as the pool reaches back, so they are in memory. Stores take effect in order,
 * and one that waits for its line holds up all behind it.
 *
 * At the end of each run, for those to come: one line more than a trace of 100
 * bytes takes with its headers, 2 KiB ahead of it, and the line of entries that
 * comes after the next three. Of 512, 1024, 2048 and 4096 bytes the last two
 * were best; with none a trace took half as long again. What is in the middle of
 * a long run the processor sees coming: to ask with each record made one of 128
 * bytes a sixth slower.
 */
#define BS_SEGMENT_AHEAD 2048
#define BS_SEGMENT_AHEAD_LINES 3
#define BS_DIRECTORY_AHEAD (4 * BS_CACHE_LINE)

static inline void bs_prefetch_segment(const unsigned char *cursor,
				       const unsigned char *floor)
{
	for (size_t i = 0; i < BS_SEGMENT_AHEAD_LINES; i++)
		__builtin_prefetch(
			cursor + BS_SEGMENT_AHEAD + i * BS_CACHE_LINE, 1);
	__builtin_prefetch(floor - BS_DIRECTORY_AHEAD, 1);
}

static inline uint32_t bs_segment_offset(const struct bs_thread *t,
					 const void *p)
{
	return (uint32_t)((const unsigned char *)p -
			  (const unsigned char *)t->segment);
}

/*
 * The thread is about to open a run. Before it looks at where it stands, it says
 * so: then the attach thread leaves it its segment, or it sees here that it does
 * not (park.c). False: it stands elsewhere now, and must look again.
 */
static inline bool bs_run_announce(struct bs_thread *t)
{
	struct bs_member *m = t->member;

	WRITE_ONCE(m->stands_at, NULL);
	light_fence();
	if (likely(!load_acquire(&m->is_called)))
		return true;
	bs_thread_answer(t);
	return false;
}

/* From here on its segment may be taken from it. */
static inline void bs_thread_stand(struct bs_thread *t,
				   const unsigned char *cursor)
{
	store_release(&t->member->stands_at, cursor);
}

/* A handle's run that the thread left open, and goes on with or closes: as if it
 * were about to be opened. */
static inline void bs_run_wake(struct bs_thread *t)
{
	if (t->run_state != BS_RUN_OPEN || t->run_is_own)
		return;
	while (unlikely(!bs_run_announce(t)))
		;
}

/* It stays open, and whoever takes the segment closes it. What is written to the
 * thread's own trace nobody announces, so there the thread never stands. */
static inline void bs_run_rest(struct bs_thread *t)
{
	if (t->run_state == BS_RUN_OPEN && !t->run_is_own)
		bs_thread_stand(t, t->writer.cursor);
}

__attribute__((cold)) void bs_run_close_lost(struct bs_thread *t,
					     uint32_t flags);

static inline void bs_run_count(const struct bs_thread *t, uint32_t bytes)
{
	BS_COUNT(t->area->runs, 1);
	BS_COUNT(t->area->payload_bytes, bytes);
}

/* By who took the segment. */
static inline void bs_run_was_closed(struct bs_thread *t)
{
	t->cursor = t->writer.cursor;
	t->run_state = BS_RUN_NONE;
	bs_run_count(t, bs_word_committed(bs_writer_word(&t->writer)));
}

/* flags: BS_RUN_LAST or 0. A run must be open. */
static inline __attribute__((always_inline)) void
bs_run_close(struct bs_thread *t, uint32_t flags)
{
	uint32_t bytes;

	if (unlikely(t->run_state == BS_RUN_LOST)) {
		bs_run_close_lost(t, flags);
		return;
	}
	if (t->run_is_own) {
		t->cursor = bs_writer.cursor;
		bytes = bs_word_committed(bs_writer_word(&bs_writer));
		bs_writer.cursor = NULL;
		bs_writer.limit = NULL;
	} else {
		t->cursor = t->writer.cursor;
		bytes = bs_word_committed(bs_writer_word(&t->writer));
	}
	t->run_state = BS_RUN_NONE;
	store_release((uint64_t *)t->floor,
		      t->run_entry | BS_RUN_CLOSED | flags);
	bs_prefetch_segment(t->cursor, t->floor);
	bs_run_count(t, bytes);
	bs_thread_stand(t, t->cursor);
}

/* The handle's next number. False when another thread gave the trace a new
 * handle meanwhile, in an attachment that is not ours. */
static inline bool bs_trace_draw_seq(const struct bs_thread *t,
				     struct bs_trace *trace, uint64_t *drawn)
{
	*drawn = load_acquire(&trace->handle_seq);
	if (trace == &t->own) {
		trace->handle_seq = bs_trace_next(*drawn);
		return true;
	}
	do {
		if (load_acquire(&trace->attachment) != t->epoch)
			return false;
	} while (!compare_and_swap(&trace->handle_seq, drawn,
				   bs_trace_next(*drawn)));
	return true;
}

static inline bool bs_run_is_of(const struct bs_thread *t,
				const struct bs_trace *trace)
{
	if (t->run_state == BS_RUN_NONE)
		return false;
	if (trace == &t->own)
		return t->run_is_own;
	return !t->run_is_own &&
	       t->run_handle == bs_trace_handle(READ_ONCE(trace->handle_seq)) &&
	       bs_trace_id_equal(t->run_id, trace->id);
}

/* What a run takes that has so many bytes of records. */
static inline size_t bs_run_bytes(size_t bytes)
{
	return sizeof(struct bs_run_header) + sizeof(uint64_t) + bytes;
}

static inline bool bs_run_fits(const struct bs_thread *t, size_t bytes)
{
	return (size_t)(t->floor - t->cursor) >= bs_run_bytes(bytes);
}

/* Whose the run is that is opened next. */
static inline void bs_run_name(struct bs_thread *t, struct bs_trace *trace,
			       uint64_t handle_seq)
{
	t->run_entry = READ_ONCE(trace->flags) & BS_RUN_LOSSY;
	if ((uint32_t)handle_seq == 0)
		t->run_entry |= BS_RUN_FIRST;
	t->run_is_own = trace == &t->own;
	if (trace == &t->own)
		return;
	WRITE_ONCE(t->run_id.hi, READ_ONCE(trace->id.hi));
	WRITE_ONCE(t->run_id.lo, READ_ONCE(trace->id.lo));
	t->run_handle = bs_trace_handle(handle_seq);
}

/*
 * Begin it where the thread stands; there is room.
 *
 * The words of the id are copied one by one: it was just written so, and a
 * processor cannot forward two stores to one wider load.
 */
static inline __attribute__((always_inline)) void
bs_run_place(struct bs_thread *t, struct bs_trace *trace, uint64_t handle_seq)
{
	struct bs_writer *w = trace == &t->own ? &bs_writer : &t->writer;
	unsigned char *cursor = t->cursor, *floor;
	struct bs_run_header *run = (struct bs_run_header *)cursor;
	uint64_t hi = READ_ONCE(trace->id.hi);
	uint64_t mix = bs_trace_mix(hi, READ_ONCE(trace->id.lo));
	uint32_t word = bs_word(mix, 0);

	/* Nobody reads it before `runs` counts it. */
	memcpy(run->trace_hi, &hi, sizeof(hi));
	run->word = word;
	run->handle = bs_trace_handle(handle_seq);
	t->run_seq = (uint32_t)handle_seq;
	cursor += bs_run_header_bytes((uint32_t)t->run_entry);
	if (!(t->run_entry & BS_RUN_FIRST))
		run->seq = t->run_seq;

	t->run_entry |= bs_entry(mix >> BS_ENTRY_FINGERPRINT_SHIFT,
				 bs_segment_offset(t, run), 0);
	floor = t->floor - sizeof(t->run_entry);
	t->floor = floor;
	WRITE_ONCE(*(uint64_t *)floor, t->run_entry);
	store_release(&t->segment->runs, ++t->runs);

	t->run_state = BS_RUN_OPEN;
	w->cursor = cursor;
	w->limit = floor;
	w->word = &run->word;
	w->word_base = 0;
	w->word_base = word - bs_writer_word(w);
}

/* The run that was to be opened is lost: see the top of this file. */
void bs_run_open_lost(struct bs_thread *t, struct bs_trace *trace);

/* Open a run with room for `bytes` of records, or a lost one. The thread has
 * a slot and no open run. False as bs_trace_draw_seq(). */
static inline bool bs_run_open(struct bs_thread *t, struct bs_trace *trace,
			       size_t bytes)
{
	uint64_t handle_seq;

	if (!bs_trace_draw_seq(t, trace, &handle_seq))
		return false;
	bs_run_name(t, trace, handle_seq);
	while (unlikely(!bs_run_announce(t)))
		;
	if (unlikely(!bs_run_fits(t, bytes)) && !bs_segment_take(t, bytes))
		bs_run_open_lost(t, trace);
	else
		bs_run_place(t, trace, handle_seq);
	return true;
}

static inline void bs_writer_put(struct bs_writer *w, uint8_t type,
				 uint8_t flags, uint64_t ticks,
				 const struct bs_part *parts, int n_parts,
				 size_t payload_bytes)
{
	struct bs_record_header *h = (struct bs_record_header *)w->cursor;
	unsigned char *to = (unsigned char *)(h + 1);

	h->payload_bytes = (uint16_t)payload_bytes;
	h->type = type;
	h->flags = flags;
	h->ticks = ticks;
	for (int i = 0; i < n_parts; i++) {
		if (parts[i].n)
			memcpy(to, parts[i].bytes, parts[i].n);
		to += parts[i].n;
	}
	w->cursor += bs_record_bytes(payload_bytes);
	bs_writer_commit(w);
}

/* Whether the thread can write to the trace as things stand. */
static inline bool bs_trace_is_at_hand(const struct bs_thread *t,
				       const struct bs_trace *trace)
{
	return t->attachment == READ_ONCE(bs_process.current) &&
	       load_acquire(&trace->attachment) == t->epoch && t->area &&
	       !(READ_ONCE(trace->flags) & BS_TRACE_UNRECORDED);
}

/* bs_append() of one piece, stamped now or before; short where nothing special
 * is to be done. */
static inline int bs_append_bytes(struct bs_thread *t, struct bs_trace *trace,
				  uint8_t type, const void *payload,
				  size_t payload_bytes, uint64_t ticks)
{
	const struct bs_part part = {payload, payload_bytes};
	struct bs_writer *w = trace == &t->own ? &bs_writer : &t->writer;
	size_t bytes = bs_record_bytes(payload_bytes);

	if (unlikely(payload_bytes > BS_PAYLOAD_MAX) ||
	    unlikely(!bs_trace_is_at_hand(t, trace)))
		goto slow;
	bs_run_wake(t);
	if (!bs_run_is_of(t, trace)) {
		if (t->run_state != BS_RUN_NONE)
			bs_run_close(t, 0);
		if (unlikely(!bs_run_open(t, trace, bytes)))
			goto slow;
	}
	if (unlikely(t->run_state != BS_RUN_OPEN) ||
	    unlikely((size_t)(w->limit - w->cursor) < bytes))
		goto slow;
	bs_writer_put(w, type, 0, ticks, &part, 1, payload_bytes);
	bs_run_rest(t);
	return 0;
slow:
	return bs_append(t, trace, type, 0, ticks, &part, 1);
}

#endif
