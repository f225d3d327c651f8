/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is written of traces that are collected already. While there are
 * slices, new entries of the segments that are written to are compared with
 * them, at each poll; without, nothing is looked at.
 *
 *   entries |  scanned  | open run | not there yet
 *           0           ^ f->scanned, of which f->copied bytes are in its slice
 *
 * All slices were served what lies before f->scanned: by this, or by the
 * search that made them (pass.c). How far that is, is saved with the slices,
 * in one commit (mark.c), so a successor goes on in the same place.
 */
#include "internal.h"

/* A look at a frame is as dear as some entries, and so is a run that is served. */
#define FRAME_ENTRIES 4u
#define RUN_ENTRIES 40u

static void set_dirty(struct bsn *n, struct frame *f)
{
	if (f->dirty)
		return;
	f->dirty = true;
	n->pool.dirty[n->pool.n_dirty++] = frame_number(n, f);
}

/* Of the run that is looked at next, so much is in its slice already. */
void watch_from(struct bsn *n, struct frame *f, uint32_t copied)
{
	f->copied = copied;
	set_dirty(n, f);
}

/* A run into the slice of its trace, if it has one that is served here. */
static uint32_t serve(struct bsn *n, struct frame *f, uint64_t entry,
		      struct walk *walk, bool final)
{
	struct slice *s = slice_find(n, run_id(n, f, entry));
	struct sink to = {.slice = s};
	uint32_t open, flags, crumbs, before = f->copied;
	struct ticks ticks;
	uint64_t bytes;
	struct run run;

	n->cost += RUN_ENTRIES;
	if (!s || (s->search && !pass_has_met(n, s->search, f)))
		return NONE;
	if (!run_open(n, f, f->scanned, entry, walk, &run)) {
		n->counts.corrupt++;
		s->flags |= BSN_SLICE_CORRUPT;
		slice_dirty(n, s);
		return NONE;
	}
	/* A thread that was killed marks a loss there, and closes nothing. */
	if (final)
		run.flags |= BS_RUN_CLOSED;
	open = slice_open_handles(s);
	flags = s->flags;
	crumbs = s->n_crumbs;
	bytes = s->bytes;
	/* A slice is told what processes lose that have a part in it. */
	if (!s->search && before == NONE &&
	    client_may_lack(n, f->client, run.granted_ns))
		s->flags |= BSN_SLICE_MAYBE_LOSSY;
	watch_from(n, f, slice_copy_run(n, &to, &run, before, &ticks));
	/* Its search has been here, and is not judged yet. */
	if (s->search && before == NONE)
		search_meet(n, s->search, &run, ticks);
	else if (s->search)
		search_meet_again(n, s->search, &run, ticks.last);
	else
		slice_count_run(n, s, &run, before == NONE);
	if (s->bytes != bytes || s->flags != flags || s->n_crumbs != crumbs ||
	    slice_open_handles(s) != open)
		slice_dirty(n, s);
	n->cost += (run.bytes - (before == NONE ? 0 : before)) / BYTES_AN_ENTRY;
	return f->copied;
}

/* final: nobody writes there any more, so an open run is over too. */
bool watch_until(struct bsn *n, struct frame *f, bool final, uint64_t end)
{
	struct walk walk;

	if (!n->store.n_slices)
		return false;
	walk = walk_of(f, record_of(n, f)->generation);
	while (f->scanned < walk.runs) {
		uint64_t entry = run_entry(f, f->scanned);

		if (n->cost >= end)
			return false;

		if (filter_has(&n->store.filter, bs_entry_fingerprint(entry)))
			f->copied = serve(n, f, entry, &walk, final);
		if (!(bs_entry_flags(entry) & BS_RUN_CLOSED) && !final)
			return false;
		f->scanned++;
		n->counts.entries_watched++;
		n->cost++;
		f->copied = NONE;
		set_dirty(n, f);
	}
	return true;
}

void watch_frame(struct bsn *n, struct frame *f, bool final)
{
	watch_until(n, f, final, UINT64_MAX);
}

static const uint32_t *runs_of(const struct frame *f)
{
	return &((const struct bs_segment_header *)f->bytes)->runs;
}

/* Of most nothing was written since they were looked at: of those one word is
 * read, and so many words ahead are asked for. */
#define FRAMES_AHEAD 8u

