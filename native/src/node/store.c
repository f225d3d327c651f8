/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The report store: a memfd of blocks. Block 0 is the header; a slice has one
 * mark block, and data blocks that hold its bytes in order.
 *
 * What the store says after a crash is what it said at the last commit: a
 * mark has two states, written in turn and stamped with the number of the
 * commit to come, and a state counts once the header has that number. The
 * threads' progress (drain.c) is stamped with the same number, so what was
 * copied, and from where in the log, agree.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "internal.h"

#define STORE_MAGIC 0x45524f5453425342ull
#define STORE_VERSION 3u
#define BLOCK_MAGIC 0x4b4c4253u

enum block_kind {
	BLOCK_MARK = 1,
	BLOCK_DATA = 2
};

struct store_header {
	uint64_t magic;
	uint32_t version;
	uint32_t block_bytes;
	uint32_t n_blocks;
	uint32_t next_client;	   /* number that no process had yet */
	uint64_t epoch;		   /* of the last commit */
	uint64_t next_slice_epoch; /* number that no slice had yet */
};

struct block {
	uint32_t magic; /* 0: free */
	uint16_t kind;
	uint16_t zero;
	uint32_t mark;	 /* block number of the slice's mark */
	uint32_t number; /* of a data block in its slice: 0, 1, ... */
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint8_t content[];
};
_Static_assert(sizeof(struct block) == BLOCK_HEADER, "32 of 2048 bytes");

struct mark_state {
	uint64_t epoch; /* 0: none */
	uint64_t bytes, trimmed_bytes, changed_ns;
	uint32_t flags;
	uint32_t n_crumbs, n_opens;
	uint32_t zero;
	uint64_t crumbs[BSN_CRUMBS_MAX];
	struct {
		uint32_t client;
		int32_t open;
	} opens[MARK_OPENS];
};

struct mark {
	struct block block;
	struct bs_trace_id primary;
	char trigger[BS_TRIGGER_NAME_MAX + 1];
	uint64_t collected_ns;
	uint64_t slice_epoch;
	struct mark_state state[2];
};
_Static_assert(sizeof(struct mark) <= BLOCK_BYTES, "a mark is one block");

static struct store_header *header(const struct store *s)
{
	return (struct store_header *)s->map;
}

static struct block *block_at(const struct store *s, uint32_t i)
{
	return (struct block *)(s->map + (uint64_t)i * BLOCK_BYTES);
}

static struct mark *mark_at(const struct store *s, uint32_t i)
{
	return (struct mark *)block_at(s, i);
}

/* -------------------------------------------------------------- blocks --- */

static uint32_t blocks_left(const struct store *s)
{
	return s->n_blocks - s->used;
}

static uint32_t block_take(struct store *s)
{
	uint32_t i = s->free;

	if (i != NONE)
		s->free = s->free_next[i];
	else if (s->fresh < s->n_blocks)
		i = s->fresh++;
	else
		return NONE;
	s->used++;
	return i;
}

static void block_free(struct store *s, uint32_t i)
{
	block_at(s, i)->magic = 0;
	s->free_next[i] = s->free;
	s->free = i;
	s->used--;
}

static void block_fill(struct store *s, uint32_t i, enum block_kind kind,
		       uint32_t mark, uint32_t number, struct bs_trace_id id)
{
	struct block *b = block_at(s, i);

	b->kind = (uint16_t)kind;
	b->zero = 0;
	b->mark = mark;
	b->number = number;
	b->trace_hi = id.hi;
	b->trace_lo = id.lo;
	store_release(&b->magic, BLOCK_MAGIC);
}

/* -------------------------------------------------------------- slices --- */

struct slice *slice_of(const struct bsn *n, uint32_t t)
{
	const struct trace *trace = &n->index.traces[t];

	return trace->flags & TRACE_COLLECTED ? n->store.slices[trace->slice]
					      : NULL;
}

