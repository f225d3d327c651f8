/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work that grows with a stock, with what a process left, or with slices is done in
 * pieces. A second thread waits for the lock when it begins, gets it after the first
 * piece, and tells how much was done by then.
 */
#include <pthread.h>
#include <sched.h>

#include "node/internal.h"
#include "writer.h"

static uint8_t payload[1024];

/* ------------------------------------------------------- between pieces --- */

struct between {
	struct bsn *n;
	uint32_t (*left)(struct bsn *n);
	uint32_t seen;
};

static void *look_between(void *argument)
{
	struct between *b = argument;

	node_lock(b->n);
	b->seen = b->left(b->n);
	node_unlock(b->n);
	return NULL;
}

/* With the lock held: the other thread waits for it from here on. */
static pthread_t start_between(struct between *b)
{
	pthread_t thread;

	CHECK_EQ(pthread_create(&thread, NULL, look_between, b), 0);
	/* Who waits for the lock holds the gate. */
	while (!pthread_mutex_trylock(&b->n->gate)) {
		pthread_mutex_unlock(&b->n->gate);
		sched_yield();
	}
	return thread;
}

/* How much was left after the first piece, of what was and is. */
static void check_piece(struct between *b, uint32_t before, uint32_t most)
{
	uint32_t after = b->left(b->n);

	CHECK(after < b->seen);
	CHECK(b->seen < before);
	CHECK(before - b->seen <= most);
	CHECK(before - after > most);
}

/* ---------------------------------------------------------------- scene --- */

static struct client *first(const struct bsn *n)
{
	return n->clients.all[0];
}

static struct bsn *new_node(uint32_t clients_max)
{
	struct bsn_config config = test_config(64 << 20);

	config.clients_max = clients_max;
	return test_node(&config);
}

/* Until it holds so many segments that are full. */
static uint64_t fill(struct bsn *n, struct wthread *t, uint32_t segments)
{
	uint64_t now = START, i = 0;

	while (n->pool.sealed.count < segments) {
		if (!w_trace(t, trace_id(i++), 1000, now) || i % 100 == 0)
			bsn_poll(n, now += MS);
	}
	return now;
}

static uint32_t sealed_left(struct bsn *n)
{
	return n->pool.sealed.count;
}

/* As a new process needs its place. */
static void what_a_process_left_goes_in_pieces(void)
{
	struct bsn *n = new_node(1);
	struct between b = {.n = n, .left = sealed_left};
	pthread_t thread;
	struct wthread t;
	struct writer w;
	uint32_t before;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK_EQ(bsn_client_exited(n, w.number, fill(n, &t, 500)), 0);
	before = sealed_left(n);
	node_lock(n);
	thread = start_between(&b);
	CHECK(client_make_room(n));
	node_unlock(n);
	pthread_join(thread, NULL);
	check_piece(&b, before, 8);
	CHECK_EQ(n->clients.count, 0);
	check_invariants(n);
	free_with_writer(n, &w);
}

static uint32_t stock_lacks(struct bsn *n)
{
	return first(n)->stock_target - grants_stock(first(n));
}

static void stocks_are_filled_in_pieces(void)
{
	struct bsn *n = new_node(8);
	struct between b = {.n = n, .left = stock_lacks};
	struct wthread t[200];
	pthread_t thread;
	struct writer w;
	uint32_t before;

	writer_attach(&w, n, START);
	t[0] = writer_thread(&w, 0);
	fill(n, &t[0], 600);
	for (uint32_t i = 0; i < 200; i++) {
		t[i] = writer_thread(&w, i);
		CHECK(w_take_segment(&t[i]));
	}
	node_lock(n);
	node_catch_up(n, n->now_ns + MS);
	before = stock_lacks(n);
	CHECK(before >= 200);
	thread = start_between(&b);
	grants_first(n, first(n));
	node_unlock(n);
	pthread_join(thread, NULL);
	check_piece(&b, before, 128);
	free_with_writer(n, &w);
}

static uint32_t stock_left(struct bsn *n)
{
	return grants_stock(first(n));
}

static void what_was_in_hand_goes_in_pieces(void)
{
	struct bsn *n = new_node(8);
	struct between b = {.n = n, .left = stock_left};
	pthread_t thread;
	struct writer w;
	uint32_t before;

	writer_attach(&w, n, START);
	before = stock_left(n);
	CHECK(before > 100);
	node_lock(n);
	thread = start_between(&b);
	first(n)->live = false;
	pool_drop_unused(n, first(n));
	first(n)->live = true;
	node_unlock(n);
	pthread_join(thread, NULL);
	check_piece(&b, before, 8);
	CHECK_EQ(stock_left(n), 0);
	bsn_poll(n, START);
	free_with_writer(n, &w);
}

/* --------------------------------------------------------------- slices --- */

static uint32_t open_left(struct bsn *n)
{
	uint32_t open = 0;

	for (uint32_t i = 1; i < n->store.n_blocks; i++)
		open += n->store.slices[i] &&
			slice_open_handles(n->store.slices[i]) &&
			!(n->store.slices[i]->flags & BSN_SLICE_MAYBE_LOSSY);
	return open;
}

/* Slices of a process that has them all open. */
static struct bsn *many_slices(struct writer *w, struct wthread *t)
{
	struct bsn *n = new_node(8);
	struct bsn_slice s;

	writer_attach(w, n, START);
	*t = writer_thread(w, 0);
	CHECK(w_take_segment(t));
	for (uint32_t i = 0; i < 300; i++) {
		CHECK(w_begin(t, trace_id(i), 0x10000u + i, 0, BS_RUN_FIRST,
			      40));
		w_record(t, BS_RECORD_DATA, payload, 8, START);
		w_end(t, 0);
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	}
	bsn_poll(n, START);
	CHECK_EQ(open_left(n), 300);
	return n;
}

static void slices_are_closed_in_pieces(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct between b = {.n = n, .left = open_left};
	pthread_t thread;

	node_lock(n);
	thread = start_between(&b);
	first(n)->live = false;
	slices_close_gone(n, true);
	first(n)->live = true;
	node_unlock(n);
	pthread_join(thread, NULL);
	check_piece(&b, 300, 60);
	CHECK_EQ(open_left(n), 0);
	free_with_writer(n, &w);
}

static void slices_are_told_of_losses_in_pieces(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct between b = {.n = n, .left = open_left};
	pthread_t thread;

	node_lock(n);
	client_untied_loss(n, first(n));
	thread = start_between(&b);
	slices_untied_losses(n);
	node_unlock(n);
	pthread_join(thread, NULL);
	check_piece(&b, 300, 60);
	CHECK_EQ(open_left(n), 0);
	free_with_writer(n, &w);
}

/* Of a process that has nothing in the pool, and is forgotten as it ends. */
static void the_last_loss_of_a_process_is_told(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct bsn_slice s;

	fetch_add(&w.context->records_unattributed, 1);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	for (uint32_t i = 0; i < 300; i++) {
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		CHECK(s.flags & BSN_SLICE_MAYBE_LOSSY);
		CHECK_EQ(s.open_handles, 0);
	}
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(what_a_process_left_goes_in_pieces);
	RUN(stocks_are_filled_in_pieces);
	RUN(what_was_in_hand_goes_in_pieces);
	RUN(slices_are_closed_in_pieces);
	RUN(slices_are_told_of_losses_in_pieces);
	RUN(the_last_loss_of_a_process_is_told);
	return 0;
}
