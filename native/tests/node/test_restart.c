/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a successor must not believe, lose, or find twice. A kill in the middle
 * of a commit is made by taking the commit back: all of it but its number is
 * written before.
 */
#include <errno.h>
#include <sys/resource.h>

#include "node/internal.h"
#include "writer.h"

static struct decoded d;

/* --------------------------------------------------------------- commits --- */

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
		w_list(&w[1], 100 + round, true);
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

/* It went on in a segment that was parked, and died, while there was no daemon. */
static void what_the_dead_wrote_where_it_was_parked_is_copied(void)
{
	static struct decoded d;
	struct bsn_config config = test_config(8 << 20);
	struct wthread t, place;
	struct bsn_slice s;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	collect(n, trace_id(1), START, &s);
	CHECK(w_trace(&t, trace_id(2), 100, START));
	bsn_poll(n, START);
	w_park(&t, &place);
	fetch_add(&w_grants(&w)->moves, 1);
	bsn_poll(n, START + MS);
	CHECK_EQ(n->clients.all[0]->parked.count, 1);
	/* It is committed that it was. */
	collect(n, trace_id(3), START + MS, &s);
	CHECK(w_go_on(&t, &place));
	CHECK(w_trace(&t, trace_id(1), 100, START + MS));
	n = restart(n, &config, &w, 1, START + 2 * MS);
	CHECK_EQ(bsn_client_exited(n, w.number, START + 2 * MS), 0);
	bsn_poll(n, START + 2 * MS);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	free(d.bytes);
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

/* --------------------------------------------------------------- beliefs --- */

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

/* --------------------------------------------------- processes that ended --- */

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

/* -------------------------------------------------------------- counters --- */

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

/* As many marks as there is room for. */
static uint32_t fill_store(struct bsn *n, uint64_t *next)
{
	struct bsn_slice s;
	uint32_t count = 0;

	while (!bsn_collect(n, trace_id(*next), trace_id(*next), "t", START,
			    &s)) {
		++*next;
		count++;
	}
	return count;
}

static struct bsn *restart_store(struct bsn *n, uint64_t store_bytes)
{
	struct bsn_config config = test_config(4 << 20);
	struct held h;

	bsn_poll(n, START);
	h = hold(n);
	bsn_free(n);
	config.store_bytes = store_bytes;
	n = test_node(&config);
	CHECK_EQ(bsn_adopt_keep(n, START, h.keep), 0);
	CHECK_EQ(bsn_adopt_store(n, START, h.store), 0);
	close(h.store);
	close(h.keep);
	bsn_poll(n, START);
	return n;
}

static uint64_t store_bytes(struct bsn *n, uint64_t *used)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	*used = m.store_used_bytes;
	return m.store_bytes;
}

static void a_restart_takes_up_the_size_of_the_store(void)
{
	const uint32_t mib = 1 << 20, blocks = mib / 2048;
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct bsn *n;
	uint64_t used, next = 1;

	config.store_bytes = mib;
	n = test_node(&config);
	CHECK_EQ(fill_store(n, &next), blocks - 1);
	/* Larger. */
	n = restart_store(n, 2 * mib);
	CHECK_EQ(store_bytes(n, &used), 2 * mib);
	CHECK_EQ(used, mib);
	CHECK_EQ(fill_store(n, &next), blocks);
	/* Smaller than what it holds: all stays until it is let go of. */
	n = restart_store(n, mib);
	CHECK_EQ(store_bytes(n, &used), mib);
	CHECK_EQ(used, 2 * mib);
	CHECK_EQ(fill_store(n, &next), 0);
	for (uint64_t i = 1; i < next; i++)
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
	for (uint64_t i = 1; i <= blocks; i++)
		CHECK_EQ(bsn_slice_release(n, trace_id(i), false, START), 0);
	CHECK_EQ(fill_store(n, &next), 0);
	CHECK_EQ(bsn_slice_release(n, trace_id(blocks + 1), false, START), 0);
	CHECK_EQ(fill_store(n, &next), 1);
	/* As large as there is room for, which is four times of what it was at first. */
	n = restart_store(n, 16ull * mib);
	CHECK_EQ(store_bytes(n, &used), 4 * mib);
	CHECK_EQ(fill_store(n, &next), 3 * blocks);
	CHECK_EQ(bsn_slice_info(n, trace_id(next - 1), &s), 0);
	check_invariants(n);
	bsn_free(n);
}

/* Who is short of memory must not take what came back for broken. */
static void without_memory_nothing_is_broken(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct rlimit all, none;
	struct held h;

	bsn_poll(n, START);
	h = hold(n);
	bsn_free(n);
	n = test_node(&config);
	CHECK_EQ(getrlimit(RLIMIT_AS, &all), 0);
	none = (struct rlimit){.rlim_cur = 1, .rlim_max = all.rlim_max};
	CHECK_EQ(setrlimit(RLIMIT_AS, &none), 0);
	if (mmap(NULL, 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) !=
	    MAP_FAILED) {
		printf("  not here: this emulator limits nothing\n");
	} else {
		CHECK_EQ(bsn_adopt_keep(n, START, h.keep), -ENOMEM);
		CHECK_EQ(bsn_adopt_store(n, START, h.store), -ENOMEM);
	}
	CHECK_EQ(setrlimit(RLIMIT_AS, &all), 0);
	CHECK_EQ(bsn_adopt_keep(n, START, h.keep), 0);
	CHECK_EQ(bsn_adopt_store(n, START, h.store), 0);
	close(h.keep);
	close(h.store);
	bsn_poll(n, START);
	check_invariants(n);
	bsn_free(n);
}

int main(void)
{
	RUN(progress_is_neither_lost_nor_doubled);
	RUN(what_a_dead_process_wrote_is_copied_once);
	RUN(what_the_dead_wrote_where_it_was_parked_is_copied);
	RUN(what_was_sealed_since_is_copied_once);
	RUN(slots_that_are_none);
	RUN(a_process_that_ended_contradicts_nothing);
	RUN(numbers_are_not_the_clients);
	RUN(nothing_is_behind_the_last_run);
	RUN(nothing_passes_for_whole);
	RUN(handles_of_nobody_are_closed);
	RUN(who_lives_is_known_when_all_are_adopted);
	RUN(counters_go_on);
	RUN(a_restart_takes_up_the_size_of_the_store);
	RUN(without_memory_nothing_is_broken);
	free(d.bytes);
	return 0;
}
