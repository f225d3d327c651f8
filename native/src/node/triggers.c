/* SPDX-License-Identifier: Apache-2.0 */
/* The trigger queues of clients (abi/context.h); two while a context segment
 * is being replaced. */
#include <string.h>

#include "internal.h"

/* A trigger that claims to be older was stamped by a clock that is not ours. */
#define TRIGGER_AGE_MAX_NS (3600 * NS_PER_S)

static bool name_is_valid(const char *name)
{
	size_t i = 0;

	for (; i < BS_TRIGGER_NAME_MAX + 1 && name[i]; i++) {
		char ch = name[i];

		if (!((ch >= 'a' && ch <= 'z') || (ch >= '0' && ch <= '9') ||
		      ch == '_' || ch == '.' || ch == '-'))
			return false;
	}
	return i && i <= BS_TRIGGER_NAME_MAX;
}

static void copy_text(char *to, const char *from, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = READ_ONCE(from[i]);
	to[bytes - 1] = 0;
	/* Nothing after the end: it may be anything. */
	memset(to + strlen(to), 0, bytes - strlen(to));
}

/* What a probe saw: numbers, and no text. */
static void copy_event(char *to, const char *from, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = READ_ONCE(from[i]);
}

static void take(struct bsn *n, struct client *c,
		 const struct bs_trigger_cell *cell)
{
	struct bsn_event *e = &n->events.ring[n->events.head % EVENTS_MAX];
	uint16_t n_laterals = READ_ONCE(cell->n_laterals);
	uint64_t ticks = READ_ONCE(cell->ticks);

	memset(e, 0, sizeof(*e));
	e->kind = BSN_EVENT_TRIGGER;
	e->client = c->number;
	e->id.hi = READ_ONCE(cell->trace_hi);
	e->id.lo = READ_ONCE(cell->trace_lo);
	e->source = READ_ONCE(cell->source);
	copy_text(e->trigger, cell->name, sizeof(e->trigger));
	if (e->source == BS_TRIGGER_KERNEL)
		copy_event(e->why, cell->why, sizeof(e->why));
	else
		copy_text(e->why, cell->why, sizeof(e->why));
	if (!(e->id.hi | e->id.lo) || !name_is_valid(e->trigger) ||
	    e->source < BS_TRIGGER_APPLICATION ||
	    e->source > BS_TRIGGER_KERNEL || n_laterals > BS_LATERALS_MAX) {
		n->counts.corrupt++;
		return;
	}
	for (uint32_t i = 0; i < n_laterals; i++) {
		struct bs_trace_id id;

		id.hi = READ_ONCE(cell->laterals[i].hi);
		id.lo = READ_ONCE(cell->laterals[i].lo);
		if (id.hi | id.lo)
			e->laterals[e->n_laterals++] = id;
	}
	e->time_ns = e->source == BS_TRIGGER_KERNEL ? ticks
						    : clock_monotonic(n, ticks);
	if (e->time_ns > n->now_ns ||
	    n->now_ns - e->time_ns > TRIGGER_AGE_MAX_NS)
		e->time_ns = n->now_ns;
	n->events.head++;
	n->events.unsettled = true;
	n->counts.triggers++;
}

/* Where a queue stands: at the first cell that was not given back. */
void triggers_start(struct queue *q)
{
	const struct bs_context_segment *x = q->context;
	uint32_t head = READ_ONCE(x->trigger_head);

	q->tail = head - BS_TRIGGER_CELLS;
	/* One that was given back may have been taken anew since the head was
	 * read. */
	while (q->tail != head &&
	       load_acquire(&x->cells[q->tail % BS_TRIGGER_CELLS].seq) -
			       (q->tail + BS_TRIGGER_CELLS) <=
		       1)
		q->tail++;
	q->kept = q->tail;
	q->stuck_ns = 0;
}

/* Nobody commits it any more. False: somebody just did. */
static bool skip(struct bs_trigger_cell *cell, uint32_t seq, uint32_t t)
{
	return compare_and_swap(&cell->seq, &seq, t + BS_CELL_SKIPPED);
}

/*
 * Cells are not given back here, but when the control plane has seen to what
 * stood in them (triggers_done): a trigger that was taken out of its queue and
 * not yet collected would be nowhere if the daemon were killed.
 */
