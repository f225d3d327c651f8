/* SPDX-License-Identifier: Apache-2.0 */
/* Hand-over of segments: each that was granted is one thread's, or goes back to
 * the node; none is anybody's twice, and none is lost. */
#include <string.h>

#include "check.h"
#include "internal.h"
#include "share.h"

#define TAKES 2
#define THREADS 2
#define SEGMENTS 8 /* a stock of two */

/* Long enough that a quiet process needs no more than the least. */
#define LATER (START + 600 * NS_PER_S)

static uint32_t taken[THREADS * TAKES + 1], n_taken, taker[THREADS * TAKES];
static uint32_t none_left;
static bool node_died;

static void take(void)
{
	if (!bs_segment_take(&bs_thread, 0)) {
		none_left++;
		return;
	}
	taker[n_taken] = bs_thread.slot_number;
	taken[n_taken++] = (uint32_t)(((unsigned char *)bs_thread.segment -
				       attachment->arena) /
				      BS_SEGMENT_BYTES);
}

static void take_some(void)
{
	for (uint32_t i = 0; i < TAKES; i++)
		take();
}

static void poll(void)
{
	bsn_poll(node, START);
}

static void poll_later(void)
{
	bsn_poll(node, LATER);
}

/* It may have no more than one any more: the other is what threads may take. */
static void narrow(void)
{
	struct client *c = client_find(node, (uint32_t)client_number);

	c->n_segments = SEGMENTS / 2;
	c->settled_until_ns = 0;
	grants_take_back(node, c);
}

/* As the node's own books say. */
static void check_books(void)
{
	struct client *c;
	struct bsn_metrics m;
	uint32_t in_stock;

	bsn_poll(node, LATER);
	c = client_find(node, (uint32_t)client_number);
	CHECK_EQ(c->unclaimed.count, 0);
	for (uint32_t i = 0; i < n_taken; i++) {
		struct frame *f = frame_at(node, c->segments[taken[i]].frame);
		const struct grant_record *r = record_of(node, f);
		const struct bs_segment_header *h = (const void *)f->bytes;

		for (uint32_t k = 0; k < i; k++)
			CHECK(taken[i] != taken[k]);
		CHECK_EQ(h->slot, taker[i]);
		CHECK_EQ(bs_life_generation(h->life), r->generation);
		CHECK(r->state == FRAME_ACTIVE || r->state == FRAME_SEALED);
	}
	/* Who waits in the ring is what the node has in stock. */
	in_stock = attachment->grants->head - attachment->grants->tail;
	CHECK_EQ(in_stock, grants_stock(c));
	for (uint32_t i = 0; i < in_stock; i++) {
		const struct bs_grant *g =
			&attachment->grants
				 ->entries[(attachment->grants->tail + i) %
					   BS_GRANT_RING_ENTRIES];
		uint32_t segment = g->segment & ~BS_GRANT_FRESH;
		const struct grant_record *r = record_of(
			node, frame_at(node, c->segments[segment].frame));

		CHECK_EQ(r->state, FRAME_STOCK);
		CHECK_EQ(r->generation, g->generation);
		for (uint32_t k = 0; k < n_taken; k++)
			CHECK(segment != taken[k]);
	}
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.stock_bytes, in_stock * (uint64_t)BS_SEGMENT_BYTES);
	CHECK_EQ(m.active_bytes + m.sealed_bytes,
		 (n_taken + c->unclaimed.count) * (uint64_t)BS_SEGMENT_BYTES);
}

enum outcome {
	ENOUGH,
	TOO_FEW,
	/* When the node was killed, which takes two back. */
	BEFORE_ALL,
	IN_THE_MIDDLE,
	AFTER_ALL,
};

static void check(void)
{
	check_books();
	weak_met(none_left ? TOO_FEW : ENOUGH);
}

/* A stock of two, which the node fills up meanwhile. */
static void short_setup(void)
{
	share_process(SEGMENTS, THREADS);
	weak_expect(1u << ENOUGH | 1u << TOO_FEW);
}

/* One of ten, of which it takes two back. */
static void long_setup(void)
{
	share_process(40, THREADS);
	weak_expect(1u << ENOUGH);
}

/* ---------------------------------------------------------- never empty --- */

static void must_take(void)
{
	take();
	CHECK(!none_left);
}

/* One is left, and the node grants another one. */
static void nearly_empty_setup(void)
{
	share_process(SEGMENTS, THREADS);
	weak_as(0, take);
	weak_expect(1u << ENOUGH);
}

static void take_after_poll(void)
{
	weak_join(2);
	must_take();
}

/* ----------------------------------------------------------------- death --- */

static uint32_t stock_before;

static void succeed(void)
{
	uint32_t taken_back;

	weak_join(1);
	node_died = weak_died(1);
	if (!node_died)
		return;
	taken_back = stock_before - attachment->grants->head;
	weak_met(taken_back == 0   ? BEFORE_ALL
		 : taken_back == 1 ? IN_THE_MIDDLE
				   : AFTER_ALL);
	process_succeed();
	bsn_poll(node, LATER);
}

static void death_setup(void)
{
	share_process(40, 1);
	weak_expect(1u << ENOUGH);
}

static void node_death_setup(void)
{
	death_setup();
	stock_before = attachment->grants->head;
	weak_expect(1u << ENOUGH | 1u << BEFORE_ALL | 1u << IN_THE_MIDDLE |
		    1u << AFTER_ALL);
}

static void bury(void)
{
	weak_join(0);
	CHECK_EQ(bsn_client_exited(node, client_number, START), 0);
}

/* What a process had that was killed is all the node's again, but for what it
 * may have written to. */
