/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What becomes of the pool over a restart: its segments, their order, what is kept of
 * those that were reclaimed; and what a successor does not cost.
 */
#include <sys/stat.h>

#include "node/internal.h"
#include "writer.h"

static struct decoded d;

/* ------------------------------------------------------------- segments --- */

/* A stock that was taken back is in no thread's hands. */
static void a_stock_taken_back_is_not_in_use(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn_metrics m;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t i = 0; i < 20; i++) {
		now += MS;
		for (uint64_t k = 0; k < 40; k++)
			w_trace(&t, trace_id(i * 100 + k), 30000, now);
		bsn_poll(n, now);
	}
	for (uint32_t i = 0; i < 100; i++) {
		now += 10 * SECOND;
		bsn_poll(n, now);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.active_bytes, SEG);
	CHECK(m.stock_bytes <= 8 * SEG);
	n = restart(n, &config, &w, 1, now);
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.active_bytes, SEG);
	CHECK_EQ(m.corrupt, 0);
	free_with_writer(n, &w);
}

/* What no longer fits is reclaimed, as always, and not dropped; and a thread
 * keeps the segment that it writes to. */
static void a_pool_that_has_shrunk(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t, other;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t i = 0; i < 190; i++) {
		now += 300 * MS;
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		if (i == 110 || i == 150)
			CHECK(w_trace(&t, trace_id(1), 100, now));
		bsn_poll(n, now);
	}
	CHECK_EQ(flags_of(n, trace_id(1), now), 0);
	config.pool_bytes = config.arena_bytes = 4 << 20;
	n = restart(n, &config, &w, 1, now);
	collect(n, trace_id(1), now, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK(d.records == 2 || s.flags & BSN_SLICE_EVICTED);
	bsn_get_metrics(n, &m);
	CHECK(m.pool_used_bytes <= m.pool_bytes);
	CHECK_EQ(m.corrupt, 0);
	CHECK(m.reclaims > 0);
	other = writer_thread(&w, 1);
	for (uint64_t i = 0; i < 500; i++) {
		now += MS;
		w_trace(&other, trace_id(5000 + i), 30000, now);
		CHECK(other.segment != t.segment);
		bsn_poll(n, now);
	}
	check_invariants(n);
	free_with_writer(n, &w);
}

/* A thread that was killed between taking a segment and writing its header: it
 * is nobody's, and holds nothing, but what is behind it goes on. */
static void a_segment_without_a_header(bool adopted)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bs_grant grant;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t[2];

	writer_attach(&w, n, START);
	for (uint32_t i = 0; i < 2; i++)
		t[i] = writer_thread(&w, i);
	CHECK(w_grab(&t[0], &grant));
	CHECK(w_trace(&t[1], trace_id(1), 100, START));
	for (uint32_t i = 0; i < 2; i++) {
		if (adopted)
			n = restart(n, &config, &w, 1, START);
		bsn_poll(n, START);
		bsn_get_metrics(n, &m);
		CHECK_EQ(m.active_bytes, 2 * SEG);
		CHECK_EQ(m.corrupt, 0);
	}
	/* It lived, after all. */
	w_settle(&t[0], &grant);
	CHECK(w_trace(&t[0], trace_id(2), 100, START));
	bsn_poll(n, START);
	for (uint64_t i = 1; i <= 2; i++) {
		collect(n, trace_id(i), START, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	/* And once more, until the end of the process. */
	CHECK(w_grab(&t[0], &grant));
	if (adopted)
		n = restart(n, &config, &w, 1, START);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.active_bytes, 0);
	CHECK_EQ(m.stock_bytes, 0);
	CHECK_EQ(m.corrupt, 0);
	free_with_writer(n, &w);
}

static void segments_without_a_header(void)
{
	a_segment_without_a_header(false);
	a_segment_without_a_header(true);
}

/* What is evicted is what was sealed first, over both processes, as if there
 * had been no restarts. A trace fills a segment, which is sealed when its thread
 * writes the next. */
