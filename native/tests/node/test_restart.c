/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a successor must not believe, lose, or find twice. A kill in the middle
 * of a commit is made by taking the commit back: all of it but its number is
 * written before.
 */
#include <errno.h>

#include "writer.h"

static struct decoded d;

/* The slot in a segment's header is the client's to write. */
static void a_slot_that_is_none(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bs_segment_header *h;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK(w_begin(&t, trace_id(1), 1, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	h = (struct bs_segment_header *)(w.arena + (uint64_t)t.segment * SEG);
	h->slot = 0xffff;
	n = restart(n, &config, &w, 1, START);
	collect(n, trace_id(1), START, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	writer_close(&w);
	bsn_free(n);
}

/* Two threads of two processes get on, and the commit of that never is. */
static void progress_that_was_not_committed(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	uint64_t *last = commits_map(n), before;
	uint32_t tails[2];
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2];

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, START);
		t[i] = writer_thread(&w[i], 0);
		CHECK(w_begin(&t[i], trace_id(1), 1, 0, BS_RUN_FIRST, 30000));
		w_record(&t[i], BS_RECORD_DATA, "a", 1, START);
	}
	collect(n, trace_id(1), START, &s);
	bsn_poll(n, START);
	before = *last;
	for (int i = 0; i < 2; i++) {
		tails[i] = w_area(&w[i], 0)->run_tail;
		w_record(&t[i], BS_RECORD_DATA, "b", 1, START);
		w_end(&t[i], 0);
	}
	w_lose(&t[1], trace_id(1), 0, 100);
	bsn_poll(n, START);
	CHECK_EQ(*last, before + 1);
	*last = before;
	for (int i = 0; i < 2; i++)
		w_area(&w[i], 0)->run_tail = tails[i];
	n = restart(n, &config, w, 2, START + MS);
	for (int i = 0; i < 2; i++) {
		CHECK(w_begin(&t[i], trace_id(1), 1, 1, 0, 3000));
		w_record(&t[i], BS_RECORD_DATA, "c", 1, START);
		w_end(&t[i], BS_RUN_LAST);
	}
	bsn_poll(n, START + MS);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK(s.flags & BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 6);
	CHECK_EQ(d.by_kind[BS_PIECE_LOSS], 1);
	commits_unmap(last);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void what_a_dead_process_wrote_is_copied_once(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t bytes;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 5; i++)
		CHECK(w_trace(&t, trace_id(1), 1000, START));
	collect(n, trace_id(1), START, &s);
	bytes = s.bytes;
	CHECK(w_trace(&t, trace_id(2), 1000, START));
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	for (uint32_t i = 0; i < 3; i++) {
		n = restart(n, &config, &w, 1, START + MS);
		CHECK_EQ(bsn_client_exited(n, w.number, START + MS), 0);
		bsn_poll(n, START + MS);
		CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
		CHECK_EQ(s.bytes, bytes);
	}
	writer_close(&w);
	bsn_free(n);
}

/* Found by walking the log, before its news. */
static void what_was_walked_is_copied_once(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	collect(n, trace_id(1), START, &s);
	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	w_end_log(&t);
	store_release(&t.run->flags,
		      (uint16_t)(BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_CLOSED));
	bsn_poll(n, START);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	n = restart(n, &config, &w, 1, START);
	bsn_poll(n, START);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	writer_close(&w);
	bsn_free(n);
}

/* A stock that was taken back is in no thread's hands. */
static void a_stock_taken_back_is_not_in_use(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint64_t i = 0; i < 20; i++) {
		now += MS;
		for (uint64_t k = 0; k < 40; k++)
			w_trace(&t, trace_id(i * 100 + k), 30000, now);
		bsn_poll(n, now);
	}
	for (uint32_t i = 0; i < 100; i++) {
		now += 100 * MS;
		bsn_poll(n, now);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.active_bytes, SEG);
	n = restart(n, &config, &w, 1, now);
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.active_bytes, SEG);
	CHECK_EQ(m.corrupt, 0);
	writer_close(&w);
	bsn_free(n);
}

