/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens to the runs of a segment that is reclaimed (node.h): those of
 * handles that are still open are kept, the others leave their fingerprint.
 */
#include "internal.h"

/* What a segment costs, in entries: pages that the node has not read for long. A run
 * that leaves its fingerprint, and one that is kept. */
#define EVICT_ENTRIES 1500u
#define GONE_ENTRIES 10u
#define KEPT_ENTRIES 25u

/* An entry of the keep arena has another name. */
static uint64_t kept_fingerprint(const struct bsn *n, const struct frame *f,
				 uint64_t entry)
{
	struct bs_trace_id id = run_id(n, f, entry);

	return bs_fingerprint(id.hi, id.lo);
}

static uint64_t fingerprint_of(const struct bsn *n, const struct frame *f,
			       uint64_t entry)
{
	return f->client == &n->keep.arena ? kept_fingerprint(n, f, entry)
					   : bs_entry_fingerprint(entry);
}

static const struct slice *slice_of(const struct bsn *n, const struct frame *f,
				    uint64_t entry)
{
	if (!filter_has(&n->store.filter, fingerprint_of(n, f, entry)))
		return NULL;
	return slice_find(n, run_id(n, f, entry));
}

/* Of one whose search has not begun nothing was copied. */
static bool waits(const struct slice *s)
{
	return s && s->search && !s->search->pass;
}

static bool is_collected(const struct bsn *n, const struct frame *f,
			 uint64_t entry)
{
	const struct slice *s = slice_of(n, f, entry);

	return s && !waits(s);
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
	return true;
}

/* Nothing is lost with a handle that wrote nothing. Where the last run ends is not
 * known without a look at it: then next is 0, which is where no run begins. */
static bool is_empty(uint64_t entry, uint64_t next)
{
	const uint32_t flags = bs_entry_flags(entry);
	const uint32_t whole = BS_RUN_FIRST | BS_RUN_LAST;

	return (flags & (whole | BS_RUN_LOSSY)) == whole &&
	       bs_entry_offset(next) ==
		       bs_entry_offset(entry) + bs_run_header_bytes(flags);
}

/* A process writes as short runs as it likes, and each leaves a fingerprint. So that
 * nobody's are forgotten for another's, each segment may leave so many: three quarters of
 * what gone.c has room for, divided by the segments of the pool. What a segment does not
 * use, its tenant saves for others of its, up to a third more for each segment that it has.
 */
static uint64_t share_of_segment(const struct bsn *n)
{
	uint64_t share = gone_room(&n->ledger) * 3 / 4 / n->pool.n_frames;

	return share ? share : 1;
}

static void save_share(const struct bsn *n, struct tenant *t, uint64_t left)
{
	uint64_t most = gone_room(&n->ledger) / 4 * t->held / n->pool.n_frames;

	t->gone_left = left < most ? left : most;
}

/* What leaves a segment, and is not in the set yet. */
struct leaving {
	uint64_t before; /* gone_added */
	uint64_t room;	 /* for so many more than there were before */
	uint32_t most;	 /* of the batch: there is room for these */
	bool forgets;
	struct gone_batch batch;
};

static uint64_t room_left(const struct bsn *n, const struct leaving *l)
{
	uint64_t added = n->ledger.header->gone_added - l->before;

	return added < l->room ? l->room - added : 0;
}

static void flush(struct bsn *n, struct leaving *l)
{
	uint64_t left;

	gone_add_batch(n, &l->batch);
	left = room_left(n, l);
	l->most = left < GONE_BATCH ? (uint32_t)left : GONE_BATCH;
}

static void leave(struct bsn *n, struct leaving *l, const struct frame *f,
		  uint64_t entry)
{
	const uint64_t fingerprint = fingerprint_of(n, f, entry);
	const uint32_t flags = bs_entry_flags(entry);
	const uint32_t why = GONE_EVICTED |
			     (flags & BS_RUN_LOSSY ? GONE_LOSSY : 0);

	/* Of what was in the set already there is no second: then there is room left. */
	if (unlikely(l->batch.count == l->most))
		flush(n, l);
	if (unlikely(!l->most)) {
		/* As many as are waited for are added, whoever evicts them. */
		if (waits(slice_of(n, f, entry))) {
			gone_add(n, fingerprint, why);
			return;
		}
		n->counts.gone_forgotten++;
		l->forgets = true;
		return;
	}
	l->batch.gone[l->batch.count].fingerprint = fingerprint;
	l->batch.gone[l->batch.count].why = why;
	l->batch.count++;
}

void evict_frame(struct bsn *n, struct frame *f, bool second_chance)
{
	const uint32_t whole = BS_RUN_FIRST | BS_RUN_LAST;
	/* The keep arena is everybody's, and a quarter of the pool at most. */
	struct tenant *t = f->client->tenant;
	const bool is_shared = t && tenant_has_others(n, t);
	struct leaving l = {.before = n->ledger.header->gone_added};
	struct walk walk = walk_of(f, record_of(n, f)->generation);
	uint64_t next = walk.runs ? run_entry(f, 0) : 0;
	uint64_t kept = 0;

	l.room = is_shared ? share_of_segment(n) + t->gone_left : UINT64_MAX;
	flush(n, &l);
	for (uint32_t i = 0; i < walk.runs; i++) {
		uint64_t entry = next;
		uint32_t flags = bs_entry_flags(entry);

		next = i + 1 < walk.runs ? run_entry(f, i + 1) : 0;
		if ((flags & whole) != whole && second_chance &&
		    keep_open(n, f, i, entry, &walk))
			kept++;
		else if (!is_empty(entry, next))
			leave(n, &l, f, entry);
	}
	flush(n, &l);
	n->counts.second_chances += kept;
	n->counts.runs_evicted += walk.runs - kept;
	if (is_shared)
		save_share(n, t, room_left(n, &l));
	if (l.forgets)
		client_forget(n, f->client);
	n->cost +=
		EVICT_ENTRIES + GONE_ENTRIES * walk.runs + KEPT_ENTRIES * kept;
}
