/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two clients that write random bytes over all of their mappings, each in a
 * thread of its own, while the node polls, searches, reclaims and is restarted;
 * and an honest one, which loses nothing.
 *
 * test_node_scribble [polls [seed]]
 */
#include <pthread.h>
#include <sys/stat.h>

#include "random.h"
#include "writer.h"

#define SCRIBBLERS 2
#define LIARS_TRACES 8u
#define HONEST 1000u

struct scribbler {
	struct writer w;
	pthread_t thread;
	uint64_t state;
	bool stop;
};

static struct decoded d;

/* Of its own: the main thread's numbers must not depend on theirs. */
static uint64_t next(struct scribbler *s)
{
	s->state ^= s->state << 13;
	s->state ^= s->state >> 7;
	s->state ^= s->state << 17;
	return s->state * 0x2545f4914f6cdd1dull;
}

static void scribble(struct scribbler *s, uint8_t *bytes, uint64_t size)
{
	uint64_t at = next(s) % (size / 8), words = 1 + next(s) % 64;

	for (uint64_t i = at; i < at + words && i < size / 8; i++)
		WRITE_ONCE(((uint64_t *)bytes)[i], next(s));
}

/* What the node would look at: a directory of runs of a trace that is collected,
 * wherever they may be. */
static void write_directory(struct scribbler *s, uint32_t segment)
{
	uint8_t *bytes = s->w.arena + (uint64_t)segment * SEG;
	struct bs_trace_id id = trace_id(next(s) % LIARS_TRACES);

	for (uint32_t i = 0; i < 16; i++) {
		uint32_t at = (uint32_t)(next(s) % (SEG - 64)) & ~3u;
		struct bs_run_header *h = (void *)(bytes + at);

		w_put_header(h, id, (uint32_t)next(s) % 4, 0, BS_RUN_FIRST,
			     (uint32_t)next(s) % SEG);
		WRITE_ONCE(*bs_directory(bytes, (uint32_t)(next(s) % 64)),
			   bs_entry(bs_fingerprint(id.hi, id.lo), at,
				    (uint32_t)next(s) % 16));
	}
	WRITE_ONCE(((struct bs_segment_header *)bytes)->runs, 64);
	WRITE_ONCE(((struct bs_segment_header *)bytes)->slot, next(s) % 4);
	WRITE_ONCE(((struct bs_segment_header *)bytes)->life,
		   bs_life(1 + next(s) % 3, next(s) % 5));
	fetch_add(&w_grants(&s->w)->moves, next(s) % 2);
}

static void *scribbles(void *arg)
{
	struct scribbler *s = arg;
	struct bs_grant_ring *ring = w_grants(&s->w);

	while (!load_acquire(&s->stop)) {
		switch (next(s) % 8) {
		case 0:
			scribble(s, s->w.channel, BS_CHANNEL_BYTES);
			break;
		case 1:
			scribble(s, (uint8_t *)s->w.context,
				 sizeof(*s->w.context));
			break;
		case 2:
			/* It takes what there is, as far as it is told so. */
			WRITE_ONCE(ring->tail, READ_ONCE(ring->head));
			break;
		case 3:
			scribble(s, s->w.arena, s->w.arena_bytes);
			break;
		default:
			write_directory(s, (uint32_t)(next(s) % 64));
		}
	}
	return NULL;
}

static void scribbler_start(struct scribbler *s, struct bsn *n, uint64_t now)
{
	writer_attach(&s->w, n, now);
	s->stop = false;
	s->state = random_u64() | 1;
	CHECK_EQ(pthread_create(&s->thread, NULL, scribbles, s), 0);
}

static void scribbler_end(struct scribbler *s)
{
	store_release(&s->stop, true);
	CHECK_EQ(pthread_join(s->thread, NULL), 0);
	writer_close(&s->w);
}

static struct bsn_metrics total;

static void add_up(struct bsn *n)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	total.corrupt += m.corrupt;
	total.reclaims += m.reclaims;
	total.passes += m.passes;
	total.entries_searched += m.entries_searched;
	total.taken_back_bytes += m.taken_back_bytes;
}

static struct bsn *restart_all(struct bsn *n, const struct bsn_config *config,
			       struct writer *honest,
			       struct scribbler scribblers[SCRIBBLERS],
			       uint64_t now)
{
	struct held h = hold(n);

	add_up(n);
	bsn_free(n);
	n = test_node(config);
	CHECK_EQ(bsn_adopt_keep(n, now, h.keep), 0);
	CHECK_EQ(bsn_adopt_store(n, now, h.store), 0);
	CHECK_EQ(bsn_client_adopt(n, honest->number, 1, "tester", now,
				  &honest->fds),
		 honest->number);
	for (int i = 0; i < SCRIBBLERS; i++) {
		struct scribbler *s = &scribblers[i];

		/* Its magic may be spoilt: it comes as another. */
		if (bsn_client_adopt(n, s->w.number, 2, "liar", now,
				     &s->w.fds) < 0) {
			scribbler_end(s);
			bsn_poll(n, now);
			scribbler_start(s, n, now);
		}
	}
	close(h.store);
	close(h.keep);
	return n;
}

