/* SPDX-License-Identifier: Apache-2.0 */
/* Segments of idle threads: parked by their process, gone on in, reclaimed. */
#include "random.h"
#include "writer.h"

static struct decoded d;

/* --------------------------------------------------------------- threads --- */

#define POOL (256ull << 20)
#define PROCESSES_MAX 40u

enum idle {
	NO_THREADS,
	THREADS_HOLD, /* what they took, as without a kernel that can tell */
	THREADS_PARK,
};

static struct writer processes[PROCESSES_MAX];

/* Each writes a trace of 100 bytes, and nothing more. Returns the bytes that all
 * wrote. */
static uint64_t begin_idle(struct bsn *n, uint32_t count, uint32_t threads,
			   enum idle idle, uint64_t *now)
{
	uint64_t bytes = 0, id = 0;

	for (uint32_t i = 0; i < count; i++) {
		struct wthread places[BS_THREAD_SLOTS], place;
		uint32_t taken = 0;

		writer_attach(&processes[i], n, *now);
		for (uint32_t k = 0; k < threads && idle != NO_THREADS; k++) {
			struct wthread t = writer_thread(&processes[i], k);

			/* Until there is one, or none any more. */
			for (uint32_t tries = 0;
			     tries < 50 && !w_take_segment(&t); tries++) {
				*now += 100 * MS;
				bsn_poll(n, *now);
			}
			if (t.segment == BS_SEGMENT_NONE)
				continue;
			CHECK(w_trace(&t, trace_id(1000000 + id++), 100, *now));
			bytes += 100;
			places[taken++] = t;
		}
		for (uint32_t k = 0; k < taken && idle == THREADS_PARK; k++)
			w_park(&places[k], &place);
		*now += 10 * MS;
		bsn_poll(n, *now);
	}
	return bytes;
}

struct usable {
	/* Bytes of what was written as much as is the pool. */
	uint64_t lost, there;
	/* In segments: what is there, and what it may write to at once. */
	uint64_t segment_bytes;
};

static bool is_there(struct bsn *n, struct bs_trace_id id, uint64_t now)
{
	static uint8_t buffer[SEG];
	struct bsn_slice s;

	return bsn_peek(n, id, now, buffer, sizeof(buffer), &s) > 30000;
}

/* What a process that comes now writes without loss, and finds afterwards. */
static struct usable use_pool(struct bsn *n, uint64_t now)
{
	/* Two in a segment. */
	const uint32_t bytes = 32000, traces = POOL / bytes;
	struct usable u = {0};
	struct writer w;
	struct wthread t;

	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < traces; i++) {
		u.lost += w_trace(&t, trace_id(i), bytes, now) ? 0 : bytes;
		if (i % 16)
			continue;
		now += MS;
		bsn_poll(n, now);
	}
	for (uint32_t i = 0; i < traces; i += 64)
		u.there += is_there(n, trace_id(i), now) ? 64ull * bytes : 0;
	check_invariants(n);
	u.segment_bytes =
		u.there / bytes / 2 * SEG +
		(uint64_t)(w_grants(&w)->head - w_grants(&w)->tail) * SEG;
	writer_close(&w);
	return u;
}

static struct usable usable_beside(uint32_t count, uint32_t threads,
				   enum idle idle)
{
	struct bsn_config config = test_config(POOL);
	struct bsn *n = test_node(&config);
	uint64_t now = START, bytes;
	struct bsn_metrics m;
	struct usable u;

	bytes = begin_idle(n, count, threads, idle, &now);
	bsn_get_metrics(n, &m);
	/* Until they have no more in hand than what is idle has. */
	for (uint32_t minute = 0; minute < 20; minute++) {
		now += 60 * SECOND;
		bsn_poll(n, now);
	}
	u = use_pool(n, now);
	printf("beside %u x %u threads, %s: %ju KiB of theirs in %ju MiB; "
	       "of %ju MiB %ju are lost, %ju there; its segments: %ju MiB\n",
	       count, idle == NO_THREADS ? 0 : threads,
	       idle == THREADS_PARK ? "parked" : "not parked",
	       (uintmax_t)bytes >> 10,
	       (uintmax_t)(m.active_bytes + m.sealed_bytes) >> 20,
	       (uintmax_t)POOL >> 20, (uintmax_t)u.lost >> 20,
	       (uintmax_t)u.there >> 20, (uintmax_t)u.segment_bytes >> 20);
	fflush(stdout);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);
	free_with_writers(n, processes, count);
	return u;
}

/* 256 threads in each of 16 processes, 0.4 MiB of traces: they had all of the
 * pool, and a process that came then lost what it wrote. */
