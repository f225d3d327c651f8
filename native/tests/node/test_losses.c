/* SPDX-License-Identifier: Apache-2.0 */
/* Nothing that was lost is forgotten, and nothing is there twice. */
#include <errno.h>

#include "writer.h"

static struct decoded d;

/* Handles of tests, that no w_trace() uses. */
#define HANDLE 0x10000u

static const uint8_t payload[BS_PAYLOAD_MAX];

/* ------------------------------------------------------------ told, untold --- */

/* A run that found no segment: its thread says which trace's it was. That is
 * known of it, and nothing of others. */
static void a_loss_is_of_its_trace(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct writer w;
	struct wthread t, other;
	struct bsn_slice s;
	struct bsn *n = node_with_writer(&config, &w, &t);

	other = writer_thread(&w, 1);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	CHECK(w_trace(&t, trace_id(2), 100, START));
	/* As a whole; a part; by a thread that never had a segment. */
	w_lose(&t, trace_id(3), BS_RUN_FIRST | BS_RUN_LAST, 100);
	w_lose(&t, trace_id(1), 0, 100);
	w_lose(&other, trace_id(4), BS_RUN_FIRST | BS_RUN_LAST, 100);
	CHECK_EQ(flags_of(n, trace_id(1), START), BSN_SLICE_LOSSY);
	CHECK_EQ(flags_of(n, trace_id(2), START), 0);
	CHECK_EQ(flags_of(n, trace_id(3), START), BSN_SLICE_LOSSY);
	CHECK_EQ(flags_of(n, trace_id(4), START), BSN_SLICE_LOSSY);
	CHECK_EQ(flags_of(n, trace_id(5), START), 0);
	/* Also when it is collected, released and collected again. */
	for (int i = 0; i < 2; i++) {
		collect(n, trace_id(1), START, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_LOSSY);
		CHECK_EQ(bsn_slice_release(n, trace_id(1), false, START), 0);
	}
	free_with_writer(n, &w);
}

/* More than the ring holds, between two looks. */
static void a_full_ring_loses_nothing(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t round = 0; round < 3; round++) {
		for (uint64_t i = 0; i < BS_LOSS_RING_ENTRIES; i++)
			w_lose(&t, trace_id(1000 * round + i),
			       BS_RUN_FIRST | BS_RUN_LAST, 100);
		bsn_poll(n, START + round * MS);
		for (uint64_t i = 0; i < BS_LOSS_RING_ENTRIES; i++)
			CHECK_EQ(flags_of(n, trace_id(1000 * round + i),
					  START + round * MS),
				 BSN_SLICE_LOSSY);
	}
	CHECK_EQ(w_area(&w, 0)->losses_untold, 0);
	free_with_writer(n, &w);
}

/* A thread that lost, and was gone before anybody looked: no slot shows it. */
static void losses_of_a_thread_that_ended_are_read(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct writer w;
	struct wthread t, gone;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(1), 100, START));
	bsn_poll(n, START);
	gone = writer_thread(&w, 200);
	w_lose(&gone, trace_id(2), BS_RUN_FIRST | BS_RUN_LAST, 100);
	WRITE_ONCE(w.context->slots[200].tid, 0);
	WRITE_ONCE(w_area(&w, 200)->owner_tid, 0);
	bsn_poll(n, START + MS);
	CHECK_EQ(flags_of(n, trace_id(2), START + MS), BSN_SLICE_LOSSY);
	free_with_writer(n, &w);
}

#define MINUTES (60 * SECOND)

/* Of each process traces from long before a loss of nobody knows which trace to long
 * after it. A trace may have handles some minutes apart. */
struct doubt {
	struct bsn *n;
	struct writer w[2];
	struct wthread t[2];
	uint64_t now;
};

static struct bs_trace_id long_before(int i)
{
	return trace_id(40 + (uint64_t)i);
}

static struct bs_trace_id before(int i)
{
	return trace_id(10 + (uint64_t)i);
}

static struct bs_trace_id during(int i)
{
	return trace_id(20 + (uint64_t)i);
}

static struct bs_trace_id after(int i)
{
	return trace_id(30 + (uint64_t)i);
}