static void check_honest(struct bsn *n, uint64_t trace, uint64_t now)
{
	struct bsn_slice s;

	if (bsn_collect(n, trace_id(trace), trace_id(trace), "test", now, &s))
		return; /* liars' slices have all of the store */
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, trace_id(trace), &s), 0);
	if (!(s.flags & BSN_SLICE_STORE_FULL)) {
		/* That something near was lost, a liar can say. */
		CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_MAYBE_LOSSY,
			 BSN_SLICE_HELD);
		decode_slice(n, trace_id(trace), &d);
		CHECK_EQ(d.records, 1);
	}
	bsn_slice_release(n, trace_id(trace), false, now);
}

static void look_at_lies(struct bsn *n, const struct bsn_config *config,
			 uint64_t now)
{
	struct bs_trace_id id = trace_id(below(LIARS_TRACES));
	struct bsn_slice s;

	if (bsn_collect(n, id, id, "test", now, &s))
		return;
	CHECK(s.bytes <= config->trace_bytes_max);
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, id, &s), 0);
	decode_slice(n, id, &d);
	if (below(2))
		bsn_slice_release(n, id, false, now);
}

static void scribbled(uint64_t polls)
{
	/* A process can pin what its threads can be in: 512 segments each. */
	struct bsn_config config = test_config(128 << 20);
	struct bsn *n;
	struct bsn_metrics m;
	struct bsn_event events[32];
	struct scribbler scribblers[SCRIBBLERS];
	struct writer honest;
	struct wthread t;
	struct stat st;
	uint64_t now = START, written = 0, memory = 0;

	config.trace_bytes_max = 256 << 10;
	n = node_with_writer(&config, &honest, &t);
	for (int i = 0; i < SCRIBBLERS; i++)
		scribbler_start(&scribblers[i], n, now);
	for (uint64_t poll = 0; poll < polls; poll++) {
		now += 5 * MS;
		CHECK(w_trace(&t, trace_id(HONEST + written++), below(3000),
			      now));
		bsn_poll(n, now);
		bsn_events(n, events, 32);
		bsn_events_done(n);
		if (poll % 8 == 0)
			check_honest(n, HONEST + written - 1, now);
		if (poll % 8 == 4)
			look_at_lies(n, &config, now);
		if (poll % 64 == 0)
			check_invariants(n);
		if (poll % 300 == 150)
			n = restart_all(n, &config, &honest, scribblers, now);
		if (poll % 100 == 50) {
			struct scribbler *s = &scribblers[below(SCRIBBLERS)];

			bsn_client_exited(n, s->w.number, now);
			scribbler_end(s);
			scribbler_start(s, n, now);
		}
	}
	CHECK_EQ(w_area(&honest, 0)->loss_head, 0);
	for (int i = 0; i < SCRIBBLERS; i++) {
		store_release(&scribblers[i].stop, true);
		CHECK_EQ(pthread_join(scribblers[i].thread, NULL), 0);
	}
	/* What they touched and were not granted is taken back. */
	for (uint32_t i = 0; i < 50; i++) {
		now += SECOND;
		bsn_poll(n, now);
	}
	bsn_get_metrics(n, &m);
	for (int i = 0; i < SCRIBBLERS; i++) {
		CHECK_EQ(fstat(scribblers[i].w.fds.arena, &st), 0);
		memory += (uint64_t)st.st_blocks * 512;
		writer_close(&scribblers[i].w);
	}
	CHECK(memory <= m.pool_bytes);
	add_up(n);
	printf("%ju polls: corrupt %ju, reclaims %ju, %ju entries searched in "
	       "%ju passes, taken back %ju MiB\n",
	       (uintmax_t)polls, (uintmax_t)total.corrupt,
	       (uintmax_t)total.reclaims, (uintmax_t)total.entries_searched,
	       (uintmax_t)total.passes,
	       (uintmax_t)(total.taken_back_bytes >> 20));
	CHECK(total.entries_searched <=
	      total.passes * (m.pool_bytes / SEG) * BS_SEGMENT_RUNS_MAX);
	/* It was what it is meant to be. */
	if (polls >= 4000)
		CHECK(total.corrupt > 100 && total.reclaims > 100 &&
		      total.entries_searched > 10000 && total.taken_back_bytes);
	free_with_writer(n, &honest);
}

int main(int argc, char **argv)
{
	scribbled(amount_of(argc, argv, 4000).much);
	free(d.bytes);
	return 0;
}
