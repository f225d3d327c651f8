/* SPDX-License-Identifier: Apache-2.0 */
/* Write, collect, read, release: the way of the data. */
#include <errno.h>

#include "writer.h"

static struct decoded d;
static const uint8_t payload[BS_PAYLOAD_MAX];

static void collects_what_was_written(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct writer w;
	struct wthread t;
	struct bsn_slice s;
	struct bsn_metrics m;
	struct bs_piece_process process;
	struct bs_clock_pair pair;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t i = 0; i < 1000; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START + i));
	CHECK_EQ(bsn_poll(n, START + MS), 0);
	collect(n, trace_id(7), START + MS, &s);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.searches, 1);
	CHECK_EQ(m.passes, 1);
	CHECK_EQ(m.entries_searched, 1000);
	CHECK_EQ(m.false_hits, 0);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	CHECK_EQ(s.n_crumbs, 0);
	decode_slice(n, trace_id(7), &d);
	CHECK_EQ(d.n_pieces, 3);
	CHECK_EQ(d.pieces[0].kind, BS_PIECE_PROCESS);
	CHECK_EQ(d.pieces[1].kind, BS_PIECE_CLOCK);
	CHECK_EQ(d.pieces[2].kind, BS_PIECE_RUN);
	memcpy(&process, d.content[0], sizeof(process));
	CHECK_EQ(process.pid, 1234);
	CHECK(!strcmp(process.service, "tester"));
	memcpy(&pair, d.content[1], sizeof(pair));
	CHECK_EQ(pair.ticks, START);
	CHECK_EQ(pair.realtime_ns, START);
	CHECK_EQ(pair.ticks_per_s, SECOND);
	CHECK_EQ(d.pieces[2].bytes, 112);
	CHECK_EQ(d.pieces[2].client, w.number);
	CHECK_EQ(d.pieces[2].handle, 8);
	CHECK_EQ(d.pieces[2].flags, BS_RUN_FIRST | BS_RUN_LAST);
	CHECK_EQ(d.records, 1);

	/* Idempotent. */
	collect(n, trace_id(7), START + 2 * MS, &s);
	CHECK_EQ(s.bytes, d.n_bytes);
	CHECK_EQ(s.collected_ns, START + MS);
	/* Never seen: an answer, not held, nothing lost. */
	collect(n, trace_id(5000), START + MS, &s);
	CHECK_EQ(s.flags, 0);
	CHECK_EQ(s.bytes, 0);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* Collected again, even in the same instant or by another store, a trace has
 * another slice. */
static void slices_differ_in_epoch(void)
{
	struct bsn_config config = test_config(8 << 20);
	uint64_t first = 0;

	for (int store = 0; store < 2; store++) {
		struct bsn *n = test_node(&config);
		struct bsn_slice s, again;

		collect(n, trace_id(1), START, &s);
		CHECK(s.epoch > 0 && s.epoch <= INT64_MAX);
		CHECK(s.epoch != first);
		first = s.epoch;
		collect(n, trace_id(1), START + MS, &again);
		CHECK_EQ(again.epoch, s.epoch);
		CHECK_EQ(bsn_slice_release(n, trace_id(1), false, START), 0);
		collect(n, trace_id(1), START, &again);
		CHECK(again.epoch != s.epoch);
		bsn_free(n);
	}
}

