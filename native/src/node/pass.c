/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pass over the directories of all segments, for all traces that wait: each
 * entry is read once, however many they are.
 *
 *   keep arena, in the order of sealing   what was written first
 *   sealed segments, likewise
 *   segments that are written to          up to where watch.c goes on: with
 *                                         the run that is open, as far as it is
 *
 * It goes on in pieces, between which others have the lock. Each frame that
 * was passed is marked; one that is reclaimed before its turn is looked at
 * then (pass_before_reclaim). So it begins: one search after the other joins it,
 * and what is reclaimed meanwhile is looked at for those that have.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* A frame is as dear as some entries, because its directory is not in the cache; so is
 * a run whose header is read. */
#define FRAME_ENTRIES 50u

/* What a column is dear as, and how many entries of one cost as much as one of a
 * directory. */
#define COLUMN_ENTRIES 10u
#define COLUMN_FASTER 3u
#define HIT_ENTRIES 40u
#define PASSED_OVER_ENTRIES 4u

/* --------------------------------------------------------------- frames --- */

static bool is_visited(const struct pass *p, uint32_t i)
{
	return p->visited[i / 64] >> (i % 64) & 1;
}

static void set_visited(struct pass *p, uint32_t i, bool visited)
{
	uint64_t bit = 1ull << (i % 64);

	if (visited)
		p->visited[i / 64] |= bit;
	else
		p->visited[i / 64] &= ~bit;
}

bool pass_has_met(const struct bsn *n, const struct search *s,
		  const struct frame *f)
{
	const struct pass *p = s->pass;

	return p && (p->over || is_visited(p, frame_number(n, f)));
}

/* watch.c goes on in it. A peek has no slice that it could go on for. */
static bool is_watched(const struct bsn *n, const struct pass *p,
		       const struct frame *f)
{
	uint8_t state = record_of(n, f)->state;

	return (state == FRAME_ACTIVE || state == FRAME_PARKED) &&
	       f->client->live && f->client != &n->keep.arena && !p->is_peek;
}

static bool is_kept(const struct bsn *n, const struct frame *f)
{
	return f->client == &n->keep.arena;
}

static const struct filter *
filter_for(const struct bsn *n, const struct pass *p, const struct frame *f)
{
	return is_kept(n, f) ? &p->wanted.kept_filter : &p->wanted.filter;
}

/* Returns what it cost, in entries. Of the processes of a slice each is looked at. */
static uint32_t hit(struct bsn *n, struct search *s, struct frame *f,
		    uint32_t index, uint64_t entry, struct walk *walk)
{
	bool watched = is_watched(n, s->pass, f) && index == f->scanned;
	uint64_t before = n->cost;
	struct ticks ticks;
	uint32_t copied;
	struct run run;

	/* Released meanwhile. */
	if (!s->to.slice)
		return PASSED_OVER_ENTRIES;
	if (!run_open(n, f, index, entry, walk, &run)) {
		n->counts.corrupt++;
		s->to.slice->flags |= BSN_SLICE_CORRUPT;
		return 1;
	}
	if (run.from) {
		search_put_off(n, s, &run);
		return HIT_ENTRIES + run.bytes / BYTES_AN_ENTRY;
	}
	/* That it is closed by now, watch.c will tell. */
	if (watched)
		run.flags &= ~(BS_RUN_LAST | BS_RUN_CLOSED);
	copied = slice_copy_run(n, &s->to, &run, NONE, &ticks);
	if (watched)
		watch_from(n, f, copied);
	search_meet(n, s, &run, ticks);
	return HIT_ENTRIES + s->to.slice->n_parts + run.bytes / BYTES_AN_ENTRY +
	       (uint32_t)(n->cost - before);
}

static uint32_t look(struct bsn *n, struct pass *p, struct frame *f,
		     uint32_t index, struct walk *walk)
{
	uint64_t entry = run_entry(f, index);
	uint64_t fingerprint = bs_entry_fingerprint(entry);
	struct search *s;

	/* Half of it was met. Kept runs look alike by chance alone (keep.c). */
	if (!is_kept(n, f) &&
	    (!wanted_has_fingerprint(&p->wanted, fingerprint) ||
	     wanted_passes_over(&p->wanted, f->client->number, fingerprint)))
		return PASSED_OVER_ENTRIES;
	s = wanted_find(&p->wanted, run_id(n, f, entry));
	if (s)
		return hit(n, s, f, index, entry, walk);
	n->counts.false_hits++;
	if (!is_kept(n, f))
		wanted_in_vain(&p->wanted, f->client->number, fingerprint);
	return HIT_ENTRIES;
}

