/* SPDX-License-Identifier: Apache-2.0 */
/* Work that grows with a stock, or with what a process left in the pool, is done in pieces. */
#include "pieces.h"

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
	thread = start_between(n, look_between, &b);
	CHECK(client_make_room(n));
	end_between(n, thread);
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
	thread = start_between(n, look_between, &b);
	grants_first(n, first(n));
	end_between(n, thread);
	check_piece(&b, before, 128);
	free_with_writer(n, &w);
}

static uint32_t second_lacks(struct bsn *n)
{
	return second(n)->stock_target - grants_stock(second(n));
}

/* What one process wrote and lost again is another's next stock. */
static void memory_of_others_is_given_back_in_pieces(void)
{
	struct bsn *n = new_node(8);
	struct between b = {.n = n, .left = second_lacks};
	struct wthread t, others[100];
	pthread_t thread;
	struct writer w[2];
	uint32_t before;

	writer_attach(&w[0], n, START);
	t = writer_thread(&w[0], 0);
	fill(n, &t, 600);
	writer_attach(&w[1], n, n->now_ns);
	for (uint32_t i = 0; i < 100; i++) {
		others[i] = writer_thread(&w[1], i);
		CHECK(w_take_segment(&others[i]));
	}
	node_lock(n);
	node_catch_up(n, n->now_ns + MS);
	while (first(n)->backed.count < 200)
		CHECK(pool_reclaim(n, NULL, false));
	n->pool.n_frames = n->pool.frames_used;
	/* It has what it will want itself. */
	first(n)->stock_target = 0;
	before = second_lacks(n);
	CHECK(before >= 50);
	thread = start_between(n, look_between, &b);
	while (grants_fill(n, second(n)))
		node_give_way(n);
	end_between(n, thread);
	check_piece(&b, before, 8);
	check_invariants(n);
	writer_close(&w[0]);
	free_with_writer(n, &w[1]);
}

/* All of the memory that nobody uses is that of the last of many processes. */
#define PROCESSES 20u

static struct client *last_has_memory(struct bsn *n, struct writer *w)
{
	struct client *c, *last;
	struct wthread t;

	for (uint32_t i = 0; i < PROCESSES; i++)
		writer_attach(&w[i], n, START);
	t = writer_thread(&w[PROCESSES - 1], 0);
	fill(n, &t, 200);
	node_lock(n);
	last = n->clients.all[PROCESSES - 1];
	for_each_client(n, c) {
		while (c->backed.count)
			frame_drop(n, own_pop(n, &c->backed));
	}
	while (last->backed.count < 10)
		CHECK(pool_reclaim(n, NULL, false));
	n->pool.n_frames = n->pool.frames_used;
	return last;
}

static void end_processes(struct bsn *n, struct writer *w)
{
	node_unlock(n);
	free_with_writers(n, w, PROCESSES);
}

/* In entries. */
static uint64_t cost_of_taking(struct bsn *n)
{
	uint64_t before = n->cost;
	struct frame *f;
	bool again;

	f = pool_take(n, first(n), UINT64_MAX, &again);
	CHECK(f);
	frame_back(n, f);
	frame_drop(n, own_pop(n, &first(n)->backed));
	n->pool.n_frames = n->pool.frames_used;
	return n->cost - before;
}

static void who_has_memory_to_spare_is_asked_first(void)
{
	struct bsn *n = new_node(PROCESSES);
	struct writer w[PROCESSES];
	struct client *last = last_has_memory(n, w);
	uint64_t cost;
	bool again;

	last->stock_target = 0;
	cost = cost_of_taking(n);
	CHECK(cost_of_taking(n) < cost);
	/* Where nobody has any, nobody is asked. */
	while (last->backed.count)
		frame_drop(n, own_pop(n, &last->backed));
	n->pool.n_frames = n->pool.frames_used;
	cost = n->cost;
	CHECK(!pool_take(n, first(n), cost, &again));
	CHECK(again);
	CHECK_EQ(n->cost, cost);
	end_processes(n, w);
}

/* To ask all is more than may be done under one hold of the lock. */
static void who_asks_in_vain_does_not_ask_again(void)
{
	struct bsn *n = new_node(PROCESSES);
	struct writer w[PROCESSES];
	struct client *last = last_has_memory(n, w);
	bool again = true;

	/* It wants itself what it has, and no more. */
	last->stock_target = grants_stock(last) + last->backed.count;
	for (uint32_t i = 0; again; i++) {
		CHECK(i < 10);
		pool_take(n, first(n), n->cost + 1, &again);
	}
	end_processes(n, w);
}

/* As bsn_client_exited(), up to where it gives back what the process had. */
static void end_process(struct bsn *n)
{
	threads_finish(n, first(n));
	first(n)->live = false;
	tenant_exit(n, first(n));
	wait_leave(first(n));
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
	thread = start_between(n, look_between, &b);
	end_process(n);
	pool_drop_unused(n, first(n));
	end_between(n, thread);
	check_piece(&b, before, 8);
	CHECK_EQ(n->clients.count, 0);
	bsn_poll(n, START);
	free_with_writer(n, &w);
}

/* Others need all that it has: first what nobody uses, and then what it wrote. */
static void *need_all(void *argument)
{
	struct bsn *n = argument;
	uint32_t budget;

	node_lock(n);
	budget = n->pool.n_frames;
	n->pool.n_frames = 0;
	pool_shrink(n);
	n->pool.n_frames = budget;
	node_unlock(n);
	return NULL;
}

static void a_process_that_ends_is_forgotten_meanwhile(void)
{
	struct bsn *n = new_node(8);
	struct bsn_event event;
	pthread_t thread;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	fill(n, &t, 100);
	node_lock(n);
	/* Most of what it wrote is gone, and waits for it to write more. */
	while (n->pool.sealed.count > 10)
		CHECK(pool_reclaim(n, NULL, false));
	while (grants_drop_one(n, first(n)))
		;
	CHECK(first(n)->backed.count > 50);
	end_process(n);
	thread = start_between(n, need_all, n);
	pool_drop_unused(n, first(n));
	end_between(n, thread);
	CHECK_EQ(n->clients.count, 0);
	CHECK_EQ(bsn_events(n, &event, 1), 1);
	CHECK_EQ(event.kind, BSN_EVENT_CLIENT_DRAINED);
	CHECK_EQ(event.client, w.number);
	CHECK_EQ(bsn_events(n, &event, 1), 0);
	check_invariants(n);
	free_with_writer(n, &w);
}

static void what_is_too_much_is_taken_back_in_pieces(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = large_stock(&w, &t);
	struct between b = {.n = n, .left = stock_left};
	uint32_t before = stock_left(n);
	pthread_t thread;

	node_lock(n);
	thread = start_between(n, look_between, &b);
	/* As if it were new. */
	node_set_time(n, n->now_ns + 2 * NS_PER_S);
	grants_first(n, first(n));
	end_between(n, thread);
	check_piece(&b, before, 128);
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(what_a_process_left_goes_in_pieces);
	RUN(stocks_are_filled_in_pieces);
	RUN(memory_of_others_is_given_back_in_pieces);
	RUN(who_has_memory_to_spare_is_asked_first);
	RUN(who_asks_in_vain_does_not_ask_again);
	RUN(what_was_in_hand_goes_in_pieces);
	RUN(a_process_that_ends_is_forgotten_meanwhile);
	RUN(what_is_too_much_is_taken_back_in_pieces);
	return 0;
}