static struct bs_trace_id long_after(int i)
{
	return trace_id(50 + (uint64_t)i);
}

static void doubt_begin(struct doubt *x, const struct bsn_config *config)
{
	x->n = test_node(config);
	x->now = START;
	for (int i = 0; i < 2; i++) {
		writer_attach(&x->w[i], x->n, x->now);
		x->t[i] = writer_thread(&x->w[i], 0);
		CHECK(w_trace(&x->t[i], long_before(i), 100, x->now));
	}
	bsn_poll(x->n, x->now += 6 * MINUTES);
	for (int i = 0; i < 2; i++)
		CHECK(w_trace(&x->t[i], before(i), 100, x->now));
	bsn_poll(x->n, x->now += 3 * MINUTES);
	for (int i = 0; i < 2; i++)
		CHECK(w_trace(&x->t[i], during(i), 100, x->now + MS));
}

static void in_new_segments(struct doubt *x, uint64_t later_ns,
			    struct bs_trace_id (*id)(int))
{
	for (int i = 0; i < 2; i++) {
		while (w_take_segment(&x->t[i]))
			;
	}
	bsn_poll(x->n, x->now += later_ns);
	for (int i = 0; i < 2; i++) {
		CHECK(w_take_segment(&x->t[i]));
		CHECK(w_trace(&x->t[i], id(i), 100, x->now));
	}
}

/* What was over long before is out of it, and what was written into segments that were
 * granted long after. */
static void doubt_check(struct doubt *x, uint32_t unseen)
{
	bsn_poll(x->n, x->now += SECOND);
	in_new_segments(x, 3 * MINUTES, after);
	in_new_segments(x, 3 * MINUTES, long_after);
	for (int i = 0; i < 2; i++) {
		uint32_t flags = i ? 0 : BSN_SLICE_MAYBE_LOSSY;

		CHECK_EQ(flags_of(x->n, long_before(i), x->now), 0);
		CHECK_EQ(flags_of(x->n, before(i), x->now), flags);
		CHECK_EQ(flags_of(x->n, during(i), x->now), flags);
		CHECK_EQ(flags_of(x->n, after(i), x->now), flags);
		CHECK_EQ(flags_of(x->n, long_after(i), x->now), 0);
	}
	CHECK_EQ(flags_of(x->n, trace_id(99), x->now), unseen);
}

static void doubt_end(struct doubt *x)
{
	for (int i = 0; i < 2; i++)
		writer_close(&x->w[i]);
	bsn_free(x->n);
}

/* It did not fit into the ring: all that the process wrote within some minutes is in
 * doubt; not what it wrote long before or after, and nothing that others wrote. */
