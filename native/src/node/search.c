/* SPDX-License-Identifier: Apache-2.0 */
/* Traces that wait to be looked for, and when that is: a pass (pass.c) costs the same
 * for one as for all. */
#include <stdlib.h>

#include "internal.h"

/* One that met little is as dear as so many places of its table, and so is a part. */
#define SEARCH_MET 400u
#define PART_MET 60u

static void judge(struct bsn *n, struct search *s, uint32_t *cost)
{
	uint32_t bytes;

	while (search_put_part(n, s, &bytes)) {
		*cost += PART_MET + bytes / BYTES_AN_ENTRY;
		if (*cost >= PIECE_MET) {
			node_commit_and_give_way(n);
			*cost = 0;
		}
	}
	*cost += SEARCH_MET;
	n->counts.searches++;
	search_conclude(n, s, cost);
}

void search_judge_all(struct bsn *n, struct search *searches, bool failed)
{
	uint32_t cost = 0;

	for (struct search *s = searches; s; s = s->next) {
		s->failed |= failed;
		judge(n, s, &cost);
		if (s->next && cost >= PIECE_MET) {
			node_commit_and_give_way(n);
			cost = 0;
		}
	}
}

/* What a pass costs, in entries of traces of 100 bytes. */
uint64_t search_cost(const struct bsn *n)
{
	uint64_t frames = n->pool.sealed.count + n->pool.by_state[FRAME_ACTIVE];

	return frames * (SEGMENT / 136);
}

int search_all(struct bsn *n, struct search *searches, uint32_t count)
{
	struct pass p;
	int err = pass_begin(n, &p, searches, count);

	if (!err) {
		pass_run(n, &p);
		pass_end(n, &p);
	}
	search_judge_all(n, searches, err != 0);
	if (!err)
		pass_free(&p);
	return err;
}

/* ---------------------------------------------------------------- queue --- */

void search_later(struct bsn *n, struct slice *slice)
{
	struct sink to = {.slice = slice};
	struct search *s = malloc(sizeof(*s));

	if (!s || search_init(n, s, slice->id, to)) {
		free(s);
		slice->flags |= BSN_SLICE_MAYBE_LOSSY;
		slice->flags &= ~(uint32_t)BSN_SLICE_SEARCHING;
		return;
	}
	slice->flags |= BSN_SLICE_SEARCHING;
	slice->search = s;
	s->number = ++n->searches_made;
	s->next = n->searches;
	n->searches = s;
	n->n_searches++;
}

/* A pass may cost so much CPU time as has passed since those before, divided by
 * this: a quarter of a core, so that with what each trigger costs beside it is
 * less than a third. */
#define CORES_PASSES_SHARE 4u

/* What has not been used of it, up to so much: after a while without triggers
 * the next ones are looked for at once. */
#define PASSES_AHEAD_NS NS_PER_MS

uint64_t search_due_in_ns(const struct bsn *n)
{
	uint64_t ahead_ns = n->now_ns + CORES_PASSES_SHARE * PASSES_AHEAD_NS;

	return n->passes_paid_ns > ahead_ns ? n->passes_paid_ns - ahead_ns : 0;
}

static uint64_t cpu_ns(const struct bsn *n)
{
	return n->config.thread_cpu_ns ? n->config.thread_cpu_ns() : 0;
}

static void pay(struct bsn *n, uint64_t begun_ns, uint64_t spent_ns)
{
	if (n->passes_paid_ns < n->now_ns)
		n->passes_paid_ns = n->now_ns;
	n->passes_paid_ns += CORES_PASSES_SHARE * spent_ns;
	/* So much time has passed at least. */
	node_set_time(n, begun_ns + spent_ns);
}

void search_waiting(struct bsn *n, uint64_t last)
{
	uint64_t begun_ns = n->now_ns, spent_ns;
	struct search **link = &n->searches, *all;
	uint32_t later = 0, count, freed = 0;

	/* The newest is the first. */
	for (; *link && (*link)->number > last; link = &(*link)->next)
		later++;
	all = *link;
	if (!all || search_due_in_ns(n))
		return;
	*link = NULL;
	count = n->n_searches - later;
	n->n_searches = later;
	spent_ns = cpu_ns(n);
	search_all(n, all, count);
	spent_ns = cpu_ns(n) - spent_ns;
	pay(n, begun_ns, spent_ns);
	while (all) {
		struct search *s = all;

		all = s->next;
		search_free(n, s);
		free(s);
		if (++freed % (PIECE_MET / SEARCH_MET) == 0)
			node_give_way(n);
	}
}
