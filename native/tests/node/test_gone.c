/* SPDX-License-Identifier: Apache-2.0 */
/* What is remembered of traces that lost something: so many, the youngest, and for as
 * long as a node and its successors run. */
#include "node/internal.h"
#include "writer.h"

enum {
	REMEMBERED = 4096
};

static uint64_t fingerprint_of(uint64_t i)
{
	const struct bs_trace_id id = trace_id(i);

	return bs_fingerprint(id.hi, id.lo);
}

static struct bsn *node_that_remembers(uint32_t traces)
{
	struct bsn_config config = test_config(4 << 20);

	config.tombstones = traces;
	return test_node(&config);
}

static uint64_t remembered(struct bsn *n)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	return m.gone;
}

static uint64_t forgotten(struct bsn *n)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	return m.gone_forgotten;
}

static void the_youngest_are_remembered(void)
{
	struct bsn *n = node_that_remembers(REMEMBERED);
	const uint64_t added = 10 * REMEMBERED;
	uint32_t of_the_oldest = 0;

	for (uint64_t i = 0; i < added; i++) {
		CHECK(gone_add(n, fingerprint_of(i), GONE_EVICTED));
		if (i >= REMEMBERED)
			CHECK_EQ(gone_why(n, fingerprint_of(i - REMEMBERED)),
				 GONE_EVICTED);
	}
	CHECK(remembered(n) >= REMEMBERED);
	CHECK_EQ(remembered(n) + forgotten(n), added);
	for (uint64_t i = 0; i < added / 2; i++)
		of_the_oldest += !!gone_why(n, fingerprint_of(i));
	CHECK_EQ(of_the_oldest, 0);
	bsn_free(n);
}

/* The secret makes that rare; here it is known. */
static void each_finds_a_place(void)
{
	const uint64_t mask = (1ull << BS_FINGERPRINT_BITS) - 1;
	struct bsn *n = node_that_remembers(REMEMBERED);
	uint64_t secret = n->ledger.gone.secret, inverse = secret, i;
	const struct gone_seen seen = gone_seen(n);

	/* Newton's iteration: each doubles the bits that are right, of which there are 3. */
	for (int bits = 3; bits < BS_FINGERPRINT_BITS; bits *= 2)
		inverse *= 2 - secret * inverse;
	/* The same bucket and, for 256 of them, the same way to the next. */
	for (i = 1; gone_seen(n).layer == seen.layer; i++)
		CHECK(gone_add(n, i * inverse & mask, GONE_EVICTED));
	CHECK(i > 128);
	CHECK_EQ(remembered(n), i - 1);
	while (--i)
		CHECK_EQ(gone_why(n, i * inverse & mask), GONE_EVICTED);
	bsn_free(n);
}

static void reasons_of_all_times_are_told(void)
{
	struct bsn *n = node_that_remembers(REMEMBERED);
	struct gone_seen seen, later;
	uint64_t other = 1;

	gone_add(n, fingerprint_of(0), GONE_LOSSY);
	gone_add(n, fingerprint_of(0), GONE_REPORTED);
	gone_add(n, fingerprint_of(0), GONE_ABANDONED);
	CHECK_EQ(remembered(n), 2);
	for (seen = gone_seen(n); gone_seen(n).layer < seen.layer + 3; other++)
		gone_add(n, fingerprint_of(other), GONE_EVICTED);
	for (uint64_t i = 1 << 20; gone_seen(n).loss_layer < 1; i++)
		CHECK(gone_add(n, fingerprint_of(i), GONE_LOSSY));
	later = gone_seen(n);
	gone_add(n, fingerprint_of(0), GONE_EVICTED);
	CHECK_EQ(gone_why(n, fingerprint_of(0)),
		 GONE_LOSSY | GONE_REPORTED | GONE_ABANDONED | GONE_EVICTED);
	/* Who has looked before need not look there again. */
	CHECK_EQ(gone_why_since(n, fingerprint_of(0), later), GONE_EVICTED);
	CHECK_EQ(gone_why_since(n, fingerprint_of(0), seen),
		 GONE_LOSSY | GONE_REPORTED | GONE_ABANDONED | GONE_EVICTED);
	CHECK_EQ(gone_why(n, fingerprint_of(other)), 0);
	bsn_free(n);
}

