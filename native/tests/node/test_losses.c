/* SPDX-License-Identifier: Apache-2.0 */
/* Nothing that was lost is forgotten, and nothing is there twice. */
#include "writer.h"

static struct decoded d;

/* Where the index is full of runs, room is made while news is read: that looks
 * at open runs, also in the segment that the news is about. */
static void a_full_index_counts_each_run_once(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n;
	uint64_t now = START, written = 0, first;

	config.index_traces = config.index_runs = 4096;
	config.tombstones = 200;
	n = test_node(&config);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t round = 0; round < 200; round++) {
		now += MS;
		first = written;
		for (uint32_t i = 0; i < 500; i++)
			CHECK(w_trace(&t, trace_id(written++), 40, now));
		/* Still open when the room is made. */
		CHECK(w_begin(&t, trace_id(written), 1u << 30, 0, BS_RUN_FIRST,
			      100));
		w_record(&t, BS_RECORD_DATA, "a", 1, now);
		bsn_poll(n, now);
		w_end(&t, BS_RUN_LAST);
		written++;
		bsn_get_metrics(n, &m);
		for (uint64_t i = first; i < written; i += 25) {
			collect(n, trace_id(i), now, &s);
			CHECK_EQ(s.flags, BSN_SLICE_HELD);
			CHECK_EQ(s.open_handles, 0);
			decode_slice(n, trace_id(i), &d);
			CHECK_EQ(d.records, 1);
			bsn_slice_release(n, trace_id(i), false, now);
		}
	}
	CHECK(m.reclaims > 100);
	writer_close(&w);
	bsn_free(n);
}

/* A thread was killed while it put a trigger into the queue: those of other
 * threads behind it are the most wanted ones there are. */
static void triggers_of_the_dead_are_taken(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[4];
	struct bsn_metrics m;
	struct writer w;

	writer_attach(&w, n, START);
	w_trigger(&w, trace_id(1), "first", START);
	w.context->trigger_head++;
	w_trigger(&w, trace_id(2), "crash", START);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	CHECK_EQ(bsn_events(n, e, 4), 3);
	CHECK_EQ(e[0].id.lo, trace_id(1).lo);
	CHECK_EQ(e[1].id.lo, trace_id(2).lo);
	CHECK_EQ(e[2].kind, BSN_EVENT_CLIENT_DRAINED);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.cells_skipped, 1);
	writer_close(&w);
	bsn_free(n);
}

/* Lost before the thread had any segment, when the index had no room for the
 * trace: then all that it does not know may be concerned. */
static void losses_without_a_place_are_told(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct writer w;
	struct wthread t, other;

	config.index_traces = 64;
	n = test_node(&config);
	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	other = writer_thread(&w, 1);
	for (uint32_t i = 0; i < 64; i++)
		CHECK(w_trace(&t, trace_id(i), 0, START));
	bsn_poll(n, START);
	CHECK_EQ(flags_of(n, trace_id(100), START), 0);
	w_lose(&other, trace_id(100), BS_RUN_FIRST | BS_RUN_LAST, 100);
	CHECK_EQ(flags_of(n, trace_id(100), START), BSN_SLICE_MAYBE_LOSSY);
	writer_close(&w);
	bsn_free(n);
}

/* News of a loss that did not fit into the ring concerns all that the process
 * wrote then, also for the next daemon. */
