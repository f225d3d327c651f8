/* SPDX-License-Identifier: Apache-2.0 */
/* The budget, the order of reclaim, second chances, and what is said of what is gone. */
#include "node/internal.h"
#include "writer.h"

static struct decoded d;
static const uint8_t payload[BS_PAYLOAD_MAX];

/* Handles of tests, that no w_trace() uses. */
#define HANDLE 0x10000u
#define FREE 8u /* segments of a small pool that are left free */

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
		/* While something can be reclaimed. */
		CHECK(m.pool_used_bytes <= m.pool_bytes - FREE * SEG);
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
		CHECK(m.pool_used_bytes <= m.pool_bytes - FREE * SEG);
		check_invariants(n);
	}
	CHECK(m.reclaims > 0);
	CHECK(m.horizon_ns > 50 * MS && m.horizon_ns < 150 * MS);
	CHECK_EQ(m.second_chances, 0);
	CHECK_EQ(m.gone, m.runs_evicted);
	CHECK_EQ(m.gone_forgotten, 0);
	/* Whoever wrote: what is gone is older than what is there. */
	gone = 0;
	for (uint64_t i = 0; i < 400; i++) {
		uint32_t flags = flags_of(n, trace_id(i), now);

		CHECK(flags == EVICTED_BY_FINGERPRINT || flags == 0);
		if (flags == EVICTED_BY_FINGERPRINT)
			gone++;
		else
			held = true;
		/* Both of a segment go together: two by two, interleaved. */
		CHECK(!held || flags != EVICTED_BY_FINGERPRINT || i < gone + 4);
	}
	CHECK_EQ(gone, m.runs_evicted);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* What one that writes little has lies in its stock for long before it is written. */
