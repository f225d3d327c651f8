/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes and segments that a predecessor knew. The ledger says what was
 * granted to whom. Of a client's memory is read how many of its grants its
 * threads took meanwhile, that is the grant ring, whose entries are believed
 * only where the ledger says the same; and which thread slots are in use.
 *
 *   bsn_adopt_store, bsn_adopt_keep   the memfds of the node
 *   bsn_client_adopt                  each process, with the segments it has
 *   adopt_end, at the first poll      what is of nobody is free; the order of
 *                                     the sealed; slices go on
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "internal.h"

/* ---------------------------------------------------------------- ledger --- */

int bsn_adopt_store(struct bsn *n, uint64_t now_ns, int fd)
{
	int err;

	node_lock(n);
	node_set_time(n, now_ns);
	err = n->clients.count || n->store.n_slices ? -EBUSY
						    : store_adopt(n, fd);
	node_unlock(n);
	return err;
}

static int by_client(const void *a, const void *b, void *records)
{
	const struct grant_record *r =
		(const struct grant_record *)records + *(const uint32_t *)a;
	const struct grant_record *s =
		(const struct grant_record *)records + *(const uint32_t *)b;

	if (r->client != s->client)
		return r->client < s->client ? -1 : 1;
	return r->granted_ns < s->granted_ns ? -1
					     : r->granted_ns > s->granted_ns;
}

/* All frames that are granted, by client. */
static int list_granted(struct bsn *n)
{
	struct adoption *a = &n->adoption;
	uint32_t fresh = n->ledger.header->frames_fresh;

	a->frames = malloc((size_t)n->pool.frames_room * sizeof(*a->frames));
	if (!a->frames)
		return -ENOMEM;
	a->count = 0;
	for (uint32_t i = 0; i < fresh; i++) {
		if (n->ledger.records[i].state == FRAME_FREE)
			continue;
		a->frames[a->count++] = i;
		n->pool.frames_fresh = i + 1;
	}
	qsort_r(a->frames, a->count, sizeof(*a->frames), by_client,
		n->ledger.records);
	return 0;
}

