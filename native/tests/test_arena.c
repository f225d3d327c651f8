/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What stands for a trace id in a segment: that nothing of the id is lost, and
 * that traces spread over tables as they should, whatever ids an application
 * draws.
 */
#include <stdbool.h>
#include <string.h>

#include "abi.h"
#include "check.h"
#include "node/random.h"

#define COUNT (1u << 16)
#define PLACES (1u << 16)

/* Of so many at random, in as many places, 1/e of the places get none. */
#define SPREAD (PLACES - PLACES / 2.718281828)

static const uint64_t any[] = {
	0, 1, 0xffffffff, 1ull << 63, 0x0af7651916cd43dd, UINT64_MAX,
};
#define ANY (sizeof(any) / sizeof(*any))

static struct bs_trace_id id_of(uint64_t entry, uint64_t hi, uint32_t word)
{
	const uint32_t halves[2] = {(uint32_t)hi, (uint32_t)(hi >> 32)};

	return bs_run_trace_id(entry, halves, word);
}

static void check_id(uint64_t hi, uint64_t lo, uint32_t offset, uint32_t flags,
		     uint32_t committed)
{
	uint64_t mix = bs_trace_mix(hi, lo);
	uint64_t entry = bs_entry(bs_fingerprint(hi, lo), offset, flags);
	uint32_t word = bs_word(mix, committed);
	struct bs_trace_id id = id_of(entry, hi, word);

	CHECK_EQ(bs_trace_lo(hi, mix), lo);
	CHECK(id.hi == hi && id.lo == lo);
	CHECK_EQ(bs_entry_offset(entry), offset);
	CHECK_EQ(bs_entry_flags(entry), flags);
	CHECK_EQ(bs_word_committed(word), committed);
}

static void entry_and_header_make_the_id(void)
{
	for (uint32_t i = 0; i < ANY * ANY; i++) {
		check_id(any[i / ANY], any[i % ANY], 64, 0, 0);
		check_id(any[i / ANY], any[i % ANY], BS_SEGMENT_BYTES - 4, 15,
			 BS_SEGMENT_BYTES - 4);
	}
	for (uint32_t i = 0; i < 1000000; i++)
		check_id(random_u64(), random_u64(),
			 below(BS_SEGMENT_BYTES / 4) * 4, below(16),
			 below(BS_SEGMENT_BYTES / 4) * 4);
}

/* Each bit of entry and header that is not offset, flag or length is a bit of the
 * id: with one that differs it is another's. */
static void each_bit_tells_ids_apart(void)
{
	uint64_t hi = random_u64(), lo = random_u64();
	uint64_t entry = bs_entry(bs_fingerprint(hi, lo), 64, 0);
	uint32_t word = bs_word(bs_trace_mix(hi, lo), 128);

	for (uint32_t bit = 0; bit < 64; bit++) {
		CHECK(id_of(entry, hi ^ 1ull << bit, word).hi != hi);
		if (bit >= BS_ENTRY_FINGERPRINT_SHIFT)
			CHECK(id_of(entry ^ 1ull << bit, hi, word).lo != lo);
		if (bit < BS_WORD_MIX_BITS)
			CHECK(id_of(entry, hi, word ^ 1u << bit).lo != lo);
	}
}

/* ---------------------------------------------------------------- spread --- */

enum half {
	HI,
	LO,
	BOTH
};

static struct bs_trace_id counted(enum half half, uint32_t shift, uint64_t i,
				  uint64_t other)
{
	uint64_t count = i << shift;

	return (struct bs_trace_id){half == LO ? other : count,
				    half == HI ? other : count};
}

static bool put(uint8_t *set, uint32_t place)
{
	bool is_new = !(set[place / 8] >> (place % 8) & 1);

	set[place / 8] |= (uint8_t)(1u << (place % 8));
	return is_new;
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* The low bits choose places in tables and filters (pass.c, gone.c). */
static void check_spread(enum half half, uint32_t shift, uint64_t other)
{
	static uint64_t all[COUNT];
	static uint8_t set[PLACES / 8];
	uint32_t places = 0, same = 0;

	memset(set, 0, sizeof(set));
	for (uint32_t i = 0; i < COUNT; i++) {
		struct bs_trace_id id = counted(half, shift, i, other);

		all[i] = bs_fingerprint(id.hi, id.lo);
		places += put(set, (uint32_t)(all[i] % PLACES));
	}
	CHECK(places > SPREAD * 0.95);
	qsort(all, COUNT, sizeof(*all), by_value);
	for (uint32_t i = 1; i < COUNT; i++)
		same += all[i] == all[i - 1];
	/* At random it is one pair in 30,000 such sets. */
	CHECK(same <= 1);
}

static void counted_ids_spread_as_random_ones(void)
{
	for (uint32_t shift = 0; shift <= 48; shift++) {
		for (enum half half = HI; half <= BOTH; half++) {
			check_spread(half, shift, 0);
			check_spread(half, shift, any[ANY - 2]);
			check_spread(half, shift, random_u64());
		}
	}
}

int main(int argc, char **argv)
{
	amount_of(argc, argv, 1);
	RUN(entry_and_header_make_the_id);
	RUN(each_bit_tells_ids_apart);
	RUN(counted_ids_spread_as_random_ones);
	return 0;
}