static void the_horizon_is_what_is_there(void)
{
	enum {
		ROUNDS = 1000,
		SLOW = 40 /* as seldom does the other one write */
	};
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct writer w[2];
	struct wthread t[2];
	uint64_t now = START;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	for (uint64_t i = 0; i < ROUNDS; i++) {
		uint64_t within, held = 0;

		now += MS;
		CHECK(w_trace(&t[0], trace_id(i), 30000, now));
		if (i % SLOW == 0)
			CHECK(w_trace(&t[1], trace_id(ROUNDS + i), 30000, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		if (!m.reclaims) {
			CHECK_EQ(m.horizon_ns, 0);
			continue;
		}
		within = m.horizon_ns / MS;
		for (uint64_t age = 0; age < within; age++) {
			CHECK_EQ(flags_of(n, trace_id(i - age), now), 0);
			if ((i - age) % SLOW == 0)
				CHECK_EQ(flags_of(n, trace_id(ROUNDS + i - age),
						  now),
					 0);
		}
		while (flags_of(n, trace_id(i - held), now) == 0)
			held++;
		/* A segment of two, that is full before it is seen. */
		CHECK(held <= within + 3);
	}
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* Over and over, as long as the handle is open: that of the thread-local trace,
 * those of bs_open(). */
static void open_handles_are_kept(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	enum {
		OWN,
		LISTED,
		CLOSED, /* whole */
		LEFT,	/* begun, and in neither place */
		TRACES
	};

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < TRACES; i++) {
		CHECK(w_begin(&t, trace_id(i), HANDLE + i, 0, BS_RUN_FIRST,
			      5000));
		w_record(&t, BS_RECORD_DATA, "begin", 6, now);
		w_end(&t, i == CLOSED ? BS_RUN_LAST : 0);
	}
	w_show(&t, HANDLE + OWN);
	w_list(&w, HANDLE + LISTED, true);
	/* Others are open for a while: they push them through the keep arena. */
	for (uint32_t i = 0; i < 800; i++) {
		CHECK(w_begin(&t, trace_id(2000 + i), HANDLE + 10 + i, 0,
			      BS_RUN_FIRST, 3000));
		w_record(&t, BS_RECORD_DATA, payload, 2000, now);
		w_end(&t, 0);
		w_list(&w, HANDLE + 10 + i, true);
		if (i >= 120)
			w_list(&w, HANDLE + 10 + i - 120, false);
		now = fill(n, &t, 1000 + i, 1, 30000, now);
	}
	bsn_get_metrics(n, &m);
	/* Many horizons: of 40 segments, between the threshold and the stock. */
	CHECK(m.reclaims > 300);
	CHECK(m.second_chances > 600);
	CHECK(m.keep_bytes > 0);
	for (uint32_t i = 0; i < TRACES; i++)
		CHECK_EQ(flags_of(n, trace_id(i), now),
			 i <= LISTED ? 0 : EVICTED_BY_FINGERPRINT);

	/* They go on, and are whole. */
	for (uint32_t i = 0; i <= LISTED; i++) {
		CHECK(w_begin(&t, trace_id(i), HANDLE + i, 1, 0, 5000));
		w_record(&t, BS_RECORD_DATA, "end", 4, now);
		w_end(&t, BS_RUN_LAST);
	}
	w_show(&t, 0);
	w_list(&w, HANDLE + LISTED, false);
	for (uint32_t i = 0; i < 800; i++)
		w_list(&w, HANDLE + 10 + i, false);
	for (uint32_t i = 0; i <= LISTED; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK_EQ(s.open_handles, 0);
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, 2);
		CHECK_EQ(check_order(&d), 1);
		CHECK(!memcmp(d.content[d.n_pieces - 1] +
				      sizeof(struct bs_record_header),
			      "end", 4));
		CHECK_EQ(bsn_slice_release(n, trace_id(i), false, now), 0);
	}
	/* Closed now: they go, and the memory comes back. */
	now = fill(n, &t, 5000, 200, 30000, now);
	for (uint32_t i = 0; i <= LISTED; i++)
		CHECK_EQ(flags_of(n, trace_id(i), now), EVICTED_BY_FINGERPRINT);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.keep_bytes, SEG);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* A handle is open as long as its process lives. */
static void what_the_dead_had_open_goes(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct writer w[2];
	struct wthread t[2];
	uint64_t now = START;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	CHECK(w_begin(&t[0], trace_id(1), HANDLE, 0, BS_RUN_FIRST, 100));
	w_end(&t[0], 0);
	w_show(&t[0], HANDLE);
	CHECK(w_take_segment(&t[0]));
	now = fill(n, &t[1], 1000, 200, 30000, now);
	CHECK_EQ(flags_of(n, trace_id(1), now), 0);
	CHECK_EQ(bsn_client_exited(n, w[0].number, now), 0);
	/* It is in the keep arena, and not its own any more. It goes when others
	 * have filled its segment there. */
	CHECK_EQ(flags_of(n, trace_id(1), now), 0);
	for (uint32_t i = 0; i < 4; i++) {
		CHECK(w_begin(&t[1], trace_id(2), HANDLE + i, 0, BS_RUN_FIRST,
			      30100));
		w_record(&t[1], BS_RECORD_DATA, payload, 30000, now);
		w_end(&t[1], 0);
		w_list(&w[1], HANDLE + i, true);
	}
	now = fill(n, &t[1], 5000, 400, 30000, now);
	CHECK_EQ(flags_of(n, trace_id(1), now), EVICTED_BY_FINGERPRINT);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* The largest run that there is, of a handle that stays open. Returns its records. */
static uint32_t write_big_run(struct wthread *t, uint64_t now)
{
	uint32_t next = 0;

	CHECK(w_begin(t, trace_id(1), HANDLE, 0, BS_RUN_FIRST,
		      SEG - 64 - 32 - 8));
	while (t->cursor + 16 + 1000 <= SEG - 8) {
		uint32_t numbered[250] = {next++};

		w_record(t, BS_RECORD_DATA, numbered, 1000, now);
	}
	w_record(t, BS_RECORD_DATA, payload, SEG - 8 - t->cursor - 16, now);
	w_end(t, 0);
	w_show(t, HANDLE);
	return next + 1;
}

static void big_runs_are_kept_in_parts(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);
	uint32_t records = write_big_run(&t, now);

	now = fill(n, &t, 1000, 500, 30000, now);
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, records);
	CHECK(d.by_kind[BS_PIECE_RUN] > 1);
	CHECK_EQ(check_order(&d), 1);
	free_with_writer(n, &w);
}

/* As after many others. */
static void forget_what_is_gone(struct bsn *n)
{
	memset(n->ledger.gone.buckets, 0,
	       (size_t)n->ledger.header->n_buckets * BS_CACHE_LINE);
}

