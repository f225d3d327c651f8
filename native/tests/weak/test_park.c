/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The segment of a thread that seems idle is taken from it while it writes again,
 * another thread goes on in it, and the node takes it (park.c): who appends to
 * it is always one alone, and nothing of what was written is missing.
 */
#include "check.h"
#include "internal.h"
#include "share.h"

static const char payload[] = "0123456789abcdefghijklmnopqrstu";

static uint32_t generation; /* of the first segment */

static void write_trace(uint64_t number)
{
	CHECK_EQ(bs_begin(trace_id(number)), 0);
	CHECK_EQ(bs_record_at(BS_RECORD_DATA, payload, sizeof(payload), START),
		 0);
	CHECK_EQ(bs_end(), 0);
}

static void write_first(void)
{
	write_trace(1);
}

static void write_second(void)
{
	write_trace(2);
}

static void write_third(void)
{
	write_trace(3);
}

/* As the attach thread at its tick. */
static void park(void)
{
	pthread_mutex_lock(&bs_process.lock);
	bs_park_idle();
	pthread_mutex_unlock(&bs_process.lock);
}

static void park_and_write(void)
{
	park();
	write_third();
}

/* Two ticks: what it wrote between them is seen by the second. */
static void park_twice_and_write(void)
{
	park();
	park_and_write();
}

/* The last two find it idle again. */
static void park_three_times(void)
{
	park();
	park();
	park();
}

static struct bs_segment_header *first_segment(void)
{
	return (struct bs_segment_header *)attachment->arena;
}

/* As the node when it needs the segment, and has seen that it is parked; here it
 * keeps what is there. */
static void take_back(void)
{
	struct client *c = client_find(node, (uint32_t)client_number);
	struct frame *f = frame_at(node, c->segments[0].frame);
	bool taken;

	bsn_poll(node, START);
	if (record_of(node, f)->state != FRAME_PARKED)
		return;
	taken = parked_take(node, f);
	frame_unpark(node, f);
	if (!taken)
		return;
	own_remove(node, &c->active, f);
	frame_seal(node, f);
}

static void poll(void)
{
	bsn_poll(node, START);
}

static uint32_t holders(void)
{
	uint32_t n = 0;

	for (const struct bs_member *m = bs_members; m; m = m->next)
		n += m->segment == first_segment();
	return n;
}

/* A bit for each state that the first segment can be in at the end, twice: whether
 * the second trace is in it. */
static void check_traces(uint64_t last)
{
	struct bs_segment_header *h = first_segment();
	struct bsn_metrics m;
	struct bsn_slice s;

	weak_met(bs_life_state(h->life) << 1 | (h->runs > 1));
	CHECK_EQ(holders(), bs_life_state(h->life) == BS_SEGMENT_HELD);
	CHECK_EQ(attachment->grants->losses, 0);
	for (uint64_t i = 1; i <= last; i++) {
		CHECK_EQ(bsn_collect(node, trace_id(i), trace_id(i), "test",
				     START, &s),
			 0);
		bsn_poll(node, START);
		CHECK_EQ(bsn_slice_info(node, trace_id(i), &s), 0);
		CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_HELD, 0);
		CHECK_EQ(s.open_handles, 0);
		CHECK(s.bytes > sizeof(payload));
	}
	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
}

static void collect_second(void)
{
	struct bsn_slice s;

	CHECK_EQ(bsn_collect(node, trace_id(2), trace_id(2), "test", START, &s),
		 0);
	poll();
}

static void check_watched(void)
{
	struct bsn_slice s;

	weak_met(bs_life_state(first_segment()->life) << 1 |
		 (first_segment()->runs > 1));
	poll();
	CHECK_EQ(bsn_slice_info(node, trace_id(2), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	CHECK(s.bytes > sizeof(payload));
}

static void check_two(void)
{
	check_traces(2);
}

static void check_three(void)
{
	check_traces(3);
}

#define MEETS(state, second) (1u << ((state) << 1 | (second)))

/* The first thread has a segment, and wrote nothing since the last tick. */
static void idle_setup(uint32_t threads)
{
	share_process(8, threads);
	NAME(first_segment()->life);
	NAME(first_segment()->runs);
	for (struct bs_member *m = bs_members; m; m = m->next) {
		NAME(m->stands_at);
		NAME(m->is_called);
	}
	bs_park_start();
	weak_as(0, write_first);
	generation = bs_life_generation(first_segment()->life);
	park();
	bsn_poll(node, START);
}

static void written_setup(void)
{
	idle_setup(1);
	/* It keeps the segment, or loses it and goes on in it; or takes the next one,
	 * not to wait. */
	weak_expect(MEETS(BS_SEGMENT_HELD, true) |
		    MEETS(BS_SEGMENT_PARKED, false));
}

static void shared_setup(void)
{
	idle_setup(2);
	weak_expect(MEETS(BS_SEGMENT_HELD, true));
}

static void after_setup(void)
{
	idle_setup(2);
	weak_expect(MEETS(BS_SEGMENT_HELD, true));
}

static void taken_setup(void)
{
	idle_setup(1);
	weak_expect(MEETS(BS_SEGMENT_HELD, true) |
		    MEETS(BS_SEGMENT_TAKEN_BACK, false));
}

static void watched_setup(void)
{
	idle_setup(1);
	collect_second();
	weak_expect(MEETS(BS_SEGMENT_HELD, true) |
		    MEETS(BS_SEGMENT_PARKED, true) |
		    MEETS(BS_SEGMENT_PARKED, false));
}

static const struct weak_scenario scenarios[] = {
	{.name = "parked while its thread writes again",
	 .setup = written_setup,
	 .parties = {{.name = "thread", .run = write_second},
		     {.name = "attach", .run = park}},
	 .check = check_two},
	{.name = "gone on in by another while its thread writes again",
	 .setup = shared_setup,
	 .parties = {{.name = "thread", .run = write_second},
		     {.name = "other", .run = park_and_write}},
	 .check = check_three,
	 .most = 2000},
	{.name = "gone on in by another after its thread wrote again",
	 .setup = after_setup,
	 .parties = {{.name = "thread", .run = write_second},
		     {.name = "other", .run = park_twice_and_write}},
	 .check = check_three,
	 .most = 2000},
	{.name = "taken back while its thread writes again",
	 .setup = taken_setup,
	 .parties = {{.name = "thread", .run = write_second},
		     {.name = "attach", .run = park},
		     {.name = "node", .run = take_back}},
	 .check = check_two},
	{.name = "watched while its thread goes on in it",
	 .setup = watched_setup,
	 .parties = {{.name = "thread", .run = write_second},
		     {.name = "attach", .run = park_three_times},
		     {.name = "node", .run = poll}},
	 .check = check_watched,
	 /* So that all are tried, some 4,200: what breaks first shows in the 3,270th. */
	 .most = 10000},
};

SCENARIO_MAIN(scenarios)
