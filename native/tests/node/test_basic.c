/* SPDX-License-Identifier: Apache-2.0 */
/* Write, index, collect, read: the way of the data, and what adds to it. */
#include <errno.h>

#include "writer.h"

static struct decoded d;

static void collects_what_was_written(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct writer w;
	struct wthread t;
	struct bsn_slice s;
	struct bsn_metrics m;
	struct bs_piece_process process;
	struct bs_clock_pair pair;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 1000; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START + i));
	CHECK_EQ(bsn_poll(n, START + MS), 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.runs_drained, 1000);
	CHECK_EQ(m.traces_indexed, 1000);
	CHECK_EQ(m.corrupt, 0);
	collect(n, trace_id(7), START + MS, &s);
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
	CHECK_EQ(d.pieces[2].bytes, 120);
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
	writer_close(&w);
	bsn_free(n);
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
	struct bsn *n = test_node(&config);
	struct bsn_event events[8];
	struct bsn_slice s;
	struct writer w;
	struct wthread t;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(bsn_poll(n, START), 1);
	CHECK_EQ(bsn_events(n, events, 8), 1);
	CHECK_EQ(events[0].kind, BSN_EVENT_SLICE_CHANGED);
	CHECK_EQ(bsn_poll(n, START), 0);

	/* An open run, as it grows. */
	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 1000));
	w_record(&t, BS_RECORD_DATA, "abc", 3, START);
	CHECK_EQ(bsn_poll(n, START + MS), 1);
	CHECK_EQ(bsn_events(n, events, 8), 1);
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
	CHECK_EQ(d.pieces[3].from, 24);
	CHECK_EQ(d.pieces[4].from, 72);
	CHECK_EQ(d.pieces[4].flags, BS_RUN_FIRST | BS_RUN_LAST);
	CHECK_EQ(d.pieces[4].bytes, 0);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	writer_close(&w);
	bsn_free(n);
}

static void names_other_nodes(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bs_hop hop = {.node_id = 77, .span_id = 1};
	uint64_t crumb[2] = {55, 0x61};

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
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
	writer_close(&w);
	bsn_free(n);
}

static void trims_and_releases(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s, all[4];
	struct bsn_metrics before, after;
	struct writer w;
	struct wthread t;
	uint8_t whole[70000], part[70000];
	uint64_t cursor = 0;
	int64_t bytes;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
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

	/* Abandoned ones are remembered as that. */
	CHECK(w_trace(&t, trace_id(2), 100, START));
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(bsn_slice_release(n, trace_id(2), true, START), 0);
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_ABANDONED);
	CHECK_EQ(s.bytes, 0);
	writer_close(&w);
	bsn_free(n);
}

static void triggers_arrive(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[4];
	struct bsn_metrics m;
	struct writer w;

	writer_attach(&w, n, START);
	w_trigger(&w, trace_id(3), "slow", START + 5);
	w_trigger(&w, trace_id(4), "Not a name", START + 5);
	CHECK_EQ(bsn_wait(n, -1), 1);
	CHECK_EQ(bsn_poll(n, START + MS), 1);
	CHECK_EQ(bsn_events(n, e, 4), 1);
	CHECK_EQ(e[0].kind, BSN_EVENT_TRIGGER);
	CHECK_EQ(e[0].client, w.number);
	CHECK_EQ(e[0].time_ns, START + 5);
	CHECK_EQ(e[0].id.lo, trace_id(3).lo);
	CHECK(!strcmp(e[0].trigger, "slow"));
	CHECK(!strcmp(e[0].why, "because"));
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 1);
	CHECK_EQ(m.triggers, 1);

	/* Claimed and never committed: skipped after 100 ms, not before. */
	w.context->trigger_head++;
	w_trigger(&w, trace_id(5), "slow", START + MS);
	CHECK_EQ(bsn_poll(n, START + 2 * MS), 0);
	CHECK_EQ(bsn_poll(n, START + 101 * MS), 0);
	CHECK_EQ(bsn_poll(n, START + 102 * MS), 1);
	CHECK_EQ(bsn_events(n, e, 4), 1);
	CHECK_EQ(e[0].id.lo, trace_id(5).lo);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.cells_skipped, 1);
	/* Its late commit does not stop the queue. */
	store_release(&w.context->cells[2].seq, 3);
	for (uint32_t i = 0; i < 3 * BS_TRIGGER_CELLS; i++) {
		uint32_t p = w.context->trigger_head;

		bsn_poll(n, START + 103 * MS);
		if (load_acquire(&w.context->cells[p % BS_TRIGGER_CELLS].seq) ==
		    p)
			w_trigger(&w, trace_id(6), "slow", START);
		bsn_poll(n, START + 103 * MS);
		while (bsn_events(n, e, 4))
			;
		bsn_events_done(n);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers, 2 + 3 * BS_TRIGGER_CELLS);
	writer_close(&w);
	bsn_free(n);
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
	REFUSES(tombstones, 0);
	REFUSES(ticks_per_s, 0);
	REFUSES(index_runs, 1);
	REFUSES(index_traces, 1);
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
	uint8_t payload[1000] = {0};

	config.trace_bytes_max = 65536;
	n = test_node(&config);
	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
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
	writer_close(&w);
	bsn_free(n);
}