static struct slice *slice_make(struct store *s, uint32_t mark, uint32_t trace,
				struct bs_trace_id id)
{
	struct slice *slice = calloc(1, sizeof(*slice));

	if (!slice)
		return NULL;
	slice->id = id;
	slice->trace = trace;
	slice->mark = mark;
	s->slices[mark] = slice;
	s->n_slices++;
	return slice;
}

/* A slice with a mark. Until the commit it does not count, so a successor does
 * not find one that was being copied: its trigger comes again. NULL: no room. */
struct slice *slice_new(struct bsn *n, uint32_t trace, struct bs_trace_id id,
			struct bs_trace_id primary, const char *trigger)
{
	struct store *s = &n->store;
	uint32_t i = block_take(s);
	struct slice *slice;
	struct mark *m;

	if (i == NONE)
		return NULL;
	slice = slice_make(s, i, trace, id);
	if (!slice) {
		block_free(s, i);
		return NULL;
	}
	slice->primary = primary;
	strncpy(slice->trigger, trigger, sizeof(slice->trigger) - 1);
	slice->collected_ns = n->now_ns;
	slice->epoch = header(s)->next_slice_epoch++;
	m = mark_at(s, i);
	memset(m, 0, sizeof(*m));
	m->primary = primary;
	memcpy(m->trigger, slice->trigger, sizeof(m->trigger));
	m->collected_ns = n->now_ns;
	m->slice_epoch = slice->epoch;
	block_fill(s, i, BLOCK_MARK, i, 0, id);
	slice_dirty(n, slice);
	return slice;
}

void slice_free(struct bsn *n, struct slice *slice)
{
	struct store *s = &n->store;

	store_commit(n); /* so that it is in no list of dirty ones */
	block_free(s, slice->mark);
	for (uint32_t i = 0; i < slice->n_blocks; i++)
		block_free(s, slice->blocks[i]);
	s->slices[slice->mark] = NULL;
	s->n_slices--;
	free(slice->blocks);
	free(slice->parts);
	free(slice);
}

/* Its mark is written with the next commit. */
static void mark_dirty(struct store *s, struct slice *slice)
{
	if (slice->dirty)
		return;
	slice->dirty = true;
	slice->next_dirty = s->dirty;
	s->dirty = slice->mark;
}

/* Its mark must be written, and its owner told. */
void slice_dirty(struct bsn *n, struct slice *slice)
{
	struct store *s = &n->store;

	slice->changed_ns = n->now_ns;
	slice->changed = true;
	mark_dirty(s, slice);
	if (!s->queued[slice->mark]) {
		s->queued[slice->mark] = true;
		s->changed_next[slice->mark] = NONE;
		if (s->changed_tail == NONE)
			s->changed_head = slice->mark;
		else
			s->changed_next[s->changed_tail] = slice->mark;
		s->changed_tail = slice->mark;
	}
}

/* The next slice with something to tell, or NULL. It stays in the queue while
 * it has more than one thing. */
struct slice *store_next_changed(struct bsn *n)
{
	struct store *s = &n->store;

	while (s->changed_head != NONE) {
		uint32_t i = s->changed_head;
		struct slice *slice = s->slices[i];

		if (slice && (slice->changed || slice->full_event))
			return slice;
		s->changed_head = s->changed_next[i];
		if (s->changed_head == NONE)
			s->changed_tail = NONE;
		s->queued[i] = false;
	}
	return NULL;
}

