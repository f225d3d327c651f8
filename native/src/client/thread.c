/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "writer.h"

__thread struct bs_thread bs_thread;
struct bs_member *bs_members;

/* How many threads are asked whether they live, at a time: a system call each, of
 * 0.1 to 0.2 us, in which nobody else has bs_lock. */
#define REAPED_AT_ONCE 64
static struct bs_member *reaped_next; /* NULL: from the first; bs_lock */

static pthread_key_t exit_key;
static bool exit_key_is_made;

/* --------------------------------------------------------- membership --- */

/* bs_lock held; it has left its attachment. */
static void remove_member(struct bs_member *m)
{
	*m->link = m->next;
	if (m->next)
		m->next->link = m->link;
	if (reaped_next == m)
		reaped_next = m->next;
	bs_stats_fold_member(m);
	free(m);
}

/* The thread exits. What it had open ends here: nobody else can write to it.
 * Destructors of others may still use us; then this one is called again, unless
 * it was the last time that any is. */
static void on_exit_of_thread(void *arg)
{
	struct bs_thread *t = arg;

	if (bs_process_is_new() || !t->member)
		return;
	bs_end();
	bs_thread_leave(t);
	pthread_mutex_lock(&bs_process.lock);
	remove_member(t->member);
	t->member = NULL;
	pthread_mutex_unlock(&bs_process.lock);
}

__attribute__((constructor)) static void make_exit_key(void)
{
	exit_key_is_made = !pthread_key_create(&exit_key, on_exit_of_thread);
}

/* Without a destructor the slot of a dead thread would be free late, so a
 * thread that cannot have one stays out. bs_lock held. */
static bool become_member(struct bs_thread *t)
{
	struct bs_member *m;

	if (t->member)
		return true;
	if (!exit_key_is_made || pthread_setspecific(exit_key, t))
		return false;
	m = aligned_alloc(BS_CACHE_LINE, sizeof(*m));
	if (!m)
		return false;
	memset(m, 0, sizeof(*m));
	m->tid = (pid_t)syscall(SYS_gettid);
	m->slot_number = BS_THREAD_SLOTS;
	m->next = bs_members;
	m->link = &bs_members;
	if (m->next)
		m->next->link = &m->next;
	bs_members = m;
	t->member = m;
	return true;
}

/* --------------------------------------------------------- attachment --- */

/* bs_lock held. */
static void release_slot(struct bs_attachment *a, uint32_t slot_number)
{
	struct bs_thread_area *area = bs_attachment_area(a, slot_number);
	struct bs_thread_slot *slot = &a->context->slots[slot_number];

	WRITE_ONCE(slot->trace_hi, 0);
	WRITE_ONCE(slot->trace_lo, 0);
	WRITE_ONCE(slot->tid, 0);
	WRITE_ONCE(area->own_handle, 0);
	store_release(&area->owner_tid, 0);
	a->slots_used[slot_number / 64] &= ~(1ull << (slot_number % 64));
	WRITE_ONCE(a->slots_free, a->slots_free + 1);
}

static void keep_place(const struct bs_thread *t, struct bs_slot_state *state)
{
	state->next_handle = t->next_handle;
	state->segment = BS_SEGMENT_NONE;
	if (!t->segment)
		return;
	state->segment = (uint32_t)(((unsigned char *)t->segment -
				     t->attachment->arena) /
				    BS_SEGMENT_BYTES);
	state->cursor = bs_segment_offset(t, t->cursor);
	state->runs = t->runs;
}

void bs_thread_leave(struct bs_thread *t)
{
	struct bs_attachment *a = t->attachment;

	if (!a)
		return;
	bs_run_wake(t);
	if (t->run_state != BS_RUN_NONE)
		bs_run_close(t, 0);
	pthread_mutex_lock(&bs_process.lock);
	if (t->area) {
		bs_thread_answer_locked(t);
		keep_place(t, &a->slots[t->slot_number]);
		release_slot(a, t->slot_number);
		t->member->slot_number = BS_THREAD_SLOTS;
		t->member->segment = NULL;
		t->member->stands_at = NULL;
		bs_attachment_let_go(a, t->segment);
	}
	t->area = NULL;
	t->slot = NULL;
	t->segment = NULL;
	t->cursor = NULL;
	t->floor = NULL;
	t->attachment = NULL;
	if (t->member)
		t->member->attachment = NULL;
	a = bs_attachment_put(a);
	pthread_mutex_unlock(&bs_process.lock);
	bs_attachment_unmap(a);
}

/* A thread that ended in the middle of a run leaves a segment where nobody goes on. */
static struct bs_attachment *leave_for(struct bs_member *m)
{
	struct bs_attachment *a = m->attachment;

	if (!a)
		return NULL;
	if (m->slot_number != BS_THREAD_SLOTS) {
		struct bs_slot_state *state = &a->slots[m->slot_number];

		state->segment = BS_SEGMENT_NONE;
		if (m->segment && m->stands_at)
			bs_segment_park(a, m->segment, m->stands_at);
		else if (m->segment)
			bs_segment_seal(a, m->segment);
		/* Nobody knows how far it counted. */
		state->next_handle += BS_HANDLE_COUNT_MASK / 2;
		release_slot(a, m->slot_number);
		bs_attachment_let_go(a, m->segment);
	}
	return bs_attachment_put(a);
}

