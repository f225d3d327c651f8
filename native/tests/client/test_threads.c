/* SPDX-License-Identifier: Apache-2.0 */
/* Many threads: slots, shared handles, and a daemon that is replaced. */
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "fake_node.h"

#define THREADS 8
#define ROUNDS 2000
#define SHARED 64 /* records of each thread between two other traces */

static struct fake_node node;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){5, number};
}

static struct bs_stats stats(void)
{
	struct bs_stats s;

	bs_get_stats(&s);
	return s;
}

/* Arguments of threads: numbers[i] is i. */
static uint64_t numbers[THREADS];

static void start(pthread_t *thread, void *(*run)(void *), int number)
{
	CHECK_EQ(pthread_create(thread, NULL, run, &numbers[number]), 0);
}

static void join(pthread_t thread)
{
	CHECK_EQ(pthread_join(thread, NULL), 0);
}

/* -------------------------------------------------------------- slots --- */

static void *write_and_exit(void *argument)
{
	CHECK_EQ(bs_begin(trace(*(uint64_t *)argument)), 0);
	CHECK_EQ(bs_tracepoint("12345678", 8), 0);
	return NULL;
}

/* A thread that ends leaves its slot, its segment and the place in it to the
 * next one; what it had open is closed. */
static void test_slot_is_handed_on(void)
{
	uint32_t handles[3], segment = BS_SEGMENT_NONE;
	uint32_t offset = sizeof(struct bs_segment_header);
	struct fake_run run;
	pthread_t thread;

	for (int i = 0; i < 3; i++) {
		start(&thread, write_and_exit, i + 1);
		join(thread);
		CHECK_EQ(fake_node_owned_slots(&node), 0);
		CHECK_EQ(node.context->slots[0].tid, 0);
		CHECK_EQ(node.context->slots[0].trace_lo, 0);
		CHECK(fake_node_run(&node, 0, &run));
		CHECK_EQ(run.id.lo, i + 1);
		CHECK_EQ(run.flags, BS_RUN_FIRST | BS_RUN_LAST);
		CHECK_EQ(run.offset, offset);
		offset += bs_run_header_bytes(BS_RUN_FIRST) + 20;
		if (i == 0)
			segment = run.segment;
		CHECK_EQ(run.segment, segment);
		handles[i] = run.handle;
	}
	CHECK(handles[0] != handles[1] && handles[1] != handles[2] &&
	      handles[0] != handles[2]);
}

static pthread_barrier_t all_have_begun, may_end;

static void *hold_slot(void *argument)
{
	(void)argument;
	CHECK_EQ(bs_begin(trace(1)), 0);
	pthread_barrier_wait(&all_have_begun);
	pthread_barrier_wait(&may_end);
	CHECK_EQ(bs_end(), 0);
	return NULL;
}

/* One thread too many records nothing, and says so; when a slot becomes free
 * it takes that. */
static void test_all_slots_in_use(void)
{
	static const char oversized[BS_PAYLOAD_MAX + 1];
	static pthread_t threads[BS_THREAD_SLOTS];
	struct bs_stats before = stats();
	struct fake_run run;

	pthread_barrier_init(&all_have_begun, NULL, BS_THREAD_SLOTS + 1);
	pthread_barrier_init(&may_end, NULL, BS_THREAD_SLOTS + 1);
	for (int i = 0; i < (int)BS_THREAD_SLOTS; i++)
		start(&threads[i], hold_slot, 0);
	pthread_barrier_wait(&all_have_begun);
	CHECK_EQ(fake_node_owned_slots(&node), BS_THREAD_SLOTS);
	CHECK_EQ(bs_begin(trace(2)), 0);
	CHECK_EQ(bs_tracepoint("123", 3), -ENOSPC);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(node.context->records_unattributed, 1);
	/* Nor can it say otherwise that a record was too large. */
	CHECK_EQ(bs_begin(trace(2)), 0);
	CHECK_EQ(bs_tracepoint(oversized, sizeof(oversized)), -EMSGSIZE);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(node.context->records_unattributed, 2);
	CHECK_EQ(stats().records_lost - before.records_lost, 1);
	CHECK_EQ(stats().payload_bytes_lost - before.payload_bytes_lost, 3);
	CHECK_EQ(stats().runs_lost - before.runs_lost, 2);
	CHECK_EQ(bs_begin(trace(3)), 0);
	CHECK_EQ(bs_tracepoint("123", 3), -ENOSPC);
	pthread_barrier_wait(&may_end);
	for (int i = 0; i < (int)BS_THREAD_SLOTS; i++)
		join(threads[i]);
	pthread_barrier_destroy(&all_have_begun);
	pthread_barrier_destroy(&may_end);

	CHECK_EQ(bs_tracepoint("456", 3), 0);
	CHECK_EQ(fake_node_owned_slots(&node), 1);
	CHECK_EQ(bs_end(), 0);
	while (!fake_node_run(&node, 0, &run))
		;
	CHECK_EQ(run.id.lo, 3);
	CHECK_EQ(run.flags, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY);
}

/* ----------------------------------------------------- shared handles --- */

static struct bs_trace shared;