/* However many a process tells: what is forgotten for them is nothing. */
static void losses_have_their_share(void)
{
	struct bsn *n = node_that_remembers(REMEMBERED);
	const uint64_t evicted = 1 << 20, others = 1 << 21;
	uint64_t lost = 0, next = evicted;

	for (uint64_t i = 0; i < 100; i++)
		CHECK(gone_add(n, fingerprint_of(others + i), GONE_LOSSY));
	for (; next < evicted + REMEMBERED; next++)
		CHECK(gone_add(n, fingerprint_of(next), GONE_EVICTED));
	while (lost < REMEMBERED &&
	       gone_add(n, fingerprint_of(lost), GONE_LOSSY))
		lost++;
	CHECK(lost >= REMEMBERED / 5 && lost < REMEMBERED / 2);
	CHECK_EQ(remembered(n), REMEMBERED + 100 + lost);
	CHECK_EQ(forgotten(n), 0);
	/* Nor, while evictions make no more room than for one layer. */
	for (uint64_t i = 0; i < REMEMBERED / 16; i++) {
		CHECK(gone_add(n, fingerprint_of(next++), GONE_EVICTED));
		CHECK(!gone_add(n, fingerprint_of(lost), GONE_LOSSY));
	}
	for (uint64_t i = 0; i < 100; i++)
		CHECK_EQ(gone_why(n, fingerprint_of(others + i)), GONE_LOSSY);
	for (uint64_t i = 0; i < lost; i++)
		CHECK_EQ(gone_why(n, fingerprint_of(i)), GONE_LOSSY);
	for (uint64_t i = next - REMEMBERED; i < next; i++)
		CHECK_EQ(gone_why(n, fingerprint_of(i)), GONE_EVICTED);
	/* As many were evicted since as are remembered: it is their turn. */
	for (uint64_t i = 0; i < 2 * REMEMBERED; i++)
		CHECK(gone_add(n, fingerprint_of(next++), GONE_EVICTED));
	for (uint64_t i = 0; i < lost; i++)
		CHECK(gone_add(n, fingerprint_of((1 << 22) + i), GONE_LOSSY));
	CHECK_EQ(gone_why(n, fingerprint_of(others)), 0);
	bsn_free(n);
}

static void a_successor_goes_on(void)
{
	struct bsn_config config = test_config(4 << 20);
	uint64_t lost = 0;
	struct bsn *n;

	config.tombstones = REMEMBERED;
	n = test_node(&config);
	for (uint64_t i = 0; i < 1500; i++) {
		struct gone_seen before = gone_seen(n), after;

		gone_add(n, fingerprint_of(i), GONE_EVICTED);
		lost += gone_add(n, fingerprint_of(1 << 20 | i), GONE_LOSSY);
		if (i % 100 == 99) {
			n = restart(n, &config, NULL, 0, START);
			CHECK_EQ(remembered(n), i + 1 + lost);
			after = gone_seen(n);
			CHECK(after.layer - before.layer <= 1);
			CHECK(after.loss_layer - before.loss_layer <= 1);
		}
		if (i < 100)
			continue;
		CHECK_EQ(gone_why(n, fingerprint_of(i - 100)), GONE_EVICTED);
		CHECK_EQ(gone_why(n, fingerprint_of(1 << 20 | (i - 100))),
			 i - 100 < lost ? GONE_LOSSY : 0);
	}
	CHECK(lost > REMEMBERED / 5 && lost < 1500);
	bsn_free(n);
}

/* A search waits for its pass, and layers grow old meanwhile. */
static void a_search_is_told_until_its_pass_begins(void)
{
	const struct bs_trace_id id = trace_id(1 << 20);
	const uint64_t fingerprint = fingerprint_of(1 << 20);
	struct bsn *n = node_that_remembers(REMEMBERED);
	struct slice slice = {.id = id};
	const struct sink to = {.slice = &slice};
	struct gone_seen seen = gone_seen(n);
	struct search s;
	struct pass p;

	node_lock(n);
	gone_add(n, fingerprint, GONE_LOSSY);
	CHECK_EQ(search_init(n, &s, id, to), 0);
	gone_add(n, fingerprint, GONE_ABANDONED);
	for (uint64_t i = 0; gone_seen(n).layer < seen.layer + 2; i++)
		gone_add(n, fingerprint_of(i), GONE_EVICTED);
	CHECK_EQ(pass_begin(n, &p, &s, 1), 0);
	CHECK_EQ(s.why, GONE_LOSSY | GONE_ABANDONED);
	/* What is reclaimed from now on, the pass looks at before. */
	gone_add(n, fingerprint, GONE_EVICTED);
	pass_run(n, &p);
	pass_end(n, &p);
	pass_free(&p);
	CHECK_EQ(s.why, GONE_LOSSY | GONE_ABANDONED);
	search_free(n, &s);
	node_unlock(n);
	bsn_free(n);
}

int main(void)
{
	RUN(the_youngest_are_remembered);
	RUN(each_finds_a_place);
	RUN(reasons_of_all_times_are_told);
	RUN(losses_have_their_share);
	RUN(a_successor_goes_on);
	RUN(a_search_is_told_until_its_pass_begins);
	return 0;
}
