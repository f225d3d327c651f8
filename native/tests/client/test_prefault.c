/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose time, and how much memory, it takes to meet new pages. The test has the
 * library in itself, and hears when the thread that meets them goes to sleep.
 */
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "client.h"
#include "fake_node.h"

static struct {
	uint32_t value; /* of the word on which it sleeps */
	bool is_asleep; /* until that changes */
} sleeper;

static long heard_syscall(long number, uint32_t *word, int call, uint32_t value)
{
	bool sleeps = call == FUTEX_WAIT_PRIVATE;
	long ret;

	if (sleeps) {
		WRITE_ONCE(sleeper.value, value);
		store_release(&sleeper.is_asleep, true);
	}
	ret = syscall(number, word, call, value, NULL, NULL, 0);
	if (sleeps)
		store_release(&sleeper.is_asleep, false);
	return ret;
}

#define syscall(number, word, call, value, ...)                                \
	heard_syscall(number, word, call, value)
/* For what is static there. */
#include "prefault.c" /* NOLINT(bugprone-suspicious-include) */
#undef syscall

#define SEGMENTS 64u
#define AHEAD SEGMENTS_AHEAD

static struct fake_node node;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){6, number};
}

/* Pages of a segment that have memory. */
static uint32_t pages(uint32_t segment)
{
	unsigned char resident[BS_SEGMENT_BYTES / 4096];
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	uint32_t n = 0;

	CHECK_EQ(mincore(node.arena + (size_t)segment * BS_SEGMENT_BYTES,
			 BS_SEGMENT_BYTES, resident),
		 0);
	for (size_t i = 0; i < BS_SEGMENT_BYTES / page; i++)
		n += resident[i] & 1;
	return n * (uint32_t)(page / 4096);
}

/* Segments that are ready: the first ones. They get ready meanwhile, one after the
 * other, so it is looked at the last ones first: before one that has memory all had it. */
static uint32_t populated(void)
{
	uint32_t n = SEGMENTS;

	while (n && !pages(n - 1))
		n--;
	if (n && pages(n - 1) < BS_SEGMENT_BYTES / 4096)
		n--;
	for (uint32_t i = 0; i < n; i++)
		CHECK_EQ(pages(i), BS_SEGMENT_BYTES / 4096);
	return n;
}

/* Write until the n-th segment is in use. */
static void use_segments(uint32_t n)
{
	CHECK_EQ(bs_begin(trace(n)), 0);
	while (node.grants->tail < n)
		CHECK_EQ(bs_tracepoint("0123456789", 10), 0);
	CHECK_EQ(bs_end(), 0);
}

static uint64_t faults(void)
{
	struct rusage usage;

	CHECK_EQ(getrusage(RUSAGE_THREAD, &usage), 0);
	return (uint64_t)usage.ru_minflt;
}

/* Until the thread has done with what there is to do: then it sleeps until somebody
 * rings. Returns how often somebody did. */
static uint32_t let_it_sleep(void)
{
	uint32_t rings;

	do {
		sched_yield();
		rings = READ_ONCE(rung);
	} while (!load_acquire(&sleeper.is_asleep) ||
		 READ_ONCE(sleeper.value) != rings);
	return rings;
}

static void test_unused_stock_has_no_memory(void)
{
	let_it_sleep();
	CHECK_EQ(populated(), 0);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(populated(), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	/* That one, by the thread itself. */
	let_it_sleep();
	CHECK_EQ(populated(), 1);
}

/* Until half of what it may be ahead is ready. Only who takes one within a second
 * of another gets that, which on a starved machine takes more than one try. */
static void wait_until_ready(void)
{
	for (uint32_t spins = 1; populated() < node.grants->tail + AHEAD / 2;
	     spins++) {
		if (spins % 1000000 == 0)
			use_segments(node.grants->tail + 1);
		sched_yield();
	}
}

/* Who takes one soon after another gets the next ones ready, and no more. */
static void test_next_segments_are_ready(void)
{
	for (uint32_t n = 2; n < 12; n++) {
		use_segments(n);
		wait_until_ready();
		CHECK(populated() <= node.grants->tail + AHEAD);
	}
}

/* The thread that writes meets none of their pages. */
static void test_writer_has_no_faults(void)
{
	uint64_t before;

	wait_until_ready();
	before = faults();
	use_segments(node.grants->tail + AHEAD / 2);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
	/* A sanitizer's own memory aside. */
	CHECK(faults() - before < BS_SEGMENT_BYTES / 4096);
#else
	(void)before;
#endif
}

/* Segments that were met before wake nobody. */
static void test_thread_sleeps_on(void)
{
	uint32_t before;

	/* Let it have done with the last ones that are new. */
	use_segments(SEGMENTS);
	before = let_it_sleep();
	for (uint32_t i = 0; i < 20; i++)
		fake_node_grant(&node, i, false);
	use_segments(SEGMENTS + 20);
	CHECK_EQ(READ_ONCE(rung), before);
}

/* qemu-user says that it did so. */
static bool pages_are_populated(void)
{
	unsigned char resident = 0;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *p = mmap(NULL, page, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	if (!madvise(p, page, MADV_POPULATE_WRITE))
		CHECK_EQ(mincore(p, page, &resident), 0);
	else
		resident = 1; /* Linux before 5.14 */
	munmap(p, page);
	return resident & 1;
}

int main(void)
{
	if (!pages_are_populated()) {
		printf("not here: this emulator populates nothing\n");
		return 0;
	}
	fake_node_open(&node);
	fake_node_attach(&node, SEGMENTS, SEGMENTS);
	RUN(test_unused_stock_has_no_memory);
	RUN(test_next_segments_are_ready);
	RUN(test_writer_has_no_faults);
	RUN(test_thread_sleeps_on);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