static void threads_of_sixteen_processes(void)
{
	struct usable held = usable_beside(16, 256, THREADS_HOLD);
	struct usable parked = usable_beside(16, 256, THREADS_PARK);

	CHECK(held.lost > POOL / 2);
	CHECK_EQ(parked.lost, 0);
}

/* More threads than the pool has segments leave nine tenths of it to others. */
static void ten_thousand_threads(void)
{
	struct usable without = usable_beside(40, 250, NO_THREADS);
	struct usable parked = usable_beside(40, 250, THREADS_PARK);

	CHECK_EQ(without.lost, 0);
	CHECK_EQ(parked.lost, 0);
	CHECK(parked.there * 10 >= without.there * 9);
	CHECK(parked.segment_bytes * 10 >= POOL * 9);
}

/* -------------------------------------------------------------- segments --- */

/* They go in the order in which they were parked or sealed, over all processes;
 * one that is gone on in is not touched, and then as old as that. */
static void reclaimed_in_order(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct wthread t[2], places[4];
	uint64_t now = START, id = 100;
	struct writer w[2];
	bool gone[5] = {false};

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	/* 0 and 2 parked, 1 sealed, 3 parked and gone on in; then 4 parked. */
	for (uint32_t i = 0; i < 4; i++) {
		CHECK(w_trace(&t[i % 2], trace_id(i), 100, now));
		if (i == 1)
			CHECK(w_take_segment(&t[1]));
		else
			w_park(&t[i % 2], &places[i]);
		now += MS;
		bsn_poll(n, now);
	}
	CHECK(w_go_on(&t[1], &places[3]));
	CHECK(w_trace(&t[0], trace_id(4), 100, now));
	w_park(&t[0], &places[3]);
	while (!gone[4]) {
		CHECK(w_trace(&t[0], trace_id(id++), 30000, now));
		now += MS;
		bsn_poll(n, now);
		for (uint32_t i = 0; i < 5; i++) {
			bool is_gone = flags_of(n, trace_id(i), now) ==
				       EVICTED_BY_FINGERPRINT;

			CHECK(is_gone >= gone[i]);
			gone[i] = is_gone;
		}
		CHECK(gone[0] >= gone[1] && gone[1] >= gone[2] &&
		      gone[2] >= gone[4]);
		CHECK(!gone[3]);
		CHECK(id < 1000);
	}
	/* What the node took, nobody goes on in. */
	CHECK(!w_go_on(&t[0], &places[0]));
	check_invariants(n);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* A trace that is collected gets what is written to it afterwards, by whom and in
 * whichever segment, also where the node did not look in between; each run once. */
static void slices_go_on(bool restarts)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	uint32_t handle = 77, seq = 0;
	struct wthread t[2], place = {0};
	struct bsn_slice s;
	uint64_t now = START;
	struct writer w;

	writer_attach(&w, n, now);
	for (uint32_t i = 0; i < 2; i++)
		t[i] = writer_thread(&w, i);
	for (uint32_t round = 0; round < 40; round++) {
		struct wthread *writes = &t[round % 2];

		if (round)
			CHECK(w_go_on(writes, &place));
		CHECK(w_begin(writes, trace_id(1), handle, seq,
			      seq ? 0 : BS_RUN_FIRST, 100));
		w_record(writes, BS_RECORD_DATA, "run", 3, now);
		seq++;
		if (round % 3 == 0)
			bsn_poll(n, now);
		w_end(writes, 0);
		if (round % 5 == 0)
			bsn_poll(n, now);
		w_park(writes, &place);
		if (round % 7 == 0)
			bsn_poll(n, now);
		if (round == 20)
			collect(n, trace_id(1), now, &s);
		if (restarts)
			n = restart(n, &config, &w, 1, now);
		now += 10 * MS;
	}
	bsn_poll(n, now);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 40);
	CHECK_EQ(check_order(&d), 1);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(bsn_client_exited(n, w.number, now), 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 40);
	check_invariants(n);
	free_with_writer(n, &w);
}

static void slices_go_on_in_what_was_parked(void)
{
	slices_go_on(false);
	slices_go_on(true);
}

/* While there is no slice nothing is watched: all of a parked segment is met by the
 * first search, and what is written there later comes once. */
static void the_first_slice_has_what_was_parked_before(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct wthread t, place;
	struct bsn_slice s;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t i = 0; i < 10; i++)
		CHECK(w_trace(&t, trace_id(i), 100, START));
	w_park(&t, &place);
	bsn_poll(n, START);
	for (uint64_t i = 8; i < 10; i++) {
		collect(n, trace_id(i), START, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK_EQ(s.open_handles, 0);
	}
	CHECK(w_go_on(&t, &place));
	CHECK(w_trace(&t, trace_id(9), 100, START));
	bsn_poll(n, START);
	for (uint64_t i = 8; i < 10; i++) {
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, i == 9 ? 2 : 1);
	}
	free_with_writer(n, &w);
}

