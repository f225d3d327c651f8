/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much is done under one hold of the lock of what one trace, or one process, can
 * make much. A second thread has the lock after the first piece, and tells what was done
 * by then; how long that takes `holds` tells.
 */
#include "between.h"
#include "writer.h"

/* ------------------------------------------------------------ first piece --- */

struct first_piece {
	struct bsn *n;
	uint32_t (*left)(struct bsn *n);
	uint32_t before, then;
};

static void *look_then(void *argument)
{
	struct first_piece *p = argument;

	node_lock(p->n);
	p->then = p->left(p->n);
	node_unlock(p->n);
	return NULL;
}

/* With the lock held. */
static pthread_t start_piece(struct first_piece *p)
{
	p->before = p->left(p->n);
	return start_between(p->n, look_then, p);
}

/* The work is done: all of it, and `most` with the first piece. */
static void end_piece(struct first_piece *p, pthread_t thread, uint32_t most)
{
	end_between(p->n, thread);
	CHECK(p->then < p->before);
	CHECK(p->before - p->then <= most);
	CHECK(p->left(p->n) < p->then);
}

/* ------------------------------------------------------------------ runs --- */

#define RUNS 2000u

static uint32_t runs_not_copied(struct bsn *n)
{
	const struct slice *s = slice_find(n, trace_id(1));

	/* It has other pieces, too. */
	return RUNS + 10 -
	       (uint32_t)(s->bytes / sizeof(struct bs_piece_header));
}

/* One that is written to is watched, too. */
static uint32_t runs_not_seen(struct bsn *n)
{
	uint32_t i = n->clients.all[0]->active.head;
	uint32_t watched = i == NONE ? 0 : frame_at(n, i)->scanned;

	return runs_not_copied(n) + RUNS - watched;
}

static struct bsn *node_of_large_slices(struct writer *w, struct wthread *t)
{
	struct bsn_config config = test_config(64 << 20);

	config.trace_bytes_max = 4 << 20;
	config.store_bytes = 16 << 20;
	return node_with_writer(&config, w, t);
}

/* In one segment. */
static void write_runs(struct wthread *t)
{
	for (uint32_t i = 0; i < RUNS; i++) {
		CHECK(w_begin(t, trace_id(1), 0x10000, i, i ? 0 : BS_RUN_FIRST,
			      0));
		w_end(t, 0);
	}
	CHECK_EQ(t->runs, RUNS);
}

static void check_slice(struct bsn *n)
{
	static struct decoded d;

	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.by_kind[BS_PIECE_RUN], RUNS);
	CHECK_EQ(check_order(&d), 1);
	free(d.bytes);
	d.bytes = NULL;
}

/* A run that is copied is dearer than so many entries. */
#define RUN_COST 40u
#define RUNS_A_PIECE (PIECE_ENTRIES / RUN_COST)

static void find_in_pieces(bool sealed)
{
	struct first_piece piece = {.left = runs_not_seen};
	pthread_t thread;
	struct slice *slice;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_of_large_slices(&w, &t);

	piece.n = n;
	write_runs(&t);
	if (sealed)
		CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	CHECK_EQ(n->pool.sealed.count, sealed);
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	thread = start_piece(&piece);
	search_waiting(n, n->searches_made);
	end_piece(&piece, thread, RUNS_A_PIECE);
	check_slice(n);
	free_with_writer(n, &w);
}

static void runs_of_a_sealed_segment_are_found_in_pieces(void)
{
	find_in_pieces(true);
}

static void runs_of_an_open_segment_are_found_in_pieces(void)
{
	find_in_pieces(false);
}

static void runs_of_a_segment_are_watched_in_pieces(void)
{
	struct first_piece piece = {.left = runs_not_copied};
	struct bsn_slice s;
	pthread_t thread;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_of_large_slices(&w, &t);

	piece.n = n;
	collect(n, trace_id(1), START, &s);
	write_runs(&t);
	node_lock(n);
	observe(n, n->clients.all[0]);
	thread = start_piece(&piece);
	watch_all(n);
	end_piece(&piece, thread, RUNS_A_PIECE);
	check_slice(n);
	free_with_writer(n, &w);
}

/* What happens to a segment of which a part is visited. */
struct meanwhile {
	struct bsn *n;
	struct wthread *t;
	uint32_t seen;
};

static void *reclaim_it(void *argument)
{
	struct meanwhile *m = argument;

	node_lock(m->n);
	m->seen = runs_not_copied(m->n);
	CHECK(pool_reclaim(m->n, NULL, false));
	node_unlock(m->n);
	return NULL;
}

