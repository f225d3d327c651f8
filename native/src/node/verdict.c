/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a search met of its trace: handles. Whether all of the
 * trace was there is judged at the end, by its handles: the runs of each are
 * numbered, and a number that is missing was reclaimed, or lost when it was
 * written. A handle that is gone as a whole leaves its fingerprint in gone.c.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

#define MET_ROOM_MIN 8u

/* Handles of one trace that are told apart: their table is read, or made anew, in a
 * third of a millisecond, under one hold of the lock. Of a trace with more it is not
 * known whether all of it was there. */
#define MET_MAX 32768u

/* An entry here takes as much memory as a run without records in the pool. So of
 * tables that are larger than this all together have a 32nd of the pool's bytes, beside
 * it. */
#define MET_ROOM_SMALL 128u
#define MET_SHARE 32u

/* ------------------------------------------------------------- handles --- */

int search_init(const struct bsn *n, struct search *s, struct bs_trace_id id,
		struct sink to)
{
	memset(s, 0, sizeof(*s));
	s->id = id;
	s->fingerprint = bs_fingerprint(id.hi, id.lo);
	s->to = to;
	/* Here, since a pass has no time for all layers of many. */
	s->why = gone_why(n, s->fingerprint);
	s->gone_layer = gone_layer(n);
	s->untied_from_ns = UINT64_MAX;
	s->met = malloc(MET_ROOM_MIN * sizeof(*s->met));
	if (!s->met)
		return -ENOMEM;
	s->met_room = MET_ROOM_MIN;
	memset(s->met, 0xff, MET_ROOM_MIN * sizeof(*s->met));
	return 0;
}

static uint64_t shared_bytes(uint32_t room)
{
	return room > MET_ROOM_SMALL ? room * sizeof(struct met) : 0;
}

void search_free(struct bsn *n, struct search *s)
{
	n->met_bytes -= shared_bytes(s->met_room);
	free(s->met);
	s->met = NULL;
	parts_free(s);
}

/* By a secret: a process chooses what handles it writes. */
static struct met *met_place(const struct bsn *n, struct met *table,
			     uint32_t room, uint32_t client, uint32_t handle)
{
	uint64_t i = bs_fmix64(((uint64_t)client << 32 | handle) ^ n->secret);

	for (;; i++) {
		struct met *m = &table[i % room];

		if (m->client == NONE ||
		    (m->client == client && m->handle == handle))
			return m;
	}
}

/* False: there is no room for more. */
static bool met_grow(struct bsn *n, struct search *s)
{
	uint32_t room = s->met_room ? 2 * s->met_room : MET_ROOM_MIN;
	uint64_t bytes =
		n->met_bytes - shared_bytes(s->met_room) + shared_bytes(room);
	struct met *table;

	if (s->n_met >= MET_MAX ||
	    (room > MET_ROOM_SMALL && bytes > n->config.pool_bytes / MET_SHARE))
		return false;
	table = malloc(room * sizeof(*table));
	if (!table)
		return false;
	memset(table, 0xff, room * sizeof(*table));
	for (uint32_t i = 0; i < s->met_room; i++) {
		if (s->met[i].client != NONE)
			*met_place(n, table, room, s->met[i].client,
				   s->met[i].handle) = s->met[i];
	}
	free(s->met);
	s->met = table;
	s->met_room = room;
	n->met_bytes = bytes;
	return true;
}

static struct met *met_get(struct bsn *n, struct search *s, uint32_t client,
			   uint32_t handle)
{
	struct met *m;

	if (s->n_met * 2 >= s->met_room && !met_grow(n, s))
		return NULL;
	m = met_place(n, s->met, s->met_room, client, handle);
	if (m->client == NONE) {
		*m = (struct met){.client = client, .handle = handle};
		s->n_met++;
	}
	return m;
}

void search_meet(struct bsn *n, struct search *s, const struct run *run,
		 uint64_t last_ticks)
{
	const struct client *c = client_find(n, run->owner.number);
	uint64_t last_ns = clock_monotonic(n, last_ticks);
	struct met *m;

	if (last_ns > s->active_ns)
		s->active_ns = last_ns;
	if (!c) {
		/* Of one that is forgotten, only the latest loss is known. */
		if (n->ledger.header->untied_to_ns >= run->granted_ns)
			s->untied_from_ns = 0;
	} else if (c->untied_to_ns >= run->granted_ns &&
		   c->untied_from_ns < s->untied_from_ns) {
		s->untied_from_ns = c->untied_from_ns;
	}
	m = met_get(n, s, run->owner.number, run->handle);
	if (!m) {
		s->failed = true;
		return;
	}
	m->live = run->live;
	m->first |= !!(run->flags & BS_RUN_FIRST);
	m->last |= !!(run->flags & BS_RUN_LAST);
	m->lossy |= !!(run->flags & BS_RUN_LOSSY);
	/* A kept run may be in parts, of which the first counts. */
	m->runs += !run->from;
	m->ends -= run->from;
	if (run->has_more)
		m->ends += run->from + run->bytes;
	if (run->seq > m->seq_max)
		m->seq_max = run->seq;
}

void search_loss(struct bsn *n, struct search *s, uint32_t client,
		 uint32_t handle, uint32_t flags)
{
	struct met *m = met_get(n, s, client, handle);

	if (!m) {
		s->failed = true;
		return;
	}
	m->lossy = true;
	m->last |= !!(flags & BS_RUN_LAST);
}

