/* SPDX-License-Identifier: Apache-2.0 */
/* Traces that wait to be looked for, and when that is: a pass (pass.c) costs the same
 * for one as for all. */
#include <stdlib.h>

#include "internal.h"

/* What is judged under one hold of the lock, in what searches met: 100 us. One that
 * met little is as dear as so many, and so are a part and bytes that are copied. */
#define PIECE_MET 20000u
#define SEARCH_MET 400u
#define BYTES_A_MET 16u
#define PART_MET 60u

static void judge(struct bsn *n, struct search *s, bool give_way,
		  uint32_t *cost)
{
	uint32_t bytes;

	while (search_put_part(n, s, &bytes)) {
		*cost += PART_MET + bytes / BYTES_A_MET;
		if (give_way && *cost >= PIECE_MET) {
			node_commit_and_give_way(n);
			*cost = 0;
		}
	}
	*cost += SEARCH_MET + s->met_room;
	n->counts.searches++;
	search_conclude(n, s);
}

void search_judge_all(struct bsn *n, struct search *searches, bool failed,
		      bool give_way)
{
	uint32_t cost = 0;

	for (struct search *s = searches; s; s = s->next) {
		s->failed |= failed;
		judge(n, s, give_way, &cost);
		if (give_way && s->next && cost >= PIECE_MET) {
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

int search_all(struct bsn *n, struct search *searches, bool give_way)
{
	struct pass p;
	int err = pass_begin(n, &p, searches);

	if (!err) {
		pass_run(n, &p, give_way);
		pass_end(n, &p, searches);
	}
	search_judge_all(n, searches, err != 0, give_way);
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
	s->next = n->searches;
	n->searches = s;
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

void search_waiting(struct bsn *n)
{
	struct search *all = n->searches;
	uint64_t begun_ns = n->now_ns, spent_ns;
	uint32_t count = 0;

	if (!all || search_due_in_ns(n))
		return;
	n->searches = NULL;
	spent_ns = cpu_ns(n);
	search_all(n, all, true);
	spent_ns = cpu_ns(n) - spent_ns;
	pay(n, begun_ns, spent_ns);
	while (all) {
		struct search *s = all;

		all = s->next;
		search_free(n, s);
		free(s);
		if (++count % (PIECE_MET / SEARCH_MET) == 0)
			node_give_way(n);
	}
}
