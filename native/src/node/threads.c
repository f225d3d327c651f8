/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the threads of a process did with what they were granted: which segments
 * they are in, which are full, and which wait for a thread. And what they lost.
 */
#include <stdlib.h>

#include "internal.h"

/* The losses up to here are in slices, and committed. */
static uint32_t losses_seen(const struct bsn *n, struct bs_thread_area *a)
{
	uint32_t tail = READ_ONCE(a->loss_tail);
	uint32_t seen = READ_ONCE(a->loss_tail_seen);
	uint64_t commit = READ_ONCE(a->loss_commit);

	/* Given back first: of a successor's successor it is known no more. */
	if (commit && commit <= store_epoch(n) &&
	    seen - tail <= BS_LOSS_RING_ENTRIES) {
		tail = seen;
		store_release(&a->loss_tail, tail);
	}
	/* A commit that never was must not become another one. */
	store_release(&a->loss_commit, 0);
	return tail;
}

/* So many slots were used. Losses that a predecessor read are not read again. */
void threads_use(struct bsn *n, struct client *c, uint32_t slots)
{
	for (; c->threads_used < slots; c->threads_used++) {
		c->threads[c->threads_used].loss_tail =
			losses_seen(n, area_of(c, c->threads_used));
		c->losses_unsaved = n->losses_unsaved = true;
	}
}

