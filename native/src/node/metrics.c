/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers: what grows, in n->counts; what is, from where it is. */
#include <errno.h>
#include <string.h>

#include "internal.h"

/* More than any process counts between two looks, of which a successor that finds none of
 * a predecessor takes the first after all its life: 256 TiB are 200 MB/s for two weeks.
 * What jumps further, or falls, is a lie, and is not counted. */
#define STEP_MAX (1ull << 48)

static void believe(struct bsn *n, uint64_t *sum, uint64_t *told, uint64_t now)
{
	if (now < *told || now - *told > STEP_MAX) {
		n->counts.corrupt += *told != now;
		*told = now;
		return;
	}
	*sum += now - *told;
	*told = now;
}

static void read_queue(struct bsn *n, struct queue *q)
{
	if (!q->context)
		return;
	believe(n, &n->counts.records_lost, &q->records_told,
		READ_ONCE(q->context->records_unattributed));
	believe(n, &n->counts.triggers_lost, &q->triggers_told,
		READ_ONCE(q->context->triggers_lost));
}

void metrics_enter(struct bsn *n, struct client *c)
{
	struct told *t = ledger_told(&n->ledger, c->number);

	if (t) {
		c->believed = *t;
		c->queue.records_told = t->records_unattributed;
		c->queue.triggers_told = t->triggers_lost;
	} else {
		t = ledger_told(&n->ledger, 0);
	}
	c->believed.client = c->number;
	c->told = t;
	if (t)
		*t = c->believed;
}

void metrics_leave(struct client *c)
{
	if (c->told)
		c->told->client = 0;
	c->told = NULL;
}

/* For a successor, whose own counters begin with what comes after. */
void metrics_save(struct client *c)
{
	c->believed.threads_used = c->threads_used;
	c->believed.records_unattributed = c->queue.records_told;
	c->believed.triggers_lost = c->queue.triggers_told;
	if (c->told)
		*c->told = c->believed;
}

/* What a process counted itself: its word, and no decision rests on it. */
void metrics_read_client(struct bsn *n, struct client *c)
{
	struct told *told = &c->believed;
	struct told now = {0};

	for (uint32_t i = 0; i < c->threads_used; i++) {
		const struct bs_thread_area *a = area_of(c, i);

		now.runs_lost += READ_ONCE(a->runs_lost);
		now.records_lost += READ_ONCE(a->records_lost);
		now.payload_bytes += READ_ONCE(a->payload_bytes);
		now.payload_bytes_lost += READ_ONCE(a->payload_bytes_lost);
	}
	read_queue(n, &c->queue);
	read_queue(n, &c->queue_before);
	believe(n, &n->counts.runs_lost, &told->runs_lost, now.runs_lost);
	believe(n, &n->counts.records_lost, &told->records_lost,
		now.records_lost);
	believe(n, &n->counts.payload_bytes, &told->payload_bytes,
		now.payload_bytes);
	believe(n, &n->counts.payload_bytes_lost, &told->payload_bytes_lost,
		now.payload_bytes_lost);
	metrics_save(c);
}

uint64_t bsn_client_records_lost(struct bsn *n, int client)
{
	const struct client *c;
	uint64_t records = 0;

	node_lock(n);
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (c)
		records = c->believed.records_lost +
			  c->believed.records_unattributed;
	node_unlock(n);
	return records;
}

void bsn_get_usage(struct bsn *n, struct bsn_usage *u)
{
	node_lock(n);
	u->store_bytes = (uint64_t)n->store.blocks_max * BLOCK_BYTES;
	u->store_used_bytes = (uint64_t)n->store.used * BLOCK_BYTES;
	u->slices = n->store.n_slices;
	node_unlock(n);
}

/* Each thread's counters are in a line of their own, that it wrote last, and in a page
 * of their own too: so many are read under one hold of the lock. */
#define LINES_A_PIECE (PIECE_ENTRIES / LINE_ENTRIES)

/* A process is as dear as so many. */
#define CLIENT_LINES (LINES_A_PIECE / CLIENTS_A_PIECE)

/* Returns how many processes live. */
uint32_t metrics_read_all(struct bsn *n)
{
	uint32_t live = 0, lines = 0;
	struct client *c;

	for_each_client(n, c) {
		live += c->live;
		lines += CLIENT_LINES + c->threads_used;
		metrics_read_client(n, c);
		if (lines < LINES_A_PIECE)
			continue;
		lines = 0;
		node_give_way(n);
	}
	return live;
}

void bsn_get_metrics(struct bsn *n, struct bsn_metrics *m)
{
	const struct pool *p = &n->pool;
	const struct client *keep = &n->keep.arena;
	uint32_t live;

	node_lock(n);
	live = metrics_read_all(n);
	*m = n->counts;
	m->clients = live;
	m->gone = n->ledger.header->gone_held;
	m->pool_bytes = (uint64_t)p->n_frames * SEGMENT;
	m->stock_bytes = (uint64_t)p->by_state[FRAME_STOCK] * SEGMENT;
	m->active_bytes = (uint64_t)p->by_state[FRAME_ACTIVE] * SEGMENT;
	m->sealed_bytes = (uint64_t)(p->by_state[FRAME_SEALED] +
				     p->by_state[FRAME_PARKED]) *
			  SEGMENT;
	m->keep_bytes = (uint64_t)(keep->frames - keep->backed.count) * SEGMENT;
	m->pool_used_bytes = m->stock_bytes + m->active_bytes +
			     m->sealed_bytes + m->keep_bytes;
	m->store_bytes = (uint64_t)n->store.blocks_max * BLOCK_BYTES;
	m->store_used_bytes = (uint64_t)n->store.used * BLOCK_BYTES;
	m->horizon_ns = pool_horizon_ns(n);
	m->column_bytes = p->column_bytes;
	m->slices = n->store.n_slices;
	m->wake_ups = READ_ONCE(n->waiting.wake_ups);
	node_unlock(n);
}
