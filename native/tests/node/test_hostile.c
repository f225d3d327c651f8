/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client that writes anything anywhere: bytes of its arena, channel and
 * context, at random, while the node works, is restarted, and is asked. Beside
 * it an honest one, which must lose nothing.
 *
 * test_node_hostile [rounds [seed]]
 */
#include "random.h"
#include "writer.h"

#define SEGMENTS(bytes) ((bytes) / SEG)

static struct decoded d;
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
	anything(amount_of(argc, argv, 200000).much);
	free(d.bytes);
	return 0;
}
