/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is remembered of traces that lost something here: a set of fingerprints
 * in the ledger, 4 bytes each.
 *
 *   bucket: a cache line, the youngest entry first    entry: tag : 27 | why : 5
 *
 * The bucket is chosen by the upper bits of the fingerprint, multiplied by a secret
 * of the ledger; the tag is made of the bits below. So two traces are taken for each
 * other once in 2^27 / 16, or 8 million, look-ups, if the table has 2^19 buckets or
 * less; then all bits of a fingerprint are in use, and twice the table errs twice as
 * often. A full bucket forgets its oldest entry: on the whole the table remembers as
 * many traces as it has entries, the youngest. And who chooses trace ids does not
 * choose whose is forgotten.
 *
 * Of evictions there are no more than there was memory for; of losses a process
 * tells as many as it likes. So those have half of a bucket's places, and where
 * these are taken a further one is refused: neither an eviction nor another
 * process's loss is forgotten for it.
 */
#include <string.h>

#include "internal.h"

#define WHY_BITS 5
#define WHY_MASK ((1u << WHY_BITS) - 1)
#define ENTRIES (BS_CACHE_LINE / sizeof(uint32_t))
#define LOSSES_MAX (ENTRIES / 2)
#define BUCKETS_MIN 64u
#define BUCKETS_MAX (1u << 26)

_Static_assert(ENTRIES == 16, "four times four lanes");
#define TAG_BITS (32 - WHY_BITS)
_Static_assert(BS_FINGERPRINT_BITS - 19 == TAG_BITS,
	       "with 2^19 buckets no bit of a fingerprint is left out");

uint32_t gone_buckets(uint64_t entries)
{
	uint32_t buckets = BUCKETS_MIN;

	while (buckets < BUCKETS_MAX && buckets * ENTRIES < entries)
		buckets *= 2;
	return buckets;
}

/* Multiply-shift: the secret is odd, so no two become one, and each bit depends on
 * all below it. At the top of a word. */
static uint64_t turned(const struct bsn *n, uint64_t fingerprint)
{
	return fingerprint * n->ledger.secret << (64 - BS_FINGERPRINT_BITS);
}

static uint32_t *bucket_of(const struct bsn *n, uint64_t fingerprint)
{
	uint64_t i = turned(n, fingerprint) >> (64 - n->ledger.bucket_bits);

	return n->ledger.gone + i * ENTRIES;
}

/* Never 0, which is a free place. */
static uint32_t tag_of(const struct bsn *n, uint64_t fingerprint)
{
	uint64_t below = turned(n, fingerprint) << n->ledger.bucket_bits;
	uint32_t tag = (uint32_t)(below >> (64 - TAG_BITS)) << WHY_BITS;

	return tag ? tag : 1u << WHY_BITS;
}

void gone_prefetch(const struct bsn *n, uint64_t fingerprint)
{
	__builtin_prefetch(bucket_of(n, fingerprint), 1);
}

/* Four entries at a time, as SSE2 and NEON have it. */
typedef uint32_t lanes __attribute__((vector_size(16)));

static bool has(const uint32_t *bucket, uint32_t tag)
{
	const lanes *four = (const lanes *)bucket;
	const lanes mask = {~WHY_MASK, ~WHY_MASK, ~WHY_MASK, ~WHY_MASK};
	const lanes want = {tag, tag, tag, tag};
	union {
		lanes lanes;
		uint64_t words[2];
	} met;

	met.lanes = (lanes)((four[0] & mask) == want) |
		    (lanes)((four[1] & mask) == want) |
		    (lanes)((four[2] & mask) == want) |
		    (lanes)((four[3] & mask) == want);
	return met.words[0] | met.words[1];
}

static uint32_t *find(const struct bsn *n, uint64_t fingerprint)
{
	uint32_t *bucket = bucket_of(n, fingerprint);
	uint32_t tag = tag_of(n, fingerprint);

	if (likely(!has(bucket, tag)))
		return NULL;
	for (uint32_t i = 0; i < ENTRIES; i++) {
		if ((bucket[i] & ~WHY_MASK) == tag)
			return &bucket[i];
	}
	return NULL;
}

/* Of which no more is known than that something was lost. */
static uint32_t count_losses(const uint32_t *bucket)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < ENTRIES; i++)
		count += (bucket[i] & WHY_MASK) == GONE_LOSSY;
	return count;
}

/* False: it is a loss, and there is no room for it. */
bool gone_add(struct bsn *n, uint64_t fingerprint, uint32_t why)
{
	uint32_t *bucket = bucket_of(n, fingerprint);
	uint32_t *entry = find(n, fingerprint);

	if (entry) {
		*entry |= why;
		return true;
	}
	if (unlikely(why == GONE_LOSSY) && count_losses(bucket) == LOSSES_MAX)
		return false;
	if (bucket[ENTRIES - 1])
		n->counts.gone_forgotten++;
	else
		n->counts.gone++;
	memmove(bucket + 1, bucket, (ENTRIES - 1) * sizeof(*bucket));
	bucket[0] = tag_of(n, fingerprint) | why;
	return true;
}

/* enum gone; 0: nothing is known. */
uint32_t gone_why(const struct bsn *n, uint64_t fingerprint)
{
	const uint32_t *entry = find(n, fingerprint);

	return entry ? *entry & WHY_MASK : 0;
}
