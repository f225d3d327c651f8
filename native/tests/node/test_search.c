/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When passes over the directories are made, for whom, and what they remember; and
 * that who makes traces look alike gains nothing.
 */
#include "node/internal.h"
#include "wanted.h"

static struct decoded d;

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
	CHECK_EQ(bsn_events(n, e, 2 * MANY), 0);
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

/* What threads took since the latest look is taken up by the poll, however many
 * triggers there are before it. */
static void a_trigger_that_waits_looks_at_no_process(void)
{
	struct bsn_config config = test_config(8 << 20);
	const struct client *c;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);
	uint32_t taken;

	c = n->clients.all[0];
	taken = c->grant_tail;
	CHECK(w_take_segment(&t));
	mark_only(n, trace_id(0), START, &s);
	CHECK_EQ(c->grant_tail, ++taken);
	CHECK(w_take_segment(&t));
	CHECK(w_trace(&t, trace_id(1), 100, START));
	mark_only(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	CHECK_EQ(c->grant_tail, taken);
	bsn_poll(n, START);
	CHECK_EQ(c->grant_tail, taken + 1);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	free_with_writer(n, &w);
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

/* ------------------------------------------------------------- segments --- */

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
	enum {
		SEGMENTS = 60
	};
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

/* ----------------------------------------------------------------- lies --- */

/* Entries with the fingerprint of another process's trace: some of them hit. That the
 * others were not looked at is told; what is kept of them is no other trace's. */
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
	/* Of open handles: they are kept. */
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
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
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
		CHECK_EQ(m.false_hits, met);
	}
	writer_close(&w);
	free_with_writer(n, &liar);
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
	RUN(a_trigger_that_waits_looks_at_no_process);
	RUN(passes_keep_to_a_quarter_of_a_core);
	RUN(one_of_those_that_wait_wakes_the_node);
	RUN(segments_are_found_in_after_they_were_reclaimed);
	RUN(columns_have_a_budget);
	RUN(forged_entries_hurt_nobody);
	RUN(slices_that_look_alike_share_no_bucket);
	free(d.bytes);
	return 0;
}
