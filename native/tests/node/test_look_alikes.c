/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Traces with the fingerprint of another one, or half of it. Who chooses trace ids makes
 * as many as he likes, and honest processes write them: no search takes long for it, and
 * none that did not look at a run says that it knows all.
 */
#include "node/internal.h"
#include "writer.h"

static struct decoded d;

/* Of one process and fingerprint so many cost a look, and then no more. */
#define LOOKS 17u

static void write_alike(struct wthread *t, struct bs_trace_id id,
			uint32_t count)
{
	for (uint32_t k = 1; k <= count; k++)
		CHECK(w_trace(t, look_alike(id, k), 100, START));
}

static uint64_t false_hits(struct bsn *n)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	return m.false_hits;
}

static void check_found(struct bsn *n, struct bs_trace_id id, uint32_t flags,
			uint32_t records)
{
	struct bsn_slice s;

	CHECK_EQ(flags_of(n, id, START), flags & ~(uint32_t)BSN_SLICE_HELD);
	collect(n, id, START, &s);
	CHECK_EQ(s.flags, flags);
	decode_slice(n, id, &d);
	CHECK_EQ(d.records, records);
	CHECK_EQ(bsn_slice_release(n, id, false, START), 0);
}

/* ---------------------------------------------------------- fingerprints --- */

/* As a directory tells it, and as a column does, which has half of it. */
static void write_and_find(uint32_t alike, bool sealed, uint32_t flags,
			   uint32_t records)
{
	struct bsn_config config = test_config(8 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	write_alike(&t, trace_id(1), alike);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	CHECK(w_trace(&t, trace_id(2), 100, START));
	if (sealed)
		CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	for (uint32_t i = 0; i < 2; i++) {
		uint64_t met = false_hits(n);

		check_found(n, trace_id(1), flags, records);
		/* A peek, and a slice. */
		CHECK_EQ(false_hits(n) - met,
			 2 * (alike < LOOKS ? alike : LOOKS));
		/* Of another trace of the process all is known. */
		check_found(n, trace_id(2), BSN_SLICE_HELD, 1);
	}
	free_with_writer(n, &w);
}

static void what_is_passed_over_is_told(void)
{
	for (uint32_t sealed = 0; sealed < 2; sealed++) {
		write_and_find(0, sealed, BSN_SLICE_HELD, 1);
		write_and_find(LOOKS - 1, sealed, BSN_SLICE_HELD, 1);
		write_and_find(LOOKS, sealed, BSN_SLICE_MAYBE_LOSSY, 0);
		write_and_find(1000, sealed, BSN_SLICE_MAYBE_LOSSY, 0);
	}
}

/* Where nothing came behind them, nothing was passed over. */
static void who_looked_at_all_says_so(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(1), 100, START));
	write_alike(&t, trace_id(1), LOOKS);
	check_found(n, trace_id(1), BSN_SLICE_HELD, 1);
	/* A second handle of the trace: it is found in part. */
	CHECK(w_trace(&t, trace_id(1), 100, START));
	check_found(n, trace_id(1), BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY, 1);
	free_with_writer(n, &w);
}

/* Searches that one pass is for: those of that fingerprint say it, all of them, and
 * what another process wrote is found. */
