/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a successor must not believe, lose, or find twice. A kill in the middle
 * of a commit is made by taking the commit back: all of it but its number is
 * written before.
 */
#include <errno.h>

#include <sys/stat.h>

#include "writer.h"

static struct decoded d;

/* The slot in a segment's header is the client's to write: it says which losses
 * to look for, and nothing of the segment. */
static void a_slot_that_is_none(bool known)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 1, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	if (known)
		bsn_poll(n, START);
	w_segment_header(&t)->slot = 0xffff;
	n = restart(n, &config, &w, 1, START);
	collect(n, trace_id(1), START, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	w_record(&t, BS_RECORD_DATA, "b", 1, START);
	bsn_poll(n, START);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	free_with_writer(n, &w);
}

static void slots_that_are_none(void)
{
	a_slot_that_is_none(true);
	a_slot_that_is_none(false);
}

enum killed {
	BEFORE_THE_COMMIT,
	AFTER_THE_COMMIT, /* losses are not given back yet */
};

/* Threads of two processes get on, and the commit of that never is; two times,
 * the second time to another end. */
static void progress(enum killed when)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	uint64_t *last = commits_map(n), before;
	uint32_t tail;
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2];

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, START);
		t[i] = writer_thread(&w[i], 0);
		CHECK(w_begin(&t[i], trace_id(1), 1, 0, BS_RUN_FIRST, 3000));
		w_record(&t[i], BS_RECORD_DATA, "a", 1, START);
	}
	collect(n, trace_id(1), START, &s);
	bsn_poll(n, START);
	for (uint32_t round = 0; round < 2; round++) {
		before = *last;
		for (int i = 0; i < 2; i++) {
			w_record(&t[i], BS_RECORD_DATA, "b", 1, START);
			if (round == 0)
				continue;
			w_end(&t[i], 0);
			CHECK(w_begin(&t[i], trace_id(1), 1, 1, 0, 3000));
			w_record(&t[i], BS_RECORD_DATA, "c", 1, START);
		}
		w_lose_run(&t[1], trace_id(1), 100 + round, BS_RUN_FIRST, 100);
		tail = w_area(&w[1], 0)->loss_tail;
		bsn_poll(n, START);
		CHECK_EQ(*last, before + 1);
		CHECK_EQ(w_area(&w[1], 0)->loss_tail, round + 1);
		w_area(&w[1], 0)->loss_tail = tail;
		if (when == BEFORE_THE_COMMIT)
			*last = before;
		/* The first successor is killed before it does anything. */
		for (uint32_t i = 0; i < 2; i++)
			n = restart(n, &config, w, 2, START + MS);
	}
	for (int i = 0; i < 2; i++) {
		w_record(&t[i], BS_RECORD_DATA, "d", 1, START);
		w_end(&t[i], BS_RUN_LAST);
	}
	bsn_poll(n, START + MS);
	CHECK_EQ(w_area(&w[1], 0)->loss_tail, 2);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK(s.flags & BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 2); /* those that were lost */
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2 * 5);
	CHECK_EQ(d.by_kind[BS_PIECE_LOSS], 2);
	commits_unmap(last);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void progress_is_neither_lost_nor_doubled(void)
{
	progress(BEFORE_THE_COMMIT);
	progress(AFTER_THE_COMMIT);
}

static void what_a_dead_process_wrote_is_copied_once(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t bytes;
	struct bsn *n = node_with_writer(&config, &w, &t);

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
	free_with_writer(n, &w);
}

/* Segments that were sealed since are looked at again, from where the commit
 * says, however many there are. */
static void what_was_sealed_since_is_copied_once(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	uint64_t *last = commits_map(n), before;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint32_t records = 3;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < records; i++)
		CHECK(w_trace(&t, trace_id(1), 100, START));
	collect(n, trace_id(1), START, &s);
	bsn_poll(n, START);
	before = *last;
	for (uint32_t i = 0; i < 20; i++) {
		CHECK(w_trace(&t, trace_id(100 + i), 30000, START));
		CHECK(w_trace(&t, trace_id(1), 100, START));
		records++;
	}
	bsn_poll(n, START);
	CHECK_EQ(*last, before + 1);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, records);
	*last = before;
	for (uint32_t i = 0; i < 2; i++) {
		n = restart(n, &config, &w, 1, START);
		bsn_poll(n, START);
		decode_slice(n, trace_id(1), &d);
		CHECK_EQ(d.records, records);
	}
	commits_unmap(last);
	free_with_writer(n, &w);
}

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

/* A process that ended, whose records are in the pool still, left no stock. */
static void a_process_that_ended_contradicts_nothing(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

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

/* What a trace lost stands in the ledger, and what was collected in the store:
 * without either, nothing passes for whole. */
static void without_what_a_predecessor_knew(bool with_keep, bool with_store)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	struct bsn_slice s;
	struct held h;
	struct writer w, other;
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
	CHECK_EQ(bsn_client_adopt(n, w.number, 1, "t", now, &w.fds),
		 with_keep ? w.number : -EPROTO);
	bsn_poll(n, now);
	collect(n, trace_id(1), now, &s);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, with_keep ? 3 : 0);
	CHECK(s.flags & (BSN_SLICE_EVICTED | BSN_SLICE_MAYBE_LOSSY));
	/* And all goes on: it attaches anew, as another. */
	writer_attach(&other, n, now);
	CHECK_EQ(other.number == w.number, !with_keep && !with_store);
	t = writer_thread(&other, 0);
	for (uint64_t i = 0; i < 300; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(2000 + i), 30000, now));
		bsn_poll(n, now);
	}
	collect(n, trace_id(2299), now, &s);
	CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_MAYBE_LOSSY, BSN_SLICE_HELD);
	check_invariants(n);
	close(h.keep);
	close(h.store);
	writer_close(&w);
	free_with_writer(n, &other);
}