static void peeks_without_collecting(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint8_t buffer[4096];

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
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
	writer_close(&w);
	bsn_free(n);
}

/* While the node is away a thread fills its ring, and then whole segments that
 * no news names. They are found, and come back into use. */
static void finds_segments_that_no_news_names(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n;
	struct writer w;
	struct wthread t;
	struct bsn_slice s;
	struct bsn_metrics m;
	uint64_t written = 0;
	uint64_t now = START;

	/* For traces as small as these are. */
	config.index_traces = config.index_runs = 1 << 18;
	n = test_node(&config);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (int round = 0; round < 300; round++) {
		uint32_t unannounced = w_area(&w, 0)->runs_unannounced;
		uint64_t first = written;
		uint32_t segments = 0;
		uint32_t segment = t.segment;

		while (w_trace(&t, trace_id(written), 8, now)) {
			written++;
			segments += t.segment != segment;
			segment = t.segment;
		}
		CHECK(segments >= 4);
		CHECK(w_area(&w, 0)->runs_unannounced - unannounced >
		      (written - first) / segments);
		now += MS;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK(m.runs_drained + m.runs_walked >= written);
		CHECK_EQ(m.corrupt, 0);
		CHECK(m.active_bytes <= SEG);
		/* In a segment that was announced, in one that was not. */
		collect(n, trace_id(first + 1), now, &s);
		CHECK_EQ(s.flags & ~BSN_SLICE_MAYBE_LOSSY, BSN_SLICE_HELD);
		collect(n, trace_id(written - 1), now, &s);
		CHECK_EQ(s.flags & ~BSN_SLICE_MAYBE_LOSSY, BSN_SLICE_HELD);
		bsn_slice_release(n, trace_id(first + 1), false, now);
		bsn_slice_release(n, trace_id(written - 1), false, now);
	}
	CHECK(m.reclaims > 300);
	check_invariants(n);
	writer_close(&w);
	bsn_free(n);
}

/* Its threads may all begin at once; if they do not, others have the memory. */
static void a_new_process_has_a_large_stock(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct wthread t[32];
	struct writer w;

	writer_attach(&w, n, START);
	for (uint32_t i = 0; i < 32; i++) {
		t[i] = writer_thread(&w, i);
		CHECK(w_trace(&t[i], trace_id(i), 100, START));
	}
	writer_close(&w);
	writer_attach(&w, n, START);
	for (uint64_t ms = 1; ms <= 4000; ms++)
		bsn_poll(n, START + ms * MS);
	bsn_get_metrics(n, &m);
	/* The first one is still there, and quiet too. */
	CHECK(m.stock_bytes <= 2 * 8 * SEG);
	CHECK(m.stock_bytes >= 2 * 4 * SEG);
	check_invariants(n);
	writer_close(&w);
	bsn_free(n);
}

/* Of the last seconds, of one service or of all, the highest priority first. */
static void finds_what_is_recent(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	struct bs_trace_id ids[100], some[10];
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	uint64_t found;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 100; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START));
	bsn_poll(n, START);
	for (uint32_t i = 100; i < 130; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START + 10 * SECOND));
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 20 * SECOND, "", ids, 100,
			    &found),
		 100);
	CHECK_EQ(found, 130);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "tester", ids,
			    100, &found),
		 30);
	CHECK_EQ(found, 30);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "", some, 10,
			    &found),
		 10);
	CHECK_EQ(found, 30);
	CHECK(!memcmp(some, ids, sizeof(some)));
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "other", ids,
			    100, &found),
		 0);
	collect(n, trace_id(110), START + 10 * SECOND, &s);
	CHECK_EQ(bsn_recent(n, START + 10 * SECOND, 5 * SECOND, "", ids, 100,
			    &found),
		 29);
	/* Nor what was reported, unless it is written to again. */
	CHECK_EQ(bsn_slice_release(n, trace_id(110), false,
				   START + 90 * SECOND),
		 0);
	CHECK_EQ(bsn_recent(n, START + 90 * SECOND, 81 * SECOND, "", ids, 100,
			    &found),
		 29);
	CHECK(w_trace(&t, trace_id(110), 100, START + 91 * SECOND));
	CHECK_EQ(bsn_recent(n, START + 91 * SECOND, 5 * SECOND, "", ids, 100,
			    &found),
		 1);
	CHECK_EQ(ids[0].lo, trace_id(110).lo);
	CHECK_EQ(bsn_recent(n, START, SECOND, "", ids, 0, &found), -EINVAL);
	writer_close(&w);
	bsn_free(n);
}