/* A process that ended, whose records are in the pool still, left no stock. */
static void a_process_that_ended_contradicts_nothing(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	bsn_poll(n, START);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	for (int i = 0; i < 2; i++) {
		n = restart(n, &config, &w, 1, START);
		CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
		bsn_poll(n, START);
		bsn_get_metrics(n, &m);
		CHECK_EQ(m.corrupt, 0);
		CHECK_EQ(m.stock_bytes, 0);
	}
	collect(n, trace_id(1), START, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	writer_close(&w);
	bsn_free(n);
}

/* What no longer fits is reclaimed, as always, and not dropped; and a thread
 * keeps the segment that it writes to. */
static void a_pool_that_has_shrunk(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t, other;
	uint64_t now = START;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
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
	writer_close(&w);
	bsn_free(n);
}

/* By numbers slices tell processes apart: no process names its own. */
static void numbers_are_not_the_clients(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_client_fds fds;
	struct writer w[2];

	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, START);
	w_header(&w[0])->client_number = (uint32_t)w[1].number;
	w_header(&w[1])->client_number = INT32_MAX - 1;
	n = restart(n, &config, w, 2, START);
	CHECK_EQ(bsn_client_adopt(n, w[0].number, 1, "x", START, &w[0].fds),
		 -EINVAL);
	CHECK_EQ(bsn_client_adopt(n, -1, 1, "x", START, &w[0].fds), -EINVAL);
	for (int i = 0; i < 3; i++) {
		CHECK(bsn_client_add(n, 1, "x", START, &fds) > w[1].number);
		close(fds.arena);
		close(fds.channel);
		close(fds.context);
	}
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* What a trace lost stands in the keep memfd, and what was collected in the
 * store: without either, nothing passes for whole. */
static void without_what_a_predecessor_knew(bool with_keep, bool with_store)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	struct bsn_slice s;
	struct held h;
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	CHECK(w_trace(&t, trace_id(1), 100, now));
	bsn_poll(n, now);
	if (!with_store)
		collect(n, trace_id(1), now, &s);
	for (uint64_t i = 0; i <= 95 || m.reclaims <= 3; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		if (i >= 90 && i < 93)
			CHECK(w_trace(&t, trace_id(1), 100, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
	}
	h = hold(n);
	bsn_free(n);
	n = test_node(&config);
	if (with_keep)
		CHECK_EQ(bsn_adopt_keep(n, now, h.keep), 0);
	if (with_store)
		CHECK_EQ(bsn_adopt_store(n, now, h.store), 0);
	CHECK_EQ(bsn_client_adopt(n, w.number, 1, "t", now, &w.fds), w.number);
	bsn_poll(n, now);
	collect(n, trace_id(1), now, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 3);
	CHECK(s.flags & (BSN_SLICE_EVICTED | BSN_SLICE_MAYBE_LOSSY));
	close(h.keep);
	close(h.store);
	writer_close(&w);
	bsn_free(n);
}

static void nothing_passes_for_whole(void)
{
	without_what_a_predecessor_knew(true, true);
	without_what_a_predecessor_knew(false, true);
	without_what_a_predecessor_knew(true, false);
}

/* Whether their process comes back or not. */
static void kept_runs_find_no_room(bool comes_back)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 300; i++) {
		CHECK(w_begin(&t, trace_id(i), 2 * i, 0, BS_RUN_FIRST, 100));
		w_record(&t, BS_RECORD_DATA, "x", 1, now);
		w_end(&t, 0);
	}
	for (uint64_t i = 0; m.reclaims < 5; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
	}
	CHECK(m.second_chances >= 300);
	config.index_traces = config.index_runs = 64;
	n = restart(n, &config, &w, comes_back, now);
	for (uint32_t i = 0; i < 300; i++)
		CHECK(flags_of(n, trace_id(i), now));
	writer_close(&w);
	bsn_free(n);
}

static void kept_runs_that_find_no_room(void)
{
	kept_runs_find_no_room(true);
	kept_runs_find_no_room(false);
}

/* Its process did not come back: nobody closes what it had open. */
static void handles_of_nobody_are_closed(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.open_handles, 1);
	n = restart(n, &config, &w, 0, START);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], 1);
	writer_close(&w);
	bsn_free(n);
}