static void take_queue(struct bsn *n, struct client *c, struct queue *q,
		       uint32_t most)
{
	struct bs_context_segment *x = q->context;
	uint32_t room = EVENTS_MAX - (n->events.head - n->events.tail);
	uint32_t end = n->events.head + (most < room ? most : room);

	while (n->events.head != end) {
		uint32_t t = q->tail;
		struct bs_trigger_cell *cell = &x->cells[t % BS_TRIGGER_CELLS];
		uint32_t seq = load_acquire(&cell->seq);
		uint32_t claimed = READ_ONCE(x->trigger_head) - t;

		/* Once around at most, however fast cells are committed. */
		if (t - q->kept == BS_TRIGGER_CELLS)
			break;
		if (seq == t + 1) {
			take(n, c, cell);
		} else if (!claimed || claimed > BS_TRIGGER_CELLS) {
			/* Empty. A late commit of a cell that was skipped would
			 * stop the queue when it comes round again. */
			if (seq != t) {
				n->counts.corrupt++;
				store_release(&cell->seq, t);
			}
			break;
		} else {
			if (!q->stuck_ns)
				q->stuck_ns = n->now_ns ? n->now_ns : 1;
			if ((ns_since(n, q->stuck_ns) < CELL_STUCK_NS &&
			     c->live) ||
			    !skip(cell, seq, t)) {
				n->waiting.cell_is_stuck = true;
				break;
			}
			n->counts.cells_skipped++;
		}
		q->stuck_ns = 0;
		q->tail = t + 1;
	}
}

static uint32_t left_in(const struct queue *q)
{
	uint32_t claimed = READ_ONCE(q->context->trigger_head) - q->tail;

	return claimed <= BS_TRIGGER_CELLS ? claimed : 0;
}

static bool old_has_more(const struct client *c)
{
	return c->queue_before.context && left_in(&c->queue_before);
}

/* What a thread fired in the old one, it fired before all in the new one: of
 * that no more than was there before the look at the old one. */
static void take_queues(struct bsn *n, struct client *c, uint32_t most)
{
	uint32_t head = load_acquire(&c->queue.context->trigger_head);

	if (c->queue_before.context) {
		take_queue(n, c, &c->queue_before, most);
		if (old_has_more(c))
			return;
		if (head - c->queue.tail < most)
			most = head - c->queue.tail;
	}
	take_queue(n, c, &c->queue, most);
}

void triggers_take(struct bsn *n, struct client *c)
{
	take_queues(n, c, EVENTS_MAX);
}

/* Each has its share of the room, and a turn to be the first: who fires without
 * end keeps nobody waiting. What room is left then is anybody's. */
void triggers_take_all(struct bsn *n)
{
	uint32_t count = n->clients.count;
	uint32_t first = n->events.turn++;

	/* Some may go when this gives way; who comes has his turn at the next poll. */
	for (uint32_t i = 0; i < count && n->clients.count; i++) {
		struct client *c =
			n->clients.all[(first + i) % n->clients.count];
		uint32_t room = EVENTS_MAX - (n->events.head - n->events.tail);
		uint32_t share = (room + count - i - 1) / (count - i);

		take_queues(n, c, share);
		if ((i + 1) % CLIENTS_A_PIECE == 0)
			node_give_way(n);
	}
	for (uint32_t i = 0; i < n->clients.count; i++) {
		struct client *c = n->clients.all[i];

		if (triggers_left(c))
			triggers_take(n, c);
		if ((i + 1) % CLIENTS_A_PIECE == 0)
			node_give_way(n);
	}
}

/* Claimed and not yet taken. */
uint32_t triggers_left(const struct client *c)
{
	return left_in(&c->queue) +
	       (c->queue_before.context ? left_in(&c->queue_before) : 0);
}

static void done_with(struct queue *q)
{
	for (; q->kept != q->tail; q->kept++)
		store_release(
			&q->context->cells[q->kept % BS_TRIGGER_CELLS].seq,
			q->kept + BS_TRIGGER_CELLS);
}

void triggers_done(struct client *c)
{
	if (c->queue_before.context)
		done_with(&c->queue_before);
	done_with(&c->queue);
}

static bool is_ready(const struct queue *q)
{
	return load_acquire(
		       &q->context->cells[q->tail % BS_TRIGGER_CELLS].seq) ==
	       q->tail + 1;
}

bool triggers_wait(const struct bsn *n, const struct client *c)
{
	if (n->events.head - n->events.tail == EVENTS_MAX)
		return false;
	return is_ready(old_has_more(c) ? &c->queue_before : &c->queue);
}