/* Append all or nothing. */
bool slice_append(struct bsn *n, struct slice *slice, const void *head,
		  size_t head_bytes, const void *body, size_t body_bytes)
{
	struct store *s = &n->store;
	uint64_t end = slice->bytes + head_bytes + body_bytes;
	uint64_t have = ((uint64_t)slice->first_block + slice->n_blocks) *
			BLOCK_CONTENT;
	uint64_t more =
		end > have ? (end - have + BLOCK_CONTENT - 1) / BLOCK_CONTENT
			   : 0;
	const uint8_t *from = head;
	size_t left = head_bytes;

	if (more > blocks_left(s))
		return false;
	if (slice->n_blocks + more > slice->blocks_room) {
		uint32_t room = 2 * slice->blocks_room + (uint32_t)more + 4;
		uint32_t *blocks =
			realloc(slice->blocks, room * sizeof(*blocks));

		if (!blocks)
			return false;
		slice->blocks = blocks;
		slice->blocks_room = room;
	}
	while (more--) {
		uint32_t i = block_take(s);

		block_fill(s, i, BLOCK_DATA, slice->mark,
			   slice->first_block + slice->n_blocks, slice->id);
		slice->blocks[slice->n_blocks++] = i;
	}
	while (slice->bytes < end) {
		uint32_t at = (uint32_t)(slice->bytes % BLOCK_CONTENT);
		uint32_t k = (uint32_t)(slice->bytes / BLOCK_CONTENT) -
			     slice->first_block;
		size_t part = BLOCK_CONTENT - at;

		if (!left) {
			from = body;
			left = body_bytes;
		}
		if (part > left)
			part = left;
		memcpy(block_at(s, slice->blocks[k])->content + at, from, part);
		from += part;
		left -= part;
		slice->bytes += part;
	}
	return true;
}

size_t slice_read(const struct bsn *n, const struct slice *slice,
		  uint64_t offset, uint8_t *to, size_t bytes)
{
	size_t done = 0;

	if (offset >= slice->bytes)
		return 0;
	if (bytes > slice->bytes - offset)
		bytes = slice->bytes - offset;
	while (done < bytes) {
		uint32_t at = (uint32_t)((offset + done) % BLOCK_CONTENT);
		uint32_t k = (uint32_t)((offset + done) / BLOCK_CONTENT) -
			     slice->first_block;
		size_t part = BLOCK_CONTENT - at;

		if (part > bytes - done)
			part = bytes - done;
		memcpy(to + done,
		       block_at(&n->store, slice->blocks[k])->content + at,
		       part);
		done += part;
	}
	return done;
}

void slice_trim(struct bsn *n, struct slice *slice, uint64_t offset)
{
	uint32_t drop;

	if (offset <= slice->trimmed_bytes)
		return;
	slice->trimmed_bytes = offset;
	drop = (uint32_t)(offset / BLOCK_CONTENT) - slice->first_block;
	mark_dirty(&n->store, slice);
	store_commit(n); /* before: a successor must not look for them */
	if (!drop)
		return;
	for (uint32_t i = 0; i < drop; i++)
		block_free(&n->store, slice->blocks[i]);
	slice->n_blocks -= drop;
	slice->first_block += drop;
	memmove(slice->blocks, slice->blocks + drop,
		slice->n_blocks * sizeof(*slice->blocks));
}

/* -------------------------------------------------------------- commit --- */

uint64_t store_epoch(const struct bsn *n)
{
	return header(&n->store)->epoch;
}

static void mark_write(struct bsn *n, struct slice *slice, uint64_t epoch)
{
	struct mark_state *m;

	slice->saved ^= 1;
	m = &mark_at(&n->store, slice->mark)->state[slice->saved];
	m->flags = slice->flags;
	m->bytes = slice->bytes;
	m->trimmed_bytes = slice->trimmed_bytes;
	m->changed_ns = slice->changed_ns;
	m->n_crumbs = slice->n_crumbs;
	memcpy(m->crumbs, slice->crumbs,
	       slice->n_crumbs * sizeof(*slice->crumbs));
	m->n_opens = 0;
	for (uint32_t i = 0; i < slice->n_parts && m->n_opens < MARK_OPENS;
	     i++) {
		if (!slice->parts[i].open)
			continue;
		m->opens[m->n_opens].client = slice->parts[i].client;
		m->opens[m->n_opens++].open = slice->parts[i].open;
	}
	store_release(&m->epoch, epoch);
}