/* False: it was visited, or its runs were kept since the pass began, from segments that
 * are visited before they are reclaimed. */
static bool may_visit(const struct bsn *n, const struct pass *p,
		      const struct frame *f)
{
	return !is_visited(p, frame_number(n, f)) &&
	       (f->client != &n->keep.arena ||
		record_of(n, f)->granted_ns <= p->granted_ns);
}

/* How many entries were there when the pass began. */
static uint32_t limit_of(const struct bsn *n, const struct pass *p,
			 const struct frame *f, uint32_t runs)
{
	return frame_number(n, f) == p->keep_frame && runs > p->keep_runs
		       ? p->keep_runs
		       : runs;
}

/* False: there is more, and a piece is done. */
static bool visit_directory(struct bsn *n, struct pass *p, struct frame *f,
			    uint32_t most, uint32_t *cost)
{
	const struct filter *filter = filter_for(n, p, f);
	uint32_t from = p->in.entry, limit;
	const uint64_t *entry;

	if (!p->in.walk.end) {
		*cost += FRAME_ENTRIES;
		p->in.walk.end = FIRST_RUN;
	}
	p->in.walk.runs = runs_count(f, record_of(n, f)->generation);
	limit = limit_of(n, p, f, p->in.walk.runs);
	if (is_watched(n, p, f) && f->scanned < p->in.walk.runs)
		limit = f->scanned + 1;
	entry = bs_directory(f->bytes, 0);
	for (; p->in.entry < limit && *cost < most; p->in.entry++) {
		uint64_t name =
			bs_entry_fingerprint(READ_ONCE(*(entry - p->in.entry)));

		++*cost;
		if (wanted_may_have(&p->wanted, filter, name))
			*cost += look(n, p, f, p->in.entry, &p->in.walk);
	}
	n->counts.entries_searched += p->in.entry - from;
	return p->in.entry >= limit;
}

/* Each entry of a column is a third of one of a directory: with those that are looked
 * at, up to `most`. */
static bool visit_column(struct bsn *n, struct pass *p, struct frame *f,
			 uint32_t most, uint32_t *cost)
{
	const struct filter *filter = filter_for(n, p, f);
	uint32_t from = p->in.entry, looked = 0, limit;

	limit = limit_of(n, p, f, f->column_runs);
	for (; p->in.entry < limit && *cost + looked < most; p->in.entry++) {
		if (!wanted_may_have(&p->wanted, filter,
				     f->column[p->in.entry]))
			continue;
		if (!p->in.walk.end)
			p->in.walk = walk_of(f, record_of(n, f)->generation);
		looked += look(n, p, f, p->in.entry, &p->in.walk);
	}
	n->counts.entries_searched += p->in.entry - from;
	*cost += COLUMN_ENTRIES + looked + (p->in.entry - from) / COLUMN_FASTER;
	return p->in.entry >= limit;
}

/* What slices that are not looked for get of it. From the run on that is open then,
 * watch.c goes on. */
static bool watch(struct bsn *n, struct frame *f, uint32_t most, uint32_t *cost)
{
	uint64_t before = n->cost;

	if (*cost >= most)
		return false;
	watch_until(n, f, false, before + most - *cost);
	*cost += (uint32_t)(n->cost - before);
	return *cost < most;
}

/* All of a frame; or so much that it cost `most`, and the rest in further calls: false
 * as long as there is more. Others may have the lock between them, so it is visited
 * when all of it is: until then what comes there is the pass's, and not watch.c's. */
static bool visit(struct bsn *n, struct pass *p, struct frame *f, uint32_t most,
		  uint32_t *cost)
{
	uint32_t i = frame_number(n, f);
	bool done;

	if (!may_visit(n, p, f))
		return true;
	if (p->in.frame != i)
		p->in = (struct visit){.frame = i};
	if (is_watched(n, p, f) && !watch(n, f, most, cost))
		return false;
	if (f->column)
		done = visit_column(n, p, f, most, cost);
	else
		done = visit_directory(n, p, f, most, cost);
	if (!done)
		return false;
	set_visited(p, i, true);
	p->in.frame = NONE;
	return true;
}

