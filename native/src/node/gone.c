/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is remembered of traces that lost something here: a set of fingerprints
 * in the ledger.
 *
 *   layer:  | bucket | bucket | ...     one is young, and takes what is new
 *   bucket: | tag : 32, 14 times | why : 4, 14 times | held : 8 |
 *
 * Each trace that is reclaimed leaves an entry. In a table as large as all this,
 * each would be a cache miss and a TLB miss; the young layer is small enough for a
 * core's cache. When it has its share of entries, the oldest layer, which was
 * emptied meanwhile, becomes the young one. A look-up looks at all layers; who knows
 * until when it has looked, only at those that were young since.
 *
 * A fingerprint times a secret odd number gives the bucket by the high bits and the
 * tag by the low ones, so who chooses trace ids does not choose what shares a bucket.
 * What finds its bucket full goes to another one, PROBES times; of entries as many as
 * make a layer old, one in a million finds no place.
 *
 * A look-up meets LAYERS * PER_BUCKET tags, so two traces are taken for each other once
 * in 2^32 / 352, or 12 million, look-ups, if a layer has 2^14 buckets or less; then all
 * bits of a fingerprint are in use, and twice the layer errs twice as often.
 *
 * Of evictions there are no more than there was memory for; of losses a process
 * tells as many as it likes. So half of the set is open to those, and a further one
 * is refused: neither an eviction nor another process's loss is forgotten for it.
 */
#include <string.h>

#include "internal.h"

#define WHY_BITS 4
#define WHY_MASK ((1u << WHY_BITS) - 1)
#define PLACES 14u
#define HELD_SHIFT (WHY_BITS * PLACES)

/* Entries that make a layer old, for each of its buckets. With 12 there is no place for
 * 25 in a million. */
#define PER_BUCKET 11u
#define PROBES 8u

/* After so many entries a bucket of the oldest layer is emptied, so that all are
 * when it is its turn. */
#define CLEAR_EVERY 8u

/* 2 MiB each in a pool of 1 GiB. A look-up costs a cache miss for each. */
#define LAYERS 32u

#define LAYER_BUCKETS_MIN 2u
#define LAYER_BUCKETS_MAX (1u << 21)

struct gone_bucket {
	uint32_t tags[PLACES]; /* 0: none was there yet */
	uint64_t meta;	       /* from the low bits up: why, for each; held */
};

_Static_assert(sizeof(struct gone_bucket) == BS_CACHE_LINE, "one miss");
_Static_assert(HELD_SHIFT + 8 == 64, "meta is written in one");
_Static_assert((GONE_ALL & ~WHY_MASK) == 0, "each reason has a bit");
_Static_assert(CLEAR_EVERY < PER_BUCKET, "emptied in time");
_Static_assert(BS_FINGERPRINT_BITS - 14 == 32,
	       "with 2^14 buckets no bit of a fingerprint is left out");

uint32_t gone_buckets(uint64_t entries)
{
	uint32_t buckets = LAYER_BUCKETS_MIN;

	/* One layer is being emptied. */
	while (buckets < LAYER_BUCKETS_MAX &&
	       (uint64_t)buckets * PER_BUCKET * (LAYERS - 1) < entries)
		buckets *= 2;
	return buckets * LAYERS;
}

bool gone_buckets_are_valid(uint32_t buckets)
{
	return buckets >= LAYERS * LAYER_BUCKETS_MIN &&
	       buckets <= LAYERS * LAYER_BUCKETS_MAX &&
	       !(buckets & (buckets - 1));
}

void gone_point(struct gone_set *g, const struct ledger_header *h,
		struct gone_bucket *buckets)
{
	uint32_t of_a_layer = h->n_buckets / LAYERS;

	*g = (struct gone_set){
		.buckets = buckets,
		.secret = h->secret,
		.bits = (uint32_t)__builtin_ctz(of_a_layer),
		.layer = h->gone_added / (PER_BUCKET * of_a_layer),
		.added = (uint32_t)(h->gone_added % (PER_BUCKET * of_a_layer)),
	};
}

static struct gone_bucket *layer_at(const struct gone_set *g, uint64_t layer)
{
	return g->buckets + (layer % LAYERS << g->bits);
}

/* Where a fingerprint is in each layer. */
struct place {
	uint32_t bucket;
	uint32_t tag;  /* never 0 */
	uint32_t step; /* odd: from one bucket to the next that is tried */
	uint32_t mask;
};

static struct place place_of(const struct gone_set *g, uint64_t fingerprint)
{
	uint64_t mixed = fingerprint * g->secret &
			 ((1ull << BS_FINGERPRINT_BITS) - 1);
	uint32_t tag = (uint32_t)mixed;

	return (struct place){
		.bucket = (uint32_t)(mixed >> (BS_FINGERPRINT_BITS - g->bits)),
		.tag = tag ? tag : 1,
		.step = tag >> 8 | 1,
		.mask = (1u << g->bits) - 1,
	};
}

static uint32_t held_by(const struct gone_bucket *b)
{
	return (uint32_t)(b->meta >> HELD_SHIFT);
}

static bool is_full(const struct gone_bucket *b)
{
	return held_by(b) == PLACES;
}

static uint32_t why_at(const struct gone_bucket *b, uint32_t i)
{
	return b->meta >> i * WHY_BITS & WHY_MASK;
}

/* Four tags at a time, as SSE2 and NEON have it. */
typedef uint32_t lanes __attribute__((vector_size(16)));

