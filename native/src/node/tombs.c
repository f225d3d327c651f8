/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is remembered of traces that lost something: the flags in their index
 * records, which are exact as long as a run of the trace is in the pool, and a
 * ring of the youngest in the keep memfd, which survives the daemon and
 * answers for traces that have no run any more.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define TOMB_MAGIC 0x425354424d4f5442ull
#define TOMB_VERSION 2u

/* Entries that still matter are stepped over. So many at a time: in a mass
 * loss all matter, and then one is overwritten, which the ring notes. */
#define STEPS_MAX 16u

#define TOMB_FLAGS                                                             \
	(BSN_SLICE_EVICTED | BSN_SLICE_LOSSY | BSN_SLICE_ABANDONED |           \
	 BSN_SLICE_CORRUPT)

uint64_t tombs_bytes(uint32_t entries)
{
	uint64_t bytes = sizeof(struct tomb_ring) +
			 (uint64_t)entries * sizeof(struct tomb);

	return (bytes + SEGMENT - 1) / SEGMENT * SEGMENT;
}

/* Its trace may still be in the pool: forgetting would whitewash it. */
static bool matters(const struct bsn *n, uint32_t slot)
{
	uint32_t t = n->tomb_traces[slot];

	return t != NONE && n->index.traces[t].newest != NONE &&
	       n->index.traces[t].tombs == 1;
}

static void tomb_clear(struct bsn *n, uint32_t slot)
{
	uint32_t t = n->tomb_traces[slot];

	n->tombs->tombs[slot].flags = 0;
	n->tomb_traces[slot] = NONE;
	if (t == NONE)
		return;
	n->counts.tombstones--;
	n->index.traces[t].tombs--;
	trace_put(n, t);
}

/* The oldest slot. The records that the next ones will touch are on their way
 * meanwhile: in a steady state one is freed for each trace that is evicted. */
static uint32_t next_slot(struct bsn *n)
{
	uint32_t entries = n->tombs->entries;
	uint32_t slot = n->tombs->next;
	uint32_t soon = (slot + 8) % entries, sooner = (slot + 4) % entries;
	const struct tomb *tomb = &n->tombs->tombs[soon];
	uint64_t hash;

	if (n->tomb_traces[soon] != NONE) {
		__builtin_prefetch(&n->index.traces[n->tomb_traces[soon]], 1);
		hash = index_hash(&n->index,
				  (struct bs_trace_id){tomb->hi, tomb->lo});
		index_prefetch_bucket(&n->index, hash);
	}
	if (n->tomb_traces[sooner] != NONE) {
		tomb = &n->tombs->tombs[sooner];
		hash = index_hash(&n->index,
				  (struct bs_trace_id){tomb->hi, tomb->lo});
		index_prefetch_trace(&n->index, hash);
	}
	n->tombs->next = slot + 1 < entries ? slot + 1 : 0;
	return slot;
}

/* Make room in the index: forget the oldest that has no run any more. */
bool tombs_drop_oldest(struct bsn *n)
{
	for (uint32_t i = 0; i < STEPS_MAX; i++) {
		uint32_t slot = next_slot(n);
		uint32_t before = n->index.traces_used;

		if (n->tomb_traces[slot] == NONE || matters(n, slot))
			continue;
		/* Whether it does is not known before all logs are walked. */
		if (!n->recovered)
			n->tombs->overrun_ns = n->now_ns;
		tomb_clear(n, slot);
		if (n->index.traces_used < before)
			return true;
	}
	return false;
}

static void tomb_add(struct bsn *n, uint32_t t)
{
	struct trace *trace = &n->index.traces[t];
	struct tomb *tomb;
	uint32_t slot = next_slot(n);

	for (uint32_t i = 0; i < STEPS_MAX && matters(n, slot); i++)
		slot = next_slot(n);
	if (matters(n, slot))
		n->tombs->overrun_ns = n->now_ns;
	trace->tombs++; /* before: clearing must not free this trace */
	tomb_clear(n, slot);
	n->tomb_traces[slot] = t;
	n->counts.tombstones++;
	tomb = &n->tombs->tombs[slot];
	tomb->hi = trace->hi;
	tomb->lo = trace->lo;
	tomb->time_ns = n->now_ns;
	store_release(&tomb->flags, trace->flags & TOMB_FLAGS);
}

/* The trace lost something. */
void trace_flag_at(struct bsn *n, uint32_t t, uint16_t flags)
{
	struct trace *trace = &n->index.traces[t];
	struct slice *s = slice_of(n, t);

	if (s && flags & ~s->flags) {
		s->flags |= flags;
		slice_dirty(n, s);
	}
	if (!(flags & ~trace->flags) && trace->tombs)
		return;
	trace->flags |= flags;
	if (trace->tombs < UINT16_MAX)
		tomb_add(n, t);
}

void trace_flag(struct bsn *n, struct bs_trace_id id, uint16_t flags)
{
	uint32_t t = trace_get(n, id);

	if (t != NONE)
		trace_flag_at(n, t, flags);
	else
		n->tombs->overrun_ns = n->now_ns;
}

/* The ring is in place: made anew, or a predecessor's. */
int tombs_load(struct bsn *n)
{
	uint32_t entries = n->tombs->entries;

	n->tomb_traces = malloc(entries * sizeof(*n->tomb_traces));
	if (!n->tomb_traces)
		return -ENOMEM;
	memset(n->tomb_traces, 0xff, entries * sizeof(*n->tomb_traces));
	if (n->tombs->next >= entries)
		n->tombs->next = 0;
	for (uint32_t i = 0; i < entries; i++) {
		const struct tomb *tomb = &n->tombs->tombs[i];
		uint32_t t;

		if (!tomb->flags)
			continue;
		t = trace_get(n, (struct bs_trace_id){tomb->hi, tomb->lo});
		if (t == NONE || n->index.traces[t].tombs == UINT16_MAX)
			continue;
		n->index.traces[t].flags |= tomb->flags & TOMB_FLAGS;
		n->index.traces[t].tombs++;
		n->tomb_traces[i] = t;
		n->counts.tombstones++;
	}
	return 0;
}

void tombs_make(struct bsn *n, uint32_t entries, uint32_t keep_segments)
{
	n->tombs->magic = TOMB_MAGIC;
	n->tombs->version = TOMB_VERSION;
	n->tombs->entries = entries;
	n->tombs->keep_segments = keep_segments;
}

bool tombs_valid(const struct tomb_ring *ring, uint64_t bytes)
{
	return bytes >= sizeof(*ring) && ring->magic == TOMB_MAGIC &&
	       ring->version == TOMB_VERSION && ring->entries &&
	       bytes == tombs_bytes(ring->entries) +
				(uint64_t)ring->keep_segments * SEGMENT;
}
