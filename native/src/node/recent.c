/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the pool holds of the last seconds: for who asks for all of it at once.
 *
 * Which segments are recent, their times of sealing tell, and which runs in them,
 * their last records: where little happens, a segment lasts long. There may be millions
 * of traces, and each is looked at, so that goes on piece by piece, and between
 * two the lock is given up. Of all that are found those of the highest priority
 * are kept, in a heap whose root is the lowest of them: the same ones on each
 * node that has them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

/* Under 100 us, at a cache miss an entry; a look at what is gone is as dear as some
 * of them. */
#define ENTRIES_A_PIECE 1000u
#define GONE_ENTRIES 6u

struct candidate {
	uint64_t priority;
	struct bs_trace_id id;
};

static void sift_down(struct candidate *heap, uint32_t count, uint32_t i)
{
	for (;;) {
		uint32_t child = 2 * i + 1;
		struct candidate lower;

		if (child >= count)
			return;
		if (child + 1 < count &&
		    heap[child + 1].priority < heap[child].priority)
			child++;
		if (heap[i].priority <= heap[child].priority)
			return;
		lower = heap[child];
		heap[child] = heap[i];
		heap[i] = lower;
		i = child;
	}
}

static void sift_up(struct candidate *heap, uint32_t i)
{
	while (i && heap[i].priority < heap[(i - 1) / 2].priority) {
		struct candidate lower = heap[i];

		heap[i] = heap[(i - 1) / 2];
		heap[(i - 1) / 2] = lower;
		i = (i - 1) / 2;
	}
}

static int by_priority(const void *a, const void *b)
{
	const struct candidate *x = a, *y = b;

	return x->priority < y->priority ? 1 : -(x->priority > y->priority);
}

/* Whether it is among those that are kept: a set of their priorities. Who chooses trace
 * ids chooses these, since all processes know the cluster's seed: so each has its place
 * by a secret. */
struct set {
	uint64_t *places; /* 0: free */
	uint32_t room;
	uint64_t secret;
};

static uint32_t home_of(const struct set *set, uint64_t priority)
{
	return (uint32_t)bs_fmix64(priority ^ set->secret) & (set->room - 1);
}

static uint32_t place_of(const struct set *set, uint64_t priority)
{
	uint32_t i = home_of(set, priority);

	while (set->places[i] && set->places[i] != priority)
		i = (i + 1) & (set->room - 1);
	return i;
}

static void set_remove(struct set *set, uint64_t priority)
{
	uint32_t hole = place_of(set, priority);
	uint32_t i = hole;

	set->places[hole] = 0;
	/* What was pushed on by it moves up. */
	for (;;) {
		uint32_t home;

		i = (i + 1) & (set->room - 1);
		if (!set->places[i])
			return;
		home = home_of(set, set->places[i]);
		if (((i - home) & (set->room - 1)) <
		    ((i - hole) & (set->room - 1)))
			continue;
		set->places[hole] = set->places[i];
		set->places[i] = 0;
		hole = i;
	}
}

struct recent {
	uint64_t domain;
	uint64_t age_ns;
	const char *service;
	/* Those that are asked for, not by their service: NULL, or ascending. */
	const uint32_t *clients;
	uint32_t n_clients;
	struct candidate *heap;
	uint32_t count, room;
	struct set set;
	uint32_t looked; /* entries since the lock was given up */
};

/* What was collected already is on its way, or arrived. */
static bool is_collected(struct bsn *n, struct recent *r, struct bs_trace_id id)
{
	uint64_t fingerprint = bs_fingerprint(id.hi, id.lo);

	r->looked += GONE_ENTRIES;
	return slice_find(n, id) ||
	       gone_why(n, fingerprint) & (GONE_REPORTED | GONE_ABANDONED);
}

static void offer(struct bsn *n, struct recent *r, struct bs_trace_id id)
{
	struct candidate c = {.id = id};
	uint32_t place;

	c.priority = bs_hash_trace(r->domain, id);
	if (!c.priority)
		c.priority = 1; /* 0 is a free place in the set */
	if (r->count == r->room && c.priority <= r->heap[0].priority)
		return;
	place = place_of(&r->set, c.priority);
	if (r->set.places[place] || is_collected(n, r, id))
		return;
	if (r->count < r->room) {
		r->set.places[place] = c.priority;
		r->heap[r->count] = c;
		sift_up(r->heap, r->count++);
		return;
	}
	set_remove(&r->set, r->heap[0].priority);
	r->set.places[place_of(&r->set, c.priority)] = c.priority;
	r->heap[0] = c;
	sift_down(r->heap, r->count, 0);
}

/* What says no time may be of this moment; what is open is. */
static bool is_young(struct bsn *n, struct recent *r, const struct run *run)
{
	const struct client *c;
	uint32_t records;
	uint64_t last_ns = clock_monotonic(
		n, records_last_ticks(run->frame->bytes + run->records,
				      run->bytes, &records));

	r->looked += records;
	if (!last_ns || ns_since(n, last_ns) <= r->age_ns)
		return true;
	c = client_find(n, run->owner.number);
	return c && handle_is_open(c, run->handle);
}

static int by_number(const void *a, const void *b)
{
	const uint32_t *x = a, *y = b;

	return *x > *y ? 1 : -(*x < *y);
}

