/* SPDX-License-Identifier: Apache-2.0 */
/* The set by which a snapshot knows what it has already. */
/* For what is static there. */
#include "node/recent.c" /* NOLINT(bugprone-suspicious-include) */

#include "check.h"

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

int main(void)
{
	RUN(priorities_that_are_chosen_have_places_of_their_own);
	return 0;
}
