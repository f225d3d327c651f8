/* SPDX-License-Identifier: Apache-2.0 */
/* What the ticks of records mean, by the pairs that the node wrote. */
#include <errno.h>
#include <stdlib.h>

#include "abi/slice.h"
#include "internal.h"

#define NS_PER_S 1000000000

static const struct bs_clock_pair *pair_at(const struct bsd_slice *s,
					   uint32_t i)
{
	return array_at(&s->pairs.array,
			*(const uint32_t *)array_at(&s->by_ticks, i));
}

static int compare(const void *one, const void *other, void *slice)
{
	const struct array *pairs = &((struct bsd_slice *)slice)->pairs.array;
	const struct bs_clock_pair *a = array_at(pairs, *(const uint32_t *)one);
	const struct bs_clock_pair *b =
		array_at(pairs, *(const uint32_t *)other);

	return (a->ticks > b->ticks) - (a->ticks < b->ticks);
}

static int sort_pairs(struct bsd_slice *s)
{
	while (s->by_ticks.count < s->pairs.array.count) {
		uint32_t number = s->by_ticks.count;
		uint32_t *added = array_add(&s->by_ticks);

		if (!added)
			return -ENOMEM;
		*added = number;
	}
	qsort_r(s->by_ticks.entries, s->by_ticks.count, sizeof(uint32_t),
		compare, s);
	return 0;
}

/* The first that is not before these ticks; as many as there are, if all are. */
static uint32_t first_from(const struct bsd_slice *s, uint64_t ticks)
{
	uint32_t low = 0, high = s->by_ticks.count;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (pair_at(s, middle)->ticks < ticks)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static const struct bs_clock_pair *nearest(const struct bsd_slice *s,
					   uint64_t ticks)
{
	uint32_t after = first_from(s, ticks);
	const struct bs_clock_pair *a, *b;

	if (after == 0)
		return pair_at(s, 0);
	a = pair_at(s, after - 1);
	if (after == s->by_ticks.count)
		return a;
	b = pair_at(s, after);
	/* As far from both: the earlier one. */
	return b->ticks - ticks < ticks - a->ticks ? b : a;
}

int bsd_slice_time(struct bsd_slice *slice, uint64_t ticks, uint64_t *time_ns)
{
	const struct bs_clock_pair *pair;
	__int128 since, time;

	if (!ticks || !slice->pairs.array.count)
		return -ENODATA;
	if (slice->by_ticks.count != slice->pairs.array.count) {
		int error = sort_pairs(slice);

		if (error)
			return error;
	}
	pair = nearest(slice, ticks);
	since = ((__int128)ticks - pair->ticks) * NS_PER_S;
	time = since / pair->ticks_per_s;
	/* Downwards, also before the pair. */
	if (since < 0 && since % pair->ticks_per_s)
		time--;
	time += pair->realtime_ns;
	if (time < 0 || time > INT64_MAX)
		return -ENODATA;
	*time_ns = (uint64_t)time;
	return 0;
}