static void an_untold_loss_puts_its_process_in_doubt(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct doubt x;

	doubt_begin(&x, &config);
	for (uint32_t i = 0; i < BS_LOSS_RING_ENTRIES; i++)
		w_lose(&x.t[0], trace_id(1000), BS_RUN_FIRST | BS_RUN_LAST,
		       100);
	w_lose(&x.t[0], trace_id(1001), BS_RUN_FIRST | BS_RUN_LAST, 100);
	CHECK_EQ(w_area(&x.w[0], 0)->losses_untold, 1);
	/* All of one that was never seen may have been lost. */
	doubt_check(&x, BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(flags_of(x.n, trace_id(1000), x.now) & BSN_SLICE_LOSSY,
		 BSN_SLICE_LOSSY);
	doubt_end(&x);
}

/* So it is with records of threads that have no slot. */
static void an_unattributed_loss_puts_its_process_in_doubt(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct doubt x;

	doubt_begin(&x, &config);
	WRITE_ONCE(x.w[0].context->records_unattributed, 1);
	/* All of one that was never seen may have been lost. */
	doubt_check(&x, BSN_SLICE_MAYBE_LOSSY);
	doubt_end(&x);
}

/* And with a ring that makes no sense. But that counts nothing as lost, so whoever lies
 * puts no trace in doubt that he has no part in. */
static void a_broken_ring_puts_its_process_in_doubt(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn_metrics m;
	struct doubt x;

	doubt_begin(&x, &config);
	WRITE_ONCE(w_area(&x.w[0], 0)->loss_head, 1000000);
	WRITE_ONCE(w_grants(&x.w[0])->losses, 1);
	doubt_check(&x, 0);
	bsn_get_metrics(x.n, &m);
	CHECK_EQ(m.corrupt, 1);
	doubt_end(&x);
}

/* Told one by one, more than the node can remember: what was evicted, and what
 * others lost before, is remembered all the same. */
#define EVICTED_BEFORE 400u
#define LOST_BEFORE 50u
#define LOST_AFTER 40u
#define FLOOD 20000u /* five times as many as are remembered */

static uint32_t count_flags(struct bsn *n, uint64_t first, uint32_t count,
			    uint32_t flag, uint64_t now)
{
	uint32_t found = 0;

	for (uint32_t i = 0; i < count; i++)
		found += !!(flags_of(n, trace_id(first + i), now) & flag);
	return found;
}

static void a_flood_of_losses_pushes_out_nothing(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	uint64_t now = START;
	struct writer w[3];
	struct wthread t[3];

	for (int i = 0; i < 3; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	for (uint64_t i = 0; i < EVICTED_BEFORE + 200; i++) {
		CHECK(w_trace(&t[0], trace_id(i), 30000, now));
		bsn_poll(n, now += MS);
	}
	for (uint64_t i = 0; i < LOST_BEFORE; i++)
		w_lose(&t[1], trace_id(10000 + i), BS_RUN_FIRST | BS_RUN_LAST,
		       100);
	CHECK_EQ(count_flags(n, 0, EVICTED_BEFORE, BSN_SLICE_EVICTED, now),
		 EVICTED_BEFORE);
	for (uint64_t i = 0; i < FLOOD; i++) {
		if (i % BS_LOSS_RING_ENTRIES == 0)
			bsn_poll(n, now += MS);
		w_lose(&t[2], trace_id(100000 + i), BS_RUN_FIRST | BS_RUN_LAST,
		       100);
	}
	bsn_poll(n, now += MS);
	CHECK_EQ(w_area(&w[2], 0)->losses_untold, 0);
	CHECK_EQ(count_flags(n, 0, EVICTED_BEFORE, BSN_SLICE_EVICTED, now),
		 EVICTED_BEFORE);
	CHECK_EQ(count_flags(n, 10000, LOST_BEFORE, BSN_SLICE_LOSSY, now),
		 LOST_BEFORE);
	/* What was not remembered may have been any of his. Others have their share, and
	 * take of it once for each trace. */
	for (int k = 0; k < 2; k++) {
		for (uint64_t i = 0; i < LOST_AFTER; i++)
			w_lose(&t[1], trace_id(20000 + i), BS_RUN_FIRST, 100);
		bsn_poll(n, now += MS);
	}
	CHECK_EQ(count_flags(n, 20000, LOST_AFTER, BSN_SLICE_LOSSY, now),
		 LOST_AFTER);
	for (uint64_t i = 0; i < 3; i++) {
		CHECK(w_trace(&t[i], trace_id(90001 + i), 100, now));
		CHECK_EQ(flags_of(n, trace_id(90001 + i), now),
			 i == 2 ? BSN_SLICE_MAYBE_LOSSY : 0);
	}
	for (int i = 0; i < 3; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* What is collected already learns of it: what is open, and what changed within some
 * minutes before it. */
static void doubt_reaches_slices(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn_slice s;
	struct doubt x;

	doubt_begin(&x, &config);
	/* Open since long. */
	CHECK(w_begin(&x.t[0], trace_id(1), HANDLE, 0, BS_RUN_FIRST, 100));
	w_end(&x.t[0], 0);
	for (int i = 0; i < 2; i++)
		collect(x.n, before(i), x.now, &s);
	collect(x.n, trace_id(1), x.now, &s);
	bsn_poll(x.n, x.now += 6 * MINUTES);
	for (int i = 0; i < 2; i++)
		collect(x.n, during(i), x.now, &s);
	bsn_poll(x.n, x.now += SECOND);
	bsn_poll(x.n, x.now += SECOND);
	WRITE_ONCE(x.w[0].context->records_unattributed, 1);
	bsn_poll(x.n, x.now += SECOND);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(bsn_slice_info(x.n, before(i), &s), 0);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK_EQ(bsn_slice_info(x.n, during(i), &s), 0);
		CHECK_EQ(s.flags,
			 BSN_SLICE_HELD | (i ? 0 : BSN_SLICE_MAYBE_LOSSY));
	}
	CHECK_EQ(bsn_slice_info(x.n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	doubt_end(&x);
}

/* What a process wrote before the node lost its memory may be of what it writes then. */
static void what_was_written_to_lost_memory_is_in_doubt(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	struct writer w[2];
	struct wthread t[2];

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, START);
		if (!i)
			CHECK_EQ(bsn_client_lost(n, w[i].number, START), 0);
		t[i] = writer_thread(&w[i], 0);
		CHECK(w_trace(&t[i], during(i), 100, START));
	}
	CHECK_EQ(bsn_client_lost(n, 77, START), -ENOENT);
	for (int i = 0; i < 2; i++) {
		while (w_take_segment(&t[i]))
			;
	}
	bsn_poll(n, START + 6 * MINUTES);
	for (int i = 0; i < 2; i++) {
		uint32_t flags = i ? 0 : BSN_SLICE_MAYBE_LOSSY;

		CHECK(w_take_segment(&t[i]));
		CHECK(w_trace(&t[i], long_after(i), 100, START + 6 * MINUTES));
		CHECK_EQ(flags_of(n, during(i), START + 6 * MINUTES), flags);
		CHECK_EQ(flags_of(n, long_after(i), START + 6 * MINUTES), 0);
		writer_close(&w[i]);
	}
	CHECK_EQ(flags_of(n, trace_id(99), START + 6 * MINUTES),
		 BSN_SLICE_MAYBE_LOSSY);
	bsn_free(n);
}

/* -------------------------------------------------------------- in runs --- */

/* The run that comes after a loss says so. A number that is missing then was
 * lost, not evicted; that stays known when the run is gone. */
static void runs_tell_of_losses(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), HANDLE, 0, BS_RUN_FIRST, 100));
	w_end(&t, 0);
	CHECK(w_begin(&t, trace_id(1), HANDLE, 2, BS_RUN_LOSSY, 100));
	w_end(&t, BS_RUN_LAST);
	/* Its first is lost. */
	CHECK(w_begin(&t, trace_id(2), HANDLE + 1, 1, BS_RUN_LOSSY, 100));
	w_end(&t, BS_RUN_LAST);
	/* It learns of the loss while it is open. */
	CHECK(w_begin(&t, trace_id(3), HANDLE + 2, 0, BS_RUN_FIRST, 100));
	w_end(&t, BS_RUN_LAST | BS_RUN_LOSSY);
	for (uint64_t i = 1; i <= 3; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_LOSSY);
		CHECK_EQ(s.open_handles, 0);
		CHECK_EQ(bsn_slice_release(n, trace_id(i), false, now), 0);
	}
	for (uint64_t i = 0; i < 200; i++) {
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now += MS);
	}
	for (uint64_t i = 1; i <= 3; i++)
		CHECK_EQ(flags_of(n, trace_id(i), now),
			 EVICTED_BY_FINGERPRINT | BSN_SLICE_LOSSY);
	free_with_writer(n, &w);
}

