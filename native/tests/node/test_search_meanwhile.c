/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pass over the directories, and what happens in the middle of it. It goes on
 * in pieces; between two of them others have the lock. So a test has a second
 * thread, which waits for the lock when the pass begins, and gets it after the
 * first piece: with the lock held it calls what is inside of the node.
 */
#include <errno.h>

#include "between.h"
#include "wanted.h"

static struct decoded d;

#define SEGMENTS 60u

/* ------------------------------------------------------- between pieces --- */

struct between {
	struct bsn *n;
	struct writer *w;
	struct wthread *t;
	uint64_t now;
	void (*act)(struct between *b);
};

static void *act_between(void *argument)
{
	struct between *b = argument;

	node_lock(b->n);
	CHECK(b->n->passes);
	b->act(b);
	node_unlock(b->n);
	return NULL;
}

/* As bsn_collect() marks it. */
static void mark(struct bsn *n, uint64_t id)
{
	struct slice *s = slice_new(n, trace_id(id), trace_id(id), "test");

	CHECK(s);
	search_later(n, s);
}

/* A pass for WANTED, with something after its first piece. */
static void search_with(struct between *b)
{
	pthread_t thread;

	node_lock(b->n);
	node_catch_up(b->n, b->now);
	mark(b->n, WANTED);
	thread = start_between(b->n, act_between, b);
	search_waiting(b->n, b->n->searches_made);
	store_publish(b->n);
	end_between(b->n, thread);
	CHECK(!b->n->passes);
}

/* ----------------------------------------------------------------- scene --- */

/* 60 segments of 1,800 traces each, with a run of WANTED in each, of a
 * handle that stays open: more than one piece of a pass. */
static void write_pool(struct between *b, uint32_t bytes)
{
	w_show(b->t, HANDLE);
	for (uint32_t i = 0; i < SEGMENTS; i++) {
		write_long_run(b->t, HANDLE, i, 0, bytes, b->now);
		write_segment(b->t, b->now);
		bsn_poll(b->n, b->now += MS);
	}
}

static void begin(struct between *b, struct writer *w, struct wthread *t,
		  void (*act)(struct between *b))
{
	struct bsn_config config = test_config(8 << 20);

	config.tombstones = 1u << 20;
	*b = (struct between){.w = w, .t = t, .now = START, .act = act};
	b->n = test_node(&config);
	writer_attach(w, b->n, b->now);
	*t = writer_thread(w, 0);
}

static void end(struct between *b)
{
	check_invariants(b->n);
	bsn_free(b->n);
	writer_close(b->w);
}