static void sealed_in_order(uint64_t pool_bytes_after, bool evicts)
{
	enum {
		BEFORE = 70,
		TRACES = 150
	};
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2];
	uint64_t order[TRACES], latest[2] = {TRACES, TRACES};
	uint64_t now = START, written = 0;
	uint32_t sealed = 0, gone = 0;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	for (uint64_t i = 0; i < TRACES; i++) {
		uint32_t who = i % 5 < 3;

		if (i == BEFORE)
			config.pool_bytes = config.arena_bytes =
				pool_bytes_after;
		if (i >= BEFORE)
			n = restart(n, &config, w, 2, now);
		now += MS;
		if (w_trace(&t[who], trace_id(i), BS_PAYLOAD_MAX, now)) {
			if (latest[who] < TRACES)
				order[sealed++] = latest[who];
			latest[who] = written = i;
		}
		bsn_poll(n, now);
		check_invariants(n);
		gone = 0;
		while (gone < sealed && flags_of(n, trace_id(order[gone]), now))
			gone++;
		for (uint32_t k = gone; k < sealed; k++)
			CHECK_EQ(flags_of(n, trace_id(order[k]), now), 0);
	}
	CHECK(sealed > BEFORE);
	CHECK(evicts ? gone > BEFORE / 2 : !gone);
	CHECK_EQ(flags_of(n, trace_id(order[0]), now),
		 evicts ? EVICTED_BY_FINGERPRINT : 0);
	collect(n, trace_id(written), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void the_order_of_sealing_stays(void)
{
	sealed_in_order(8 << 20, true);
	sealed_in_order(4 << 20, true);
	sealed_in_order(64 << 20, false);
}

/* ------------------------------------------------------------ kept runs --- */

/* What was kept of open handles is there, whether their process comes back or
 * not. */
static void kept_runs(bool comes_back)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint32_t *open;
	uint64_t now = START;

	writer_attach(&w, n, now);
	open = (uint32_t *)(w.channel + BS_CHANNEL_HANDLES_OFFSET);
	t = writer_thread(&w, 0);
	for (uint32_t i = 1; i <= 300; i++) {
		open[bs_handle_place(i)] = i;
		CHECK(w_begin(&t, trace_id(i), i, 0, BS_RUN_FIRST, 100));
		w_record(&t, BS_RECORD_DATA, "x", 1, now);
		w_end(&t, 0);
	}
	for (uint64_t i = 0; m.reclaims < 5; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
	}
	CHECK_EQ(m.second_chances, 300);
	CHECK(m.keep_bytes);
	n = restart(n, &config, &w, comes_back, now);
	for (uint32_t i = 1; i <= 300; i++) {
		collect(n, trace_id(i), now, &s);
		/* What else it wrote is lost with it. */
		CHECK_EQ(s.flags,
			 BSN_SLICE_HELD |
				 (comes_back ? 0 : BSN_SLICE_MAYBE_LOSSY));
		CHECK_EQ(s.open_handles, comes_back);
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, 1);
		CHECK_EQ(d.by_kind[BS_PIECE_EXIT], !comes_back);
		CHECK_EQ(d.by_kind[BS_PIECE_PROCESS], 1);
		CHECK_EQ(d.pieces[0].client, w.number);
	}
	free_with_writer(n, &w);
}

static void kept_runs_are_found(void)
{
	kept_runs(true);
	kept_runs(false);
}

/* Runs that are kept go from one segment of the keep arena to the next, over
 * restarts. */
static void kept_runs_move_on(void)
{
	enum {
		HANDLES = 8
	};
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint32_t *open, reclaims;
	uint64_t now = START;

	writer_attach(&w, n, now);
	open = (uint32_t *)(w.channel + BS_CHANNEL_HANDLES_OFFSET);
	t = writer_thread(&w, 0);
	/* Each of so many bytes that they fill some segments of both arenas. */
	for (uint32_t round = 0; round < 4; round++) {
		for (uint32_t i = 1; i <= HANDLES; i++) {
			open[bs_handle_place(i)] = i;
			CHECK(w_begin(&t, trace_id(i), i, round,
				      round ? 0 : BS_RUN_FIRST, 20000));
			w_record(&t, BS_RECORD_DATA, open, 19000, now);
			w_end(&t, 0);
		}
	}
	for (uint64_t i = 0; m.reclaims < 5; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
	}
	CHECK(m.second_chances > 10);
	for (uint32_t round = 0; round < 6; round++) {
		n = restart(n, &config, &w, 1, now);
		bsn_get_metrics(n, &m);
		reclaims = 0;
		while (reclaims < 1) {
			now += MS;
			CHECK(w_trace(&t, trace_id(2000), 30000, now));
			bsn_poll(n, now);
			bsn_get_metrics(n, &m);
			reclaims = (uint32_t)m.reclaims;
		}
	}
	for (uint32_t i = 1; i <= HANDLES; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, 4);
	}
	free_with_writer(n, &w);
}