void pass_before_reclaim(struct bsn *n, struct frame *f)
{
	for (struct pass *p = n->passes; p; p = p->next) {
		struct visit in = p->in;
		uint32_t cost = 0;

		visit(n, p, f, UINT32_MAX, &cost);
		n->cost += cost;
		if (in.frame != frame_number(n, f))
			p->in = in;
		/* Its next life is the pass's, too: for those that join later. */
		if (p->joining)
			set_visited(p, frame_number(n, f), false);
	}
}

void pass_before_unseal(struct bsn *n, const struct frame *f)
{
	for (struct pass *p = n->passes; p; p = p->next) {
		if (p->at == frame_number(n, f))
			p->at = p->through_keep ? f->prev_own : f->prev;
	}
}

/* A line of a column; and of a directory so many lines. */
#define COLUMN_LINE (BS_CACHE_LINE / (uint32_t)sizeof(uint32_t))
#define DIRECTORY_LINES 4u

static void prefetch(const struct frame *f)
{
	if (f->column) {
		for (uint32_t i = 0; i < f->column_runs; i += COLUMN_LINE)
			__builtin_prefetch(f->column + i);
		return;
	}
	__builtin_prefetch(f->bytes);
	for (uint32_t i = 1; i <= DIRECTORY_LINES; i++)
		__builtin_prefetch(f->bytes + SEGMENT - i * BS_CACHE_LINE);
}

/* ---------------------------------------------------------------- lists --- */

/* In pieces between which others have the lock: they may reclaim it. */
static void visit_whole(struct bsn *n, struct pass *p, struct frame *f,
			uint32_t *cost)
{
	bool done;

	do {
		done = visit(n, p, f, PIECE_ENTRIES, cost);
		if (*cost >= PIECE_ENTRIES) {
			node_commit_and_give_way(n);
			*cost = 0;
		}
	} while (!done && p->in.frame == frame_number(n, f));
}

/* What it has visited a part of comes first, whatever became of that. False: a piece is
 * done, and there is more. */
static bool visit_rest(struct bsn *n, struct pass *p, uint32_t *cost)
{
	return p->in.frame == NONE ||
	       visit(n, p, frame_at(n, p->in.frame), PIECE_ENTRIES, cost);
}

static const struct list *sealed_list(const struct bsn *n, const struct pass *p)
{
	return p->through_keep ? &n->keep.arena.sealed : &n->pool.sealed;
}

static uint32_t next_in_list(const struct pass *p, const struct frame *f)
{
	return p->through_keep ? f->next_own : f->next;
}

/* The next of the sealed; NONE: that was the last. */
static uint32_t next_sealed(const struct bsn *n, const struct pass *p)
{
	return p->at == NONE ? sealed_list(n, p)->head
			     : next_in_list(p, frame_at(n, p->at));
}

/* What comes after one of them; NONE: all. */
static void visit_sealed(struct bsn *n, struct pass *p, bool keep,
			 uint32_t after, uint32_t *cost)
{
	uint32_t i;

	if (p->in.frame != NONE)
		visit_whole(n, p, frame_at(n, p->in.frame), cost);
	p->through_keep = keep;
	p->at = after;
	while ((i = next_sealed(n, p)) != NONE) {
		struct frame *f = frame_at(n, i);
		uint32_t soon = next_in_list(p, f);

		if (soon != NONE)
			prefetch(frame_at(n, soon));
		p->at = i;
		if (may_visit(n, p, f) && !f->column &&
		    record_of(n, f)->state == FRAME_SEALED && column_make(n, f))
			*cost += FRAME_ENTRIES + f->column_runs;
		visit_whole(n, p, f, cost);
	}
}

/* Of the sealed, the last that it has been through. */
static uint32_t last_passed(const struct bsn *n, const struct pass *p)
{
	uint32_t i = n->pool.sealed.tail;

	while (i != NONE && n->ledger.records[i].sealed > p->sealed)
		i = frame_at(n, i)->prev;
	return i;
}

/* False: a piece is done, and there is more. */
static bool visit_client(struct bsn *n, struct pass *p, const struct client *c,
			 uint32_t *cost)
{
	if (!visit_rest(n, p, cost))
		return false;
	for (uint32_t i = c->active.head; i != NONE;) {
		struct frame *f = frame_at(n, i);

		i = f->next_own;
		if (i != NONE)
			prefetch(frame_at(n, i));
		if (!visit(n, p, f, PIECE_ENTRIES, cost))
			return false;
	}
	return true;
}

