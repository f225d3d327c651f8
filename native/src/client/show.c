/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What threads show of what they work on, for who watches them from outside: the node's
 * probes, in the kernel (abi/context.h). A thread that uses the thread-local form shows
 * its trace by itself (trace.c). Whoever uses handles says here which one it works on.
 *
 * To show nothing is better than to show a trace that the thread has left: that one would
 * be collected for what happened to another. So no handle is shown once it is closed, on
 * no thread, whoever forgot to say so.
 */
#include <errno.h>

#include "writer.h"

static void show_id(struct bs_thread *t, struct bs_trace_id id)
{
	WRITE_ONCE(t->slot->trace_hi, id.hi);
	WRITE_ONCE(t->slot->trace_lo, id.lo);
}

/* What nobody records nobody shall be asked to collect. */
static bool is_recorded(const struct bs_trace *trace)
{
	return !(READ_ONCE(trace->flags) & BS_TRACE_UNRECORDED);
}

void bs_show_own(struct bs_thread *t)
{
	struct bs_trace_id id = {0, 0};

	if (t->own_open && is_recorded(&t->own))
		id = t->own.id;
	show_id(t, id);
}

int bs_show(struct bs_trace *trace)
{
	struct bs_thread *t = &bs_thread;
	bool is_open = trace && READ_ONCE(trace->attachment) > bs_fork_epoch;

	bs_thread_enter(t);
	if (!bs_thread_has_slot(t))
		return -ENOSPC;
	if (!is_open) {
		bs_show_own(t);
		return trace ? -ENOENT : 0;
	}
	if (!is_recorded(trace)) {
		show_id(t, (struct bs_trace_id){0, 0});
		return 0;
	}
	if (!(READ_ONCE(trace->flags) & BS_TRACE_SHOWN))
		fetch_or(&trace->flags, BS_TRACE_SHOWN);
	show_id(t, trace->id);
	return 0;
}

/* Whose thread may show something else at any moment: then it stays. */
static void hide_in(struct bs_thread_slot *slot, struct bs_trace_id id)
{
	if (READ_ONCE(slot->trace_hi) != id.hi ||
	    READ_ONCE(slot->trace_lo) != id.lo)
		return;
	if (compare_and_swap(&slot->trace_lo, &id.lo, 0))
		compare_and_swap(&slot->trace_hi, &id.hi, 0);
}

void bs_show_no_more(struct bs_thread *t, const struct bs_trace *trace)
{
	struct bs_attachment *a = t->attachment;
	uint32_t touched = READ_ONCE(a->slots_touched);

	for (uint32_t i = 0; i < touched; i++) {
		struct bs_thread_slot *slot = &a->context->slots[i];

		if (slot != t->slot)
			hide_in(slot, trace->id);
		else if (READ_ONCE(slot->trace_hi) == trace->id.hi &&
			 READ_ONCE(slot->trace_lo) == trace->id.lo)
			bs_show_own(t);
	}
}
