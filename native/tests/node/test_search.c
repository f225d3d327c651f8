/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pass over the directories, and what happens in the middle of it. It goes on
 * in pieces; between two of them others have the lock. So a test has a second
 * thread, which waits for the lock when the pass begins, and gets it after the
 * first piece: with the lock held it calls what is inside of the node.
 */
#include <errno.h>

#include "between.h"
#include "writer.h"

static struct decoded d;
static const uint8_t payload[BS_PAYLOAD_MAX];

/* Handles of tests, that no w_trace() uses. */
#define HANDLE 0x10000u

/* The trace that is looked for, and those that are in the way. */
#define WANTED 1u
#define OTHERS 1000000u

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
	search_waiting(b->n);
	store_publish(b->n);
	end_between(b->n, thread);
	CHECK(!b->n->passes);
}

/* --------------------------------------------------------------- writing --- */

/* Other traces, until the thread is in its next segment. */
static void write_segment(struct wthread *t, uint64_t now)
{
	static uint64_t other = OTHERS;
	uint32_t segment = t->segment;

	while (t->segment == segment)
		CHECK(w_trace(t, trace_id(other++), 0, now));
}

/* One run of an open handle of WANTED. */
static void write_long_run(struct wthread *t, uint32_t handle, uint32_t seq,
			   uint32_t flags, uint32_t bytes, uint64_t now)
{
	CHECK(w_begin(t, trace_id(WANTED), handle, seq, seq ? 0 : BS_RUN_FIRST,
		      bytes + 24));
	w_record(t, BS_RECORD_DATA, payload, bytes, now);
	w_end(t, flags);
}

static void write_run(struct wthread *t, uint32_t handle, uint32_t seq,
		      uint32_t flags, uint64_t now)
{
	write_long_run(t, handle, seq, flags, 100, now);
}

#define SEGMENTS 60u

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

/* ----------------------------------------------------------------- passes --- */

static void mark_only(struct bsn *n, struct bs_trace_id id, uint64_t now,
		      struct bsn_slice *s)
{
	CHECK_EQ(bsn_collect(n, id, id, "test", now, s), 0);
}

/* However many wait: each entry is read once, and each is told that it was
 * found. */
static void one_pass_is_for_all_that_wait(void)
{
	enum {
		MANY = 100
	};
	struct bsn_config config = test_config(256 << 20);
	static struct bsn_event e[2 * MANY];
	uint64_t now = START, written = 0;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	while (search_cost(n) <= 520000) {
		CHECK(w_trace(&t, trace_id(written++), 30000, now));
		bsn_poll(n, now += MS);
	}
	for (uint64_t i = 0; i < MANY; i++) {
		mark_only(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	}
	/* Idempotent. Nobody looks before the next poll, which is due. */
	mark_only(n, trace_id(0), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	CHECK_EQ(bsn_wait(n, -1), 1);
	CHECK_EQ(bsn_events(n, e, 2 * MANY), MANY);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.passes, 0);
	CHECK_EQ(bsn_poll(n, now), 1);
	CHECK_EQ(bsn_events(n, e, 2 * MANY), MANY);
	for (uint64_t i = 0; i < MANY; i++) {
		CHECK_EQ(e[i].kind, BSN_EVENT_SLICE_CHANGED);
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, 1);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.passes, 1);
	CHECK_EQ(m.searches, MANY);
	CHECK_EQ(m.entries_searched, written);
	CHECK_EQ(bsn_poll(n, now), 0);
	bsn_free(n);
	writer_close(&w);
}

/* In a small pool the first one is looked for at once; those that come in the same
 * moment share the next pass. */
static void the_first_of_a_moment_is_answered_at_once(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t i = 0; i < 20; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START));
	for (uint64_t round = 0; round < 2; round++) {
		for (uint64_t i = 0; i < 10; i++) {
			mark_only(n, trace_id(10 * round + i), START, &s);
			CHECK_EQ(s.flags,
				 i ? BSN_SLICE_SEARCHING : BSN_SLICE_HELD);
		}
		CHECK_EQ(bsn_poll(n, START), 1);
		for (uint64_t i = 0; i < 10; i++) {
			CHECK_EQ(bsn_slice_info(n, trace_id(10 * round + i),
						&s),
				 0);
			CHECK_EQ(s.flags, BSN_SLICE_HELD);
		}
		bsn_get_metrics(n, &m);
		CHECK_EQ(m.passes, 2 * (round + 1));
	}
	CHECK_EQ(m.searches, 20);
	bsn_free(n);
	writer_close(&w);
}