static uint32_t stock_of(const struct writer *w)
{
	return w_grants(w)->head - w_grants(w)->tail;
}

/* Also of a process that takes one now and then, and is looked at often. */
static void a_first_stock_is_not_for_ever(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint64_t ms = 0; ms <= 5000; ms += 20) {
		if (ms % 200 == 0)
			CHECK(w_take_segment(&t));
		bsn_poll(n, START + ms * MS);
	}
	CHECK(stock_of(&w) <= 10);
	writer_close(&w);
	bsn_free(n);
}

/* However many come at once, or one after the other. */
static void stocks_leave_half_of_the_pool(bool polls_between)
{
	struct bsn_config config = test_config(64 << 20);
	static struct writer w[128];
	uint64_t now = START;
	struct bsn_metrics m;
	struct bsn *n;

	config.clients_max = 128;
	n = test_node(&config);
	for (int i = 0; i < 128; i++) {
		writer_attach(&w[i], n, now);
		now += MS;
		if (polls_between)
			bsn_poll(n, now);
	}
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK(m.stock_bytes <= (32 << 20));
	for (int i = 0; i < 128; i++) {
		CHECK(stock_of(&w[i]) >= 1);
		writer_close(&w[i]);
	}
	check_invariants(n);
	bsn_free(n);
}

static void stocks_are_shared(void)
{
	stocks_leave_half_of_the_pool(false);
	stocks_leave_half_of_the_pool(true);
}

/* What was taken back, the process never touched: it must populate it. */
static void segments_come_back_fresh(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	bool seen[256] = {false};
	uint64_t now = START;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, now);
	for (int i = 0; i < 3000; i++)
		bsn_poll(n, now += MS);
	CHECK(stock_of(&w) <= 8);
	t = writer_thread(&w, 0);
	for (int i = 0; i < 20; i++) {
		const struct bs_grant_ring *ring = w_grants(&w);
		struct bs_grant g =
			ring->entries[ring->tail % BS_GRANT_RING_ENTRIES];

		CHECK(w_take_segment(&t));
		CHECK(g.fresh || seen[g.segment]);
		seen[g.segment] = true;
		bsn_poll(n, now += 10 * MS);
	}
	writer_close(&w);
	bsn_free(n);
}

static void check_sampling(const struct writer *w, uint64_t threshold,
			   uint32_t trusts)
{
	CHECK_EQ(READ_ONCE(w_header(w)->percentage_threshold), threshold);
	CHECK_EQ(READ_ONCE(w_header(w)->trust_incoming), trusts);
}

/* Of those that are attached, of those to come, and after a restart as it is
 * configured then. */
static void sampling_can_change(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct writer w[3];

	writer_attach(&w[0], n, START);
	writer_attach(&w[1], n, START);
	for (int i = 0; i < 2; i++)
		check_sampling(&w[i], UINT64_MAX, 0);
	bsn_set_sampling(n, 12345, true);
	writer_attach(&w[2], n, START);
	for (int i = 0; i < 3; i++)
		check_sampling(&w[i], 12345, 1);
	n = restart(n, &config, w, 3, START + MS);
	for (int i = 0; i < 3; i++)
		check_sampling(&w[i], UINT64_MAX, 0);
	bsn_set_sampling(n, 0, true);
	for (int i = 0; i < 3; i++) {
		check_sampling(&w[i], 0, 1);
		writer_close(&w[i]);
	}
	bsn_free(n);
}

int main(void)
{
	RUN(collects_what_was_written);
	RUN(slices_differ_in_epoch);
	RUN(later_runs_follow);
	RUN(names_other_nodes);
	RUN(trims_and_releases);
	RUN(triggers_arrive);
	RUN(refuses_bad_configurations);
	RUN(cuts_long_traces_on_records);
	RUN(peeks_without_collecting);
	RUN(finds_segments_that_no_news_names);
	RUN(a_new_process_has_a_large_stock);
	RUN(finds_what_is_recent);
	RUN(a_first_stock_is_not_for_ever);
	RUN(stocks_are_shared);
	RUN(segments_come_back_fresh);
	RUN(sampling_can_change);
	free(d.bytes);
	return 0;
}
