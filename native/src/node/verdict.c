/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether all of a trace was there is judged at the end of a search, by the handles
 * that it met: the runs of each are numbered, and a number that is missing was
 * reclaimed, or lost when it was written. A handle that is gone as a whole leaves its
 * fingerprint in gone.c.
 */
#include <string.h>

#include "hash.h"
#include "internal.h"

/* ---------------------------------------------------------------- search --- */

int search_init(const struct bsn *n, struct search *s, struct bs_trace_id id,
		struct sink to)
{
	memset(s, 0, sizeof(*s));
	s->id = id;
	s->fingerprint = bs_fingerprint(id.hi, id.lo);
	s->to = to;
	/* Here, since a pass has no time for all layers of many. */
	s->why = gone_why(n, s->fingerprint);
	s->seen = gone_seen(n);
	s->forgotten_to_ns = n->ledger.header->forgotten_to_ns;
	s->untied_from_ns = UINT64_MAX;
	s->granted_ns = UINT64_MAX;
	s->begun_ns = UINT64_MAX;
	return met_init(&s->met);
}

void search_free(struct bsn *n, struct search *s)
{
	met_free(n, &s->met);
	parts_free(s);
}

static bool is_open(const struct met *m)
{
	return m->begun && !m->last && !m->closed && m->live;
}

/* In whatever order its runs are met. */
static void count(struct bsn *n, struct search *s, const struct met *m,
		  bool was_open)
{
	struct slice *slice = s->to.slice;
	struct part *part;

	if (!slice || is_open(m) == was_open)
		return;
	part = slice_part(slice, m->client);
	if (part && was_open)
		slice_close_handle(n, slice, part, m->handle);
	else if (part)
		slice_open_handle(n, slice, part, m->handle);
}

void search_meet(struct bsn *n, struct search *s, const struct run *run,
		 struct ticks ticks)
{
	const struct client *c = client_find(n, run->owner.number);
	uint64_t untied_to_ns = n->ledger.header->untied_to_ns;
	uint64_t first_ns = clock_monotonic(n, ticks.first);
	uint64_t last_ns = clock_monotonic(n, ticks.last);
	struct met *m;
	bool was_open;

	if (first_ns && first_ns < s->begun_ns)
		s->begun_ns = first_ns;
	if (last_ns > s->active_ns)
		s->active_ns = last_ns;
	if (c && c->believed.evicted_ns > s->evicted_ns)
		s->evicted_ns = c->believed.evicted_ns;
	if (run->granted_ns < s->granted_ns)
		s->granted_ns = run->granted_ns;
	s->forgotten |= c && client_is_forgotten(n, c);
	if (!c) {
		/* Of one that is forgotten, only the latest loss is known. */
		if (untied_to_ns && untied_to_ns + TRACE_NS >= run->granted_ns)
			s->untied_from_ns = 0;
	} else if (c->untied_to_ns >= run->granted_ns &&
		   c->untied_from_ns < s->untied_from_ns) {
		s->untied_from_ns = c->untied_from_ns;
	}
	m = met_get(n, &s->met, run->owner.number, run->handle);
	if (!m) {
		s->failed = true;
		return;
	}
	was_open = is_open(m);
	/* By now: a part of a kept run may have been put off (parts.c). */
	m->live = c && c->live;
	m->first |= !!(run->flags & BS_RUN_FIRST);
	m->begun |= m->first;
	m->last |= !!(run->flags & BS_RUN_LAST);
	m->lossy |= !!(run->flags & BS_RUN_LOSSY);
	/* A kept run may be in parts, of which the first counts. */
	m->runs += !run->from;
	m->ends -= run->from;
	if (run->has_more)
		m->ends += run->from + run->bytes;
	if (run->seq > m->seq_max)
		m->seq_max = run->seq;
	count(n, s, m, was_open);
}

void search_meet_again(struct bsn *n, struct search *s, const struct run *run,
		       uint64_t last_ticks)
{
	uint64_t last_ns = clock_monotonic(n, last_ticks);
	struct met *m = met_find(n, &s->met, run->owner.number, run->handle);
	bool was_open;

	if (last_ns > s->active_ns)
		s->active_ns = last_ns;
	if (!m)
		return;
	was_open = is_open(m);
	m->last |= !!(run->flags & BS_RUN_LAST);
	m->lossy |= !!(run->flags & BS_RUN_LOSSY);
	count(n, s, m, was_open);
}

