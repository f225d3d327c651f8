/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of the report store, and slices by trace. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "hash.h"
#include "store.h"

/* -------------------------------------------------------------- blocks --- */

static uint32_t blocks_left(const struct store *s)
{
	return s->used < s->blocks_max ? s->blocks_max - s->used : 0;
}

uint32_t block_take(struct store *s)
{
	uint32_t i = s->free;

	if (!blocks_left(s))
		return NONE;
	if (i != NONE)
		s->free = s->free_next[i];
	else if (s->fresh < s->n_blocks)
		i = s->fresh;
	else
		return NONE;
	if (i == s->fresh)
		WRITE_ONCE(store_header(s)->blocks_fresh, ++s->fresh);
	s->used++;
	return i;
}

void block_free(struct store *s, uint32_t i)
{
	block_at(s, i)->magic = 0;
	s->free_next[i] = s->free;
	s->free = i;
	s->used--;
}

void block_fill(struct store *s, uint32_t i, enum block_kind kind,
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

/* By a secret: who chooses trace ids does not choose which share a bucket. */
static uint32_t *bucket_of(const struct bsn *n, struct bs_trace_id id)
{
	const struct store *s = &n->store;

	return &s->buckets[bs_hash_trace(n->secret, id) & (s->n_buckets - 1)];
}

static void hash_in(struct bsn *n, struct slice *slice)
{
	struct store *s = &n->store;
	uint32_t *bucket = bucket_of(n, slice->id);

	slice->next_hashed = *bucket;
	*bucket = slice->mark;
	filter_add(&s->filter, slice->fingerprint);
	filter_add(&s->next, slice->fingerprint);
}

/* A filter forgets nothing by itself: make another when more of it is of slices
 * that were than of slices that are. A slice went: that is a piece. */
static void filter_renew(struct store *s)
{
	uint32_t cost = 0;

	s->removed++;
	if (s->renewed == NONE) {
		if (s->removed <= s->n_slices)
			return;
		s->removed = s->renewed = 0;
		memset(&s->next, 0, sizeof(s->next));
	}
	while (s->renewed < s->n_buckets && cost < PIECE_ENTRIES) {
		for (uint32_t i = s->buckets[s->renewed]; i != NONE;
		     i = s->slices[i]->next_hashed) {
			filter_add(&s->next, s->slices[i]->fingerprint);
			cost += 2 * LINE_ENTRIES;
		}
		s->renewed++;
		cost++;
	}
	if (s->renewed < s->n_buckets)
		return;
	s->filter = s->next;
	s->renewed = NONE;
}

static void hash_out(struct bsn *n, const struct slice *slice)
{
	struct store *s = &n->store;
	uint32_t *link = bucket_of(n, slice->id);

	while (*link != slice->mark)
		link = &s->slices[*link]->next_hashed;
	*link = slice->next_hashed;
}

struct slice *slice_find(const struct bsn *n, struct bs_trace_id id)
{
	const struct store *s = &n->store;
	uint32_t i;

	if (!s->n_slices)
		return NULL;
	i = *bucket_of(n, id);
	while (i != NONE && !id_equal(s->slices[i]->id, id))
		i = s->slices[i]->next_hashed;
	return i == NONE ? NULL : s->slices[i];
}

struct slice *slice_make(struct bsn *n, uint32_t mark, struct bs_trace_id id)
{
	struct store *s = &n->store;
	struct slice *slice = calloc(1, sizeof(*slice));

	if (!slice)
		return NULL;
	slice->id = id;
	slice->fingerprint = bs_fingerprint(id.hi, id.lo);
	slice->mark = mark;
	s->slices[mark] = slice;
	s->n_slices++;
	hash_in(n, slice);
	return slice;
}

/* A slice with a mark, which counts from the next commit on. NULL: no room. */
struct slice *slice_new(struct bsn *n, struct bs_trace_id id,
			struct bs_trace_id primary, const char *trigger)
{
	struct store *s = &n->store;
	uint32_t i = block_take(s);
	struct slice *slice;
	struct mark *m;

	if (i == NONE)
		return NULL;
	slice = slice_make(n, i, id);
	if (!slice) {
		block_free(s, i);
		return NULL;
	}
	slice->primary = primary;
	strncpy(slice->trigger, trigger, sizeof(slice->trigger) - 1);
	slice->collected_ns = n->now_ns;
	slice->epoch = store_header(s)->next_slice_epoch++;
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

/* Blocks that are freed under one hold of the lock: of each a line is written. */
#define BLOCKS_A_PIECE (PIECE_ENTRIES / LINE_ENTRIES)

/* Nobody finds it from the beginning on, nor does a successor. */
void slice_free(struct bsn *n, struct slice *slice)
{
	struct store *s = &n->store;

	store_commit(n); /* so that it is in no list of dirty ones */
	if (slice->search)
		slice->search->to.slice = NULL;
	block_at(s, slice->mark)->magic = 0;
	hash_out(n, slice);
	s->slices[slice->mark] = NULL;
	s->n_slices--;
	filter_renew(s);
	for (uint32_t i = 0; i < slice->n_blocks; i++) {
		block_free(s, slice->blocks[i]);
		if ((i + 1) % BLOCKS_A_PIECE == 0)
			node_give_way(n);
	}
	/* Last: what names this mark must not pass for a later slice's. */
	block_free(s, slice->mark);
	free(slice->blocks);
	free(slice->parts);
	free(slice->handles);
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

/* A piece. True: there is more. */
bool slice_trim(struct bsn *n, struct slice *slice, uint64_t offset)
{
	uint64_t most =
		((uint64_t)slice->first_block + BLOCKS_A_PIECE) * BLOCK_CONTENT;
	bool more = offset > most;
	uint32_t drop;

	if (more)
		offset = most;
	if (offset <= slice->trimmed_bytes)
		return more;
	slice->trimmed_bytes = offset;
	/* Of what is wanted by nobody, not even the block is kept that is begun: a
	 * slice that only waits for more takes its mark. */
	drop = (uint32_t)(offset / BLOCK_CONTENT) - slice->first_block;
	if (offset == slice->bytes)
		drop = slice->n_blocks;
	mark_dirty(&n->store, slice);
	store_commit(n); /* before: a successor must not look for them */
	if (!drop)
		return more;
	for (uint32_t i = 0; i < drop; i++)
		block_free(&n->store, slice->blocks[i]);
	slice->n_blocks -= drop;
	slice->first_block = (uint32_t)(offset / BLOCK_CONTENT);
	memmove(slice->blocks, slice->blocks + drop,
		slice->n_blocks * sizeof(*slice->blocks));
	return more;
}

/* ---------------------------------------------------------------- life --- */

/* STORE_MAX: block numbers have 32 bits. */
#define BLOCKS_MAX (1ull << 30)

int store_tables(struct bsn *n)
{
	struct store *s = &n->store;
	uint64_t blocks = n->config.store_bytes / BLOCK_BYTES;

	s->n_blocks = (uint32_t)(s->bytes / BLOCK_BYTES);
	s->blocks_max = blocks < s->n_blocks ? (uint32_t)blocks : s->n_blocks;
	s->fresh = 1;
	s->used = 1;
	s->free = NONE;
	s->dirty = NONE;
	s->renewed = NONE;
	s->changed_head = s->changed_tail = NONE;
	s->free_next = calloc(s->n_blocks, sizeof(*s->free_next));
	s->slices = calloc(s->n_blocks, sizeof(struct slice *));
	s->changed_next = calloc(s->n_blocks, sizeof(*s->changed_next));
	s->queued = calloc(s->n_blocks, sizeof(*s->queued));
	for (s->n_buckets = 64; s->n_buckets < s->n_blocks / 8;)
		s->n_buckets *= 2;
	s->buckets = malloc(s->n_buckets * sizeof(*s->buckets));
	if (!s->free_next || !s->slices || !s->changed_next || !s->queued ||
	    !s->buckets)
		return -ENOMEM;
	memset(s->buckets, 0xff, s->n_buckets * sizeof(*s->buckets));
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
	uint64_t blocks = n->config.store_bytes / BLOCK_BYTES * ROOM_FACTOR;
	uint64_t bytes =
		(blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX) * BLOCK_BYTES;
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
	*store_header(s) = (struct store_header){
		.magic = STORE_MAGIC,
		.version = STORE_VERSION,
		.block_bytes = BLOCK_BYTES,
		.n_blocks = (uint32_t)(bytes / BLOCK_BYTES),
		.next_client = 1,
		.next_slice_epoch = slice_epoch,
		.blocks_fresh = 1,
	};
	return store_tables(n);
}

void store_free(struct bsn *n)
{
	struct store *s = &n->store;

	for (uint32_t i = 1; s->slices && i < s->fresh; i++) {
		if (!s->slices[i])
			continue;
		free(s->slices[i]->blocks);
		free(s->slices[i]->parts);
		free(s->slices[i]->handles);
		free(s->slices[i]);
	}
	free(s->slices);
	free(s->free_next);
	free(s->changed_next);
	free(s->queued);
	free(s->buckets);
	if (s->map)
		munmap(s->map, s->bytes);
	if (s->fd >= 0)
		close(s->fd);
	memset(s, 0, sizeof(*s));
	s->fd = -1;
}
