/* SPDX-License-Identifier: Apache-2.0 */
/* The budget, the order of reclaim, second chances, tombstones, full tables. */
#include "writer.h"

static struct decoded d;

/* Fill segments with traces first..first+count-1, one poll a trace, so that
 * time passes. */
static uint64_t fill(struct bsn *n, struct wthread *t, uint64_t first,
		     uint64_t count, uint32_t bytes, uint64_t now)
{
	for (uint64_t i = 0; i < count; i++) {
		now += MS;
		CHECK(w_trace(t, trace_id(first + i), bytes, now));
		bsn_poll(n, now);
	}
	return now;
}

/* 4 MiB are 64 segments; two traces of 30000 bytes fill one. */
static void oldest_goes_first_over_arenas(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct writer w[2];
	struct wthread t[2];
	struct bsn_metrics m;
	uint64_t now = START, gone;
	bool held = false;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	for (uint64_t i = 0; i < 40; i++) {
		now += MS;
		CHECK(w_trace(&t[i % 2], trace_id(i), 30000, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		/* At most 90 percent, while something can be reclaimed. */
		CHECK(m.pool_used_bytes <= m.pool_bytes * 9 / 10);
		check_invariants(n);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.reclaims, 0);
	CHECK_EQ(m.horizon_ns, 0);
	for (uint64_t i = 40; i < 400; i++) {
		now += MS;
		CHECK(w_trace(&t[i % 2], trace_id(i), 30000, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK(m.pool_used_bytes <= m.pool_bytes * 9 / 10);
		check_invariants(n);
	}
	CHECK(m.reclaims > 0);
	CHECK(m.horizon_ns > 50 * MS && m.horizon_ns < 120 * MS);
	CHECK_EQ(m.second_chances, 0);
	CHECK_EQ(m.traces_evicted + m.traces_indexed - m.tombstones, 400);
	/* Whoever wrote: what is gone is older than what is there. */
	gone = 0;
	for (uint64_t i = 0; i < 400; i++) {
		uint32_t flags = flags_of(n, trace_id(i), now);

		CHECK(flags == BSN_SLICE_EVICTED || flags == 0);
		if (flags == BSN_SLICE_EVICTED)
			gone++;
		else
			held = true;
		/* Both of a segment go together: two by two, interleaved. */
		CHECK(!held || flags != BSN_SLICE_EVICTED || i < gone + 4);
	}
	CHECK_EQ(gone, m.traces_evicted);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void open_traces_get_a_second_chance(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	/* Open, with a run that is closed; and one that is over. */
	CHECK(w_begin(&t, trace_id(1), 1, 0, BS_RUN_FIRST, 5000));
	w_record(&t, BS_RECORD_DATA, "begin", 6, now);
	w_end(&t, 0);
	CHECK(w_trace(&t, trace_id(2), 100, now));
	now = fill(n, &t, 1000, 500, 30000, now);
	bsn_get_metrics(n, &m);
	CHECK(m.reclaims > 100);
	CHECK(m.second_chances >= 1);
	CHECK(m.keep_bytes > 0);
	CHECK_EQ(flags_of(n, trace_id(2), now), BSN_SLICE_EVICTED);

	/* It goes on, and is whole. */
	CHECK(w_begin(&t, trace_id(1), 1, 1, 0, 5000));
	w_record(&t, BS_RECORD_DATA, "end", 4, now);
	w_end(&t, BS_RUN_LAST);
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	CHECK(!memcmp(d.content[d.n_pieces - 1] + 16, "end", 4));
	check_invariants(n);
	writer_close(&w);
	bsn_free(n);
}

static void big_runs_are_kept_in_parts(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	uint32_t next = 0;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	/* The largest run that there is. */
	CHECK(w_begin(&t, trace_id(1), 1, 0, BS_RUN_FIRST, SEG - 64 - 32));
	while (t.cursor + 16 + 1000 <= SEG) {
		uint32_t payload[250] = {next++};

		w_record(&t, BS_RECORD_DATA, payload, 1000, now);
	}
	w_record(&t, BS_RECORD_DATA, &d, SEG - t.cursor - 16, now);
	next++;
	w_end(&t, 0);
	now = fill(n, &t, 1000, 500, 30000, now);
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, next);
	CHECK(d.by_kind[BS_PIECE_RUN] > 1);
	/* Offsets fit together. */
	next = 0;
	for (uint32_t i = 0; i < d.n_pieces; i++) {
		if (d.pieces[i].kind != BS_PIECE_RUN)
			continue;
		CHECK_EQ(d.pieces[i].from, next);
		CHECK_EQ(d.pieces[i].handle, 1);
		next += d.pieces[i].bytes;
	}
	writer_close(&w);
	bsn_free(n);
}

static void evicts_whole_traces(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t, other;
	uint64_t now = START;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	other = writer_thread(&w, 1);
	/* Closed, in an old segment and in one that stays active. */
	CHECK(w_trace(&t, trace_id(1), 100, now));
	CHECK(w_trace(&other, trace_id(1), 100, now));
	collect(n, trace_id(1), now, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(bsn_slice_release(n, trace_id(1), false, now), 0);
	now = fill(n, &t, 1000, 150, 30000, now);
	/* The second run is in the pool, but not to be had. */
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_EVICTED);
	CHECK_EQ(s.bytes, 0);
	CHECK_EQ(bsn_slice_release(n, trace_id(1), false, now), 0);

	/* Written again: held, and never whole. */
	CHECK(w_trace(&other, trace_id(1), 100, now));
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_EVICTED);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);

	/* What was collected needs no second chance, and no tombstone. */
	bsn_get_metrics(n, &m);
	now = fill(n, &other, 5000, 150, 30000, now);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);

	/* Collected, delivered and released; by then some had been reclaimed:
	 * who asks again gets no part of it for the whole. */
	CHECK(w_trace(&t, trace_id(3), 100, now));
	CHECK(w_trace(&t, trace_id(4), 100, now));
	collect(n, trace_id(3), now, &s);
	collect(n, trace_id(4), now, &s);
	CHECK_EQ(bsn_slice_release(n, trace_id(4), false, now), 0);
	collect(n, trace_id(4), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK(w_trace(&other, trace_id(3), 100, now));
	now = fill(n, &t, 9000, 150, 30000, now);
	CHECK(w_trace(&t, trace_id(3), 100, now));
	decode_slice(n, trace_id(3), &d);
	collect(n, trace_id(3), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(bsn_slice_release(n, trace_id(3), false, now), 0);
	collect(n, trace_id(3), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_EVICTED);
	writer_close(&w);
	bsn_free(n);
}

static void tombstones_that_matter_stay(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t, other;
	uint64_t now = START;

	config.tombstones = 8;
	n = test_node(&config);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	other = writer_thread(&w, 1);
	CHECK(w_trace(&t, trace_id(1), 100, now));
	CHECK(w_trace(&other, trace_id(1), 100, now));
	CHECK(w_trace(&t, trace_id(2), 100, now));
	now = fill(n, &t, 1000, 300, 30000, now);
	bsn_get_metrics(n, &m);
	CHECK(m.traces_evicted > 100);
	CHECK_EQ(m.tombstones, 8);
	/* Of trace 1 a run is still in the pool: hundreds of younger
	 * tombstones did not push it out. */
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_EVICTED);
	CHECK_EQ(flags_of(n, trace_id(2), now), 0);
	writer_close(&w);
	bsn_free(n);
}

static void keep_arena_full(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	uint32_t whole = 0;
	static uint8_t payload[30000];

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	/* Everything stays open: more than can be kept. */
	for (uint32_t i = 0; i < 400; i++) {
		now += MS;
		CHECK(w_begin(&t, trace_id(i), i, 0, BS_RUN_FIRST, 30100));
		w_record(&t, BS_RECORD_DATA, payload, 30000, now);
		w_end(&t, 0);
		bsn_poll(n, now);
		check_invariants(n);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.second_chances > 10);
	CHECK(m.traces_evicted > 200);
	CHECK(m.keep_bytes <= (1 << 20));
	for (uint32_t i = 0; i < 400; i++) {
		struct bsn_slice s;

		collect(n, trace_id(i), now, &s);
		CHECK(s.flags == BSN_SLICE_EVICTED ||
		      s.flags == BSN_SLICE_HELD ||
		      s.flags == BSN_SLICE_STORE_FULL);
		whole += s.flags == BSN_SLICE_HELD;
		CHECK_EQ(bsn_slice_release(n, trace_id(i), false, now), 0);
	}
	CHECK(whole > 50 && whole < 200);
	writer_close(&w);
	bsn_free(n);
}

static void index_full(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	config.index_traces = 1500;
	config.index_runs = 1500;
	config.tombstones = 200;
	n = test_node(&config);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 20000; i++) {
		CHECK(w_trace(&t, trace_id(i), 100, now));
		if (i % 50)
			continue;
		now += MS;
		bsn_poll(n, now);
		check_invariants(n);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.traces_indexed <= 1500);
	CHECK(m.reclaims > 10);
	/* The youngest is there, as ever. */
	collect(n, trace_id(19999), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	writer_close(&w);
	bsn_free(n);

	/* Of active segments nothing can be reclaimed: then runs are lost, and
	 * whoever asks is told. */
	config.index_traces = 100;
	config.tombstones = 10;
	n = test_node(&config);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 300; i++)
		CHECK(w_trace(&t, trace_id(i), 100, now));
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.traces_indexed, 100);
	CHECK(m.runs_lost >= 200);
	for (uint32_t i = 0; i < 300; i++) {
		uint32_t flags = flags_of(n, trace_id(i), now);

		if (i >= 100)
			CHECK(flags &
			      (BSN_SLICE_MAYBE_LOSSY | BSN_SLICE_LOSSY));
	}
	writer_close(&w);
	bsn_free(n);
}

