/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the threads of a process lost: traces by name, in a ring of each thread, and
 * counts of what found no place there.
 */
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

void threads_use(struct bsn *n, struct client *c, uint32_t slots)
{
	for (; c->threads_used < slots; c->threads_used++) {
		c->threads[c->threads_used].loss_tail =
			losses_seen(n, area_of(c, c->threads_used));
		c->losses_unsaved = n->losses_unsaved = true;
	}
}

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

/* What it costs to tell a slice of one, in entries: it is changed and committed. And
 * of all that a thread has told. */
#define TOLD_ENTRIES 200u
#define THREAD_ENTRIES (BS_LOSS_RING_ENTRIES * (LINE_ENTRIES + TOLD_ENTRIES))

static uint32_t *named_in(struct losses_named *named, uint64_t layer)
{
	if (named->layer != layer)
		*named = (struct losses_named){.layer = layer};
	return &named->entries;
}

/* A process tells as many as it likes. Of the last ones that there is room for, it and
 * all of its user may name no more than they leave to others. */
static bool name_loss(struct bsn *n, struct client *c, uint64_t fingerprint)
{
	const struct gone_losses_left left = gone_losses_left(n);
	const uint64_t *added = &n->ledger.header->losses_added;
	uint32_t *own = named_in(&c->losses_named, left.layer);
	uint32_t *tenants = named_in(&c->tenant->losses_named, left.layer);
	uint64_t before = *added;

	if (*own >= left.entries ||
	    (*tenants >= left.entries && tenant_has_others(n, c->tenant)))
		return false;
	if (!gone_add(n, fingerprint, GONE_LOSSY))
		return false;
	*own += *added - before;
	*tenants += *added - before;
	return true;
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
	if (!name_loss(n, c, bs_fingerprint(id.hi, id.lo)))
		client_untied_loss(n, c);
	s = slice_find(n, id);
	if (!s)
		return;
	slice_loss_arrived(n, s, c, READ_ONCE(loss->handle), flags);
	n->cost += TOLD_ENTRIES;
}

static void read_thread(struct bsn *n, struct client *c, uint32_t slot)
{
	struct bs_thread_area *a = area_of(c, slot);
	struct thread *t = &c->threads[slot];
	uint32_t untold = load_acquire(&a->losses_untold);
	uint32_t head = load_acquire(&a->loss_head);

	if (head - t->loss_tail > BS_LOSS_RING_ENTRIES) {
		n->counts.corrupt++;
		/* Nothing was counted: no trace is in doubt for it that the
		 * process has no part in. */
		client_in_doubt(n, c);
		t->loss_tail = head;
	}
	n->cost += LINE_ENTRIES * (1 + head - t->loss_tail);
	while (t->loss_tail != head)
		read_loss(n, c,
			  &a->losses[t->loss_tail++ % BS_LOSS_RING_ENTRIES]);
	c->losses_unsaved = n->losses_unsaved = true;
	if (untold != t->losses_untold) {
		t->losses_untold = untold;
		client_untied_loss(n, c);
	}
}

/* Of threads that have no area. */
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

/* In a line that triggers_take() reads anyway. */
void losses_read_unattributed(struct bsn *n, struct client *c)
{
	read_unattributed(n, c, &c->queue);
	read_unattributed(n, c, &c->queue_before);
}

/* Its areas from the first to the last, of which others may read some on their own
 * way through all when this gives way. */
struct client *losses_read(struct bsn *n, struct client *c, uint64_t *end)
{
	uint32_t losses = load_acquire(&grants_of(c)->losses);
	uint64_t begun_ns = n->now_ns;

	if (losses != c->losses) {
		find_threads(n, c, losses);
		for (uint32_t i = 0; i < c->threads_used; i++) {
			if (n->cost + THREAD_ENTRIES > *end)
				*end = n->cost;
			c = threads_give_way(n, c, end);
			if (!c)
				return NULL;
			read_thread(n, c, i);
		}
		c->losses = losses;
	}
	losses_read_unattributed(n, c);
	if (c->losses_read_ns < begun_ns)
		c->losses_read_ns = begun_ns;
	return c;
}

void losses_save(struct bsn *n, uint64_t epoch)
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

void losses_give_back(struct bsn *n)
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
