/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a pass looks for: the filter of most entries, a set of the low halves of
 * fingerprints, and the searches by their traces. Who may choose trace ids may
 * choose which of them have the same fingerprint, or half of one, as many as he
 * likes. So what has a place by these has it by a secret too, and each half has one
 * place; and which search an entry is for, the id tells.
 *
 * An entry with a half that is wanted, of a trace that is not, costs a look at its
 * header. Once may be chance, so that is counted, for each process and half apart:
 * who has too many of one is passed over where it is met again. But not for another
 * half: whoever asks for traces that look like an honest process's can make it meet
 * any number of them in vain.
 */
#include <errno.h>
#include <stdlib.h>

#include "hash.h"
#include "internal.h"

/* Halves have 32 bits: that an honest directory meets one of them by chance so often
 * in one pass does not happen. */
#define VAIN_MAX 16u

/* Pairs that are remembered; of more each look costs what it costs. */
#define VAIN_PLACES 16384u

struct vain {
	uint32_t client; /* number; 0: a free place */
	uint32_t low;
	uint32_t count;
};

/* 0 is a free place. Whoever is taken for another costs a look. */
static uint32_t low_of(uint64_t fingerprint)
{
	uint32_t low = (uint32_t)fingerprint;

	return low ? low : 1;
}

/* Multiply-shift: two fall together for two of so many secrets as there are places. */
static uint32_t low_place(const struct wanted *w, uint32_t low)
{
	return (uint32_t)(low * w->secret >> (64 - w->bits));
}

static uint32_t places(const struct wanted *w)
{
	return 1u << w->bits;
}

bool wanted_has_low(const struct wanted *w, uint64_t fingerprint)
{
	uint32_t low = low_of(fingerprint);

	for (uint32_t i = low_place(w, low);; i++) {
		uint32_t at = w->lows[i % places(w)];

		if (!at || at == low)
			return at;
	}
}

static void add_low(struct wanted *w, uint64_t fingerprint)
{
	uint32_t low = low_of(fingerprint);
	uint32_t i = low_place(w, low);

	while (w->lows[i % places(w)] && w->lows[i % places(w)] != low)
		i++;
	w->lows[i % places(w)] = low;
}

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
	for (w->bits = 2; places(w) < 2 * count; w->bits++)
		;
	w->lows = calloc(places(w), sizeof(*w->lows));
	w->searches = calloc(places(w), sizeof(struct search *));
	return w->lows && w->searches ? 0 : -ENOMEM;
}

void wanted_add(struct wanted *w, struct search *s)
{
	uint32_t i = id_place(w, s->id);

	while (w->searches[i % places(w)])
		i++;
	w->searches[i % places(w)] = s;
	add_low(w, s->fingerprint);
	filter_add(&w->filter, s->fingerprint);
}

void wanted_free(struct wanted *w)
{
	free(w->searches);
	free(w->lows);
	free(w->vain);
}

/* Its place, or the free one where it belongs. */
static struct vain *vain_at(const struct wanted *w, uint32_t client,
			    uint64_t fingerprint)
{
	uint32_t low = low_of(fingerprint);
	uint64_t pair = (uint64_t)client << 32 | low;

	for (uint64_t i = bs_fmix64(pair ^ w->secret);; i++) {
		struct vain *v = &w->vain[i % VAIN_PLACES];

		if (!v->client || (v->client == client && v->low == low))
			return v;
	}
}

bool wanted_is_vain(const struct wanted *w, uint32_t client,
		    uint64_t fingerprint)
{
	return w->vain && vain_at(w, client, fingerprint)->count > VAIN_MAX;
}

bool wanted_in_vain(struct wanted *w, uint32_t client, uint64_t fingerprint)
{
	struct vain *v;

	if (!w->vain)
		w->vain = calloc(VAIN_PLACES, sizeof(*w->vain));
	if (!w->vain)
		return false;
	v = vain_at(w, client, fingerprint);
	if (!v->client) {
		/* Some stay free, so that each look ends soon. */
		if (w->n_vain == VAIN_PLACES / 2)
			return false;
		w->n_vain++;
		*v = (struct vain){.client = client,
				   .low = low_of(fingerprint)};
	}
	v->count++;
	return v->count > VAIN_MAX;
}
