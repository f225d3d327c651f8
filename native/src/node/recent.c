/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the pool holds of the last seconds: for who asks for all of it at once.
 *
 * There may be millions of traces, and each is looked at, so that goes on piece
 * by piece, and between two the lock is given up. Of all that are found those of
 * the highest priority are kept, in a heap whose root is the lowest of them: the
 * same ones on each node that has them.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

/* 2 MiB of the table: under a millisecond. */
#define TRACES_A_PIECE 65536u

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

static bool is_written_by(const struct bsn *n, uint32_t run,
			  const char *service)
{
	const struct client *c = run_frame(n, run)->client;
	struct keep_owner owner;

	if (c != &n->keep)
		return !strcmp(c->service, service);
	return keep_owner_of(n, run, &owner) &&
	       !strncmp(owner.service, service, sizeof(owner.service));
}

static bool is_wanted(struct bsn *n, uint32_t t, uint32_t age,
		      const char *service)
{
	const struct index *x = &n->index;
	const struct trace *trace = &x->traces[t];

	/* What was collected already is on its way, or arrived. */
	if (trace->newest == NONE ||
	    trace->flags &
		    (TRACE_COLLECTED | TRACE_REPORTED | BSN_SLICE_ABANDONED) ||
	    coarse(n->now_ns) - trace->active > age)
		return false;
	for (uint32_t r = trace->newest; r != NONE; r = x->runs[r].older) {
		if (x->runs[r].flags & (RUN_DEAD | RUN_GHOST))
			continue;
		if (!service[0] || is_written_by(n, r, service))
			return true;
	}
	return false;
}

int bsn_recent(struct bsn *n, uint64_t now_ns, uint64_t age_ns,
	       const char *service, struct bs_trace_id *ids, int room,
	       uint64_t *found)
{
	uint64_t domain = bs_hash_prepare(BS_HASH_PRIORITY,
					  strlen(BS_HASH_PRIORITY),
					  n->config.cluster_seed);
	struct candidate *heap;
	uint32_t count = 0;
	/* Of a time that the index cannot tell from a younger one: all. */
	uint32_t age = age_ns >> 20 < UINT32_MAX / 2 ? coarse(age_ns)
						     : UINT32_MAX;

	*found = 0;
	if (room <= 0)
		return -EINVAL;
	heap = malloc((size_t)room * sizeof(*heap));
	if (!heap)
		return -ENOMEM;
	for (uint32_t at = 0, end = 1; at < end; at += TRACES_A_PIECE) {
		pthread_mutex_lock(&n->lock);
		if (at == 0) {
			node_catch_up(n, now_ns);
			drain_publish(n);
		}
		end = n->index.traces_fresh;
		for (uint32_t t = at; t < end && t - at < TRACES_A_PIECE; t++) {
			const struct trace *trace = &n->index.traces[t];
			struct candidate c = {.id = {trace->hi, trace->lo}};

			if (!is_wanted(n, t, age, service))
				continue;
			++*found;
			c.priority = bs_hash_trace(domain, c.id);
			if (count < (uint32_t)room) {
				heap[count] = c;
				sift_up(heap, count++);
			} else if (c.priority > heap[0].priority) {
				heap[0] = c;
				sift_down(heap, count, 0);
			}
		}
		pthread_mutex_unlock(&n->lock);
	}
	qsort(heap, count, sizeof(*heap), by_priority);
	for (uint32_t i = 0; i < count; i++)
		ids[i] = heap[i].id;
	free(heap);
	return (int)count;
}
