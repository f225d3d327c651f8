/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the report store says after a crash is what it said at the last commit:
 * a mark has two states, written in turn and stamped with the number of the
 * commit to come, and a state counts once the header has that number. How far
 * segments were watched (watch.c) is stamped with the same number, so what was
 * copied, and from where in the log, agree.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "store.h"

/* -------------------------------------------------------------- commit --- */

uint64_t store_epoch(const struct bsn *n)
{
	return store_header(&n->store)->epoch;
}

/* Of the ledger, as of the last commit. */
uint64_t store_sealed(const struct bsn *n)
{
	const struct store_header *h = store_header(&n->store);

	return h->sealed[h->epoch % 2];
}

static void mark_parts(struct mark_state *m, const struct slice *slice,
		       bool open)
{
	for (uint32_t i = 0; i < slice->n_parts && m->n_parts < MARK_PARTS;
	     i++) {
		const struct part *part = &slice->parts[i];

		if (!part->open == open)
			continue;
		m->parts[m->n_parts].client = part->client;
		m->parts[m->n_parts++].open = (int32_t)part->open;
	}
}

static void mark_write(struct bsn *n, struct slice *slice, uint64_t epoch)
{
	struct mark_state *m;

	slice->saved ^= 1;
	m = &mark_at(&n->store, slice->mark)->state[slice->saved];
	m->epoch = 0;
	m->flags = slice->flags;
	/* A search that is not over has told nobody anything: a successor
	 * begins it anew. */
	if (slice->flags & BSN_SLICE_SEARCHING) {
		m->flags = BSN_SLICE_SEARCHING;
		m->bytes = m->trimmed_bytes = 0;
		m->n_crumbs = m->n_parts = 0;
		m->has_all_parts = true;
		m->changed_ns = slice->changed_ns;
		store_release(&m->epoch, epoch);
		return;
	}
	m->bytes = slice->bytes;
	m->trimmed_bytes = slice->trimmed_bytes;
	m->changed_ns = slice->changed_ns;
	m->n_crumbs = slice->n_crumbs;
	memcpy(m->crumbs, slice->crumbs,
	       slice->n_crumbs * sizeof(*slice->crumbs));
	m->n_parts = 0;
	mark_parts(m, slice, true);
	mark_parts(m, slice, false);
	m->has_all_parts = !slice->parts_forgotten &&
			   m->n_parts == slice->n_parts;
	store_release(&m->epoch, epoch);
}

/* One commit for all: a slice has runs of many threads, and what was copied of
 * each must not count without its place in that thread's log (watch.c). */
void store_commit(struct bsn *n)
{
	struct store *s = &n->store;
	uint64_t epoch = store_header(s)->epoch + 1;

	watch_save(n, epoch);
	losses_save(n, epoch);
	while (s->dirty != NONE) {
		struct slice *slice = s->slices[s->dirty];

		s->dirty = slice->next_dirty;
		slice->dirty = false;
		mark_write(n, slice, epoch);
	}
	store_header(s)->sealed[epoch % 2] = n->ledger.header->sealed;
	store_release(&store_header(s)->epoch, epoch);
	losses_give_back(n);
}

void store_publish(struct bsn *n)
{
	if (!n->recovered)
		return;
	if (n->store.dirty != NONE || watch_is_dirty(n))
		store_commit(n);
	else
		losses_give_back(n);
}

/* A number for a new process, and for all of that store's life its own. */
uint32_t store_next_client(struct bsn *n)
{
	struct store_header *h = store_header(&n->store);
	uint32_t number = h->next_client;

	while (client_find(n, number))
		number = number < INT32_MAX ? number + 1 : 1;
	h->next_client = number < INT32_MAX ? number + 1 : 1;
	return number;
}

void store_reserve_client(struct bsn *n, uint32_t number)
{
	struct store_header *h = store_header(&n->store);

	if (number >= h->next_client && number < INT32_MAX)
		h->next_client = number + 1;
}

/* ------------------------------------------------------------- adoption --- */

