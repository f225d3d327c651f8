/* SPDX-License-Identifier: Apache-2.0 */
/* Work that grows with a process's threads, with what they took, filled, wrote and lost,
 * is done in pieces. */
#include "pieces.h"

/* ------------------------------------------------------------- segments --- */

static uint32_t taken_left(struct bsn *n)
{
	struct client *c = first(n);

	return READ_ONCE(grants_of(c)->tail) - c->grant_tail;
}

static void taken_segments_are_seen_in_pieces(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = large_stock(&w, &t);
	struct between b = {.n = n, .left = taken_left};
	pthread_t thread;

	for (uint32_t i = 0; i < 1000; i++)
		CHECK(w_take_segment(&t));
	node_lock(n);
	thread = start_between(n, look_between, &b);
	node_catch_up(n, n->now_ns);
	end_between(n, thread);
	check_piece(&b, 1000, PIECE_ENTRIES / LINE_ENTRIES + 1);
	CHECK_EQ(taken_left(n), 0);
	CHECK_EQ(first(n)->active.count, 1);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* The process says that it took less, and has shown that it needs nothing. */
static void *untake_between(void *argument)
{
	struct between *b = argument;
	struct client *c;

	node_lock(b->n);
	c = first(b->n);
	CHECK(taken_left(b->n) > 0);
	WRITE_ONCE(grants_of(c)->tail, c->grant_tail);
	c->believed.pace.peak_per_s = c->stock_granted =
		c->believed.pace.taken = 0;
	c->settled_until_ns = 0;
	while (grants_take_back(b->n, c))
		;
	CHECK(grants_stock(c) < 100);
	node_unlock(b->n);
	return NULL;
}

/* What was taken back meanwhile may be another process's. */
static void what_is_taken_back_meanwhile_is_not_taken(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = large_stock(&w, &t);
	struct between b = {.n = n};
	pthread_t thread;

	for (uint32_t i = 0; i < 1000; i++)
		CHECK(w_take_segment(&t));
	node_lock(n);
	thread = start_between(n, untake_between, &b);
	node_catch_up(n, n->now_ns);
	end_between(n, thread);
	CHECK(stock_left(n) < 100);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* ----------------------------------------------------------------- held --- */

/* As if by so many threads, which stay there. */
static void take_and_hold(struct writer *w, struct wthread *t, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		t->segment = BS_SEGMENT_NONE;
		CHECK(w_take_segment(t));
	}
	__atomic_fetch_add(&w_grants(w)->moves, 1, __ATOMIC_RELEASE);
}

static uint32_t not_looked_at(struct bsn *n)
{
	const struct client *c;
	uint32_t left = 0;

	for_each_client(n, c)
		for (uint32_t i = c->active.head; i != NONE;
		     i = frame_at(n, i)->next_own)
			left += !frame_at(n, i)->looked;
	return left;
}

/* Of processes with many threads one filled its segment. */
static void held_segments_are_looked_at_in_pieces(void)
{
	enum {
		PROCESSES = 4,
		THREADS = 250
	};
	struct bsn_config config = test_config(256 << 20);
	struct bsn *n = test_node(&config);
	struct between b = {.n = n, .left = not_looked_at};
	struct writer w[PROCESSES];
	struct client *c;
	pthread_t thread;

	for (uint32_t i = 0; i < PROCESSES; i++)
		writer_attach(&w[i], n, START);
	bsn_poll(n, START);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		struct wthread t = writer_thread(&w[i], 0);

		take_and_hold(&w[i], &t, THREADS);
	}
	/* They are taken up; and then their threads move. */
	for_each_client(n, c) {
		c->moves = READ_ONCE(grants_of(c)->moves);
		observe(n, c);
		c->moves--;
	}
	CHECK_EQ(not_looked_at(n), PROCESSES * THREADS);
	node_lock(n);
	thread = start_between(n, look_between, &b);
	node_catch_up(n, START);
	end_between(n, thread);
	check_piece(&b, PROCESSES * THREADS, PIECE_ENTRIES / LINE_ENTRIES + 1);
	CHECK_EQ(not_looked_at(n), 0);
	free_with_writers(n, w, PROCESSES);
}

struct counted {
	struct bsn *n;
	uint32_t stopping;
};

