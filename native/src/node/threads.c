/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the threads of a process did with what they were granted: which segments
 * they are in, which are full, and which wait for a thread.
 */
#include <stdlib.h>

#include "internal.h"

/* A thread has two at most: for a moment, that which is full. */
#define ACTIVE_MAX (2 * BS_THREAD_SLOTS)
#define UNCLAIMED_MAX BS_THREAD_SLOTS

struct client *threads_give_way(struct bsn *n, struct client *c, uint64_t *end)
{
	uint32_t number = c->number;

	if (n->cost < *end)
		return c;
	node_commit_and_give_way(n);
	*end = n->cost + PIECE_ENTRIES;
	c = client_find(n, number);
	return c && c->live ? c : NULL;
}

static void seal(struct bsn *n, struct frame *f)
{
	watch_frame(n, f, true);
	frame_seal(n, f);
}

static struct bs_segment_header *header_at(const struct frame *f)
{
	return (struct bs_segment_header *)f->bytes;
}

void thread_enter(struct bsn *n, struct frame *f)
{
	f->served = NONE;
	f->looked = 0;
	f->entered = ++n->pool.entered;
	own_push(n, &f->client->active, f);
}

/* Frames whose takers have written their headers, in the order of taking. */
static void claim(struct bsn *n, struct client *c)
{
	uint32_t next;

	for (uint32_t i = c->unclaimed.head; i != NONE; i = next) {
		struct frame *f = frame_at(n, i);
		const struct bs_segment_header *h = header_at(f);
		uint32_t slot;

		next = f->next_own;
		if (bs_life_generation(load_acquire(&h->life)) !=
		    record_of(n, f)->generation)
			continue;
		slot = READ_ONCE(h->slot);
		own_remove(n, &c->unclaimed, f);
		if (likely(slot < BS_THREAD_SLOTS))
			threads_use(n, c, slot + 1);
		else
			n->counts.corrupt++;
		thread_enter(n, f);
	}
	/* A thread has taken one at most whose header it has not written yet.
	 * More are a lie, and would be memory that nobody can reclaim. */
	while (unlikely(c->unclaimed.count > UNCLAIMED_MAX)) {
		n->counts.corrupt++;
		seal(n, own_pop(n, &c->unclaimed));
	}
}

static uint64_t life_of(const struct bsn *n, const struct frame *f,
			enum bs_segment_state state)
{
	return bs_life(record_of(n, f)->generation, state);
}

/* As it was when it was parked; or the node is about to reclaim it. */
static bool is_parked_still(const struct bsn *n, const struct frame *f)
{
	const struct bs_segment_header *h = header_at(f);
	uint64_t life = load_acquire(&h->life);

	return (life == life_of(n, f, BS_SEGMENT_PARKED) &&
		READ_ONCE(h->runs) == record_of(n, f)->parked_runs) ||
	       life == life_of(n, f, BS_SEGMENT_TAKEN_BACK);
}

bool parked_take(struct bsn *n, struct frame *f)
{
	uint64_t life = life_of(n, f, BS_SEGMENT_PARKED);

	/* Nobody goes on in it, and it is watched no more. */
	if (!f->client->live)
		return true;
	/* It was gone on in and parked again: it is not as old as it seems. */
	if (!is_parked_still(n, f))
		return false;
	/* A predecessor may have been killed when it had taken it. */
	if (!compare_and_swap(&header_at(f)->life, &life,
			      life_of(n, f, BS_SEGMENT_TAKEN_BACK)) &&
	    life != life_of(n, f, BS_SEGMENT_TAKEN_BACK))
		return false;
	watch_frame(n, f, true);
	return true;
}

/* A segment that a thread has appended to: when it is not held any more, once slices
 * have all of it. Until so much is done. */
static void look_at(struct bsn *n, struct client *c, struct frame *f,
		    uint64_t look, uint64_t end)
{
	uint64_t life = load_acquire(&header_at(f)->life);

	n->cost += LINE_ENTRIES;
	if (life == life_of(n, f, BS_SEGMENT_HELD)) {
		f->looked = look;
		return;
	}
	watch_until(n, f, life == life_of(n, f, BS_SEGMENT_SEALED), end);
	if (n->cost >= end)
		return;
	if (life == life_of(n, f, BS_SEGMENT_PARKED)) {
		uint32_t runs = load_acquire(&header_at(f)->runs);

		/* A thread went on in it. A run that is among these may be open, and
		 * nobody would look for its end in a segment with as many runs. */
		if (load_acquire(&header_at(f)->life) != life) {
			f->looked = look;
			return;
		}
		own_remove(n, &c->active, f);
		/* One that has more is a liar's, and is parked again and again. */
		record_of(n, f)->parked_runs = (uint16_t)runs;
		watch_frame(n, f, false);
		frame_park(n, f);
		return;
	}
	own_remove(n, &c->active, f);
	if (life != life_of(n, f, BS_SEGMENT_SEALED))
		n->counts.corrupt++;
	seal(n, f);
}

/* Those that stay parked. False: a piece is done, and there is more. */
static bool look_at_parked(struct bsn *n, struct client *c, uint64_t look,
			   uint64_t end)
{
	uint32_t next;

	for (uint32_t i = c->parked.head; i != NONE; i = next) {
		struct frame *f = frame_at(n, i);

		next = f->next_own;
		if (f->looked >= look) {
			n->cost++;
			continue;
		}
		if (n->cost >= end)
			return false;
		n->cost += LINE_ENTRIES;
		f->looked = look;
		if (is_parked_still(n, f))
			continue;
		frame_unpark(n, f);
		c->wrote_ns = n->now_ns;
	}
	return true;
}

