/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stocks: how many segments wait in a process's grant ring. They must outlast
 * the time that the daemon may be away, at the rate at which the process
 * wrote when it wrote most, lately. A segment that waits costs no memory, but
 * it counts towards the budget; so all stocks together may have a quarter.
 */
#include "internal.h"

/* A daemon that is stopped, starved or restarted is away for seconds. */
#define STOCK_S 10u

/* What a quiet process finds: a few threads start without waiting for the
 * node. */
#define STOCK_MIN 4u

/* What a process is taken to write until it has shown what it writes, so that it
 * finds 16 MiB: its threads may all begin at once, or with a burst that is over
 * before the node has a processor. */
#define FIRST_PER_S 22u

/* The rate is that of a second: shorter bursts are in it, and longer ones have
 * it for most of their time. */
#define WINDOW_NS NS_PER_S

/* The peak is forgotten by half in this time: a process that works once a
 * minute finds its stock. */
#define PEAK_HALF_LIFE_NS (30 * NS_PER_S)

/* Of the pool, all stocks together; one also of its arena. */
#define STOCKS_SHARE 4u

uint32_t grants_stock(const struct client *c)
{
	return c->grant_head - c->grant_tail;
}

uint32_t grants_wanted(const struct client *c)
{
	uint32_t stock = grants_stock(c);

	return c->live && stock < c->stock_target ? c->stock_target - stock : 0;
}

static uint32_t stock_most(const struct bsn *n, const struct client *c)
{
	/* As much for each tenant, however many processes it has. Those that are
	 * gone write nothing. */
	uint32_t most = n->pool.n_frames / STOCKS_SHARE / n->tenants.live /
			c->tenant->live;

	if (most > c->n_segments / STOCKS_SHARE)
		most = c->n_segments / STOCKS_SHARE;
	if (most > BS_GRANT_RING_ENTRIES)
		most = BS_GRANT_RING_ENTRIES;
	return most < 1 ? 1 : most;
}

static void stock_adapt(struct bsn *n, struct client *c)
{
	struct pace *p = &c->believed.pace;
	uint64_t passed = ns_since(n, p->window_ns);
	uint64_t halves = ns_since(n, p->peak_ns) / PEAK_HALF_LIFE_NS;
	uint64_t rate = 0, target;
	uint32_t most = stock_most(n, c);

	if (halves) {
		p->peak_per_s = halves < 64 ? p->peak_per_s >> halves : 0;
		p->peak_ns += halves * PEAK_HALF_LIFE_NS;
	}
	/* Within the window what was taken so far is the least that it will be. */
	rate = passed > WINDOW_NS ? p->taken * NS_PER_S / passed : p->taken;
	/* Half of a stock was used in less time than the other half must last (older
	 * libraries ring only then): twice as much was needed. */
	if (c->stock_granted && grants_stock(c) <= c->stock_granted / 2 &&
	    ns_since(n, c->filled_ns) < STOCK_S * NS_PER_S &&
	    rate * STOCK_S < 2ull * c->stock_granted)
		rate = (2ull * c->stock_granted + STOCK_S - 1) / STOCK_S;
	if (rate > p->peak_per_s) {
		p->peak_per_s = rate;
		p->peak_ns = n->now_ns;
	}
	if (passed >= WINDOW_NS) {
		p->window_ns = n->now_ns;
		p->taken = 0;
	}
	if (c->told)
		c->told->pace = *p;
	/* What is left when the daemon is told must last, not all of it. */
	target = STOCK_MIN +
		 p->peak_per_s * STOCK_S * BS_STOCK_TOLD / (BS_STOCK_TOLD - 1);
	c->stock_target = (uint32_t)(target < most ? target : most);
}

/* The latest grant is the node's again. The tail is swapped for itself: who moves it
 * from here on, or sees it moved, sees the new head. So nobody takes the latest,
 * unless it was the next already. False: it may be somebody's, and stays.
 *
 * A successor of a node that is killed in the middle finds it behind the head, and
 * moves that (adopt.c). From the tail, where threads take, it could not tell who had
 * it. */
static bool withdraw(struct client *c)
{
	struct bs_grant_ring *ring = grants_of(c);
	uint32_t latest = c->grant_head - 1;
	uint32_t tail = READ_ONCE(ring->tail);

	WRITE_ONCE(ring->head, latest);
	if (compare_and_swap(&ring->tail, &tail, tail) &&
	    (int32_t)(latest - tail) > 0) {
		c->grant_head = latest;
		return true;
	}
	store_release(&ring->head, c->grant_head);
	return false;
}

/* Segments that are granted under one hold of the lock, unless others have to be
 * reclaimed for them, or another process's memory given back: 100 us. */
#define GRANTS_A_PIECE 128u

/* Take back what a process that has become quiet will not need, or may not have
 * since there are more of them: a piece. True: there is more. */
