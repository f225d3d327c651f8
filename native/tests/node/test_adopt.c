/* SPDX-License-Identifier: Apache-2.0 */
/* What survives: a loss, the end of a process, the restart of the daemon. */
#include <errno.h>
#include <fcntl.h>

#include "writer.h"

static struct decoded d;

static void losses_are_told(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	/* Before any segment, between runs, and of a collected trace. */
	w_lose(&t, trace_id(1), BS_RUN_FIRST | BS_RUN_LAST, 100);
	CHECK(w_trace(&t, trace_id(2), 100, START));
	w_lose(&t, trace_id(2), 0, 100);
	collect(n, trace_id(3), START, &s);
	w_lose(&t, trace_id(3), BS_RUN_FIRST, 100);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_LOSSY);
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_LOSSY | BSN_SLICE_HELD);
	CHECK_EQ(bsn_slice_info(n, trace_id(3), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_LOSSY | BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(3), &d);
	CHECK_EQ(d.by_kind[BS_PIECE_LOSS], 1);
	w_lose(&t, trace_id(3), BS_RUN_LAST, 100);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(3), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	/* A lossy run says so too. */
	CHECK(w_begin(&t, trace_id(4), 50, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "x", 1, START);
	w_end(&t, BS_RUN_LAST | BS_RUN_LOSSY);
	collect(n, trace_id(4), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_LOSSY | BSN_SLICE_HELD);
	/* Threads without a slot lost something. */
	WRITE_ONCE(w.context->records_unattributed, 1);
	__atomic_fetch_add(&w_grants(&w)->losses, 1, __ATOMIC_RELEASE);
	bsn_poll(n, START);
	CHECK(w_trace(&t, trace_id(5), 100, START));
	collect(n, trace_id(5), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_MAYBE_LOSSY | BSN_SLICE_HELD);
	free_with_writer(n, &w);
}

static void an_exit_leaves_the_open_run(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[3];

	writer_attach(&w[0], n, START);
	writer_attach(&w[1], n, START);
	t[0] = writer_thread(&w[0], 0);
	t[1] = writer_thread(&w[0], 1);
	t[2] = writer_thread(&w[1], 0);
	/* Trace 1 is collected before the exit, 2 after it; 3 was closed. */
	CHECK(w_begin(&t[0], trace_id(1), 1, 0, BS_RUN_FIRST, 1000));
	w_record(&t[0], BS_RECORD_DATA, "a", 1, START);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.open_handles, 1);
	w_record(&t[0], BS_RECORD_DATA, "b", 1, START);
	CHECK(w_trace(&t[1], trace_id(3), 100, START));
	CHECK(w_begin(&t[1], trace_id(2), 2, 0, BS_RUN_FIRST, 1000));
	w_record(&t[1], BS_RECORD_DATA, "c", 1, START);
	/* The other process has trace 2 open as well. */
	CHECK(w_begin(&t[2], trace_id(2), 3, 0, BS_RUN_FIRST, 1000));
	w_record(&t[2], BS_RECORD_DATA, "d", 1, START);
	CHECK_EQ(bsn_client_exited(n, w[0].number, START + MS), 0);
	CHECK_EQ(bsn_client_exited(n, w[0].number, START + MS), -ENOENT);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], 1);
	CHECK_EQ(d.pieces[d.n_pieces - 1].kind, BS_PIECE_EXIT);
	collect(n, trace_id(2), START + MS, &s);
	CHECK_EQ(s.open_handles, 1);
	decode_slice(n, trace_id(2), &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], 1);
	CHECK_EQ(d.by_kind[BS_PIECE_PROCESS], 2);
	collect(n, trace_id(3), START + MS, &s);
	decode_slice(n, trace_id(3), &d);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.clients, 1);
	writer_close(&w[0]);
	writer_close(&w[1]);
	bsn_free(n);
}