/* A slice gets a piece for each loss, and handles open and close by losses as by
 * runs. */
static void losses_reach_slices(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_event e[4];
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	collect(n, trace_id(1), START, &s);
	w_lose_run(&t, trace_id(1), HANDLE, BS_RUN_FIRST, 100);
	while (bsn_events(n, e, 4))
		;
	CHECK_EQ(bsn_poll(n, START), 1);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 1);
	w_lose_run(&t, trace_id(1), HANDLE, 0, 100);
	w_lose_run(&t, trace_id(1), HANDLE, BS_RUN_LAST, 100);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.open_handles, 0);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.by_kind[BS_PIECE_LOSS], 3);
	CHECK_EQ(d.by_kind[BS_PIECE_PROCESS], 1);
	/* Lost before the trace is collected: its begin is there, and its end
	 * will never be. The handle is not in the table any more. */
	CHECK(w_begin(&t, trace_id(2), HANDLE + 1, 0, BS_RUN_FIRST, 100));
	w_end(&t, 0);
	w_lose_run(&t, trace_id(2), HANDLE + 1, BS_RUN_LAST, 100);
	CHECK(w_begin(&t, trace_id(2), HANDLE + 2, 0, BS_RUN_FIRST, 100));
	w_end(&t, 0);
	w_list(&w, HANDLE + 2, true);
	bsn_poll(n, START);
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 1);
	free_with_writer(n, &w);
}