/* Pieces of the work; that is not without end. */
static void *count_between(void *argument)
{
	struct counted *counted = argument;
	uint64_t cost = 0;
	uint32_t pieces = 0;

	while (!load_acquire(&counted->stopping)) {
		node_lock(counted->n);
		pieces += counted->n->cost != cost;
		cost = counted->n->cost;
		node_unlock(counted->n);
		CHECK(pieces < 1000);
	}
	return NULL;
}

/* More than can be looked at under one hold of the lock, and all of them stay. */
static void who_holds_too_many_is_looked_at_once(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = large_stock(&w, &t);
	struct counted counted = {.n = n};
	pthread_t thread;

	take_and_hold(&w, &t, 1000);
	node_lock(n);
	thread = start_between(n, count_between, &counted);
	node_catch_up(n, n->now_ns);
	store_release(&counted.stopping, 1);
	end_between(n, thread);
	CHECK_EQ(first(n)->active.count, 2 * BS_THREAD_SLOTS);
	check_invariants(n);
	free_with_writer(n, &w);
}

static uint32_t held_left(struct bsn *n)
{
	return first(n)->active.count;
}

enum {
	SEGMENTS = 500,
	RUNS = 100
};

/* As if by so many threads, after a trace was collected. */
static struct bsn *many_segments(struct writer *w, struct wthread *t,
				 uint32_t segments[static SEGMENTS])
{
	struct bsn *n = large_stock(w, t);
	struct bsn_slice s;

	CHECK_EQ(bsn_collect(n, trace_id(0), trace_id(0), "test", START, &s),
		 0);
	CHECK(w_take_segment(t));
	observe(n, first(n));
	for (uint32_t i = 0; i < SEGMENTS; i++) {
		t->segment = BS_SEGMENT_NONE;
		CHECK(w_take_segment(t));
		segments[i] = t->segment;
		for (uint32_t k = 0; k < RUNS; k++)
			CHECK(w_trace(t, trace_id(1), 8, START));
	}
	observe(n, first(n));
	return n;
}

