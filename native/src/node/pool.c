/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The budget. A frame is a segment that is granted, or that has memory; there
 * are as many as pool_bytes / 64 KiB, over all arenas. A segment that is
 * reclaimed keeps its memory until somebody else needs it: granting it again
 * to the same process costs nothing. Up to the threshold frames are granted; what
 * is above holds such memory, until something is kept (keep.c).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* ------------------------------------------------------------- reclaim --- */

uint64_t pool_horizon_ns(const struct bsn *n)
{
	uint64_t reclaimed_to_ns = n->ledger.header->reclaimed_to_ns;

	if (!reclaimed_to_ns)
		return 0;
	/* Of seals of one instant some have numbers behind it. */
	return n->now_ns > reclaimed_to_ns ? n->now_ns - reclaimed_to_ns : 1;
}

bool pool_may_hold(const struct bsn *n, uint64_t then_ns)
{
	uint32_t oldest = n->pool.sealed.head;

	return n->ledger.header->reclaimed_to_ns < then_ns ||
	       (oldest != NONE && n->ledger.records[oldest].sealed < then_ns);
}

static void reclaim(struct bsn *n, struct frame *f, bool second_chance)
{
	struct ledger_header *h = n->ledger.header;
	struct client *c = f->client;

	if (record_of(n, f)->sealed > h->reclaimed_to_ns)
		h->reclaimed_to_ns = record_of(n, f)->sealed;
	if (n->pool.sealed.head == frame_number(n, f))
		h->gone_to_ns = record_of(n, f)->sealed;
	pass_before_reclaim(n, f);
	/* What was copied of it must count before it is gone. */
	if (f->dirty)
		store_publish(n);
	keep_reclaim_begins(n, f);
	client_evicted(c, record_of(n, f)->sealed);
	evict_frame(n, f, second_chance);
	frame_unseal(n, f);
	n->counts.reclaims++;
	if (c->live)
		frame_back(n, f);
	else
		frame_drop(n, f);
	/* Before, a kill leaves it and its copies (ledger_header). */
	keep_reclaim_ends(n);
	if (!c->live)
		client_check_drained(n, c);
}

static bool drop_one_backed(struct bsn *n, struct client *c)
{
	struct frame *f = own_pop(n, &c->backed);

	if (f)
		frame_drop(n, f);
	return f;
}

/* What a process that is gone had in hand, or had written and lost again. If nothing
 * else is left of it, it is forgotten: here, or by whoever took the last of it
 * meanwhile, since memory that waits is for all. */
void pool_drop_unused(struct bsn *n, struct client *c)
{
	uint64_t end = n->cost + PIECE_ENTRIES;
	uint32_t number = c->number;

	while (c && (grants_drop_one(n, c) || drop_one_backed(n, c))) {
		bool more = grants_stock(c) || c->backed.count;

		if (!more || n->cost < end)
			continue;
		node_give_way(n);
		end = n->cost + PIECE_ENTRIES;
		c = client_find(n, number);
	}
	if (c)
		client_check_drained(n, c);
}

/* Of what is sealed or parked; NONE: there is nothing. */
static uint32_t own_oldest(const struct bsn *n, const struct client *c)
{
	const struct grant_record *records = n->ledger.records;
	uint32_t sealed = c->sealed.head, parked = c->parked.head;

	if (sealed == NONE || parked == NONE)
		return sealed == NONE ? parked : sealed;
	return records[sealed].sealed < records[parked].sealed ? sealed
							       : parked;
}

/* All that is left of a process that is gone, in pieces between which others have
 * the lock. It is freed on the way. */
void pool_drop_client(struct bsn *n, struct client *c)
{
	uint64_t end = n->cost + PIECE_ENTRIES;
	uint32_t number = c->number;

	if (own_oldest(n, c) == NONE) {
		client_check_drained(n, c);
		return;
	}
	while ((c = client_find(n, number)) && own_oldest(n, c) != NONE) {
		reclaim(n, frame_at(n, own_oldest(n, c)), true);
		if (n->cost < end)
			continue;
		node_give_way(n);
		end = n->cost + PIECE_ENTRIES;
	}
}