static void a_restart_forgets_no_loss(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct writer w[2];
	struct wthread t[2];
	uint64_t now = START;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
		CHECK(w_trace(&t[i], trace_id((uint64_t)i), 100, now));
	}
	for (uint32_t i = 0; i < BS_RUN_RING_ENTRIES; i++)
		w_trace(&t[0], trace_id(10), 0, now);
	w_lose(&t[0], trace_id(1000), BS_RUN_FIRST | BS_RUN_LAST, 100);
	now += MS;
	CHECK_EQ(flags_of(n, trace_id(0), now), BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(flags_of(n, trace_id(1), now), 0);
	n = restart(n, &config, w, 2, now + MS);
	now += 2 * MS;
	CHECK_EQ(flags_of(n, trace_id(0), now), BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(flags_of(n, trace_id(1), now), 0);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* What an earlier life of a segment of the keep arena left there is no run, also
 * where it looks like one of this life. */
static void a_restart_finds_no_run_that_is_none(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	/* At any offset of eight: committed 8, generation 1. */
	const uint64_t left = 8 | 1ull << 32;
	const size_t arena_bytes = 1 << 20;
	int keep = dup(bsn_keep_fd(n));
	off_t offset = lseek(keep, 0, SEEK_END) - (off_t)arena_bytes;
	uint64_t *arena = mmap(NULL, arena_bytes, PROT_READ | PROT_WRITE,
			       MAP_SHARED, keep, offset);
	static uint8_t payload[30000], buffer[4096];
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	CHECK(arena != MAP_FAILED);
	for (size_t i = 0; i < arena_bytes / 8; i++)
		arena[i] = left;
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	/* They stay open: the first are kept. */
	for (uint32_t i = 0; i < 140; i++) {
		now += MS;
		CHECK(w_begin(&t, trace_id(i), i, 0, BS_RUN_FIRST, 30100));
		w_record(&t, BS_RECORD_DATA, payload, 30000, now);
		w_end(&t, 0);
		bsn_poll(n, now);
	}
	bsn_free(n);
	n = test_node(&config);
	CHECK_EQ(bsn_adopt_keep(n, now, keep), 0);
	bsn_get_metrics(n, &m);
	CHECK(m.runs_indexed > 4);
	CHECK_EQ(bsn_peek(n, (struct bs_trace_id){left, left}, now, buffer,
			  sizeof(buffer), &s),
		 0);
	munmap(arena, arena_bytes);
	close(keep);
	writer_close(&w);
	bsn_free(n);
}

/* A second chance outlives the process, and its losses with it. */
static void what_is_kept_of_the_gone_is_in_doubt(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	static uint8_t payload[30000];
	struct bsn_event e[4];
	struct writer gone, w;
	struct wthread t;
	uint64_t now = START;
	int keep;

	writer_attach(&gone, n, now);
	t = writer_thread(&gone, 0);
	CHECK(w_begin(&t, trace_id(1), 1, 0, BS_RUN_FIRST, 30100));
	w_record(&t, BS_RECORD_DATA, payload, 30000, now);
	w_end(&t, 0);
	/* Its own later segments push it into the keep arena. */
	for (uint64_t i = 0; i < 200; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now);
	}
	CHECK_EQ(flags_of(n, trace_id(1), now), 0);
	WRITE_ONCE(gone.context->records_unattributed, 1);
	bsn_poll(n, now);
	CHECK_EQ(flags_of(n, trace_id(1), now), BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(bsn_client_exited(n, gone.number, now), 0);
	writer_close(&gone);
	/* Another process's take the place of all that is left of it. */
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint64_t i = 0; !bsn_events(n, e, 4); i++) {
		CHECK(i < 1000);
		now += MS / 1000;
		CHECK(w_trace(&t, trace_id(5000 + i), 30000, now));
		bsn_poll(n, now);
	}
	CHECK_EQ(e[0].kind, BSN_EVENT_CLIENT_DRAINED);
	CHECK_EQ(flags_of(n, trace_id(1), now), BSN_SLICE_MAYBE_LOSSY);
	keep = dup(bsn_keep_fd(n));
	bsn_free(n);
	n = test_node(&config);
	bsn_poll(n, now);
	CHECK_EQ(bsn_adopt_keep(n, now, keep), 0);
	CHECK_EQ(flags_of(n, trace_id(1), now), BSN_SLICE_MAYBE_LOSSY);
	close(keep);
	writer_close(&w);
	bsn_free(n);
}

/* Times of 32 bits wrap after 52 days; the doubt must not. */
static void losses_are_told_at_any_uptime(void)
{
	const uint64_t wrap = 1ull << 52;
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct writer w;
	struct wthread t;

	bsn_poll(n, wrap - SECOND);
	writer_attach(&w, n, wrap - SECOND);
	t = writer_thread(&w, 0);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	bsn_poll(n, wrap - SECOND);
	CHECK(w_trace(&t, trace_id(2), 100, START));
	bsn_poll(n, wrap + SECOND);
	WRITE_ONCE(w.context->records_unattributed, 1);
	bsn_poll(n, wrap + 2 * SECOND);
	CHECK_EQ(flags_of(n, trace_id(1), wrap + 2 * SECOND), 0);
	CHECK_EQ(flags_of(n, trace_id(2), wrap + 2 * SECOND),
		 BSN_SLICE_MAYBE_LOSSY);
	writer_close(&w);
	bsn_free(n);
}

/* A process that is gone leaves the array in the middle of a round through it:
 * nobody else misses his turn. */
static void all_are_drained_while_one_leaves(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_metrics m;
	struct writer w[4];
	struct wthread t[4];
	uint64_t now = START;

	config.index_traces = 64;
	config.tombstones = 1;
	n = test_node(&config);
	for (int i = 0; i < 4; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	/* All of the index is the first one's, in one segment. */
	for (uint64_t i = 0; i < 60; i++)
		CHECK(w_trace(&t[0], trace_id(i), 100, now));
	bsn_poll(n, now);
	CHECK_EQ(bsn_client_exited(n, w[0].number, now), 0);
	now += 100 * SECOND;
	for (int i = 1; i < 4; i++) {
		for (uint64_t k = 0; k < 15; k++)
			CHECK(w_trace(&t[i], trace_id((uint64_t)i * 100 + k),
				      100, now));
	}
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.reclaims, 1);
	CHECK_EQ(m.runs_drained, 60 + 3 * 15);
	for (int i = 0; i < 4; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* More than the control plane has room for, of a process that is gone. */
static void no_trigger_is_dropped_at_an_exit(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	static struct bsn_event e[2048];
	struct bsn_metrics m;
	struct writer w[12];
	uint64_t taken = 0;
	struct wthread t;
	int got;

	for (int i = 0; i < 12; i++) {
		writer_attach(&w[i], n, START);
		t = writer_thread(&w[i], 0);
		CHECK(w_trace(&t, trace_id((uint64_t)i), 100, START));
		for (uint64_t k = 0; k < BS_TRIGGER_CELLS; k++)
			w_trigger(&w[i], trace_id(k), "many", START);
		CHECK_EQ(bsn_client_exited(n, w[i].number, START), 0);
	}
	while ((got = bsn_events(n, e, 2048))) {
		for (int i = 0; i < got; i++)
			taken += e[i].kind == BSN_EVENT_TRIGGER;
		bsn_events_done(n);
		bsn_poll(n, START);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(taken + m.triggers_lost, 12 * BS_TRIGGER_CELLS);
	CHECK_EQ(m.triggers_lost, 0);
	for (int i = 0; i < 12; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

int main(void)
{
	RUN(what_is_kept_of_the_gone_is_in_doubt);
	RUN(losses_are_told_at_any_uptime);
	RUN(all_are_drained_while_one_leaves);
	RUN(no_trigger_is_dropped_at_an_exit);
	RUN(a_restart_finds_no_run_that_is_none);
	RUN(losses_without_a_place_are_told);
	RUN(a_restart_forgets_no_loss);
	RUN(triggers_of_the_dead_are_taken);
	RUN(a_full_index_counts_each_run_once);
	free(d.bytes);
	return 0;
}