static void visit_active(struct bsn *n, struct pass *p, uint32_t *cost)
{
	struct client *c;

	for_each_client(n, c) {
		uint32_t number = c->number;

		while (c && !visit_client(n, p, c, cost)) {
			*cost = 0;
			node_commit_and_give_way(n);
			c = client_find(n, number);
		}
	}
}

/* Those that threads entered since it began with the active: it may have been through
 * those of their process before. False: a piece is done, and there is more. */
static bool visit_active_since(struct bsn *n, struct pass *p, uint32_t *cost)
{
	struct client *c;

	if (!visit_rest(n, p, cost))
		return false;
	for_each_client(n, c) {
		for (uint32_t i = c->active.tail; i != NONE;) {
			struct frame *f = frame_at(n, i);

			if (f->entered <= p->entered)
				break;
			i = f->prev_own;
			if (!visit(n, p, f, PIECE_ENTRIES, cost))
				return false;
		}
	}
	return true;
}

/* What was sealed, or entered, since it was through these: until nothing is left at
 * one moment. Meanwhile less comes than it has been through. */
static void visit_since(struct bsn *n, struct pass *p, uint32_t *cost)
{
	for (;;) {
		visit_sealed(n, p, false, last_passed(n, p), cost);
		if (visit_active_since(n, p, cost))
			return;
		*cost = 0;
		node_commit_and_give_way(n);
	}
}

/* ------------------------------------------------------------------ pass --- */

/* What it costs to have a search join, in entries: it is in no cache. */
#define JOIN_ENTRIES 80u

static int pass_init(const struct bsn *n, struct pass *p, uint32_t count)
{
	int err;

	memset(p, 0, sizeof(*p));
	p->joining = true;
	p->visited = calloc(n->pool.frames_room / 64 + 1, sizeof(uint64_t));
	err = wanted_init(n, &p->wanted, count);
	if (err || !p->visited)
		return -ENOMEM;
	p->at = p->in.frame = p->keep_frame = NONE;
	p->granted_ns = UINT64_MAX;
	return 0;
}

void pass_free(struct pass *p)
{
	wanted_free(&p->wanted);
	free(p->visited);
}

static void join(struct bsn *n, struct pass *p, struct search *s)
{
	/* Released meanwhile. */
	if (!s->to.slice)
		return;
	wanted_add(n, &p->wanted, s);
	s->pass = p;
	s->why |= gone_why_since(n, s->fingerprint, s->seen);
	s->seen = gone_seen(n);
	p->is_peek |= s->to.buffer != NULL;
}

/* All have joined. */
static void begin(const struct bsn *n, struct pass *p)
{
	p->joining = false;
	p->granted_ns = n->ledger.header->granted_ns;
	p->keep_frame = n->keep.frame;
	if (p->keep_frame != NONE)
		p->keep_runs =
			runs_count(frame_at(n, p->keep_frame),
				   n->ledger.records[p->keep_frame].generation);
}

int pass_begin(struct bsn *n, struct pass *p, struct search *searches,
	       uint32_t count)
{
	int err = pass_init(n, p, count);

	if (err) {
		pass_free(p);
		return err;
	}
	p->next = n->passes;
	n->passes = p;
	for (struct search *s = searches; s; s = s->next) {
		join(n, p, s);
		p->cost += JOIN_ENTRIES;
		if (p->cost >= PIECE_ENTRIES) {
			node_commit_and_give_way(n);
			p->cost = 0;
		}
	}
	begin(n, p);
	return 0;
}

void pass_run(struct bsn *n, struct pass *p)
{
	uint32_t cost = p->cost;

	visit_sealed(n, p, true, NONE, &cost);
	if (n->keep.frame != NONE)
		visit_whole(n, p, frame_at(n, n->keep.frame), &cost);
	visit_sealed(n, p, false, NONE, &cost);
	p->sealed = n->ledger.header->sealed;
	p->entered = n->pool.entered;
	visit_active(n, p, &cost);
	visit_since(n, p, &cost);
	n->counts.passes++;
}

void pass_end(struct bsn *n, struct pass *p)
{
	for (struct pass **link = &n->passes; *link; link = &(*link)->next) {
		if (*link == p) {
			*link = p->next;
			break;
		}
	}
	p->over = true;
}