static bool stock_shrink(struct bsn *n, struct client *c)
{
	const struct bs_grant_ring *ring = grants_of(c);
	uint32_t most = stock_most(n, c);

	if (most > 2 * c->stock_target)
		most = 2 * c->stock_target;
	for (uint32_t count = 0; grants_stock(c) > most && withdraw(c);) {
		uint32_t at = c->grant_head % BS_GRANT_RING_ENTRIES;
		struct frame *f = frame_at(n, c->granted[at]);

		/* It has not met that memory yet. */
		if (READ_ONCE(ring->entries[at].segment) & BS_GRANT_FRESH)
			c->segments[record_of(n, f)->segment].touched = false;
		frame_back(n, f);
		/* Nobody used it up. */
		if (c->stock_granted > grants_stock(c))
			c->stock_granted = grants_stock(c);
		if (++count == GRANTS_A_PIECE)
			return grants_stock(c) > most;
	}
	return false;
}

/* It lives: only who called this says that it does not. */
static void fill_up(struct bsn *n, struct client *c)
{
	while (grants_take_back(n, c))
		node_give_way(n);
	while (grants_fill(n, c))
		node_give_way(n);
}

/* It has not shown what it writes, or to a node that kept no account of it. */
void grants_begin(const struct bsn *n, struct client *c)
{
	c->believed.pace = (struct pace){
		.window_ns = n->now_ns,
		.peak_per_s = FIRST_PER_S,
		.peak_ns = n->now_ns,
	};
}

void grants_first(struct bsn *n, struct client *c)
{
	uint64_t end = n->cost + PIECE_ENTRIES;
	struct client *other;

	grants_begin(n, c);
	fill_up(n, c);
	if (grants_stock(c) == c->stock_target)
		return;
	/* Others have what is its share since it came: it may begin to write
	 * before the next poll. */
	for_each_client(n, other) {
		uint32_t number = other->number;

		/* And of what they do not need any more they may have told. */
		if (n->recovered && other->live)
			other = threads_observe(n, other, &end);
		while (other && other->live && grants_take_back(n, other)) {
			node_give_way(n);
			other = client_find(n, number);
		}
		n->cost += PIECE_ENTRIES / CLIENTS_A_PIECE;
		if (other)
			threads_give_way(n, other, &end);
	}
	fill_up(n, c);
}

/* Its process is gone. One by one: of what is no longer in the ring a successor
 * would think that it was taken. */
bool grants_drop_one(struct bsn *n, struct client *c)
{
	uint32_t i;

	if (c->grant_tail == c->grant_head)
		return false;
	i = c->granted[--c->grant_head % BS_GRANT_RING_ENTRIES];
	WRITE_ONCE(grants_of(c)->head, c->grant_head);
	frame_drop(n, frame_at(n, i));
	return true;
}

static bool is_settled(const struct bsn *n, const struct client *c)
{
	return n->now_ns < c->settled_until_ns &&
	       c->grant_tail == c->settled_tail &&
	       n->clients.count == c->settled_clients;
}

static void settle(const struct bsn *n, struct client *c)
{
	c->settled_until_ns = grants_stock(c) == c->stock_target
				      ? c->believed.pace.window_ns + WINDOW_NS
				      : 0;
	c->settled_tail = c->grant_tail;
	c->settled_clients = n->clients.count;
}

bool grants_take_back(struct bsn *n, struct client *c)
{
	if (is_settled(n, c))
		return false;
	stock_adapt(n, c);
	return stock_shrink(n, c);
}

bool grants_fill(struct bsn *n, struct client *c)
{
	struct bs_grant_ring *ring = grants_of(c);
	uint64_t end = n->cost + PIECE_ENTRIES;
	uint32_t most = c->grant_head + GRANTS_A_PIECE;
	bool more = false;

	if (is_settled(n, c))
		return false;
	if (grants_stock(c) < c->stock_target)
		c->filled_ns = n->now_ns;
	while (grants_stock(c) < c->stock_target) {
		uint32_t at = c->grant_head % BS_GRANT_RING_ENTRIES;
		struct grant_record *r;
		struct segment *s;
		struct frame *f;

		more = c->grant_head == most || n->cost >= end;
		if (more)
			break;
		f = pool_take(n, c, end, &more);
		if (!f)
			break;
		frame_start(n, f);
		r = record_of(n, f);
		s = &c->segments[r->segment];
		WRITE_ONCE(ring->entries[at].segment,
			   r->segment | (s->touched ? 0 : BS_GRANT_FRESH));
		WRITE_ONCE(ring->entries[at].generation, r->generation);
		s->touched = true;
		frame_set_state(n, f, FRAME_STOCK);
		c->granted[at] = frame_number(n, f);
		store_release(&ring->head, ++c->grant_head);
	}
	c->stock_granted = grants_stock(c);
	settle(n, c);
	return more;
}