static void others_of_the_pass_know_all(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bs_trace_id alike = look_alike(trace_id(1), 1 << 20);
	struct writer w[2];
	struct wthread t[2];
	struct bsn_slice s;

	for (uint32_t i = 0; i < 2; i++) {
		writer_attach(&w[i], n, START);
		t[i] = writer_thread(&w[i], 0);
	}
	write_alike(&t[0], trace_id(1), 100);
	CHECK(w_trace(&t[1], trace_id(1), 100, START));
	CHECK(w_trace(&t[1], alike, 100, START));
	CHECK(w_trace(&t[0], trace_id(2), 100, START));
	/* The first is looked for at once. */
	CHECK_EQ(bsn_collect(n, trace_id(3), trace_id(3), "test", START, &s),
		 0);
	CHECK_EQ(bsn_collect(n, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	CHECK_EQ(bsn_collect(n, alike, alike, "test", START, &s), 0);
	CHECK_EQ(bsn_collect(n, trace_id(2), trace_id(2), "test", START, &s),
		 0);
	CHECK_EQ(s.flags, BSN_SLICE_SEARCHING);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(bsn_slice_info(n, alike, &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(bsn_slice_info(n, trace_id(2), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(bsn_slice_info(n, trace_id(3), &s), 0);
	CHECK_EQ(s.flags, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, 1);
	free_with_writers(n, w, 2);
}

/* ----------------------------------------------------------------- halves --- */

/* Another trace, which has the low half of the fingerprint and not the rest. */
static struct bs_trace_id half_alike(struct bs_trace_id id, uint64_t i)
{
	uint64_t hi = id.hi ^ i;
	uint64_t mix = bs_trace_mix(id.hi, id.lo) ^ 1ull << 60;

	return (struct bs_trace_id){hi, bs_trace_lo(hi, mix)};
}

static void half_a_fingerprint_is_none(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bs_trace_id half = half_alike(trace_id(1), 1);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK_EQ((uint32_t)bs_fingerprint(half.hi, half.lo),
		 (uint32_t)bs_fingerprint(trace_id(1).hi, trace_id(1).lo));
	/* One long trace, and many. */
	for (uint32_t i = 0; i < 200; i++) {
		CHECK(w_begin(&t, half, 0x10000, i, i ? 0 : BS_RUN_FIRST, 100));
		w_record(&t, BS_RECORD_DATA, "x", 1, START);
		w_end(&t, 0);
		CHECK(w_trace(&t, half_alike(trace_id(1), 2 + i), 40, START));
	}
	CHECK(w_trace(&t, trace_id(1), 100, START));
	for (uint32_t sealed = 0; sealed < 2; sealed++) {
		check_found(n, trace_id(1), BSN_SLICE_HELD, 1);
		CHECK_EQ(false_hits(n), 0);
		if (!sealed)
			CHECK(w_take_segment(&t));
		bsn_poll(n, START);
	}
	free_with_writer(n, &w);
}

/* ------------------------------------------------------------ what is kept --- */

#define LONG_RUNS 40u

static void write_open(struct wthread *t, struct bs_trace_id id,
		       uint32_t handle, uint32_t runs)
{
	w_show(t, handle);
	for (uint32_t i = 0; i < runs; i++) {
		CHECK(w_begin(t, id, handle, i, i ? 0 : BS_RUN_FIRST, 100));
		w_record(t, BS_RECORD_DATA, "a", 1, START);
		w_end(t, 0);
		/* Else they were one run. */
		CHECK(w_trace(t, trace_id(5000 + i), 10, START));
	}
}

/* Until all of it was kept. */
static void push(struct bsn *n, struct wthread *t)
{
	struct bsn_metrics m = {0};

	for (uint64_t i = 0; m.reclaims < 30; i++) {
		CHECK(w_trace(t, trace_id(1000000 + i), 30000, START));
		bsn_poll(n, START);
		bsn_get_metrics(n, &m);
	}
}

/* An honest trace of many runs, kept; and whoever asks for another one that looks
 * like it: once, or each time. */
static void what_is_kept_stays_its_traces(uint32_t asked, bool restarts)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct writer w[2];
	struct wthread t, other;
	struct bsn_metrics m;
	struct bsn_slice s;

	for (uint32_t i = 0; i < 2; i++)
		writer_attach(&w[i], n, START);
	t = writer_thread(&w[0], 0);
	other = writer_thread(&w[1], 0);
	write_open(&t, trace_id(1), 5, LONG_RUNS);
	CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	push(n, &other);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.second_chances, LONG_RUNS);
	if (restarts)
		n = restart(n, &config, w, 2, START);
	for (uint32_t i = 1; i <= asked; i++)
		check_found(n, look_alike(trace_id(1), i), 0, 0);
	/* Nobody looked at what is kept of others. */
	CHECK_EQ(false_hits(n), 0);
	CHECK(w_begin(&t, trace_id(1), 5, LONG_RUNS, 0, 100));
	w_record(&t, BS_RECORD_DATA, "b", 1, START);
	w_end(&t, BS_RUN_LAST);
	w_show(&t, 0);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, LONG_RUNS + 1);
	free_with_writers(n, w, 2);
}

static void nobody_takes_from_a_trace_what_was_kept_of_it(void)
{
	what_is_kept_stays_its_traces(0, false);
	what_is_kept_stays_its_traces(20, false);
	what_is_kept_stays_its_traces(20, true);
}

int main(void)
{
	RUN(what_is_passed_over_is_told);
	RUN(who_looked_at_all_says_so);
	RUN(others_of_the_pass_know_all);
	RUN(half_a_fingerprint_is_none);
	RUN(nobody_takes_from_a_trace_what_was_kept_of_it);
	free(d.bytes);
	return 0;
}
