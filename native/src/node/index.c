/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index: a chained hash table with one record a trace, and its runs linked
 * from newest to oldest. The full trace id stands in the record, so that no
 * answer depends on memory that a client can write to.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "internal.h"

/* When not configured: an index for runs of 256 bytes on average, of two runs
 * a trace; smaller ones fill the index before the pool, which then reclaims
 * earlier. 12 + 32 / 2 + 4 bytes a run are 12 percent of the pool then, and
 * less where runs are longer: only what is used is touched. */
#define RUN_BYTES_EXPECTED 256u

/* Every segment can have runs, and one more chunk makes what is left over. */
#define CHUNKS_SPARE 8u

static void *table(uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		return NULL;
	/* Lookups are random: with small pages each would miss the TLB too. */
	(void)madvise(p, bytes, MADV_HUGEPAGE);
	(void)madvise(p, bytes, MADV_DONTDUMP);
	return p;
}

static void untable(void *p, uint64_t bytes)
{
	if (p)
		munmap(p, bytes);
}

static uint64_t runs_of(const struct index *x)
{
	return (uint64_t)x->n_chunks * CHUNK_RUNS;
}

int index_init(struct bsn *n)
{
	struct index *x = &n->index;
	uint64_t runs = n->config.index_runs;
	uint64_t traces = n->config.index_traces;
	uint64_t buckets = 64;

	if (!runs)
		runs = n->config.pool_bytes / RUN_BYTES_EXPECTED;
	if (!traces)
		traces = runs / 2 + n->config.tombstones;
	x->n_chunks =
		(uint32_t)(runs / CHUNK_RUNS) + n->n_frames + CHUNKS_SPARE;
	x->n_traces = (uint32_t)traces;
	while (buckets < traces)
		buckets *= 2;
	x->n_buckets = (uint32_t)buckets;
	x->traces_free = x->chunks_free = NONE;
	x->traces = table(traces * sizeof(*x->traces));
	x->buckets = table(buckets * sizeof(*x->buckets));
	x->runs = table(runs_of(x) * sizeof(*x->runs));
	x->chunks = table((uint64_t)x->n_chunks * sizeof(*x->chunks));
	if (!x->traces || !x->buckets || !x->runs || !x->chunks)
		return -ENOMEM;
	/* The buckets are all touched soon; the rest fills from the front. */
	memset(x->buckets, 0xff, buckets * sizeof(*x->buckets));
	if (getrandom(x->secret, sizeof(x->secret), 0) != sizeof(x->secret))
		return -EIO;
	return 0;
}

void index_free(struct index *x)
{
	untable(x->traces, (uint64_t)x->n_traces * sizeof(*x->traces));
	untable(x->buckets, (uint64_t)x->n_buckets * sizeof(*x->buckets));
	untable(x->runs, runs_of(x) * sizeof(*x->runs));
	untable(x->chunks, (uint64_t)x->n_chunks * sizeof(*x->chunks));
}

uint64_t index_hash(const struct index *x, struct bs_trace_id id)
{
	unsigned __int128 product = (unsigned __int128)(id.hi ^ x->secret[0]) *
				    (id.lo ^ x->secret[1]);

	/* The id itself goes in again: a factor of zero must not unite all. */
	return ((uint64_t)product ^ (uint64_t)(product >> 64)) +
	       (id.hi ^ id.lo);
}

static uint32_t *bucket(const struct index *x, uint64_t hash)
{
	return &x->buckets[hash & (x->n_buckets - 1)];
}

void index_prefetch_bucket(const struct index *x, uint64_t hash)
{
	__builtin_prefetch(bucket(x, hash), 1);
}

void index_prefetch_trace(const struct index *x, uint64_t hash)
{
	uint32_t t = *bucket(x, hash);

	if (t != NONE)
		__builtin_prefetch(&x->traces[t], 1);
}

uint32_t trace_find(const struct bsn *n, struct bs_trace_id id)
{
	const struct index *x = &n->index;
	uint32_t t = *bucket(x, index_hash(x, id));

	while (t != NONE && !id_is(&x->traces[t], id))
		t = x->traces[t].next;
	return t;
}

/* Find or make its record; NONE when the index is full of what is in use. */
uint32_t trace_get(struct bsn *n, struct bs_trace_id id)
{
	struct index *x = &n->index;
	uint64_t hash = index_hash(x, id);
	uint32_t t = *bucket(x, hash);
	struct trace *trace;

	while (t != NONE && !id_is(&x->traces[t], id))
		t = x->traces[t].next;
	if (t != NONE)
		return t;
	/* Old tombstones go first: the horizon is worth more. */
	for (bool second_chance = true;
	     x->traces_free == NONE && x->traces_fresh == x->n_traces;
	     second_chance = false) {
		if (!tombs_drop_oldest(n) && !pool_reclaim(n, second_chance))
			return NONE;
	}
	/* What was reclaimed may have left this trace a tombstone. */
	t = trace_find(n, id);
	if (t != NONE)
		return t;
	if (x->traces_free != NONE) {
		t = x->traces_free;
		x->traces_free = x->traces[t].next;
	} else {
		t = x->traces_fresh++;
	}
	x->traces_used++;
	trace = &x->traces[t];
	memset(trace, 0, sizeof(*trace));
	trace->hi = id.hi;
	trace->lo = id.lo;
	trace->newest = NONE;
	trace->active = coarse(n->now_ns);
	trace->next = *bucket(x, hash);
	*bucket(x, hash) = t;
	return t;
}