/* Whoever opened it had no slot, but it is listed. */
static void a_handle_without_a_slot_is_open(void)
{
	const uint32_t handle = BS_THREAD_SLOTS << BS_HANDLE_COUNT_BITS | 5;
	struct bsn_config config = test_config(4 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(!handle_is_open(n->clients.all[0], handle));
	w_list(&w, handle, true);
	CHECK(handle_is_open(n->clients.all[0], handle));
	w_list(&w, handle, false);
	CHECK(!handle_is_open(n->clients.all[0], handle));
	free_with_writer(n, &w);
}

/* There is room for the first part of a run, and none for the next. */
static void a_run_that_is_cut_is_never_whole(void)
{
	struct bsn_config config = test_config(4 << 20);
	uint32_t budget;
	struct client *c;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	c = n->clients.all[0];
	CHECK(w_begin(&t, trace_id(2), HANDLE + 1, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, payload, 50, START);
	w_end(&t, 0);
	w_list(&w, HANDLE + 1, true);
	CHECK(w_take_segment(&t));
	write_big_run(&t, START);
	CHECK(w_take_segment(&t));
	bsn_poll(n, START + MS);
	node_lock(n);
	CHECK_EQ(n->pool.sealed.count, 2);
	CHECK(pool_reclaim(n, NULL, true));
	while (c->backed.count)
		frame_drop(n, own_pop(n, &c->backed));
	budget = n->pool.n_frames;
	n->pool.n_frames = n->pool.frames_used;
	CHECK(pool_reclaim(n, NULL, true));
	CHECK_EQ(n->counts.second_chances, 1);
	n->pool.n_frames = budget;
	CHECK_EQ(n->keep.arena.sealed.count, 1);
	CHECK_EQ(runs_count(frame_at(n, n->keep.arena.sealed.head), 1), 2);
	forget_what_is_gone(n);
	node_unlock(n);
	CHECK_EQ(flags_of(n, trace_id(1), START + MS), BSN_SLICE_EVICTED);
	CHECK_EQ(flags_of(n, trace_id(2), START + MS), 0);
	free_with_writer(n, &w);
}

struct kept_part {
	uint32_t from, bytes;
	bool has_more;
};

static uint32_t flags_of_parts(struct bsn *n, const struct kept_part *parts,
			       uint32_t count)
{
	struct slice slice = {.id = trace_id(1)};
	uint8_t nothing;
	const struct sink to = {.slice = &slice, .buffer = &nothing};
	struct search s;
	uint32_t cost = 0;

	CHECK_EQ(search_init(n, &s, slice.id, to), 0);
	for (uint32_t i = 0; i < count; i++) {
		const struct run run = {
			.owner.number = 1,
			.handle = HANDLE,
			.flags = parts[i].from ? 0 : BS_RUN_FIRST,
			.from = parts[i].from,
			.bytes = parts[i].bytes,
			.has_more = parts[i].has_more,
			.granted_ns = START,
		};

		search_meet(n, &s, &run, (struct ticks){0});
	}
	search_conclude(n, &s, &cost);
	search_free(n, &s);
	return slice.flags;
}

/* Each is kept again in its time, or not. */
static void each_part_has_the_next(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	const struct kept_part parts[3] = {
		{0, 100, true}, {100, 30, true}, {130, 10, false}};
	const struct kept_part turned[3] = {parts[2], parts[0], parts[1]};
	const struct kept_part hole[2] = {parts[0], parts[2]};

	node_lock(n);
	CHECK_EQ(flags_of_parts(n, parts, 3), 0);
	CHECK_EQ(flags_of_parts(n, turned, 3), 0);
	CHECK_EQ(flags_of_parts(n, parts, 2), BSN_SLICE_EVICTED);
	CHECK_EQ(flags_of_parts(n, parts, 1), BSN_SLICE_EVICTED);
	CHECK_EQ(flags_of_parts(n, hole, 2), BSN_SLICE_EVICTED);
	node_unlock(n);
	bsn_free(n);
}

/* Whoever asks is told, whatever of it is left. */
static void what_was_evicted_is_told(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t, other;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	other = writer_thread(&w, 1);
	/* A handle as a whole; one of two; one that is whole. */
	CHECK(w_trace(&t, trace_id(1), 100, now));
	CHECK(w_trace(&t, trace_id(2), 100, now));
	CHECK(w_trace(&other, trace_id(2), 100, now));
	CHECK(w_trace(&other, trace_id(3), 100, now));
	now = fill(n, &t, 1000, 150, 30000, now);
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, EVICTED_BY_FINGERPRINT);
	CHECK_EQ(s.bytes, 0);
	collect(n, trace_id(2), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | EVICTED_BY_FINGERPRINT);
	decode_slice(n, trace_id(2), &d);
	CHECK_EQ(d.records, 1);
	collect(n, trace_id(3), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(bsn_slice_release(n, trace_id(2), false, now), 0);

	/* Written again: held, and never whole. */
	CHECK(w_trace(&other, trace_id(2), 100, now));
	collect(n, trace_id(2), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | EVICTED_BY_FINGERPRINT);
	decode_slice(n, trace_id(2), &d);
	CHECK_EQ(d.records, 2);

	/* What is collected is out of reach of eviction. Once it is released,
	 * it is not whole in the pool any more. */
	CHECK(w_trace(&t, trace_id(4), 100, now));
	CHECK(w_trace(&other, trace_id(4), 100, now));
	collect(n, trace_id(4), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	bsn_get_metrics(n, &m);
	now = fill(n, &t, 5000, 150, 30000, now);
	collect(n, trace_id(4), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	decode_slice(n, trace_id(4), &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(bsn_slice_release(n, trace_id(4), false, now), 0);
	collect(n, trace_id(4), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | EVICTED_BY_FINGERPRINT);
	decode_slice(n, trace_id(4), &d);
	CHECK_EQ(d.records, 1);
	free_with_writer(n, &w);
}

/* What is left of a handle tells of it, also when its fingerprint is forgotten:
 * the first run is missing, or one in between. */
static void handles_tell_what_is_missing(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_metrics m;
	struct writer w;
	struct wthread t, other;
	uint64_t now = START;

	enum {
		NO_FIRST,
		GAP,
		WHOLE,
		TRACES
	};

	config.tombstones = 1; /* as few as can be */
	n = node_with_writer(&config, &w, &t);
	other = writer_thread(&w, 1);
	for (uint32_t i = 0; i < TRACES; i++) {
		for (uint32_t seq = 0; seq < 3; seq++) {
			bool goes = seq == i;

			CHECK(w_begin(goes && i != WHOLE ? &t : &other,
				      trace_id(i), HANDLE + i, seq,
				      seq ? 0 : BS_RUN_FIRST, 100));
			w_end(goes && i != WHOLE ? &t : &other,
			      seq == 2 ? BS_RUN_LAST : 0);
		}
	}
	now = fill(n, &t, 1000, 100, 30000, now);
	for (uint64_t i = 0; i < 40000; i++) {
		CHECK(w_trace(&t, trace_id(10000 + i), 100, now));
		if (i % 100 == 0)
			bsn_poll(n, now += MS);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.gone <= 1024);
	CHECK(m.gone_forgotten > 2000);
	CHECK_EQ(m.gone + m.gone_forgotten, m.runs_evicted);
	CHECK_EQ(flags_of(n, trace_id(NO_FIRST), now), BSN_SLICE_EVICTED);
	CHECK_EQ(flags_of(n, trace_id(GAP), now), BSN_SLICE_EVICTED);
	CHECK_EQ(flags_of(n, trace_id(WHOLE), now), 0);
	/* What went last is remembered, what went first is not. */
	CHECK_EQ(flags_of(n, trace_id(1000), now), 0);
	for (uint64_t i = m.runs_evicted - 50 - 102; i < m.runs_evicted - 102;
	     i++)
		CHECK_EQ(flags_of(n, trace_id(10000 + i), now),
			 EVICTED_BY_FINGERPRINT);
	free_with_writer(n, &w);
}

static void keep_arena_full(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_metrics m;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	uint32_t whole = 0;
	struct bsn *n = node_with_writer(&config, &w, &t);

	/* Everything stays open: more than can be kept. */
	for (uint32_t i = 0; i < 400; i++) {
		now += MS;
		CHECK(w_begin(&t, trace_id(i), HANDLE + i, 0, BS_RUN_FIRST,
			      30100));
		w_record(&t, BS_RECORD_DATA, payload, 30000, now);
		w_end(&t, 0);
		w_list(&w, HANDLE + i, true);
		bsn_poll(n, now);
		check_invariants(n);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.second_chances > 10);
	CHECK(m.runs_evicted > 200);
	CHECK(m.keep_bytes <= (1 << 20));
	for (uint32_t i = 0; i < 400; i++) {
		struct bsn_slice s;

		collect(n, trace_id(i), now, &s);
		CHECK(s.flags == EVICTED_BY_FINGERPRINT ||
		      s.flags == BSN_SLICE_HELD ||
		      s.flags == BSN_SLICE_STORE_FULL);
		whole += s.flags == BSN_SLICE_HELD;
		CHECK_EQ(bsn_slice_release(n, trace_id(i), false, now), 0);
	}
	CHECK(whole > 50 && whole < 200);
	free_with_writer(n, &w);
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
	n = node_with_writer(&config, &w, &t);
	for (uint32_t i = 0; i < 45; i++) {
		CHECK(w_trace(&t, trace_id(i), 20000, now));
		bsn_poll(n, now);
	}
	for (uint32_t i = 0; i < 45; i++) {
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "t", now, &s),
			 0);
	}
	bsn_poll(n, now);
	for (uint32_t i = 0; i < 45; i++) {
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
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
	free_with_writer(n, &w);
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

/* Of what a slice has the beginning of, it counts the end: once, and of nothing
 * else. */
static void only_what_began_can_end(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct wthread t[3];
	struct writer w;
	uint64_t now = START;

	writer_attach(&w, n, now);
	for (uint32_t i = 0; i < 3; i++)
		t[i] = writer_thread(&w, i);
	/* Its begin goes: nothing shows that it is open. */
	CHECK(w_begin(&t[0], trace_id(1), HANDLE, 0, BS_RUN_FIRST, 100));
	w_end(&t[0], 0);
	CHECK(w_take_segment(&t[0]));
	for (uint64_t i = 0; i < 200; i++) {
		CHECK(w_trace(&t[2], trace_id(1000 + i), 30000, now));
		bsn_poll(n, now += MS);
	}
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, EVICTED_BY_FINGERPRINT);
	CHECK_EQ(s.open_handles, 0);
	/* One that is open while that ends, one that begins afterwards. */
	CHECK(w_begin(&t[1], trace_id(1), HANDLE + 1, 0, BS_RUN_FIRST, 100));
	w_end(&t[1], 0);
	CHECK(w_begin(&t[0], trace_id(1), HANDLE, 1, 0, 100));
	w_end(&t[0], BS_RUN_LAST);
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 1);
	CHECK(w_begin(&t[0], trace_id(1), HANDLE + 2, 0, BS_RUN_FIRST, 100));
	w_end(&t[0], 0);
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 2);
	/* A successor knows how many, and not which. */
	n = restart(n, &config, &w, 1, now);
	CHECK(w_begin(&t[0], trace_id(1), HANDLE + 2, 1, 0, 100));
	w_end(&t[0], BS_RUN_LAST);
	CHECK(w_begin(&t[1], trace_id(1), HANDLE + 1, 1, 0, 100));
	w_end(&t[1], BS_RUN_LAST);
	bsn_poll(n, now + MS);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	free_with_writer(n, &w);
}

/* A run of the trace that is looked at; its flags, but that it is closed. */
static void one_run(struct wthread *t, uint32_t handle, uint32_t seq,
		    uint32_t flags)
{
	CHECK(w_begin(t, trace_id(1), handle, seq, flags & BS_RUN_FIRST, 100));
	w_end(t, flags & BS_RUN_LAST);
}

/* Its slice is there, with nothing open. */
static struct bsn *node_with_slice(struct bsn_config *config, struct writer *w,
				   struct wthread *t)
{
	struct bsn *n = node_with_writer(config, w, t);
	struct bsn_slice s;

	CHECK(w_trace(t, trace_id(1), 100, START));
	collect(n, trace_id(1), START, &s);
	return n;
}

/* One thread begins handles, another one ends them. */
static void pass_on(struct wthread *begins, struct wthread *ends, uint32_t from,
		    uint32_t count)
{
	for (uint32_t i = from; i < from + count; i++)
		one_run(begins, HANDLE + i, 0, BS_RUN_FIRST);
	for (uint32_t i = from; i < from + count; i++)
		one_run(ends, HANDLE + i, 1, BS_RUN_LAST);
}

static uint32_t open_now(struct bsn *n)
{
	struct bsn_slice s;

	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK(s.flags & BSN_SLICE_HELD);
	return s.open_handles;
}

/* More than a slice lists. */
#define MANY (SLICE_HANDLES_MAX + 100)

/* Whichever's segment is looked at first: by a search, however many they are; for a slice
 * that is there, where more than are listed are asked for; and by a successor. */
static void an_end_counts_before_the_beginning(void)
{
	for (uint32_t first = 0; first < 2; first++) {
		struct bsn_config config = test_config(4 << 20);
		struct bsn_slice s;
		struct wthread t[2];
		struct writer w;
		struct bsn *n = node_with_writer(&config, &w, &t[0]);

		t[1] = writer_thread(&w, 1);
		/* Their segments are looked at in this order. */
		for (uint32_t i = 0; i < 2; i++)
			CHECK(w_trace(&t[i], trace_id(2), 100, START));
		pass_on(&t[first], &t[!first], 0, MANY);
		collect(n, trace_id(1), START, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK_EQ(s.open_handles, 0);
		for (uint32_t i = 1; i <= 3; i++) {
			pass_on(&t[first], &t[!first], i * MANY, MANY);
			CHECK_EQ(open_now(n), 0);
			pass_on(&t[!first], &t[first], 4 * MANY + i, 1);
			CHECK_EQ(open_now(n), 0);
		}
		/* One is open, and a successor does not know which. */
		w_list(&w, HANDLE + 5 * MANY, true);
		one_run(&t[0], HANDLE + 5 * MANY, 0, BS_RUN_FIRST);
		CHECK_EQ(open_now(n), 1);
		n = restart(n, &config, &w, 1, START);
		for (uint32_t i = 6; i <= 8; i++) {
			pass_on(&t[first], &t[!first], i * MANY,
				SLICE_HANDLES_MAX / 2);
			CHECK_EQ(open_now(n), 1);
		}
		one_run(&t[1], HANDLE + 5 * MANY, 1, BS_RUN_LAST);
		CHECK_EQ(open_now(n), 0);
		free_with_writer(n, &w);
	}
}

/* More are open than a slice lists; those that come and go beside them count for none. */
static void a_search_counts_however_many_are_open(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct wthread t[2];
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t[0]);

	t[1] = writer_thread(&w, 1);
	for (uint32_t i = 0; i < MANY; i++) {
		w_list(&w, HANDLE + i, true);
		one_run(&t[0], HANDLE + i, 0, BS_RUN_FIRST);
	}
	pass_on(&t[0], &t[0], MANY, 200);
	pass_on(&t[0], &t[1], MANY + 200, 200);
	pass_on(&t[1], &t[0], MANY + 400, 200);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.open_handles, MANY);
	for (uint32_t i = 0; i < MANY; i++)
		one_run(&t[1], HANDLE + i, 1, BS_RUN_LAST);
	CHECK_EQ(open_now(n), 0);
	free_with_writer(n, &w);
}

/* The end is reclaimed, and the beginning is there. */
static void an_end_that_is_gone_is_an_end(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct wthread t[3];
	struct writer w;

	writer_attach(&w, n, START);
	for (uint32_t i = 0; i < 3; i++)
		t[i] = writer_thread(&w, i);
	pass_on(&t[0], &t[1], 0, 1);
	CHECK(w_take_segment(&t[1]));
	w_list(&w, HANDLE + 1, true);
	one_run(&t[0], HANDLE + 1, 0, BS_RUN_FIRST);
	for (uint64_t i = 0; i < 200; i++) {
		CHECK(w_trace(&t[2], trace_id(1000 + i), 30000, START));
		bsn_poll(n, START);
	}
	collect(n, trace_id(1), START, &s);
	CHECK(s.flags & BSN_SLICE_EVICTED);
	CHECK_EQ(s.open_handles, 1);
	free_with_writer(n, &w);
}

/* A restart comes between. */
static void a_beginning_that_a_successor_meets_is_not_open(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_slice(&config, &w, &t);

	one_run(&t, HANDLE, 1, BS_RUN_LAST);
	CHECK_EQ(open_now(n), 0);
	n = restart(n, &config, &w, 1, START);
	one_run(&t, HANDLE, 0, BS_RUN_FIRST);
	CHECK_EQ(open_now(n), 0);
	/* One that is open is. */
	w_list(&w, HANDLE + 1, true);
	one_run(&t, HANDLE + 1, 0, BS_RUN_FIRST);
	CHECK_EQ(open_now(n), 1);
	free_with_writer(n, &w);
}

/* A process that lies, or whose last run was taken for lost. */
static void a_handle_ends_once(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_slice(&config, &w, &t);

	for (uint32_t i = 0; i < 5; i++) {
		one_run(&t, HANDLE, i, i == 2 ? BS_RUN_FIRST : BS_RUN_LAST);
		CHECK_EQ(open_now(n), 0);
	}
	/* Of a loss one does not know when it was, either. */
	w_lose_run(&t, trace_id(1), HANDLE + 1, BS_RUN_LAST, 100);
	CHECK_EQ(open_now(n), 0);
	one_run(&t, HANDLE + 1, 0, BS_RUN_FIRST);
	CHECK_EQ(open_now(n), 0);
	free_with_writer(n, &w);
}

/* More ends whose beginnings are gone than are remembered take no place from those that
 * are open. */
static void ends_without_a_beginning_leave_room(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_slice(&config, &w, &t);

	for (uint32_t i = 0; i < MANY; i++)
		one_run(&t, HANDLE + i, 1, BS_RUN_LAST);
	for (uint32_t i = MANY; i < MANY + 40; i++) {
		w_list(&w, HANDLE + i, true);
		one_run(&t, HANDLE + i, 0, BS_RUN_FIRST);
	}
	CHECK_EQ(open_now(n), 40);
	/* Of new ones either may be met first. */
	one_run(&t, HANDLE + 2 * MANY, 1, BS_RUN_LAST);
	one_run(&t, HANDLE + 2 * MANY, 0, BS_RUN_FIRST);
	CHECK_EQ(open_now(n), 40);
	/* An end of another one counts for none of them. */
	for (uint32_t i = 0; i <= 40; i++) {
		one_run(&t, HANDLE + MANY + 40 - i, 2, BS_RUN_LAST);
		CHECK_EQ(open_now(n), 40 - i);
	}
	free_with_writer(n, &w);
}

/* A handle that is about to close, in a trace that has losses: the search takes its
 * end for lost, and then it comes. */
static void an_end_counts_once(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct wthread t[2];
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t[0]);

	t[1] = writer_thread(&w, 1);
	w_lose(&t[1], trace_id(1), BS_RUN_FIRST | BS_RUN_LAST, 100);
	CHECK(w_begin(&t[0], trace_id(1), HANDLE, 0, BS_RUN_FIRST, 100));
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.open_handles, 0);
	w_end(&t[0], BS_RUN_LAST);
	bsn_poll(n, START);
	CHECK(w_begin(&t[0], trace_id(1), HANDLE + 1, 0, BS_RUN_FIRST, 100));
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 1);
	w_end(&t[0], BS_RUN_LAST);
	/* As many as are known by their numbers, and more. */
	for (uint32_t i = 0; i < MANY; i++) {
		w_list(&w, HANDLE + 2 + i, true);
		CHECK(w_begin(&t[1], trace_id(1), HANDLE + 2 + i, 0,
			      BS_RUN_FIRST, 100));
		w_end(&t[1], 0);
	}
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, MANY);
	for (uint32_t i = 0; i < MANY; i++) {
		CHECK(w_begin(&t[1], trace_id(1), HANDLE + 2 + i, 1, 0, 100));
		w_end(&t[1], BS_RUN_LAST);
	}
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	free_with_writer(n, &w);
}

