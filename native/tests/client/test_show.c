/* SPDX-License-Identifier: Apache-2.0 */
/* What threads show of the handles that they work on. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;
static pthread_barrier_t both;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){7, number};
}

/* 0: nothing. */
static void expect_shown(uint32_t slot, uint64_t number)
{
	const struct bs_thread_slot *s = &node.context->slots[slot];

	CHECK_EQ(READ_ONCE(s->trace_lo), number);
	CHECK_EQ(READ_ONCE(s->trace_hi), number ? 7 : 0);
}

static void test_handles_in_turn(void)
{
	struct bs_trace a, b;

	CHECK_EQ(bs_open(&a, trace(1)), 0);
	CHECK_EQ(bs_open(&b, trace(2)), 0);
	expect_shown(0, 0);
	CHECK_EQ(bs_show(&a), 0);
	expect_shown(0, 1);
	CHECK_EQ(bs_show(&b), 0);
	expect_shown(0, 2);
	CHECK_EQ(bs_close(&a), 0);
	expect_shown(0, 2);
	CHECK_EQ(bs_show(NULL), 0);
	expect_shown(0, 0);
	CHECK_EQ(bs_show(&b), 0);
	CHECK_EQ(bs_show(&a), -ENOENT);
	expect_shown(0, 0);
	CHECK_EQ(bs_close(&b), 0);
}

static void test_closed_handle_is_not_shown(void)
{
	struct bs_trace a;

	CHECK_EQ(bs_open(&a, trace(3)), 0);
	CHECK_EQ(bs_show(&a), 0);
	CHECK_EQ(bs_close(&a), 0);
	expect_shown(0, 0);
}

/* Where a handle's work ends, the thread's own trace goes on. */
static void test_own_trace_beside_a_handle(void)
{
	struct bs_trace a;

	CHECK_EQ(bs_begin(trace(4)), 0);
	CHECK_EQ(bs_open(&a, trace(5)), 0);
	CHECK_EQ(bs_show(&a), 0);
	expect_shown(0, 5);
	CHECK_EQ(bs_show(NULL), 0);
	expect_shown(0, 4);
	CHECK_EQ(bs_show(&a), 0);
	CHECK_EQ(bs_close(&a), 0);
	expect_shown(0, 4);
	CHECK_EQ(bs_end(), 0);
	expect_shown(0, 0);
}

static void test_unrecorded_is_not_shown(void)
{
	struct bs_trace a;

	WRITE_ONCE(node.policy->percentage_threshold, 0);
	CHECK_EQ(bs_open(&a, trace(6)), 0);
	CHECK_EQ(bs_show(&a), 0);
	expect_shown(0, 0);
	CHECK_EQ(bs_close(&a), 0);
	WRITE_ONCE(node.policy->percentage_threshold, BS_PERCENTAGE_ALL);
}

static void *show_and_stay(void *argument)
{
	CHECK_EQ(bs_show(argument), 0);
	pthread_barrier_wait(&both);
	pthread_barrier_wait(&both);
	return NULL;
}

static void test_closed_by_another_thread(void)
{
	struct bs_trace a, b;
	pthread_t threads[2];

	CHECK_EQ(bs_open(&a, trace(8)), 0);
	CHECK_EQ(bs_open(&b, trace(9)), 0);
	CHECK_EQ(pthread_create(&threads[0], NULL, show_and_stay, &a), 0);
	pthread_barrier_wait(&both);
	expect_shown(1, 8);
	CHECK_EQ(bs_close(&a), 0);
	expect_shown(1, 0);
	pthread_barrier_wait(&both);
	pthread_join(threads[0], NULL);

	CHECK_EQ(pthread_create(&threads[1], NULL, show_and_stay, &b), 0);
	pthread_barrier_wait(&both);
	expect_shown(1, 9);
	pthread_barrier_wait(&both);
	pthread_join(threads[1], NULL);
	expect_shown(1, 0);
	CHECK_EQ(bs_close(&b), 0);
}

#define ROUNDS 20000

static void *show_in_turn(void *argument)
{
	struct bs_trace *traces = argument, mine;

	for (int i = 0; i < ROUNDS; i++) {
		CHECK_EQ(bs_open(&mine, trace(100)), 0);
		CHECK_EQ(bs_show(&traces[i % 2]), 0);
		CHECK_EQ(bs_show(&mine), 0);
		CHECK_EQ(bs_close(&mine), 0);
	}
	CHECK_EQ(bs_show(NULL), 0);
	return NULL;
}

/* Two show the same handles, and each closes one that is its own beside the other. */
static void test_two_at_once(void)
{
	struct bs_trace traces[2];
	pthread_t threads[2];

	CHECK_EQ(bs_open(&traces[0], trace(10)), 0);
	CHECK_EQ(bs_open(&traces[1], trace(11)), 0);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, show_in_turn,
					traces),
			 0);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	expect_shown(1, 0);
	expect_shown(2, 0);
	CHECK_EQ(bs_close(&traces[0]), 0);
	CHECK_EQ(bs_close(&traces[1]), 0);
}

/* The handle goes on with the next node, and is known there as shown. */
static void test_another_node(void)
{
	struct bs_stats before, now;
	struct bs_trace a;

	bs_get_stats(&before);
	CHECK_EQ(bs_open(&a, trace(12)), 0);
	CHECK_EQ(bs_show(&a), 0);
	fake_node_hang_up(&node);
	fake_node_attach(&node, 8, 8);
	do {
		sched_yield();
		bs_get_stats(&now);
	} while (now.attachments == before.attachments);
	CHECK_EQ(bs_show(&a), 0);
	expect_shown(0, 12);
	CHECK_EQ(bs_write(&a, BS_RECORD_DATA, "x", 1), 0);
	CHECK_EQ(bs_close(&a), 0);
	expect_shown(0, 0);
}

int main(void)
{
	pthread_barrier_init(&both, NULL, 2);
	fake_node_open(&node);
	fake_node_attach(&node, 8, 8);
	CHECK_EQ(bs_begin(trace(1)), 0); /* the first slot is ours */
	CHECK_EQ(bs_end(), 0);
	RUN(test_handles_in_turn);
	RUN(test_closed_handle_is_not_shown);
	RUN(test_own_trace_beside_a_handle);
	RUN(test_unrecorded_is_not_shown);
	RUN(test_closed_by_another_thread);
	RUN(test_two_at_once);
	RUN(test_another_node);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
