/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One frame: what becomes of a segment, and the lists that it is in.
 *
 *   free -> backed -> stock -> active -> sealed -> backed ...
 *                                 |  ^
 *                                 v  |
 *                                parked -> backed ...
 *
 *   backed   has memory, waits to be granted
 *   stock    granted, waits in its process's ring; may be withdrawn: backed
 *   active   a thread is in it
 *   parked   its thread writes nothing: goes in its turn, unless the thread goes on
 *   sealed   nobody writes there any more: goes in its turn
 *
 * When it goes and its process is gone too, the memory is given back: free.
 */
#include <string.h>
#include <sys/mman.h>

#include "internal.h"

/* --------------------------------------------------------------- lists --- */

void list_init(struct list *l)
{
	l->head = l->tail = NONE;
	l->count = 0;
}

/* Lists of one client: linked by prev_own, next_own. */
void own_push(struct bsn *n, struct list *l, struct frame *f)
{
	uint32_t i = frame_number(n, f);

	f->next_own = NONE;
	f->prev_own = l->tail;
	if (l->tail == NONE)
		l->head = i;
	else
		frame_at(n, l->tail)->next_own = i;
	l->tail = i;
	l->count++;
}

void own_remove(struct bsn *n, struct list *l, struct frame *f)
{
	if (f->prev_own == NONE)
		l->head = f->next_own;
	else
		frame_at(n, f->prev_own)->next_own = f->next_own;
	if (f->next_own == NONE)
		l->tail = f->prev_own;
	else
		frame_at(n, f->next_own)->prev_own = f->prev_own;
	f->prev_own = f->next_own = NONE;
	l->count--;
}

struct frame *own_pop(struct bsn *n, struct list *l)
{
	struct frame *f;

	if (l->head == NONE)
		return NULL;
	f = frame_at(n, l->head);
	own_remove(n, l, f);
	return f;
}

/* -------------------------------------------------------------- frames --- */

static bool is_counted(enum frame_state state)
{
	return state == FRAME_STOCK || state == FRAME_ACTIVE ||
	       state == FRAME_SEALED || state == FRAME_PARKED;
}

static void count_state(struct bsn *n, const struct frame *f,
			enum frame_state state, int32_t frames)
{
	if (state == FRAME_BACKED) {
		n->pool.backed += (uint32_t)frames;
	} else if (is_counted(state) && f->client != &n->keep.arena) {
		n->pool.by_state[state] += (uint32_t)frames;
		tenant_count(f->client, frames);
	}
}

void frame_set_state(struct bsn *n, struct frame *f, enum frame_state state)
{
	struct grant_record *r = record_of(n, f);
	struct client *c = f->client;

	if (r->granted_ns <= c->untied_granted_ns) {
		c->untied_frames -= is_counted(r->state);
		c->untied_frames += is_counted(state);
	}
	count_state(n, f, r->state, -1);
	count_state(n, f, state, 1);
	store_release(&r->state, (uint8_t)state);
}

static void frame_enter(struct bsn *n, struct frame *f, struct client *c,
			uint32_t segment)
{
	memset(f, 0, sizeof(*f));
	f->client = c;
	f->bytes = c->arena + (uint64_t)segment * SEGMENT;
	f->prev = f->next = f->prev_own = f->next_own = NONE;
	f->copied = NONE;
	c->segments[segment].frame = frame_number(n, f);
	c->frames++;
	n->pool.frames_used++;
}

struct frame *frame_new(struct bsn *n, struct client *c, uint32_t segment,
			enum frame_state state)
{
	struct pool *p = &n->pool;
	struct grant_record *r;
	struct frame *f;

	if (p->frames_free != NONE) {
		f = &p->frames[p->frames_free];
		p->frames_free = f->next;
	} else if (p->frames_fresh < p->frames_room) {
		f = &p->frames[p->frames_fresh++];
		if (n->ledger.header->frames_fresh < p->frames_fresh)
			WRITE_ONCE(n->ledger.header->frames_fresh,
				   p->frames_fresh);
	} else {
		return NULL;
	}
	frame_enter(n, f, c, segment);
	r = record_of(n, f);
	memset(r, 0, sizeof(*r));
	r->client = c->number;
	r->segment = segment;
	r->generation = c->segments[segment].generation;
	frame_set_state(n, f, state);
	return f;
}