static void adopt_mark(struct bsn *n, uint32_t i)
{
	struct store *s = &n->store;
	const struct mark *m = mark_at(s, i);
	struct bs_trace_id id = {m->block.trace_hi, m->block.trace_lo};
	const struct mark_state *best = NULL;
	struct slice *slice;
	uint8_t saved = 0;

	for (uint8_t k = 0; k < 2; k++) {
		const struct mark_state *state = &m->state[k];

		if (state->epoch && state->epoch <= store_header(s)->epoch &&
		    (!best || state->epoch > best->epoch)) {
			best = state;
			saved = k;
		}
	}
	/* No commit: its trigger was not answered, and will come again. */
	if (!best || !m->slice_epoch || m->slice_epoch > INT64_MAX ||
	    best->n_crumbs > BSN_CRUMBS_MAX || best->n_parts > MARK_PARTS ||
	    best->trimmed_bytes > best->bytes || best->bytes > s->bytes)
		return;
	if (slice_find(n, id))
		return;
	slice = slice_make(n, i, id);
	if (!slice)
		return;
	slice->primary = m->primary;
	memcpy(slice->trigger, m->trigger, sizeof(slice->trigger));
	slice->trigger[BS_TRIGGER_NAME_MAX] = 0;
	slice->collected_ns = m->collected_ns;
	slice->epoch = m->slice_epoch;
	slice->saved = saved;
	slice->changed_ns = best->changed_ns;
	slice->parts_forgotten = !best->has_all_parts;
	slice->ends_forgotten = !(best->flags & BSN_SLICE_SEARCHING);
	slice->bytes = best->bytes;
	slice->trimmed_bytes = best->trimmed_bytes;
	slice->flags = best->flags;
	slice->n_crumbs = best->n_crumbs;
	memcpy(slice->crumbs, best->crumbs, sizeof(slice->crumbs));
	for (uint32_t k = 0; k < best->n_parts; k++) {
		struct part *part = slice_part(slice, best->parts[k].client);

		if (!part)
			slice->parts_forgotten = true;
		else if (best->parts[k].open > 0)
			part->open = part->unlisted =
				(uint32_t)best->parts[k].open;
	}
	slice->first_block = (uint32_t)(slice->trimmed_bytes / BLOCK_CONTENT);
	if (slice->trimmed_bytes < slice->bytes)
		slice->n_blocks =
			(uint32_t)((slice->bytes + BLOCK_CONTENT - 1) /
				   BLOCK_CONTENT) -
			slice->first_block;
	slice->blocks = calloc(slice->n_blocks + 1u, sizeof(*slice->blocks));
	slice->blocks_room = slice->blocks ? slice->n_blocks + 1 : 0;
}

/* Block i belongs to a slice, or is free. */
static bool adopt_data(struct store *s, uint32_t i)
{
	const struct block *b = block_at(s, i);
	struct slice *slice;
	uint32_t k;

	if (b->magic != BLOCK_MAGIC || b->kind != BLOCK_DATA ||
	    b->mark >= s->n_blocks)
		return false;
	slice = s->slices[b->mark];
	if (!slice || !slice->blocks || slice->id.hi != b->trace_hi ||
	    slice->id.lo != b->trace_lo || b->number < slice->first_block)
		return false;
	k = b->number - slice->first_block;
	if (k >= slice->n_blocks || slice->blocks[k])
		return false;
	slice->blocks[k] = i;
	return true;
}

/* A slice ends where a block of it is missing. */
static void adopt_check(struct bsn *n, struct slice *slice)
{
	for (uint32_t k = 0; k < slice->n_blocks; k++) {
		uint64_t cut;

		if (slice->blocks && slice->blocks[k])
			continue;
		cut = ((uint64_t)slice->first_block + k) * BLOCK_CONTENT;
		while (slice->blocks && ++k < slice->n_blocks) {
			if (slice->blocks[k])
				block_free(&n->store, slice->blocks[k]);
		}
		n->counts.corrupt++;
		slice->flags |= BSN_SLICE_CORRUPT;
		slice->bytes =
			cut > slice->trimmed_bytes ? cut : slice->trimmed_bytes;
		slice->n_blocks =
			(uint32_t)(cut / BLOCK_CONTENT) - slice->first_block;
		break;
	}
}

int store_adopt(struct bsn *n, int fd)
{
	struct store *s = &n->store;
	struct store_header *h;
	uint64_t bytes, changed_ns;
	int err = memfd_check(fd, &bytes);

	if (err)
		return err;
	if (bytes < 2 * BLOCK_BYTES || bytes / BLOCK_BYTES > INT32_MAX)
		return -EPROTO;
	h = map_shared(fd, bytes);
	if (!h)
		return map_failure();
	if (h->magic != STORE_MAGIC || h->version != STORE_VERSION ||
	    h->block_bytes != BLOCK_BYTES ||
	    (uint64_t)h->n_blocks * BLOCK_BYTES != bytes ||
	    !h->next_slice_epoch || h->next_slice_epoch > INT64_MAX ||
	    !h->blocks_fresh || h->blocks_fresh > h->n_blocks) {
		munmap(h, bytes);
		return -EPROTO;
	}
	fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0) {
		err = -errno;
		munmap(h, bytes);
		return err;
	}
	store_free(n);
	s->fd = fd;
	s->bytes = bytes;
	s->map = (uint8_t *)h;
	err = store_tables(n);
	if (err)
		return err;
	if (!h->next_client)
		h->next_client = 1;
	s->fresh = h->blocks_fresh;
	for (uint32_t i = 1; i < s->fresh; i++) {
		const struct block *b = block_at(s, i);

		if (b->magic == BLOCK_MAGIC && b->kind == BLOCK_MARK &&
		    b->mark == i)
			adopt_mark(n, i);
	}
	/* Backwards, so that the free list begins at the front. */
	s->used = s->fresh;
	for (uint32_t i = s->fresh; i-- > 1;) {
		if (!s->slices[i] && !adopt_data(s, i))
			block_free(s, i);
	}
	for (uint32_t i = 1; i < s->fresh; i++) {
		struct slice *slice = s->slices[i];

		if (!slice)
			continue;
		adopt_check(n, slice);
		changed_ns = slice->changed_ns;
		slice_dirty(n, slice);
		slice->changed_ns = changed_ns;
	}
	s->adopted = true;
	return 0;
}