/* -------------------------------------------------------------- restarts --- */

/* A loss of nobody knows which trace concerns all that the process wrote then,
 * also for the next daemon. */
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
	for (uint32_t i = 0; i <= BS_LOSS_RING_ENTRIES; i++)
		w_lose(&t[0], trace_id(1000), BS_RUN_FIRST | BS_RUN_LAST, 100);
	now += MS;
	for (int round = 0; round < 2; round++) {
		CHECK_EQ(flags_of(n, trace_id(0), now), BSN_SLICE_MAYBE_LOSSY);
		CHECK_EQ(flags_of(n, trace_id(1), now), 0);
		CHECK_EQ(flags_of(n, trace_id(1000), now) & BSN_SLICE_LOSSY,
			 BSN_SLICE_LOSSY);
		if (!round)
			n = restart(n, &config, w, 2, now + MS);
		now += 2 * MS;
	}
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void write_open(struct wthread *t, uint64_t trace, uint64_t now)
{
	CHECK(w_begin(t, trace_id(trace), HANDLE, 0, BS_RUN_FIRST, 100));
	w_record(t, BS_RECORD_DATA, payload, 8, now);
	w_end(t, 0);
}

/* A process lost something long ago, and slices were told. A successor cannot know
 * that it lost nothing since the last poll: so in doubt is what it has open, and what
 * it changed in that poll. Nothing else is. */
static void a_restart_doubts_what_may_lack(void)
{
	enum {
		OVER = 1,
		OPEN,
		OF_OTHER,
		CHANGED,
		CHANGED_OF_OTHER
	};
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	uint64_t now = START;
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2];

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	WRITE_ONCE(w[0].context->records_unattributed, 1);
	bsn_poll(n, now += SECOND);
	/* Of what is written from here on nothing was lost then. */
	while (w_take_segment(&t[0]))
		;
	bsn_poll(n, now += 6 * MINUTES);
	CHECK(w_take_segment(&t[0]));
	CHECK(w_trace(&t[0], trace_id(OVER), 100, now));
	CHECK(w_trace(&t[0], trace_id(CHANGED), 100, now));
	CHECK(w_trace(&t[1], trace_id(CHANGED_OF_OTHER), 100, now));
	write_open(&t[0], OPEN, now);
	write_open(&t[1], OF_OTHER, now);
	for (uint64_t i = OVER; i <= CHANGED_OF_OTHER; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	bsn_poll(n, now += SECOND);
	CHECK(w_trace(&t[0], trace_id(CHANGED), 100, now));
	CHECK(w_trace(&t[1], trace_id(CHANGED_OF_OTHER), 100, now));
	bsn_poll(n, now += SECOND);
	n = restart(n, &config, w, 2, now += SECOND);
	bsn_poll(n, now);
	for (uint64_t i = OVER; i <= CHANGED_OF_OTHER; i++) {
		bool in_doubt = i == OPEN || i == CHANGED;

		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		CHECK_EQ(s.flags,
			 BSN_SLICE_HELD |
				 (in_doubt ? BSN_SLICE_MAYBE_LOSSY : 0));
	}
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* It was killed before it told them of what it had seen. */
static void a_restart_tells_what_was_not_told(void)
{
	struct bsn_config config = test_config(16 << 20);
	uint64_t now = START;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(1), 100, now));
	collect(n, trace_id(1), now, &s);
	bsn_poll(n, now += SECOND);
	CHECK(w_trace(&t, trace_id(1), 100, now));
	WRITE_ONCE(w.context->records_unattributed, 1);
	/* It looks, and the next poll never is. */
	collect(n, trace_id(2), now += SECOND, &s);
	CHECK(s.flags & BSN_SLICE_MAYBE_LOSSY);
	n = restart(n, &config, &w, 1, now += SECOND);
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	free_with_writer(n, &w);
}