/* WANTED is there, as a whole: so many runs of so many handles. */
static void check_wanted(struct between *b, uint32_t runs, uint32_t handles,
			 uint32_t open)
{
	struct bsn_slice s;

	CHECK_EQ(bsn_slice_info(b->n, trace_id(WANTED), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, open);
	decode_slice(b->n, trace_id(WANTED), &d);
	CHECK_EQ(d.records, runs);
	CHECK_EQ(check_order(&d), handles);
}

/* ------------------------------------------------------------- meanwhile --- */

/* What is written in the middle comes once: in the segment that its thread was
 * in, in the next one, and after it. */
static void write_more(struct between *b)
{
	write_run(b->t, HANDLE, SEGMENTS, 0, b->now);
	observe(b->n, b->n->clients.all[0]);
	watch_at_once(b->n);
	write_segment(b->t, b->now);
	write_run(b->t, HANDLE, SEGMENTS + 1, 0, b->now);
	observe(b->n, b->n->clients.all[0]);
	watch_at_once(b->n);
	write_run(b->t, HANDLE, SEGMENTS + 2, 0, b->now);
}

static void what_is_written_meanwhile_comes_once(void)
{
	struct between b;
	struct writer w;
	struct wthread t;

	begin(&b, &w, &t, write_more);
	write_pool(&b, 100);
	search_with(&b);
	bsn_poll(b.n, b.now);
	check_wanted(&b, SEGMENTS + 3, 1, 1);
	write_run(&t, HANDLE, SEGMENTS + 3, BS_RUN_LAST, b.now);
	bsn_poll(b.n, b.now);
	check_wanted(&b, SEGMENTS + 4, 1, 0);
	end(&b);
}

/* The segments that are written to are many: the pass has been through all of the
 * process that is looked at first when its thread goes on there, fills one more segment,
 * and takes another. */
static void take_two(struct between *b)
{
	write_run(b->t, HANDLE, 1, 0, b->now);
	write_segment(b->t, b->now);
	write_run(b->t, HANDLE, 2, 0, b->now);
	write_segment(b->t, b->now);
	write_run(b->t, HANDLE, 3, BS_RUN_LAST, b->now);
	for (uint32_t i = 0; i < b->n->clients.count; i++)
		observe(b->n, b->n->clients.all[i]);
	watch_at_once(b->n);
}

static void segments_that_are_taken_meanwhile_are_seen(void)
{
	enum {
		THREADS = 25
	};
	struct between b;
	struct writer w, others;
	struct wthread t, other_t;
	uint64_t other = OTHERS / 2;

	begin(&b, &others, &other_t, take_two);
	for (uint32_t i = 0; i < THREADS; i++) {
		other_t = writer_thread(&others, i);
		CHECK(w_take_segment(&other_t));
		for (uint32_t k = 0; k < 1000; k++)
			CHECK(w_trace(&other_t, trace_id(other++), 0, b.now));
		bsn_poll(b.n, b.now);
	}
	writer_attach(&w, b.n, b.now);
	t = writer_thread(&w, 0);
	b.t = &t;
	w_show(&t, HANDLE);
	write_run(&t, HANDLE, 0, 0, b.now);
	search_with(&b);
	bsn_poll(b.n, b.now);
	check_wanted(&b, 4, 1, 0);
	writer_close(&w);
	end(&b);
}

/* One thread goes on where the pass has been, and another closes the handle where it
 * has not. */
static void close_elsewhere(struct between *b)
{
	write_run(&b->t[0], HANDLE, 1, 0, b->now);
	write_run(&b->t[1], HANDLE, 2, BS_RUN_LAST, b->now);
}

/* So one begins, too, of which a record is lost. Nothing else is missing. */
static void begin_and_close_elsewhere(struct between *b)
{
	write_run(&b->t[0], HANDLE, 1, BS_RUN_LAST, b->now);
	write_run(&b->t[0], HANDLE + 1, 0, 0, b->now);
	write_run(&b->t[1], HANDLE + 1, 1, BS_RUN_LAST | BS_RUN_LOSSY, b->now);
}

static void come_behind_a_pass(void (*act)(struct between *b), uint32_t flags,
			       uint32_t records)
{
	enum {
		THREADS = 25
	};
	struct between b;
	struct writer w;
	struct wthread t[2], other_t;
	struct bsn_slice s;
	uint64_t other = OTHERS / 2;

	begin(&b, &w, &t[0], act);
	b.t = t;
	w_show(&t[0], HANDLE);
	write_run(&t[0], HANDLE, 0, 0, b.now);
	for (uint32_t i = 1; i <= THREADS; i++) {
		bsn_poll(b.n, b.now);
		other_t = writer_thread(&w, i);
		CHECK(w_take_segment(&other_t));
		for (uint32_t k = 0; k < 1000; k++)
			CHECK(w_trace(&other_t, trace_id(other++), 0, b.now));
	}
	t[1] = writer_thread(&w, THREADS + 1);
	CHECK(w_take_segment(&t[1]));
	search_with(&b);
	bsn_poll(b.n, b.now);
	CHECK_EQ(bsn_slice_info(b.n, trace_id(WANTED), &s), 0);
	CHECK_EQ(s.flags, flags);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(b.n, trace_id(WANTED), &d);
	CHECK_EQ(d.records, records);
	end(&b);
}

static void what_comes_behind_a_pass_is_not_missing(void)
{
	come_behind_a_pass(close_elsewhere, BSN_SLICE_HELD, 3);
}

static void what_begins_behind_a_pass_ends_with_it(void)
{
	come_behind_a_pass(begin_and_close_elsewhere,
			   BSN_SLICE_HELD | BSN_SLICE_LOSSY, 4);
}

/* Segments that were looked at, and some that were not. */
static void reclaim_some(struct between *b)
{
	uint32_t looked_at = 0;

	for (uint32_t i = 0; i < b->n->pool.frames_fresh; i++)
		looked_at += b->n->passes->visited[i / 64] >> (i % 64) & 1;
	CHECK(looked_at > 5 && looked_at < SEGMENTS / 2);
	for (uint32_t i = 0; i < SEGMENTS / 2; i++)
		CHECK(pool_reclaim(b->n, NULL, true));
}

static void what_is_reclaimed_meanwhile_was_looked_at(void)
{
	struct bsn_metrics before, after;
	struct between b;
	struct writer w;
	struct wthread t;
	struct bsn_slice s;

	begin(&b, &w, &t, reclaim_some);
	write_pool(&b, 100);
	bsn_get_metrics(b.n, &before);
	CHECK_EQ(before.reclaims, 0);
	search_with(&b);
	check_wanted(&b, SEGMENTS, 1, 1);
	bsn_get_metrics(b.n, &after);
	CHECK_EQ(after.reclaims, SEGMENTS / 2);
	/* Each entry once; also what others wrote. */
	CHECK(after.entries_searched > SEGMENTS * 1700);
	CHECK(after.entries_searched < SEGMENTS * 1900);
	/* The next one knows that a part is gone. */
	CHECK_EQ(bsn_slice_release(b.n, trace_id(WANTED), false, b.now), 0);
	collect(b.n, trace_id(WANTED), b.now, &s);
	CHECK_EQ(s.flags,
		 BSN_SLICE_HELD | BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT);
	end(&b);
}

/* As bsn_slice_release() does it. */
static void release(struct between *b)
{
	struct slice *s = slice_find(b->n, trace_id(WANTED));

	gone_add(b->n, s->fingerprint, GONE_REPORTED);
	slice_free(b->n, s);
}

static void abandon(struct between *b)
{
	struct slice *s = slice_find(b->n, trace_id(WANTED));

	gone_add(b->n, s->fingerprint, GONE_ABANDONED);
	slice_free(b->n, s);
}

/* Collected again, before the pass is over: that is the next one's. */
static void release_and_collect(struct between *b)
{
	release(b);
	mark(b->n, WANTED);
	watch_at_once(b->n);
}

static void what_is_released_meanwhile_stays_released(void)
{
	struct bsn_metrics m;
	struct between b;
	struct writer w;
	struct wthread t;
	struct bsn_slice s;

	begin(&b, &w, &t, release);
	write_pool(&b, 100);
	search_with(&b);
	CHECK_EQ(bsn_slice_info(b.n, trace_id(WANTED), &s), -ENOENT);
	bsn_get_metrics(b.n, &m);
	CHECK_EQ(m.slices, 0);
	CHECK_EQ(m.store_used_bytes, 2048);
	collect(b.n, trace_id(WANTED), b.now, &s);
	check_wanted(&b, SEGMENTS, 1, 1);
	CHECK_EQ(bsn_slice_release(b.n, trace_id(WANTED), false, b.now), 0);

	b.act = release_and_collect;
	search_with(&b);
	CHECK_EQ(bsn_slice_info(b.n, trace_id(WANTED), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	CHECK_EQ(s.bytes, 0);
	bsn_poll(b.n, b.now);
	check_wanted(&b, SEGMENTS, 1, 1);
	CHECK_EQ(bsn_slice_release(b.n, trace_id(WANTED), false, b.now), 0);

	b.act = abandon;
	search_with(&b);
	CHECK_EQ(bsn_slice_info(b.n, trace_id(WANTED), &s), -ENOENT);
	collect(b.n, trace_id(WANTED), b.now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_ABANDONED);
	end(&b);
}

/* Its segments are all sealed then; what it had open stays unfinished. */
static void leave(struct between *b)
{
	node_unlock(b->n);
	CHECK_EQ(bsn_client_exited(b->n, b->w->number, b->now), 0);
	node_lock(b->n);
	/* For who may want it before the pass was over. */
	b->now = b->n->passes ? b->now : 0;
}

static void a_process_leaves_meanwhile(void)
{
	struct between b;
	struct writer w;
	struct wthread t;

	for (;;) {
		begin(&b, &w, &t, leave);
		write_pool(&b, 100);
		search_with(&b);
		if (b.now)
			break;
		end(&b);
	}
	check_wanted(&b, SEGMENTS, 1, 0);
	CHECK(d.by_kind[BS_PIECE_EXIT] >= 1);
	CHECK_EQ(d.pieces[d.n_pieces - 1].kind, BS_PIECE_EXIT);
	end(&b);
}

/* The last run of one of two handles is lost: one is open. And all of a third one. */
static void lose_last(struct between *b)
{
	uint64_t end = UINT64_MAX;

	w_show(b->t, 0);
	w_lose_run(b->t, trace_id(WANTED), HANDLE, BS_RUN_LAST, 100);
	w_lose_run(b->t, trace_id(WANTED), HANDLE + 2, BS_RUN_FIRST, 100);
	CHECK(losses_read(b->n, b->n->clients.all[0], &end));
}

static void a_loss_meanwhile_closes_its_handle_once(void)
{
	struct between b;
	struct writer w;
	struct wthread t;
	struct bsn_slice s;

	begin(&b, &w, &t, lose_last);
	write_run(&t, HANDLE + 1, 0, 0, b.now);
	w_list(&w, HANDLE + 1, true);
	write_pool(&b, 100);
	search_with(&b);
	CHECK_EQ(bsn_slice_info(b.n, trace_id(WANTED), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(b.n, trace_id(WANTED), &d);
	CHECK_EQ(check_order(&d), 2);
	CHECK_EQ(d.by_kind[BS_PIECE_LOSS], 2);
	end(&b);
}

/* ----------------------------------------------------------------- peeks --- */

/* A look at a trace does not mark it: what is reclaimed of it is kept, and is
 * not met again where it is kept. */
static void keep_many(struct between *b)
{
	uint64_t before = b->n->counts.second_chances;

	while (b->n->counts.second_chances - before < SEGMENTS - 2)
		CHECK(pool_reclaim(b->n, NULL, true));
}

static void peek_with(struct between *b)
{
	static uint8_t buffer[1 << 20];
	struct slice look = {.id = trace_id(WANTED)};
	struct sink to = {
		.slice = &look, .buffer = buffer, .room = sizeof(buffer)};
	struct search search;
	pthread_t thread;

	node_lock(b->n);
	node_catch_up(b->n, b->now);
	CHECK_EQ(search_init(b->n, &search, look.id, to), 0);
	thread = start_between(b->n, act_between, b);
	CHECK_EQ(search_all(b->n, &search, 1), 0);
	end_between(b->n, thread);
	CHECK(b->n->counts.second_chances >= SEGMENTS - 2);
	CHECK_EQ(look.flags, BSN_SLICE_HELD);
	CHECK_EQ(slice_open_handles(&look), 1);
	d.bytes = realloc(d.bytes, look.bytes);
	d.n_bytes = (int64_t)look.bytes;
	memcpy(d.bytes, buffer, look.bytes);
	decode(&d);
	CHECK_EQ(d.records, SEGMENTS);
	CHECK_EQ(d.by_kind[BS_PIECE_RUN], SEGMENTS);
	search_free(b->n, &search);
	free(look.parts);
	free(look.handles);
}

/* Into segments of the keep arena that the pass comes to later. */
static void a_peek_meets_each_run_once(void)
{
	struct between b;
	struct writer w;
	struct wthread t;

	begin(&b, &w, &t, keep_many);
	write_pool(&b, 3000);
	peek_with(&b);
	CHECK_EQ(check_order(&d), 1);
	CHECK(b.n->keep.arena.sealed.count > 1);
	end(&b);
}

/* And where the pass has not come through the keep arena yet. */
static void a_peek_meets_each_kept_run_once(void)
{
	const uint32_t many = 35000;
	struct between b;
	struct writer w;
	struct wthread t;

	begin(&b, &w, &t, keep_many);
	for (uint32_t i = 0; i < many; i++) {
		CHECK(w_begin(&t, trace_id(OTHERS / 2 + i), HANDLE + 1 + i, 0,
			      BS_RUN_FIRST, 16));
		w_end(&t, 0);
		w_list(&w, HANDLE + 1 + i, true);
		if (i % 1000 == 0)
			bsn_poll(b.n, b.now);
	}
	write_pool(&b, 100);
	node_lock(b.n);
	while (b.n->counts.second_chances < many)
		CHECK(pool_reclaim(b.n, NULL, true));
	node_unlock(b.n);
	/* More than a piece. */
	CHECK(b.n->keep.arena.sealed.count > 20);
	peek_with(&b);
	end(&b);
}

/* ----------------------------------------------------- while a poll looks --- */

struct polling {
	struct bsn *n;
	bool stop;
};

static void *poll_on(void *argument)
{
	struct polling *p = argument;

	while (!load_acquire(&p->stop))
		bsn_poll(p->n, START);
	return NULL;
}

/* Who asks in the middle of a poll for what was written then asks for more than that
 * poll has seen: it was past the process already, mostly. */
static void who_asks_while_a_poll_looks_waits_for_the_next(void)
{
	enum {
		CLIENTS = 64,
		ASKED = 300
	};
	struct bsn_config config = test_config(8 << 20);
	struct polling polling = {0};
	static struct writer others[CLIENTS];
	struct writer w;
	struct wthread t;
	struct bsn_slice s;
	pthread_t thread;
	struct bsn *n;

	config.clients_max = CLIENTS + 1;
	polling.n = n = test_node(&config);
	for (uint32_t i = 0; i < CLIENTS; i++)
		writer_attach(&others[i], n, START);
	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK_EQ(pthread_create(&thread, NULL, poll_on, &polling), 0);
	for (uint64_t id = 1; id <= ASKED;) {
		bool wrote;

		node_lock(n);
		/* In a segment that the node does not know of yet. */
		wrote = w_take_segment(&t);
		if (wrote) {
			CHECK(w_trace(&t, trace_id(id), 10, START));
			mark(n, id);
		}
		node_unlock(n);
		if (!wrote)
			continue;
		do {
			sched_yield();
			CHECK_EQ(bsn_slice_info(n, trace_id(id), &s), 0);
		} while (s.flags & BSN_SLICE_SEARCHING);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK_EQ(bsn_slice_release(n, trace_id(id++), false, START), 0);
	}
	store_release(&polling.stop, true);
	pthread_join(thread, NULL);
	bsn_free(n);
	for (uint32_t i = 0; i < CLIENTS; i++)
		writer_close(&others[i]);
	writer_close(&w);
}

int main(void)
{
	RUN(what_is_written_meanwhile_comes_once);
	RUN(segments_that_are_taken_meanwhile_are_seen);
	RUN(what_comes_behind_a_pass_is_not_missing);
	RUN(what_begins_behind_a_pass_ends_with_it);
	RUN(what_is_reclaimed_meanwhile_was_looked_at);
	RUN(what_is_released_meanwhile_stays_released);
	RUN(a_process_leaves_meanwhile);
	RUN(a_loss_meanwhile_closes_its_handle_once);
	RUN(a_peek_meets_each_run_once);
	RUN(a_peek_meets_each_kept_run_once);
	RUN(who_asks_while_a_poll_looks_waits_for_the_next);
	free(d.bytes);
	return 0;
}
