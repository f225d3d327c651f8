/* SPDX-License-Identifier: Apache-2.0 */
/* What a snapshot finds, and the set by which it knows what it has already. */
/* For what is static there. */
#include "node/recent.c" /* NOLINT(bugprone-suspicious-include) */

#include "wanted.h"

enum {
	ROOM = 1 << 15,
	TRACES = 10000
};

static uint32_t longest_row(const struct set *set)
{
	uint32_t longest = 0, row = 0;

	for (uint32_t i = 0; i < set->room; i++) {
		row = set->places[i] ? row + 1 : 0;
		if (row > longest)
			longest = row;
	}
	return longest;
}

static bool is_in(const struct set *set, uint64_t priority)
{
	return set->places[place_of(set, priority)] == priority;
}

/* The highest, of which all have the same lower half. */
static uint64_t chosen(uint64_t i)
{
	return UINT64_MAX - (i << 32);
}

static void priorities_that_are_chosen_have_places_of_their_own(void)
{
	struct set set = {.room = ROOM, .secret = 0x1234567890abcdefull};

	set.places = calloc(set.room, sizeof(*set.places));
	CHECK(set.places);
	for (uint64_t i = 0; i < TRACES; i++)
		set.places[place_of(&set, chosen(i))] = chosen(i);
	CHECK(longest_row(&set) < 200);
	for (uint64_t i = 0; i < TRACES; i += 2)
		set_remove(&set, chosen(i));
	for (uint64_t i = 0; i < TRACES; i++)
		CHECK_EQ(is_in(&set, chosen(i)), i % 2);
	free(set.places);
}

/* Of the last seconds, of one service or of all, the highest priority first. */
static void finds_what_is_recent(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bs_trace_id ids[100], some[10];
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	uint64_t found;
	struct bsn *n = node_with_writer(&config, &w, &t);
	uint32_t number = (uint32_t)w.number;
	uint32_t clients[] = {number + 9, number, number + 1};
	uint32_t others[] = {number + 9, number + 1};

	for (uint32_t i = 0; i < 100; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START));
	CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	for (uint32_t i = 100; i < 130; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START + 10 * SECOND));
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 20 * SECOND, "", ids, 100,
			    &found),
		 100);
	/* Estimated: there are more than were asked for. */
	CHECK(found > 110 && found < 150);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "tester", ids,
			    100, &found),
		 30);
	CHECK_EQ(found, 30);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "", some, 10,
			    &found),
		 10);
	CHECK(found > 15 && found < 60);
	CHECK(!memcmp(some, ids, sizeof(some)));
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "other", ids,
			    100, &found),
		 0);
	CHECK_EQ(bsn_recent_of(n, START + 10 * SECOND, 5 * SECOND, clients, 3,
			       ids, 100, &found),
		 30);
	CHECK_EQ(found, 30);
	CHECK_EQ(bsn_recent_of(n, START + 10 * SECOND, 5 * SECOND, others, 2,
			       ids, 100, &found),
		 0);
	CHECK_EQ(bsn_recent_of(n, START + 10 * SECOND, 5 * SECOND, others, 0,
			       ids, 100, &found),
		 0);
	collect(n, trace_id(110), START + 10 * SECOND, &s);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "", ids, 100,
			    &found),
		 29);
	/* Nor what was reported, whatever is written of it afterwards. */
	CHECK_EQ(bsn_slice_release(n, trace_id(110), false,
				   START + 90 * SECOND),
		 0);
	CHECK(w_trace(&t, trace_id(110), 100, START + 91 * SECOND));
	CHECK_EQ(bsn_recent(n, START + 91 * SECOND, 85 * SECOND, "", ids, 100,
			    &found),
		 29);
	CHECK_EQ(bsn_recent(n, START, SECOND, "", ids, 0, &found), -EINVAL);
	free_with_writer(n, &w);
}

/* A segment in which little happens lasts: its first runs may be old. */
static void knows_old_runs_of_a_segment_in_use(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bs_trace_id ids[100];
	uint64_t found, now = START + 60 * SECOND;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t i = 0; i < 40; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START));
	write_run(&t, HANDLE, 0, 0, START);
	w_list(&w, HANDLE, true);
	for (uint32_t i = 40; i < 50; i++)
		CHECK(w_trace(&t, trace_id(i), 100, now));
	CHECK_EQ(bsn_recent(n, now, 5 * SECOND, "", ids, 100, &found), 11);
	w_list(&w, HANDLE, false);
	CHECK_EQ(bsn_recent(n, now, 5 * SECOND, "", ids, 100, &found), 10);
	CHECK_EQ(bsn_recent(n, now, 90 * SECOND, "", ids, 100, &found), 50);
	free_with_writer(n, &w);
}

/* What is kept is as old as the segment that it was written in. */
static void what_is_kept_is_not_recent(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bs_trace_id ids[1000];
	uint64_t found, now = START;
	struct bsn_metrics m;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);
	uint32_t client = (uint32_t)w.number;

	write_run(&t, HANDLE, 0, 0, now);
	w_show(&t, HANDLE);
	for (uint64_t i = 0; i < 200; i++) {
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now += SECOND);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.second_chances, 1);
	for (int age_s = 50; age_s <= 250; age_s += 200) {
		int got = bsn_recent(n, now, (uint64_t)age_s * SECOND, "tester",
				     ids, 1000, &found);
		bool there = false;

		CHECK(got > 25);
		for (int i = 0; i < got; i++)
			there |= ids[i].lo == trace_id(WANTED).lo;
		CHECK_EQ(there, age_s == 250);
		CHECK_EQ(bsn_recent_of(n, now, (uint64_t)age_s * SECOND,
				       &client, 1, ids, 1000, &found),
			 got);
	}
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(finds_what_is_recent);
	RUN(knows_old_runs_of_a_segment_in_use);
	RUN(what_is_kept_is_not_recent);
	RUN(priorities_that_are_chosen_have_places_of_their_own);
	return 0;
}