static bool has(const struct gone_bucket *b, uint32_t tag)
{
	const lanes *four = (const lanes *)b;
	const lanes want = {tag, tag, tag, tag};
	const lanes tags = {UINT32_MAX, UINT32_MAX, 0, 0}; /* then meta */
	union {
		lanes lanes;
		uint64_t words[2];
	} met;

	met.lanes = (lanes)(four[0] == want) | (lanes)(four[1] == want) |
		    (lanes)(four[2] == want) |
		    ((lanes)(four[3] == want) & tags);
	return met.words[0] | met.words[1];
}

/* PLACES: it is not there. */
static uint32_t find_in(const struct gone_bucket *b, uint32_t tag)
{
	uint32_t i = 0;

	if (likely(!has(b, tag)))
		return PLACES;
	while (b->tags[i] != tag)
		i++;
	/* Behind those that are held is what a kill left. */
	return i < held_by(b) ? i : PLACES;
}

void gone_prefetch(const struct bsn *n, uint64_t fingerprint)
{
	const struct gone_set *g = &n->ledger.gone;

	__builtin_prefetch(
		layer_at(g, g->layer) + place_of(g, fingerprint).bucket, 1);
}

/* Of losses those are counted of which no more is known. A kill may have left some
 * uncounted. */
static void uncount_loss(struct ledger_header *h)
{
	h->gone_losses -= !!h->gone_losses;
}

static void add_why(struct bsn *n, struct gone_bucket *b, uint32_t i,
		    uint32_t why)
{
	if (why_at(b, i) == GONE_LOSSY && why != GONE_LOSSY)
		uncount_loss(n->ledger.header);
	WRITE_ONCE(b->meta, b->meta | (uint64_t)why << i * WHY_BITS);
}

/* Meta last: before that, nothing was put. */
static void put(struct bsn *n, struct gone_bucket *b, uint32_t tag,
		uint32_t why)
{
	struct ledger_header *h = n->ledger.header;
	uint32_t i = held_by(b);
	uint64_t meta = b->meta + (1ull << HELD_SHIFT);

	h->gone_losses += why == GONE_LOSSY;
	h->gone_held++;
	WRITE_ONCE(b->tags[i], tag);
	store_release(&b->meta, meta | (uint64_t)why << i * WHY_BITS);
}

static void clear(struct bsn *n, struct gone_bucket *b)
{
	struct ledger_header *h = n->ledger.header;
	uint32_t held = held_by(b);

	for (uint32_t i = 0; i < held && h->gone_losses; i++) {
		if (why_at(b, i) == GONE_LOSSY)
			uncount_loss(h);
	}
	h->gone_held -= held < h->gone_held ? held : h->gone_held;
	n->counts.gone_forgotten += held;
	memset(b, 0, sizeof(*b));
}

/* By one entry. */
static void grow_older(struct bsn *n)
{
	struct ledger_header *h = n->ledger.header;
	struct gone_set *g = &n->ledger.gone;
	uint32_t next = g->added / CLEAR_EVERY;

	if (g->added % CLEAR_EVERY == 0 && next < 1u << g->bits)
		clear(n, layer_at(g, g->layer + 1) + next);
	WRITE_ONCE(h->gone_added, h->gone_added + 1);
	if (++g->added == PER_BUCKET << g->bits) {
		g->added = 0;
		g->layer++;
	}
}

/* False: there is no room for it. */
bool gone_add(struct bsn *n, uint64_t fingerprint, uint32_t why)
{
	const struct gone_set *g = &n->ledger.gone;
	const struct ledger_header *h = n->ledger.header;
	struct gone_bucket *young = layer_at(g, g->layer);
	struct place p = place_of(g, fingerprint);

	for (uint32_t probe = 0; probe < PROBES; probe++) {
		struct gone_bucket *b = &young[p.bucket];
		uint32_t i = find_in(b, p.tag);

		if (i < PLACES) {
			add_why(n, b, i, why);
			return true;
		}
		if (likely(!is_full(b))) {
			if (unlikely(why == GONE_LOSSY) &&
			    h->gone_losses >=
				    (uint64_t)h->n_buckets * PER_BUCKET / 2)
				return false;
			put(n, b, p.tag, why);
			grow_older(n);
			return true;
		}
		p.bucket = (p.bucket + p.step) & p.mask;
	}
	n->counts.gone_forgotten++;
	return false;
}

uint64_t gone_layer(const struct bsn *n)
{
	return n->ledger.gone.layer;
}

static uint32_t why_in(const struct gone_bucket *layer, struct place p)
{
	for (uint32_t probe = 0; probe < PROBES; probe++) {
		const struct gone_bucket *b = &layer[p.bucket];
		uint32_t i = find_in(b, p.tag);

		if (i < PLACES)
			return why_at(b, i);
		if (likely(!is_full(b)))
			break;
		p.bucket = (p.bucket + p.step) & p.mask;
	}
	return 0;
}

uint32_t gone_why_since(const struct bsn *n, uint64_t fingerprint,
			uint64_t layer)
{
	const struct gone_set *g = &n->ledger.gone;
	struct place p = place_of(g, fingerprint);
	uint32_t why = 0;

	if (g->layer - layer >= LAYERS)
		layer = g->layer - (LAYERS - 1);
	for (; layer <= g->layer; layer++)
		why |= why_in(layer_at(g, layer), p);
	return why;
}

/* enum gone; 0: nothing is known. */
uint32_t gone_why(const struct bsn *n, uint64_t fingerprint)
{
	return gone_why_since(n, fingerprint, 0);
}
