/* SPDX-License-Identifier: Apache-2.0 */
/* The doorbell: the node never sleeps while a trigger waits, or a stock of which
 * enough is used (abi/channel.h). */
#include "check.h"
#include "share.h"

#define MORE_THAN_COME 16

static uint32_t triggers, taken;

static void take_events(void)
{
	struct bsn_event e[MORE_THAN_COME];
	int got = bsn_events(node, e, MORE_THAN_COME);

	for (int i = 0; i < got; i++)
		taken += e[i].kind == BSN_EVENT_TRIGGER;
	bsn_events_done(node);
}

/* As the daemon's worker does, without a time-out: until it has what came. If a
 * ring is lost, it sleeps for ever. */
static void wait_for_triggers(void)
{
	while (taken < triggers) {
		bsn_wait(node, -1);
		bsn_poll(node, START);
		take_events();
	}
}

static void fire(void)
{
	CHECK_EQ(bs_trigger(trace_id(1), "ring", NULL, NULL, 0), 0);
}

static void trigger_setup(void)
{
	share_process(8, 1);
	triggers = 1;
}

static void fire_twice(void)
{
	fire();
	fire();
}

static void twice_setup(void)
{
	trigger_setup();
	triggers = 2;
}

static void two_threads_setup(void)
{
	share_process(8, 2);
	triggers = 2;
}

/* A stock of two segments: the first one that is taken is more than an eighth. */
static void wait_for_stock(void)
{
	struct bsn_metrics m;

	do {
		bsn_wait(node, -1);
		bsn_poll(node, START);
		bsn_get_metrics(node, &m);
	} while (!m.active_bytes);
	CHECK_EQ(m.stock_bytes, 2 * BS_SEGMENT_BYTES);
}

static void use_stock(void)
{
	CHECK(bs_segment_take(&bs_thread, 0));
}

static void stock_setup(void)
{
	share_process(8, 1);
}

static const struct weak_scenario scenarios[] = {
	{.name = "trigger",
	 .setup = trigger_setup,
	 .parties = {{.name = "client", .run = fire},
		     {.name = "node", .run = wait_for_triggers}}},
	{.name = "stock",
	 .setup = stock_setup,
	 .parties = {{.name = "client", .run = use_stock},
		     {.name = "node", .run = wait_for_stock}}},
	{.name = "two triggers",
	 .setup = twice_setup,
	 .parties = {{.name = "client", .run = fire_twice},
		     {.name = "node", .run = wait_for_triggers}},
	 .most = 1000},
	{.name = "triggers of two threads",
	 .setup = two_threads_setup,
	 .parties = {{.name = "one", .run = fire},
		     {.name = "another", .run = fire},
		     {.name = "node", .run = wait_for_triggers}},
	 .most = 1000},
};

SCENARIO_MAIN(scenarios)
