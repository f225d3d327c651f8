/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trigger queue: each trigger that bs_trigger() took is taken out once, whole,
 * by this node or by its successor; and who replaces the queue waits for those
 * who are inside.
 */
#include <string.h>

#include "check.h"
#include "share.h"

#define EVENTS 8
#define FILLER 3 /* a trace whose triggers are not counted */
#define LATER                                                                  \
	(START + 1000000000ull) /* a claimed cell is passed over by then */

static struct bs_trace_id lateral;
static uint32_t fired, refused;
static uint32_t seen[EVENTS]; /* by trace */

/* ---------------------------------------------------------------- client --- */

static void fire_as(uint64_t trace)
{
	int err =
		bs_trigger(trace_id(trace), "trigger", "because", &lateral, 1);

	if (err)
		refused |= 1u << trace;
	else
		fired |= 1u << trace;
}

static void fire_one(void)
{
	fire_as(1);
}

static void fire_two(void)
{
	fire_as(2);
}

static void fire_both(void)
{
	fire_one();
	fire_two();
}

/* ------------------------------------------------------------------ node --- */

static void take_events(void)
{
	struct bsn_event e[EVENTS];
	int got = bsn_events(node, e, EVENTS);

	for (int i = 0; i < got; i++) {
		if (e[i].kind != BSN_EVENT_TRIGGER)
			continue;
		CHECK_EQ(e[i].id.lo, trace_id(e[i].id.hi % EVENTS).lo);
		CHECK(!strcmp(e[i].trigger, "trigger"));
		CHECK(!strcmp(e[i].why, "because"));
		CHECK_EQ(e[i].n_laterals, 1);
		CHECK_EQ(e[i].laterals[0].lo, lateral.lo);
		seen[e[i].id.hi % EVENTS]++;
	}
	bsn_events_done(node);
}

static void poll(void)
{
	bsn_poll(node, START);
	take_events();
}

static void poll_twice(void)
{
	poll();
	poll();
}

static void check_counts(uint32_t times)
{
	struct bsn_metrics m;

	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
	for (uint32_t i = 1; i < EVENTS; i++) {
		if (i == FILLER)
			continue;
		CHECK(!(fired >> i & 1) || seen[i]);
		CHECK(seen[i] <= times);
	}
}

static void check(void)
{
	poll();
	check_counts(1);
	CHECK_EQ(refused, 0);
}

static void setup_of(uint32_t threads)
{
	lateral = trace_id(7);
	share_process(8, threads);
}

static void one_setup(void)
{
	setup_of(1);
}

static void two_setup(void)
{
	setup_of(2);
}

/* ------------------------------------------------------------ full queue --- */

static void fill_queue(void)
{
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		fire_as(FILLER);
}

/* All cells are taken, and the node is about to give them back. */
static void full_setup(void)
{
	one_setup();
	weak_as(0, fill_queue);
	bsn_poll(node, START);
	weak_expect(3);
}

static void give_back(void)
{
	struct bsn_event e[BS_TRIGGER_CELLS];

	CHECK_EQ(bsn_events(node, e, BS_TRIGGER_CELLS), BS_TRIGGER_CELLS);
	bsn_events_done(node);
}

static void check_full(void)
{
	weak_met(fired >> 1 & 1);
	poll();
	check_counts(1);
}

/* ----------------------------------------------------------------- death --- */

static void poll_later(void)
{
	bsn_poll(node, LATER);
	take_events();
}

static void check_other(void)
{
	check_counts(1);
	CHECK_EQ(seen[2], 1);
}

/* One who fires is killed: what the other one fired is taken. */
static void pass_over(void)
{
	poll();
	weak_join(0);
	weak_join(1);
	poll_later();
	poll_later();
	bsn_poll(node, LATER + LATER);
	take_events();
}

/* What the node took, and was killed before it was done with, its successor
 * takes again. */
static void succeed(void)
{
	weak_join(1);
	if (weak_died(1))
		process_succeed();
}

static void check_successor(void)
{
	poll();
	check_counts(1 + weak_died(1));
}

static const struct weak_scenario scenarios[] = {
	{.name = "one thread",
	 .setup = one_setup,
	 .parties = {{.name = "client", .run = fire_both},
		     {.name = "node", .run = poll_twice}},
	 .check = check},
	{.name = "two threads",
	 .setup = two_setup,
	 .parties = {{.name = "one", .run = fire_one},
		     {.name = "another", .run = fire_two},
		     {.name = "node", .run = poll}},
	 .check = check},
	{.name = "full queue",
	 .setup = full_setup,
	 .parties = {{.name = "client", .run = fire_one},
		     {.name = "node", .run = give_back}},
	 .check = check_full},
	{.name = "thread killed",
	 .setup = two_setup,
	 .parties = {{.name = "one", .run = fire_one, .mortal = true},
		     {.name = "another", .run = fire_two},
		     {.name = "node", .run = pass_over}},
	 .check = check_other,
	 .most = 1000},
	{.name = "node killed",
	 .setup = one_setup,
	 .parties = {{.name = "client", .run = fire_both},
		     {.name = "node", .run = poll_twice, .mortal = true},
		     {.name = "successor", .run = succeed}},
	 .check = check_successor,
	 .most = 3000},
};

SCENARIO_MAIN(scenarios)