void search_loss(struct bsn *n, struct search *s, const struct client *c,
		 uint32_t handle, uint32_t flags)
{
	struct met *m = met_get(n, &s->met, c->number, handle);
	bool was_open;

	if (!m) {
		s->failed = true;
		return;
	}
	was_open = is_open(m);
	m->lossy = true;
	m->live = c->live;
	m->begun |= !!(flags & BS_RUN_FIRST);
	m->last |= !!(flags & BS_RUN_LAST);
	count(n, s, m, was_open);
}

/* ---------------------------------------------------------------- verdict --- */

/* What stands for a process as a whole: no handle has this number. */
#define NO_HANDLE 0u

/* What handles that were met say, all together. */
struct judged {
	bool is_any, has_gaps, is_open;
	bool lacks_runs; /* or may: the last ones of handles, too */
};

static void meet_processes(struct bsn *n, struct search *s)
{
	struct slice *slice = s->to.slice;

	for (uint32_t k = 0; k < slice->n_parts; k++) {
		struct met *process =
			met_get(n, &s->met, slice->parts[k].client, NO_HANDLE);

		if (process)
			process->ends_lost = 0;
		else
			slice->flags |= BSN_SLICE_MAYBE_LOSSY;
	}
}

static bool has_gap(const struct met *m)
{
	if (m->lossy || m->ends)
		return !m->lossy;
	/* Of one that goes on, threads may have drawn numbers of runs that are on their
	 * way. If they do not come, the coordinator sees that when it is closed; and of
	 * what was reclaimed there are fingerprints. */
	if (m->live && !m->last)
		return false;
	/* The first number is 0, and the last may be any of 32 bits. */
	return !m->first || m->runs <= m->seq_max;
}

/* Its last run was lost where it was to be written, or is reclaimed: no entry will say
 * so. */
static bool end_is_lost(const struct met *m, const struct client *c)
{
	return m->begun && !m->last && !m->closed && m->live && c &&
	       !handle_is_open(c, m->handle);
}

/* Of a place in a table; where ends may be lost, it is asked of each handle whether it
 * is open. */
#define LOSSY_PLACE_MET 4u

/* Those that the slice lists. Of the others as many are closed as ends were lost: to
 * look for each of thousands in that list would take milliseconds. */
static void close_listed(const struct bsn *n, struct search *s, uint32_t *cost)
{
	struct slice *slice = s->to.slice;

	*cost += slice->n_handles * LOSSY_PLACE_MET;

	for (uint32_t i = 0; i < slice->n_handles; i++) {
		struct slice_handle *h = &slice->handles[i];
		struct met *m = met_find(n, &s->met, h->client, h->handle);

		if (h->ended || !m ||
		    !end_is_lost(m, client_find(n, h->client)))
			continue;
		/* If it comes all the same, it counts no more. */
		h->ended = true;
		slice_part(slice, h->client)->open--;
		m->closed = true;
	}
}

static void close_unlisted(const struct bsn *n, struct search *s)
{
	struct slice *slice = s->to.slice;

	for (uint32_t k = 0; k < slice->n_parts; k++) {
		const struct met *process =
			met_find(n, &s->met, slice->parts[k].client, NO_HANDLE);

		if (process)
			slice_close_unlisted(&slice->parts[k],
					     process->ends_lost);
	}
}

static void judge_page(struct bsn *n, struct search *s,
		       const struct met_page *page, struct judged *judged)
{
	const struct client *c = NULL;
	struct met *process = NULL;
	uint32_t number = NONE;

	for (uint32_t i = 0; i < page->room; i++) {
		const struct met *m = &page->met[i];

		if (m->client == NONE || m->handle == NO_HANDLE)
			continue;
		judged->is_any = true;
		judged->has_gaps |= has_gap(m);
		judged->is_open |= !m->last;
		/* Its beginning may stand where the pass had been. If it comes, it is
		 * asked whether it is open. */
		if (m->live && m->last && !m->begun)
			s->to.slice->ends_forgotten = true;
		/* Most that follow on each other are of the same. */
		if (m->client != number) {
			number = m->client;
			c = client_find(n, number);
			process = met_find(n, &s->met, number, NO_HANDLE);
		}
		if (!process)
			continue;
		if (judged->lacks_runs && end_is_lost(m, c))
			process->ends_lost++;
		/* Once for each process that is gone. */
		if (!m->first || m->last || m->live || process->exit_told)
			continue;
		process->exit_told = true;
		slice_put_exit(n, &s->to, number);
	}
}