/* ---------------------------------------------------------------- verdict --- */

/* What stands for a process as a whole: no handle has this number. */
#define NO_HANDLE 0u

/* Once for each process that is gone. */
static void put_exits(struct bsn *n, struct search *s)
{
	for (uint32_t k = 0; k < s->to.slice->n_parts; k++) {
		if (!met_get(n, s, s->to.slice->parts[k].client, NO_HANDLE))
			s->to.slice->flags |= BSN_SLICE_MAYBE_LOSSY;
	}
	for (uint32_t i = 0; i < s->met_room; i++) {
		const struct met *m = &s->met[i];
		struct met *process;

		if (m->client == NONE || !m->first || m->last || m->live)
			continue;
		process =
			met_place(n, s->met, s->met_room, m->client, NO_HANDLE);
		if (process->client == NONE || process->exit_told)
			continue;
		process->exit_told = true;
		slice_put_exit(n, &s->to, m->client);
	}
}

/* Its last run was lost where it was to be written: no entry will say so. */
static bool end_is_lost(const struct met *m, const struct client *c)
{
	return m->client != NONE && m->first && !m->last && m->live && c &&
	       !handle_is_open(c, m->handle);
}

static struct met *process_of(const struct bsn *n, const struct search *s,
			      uint32_t client)
{
	struct met *m = met_place(n, s->met, s->met_room, client, NO_HANDLE);

	return m->client == NONE ? NULL : m;
}

/* Of each process, handles that the slice does not list. Most that follow on each other
 * are of the same. */
static void count_ends_lost(const struct bsn *n, struct search *s)
{
	const struct client *c = NULL;
	struct met *process = NULL;
	uint32_t number = NONE;

	for (uint32_t i = 0; i < s->met_room; i++) {
		const struct met *m = &s->met[i];

		if (m->client == NONE)
			continue;
		if (m->client != number) {
			number = m->client;
			c = client_find(n, number);
			process = process_of(n, s, number);
		}
		if (process && end_is_lost(m, c))
			process->ends_lost++;
	}
}

/* Of those that the slice lists each is closed, of the others as many: to look for
 * each of thousands in that list, and in that of the processes, would take
 * milliseconds. */
static void close_lost(struct bsn *n, struct search *s)
{
	struct slice *slice = s->to.slice;
	struct met *process;

	if (!(slice->flags & BSN_SLICE_LOSSY))
		return;
	for (uint32_t i = slice->n_opens; i-- > 0;) {
		struct open_handle open = slice->opens[i];
		struct met *m = met_place(n, s->met, s->met_room, open.client,
					  open.handle);

		if (!end_is_lost(m, client_find(n, open.client)))
			continue;
		slice_close_handle(slice, slice_part(slice, open.client),
				   open.handle);
		m->last = true;
	}
	for (uint32_t k = 0; k < slice->n_parts; k++) {
		process = process_of(n, s, slice->parts[k].client);
		if (process)
			process->ends_lost = 0;
	}
	count_ends_lost(n, s);
	for (uint32_t k = 0; k < slice->n_parts; k++) {
		process = process_of(n, s, slice->parts[k].client);
		if (process)
			slice_close_unlisted(&slice->parts[k],
					     process->ends_lost);
	}
}

static bool has_gaps(const struct search *s)
{
	for (uint32_t i = 0; i < s->met_room; i++) {
		const struct met *m = &s->met[i];

		if (m->client == NONE || m->lossy)
			continue;
		/* The first number is 0, and the last may be any of 32 bits. */
		if (!m->first || m->runs <= m->seq_max || m->ends)
			return true;
	}
	return false;
}

/* Was a loss that could not be blamed on a trace close to this one? */
static bool is_maybe_lossy(const struct bsn *n, const struct search *s)
{
	uint64_t unseen_to_ns = n->ledger.header->unseen_to_ns;
	uint64_t active_ns = s->active_ns;

	if (!s->n_met)
		return unseen_to_ns &&
		       unseen_to_ns >= n->ledger.header->reclaimed_to_ns;
	/* What a trace that is open was to write last may be what was lost. */
	for (uint32_t i = 0; i < s->met_room; i++) {
		if (s->met[i].client != NONE && !s->met[i].last)
			active_ns = n->now_ns;
	}
	return s->untied_from_ns <= active_ns;
}

void search_conclude(struct bsn *n, struct search *s)
{
	struct slice *slice = s->to.slice;
	/* What was reclaimed during the pass was looked at before. */
	uint32_t lossy = gone_why_since(n, s->fingerprint, s->gone_layer) &
			 GONE_LOSSY;
	uint32_t why = s->why | lossy;

	if (!slice)
		return;
	if (has_gaps(s))
		slice->flags |= BSN_SLICE_EVICTED;
	else if (why & GONE_EVICTED)
		slice->flags |= BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT;
	if (why & GONE_ABANDONED)
		slice->flags |= BSN_SLICE_ABANDONED;
	if (why & GONE_LOSSY)
		slice->flags |= BSN_SLICE_LOSSY;
	if (s->failed || is_maybe_lossy(n, s))
		slice->flags |= BSN_SLICE_MAYBE_LOSSY;
	slice->flags &= ~(uint32_t)BSN_SLICE_SEARCHING;
	put_exits(n, s);
	close_lost(n, s);
	if (s->to.buffer)
		return;
	slice->search = NULL;
	slice_dirty(n, slice);
}
