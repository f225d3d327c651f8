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

#if BS_HAS_CPU_COUNTER
/* A daemon that comes back may name another one. */
static void test_another_after_resuming(void)
{
	struct bs_attach_reply reply;
	struct bs_stats before, now;
	uint64_t earliest, ticks, latest;

	attach_to_clock(BS_CLOCK_COUNTER);
	bs_get_stats(&before);
	fake_node_hang_up(&node);
	WRITE_ONCE(node.channel->clock, BS_CLOCK_MONOTONIC);
	fake_node_accept(&node);
	fake_node_fill_reply(&node, &reply);
	reply.resumed = 1;
	fake_node_send(&node, &reply, sizeof(reply), NULL, 0);
	do {
		sched_yield();
		bs_get_stats(&now);
	} while (now.attachments == before.attachments);
	earliest = monotonic_ns();
	ticks = ticks_of_one_record();
	latest = monotonic_ns();
	CHECK(earliest <= ticks);
	CHECK(ticks <= latest);
}

/* Or nonsense: then it is another attachment that counts. */
static void test_nonsense_after_resuming(void)
{
	struct bs_attach_reply reply;

	fake_node_hang_up(&node);
	WRITE_ONCE(node.channel->clock, BS_CLOCK_COUNTER + 1);
	fake_node_accept(&node);
	CHECK(node.request.token[0]);
	fake_node_fill_reply(&node, &reply);
	reply.resumed = 1;
	fake_node_send(&node, &reply, sizeof(reply), NULL, 0);
	fake_node_wait_hangup(&node);
	fake_node_accept(&node);
	CHECK(!node.request.token[0]);
	fake_node_hang_up(&node);
}
#endif

int main(void)
{
	fake_node_open(&node);
	RUN(test_monotonic);
#if BS_HAS_CPU_COUNTER
	fake_node_hang_up(&node);
	RUN(test_counter);
	fake_node_hang_up(&node);
	RUN(test_another_after_resuming);
	RUN(test_nonsense_after_resuming);
#endif
	fake_node_close(&node);
	bs_shutdown();
	return 0;
}