/* One commit for all: a slice has runs of many threads, and what was copied of
 * each must not count without its place in that thread's log. */
void store_commit(struct bsn *n)
{
	struct store *s = &n->store;
	uint64_t epoch = header(s)->epoch + 1;

	drain_save(n, epoch);
	while (s->dirty != NONE) {
		struct slice *slice = s->slices[s->dirty];

		s->dirty = slice->next_dirty;
		slice->dirty = false;
		mark_write(n, slice, epoch);
	}
	store_release(&header(s)->epoch, epoch);
	drain_give_back(n);
}

/* A number for a new process, and for all of that store's life its own. */
uint32_t store_next_client(struct bsn *n)
{
	struct store_header *h = header(&n->store);
	uint32_t number = h->next_client;

	while (client_find(n, number))
		number = number < INT32_MAX ? number + 1 : 1;
	h->next_client = number < INT32_MAX ? number + 1 : 1;
	return number;
}

void store_reserve_client(struct bsn *n, uint32_t number)
{
	struct store_header *h = header(&n->store);

	if (number >= h->next_client && number < INT32_MAX)
		h->next_client = number + 1;
}

/* ---------------------------------------------------------------- life --- */

static int store_tables(struct store *s)
{
	s->n_blocks = (uint32_t)(s->bytes / BLOCK_BYTES);
	s->fresh = 1;
	s->used = 1;
	s->free = NONE;
	s->dirty = NONE;
	s->changed_head = s->changed_tail = NONE;
	s->free_next = calloc(s->n_blocks, sizeof(*s->free_next));
	s->slices = calloc(s->n_blocks, sizeof(struct slice *));
	s->changed_next = calloc(s->n_blocks, sizeof(*s->changed_next));
	s->queued = calloc(s->n_blocks, sizeof(*s->queued));
	if (!s->free_next || !s->slices || !s->changed_next || !s->queued)
		return -ENOMEM;
	return 0;
}

/* See node.h, "Epochs". Far from the end of what a signed number holds. */
static int first_slice_epoch(uint64_t *epoch)
{
	if (getrandom(epoch, sizeof(*epoch), 0) != sizeof(*epoch))
		return -EIO;
	*epoch = (*epoch >> 2) + 1;
	return 0;
}

int store_init(struct bsn *n)
{
	struct store *s = &n->store;
	uint64_t bytes = n->config.store_bytes / BLOCK_BYTES * BLOCK_BYTES;
	uint64_t slice_epoch;
	int err = first_slice_epoch(&slice_epoch);
	int fd;

	if (err)
		return err;
	fd = memfd_sealed("backsight-store", bytes);
	if (fd < 0)
		return fd;
	s->fd = fd;
	s->bytes = bytes;
	s->map = map_shared(fd, bytes);
	if (!s->map)
		return -ENOMEM;
	*header(s) = (struct store_header){
		.magic = STORE_MAGIC,
		.version = STORE_VERSION,
		.block_bytes = BLOCK_BYTES,
		.n_blocks = (uint32_t)(bytes / BLOCK_BYTES),
		.next_client = 1,
		.next_slice_epoch = slice_epoch,
	};
	return store_tables(s);
}

void store_free(struct bsn *n)
{
	struct store *s = &n->store;

	for (uint32_t i = 1; s->slices && i < s->n_blocks; i++) {
		if (!s->slices[i])
			continue;
		free(s->slices[i]->blocks);
		free(s->slices[i]->parts);
		free(s->slices[i]);
	}
	free(s->slices);
	free(s->free_next);
	free(s->changed_next);
	free(s->queued);
	if (s->map)
		munmap(s->map, s->bytes);
	if (s->fd >= 0)
		close(s->fd);
	memset(s, 0, sizeof(*s));
	s->fd = -1;
}