static void *write_shared(void *argument)
{
	uint64_t number = *(uint64_t *)argument << 32;

	for (int i = 0; i < ROUNDS; i++) {
		CHECK_EQ(bs_write(&shared, BS_RECORD_DATA, &number, 8), 0);
		number++;
		if (i % SHARED)
			continue;
		/* Closes the run, and wants a new number for the next. */
		CHECK_EQ(bs_begin(trace(99)), 0);
		CHECK_EQ(bs_tracepoint("", 0), 0);
		CHECK_EQ(bs_end(), 0);
	}
	return NULL;
}

/* Each record is there once, each run of the handle has its own number, and
 * there is no gap. */
static void test_shared_handle(void)
{
	static bool seen_records[THREADS + 1][ROUNDS];
	static bool seen_seqs[THREADS * ROUNDS];
	uint32_t runs = 0, highest = 0, firsts = 0, lasts = 0, records = 0;
	const struct bs_record_header *h;
	pthread_t threads[THREADS];
	struct fake_run run;

	CHECK_EQ(bs_open(&shared, trace(4)), 0);
	for (int i = 0; i < THREADS; i++)
		start(&threads[i], write_shared, i);
	for (int i = 0; i < THREADS; i++)
		join(threads[i]);
	CHECK_EQ(bs_close(&shared), 0);

	for (uint32_t slot = 0; slot < BS_THREAD_SLOTS; slot++) {
		while (fake_node_run(&node, slot, &run)) {
			uint32_t offset = 0;

			if (run.id.lo != 4)
				continue;
			CHECK(!seen_seqs[run.seq]);
			seen_seqs[run.seq] = true;
			if (run.seq > highest)
				highest = run.seq;
			runs++;
			firsts += !!(run.flags & BS_RUN_FIRST);
			lasts += !!(run.flags & BS_RUN_LAST);
			CHECK(!(run.flags & BS_RUN_LOSSY));
			while ((h = fake_run_record(&run, &offset))) {
				uint64_t number;

				memcpy(&number, h + 1, 8);
				CHECK(!seen_records[number >> 32]
						   [(uint32_t)number]);
				seen_records[number >> 32][(uint32_t)number] =
					true;
				records++;
			}
		}
	}
	CHECK_EQ(records, THREADS * ROUNDS);
	CHECK_EQ(highest + 1, runs);
	CHECK_EQ(firsts, 1);
	CHECK_EQ(lasts, 1);
}

/* ------------------------------------------- a daemon that is replaced --- */

static bool stop;
static uint64_t written;

static void *write_on(void *argument)
{
	uint64_t number = *(uint64_t *)argument;
	struct bs_trace handle;

	while (!READ_ONCE(stop)) {
		bs_begin(trace(number));
		bs_tracepoint(&number, sizeof(number));
		bs_open(&handle, trace(number + 100));
		bs_write(&handle, BS_RECORD_DATA, &number, sizeof(number));
		bs_write(&shared, BS_RECORD_DATA, &number, sizeof(number));
		bs_tracepoint(&number, sizeof(number));
		bs_breadcrumb(NULL, "elsewhere");
		bs_trigger(trace(number), "t", "why", NULL, 0);
		bs_close(&handle);
		bs_end();
		fetch_add(&written, 1);
	}
	return NULL;
}

/* What is announced is always right; where memory runs out, all goes on. */
static void test_daemon_is_replaced(void)
{
	struct bs_attach_reply reply;
	struct bs_trigger_cell cell;
	pthread_t threads[4];
	struct fake_run run;

	CHECK_EQ(bs_open(&shared, trace(7)), 0);
	for (int i = 0; i < 4; i++)
		start(&threads[i], write_on, i + 1);
	for (int round = 0; round < 10; round++) {
		uint64_t attachments = stats().attachments;
		uint64_t until;

		fake_node_hang_up(&node);
		fake_node_make(&node, 16);
		for (uint32_t i = 0; i < 16; i++)
			fake_node_grant(&node, i, i % 2);
		fake_node_accept(&node);
		fake_node_fill_reply(&node, &reply);
		fake_node_send(&node, &reply, sizeof(reply), node.fds, BS_FDS);
		while (stats().attachments == attachments)
			sched_yield();
		until = READ_ONCE(written) + 1000;
		while (READ_ONCE(written) < until) {
			for (uint32_t slot = 0; slot < 8; slot++) {
				if (fake_node_run(&node, slot, &run))
					CHECK(run.id.lo > 0 && run.id.lo < 105);
			}
			if (fake_node_trigger(&node, &cell))
				CHECK(!strcmp(cell.why, "why"));
		}
	}
	WRITE_ONCE(stop, true);
	for (int i = 0; i < 4; i++)
		join(threads[i]);
	bs_close(&shared);
	CHECK_EQ(fake_node_owned_slots(&node), 1);
}

int main(void)
{
	for (int i = 0; i < THREADS; i++)
		numbers[i] = (uint64_t)i;
	fake_node_open(&node);
	fake_node_attach(&node, 300, 300);
	RUN(test_slot_is_handed_on);
	RUN(test_all_slots_in_use);
	RUN(test_shared_handle);
	RUN(test_daemon_is_replaced);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