/* ------------------------------------------------------------ segments --- */

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
	while (unlikely(c->unclaimed.count > BS_THREAD_SLOTS)) {
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

/* A segment that a thread has appended to. */
static void look_at(struct bsn *n, struct client *c, struct frame *f)
{
	uint64_t life = load_acquire(&header_at(f)->life);

	if (life == life_of(n, f, BS_SEGMENT_HELD))
		return;
	own_remove(n, &c->active, f);
	if (life == life_of(n, f, BS_SEGMENT_PARKED)) {
		/* One that has more is a liar's, and is parked again and again. */
		record_of(n, f)->parked_runs =
			(uint16_t)READ_ONCE(header_at(f)->runs);
		watch_frame(n, f, false);
		frame_park(n, f);
		return;
	}
	if (life != life_of(n, f, BS_SEGMENT_SEALED))
		n->counts.corrupt++;
	seal(n, f);
}

/* Threads parked, sealed or went on with segments. */
static void look_at_moves(struct bsn *n, struct client *c)
{
	uint32_t next;

	for (uint32_t i = c->parked.head; i != NONE; i = next) {
		struct frame *f = frame_at(n, i);

		next = f->next_own;
		if (is_parked_still(n, f))
			continue;
		frame_unpark(n, f);
		c->wrote_ns = n->now_ns;
	}
	for (uint32_t i = c->active.head; i != NONE; i = next) {
		next = frame_at(n, i)->next_own;
		look_at(n, c, frame_at(n, i));
	}
}

/* What is held cannot be reclaimed, and what is parked is looked at again and
 * again: there is an end to both. */
static void bound_held(struct bsn *n, struct client *c)
{
	while (unlikely(c->parked.count > BS_PARKED_MAX)) {
		struct frame *f = frame_at(n, c->parked.head);
		bool taken = parked_take(n, f);

		frame_unpark(n, f);
		if (taken) {
			own_remove(n, &c->active, f);
			frame_seal(n, f);
		}
	}
	/* A thread has two at most: for a moment, that which is full. */
	while (unlikely(c->active.count > 2 * BS_THREAD_SLOTS)) {
		n->counts.corrupt++;
		seal(n, own_pop(n, &c->active));
	}
}

void threads_observe(struct bsn *n, struct client *c)
{
	uint32_t moves;
	uint32_t tail = load_acquire(&grants_of(c)->tail);
	uint32_t taken = tail - c->grant_tail;

	if (taken > grants_stock(c)) {
		n->counts.corrupt++;
		taken = 0;
	}
	c->taken += taken;
	if (taken)
		c->wrote_ns = n->now_ns;
	while (taken--) {
		uint32_t i =
			c->granted[c->grant_tail++ % BS_GRANT_RING_ENTRIES];

		frame_set_state(n, frame_at(n, i), FRAME_ACTIVE);
		own_push(n, &c->unclaimed, frame_at(n, i));
	}
	if (c->unclaimed.count)
		claim(n, c);
	moves = load_acquire(&grants_of(c)->moves);
	if (moves != c->moves) {
		c->moves = moves;
		look_at_moves(n, c);
	}
	bound_held(n, c);
}

/* -------------------------------------------------------------- losses --- */

/* Threads that only ever lost, without touching the areas of those that are not
 * in use: each would cost a page. Only if those that are known did not lose as
 * much as is counted, one lost and was gone before it was seen. */
static void find_threads(struct bsn *n, struct client *c, uint32_t losses)
{
	const struct bs_context_segment *x = c->queue.context;
	uint32_t known = 0;

	for (uint32_t i = BS_THREAD_SLOTS; i-- > c->threads_used;) {
		if (READ_ONCE(x->slots[i].tid)) {
			threads_use(n, c, i + 1);
			break;
		}
	}
	for (uint32_t i = 0; i < c->threads_used; i++) {
		const struct bs_thread_area *a = area_of(c, i);

		known += READ_ONCE(a->loss_head) + READ_ONCE(a->losses_untold);
	}
	if ((int32_t)(losses - known) > 0)
		threads_use(n, c, BS_THREAD_SLOTS);
}

static void read_loss(struct bsn *n, struct client *c,
		      const struct bs_loss *loss)
{
	struct bs_trace_id id = {READ_ONCE(loss->trace_hi),
				 READ_ONCE(loss->trace_lo)};
	uint32_t flags = READ_ONCE(loss->flags) & (BS_RUN_FIRST | BS_RUN_LAST);
	struct slice *s;

	if (!(id.hi | id.lo)) {
		n->counts.corrupt++;
		return;
	}
	if (!gone_add(n, bs_fingerprint(id.hi, id.lo), GONE_LOSSY))
		client_untied_loss(n, c);
	s = slice_find(n, id);
	if (s)
		slice_loss_arrived(n, s, c, READ_ONCE(loss->handle), flags);
}

static void read_thread(struct bsn *n, struct client *c, uint32_t slot)
{
	struct bs_thread_area *a = area_of(c, slot);
	struct thread *t = &c->threads[slot];
	uint32_t untold = load_acquire(&a->losses_untold);
	uint32_t head = load_acquire(&a->loss_head);

	if (head - t->loss_tail > BS_LOSS_RING_ENTRIES) {
		n->counts.corrupt++;
		client_untied_loss(n, c);
		t->loss_tail = head;
	}
	while (t->loss_tail != head)
		read_loss(n, c,
			  &a->losses[t->loss_tail++ % BS_LOSS_RING_ENTRIES]);
	c->losses_unsaved = n->losses_unsaved = true;
	if (untold != t->losses_untold) {
		t->losses_untold = untold;
		client_untied_loss(n, c);
	}
}

/* Of threads that have no area. In the line that triggers_take() reads anyway. */
static void read_unattributed(struct bsn *n, struct client *c, struct queue *q)
{
	uint64_t unattributed;

	if (!q->context)
		return;
	unattributed = READ_ONCE(q->context->records_unattributed);
	if (unattributed == q->unattributed)
		return;
	q->unattributed = unattributed;
	client_untied_loss(n, c);
}

void threads_read_losses(struct bsn *n, struct client *c)
{
	uint32_t losses = load_acquire(&grants_of(c)->losses);

	if (losses != c->losses) {
		c->losses = losses;
		find_threads(n, c, losses);
		for (uint32_t i = 0; i < c->threads_used; i++)
			read_thread(n, c, i);
	}
	read_unattributed(n, c, &c->queue);
	read_unattributed(n, c, &c->queue_before);
	c->losses_read_ns = n->now_ns;
}

void threads_save_losses(struct bsn *n, uint64_t epoch)
{
	struct client *c;

	if (!n->losses_unsaved)
		return;
	for_each_client(n, c) {
		for (uint32_t i = 0; c->losses_unsaved && i < c->threads_used;
		     i++) {
			struct bs_thread_area *a = area_of(c, i);

			if (READ_ONCE(a->loss_tail) == c->threads[i].loss_tail)
				continue;
			store_release(&a->loss_commit, 0);
			store_release(&a->loss_tail_seen,
				      c->threads[i].loss_tail);
			store_release(&a->loss_commit, epoch);
		}
	}
}

void threads_give_losses_back(struct bsn *n)
{
	struct client *c;

	if (!n->losses_unsaved)
		return;
	for_each_client(n, c) {
		for (uint32_t i = 0; c->losses_unsaved && i < c->threads_used;
		     i++)
			store_release(&area_of(c, i)->loss_tail,
				      c->threads[i].loss_tail);
		c->losses_unsaved = false;
	}
	n->losses_unsaved = false;
}

/* ------------------------------------------------------------- handles --- */

bool handle_is_open(const struct client *c, uint32_t handle)
{
	const uint32_t *table =
		(const void *)(c->channel + BS_CHANNEL_HANDLES_OFFSET);
	uint32_t slot = bs_handle_slot(handle);

	if (!c->live || !handle || slot >= BS_THREAD_SLOTS)
		return false;
	return READ_ONCE(area_of(c, slot)->own_handle) == handle ||
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

void frames_sort(struct bsn *n, uint32_t *frames, uint32_t count)
{
	qsort_r(frames, count, sizeof(*frames), by_grant, n);
}

/* The process is gone: all that it wrote is final. */
void threads_finish(struct bsn *n, struct client *c)
{
	uint32_t found[3 * BS_THREAD_SLOTS];
	uint32_t count = 0;

	for (uint32_t i = c->active.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		found[count++] = i;
	for (uint32_t i = c->unclaimed.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		found[count++] = i;
	list_init(&c->active);
	list_init(&c->unclaimed);
	frames_sort(n, found, count);
	for (uint32_t k = 0; k < count; k++)
		seal(n, frame_at(n, found[k]));
	/* What is parked has its place in the order. */
	for (uint32_t i = c->parked.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		watch_frame(n, frame_at(n, i), true);
	c->take_back = 0; /* what it touched and was not granted */
}
