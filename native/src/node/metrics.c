/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers: what grows, in n->counts; what is, from where it is. */
#include <string.h>

#include "internal.h"

/* What processes counted themselves: their word, and no decision rests on it. */
void metrics_add_client(const struct client *c, struct bsn_metrics *m)
{
	for (uint32_t i = 0; i < c->threads_used; i++) {
		const struct bs_thread_area *a = area_of(c, i);

		m->runs_lost += READ_ONCE(a->runs_lost);
		m->records_lost += READ_ONCE(a->records_lost);
		m->payload_bytes += READ_ONCE(a->payload_bytes);
		m->payload_bytes_lost += READ_ONCE(a->payload_bytes_lost);
	}
	m->records_lost += READ_ONCE(c->context->records_unattributed);
	m->triggers_lost += READ_ONCE(c->context->triggers_lost);
}

void bsn_get_metrics(struct bsn *n, struct bsn_metrics *m)
{
	pthread_mutex_lock(&n->lock);
	*m = n->counts;
	for (uint32_t i = 0; i < n->n_clients; i++) {
		metrics_add_client(n->clients[i], m);
		m->clients += n->clients[i]->live;
	}
	m->pool_bytes = n->config.pool_bytes;
	m->stock_bytes = (uint64_t)n->by_state[FRAME_STOCK] * SEGMENT;
	m->active_bytes = (uint64_t)n->by_state[FRAME_ACTIVE] * SEGMENT;
	m->sealed_bytes = (uint64_t)n->by_state[FRAME_SEALED] * SEGMENT;
	m->keep_bytes =
		(uint64_t)(n->keep.frames - n->keep.backed.count) * SEGMENT;
	m->pool_used_bytes = m->stock_bytes + m->active_bytes +
			     m->sealed_bytes + m->keep_bytes;
	m->store_bytes = n->store.bytes;
	m->store_used_bytes = (uint64_t)n->store.used * BLOCK_BYTES;
	m->horizon_ns = n->counts.reclaims ? pool_oldest_ns(n) : 0;
	m->traces_indexed = n->index.traces_used;
	m->runs_indexed = n->index.runs_used;
	m->slices = n->store.n_slices;
	pthread_mutex_unlock(&n->lock);
}

void bsn_get_usage(struct bsn *n, struct bsn_usage *u)
{
	pthread_mutex_lock(&n->lock);
	u->store_bytes = n->store.bytes;
	u->store_used_bytes = (uint64_t)n->store.used * BLOCK_BYTES;
	u->slices = n->store.n_slices;
	pthread_mutex_unlock(&n->lock);
}
