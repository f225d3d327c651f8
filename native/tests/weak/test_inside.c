/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handshakes inside a process: the thread that meets pages does not sleep while
 * there is work (prefault.c); an arena is not unmapped under a thread that takes
 * a segment of it (retire.c), nor a queue under one that fires (replace.c).
 */
#include <string.h>

/* For what is static there. */
#include "prefault.c" /* NOLINT(bugprone-suspicious-include) */

#include "check.h"
#include "share.h"

/* -------------------------------------------------------------- prefault --- */

#define TAKES 2

static void take_some(void)
{
	for (uint32_t i = 0; i < TAKES; i++)
		CHECK(bs_segment_take(&bs_thread, 0));
}

static void take_one(void)
{
	CHECK(bs_segment_take(&bs_thread, 0));
}

static void meet_pages(void)
{
	prefault_thread(NULL);
}

static void check_met(void)
{
	uint32_t last = attachment->grants->tail - 1;

	CHECK(!is_wanted(attachment, last + SEGMENTS_AHEAD / 2));
}

static void prefault_setup(void)
{
	share_process(16, 1);
	weak_share("rung", &rung, sizeof(rung));
	weak_share("sleeping", &sleeping, sizeof(sleeping));
	weak_share("worked_on", &worked_on, sizeof(void *));
	weak_share("is_stopped", &is_stopped, sizeof(is_stopped));
}

/* ---------------------------------------------------------------- retire --- */

static bool took;

static void take_and_write(void)
{
	took = bs_segment_take(&bs_thread, 0);
	if (took)
		memset(bs_thread.cursor, 1, BS_RECORD_ALIGN);
}

/* As the attach thread, when the daemon has gone. */
static void retire(void)
{
	pthread_mutex_lock(&bs_process.lock);
	bs_attachment_publish(&bs_nowhere);
	bs_attachment_retire_old();
	pthread_mutex_unlock(&bs_process.lock);
}

static void check_retired(void)
{
	CHECK(attachment->is_torn);
	weak_met(took);
}

static void retire_setup(void)
{
	share_process(8, 1);
	weak_share("bs_nowhere", &bs_nowhere, sizeof(bs_nowhere));
	weak_expect(3);
}

/* It has a segment already. */
static void retire_next_setup(void)
{
	retire_setup();
	weak_as(0, take_one);
}

/* --------------------------------------------------------------- replace --- */

static int new_context;

static void fire(void)
{
	CHECK_EQ(bs_trigger(trace_id(1), "ring", NULL, NULL, 0), 0);
}

/* As the attach thread, when the daemon sends another context. */
static void replace(void)
{
	struct bs_context_segment *old;

	pthread_mutex_lock(&bs_process.lock);
	CHECK(!bs_context_replace(attachment, new_context, &old));
	bs_queue_unmap(old);
	pthread_mutex_unlock(&bs_process.lock);
}

static void check_replaced(void)
{
	weak_met(attachment->queue->trigger_head);
}

static void replace_setup(void)
{
	const char *reason;
	struct bs_context_segment *next;

	share_process(8, 1);
	new_context = bsn_client_context(node, client_number, -1);
	CHECK(new_context >= 0);
	next = bs_context_map(new_context, &reason);
	CHECK(next);
	weak_share("new context", next, sizeof(*next));
	weak_expect(3);
}

static const struct weak_scenario scenarios[] = {
	{.name = "pages",
	 .setup = prefault_setup,
	 .parties = {{.name = "client", .run = take_some},
		     {.name = "pages", .run = meet_pages}},
	 .check = check_met,
	 .may_sleep = true,
	 .most = 1000},
	{.name = "retired while it takes its first segment",
	 .setup = retire_setup,
	 .parties = {{.name = "client", .run = take_and_write},
		     {.name = "attach", .run = retire}},
	 .check = check_retired},
	{.name = "retired while it takes its next segment",
	 .setup = retire_next_setup,
	 .parties = {{.name = "client", .run = take_and_write},
		     {.name = "attach", .run = retire}},
	 .check = check_retired},
	{.name = "replaced while it fires",
	 .setup = replace_setup,
	 .parties = {{.name = "client", .run = fire},
		     {.name = "attach", .run = replace}},
	 .check = check_replaced},
};

SCENARIO_MAIN(scenarios)