/* What is left of a process that is gone is reclaimed in its turn, and then the
 * process is forgotten. */
static void a_process_with_parked_segments_ends(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct wthread t, other, place;
	uint64_t now = START, id = 100;
	struct bsn_event e[8];
	struct writer w[2];
	int drained = 0;

	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, now);
	t = writer_thread(&w[0], 0);
	other = writer_thread(&w[1], 0);
	for (uint64_t i = 0; i < 3; i++) {
		CHECK(w_trace(&t, trace_id(i), 100, now));
		w_park(&t, &place);
	}
	bsn_poll(n, now);
	CHECK_EQ(bsn_client_exited(n, w[0].number, now), 0);
	for (uint64_t i = 0; i < 3; i++)
		CHECK_EQ(flags_of(n, trace_id(i), now), 0);
	while (!drained) {
		CHECK(w_trace(&other, trace_id(id++), 30000, now));
		now += MS;
		bsn_poll(n, now);
		for (int i = bsn_events(n, e, 8); i-- > 0;)
			drained += e[i].kind == BSN_EVENT_CLIENT_DRAINED;
		CHECK(id < 1000);
	}
	for (uint64_t i = 0; i < 3; i++)
		CHECK_EQ(flags_of(n, trace_id(i), now), EVICTED_BY_FINGERPRINT);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* ------------------------------------------------------------------ lies --- */

/* Who parks all that it gets, and more than it may, holds nothing that others
 * need; and who holds all that it gets, no more than its threads could. */
static void more_than_its_threads_could(bool parks)
{
	struct bsn_config config = test_config(128 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct writer w;
	uint64_t now = START;
	uint32_t taken = 0;

	writer_attach(&w, n, now);
	for (uint32_t round = 0; round < 400; round++) {
		struct wthread t = writer_thread(&w, round % 256), place;

		for (; w_take_segment(&t); taken++) {
			if (parks)
				w_park(&t, &place);
			t.segment = BS_SEGMENT_NONE;
		}
		now += 10 * MS;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK(m.active_bytes <= 2 * BS_THREAD_SLOTS * SEG);
		CHECK_EQ(m.corrupt > 0, !parks && taken > 2 * BS_THREAD_SLOTS);
		check_invariants(n);
	}
	CHECK(taken > 3000);
	CHECK_EQ(m.active_bytes, parks ? 0 : 2 * BS_THREAD_SLOTS * SEG);
	free_with_writer(n, &w);
}

static void who_takes_more_than_its_threads_could(void)
{
	more_than_its_threads_could(true);
	more_than_its_threads_could(false);
}

/* One that writes on in what it parked harms itself alone. */
static void who_writes_where_it_parked(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct wthread honest, liar, place;
	uint64_t now = START, id = 0;
	struct writer w[2];
	struct bsn_slice s;

	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, now);
	honest = writer_thread(&w[0], 0);
	liar = writer_thread(&w[1], 0);
	for (uint32_t round = 0; round < 500; round++) {
		if (liar.segment == BS_SEGMENT_NONE || below(8) == 0)
			w_take_segment(&liar);
		if (liar.segment != BS_SEGMENT_NONE) {
			uint32_t segment = liar.segment;

			w_park(&liar, &place);
			liar.segment = segment;
			if (liar.cursor < SEG / 2)
				w_trace(&liar, trace_id(1000000 + round), 100,
					now);
		}
		CHECK(w_trace(&honest, trace_id(id++), 30000, now));
		now += MS;
		bsn_poll(n, now);
		check_invariants(n);
		if (round % 100 == 50)
			n = restart(n, &config, w, 2, now);
	}
	/* All but what had to go for what came. */
	for (uint64_t i = id - 60; i < id; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		bsn_slice_release(n, trace_id(i), false, now);
	}
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

int main(int argc, char **argv)
{
	amount_of(argc, argv, 0);
	RUN(threads_of_sixteen_processes);
	RUN(ten_thousand_threads);
	RUN(reclaimed_in_order);
	RUN(slices_go_on_in_what_was_parked);
	RUN(the_first_slice_has_what_was_parked_before);
	RUN(a_process_with_parked_segments_ends);
	RUN(who_takes_more_than_its_threads_could);
	RUN(who_writes_where_it_parked);
	free(d.bytes);
	return 0;
}
