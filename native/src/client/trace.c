/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <time.h>

#include "writer.h"

uint64_t bs_clock_ticks_slow(void)
{
	struct timespec now;

	/* In a child nothing says that it may read the counter, so it comes
	 * by here before it writes to the parent's run. */
	bs_process_check();
#if BS_HAS_CPU_COUNTER
	if (READ_ONCE(bs_process.clock_is_counter))
		return bs_cpu_counter();
#endif
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/*
 * Ids go by their words here. As a whole gcc would put one on the stack in two stores
 * and read it back in one load, which has to wait until all stores before it have
 * taken effect, and these wait for memory. The same holds for a trace's (bs_run_place).
 */
static inline void fill_in(struct bs_thread *t, struct bs_trace *trace,
			   uint64_t hi, uint64_t lo, uint32_t handle,
			   uint32_t flags)
{
	WRITE_ONCE(trace->id.hi, hi);
	WRITE_ONCE(trace->id.lo, lo);
	trace->handle_seq = (uint64_t)handle << 32;
	trace->next_hop = 0;
	trace->flags = flags;
	for (int i = 0; i < 3; i++)
		trace->crumbs[i] = 0;
	trace->attachment = t->epoch;
}

/* 0, or BS_TRACE_UNRECORDED. */
static __attribute__((noinline)) uint32_t recorded(const struct bs_thread *t,
						   uint64_t hi, uint64_t lo)
{
	return bs_thread_recorded(t, (struct bs_trace_id){hi, lo});
}

static void enter(struct bs_thread *t)
{
	bs_thread_enter(t);
	bs_thread_has_slot(t);
}

/* -------------------------------------------------- thread-local form --- */

/* What the thread works on, for who watches from outside; 0, 0: nothing. */
static inline void show_trace(struct bs_thread *t, uint64_t hi, uint64_t lo,
			      uint32_t handle)
{
	WRITE_ONCE(t->slot->trace_hi, hi);
	WRITE_ONCE(t->slot->trace_lo, lo);
	WRITE_ONCE(t->area->own_handle, handle);
}

static inline int begin_as(struct bs_thread *t, uint64_t hi, uint64_t lo,
			   uint32_t handle, uint32_t flags)
{
	fill_in(t, &t->own, hi, lo, handle, flags);
	t->own_open = true;
	/* What nobody records nobody shall be asked to collect. */
	if (flags & BS_TRACE_UNRECORDED)
		hi = lo = 0;
	if (likely(t->area != NULL))
		show_trace(t, hi, lo, handle);
	return 0;
}

static __attribute__((noinline)) int begin_slow(struct bs_thread *t,
						uint64_t hi, uint64_t lo)
{
	bs_process_check();
	bs_end();
	enter(t);
	return begin_as(t, hi, lo, bs_handle_draw(t), recorded(t, hi, lo));
}

/* Where not all traces are recorded. */
static __attribute__((noinline)) int begin_some(struct bs_thread *t,
						uint64_t hi, uint64_t lo)
{
	return begin_as(t, hi, lo, bs_thread_draw_own_handle(t),
			recorded(t, hi, lo));
}

/* What is rare is in a function of its own: with calls in its midst, this one
 * would have registers to save. */
int bs_begin(struct bs_trace_id id)
{
	struct bs_thread *t = &bs_thread;
	const uint64_t hi = id.hi, lo = id.lo;

	if (unlikely(bs_trace_id_is_zero(id)))
		return -EINVAL;
	if (unlikely(t->own_open) ||
	    unlikely(t->attachment != READ_ONCE(bs_process.current)) ||
	    unlikely(!t->area))
		return begin_slow(t, hi, lo);
	if (unlikely(!bs_thread_records_all(t)))
		return begin_some(t, hi, lo);
	return begin_as(t, hi, lo, bs_thread_draw_own_handle(t), 0);
}

int bs_end(void)
{
	struct bs_thread *t = &bs_thread;

	bs_process_check();
	if (unlikely(!t->own_open))
		return -ENOENT;
	t->own_open = false;
	if (likely(t->run_state != BS_RUN_NONE && t->run_is_own))
		bs_run_close(t, BS_RUN_LAST);
	else if (bs_trace_has_run(&t->own))
		bs_append_last(t, &t->own);
	if (likely(t->area != NULL))
		show_trace(t, 0, 0, 0);
	return 0;
}

bool bs_writer_open(size_t record_bytes)
{
	struct bs_thread *t = &bs_thread;
	uint64_t handle_seq;

	if (unlikely(!t->own_open) || unlikely(t->run_state != BS_RUN_NONE) ||
	    unlikely(!bs_trace_is_at_hand(t, &t->own)) ||
	    unlikely(!bs_run_fits(t, record_bytes)) ||
	    unlikely(!bs_run_announce(t)))
		return false;
	bs_trace_draw_seq(t, &t->own, &handle_seq);
	bs_run_name(t, &t->own, handle_seq);
	bs_run_place(t, &t->own, handle_seq);
	return true;
}

int bs_tracepoint_slow(uint8_t type, const void *payload, size_t payload_bytes,
		       uint64_t ticks)
{
	const struct bs_part part = {payload, payload_bytes};
	struct bs_thread *t = &bs_thread;

	if (unlikely(!t->own_open))
		return -ENOENT;
	return bs_append(t, &t->own, type, 0, ticks, &part, 1);
}

/* ------------------------------------------------------------ handles --- */

int bs_open(struct bs_trace *trace, struct bs_trace_id id)
{
	struct bs_thread *t = &bs_thread;
	const uint64_t hi = id.hi, lo = id.lo;
	uint32_t handle, unrecorded;

	if (unlikely(bs_trace_id_is_zero(id)))
		return -EINVAL;
	enter(t);
	unrecorded = bs_thread_records_all(t) ? 0 : recorded(t, hi, lo);
	handle = unrecorded ? bs_handle_draw(t) : bs_handle_draw_listed(t);
	fill_in(t, trace, hi, lo, handle, unrecorded);
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
	if (READ_ONCE(trace->flags) & BS_TRACE_SHOWN)
		bs_show_no_more(t, trace);
	if (READ_ONCE(trace->attachment) == t->epoch)
		bs_handle_unlist(t->attachment,
				 bs_trace_handle(READ_ONCE(trace->handle_seq)));
	WRITE_ONCE(trace->attachment, 0);
	return 0;
}

int bs_write(struct bs_trace *trace, uint8_t type, const void *payload,
	     size_t payload_bytes)
{
	struct bs_thread *t = &bs_thread;

	if (!trace)
		return bs_record_at(type, payload, payload_bytes,
				    bs_clock_ticks());
	return bs_append_bytes(t, trace, type, payload, payload_bytes,
			       bs_clock_ticks());
}