/* Of the thread that passes: as if each took so long. */
#define PASS_NS (10 * MS)
static uint64_t thread_cpu;

static uint64_t read_thread_cpu(void)
{
	return thread_cpu += PASS_NS;
}

static void check_searching(struct bsn *n, uint64_t from, uint64_t to,
			    bool searching)
{
	struct bsn_slice s;

	for (uint64_t i = from; i < to; i++) {
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		CHECK_EQ(s.flags,
			 searching ? BSN_SLICE_SEARCHING : BSN_SLICE_HELD);
	}
}

/* A pass of 10 ms, and the next not before 30 ms more have passed; what comes
 * meanwhile shares it. */
static void passes_keep_to_a_quarter_of_a_core(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	uint64_t now = START, waited = 0, traces = 0;
	struct wthread t;
	struct writer w;
	struct bsn *n;

	config.thread_cpu_ns = read_thread_cpu;
	n = node_with_writer(&config, &w, &t);
	for (uint64_t i = 0; i < 1000; i++)
		CHECK(w_trace(&t, trace_id(i), 0, now));
	/* Nothing was looked for lately. */
	mark_only(n, trace_id(traces++), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	/* A trigger each millisecond, for a second. */
	for (uint64_t ms = 1; ms <= 1000; ms++) {
		uint64_t passes;

		now += MS;
		mark_only(n, trace_id(traces++ % 1000), now, &s);
		bsn_get_metrics(n, &m);
		passes = m.passes;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK(m.passes <= passes + 1);
		waited += search_due_in_ns(n) > 0;
	}
	/* That of before, and what was not used yet, besides. */
	bsn_get_metrics(n, &m);
	CHECK(m.passes >= SECOND / (4 * PASS_NS));
	CHECK(m.passes <= SECOND / (4 * PASS_NS) + 2);
	CHECK(waited > 800);
	bsn_poll(n, now += 4 * PASS_NS);
	check_searching(n, 0, 1000, false);
	/* After a while they are at once again, with what was saved up and no
	 * more. */
	CHECK_EQ(bsn_slice_release(n, trace_id(0), true, now), 0);
	now += 60 * SECOND;
	mark_only(n, trace_id(5000), now, &s);
	CHECK(!(s.flags & BSN_SLICE_SEARCHING));
	bsn_poll(n, now + MS);
	mark_only(n, trace_id(5001), now + MS, &s);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	bsn_poll(n, now + MS);
	CHECK_EQ(bsn_slice_info(n, trace_id(5001), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	bsn_free(n);
	writer_close(&w);
}

/* While a pass is not due nobody is woken for what waits: the first one woke the
 * node, which sleeps until it is. */
static void one_of_those_that_wait_wakes_the_node(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s;
	struct bsn *n;

	config.thread_cpu_ns = read_thread_cpu;
	n = test_node(&config);
	mark_only(n, trace_id(0), START, &s);
	bsn_poll(n, START);
	bsn_wait(n, 0);
	mark_only(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	CHECK_EQ(bsn_wait(n, 0), 1);
	mark_only(n, trace_id(2), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	CHECK_EQ(bsn_wait(n, 0), 0);
	/* Not for ever. */
	CHECK_EQ(bsn_wait(n, -1), 0);
	bsn_free(n);
}

/* What passes remember of a segment goes with its content. */
static void segments_are_found_in_after_they_were_reclaimed(void)
{
	struct bsn_config config = test_config(8 << 20);
	uint64_t now = START, written = 0;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t round = 0; round < 4; round++) {
		uint64_t until = written + 2 * (8 << 20) / 1000;

		for (; written < until; written++) {
			CHECK(w_trace(&t, trace_id(written), 1000, now));
			bsn_poll(n, now += MS);
		}
		for (uint64_t i = 1; i < 5000; i += 500) {
			collect(n, trace_id(written - i), now, &s);
			CHECK_EQ(s.flags, BSN_SLICE_HELD);
			collect(n, trace_id(written - until / 4 - i), now, &s);
		}
		bsn_get_metrics(n, &m);
		CHECK(m.reclaims > round * 100);
	}
	bsn_free(n);
	writer_close(&w);
}

/* Runs that are as small as can be: copies of their directories would take a
 * ninth of the pool. */
static void columns_have_a_budget(void)
{
	struct bsn_config config = test_config(8 << 20);
	uint64_t now = START;
	struct bsn_metrics m;
	struct wthread t;
	struct writer w;
	struct bsn_slice s;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(WANTED), 0, now));
	for (uint32_t i = 0; i < SEGMENTS; i++) {
		write_segment(&t, now);
		bsn_poll(n, now += MS);
	}
	collect(n, trace_id(WANTED), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	bsn_get_metrics(n, &m);
	CHECK(m.column_bytes <= (8 << 20) / 32);
	CHECK(m.column_bytes > (8 << 20) / 32 - SEG);
	/* They go with what they are of. */
	for (uint32_t i = 0; i < 3 * SEGMENTS; i++) {
		CHECK(w_trace(&t, trace_id(OTHERS - 1 - i), 30000, now));
		CHECK(w_trace(&t, trace_id(OTHERS - 1 - i), 30000, now));
		bsn_poll(n, now += MS);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.column_bytes, 0);
	bsn_free(n);
	writer_close(&w);
}

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
 * process that is looked at first when its thread fills one more segment, and takes
 * another. */
static void take_two(struct between *b)
{
	write_segment(b->t, b->now);
	write_run(b->t, HANDLE, 1, 0, b->now);
	write_segment(b->t, b->now);
	write_run(b->t, HANDLE, 2, BS_RUN_LAST, b->now);
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
	check_wanted(&b, 3, 1, 0);
	writer_close(&w);
	end(&b);
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
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_EVICTED);
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

/* The last run of one of two handles is lost: one is open. */
static void lose_last(struct between *b)
{
	uint64_t end = UINT64_MAX;

	w_show(b->t, 0);
	w_lose_run(b->t, trace_id(WANTED), HANDLE, BS_RUN_LAST, 100);
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
	CHECK_EQ(d.by_kind[BS_PIECE_LOSS], 1);
	end(&b);
}

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
	CHECK_EQ(search_all(b->n, &search, true), 0);
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
	free(look.opens);
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

/* ----------------------------------------------------------------- lies --- */

/* Entries with the fingerprint of another process's trace: they hit, and that is
 * all. */
static void forged_entries_hurt_nobody(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	uint64_t victim =
		bs_fingerprint(trace_id(WANTED).hi, trace_id(WANTED).lo);
	struct wthread t, lies;
	struct writer w, liar;
	struct bsn_metrics m;
	struct bsn_slice s;
	uint64_t now = START;

	writer_attach(&w, n, now);
	writer_attach(&liar, n, now);
	t = writer_thread(&w, 0);
	lies = writer_thread(&liar, 0);
	CHECK(w_begin(&t, trace_id(WANTED), HANDLE, 0, BS_RUN_FIRST, 1000));
	w_record(&t, BS_RECORD_DATA, "honest", 6, now);
	w_end(&t, 0);
	w_show(&t, HANDLE);
	/* Of open handles: they are kept, and would be met there ever after. */
	for (uint32_t i = 0; i < 100; i++) {
		CHECK(w_begin(&lies, trace_id(100 + i), HANDLE + i, 0,
			      BS_RUN_FIRST, 1000));
		w_put_entry(&lies, lies.runs - 1,
			    bs_entry(victim, lies.run_offset, BS_RUN_FIRST));
		w_end(&lies, 0);
		w_list(&liar, HANDLE + i, true);
	}
	bsn_poll(n, now);
	collect(n, trace_id(WANTED), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(WANTED), &d);
	CHECK_EQ(d.records, 1);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.false_hits, 17);
	CHECK_EQ(bsn_slice_release(n, trace_id(WANTED), false, now), 0);

	/* All go through the keep arena: the honest run is found there. */
	for (uint64_t i = 0; i < 200; i++) {
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		CHECK(w_trace(&lies, trace_id(2000 + i), 30000, now));
		bsn_poll(n, now += MS);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.second_chances > 100);
	for (uint32_t i = 0; i < 3; i++) {
		uint64_t met = m.false_hits;

		collect(n, trace_id(WANTED), now, &s);
		CHECK(s.flags & BSN_SLICE_HELD);
		CHECK(!(s.flags & (BSN_SLICE_LOSSY | BSN_SLICE_MAYBE_LOSSY)));
		decode_slice(n, trace_id(WANTED), &d);
		CHECK_EQ(d.records, 1);
		CHECK_EQ(bsn_slice_release(n, trace_id(WANTED), false, now), 0);
		bsn_get_metrics(n, &m);
		if (i == 0)
			CHECK_EQ(m.false_hits - met, 100);
		else
			CHECK_EQ(m.false_hits - met, 16);
	}
	writer_close(&w);
	free_with_writer(n, &liar);
}

/* --------------------------------------------------------------- recent --- */

/* Of the last seconds, of one service or of all, the highest priority first. */
static void finds_what_is_recent(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bs_trace_id ids[100], some[10];
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	uint64_t found;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t i = 0; i < 100; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START));
	CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	for (uint32_t i = 100; i < 130; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START + 10 * SECOND));
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 20 * SECOND, "", ids, 100,
			    &found),
		 100);
	/* Estimated: there are more than were asked for. */
	CHECK(found > 110 && found < 150);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "tester", ids,
			    100, &found),
		 30);
	CHECK_EQ(found, 30);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "", some, 10,
			    &found),
		 10);
	CHECK(found > 15 && found < 60);
	CHECK(!memcmp(some, ids, sizeof(some)));
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "other", ids,
			    100, &found),
		 0);
	collect(n, trace_id(110), START + 10 * SECOND, &s);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "", ids, 100,
			    &found),
		 29);
	/* Nor what was reported, whatever is written of it afterwards. */
	CHECK_EQ(bsn_slice_release(n, trace_id(110), false,
				   START + 90 * SECOND),
		 0);
	CHECK(w_trace(&t, trace_id(110), 100, START + 91 * SECOND));
	CHECK_EQ(bsn_recent(n, START + 91 * SECOND, 5 * SECOND, "", ids, 100,
			    &found),
		 29);
	CHECK_EQ(bsn_recent(n, START, SECOND, "", ids, 0, &found), -EINVAL);
	free_with_writer(n, &w);
}