/* It ended while there was no daemon, and is adopted before another that lives. */
static void who_lives_is_known_when_all_are_adopted(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2];
	struct held h;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, START);
		t[i] = writer_thread(&w[i], 0);
		CHECK(w_begin(&t[i], trace_id(1), 1, 0, BS_RUN_FIRST, 100));
		w_record(&t[i], BS_RECORD_DATA, "a", 1, START);
	}
	collect(n, trace_id(1), START, &s);
	bsn_poll(n, START);
	h = hold(n);
	bsn_free(n);
	n = test_node(&config);
	CHECK_EQ(bsn_adopt_keep(n, START, h.keep), 0);
	CHECK_EQ(bsn_adopt_store(n, START, h.store), 0);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(bsn_client_adopt(n, w[i].number, 1234, "tester", START,
					  &w[i].fds),
			 w[i].number);
		if (i == 0)
			CHECK_EQ(bsn_client_exited(n, w[0].number, START), 0);
	}
	close(h.store);
	close(h.keep);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], 1);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* Killed while it wrote a record: what the payload looks like is no run. */
static void nothing_is_behind_the_last_run(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct writer w;
	struct wthread t;
	struct bs_run_header forged = {
		.trace_hi = 7,
		.trace_lo = 7,
	};

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	forged.generation = t.generation;
	memcpy(w.arena + (uint64_t)t.segment * SEG + t.cursor, &forged,
	       sizeof(forged));
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.traces_indexed, 1);
	CHECK_EQ(m.corrupt, 0);
	writer_close(&w);
	bsn_free(n);
}

/* A run that stays open, and says nothing new, grows no slice. */
static void an_open_run_is_told_once(bool lossy)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[8];
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t bytes;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK(w_begin(&t, trace_id(1), 9, 1, lossy ? BS_RUN_LOSSY : 0, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	collect(n, trace_id(1), START, &s);
	if (!lossy) {
		/* Not of records. */
		memset((uint8_t *)(t.run + 1) + 24, 0xff, 16);
		store_release(&t.run->committed_bytes, 40);
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
	writer_close(&w);
	bsn_free(n);
}

static void open_runs_are_told_once(void)
{
	an_open_run_is_told_once(true);
	an_open_run_is_told_once(false);
}

/* While the control plane has its hands full, the node sleeps; and it wakes for
 * a cell that nobody commits. */
static void waits_for_what_it_can_do(void)
{
	enum {
		MANY = 6
	};
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	static struct bsn_event e[MANY * BS_TRIGGER_CELLS];
	struct writer w[MANY];
	int taken = 0, got;

	for (int i = 0; i < MANY; i++) {
		writer_attach(&w[i], n, START);
		for (uint32_t k = 0; k < BS_TRIGGER_CELLS - 1; k++)
			w_trigger(&w[i], trace_id(k + 1), "many", START);
	}
	bsn_wait(n, 0);
	bsn_poll(n, START);
	CHECK_EQ(bsn_wait(n, MS), 0);
	while ((got = bsn_events(n, e, MANY * BS_TRIGGER_CELLS))) {
		taken += got;
		CHECK_EQ(bsn_wait(n, taken < 1200 ? -1 : 0), taken < 1200);
		bsn_events_done(n);
		bsn_poll(n, START);
	}
	CHECK_EQ(taken, MANY * (BS_TRIGGER_CELLS - 1));
	for (int i = 0; i < MANY; i++)
		writer_close(&w[i]);
	bsn_free(n);

	n = test_node(&config);
	writer_attach(&w[0], n, START);
	w[0].context->trigger_head++;
	w_trigger(&w[0], trace_id(2), "crash", START);
	bsn_wait(n, 0);
	CHECK_EQ(bsn_poll(n, START), 0);
	CHECK_EQ(bsn_wait(n, -1), 0);
	CHECK_EQ(bsn_poll(n, START + SECOND), 1);
	writer_close(&w[0]);
	bsn_free(n);
}

int main(void)
{
	RUN(a_slot_that_is_none);
	RUN(progress_that_was_not_committed);
	RUN(what_a_dead_process_wrote_is_copied_once);
	RUN(what_was_walked_is_copied_once);
	RUN(a_stock_taken_back_is_not_in_use);
	RUN(a_process_that_ended_contradicts_nothing);
	RUN(a_pool_that_has_shrunk);
	RUN(numbers_are_not_the_clients);
	RUN(nothing_passes_for_whole);
	RUN(kept_runs_that_find_no_room);
	RUN(handles_of_nobody_are_closed);
	RUN(who_lives_is_known_when_all_are_adopted);
	RUN(nothing_is_behind_the_last_run);
	RUN(open_runs_are_told_once);
	RUN(waits_for_what_it_can_do);
	free(d.bytes);
	return 0;
}