static void check_buried(void)
{
	struct bsn_metrics m;

	bsn_poll(node, START);
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.stock_bytes, 0);
	CHECK_EQ(m.active_bytes, 0);
	CHECK(m.sealed_bytes >= n_taken * (uint64_t)BS_SEGMENT_BYTES);
	CHECK(m.sealed_bytes <= TAKES * (uint64_t)BS_SEGMENT_BYTES);
	CHECK_EQ(m.pool_used_bytes, m.sealed_bytes);
	weak_met(ENOUGH);
}

/* ------------------------------------------------------------- other lives --- */

static const char payload[BS_PAYLOAD_MAX];
static uint64_t written;
static uint64_t written_to[SEGMENTS]; /* the latest trace of each segment */

/* A segment's worth of traces. */
static void fill_segment(void)
{
	struct bs_segment_header *first = bs_thread.segment;

	while (bs_thread.segment == first) {
		CHECK_EQ(bs_begin(trace_id(++written)), 0);
		CHECK_EQ(bs_record_at(1, payload, sizeof(payload), START), 0);
		CHECK_EQ(bs_end(), 0);
	}
	written_to[((unsigned char *)bs_thread.segment - attachment->arena) /
		   BS_SEGMENT_BYTES] = written;
}

static bool all_were_used(void)
{
	const struct client *c = client_find(node, (uint32_t)client_number);
	const struct bs_grant_ring *ring = attachment->grants;

	for (uint32_t i = ring->tail; i != ring->head; i++) {
		uint32_t segment =
			ring->entries[i % BS_GRANT_RING_ENTRIES].segment &
			~BS_GRANT_FRESH;

		if (!bs_segment_at(attachment, segment)->life)
			return false;
	}
	return c->segments_fresh == c->n_segments;
}

/* The trace of the earlier life of the segment that is taken next. */
static struct bs_trace_id old_id(void)
{
	const struct bs_grant_ring *ring = attachment->grants;
	uint32_t segment =
		ring->entries[ring->tail % BS_GRANT_RING_ENTRIES].segment &
		~BS_GRANT_FRESH;

	return trace_id(written_to[segment]);
}

static struct bs_trace_id old;

/* The thread's segment has room for nothing but the last of its runs, and the next
 * one had an earlier life. */
static void other_lives_setup(void)
{
	share_process(SEGMENTS, THREADS);
	do {
		weak_as(1, fill_segment);
		bsn_poll(node, START);
	} while (!all_were_used());
	old = old_id();
	weak_expect(1u << ENOUGH);
}

static void nothing(void)
{
}

static void begin_new_life(void)
{
	bs_thread.floor = bs_thread.cursor; /* no room is left */
	CHECK_EQ(bs_begin(trace_id(written + 1)), 0);
	CHECK_EQ(bs_record_at(1, payload, 16, START), 0);
	CHECK_EQ(bs_end(), 0);
}

static void look_for(struct bs_trace_id id)
{
	struct bsn_slice s;

	CHECK_EQ(bsn_collect(node, id, id, "test", START, &s), 0);
}

static void look_for_new(void)
{
	look_for(trace_id(written + 1));
	bsn_poll(node, START);
}

static void look_for_old(void)
{
	look_for(old);
	bsn_poll(node, START);
}

static void check_life(void)
{
	struct bsn_metrics m;
	struct bsn_slice s;

	look_for_new();
	look_for_old();
	CHECK_EQ(bsn_slice_info(node, trace_id(written + 1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(bsn_slice_info(node, old, &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT);
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
	weak_met(ENOUGH);
}

static const struct weak_scenario scenarios[] = {
	{.name = "short stock",
	 .setup = short_setup,
	 .parties = {{.name = "one", .run = take_some},
		     {.name = "another", .run = take_some},
		     {.name = "node", .run = poll}},
	 .check = check,
	 .most = 1000},
	{.name = "stock that shrinks",
	 .setup = long_setup,
	 .parties = {{.name = "one", .run = take_some},
		     {.name = "another", .run = take_some},
		     {.name = "node", .run = poll_later}},
	 .check = check,
	 .most = 1000},
	{.name = "stock of one",
	 .setup = short_setup,
	 .parties = {{.name = "one", .run = take},
		     {.name = "another", .run = take},
		     {.name = "node", .run = narrow}},
	 .check = check,
	 .most = 8000},
	{.name = "never empty",
	 .setup = nearly_empty_setup,
	 .parties = {{.name = "one", .run = take_after_poll},
		     {.name = "another", .run = must_take},
		     {.name = "node", .run = poll}},
	 .check = check},
	{.name = "node killed",
	 .setup = node_death_setup,
	 .parties = {{.name = "client", .run = take_some},
		     {.name = "node", .run = poll_later, .mortal = true},
		     {.name = "successor", .run = succeed}},
	 .check = check,
	 .most = 1000},
	{.name = "client killed",
	 .setup = death_setup,
	 .parties = {{.name = "client", .run = take_some, .mortal = true},
		     {.name = "node", .run = bury}},
	 .check = check_buried},
	{.name = "another life",
	 .setup = other_lives_setup,
	 .parties = {{.name = "idle", .run = nothing},
		     {.name = "client", .run = begin_new_life},
		     {.name = "node", .run = look_for_new}},
	 .check = check_life},
	{.name = "an earlier life",
	 .setup = other_lives_setup,
	 .parties = {{.name = "idle", .run = nothing},
		     {.name = "client", .run = begin_new_life},
		     {.name = "node", .run = look_for_old}},
	 .check = check_life},
};

SCENARIO_MAIN(scenarios)