static void store_full(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_event e;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	uint32_t held = 0, full = 0, refused = 0, events = 0;

	config.store_bytes = 1 << 20;
	n = test_node(&config);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 45; i++) {
		CHECK(w_trace(&t, trace_id(i), 20000, now));
		bsn_poll(n, now);
	}
	for (uint32_t i = 0; i < 45; i++) {
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "t", now, &s),
			 0);
		held += s.flags == BSN_SLICE_HELD;
		full += !!(s.flags & BSN_SLICE_STORE_FULL);
	}
	CHECK(held > 30 && held < 45);
	CHECK_EQ(held + full, 45);
	for (uint32_t i = 0; i < 1000; i++)
		refused += bsn_collect(n, trace_id(1000 + i), trace_id(1), "t",
				       now, &s) == -28;
	CHECK(refused > 0);
	check_invariants(n);
	while (bsn_events(n, &e, 1))
		events += e.kind == BSN_EVENT_STORE_FULL;
	CHECK_EQ(events, full);
	/* Room again: what comes later is copied again. */
	for (uint32_t i = 0; i < 30; i++)
		CHECK_EQ(bsn_slice_release(n, trace_id(i), true, now), 0);
	CHECK(w_trace(&t, trace_id(44), 20000, now));
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, trace_id(44), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_STORE_FULL);
	bsn_get_metrics(n, &m);
	CHECK(m.slices >= 15);
	writer_close(&w);
	bsn_free(n);
}

