/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that lie: in directories, grants, slots, losses, counters, open handles
 * and triggers. Beside each an honest one, which must lose nothing.
 */
#include "node/internal.h"
#include "random.h"
#include "writer.h"

#define SEGMENTS(bytes) ((bytes) / SEG)

static struct decoded d;

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
	w_put_header((void *)(w_segment(t) + offset), trace_id(LIAR), handle, 0,
		     0, committed);
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

/* Each entry ascends from the one before it, or is behind the next; and yet a
 * third of all are runs of half a segment. */
static void half_a_segment_each(struct wthread *t, uint32_t flags)
{
	for (uint32_t i = 0; i < MANY; i++) {
		uint32_t offset = 64 + i / 3 * 40;

		if (i % 3 < 2)
			put_header(t, offset + i % 3 * 4, i, 30000);
		else
			offset = 50000;
		w_put_entry(t, i, entry_of(offset + i % 3 * 4, flags));
	}
	put_runs(t, MANY);
}

static void outside(struct wthread *t, uint32_t flags)
{
	w_put_entry(t, 0, entry_of(0, flags));
	w_put_entry(t, 1, entry_of(56, flags));
	w_put_entry(t, 2, entry_of(60, flags));
	w_put_entry(t, 3, entry_of(65532, flags));
	w_put_entry(t, 4, entry_of(65520, flags));
	w_put_entry(t, 5, entry_of(65516, flags));
	put_runs(t, 6);
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
		w_put_entry(t, i, entry_of(64 + 16 * i, flags));
	put_runs(t, 0xffffffff);
}

static void committed_beyond_the_next(struct wthread *t, uint32_t flags)
{
	put_header(t, 64, 1, 65532);
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
	memset(w_segment(t) + 64 + bs_run_header_bytes(flags), 0xff, 32000);
	w_put_entry(t, 0, entry_of(64, flags));
	put_runs(t, 1);
}

static void (*const lies[])(struct wthread *t, uint32_t flags) = {
	one_run_for_all_entries,
	offsets_descend,
	runs_overlap,
	half_a_segment_each,
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
				  ? BSN_SLICE_HELD | EVICTED_BY_FINGERPRINT
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
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint8_t *sealed;
	uint64_t bytes;
	struct bsn *n = node_with_writer(&config, &w, &t);

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
				entry_of(64 + 4 * below(16000), below(16));
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
	free_with_writer(n, &w);
}

/* Fingerprints of others' traces: each costs a look at a header, and after some
 * of them nobody looks at the liar's segments in that search, which says so. What is
 * kept of his runs no search meets. */
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
		 BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	decode_slice(n, id, &d);
	CHECK_EQ(d.records, 2);
	CHECK_EQ(check_order(&d), 1);
	bsn_get_metrics(n, &m);
	CHECK(!kept || m.second_chances > 1000);
	/* All of them in the segment that he holds. */
	CHECK_EQ(m.false_hits, 17);
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void others_fingerprints(void)
{
	fingerprints_of_others(false);
	fingerprints_of_others(true);
}

#define LOOK_ALIKES 100u
#define ASKED_FOR 10u

/* Somebody asks for traces that look like an honest process's, as he knows how to
 * make them: that is no lie of the process, and it is found what it wrote. */
