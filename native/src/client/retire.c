/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is left of an attachment that was replaced.
 *
 * A thread leaves it at its next begin. Some never begin again, and would hold
 * all of an arena that no node reads any more. So the arena is unmapped under
 * them, but for the segment in which each stands: there it may be in the middle
 * of a record, so it gets memory of its own in that place (replace.c says why
 * that can be done), which goes when the thread leaves.
 *
 * That they stand where they stand is made sure first:
 *
 *   thread (bs_segment_take)              attach thread
 *   ------------------------              -------------
 *   WRITE_ONCE(is_taking, true)           WRITE_ONCE(is_retired, true)
 *   full_fence()                          full_fence()
 *   if READ_ONCE(is_retired): no          until no is_taking: wait
 *   take; WRITE_ONCE(segment)             read each segment
 *   store_release(is_taking, false)
 */
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "client.h"

/* A segment is taken in microseconds, unless its thread waits for a processor. One
 * that a debugger stops in the middle is waited for at each tick, so much. */
#define TAKE_PAUSE_NS 100000
#define TAKE_PAUSES 100

static bool anybody_takes(const struct bs_attachment *a)
{
	for (const struct bs_member *m = bs_members; m; m = m->next) {
		if (m->attachment == a && load_acquire(&m->is_taking))
			return true;
	}
	return bs_prefault_works_on(a);
}

/* False: somebody does for long. */
static bool wait_for_takes(const struct bs_attachment *a)
{
	const struct timespec pause = {.tv_nsec = TAKE_PAUSE_NS};
	int pauses = 0;

	full_fence();
	while (anybody_takes(a)) {
		if (pauses++ == TAKE_PAUSES)
			return false;
		pthread_mutex_unlock(&bs_process.lock);
		nanosleep(&pause, NULL);
		pthread_mutex_lock(&bs_process.lock);
	}
	return true;
}

static bool put_memory(struct bs_segment_header *segment)
{
	void *memory = mmap(NULL, BS_SEGMENT_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return false;
	if (madvise(memory, BS_SEGMENT_BYTES, MADV_DONTFORK)) {
		munmap(memory, BS_SEGMENT_BYTES);
		return false;
	}
	return !bs_map_in_place(segment, memory, BS_SEGMENT_BYTES);
}

static int compare_addresses(const void *a, const void *b)
{
	const unsigned char *x = *(unsigned char *const *)a;
	const unsigned char *y = *(unsigned char *const *)b;

	return (x > y) - (x < y);
}

static void unmap_between(const unsigned char *from, const unsigned char *to)
{
	if (to > from)
		munmap((void *)from, (size_t)(to - from));
}

/* bs_lock is held all along: nobody leaves meanwhile. */
static void tear(struct bs_attachment *a)
{
	const unsigned char *kept[BS_THREAD_SLOTS];
	const unsigned char *end = a->arena + a->arena_bytes;
	const unsigned char *from = a->arena;
	size_t n = 0;

	for (const struct bs_member *m = bs_members; m; m = m->next) {
		struct bs_segment_header *segment = READ_ONCE(m->segment);

		if (m->attachment != a || !segment)
			continue;
		/* There is no room even for that: next time. */
		if (!put_memory(segment))
			return;
		kept[n++] = (const unsigned char *)segment;
	}
	qsort(kept, n, sizeof(kept[0]), compare_addresses);
	for (size_t i = 0; i < n; i++) {
		unmap_between(from, kept[i]);
		from = kept[i] + BS_SEGMENT_BYTES;
	}
	unmap_between(from, end);
	a->is_torn = true;
}

void bs_attachment_let_go(const struct bs_attachment *a,
			  struct bs_segment_header *segment)
{
	if (a->is_torn && segment)
		munmap(segment, BS_SEGMENT_BYTES);
}

static struct bs_attachment *old_one(void)
{
	for (struct bs_attachment *a = bs_attachments; a; a = a->next) {
		if (a != bs_process.current && !a->is_torn)
			return a;
	}
	return NULL;
}

void bs_attachment_retire_old(void)
{
	struct bs_attachment *a;
	bool goes_on = true;

	while (goes_on && (a = old_one())) {
		a->refs++;
		WRITE_ONCE(a->is_retired, true);
		/* bs_lock was given up: somebody else may have been here. */
		if (wait_for_takes(a) && !a->is_torn)
			tear(a);
		goes_on = a->is_torn;
		bs_attachment_unmap(bs_attachment_put(a));
	}
}