/* Free its record unless something still needs it. */
void trace_put(struct bsn *n, uint32_t t)
{
	struct index *x = &n->index;
	struct trace *trace = &x->traces[t];
	struct bs_trace_id id = {trace->hi, trace->lo};
	uint32_t *link;

	if (trace->newest != NONE || trace->tombs ||
	    trace->flags & TRACE_COLLECTED)
		return;
	link = bucket(x, index_hash(x, id));
	while (*link != t)
		link = &x->traces[*link].next;
	*link = trace->next;
	trace->next = x->traces_free;
	x->traces_free = t;
	x->traces_used--;
}

static bool chunk_room(struct bsn *n)
{
	struct index *x = &n->index;

	for (bool second_chance = true;
	     x->chunks_free == NONE && x->chunks_fresh == x->n_chunks;
	     second_chance = false) {
		if (!pool_reclaim(n, second_chance))
			return false;
	}
	return true;
}

/* Whether run_add() finds room without reclaiming. */
bool run_room(struct bsn *n)
{
	const struct index *x = &n->index;

	return (x->chunks_free != NONE || x->chunks_fresh < x->n_chunks) &&
	       (x->traces_free != NONE || x->traces_fresh < x->n_traces);
}

/* A run of the frame's, not yet in any trace's chain. Reclaims nothing. */
uint32_t run_alloc(struct bsn *n, struct frame *f, uint32_t offset,
		   uint16_t flags)
{
	struct index *x = &n->index;
	struct chunk *c;
	struct run *run;
	uint32_t r;

	if (f->chunk == NONE || x->chunks[f->chunk].used == CHUNK_RUNS) {
		uint32_t k = x->chunks_free;

		if (k != NONE)
			x->chunks_free = x->chunks[k].next;
		else if (x->chunks_fresh < x->n_chunks)
			k = x->chunks_fresh++;
		else
			return NONE;
		x->chunks_used++;
		x->chunks[k] = (struct chunk){.frame = frame_number(n, f),
					      .next = f->chunk};
		f->chunk = k;
	}
	c = &x->chunks[f->chunk];
	r = f->chunk * CHUNK_RUNS + c->used++;
	run = &x->runs[r];
	run->older = NONE;
	run->trace = NONE;
	run->offset8 = (uint16_t)(offset / 8);
	run->flags = flags;
	x->runs_used++;
	return r;
}

/* A run into the index. NONE: no room, after reclaiming all that could be. */
uint32_t run_add(struct bsn *n, struct bs_trace_id id, struct frame *f,
		 uint32_t offset, uint16_t flags)
{
	struct index *x = &n->index;
	uint32_t t, r;

	if (unlikely(f->chunk == NONE ||
		     x->chunks[f->chunk].used == CHUNK_RUNS) &&
	    !chunk_room(n))
		return NONE;
	t = trace_get(n, id);
	if (unlikely(t == NONE))
		return NONE;
	r = run_alloc(n, f, offset, flags);
	if (unlikely(r == NONE)) {
		trace_put(n, t);
		return NONE;
	}
	x->runs[r].trace = t;
	x->runs[r].older = x->traces[t].newest;
	x->traces[t].newest = r;
	if (!(x->traces[t].flags & TRACE_COLLECTED))
		x->traces[t].active = coarse(n->now_ns);
	x->traces[t].flags &= ~TRACE_REPORTED;
	return r;
}

/* The runs of a trace that are not dead, oldest first, into n->chain. */
uint32_t trace_chain(struct bsn *n, uint32_t t)
{
	const struct index *x = &n->index;
	uint32_t count = 0;

	for (uint32_t r = x->traces[t].newest; r != NONE; r = x->runs[r].older)
		count += !(x->runs[r].flags & RUN_DEAD);
	if (count > n->chain_room) {
		uint32_t *chain = realloc(n->chain, count * sizeof(*chain));

		if (!chain)
			return NONE;
		n->chain = chain;
		n->chain_room = count;
	}
	for (uint32_t r = x->traces[t].newest, i = count; r != NONE;
	     r = x->runs[r].older) {
		if (!(x->runs[r].flags & RUN_DEAD))
			n->chain[--i] = r;
	}
	return count;
}

/* The frame's runs have left their chains: give the chunks back. */
void frame_forget_runs(struct bsn *n, struct frame *f)
{
	struct index *x = &n->index;

	while (f->chunk != NONE) {
		uint32_t k = f->chunk;
		struct chunk *c = &x->chunks[k];

		x->runs_used -= c->used;
		f->chunk = c->next;
		c->next = x->chunks_free;
		x->chunks_free = k;
		x->chunks_used--;
	}
}
