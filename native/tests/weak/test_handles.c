/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A handle that threads share: each of its runs has a number of its own, also while
 * they move to another daemon, where the handle goes on as another one. That passes for
 * whole only if nothing was written or lost before.
 */
#include <errno.h>

#include "check.h"
#include "share.h"

enum outcome {
	ALL_HERE, /* of what was written, at the last daemon */
	SOME_HERE,
	NONE_HERE,
};

static const char payload[BS_PAYLOAD_MAX + 1];
static struct bs_trace trace;
static struct bsn *first_node; /* NULL: there is one alone */
static struct bs_attachment *first;
static uint32_t written, refused, first_handle;

/* ---------------------------------------------------------------- client --- */

static void open_handle(void)
{
	CHECK_EQ(bs_open(&trace, trace_id(1)), 0);
}

static void write_one(void)
{
	CHECK_EQ(bs_write(&trace, BS_RECORD_DATA, payload, 16), 0);
	written++;
}

static void write_too_much(void)
{
	CHECK_EQ(bs_write(&trace, BS_RECORD_DATA, payload, sizeof(payload)),
		 -EMSGSIZE);
	refused++;
}

/* Each takes a segment. */
static void write_another_trace(void)
{
	CHECK_EQ(bs_begin(trace_id(2)), 0);
	CHECK_EQ(bs_record_at(BS_RECORD_DATA, payload, 16, START), 0);
	CHECK_EQ(bs_end(), 0);
}

static void close_handle(void)
{
	CHECK_EQ(bs_close(&trace), 0);
}

/* As the attach thread. */
static void publish(void)
{
	process_publish();
}

/* ------------------------------------------------------------------ node --- */

/* How many records it has; and the slice's flags. */
static uint32_t records_at(struct bsn *n, uint32_t *flags)
{
	static uint8_t slice[4096];
	uint32_t bytes = 0;
	struct bsn_slice s;
	int64_t end;

	CHECK_EQ(bsn_collect(n, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	*flags = s.flags;
	end = bsn_slice_read(n, trace_id(1), 0, slice, sizeof(slice));
	for (int64_t at = 0; at < end;) {
		const struct bs_piece_header *h = (const void *)(slice + at);

		if (h->kind == BS_PIECE_RUN)
			bytes += h->bytes;
		at += (int64_t)sizeof(*h) + h->bytes;
	}
	CHECK_EQ(bytes % (sizeof(struct bs_record_header) + 16), 0);
	return bytes / (uint32_t)(sizeof(struct bs_record_header) + 16);
}

static void check(void)
{
	uint32_t here, before = 0, flags, ignored;
	bool is_lossy;

	/* Else one that looked at the old one could draw a number of the new one. */
	if (trace.attachment != first->epoch)
		CHECK(bs_trace_handle(trace.handle_seq) != first_handle);
	weak_as(0, close_handle);
	here = records_at(node, &flags);
	if (first_node)
		before = records_at(first_node, &ignored);
	CHECK_EQ(here + before, written);
	is_lossy = flags & BSN_SLICE_LOSSY;
	CHECK_EQ(flags & BSN_SLICE_EVICTED, 0);
	/* Who has no slot when it is refused something tells no name. */
	CHECK(!(flags & BSN_SLICE_MAYBE_LOSSY) || refused);
	if (here)
		CHECK_EQ(is_lossy, before || refused);
	weak_met(!here ? NONE_HERE : before ? SOME_HERE : ALL_HERE);
}

static void setup_of(uint32_t outcomes)
{
	share_process(8, 2);
	weak_share("trace", &trace, sizeof(trace));
	weak_as(0, open_handle);
	weak_as(0, write_another_trace);
	weak_as(1, write_another_trace);
	NAME(trace.handle_seq);
	NAME(trace.flags);
	NAME(trace.attachment);
	weak_expect(outcomes);
	first = attachment;
	first_handle = bs_trace_handle(trace.handle_seq);
}

static void setup(void)
{
	setup_of(1u << ALL_HERE);
}

static void other_daemon_setup(void)
{
	setup_of(1u << ALL_HERE | 1u << SOME_HERE | 1u << NONE_HERE);
	first_node = node;
	/* It stays to be looked at. */
	first->refs++;
	process_find_other_daemon();
	share_attachment();
}

static void refused_setup(void)
{
	other_daemon_setup();
	weak_expect(1u << ALL_HERE | 1u << NONE_HERE);
}

static const struct weak_scenario scenarios[] = {
	{.name = "written to by two",
	 .setup = setup,
	 .parties = {{.name = "one", .run = write_one},
		     {.name = "another", .run = write_one}},
	 .check = check},
	{.name = "refused while it is written to",
	 .setup = setup,
	 .parties = {{.name = "one", .run = write_too_much},
		     {.name = "another", .run = write_one}},
	 .check = check},
	{.name = "written to by two while they move",
	 .setup = other_daemon_setup,
	 .parties = {{.name = "one", .run = write_one},
		     {.name = "another", .run = write_one},
		     {.name = "attach", .run = publish}},
	 .check = check,
	 .most = 2000},
	{.name = "refused while another one moves",
	 .setup = refused_setup,
	 .parties = {{.name = "one", .run = write_too_much},
		     {.name = "another", .run = write_one},
		     {.name = "attach", .run = publish}},
	 .check = check,
	 .most = 2000},
};

SCENARIO_MAIN(scenarios)
