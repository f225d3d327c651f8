/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which trace a thread works on: it shows it in a slot of its process's context
 * (abi/context.h), with plain stores. Who reads it here runs while the thread is in
 * the kernel or off the CPU, so no half of an id is seen, but in the moment in which
 * another thread closes that trace; nobody has one of that id then.
 */
#ifndef BPF_THREAD_H
#define BPF_THREAD_H

#include <stdbool.h>

#include "barrier.h"
#include "storage.h"

/* A thread that shows itself nowhere has never begun a trace. To seek it in all slots
 * takes half a microsecond: it is not done at each switch, but when another thread
 * has taken a slot; where the library does not count these, so often. */
#define SEEK_AGAIN_NS 5000000ull

static __always_inline bool may_have_come(struct probes_thread *t,
					  const struct bs_context_segment *c,
					  __u64 now)
{
	__u32 taken = READ_ONCE(c->slots_taken);

	if (taken == t->slots_taken &&
	    (taken || now - t->slot_sought_ns < SEEK_AGAIN_NS))
		return false;
	t->slots_taken = taken;
	t->slot_sought_ns = now;
	return true;
}

struct shown {
	struct bs_context_segment *context;
	struct bs_thread_slot *slot;
	__u64 hi, lo; /* both 0: no trace */
};

static __always_inline bool may_be_ours(const __u16 *by_tgid,
					const struct task_struct *task)
{
	return by_tgid[FIELD(task, tgid) & (PROBES_FILTER_ENTRIES - 1)] != 0;
}

static __always_inline bool current_may_be_ours(void)
{
	const __u16 *by_tgid = only(MAP(filter));

	return by_tgid && may_be_ours(by_tgid, bpf_get_current_task_btf());
}

static __always_inline struct bs_context_segment *
context_of(const struct probes_thread *t)
{
	__u32 process = t->process;
	void *inner = bpf_map_lookup_elem(MAP(processes), &process);

	return inner ? only(inner) : 0;
}

struct sought {
	const struct bs_context_segment *context;
	__u32 tid;
	__u32 slot; /* BS_CONTEXT_SLOTS: not found */
};

LOOP_BODY(look_at_slot)
long look_at_slot(__u32 i, struct sought *sought)
{
	if (READ_ONCE(sought->context->slots[i % BS_CONTEXT_SLOTS].tid) !=
	    sought->tid)
		return 0;
	sought->slot = i;
	return 1;
}

/* By bpf_loop(): the verifier would go through 256 rounds, and all that comes after. */
static __always_inline __u32 seek_slot(const struct bs_context_segment *context,
				       __u32 tid)
{
	struct sought sought = {
		.context = context,
		.tid = tid,
		.slot = BS_CONTEXT_SLOTS,
	};

	LOOP(BS_CONTEXT_SLOTS, look_at_slot, &sought);
	return sought.slot;
}

/* What a thread shows; false: no trace. */
static __always_inline bool look(struct probes_thread *t, __u64 now,
				 struct shown *s)
{
	__u32 number = t->slot;

	s->context = context_of(t);
	if (!s->context)
		return false;
	s->slot = &s->context->slots[number % BS_CONTEXT_SLOTS];
	if (READ_ONCE(s->slot->tid) != t->tid) {
		if (!may_have_come(t, s->context, now))
			return false;
		number = seek_slot(s->context, t->tid);
		if (number >= BS_CONTEXT_SLOTS)
			return false;
		t->slot = number;
		s->slot = &s->context->slots[number % BS_CONTEXT_SLOTS];
	}
	s->hi = READ_ONCE(s->slot->trace_hi);
	s->lo = READ_ONCE(s->slot->trace_lo);
	return s->hi | s->lo;
}

/* What the current thread shows, if it is of an attached process. */
static __always_inline struct probes_thread *current_thread(__u64 now,
							    struct shown *s)
{
	struct probes_thread *t;

	if (!current_may_be_ours())
		return 0;
	t = thread_of(bpf_get_current_task_btf());
	return t && look(t, now, s) ? t : 0;
}

#endif
