/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <time.h>

#include "writer.h"

uint64_t bs_clock_ticks_slow(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* Inlined: as a call it costs bs_begin() a tenth of its time. */
static inline __attribute__((always_inline)) void
open_trace(struct bs_thread *t, struct bs_trace *trace, struct bs_trace_id id)
{
	bs_thread_has_slot(t);
	/* Word by word: as a whole it would go through memory, and be read
	 * back wider than it was written (see bs_run_open). */
	WRITE_ONCE(trace->id.hi, id.hi);
	WRITE_ONCE(trace->id.lo, id.lo);
	trace->handle_seq = (uint64_t)bs_thread_draw_handle(t) << 32;
	trace->next_hop = 0;
	trace->flags = bs_thread_recorded(t, id);
	for (int i = 0; i < 3; i++)
		trace->crumbs[i] = 0;
	trace->attachment = t->epoch;
}

/* -------------------------------------------------- thread-local form --- */

/* What the thread works on, for who watches from outside. */
static inline void show_trace(struct bs_thread *t, struct bs_trace_id id)
{
	if (unlikely(!t->slot))
		return;
	WRITE_ONCE(t->slot->trace_hi, id.hi);
	WRITE_ONCE(t->slot->trace_lo, id.lo);
}

static inline void end_own(struct bs_thread *t)
{
	if (likely(t->run_state == BS_RUN_OPEN && t->run_is_own))
		bs_run_close(t, BS_RUN_LAST);
	else
		bs_append_last(t, &t->own);
	t->own_open = false;
}

int bs_begin(struct bs_trace_id id)
{
	struct bs_thread *t = &bs_thread;

	if (unlikely(bs_trace_id_is_zero(id)))
		return -EINVAL;
	if (unlikely(t->own_open))
		end_own(t);
	bs_thread_enter(t);
	open_trace(t, &t->own, id);
	t->own_open = true;
	show_trace(t, id);
	return 0;
}

int bs_end(void)
{
	struct bs_thread *t = &bs_thread;

	if (unlikely(!t->own_open))
		return -ENOENT;
	end_own(t);
	show_trace(t, (struct bs_trace_id){0, 0});
	return 0;
}

int bs_tracepoint_slow(uint16_t type, const void *payload, size_t payload_bytes,
		       uint64_t ticks)
{
	struct bs_thread *t = &bs_thread;

	if (unlikely(!t->own_open))
		return -ENOENT;
	return bs_append_bytes(t, &t->own, type, payload, payload_bytes, ticks);
}

/* ------------------------------------------------------------ handles --- */

int bs_open(struct bs_trace *trace, struct bs_trace_id id)
{
	struct bs_thread *t = &bs_thread;

	if (unlikely(bs_trace_id_is_zero(id)))
		return -EINVAL;
	bs_thread_enter(t);
	open_trace(t, trace, id);
	return 0;
}

int bs_close(struct bs_trace *trace)
{
	struct bs_thread *t = &bs_thread;

	if (!trace)
		return bs_end();
	if (READ_ONCE(trace->attachment) <= bs_fork_epoch)
		return -ENOENT;
	bs_thread_enter(t);
	bs_append_last(t, trace);
	WRITE_ONCE(trace->attachment, 0);
	return 0;
}

int bs_write(struct bs_trace *trace, uint16_t type, const void *payload,
	     size_t payload_bytes)
{
	struct bs_thread *t = &bs_thread;

	if (!trace)
		return bs_record_at(type, payload, payload_bytes,
				    bs_clock_ticks());
	return bs_append_bytes(t, trace, type, payload, payload_bytes,
			       bs_clock_ticks());
}