static void *seal_it(void *argument)
{
	struct meanwhile *m = argument;

	node_lock(m->n);
	m->seen = runs_not_copied(m->n);
	CHECK(w_take_segment(m->t));
	observe(m->n, m->n->clients.all[0]);
	CHECK_EQ(m->n->pool.sealed.count, 1);
	node_unlock(m->n);
	return NULL;
}

static void *park_it(void *argument)
{
	struct meanwhile *m = argument;
	struct wthread place;

	node_lock(m->n);
	m->seen = runs_not_copied(m->n);
	w_park(m->t, &place);
	observe(m->n, m->n->clients.all[0]);
	CHECK_EQ(m->n->pool.sealed.count, 1);
	node_unlock(m->n);
	return NULL;
}

static void find_while(void *(*happens)(void *), bool sealed)
{
	struct meanwhile m;
	pthread_t thread;
	struct slice *slice;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_of_large_slices(&w, &t);

	m.n = n;
	m.t = &t;
	write_runs(&t);
	if (sealed)
		CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	/* So that the first piece finds runs. */
	watch_at_once(n);
	thread = start_between(n, happens, &m);
	search_waiting(n, n->searches_made);
	end_between(n, thread);
	CHECK(m.seen > 100 && m.seen < RUNS);
	check_slice(n);
	CHECK(!(slice_find(n, trace_id(1))->flags & BSN_SLICE_EVICTED));
	free_with_writer(n, &w);
}

static void what_is_visited_in_part_is_visited_once(void)
{
	find_while(reclaim_it, true);
	find_while(seal_it, false);
	find_while(park_it, false);
}

/* ----------------------------------------------------------------- parts --- */

#define PARTS 4000u

static uint32_t way_to_the_right(const struct later *l)
{
	uint32_t steps = 0;

	for (; l; l = l->right)
		steps++;
	return steps;
}

/* A search puts off parts in the order in which it meets them. */
static void put_off(struct bsn *n, struct search *s, bool rising)
{
	static uint8_t records[12] = {0, 0, BS_RECORD_DATA};
	struct frame frame = {.bytes = records};
	struct run run = {.frame = &frame, .bytes = sizeof(records)};

	for (uint32_t i = 0; i < PARTS; i++) {
		run.owner.number = 1;
		run.from = 12 * (rising ? i + 1 : PARTS - i);
		search_put_off(n, s, &run);
		/* 2 to this are more than there are parts. */
		CHECK(way_to_the_right(s->later) <= 12);
	}
}

static void parts_in_any_order_take_few_steps(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct slice slice = {.id = trace_id(1)};
	const struct sink to = {.slice = &slice};
	struct search s;

	node_lock(n);
	for (uint32_t k = 0; k < 2; k++) {
		uint32_t last = 0, bytes;

		CHECK_EQ(search_init(n, &s, slice.id, to), 0);
		put_off(n, &s, k);
		/* Released meanwhile: that too is done a part at a time. */
		s.to.slice = NULL;
		for (uint32_t i = 0; i < PARTS; i++) {
			CHECK(s.later->run.from > last);
			last = s.later->run.from;
			CHECK(search_put_part(n, &s, &bytes));
		}
		CHECK(!search_put_part(n, &s, &bytes));
		search_free(n, &s);
		s.to.slice = &slice;
	}
	node_unlock(n);
	bsn_free(n);
}

/* One that was put off while its process lived. */
static void a_part_of_a_process_that_is_gone_opens_nothing(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct slice slice = {.id = trace_id(1)};
	const struct sink to = {.slice = &slice};
	struct run run = {
		.handle = 0x10000, .flags = BS_RUN_FIRST, .live = true};
	struct search s;
	struct writer w;

	writer_attach(&w, n, START);
	run.owner.number = (uint32_t)w.number;
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	node_lock(n);
	CHECK_EQ(search_init(n, &s, slice.id, to), 0);
	search_meet(n, &s, &run, (struct ticks){0});
	CHECK_EQ(slice_open_handles(&slice), 0);
	search_free(n, &s);
	node_unlock(n);
	free(slice.parts);
	free_with_writer(n, &w);
}

/* By a successor, which takes up the search of its predecessor afterwards. */
static void what_is_watched_before_its_search_counts_once(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct slice slice = {.id = trace_id(1)};
	const struct sink to = {.slice = &slice};
	struct run run = {
		.handle = 0x10000, .flags = BS_RUN_FIRST, .live = true};
	struct search s;
	struct writer w;

	writer_attach(&w, n, START);
	run.owner.number = (uint32_t)w.number;
	node_lock(n);
	slice_count_run(n, &slice, &run, true);
	run.handle++;
	run.flags = BS_RUN_LAST | BS_RUN_CLOSED;
	slice_count_run(n, &slice, &run, true);
	CHECK_EQ(slice_open_handles(&slice), 1);
	CHECK_EQ(search_init(n, &s, slice.id, to), 0);
	for (uint32_t i = 0; i < 2; i++) {
		run.handle = 0x10000 + i;
		run.flags = BS_RUN_FIRST;
		search_meet(n, &s, &run, (struct ticks){0});
	}
	CHECK_EQ(slice_open_handles(&slice), 1);
	for (uint32_t i = 0; i < 2; i++) {
		run.handle = 0x10000 + i;
		run.flags = BS_RUN_LAST | BS_RUN_CLOSED;
		search_meet(n, &s, &run, (struct ticks){0});
	}
	CHECK_EQ(slice_open_handles(&slice), 0);
	search_free(n, &s);
	node_unlock(n);
	free(slice.parts);
	free(slice.handles);
	free_with_writer(n, &w);
}