/* False: a thread went on in it, and it is not to be reclaimed any more. */
static bool reclaim_unless_held(struct bsn *n, struct frame *f,
				bool second_chance)
{
	if (record_of(n, f)->state == FRAME_PARKED && !parked_take(n, f)) {
		frame_unpark(n, f);
		return false;
	}
	reclaim(n, f, second_chance);
	return true;
}

bool pool_reclaim(struct bsn *n, const struct client *c, bool second_chance)
{
	uint32_t i;

	while ((i = tenant_victim(n, c)) != NONE) {
		if (reclaim_unless_held(n, frame_at(n, i), second_chance))
			return true;
	}
	return false;
}

/* -------------------------------------------------------------- taking --- */

static bool arena_is_full(const struct client *c)
{
	return c->segments_free == NONE && c->segments_fresh == c->n_segments;
}

/* Without memory. */
static struct frame *frame_unused(struct bsn *n, struct client *c)
{
	uint32_t segment = c->segments_free;
	struct frame *f;

	if (segment != NONE)
		c->segments_free = c->segments[segment].frame;
	else if (c->segments_fresh < c->n_segments)
		segment = c->segments_fresh++;
	else
		return NULL;
	f = frame_new(n, c, segment, FRAME_BACKED);
	if (!f) {
		c->segments[segment].frame = c->segments_free;
		c->segments_free = segment;
	}
	return f;
}

/* A look at a process that may have memory, in entries. */
#define CLIENT_ENTRIES 5u

/* Memory that another process's arena holds and nobody uses; `spare`: that this
 * process does not want itself now. To give it back costs the node 40 us a segment, to
 * meet it anew a process as much. Who had some for the last one may have more. */
static bool steal(struct bsn *n, const struct client *for_whom, bool spare)
{
	struct client *keep = &n->keep.arena;
	uint32_t count = n->clients.count;

	for (uint32_t i = 0; n->pool.backed && i < count; i++) {
		uint32_t at = (n->pool.spares + i) % count;
		struct client *c = n->clients.all[at];

		n->cost += CLIENT_ENTRIES;
		if (c == for_whom ||
		    c->backed.count <= (spare ? grants_wanted(c) : 0))
			continue;
		n->pool.spares = at;
		frame_drop(n, own_pop(n, &c->backed));
		return true;
	}
	if (keep != for_whom && keep->backed.count) {
		frame_drop(n, own_pop(n, &keep->backed));
		return true;
	}
	return false;
}

/* One that waits with its memory, or memory that nobody has, or that another does not
 * want. */
static struct frame *frame_get(struct bsn *n, struct client *c, bool spare)
{
	struct pool *p = &n->pool;
	struct frame *f = own_pop(n, &c->backed);

	if (f)
		return f;
	if (arena_is_full(c))
		return NULL;
	while (p->frames_used >= p->n_frames) {
		if (!steal(n, c, spare))
			return NULL;
	}
	return frame_unused(n, c);
}

/* A predecessor had a larger budget. */
void pool_shrink(struct bsn *n)
{
	while (n->pool.frames_used > n->pool.n_frames) {
		if (!steal(n, NULL, false) && !pool_reclaim(n, NULL, true))
			break;
	}
}

/* To make room again for what will be kept: so many segments for each that is
 * taken. */
#define MAKE_ROOM_SEGMENTS 8u

/* What lies between the threshold and the budget at least, whatever is configured.
 * A segment all of whose runs are kept takes up to two thirds more than before, as
 * each run has some more bytes there; and so do those that are then reclaimed to
 * make room for it. */
#define KEEP_ROOM MAKE_ROOM_SEGMENTS

/*
 * A segment for c, or NULL. The loop is bounded: each round either ends, or
 * takes one from the list of the sealed; those that came to it meanwhile (the
 * keep arena's) get no second chance.
 *
 * The oldest goes, whosever it is, and its process keeps the memory: for what it wants
 * now, and as far as the room above the threshold goes for what it will want. So
 * processes that write all the time get their own memory again. *again: as much was
 * reclaimed as may be under one hold of the lock, some of it for others; the next call
 * goes on.
 */
