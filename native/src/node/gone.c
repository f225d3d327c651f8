/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is remembered of traces that lost something here: a set of fingerprints
 * in the ledger.
 *
 *   set:    | layer | layer | ...       one is young, and takes what is new
 *   layer:  | bucket | bucket | ...
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
 * What finds its bucket full goes to another one, until one has room: a layer grows old
 * before it is full.
 *
 * A look-up meets LAYERS * PER_BUCKET tags, so two traces are taken for each other once
 * in 2^32 / 352, or 12 million, look-ups, if a layer has 2^14 buckets or less; then all
 * bits of a fingerprint are in use, and twice the layer errs twice as often. Where as
 * many losses are remembered as there is room for, it is once in 10 million.
 *
 * Of evictions there are no more than there was memory for, of each user in their
 * measure (evict.c); of losses a process tells as many as it likes. So those have a
 * set of their own, which forgets only when this one does: a layer of losses is
 * emptied when as many traces were evicted since as this set has room for. Before that
 * a further loss is refused: neither an eviction nor another process's loss is
 * forgotten for it.
 */
#include <string.h>

#include "internal.h"

#define WHY_BITS 4
#define WHY_MASK ((1u << WHY_BITS) - 1)
#define PLACES 14u
#define HELD_SHIFT (WHY_BITS * PLACES)

/* Entries that make a layer old, for each of its buckets. A look-up in an old layer meets
 * 1.4 buckets then, each a cache miss; with 12, 1.7; with 13, 2.9. */
#define PER_BUCKET 11u

/* After so many entries a bucket of the oldest layer is emptied, so that all are
 * when it is its turn. */
#define CLEAR_EVERY 8u

/* 2 MiB each in a pool of 1 GiB. A look-up costs a cache miss for each. */
#define LAYERS ((uint32_t)GONE_LAYERS)

/* Of a batch, before its bucket is looked at: as many cache misses side by side as a
 * core can have. */
#define AHEAD 32u

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
_Static_assert(PER_BUCKET < PLACES, "one bucket has room");
_Static_assert(!(LAYERS & (LAYERS - 1)) &&
		       !(GONE_LOSS_LAYERS & (GONE_LOSS_LAYERS - 1)),
	       "a layer is found without a division");
_Static_assert(BS_FINGERPRINT_BITS - 14 == 32,
	       "with 2^14 buckets no bit of a fingerprint is left out");

uint64_t gone_room(const struct ledger *l)
{
	return (uint64_t)l->header->n_buckets / LAYERS * (LAYERS - 1) *
	       PER_BUCKET;
}

uint32_t gone_loss_buckets(uint32_t buckets)
{
	return buckets / LAYERS * GONE_LOSS_LAYERS;
}

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

static void point(struct gone_set *g, uint64_t *added_ever, uint64_t secret,
		  uint32_t layers, uint32_t of_a_layer,
		  struct gone_bucket *buckets)
{
	uint32_t entries = PER_BUCKET * of_a_layer;

	*g = (struct gone_set){
		.buckets = buckets,
		.added_ever = added_ever,
		.secret = secret,
		.layers = layers,
		.bits = (uint32_t)__builtin_ctz(of_a_layer),
		.layer = *added_ever / entries,
		.added = (uint32_t)(*added_ever % entries),
	};
}

void gone_point(struct ledger *l, struct gone_bucket *buckets)
{
	struct ledger_header *h = l->header;
	uint32_t of_a_layer = h->n_buckets / LAYERS;

	point(&l->gone, &h->gone_added, h->secret, LAYERS, of_a_layer, buckets);
	point(&l->losses, &h->losses_added, h->secret, GONE_LOSS_LAYERS,
	      of_a_layer, buckets + h->n_buckets);
}

static struct gone_bucket *layer_at(const struct gone_set *g, uint64_t layer)
{
	/* Each entry asks: a division by a variable would take longer than all the rest. */
	return g->buckets + ((layer & (g->layers - 1)) << g->bits);
}

