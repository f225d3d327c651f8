/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Client and node with one mapping, so that TSan sees what both sides do: its
 * shadow is by address. Real threads write and fire, go round a small pool, and
 * the node collects what was fired.
 */
#include <sched.h>
#include <string.h>

#include "check.h"
#include "process.h"

#define WRITERS 2
#define NOBODYS 1000000u /* a trace that nobody writes */
#define TRACES 3000u	 /* a thread: some five times what the pool holds */
#define EVERY 25u	 /* so many are written for one that is fired */
#define RECORDS 3
#define PAYLOAD_BYTES 1000

static const uint8_t payload[PAYLOAD_BYTES];
static uint32_t fired, taken, delivered;
static uint32_t running = WRITERS + 1;

static void fire(uint64_t trace, const char *trigger)
{
	CHECK_EQ(bs_trigger(trace_id(trace), trigger, "why", NULL, 0), 0);
	fetch_add(&fired, 1);
}

/* No faster than the node: what is lost is not read. Nothing is open meanwhile,
 * for that is what the node waits for. */
static void wait_for_node(void)
{
	while (READ_ONCE(taken) + 2 * (WRITERS + 1) < READ_ONCE(fired))
		sched_yield();
}

/* One that is fired is collected while it is written. */
static void write_trace(uint64_t trace, bool fires)
{
	CHECK_EQ(bs_begin(trace_id(trace)), 0);
	for (uint16_t i = 1; i <= RECORDS; i++) {
		CHECK_EQ(bs_record_at(i, payload, sizeof(payload), START), 0);
		if (fires && i == 1)
			fire(trace, "fired");
		if (fires)
			sched_yield();
	}
	CHECK_EQ(bs_end(), 0);
}

static void ended(void)
{
	/* What the thread had open is closed, and its slot is free. */
	bs_thread_leave(&bs_thread);
	__atomic_fetch_sub(&running, 1, __ATOMIC_RELEASE);
	bsn_wake(node);
}

static void *write_all(void *argument)
{
	uint64_t from = *(const uint64_t *)argument;

	for (uint32_t i = 0; i < TRACES; i++) {
		write_trace(from + i, i % EVERY == 0);
		wait_for_node();
	}
	ended();
	return NULL;
}

/* The queue goes round, and this thread meets the node nowhere else. */
static void *fire_all(void *unused)
{
	(void)unused;
	for (uint32_t i = 0; i < 3 * BS_TRIGGER_CELLS; i++) {
		fire(NOBODYS, "flood");
		wait_for_node();
	}
	ended();
	return NULL;
}

static void collect(struct bs_trace_id id)
{
	static uint8_t slice[1 << 18];
	struct bsn_slice s;

	CHECK_EQ(bsn_collect(node, id, id, "fired", START, &s), 0);
	do {
		bsn_poll(node, START);
		CHECK_EQ(bsn_slice_info(node, id, &s), 0);
	} while (s.open_handles);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(bsn_slice_read(node, id, 0, slice, sizeof(slice)), s.bytes);
	CHECK(s.bytes > RECORDS * PAYLOAD_BYTES);
	CHECK_EQ(bsn_slice_release(node, id, false, START), 0);
	delivered++;
}

static void work(void)
{
	struct bsn_event e[64];
	int got;

	bsn_poll(node, START);
	while ((got = bsn_events(node, e, 64)) > 0) {
		for (int i = 0; i < got; i++) {
			if (e[i].kind != BSN_EVENT_TRIGGER)
				continue;
			fetch_add(&taken, 1);
			if (!strcmp(e[i].trigger, "fired"))
				collect(e[i].id);
		}
	}
	bsn_events_done(node);
}

/* Until no more than so many threads run. */
static void serve(uint32_t left)
{
	while (load_acquire(&running) > left) {
		bsn_wait(node, -1);
		work();
	}
	work();
}

int main(void)
{
	uint64_t from[WRITERS];
	pthread_t threads[WRITERS], flood;
	struct bsn_metrics m;

	process_start(POOL_BYTES / BS_SEGMENT_BYTES);
	/* First alone: from others it would learn what they know of the node. */
	CHECK_EQ(pthread_create(&flood, NULL, fire_all, NULL), 0);
	serve(WRITERS);
	pthread_join(flood, NULL);
	for (uint32_t i = 0; i < WRITERS; i++) {
		from[i] = 1 + i * (uint64_t)TRACES;
		CHECK_EQ(pthread_create(&threads[i], NULL, write_all, &from[i]),
			 0);
	}
	serve(0);
	for (uint32_t i = 0; i < WRITERS; i++)
		pthread_join(threads[i], NULL);
	bsn_get_metrics(node, &m);
	printf("%u fired, %u taken, %u delivered whole; %ju segments reclaimed\n",
	       fired, taken, delivered, (uintmax_t)m.reclaims);
	CHECK_EQ(taken, fired);
	CHECK_EQ(delivered, WRITERS * TRACES / EVERY);
	CHECK(m.reclaims > 0);
	CHECK_EQ(m.corrupt, 0);
	return 0;
}
