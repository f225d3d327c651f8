/* SPDX-License-Identifier: Apache-2.0 */
/* Doorbells: nobody rings in vain, however many may ring, come and go; and
 * while nobody rings, nobody wakes up. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>

#include "old_kernel.h"
#include "writer.h"

/* Three calls of the kernel's could wait for them. */
#define MANY 300
#define ARENA_BYTES (1u << 20)

static struct bsn *node;
static struct writer writers[MANY];
static uint32_t stopping;

/* By writer: triggers that the node has taken. */
static uint32_t taken[MANY];

static struct bsn *node_for(uint32_t clients)
{
	struct bsn_config config = test_config(256 << 20);

	config.clients_max = clients;
	config.arena_bytes = ARENA_BYTES;
	return test_node(&config);
}

static uint64_t wake_ups(void)
{
	struct bsn_metrics m;

	bsn_get_metrics(node, &m);
	return m.wake_ups;
}

/* The doorbell of abi/channel.h, as the client library rings it. */
static void ring(struct writer *w)
{
	struct bs_doorbell *bell = &w_header(w)->doorbell;

	full_fence();
	if (!READ_ONCE(bell->sleeping))
		return;
	fetch_add(&bell->rung, 1);
	syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Its number says which one it is. */
static void trigger(uint32_t i)
{
	w_trigger(&writers[i], trace_id(i + 1), "ring", START);
	ring(&writers[i]);
}

static void take_events(void)
{
	struct bsn_event e[64];
	int got;

	while ((got = bsn_events(node, e, 64)) > 0) {
		for (int k = 0; k < got; k++) {
			if (e[k].kind == BSN_EVENT_TRIGGER)
				fetch_add(&taken[e[k].id.hi % 0x10000 - 1], 1);
		}
	}
	bsn_events_done(node);
}

/* As the daemon's worker does, and without any time-out: a ring that is lost is
 * a test that hangs. */
static void *work(void *unused)
{
	(void)unused;
	while (!load_acquire(&stopping)) {
		bsn_wait(node, -1);
		bsn_poll(node, START);
		take_events();
	}
	return NULL;
}

static pthread_t begin_work(void)
{
	pthread_t worker;

	memset(taken, 0, sizeof(taken));
	store_release(&stopping, 0);
	CHECK_EQ(pthread_create(&worker, NULL, work, NULL), 0);
	return worker;
}

static void end_work(pthread_t worker)
{
	store_release(&stopping, 1);
	bsn_wake(node);
	pthread_join(worker, NULL);
}

static void await_taken(uint32_t i, uint32_t times)
{
	while (READ_ONCE(taken[i]) != times)
		sched_yield();
}

/* Until the node has gone to sleep on this bell. */
static void await_sleep(uint32_t i)
{
	while (!READ_ONCE(w_header(&writers[i])->doorbell.sleeping))
		sched_yield();
}

static void attach(uint32_t from, uint32_t to)
{
	for (uint32_t i = from; i < to; i++)
		writer_attach(&writers[i], node, START);
}

static void detach(uint32_t i)
{
	CHECK_EQ(bsn_client_exited(node, writers[i].number, START), 0);
	writer_close(&writers[i]);
}

/* ---------------------------------------------------------------- tests --- */

static void any_of_many_wakes_the_node(void)
{
	pthread_t worker;

	node = node_for(MANY);
	attach(0, MANY);
	worker = begin_work();
	for (uint32_t i = 0; i < MANY; i++) {
		await_sleep(i);
		trigger(i);
		await_taken(i, 1);
	}
	/* And again, when all were woken for once. */
	for (uint32_t i = MANY; i-- > 0;) {
		trigger(i);
		await_taken(i, 2);
	}
	end_work(worker);
	free_with_writers(node, writers, MANY);
}

#define GROUP 127
#define STEADY 130

/* At the pace of a kernel without futex_waitv a ring takes milliseconds. */
static uint32_t rounds = 20;

/* Those above STEADY come and go, and each fires once in its life. */
static void *come_and_go(void *unused)
{
	uint32_t i = STEADY;

	(void)unused;
	for (uint32_t round = 0; round < 10 * rounds; round++) {
		attach(i, i + 1);
		trigger(i);
		/* Who was there before goes: his last one is taken all the same,
		 * or was not rung for at all. */
		if (++i == MANY)
			i = STEADY;
		if (writers[i].number) {
			detach(i);
			writers[i].number = 0;
		}
	}
	return NULL;
}

static void none_is_lost_while_clients_come_and_go(void)
{
	pthread_t worker, others;
	uint32_t sum = 0;

	node = node_for(2 * MANY);
	memset(writers, 0, sizeof(writers));
	attach(0, STEADY);
	worker = begin_work();
	CHECK_EQ(pthread_create(&others, NULL, come_and_go, NULL), 0);
	for (uint32_t round = 1; round <= rounds; round++) {
		for (uint32_t i = 0; i < STEADY; i++) {
			trigger(i);
			await_taken(i, round);
		}
	}
	pthread_join(others, NULL);
	for (uint32_t i = STEADY; i < MANY; i++) {
		while (writers[i].number && !READ_ONCE(taken[i]))
			sched_yield();
	}
	end_work(worker);
	bsn_poll(node, START);
	take_events();
	for (uint32_t i = STEADY; i < MANY; i++)
		sum += READ_ONCE(taken[i]);
	CHECK_EQ(sum, 10 * rounds);
	for (uint32_t i = 0; i < MANY; i++) {
		if (writers[i].number)
			writer_close(&writers[i]);
	}
	bsn_free(node);
}

/* From one thread that sleeps on all bells to one a group. */
static void a_group_more_while_the_node_sleeps(void)
{
	pthread_t worker;

	node = node_for(MANY);
	attach(0, GROUP);
	worker = begin_work();
	for (uint32_t i = 0; i < GROUP; i += GROUP - 1) {
		await_sleep(i);
		trigger(i);
		await_taken(i, 1);
	}
	await_sleep(0);
	attach(GROUP, GROUP + 1);
	for (uint32_t i = 0; i <= GROUP; i++) {
		uint32_t before = READ_ONCE(taken[i]);

		await_sleep(i);
		trigger(i);
		await_taken(i, before + 1);
	}
	/* And the last one goes, and comes back. */
	detach(GROUP);
	attach(GROUP, GROUP + 1);
	for (uint32_t i = 0; i <= GROUP; i++) {
		uint32_t before = READ_ONCE(taken[i]);

		await_sleep(i);
		trigger(i);
		await_taken(i, before + 1);
	}
	end_work(worker);
	for (uint32_t i = 0; i <= GROUP; i++)
		writer_close(&writers[i]);
	bsn_free(node);
}

static void nobody_wakes_up_for_nothing(void)
{
	uint64_t before;
	int threads = count_threads();

	node = node_for(MANY);
	attach(0, MANY);
	CHECK_EQ(bsn_wait(node, -1), 1); /* for those that came */
	bsn_poll(node, START);
	before = wake_ups();
	for (uint32_t i = 0; i < 10; i++)
		CHECK_EQ(bsn_wait(node, 20 * MS), 0);
	/* This thread, ten times. */
	CHECK_EQ(wake_ups() - before, 10);
	CHECK_EQ(count_threads() - threads, 3);

	/* One bell: its listener, and this thread if it slept already. The others
	 * sleep on. */
	before = wake_ups();
	trigger(200);
	CHECK_EQ(bsn_wait(node, -1), 1);
	CHECK(wake_ups() - before <= 2);
	bsn_poll(node, START);
	take_events();
	CHECK_EQ(bsn_wait(node, 20 * MS), 0);
	CHECK(wake_ups() - before <= 3);
	free_with_writers(node, writers, MANY);
	CHECK_EQ(count_threads(), threads);
}

static void one_group_needs_no_thread(void)
{
	int threads = count_threads();

	node = node_for(MANY);
	attach(0, GROUP);
	CHECK_EQ(bsn_wait(node, -1), 1);
	bsn_poll(node, START);
	CHECK_EQ(bsn_wait(node, 20 * MS), 0);
	CHECK_EQ(count_threads(), threads);
	/* It is awake: nobody needs to ring. */
	for (uint32_t i = 0; i < GROUP; i++) {
		CHECK_EQ(w_header(&writers[i])->doorbell.sleeping, 0);
		writer_close(&writers[i]);
	}
	bsn_free(node);
}

/* --------------------------------------------------------------- liars --- */

static void *ring_without_end(void *argument)
{
	struct writer *w = argument;
	struct bs_doorbell *bell = &w_header(w)->doorbell;

	while (!load_acquire(&stopping)) {
		fetch_add(&bell->rung, 1);
		syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL,
			0);
	}
	return NULL;
}

