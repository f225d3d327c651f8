/* SPDX-License-Identifier: Apache-2.0 */
/* Records are stamped by the clock that the node names. */
#include <sched.h>
#include <time.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;

static uint64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void attach_to_clock(enum bs_clock clock)
{
	struct bs_stats before, now;

	bs_get_stats(&before);
	node.clock = clock;
	fake_node_attach(&node, 4, 4);
	/* It counts as attached while the old node's memory is there. */
	do {
		sched_yield();
		bs_get_stats(&now);
	} while (now.attachments == before.attachments);
}

static uint64_t ticks_of_one_record(void)
{
	struct bs_trace_id id = {1, 2};
	struct fake_run run;
	uint32_t offset = 0;

	CHECK_EQ(bs_begin(id), 0);
	CHECK_EQ(bs_tracepoint("record", 6), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK(fake_node_run(&node, 0, &run));
	return fake_run_record(&run, &offset)->ticks;
}

static void test_monotonic(void)
{
	uint64_t before, ticks, after;

	attach_to_clock(BS_CLOCK_MONOTONIC);
	before = monotonic_ns();
	ticks = ticks_of_one_record();
	after = monotonic_ns();
	CHECK(before <= ticks);
	CHECK(ticks <= after);
}

#if BS_HAS_CPU_COUNTER
static void test_counter(void)
{
	uint64_t before, ticks, after;

	attach_to_clock(BS_CLOCK_COUNTER);
	before = bs_cpu_counter();
	ticks = ticks_of_one_record();
	after = bs_cpu_counter();
	CHECK(before <= ticks);
	CHECK(ticks <= after);
}
#endif

int main(void)
{
	fake_node_open(&node);
	RUN(test_monotonic);
#if BS_HAS_CPU_COUNTER
	fake_node_hang_up(&node);
	RUN(test_counter);
#endif
	fake_node_close(&node);
	bs_shutdown();
	return 0;
}