/* Nor is it remembered that it was there. */
static void with_an_empty_handle_nothing_is_lost(void)
{
	struct bsn_config config = test_config(4 << 20);
	uint64_t now = START, gone;
	struct bsn_metrics m;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t i = 0; i < 3; i++) {
		static const uint32_t flags[] = {BS_RUN_LAST, 0,
						 BS_RUN_LAST | BS_RUN_LOSSY};

		CHECK(w_begin(&t, trace_id(1 + i), HANDLE + i, 0, BS_RUN_FIRST,
			      100));
		w_end(&t, flags[i]);
	}
	/* Its first run is another. */
	CHECK(w_begin(&t, trace_id(4), HANDLE + 3, 1, 0, 100));
	w_end(&t, BS_RUN_LAST);
	CHECK(w_begin(&t, trace_id(5), HANDLE + 4, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, payload, 0, now);
	w_end(&t, BS_RUN_LAST);
	CHECK(w_trace(&t, trace_id(6), 100, now));
	now = fill(n, &t, 1000, 150, 30000, now);
	CHECK_EQ(flags_of(n, trace_id(1), now), 0);
	CHECK_EQ(flags_of(n, trace_id(2), now), EVICTED_BY_FINGERPRINT);
	CHECK_EQ(flags_of(n, trace_id(3), now),
		 EVICTED_BY_FINGERPRINT | BSN_SLICE_LOSSY);
	for (uint32_t i = 4; i <= 6; i++)
		CHECK_EQ(flags_of(n, trace_id(i), now), EVICTED_BY_FINGERPRINT);
	bsn_get_metrics(n, &m);
	gone = m.gone;
	for (uint32_t i = 0; i < 100; i++) {
		CHECK(w_begin(&t, trace_id(100 + i), HANDLE + i, 0,
			      BS_RUN_FIRST, 100));
		w_end(&t, BS_RUN_LAST);
	}
	fill(n, &t, 2000, 150, 30000, now);
	bsn_get_metrics(n, &m);
	/* But the last of a segment. */
	CHECK(m.gone <= gone + 150 + 1);
	free_with_writer(n, &w);
}