/* Likewise, those that stay held. */
static bool look_at_active(struct bsn *n, struct client *c, uint64_t look,
			   uint64_t end)
{
	uint32_t next;

	for (uint32_t i = c->active.head; i != NONE; i = next) {
		struct frame *f = frame_at(n, i);

		next = f->next_own;
		if (f->looked >= look) {
			n->cost++;
			continue;
		}
		if (n->cost >= end)
			return false;
		look_at(n, c, f, look, end);
	}
	return true;
}

/* Threads parked, sealed or went on with segments. Others look at some when this gives
 * way, and move them to other lists, so it begins at the head of its list again: but
 * reads no header twice that did not change, or a liar with very many would keep it
 * there for ever. */
static struct client *look_at_moves(struct bsn *n, struct client *c,
				    uint64_t *end)
{
	uint32_t moves = load_acquire(&grants_of(c)->moves);
	uint64_t look;

	if (moves == c->moves)
		return c;
	look = ++c->looks;
	while (c && !look_at_parked(n, c, look, *end))
		c = threads_give_way(n, c, end);
	while (c && !look_at_active(n, c, look, *end))
		c = threads_give_way(n, c, end);
	if (c)
		c->moves = moves;
	return c;
}

/* What is held cannot be reclaimed, and what is parked is looked at again and
 * again: there is an end to both. */
static struct client *bound_held(struct bsn *n, struct client *c, uint64_t *end)
{
	while (c && unlikely(c->parked.count > BS_PARKED_MAX)) {
		struct frame *f = frame_at(n, c->parked.head);
		bool taken = parked_take(n, f);

		frame_unpark(n, f);
		if (taken) {
			own_remove(n, &c->active, f);
			frame_seal(n, f);
		}
		n->cost += LINE_ENTRIES;
		c = threads_give_way(n, c, end);
	}
	while (c && unlikely(c->active.count > ACTIVE_MAX)) {
		n->counts.corrupt++;
		seal(n, own_pop(n, &c->active));
		n->cost += LINE_ENTRIES;
		c = threads_give_way(n, c, end);
	}
	return c;
}

/* Segments that threads took, in the order of taking. */
static struct client *look_at_taken(struct bsn *n, struct client *c,
				    uint64_t *end)
{
	uint32_t tail = load_acquire(&grants_of(c)->tail);

	if (tail - c->grant_tail > grants_stock(c)) {
		n->counts.corrupt++;
		tail = c->grant_tail;
	}
	/* When this gives way others may take more of them up; and take back what the
	 * process then says that it did not take. */
	while (c && (int32_t)(tail - c->grant_tail) > 0 && grants_stock(c)) {
		uint32_t i =
			c->granted[c->grant_tail++ % BS_GRANT_RING_ENTRIES];

		c->believed.pace.taken++;
		c->wrote_ns = n->now_ns;
		frame_set_state(n, frame_at(n, i), FRAME_ACTIVE);
		own_push(n, &c->unclaimed, frame_at(n, i));
		n->cost += LINE_ENTRIES;
		if (n->cost < *end)
			continue;
		claim(n, c);
		c = threads_give_way(n, c, end);
	}
	if (c)
		claim(n, c);
	return c;
}

struct client *threads_observe(struct bsn *n, struct client *c, uint64_t *end)
{
	c = look_at_taken(n, c, end);
	if (c)
		c = look_at_moves(n, c, end);
	if (c)
		c = bound_held(n, c, end);
	return c;
}

/* ------------------------------------------------------------- handles --- */

bool handle_is_open(const struct client *c, uint32_t handle)
{
	const uint32_t *table =
		(const void *)(c->channel + BS_CHANNEL_HANDLES_OFFSET);
	uint32_t slot = bs_handle_slot(handle);

	if (!c->live || !handle)
		return false;
	/* Who had no slot drew one that is nobody's. */
	return (slot < BS_THREAD_SLOTS &&
		READ_ONCE(area_of(c, slot)->own_handle) == handle) ||
	       READ_ONCE(table[bs_handle_place(handle)]) == handle;
}

/* ----------------------------------------------------------------- end --- */

static int by_grant(const void *a, const void *b, void *node)
{
	const struct bsn *n = node;
	const struct grant_record *r = &n->ledger.records[*(const uint32_t *)a];
	const struct grant_record *s = &n->ledger.records[*(const uint32_t *)b];

	return r->granted_ns < s->granted_ns ? -1
					     : r->granted_ns > s->granted_ns;
}

/* The process is gone: all that it wrote is final. */
void threads_finish(struct bsn *n, struct client *c)
{
	uint32_t found[ACTIVE_MAX + UNCLAIMED_MAX];
	uint32_t count = 0;

	/* Others may be looking at what it took, a piece at a time. Only of a liar,
	 * whose memory another process writes to, have they found too many. */
	while (unlikely(c->active.count > ACTIVE_MAX))
		seal(n, own_pop(n, &c->active));

	for (uint32_t i = c->active.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		found[count++] = i;
	for (uint32_t i = c->unclaimed.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		found[count++] = i;
	list_init(&c->active);
	list_init(&c->unclaimed);
	qsort_r(found, count, sizeof(*found), by_grant, n);
	for (uint32_t k = 0; k < count; k++)
		seal(n, frame_at(n, found[k]));
	/* What is parked has its place in the order. */
	for (uint32_t i = c->parked.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		watch_frame(n, frame_at(n, i), true);
	c->take_back = 0; /* what it touched and was not granted */
}
