/* SPDX-License-Identifier: Apache-2.0 */
/* Work that grows with what is searched for, and with what is found of it, is done in
 * pieces, and takes little memory. */
#include "pieces.h"

static uint32_t searching(struct bsn *n)
{
	uint32_t count = 0;

	for (uint32_t i = 1; i < n->store.n_blocks; i++)
		count += n->store.slices[i] &&
			 n->store.slices[i]->flags & BSN_SLICE_SEARCHING;
	return count;
}

/* Slices whose searches have joined no pass yet. */
static uint32_t not_joined(struct bsn *n)
{
	uint32_t count = 0;

	for (uint32_t i = 1; i < n->store.n_blocks; i++) {
		const struct slice *s = n->store.slices[i];

		count += s && s->search && !s->search->pass;
	}
	return count;
}

#define SEARCHES 1500u

static void searches_begin_in_pieces(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n;
	struct between b = {.left = not_joined};
	struct bsn_slice s;
	pthread_t thread;

	config.store_bytes = 16 << 20;
	b.n = n = test_node(&config);
	for (uint32_t i = 0; i <= SEARCHES; i++)
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	CHECK_EQ(not_joined(n), SEARCHES);
	node_lock(n);
	thread = start_between(n, look_between, &b);
	search_waiting(n, n->searches_made);
	end_between(n, thread);
	check_piece(&b, SEARCHES, 400);
	CHECK_EQ(searching(n), 0);
	CHECK_EQ(n->counts.passes, 2);
	bsn_free(n);
}

/* Where a search joins a pass, what is written of its trace goes or comes. */
struct joining {
	struct between b;
	struct wthread *t;
};

static void write_all(struct wthread *t)
{
	for (uint32_t i = 1; i <= SEARCHES; i++)
		CHECK(w_trace(t, trace_id(i), 40, START));
}

static void *go_and_come(void *argument)
{
	struct joining *j = argument;
	struct bsn *n = j->b.n;

	node_lock(n);
	j->b.seen = not_joined(n);
	CHECK(n->passes && n->passes->joining);
	while (w_take_segment(j->t))
		;
	observe(n, first(n));
	while (pool_reclaim(n, NULL, false))
		;
	/* And into the segments that went. */
	while (grants_fill(n, first(n)))
		;
	write_all(j->t);
	observe(n, first(n));
	watch_at_once(n);
	node_unlock(n);
	return NULL;
}

static void what_goes_and_comes_while_searches_join_is_found(void)
{
	static struct decoded d;
	struct bsn_config config = test_config(4 << 20);
	struct joining j = {0};
	uint32_t twice = 0, once = 0;
	struct bsn_slice s;
	struct bsn *n;
	pthread_t thread;
	struct wthread t;
	struct writer w;

	config.store_bytes = 16 << 20;
	n = node_with_writer(&config, &w, &t);
	j.b.n = n;
	j.t = &t;
	bsn_poll(n, START);
	write_all(&t);
	CHECK(w_take_segment(&t));
	for (uint32_t i = 0; i <= SEARCHES; i++)
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	node_lock(n);
	observe(n, first(n));
	thread = start_between(n, go_and_come, &j);
	search_waiting(n, n->searches_made);
	end_between(n, thread);
	CHECK(j.b.seen > 0 && j.b.seen < SEARCHES);
	bsn_poll(n, START);
	for (uint32_t i = 1; i <= SEARCHES; i++) {
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		once += d.records == 1;
		twice += d.records == 2;
		CHECK_EQ(s.flags & BSN_SLICE_EVICTED,
			 d.records == 1 ? BSN_SLICE_EVICTED : 0);
	}
	CHECK_EQ(once, j.b.seen);
	CHECK_EQ(twice, SEARCHES - j.b.seen);
	free(d.bytes);
	free_with_writer(n, &w);
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
	for (uint32_t i = 0; i < 101; i++) {
		CHECK(w_trace(&t, trace_id(i), 40, START));
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	}
	CHECK_EQ(searching(n), 100);
	node_lock(n);
	thread = start_between(n, look_between, &b);
	search_waiting(n, n->searches_made);
	end_between(n, thread);
	check_piece(&b, 100, 60);
	CHECK_EQ(searching(n), 0);
	for (uint32_t i = 0; i < 101; i++) {
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	free_with_writer(n, &w);
}

/* So many join a pass in one piece, and are judged in several. */
#define JUDGED 201u

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
	for (uint32_t i = 0; i < JUDGED; i++)
		CHECK(w_trace(m->t, trace_id(i), 40, START));
	CHECK(w_take_segment(m->t));
	for (uint32_t i = 0; i < JUDGED; i++)
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
	for (uint32_t i = 0; i < JUDGED; i++)
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	node_lock(n);
	thread = start_between(n, write_meanwhile, &m);
	search_waiting(n, n->searches_made);
	end_between(n, thread);
	CHECK(m.b.seen > 0 && m.b.seen < JUDGED - 1);
	bsn_poll(n, START);
	for (uint32_t i = 0; i < JUDGED; i++) {
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
	search_judge_all(n, search, false);
	end_between(n, thread);
	check_piece(&b, PARTS, 2);
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
			search_meet(n, &s[i], &run, (struct ticks){0});
		CHECK_EQ(s[i].failed, i < 3);
		CHECK(n->met_bytes <= n->config.pool_bytes / 32);
	}
	CHECK_EQ(s[0].met.n, 32768);
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
	search_waiting(n, n->searches_made);
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
	search_waiting(n, n->searches_made);
	end_between(n, thread);
	CHECK_EQ(n->now_ns, START + 4 * MS);
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(searches_begin_in_pieces);
	RUN(what_goes_and_comes_while_searches_join_is_found);
	RUN(searches_are_judged_in_pieces);
	RUN(what_comes_before_the_judgement_comes_once);
	RUN(parts_are_put_in_pieces);
	RUN(traces_of_many_handles_cost_little);
	RUN(of_a_trace_of_many_handles_nobody_knows_all);
	RUN(runs_are_found_in_pieces);
	RUN(the_time_is_not_counted_twice);
	return 0;
}
