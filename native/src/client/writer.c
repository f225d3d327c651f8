/* SPDX-License-Identifier: Apache-2.0 */
#include "writer.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

__thread struct bs_writer bs_writer;

/* ----------------------------------------------------------- doorbell --- */

void bs_doorbell_ring(struct bs_attachment *a)
{
	struct bs_doorbell *bell = &a->channel->doorbell;

	full_fence();
	if (!READ_ONCE(bell->sleeping))
		return;
	fetch_add(&bell->rung, 1);
	syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* ----------------------------------------------------------- segments --- */

/* By its position in the ring. */
static bool grant_take(struct bs_attachment *a, struct bs_grant *grant,
		       uint32_t *position)
{
	struct bs_grant_ring *ring = a->grants;
	/* Whoever moved the tail saw a head in front of it. With acquire, here
	 * and where the swap fails, we see that one or a newer one. */
	uint32_t tail = load_acquire(&ring->tail);
	uint32_t head, waiting;

	do {
		head = load_acquire(&ring->head);
		waiting = head - tail;
		if (waiting == 0 || waiting > BS_GRANT_RING_ENTRIES)
			return false;
		/* The node does not overwrite it before the tail has passed,
		 * and if it has, the swap fails. */
		const struct bs_grant *e =
			&ring->entries[tail % BS_GRANT_RING_ENTRIES];
		grant->segment = READ_ONCE(e->segment);
		grant->generation = READ_ONCE(e->generation);
	} while (!compare_and_swap(&ring->tail, &tail, tail + 1));

	/* Threads that race here disturb each other's idea of how much of the
	 * stock is used by one segment. */
	if (READ_ONCE(a->stock_head) != head) {
		WRITE_ONCE(a->stock_head, head);
		WRITE_ONCE(a->stock_full, waiting);
	}
	if ((waiting - 1) * BS_STOCK_TOLD <=
	    READ_ONCE(a->stock_full) * (BS_STOCK_TOLD - 1))
		bs_doorbell_ring(a);
	*position = tail;
	return true;
}

/* A daemon that grants nonsense harms nobody: it is not written to. */
static bool grant_is_sane(const struct bs_attachment *a,
			  const struct bs_grant *grant)
{
	return (grant->segment & ~BS_GRANT_FRESH) < a->segments &&
	       grant->generation != 0;
}

static bool take_granted(struct bs_thread *t)
{
	struct bs_attachment *a = t->attachment;
	struct bs_segment_header *h;
	struct bs_grant grant;
	uint32_t segment, position;

	do {
		if (!grant_take(a, &grant, &position))
			return false;
	} while (!grant_is_sane(a, &grant));

	segment = grant.segment & ~BS_GRANT_FRESH;
	h = bs_segment_at(a, segment);
	if (grant.segment & BS_GRANT_FRESH &&
	    !bs_prefault_is_ready(a, position))
		bs_segment_populate(h);
	bs_prefault_taken(a, position);
	WRITE_ONCE(t->member->segment, h);
	t->segment = h;
	t->runs = 0;
	t->cursor = (unsigned char *)(h + 1);
	t->floor = (unsigned char *)h + BS_SEGMENT_BYTES;
	WRITE_ONCE(h->runs, 0);
	WRITE_ONCE(h->slot, t->slot_number);
	store_release(&h->life, bs_life(grant.generation, BS_SEGMENT_HELD));
	store_release(&t->area->segment, segment);
	return true;
}

/* One that is parked costs the pool nothing, but its list is another thread's at
 * times: nobody waits for that while there are grants. */
static bool take(struct bs_thread *t, size_t bytes)
{
	struct bs_segment_header *full = t->segment;

	if (!bs_parked_take(t, bytes, false) && !take_granted(t) &&
	    !bs_parked_take(t, bytes, true))
		return false;
	if (full)
		bs_segment_seal(t->attachment, full);
	return true;
}

bool bs_segment_take(struct bs_thread *t, size_t bytes)
{
	bool taken;

	/* See retire.c. */
	WRITE_ONCE(t->member->is_taking, true);
	full_fence();
	taken = !READ_ONCE(t->attachment->is_retired) && take(t, bytes);
	store_release(&t->member->is_taking, false);
	return taken;
}

/* --------------------------------------------------------------- runs --- */

static void mark_lossy(struct bs_thread *t, struct bs_trace *trace)
{
	if (trace == &t->own)
		trace->flags |= BS_RUN_LOSSY;
	else if (!(READ_ONCE(trace->flags) & BS_RUN_LOSSY))
		fetch_or(&trace->flags, BS_RUN_LOSSY);
	if (!bs_run_is_of(t, trace))
		return;
	t->run_entry |= BS_RUN_LOSSY;
	if (t->run_state == BS_RUN_OPEN)
		WRITE_ONCE(*(uint64_t *)t->floor, t->run_entry);
}

/* The node looks for losses where this has moved. */
static void move_losses(struct bs_attachment *a)
{
	fetch_add_release(&a->grants->losses, 1);
}

static void tell_loss(struct bs_thread *t, struct bs_trace_id id,
		      uint32_t handle, uint32_t flags, uint64_t payload_bytes)
{
	struct bs_thread_area *area = t->area;
	uint32_t head = t->loss_head;
	/* The last place is for the end of a handle: a node that knows of its
	 * beginning waits for that. */
	uint32_t room = BS_LOSS_RING_ENTRIES - !(flags & BS_RUN_LAST);

	if (head - load_acquire(&area->loss_tail) >= room) {
		BS_COUNT(area->losses_untold, 1);
	} else {
		area->losses[head % BS_LOSS_RING_ENTRIES] = (struct bs_loss){
			.trace_hi = id.hi,
			.trace_lo = id.lo,
			.handle = handle,
			.flags = flags,
			.payload_bytes = payload_bytes,
		};
		store_release(&area->loss_head, ++t->loss_head);
	}
	move_losses(t->attachment);
}

static void count_unattributed(struct bs_attachment *a)
{
	if (!a->context)
		return;
	fetch_add(&a->context->records_unattributed, 1);
	move_losses(a);
}

/* By a thread without a slot. One that can be no member is nowhere, but what it
 * loses is lost to its process all the same. */
static void tell_unattributed(const struct bs_thread *t)
{
	if (likely(t->member != NULL)) {
		count_unattributed(t->attachment);
		return;
	}
	pthread_mutex_lock(&bs_process.lock);
	count_unattributed(bs_process.current);
	pthread_mutex_unlock(&bs_process.lock);
}

/* Of the run that is open. */
static void tell_run_lost(struct bs_thread *t, uint32_t flags)
{
	if (t->run_is_own)
		tell_loss(t, t->own.id, bs_trace_handle(t->own.handle_seq),
			  flags, t->lost_bytes);
	else
		tell_loss(t, t->run_id, t->run_handle, flags, t->lost_bytes);
}

/* Told at once: the process may be killed before the run is closed, and without
 * it the trace would seem complete. */
void bs_run_open_lost(struct bs_thread *t, struct bs_trace *trace)
{
	t->run_state = BS_RUN_LOST;
	t->lost_bytes = 0;
	mark_lossy(t, trace);
	BS_COUNT(t->area->runs_lost, 1);
	tell_run_lost(t, (uint32_t)t->run_entry & BS_RUN_FIRST);
}

void bs_run_close_lost(struct bs_thread *t, uint32_t flags)
{
	if (flags & BS_RUN_LAST)
		tell_run_lost(t, flags);
	t->run_state = BS_RUN_NONE;
	bs_thread_stand(t, t->cursor);
	/* Nobody may read that ring any more. */
	if (flags & BS_RUN_LAST && t->run_is_own &&
	    t->attachment != READ_ONCE(bs_process.current))
		bs_append_last(t, &t->own);
}

static uint32_t draw(struct bs_thread *t, bool unrecorded)
{
	return unrecorded ? bs_handle_draw(t) : bs_handle_draw_listed(t);
}

/* Another thread may be about to draw a number from the old handle (bs_trace_draw_seq).
 * Its swap must fail, so the new handle is another one: in each attachment they are
 * counted from the start. */
static uint32_t rebind_handle(struct bs_thread *t, const struct bs_trace *trace,
			      bool unrecorded)
{
	uint32_t old = bs_trace_handle(READ_ONCE(trace->handle_seq));
	uint32_t handle;

	if (trace != &t->own) {
		handle = draw(t, unrecorded);
		if (unlikely(handle == old)) {
			handle = draw(t, unrecorded);
			bs_handle_unlist(t->attachment, old);
		}
		return handle;
	}
	handle = bs_handle_draw(t);
	if (t->area)
		WRITE_ONCE(t->area->own_handle, handle);
	return handle;
}

/*
 * The trace was opened in an attachment that the thread is no longer in, or is
 * not in yet: it goes on as a new handle in the current one. What it wrote
 * before may be out of reach, so it is lossy. -ENOENT when it is closed, or
 * was inherited over fork().
 */
static int rebind(struct bs_thread *t, struct bs_trace *trace)
{
	uint64_t epoch = load_acquire(&trace->attachment);

	if (epoch <= bs_fork_epoch)
		return -ENOENT;
	if (epoch > t->epoch) {
		/* Another thread was faster, or is at it. */
		bs_thread_move(t);
		return 0;
	}
	pthread_mutex_lock(&bs_process.lock);
	epoch = READ_ONCE(trace->attachment);
	if (epoch > bs_fork_epoch && epoch < t->epoch) {
		uint64_t last = READ_ONCE(trace->handle_seq);
		uint32_t flags = READ_ONCE(trace->flags);
		/* What was left out so far must not be recorded from here on. */
		uint32_t moved = flags & BS_TRACE_UNRECORDED
					 ? BS_TRACE_UNRECORDED
					 : bs_thread_recorded(t, trace->id);
		uint64_t next = (uint64_t)rebind_handle(t, trace, moved) << 32;

		/* In between it belongs to no attachment (bs_trace_draw_seq). */
		store_release(&trace->attachment, UINT64_MAX);
		/* Who looked before that may still draw: what counts is how many
		 * runs the handle had when it was given up. */
		while (!compare_and_swap(&trace->handle_seq, &last, next))
			;
		if ((uint32_t)last)
			moved |= BS_RUN_LOSSY;
		/* And may still refuse a record, and mark the trace for that. */
		while (!compare_and_swap(&trace->flags, &flags,
					 (flags & BS_TRACE_KEPT) | moved))
			;
		store_release(&trace->attachment, t->epoch);
	}
	pthread_mutex_unlock(&bs_process.lock);
	return 0;
}

/* ------------------------------------------------------------- append --- */

static int lose(struct bs_thread *t, struct bs_trace *trace,
		size_t payload_bytes)
{
	mark_lossy(t, trace);
	if (likely(t->area != NULL)) {
		t->lost_bytes += payload_bytes;
		BS_COUNT(t->area->records_lost, 1);
		BS_COUNT(t->area->payload_bytes_lost, payload_bytes);
		return -ENOSPC;
	}
	BS_COUNT_THREAD(t, records_lost, 1);
	BS_COUNT_THREAD(t, payload_bytes_lost, payload_bytes);
	tell_unattributed(t);
	return -ENOSPC;
}

static int refuse(struct bs_thread *t, struct bs_trace *trace)
{
	if (likely(t->area != NULL)) {
		BS_COUNT(t->area->records_oversized, 1);
		/* Where no run says so: as bs_run_open_lost(). */
		if (!bs_run_is_of(t, trace))
			tell_loss(t, trace->id,
				  bs_trace_handle(READ_ONCE(trace->handle_seq)),
				  0, 0);
	} else {
		BS_COUNT_THREAD(t, records_oversized, 1);
		tell_unattributed(t);
	}
	mark_lossy(t, trace);
	return -EMSGSIZE;
}

static int append(struct bs_thread *t, struct bs_trace *trace, uint8_t type,
		  uint8_t flags, uint64_t ticks, const struct bs_part *parts,
		  int n_parts)
{
	size_t payload_bytes = 0;
	size_t bytes;
	struct bs_writer *w;
	int ret;

	for (int i = 0; i < n_parts; i++) {
		if (unlikely(parts[i].n > BS_PAYLOAD_MAX))
			payload_bytes = BS_PAYLOAD_MAX + 1;
		else
			payload_bytes += parts[i].n;
	}
	bytes = bs_record_bytes(payload_bytes);

	/* A child that only still has its parent's handles need not attach. */
	if (unlikely(READ_ONCE(trace->attachment) <= bs_fork_epoch))
		return -ENOENT;
	for (;;) {
		bool has_slot;

		bs_thread_enter(t);
		bs_run_wake(t);
		/* First, since a handle's number says in which slot it was drawn. */
		has_slot = bs_thread_has_slot(t);
		if (unlikely(load_acquire(&trace->attachment) != t->epoch)) {
			/* Who can be no member is nowhere, and stays there. */
			if (unlikely(!t->member))
				return lose(t, trace, payload_bytes);
			ret = rebind(t, trace);
			if (ret)
				return ret;
			continue;
		}
		if (unlikely(READ_ONCE(trace->flags) & BS_TRACE_UNRECORDED))
			return 0;
		if (unlikely(payload_bytes > BS_PAYLOAD_MAX))
			return refuse(t, trace);
		if (unlikely(!has_slot))
			return lose(t, trace, payload_bytes);
		if (!bs_run_is_of(t, trace)) {
			if (t->run_state != BS_RUN_NONE)
				bs_run_close(t, 0);
			if (unlikely(!bs_run_open(t, trace, bytes)))
				continue;
			/* Just now there was no segment. */
			if (unlikely(t->run_state == BS_RUN_LOST))
				return lose(t, trace, payload_bytes);
		}
		if (unlikely(t->run_state == BS_RUN_LOST)) {
			if (!bs_run_fits(t, bytes) &&
			    !bs_segment_take(t, bytes))
				return lose(t, trace, payload_bytes);
			bs_run_close(t, 0);
			continue;
		}
		w = t->run_is_own ? &bs_writer : &t->writer;
		if (likely((size_t)(w->limit - w->cursor) >= bytes)) {
			bs_writer_put(w, type, flags, ticks, parts, n_parts,
				      payload_bytes);
			return 0;
		}
		/* The next one goes into the next segment. */
		bs_run_close(t, 0);
	}
}

int bs_append(struct bs_thread *t, struct bs_trace *trace, uint8_t type,
	      uint8_t flags, uint64_t ticks, const struct bs_part *parts,
	      int n_parts)
{
	int ret = append(t, trace, type, flags, ticks, parts, n_parts);

	bs_run_rest(t);
	return ret;
}

/*
 * What a trace lost before the thread came to this node, or wrote for another one,
 * this node hears of by an empty run that is lossy, or as a loss of nobody knows which
 * trace. It hears nothing of a process that ends before its trace does, nor of a trace
 * that ends while there is no node, or in a run which was begun for another one.
 */
static bool is_here(struct bs_thread *t, struct bs_trace *trace)
{
	if (READ_ONCE(trace->flags) & BS_RUN_LOSSY)
		bs_thread_enter(t);
	if (likely(READ_ONCE(trace->attachment) == t->epoch))
		return true;
	if (!bs_trace_has_run(trace))
		return false;
	if (!bs_thread_has_slot(t)) {
		tell_unattributed(t);
		return false;
	}
	return !rebind(t, trace) && READ_ONCE(trace->attachment) == t->epoch;
}

static void append_last(struct bs_thread *t, struct bs_trace *trace)
{
	if (!is_here(t, trace) || READ_ONCE(trace->flags) & BS_TRACE_UNRECORDED)
		return;
	if (unlikely(!bs_thread_has_slot(t))) {
		if (READ_ONCE(trace->flags) & BS_RUN_LOSSY)
			BS_COUNT_THREAD(t, runs_lost, 1);
		return;
	}
	/* Another thread's run came after ours, and the last must be the one
	 * with the highest number: up to there the reader expects runs. */
	if (t->run_state == BS_RUN_OPEN && bs_run_is_of(t, trace) &&
	    t->run_seq + 1 != (uint32_t)READ_ONCE(trace->handle_seq))
		bs_run_close(t, 0);
	if (!bs_run_is_of(t, trace)) {
		if (!bs_trace_has_run(trace))
			return;
		if (t->run_state != BS_RUN_NONE)
			bs_run_close(t, 0);
		if (!bs_run_open(t, trace, 0))
			return;
	}
	/* Another thread may have lost something since the run was opened. */
	t->run_entry |= READ_ONCE(trace->flags) & BS_RUN_LOSSY;
	bs_run_close(t, BS_RUN_LAST);
}

void bs_append_last(struct bs_thread *t, struct bs_trace *trace)
{
	bs_run_wake(t);
	append_last(t, trace);
	bs_run_rest(t);
}
