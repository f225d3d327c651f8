/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work that grows with a stock, with what a process left, or with slices is done in
 * pieces. A second thread waits for the lock when it begins, gets it after the first
 * piece, and tells how much was done by then.
 */
#include "between.h"
#include "writer.h"

static uint8_t payload[1024];

/* ------------------------------------------------------- between pieces --- */

struct between {
	struct bsn *n;
	uint32_t (*left)(struct bsn *n);
	uint32_t seen;
	uint32_t uncommitted; /* slices, then */
};

static uint32_t uncommitted(const struct bsn *n)
{
	uint32_t count = 0;

	for (uint32_t i = n->store.dirty; i != NONE;
	     i = n->store.slices[i]->next_dirty)
		count++;
	return count;
}

static void *look_between(void *argument)
{
	struct between *b = argument;

	node_lock(b->n);
	b->seen = b->left(b->n);
	b->uncommitted = uncommitted(b->n);
	node_unlock(b->n);
	return NULL;
}

/* How much was left after the first piece, of what was and is. */
static void check_piece(struct between *b, uint32_t before, uint32_t most)
{
	uint32_t after = b->left(b->n);

	CHECK(after < b->seen);
	CHECK(b->seen < before);
	CHECK(before - b->seen <= most);
	CHECK(before - after > most);
	CHECK_EQ(b->uncommitted, 0);
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

static struct client *second(const struct bsn *n)
{
	return n->clients.all[1];
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

static uint32_t stock_left(struct bsn *n)
{
	return n->clients.count ? grants_stock(first(n)) : 0;
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

/* -------------------------------------------------------------- threads --- */

/* A process that writes so much that a thousand segments wait for it. */
static struct bsn *large_stock(struct writer *w, struct wthread *t)
{
	struct bsn_config config = test_config(256 << 20);
	struct bsn *n = node_with_writer(&config, w, t);

	fill(n, t, 1200);
	bsn_poll(n, n->now_ns + MS);
	CHECK(stock_left(n) >= 1000);
	return n;
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
	first(n)->taken = 0;
	grants_first(n, first(n));
	end_between(n, thread);
	check_piece(&b, before, 128);
	free_with_writer(n, &w);
}

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
	thread = start_between(n, look_between, &b);
	first(n)->live = false;
	slices_close_gone(n, true);
	first(n)->live = true;
	end_between(n, thread);
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
	thread = start_between(n, look_between, &b);
	slices_untied_losses(n);
	end_between(n, thread);
	check_piece(&b, 300, 60);
	CHECK_EQ(open_left(n), 0);
	free_with_writer(n, &w);
}

/* Of many processes at once: not one after the other. */
struct told_of {
	struct bsn *n;
	uint32_t of[2]; /* slices that know, of each process */
};

static void *count_between(void *argument)
{
	struct told_of *t = argument;

	node_lock(t->n);
	for (uint32_t i = 1; i < t->n->store.n_blocks; i++) {
		const struct slice *s = t->n->store.slices[i];

		if (s && s->flags & BSN_SLICE_MAYBE_LOSSY)
			t->of[s->parts[0].client % 2]++;
	}
	node_unlock(t->n);
	return NULL;
}

static void slices_are_told_of_all_processes_at_once(void)
{
	struct bsn *n = new_node(8);
	struct told_of told = {.n = n};
	struct writer w[2];
	struct wthread t[2];
	struct bsn_slice s;
	pthread_t thread;

	for (uint32_t k = 0; k < 2; k++) {
		writer_attach(&w[k], n, START);
		t[k] = writer_thread(&w[k], 0);
	}
	for (uint32_t i = 0; i < 300; i++) {
		CHECK(w_trace(&t[i % 2], trace_id(i), 40, START));
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	}
	bsn_poll(n, START);
	node_lock(n);
	client_untied_loss(n, first(n));
	client_untied_loss(n, second(n));
	thread = start_between(n, count_between, &told);
	slices_untied_losses(n);
	end_between(n, thread);
	CHECK(told.of[0] >= 20 && told.of[1] >= 20);
	CHECK(told.of[0] + told.of[1] <= 60);
	for (uint32_t i = 0; i < 300; i++)
		CHECK(slice_find(n, trace_id(i))->flags &
		      BSN_SLICE_MAYBE_LOSSY);
	writer_close(&w[0]);
	free_with_writer(n, &w[1]);
}

/* What a successor takes for told was told to all of them, whoever does it. */
static uint32_t who_tell(struct bsn *n)
{
	return n->telling;
}

static void nothing_is_told_before_all_slices_know(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct between b = {.n = n, .left = who_tell};
	pthread_t thread;

	node_lock(n);
	client_untied_loss(n, first(n));
	thread = start_between(n, look_between, &b);
	slices_untied_losses(n);
	end_between(n, thread);
	CHECK_EQ(b.seen, 1);
	CHECK_EQ(n->telling, 0);

	/* As if the poll came then. */
	n->telling = 1;
	bsn_poll(n, START + SECOND);
	CHECK_EQ(n->ledger.header->told_ns, START);
	n->telling = 0;
	bsn_poll(n, START + 2 * SECOND);
	CHECK_EQ(n->ledger.header->told_ns, START + 2 * SECOND);
	free_with_writer(n, &w);
}

static uint32_t used_left(struct bsn *n)
{
	return n->store.used;
}

/* A slice of so many blocks, and the header. */
static struct bsn *large_slice(uint32_t blocks)
{
	struct bsn_config config = test_config(64 << 20);
	struct slice *slice;
	struct bsn *n;

	config.store_bytes = config.trace_bytes_max = 16 << 20;
	n = test_node(&config);
	bsn_poll(n, START);
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	while (slice->n_blocks < blocks)
		CHECK(slice_append(n, slice, payload, sizeof(payload), NULL,
				   0));
	node_unlock(n);
	CHECK_EQ(used_left(n), blocks + 2);
	return n;
}

static void a_large_slice_goes_in_pieces(void)
{
	const uint32_t piece = PIECE_ENTRIES / LINE_ENTRIES;
	struct bsn *n = large_slice(4000);
	struct between b = {.n = n, .left = used_left};
	pthread_t thread;

	CHECK_EQ(bsn_slice_trim(n, trace_id(1), 1000ull * BLOCK_CONTENT), 0);
	CHECK_EQ(used_left(n), 3002);
	node_lock(n);
	CHECK(slice_trim(n, slice_find(n, trace_id(1)),
			 2000ull * BLOCK_CONTENT));
	CHECK_EQ(used_left(n), 3002 - piece);
	thread = start_between(n, look_between, &b);
	slice_free(n, slice_find(n, trace_id(1)));
	end_between(n, thread);
	check_piece(&b, 3002 - piece, piece);
	CHECK_EQ(used_left(n), 1);
	bsn_free(n);
}

static uint32_t filtered(const struct filter *f)
{
	uint32_t bits = 0;

	for (uint32_t i = 0; i < FILTER_BITS / 64; i++)
		bits += (uint32_t)__builtin_popcountll(f->words[i]);
	return bits;
}

enum {
	SLICES = 2000,
	LEFT = 900
};

/* One piece with each slice that goes, until it knows those alone that are left. */
static void what_slices_are_told_by_is_renewed_in_pieces(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	uint32_t bits, pieces = 0;

	bsn_poll(n, START);
	node_lock(n);
	for (uint32_t i = 0; i < SLICES; i++)
		CHECK(slice_new(n, trace_id(i), trace_id(i), "test"));
	for (uint32_t i = 0; i < SLICES - LEFT; i++) {
		bits = n->store.renewed == NONE ? 0 : filtered(&n->store.next);
		slice_free(n, slice_find(n, trace_id(i)));
		if (n->store.renewed == NONE)
			continue;
		CHECK(filtered(&n->store.next) - bits <=
		      PIECE_ENTRIES / LINE_ENTRIES);
		pieces++;
	}
	CHECK(pieces >= 2);
	CHECK_EQ(n->store.renewed, NONE);
	CHECK(filtered(&n->store.filter) <= SLICES / 2);
	for (uint32_t i = SLICES - LEFT; i < SLICES; i++)
		CHECK(filter_has(&n->store.filter,
				 slice_find(n, trace_id(i))->fingerprint));
	node_unlock(n);
	bsn_free(n);
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

/* --------------------------------------------------------------- passes --- */

static uint32_t searching(struct bsn *n)
{
	uint32_t count = 0;

	for (uint32_t i = 1; i < n->store.n_blocks; i++)
		count += n->store.slices[i] &&
			 n->store.slices[i]->flags & BSN_SLICE_SEARCHING;
	return count;
}

/* All that are looked for in one piece of a pass, and each of them as it is judged. */
static void searches_are_judged_in_pieces(void)
{
	struct bsn *n = new_node(8);
	struct between b = {.n = n, .left = searching};
	struct bsn_slice s;
	pthread_t thread;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 151; i++) {
		CHECK(w_trace(&t, trace_id(i), 40, START));
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	}
	CHECK_EQ(searching(n), 150);
	node_lock(n);
	thread = start_between(n, look_between, &b);
	search_waiting(n);
	end_between(n, thread);
	check_piece(&b, 150, 60);
	CHECK_EQ(searching(n), 0);
	for (uint32_t i = 0; i < 151; i++) {
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	free_with_writer(n, &w);
}

/* What is written of a trace after the pass, and before it is judged, comes once. */
struct meanwhile {
	struct between b;
	struct wthread *t;
};

static void *write_meanwhile(void *argument)
{
	struct meanwhile *m = argument;
	struct bsn *n = m->b.n;

	node_lock(n);
	m->b.seen = searching(n);
	for (uint32_t i = 0; i < 301; i++)
		CHECK(w_trace(m->t, trace_id(i), 40, START));
	CHECK(w_take_segment(m->t));
	for (uint32_t i = 0; i < 301; i++)
		CHECK(w_trace(m->t, trace_id(i), 40, START));
	observe(n, first(n));
	watch_at_once(n);
	node_unlock(n);
	return NULL;
}

static void what_comes_before_the_judgement_comes_once(void)
{
	static struct decoded d;
	struct bsn *n = new_node(8);
	struct meanwhile m = {.b.n = n};
	struct bsn_slice s;
	pthread_t thread;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	m.t = &t;
	for (uint32_t i = 0; i < 301; i++)
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	node_lock(n);
	thread = start_between(n, write_meanwhile, &m);
	search_waiting(n);
	end_between(n, thread);
	CHECK(m.b.seen > 0 && m.b.seen < 300);
	bsn_poll(n, START);
	for (uint32_t i = 0; i < 301; i++) {
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, 2);
	}
	free(d.bytes);
	free_with_writer(n, &w);
}

#define PARTS 200u

static uint32_t count_parts(const struct later *l)
{
	return l ? 1 + count_parts(l->left) + count_parts(l->right) : 0;
}

static uint32_t parts_left(struct bsn *n)
{
	const struct slice *s = slice_find(n, trace_id(1));

	return s->search ? count_parts(s->search->later) : 0;
}

/* Those of kept runs, which have their turn at the end. */
static void parts_are_put_in_pieces(void)
{
	static uint8_t records[59 * 1012];
	struct bsn_config config = test_config(64 << 20);
	struct bs_record_header header = {.payload_bytes = 1000,
					  .type = BS_RECORD_DATA};
	struct bsn *n;
	struct between b = {.left = parts_left};
	struct frame frame = {.bytes = records};
	struct run run = {.frame = &frame, .bytes = sizeof(records)};
	struct search *search;
	struct bsn_slice s;
	pthread_t thread;
	struct slice *slice;

	config.store_bytes = config.trace_bytes_max = 16 << 20;
	b.n = n = test_node(&config);
	bsn_poll(n, START);
	for (size_t at = 0; at < sizeof(records); at += 1012)
		memcpy(records + at, &header, sizeof(header));
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	search = n->searches;
	n->searches = NULL;
	for (uint32_t i = 0; i < PARTS; i++) {
		run.owner.number = 1;
		run.from = 1012 * (i + 1);
		search_put_off(n, search, &run);
	}
	CHECK_EQ(parts_left(n), PARTS);
	thread = start_between(n, look_between, &b);
	search_judge_all(n, search, false, true);
	end_between(n, thread);
	check_piece(&b, PARTS, 6);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK(s.bytes > PARTS * sizeof(records));
	search_free(n, search);
	free(search);
	bsn_free(n);
}

/* What is met of a trace, however many handles there are of it, and of however many
 * such traces, takes little memory, and no other trace pays for it. */
static void traces_of_many_handles_cost_little(void)
{
	struct bsn *n = new_node(8);
	struct slice slice = {.id = trace_id(1)};
	const struct sink to = {.slice = &slice};
	struct search *s = calloc(4, sizeof(*s));
	struct run run = {.owner.number = 1};

	node_lock(n);
	for (uint32_t i = 0; i < 4; i++) {
		CHECK_EQ(search_init(n, &s[i], slice.id, to), 0);
		for (run.handle = 1; run.handle < (i < 3 ? 200000 : 60);
		     run.handle++)
			search_meet(n, &s[i], &run, 0);
		CHECK_EQ(s[i].failed, i < 3);
		CHECK(n->met_bytes <= n->config.pool_bytes / 32);
	}
	CHECK_EQ(s[0].n_met, 32768);
	for (uint32_t i = 0; i < 4; i++)
		search_free(n, &s[i]);
	CHECK_EQ(n->met_bytes, 0);
	node_unlock(n);
	free(s);
	bsn_free(n);
}

static void of_a_trace_of_many_handles_nobody_knows_all(void)
{
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = new_node(8);

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 70000; i++) {
		struct bs_trace_id id = trace_id(i < 30000 ? 1 : 2);

		CHECK(w_begin(&t, id, 0x10000 + i, 0, BS_RUN_FIRST, 0));
		w_end(&t, BS_RUN_LAST);
	}
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	free_with_writer(n, &w);
}

/* Runs of a trace that is looked for. */
#define RUNS 60000u

static uint32_t runs_not_found(struct bsn *n)
{
	const struct slice *s = slice_find(n, trace_id(1));

	/* It has other pieces, too. */
	return RUNS + 10 -
	       (uint32_t)(s->bytes / sizeof(struct bs_piece_header));
}

/* Each costs more than an entry that is passed over, without records too. */
static void write_runs(struct wthread *t)
{
	for (uint32_t i = 0; i < RUNS; i++) {
		CHECK(w_begin(t, trace_id(1), 0x10000, i, i ? 0 : BS_RUN_FIRST,
			      0));
		w_end(t, 0);
	}
}

static void runs_are_found_in_pieces(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct between b = {.left = runs_not_found};
	struct slice *slice;
	pthread_t thread;
	struct wthread t;
	struct writer w;
	struct bsn *n;

	config.trace_bytes_max = 4 << 20;
	config.store_bytes = 16 << 20;
	b.n = n = node_with_writer(&config, &w, &t);
	write_runs(&t);
	bsn_poll(n, START);
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	thread = start_between(n, look_between, &b);
	search_waiting(n);
	end_between(n, thread);
	check_piece(&b, RUNS + 10, BS_SEGMENT_RUNS_MAX + 10);
	free_with_writer(n, &w);
}

static void *tell_the_time(void *argument)
{
	struct bsn *n = argument;

	node_lock(n);
	node_set_time(n, START + 3 * MS);
	node_unlock(n);
	return NULL;
}

/* Two milliseconds, each time that it is asked. */
static uint64_t cpu_clock(void)
{
	static uint64_t now;

	return now += 2 * MS;
}

/* A pass knows how much time has passed at least: others may know it better. */
static void the_time_is_not_counted_twice(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn_slice s;
	pthread_t thread;
	struct wthread t;
	struct writer w;
	struct bsn *n;

	config.thread_cpu_ns = cpu_clock;
	n = node_with_writer(&config, &w, &t);
	for (uint32_t i = 0; i < 301; i++)
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	CHECK(s.flags & BSN_SLICE_SEARCHING);
	node_lock(n);
	n->passes_paid_ns = 0;
	CHECK_EQ(n->now_ns, START + 2 * MS);
	thread = start_between(n, tell_the_time, n);
	search_waiting(n);
	end_between(n, thread);
	CHECK_EQ(n->now_ns, START + 4 * MS);
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
	for (uint32_t i = 0; i < PROCESSES; i++)
		writer_close(&w[i]);
	bsn_free(n);
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
	search_waiting(n);
	end_between(n, thread);
	check_piece(&b, before, 20000 / ENTRIES + 1);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	for (uint32_t i = 0; i < PROCESSES; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

int main(void)
{
	RUN(what_a_process_left_goes_in_pieces);
	RUN(stocks_are_filled_in_pieces);
	RUN(memory_of_others_is_given_back_in_pieces);
	RUN(what_was_in_hand_goes_in_pieces);
	RUN(a_process_that_ends_is_forgotten_meanwhile);
	RUN(what_is_too_much_is_taken_back_in_pieces);
	RUN(taken_segments_are_seen_in_pieces);
	RUN(full_segments_are_sealed_in_pieces);
	RUN(segments_are_watched_in_pieces);
	RUN(losses_are_read_in_pieces);
	RUN(slices_are_closed_in_pieces);
	RUN(slices_are_told_of_losses_in_pieces);
	RUN(slices_are_told_of_all_processes_at_once);
	RUN(nothing_is_told_before_all_slices_know);
	RUN(a_large_slice_goes_in_pieces);
	RUN(what_slices_are_told_by_is_renewed_in_pieces);
	RUN(the_last_loss_of_a_process_is_told);
	RUN(searches_are_judged_in_pieces);
	RUN(what_comes_before_the_judgement_comes_once);
	RUN(parts_are_put_in_pieces);
	RUN(traces_of_many_handles_cost_little);
	RUN(of_a_trace_of_many_handles_nobody_knows_all);
	RUN(runs_are_found_in_pieces);
	RUN(the_time_is_not_counted_twice);
	RUN(threads_are_watched_in_pieces);
	RUN(threads_are_searched_in_pieces);
	return 0;
}