/* What an earlier life of a segment of the keep arena left there is no run, also
 * where it looks like a directory of this life. */
static void a_restart_finds_no_run_that_is_none(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	const struct bs_trace_id forged = trace_id(1u << 30);
	const size_t keep_bytes = 64 * SEG; /* behind all else in the ledger */
	int keep = dup(bsn_keep_fd(n));
	off_t offset = lseek(keep, 0, SEEK_END) - (off_t)keep_bytes;
	uint8_t *arena = mmap(NULL, keep_bytes, PROT_READ | PROT_WRITE,
			      MAP_SHARED, keep, offset);
	static uint8_t buffer[4096];
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	CHECK(arena != MAP_FAILED);
	for (size_t at = 0; at < keep_bytes; at += SEG) {
		struct bs_segment_header *h = (void *)(arena + at);

		h->life = bs_life(1, BS_SEGMENT_HELD);
		h->runs = 1000;
		for (uint32_t i = 0; i < 1000; i++) {
			uint32_t place = 64 + 56 * i;

			w_put_header((void *)(arena + at + place), forged, 0, 0,
				     BS_RUN_FIRST, 16);
			*bs_directory(arena + at, i) = bs_entry(
				bs_fingerprint(forged.hi, forged.lo), place,
				BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_CLOSED);
		}
	}
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	/* They stay open: the first are kept. */
	for (uint32_t i = 0; i < 140; i++) {
		now += MS;
		CHECK(w_begin(&t, trace_id(i), HANDLE + i, 0, BS_RUN_FIRST,
			      30100));
		w_record(&t, BS_RECORD_DATA, payload, 30000, now);
		w_end(&t, 0);
		w_list(&w, HANDLE + i, true);
		bsn_poll(n, now);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.second_chances > 4);
	CHECK_EQ(bsn_peek(n, forged, now, buffer, sizeof(buffer), &s), 0);
	bsn_free(n);
	n = test_node(&config);
	CHECK_EQ(bsn_adopt_keep(n, now, keep), 0);
	CHECK_EQ(bsn_peek(n, forged, now, buffer, sizeof(buffer), &s), 0);
	CHECK(bsn_peek(n, trace_id(20), now, buffer, sizeof(buffer), &s) > 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);
	munmap(arena, keep_bytes);
	close(keep);
	free_with_writer(n, &w);
}

/* --------------------------------------------------------------- the dead --- */

/* A second chance outlives the process, and its losses with it. */
static void what_is_kept_of_the_gone_is_in_doubt(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[4];
	struct writer gone, w;
	struct wthread t;
	uint64_t now = START;
	int keep;

	writer_attach(&gone, n, now);
	t = writer_thread(&gone, 0);
	CHECK(w_begin(&t, trace_id(1), HANDLE, 0, BS_RUN_FIRST, 30100));
	w_record(&t, BS_RECORD_DATA, payload, 30000, now);
	w_end(&t, 0);
	w_show(&t, HANDLE);
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
	CHECK_EQ(bsn_adopt_keep(n, now, keep), 0);
	CHECK_EQ(flags_of(n, trace_id(1), now), BSN_SLICE_MAYBE_LOSSY);
	close(keep);
	free_with_writer(n, &w);
}