/* In pieces. False: the slice was released meanwhile. */
static bool judge_handles(struct bsn *n, struct search *s, uint32_t why,
			  uint32_t *cost, struct judged *judged)
{
	*judged = (struct judged){
		.lacks_runs = s->to.slice->flags & BSN_SLICE_LOSSY ||
			      why & GONE_EVICTED,
	};
	meet_processes(n, s);
	if (judged->lacks_runs)
		close_listed(n, s, cost);
	for (uint32_t i = 0; i < met_pages(&s->met); i++) {
		const struct met_page *page = met_page(&s->met, i);

		if (i && *cost >= PIECE_MET) {
			node_commit_and_give_way(n);
			*cost = 0;
			if (!s->to.slice)
				return false;
		}
		judge_page(n, s, page, judged);
		*cost +=
			page->room * (judged->lacks_runs ? LOSSY_PLACE_MET : 1);
	}
	return true;
}

/* What came to segments that the pass had been through is watch.c's. Of a handle that
 * is closed all of that was written before its last run, which was met. False: the slice
 * was released meanwhile. */
static bool look_again(struct bsn *n, struct search *s)
{
	uint64_t end = n->cost + PIECE_ENTRIES;

	for (uint32_t k = 0; s->to.slice && k < s->to.slice->n_parts; k++) {
		struct client *c = client_find(n, s->to.slice->parts[k].client);

		if (c && c->live)
			c = threads_observe(n, c, &end);
		watch_in_pieces(n, c, &end);
	}
	return s->to.slice;
}

/* Was a loss that could not be blamed on a trace close to this one? */
static bool is_maybe_lossy(const struct bsn *n, const struct search *s,
			   const struct judged *judged)
{
	uint64_t untied_to_ns = n->ledger.header->untied_to_ns;

	if (!judged->is_any)
		return untied_to_ns &&
		       untied_to_ns >= n->ledger.header->gone_to_ns;
	/* What a trace that is open was to write last may be what was lost. */
	return s->untied_from_ns <=
	       (judged->is_open ? n->now_ns : s->active_ns);
}

/* It began before all evictions that are remembered, and what a process wrote since then
 * that has a part in it is gone: some of that may have been its. */
static bool outlives_memory(const struct search *s)
{
	/* Where nothing was forgotten, 0 is no time. */
	return s->forgotten_to_ns && s->begun_ns <= s->evicted_ns &&
	       s->begun_ns <= s->forgotten_to_ns;
}

/* A process has so many runs of traces that look like this one that some were not looked
 * at: some may be its. */
static bool was_passed_over(const struct search *s)
{
	return s->pass && wanted_passed_over(&s->pass->wanted, s->fingerprint);
}

void search_conclude(struct bsn *n, struct search *s, uint32_t *cost)
{
	struct slice *slice = s->to.slice;
	struct judged judged;
	uint32_t why;

	if (!slice)
		return;
	/* What was reclaimed during the pass was looked at before. */
	why = s->why |
	      (gone_why_since(n, s->fingerprint, s->seen) & GONE_LOSSY);
	if (why & GONE_LOSSY)
		slice->flags |= BSN_SLICE_LOSSY;
	if (!judge_handles(n, s, why, cost, &judged))
		return;
	/* A peek does not: what it says of a trace that ends meanwhile may be so. */
	if (judged.has_gaps && !s->to.buffer &&
	    (!look_again(n, s) || !judge_handles(n, s, why, cost, &judged)))
		return;
	if (judged.lacks_runs)
		close_unlisted(n, s);
	if (judged.has_gaps)
		slice->flags |= BSN_SLICE_EVICTED;
	else if (why & GONE_EVICTED)
		slice->flags |= BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT;
	if (why & GONE_ABANDONED)
		slice->flags |= BSN_SLICE_ABANDONED;
	if (s->failed || was_passed_over(s) || is_maybe_lossy(n, s, &judged))
		slice->flags |= BSN_SLICE_MAYBE_LOSSY;
	if (s->forgotten || outlives_memory(s) ||
	    policy_left_out(n, s->id, s->granted_ns))
		slice->flags |= BSN_SLICE_MAYBE_LOSSY;
	slice->flags &= ~(uint32_t)BSN_SLICE_SEARCHING;
	if (s->to.buffer)
		return;
	slice->search = NULL;
	slice_dirty(n, slice);
}
