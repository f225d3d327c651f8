/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page costs a fault when it is met for the first time: a quarter of a
 * microsecond to eleven, sixteen times a segment. A thread of ours meets the
 * pages of segments before the application's threads take them.
 *
 * It stays a few segments ahead, and only of a process that takes one within a
 * second of another: where that is rare, the memory would cost more than the
 * time. A thread that takes a segment which is not ready populates it itself.
 *
 *   taker                                 this thread
 *   -----                                 -----------
 *   grant at tail; tail + 1               WRITE_ONCE(sleeping, 1)
 *   full_fence()                          full_fence()
 *   if READ_ONCE(sleeping):               look at tail once more
 *       fetch_add(rung, 1); futex_wake    if nothing is to do: futex_wait(rung)
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client.h"

/* A process that writes 100 MB/s uses one in 0.65 ms. This lasts for the 3 ms
 * that a thread waits for a processor on a busy machine, and is a quarter of a
 * megabyte at most that nobody may use. */
#define SEGMENTS_AHEAD 4

#define NS_PER_S 1000000000ull

static pthread_t thread;
static bool is_running; /* the attach thread's */
static bool is_stopped;
static const struct bs_attachment *worked_on; /* bs_lock */
static uint32_t rung;
static uint32_t sleeping;

/* ------------------------------------------------------------ populate --- */

/* Whoever owns the segment may write to it at the same time. */
void bs_segment_populate(struct bs_segment_header *segment)
{
	unsigned char *bytes = (unsigned char *)segment;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	int saved = errno;

	if (madvise(bytes, BS_SEGMENT_BYTES, MADV_POPULATE_WRITE) &&
	    errno == EINVAL) {
		/* Linux before 5.14: a write that changes nothing. */
		for (size_t at = 0; at < BS_SEGMENT_BYTES; at += page) {
			uint32_t zero = 0;

			compare_and_swap((uint32_t *)(bytes + at), &zero, 0);
		}
	}
	errno = saved;
}

/* Whether the grant at this position was met before. */
bool bs_prefault_is_ready(const struct bs_attachment *a, uint32_t position)
{
	return (int32_t)(load_acquire(&a->populated_to) - position) > 0;
}

/* ---------------------------------------------------------------- wake --- */

static uint64_t coarse_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static void wake(void)
{
	full_fence();
	if (!READ_ONCE(sleeping))
		return;
	fetch_add(&rung, 1);
	syscall(SYS_futex, &rung, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* In the middle of how far ahead this thread may be, and not met before. */
static bool is_wanted(const struct bs_attachment *a, uint32_t position)
{
	const struct bs_grant_ring *ring = a->grants;

	return (int32_t)(load_acquire(&ring->head) - position) > 0 &&
	       READ_ONCE(
		       ring->entries[position % BS_GRANT_RING_ENTRIES].segment) &
		       BS_GRANT_FRESH &&
	       !bs_prefault_is_ready(a, position);
}

void bs_prefault_taken(struct bs_attachment *a, uint32_t position)
{
	uint64_t now_ns = coarse_ns();
	uint64_t since_ns = now_ns - READ_ONCE(a->taken_ns);

	WRITE_ONCE(a->taken_ns, now_ns);
	if (since_ns >= NS_PER_S)
		return;
	WRITE_ONCE(a->takes_often, true);
	if (is_wanted(a, position + SEGMENTS_AHEAD / 2))
		wake();
}

/* -------------------------------------------------------------- thread --- */

/* The next one to be met; false when there is none for now. */
static bool next_segment(const struct bs_attachment *a, uint32_t *position,
			 struct bs_segment_header **segment)
{
	const struct bs_grant_ring *ring = a->grants;
	uint32_t tail = load_acquire(&ring->tail);
	uint32_t waiting = load_acquire(&ring->head) - tail;
	uint32_t number;

	/* Nobody needs any, or the daemon talks nonsense. */
	if (!READ_ONCE(a->takes_often) || waiting > BS_GRANT_RING_ENTRIES)
		return false;
	if (waiting > SEGMENTS_AHEAD)
		waiting = SEGMENTS_AHEAD;
	*position = a->populated_to;
	if ((int32_t)(*position - tail) < 0)
		*position = tail;
	for (; *position - tail < waiting; ++*position) {
		number = READ_ONCE(
			ring->entries[*position % BS_GRANT_RING_ENTRIES]
				.segment);
		if (!(number & BS_GRANT_FRESH))
			continue;
		number &= ~BS_GRANT_FRESH;
		if (number >= a->segments)
			continue;
		*segment = bs_segment_at(a, number);
		return true;
	}
	return false;
}

/* Whether there was something to do. */
static bool populate_next(struct bs_attachment *a)
{
	struct bs_segment_header *segment;
	uint32_t position;

	if (!a->grants || !next_segment(a, &position, &segment))
		return false;
	bs_segment_populate(segment);
	store_release(&a->populated_to, position + 1);
	return true;
}

static bool work(void)
{
	struct bs_attachment *a;
	bool worked;

	pthread_mutex_lock(&bs_process.lock);
	a = bs_process.current;
	a->refs++;
	worked_on = a;
	pthread_mutex_unlock(&bs_process.lock);
	worked = populate_next(a);
	pthread_mutex_lock(&bs_process.lock);
	worked_on = NULL;
	a = bs_attachment_put(a);
	pthread_mutex_unlock(&bs_process.lock);
	bs_attachment_unmap(a);
	return worked;
}

static void *prefault_thread(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "backsight-pages");
	while (!READ_ONCE(is_stopped)) {
		uint32_t seen = READ_ONCE(rung);

		if (work())
			continue;
		WRITE_ONCE(sleeping, 1);
		full_fence();
		if (!work() && !READ_ONCE(is_stopped))
			syscall(SYS_futex, &rung, FUTEX_WAIT_PRIVATE, seen,
				NULL, NULL, 0);
		WRITE_ONCE(sleeping, 0);
	}
	return NULL;
}

void bs_prefault_start(void)
{
	if (is_running)
		return;
	is_stopped = false;
	if (pthread_create(&thread, NULL, prefault_thread, NULL))
		return; /* whoever takes a segment populates it */
	is_running = true;
}

void bs_prefault_stop(void)
{
	if (!is_running)
		return;
	WRITE_ONCE(is_stopped, true);
	wake();
	pthread_join(thread, NULL);
	is_running = false;
}

bool bs_prefault_runs(void)
{
	return is_running;
}

bool bs_prefault_works_on(const struct bs_attachment *a)
{
	return worked_on == a;
}

void bs_prefault_forget(void)
{
	worked_on = NULL;
	is_running = false;
	sleeping = 0;
}
