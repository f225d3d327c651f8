/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a pass looks for: the names of the traces, that is what stands for them in
 * directories, and the searches by their traces. A process's directory has
 * fingerprints, the keep arena has names of its own (keep.c). Of either there is a
 * filter of most entries; of both a set of their low halves, since columns have no
 * more; and there is one of whole fingerprints. Who may choose trace ids may choose
 * which of them have the same fingerprint, or half of one, as many as he likes. So what
 * has a place by these has it by a secret too, and each half has one place, and each
 * fingerprint; and which search an entry is for, the id tells.
 *
 * An entry with a fingerprint that is wanted, of a trace that is not, costs a look at
 * its header. That is counted, for each process and fingerprint apart: who has too
 * many of one is passed over where it is met again. But not for another one: whoever
 * asks for traces that look like an honest process's can make it meet any number of
 * them in vain.
 *
 * What is passed over may be a run that is wanted: honest processes write what others
 * chose the ids of. So that is remembered with the fingerprint, and no search for it
 * says that it knows all. Who makes that so has to know the fingerprint, and had to
 * write it more often than VAIN_MAX through one process.
 */
#include <errno.h>
#include <stdlib.h>

#include "hash.h"
#include "internal.h"

/* Entries of one process, each of which cost a look. That honest ones, of traces that
 * nobody chose the ids of, are so many is not excluded: one long trace is enough. But
 * it has the fingerprint of one that is wanted once in 2^46 (a million such traces in
 * a pool: once in 70 million searches), and then the search says so. */
#define VAIN_MAX 16u

/* Pairs that are remembered; of more each look costs what it costs. */
#define VAIN_PLACES 16384u

struct vain {
	uint32_t client; /* number; 0: a free place */
	uint32_t count;
	uint64_t fingerprint;
};

/* ---------------------------------------------------------------- names --- */

/* The lowest bit of a tag. */
#define TAG_PASSED_OVER 1u

static uint32_t places(const struct wanted *w)
{
	return 1u << w->bits;
}

/* 0 is a free place. Whoever is taken for another costs a look. */
static uint32_t low_of(uint64_t name)
{
	uint32_t low = (uint32_t)name;

	return low ? low : 1;
}

/* Its place, or the free one where it belongs. Multiply-shift: two fall together for
 * two of so many secrets as there are places. */
static uint32_t *low_at(const struct wanted *w, uint64_t name)
{
	uint32_t low = low_of(name);

	for (uint64_t i = low * w->secret >> (64 - w->bits);; i++) {
		uint32_t *at = &w->lows[i % places(w)];

		if (!*at || *at == low)
			return at;
	}
}

bool wanted_has_low(const struct wanted *w, uint64_t name)
{
	return *low_at(w, name);
}

/* Place and tag of a fingerprint are two parts of one hash, by the secret, of all its
 * bits. Two are taken for each other once in 2^31. */
static uint32_t *tag_at(const struct wanted *w, uint64_t fingerprint,
			uint32_t *tag)
{
	uint64_t mixed = bs_fmix64(fingerprint ^ w->secret);

	*tag = (uint32_t)(mixed >> 32) & ~TAG_PASSED_OVER;
	if (!*tag)
		*tag = 2 * TAG_PASSED_OVER; /* 0 is a free place */
	for (uint64_t i = mixed;; i++) {
		uint32_t *at = &w->tags[i % places(w)];

		if (!*at || (*at & ~TAG_PASSED_OVER) == *tag)
			return at;
	}
}

bool wanted_has_fingerprint(const struct wanted *w, uint64_t fingerprint)
{
	uint32_t tag;

	return *tag_at(w, fingerprint, &tag);
}

/* ------------------------------------------------------------- searches --- */

static uint32_t id_place(const struct wanted *w, struct bs_trace_id id)
{
	return (uint32_t)bs_hash_trace(w->secret, id);
}

struct search *wanted_find(const struct wanted *w, struct bs_trace_id id)
{
	for (uint32_t i = id_place(w, id);; i++) {
		struct search *s = w->searches[i % places(w)];

		if (!s || id_equal(s->id, id))
			return s;
	}
}

int wanted_init(const struct bsn *n, struct wanted *w, uint32_t count)
{
	w->secret = n->secret;
	/* There are two names of each: a third stays free. */
	for (w->bits = 2; places(w) < 3 * count; w->bits++)
		;
	w->lows = calloc(places(w), sizeof(*w->lows));
	w->tags = calloc(places(w), sizeof(*w->tags));
	w->searches = calloc(places(w), sizeof(struct search *));
	return w->lows && w->tags && w->searches ? 0 : -ENOMEM;
}

void wanted_add(const struct bsn *n, struct wanted *w, struct search *s)
{
	uint64_t mix = bs_trace_mix(s->id.hi, s->id.lo);
	uint64_t kept = s->fingerprint ^ keep_disguise(n, s->id.hi, mix);
	uint32_t i = id_place(w, s->id), tag, *at;

	while (w->searches[i % places(w)])
		i++;
	w->searches[i % places(w)] = s;
	filter_add(&w->filter, s->fingerprint);
	filter_add(&w->kept_filter, kept);
	*low_at(w, s->fingerprint) = low_of(s->fingerprint);
	*low_at(w, kept) = low_of(kept);
	at = tag_at(w, s->fingerprint, &tag);
	*at |= tag;
}

void wanted_free(struct wanted *w)
{
	free(w->searches);
	free(w->tags);
	free(w->lows);
	free(w->vain);
}

/* -------------------------------------------------------------- in vain --- */

/* Its place, or the free one where it belongs. */
static struct vain *vain_at(const struct wanted *w, uint32_t client,
			    uint64_t fingerprint)
{
	uint64_t pair = bs_fmix64(fingerprint ^ w->secret) ^ client;

	for (uint64_t i = bs_fmix64(pair);; i++) {
		struct vain *v = &w->vain[i % VAIN_PLACES];

		if (!v->client ||
		    (v->client == client && v->fingerprint == fingerprint))
			return v;
	}
}

bool wanted_passes_over(struct wanted *w, uint32_t client, uint64_t fingerprint)
{
	uint32_t tag;

	if (!w->vain || vain_at(w, client, fingerprint)->count <= VAIN_MAX)
		return false;
	*tag_at(w, fingerprint, &tag) |= TAG_PASSED_OVER;
	return true;
}

bool wanted_passed_over(const struct wanted *w, uint64_t fingerprint)
{
	uint32_t tag;

	return *tag_at(w, fingerprint, &tag) & TAG_PASSED_OVER;
}

void wanted_in_vain(struct wanted *w, uint32_t client, uint64_t fingerprint)
{
	struct vain *v;

	if (!w->vain)
		w->vain = calloc(VAIN_PLACES, sizeof(*w->vain));
	if (!w->vain)
		return;
	v = vain_at(w, client, fingerprint);
	if (!v->client) {
		/* Some stay free, so that each look ends soon. */
		if (w->n_vain == VAIN_PLACES / 2)
			return;
		w->n_vain++;
		*v = (struct vain){.client = client,
				   .fingerprint = fingerprint};
	}
	v->count++;
}