static void adopt_mark(struct bsn *n, uint32_t i)
{
	struct store *s = &n->store;
	const struct mark *m = mark_at(s, i);
	struct bs_trace_id id = {m->block.trace_hi, m->block.trace_lo};
	const struct mark_state *best = NULL;
	struct slice *slice;
	uint32_t t;
	uint8_t saved = 0;

	for (uint8_t k = 0; k < 2; k++) {
		const struct mark_state *state = &m->state[k];

		if (state->epoch && state->epoch <= header(s)->epoch &&
		    (!best || state->epoch > best->epoch)) {
			best = state;
			saved = k;
		}
	}
	/* No commit: its trigger was not answered, and will come again. */
	if (!best || !m->slice_epoch || m->slice_epoch > INT64_MAX ||
	    best->n_crumbs > BSN_CRUMBS_MAX || best->n_opens > MARK_OPENS ||
	    best->trimmed_bytes > best->bytes || best->bytes > s->bytes)
		return;
	t = trace_get(n, id);
	if (t == NONE || n->index.traces[t].flags & TRACE_COLLECTED)
		return;
	slice = slice_make(s, i, t, id);
	if (!slice)
		return;
	slice->primary = m->primary;
	memcpy(slice->trigger, m->trigger, sizeof(slice->trigger));
	slice->trigger[BS_TRIGGER_NAME_MAX] = 0;
	slice->collected_ns = m->collected_ns;
	slice->epoch = m->slice_epoch;
	slice->saved = saved;
	slice->changed_ns = best->changed_ns;
	slice->adopted = true;
	/* How much of it was reclaimed since, nobody knows any more. */
	n->index.traces[t].flags |= TRACE_COLLECTED | TRACE_PARTIAL;
	n->index.traces[t].slice = i;
	slice->bytes = best->bytes;
	slice->trimmed_bytes = best->trimmed_bytes;
	slice->flags = best->flags;
	slice->n_crumbs = best->n_crumbs;
	memcpy(slice->crumbs, best->crumbs, sizeof(slice->crumbs));
	for (uint32_t k = 0; k < best->n_opens; k++) {
		struct part *part = slice_part(slice, best->opens[k].client);

		if (part)
			part->open = best->opens[k].open;
	}
	slice->first_block = (uint32_t)(slice->trimmed_bytes / BLOCK_CONTENT);
	slice->n_blocks =
		(uint32_t)((slice->bytes + BLOCK_CONTENT - 1) / BLOCK_CONTENT) -
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
		return -EPROTO;
	if (h->magic != STORE_MAGIC || h->version != STORE_VERSION ||
	    h->block_bytes != BLOCK_BYTES ||
	    (uint64_t)h->n_blocks * BLOCK_BYTES != bytes ||
	    !h->next_slice_epoch || h->next_slice_epoch > INT64_MAX) {
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
	err = store_tables(s);
	if (err)
		return err;
	if (!h->next_client)
		h->next_client = 1;
	for (uint32_t i = 1; i < s->n_blocks; i++) {
		const struct block *b = block_at(s, i);

		if (b->magic == BLOCK_MAGIC && b->kind == BLOCK_MARK &&
		    b->mark == i)
			adopt_mark(n, i);
	}
	/* Backwards, so that the free list begins at the front. */
	s->fresh = s->n_blocks;
	s->used = s->n_blocks;
	for (uint32_t i = s->n_blocks; i-- > 1;) {
		if (!s->slices[i] && !adopt_data(s, i))
			block_free(s, i);
	}
	for (uint32_t i = 1; i < s->n_blocks; i++) {
		struct slice *slice = s->slices[i];

		if (!slice)
			continue;
		adopt_check(n, slice);
		changed_ns = slice->changed_ns;
		slice_dirty(n, slice);
		slice->changed_ns = changed_ns;
	}
	n->store_adopted = true;
	return 0;
}