static void later_runs_follow(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_event events[8];
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	/* What it finds it tells, and no event does so again. */
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(bsn_poll(n, START), 0);

	/* An open run, as it grows. */
	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 1000));
	w_record(&t, BS_RECORD_DATA, "abc", 3, START);
	CHECK_EQ(bsn_poll(n, START + MS), 1);
	CHECK_EQ(bsn_events(n, events, 8), 1);
	CHECK_EQ(events[0].kind, BSN_EVENT_SLICE_CHANGED);
	CHECK_EQ(events[0].id.lo, trace_id(1).lo);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	CHECK_EQ(bsn_poll(n, START + MS), 0);
	w_record(&t, BS_RECORD_DATA, "def", 3, START);
	w_record(&t, BS_RECORD_DATA, "ghi", 3, START);
	CHECK_EQ(bsn_poll(n, START + MS), 1);
	w_end(&t, BS_RUN_LAST);
	CHECK_EQ(bsn_poll(n, START + MS), 1);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 3);
	CHECK_EQ(d.by_kind[BS_PIECE_RUN], 3);
	CHECK_EQ(d.pieces[2].from, 0);
	CHECK_EQ(d.pieces[3].from, 16);
	CHECK_EQ(d.pieces[4].from, 48);
	CHECK_EQ(d.pieces[4].flags, BS_RUN_FIRST | BS_RUN_LAST);
	CHECK_EQ(d.pieces[4].bytes, 0);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	free_with_writer(n, &w);
}

/* An entry is there before the first record. What stands in a run that is open
 * belongs to the answer. */
static void open_runs_are_found(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(9), 100, START));
	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 1000));
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 1);
	CHECK_EQ(bsn_slice_release(n, trace_id(1), false, START), 0);

	w_record(&t, BS_RECORD_DATA, "abc", 3, START);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	/* As far as it is; the rest follows. */
	w_record(&t, BS_RECORD_DATA, "def", 3, START);
	bsn_poll(n, START);
	w_record(&t, BS_RECORD_DATA, "ghi", 3, START);
	w_end(&t, BS_RUN_LAST);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 3);
	CHECK_EQ(d.by_kind[BS_PIECE_RUN], 3);
	CHECK_EQ(check_order(&d), 1);

	/* Collected after it was closed, or while its segment is left. */
	CHECK_EQ(bsn_slice_release(n, trace_id(1), false, START), 0);
	collect(n, trace_id(1), START, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 3);
	CHECK_EQ(d.by_kind[BS_PIECE_RUN], 1);
	CHECK_EQ(s.open_handles, 0);
	CHECK(w_begin(&t, trace_id(2), 10, 0, BS_RUN_FIRST, 1000));
	w_record(&t, BS_RECORD_DATA, "abc", 3, START);
	collect(n, trace_id(2), START, &s);
	w_record(&t, BS_RECORD_DATA, "def", 3, START);
	w_end(&t, BS_RUN_LAST);
	CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	decode_slice(n, trace_id(2), &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(check_order(&d), 1);
	CHECK_EQ(bsn_slice_info(n, trace_id(2), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	free_with_writer(n, &w);
}

/* A run that stays open, and says nothing new, grows no slice. */
static void an_open_run_is_told_once(bool lossy)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_event e[8];
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t bytes;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 9, 1, lossy ? BS_RUN_LOSSY : 0, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	collect(n, trace_id(1), START, &s);
	if (!lossy) {
		/* Not of records. */
		memset((uint8_t *)(t.run + 1) + 16, 0xff, 16);
		w_commit(&t, 32);
		bsn_poll(n, START);
		CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
		CHECK(s.flags & BSN_SLICE_CORRUPT);
	}
	bytes = s.bytes;
	bsn_events(n, e, 8);
	for (uint32_t i = 0; i < 100; i++) {
		CHECK_EQ(bsn_poll(n, START + i * MS), 0);
		CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
		CHECK_EQ(s.bytes, bytes);
	}
	free_with_writer(n, &w);
}

static void open_runs_are_told_once(void)
{
	an_open_run_is_told_once(true);
	an_open_run_is_told_once(false);
}

/* However it was reached: while nobody looked, or poll by poll. */
static void is_whole_over_segments_and_processes(bool polls_between)
{
	enum {
		PROCESSES = 3,
		THREADS = 2,
		RUNS = 12
	};
	struct bsn_config config = test_config(32 << 20);
	struct bsn *n;
	struct writer w[PROCESSES];
	struct wthread t[PROCESSES][THREADS];
	struct bsn_slice s;
	uint64_t other = 1000;

	config.trace_bytes_max = 4 << 20;
	n = test_node(&config);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		writer_attach(&w[i], n, START);
		for (uint32_t k = 0; k < THREADS; k++) {
			t[i][k] = writer_thread(&w[i], k);
			w_show(&t[i][k], ++t[i][k].handle);
		}
	}
	for (uint32_t r = 0; r < RUNS; r++) {
		for (uint32_t i = 0; i < PROCESSES * THREADS; i++) {
			struct wthread *at = &t[i / THREADS][i % THREADS];
			uint32_t own = w_area(at->w, at->slot)->own_handle;

			CHECK(w_begin(at, trace_id(1), own, r,
				      r ? 0 : BS_RUN_FIRST, 20000));
			w_record(at, BS_RECORD_DATA, payload, 10000, START + r);
			w_record(at, BS_RECORD_DATA, payload, 10000, START + r);
			/* The last stays open. */
			if (r + 1 == RUNS)
				continue;
			w_end(at, 0);
			CHECK(w_trace(at, trace_id(other++), 30000, START));
		}
		if (polls_between)
			bsn_poll(n, START + r);
	}
	collect(n, trace_id(1), START + MS, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, PROCESSES * THREADS);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2 * RUNS * PROCESSES * THREADS);
	CHECK_EQ(d.by_kind[BS_PIECE_PROCESS], PROCESSES);
	CHECK_EQ(check_order(&d), PROCESSES * THREADS);

	/* It goes on, into further segments. */
	for (uint32_t i = 0; i < PROCESSES * THREADS; i++) {
		struct wthread *at = &t[i / THREADS][i % THREADS];
		uint32_t own = w_area(at->w, at->slot)->own_handle;

		w_record(at, BS_RECORD_DATA, "more", 5, START + MS);
		w_end(at, 0);
		CHECK(w_begin(at, trace_id(1), own, RUNS, 0, 60000));
		w_record(at, BS_RECORD_DATA, payload, 30000, START + MS);
		w_end(at, BS_RUN_LAST);
		w_show(at, 0);
	}
	bsn_poll(n, START + 2 * MS);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2 * (RUNS + 1) * PROCESSES * THREADS);
	CHECK_EQ(check_order(&d), PROCESSES * THREADS);
	check_invariants(n);
	bsn_free(n);
	for (uint32_t i = 0; i < PROCESSES; i++)
		writer_close(&w[i]);
}

