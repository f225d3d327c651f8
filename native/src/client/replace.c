/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Putting another segment in the place of one that threads use.
 *
 * Threads write to their slots at every begin and end, and read the policy at
 * every begin. They take no lock for that and must not be waited for. So what
 * is replaced is the memory behind their addresses: mremap() puts the new
 * mapping where the old one was. A thread that comes by meanwhile waits in the
 * page fault; once mremap() has returned, no processor knows the old pages any
 * more. A pointer to a slot never changes, and there is nothing to free.
 *
 * That does not do for the trigger queue: who has claimed a cell of the old one
 * must fill that cell. The context is therefore mapped twice. Threads show
 * themselves through one mapping, whose memory changes. They fire through the
 * other, whose address changes; who is inside says so (struct bs_member), and
 * the old one is unmapped when nobody is.
 *
 * Who reads more than a word of the policy reads its `number` before and after,
 * and begins anew where it changed.
 */
#include <errno.h>
#include <time.h>

#include "client.h"

/* -------------------------------------------------------------- policy --- */

const char *bs_policy_replace(struct bs_attachment *a, int fd)
{
	const char *reason;
	const struct bs_policy *p = bs_policy_map(fd, &reason);
	int ret = p ? bs_map_in_place(a->policy, p, BS_POLICY_BYTES) : 0;

	/* A table of zeros would have nothing recorded. */
	if (ret == -EFAULT)
		WRITE_ONCE(
			((struct bs_policy *)a->policy)->percentage_threshold,
			BS_PERCENTAGE_ALL);
	return ret ? bs_no_room : reason;
}

/* ------------------------------------------------------------- context --- */

/* What stands in a slot of the new context until it is known what its thread
 * shows: no trace has this id. Nobody finds it, since the slot has no tid. */
#define UNKNOWN 0xdf0b7a1c5e92a843ull

static void settle(uint64_t *word, uint64_t shown)
{
	uint64_t unknown = UNKNOWN;

	/* If it is something else, the thread has begun or ended since. */
	compare_and_swap(word, &unknown, shown);
}

/* The slots of the old context do not change any more. */
static void copy_slots(const struct bs_attachment *a,
		       struct bs_context_segment *to,
		       const struct bs_context_segment *from)
{
	for (uint32_t i = 0; i < a->slots_touched; i++) {
		const struct bs_thread_slot *old = &from->slots[i];
		struct bs_thread_slot *slot = &to->slots[i];

		settle(&slot->trace_hi, READ_ONCE(old->trace_hi));
		settle(&slot->trace_lo, READ_ONCE(old->trace_lo));
		store_release(&slot->tid, READ_ONCE(old->tid));
	}
}

const char *bs_context_replace(struct bs_attachment *a, int fd,
			       struct bs_context_segment **old)
{
	struct bs_context_segment *context, *queue;
	const char *reason;

	context = bs_context_map(fd, &reason);
	if (!context)
		return reason;
	queue = bs_context_map(fd, &reason);
	if (!queue) {
		bs_unmap(context, sizeof(*context));
		return reason;
	}
	for (uint32_t i = 0; i < a->slots_touched; i++) {
		WRITE_ONCE(queue->slots[i].tid, 0);
		WRITE_ONCE(queue->slots[i].trace_hi, UNKNOWN);
		WRITE_ONCE(queue->slots[i].trace_lo, UNKNOWN);
	}
	if (bs_map_in_place(a->context, context, sizeof(*context))) {
		bs_unmap(queue, sizeof(*queue));
		return bs_no_room;
	}
	*old = a->queue;
	copy_slots(a, queue, *old);
	bs_slots_taken(queue);
	store_release(&a->queue, queue);
	return NULL;
}

/* --------------------------------------------------------------- queue --- */

/* Either we see the queue that was published last, or whoever wants to unmap ours
 * sees that we are inside. */
struct bs_context_segment *bs_queue_enter(const struct bs_thread *t)
{
	struct bs_context_segment **current = &t->attachment->queue;
	struct bs_context_segment *queue = load_acquire(current);

	for (;;) {
		struct bs_context_segment *entered = queue;

		if (!queue)
			return NULL;
		WRITE_ONCE(t->member->pushing, entered);
		full_fence();
		queue = load_acquire(current);
		if (queue == entered)
			return queue;
	}
}

void bs_queue_leave(const struct bs_thread *t)
{
	store_release(&t->member->pushing, NULL);
}

/* For whoever fires; a push takes less than a microsecond, unless its thread
 * waits for a processor. Half a second in all: then a debugger has stopped it. */
#define PUSH_PAUSE_NS 100000
#define PUSH_PAUSES 5000

static bool anybody_pushes(const struct bs_context_segment *queue)
{
	for (const struct bs_member *m = bs_members; m; m = m->next) {
		if (load_acquire(&m->pushing) == queue)
			return true;
	}
	return false;
}

bool bs_queue_unmap(struct bs_context_segment *queue)
{
	const struct timespec pause = {.tv_nsec = PUSH_PAUSE_NS};
	int pauses = 0;

	/* See bs_queue_enter(). */
	full_fence();
	while (anybody_pushes(queue)) {
		if (pauses++ == PUSH_PAUSES)
			return false;
		pthread_mutex_unlock(&bs_process.lock);
		nanosleep(&pause, NULL);
		pthread_mutex_lock(&bs_process.lock);
	}
	bs_unmap(queue, sizeof(*queue));
	return true;
}