/* Where a fingerprint is in each layer. */
struct place {
	uint32_t bucket;
	uint32_t tag;  /* never 0 */
	uint32_t step; /* odd: from one bucket to the next, through all */
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

static inline bool has(const struct gone_bucket *b, uint32_t tag)
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
static inline uint32_t find_in(const struct gone_bucket *b, uint32_t tag)
{
	uint32_t i = 0;

	if (likely(!has(b, tag)))
		return PLACES;
	while (b->tags[i] != tag)
		i++;
	/* Behind those that are held is what a kill left. */
	return i < held_by(b) ? i : PLACES;
}

/* Meta last: before that, nothing was put. */
static void put(struct bsn *n, struct gone_bucket *b, uint32_t tag,
		uint32_t why)
{
	uint32_t i = held_by(b);
	uint64_t meta = b->meta + (1ull << HELD_SHIFT);

	n->ledger.header->gone_held++;
	WRITE_ONCE(b->tags[i], tag);
	store_release(&b->meta, meta | (uint64_t)why << i * WHY_BITS);
}

static void clear(struct bsn *n, struct gone_bucket *b)
{
	struct ledger_header *h = n->ledger.header;
	uint32_t held = held_by(b);

	h->gone_held -= held < h->gone_held ? held : h->gone_held;
	n->counts.gone_forgotten += held;
	memset(b, 0, sizeof(*b));
}

/* By one entry. */
static void grow_older(struct bsn *n, struct gone_set *g)
{
	struct ledger_header *h = n->ledger.header;
	const bool is_evictions = g == &n->ledger.gone;
	const bool is_full = g->added + 1 == PER_BUCKET << g->bits;
	uint32_t next = g->added / CLEAR_EVERY;

	/* The oldest layer is emptied from now on. */
	if (is_evictions && !g->added)
		h->forgotten_to_ns = h->gone_full_ns[(g->layer + 1) % LAYERS];
	if (is_evictions && is_full)
		h->gone_full_ns[g->layer % LAYERS] = n->now_ns;
	if (g->added % CLEAR_EVERY == 0 && next < 1u << g->bits)
		clear(n, layer_at(g, g->layer + 1) + next);
	WRITE_ONCE(*g->added_ever, *g->added_ever + 1);
	g->added++;
	if (is_full) {
		g->added = 0;
		g->layer++;
	}
}

/* While the layer before it takes what is new. */
static bool losses_may_be_emptied(const struct bsn *n, uint64_t layer)
{
	const struct gone_set *g = &n->ledger.losses;
	const struct ledger_header *h = n->ledger.header;

	return layer < g->layers ||
	       h->gone_added - h->losses_left[layer % g->layers] >=
		       (uint64_t)h->n_buckets * PER_BUCKET;
}

struct gone_losses_left gone_losses_left(const struct bsn *n)
{
	const struct gone_set *g = &n->ledger.losses;
	bool is_last = !losses_may_be_emptied(n, g->layer + 2);

	return (struct gone_losses_left){
		.layer = g->layer,
		.entries = is_last ? (PER_BUCKET << g->bits) - g->added
				   : UINT32_MAX,
	};
}

/* False: there is no room for it. */
static inline __attribute__((always_inline)) bool
add(struct bsn *n, struct gone_set *g, uint64_t fingerprint, uint32_t why)
{
	const bool is_loss = why == GONE_LOSSY;
	struct ledger_header *h = n->ledger.header;
	struct gone_bucket *young = layer_at(g, g->layer);
	struct place p = place_of(g, fingerprint);

	for (uint32_t probe = 0; probe <= p.mask; probe++) {
		struct gone_bucket *b = &young[p.bucket];
		uint32_t i = find_in(b, p.tag);

		if (i < PLACES) {
			WRITE_ONCE(b->meta,
				   b->meta | (uint64_t)why << i * WHY_BITS);
			return true;
		}
		if (likely(!is_full(b))) {
			if (unlikely(is_loss)) {
				if (!losses_may_be_emptied(n, g->layer + 1))
					return false;
				h->losses_left[g->layer % g->layers] =
					h->gone_added;
			}
			put(n, b, p.tag, why);
			grow_older(n, g);
			return true;
		}
		p.bucket = (p.bucket + p.step) & p.mask;
	}
	n->counts.gone_forgotten++;
	return false;
}

bool gone_add(struct bsn *n, uint64_t fingerprint, uint32_t why)
{
	if (why == GONE_LOSSY)
		return add(n, &n->ledger.losses, fingerprint, why);
	return add(n, &n->ledger.gone, fingerprint, why);
}

static struct gone_bucket *young_bucket(const struct gone_set *g,
					uint64_t fingerprint)
{
	return layer_at(g, g->layer) + place_of(g, fingerprint).bucket;
}

void gone_add_batch(struct bsn *n, struct gone_batch *batch)
{
	struct gone_set *g = &n->ledger.gone;

	for (uint32_t i = 0; i < AHEAD && i < batch->count; i++)
		__builtin_prefetch(young_bucket(g, batch->gone[i].fingerprint),
				   1);
	for (uint32_t i = 0; i < batch->count; i++) {
		if (i + AHEAD < batch->count)
			__builtin_prefetch(
				young_bucket(
					g, batch->gone[i + AHEAD].fingerprint),
				1);
		add(n, g, batch->gone[i].fingerprint, batch->gone[i].why);
	}
	batch->count = 0;
}

struct gone_seen gone_seen(const struct bsn *n)
{
	return (struct gone_seen){n->ledger.gone.layer, n->ledger.losses.layer};
}

static uint32_t why_in(const struct gone_bucket *layer, struct place p)
{
	for (uint32_t probe = 0; probe <= p.mask; probe++) {
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

static uint32_t why_in_set(const struct gone_set *g, struct place p,
			   uint64_t layer)
{
	uint32_t why = 0;

	if (g->layer - layer >= g->layers)
		layer = g->layer - (g->layers - 1);
	for (; layer <= g->layer; layer++)
		why |= why_in(layer_at(g, layer), p);
	return why;
}

uint32_t gone_why_since(const struct bsn *n, uint64_t fingerprint,
			struct gone_seen since)
{
	const struct ledger *l = &n->ledger;
	/* The layers of both are as large. */
	struct place p = place_of(&l->gone, fingerprint);

	return why_in_set(&l->gone, p, since.layer) |
	       why_in_set(&l->losses, p, since.loss_layer);
}

/* enum gone; 0: nothing is known. */
uint32_t gone_why(const struct bsn *n, uint64_t fingerprint)
{
	return gone_why_since(n, fingerprint, (struct gone_seen){0});
}
