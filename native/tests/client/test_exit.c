/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that trace while they exit. Not for TSan, which has gone by then. */
#include <limits.h>
#include <pthread.h>
#include <sched.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){8, number};
}

static struct bs_stats stats(void)
{
	struct bs_stats s;

	bs_get_stats(&s);
	return s;
}

static pthread_key_t late_key;
static int rounds;

/* A destructor of the application's that traces, in the last round in which any
 * are called: ours is called no more. */
static void trace_late(void *argument)
{
	if (++rounds < PTHREAD_DESTRUCTOR_ITERATIONS) {
		pthread_setspecific(late_key, argument);
		return;
	}
	bs_begin(trace(80));
	CHECK_EQ(bs_tracepoint("", 0), 0);
}

static void *be_destroyed(void *argument)
{
	CHECK_EQ(pthread_setspecific(late_key, argument), 0);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("12345678", 8), 0);
	return NULL;
}

/* Whoever traces after that leaves nothing that anybody stumbles over, and its
 * slot is found. */
static void test_trace_in_last_destructor(void)
{
	const struct bs_attach_news unknown = {
		.magic = BS_ABI_MAGIC,
		.kind = 1000,
	};
	uint64_t runs = stats().runs;
	struct fake_run run;
	pthread_t thread;

	CHECK_EQ(pthread_key_create(&late_key, trace_late), 0);
	for (int i = 0; i < 10; i++) {
		rounds = 0;
		CHECK_EQ(pthread_create(&thread, NULL, be_destroyed, &rounds),
			 0);
		CHECK_EQ(pthread_join(thread, NULL), 0);
		CHECK(stats().runs >= runs + i);
	}
	CHECK_EQ(rounds, PTHREAD_DESTRUCTOR_ITERATIONS);
	/* It looks for them every few seconds, and when there is news. */
	fake_node_send(&node, &unknown, sizeof(unknown), NULL, 0);
	while (fake_node_owned_slots(&node))
		sched_yield();
	while (fake_node_run(&node, 0, &run))
		;
	pthread_key_delete(late_key);
}

int main(void)
{
	fake_node_open(&node);
	fake_node_attach(&node, 32, 32);
	RUN(test_trace_in_last_destructor);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
