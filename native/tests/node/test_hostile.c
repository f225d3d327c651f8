/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that lie: in directories, grants, slots, open handles, losses and
 * counters; and one that writes anything anywhere. Beside each an honest one,
 * which must lose nothing. The numbers come from a seed, so that a failure
 * repeats: test_node_hostile [rounds [seed]].
 */
#include <fcntl.h>
#include <sys/stat.h>

#include "writer.h"

#define SEGMENTS(bytes) ((bytes) / SEG)

static struct decoded d;
static uint64_t random_state;

static uint64_t random_u64(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state * 0x2545f4914f6cdd1dull;
}

static uint32_t below(uint32_t limit)
{
	return (uint32_t)(random_u64() % limit);
}

/* --------------------------------------------------------- directories --- */

#define LIAR 7777u /* its trace */

static uint64_t entry_of(uint32_t offset, uint32_t flags)
{
	struct bs_trace_id id = trace_id(LIAR);

	return bs_entry(bs_fingerprint(id.hi, id.lo), offset, flags);
}

static void put_header(struct wthread *t, uint32_t offset, uint32_t handle,
		       uint32_t committed)
{
	struct bs_run_header h = {
		.trace_hi = trace_id(LIAR).hi,
		.trace_lo = trace_id(LIAR).lo,
		.handle = handle,
		.committed_bytes = committed,
	};

	memcpy(w_segment(t) + offset, &h, sizeof(h));
}

static void put_runs(struct wthread *t, uint32_t runs)
{
	store_release(&w_segment_header(t)->runs, runs);
}

#define MANY 1000u

static void one_run_for_all_entries(struct wthread *t, uint32_t flags)
{
	put_header(t, 64, 1, 30000);
	for (uint32_t i = 0; i < MANY; i++)
		w_put_entry(t, i, entry_of(64, flags));
	put_runs(t, MANY);
}

static void offsets_descend(struct wthread *t, uint32_t flags)
{
	for (uint32_t i = 0; i < MANY; i++) {
		uint32_t offset = 64 + (MANY - i) * 40;

		put_header(t, offset, i, 0);
		w_put_entry(t, i, entry_of(offset, flags));
	}
	put_runs(t, MANY);
}

static void runs_overlap(struct wthread *t, uint32_t flags)
{
	for (uint32_t i = 0; i < MANY; i++) {
		put_header(t, 64 + i * 40, i, 32000);
		w_put_entry(t, i, entry_of(64 + i * 40, flags));
	}
	put_runs(t, MANY);
}

static void outside(struct wthread *t, uint32_t flags)
{
	w_put_entry(t, 0, entry_of(0, flags));
	w_put_entry(t, 1, entry_of(56, flags));
	w_put_entry(t, 2, entry_of(65528, flags));
	w_put_entry(t, 3, entry_of(65504, flags));
	put_runs(t, 4);
}

static void in_the_directory(struct wthread *t, uint32_t flags)
{
	for (uint32_t i = 0; i < MANY; i++)
		w_put_entry(t, i, entry_of(SEG - 8 * MANY + 8 * i, flags));
	put_runs(t, MANY);
}

static void more_than_can_be(struct wthread *t, uint32_t flags)
{
	for (uint32_t i = 0; i < BS_SEGMENT_RUNS_MAX; i++)
		w_put_entry(t, i, entry_of(64 + 32 * i, flags));
	put_runs(t, 0xffffffff);
}

static void committed_beyond_the_next(struct wthread *t, uint32_t flags)
{
	put_header(t, 64, 1, 65528);
	w_put_entry(t, 0, entry_of(64, flags));
	put_header(t, 4096, 2, 8);
	w_put_entry(t, 1, entry_of(4096, flags));
	put_header(t, 8192, 3, 4);
	w_put_entry(t, 2, entry_of(8192, flags));
	put_runs(t, 3);
}

static void records_that_are_none(struct wthread *t, uint32_t flags)
{
	put_header(t, 64, 1, 32000);
	memset(w_segment(t) + 96, 0xff, 32000);
	w_put_entry(t, 0, entry_of(64, flags));
	put_runs(t, 1);
}

static void (*const lies[])(struct wthread *t, uint32_t flags) = {
	one_run_for_all_entries,
	offsets_descend,
	runs_overlap,
	outside,
	in_the_directory,
	more_than_can_be,
	committed_beyond_the_next,
	records_that_are_none,
};

#define LIES (sizeof(lies) / sizeof(*lies))

/* When the node meets the lie. */
enum meets {
	WHEN_IT_SEARCHES,
	WHEN_IT_WATCHES,
	WHEN_IT_RECLAIMS, /* of a handle that is open, as the liar says */
	AFTER_A_RESTART,
};