void frame_adopt(struct bsn *n, uint32_t i, struct client *c)
{
	struct grant_record *r = &n->ledger.records[i];
	struct frame *f = frame_at(n, i);

	frame_enter(n, f, c, r->segment);
	c->segments[r->segment].generation = r->generation;
	c->segments[r->segment].touched = true;
	count_state(n, f, r->state, 1);
}

/* Up to 40 us, in entries: a system call that takes pages from whoever mapped them. */
#define DROP_ENTRIES 8000u

void frame_drop(struct bsn *n, struct frame *f)
{
	struct client *c = f->client;
	uint32_t number = record_of(n, f)->segment;
	/* Who takes frames from a list until it is empty meets none twice; that
	 * much of lists clang-tidy does not follow. */
	struct segment *s = &c->segments[number]; /* NOLINT(clang-analyzer-*) */

	/* Failure leaves old bytes behind, of this process and in its own
	 * arena; its next directory begins with no entry. */
	(void)madvise(f->bytes, SEGMENT, MADV_REMOVE);
	frame_set_state(n, f, FRAME_FREE);
	s->touched = false; /* the process's pages are gone too */
	s->frame = c->segments_free;
	c->segments_free = number;
	c->frames--;
	n->pool.frames_used--;
	f->client = NULL;
	n->cost += DROP_ENTRIES;
	f->next = n->pool.frames_free;
	n->pool.frames_free = frame_number(n, f);
}

/* At the end of the order of sealing, which its record tells already. */
static void list_sealed(struct bsn *n, struct frame *f)
{
	struct pool *p = &n->pool;
	uint32_t i = frame_number(n, f);

	f->next = NONE;
	f->prev = p->sealed.tail;
	if (f->prev == NONE)
		p->sealed.head = i;
	else
		p->frames[f->prev].next = i;
	p->sealed.tail = i;
	p->sealed.count++;
	tenant_seal(n, f);
}

void frame_seal_again(struct bsn *n, struct frame *f)
{
	list_sealed(n, f);
	own_push(n, &f->client->sealed, f);
}

void frame_park_again(struct bsn *n, struct frame *f)
{
	list_sealed(n, f);
	own_push(n, &f->client->parked, f);
}

void frame_seal(struct bsn *n, struct frame *f)
{
	ledger_number_seal(n, frame_number(n, f));
	frame_set_state(n, f, FRAME_SEALED);
	frame_seal_again(n, f);
}

void frame_park(struct bsn *n, struct frame *f)
{
	ledger_number_seal(n, frame_number(n, f));
	frame_set_state(n, f, FRAME_PARKED);
	frame_park_again(n, f);
}

void frame_unseal(struct bsn *n, struct frame *f)
{
	struct client *c = f->client;
	struct pool *p = &n->pool;

	pass_before_unseal(n, f);
	if (f->prev == NONE)
		p->sealed.head = f->next;
	else
		p->frames[f->prev].next = f->next;
	if (f->next == NONE)
		p->sealed.tail = f->prev;
	else
		p->frames[f->next].prev = f->prev;
	p->sealed.count--;
	own_remove(n,
		   record_of(n, f)->state == FRAME_PARKED ? &c->parked
							  : &c->sealed,
		   f);
	tenant_unseal(n, f);
	column_drop(n, f);
}

void frame_unpark(struct bsn *n, struct frame *f)
{
	frame_unseal(n, f);
	frame_set_state(n, f, FRAME_ACTIVE);
	thread_enter(n, f);
}

void frame_back(struct bsn *n, struct frame *f)
{
	frame_set_state(n, f, FRAME_BACKED);
	own_push(n, &f->client->backed, f);
}

void frame_start(struct bsn *n, struct frame *f)
{
	struct grant_record *r = record_of(n, f);
	struct segment *s = &f->client->segments[r->segment];
	struct ledger_header *h = n->ledger.header;

	/* All differ, so that there is an order. */
	h->granted_ns = n->now_ns > h->granted_ns ? n->now_ns
						  : h->granted_ns + 1;
	if (++s->generation == 0)
		s->generation = 1;
	r->granted_ns = h->granted_ns;
	r->generation = s->generation;
	memset(r->watched, 0, sizeof(r->watched));
	f->scanned = 0;
	f->copied = NONE;
}