static void is_whole_over_segments(void)
{
	is_whole_over_segments_and_processes(false);
	is_whole_over_segments_and_processes(true);
}

static void names_other_nodes(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bs_hop hop = {.node_id = 77, .span_id = 1};
	uint64_t crumb[2] = {55, 0x61};
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 4000));
	w_record(&t, BS_RECORD_HOP_IN, &hop, sizeof(hop), START);
	w_record(&t, BS_RECORD_BREADCRUMB, crumb, 9, START);
	w_record(&t, BS_RECORD_BREADCRUMB, crumb, 9, START);
	w_record(&t, BS_RECORD_BREADCRUMB, crumb, 7, START); /* too short */
	hop.node_id = w_header(&w)->node_id;
	w_record(&t, BS_RECORD_HOP_OUT, &hop, sizeof(hop), START);
	w_record(&t, BS_RECORD_HOP_IN, &hop, sizeof(hop), START);
	w_end(&t, BS_RUN_LAST);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.n_crumbs, 2);
	CHECK_EQ(s.crumbs[0], 77);
	CHECK_EQ(s.crumbs[1], 55);

	/* Ten thousand of them. */
	for (uint64_t i = 0; i < 10000; i++) {
		crumb[0] = 1000 + i;
		CHECK(w_begin(&t, trace_id(2), 10, (uint32_t)i, 0, 40));
		w_record(&t, BS_RECORD_BREADCRUMB, crumb, 16, START);
		w_end(&t, 0);
		if (i % 1000 == 0)
			bsn_poll(n, START);
	}
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.n_crumbs, BSN_CRUMBS_MAX);
	CHECK(s.flags & BSN_SLICE_CRUMBS_CUT);
	free_with_writer(n, &w);
}