static void look_alikes_hide_nothing(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	/* Some of its traces have many runs. */
	for (uint32_t i = 0; i < ASKED_FOR; i++) {
		for (uint32_t k = 0; k < 40; k++)
			CHECK(w_trace(&t, trace_id(i), 100, START));
		CHECK(w_take_segment(&t));
	}
	CHECK(w_trace(&t, trace_id(ASKED_FOR), 100, START));
	CHECK(w_take_segment(&t));
	bsn_poll(n, START);
	collect(n, trace_id(LIAR), START, &s);
	for (uint32_t i = 0; i < ASKED_FOR; i++) {
		for (uint64_t k = 1; k <= LOOK_ALIKES; k++) {
			struct bs_trace_id id = look_alike(trace_id(i), k);

			CHECK_EQ(bs_fingerprint(id.hi, id.lo),
				 bs_fingerprint(trace_id(i).hi,
						trace_id(i).lo));
			CHECK_EQ(bsn_collect(n, id, id, "test", START, &s), 0);
		}
	}
	/* Half of them nobody asks for, and their runs are met in vain. */
	for (uint32_t i = ASKED_FOR / 2; i <= ASKED_FOR; i++)
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	CHECK(s.flags & BSN_SLICE_SEARCHING);
	bsn_poll(n, START + MS);
	for (uint32_t i = ASKED_FOR / 2; i <= ASKED_FOR; i++) {
		decode_slice(n, trace_id(i), &d);
		CHECK_EQ(d.records, i < ASKED_FOR ? 40 : 1);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.false_hits > ASKED_FOR / 2);
	CHECK(m.false_hits <= ASKED_FOR / 2 * 17);
	free_with_writer(n, &w);
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
	LIVES, /* parked, sealed, gone on with: as they like */
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
	case LIVES:
	default:
		for (uint32_t s = 0; s < 64; s++) {
			struct bs_segment_header *h =
				(void *)(w->arena + (uint64_t)s * SEG);

			if (lie == SLOTS)
				h->slot = below(2) ? below(300) : 0xffffffff;
			else if (lie == LIVES)
				w_set_life(w, s, below(5));
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
			      s.flags == EVICTED_BY_FINGERPRINT);
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
		/* Who had a part in it, a successor does not know; but that
		 * nothing of it changed since. */
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
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

		for (int i = 0; i < LIARS; i++) {
			struct bs_context_segment *x = w[i].context;

			while (x->cells[x->trigger_head % BS_TRIGGER_CELLS]
				       .seq == x->trigger_head)
				w_trigger(&w[i], trace_id(9), "flood", START);
		}
		if (fired == came) {
			w_trigger(&w[LIARS], trace_id(1), "honest", START);
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

/* Another process writes to the memory of one that ended, and others look at what it
 * took while its end is seen to: more than any process can have in use. */
static void a_process_that_ended_takes_more(void)
{
	struct bsn_config config = test_config(256 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);
	struct client *c = n->clients.all[0];
	uint64_t now = START;
	uint32_t count = 0;

	while (grants_stock(c) < 1000) {
		CHECK(w_take_segment(&t));
		if (++count % 10 == 0)
			bsn_poll(n, now += MS);
	}
	node_lock(n);
	for (uint32_t i = 0; i < 1000; i++) {
		uint32_t at = c->grant_tail++ % BS_GRANT_RING_ENTRIES;
		struct frame *f = frame_at(n, c->granted[at]);

		frame_set_state(n, f, FRAME_ACTIVE);
		thread_enter(n, f);
	}
	CHECK(c->active.count >= 1000);
	count = n->pool.sealed.count + c->active.count;
	threads_finish(n, c);
	CHECK_EQ(c->active.count, 0);
	CHECK_EQ(n->pool.sealed.count, count);
	node_unlock(n);
	free_with_writer(n, &w);
}

/* The longest row of places that are taken. */
static uint32_t longest_row(struct met_table *t)
{
	uint32_t longest = 0;

	for (uint32_t k = 0; k < met_pages(t); k++) {
		const struct met_page *page = met_page(t, k);
		uint32_t row = 0;

		for (uint32_t i = 0; i < page->room; i++) {
			row = page->met[i].client == NONE ? 0 : row + 1;
			if (row > longest)
				longest = row;
		}
	}
	return longest;
}

/* What 0x9e3779b1 makes into a number of which the bits 7 to 22 are 0. */
static uint32_t handle_of_one_place(uint32_t i)
{
	return (i >> 7 << 23 | (i & 0x7f)) * 0x0e8b2f51u;
}

/* A process knows the code. Handles that all have one place would each cost a look at
 * all of them. */
static void handles_that_are_chosen_have_places_of_their_own(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct slice slice = {.id = trace_id(1)};
	const struct sink to = {.slice = &slice};
	struct run run = {.owner.number = 1};
	struct search s;

	node_lock(n);
	CHECK_EQ(search_init(n, &s, slice.id, to), 0);
	for (uint32_t i = 1; i <= 10000; i++) {
		run.handle = handle_of_one_place(i);
		search_meet(n, &s, &run, (struct ticks){0});
	}
	CHECK_EQ(s.met.n, 10000);
	CHECK(longest_row(&s.met) < 200);
	search_free(n, &s);
	node_unlock(n);
	bsn_free(n);
}

/* Buckets of which each place is held: what comes there goes on to others (gone.c). */
static uint32_t full_buckets(const struct bsn *n)
{
	const struct gone_set *g = &n->ledger.gone;
	const uint64_t *words = (const uint64_t *)g->buckets;
	uint32_t full = 0;

	for (uint32_t i = 0; i < 1u << g->bits; i++)
		full += words[8 * i + 7] >> 56 == 14;
	return full;
}

/* Who knows a trace's id, and the code, but not the secret, lets others be evicted that
 * would have all places of eight buckets in which it is looked for, were the secret 1. */
static void nobody_chooses_what_shares_a_bucket(void)
{
	const uint64_t victim = 0x123456789abc;
	const uint32_t step = (uint32_t)victim >> 8 | 1;
	struct bsn_config config = test_config(4 << 20);
	uint64_t mask;
	uint32_t shift;
	struct bsn *n;

	config.tombstones = 1u << 20;
	n = test_node(&config);
	shift = BS_FINGERPRINT_BITS - n->ledger.gone.bits;
	mask = (1u << n->ledger.gone.bits) - 1;
	node_lock(n);
	for (uint32_t i = 0; i < 8 * 14; i++) {
		uint64_t bucket = (victim >> shift) + i / 14 * step;

		CHECK(gone_add(n, (bucket & mask) << shift | (i + 1),
			       GONE_EVICTED));
	}
	CHECK_EQ(full_buckets(n), 0);
	CHECK(gone_add(n, victim, GONE_EVICTED));
	CHECK_EQ(gone_why(n, victim), GONE_EVICTED);
	node_unlock(n);
	bsn_free(n);
}

/* The number of a run may be any that 32 bits can say. */
static void the_highest_number_of_a_run_is_not_the_only_one(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_begin(&t, trace_id(1), 0x10000, 0, BS_RUN_FIRST, 8));
	w_end(&t, 0);
	CHECK(w_begin(&t, trace_id(1), 0x10000, UINT32_MAX, 0, 8));
	w_end(&t, BS_RUN_LAST);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_EVICTED);
	free_with_writer(n, &w);
}

int main(int argc, char **argv)
{
	amount_of(argc, argv, 1);
	RUN(directories_that_lie);
	RUN(entries_rewritten_after_sealing);
	RUN(others_fingerprints);
	RUN(look_alikes_hide_nothing);
	RUN(grants_that_lie);
	RUN(losses_that_lie);
	RUN(handles_that_never_close);
	RUN(triggers_without_end);
	RUN(a_process_that_ended_takes_more);
	RUN(handles_that_are_chosen_have_places_of_their_own);
	RUN(nobody_chooses_what_shares_a_bucket);
	RUN(the_highest_number_of_a_run_is_not_the_only_one);
	free(d.bytes);
	return 0;
}