static bool is_of_whom(const struct recent *r, uint32_t client,
		       const char *service)
{
	if (r->clients)
		return bsearch(&client, r->clients, r->n_clients,
			       sizeof(client), by_number);
	return !r->service[0] ||
	       !strncmp(service, r->service,
			sizeof(((struct client *)NULL)->service));
}

/* A kept run is as old as the segment that it was written in, and its process
 * may be gone. */
static bool is_wanted(struct bsn *n, struct recent *r, struct frame *f,
		      uint32_t index, uint64_t entry, struct walk *walk)
{
	struct run run;

	if (!run_open(n, f, index, entry, walk, &run) || !is_young(n, r, &run))
		return false;
	if (f->client != &n->keep.arena)
		return true;
	return ns_since(n, run.granted_ns) <= r->age_ns &&
	       is_of_whom(r, run.owner.number, run.owner.service);
}

static bool is_recent(const struct bsn *n, uint32_t i, uint64_t age_ns)
{
	const struct grant_record *r = &n->ledger.records[i];

	if (!n->pool.frames[i].client)
		return false;
	return r->state == FRAME_ACTIVE ||
	       ((r->state == FRAME_SEALED || r->state == FRAME_PARKED) &&
		ns_since(n, r->sealed) <= age_ns);
}

static void offer_frame(struct bsn *n, struct recent *r, uint32_t number)
{
	uint64_t granted_ns = n->ledger.records[number].granted_ns;
	struct frame *f = frame_at(n, number);
	struct walk walk = walk_of(f, record_of(n, f)->generation);

	if (f->client != &n->keep.arena &&
	    !is_of_whom(r, f->client->number, f->client->service))
		return;
	for (uint32_t i = 0; i < walk.runs; i++) {
		uint64_t entry = run_entry(f, i);
		struct bs_trace_id id = run_id(n, f, entry);

		if (!id_is_zero(id) && is_wanted(n, r, f, i, entry, &walk))
			offer(n, r, id);
		if (++r->looked <= ENTRIES_A_PIECE)
			continue;
		node_give_way(n);
		r->looked = 0;
		/* It may be reclaimed now, and the table of frames elsewhere. */
		if (!is_recent(n, number, r->age_ns) ||
		    n->ledger.records[number].granted_ns != granted_ns)
			return;
		f = frame_at(n, number);
	}
}

/* How many there are, known by the lowest priority of the highest: if all are
 * kept, their number; else as many as fit the part of all priorities above it.
 * (Priorities are hashes; of 10,000 the error is one in a hundred.) */
static uint64_t estimate(const struct recent *r)
{
	double above, about = r->count;

	if (r->count < r->room)
		return r->count;
	above = (double)(UINT64_MAX - r->heap[0].priority) / 0x1p64;
	if (above > 0)
		about = (r->count - 1) / above;
	/* Of one alone nothing can be told. */
	return about > r->count ? (uint64_t)about : r->count;
}

void bsn_set_priority_seed(struct bsn *n, uint64_t seed)
{
	node_lock(n);
	n->priority_seed = seed;
	node_unlock(n);
}

static int recent(struct bsn *n, uint64_t now_ns, struct recent whose,
		  struct bs_trace_id *ids, int room, uint64_t *found)
{
	struct recent r = whose;
	uint64_t age_ns = r.age_ns;

	*found = 0;
	if (room <= 0)
		return -EINVAL;
	r.room = (uint32_t)room;
	r.set.secret = n->secret;
	r.domain = bs_hash_prepare(BS_HASH_PRIORITY, strlen(BS_HASH_PRIORITY),
				   n->priority_seed);
	for (r.set.room = 64; r.set.room < 2 * r.room; r.set.room *= 2)
		;
	r.heap = malloc((size_t)room * sizeof(*r.heap));
	r.set.places = calloc(r.set.room, sizeof(*r.set.places));
	if (!r.heap || !r.set.places) {
		free(r.heap);
		free(r.set.places);
		return -ENOMEM;
	}
	node_lock(n);
	node_catch_up(n, now_ns);
	for (uint32_t i = 0; i < n->pool.frames_fresh; i++) {
		if (is_recent(n, i, age_ns))
			offer_frame(n, &r, i);
		if (++r.looked > ENTRIES_A_PIECE) {
			node_give_way(n);
			r.looked = 0;
		}
	}
	node_unlock(n);
	*found = estimate(&r);
	qsort(r.heap, r.count, sizeof(*r.heap), by_priority);
	for (uint32_t i = 0; i < r.count; i++)
		ids[i] = r.heap[i].id;
	free(r.heap);
	free(r.set.places);
	return (int)r.count;
}

int bsn_recent(struct bsn *n, uint64_t now_ns, uint64_t age_ns,
	       const char *service, struct bs_trace_id *ids, int room,
	       uint64_t *found)
{
	struct recent whose = {.age_ns = age_ns, .service = service};

	return recent(n, now_ns, whose, ids, room, found);
}

int bsn_recent_of(struct bsn *n, uint64_t now_ns, uint64_t age_ns,
		  uint32_t *clients, int n_clients, struct bs_trace_id *ids,
		  int room, uint64_t *found)
{
	struct recent whose = {
		.age_ns = age_ns,
		.clients = clients,
		.n_clients = n_clients < 0 ? 0 : (uint32_t)n_clients,
	};

	qsort(clients, whose.n_clients, sizeof(*clients), by_number);
	return recent(n, now_ns, whose, ids, room, found);
}