static void trims_and_releases(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s, all[4];
	struct bsn_metrics before, after;
	struct writer w;
	struct wthread t;
	uint8_t whole[70000], part[70000];
	uint64_t cursor = 0;
	int64_t bytes;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 60000));
	for (uint32_t i = 0; i < 50; i++)
		w_record(&t, BS_RECORD_DATA, whole, 1000, START);
	collect(n, trace_id(1), START, &s);
	CHECK(s.bytes > 50000);
	bytes = bsn_slice_read(n, trace_id(1), 0, whole, sizeof(whole));
	CHECK_EQ(bytes, s.bytes);
	bsn_get_metrics(n, &before);
	CHECK_EQ(bsn_slice_trim(n, trace_id(1), 30001), 0);
	CHECK_EQ(bsn_slice_trim(n, trace_id(1), s.bytes + 1), -EINVAL);
	bsn_get_metrics(n, &after);
	CHECK(before.store_used_bytes - after.store_used_bytes >= 28000);
	CHECK_EQ(bsn_slice_read(n, trace_id(1), 30000, part, 10), -ESTALE);
	/* Resumed, and grown meanwhile. */
	w_record(&t, BS_RECORD_DATA, whole, 1000, START);
	w_end(&t, BS_RUN_LAST);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.trimmed_bytes, 30001);
	CHECK(s.bytes > (uint64_t)bytes);
	CHECK_EQ(bsn_slice_read(n, trace_id(1), 30001, part, sizeof(part)),
		 s.bytes - 30001);
	CHECK(!memcmp(part, whole + 30001, (size_t)bytes - 30001));
	CHECK_EQ(bsn_slices(n, &cursor, all, 4), 1);
	CHECK_EQ(bsn_slices(n, &cursor, all, 4), 0);
	CHECK_EQ(bsn_slice_release(n, trace_id(1), false, START), 0);
	CHECK_EQ(bsn_slice_release(n, trace_id(1), false, START), -ENOENT);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), -ENOENT);
	bsn_get_metrics(n, &after);
	CHECK_EQ(after.slices, 0);
	CHECK_EQ(after.store_used_bytes, 2048);

	free_with_writer(n, &w);
}

/* What is left of it in the pool is found again, as another slice. If it was
 * given up, that is said; if it was reported, it was no loss. */
static void what_was_released_is_collected_anew(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s, again;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t abandoned = 0; abandoned < 2; abandoned++) {
		struct bs_trace_id id = trace_id(abandoned);
		uint32_t flags = abandoned ? BSN_SLICE_ABANDONED : 0;

		CHECK(w_trace(&t, id, 100, START));
		collect(n, id, START, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK_EQ(bsn_slice_release(n, id, abandoned, START), 0);
		CHECK_EQ(flags_of(n, id, START), flags);
		collect(n, id, START, &again);
		CHECK_EQ(again.flags, BSN_SLICE_HELD | flags);
		CHECK_EQ(again.bytes, s.bytes);
		CHECK(again.epoch != s.epoch);
		/* Nothing was there. */
		id = trace_id(10 + abandoned);
		collect(n, id, START, &s);
		CHECK_EQ(s.flags, 0);
		CHECK_EQ(bsn_slice_release(n, id, abandoned, START), 0);
		CHECK_EQ(flags_of(n, id, START), flags);
	}
	/* Never seen. */
	CHECK_EQ(flags_of(n, trace_id(100), START), 0);
	free_with_writer(n, &w);
}

/* Of a slice that is reported in full only the mark is left, also while it grows
 * and is reported again, and over a change of daemons. */
