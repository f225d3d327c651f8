/* SPDX-License-Identifier: Apache-2.0 */
/* Losses: each run that found no segment is told of, once, by this node or by
 * its successor; and if not by name, then as one of nobody knows which trace. */
#include <string.h>

#include "check.h"
#include "share.h"

#define LOSSES 3

static const char payload[8];
static uint32_t wrote;

/* ---------------------------------------------------------------- client --- */

/* There is one segment, and no room is left in it. */
static void use_up(void)
{
	CHECK(bs_segment_take(&bs_thread, 0));
	bs_thread.floor = bs_thread.cursor;
}

static void lose(void)
{
	bs_begin(trace_id(++wrote));
	bs_record_at(1, payload, sizeof(payload), START);
	bs_end();
}

static void lose_some(void)
{
	for (uint32_t i = 0; i < LOSSES; i++)
		lose();
}

/* ------------------------------------------------------------------ node --- */

/* No segment is granted: there are none left in the arena. */
static void poll(void)
{
	bsn_poll(node, START);
}

static void poll_twice(void)
{
	poll();
	poll();
}

static uint32_t flags_of(struct bs_trace_id id)
{
	struct bsn_slice s;
	uint8_t buffer[1];

	bsn_peek(node, id, START, buffer, 0, &s);
	return s.flags;
}

/* All that it lost is known. */
static void check(void)
{
	struct bsn_metrics m;

	poll();
	for (uint32_t i = 1; i <= wrote; i++)
		CHECK(flags_of(trace_id(i)) & BSN_SLICE_LOSSY);
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.runs_lost, wrote);
}

static void collect(void)
{
	struct bsn_slice s;

	CHECK_EQ(bsn_collect(node, trace_id(2), trace_id(2), "test", START, &s),
		 0);
	poll();
}

/* What is told of a slice's trace is in it, once: that it lost, and that it ended. */
static void check_slice(void)
{
	static uint8_t slice[4096];
	uint32_t pieces = 0;
	struct bsn_slice s;
	int64_t bytes;

	check();
	CHECK_EQ(bsn_slice_info(node, trace_id(2), &s), 0);
	CHECK(s.flags & BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 0);
	bytes = bsn_slice_read(node, trace_id(2), 0, slice, sizeof(slice));
	for (int64_t at = 0; at < bytes;) {
		const struct bs_piece_header *h = (const void *)(slice + at);

		pieces += h->kind == BS_PIECE_LOSS;
		at += (int64_t)sizeof(*h) + h->bytes;
	}
	CHECK(pieces <= 2);
}

static void setup(void)
{
	share_process(1, 1);
	weak_as(0, use_up);
	poll();
}

/* ------------------------------------------------------------- full ring --- */

/* Each is told of twice. */
static void fill_ring(void)
{
	for (uint32_t i = 0; i < BS_LOSS_RING_ENTRIES / 2; i++)
		lose();
}

/* The node has read the ring, and is about to give its places back. */
static void full_setup(void)
{
	setup();
	weak_as(0, fill_ring);
	weak_expect(3);
}

/* By name, or not. */
static void check_full(void)
{
	uint32_t flags;

	poll();
	flags = flags_of(trace_id(wrote));
	CHECK(flags & (BSN_SLICE_LOSSY | BSN_SLICE_MAYBE_LOSSY));
	weak_met(!!(flags & BSN_SLICE_LOSSY));
	for (uint32_t i = 1; i < wrote; i++)
		CHECK(flags_of(trace_id(i)) & BSN_SLICE_LOSSY);
}

/* ----------------------------------------------------------------- death --- */

static bool lost;

static void lose_mortally(void)
{
	bs_begin(trace_id(++wrote));
	bs_record_at(1, payload, sizeof(payload), START);
	lost = true;
	bs_record_at(1, payload, sizeof(payload), START);
	bs_end();
}

/* The process was killed anywhere, also in the middle of a run: what it lost is
 * known. */
static void bury(void)
{
	weak_join(0);
	CHECK_EQ(bsn_client_exited(node, client_number, START), 0);
	poll();
	if (lost)
		CHECK(flags_of(trace_id(1)) & BSN_SLICE_LOSSY);
	weak_met(lost);
}

static void mortal_setup(void)
{
	setup();
	weak_expect(3);
}

static void succeed(void)
{
	weak_join(1);
	if (weak_died(1))
		process_succeed();
}

static void collect_setup(void)
{
	struct bsn_slice s;

	setup();
	CHECK_EQ(bsn_collect(node, trace_id(2), trace_id(2), "test", START, &s),
		 0);
	poll();
}

static const struct weak_scenario scenarios[] = {
	{.name = "lost while the node looks",
	 .setup = setup,
	 .parties = {{.name = "client", .run = lose_some},
		     {.name = "node", .run = poll_twice}},
	 .check = check,
	 .most = 3000},
	{.name = "lost while it is collected",
	 .setup = setup,
	 .parties = {{.name = "client", .run = lose_some},
		     {.name = "node", .run = collect}},
	 .check = check_slice,
	 .most = 3000},
	{.name = "full ring",
	 .setup = full_setup,
	 .parties = {{.name = "client", .run = lose},
		     {.name = "node", .run = poll}},
	 .check = check_full},
	{.name = "client killed",
	 .setup = mortal_setup,
	 .parties = {{.name = "client", .run = lose_mortally, .mortal = true},
		     {.name = "node", .run = bury}}},
	{.name = "node killed",
	 .setup = collect_setup,
	 .parties = {{.name = "client", .run = lose_some},
		     {.name = "node", .run = poll, .mortal = true},
		     {.name = "successor", .run = succeed}},
	 .check = check_slice,
	 .most = 3000},
};

SCENARIO_MAIN(scenarios)