static struct frame *take(struct bsn *n, struct client *c, uint64_t end,
			  bool *again)
{
	struct pool *p = &n->pool;
	struct taking *t = &c->taking;

	*again = false;
	/* Which is the oldest, is not known before all are adopted. */
	if (!n->recovered)
		return frame_get(n, c, false);
	for (;;) {
		uint32_t used = p->frames_used - p->backed;
		/* What was kept took the room for what will be kept. */
		bool crowded = used > p->threshold;
		bool second_chance = t->chances > 0;
		struct frame *f;

		if (!t->in_vain &&
		    (used < p->threshold || (crowded && !t->left))) {
			f = frame_get(n, c, t->spare);
			if (f)
				return f;
			/* The next call finds none either, until something is
			 * reclaimed. */
			t->in_vain = true;
		}
		*again = n->cost >= end;
		if (*again)
			return NULL;
		t->in_vain = false;
		if (t->chances)
			t->chances--;
		if (crowded && t->left) {
			t->spare = false;
			t->left--;
		}
		if (arena_is_full(c) && !c->backed.count) {
			/* Its arena is smaller than its share: its own oldest
			 * must go. */
			uint32_t own = own_oldest(n, c);

			if (own == NONE)
				return NULL;
			reclaim_unless_held(n, frame_at(n, own), second_chance);
			continue;
		}
		if (pool_reclaim(n, c, second_chance))
			continue;
		/* All is being written to: up to the budget, then nothing. */
		return frame_get(n, c, false);
	}
}

struct frame *pool_take(struct bsn *n, struct client *c, uint64_t end,
			bool *again)
{
	struct frame *f;

	if (!c->taking.goes_on)
		c->taking = (struct taking){
			.chances = n->pool.sealed.count,
			.left = MAKE_ROOM_SEGMENTS,
			.spare = true,
		};
	f = take(n, c, end, again);
	c->taking.goes_on = *again;
	return f;
}

/* One for the keep arena, which asks in the middle of a reclaim: what lies
 * between the threshold and the budget is for this. */
struct frame *pool_take_kept(struct bsn *n)
{
	struct client *keep = &n->keep.arena;

	if (!keep->backed.count && keep->frames >= n->pool.keep_max)
		return NULL;
	return frame_get(n, keep, false);
}

/* ---------------------------------------------------------------- life --- */

/* The ledger is in place, made anew or a predecessor's: a frame a record. */
int pool_init(struct bsn *n)
{
	struct pool *p = &n->pool;
	uint32_t room = n->ledger.header->n_records;

	pool_free(n);
	p->n_frames = (uint32_t)(n->config.pool_bytes / SEGMENT);
	/* Of a predecessor that had less than a quarter of it. */
	if (p->n_frames > room)
		p->n_frames = room;
	p->threshold = (uint32_t)((uint64_t)p->n_frames *
				  n->config.reclaim_percent / 100);
	if (p->threshold > p->n_frames - KEEP_ROOM)
		p->threshold = p->n_frames - KEEP_ROOM;
	p->keep_max = p->n_frames / 4;
	if (p->keep_max > n->ledger.header->keep_segments)
		p->keep_max = n->ledger.header->keep_segments;
	p->frames_room = room;
	p->frames_fresh = 0;
	p->frames_free = NONE;
	list_init(&p->sealed);
	p->frames = calloc(room, sizeof(*p->frames));
	p->dirty = calloc(room, sizeof(*p->dirty));
	return p->frames && p->dirty ? 0 : -ENOMEM;
}

void pool_free(struct bsn *n)
{
	for (uint32_t i = 0; n->pool.frames && i < n->pool.frames_fresh; i++)
		column_drop(n, &n->pool.frames[i]);
	free(n->pool.frames);
	free(n->pool.dirty);
	memset(&n->pool, 0, sizeof(n->pool));
}