static uint32_t unwatched_of_first(struct bsn *n)
{
	uint32_t left = 0;

	for (uint32_t i = first(n)->active.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		left += frame_at(n, i)->scanned < RUNS;
	return left;
}

/* As before its process is done with. */
static void segments_are_watched_in_pieces(void)
{
	uint32_t segments[SEGMENTS], before;
	uint64_t end;
	struct writer w;
	struct wthread t;
	struct bsn *n = many_segments(&w, &t, segments);
	struct between b = {.n = n, .left = unwatched_of_first};
	pthread_t thread;

	before = unwatched_of_first(n);
	CHECK(before >= SEGMENTS);
	node_lock(n);
	thread = start_between(n, look_between, &b);
	end = n->cost + PIECE_ENTRIES;
	CHECK(watch_in_pieces(n, first(n), &end));
	end_between(n, thread);
	check_piece(&b, before, PIECE_ENTRIES / RUNS + 1);
	CHECK_EQ(bsn_client_exited(n, w.number, n->now_ns), 0);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* Each is watched before. */
static void full_segments_are_sealed_in_pieces(void)
{
	uint32_t segments[SEGMENTS];
	struct writer w;
	struct wthread t;
	struct bsn *n = many_segments(&w, &t, segments);
	struct between b = {.n = n, .left = held_left};
	pthread_t thread;

	for (uint32_t i = 0; i < SEGMENTS; i++)
		w_set_life(&w, segments[i], BS_SEGMENT_SEALED);
	node_lock(n);
	thread = start_between(n, look_between, &b);
	node_catch_up(n, n->now_ns);
	end_between(n, thread);
	check_piece(&b, SEGMENTS + 1,
		    PIECE_ENTRIES / (RUNS + LINE_ENTRIES) + 1);
	CHECK_EQ(held_left(n), 1);
	free_with_writer(n, &w);
}

/* -------------------------------------------------------------- losses --- */

enum {
	LOSERS = 200
};

static uint32_t losses_left(struct bsn *n)
{
	uint32_t left = 0;

	for (uint32_t i = 0; i < LOSERS; i++) {
		const struct bs_thread_area *a = area_of(first(n), i);

		left += a->loss_head - a->loss_tail;
	}
	return left;
}

/* And their places are given back with each. */
static void losses_are_read_in_pieces(void)
{
	struct writer w;
	struct bsn *n = new_node(8);
	struct between b = {.n = n, .left = losses_left};
	pthread_t thread;

	writer_attach(&w, n, START);
	for (uint32_t i = 0; i < LOSERS; i++) {
		struct wthread t = writer_thread(&w, i);

		for (uint32_t k = 0; k < BS_LOSS_RING_ENTRIES; k++)
			w_lose(&t, trace_id(i), BS_RUN_FIRST, 8);
	}
	node_lock(n);
	thread = start_between(n, look_between, &b);
	node_catch_up(n, START + MS);
	store_publish(n);
	end_between(n, thread);
	check_piece(&b, LOSERS * BS_LOSS_RING_ENTRIES,
		    PIECE_ENTRIES / LINE_ENTRIES + BS_LOSS_RING_ENTRIES);
	CHECK_EQ(losses_left(n), 0);
	free_with_writer(n, &w);
}

/* ---------------------------------------------------------------- threads --- */

#define PROCESSES 2u
#define ENTRIES 100u

static uint32_t unwatched(struct bsn *n)
{
	uint32_t frames = 0;
	struct client *c;

	for_each_client(n, c) {
		for (uint32_t i = c->active.head; i != NONE;
		     i = frame_at(n, i)->next_own)
			frames += frame_at(n, i)->scanned < ENTRIES;
	}
	return frames;
}

/* Each of their threads writes as many traces. */
static struct bsn *many_threads(struct writer *w)
{
	struct bsn *n = new_node(8);

	for (uint32_t i = 0; i < PROCESSES; i++) {
		writer_attach(&w[i], n, START);
		for (uint32_t slot = 0; slot < BS_THREAD_SLOTS; slot++) {
			struct wthread t = writer_thread(&w[i], slot);

			while (!w_take_segment(&t))
				bsn_poll(n, START);
			for (uint32_t k = 0; k < ENTRIES; k++)
				CHECK(w_trace(&t, trace_id(k), 40, START));
		}
	}
	node_lock(n);
	node_catch_up(n, START + MS);
	node_unlock(n);
	return n;
}

static void threads_are_watched_in_pieces(void)
{
	struct writer w[PROCESSES];
	struct bsn *n = many_threads(w);
	struct between b = {.n = n, .left = unwatched};
	struct bsn_slice s;
	pthread_t thread;
	uint32_t before;

	/* Of what was written before it, the search has seen to. */
	CHECK_EQ(unwatched(n), PROCESSES * BS_THREAD_SLOTS);
	node_lock(n);
	CHECK(slice_new(n, trace_id(1u << 20), trace_id(1), "test"));
	before = unwatched(n);
	thread = start_between(n, look_between, &b);
	watch_all(n);
	end_between(n, thread);
	check_piece(&b, before, 20000 / ENTRIES + 1);
	CHECK_EQ(unwatched(n), 0);
	CHECK_EQ(bsn_slice_info(n, trace_id(1u << 20), &s), 0);
	free_with_writers(n, w, PROCESSES);
}

/* The first search watches all of them, none of which was before. */
static void threads_are_searched_in_pieces(void)
{
	struct writer w[PROCESSES];
	struct bsn *n = many_threads(w);
	struct between b = {.n = n, .left = unwatched};
	struct bsn_slice s;
	pthread_t thread;
	struct slice *slice;
	uint32_t before;

	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	before = unwatched(n);
	thread = start_between(n, look_between, &b);
	search_waiting(n, n->searches_made);
	end_between(n, thread);
	check_piece(&b, before, 20000 / ENTRIES + 1);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	free_with_writers(n, w, PROCESSES);
}

int main(void)
{
	RUN(held_segments_are_looked_at_in_pieces);
	RUN(who_holds_too_many_is_looked_at_once);
	RUN(taken_segments_are_seen_in_pieces);
	RUN(what_is_taken_back_meanwhile_is_not_taken);
	RUN(full_segments_are_sealed_in_pieces);
	RUN(segments_are_watched_in_pieces);
	RUN(losses_are_read_in_pieces);
	RUN(threads_are_watched_in_pieces);
	RUN(threads_are_searched_in_pieces);
	return 0;
}
