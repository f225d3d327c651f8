/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to the traces of a segment that is reclaimed (node.h). */
#include "internal.h"

static bool frame_is(const struct bsn *n, uint32_t run, const struct frame *f)
{
	return run_frame(n, run) == f;
}

/* Handles of live processes that were opened and not closed, as far as runs in
 * the index tell. */
int trace_open_handles(struct bsn *n, uint32_t t)
{
	const struct index *x = &n->index;
	int open = 0;

	for (uint32_t r = x->traces[t].newest; r != NONE;
	     r = x->runs[r].older) {
		const struct run *run = &x->runs[r];
		const struct client *c = run_frame(n, r)->client;
		struct keep_owner owner;

		if (run->flags & RUN_DEAD ||
		    !(run->flags & (BS_RUN_FIRST | BS_RUN_LAST)))
			continue;
		if (c == &n->keep) {
			if (!keep_owner_of(n, r, &owner))
				continue;
			c = client_find(n, owner.number);
		}
		if (!c || !c->live)
			continue;
		open += !!(run->flags & BS_RUN_FIRST);
		open -= !!(run->flags & BS_RUN_LAST);
	}
	return open > 0 ? open : 0;
}

/* Take the frame's runs out of the trace's chain. */
static void unlink_frame(struct bsn *n, uint32_t t, const struct frame *f)
{
	struct index *x = &n->index;
	uint32_t *link = &x->traces[t].newest;

	while (*link != NONE) {
		struct run *run = &x->runs[*link];

		if (frame_is(n, *link, f)) {
			*link = run->older;
			run->trace = NONE;
		} else {
			link = &run->older;
		}
	}
}

/* The same, putting copies in the keep arena in their place. False: no room;
 * then some are copied and some are not, and the trace must go. */
static bool keep_frame_runs(struct bsn *n, uint32_t t, const struct frame *f)
{
	struct index *x = &n->index;
	uint32_t *link = &x->traces[t].newest;

	while (*link != NONE) {
		uint32_t r = *link, newest, oldest;

		if (!frame_is(n, r, f)) {
			link = &x->runs[r].older;
			continue;
		}
		if (!keep_run(n, r, &newest, &oldest))
			return false;
		for (uint32_t k = newest; k != NONE; k = x->runs[k].older)
			x->runs[k].trace = t;
		x->runs[oldest].older = x->runs[r].older;
		*link = newest;
		link = &x->runs[oldest].older;
		x->runs[r].trace = NONE;
	}
	return true;
}

/* All of it leaves the index, wherever it lies. Its runs stay in the chain,
 * dead, until their segments go: so long the tombstone must stay too. */
void trace_evict(struct bsn *n, uint32_t t, uint16_t why)
{
	struct index *x = &n->index;

	for (uint32_t r = x->traces[t].newest; r != NONE; r = x->runs[r].older)
		x->runs[r].flags |= RUN_DEAD;
	trace_flag_at(n, t, why);
}

static bool was_active_lately(const struct bsn *n, const struct trace *trace)
{
	uint32_t age = coarse(n->now_ns) - trace->active;

	return age <= coarse(pool_oldest_ns(n)) / 4;
}

static void evict_trace(struct bsn *n, uint32_t t, const struct frame *f,
			bool second_chance)
{
	struct trace *trace = &n->index.traces[t];
	bool holds = false;

	if (trace->flags & TRACE_COLLECTED) {
		/* Whole in its slice, but not here any more. */
		trace->flags |= TRACE_PARTIAL;
		unlink_frame(n, t, f);
		return;
	}
	for (uint32_t r = trace->newest; r != NONE; r = n->index.runs[r].older)
		holds |= frame_is(n, r, f) &&
			 !(n->index.runs[r].flags & RUN_DEAD);
	if (!holds) {
		unlink_frame(n, t, f);
		trace_put(n, t);
		return;
	}
	if (second_chance &&
	    !(trace->flags & (BSN_SLICE_EVICTED | BSN_SLICE_ABANDONED)) &&
	    (was_active_lately(n, trace) || trace_open_handles(n, t)) &&
	    keep_frame_runs(n, t, f)) {
		n->counts.second_chances++;
		return;
	}
	n->counts.traces_evicted++;
	trace_evict(n, t, BSN_SLICE_EVICTED);
	unlink_frame(n, t, f);
	trace_put(n, t);
}

void evict_frame(struct bsn *n, struct frame *f, bool second_chance)
{
	struct index *x = &n->index;

	for (uint32_t k = f->chunk; k != NONE; k = x->chunks[k].next) {
		for (uint32_t i = 0; i < x->chunks[k].used; i++) {
			uint32_t t = x->runs[k * CHUNK_RUNS + i].trace;

			if (i + 8 < x->chunks[k].used) {
				uint32_t soon =
					x->runs[k * CHUNK_RUNS + i + 8].trace;

				if (soon != NONE)
					__builtin_prefetch(&x->traces[soon], 1);
			}
			if (t != NONE)
				evict_trace(n, t, f, second_chance);
		}
	}
	frame_forget_runs(n, f);
}