/* --------------------------------------------------------------- handles --- */

/* Those that a slice lists, and many more, of two processes. */
static void handles_whose_ends_are_lost_are_closed(void)
{
	enum {
		EACH = 500,
		OPEN = 3
	};
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct writer w[2];
	struct bsn_slice s;

	for (uint32_t k = 0; k < 2; k++) {
		struct wthread t;

		writer_attach(&w[k], n, START);
		t = writer_thread(&w[k], 0);
		for (uint32_t i = 0; i < EACH; i++) {
			CHECK(w_begin(&t, trace_id(1), 0x10000 + i, 0,
				      BS_RUN_FIRST | BS_RUN_LOSSY, 0));
			w_end(&t, 0);
		}
		for (uint32_t i = 0; i < OPEN + k; i++)
			w_list(&w[k], 0x10000 + 100 * i, true);
	}
	collect(n, trace_id(1), START, &s);
	CHECK(s.flags & BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 2 * OPEN + 1);
	for (uint32_t k = 0; k < 2; k++)
		CHECK_EQ(slice_part(slice_find(n, trace_id(1)),
				    (uint32_t)w[k].number)
				 ->open,
			 OPEN + k);
	writer_close(&w[0]);
	free_with_writer(n, &w[1]);
}

/* Of a trace of many, all of them of one process that lives. */
#define HANDLES 20000u

static uint32_t ends_not_counted(struct bsn *n)
{
	const struct slice *s = slice_find(n, trace_id(1));
	const struct met *process;

	if (!s->search)
		return 0;
	process = met_find(n, &s->search->met, n->clients.all[0]->number, 0);
	return HANDLES - (process ? process->ends_lost : 0);
}

static void meet_handles(struct bsn *n, struct slice *slice)
{
	struct part *part = slice_part(slice, n->clients.all[0]->number);
	struct run run = {
		.owner.number = part->client,
		.flags = BS_RUN_FIRST | BS_RUN_LOSSY,
		.live = true,
	};

	for (uint32_t i = 0; i < HANDLES; i++) {
		run.handle = 0x10000 + i;
		search_meet(n, slice->search, &run, (struct ticks){0});
	}
	part->open = part->unlisted = HANDLES;
	slice->flags |= BSN_SLICE_LOSSY;
}

static void handles_are_judged_in_pieces(void)
{
	struct first_piece piece = {.left = ends_not_counted};
	struct search *search;
	struct slice *slice;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_of_large_slices(&w, &t);
	pthread_t thread;

	piece.n = n;
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	search = n->searches;
	n->searches = NULL;
	meet_handles(n, slice);
	CHECK(!search->failed);
	CHECK_EQ(search->met.n, HANDLES);
	thread = start_piece(&piece);
	search_judge_all(n, search, false);
	/* A place of the table is as dear as four where ends may be lost, and half of
	 * the places are used at most. One more page is begun. */
	end_piece(&piece, thread, PIECE_MET / 4);
	CHECK_EQ(slice_open_handles(slice_find(n, trace_id(1))), 0);
	node_lock(n);
	search_free(n, search);
	node_unlock(n);
	free(search);
	free_with_writer(n, &w);
}

/* ---------------------------------------------------------------- losses --- */

/* Threads, each of which lost records of as many traces as it can tell of. */
#define LOSERS 8u
#define LOST (LOSERS * BS_LOSS_RING_ENTRIES)

static uint32_t slices_not_told(struct bsn *n)
{
	uint32_t left = 0;

	for (uint32_t i = 0; i < LOST; i++)
		left += !(slice_find(n, trace_id(1 + i))->flags &
			  BSN_SLICE_LOSSY);
	return left;
}

