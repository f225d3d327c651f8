/* SPDX-License-Identifier: Apache-2.0 */
/* Pairs of record ticks and the other two clocks, oldest first. */
#include <errno.h>
#include <string.h>

#include "internal.h"

/* Readings that pass each other on their way differ by far less. */
#define WENT_BACK_NS NS_PER_S

static uint64_t distance(uint64_t a, uint64_t b)
{
	return a > b ? a - b : b - a;
}

/* The pair nearest to a time, or NULL when there is none. */
const struct pair *clock_nearest(const struct clock *k, uint64_t ticks)
{
	uint32_t low = 0, high = k->n;

	if (!k->n)
		return NULL;
	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (k->pairs[middle].ticks < ticks)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == k->n)
		return &k->pairs[low - 1];
	if (low && distance(k->pairs[low - 1].ticks, ticks) <=
			   distance(k->pairs[low].ticks, ticks))
		low--;
	return &k->pairs[low];
}

/* CLOCK_MONOTONIC at a tick; 0: unknown. */
uint64_t clock_monotonic(const struct bsn *n, uint64_t ticks)
{
	const struct pair *p = clock_nearest(&n->clock, ticks);
	uint64_t per_s = n->config.ticks_per_s;
	uint64_t d, ns;

	if (!p || !ticks)
		return 0;
	d = distance(ticks, p->ticks);
	if (d / per_s > UINT32_MAX)
		return 0;
	ns = d / per_s * NS_PER_S +
	     (uint64_t)((unsigned __int128)(d % per_s) * NS_PER_S / per_s);
	if (ticks < p->ticks)
		return ns < p->monotonic_ns ? p->monotonic_ns - ns : 0;
	return p->monotonic_ns + ns;
}

/* The one whose neighbours are nearest to each other, for their age: so what is
 * left stands as dense as it is young, a hundredth of its age apart after days. */
static void leave_one_out(struct clock *k, uint64_t now)
{
	double closest = 2;
	uint32_t least = 1;

	for (uint32_t i = 1; i + 1 < k->n; i++) {
		double apart =
			(double)(k->pairs[i + 1].ticks - k->pairs[i - 1].ticks);
		double age = (double)(now - k->pairs[i].ticks);

		if (apart < closest * age) {
			closest = apart / age;
			least = i;
		}
	}
	k->n--;
	memmove(&k->pairs[least], &k->pairs[least + 1],
		(k->n - least) * sizeof(*k->pairs));
}

void clock_adopt(struct bsn *n)
{
	const struct ledger_header *h = n->ledger.header;

	/* Readings of another clock say nothing of this one. */
	if (n->config.clock_is_counter != h->clock_is_counter)
		n->clock.n = 0;
	n->config.clock_is_counter = h->clock_is_counter;
	n->config.ticks_per_s = h->ticks_per_s;
}

void bsn_clock_source(struct bsn *n, bool *is_counter, uint64_t *ticks_per_s)
{
	node_lock(n);
	*is_counter = n->config.clock_is_counter;
	*ticks_per_s = n->config.ticks_per_s;
	node_unlock(n);
}

int bsn_clock_pair(struct bsn *n, uint64_t ticks, uint64_t monotonic_ns,
		   uint64_t realtime_ns)
{
	struct clock *k = &n->clock;
	int err = 0;

	node_lock(n);
	if (k->n && ticks <= k->pairs[k->n - 1].ticks) {
		/* An earlier reading, by a thread that was slow to store it. */
		if (monotonic_ns <= k->pairs[k->n - 1].monotonic_ns &&
		    k->pairs[k->n - 1].monotonic_ns - monotonic_ns <
			    WENT_BACK_NS) {
			err = -EINVAL;
			goto out;
		}
		/* The counter began anew (suspend, a restored machine): what it
		 * reached before says nothing of now. */
		while (k->n && ticks <= k->pairs[k->n - 1].ticks)
			k->n--;
	}
	if (k->n == CLOCK_PAIRS)
		leave_one_out(k, ticks);
	k->pairs[k->n].ticks = ticks;
	k->pairs[k->n].monotonic_ns = monotonic_ns;
	k->pairs[k->n++].realtime_ns = realtime_ns;
out:
	node_unlock(n);
	return err;
}