/* Where the client's begin in the list. */
static uint32_t first_of(const struct bsn *n, uint32_t client)
{
	const struct adoption *a = &n->adoption;
	uint32_t low = 0, high = a->count;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (n->ledger.records[a->frames[middle]].client < client)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool is_of(const struct bsn *n, uint32_t k, uint32_t client)
{
	return k < n->adoption.count &&
	       n->ledger.records[n->adoption.frames[k]].client == client;
}

/* Segments without a frame, below the highest that has one. */
static void list_free(const struct bsn *n, struct client *c)
{
	for (uint32_t s = c->segments_fresh; s-- > 0;) {
		uint32_t i = c->segments[s].frame;

		if (i < n->pool.frames_room && n->pool.frames[i].client == c &&
		    n->ledger.records[i].segment == s)
			continue;
		c->segments[s].frame = c->segments_free;
		c->segments_free = s;
	}
}

/* Its arena has all the segments that were granted to that number. */
static bool has_frames(const struct bsn *n, const struct client *c,
		       uint32_t number)
{
	for (uint32_t k = first_of(n, number); is_of(n, k, number); k++) {
		if (n->ledger.records[n->adoption.frames[k]].segment >=
		    c->n_segments)
			return false;
	}
	return true;
}

/* Its frames get their places. */
static void take_frames(struct bsn *n, struct client *c)
{
	/* A place that the process remembers must not fit a later life: of segments
	 * without a record nobody knows which they had. */
	for (uint32_t s = 0; s < c->n_segments; s++) {
		c->segments[s].frame = NONE;
		c->segments[s].generation = (uint32_t)(n->secret >> 32);
	}
	for (uint32_t k = first_of(n, c->number); is_of(n, k, c->number); k++) {
		uint32_t i = n->adoption.frames[k];
		uint32_t s = n->ledger.records[i].segment;

		frame_adopt(n, i, c);
		watch_adopt(n, frame_at(n, i));
		if (s >= c->segments_fresh)
			c->segments_fresh = s + 1;
	}
	list_free(n, c);
}

int bsn_adopt_keep(struct bsn *n, uint64_t now_ns, int fd)
{
	int err = -EBUSY;

	node_lock(n);
	node_set_time(n, now_ns);
	if (n->clients.count || n->ledger.adopted)
		goto out;
	err = ledger_adopt(n, fd);
	err = err ? err : pool_init(n);
	err = err ? err : keep_init(n);
	err = err ? err : list_granted(n);
	if (!err && !has_frames(n, &n->keep.arena, 0))
		err = -EPROTO;
	if (!err) {
		take_frames(n, &n->keep.arena);
		clock_adopt(n);
		policy_adopt(n);
	}
out:
	node_unlock(n);
	return err;
}

/* --------------------------------------------------------------- clients --- */

static int check(struct client *c, const struct bsn_client_fds *fds)
{
	const struct bs_context_segment *x;
	uint64_t arena, channel;
	int err;

	if (memfd_check(fds->arena, &arena) ||
	    memfd_check(fds->channel, &channel))
		return -EPROTO;
	if (arena != c->arena_bytes || channel != BS_CHANNEL_BYTES ||
	    !context_fits(fds->context))
		return -EPROTO;
	err = client_map(c, fds);
	if (err)
		return err;
	x = c->queue.context;
	c->version = READ_ONCE(header_of(c)->version);
	if (READ_ONCE(header_of(c)->magic) != BS_ABI_MAGIC ||
	    !bs_version_is_spoken(c->version) ||
	    READ_ONCE(x->magic) != BS_ABI_MAGIC)
		return -EPROTO;
	return 0;
}

static struct bs_grant read_grant(const struct client *c, uint32_t place)
{
	const struct bs_grant *at =
		&grants_of(c)->entries[place % BS_GRANT_RING_ENTRIES];
	struct bs_grant grant;

	grant.segment = READ_ONCE(at->segment) & ~BS_GRANT_FRESH;
	grant.generation = READ_ONCE(at->generation);
	return grant;
}

/* The stock of that grant; NONE: there is none. */
static uint32_t stock_of(const struct bsn *n, const struct client *c,
			 struct bs_grant grant)
{
	const struct grant_record *r;
	uint32_t i = NONE;

	if (grant.segment < c->n_segments)
		i = c->segments[grant.segment].frame;
	if (i >= n->pool.frames_room || n->pool.frames[i].client != c)
		return NONE;
	r = &n->ledger.records[i];
	return r->segment == grant.segment && r->state == FRAME_STOCK &&
			       r->generation == grant.generation
		       ? i
		       : NONE;
}

/* Of its frames the stock that was granted last. */
static uint32_t latest_stock(const struct bsn *n, const struct client *c)
{
	uint32_t latest = NONE;

	for (uint32_t k = first_of(n, c->number); is_of(n, k, c->number); k++) {
		uint32_t i = n->adoption.frames[k];

		if (n->ledger.records[i].state == FRAME_STOCK)
			latest = i;
	}
	return latest;
}

/* Which of its stock still waits in the ring. Returns the latest grant that
 * came as far as the ring. */
static struct bs_grant adopt_ring(struct bsn *n, struct client *c)
{
	struct bs_grant_ring *ring = grants_of(c);
	uint32_t tail = load_acquire(&ring->tail);
	uint32_t head = READ_ONCE(ring->head);
	struct bs_grant last = {.segment = BS_SEGMENT_NONE};
	uint64_t before_ns = 0;

	if (head - tail > BS_GRANT_RING_ENTRIES) {
		n->counts.corrupt++;
		head = tail;
	}
	if (head)
		last = read_grant(c, head - 1);
	c->grant_head = c->grant_tail = tail;
	for (; c->grant_head != head; c->grant_head++) {
		uint32_t i = stock_of(n, c, read_grant(c, c->grant_head));

		/* In the order of granting, so none of them twice. What follows
		 * a lie cannot be told: it counts as taken. */
		if (i == NONE || n->ledger.records[i].granted_ns <= before_ns) {
			n->counts.corrupt++;
			break;
		}
		before_ns = n->ledger.records[i].granted_ns;
		c->granted[c->grant_head % BS_GRANT_RING_ENTRIES] = i;
	}
	/* One more was about to come there, or to be taken back (grants.c). What
	 * an earlier round of the ring left there is not the latest. */
	if (c->grant_head == head && grants_stock(c) < BS_GRANT_RING_ENTRIES) {
		uint32_t i = stock_of(n, c, read_grant(c, head));

		if (i != NONE && i == latest_stock(n, c) &&
		    n->ledger.records[i].granted_ns > before_ns)
			c->granted[c->grant_head++ % BS_GRANT_RING_ENTRIES] = i;
	}
	WRITE_ONCE(ring->head, c->grant_head);
	c->stock_granted = grants_stock(c);
	return last;
}

/* It is in the ring, which is in the order of granting. */
static bool waits(const struct bsn *n, const struct client *c, uint32_t i)
{
	uint64_t granted_ns = n->ledger.records[i].granted_ns;
	uint32_t low = 0, high = grants_stock(c);

	while (low < high) {
		uint32_t middle = (low + high) / 2;
		uint32_t at = (c->grant_tail + middle) % BS_GRANT_RING_ENTRIES;

		if (c->granted[at] == i)
			return true;
		if (n->ledger.records[c->granted[at]].granted_ns < granted_ns)
			low = middle + 1;
		else
			high = middle;
	}
	return false;
}

static void place(struct bsn *n, struct client *c, uint32_t i,
		  struct bs_grant last)
{
	struct grant_record *r = &n->ledger.records[i];
	struct frame *f = frame_at(n, i);

	switch (r->state) {
	case FRAME_BACKED:
		own_push(n, &c->backed, f);
		break;
	case FRAME_STOCK:
		if (waits(n, c, i))
			break;
		/* The latest may not have come as far as the ring. */
		if (r->granted_ns == n->ledger.header->granted_ns &&
		    (r->segment != last.segment ||
		     r->generation != last.generation)) {
			frame_back(n, f);
			break;
		}
		c->believed.pace.taken++;
		frame_set_state(n, f, FRAME_ACTIVE);
		own_push(n, &c->unclaimed, f);
		break;
	case FRAME_ACTIVE:
		own_push(n, &c->unclaimed, f);
		break;
	default:
		break; /* sealed, parked: adopt_end() */
	}
}

static void adopt_slots(struct bsn *n, struct client *c, const struct queue *q)
{
	for (uint32_t i = BS_THREAD_SLOTS; i-- > c->threads_used;) {
		if (READ_ONCE(q->context->slots[i].tid))
			threads_use(n, c, i + 1);
	}
}

static void adopt_threads(struct bsn *n, struct client *c)
{
	adopt_slots(n, c, &c->queue);
	/* And those that are gone since a predecessor counted what they did. */
	if (c->believed.threads_used <= BS_THREAD_SLOTS)
		threads_use(n, c, c->believed.threads_used);
}

/* Of processes that nobody adopted. */
static void forget_told(struct bsn *n)
{
	for (uint32_t i = 0; i < n->ledger.header->n_told; i++) {
		if (!client_find(n, n->ledger.told[i].client))
			n->ledger.told[i].client = 0;
	}
}

int bsn_client_adopt(struct bsn *n, int number, int pid, const char *service,
		     uint64_t now_ns, const struct bsn_client_fds *fds)
{
	struct client *c = NULL;
	uint64_t arena_bytes;
	struct bs_grant last;
	int result;

	node_lock(n);
	node_set_time(n, now_ns);
	result = -EINVAL;
	if (number < 1 || number == INT32_MAX ||
	    client_find(n, (uint32_t)number))
		goto out;
	result = -ENOSPC;
	if (!client_make_room(n))
		goto out;
	result = -EPROTO;
	/* What it was granted nobody knows any more. What it wrote is lost. */
	if (!n->ledger.adopted)
		n->ledger.header->untied_to_ns = n->now_ns;
	if (!n->ledger.adopted || n->recovered ||
	    memfd_check(fds->arena, &arena_bytes) || !arena_bytes ||
	    arena_bytes % SEGMENT || arena_bytes / SEGMENT > INT32_MAX)
		goto out;
	result = -ENOMEM;
	c = client_new(n, pid, service, arena_bytes);
	if (!c)
		goto out;
	result = check(c, fds);
	if (!result && !has_frames(n, c, (uint32_t)number))
		result = -EPROTO; /* another's arena */
	if (result)
		goto out;
	store_reserve_client(n, (uint32_t)number);
	client_enter(n, c, (uint32_t)number);
	client_fill_header(n, c);
	if (!c->believed.pace.window_ns)
		grants_begin(n, c);
	result = number;
	take_frames(n, c);
	last = adopt_ring(n, c);
	/* All are looked at. */
	c->moves = READ_ONCE(grants_of(c)->moves) - 1;
	for (uint32_t k = first_of(n, c->number); is_of(n, k, c->number); k++)
		place(n, c, n->adoption.frames[k], last);
	triggers_start(&c->queue);
	adopt_threads(n, c);
	client_adopt_doubt(n, c);
	/* Its counters tell that it lost something of nobody knows which traces,
	 * and not since when. */
	c->losses_read_ns = 0;
	c = NULL;
out:
	if (c)
		client_free(c);
	node_unlock(n);
	bsn_wake(n);
	return result;
}

int bsn_client_adopt_context(struct bsn *n, int client, int fd)
{
	struct queue before = {0};
	struct client *c;
	int result = -ENOENT;

	node_lock(n);
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (!c || !c->live)
		goto out;
	result = -EBUSY;
	if (c->queue_before.context || n->recovered)
		goto out;
	result = -EPROTO;
	if (!context_fits(fd))
		goto out;
	result = -ENOMEM;
	before.context = map_shared(fd, sizeof(*before.context));
	if (!before.context)
		goto out;
	/* What a predecessor counted of it is not written down: all of it. */
	before.records_told = READ_ONCE(before.context->records_unattributed);
	before.triggers_told = READ_ONCE(before.context->triggers_lost);
	triggers_start(&before);
	c->queue_before = before;
	adopt_slots(n, c, &before);
	result = 0;
out:
	node_unlock(n);
	return result;
}

/* ------------------------------------------------------------------- end --- */

static int by_seal(const void *a, const void *b, void *records)
{
	const struct grant_record *r =
		(const struct grant_record *)records + *(const uint32_t *)a;
	const struct grant_record *s =
		(const struct grant_record *)records + *(const uint32_t *)b;

	return r->sealed < s->sealed ? -1 : r->sealed > s->sealed;
}

/* The order of sealing and parking over all processes, some of which may have
 * sealed more since they were adopted. */
static void order_sealed(struct bsn *n, uint32_t *frames, uint32_t count)
{
	struct client *c;
	uint32_t sealed = 0;

	list_init(&n->pool.sealed);
	list_init(&n->keep.arena.sealed);
	tenants_unseal_all(n);
	for_each_client(n, c) {
		list_init(&c->sealed);
		list_init(&c->parked);
	}
	for (uint32_t k = 0; k < count; k++) {
		uint8_t state = n->ledger.records[frames[k]].state;

		if (state == FRAME_SEALED || state == FRAME_PARKED)
			frames[sealed++] = frames[k];
	}
	qsort_r(frames, sealed, sizeof(*frames), by_seal, n->ledger.records);
	for (uint32_t k = 0; k < sealed; k++) {
		struct frame *f = frame_at(n, frames[k]);

		if (record_of(n, f)->state == FRAME_PARKED)
			frame_park_again(n, f);
		else
			frame_seal_again(n, f);
	}
}

/* What a process wrote that was not adopted is lost, whatever it was. */
static void lose_the_rest(struct bsn *n)
{
	struct client *c;

	n->ledger.header->untied_to_ns = n->now_ns;
	for_each_client(n, c)
		client_in_doubt(n, c);
}

static bool was_written_to(const struct grant_record *r)
{
	return r->client &&
	       (r->state == FRAME_ACTIVE || r->state == FRAME_SEALED ||
		r->state == FRAME_PARKED);
}

/* Segments of nobody: their process was not adopted. */
static uint32_t free_the_rest(struct bsn *n, uint32_t *used)
{
	struct pool *p = &n->pool;
	uint32_t count = 0;
	bool loses = false;

	p->frames_free = NONE;
	for (uint32_t i = p->frames_fresh; i-- > 0;) {
		struct frame *f = &p->frames[i];

		if (f->client) {
			used[count++] = i;
			continue;
		}
		loses |= was_written_to(&n->ledger.records[i]);
		n->ledger.records[i].state = FRAME_FREE;
		f->next = p->frames_free;
		p->frames_free = i;
	}
	if (loses)
		lose_the_rest(n);
	return count;
}

/* For slices that go on: what was sealed after the last commit; and what was parked
 * before it by a process that is gone, which may have gone on there when nobody looked. */
static void watch_left(struct bsn *n)
{
	uint64_t committed = store_sealed(n);

	for (uint32_t i = n->pool.sealed.head; i != NONE;
	     i = frame_at(n, i)->next) {
		const struct grant_record *r = &n->ledger.records[i];
		struct frame *f = frame_at(n, i);

		if (f->client != &n->keep.arena &&
		    (r->sealed > committed ||
		     (r->state == FRAME_PARKED && !f->client->live)))
			watch_frame(n, f, true);
	}
}

/* All of before is adopted. */
void adopt_end(struct bsn *n)
{
	uint32_t *frames = n->adoption.frames;
	uint32_t i, count;

	if (!frames)
		return;
	n->adoption.frames = NULL;
	count = free_the_rest(n, frames);
	forget_told(n);
	order_sealed(n, frames, count);
	free(frames);
	for (i = n->keep.arena.segments_fresh; i-- > 0;) {
		uint32_t k = n->keep.arena.segments[i].frame;

		if (k < n->pool.frames_room &&
		    n->pool.frames[k].client == &n->keep.arena &&
		    n->ledger.records[k].segment == i) {
			if (n->ledger.records[k].state == FRAME_ACTIVE)
				frame_seal(n, frame_at(n, k));
			if (n->ledger.records[k].state == FRAME_BACKED)
				own_push(n, &n->keep.arena.backed,
					 frame_at(n, k));
		}
	}
	keep_adopt(n);
	if (n->store.adopted)
		watch_left(n);
}