static void what_is_reported_takes_a_block(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_metrics metrics;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint8_t record[16], got[64];
	struct bsn *n = node_with_writer(&config, &w, &t);
	uint64_t reported = 0;

	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 60000));
	bsn_poll(n, START);
	collect(n, trace_id(1), START, &s);
	for (int i = 0; i < 400; i++) {
		memset(record, i, sizeof(record));
		w_record(&t, BS_RECORD_DATA, record, sizeof(record), START);
		bsn_poll(n, START);
		CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
		CHECK(s.bytes > reported);
		CHECK(s.bytes - reported <= sizeof(got) || i == 0);
		if (i) {
			int64_t bytes = bsn_slice_read(n, trace_id(1), reported,
						       got, sizeof(got));

			CHECK_EQ(bytes, s.bytes - reported);
			CHECK(!memcmp(got + bytes - sizeof(record), record,
				      sizeof(record)));
		}
		CHECK_EQ(bsn_slice_trim(n, trace_id(1), s.bytes), 0);
		reported = s.bytes;
		bsn_get_metrics(n, &metrics);
		CHECK_EQ(metrics.store_used_bytes, 2 * 2048);
	}
	CHECK(reported > 3 * 2048);
	free_with_writer(n, &w);
}

static void refuses_bad_configurations(void)
{
	struct bsn_config good = test_config(8 << 20), bad;
	struct bsn *n;
	char message[256];

#define REFUSES(field, value)                                                  \
	do {                                                                   \
		bad = good;                                                    \
		bad.field = (value);                                           \
		message[0] = 0;                                                \
		CHECK_EQ(bsn_new(&bad, &n, message, sizeof(message)),          \
			 -EINVAL);                                             \
		CHECK(strstr(message, #field));                                \
		CHECK_EQ(bsn_new(&bad, &n, NULL, 0), -EINVAL);                 \
	} while (0)
	REFUSES(pool_bytes, (4 << 20) - 1);
	REFUSES(pool_bytes, (1ull << 39) + 1);
	REFUSES(arena_bytes, good.pool_bytes + SEG);
	REFUSES(arena_bytes, SEG + 1);
	REFUSES(store_bytes, 1000);
	REFUSES(trace_bytes_max, 1000);
	REFUSES(reclaim_percent, 0);
	REFUSES(reclaim_percent, 101);
	REFUSES(clients_max, 0);
	REFUSES(tombstones, (1u << 30) + 1);
	REFUSES(ticks_per_s, 0);
	bad = good;
	bad.node_name[0] = 0;
	CHECK_EQ(bsn_new(&bad, &n, message, sizeof(message)), -EINVAL);
	CHECK(strstr(message, "node_name"));
}

static void cuts_long_traces_on_records(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;

	config.trace_bytes_max = 65536;
	n = node_with_writer(&config, &w, &t);
	for (uint32_t k = 0; k < 3; k++) {
		CHECK(w_begin(&t, trace_id(1), 9, k, k ? 0 : BS_RUN_FIRST,
			      41000));
		for (uint32_t i = 0; i < 40; i++)
			w_record(&t, BS_RECORD_DATA, payload, 1000, START);
		w_end(&t, k == 2 ? BS_RUN_LAST : 0);
		bsn_poll(n, START);
	}
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_TRUNCATED);
	CHECK(s.bytes <= 65536 && s.bytes > 65536 - 1100);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK(d.records >= 60 && d.records < 66);
	free_with_writer(n, &w);
}

static void peeks_without_collecting(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint8_t buffer[4096];
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 1000));
	w_record(&t, BS_RECORD_DATA, "abc", 3, START);
	d.bytes = realloc(d.bytes, sizeof(buffer));
	d.n_bytes =
		bsn_peek(n, trace_id(1), START, d.bytes, sizeof(buffer), &s);
	decode(&d);
	CHECK_EQ(d.records, 1);
	CHECK_EQ(s.open_handles, 1);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.slices, 0);
	CHECK_EQ(bsn_peek(n, trace_id(2), START, buffer, sizeof(buffer), &s),
		 0);
	CHECK_EQ(s.flags, 0);
	/* Cut where the buffer ends, on a piece. */
	d.n_bytes = bsn_peek(n, trace_id(1), START, d.bytes, 160, &s);
	CHECK(d.n_bytes <= 160);
	decode(&d);
	/* Looking changed nothing. */
	w_end(&t, BS_RUN_LAST);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	free_with_writer(n, &w);
}

