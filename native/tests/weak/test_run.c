/* SPDX-License-Identifier: Apache-2.0 */
/* Runs, directories and slices: what the node copies of a trace while it is
 * written is whole records, with the right bytes; and what was there before the
 * trace was collected is there. */
#include <string.h>

#include "check.h"
#include "share.h"

enum outcome {
	NOTHING, /* of the trace was there yet */
	A_PART,
	ALL,
};

static const char payload[] = "0123456789abcdefghijklmnopqrstu";
static uint8_t slice[1 << 16];

/* ---------------------------------------------------------------- client --- */

static void record(uint16_t type)
{
	CHECK_EQ(bs_record_at(type, payload, sizeof(payload), START), 0);
}

static void write_trace(void)
{
	CHECK_EQ(bs_begin(trace_id(1)), 0);
	record(1);
	record(2);
	CHECK_EQ(bs_end(), 0);
}

static void write_another(void)
{
	CHECK_EQ(bs_begin(trace_id(2)), 0);
	record(1);
	CHECK_EQ(bs_end(), 0);
}

static void write_both(void)
{
	write_trace();
	write_another();
}

/* ------------------------------------------------------------------ node --- */

/* Records of a piece, which are whole; each type is one more than the last. */
static uint32_t check_records(const uint8_t *records, uint32_t bytes,
			      uint32_t next)
{
	for (uint32_t at = 0; at < bytes;) {
		const struct bs_record_header *h = (const void *)(records + at);

		CHECK(bytes - at >= sizeof(*h));
		CHECK_EQ(h->payload_bytes, sizeof(payload));
		CHECK_EQ(h->type, next++);
		CHECK_EQ(h->ticks, START);
		CHECK(!memcmp(h + 1, payload, sizeof(payload)));
		at += (uint32_t)(sizeof(*h) + sizeof(payload));
	}
	return next;
}

/* What the node holds of trace 1. */
static uint32_t read_slice(void)
{
	int64_t bytes =
		bsn_slice_read(node, trace_id(1), 0, slice, sizeof(slice));
	uint32_t next = 1;

	for (int64_t at = 0; at < bytes;) {
		const struct bs_piece_header *h = (const void *)(slice + at);

		at += (int64_t)sizeof(*h);
		if (h->kind == BS_PIECE_RUN)
			next = check_records(slice + at, h->bytes, next);
		at += h->bytes;
	}
	return next - 1;
}

static struct bsn_slice s;
static uint32_t before;

static void collect(void)
{
	struct bsn_metrics m;

	CHECK_EQ(bsn_collect(node, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	bsn_poll(node, START);
	before = read_slice();
	bsn_poll(node, START);
	CHECK(read_slice() >= before);
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
}

static void check_final(void)
{
	struct bsn_metrics m;

	weak_met(before == 2 ? ALL : before ? A_PART : NOTHING);
	bsn_poll(node, START);
	CHECK_EQ(read_slice(), 2);
	CHECK_EQ(bsn_slice_info(node, trace_id(1), &s), 0);
	CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_HELD, 0);
	CHECK_EQ(s.open_handles, 0);
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
}

static void setup(void)
{
	share_process(8, 1);
	weak_expect(1u << NOTHING | 1u << A_PART | 1u << ALL);
}

/* The first segment is taken already. */
static void warm_setup(void)
{
	setup();
	weak_as(0, write_another);
	bsn_poll(node, START);
}

/* The node copied the first record before. */
static void open_trace(void)
{
	CHECK_EQ(bs_begin(trace_id(1)), 0);
	record(1);
}

static void open_setup(void)
{
	share_process(8, 1);
	weak_as(0, open_trace);
	bsn_poll(node, START);
	CHECK_EQ(bsn_collect(node, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	bsn_poll(node, START);
	CHECK_EQ(read_slice(), 1);
	weak_expect(1u << A_PART | 1u << ALL);
}

static void go_on(void)
{
	record(2);
	CHECK_EQ(bs_end(), 0);
	write_another();
}

static void watch(void)
{
	bsn_poll(node, START);
	before = read_slice();
	bsn_poll(node, START);
	CHECK(read_slice() >= before);
}

/* ----------------------------------------------------------------- death --- */

static void write_mortally(void)
{
	write_both();
}

/* The process was killed anywhere: what is there is whole, and final. */
static void bury(void)
{
	struct bsn_metrics m;

	weak_join(0);
	CHECK_EQ(bsn_client_exited(node, client_number, START), 0);
	bsn_poll(node, START);
	CHECK_EQ(bsn_collect(node, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	bsn_poll(node, START);
	before = read_slice();
	weak_met(before == 2 ? ALL : before ? A_PART : NOTHING);
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
}

static const struct weak_scenario scenarios[] = {
	{.name = "collected while it begins",
	 .setup = setup,
	 .parties = {{.name = "client", .run = write_trace},
		     {.name = "node", .run = collect}},
	 .check = check_final},
	{.name = "collected while it is written",
	 .setup = warm_setup,
	 .parties = {{.name = "client", .run = write_both},
		     {.name = "node", .run = collect}},
	 .check = check_final},
	{.name = "watched while it is written",
	 .setup = open_setup,
	 .parties = {{.name = "client", .run = go_on},
		     {.name = "node", .run = watch}},
	 .check = check_final},
	{.name = "killed while it is written",
	 .setup = setup,
	 .parties = {{.name = "client", .run = write_mortally, .mortal = true},
		     {.name = "node", .run = bury}}},
};

SCENARIO_MAIN(scenarios)