/* The pool has gone round, but for the segment of one that writes little. */
static void doubt_lasts_as_long_as_what_it_concerns(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct wthread slow, fast;
	struct writer w;
	uint64_t now = START;

	writer_attach(&w, n, now);
	slow = writer_thread(&w, 0);
	fast = writer_thread(&w, 1);
	CHECK(w_trace(&slow, trace_id(1), 100, now));
	for (uint64_t round = 1; round < 4; round++) {
		WRITE_ONCE(w.context->records_unattributed, round);
		bsn_poll(n, now += MS);
		CHECK_EQ(flags_of(n, trace_id(1), now), BSN_SLICE_MAYBE_LOSSY);
		for (uint64_t i = 0; i < 200; i++) {
			CHECK(w_trace(&fast, trace_id(1000 * round + i), 30000,
				      now += MS));
			bsn_poll(n, now);
		}
	}
	/* Nothing is left that was there within some minutes. */
	while (w_take_segment(&slow))
		;
	bsn_poll(n, now += 6 * MINUTES);
	while (w_take_segment(&slow))
		;
	for (uint64_t i = 0; i < 200; i++) {
		bsn_poll(n, now += MS);
		CHECK(w_trace(&fast, trace_id(5000 + i), 30000, now));
	}
	bsn_poll(n, now += MS);
	CHECK(w_trace(&fast, trace_id(2), 100, now));
	bsn_poll(n, now += 6 * MINUTES);
	WRITE_ONCE(w.context->records_unattributed, 9);
	bsn_poll(n, now += MS);
	CHECK_EQ(flags_of(n, trace_id(2), now), 0);
	writer_close(&w);
	bsn_free(n);
}

/* A process that is gone leaves the array in the middle of a round through it:
 * nobody else misses his turn. */
static void all_have_their_turn_while_one_leaves(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	uint32_t drained = 0;
	struct bsn_event e[4];
	struct writer w[4];
	struct wthread t[4];
	struct bsn_slice s;
	uint64_t now = START, id = 0;

	for (int i = 0; i < 4; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	CHECK(w_trace(&t[0], trace_id(id++), 100, now));
	bsn_poll(n, now);
	CHECK_EQ(bsn_client_exited(n, w[0].number, now), 0);
	while (!drained) {
		int got;

		CHECK(id < 1000);
		now += MS;
		for (int i = 1; i < 4; i++)
			CHECK(w_trace(&t[i], trace_id(id++), 30000, now));
		bsn_poll(n, now);
		while ((got = bsn_events(n, e, 4))) {
			for (int i = 0; i < got; i++)
				drained += e[i].kind ==
					   BSN_EVENT_CLIENT_DRAINED;
		}
		/* Each has a full stock. */
		for (int i = 1; i < 4; i++)
			CHECK(w_grants(&w[i])->head - w_grants(&w[i])->tail >=
			      4);
	}
	CHECK_EQ(drained, 1);
	for (uint64_t i = id - 3; i < id; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	for (int i = 0; i < 4; i++)
		writer_close(&w[i]);
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
	free_with_writer(n, &w);
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

/* -------------------------------------------------------------- counters --- */

/* What a process says of itself: a number that falls, or that jumps by more than
 * can be, is a lie; it takes nothing off what others say. */
static void counters_that_fall_or_jump_are_not_summed(void)
{
	/* In four hours in which nobody looked. */
	const uint64_t before = 3ull << 40;
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bs_thread_area *honest, *lies;
	struct writer w, liar;
	struct wthread t;
	struct bsn_metrics m;

	writer_attach(&w, n, START);
	writer_attach(&liar, n, START);
	t = writer_thread(&w, 0);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	t = writer_thread(&liar, 0);
	CHECK(w_trace(&t, trace_id(2), 100, START));
	bsn_poll(n, START);
	honest = w_area(&w, 0);
	lies = w_area(&liar, 0);
	honest->payload_bytes = before;
	lies->payload_bytes = 100;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.payload_bytes, before + 100);
	CHECK_EQ(m.corrupt, 0);
	honest->payload_bytes += 1000;
	honest->records_lost = 7;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.payload_bytes, before + 1100);
	CHECK_EQ(m.records_lost, 7);
	CHECK_EQ(m.corrupt, 0);
	/* Whose they are. */
	w.context->records_unattributed = 2;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.records_lost, 9);
	CHECK_EQ(bsn_client_records_lost(n, w.number), 9);
	CHECK_EQ(bsn_client_records_lost(n, liar.number), 0);
	CHECK_EQ(bsn_client_records_lost(n, liar.number + 1), 0);
	/* Each look counts what is new. */
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.payload_bytes, before + 1100);
	lies->payload_bytes = 50;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.payload_bytes, before + 1100);
	CHECK_EQ(m.corrupt, 1);
	lies->payload_bytes = 60;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.payload_bytes, before + 1110);
	lies->payload_bytes = 1ull << 50;
	lies->records_lost = UINT64_MAX;
	liar.context->triggers_lost = 1u << 31;
	honest->payload_bytes += 5;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.payload_bytes, before + 1115);
	CHECK_EQ(m.records_lost, 9);
	CHECK_EQ(m.corrupt, 3);
	/* What it said stays said when it is gone. */
	lies->payload_bytes += 3;
	CHECK_EQ(bsn_client_exited(n, liar.number, START), 0);
	for (uint64_t i = 0; i < 300; i++) {
		CHECK(w_trace(&t, trace_id(1000 + i), 30000, START));
		bsn_poll(n, START);
		if (i == 0)
			t = writer_thread(&w, 1);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.clients, 1);
	CHECK_EQ(m.payload_bytes, before + 1118);
	writer_close(&w);
	free_with_writer(n, &liar);
}