void bs_thread_reap(void)
{
	if (!reaped_next)
		reaped_next = bs_members;
	for (int i = 0; reaped_next && i < REAPED_AT_ONCE; i++) {
		struct bs_member *m = reaped_next;

		reaped_next = m->next;
		if (!syscall(SYS_tgkill, getpid(), m->tid, 0) || errno != ESRCH)
			continue;
		bs_attachment_unmap(leave_for(m));
		remove_member(m);
	}
}

void bs_thread_reap_all(void)
{
	reaped_next = NULL;
	for (bs_thread_reap(); reaped_next; bs_thread_reap()) {
		pthread_mutex_unlock(&bs_process.lock);
		pthread_mutex_lock(&bs_process.lock);
	}
}

void bs_members_forget(void)
{
	bs_members = NULL;
	reaped_next = NULL;
}

void bs_thread_move(struct bs_thread *t)
{
	int saved = errno;

	bs_process_check();
	if (t->attachment != READ_ONCE(bs_process.current))
		bs_thread_leave(t);
	pthread_mutex_lock(&bs_process.lock);
	if (become_member(t))
		bs_attach_start();
	/* One that is published after we looked is for the next move. */
	if (!t->attachment) {
		t->attachment = t->member ? bs_process.current : &bs_nowhere;
		t->attachment->refs++;
		if (t->member)
			t->member->attachment = t->attachment;
	}
	t->epoch = t->attachment->epoch;
	t->node_ref[0] = '\0';
	if (t->attachment->channel)
		snprintf(t->node_ref, sizeof(t->node_ref), "#%016llx",
			 (unsigned long long)t->attachment->node_id);
	pthread_mutex_unlock(&bs_process.lock);
	errno = saved;
}

/* Where the slot's last owner stopped. */
static void go_on_in_segment(struct bs_thread *t,
			     const struct bs_slot_state *state)
{
	if (state->segment == BS_SEGMENT_NONE) {
		WRITE_ONCE(t->area->segment, BS_SEGMENT_NONE);
		return;
	}
	t->segment = bs_segment_at(t->attachment, state->segment);
	WRITE_ONCE(t->member->segment, t->segment);
	t->runs = state->runs;
	t->cursor = (unsigned char *)t->segment + state->cursor;
	t->floor = (unsigned char *)bs_directory(t->segment, t->runs) +
		   sizeof(uint64_t);
}

/* The thread's own trace was open before the thread had a slot. */
static void own_is_here(struct bs_thread *t)
{
	bs_show_own(t);
	/* Of another attachment: it gets another handle before it writes. */
	if (READ_ONCE(t->own.attachment) != t->epoch)
		return;
	/* It has no run yet, and a number of this slot's says where it is shown. */
	t->own.handle_seq = (uint64_t)bs_thread_draw_own_handle(t) << 32;
	WRITE_ONCE(t->area->own_handle, bs_trace_handle(t->own.handle_seq));
}

bool bs_thread_claim(struct bs_thread *t)
{
	struct bs_attachment *a = t->attachment;
	bool got = false;
	uint32_t i;

	pthread_mutex_lock(&bs_process.lock);
	if (a == &bs_nowhere) {
		bs_attach_start();
		pthread_mutex_unlock(&bs_process.lock);
		return false;
	}
	/* The lowest first, so that segments of threads that are gone are
	 * filled up, and few slots' memory is ever touched. */
	for (i = 0; i < BS_THREAD_SLOTS && !a->is_retired; i++) {
		uint32_t nobody = 0;

		if (a->slots_used[i / 64] >> (i % 64) & 1)
			continue;
		a->slots_used[i / 64] |= 1ull << (i % 64);
		WRITE_ONCE(a->slots_free, a->slots_free - 1);
		if (i >= a->slots_touched)
			WRITE_ONCE(a->slots_touched, i + 1);
		t->area = bs_attachment_area(a, i);
		got = compare_and_swap(&t->area->owner_tid, &nobody,
				       (uint32_t)t->member->tid);
		if (got)
			break;
		/* Nobody of ours: never to be used. */
	}
	if (got) {
		t->slot = &a->context->slots[i];
		t->slot_number = i;
		t->member->slot_number = i;
		t->next_handle = a->slots[i].next_handle;
		t->loss_head = READ_ONCE(t->area->loss_head);
		go_on_in_segment(t, &a->slots[i]);
		bs_thread_stand(t, t->cursor);
		WRITE_ONCE(t->slot->tid, (uint32_t)t->member->tid);
		if (t->own_open)
			own_is_here(t);
		bs_slots_taken(a->context);
	} else {
		t->area = NULL;
	}
	pthread_mutex_unlock(&bs_process.lock);
	return got;
}
