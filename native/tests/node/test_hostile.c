/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that lie. Bytes of a live client's arena, channel and context are
 * overwritten at random while the node works, beside an honest client, which
 * must lose nothing; and restarts adopt what is left. The numbers come from a
 * seed, so that a failure repeats: test_node_hostile [rounds [seed]].
 */
#include <fcntl.h>

#include "writer.h"

static struct decoded d;
static uint64_t random_state;
static struct bsn_metrics total;

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

/* Values that lies are made of. */
static uint64_t lie(void)
{
	static const uint64_t likely_lies[] = {
		0,     1,	   8,	       31,	   32,
		63,    64,	   255,	       256,	   2047,
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
	uint32_t segment;

	switch (below(10)) {
	case 0: /* heads, counts, segment */
		poke((uint8_t *)a + below(120));
		break;
	case 1: /* run entries, about to be read */
	case 2:
		poke((uint8_t *)&a->entries[(a->run_head - below(8)) %
					    BS_RUN_RING_ENTRIES] +
		     below(24));
		break;
	case 3: /* the node's own line */
		poke((uint8_t *)&a->run_tail + below(56));
		break;
	case 4: /* the grant ring */
		poke((uint8_t *)w_grants(w) + below(1024));
		break;
	case 5: /* the channel header */
		poke(w->channel + below(1024));
		break;
	case 6: /* the context */
		poke((uint8_t *)x + below(sizeof(*x) - 8));
		break;
	case 7: /* a claimed or committed cell */
		x->trigger_head += below(3);
		poke((uint8_t *)&x->cells[x->trigger_head % BS_TRIGGER_CELLS] +
		     below(128));
		break;
	default: /* headers and records in segments in use */
		segment = READ_ONCE(a->segment);
		if (segment >= w->arena_bytes / SEG || below(4) == 0)
			segment = below(16);
		poke(w->arena + (uint64_t)segment * SEG +
		     (below(2) ? below(4096) : below(SEG - 8)));
	}
}

/* The honest writer's position may be a lie too: stay inside the mapping. */
static bool sane(const struct wthread *t)
{
	return t->segment == BS_SEGMENT_NONE ||
	       t->segment < t->w->arena_bytes / SEG;
}

static void write_some(struct wthread *t, uint64_t id, uint64_t now)
{
	struct bs_grant_ring *ring = w_grants(t->w);
	const struct bs_grant *g =
		&ring->entries[ring->tail % BS_GRANT_RING_ENTRIES];

	if (g->segment >= t->w->arena_bytes / SEG || !sane(t))
		return;
	if (t->head - w_area(t->w, t->slot)->run_tail > BS_RUN_RING_ENTRIES)
		return;
	w_trace(t, trace_id(id), below(3000), now);
}

static void look_around(struct bsn *n, uint64_t ids, uint64_t now)
{
	static uint8_t buffer[1 << 20];
	struct bsn_slice s;
	struct bs_trace_id id = trace_id(below((uint32_t)ids));

	switch (below(5)) {
	case 0:
		bsn_collect(n, id, id, "lie", now, &s);
		break;
	case 1:
		d.bytes = buffer;
		d.n_bytes = bsn_peek(n, id, now, buffer, sizeof(buffer), &s);
		if (s.trimmed_bytes == 0)
			decode(&d);
		break;
	case 2:
		if (!bsn_slice_info(n, id, &s))
			bsn_slice_trim(n, id, s.bytes / 2);
		break;
	case 3:
		if (!bsn_slice_info(n, id, &s) && !s.trimmed_bytes) {
			d.bytes = buffer;
			d.n_bytes = bsn_slice_read(n, id, 0, buffer,
						   sizeof(buffer));
			decode(&d);
		}
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
	total.traces_evicted += m.traces_evicted;
	total.second_chances += m.second_chances;
	total.runs_drained += m.runs_drained;
	total.runs_walked += m.runs_walked;
	total.cells_skipped += m.cells_skipped;
}

static struct bsn *come_back(struct bsn *n, const struct bsn_config *config,
			     struct writer *w, int writers, uint64_t now)
{
	int store = dup(bsn_store_fd(n)), keep = dup(bsn_keep_fd(n));

	add_up(n);
	bsn_free(n);
	n = test_node(config);
	if (below(2)) {
		CHECK_EQ(bsn_adopt_store(n, now, store), 0);
		CHECK_EQ(bsn_adopt_keep(n, now, keep), 0);
	} else {
		CHECK_EQ(bsn_adopt_keep(n, now, keep), 0);
		CHECK_EQ(bsn_adopt_store(n, now, store), 0);
	}
	for (int i = 0; i < writers; i++) {
		int number = bsn_client_adopt(n, w[i].number, 1, "again", now,
					      &w[i].fds);

		/* The magic itself may be spoilt. */
		CHECK(number > 0 || (i && number < 0));
		w[i].number = number;
	}
	close(store);
	close(keep);
	return n;
}

static void lies(uint64_t rounds)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_event events[16];
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2], honest;
	uint64_t now = START, next_honest = 1 << 30, checked = 0;

	config.trace_bytes_max = 65536;
	config.index_traces = 8192;
	n = test_node(&config);
	writer_attach(&w[0], n, now);
	honest = writer_thread(&w[0], 0);
	writer_attach(&w[1], n, now);
	for (uint32_t i = 0; i < 2; i++)
		t[i] = writer_thread(&w[1], i);
	for (uint64_t round = 0; round < rounds; round++) {
		now += below(MS / 2);
		for (uint32_t i = below(4); i; i--)
			write_some(&t[below(2)], below(500), now);
		for (uint32_t i = below(3); i; i--)
			spoil(&w[1], 2);
		if (below(3) == 0 &&
		    w_trace(&honest, trace_id(next_honest), below(3000), now))
			next_honest++;
		bsn_poll(n, now);
		if (below(8) == 0)
			look_around(n, 500, now);
		bsn_events(n, events, 16);
		if (round % 64 == 0) {
			check_invariants(n);
			/* Who is honest loses nothing to the liar. */
			if (next_honest > 1 << 30 &&
			    !bsn_collect(n, trace_id(next_honest - 1),
					 trace_id(1), "t", now, &s)) {
				CHECK(s.flags == BSN_SLICE_HELD ||
				      s.flags == (BSN_SLICE_HELD |
						  BSN_SLICE_MAYBE_LOSSY) ||
				      s.flags & BSN_SLICE_STORE_FULL);
				checked++;
				bsn_slice_release(n, trace_id(next_honest - 1),
						  false, now);
			}
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
	       "chances %ju, runs drained %ju, walked %ju, cells skipped %ju\n",
	       (uintmax_t)rounds, (uintmax_t)total.corrupt,
	       (uintmax_t)total.reclaims, (uintmax_t)total.traces_evicted,
	       (uintmax_t)total.second_chances, (uintmax_t)total.runs_drained,
	       (uintmax_t)total.runs_walked, (uintmax_t)total.cells_skipped);
	/* It was what it is meant to be. */
	if (rounds >= 100000)
		CHECK(checked && total.corrupt > 1000 && total.reclaims > 100 &&
		      total.second_chances > 10 && total.runs_walked > 100);
	writer_close(&w[0]);
	writer_close(&w[1]);
	bsn_free(n);
}

int main(int argc, char **argv)
{
	uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 0) : 200000;
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;

	random_state = seed * 2654435761u + 1;
	lies(rounds);
	return 0;
}
