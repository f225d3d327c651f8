/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work that is done in pieces: a second thread waits for the lock when it begins, gets
 * it after the first piece, and tells how much was left by then.
 */
#ifndef BS_TEST_PIECES_H
#define BS_TEST_PIECES_H

#include "between.h"
#include "writer.h"

/* ------------------------------------------------------- between pieces --- */

struct between {
	struct bsn *n;
	uint32_t (*left)(struct bsn *n);
	uint32_t seen;
	uint32_t uncommitted; /* slices, then */
};

static inline uint32_t uncommitted(const struct bsn *n)
{
	uint32_t count = 0;

	for (uint32_t i = n->store.dirty; i != NONE;
	     i = n->store.slices[i]->next_dirty)
		count++;
	return count;
}

static inline void *look_between(void *argument)
{
	struct between *b = argument;

	node_lock(b->n);
	b->seen = b->left(b->n);
	b->uncommitted = uncommitted(b->n);
	node_unlock(b->n);
	return NULL;
}

/* How much was left after the first piece, of what was and is. */
static inline void check_piece(struct between *b, uint32_t before,
			       uint32_t most)
{
	uint32_t after = b->left(b->n);

	CHECK(after < b->seen);
	CHECK(b->seen < before);
	CHECK(before - b->seen <= most);
	CHECK(before - after > most);
	CHECK_EQ(b->uncommitted, 0);
}

/* ---------------------------------------------------------------- scene --- */

static inline struct client *first(const struct bsn *n)
{
	return n->clients.all[0];
}

static inline struct client *second(const struct bsn *n)
{
	return n->clients.all[1];
}

static inline struct bsn *new_node(uint32_t clients_max)
{
	struct bsn_config config = test_config(64 << 20);

	config.clients_max = clients_max;
	return test_node(&config);
}

/* Until it holds so many segments that are full. */
static inline uint64_t fill(struct bsn *n, struct wthread *t, uint32_t segments)
{
	uint64_t now = START, i = 0;

	while (n->pool.sealed.count < segments) {
		if (!w_trace(t, trace_id(i++), 1000, now) || i % 100 == 0)
			bsn_poll(n, now += MS);
	}
	return now;
}

static inline uint32_t stock_left(struct bsn *n)
{
	return n->clients.count ? grants_stock(first(n)) : 0;
}

/* A process that writes so much that a thousand segments wait for it. */
static inline struct bsn *large_stock(struct writer *w, struct wthread *t)
{
	struct bsn_config config = test_config(256 << 20);
	struct bsn *n = node_with_writer(&config, w, t);

	fill(n, t, 1200);
	bsn_poll(n, n->now_ns + MS);
	CHECK(stock_left(n) >= 1000);
	return n;
}

#endif