static void a_restart_changes_nothing(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s, before;
	struct writer w[2];
	struct wthread t[3];
	uint64_t cursor = 0;
	uint32_t free_before;

	writer_attach(&w[0], n, START);
	writer_attach(&w[1], n, START);
	t[0] = writer_thread(&w[0], 0);
	t[1] = writer_thread(&w[0], 1);
	t[2] = writer_thread(&w[1], 0);
	for (uint32_t i = 100; i < 1500; i++) {
		CHECK(w_trace(&t[i % 3], trace_id(i), 300, START));
		if (i % 100 == 0)
			bsn_poll(n, START);
	}
	bsn_poll(n, START);
	/* Collected: 1 is whole, 2 has an open run, 3 is trimmed in the middle
	 * of one. */
	CHECK(w_trace(&t[0], trace_id(1), 100, START));
	collect(n, trace_id(1), START, &s);
	CHECK(w_begin(&t[0], trace_id(2), 2, 0, BS_RUN_FIRST, 1000));
	w_record(&t[0], BS_RECORD_DATA, "a", 1, START);
	collect(n, trace_id(2), START, &s);
	CHECK(w_begin(&t[1], trace_id(3), 3, 0, BS_RUN_FIRST, 9000));
	for (uint32_t i = 0; i < 8; i++)
		w_record(&t[1], BS_RECORD_DATA, &s, 500, START);
	collect(n, trace_id(3), START, &s);
	CHECK_EQ(bsn_slice_trim(n, trace_id(3), s.bytes), 0);
	bsn_get_metrics(n, &m);
	free_before = (uint32_t)(m.store_used_bytes / 2048);
	CHECK_EQ(bsn_slice_info(n, trace_id(2), &before), 0);

	/* Meanwhile written: closed, open, grown, lost. */
	w_record(&t[0], BS_RECORD_DATA, "b", 1, START);
	w_end(&t[0], 0);
	CHECK(w_begin(&t[0], trace_id(2), 2, 1, 0, 1000));
	w_record(&t[0], BS_RECORD_DATA, "c", 1, START);
	w_record(&t[1], BS_RECORD_DATA, "d", 1, START);
	CHECK(w_trace(&t[2], trace_id(1), 100, START));
	w_lose(&t[2], trace_id(4), BS_RUN_FIRST | BS_RUN_LAST, 100);
	n = restart(n, &config, w, 2, START + MS);

	CHECK_EQ(bsn_slice_info(n, trace_id(2), &s), 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.slices, 3);
	CHECK(m.store_used_bytes / 2048 <= free_before + 3);
	check_invariants(n);
	bsn_poll(n, START + MS);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	decode_slice(n, trace_id(2), &d);
	CHECK_EQ(d.records, 3);
	CHECK_EQ(bsn_slice_info(n, trace_id(2), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 1);
	CHECK_EQ(s.collected_ns, START);
	CHECK_EQ(s.epoch, before.epoch);
	CHECK(!strcmp(s.trigger, "test"));
	/* Of 3, the new record alone. */
	CHECK_EQ(bsn_slice_info(n, trace_id(3), &s), 0);
	CHECK(s.bytes > s.trimmed_bytes && s.bytes - s.trimmed_bytes < 300);
	CHECK_EQ(s.open_handles, 1);
	collect(n, trace_id(4), START + MS, &s);
	CHECK(s.flags & BSN_SLICE_LOSSY);
	CHECK(s.epoch > before.epoch);
	/* All others are there, whole. */
	for (uint32_t i = 100; i < 1500; i += 7) {
		collect(n, trace_id(i), START + MS, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, 1);
	}
	/* The writers noticed nothing. */
	w_end(&t[0], BS_RUN_LAST);
	w_end(&t[1], BS_RUN_LAST);
	for (uint32_t i = 0; i < 3000; i++) {
		CHECK(w_trace(&t[i % 3], trace_id(10000 + i), 300, START));
		if (i % 100 == 0)
			bsn_poll(n, START + MS);
	}
	collect(n, trace_id(12999), START + MS, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(bsn_slice_info(n, trace_id(2), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	CHECK_EQ(bsn_slice_info(n, trace_id(3), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(2), &d);
	CHECK_EQ(d.records, 3);
	CHECK(bsn_slices(n, &cursor, &s, 1) == 1);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);

	/* And once more, straight away. */
	n = restart(n, &config, w, 2, START + MS);
	decode_slice(n, trace_id(2), &d);
	CHECK_EQ(d.records, 3);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	writer_close(&w[0]);
	writer_close(&w[1]);
	bsn_free(n);
}

/* Slices have runs of many threads: what was copied of all of them, and how far
 * each log is, must be true at once, so it is committed at once. */
static void a_poll_commits_once(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	uint64_t *commits = commits_map(n), before;
	struct bsn_slice s;
	struct writer w[3];
	struct wthread t[3];

	/* Far more of them than 32 bits count: some weeks. */
	*commits = UINT32_MAX - 3ull;
	for (int i = 0; i < 3; i++) {
		writer_attach(&w[i], n, START);
		t[i] = writer_thread(&w[i], 0);
		CHECK(w_begin(&t[i], trace_id(1), 1, 0, BS_RUN_FIRST, 30000));
		w_end(&t[i], 0);
	}
	collect(n, trace_id(1), START, &s);
	for (uint32_t round = 0; round < 8; round++) {
		for (int i = 0; i < 3; i++) {
			CHECK(w_trace(&t[i], trace_id(100 + round), 100,
				      START));
			CHECK(w_begin(&t[i], trace_id(1), 1, round + 1, 0,
				      3000));
			w_record(&t[i], BS_RECORD_DATA, "a", 1, START);
			w_end(&t[i], 0);
		}
		before = *commits;
		bsn_poll(n, START);
		CHECK_EQ(*commits, before + 1);
	}
	CHECK(*commits > UINT32_MAX);
	n = restart(n, &config, w, 3, START);
	bsn_poll(n, START);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 8 * 3);
	commits_unmap(commits);
	for (int i = 0; i < 3; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void a_restart_keeps_second_chances_and_tombstones(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	w_show(&t, 1);
	CHECK(w_begin(&t, trace_id(1), 1, 0, BS_RUN_FIRST, 1000));
	w_record(&t, BS_RECORD_DATA, "begin", 6, now);
	w_end(&t, 0);
	CHECK(w_trace(&t, trace_id(2), 100, now));
	for (uint32_t i = 0; i < 300; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now);
	}
	n = restart(n, &config, &w, 1, now);
	check_invariants(n);
	collect(n, trace_id(2), now, &s);
	CHECK_EQ(s.flags, EVICTED_BY_FINGERPRINT);
	CHECK(w_begin(&t, trace_id(1), 1, 1, 0, 1000));
	w_record(&t, BS_RECORD_DATA, "end", 4, now);
	w_end(&t, BS_RUN_LAST);
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 2);
	/* Eviction goes on where it was: the oldest first. */
	for (uint32_t i = 0; i < 300; i++) {
		now += MS;
		CHECK(w_trace(&t, trace_id(2000 + i), 30000, now));
		bsn_poll(n, now);
		check_invariants(n);
	}
	collect(n, trace_id(1299), now, &s);
	CHECK_EQ(s.flags, EVICTED_BY_FINGERPRINT);
	free_with_writer(n, &w);
}

static int adopt(struct bsn *n, const struct writer *w,
		 const struct bsn_client_fds *fds)
{
	return bsn_client_adopt(n, w->number, 1, "x", START, fds);
}

/* Every bit of what the node itself made is right, or it is refused. */
static void refuses_what_is_not_ours(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct writer w;
	struct bsn_metrics m;
	struct bsn_client_fds bad;
	struct held h;
	int fd;

	writer_attach(&w, n, START);
	h = hold(n);
	bsn_free(n);
	n = test_node(&config);
	CHECK_EQ(adopt(n, &w, &w.fds), -EPROTO); /* without a ledger */
	CHECK_EQ(bsn_adopt_keep(n, START, h.keep), 0);
	/* Wrong magic, wrong version, wrong size, no seals, no memfd. */
	w_header(&w)->magic++;
	CHECK_EQ(adopt(n, &w, &w.fds), -EPROTO);
	w_header(&w)->magic--;
	w_header(&w)->version = BS_ABI_VERSION + 1;
	CHECK_EQ(adopt(n, &w, &w.fds), -EPROTO);
	w_header(&w)->version = BS_ABI_OLDEST - 1;
	CHECK_EQ(adopt(n, &w, &w.fds), -EPROTO);
	w_header(&w)->version = BS_ABI_VERSION;
	w.context->magic++;
	CHECK_EQ(adopt(n, &w, &w.fds), -EPROTO);
	w.context->magic--;
	bad = w.fds;
	bad.arena = w.fds.channel;
	CHECK_EQ(adopt(n, &w, &bad), -EPROTO);
	bad.arena = open("/dev/null", O_RDWR | O_CLOEXEC);
	CHECK_EQ(adopt(n, &w, &bad), -EPROTO);
	close(bad.arena);
	bad.arena = memfd_create("unsealed", MFD_CLOEXEC);
	CHECK_EQ(ftruncate(bad.arena, 8 << 20), 0);
	CHECK_EQ(adopt(n, &w, &bad), -EPROTO);
	close(bad.arena);
	bad.arena = -1;
	CHECK_EQ(adopt(n, &w, &bad), -EPROTO);
	bad = w.fds;
	bad.context = memfd_create("short", MFD_CLOEXEC);
	CHECK_EQ(adopt(n, &w, &bad), -EPROTO);
	close(bad.context);
	/* It is another's arena: of the segments that this one was granted it
	 * has only some. */
	bad = w.fds;
	bad.arena = memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK_EQ(ftruncate(bad.arena, 2 * SEG), 0);
	CHECK_EQ(fcntl(bad.arena, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK), 0);
	CHECK_EQ(adopt(n, &w, &bad), -EPROTO);
	close(bad.arena);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.clients, 0);
	CHECK_EQ(m.pool_used_bytes, 0);
	/* After all of that it is welcome, as it was. */
	CHECK_EQ(adopt(n, &w, &w.fds), w.number);
	bsn_poll(n, START);
	check_invariants(n);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.clients, 1);
	CHECK(m.stock_bytes);
	bsn_free(n);

	n = test_node(&config);
	fd = memfd_create("unsealed", MFD_CLOEXEC);
	CHECK_EQ(bsn_adopt_store(n, START, fd), -EPROTO);
	CHECK_EQ(bsn_adopt_keep(n, START, fd), -EPROTO);
	CHECK_EQ(bsn_adopt_store(n, START, h.keep), -EPROTO);
	CHECK_EQ(bsn_adopt_keep(n, START, h.store), -EPROTO);
	CHECK_EQ(bsn_adopt_store(n, START, w.fds.arena), -EPROTO);
	close(fd);
	CHECK_EQ(bsn_adopt_store(n, START, -1), -EPROTO);
	/* After the first client it is too late. */
	writer_close(&w);
	writer_attach(&w, n, START);
	CHECK_EQ(bsn_adopt_store(n, START, h.store), -EBUSY);
	CHECK_EQ(bsn_adopt_keep(n, START, h.keep), -EBUSY);
	free_with_writer(n, &w);
	close(h.store);
	close(h.keep);
}

/* A daemon that is killed between taking a trigger and collecting its trace
 * leaves the trigger to its successor; one that was seen to is gone. */
static void a_trigger_outlives_who_took_it(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[4];
	struct writer w;

	writer_attach(&w, n, START);
	w_trigger(&w, trace_id(1), "slow", START);
	bsn_poll(n, START);
	CHECK_EQ(bsn_events(n, e, 4), 1);
	bsn_events_done(n);
	w_trigger(&w, trace_id(2), "slow", START);
	w_trigger(&w, trace_id(3), "slow", START);
	bsn_poll(n, START);
	CHECK_EQ(bsn_events(n, e, 1), 1);
	/* One more waits, in nobody's hands. */
	bsn_events_done(n);
	n = restart(n, &config, &w, 1, START + MS);
	CHECK_EQ(bsn_poll(n, START + MS), 2);
	CHECK_EQ(bsn_events(n, e, 4), 2);
	CHECK_EQ(e[0].id.lo, trace_id(2).lo);
	CHECK_EQ(e[1].id.lo, trace_id(3).lo);
	bsn_events_done(n);
	n = restart(n, &config, &w, 1, START + 2 * MS);
	CHECK_EQ(bsn_poll(n, START + 2 * MS), 0);
	/* All cells are free again, and more are not taken than there are. */
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		w_trigger(&w, trace_id(10 + i), "slow", START + 2 * MS);
	CHECK_EQ(bsn_poll(n, START + 2 * MS), BS_TRIGGER_CELLS);
	free_with_writer(n, &w);
}

static void clients_are_bounded(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n;
	struct bsn_client_fds fds;
	struct writer w[4];
	struct wthread t;
	struct bsn_slice s;
	struct bsn_event e;

	config.clients_max = 4;
	n = test_node(&config);
	for (int i = 0; i < 4; i++) {
		writer_attach(&w[i], n, START);
		t = writer_thread(&w[i], 0);
		CHECK(w_trace(&t, trace_id((uint64_t)i), 100, START));
	}
	CHECK_EQ(bsn_client_add(n, 1, "x", START, &fds), -ENOSPC);
	/* The one that has been gone longest gives way, and that is told. */
	CHECK_EQ(bsn_client_exited(n, w[2].number, START), 0);
	CHECK_EQ(bsn_client_exited(n, w[1].number, START + MS), 0);
	writer_close(&w[2]);
	writer_attach(&w[2], n, START + 2 * MS);
	CHECK(w[2].number > w[3].number);
	collect(n, trace_id(2), START + 2 * MS, &s);
	CHECK_EQ(s.flags, EVICTED_BY_FINGERPRINT);
	collect(n, trace_id(1), START + 2 * MS, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK(bsn_events(n, &e, 1) == 1);
	CHECK_EQ(e.kind, BSN_EVENT_CLIENT_DRAINED);
	for (int i = 0; i < 4; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

int main(void)
{
	RUN(losses_are_told);
	RUN(an_exit_leaves_the_open_run);
	RUN(a_restart_changes_nothing);
	RUN(a_poll_commits_once);
	RUN(a_restart_keeps_second_chances_and_tombstones);
	RUN(refuses_what_is_not_ours);
	RUN(a_trigger_outlives_who_took_it);
	RUN(clients_are_bounded);
	free(d.bytes);
	return 0;
}