/* Until so much is done. False: there is more; what is done already is looked
 * at in no time. */
static bool watch_client(struct bsn *n, struct client *c, uint64_t end)
{
	uint32_t ahead = c->active.head;
	struct frame *f;

	for (uint32_t i = 0; i < FRAMES_AHEAD && ahead != NONE; i++)
		ahead = frame_at(n, ahead)->next_own;
	for (uint32_t i = c->active.head; i != NONE; i = f->next_own) {
		uint32_t scanned, copied;

		f = frame_at(n, i);
		if (ahead != NONE) {
			__builtin_prefetch(runs_of(frame_at(n, ahead)));
			ahead = frame_at(n, ahead)->next_own;
		}
		n->cost += FRAME_ENTRIES;
		if (READ_ONCE(*runs_of(f)) == f->served)
			continue;
		scanned = f->scanned;
		copied = f->copied;
		f->served = watch_until(n, f, false, end) ? f->scanned : NONE;
		if (f->scanned != scanned || f->copied != copied)
			c->wrote_ns = n->now_ns;
		if (n->cost >= end)
			return false;
	}
	c->watched_ns = n->now_ns;
	return true;
}

struct client *watch_in_pieces(struct bsn *n, struct client *c, uint64_t *end)
{
	while (c && c->live && n->store.n_slices && !watch_client(n, c, *end))
		c = threads_give_way(n, c, end);
	return c;
}

/* Nothing is written there before somebody goes on in it, but slices may be new. */
static void watch_parked(struct bsn *n, const struct client *c)
{
	for (uint32_t i = c->parked.head; i != NONE;) {
		struct frame *f = frame_at(n, i);

		if (f->scanned != record_of(n, f)->parked_runs)
			watch_frame(n, f, false);
		i = f->next_own;
	}
}

/* That word is in a page of its own, which thousands of idle threads make dear.
 * So a process that has written nothing for a second is looked at less often,
 * which is still far below the 200 ms of silence that end a trace. */
#define QUIET_NS NS_PER_S
#define QUIET_WATCH_NS (80 * NS_PER_MS)

static bool may_wait(const struct bsn *n, const struct client *c)
{
	return ns_since(n, c->wrote_ns) >= QUIET_NS &&
	       ns_since(n, c->watched_ns) < QUIET_WATCH_NS;
}

/* As a successor must before it reclaims anything. */
void watch_at_once(struct bsn *n)
{
	struct client *c;

	for_each_client(n, c) {
		if (!c->live)
			continue;
		watch_client(n, c, UINT64_MAX);
		watch_parked(n, c);
	}
}

void watch_all(struct bsn *n)
{
	uint64_t end = n->cost + PIECE_ENTRIES;
	struct client *c;

	for_each_client(n, c) {
		uint32_t number = c->number;

		while (c && c->live && !may_wait(n, c)) {
			bool done = watch_client(n, c, end);

			if (n->cost >= end) {
				node_commit_and_give_way(n);
				end = n->cost + PIECE_ENTRIES;
			}
			if (done)
				break;
			c = client_find(n, number);
		}
	}
}

bool watch_is_dirty(const struct bsn *n)
{
	return n->pool.n_dirty > 0;
}

void watch_save(struct bsn *n, uint64_t epoch)
{
	struct pool *p = &n->pool;

	while (p->n_dirty) {
		uint32_t i = p->dirty[--p->n_dirty];
		struct grant_record *r = &n->ledger.records[i];
		struct frame *f = frame_at(n, i);
		struct watched *w;

		f->dirty = false;
		if (!f->client)
			continue;
		w = &r->watched[r->watched[0].epoch > r->watched[1].epoch];
		w->epoch = 0;
		w->scanned = f->scanned;
		w->copied = f->copied;
		store_release(&w->epoch, epoch);
	}
}

/* Go on where a predecessor had committed that it was. */
void watch_adopt(struct bsn *n, struct frame *f)
{
	struct grant_record *r = record_of(n, f);
	uint64_t best = 0;

	for (uint32_t k = 0; k < 2; k++) {
		struct watched *w = &r->watched[k];

		/* A commit that never was must not become another one. */
		if (w->epoch > store_epoch(n))
			w->epoch = 0;
		if (w->epoch <= best)
			continue;
		best = w->epoch;
		f->scanned = w->scanned;
		f->copied = w->copied;
	}
}