/* For the flags alone: nothing goes anywhere, least of all into the store. */
static void peeks_without_a_buffer(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_metrics before, after;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(1), 3000, START));
	bsn_get_metrics(n, &before);
	CHECK_EQ(bsn_peek(n, trace_id(1), START, NULL, 0, &s), 0);
	CHECK_EQ(s.flags, 0);
	CHECK_EQ(bsn_peek(n, trace_id(1), START, NULL, 1, &s), -EINVAL);
	bsn_get_metrics(n, &after);
	CHECK_EQ(after.store_used_bytes, before.store_used_bytes);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(bsn_peek(n, trace_id(1), START, NULL, 0, &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	free_with_writer(n, &w);
}

/* A process that was quiet is heard again before a trace is taken for over. */
static void quiet_processes_are_watched(void)
{
	struct bsn_config config = test_config(8 << 20);
	uint64_t now = START + 10 * SECOND;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	uint64_t bytes;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(1), 100, START));
	collect(n, trace_id(1), START, &s);
	bsn_poll(n, now);
	for (uint32_t round = 0; round < 3; round++) {
		CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
		bytes = s.bytes;
		CHECK(w_trace(&t, trace_id(1), 100, now));
		/* As often as the daemon looks then. */
		for (uint32_t polls = 0; s.bytes == bytes; polls++) {
			CHECK(polls < 5);
			now += 20 * MS;
			bsn_poll(n, now);
			CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
			/* Then it is not quiet any more. */
			CHECK(s.bytes > bytes || round == 0);
		}
	}
	free_with_writer(n, &w);
}

/* It is heard later than others, and nothing of it is missed. A trace that it has
 * open is open until its end is met; what is sealed, parked or left before is met
 * then; and a search looks at all. */
enum after_silence {
	SEALS,
	PARKS,
	EXITS,
	IS_SEARCHED,
	AFTER_SILENCE
};

static void written_after_silence(enum after_silence next)
{
	struct bsn_config config = test_config(8 << 20);
	uint64_t now = START + 10 * SECOND;
	struct wthread t, place;
	struct bsn_slice s;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 1, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	collect(n, trace_id(1), START, &s);
	bsn_poll(n, now);
	w_record(&t, BS_RECORD_DATA, "b", 1, now);
	w_end(&t, BS_RUN_LAST);
	CHECK(w_trace(&t, trace_id(2), 100, now));
	bsn_poll(n, now += 20 * MS);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 1);
	if (next == SEALS)
		CHECK(w_take_segment(&t));
	else if (next == PARKS)
		w_park(&t, &place);
	else if (next == EXITS)
		CHECK_EQ(bsn_client_exited(n, w.number, now), 0);
	else
		collect(n, trace_id(2), now, &s);
	bsn_poll(n, now += 20 * MS);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], 0);
	collect(n, trace_id(2), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	free_with_writer(n, &w);
}

static void nothing_is_missed_after_silence(void)
{
	for (uint32_t next = 0; next < AFTER_SILENCE; next++)
		written_after_silence(next);
}

int main(void)
{
	RUN(collects_what_was_written);
	RUN(slices_differ_in_epoch);
	RUN(later_runs_follow);
	RUN(open_runs_are_found);
	RUN(open_runs_are_told_once);
	RUN(is_whole_over_segments);
	RUN(what_was_released_is_collected_anew);
	RUN(names_other_nodes);
	RUN(trims_and_releases);
	RUN(what_is_reported_takes_a_block);
	RUN(refuses_bad_configurations);
	RUN(cuts_long_traces_on_records);
	RUN(peeks_without_collecting);
	RUN(peeks_without_a_buffer);
	RUN(quiet_processes_are_watched);
	RUN(nothing_is_missed_after_silence);
	free(d.bytes);
	return 0;
}