static uint64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Who rings and wants nothing does not keep the node awake; and whoever wants
 * something is still heard. */
static void who_rings_without_end_is_listened_to_seldom(uint32_t clients)
{
	const uint32_t polls = 200, at_once = 20;
	uint64_t begun_ns;
	pthread_t liar;

	node = node_for(MANY);
	attach(0, clients);
	CHECK_EQ(bsn_poll(node, START), 0);
	stopping = 0;
	CHECK_EQ(pthread_create(&liar, NULL, ring_without_end, &writers[0]), 0);
	begun_ns = monotonic_ns();
	for (uint32_t i = 0; i < polls; i++) {
		bsn_wait(node, -1);
		CHECK_EQ(bsn_poll(node, START), 0);
	}
	/* Two for each sleep of 4 ms, at most. */
	CHECK(monotonic_ns() - begun_ns >=
	      (uint64_t)(polls - at_once) / 2 * 4000000);
	for (uint32_t i = 1; i <= 20; i++) {
		uint32_t before = load_acquire(&taken[1]);

		trigger(1);
		while (load_acquire(&taken[1]) == before) {
			bsn_wait(node, -1);
			bsn_poll(node, START);
			take_events();
		}
	}
	store_release(&stopping, 1);
	pthread_join(liar, NULL);
	for (uint32_t i = 0; i < clients; i++)
		detach(i);
	bsn_free(node);
}

static void a_liar_of_one_group(void)
{
	who_rings_without_end_is_listened_to_seldom(2);
}

static void a_liar_of_many_groups(void)
{
	who_rings_without_end_is_listened_to_seldom(MANY);
}

int main(void)
{
	RUN(any_of_many_wakes_the_node);
	RUN(none_is_lost_while_clients_come_and_go);
	RUN(a_group_more_while_the_node_sleeps);
	RUN(one_group_needs_no_thread);
	RUN(a_liar_of_one_group);
	RUN(a_liar_of_many_groups);
	/* Without futex_waitv, as under qemu-user, the node wakes up to look. */
	if (syscall(SYS_futex_waitv, NULL, 0, 0, NULL, 0) && errno != ENOSYS)
		RUN(nobody_wakes_up_for_nothing);
	RUN(forget_futex_waitv);
	RUN(one_group_needs_no_thread);
	rounds = 1;
	RUN(any_of_many_wakes_the_node);
	RUN(none_is_lost_while_clients_come_and_go);
	RUN(a_group_more_while_the_node_sleeps);
	return 0;
}