/* A process is found gone, and another comes, while the node does not know yet what is
 * older than what the first wrote last. */
static void nothing_goes_before_all_are_adopted(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	uint64_t now = START, written = 0;
	struct wthread t[2];
	struct writer w[3];

	for (uint32_t k = 0; k < 2; k++) {
		writer_attach(&w[k], n, now);
		t[k] = writer_thread(&w[k], 0);
	}
	while (m.reclaims < 5) {
		CHECK(w_trace(&t[0], trace_id(written++), 30000, now += MS));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
	}
	CHECK_EQ(flags_of(n, trace_id(0), now), EVICTED_BY_FINGERPRINT);
	/* All that it had in hand: there is nothing that the next could have. */
	while (w_take_segment(&t[1]))
		CHECK(w_trace(&t[1], trace_id(written++), 100, now));
	n = restart(n, &config, w, 2, now);
	CHECK_EQ(bsn_client_exited(n, w[1].number, now), 0);
	writer_attach(&w[2], n, now);
	for (uint32_t polls = 0; polls < 2; polls++) {
		for (uint64_t i = 1; i <= 4; i++)
			CHECK_EQ(flags_of(n, trace_id(written - i), now), 0);
		bsn_poll(n, now);
	}
	check_invariants(n);
	free_with_writers(n, w, 3);
}

int main(void)
{
	RUN(oldest_goes_first_over_arenas);
	RUN(the_horizon_is_what_is_there);
	RUN(open_handles_are_kept);
	RUN(what_the_dead_had_open_goes);
	RUN(what_was_evicted_is_told);
	RUN(handles_tell_what_is_missing);
	RUN(big_runs_are_kept_in_parts);
	RUN(a_run_that_is_cut_is_never_whole);
	RUN(a_handle_without_a_slot_is_open);
	RUN(each_part_has_the_next);
	RUN(keep_arena_full);
	RUN(store_full);
	RUN(memory_moves_between_processes);
	RUN(only_what_began_can_end);
	RUN(an_end_counts_before_the_beginning);
	RUN(a_search_counts_however_many_are_open);
	RUN(an_end_that_is_gone_is_an_end);
	RUN(a_beginning_that_a_successor_meets_is_not_open);
	RUN(a_handle_ends_once);
	RUN(ends_without_a_beginning_leave_room);
	RUN(an_end_counts_once);
	RUN(with_an_empty_handle_nothing_is_lost);
	RUN(nothing_goes_before_all_are_adopted);
	free(d.bytes);
	return 0;
}