static void memory_moves_between_processes(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[8];
	struct bsn_metrics m;
	struct writer w[2];
	struct wthread t[2];
	uint64_t now = START;
	uint32_t drained = 0;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	now = fill(n, &t[0], 0, 200, 30000, now);
	now = fill(n, &t[1], 1000, 200, 30000, now);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.payload_bytes_lost, 0);
	CHECK(m.sealed_bytes > 1 << 20);
	/* A process that is gone keeps its data, until it is the oldest. */
	CHECK_EQ(bsn_client_exited(n, w[1].number, now), 0);
	now = fill(n, &t[0], 2000, 20, 30000, now);
	collect(n, trace_id(1199), now, &(struct bsn_slice){0});
	decode_slice(n, trace_id(1199), &d);
	CHECK_EQ(d.records, 1);
	while (bsn_events(n, e, 1))
		CHECK(e[0].kind != BSN_EVENT_CLIENT_DRAINED);
	now = fill(n, &t[0], 3000, 200, 30000, now);
	while (bsn_events(n, e, 1)) {
		if (e[0].kind != BSN_EVENT_CLIENT_DRAINED)
			continue;
		CHECK_EQ(e[0].client, w[1].number);
		drained++;
	}
	CHECK_EQ(drained, 1);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.clients, 1);
	/* Counted on, over its end. */
	CHECK_EQ(bsn_client_exited(n, w[1].number, now), -2);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

int main(void)
{
	RUN(oldest_goes_first_over_arenas);
	RUN(open_traces_get_a_second_chance);
	RUN(big_runs_are_kept_in_parts);
	RUN(evicts_whole_traces);
	RUN(tombstones_that_matter_stay);
	RUN(keep_arena_full);
	RUN(index_full);
	RUN(store_full);
	RUN(memory_moves_between_processes);
	free(d.bytes);
	return 0;
}