static void directory_lies(void (*lie)(struct wthread *t, uint32_t flags),
			   enum meets when)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w[2];
	struct wthread honest, liar;
	uint64_t now = START;

	config.trace_bytes_max = 256 << 10;
	n = test_node(&config);
	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, now);
	honest = writer_thread(&w[0], 0);
	liar = writer_thread(&w[1], 0);
	CHECK(w_trace(&honest, trace_id(1), 1000, now));
	CHECK(w_take_segment(&liar));
	bsn_poll(n, now);
	if (when == WHEN_IT_WATCHES)
		collect(n, trace_id(LIAR), now, &s);
	lie(&liar, BS_RUN_FIRST | BS_RUN_CLOSED |
			   (when == WHEN_IT_RECLAIMS ? 0 : BS_RUN_LAST));
	if (when == AFTER_A_RESTART)
		n = restart(n, &config, w, 2, now);
	if (when == WHEN_IT_RECLAIMS) {
		uint32_t *open =
			(uint32_t *)(w[1].channel + BS_CHANNEL_HANDLES_OFFSET);

		for (uint32_t i = 0; i < BS_OPEN_HANDLES; i++)
			open[bs_handle_place(i)] = i;
		CHECK(w_take_segment(&liar));
		for (uint64_t i = 0; i < 500; i++) {
			now += MS;
			CHECK(w_trace(&honest, trace_id(1000 + i), 30000, now));
			bsn_poll(n, now);
			check_invariants(n);
		}
		CHECK(w_trace(&honest, trace_id(1), 1000, now));
	}
	bsn_poll(n, now);
	if (when != WHEN_IT_WATCHES)
		collect(n, trace_id(LIAR), now, &s);
	CHECK_EQ(bsn_slice_info(n, trace_id(LIAR), &s), 0);
	bsn_get_metrics(n, &m);
	/* However it lied, its segment has no more than a segment's bytes, in
	 * no more pieces than it can have. */
	CHECK(s.bytes <=
	      SEG + BS_SEGMENT_RUNS_MAX * sizeof(struct bs_piece_header) +
		      4096);
	decode_slice(n, trace_id(LIAR), &d);
	CHECK(m.entries_searched <=
	      (m.passes + 1) * SEGMENTS(m.pool_bytes) * BS_SEGMENT_RUNS_MAX);
	CHECK(m.entries_watched <= 4 * BS_SEGMENT_RUNS_MAX);
	/* An entry that names no run of the trace is another's, as it seems. */
	CHECK(m.corrupt || m.false_hits || !s.bytes);
	CHECK(s.flags & (BSN_SLICE_CORRUPT | BSN_SLICE_EVICTED) || !s.bytes);
	/* The honest one has all of his. */
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, when == WHEN_IT_RECLAIMS
				  ? BSN_SLICE_HELD | BSN_SLICE_EVICTED
				  : BSN_SLICE_HELD);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void directories_that_lie(void)
{
	for (uint32_t i = 0; i < LIES; i++) {
		directory_lies(lies[i], WHEN_IT_SEARCHES);
		directory_lies(lies[i], WHEN_IT_WATCHES);
		directory_lies(lies[i], WHEN_IT_RECLAIMS);
		directory_lies(lies[i], AFTER_A_RESTART);
	}
}

/* An entry that says CLOSED, and is rewritten after: what was told stays told,
 * and what comes is told once at most. */
static void entries_rewritten_after_sealing(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint8_t *sealed;
	uint64_t bytes;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 100; i++)
		CHECK(w_trace(&t, trace_id(LIAR), 400, START));
	collect(n, trace_id(LIAR), START, &s);
	sealed = w_segment(&t);
	CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, trace_id(LIAR), &s), 0);
	bytes = s.bytes;
	for (uint32_t round = 0; round < 50; round++) {
		for (uint32_t i = 0; i < 100; i++)
			*bs_directory(sealed, i) =
				entry_of(64 + 8 * (below(8000)), below(16));
		((struct bs_segment_header *)sealed)->runs = below(2000);
		if (round == 25)
			n = restart(n, &config, &w, 1, START);
		bsn_poll(n, START + round * MS);
		CHECK_EQ(bsn_slice_info(n, trace_id(LIAR), &s), 0);
		CHECK_EQ(s.bytes, bytes);
	}
	/* Not at all, but by a successor, once, what was sealed since the commit. */
	bsn_get_metrics(n, &m);
	CHECK(m.entries_watched <= BS_SEGMENT_RUNS_MAX);
	writer_close(&w);
	bsn_free(n);
}

/* Fingerprints of others' traces: each costs a look at a header, and after some
 * of them nobody looks at the liar's segments in that search. */