/* ---------------------------------------------------------------- costs --- */

/* A successor reads what the ledger says, and no directory. */
static void a_successor_looks_at_no_run(void)
{
	struct bsn_config config = test_config(32 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(1), 100, now));
	collect(n, trace_id(1), now, &s);
	for (uint64_t i = 0; i < 100000; i++) {
		now += MS / 10;
		CHECK(w_trace(&t, trace_id(1000 + i), 200, now));
		if (i % 100 == 0)
			bsn_poll(n, now);
	}
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK(m.entries_watched > 90000);
	CHECK(m.sealed_bytes > 20 << 20);
	n = restart(n, &config, &w, 1, now);
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.entries_searched, 0);
	/* Of one segment, from where the commit was. */
	CHECK(m.entries_watched <= 1);
	collect(n, trace_id(1000 + 99999), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	free_with_writer(n, &w);
}

static uint64_t memory_of(int fd)
{
	struct stat st;

	CHECK_EQ(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

/* What was never used has no memory afterwards either. */
static void a_successor_costs_no_memory(void)
{
	struct bsn_config config = test_config(64 << 20);
	uint64_t now = START, store, keep;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n;

	config.store_bytes = 64 << 20;
	n = test_node(&config);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint64_t i = 0; i < 10; i++) {
		CHECK(w_trace(&t, trace_id(i), 10000, now));
		collect(n, trace_id(i), now, &s);
		bsn_poll(n, now += MS);
	}
	store = memory_of(bsn_store_fd(n));
	keep = memory_of(bsn_keep_fd(n));
	CHECK(store >= 100000 && store < 1 << 20);
	for (int i = 0; i < 2; i++) {
		n = restart(n, &config, &w, 1, now += MS);
		bsn_poll(n, now += MS);
		CHECK(memory_of(bsn_store_fd(n)) <= store + 4096);
		CHECK(memory_of(bsn_keep_fd(n)) <= keep + 4096);
	}
	for (uint64_t i = 0; i < 10; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, 1);
	}
	/* As much of the store is free as there was. */
	for (uint64_t i = 10; i < 100; i++) {
		CHECK(w_trace(&t, trace_id(i), 10000, now));
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	writer_close(&w);
	bsn_free(n);
}

/* A process may remember a place in a segment of which no record tells any more: its
 * next life is not one that it had. */
static void a_life_that_nobody_knows_is_not_had_again(void)
{
	struct bsn_config config = test_config(8 << 20);
	uint32_t known, others = 0;
	uint64_t now = START;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_take_segment(&t));
	bsn_poll(n, now);
	known = n->clients.all[0]->segments_fresh;
	n = restart(n, &config, &w, 1, now);
	bsn_poll(n, now);
	for (uint32_t i = 0; i < 2 * known; i++) {
		if (!w_take_segment(&t)) {
			bsn_poll(n, now += MS);
			continue;
		}
		if (t.segment < known)
			continue;
		others++;
		CHECK(bs_life_generation(
			      READ_ONCE(w_segment_header(&t)->life)) > 1000);
	}
	CHECK(others > 0);
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(a_stock_taken_back_is_not_in_use);
	RUN(a_pool_that_has_shrunk);
	RUN(segments_without_a_header);
	RUN(the_order_of_sealing_stays);
	RUN(kept_runs_are_found);
	RUN(kept_runs_move_on);
	RUN(a_successor_looks_at_no_run);
	RUN(a_successor_costs_no_memory);
	RUN(a_life_that_nobody_knows_is_not_had_again);
	free(d.bytes);
	return 0;
}
