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

static void fire_filler(void)
{
	fire_as(FILLER);
}

/* The first cell is filled, and all others are claimed: the queue is full until
 * the node has read the first and gives it back. */
static void full_setup(void)
{
	one_setup();
	weak_as(0, fire_filler);
	attachment->context->trigger_head = BS_TRIGGER_CELLS;
	weak_expect(3);
}

static void read_and_give_back(void)
{
	struct bsn_event e[EVENTS];

	bsn_poll(node, START);
	CHECK_EQ(bsn_events(node, e, EVENTS), 1);
	bsn_events_done(node);
}

/* The claims come to nothing, each after its time. */
static void check_full(void)
{
	weak_met(fired >> 1 & 1);
	for (uint64_t i = 0; i < BS_TRIGGER_CELLS; i++) {
		bsn_poll(node, LATER + i * (LATER - START));
		take_events();
	}
	check_counts(1);
}

/* ----------------------------------------------------------------- death --- */

static void poll_later(void)
{
	bsn_poll(node, LATER);
	take_events();
}

enum thread_death {
	LIVED,
	BEFORE_ITS_CELL,
	WITH_ITS_CELL,
	AFTER_ITS_TRIGGER,
	THREAD_DEATHS
};

static void check_other(void)
{
	check_counts(1);
	CHECK_EQ(seen[2], 1);
	weak_met(!weak_died(0)				  ? LIVED
		 : seen[1]				  ? AFTER_ITS_TRIGGER
		 : attachment->context->trigger_head == 2 ? WITH_ITS_CELL
							  : BEFORE_ITS_CELL);
}

static void thread_death_setup(void)
{
	two_setup();
	weak_expect((1u << THREAD_DEATHS) - 1);
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

/* ------------------------------------------------------------- held up --- */

/* Whoever claimed a cell by the first poll is too late by the last. */
static void lose_patience(void)
{
	poll();
	poll_later();
}

/* It is told if its trigger was skipped, by this node or by its successor; and the
 * queue goes on. */
static void check_late(void)
{
	for (uint64_t i = 1; i <= 3; i++) {
		bsn_poll(node, LATER * i);
		take_events();
	}
	check_counts(1 + weak_died(1));
	CHECK(!(refused >> 1 & 1) || !seen[1]);
	CHECK_EQ(attachment->context->triggers_lost, refused >> 1 & 1);
	CHECK_EQ(bs_trigger(trace_id(2), "trigger", "because", &lateral, 1), 0);
	bsn_poll(node, LATER * 3);
	take_events();
	CHECK_EQ(seen[2], 1);
	weak_met(weak_died(1) << 1 | (refused >> 1 & 1));
}

static void late_setup(void)
{
	one_setup();
	weak_expect(3);
}

/* Killed or not, and told or not. */
static void late_death_setup(void)
{
	one_setup();
	weak_expect(0xf);
}

/* --------------------------------------------------------- node's death --- */

static uint32_t seen_before; /* it was killed */

/* What the node took, and was killed before it was done with, its successor
 * takes again. */
static void succeed(void)
{
	weak_join(1);
	if (!weak_died(1))
		return;
	seen_before = seen[1] + seen[2];
	process_succeed();
}

/* It is killed when it has taken none out, one and both. */
static void node_death_setup(void)
{
	one_setup();
	weak_expect(7);
}

static void check_successor(void)
{
	poll();
	check_counts(1 + weak_died(1));
	if (weak_died(1))
		weak_met(seen_before);
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
		     {.name = "node", .run = read_and_give_back}},
	 .check = check_full},
	{.name = "thread killed",
	 .setup = thread_death_setup,
	 .parties = {{.name = "one", .run = fire_one, .mortal = true},
		     {.name = "another", .run = fire_two},
		     {.name = "node", .run = pass_over}},
	 .check = check_other,
	 .most = 1000},
	{.name = "thread held up",
	 .setup = late_setup,
	 .parties = {{.name = "client", .run = fire_one},
		     {.name = "node", .run = lose_patience}},
	 .check = check_late},
	{.name = "thread held up, node killed",
	 .setup = late_death_setup,
	 .parties = {{.name = "client", .run = fire_one},
		     {.name = "node", .run = lose_patience, .mortal = true},
		     {.name = "successor", .run = succeed}},
	 .check = check_late,
	 .most = 2000},
	{.name = "node killed",
	 .setup = node_death_setup,
	 .parties = {{.name = "client", .run = fire_both},
		     {.name = "node", .run = poll_twice, .mortal = true},
		     {.name = "successor", .run = succeed}},
	 .check = check_successor,
	 .most = 3000},
};

SCENARIO_MAIN(scenarios)