static void fingerprints_of_others(bool kept)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	struct bsn_slice s;
	struct writer w[2];
	struct wthread honest, liar;
	struct bs_trace_id id = trace_id(1);
	uint64_t now = START;

	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, now);
	honest = writer_thread(&w[0], 0);
	liar = writer_thread(&w[1], 0);
	/* The honest one has a handle open, whose first run is kept. */
	w_show(&honest, 5);
	CHECK(w_begin(&honest, id, 5, 0, BS_RUN_FIRST, 100));
	w_record(&honest, BS_RECORD_DATA, "a", 1, now);
	w_end(&honest, 0);
	for (uint32_t segment = 0; segment < 10; segment++) {
		CHECK(w_take_segment(&liar));
		liar.handle = 9;
		w_show(&liar, 9);
		for (uint32_t i = 0; i < 500; i++) {
			CHECK(w_begin(&liar, trace_id(LIAR), 9, i, 0, 8));
			w_end(&liar, 0);
			w_put_entry(&liar, liar.runs - 1,
				    bs_entry(bs_fingerprint(id.hi, id.lo),
					     liar.run_offset, BS_RUN_CLOSED));
		}
		bsn_poll(n, now);
	}
	for (uint64_t i = 0; kept && m.reclaims < 30; i++) {
		now += MS;
		CHECK(w_trace(&honest, trace_id(1000 + i), 30000, now));
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
	}
	CHECK(w_begin(&honest, id, 5, 1, 0, 100));
	w_record(&honest, BS_RECORD_DATA, "b", 1, now);
	w_end(&honest, BS_RUN_LAST);
	collect(n, id, now, &s);
	/* That the liar's runs were reclaimed concerns the trace, as he says. */
	CHECK_EQ(s.flags & ~(uint32_t)(kept ? BSN_SLICE_EVICTED : 0),
		 BSN_SLICE_HELD);
	decode_slice(n, id, &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(check_order(&d), 1);
	bsn_get_metrics(n, &m);
	CHECK(m.false_hits <= BS_SEGMENT_RUNS_MAX);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void others_fingerprints(void)
{
	fingerprints_of_others(false);
	fingerprints_of_others(true);
}

/* --------------------------------------------------------------- grants --- */

/* How a client lies about what it was granted. */
enum grant_lie {
	TAIL_AHEAD,
	TAIL_BACK,
	TAIL_AT_HEAD, /* all taken, no header written */
	HEAD_AHEAD,
	HEAD_BACK,
	ENTRIES_TWICE,
	ENTRIES_SWAPPED,
	ENTRIES_OUTSIDE,
	GENERATIONS,
	SLOTS,
	AREAS,
	GRANT_LIES
};

static void tell(enum grant_lie lie, struct writer *w)
{
	struct bs_grant_ring *ring = w_grants(w);
	struct bs_grant *e = ring->entries, swapped;
	uint32_t at = ring->tail % BS_GRANT_RING_ENTRIES;

	switch (lie) {
	case TAIL_AHEAD:
		ring->tail = ring->head + 1 + below(3);
		break;
	case TAIL_BACK:
		ring->tail -= 1 + below(3);
		break;
	case TAIL_AT_HEAD:
		ring->tail = ring->head;
		break;
	case HEAD_AHEAD:
		ring->head += 1 + below(BS_GRANT_RING_ENTRIES);
		break;
	case HEAD_BACK:
		ring->head -= 1 + below(BS_GRANT_RING_ENTRIES);
		break;
	case ENTRIES_TWICE:
		e[at + 1] = e[at];
		break;
	case ENTRIES_SWAPPED:
		swapped = e[at];
		e[at] = e[at + 1];
		e[at + 1] = swapped;
		break;
	case ENTRIES_OUTSIDE:
		e[at].segment = below(2) ? 0x7fffffff : 100000;
		break;
	case GENERATIONS:
		e[at].generation += 1 + below(3);
		break;
	case SLOTS:
	case AREAS:
	default:
		for (uint32_t s = 0; s < 64; s++) {
			struct bs_segment_header *h =
				(void *)(w->arena + (uint64_t)s * SEG);

			if (lie == SLOTS)
				h->slot = below(2) ? below(300) : 0xffffffff;
			else
				w_area(w, s)->segment = (uint32_t)random_u64();
		}
	}
}

static void grants_that_lie(void)
{
	for (uint32_t lie = 0; lie < GRANT_LIES; lie++) {
		struct bsn_config config = test_config(64 << 20);
		struct bsn *n = test_node(&config);
		struct bsn_slice s;
		struct writer w[2];
		struct wthread honest, liar[3];
		uint64_t now = START, id = 0;

		for (int i = 0; i < 2; i++)
			writer_attach(&w[i], n, now);
		honest = writer_thread(&w[0], 0);
		for (uint32_t i = 0; i < 3; i++)
			liar[i] = writer_thread(&w[1], i);
		for (uint32_t round = 0; round < 600; round++) {
			now += 10 * MS;
			for (uint32_t i = 0; i < 3; i++) {
				struct bs_grant g;

				if (w_grab(&liar[i], &g) && below(2) &&
				    (g.segment & ~BS_GRANT_FRESH) <
					    SEGMENTS(w[1].arena_bytes))
					w_settle(&liar[i], &g);
			}
			if (below(4) == 0)
				tell(lie, &w[1]);
			CHECK(w_trace(&honest, trace_id(id++), 30000, now));
			bsn_poll(n, now);
			check_invariants(n);
			if (round % 100 == 50) {
				tell(lie, &w[1]);
				n = restart(n, &config, w, 2, now);
			}
		}
		CHECK_EQ(w_area(&w[0], 0)->loss_head, 0);
		/* Evicted by one that takes all that it can, or whole. */
		for (uint64_t k = id - 100; k < id; k++) {
			collect(n, trace_id(k), now, &s);
			CHECK(s.flags == BSN_SLICE_HELD ||
			      s.flags == BSN_SLICE_EVICTED);
		}
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		bsn_client_exited(n, w[1].number, now);
		bsn_poll(n, now);
		check_invariants(n);
		for (int i = 0; i < 2; i++)
			writer_close(&w[i]);
		bsn_free(n);
	}
}

/* -------------------------------------------------- losses and counters --- */

static void losses_that_lie(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m, before = {0};
	struct bsn_slice s;
	struct writer w[2];
	struct wthread honest;
	uint64_t now = START;

	config.trace_bytes_max = 1 << 20;
	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, now);
	honest = writer_thread(&w[0], 0);
	for (uint32_t i = 0; i < BS_THREAD_SLOTS; i++)
		writer_thread(&w[1], i);
	CHECK(w_trace(&honest, trace_id(1), 1000, now));
	collect(n, trace_id(1), now, &s);
	for (uint32_t round = 0; round < 2000; round++) {
		for (uint32_t i = 0; i < 8; i++) {
			struct bs_thread_area *a = w_area(&w[1], below(256));

			a->loss_head += below(3) ? 1 : (uint32_t)random_u64();
			a->losses_untold += below(2);
			a->loss_tail += below(2);
			a->loss_tail_seen = (uint32_t)random_u64();
			a->loss_commit = random_u64();
			a->losses[below(64)] = (struct bs_loss){
				.trace_hi = below(2) ? random_u64() : 0,
				.trace_lo = below(2) ? random_u64() : 0,
				.flags = (uint32_t)random_u64(),
			};
			a->runs_lost += below(2) ? random_u64() : 1;
			a->records_lost += below(2) ? random_u64() : 1;
			a->payload_bytes -= random_u64();
			a->payload_bytes_lost = random_u64();
		}
		w[1].context->records_unattributed = random_u64();
		w[1].context->triggers_lost = (uint32_t)random_u64();
		w_grants(&w[1])->losses += below(2);
		now += MS;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		/* They rise, and by no more than can be. */
		CHECK(m.records_lost >= before.records_lost &&
		      m.records_lost - before.records_lost < 1ull << 42);
		CHECK(m.runs_lost >= before.runs_lost &&
		      m.runs_lost - before.runs_lost < 1ull << 42);
		CHECK(m.payload_bytes >= before.payload_bytes);
		CHECK(m.triggers_lost >= before.triggers_lost);
		before = m;
		CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
		/* Who had a part in it, a successor does not know. */
		CHECK_EQ(s.flags,
			 round < 1000 ? BSN_SLICE_HELD
				      : BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
		if (round % 500 == 499 && round > 500) {
			n = restart(n, &config, w, 2, now);
			memset(&before, 0, sizeof(before));
		}
	}
	/* What is collected since: the honest one lost nothing. */
	CHECK(w_trace(&honest, trace_id(2), 1000, now));
	collect(n, trace_id(2), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	for (uint64_t i = 0; i < 100; i++) {
		now += MS;
		CHECK(w_trace(&honest, trace_id(4 + i), 30000, now));
		bsn_poll(n, now);
	}
	CHECK(w_trace(&honest, trace_id(3), 1000, now));
	collect(n, trace_id(3), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* --------------------------------------------------------------- handles --- */

/* A process that says that all its handles are open takes no more of the keep
 * arena than its share: the honest one's is kept. */
static void handles_that_never_close(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m = {0};
	struct bsn_slice s;
	struct writer w[2];
	struct wthread honest, liar;
	uint64_t now = START;
	uint32_t *open, handle = 1, runs = 0;

	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, now);
	honest = writer_thread(&w[0], 0);
	liar = writer_thread(&w[1], 0);
	open = (uint32_t *)(w[1].channel + BS_CHANNEL_HANDLES_OFFSET);
	for (uint64_t i = 0; m.reclaims < 600; i++) {
		now += MS;
		for (uint32_t k = 0; k < 4; k++, handle++) {
			static const uint8_t payload[30000];

			open[bs_handle_place(handle)] = handle;
			if (!w_begin(&liar, trace_id(handle + (1ull << 32)),
				     handle, 0, BS_RUN_FIRST, 30024))
				continue;
			w_record(&liar, BS_RECORD_DATA, payload,
				 sizeof(payload), now);
			w_end(&liar, 0);
		}
		/* One that is open all the time, and short ones. */
		if (i % 20 == 0) {
			w_show(&honest, 5);
			CHECK(w_begin(&honest, trace_id(1), 5, runs,
				      runs ? 0 : BS_RUN_FIRST, 100));
			runs++;
			w_record(&honest, BS_RECORD_DATA, "a", 1, now);
			w_end(&honest, 0);
		}
		CHECK(w_trace(&honest, trace_id(1000 + i), 10000, now));
		bsn_poll(n, now);
		check_invariants(n);
		bsn_get_metrics(n, &m);
	}
	CHECK(m.keep_bytes && m.runs_evicted > 300);
	collect(n, trace_id(1), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	decode_slice(n, trace_id(1), &d);
	CHECK_EQ(d.records, runs);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* --------------------------------------------------------------- triggers --- */

/* Processes that fire without end, and one that fires now and then: each of its
 * triggers comes through within a bounded number of polls. */
static void triggers_without_end(void)
{
	enum {
		LIARS = 12,
		TAKEN = 16, /* by the control plane, at each poll */
	};
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[TAKEN];
	struct writer w[LIARS + 1];
	uint32_t fired = 0, came = 0, waited = 0, longest = 0;

	for (int i = 0; i <= LIARS; i++)
		writer_attach(&w[i], n, START);
	for (uint32_t round = 0; round < 3000; round++) {
		int got;

		for (int i = 1; i <= LIARS; i++) {
			struct bs_context_segment *x = w[i].context;

			while (x->cells[x->trigger_head % BS_TRIGGER_CELLS]
				       .seq == x->trigger_head)
				w_trigger(&w[i], trace_id(9), "flood", START);
		}
		if (fired == came) {
			w_trigger(&w[0], trace_id(1), "honest", START);
			fired++;
			waited = 0;
		}
		bsn_poll(n, START + round * MS);
		got = bsn_events(n, e, TAKEN);
		for (int i = 0; i < got; i++)
			came += !strcmp(e[i].trigger, "honest");
		bsn_events_done(n);
		if (++waited > longest)
			longest = waited;
	}
	/* What stands before it in the queue of events, and a turn of all. */
	CHECK(longest <= 1024 / TAKEN + LIARS + 2);
	CHECK(came >= 3000 / (1024 / TAKEN + LIARS + 2));
	for (int i = 0; i <= LIARS; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* ----------------------------------------------------------------- memory --- */

static uint64_t memory_of(const struct writer *w)
{
	struct stat st;

	CHECK_EQ(fstat(w->fds.arena, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

/* What nobody was granted. */
static void touch(const struct writer *w, uint64_t from)
{
	for (uint64_t at = from; at < w->arena_bytes; at += 4096)
		w->arena[at] = 1;
}

/* Short processes touch all of their arenas, and end. What was theirs is gone;
 * what they had been granted, and wrote, is there until it is reclaimed. */
static void short_processes_leave_nothing(void)
{
	enum {
		PROCESSES = 30
	};
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w[PROCESSES];
	uint64_t now = START, sum = 0, all = 0;
	struct wthread t;

	for (uint32_t i = 0; i < PROCESSES; i++) {
		now += MS;
		writer_attach(&w[i], n, now);
		t = writer_thread(&w[i], 0);
		CHECK(w_trace(&t, trace_id(i), 100, now));
		touch(&w[i], SEG * (t.segment + 1));
		CHECK_EQ(bsn_client_exited(n, w[i].number, now), 0);
		bsn_poll(n, now);
	}
	for (uint32_t i = 0; i < 100; i++)
		bsn_poll(n, now);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		sum += memory_of(&w[i]);
		all += w[i].arena_bytes;
	}
	bsn_get_metrics(n, &m);
	CHECK(sum <= m.pool_used_bytes);
	CHECK(sum <= PROCESSES * SEG);
	CHECK(m.taken_back_bytes >= all / 2);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		writer_close(&w[i]);
	}
	bsn_free(n);
}

/* One that lives does so again and again. */
static void a_process_that_touches_all(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2];
	uint64_t now = START, taken = 0;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	for (uint32_t round = 0; round < 5; round++) {
		uint64_t before = taken;

		/* An honest one goes unnoticed, whatever its arena has. */
		for (uint32_t i = 0; i < 20; i++) {
			CHECK(w_trace(&t[0], trace_id(round * 100 + i), 30000,
				      now));
			CHECK(w_trace(&t[1], trace_id(1000 + round * 100 + i),
				      30000, now));
			bsn_poll(n, now);
		}
		now += 2 * SECOND;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK_EQ(m.taken_back_bytes, before);
		touch(&w[1], w[1].arena_bytes / 2);
		for (uint32_t i = 0; i < 8; i++) {
			now += 500 * MS;
			bsn_poll(n, now);
		}
		bsn_get_metrics(n, &m);
		taken = m.taken_back_bytes;
		CHECK(taken > before);
		CHECK(memory_of(&w[1]) <= m.pool_used_bytes + (1 << 20));
		CHECK(memory_of(&w[0]) + memory_of(&w[1]) <= m.pool_bytes);
		if (round == 2) {
			n = restart(n, &config, w, 2, now);
			taken = 0;
		}
	}
	for (uint32_t round = 0; round < 5; round++) {
		for (uint32_t i = 0; i < 20; i++) {
			collect(n, trace_id(round * 100 + i), now, &s);
			CHECK_EQ(s.flags, BSN_SLICE_HELD);
		}
	}
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* --------------------------------------------------------------- anything --- */

static struct bsn_metrics total;

/* Values that lies are made of. */
static uint64_t lie(void)
{
	static const uint64_t likely_lies[] = {
		0,     1,	   8,	       31,	   32,
		63,    64,	   255,	       256,	   1638,
		2048,  4096,	   32768,      65504,	   65535,
		65536, 0x7fffffff, 0x80000000, 0xffffffff, 0xffffffffffffffff,
	};

	if (below(2))
		return random_u64();
	return likely_lies[below(sizeof(likely_lies) / 8)] + below(3) - 1;
}

static void poke(uint8_t *at)
{
	uint64_t value = lie();

	memcpy(at, &value, 1u << below(4));
}

/* One lie, where the node reads most. */
static void spoil(struct writer *w, uint32_t slots)
{
	struct bs_thread_area *a = w_area(w, below(slots));
	struct bs_context_segment *x = w->context;
	uint32_t *handles =
		(uint32_t *)(w->channel + BS_CHANNEL_HANDLES_OFFSET);
	struct bs_segment_header *h;
	uint32_t segment;

	switch (below(12)) {
	case 0: /* counters, heads, segment */
		poke((uint8_t *)a + below(120));
		break;
	case 1: /* losses */
		poke((uint8_t *)&a->losses[(a->loss_head - below(8)) %
					   BS_LOSS_RING_ENTRIES] +
		     below(24));
		w_grants(w)->losses++;
		break;
	case 2: /* the node's own line */
		poke((uint8_t *)&a->loss_tail + below(56));
		break;
	case 3: /* the grant ring */
		poke((uint8_t *)w_grants(w) + below(1024));
		break;
	case 4: /* the channel header */
		poke(w->channel + below(1024));
		break;
	case 5: /* open handles: that some are, that others are not */
		handles[bs_handle_place(1 + below(1000))] = 1 + below(1000);
		a->own_handle = below(2000);
		break;
	case 6: /* the context */
		poke((uint8_t *)x + below(sizeof(*x) - 8));
		break;
	case 7: /* a claimed or committed cell */
		x->trigger_head += below(3);
		poke((uint8_t *)&x->cells[x->trigger_head % BS_TRIGGER_CELLS] +
		     below(128));
		break;
	default: /* headers, directories and records in segments in use */
		segment = READ_ONCE(a->segment);
		if (segment >= SEGMENTS(w->arena_bytes) || below(4) == 0)
			segment = below(16);
		h = (void *)(w->arena + (uint64_t)segment * SEG);
		switch (below(4)) {
		case 0:
			poke((uint8_t *)h + below(32));
			break;
		case 1:
			poke((uint8_t *)bs_directory(
				h, below(2) ? below(32)
					    : below(BS_SEGMENT_RUNS_MAX)));
			break;
		default:
			poke((uint8_t *)h +
			     (below(2) ? below(4096) : below(SEG - 8)));
		}
	}
}

/* What the liar is granted may be a lie of his own: stay in the mapping. */
static void write_some(struct wthread *t, uint64_t id, uint64_t now)
{
	struct bs_grant_ring *ring = w_grants(t->w);
	const struct bs_grant *g =
		&ring->entries[ring->tail % BS_GRANT_RING_ENTRIES];

	if ((g->segment & ~BS_GRANT_FRESH) >= SEGMENTS(t->w->arena_bytes))
		return;
	if (below(8) == 0) {
		uint32_t handle = 1 + below(1000);

		/* Of a handle that stays open. */
		((uint32_t *)(t->w->channel + BS_CHANNEL_HANDLES_OFFSET))
			[bs_handle_place(handle)] = handle;
		if (!w_begin(t, trace_id(id), handle, below(3),
			     below(2) ? BS_RUN_FIRST : 0, 100))
			return;
		w_record(t, BS_RECORD_DATA, &id, sizeof(id), now);
		w_end(t, 0);
		return;
	}
	w_trace(t, trace_id(id), below(3000), now);
}

static void look_around(struct bsn *n, uint64_t ids, uint64_t now)
{
	static uint8_t buffer[1 << 20];
	static struct decoded seen;
	struct bs_trace_id some[64];
	struct bsn_slice s;
	struct bs_trace_id id = trace_id(below((uint32_t)ids));
	uint64_t found;

	switch (below(6)) {
	case 0:
		bsn_collect(n, id, id, "lie", now, &s);
		break;
	case 1:
		seen.bytes = buffer;
		seen.n_bytes = bsn_peek(n, id, now, buffer, sizeof(buffer), &s);
		if (s.trimmed_bytes == 0)
			decode(&seen);
		break;
	case 2:
		if (!bsn_slice_info(n, id, &s))
			bsn_slice_trim(n, id, s.bytes / 2);
		break;
	case 3:
		if (!bsn_slice_info(n, id, &s) && !s.trimmed_bytes) {
			seen.bytes = buffer;
			seen.n_bytes = bsn_slice_read(n, id, 0, buffer,
						      sizeof(buffer));
			decode(&seen);
		}
		break;
	case 4:
		if (below(50) == 0)
			bsn_recent(n, now, SECOND, below(2) ? "" : "tester",
				   some, 64, &found);
		break;
	default:
		bsn_slice_release(n, id, below(2), now);
	}
}

static void add_up(struct bsn *n)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	total.corrupt += m.corrupt;
	total.reclaims += m.reclaims;
	total.runs_evicted += m.runs_evicted;
	total.second_chances += m.second_chances;
	total.entries_searched += m.entries_searched;
	total.passes += m.passes;
	total.entries_watched += m.entries_watched;
	total.false_hits += m.false_hits;
	total.cells_skipped += m.cells_skipped;
}

static struct bsn *come_back(struct bsn *n, const struct bsn_config *config,
			     struct writer *w, int writers, uint64_t now)
{
	struct held h = hold(n);

	add_up(n);
	bsn_free(n);
	n = test_node(config);
	if (below(2)) {
		CHECK_EQ(bsn_adopt_store(n, now, h.store), 0);
		CHECK_EQ(bsn_adopt_keep(n, now, h.keep), 0);
	} else {
		CHECK_EQ(bsn_adopt_keep(n, now, h.keep), 0);
		CHECK_EQ(bsn_adopt_store(n, now, h.store), 0);
	}
	for (int i = 0; i < writers; i++) {
		int number = bsn_client_adopt(n, w[i].number, 1, "again", now,
					      &w[i].fds);

		/* The magic itself may be spoilt. */
		CHECK(number > 0 || (i && number < 0));
		w[i].number = number;
	}
	close(h.store);
	close(h.keep);
	return n;
}

struct honest {
	struct writer *w;
	struct wthread t;
	uint64_t written, checked, triggers, collected;
	uint32_t open_runs; /* of a handle that is open all the time */
};

#define HONEST_IDS (1ull << 30)
#define HONEST_OPEN (1ull << 29)
#define HONEST_HANDLE ((1u << BS_HANDLE_COUNT_BITS) - 1)

static void honest_work(struct honest *h, uint64_t now)
{
	struct bs_trace_id id = trace_id(HONEST_IDS + h->written);

	/* It loses nothing, whatever others do. */
	CHECK(w_trace(&h->t, id, below(3000), now));
	h->written++;
	if (h->written % 1000 == 1) {
		w_show(&h->t, HONEST_HANDLE);
		CHECK(w_begin(&h->t, trace_id(HONEST_OPEN), HONEST_HANDLE,
			      h->open_runs, h->open_runs ? 0 : BS_RUN_FIRST,
			      100));
		w_record(&h->t, BS_RECORD_DATA, "open", 4, now);
		w_end(&h->t, 0);
		h->open_runs++;
	}
	if (h->written % 50 == 0 && h->triggers == h->collected) {
		w_trigger(h->w, id, "honest", now);
		h->triggers++;
	}
}

static void honest_check(struct honest *h, struct bsn *n, uint64_t now)
{
	/* Written lately. */
	uint64_t back = below(h->written < 64 ? (uint32_t)h->written : 64);
	struct bs_trace_id id = trace_id(HONEST_IDS + h->written - 1 - back);
	struct bsn_slice s;

	if (bsn_collect(n, id, id, "t", now, &s))
		return;
	if (s.flags & BSN_SLICE_SEARCHING) {
		bsn_poll(n, now);
		CHECK_EQ(bsn_slice_info(n, id, &s), 0);
	}
	if (s.flags & BSN_SLICE_STORE_FULL)
		return;
	/* A process that is forgotten may have lost it. */
	CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_MAYBE_LOSSY, BSN_SLICE_HELD);
	decode_slice(n, id, &d);
	CHECK_EQ(d.records, 1);
	h->checked++;
	bsn_slice_release(n, id, false, now);
}

static void release_all(struct bsn *n, uint64_t now)
{
	struct bsn_slice s;
	uint64_t cursor = 0;

	while (bsn_slices(n, &cursor, &s, 1) == 1)
		bsn_slice_release(n, s.id, false, now);
}

static void anything(uint64_t rounds)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n;
	struct bsn_event events[16];
	struct writer w[2];
	struct wthread t[2];
	struct honest honest = {.w = &w[0]};
	struct bsn_slice s;
	uint64_t now = START, frames = SEGMENTS(config.pool_bytes);

	config.trace_bytes_max = 65536;
	n = test_node(&config);
	writer_attach(&w[0], n, now);
	honest.t = writer_thread(&w[0], 0);
	writer_attach(&w[1], n, now);
	for (uint32_t i = 0; i < 2; i++)
		t[i] = writer_thread(&w[1], i);
	for (uint64_t round = 0; round < rounds; round++) {
		int got;

		now += below(MS / 2);
		for (uint32_t i = below(4); i; i--)
			write_some(&t[below(2)], below(500), now);
		for (uint32_t i = below(3); i; i--)
			spoil(&w[1], 2);
		if (below(3) == 0)
			honest_work(&honest, now);
		bsn_poll(n, now);
		if (below(8) == 0)
			look_around(n, 500, now);
		got = bsn_events(n, events, 16);
		for (int i = 0; i < got; i++)
			honest.collected +=
				events[i].kind == BSN_EVENT_TRIGGER &&
				events[i].client == (uint32_t)w[0].number;
		bsn_events_done(n);
		if (round % 64 == 0) {
			check_invariants(n);
			if (honest.written)
				honest_check(&honest, n, now);
		}
		if (below(2000) == 0) {
			n = come_back(n, &config, w, 2, now);
			check_invariants(n);
		}
		if (w[1].number < 0 || below(64) == 0) {
			/* A new liar. */
			if (w[1].number > 0)
				bsn_client_exited(n, w[1].number, now);
			writer_close(&w[1]);
			writer_attach(&w[1], n, now);
			for (uint32_t i = 0; i < 2; i++)
				t[i] = writer_thread(&w[1], i);
		}
	}
	add_up(n);
	printf("%ju rounds: corrupt %ju, reclaims %ju, evicted %ju, second "
	       "chances %ju, entries searched %ju, watched %ju, false hits %ju, "
	       "cells skipped %ju, honest traces %ju, triggers %ju\n",
	       (uintmax_t)rounds, (uintmax_t)total.corrupt,
	       (uintmax_t)total.reclaims, (uintmax_t)total.runs_evicted,
	       (uintmax_t)total.second_chances,
	       (uintmax_t)total.entries_searched,
	       (uintmax_t)total.entries_watched, (uintmax_t)total.false_hits,
	       (uintmax_t)total.cells_skipped, (uintmax_t)honest.written,
	       (uintmax_t)honest.triggers);
	CHECK(total.entries_searched <=
	      total.passes * frames * BS_SEGMENT_RUNS_MAX);
	CHECK(honest.triggers - honest.collected <= 1);
	release_all(n, now);
	collect(n, trace_id(HONEST_OPEN), now, &s);
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, trace_id(HONEST_OPEN), &s), 0);
	CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_MAYBE_LOSSY, BSN_SLICE_HELD);
	decode_slice(n, trace_id(HONEST_OPEN), &d);
	CHECK_EQ(d.records, honest.open_runs);
	fflush(stdout);
	/* It was what it is meant to be. */
	if (rounds >= 200000)
		CHECK(honest.checked > 500 && honest.triggers > 100 &&
		      total.corrupt > 1000 && total.reclaims > 100 &&
		      total.second_chances > 10 && total.false_hits &&
		      total.entries_watched > 1000);
	writer_close(&w[0]);
	writer_close(&w[1]);
	bsn_free(n);
}

int main(int argc, char **argv)
{
	uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 0) : 200000;
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;

	printf("seed %ju\n", (uintmax_t)seed);
	random_state = seed * 2654435761u + 1;
	RUN(directories_that_lie);
	RUN(entries_rewritten_after_sealing);
	RUN(others_fingerprints);
	RUN(grants_that_lie);
	RUN(losses_that_lie);
	RUN(handles_that_never_close);
	RUN(triggers_without_end);
	RUN(short_processes_leave_nothing);
	RUN(a_process_that_touches_all);
	anything(rounds);
	free(d.bytes);
	return 0;
}