static void slices_are_told_what_was_lost_in_pieces(void)
{
	struct first_piece piece = {.left = slices_not_told};
	struct wthread t[LOSERS];
	struct writer w;
	struct bsn *n = node_of_large_slices(&w, &t[0]);
	pthread_t thread;

	piece.n = n;
	for (uint32_t k = 1; k < LOSERS; k++)
		t[k] = writer_thread(&w, k);
	node_lock(n);
	for (uint32_t i = 0; i < LOST; i++) {
		CHECK(slice_new(n, trace_id(1 + i), trace_id(1 + i), "test"));
		w_lose(&t[i % LOSERS], trace_id(1 + i), BS_RUN_FIRST, 8);
	}
	thread = start_piece(&piece);
	node_catch_up(n, START + MS);
	end_piece(&piece, thread, BS_LOSS_RING_ENTRIES);
	CHECK_EQ(slices_not_told(n), 0);
	free_with_writer(n, &w);
}

/* --------------------------------------------------------------- reclaim --- */

/* Runs without records, as many as a segment has room for. */
#define RUNS_A_SEGMENT                                                         \
	(SEGMENT / (sizeof(struct bs_run_header) + sizeof(uint64_t)))

/* The stock is filled. Returns how many runs were kept at most before the lock was to
 * be lent. */
static uint32_t fill(struct bsn *n, uint64_t now)
{
	struct client *c = n->clients.all[0];
	uint64_t most = 0;
	bool more;

	node_lock(n);
	node_set_time(n, now);
	observe(n, c);
	do {
		uint64_t kept = n->counts.second_chances;

		more = grants_fill(n, c);
		kept = n->counts.second_chances - kept;
		if (kept > most)
			most = kept;
	} while (more);
	node_unlock(n);
	return (uint32_t)most;
}

/* A handle that is open has all of its runs copied out of segments that are reclaimed:
 * also when there is little room for more of them. */
static void open_runs_are_kept_in_pieces(void)
{
	struct bsn_config config = test_config(16 << 20);
	uint32_t most = 0, kept;
	uint64_t now = START, i = 1;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	bsn_poll(n, now);
	w_list(&w, 0x10000, true);
	for (uint32_t k = 0; k < 60000; k++) {
		CHECK(w_begin(&t, trace_id(1), 0x10000, k, k ? 0 : BS_RUN_FIRST,
			      0));
		w_end(&t, 0);
	}
	while (n->counts.reclaims < 100) {
		if (w_trace(&t, trace_id(++i), 1000, now))
			continue;
		kept = fill(n, now += MS);
		if (kept > most)
			most = kept;
	}
	CHECK(n->counts.second_chances > 30000);
	CHECK(most > 0);
	CHECK(most <= RUNS_A_SEGMENT);
	free_with_writer(n, &w);
}

/* --------------------------------------------------------------- metrics --- */

/* Of each thread of each process. */
#define PROCESSES 8u

static uint32_t threads_not_counted(struct bsn *n)
{
	uint32_t left = 0;
	struct client *c;

	for_each_client(n, c)
		left += c->believed.records_lost ? 0 : c->threads_used;
	return left;
}

static void metrics_are_gathered_in_pieces(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct first_piece piece = {.n = n, .left = threads_not_counted};
	struct writer w[PROCESSES];
	struct bsn_metrics m;
	pthread_t thread;

	for (uint32_t i = 0; i < PROCESSES; i++) {
		writer_attach(&w[i], n, START);
		for (uint32_t k = 0; k < BS_THREAD_SLOTS; k++) {
			struct wthread t = writer_thread(&w[i], k);

			w_lose(&t, trace_id(k), BS_RUN_FIRST, 8);
			WRITE_ONCE(w_area(&w[i], k)->records_lost, 1);
		}
	}
	bsn_poll(n, START + MS);
	node_lock(n);
	CHECK_EQ(threads_not_counted(n), PROCESSES * BS_THREAD_SLOTS);
	thread = start_piece(&piece);
	metrics_read_all(n);
	end_piece(&piece, thread,
		  PIECE_ENTRIES / LINE_ENTRIES + BS_THREAD_SLOTS);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.records_lost, PROCESSES * BS_THREAD_SLOTS);
	free_with_writers(n, w, PROCESSES);
}

int main(void)
{
	RUN(runs_of_a_sealed_segment_are_found_in_pieces);
	RUN(runs_of_an_open_segment_are_found_in_pieces);
	RUN(runs_of_a_segment_are_watched_in_pieces);
	RUN(what_is_visited_in_part_is_visited_once);
	RUN(parts_in_any_order_take_few_steps);
	RUN(a_part_of_a_process_that_is_gone_opens_nothing);
	RUN(what_is_watched_before_its_search_counts_once);
	RUN(handles_whose_ends_are_lost_are_closed);
	RUN(handles_are_judged_in_pieces);
	RUN(slices_are_told_what_was_lost_in_pieces);
	RUN(open_runs_are_kept_in_pieces);
	RUN(metrics_are_gathered_in_pieces);
	return 0;
}