/* What is kept is as old as the segment that it was written in. */
static void what_is_kept_is_not_recent(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bs_trace_id ids[1000];
	uint64_t found, now = START;
	struct bsn_metrics m;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	write_run(&t, HANDLE, 0, 0, now);
	w_show(&t, HANDLE);
	for (uint64_t i = 0; i < 200; i++) {
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now += SECOND);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.second_chances, 1);
	for (int age_s = 50; age_s <= 250; age_s += 200) {
		int got = bsn_recent(n, now, (uint64_t)age_s * SECOND, "tester",
				     ids, 1000, &found);
		bool there = false;

		CHECK(got > 25);
		for (int i = 0; i < got; i++)
			there |= ids[i].lo == trace_id(WANTED).lo;
		CHECK_EQ(there, age_s == 250);
	}
	free_with_writer(n, &w);
}

/* Who may choose ids finds any number with one fingerprint, and not with one place. */
static void slices_that_look_alike_share_no_bucket(void)
{
	enum {
		LOOK_ALIKES = 500
	};
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	uint32_t longest = 0;
	struct bsn_slice s;

	for (uint64_t i = 1; i <= LOOK_ALIKES; i++) {
		struct bs_trace_id id = look_alike(trace_id(1), i);

		CHECK_EQ(bsn_collect(n, id, id, "test", START, &s), 0);
	}
	for (uint32_t b = 0; b < n->store.n_buckets; b++) {
		uint32_t length = 0;

		for (uint32_t i = n->store.buckets[b]; i != NONE;
		     i = n->store.slices[i]->next_hashed)
			length++;
		longest = length > longest ? length : longest;
	}
	CHECK(longest < LOOK_ALIKES / 20);
	for (uint64_t i = 1; i <= LOOK_ALIKES; i++)
		CHECK_EQ(bsn_slice_info(n, look_alike(trace_id(1), i), &s), 0);
	bsn_free(n);
}

int main(void)
{
	RUN(one_pass_is_for_all_that_wait);
	RUN(the_first_of_a_moment_is_answered_at_once);
	RUN(passes_keep_to_a_quarter_of_a_core);
	RUN(one_of_those_that_wait_wakes_the_node);
	RUN(segments_are_found_in_after_they_were_reclaimed);
	RUN(columns_have_a_budget);
	RUN(what_is_written_meanwhile_comes_once);
	RUN(segments_that_are_taken_meanwhile_are_seen);
	RUN(what_is_reclaimed_meanwhile_was_looked_at);
	RUN(what_is_released_meanwhile_stays_released);
	RUN(a_process_leaves_meanwhile);
	RUN(a_loss_meanwhile_closes_its_handle_once);
	RUN(a_peek_meets_each_run_once);
	RUN(a_peek_meets_each_kept_run_once);
	RUN(forged_entries_hurt_nobody);
	RUN(finds_what_is_recent);
	RUN(what_is_kept_is_not_recent);
	RUN(slices_that_look_alike_share_no_bucket);
	free(d.bytes);
	return 0;
}