/* A thread marks that it lost something in the entry of the run that it has open, and
 * is killed: also where all records were told before. */
static void a_loss_in_an_open_run_is_told_when_its_process_is_killed(void)
{
	for (uint32_t later = 0; later < 2; later++) {
		struct bsn_config config = test_config(8 << 20);
		struct bs_trace_id id = trace_id(1);
		uint64_t now = START;
		struct bsn_slice s;
		struct wthread t;
		struct writer w;
		struct bsn *n = node_with_writer(&config, &w, &t);
		uint32_t last;

		w_show(&t, 5);
		CHECK(w_begin(&t, id, 5, 0, BS_RUN_FIRST, 100));
		w_record(&t, BS_RECORD_DATA, "a", 1, now);
		if (!later)
			collect(n, id, now, &s);
		bsn_poll(n, now += MS);
		last = t.runs - 1;
		w_put_entry(&t, last,
			    *bs_directory(w_segment(&t), last) | BS_RUN_LOSSY);
		bsn_poll(n, now += MS);
		CHECK_EQ(bsn_client_exited(n, w.number, now), 0);
		bsn_poll(n, now += MS);
		if (later)
			collect(n, id, now, &s);
		CHECK_EQ(bsn_slice_info(n, id, &s), 0);
		CHECK_EQ(s.flags & BSN_SLICE_LOSSY, BSN_SLICE_LOSSY);
		CHECK_EQ(s.open_handles, 0);
		free_with_writer(n, &w);
	}
}

int main(void)
{
	RUN(a_loss_is_of_its_trace);
	RUN(a_full_ring_loses_nothing);
	RUN(losses_of_a_thread_that_ended_are_read);
	RUN(an_untold_loss_puts_its_process_in_doubt);
	RUN(an_unattributed_loss_puts_its_process_in_doubt);
	RUN(a_broken_ring_puts_its_process_in_doubt);
	RUN(a_flood_of_losses_pushes_out_nothing);
	RUN(doubt_reaches_slices);
	RUN(what_was_written_to_lost_memory_is_in_doubt);
	RUN(runs_tell_of_losses);
	RUN(a_loss_in_an_open_run_is_told_when_its_process_is_killed);
	RUN(losses_reach_slices);
	RUN(a_restart_forgets_no_loss);
	RUN(a_restart_doubts_what_may_lack);
	RUN(a_restart_tells_what_was_not_told);
	RUN(a_restart_finds_no_run_that_is_none);
	RUN(what_is_kept_of_the_gone_is_in_doubt);
	RUN(doubt_lasts_as_long_as_what_it_concerns);
	RUN(all_have_their_turn_while_one_leaves);
	RUN(triggers_of_the_dead_are_taken);
	RUN(no_trigger_is_dropped_at_an_exit);
	RUN(counters_that_fall_or_jump_are_not_summed);
	free(d.bytes);
	return 0;
}
