/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens to the runs of a segment that is reclaimed (node.h): those of
 * handles that are still open are kept, the others leave their fingerprint.
 */
#include "internal.h"

/* Ahead of the entry that is looked at: as many cache misses side by side as a
 * core can have. 8 cost a third more, 64 a quarter. */
#define AHEAD 32u

/* What a segment costs, in entries: pages that the node has not read for long. A run
 * that leaves its fingerprint, and one that is kept. */
#define EVICT_ENTRIES 1500u
#define GONE_ENTRIES 10u
#define KEPT_ENTRIES 25u

/* An entry of the keep arena has another name. */
static uint64_t fingerprint_of(const struct bsn *n, const struct frame *f,
			       uint64_t entry)
{
	struct bs_trace_id id;

	if (likely(f->client != &n->keep.arena))
		return bs_entry_fingerprint(entry);
	id = run_id(n, f, entry);
	return bs_fingerprint(id.hi, id.lo);
}

static bool is_collected(const struct bsn *n, const struct frame *f,
			 uint64_t entry)
{
	const struct slice *s;

	if (!filter_has(&n->store.filter, fingerprint_of(n, f, entry)))
		return false;
	s = slice_find(n, run_id(n, f, entry));
	/* Of one whose search has not begun nothing was copied. */
	return s && (!s->search || s->search->pass);
}

/* True: it has its second chance. */
static bool keep_open(struct bsn *n, struct frame *f, uint32_t index,
		      uint64_t entry, struct walk *walk)
{
	struct client *c = f->client;
	struct run run;

	/* What is collected was copied when it was written. */
	if (is_collected(n, f, entry))
		return false;
	if (!run_open(n, f, index, entry, walk, &run)) {
		n->counts.corrupt++;
		return false;
	}
	if (c == &n->keep.arena)
		c = client_find(n, run.owner.number);
	if (id_is_zero(run.id) || !c || !handle_is_open(c, run.handle) ||
	    !keep_run(n, &run))
		return false;
	n->counts.second_chances++;
	return true;
}

/* Nothing is lost with a handle that wrote nothing. Of the last run it is not known
 * without a look at it. */
static bool is_empty(const struct frame *f, uint32_t index, uint64_t entry,
		     const struct walk *walk)
{
	const uint32_t flags = bs_entry_flags(entry);
	const uint32_t whole = BS_RUN_FIRST | BS_RUN_LAST;

	if ((flags & (whole | BS_RUN_LOSSY)) != whole ||
	    index + 1 >= walk->runs)
		return false;
	return bs_entry_offset(READ_ONCE(*bs_directory(f->bytes, index + 1))) ==
	       bs_entry_offset(entry) + bs_run_header_bytes(flags);
}

/* A process writes as short runs as it likes, and each leaves a fingerprint. So that
 * nobody's are forgotten for another's, gone.c has room for so many of each segment of
 * the pool, three quarters of all. What a tenant's segments do not need of it, others of
 * them may, as far as the last quarter goes: a third more for each segment that it has.
 * Together they are as many, while the pool turns once, as are remembered. */
static uint64_t share_of_segment(const struct bsn *n)
{
	return gone_room(&n->ledger) * 3 / 4 / n->pool.n_frames;
}

static void save_share(const struct bsn *n, struct tenant *t, uint64_t left)
{
	uint64_t most = share_of_segment(n) / 3 * t->held;

	t->gone_left = left < most ? left : most;
}

void evict_frame(struct bsn *n, struct frame *f, bool second_chance)
{
	const uint32_t whole = BS_RUN_FIRST | BS_RUN_LAST;
	const uint64_t *added = &n->ledger.header->gone_added;
	/* The keep arena is everybody's, and a quarter of the pool at most. */
	struct tenant *t = f->client->tenant;
	bool is_shared = t && tenant_has_others(n, t);
	uint64_t before = *added, room = UINT64_MAX;
	bool forgets = false;
	struct walk walk = walk_of(f, record_of(n, f)->generation);
	uint64_t kept = n->counts.second_chances;

	if (is_shared)
		room = share_of_segment(n) + t->gone_left;
	for (uint32_t i = 0; i < walk.runs; i++) {
		uint64_t entry = run_entry(f, i);
		uint32_t flags = bs_entry_flags(entry);

		/* A kept run's place is elsewhere: of these there are few. */
		if (i + AHEAD < walk.runs)
			gone_prefetch(n, bs_entry_fingerprint(READ_ONCE(
						 *bs_directory(f->bytes,
							       i + AHEAD))));
		if ((flags & whole) != whole && second_chance &&
		    keep_open(n, f, i, entry, &walk))
			continue;
		n->counts.runs_evicted++;
		if (is_empty(f, i, entry, &walk))
			continue;
		if (unlikely(*added - before >= room)) {
			n->counts.gone_forgotten++;
			forgets = true;
			continue;
		}
		gone_add(n, fingerprint_of(n, f, entry),
			 flags & BS_RUN_LOSSY ? GONE_EVICTED | GONE_LOSSY
					      : GONE_EVICTED);
	}
	if (is_shared)
		save_share(n, t, room - (*added - before));
	if (forgets)
		client_forget(n, f->client);
	kept = n->counts.second_chances - kept;
	n->cost +=
		EVICT_ENTRIES + GONE_ENTRIES * walk.runs + KEPT_ENTRIES * kept;
}