static void nothing_passes_for_whole(void)
{
	without_what_a_predecessor_knew(true, true);
	without_what_a_predecessor_knew(false, true);
	without_what_a_predecessor_knew(true, false);
	without_what_a_predecessor_knew(false, false);
}

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
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
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

/* Its process did not come back: nobody closes what it had open. */
static void handles_of_nobody_are_closed(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

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
	free_with_writer(n, &w);
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

/* Killed before it counted the entry that it wrote: what stands there is none,
 * whatever it looks like. */
static void nothing_is_behind_the_last_run(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 9, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "a", 1, START);
	w_end(&t, BS_RUN_LAST);
	CHECK(w_begin(&t, trace_id(2), 10, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "b", 1, START);
	store_release(&w_segment_header(&t)->runs, 1);
	n = restart(n, &config, &w, 1, START);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.flags, 0);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);
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

/* What a process wrote and lost, as it counts that, with all of its threads. */
static void count(const struct writer *w, uint64_t records)
{
	for (uint32_t slot = 0; slot < 2; slot++) {
		struct bs_thread_area *a = w_area(w, slot);

		a->runs_lost += records;
		a->records_lost += 2 * records;
		a->payload_bytes += 3 * records;
		a->payload_bytes_lost += 4 * records;
	}
	w->context->records_unattributed += 5 * records;
	w->context->triggers_lost += 6 * records;
}

static void check_counted(struct bsn *n, uint64_t records)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	CHECK_EQ(m.runs_lost, 2 * records);
	CHECK_EQ(m.records_lost, 4 * records + 5 * records);
	CHECK_EQ(m.payload_bytes, 6 * records);
	CHECK_EQ(m.payload_bytes_lost, 8 * records);
	CHECK_EQ(m.triggers_lost, 6 * records);
	CHECK_EQ(m.corrupt, 0);
}

/* A successor counts from where its predecessor was last asked: no rate jumps when a
 * daemon is restarted, and what happens meanwhile is counted. */
static void counters_go_on(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct wthread t[2];
	struct writer w[2];
	struct bsn *n = node_with_writer(&config, &w[0], &t[0]);
	int number;

	t[1] = writer_thread(&w[0], 1);
	CHECK(w_take_segment(&t[0]));
	CHECK(w_take_segment(&t[1]));
	bsn_poll(n, START);
	count(&w[0], 10);
	check_counted(n, 10);
	/* One of its threads ends. */
	w_set_life(&w[0], t[1].segment, BS_SEGMENT_SEALED);
	bsn_poll(n, START);
	WRITE_ONCE(w[0].context->slots[1].tid, 0);
	n = restart(n, &config, w, 1, START + MS);
	bsn_poll(n, START + MS);
	check_counted(n, 0);
	count(&w[0], 3);
	n = restart(n, &config, w, 1, START + 2 * MS);
	bsn_poll(n, START + 2 * MS);
	count(&w[0], 4);
	check_counted(n, 7);
	/* Nor does one that comes begin where another ended while nobody looked. */
	number = w[0].number;
	n = restart(n, &config, w, 0, START + 3 * MS);
	bsn_poll(n, START + 3 * MS);
	writer_close(&w[0]);
	writer_attach(&w[1], n, START + 3 * MS);
	CHECK(w[1].number != number);
	bsn_poll(n, START + 4 * MS);
	check_counted(n, 0);
	t[0] = writer_thread(&w[1], 0);
	t[1] = writer_thread(&w[1], 1);
	CHECK(w_take_segment(&t[0]));
	CHECK(w_take_segment(&t[1]));
	bsn_poll(n, START + 5 * MS);
	count(&w[1], 2);
	check_counted(n, 2);
	free_with_writer(n, &w[1]);
}

int main(void)
{
	RUN(slots_that_are_none);
	RUN(progress_is_neither_lost_nor_doubled);
	RUN(what_a_dead_process_wrote_is_copied_once);
	RUN(what_was_sealed_since_is_copied_once);
	RUN(a_stock_taken_back_is_not_in_use);
	RUN(a_process_that_ended_contradicts_nothing);
	RUN(a_pool_that_has_shrunk);
	RUN(numbers_are_not_the_clients);
	RUN(nothing_passes_for_whole);
	RUN(kept_runs_are_found);
	RUN(kept_runs_move_on);
	RUN(handles_of_nobody_are_closed);
	RUN(who_lives_is_known_when_all_are_adopted);
	RUN(nothing_is_behind_the_last_run);
	RUN(segments_without_a_header);
	RUN(the_order_of_sealing_stays);
	RUN(a_successor_looks_at_no_run);
	RUN(a_successor_costs_no_memory);
	RUN(open_runs_are_told_once);
	RUN(waits_for_what_it_can_do);
	RUN(counters_go_on);
	free(d.bytes);
	return 0;
}
