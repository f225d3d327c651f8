/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node that is killed at each of its stores to shared memory, one after the
 * other: its successor loses nothing, doubles nothing, and goes on. And a
 * successor that is killed while it adopts.
 *
 *   stage    two processes, slices, losses, open handles, a pool that is full
 *   act      what the node does when it is killed, in a process of its own
 *   check    what its successor says and does, in another
 *
 * test_node_kill [most kills an act [seed]]
 */
#include <sys/wait.h>

#include "kill.h"
#include "random.h"
#include "writer.h"

#define WRITERS 2
#define ADOPT_STORES 250u /* that a successor makes, about */
#define FREE 8u		  /* segments of a small pool that are left free */
#define FILLERS 1000u	  /* traces of one run: from this number on */

enum traces {
	OPEN = 1,      /* a handle is open all the time; its first run is old */
	COLLECTED = 2, /* by both processes, of which one has a run open */
	LOST = 3,      /* collected; one of its handles lost all */
	TRIGGERED = 4, /* a trigger waits */
	LISTED = 5,    /* as OPEN, of bs_open() */
	LATE = 6,      /* written by one that will end */
	ALONE = 7,     /* of one run, written lately */
	PARKED = 8,    /* in a segment that is parked; the oldest */
	GONE_ON = 9,   /* in one that was parked, and gone on in */
};

struct stage {
	struct bsn_config config;
	bool is_tiny, is_stocked;
	struct bsn *n;
	struct writer w[WRITERS];
	struct wthread filler, open, other, late, idle, place;
	uint64_t now;
	uint32_t fillers;
	uint32_t open_runs, collected, late_records;
	struct image images[2 + 3 * WRITERS];
	struct held held;
};

static uint64_t kills_most;
static struct decoded d;
/* What a child found out. */
static uint64_t *told;

/* ----------------------------------------------------------------- stage --- */

static void put(struct wthread *t, uint64_t trace, uint32_t handle,
		uint32_t seq, uint32_t flags, uint64_t now)
{
	CHECK(w_begin(t, trace_id(trace), handle, seq, flags, 3000));
	w_record(t, BS_RECORD_DATA, "record", 6, now);
}

static void fill(struct stage *s)
{
	s->now += MS;
	CHECK(w_trace(&s->filler, trace_id(FILLERS + s->fillers++), 30000,
		      s->now));
}

#define OPEN_HANDLE 1u
#define COLLECTED_HANDLE 2u
#define LOST_HANDLE 3u
#define OTHER_HANDLE ((1u << BS_HANDLE_COUNT_BITS) + 1)
#define LISTED_HANDLE 4u
#define LATE_HANDLE 5u
#define PARKED_HANDLE ((2u << BS_HANDLE_COUNT_BITS) + 1)

static void stage_begin(struct stage *s)
{
	struct bsn_slice slice;
	struct bsn_metrics m;
	uint32_t *listed;

	memset(s, 0, sizeof(*s));
	s->config = test_config(4 << 20);
	s->config.store_bytes = 1 << 20;
	s->config.trace_bytes_max = 256 << 10;
	s->config.tombstones = 1024;
	s->now = START;
	s->n = test_node(&s->config);
	for (int i = 0; i < WRITERS; i++)
		writer_attach(&s->w[i], s->n, s->now);
	s->open = writer_thread(&s->w[0], 0);
	s->filler = writer_thread(&s->w[0], 1);
	s->other = writer_thread(&s->w[1], 1);
	s->late = writer_thread(&s->w[1], 0);
	s->idle = writer_thread(&s->w[0], 2);
	listed = (uint32_t *)(s->w[0].channel + BS_CHANNEL_HANDLES_OFFSET);

	/* Of two that are parked, and seen so, one is gone on in later. */
	for (uint64_t i = PARKED; i <= GONE_ON; i++) {
		CHECK(w_take_segment(&s->idle));
		put(&s->idle, i, PARKED_HANDLE, 0, BS_RUN_FIRST, s->now);
		w_end(&s->idle, BS_RUN_LAST);
		w_park(&s->idle, &s->place);
	}
	bsn_poll(s->n, s->now);
	/* Old runs of open handles, between runs of others. */
	w_show(&s->open, OPEN_HANDLE);
	listed[bs_handle_place(LISTED_HANDLE)] = LISTED_HANDLE;
	put(&s->open, OPEN, OPEN_HANDLE, 0, BS_RUN_FIRST, s->now);
	w_end(&s->open, 0);
	put(&s->open, LISTED, LISTED_HANDLE, 0, BS_RUN_FIRST, s->now);
	w_end(&s->open, 0);
	CHECK(w_take_segment(&s->open)); /* so that it is sealed */
	s->open_runs = 1;
	put(&s->late, LATE, LATE_HANDLE, 0, BS_RUN_FIRST, s->now);
	w_end(&s->late, BS_RUN_LAST);
	s->late_records = 1;
	/* A slice of both; of the second it has a run that is open. */
	put(&s->open, COLLECTED, COLLECTED_HANDLE, 0, BS_RUN_FIRST, s->now);
	w_end(&s->open, 0);
	put(&s->other, COLLECTED, OTHER_HANDLE, 0, BS_RUN_FIRST, s->now);
	s->collected = 2;
	collect(s->n, trace_id(COLLECTED), s->now, &slice);
	collect(s->n, trace_id(LOST), s->now, &slice);
	bsn_poll(s->n, s->now);
	/* Until the pool is full. */
	do {
		fill(s);
		bsn_poll(s->n, s->now);
		bsn_get_metrics(s->n, &m);
		CHECK(s->fillers < 1000);
	} while (m.pool_used_bytes < m.pool_bytes - FREE * SEG);
	CHECK_EQ(m.reclaims, 0);
	bsn_poll(s->n, s->now);
}

/* What the processes do before the node gets to see it. */
static void stage_write(struct stage *s)
{
	/* A run that was open grows and is closed; another is opened. */
	w_record(&s->other, BS_RECORD_DATA, "more", 4, s->now);
	w_end(&s->other, 0);
	put(&s->other, COLLECTED, OTHER_HANDLE, 1, 0, s->now);
	put(&s->open, COLLECTED, COLLECTED_HANDLE, 1, 0, s->now);
	w_end(&s->open, BS_RUN_LAST);
	s->collected += 3;
	put(&s->open, OPEN, OPEN_HANDLE, 1, 0, s->now);
	w_end(&s->open, 0);
	s->open_runs++;
	w_list(s->late.w, LOST_HANDLE, true);
	w_lose_run(&s->late, trace_id(LOST), LOST_HANDLE, BS_RUN_FIRST, 100);
	put(&s->late, LATE, LATE_HANDLE + 1, 0, BS_RUN_FIRST, s->now);
	s->late_records++;
	put(&s->open, ALONE, LISTED_HANDLE + 1, 0, BS_RUN_FIRST, s->now);
	w_end(&s->open, BS_RUN_LAST);
	w_trigger(&s->w[0], trace_id(TRIGGERED), "slow", s->now);
	CHECK(w_go_on(&s->idle, &s->place));
	put(&s->idle, GONE_ON, PARKED_HANDLE + 1, 0, BS_RUN_FIRST, s->now);
	w_end(&s->idle, BS_RUN_LAST);
	w_park(&s->idle, &s->place);
	/* All of the stock: segments are sealed, and others must go. */
	for (uint32_t i = 0; i < 14; i++)
		fill(s);
}

static void stage_full(struct stage *s)
{
	stage_begin(s);
	stage_write(s);
}

/* Arenas so small that a segment is reclaimed in the poll that sees it full. Of
 * one there is a slice, which has not all of it yet. */
static void stage_tiny(struct stage *s)
{
	struct bsn_slice slice;

	memset(s, 0, sizeof(*s));
	s->is_tiny = true;
	s->config = test_config(4 << 20);
	s->config.arena_bytes = 2 * SEG;
	s->config.store_bytes = 1 << 20;
	s->now = START;
	s->n = test_node(&s->config);
	for (int i = 0; i < WRITERS; i++)
		writer_attach(&s->w[i], s->n, s->now);
	s->other = writer_thread(&s->w[1], 1);
	put(&s->other, COLLECTED, OTHER_HANDLE, 0, BS_RUN_FIRST, s->now);
	w_end(&s->other, 0);
	collect(s->n, trace_id(COLLECTED), s->now, &slice);
	bsn_poll(s->n, s->now);
	put(&s->other, COLLECTED, OTHER_HANDLE, 1, 0, s->now);
	w_end(&s->other, BS_RUN_LAST);
	s->collected = 2;
	/* It goes to the next segment, and lets go of the first. */
	CHECK(w_take_segment(&s->other));
}

static uint64_t stocks(const struct stage *s, bool exited)
{
	uint64_t waiting = 0;

	for (int i = 0; i < (exited ? 1 : WRITERS); i++)
		waiting += w_grants(&s->w[i])->head - w_grants(&s->w[i])->tail;
	return waiting;
}

/* A segment each, and sixteen in hand. */
static void stage_stocked(struct stage *s)
{
	memset(s, 0, sizeof(*s));
	s->is_stocked = true;
	s->config = test_config(8 << 20);
	s->config.store_bytes = 1 << 20;
	s->now = START;
	s->n = test_node(&s->config);
	for (int i = 0; i < WRITERS; i++) {
		struct wthread t;

		writer_attach(&s->w[i], s->n, s->now);
		t = writer_thread(&s->w[i], 0);
		CHECK(w_trace(&t, trace_id(FILLERS), 100, s->now));
	}
	bsn_poll(s->n, s->now);
	CHECK_EQ(stocks(s, false), WRITERS * 16);
}

static void stage_save(struct stage *s)
{
	uint32_t k = 0;

	s->held = hold(s->n);
	image_save(&s->images[k++], s->held.store);
	image_save(&s->images[k++], s->held.keep);
	for (int i = 0; i < WRITERS; i++) {
		image_save(&s->images[k++], s->w[i].fds.arena);
		image_save(&s->images[k++], s->w[i].fds.channel);
		image_save(&s->images[k++], s->w[i].fds.context);
	}
}

static void stage_restore(const struct stage *s)
{
	for (uint32_t i = 0; i < sizeof(s->images) / sizeof(*s->images); i++)
		image_restore(&s->images[i]);
}

static void stage_end(struct stage *s)
{
	for (uint32_t i = 0; i < sizeof(s->images) / sizeof(*s->images); i++)
		image_free(&s->images[i]);
	close(s->held.store);
	close(s->held.keep);
	for (int i = 0; i < WRITERS; i++)
		writer_close(&s->w[i]);
	bsn_free(s->n);
}

/* ------------------------------------------------------------------- act --- */

typedef void act_fn(struct stage *s);

static void act_poll(struct stage *s)
{
	bsn_poll(s->n, s->now + MS);
}

/* They are quiet, and do not need as much any more. */
static void act_shrink(struct stage *s)
{
	bsn_poll(s->n, s->now + 600 * SECOND);
}

static void act_collect(struct stage *s)
{
	struct bsn_slice slice;

	collect(s->n, trace_id(OPEN), s->now, &slice);
	collect(s->n, trace_id(ALONE), s->now, &slice);
}

static void act_exit(struct stage *s)
{
	bsn_client_exited(s->n, s->w[1].number, s->now);
}

static void act_attach(struct stage *s)
{
	struct bsn_client_fds fds;

	CHECK(bsn_client_add(s->n, 1, "third", s->now, &fds) > 0);
	bsn_poll(s->n, s->now + MS);
}

static void act_release(struct stage *s)
{
	struct bsn_slice slice;

	bsn_poll(s->n, s->now);
	CHECK_EQ(bsn_slice_info(s->n, trace_id(LOST), &slice), 0);
	CHECK_EQ(bsn_slice_trim(s->n, trace_id(LOST), slice.bytes), 0);
	bsn_slice_release(s->n, trace_id(LOST), false, s->now);
}

/* A successor, in whatever state this is. */
static void adopt_all(struct stage *s)
{
	s->n = test_node(&s->config);
	CHECK_EQ(bsn_adopt_keep(s->n, s->now, s->held.keep), 0);
	CHECK_EQ(bsn_adopt_store(s->n, s->now, s->held.store), 0);
	for (int i = 0; i < WRITERS; i++)
		CHECK_EQ(bsn_client_adopt(s->n, s->w[i].number, 1234, "tester",
					  s->now, &s->w[i].fds),
			 s->w[i].number);
}

static void act_adopt(struct stage *s)
{
	adopt_all(s);
	bsn_poll(s->n, s->now + MS);
}

/* ----------------------------------------------------------------- check --- */

static uint32_t records_of(struct stage *s, uint64_t trace, uint32_t flags)
{
	struct bsn_slice slice;

	collect(s->n, trace_id(trace), s->now, &slice);
	bsn_poll(s->n, s->now);
	CHECK_EQ(bsn_slice_info(s->n, trace_id(trace), &slice), 0);
	CHECK_EQ(slice.flags, flags);
	decode_slice(s->n, trace_id(trace), &d);
	/* None twice. */
	for (uint32_t i = 0; i < d.n_pieces; i++) {
		const struct bs_piece_header *a = &d.pieces[i];

		for (uint32_t k = 0; k < i && a->kind == BS_PIECE_RUN; k++) {
			const struct bs_piece_header *b = &d.pieces[k];

			CHECK(b->kind != BS_PIECE_RUN || !a->bytes ||
			      a->client != b->client ||
			      a->handle != b->handle || a->seq != b->seq ||
			      a->from >= b->from + b->bytes ||
			      b->from >= a->from + a->bytes);
		}
	}
	return d.records;
}

/* What was evicted is what was written first. */
static uint32_t check_fillers(struct stage *s)
{
	uint32_t evicted = 0;

	for (uint32_t i = 0; i < s->fillers; i++) {
		uint8_t buffer[40000];
		struct bsn_slice slice;

		d.n_bytes = bsn_peek(s->n, trace_id(FILLERS + i), s->now,
				     buffer, sizeof(buffer), &slice);
		if (i == evicted && slice.flags == EVICTED_BY_FINGERPRINT) {
			evicted++;
			continue;
		}
		/* Of a segment whose reclaim was not over it may say so, too. */
		if (i < evicted + 2 &&
		    slice.flags == (EVICTED_BY_FINGERPRINT | BSN_SLICE_HELD))
			continue;
		CHECK_EQ(slice.flags, BSN_SLICE_HELD);
	}
	return evicted;
}

static void check_all(struct stage *s, bool exited, bool released)
{
	struct bsn_metrics m;
	struct bsn_slice slice;
	struct bsn_event e[16];
	uint32_t evicted, triggers = 0;
	int got;

	bsn_poll(s->n, s->now);
	check_invariants(s->n);
	bsn_get_metrics(s->n, &m);
	CHECK_EQ(m.corrupt, 0);
	/* As many as threads are in; what is in hand is in the rings. */
	CHECK_EQ(m.active_bytes, (exited ? 2 : 4) * SEG);
	CHECK_EQ(m.stock_bytes, stocks(s, exited) * SEG);
	got = bsn_events(s->n, e, 16);
	for (int i = 0; i < got; i++)
		triggers += e[i].kind == BSN_EVENT_TRIGGER;
	CHECK_EQ(triggers, 1);
	bsn_events_done(s->n);
	evicted = check_fillers(s);
	CHECK(evicted < s->fillers - 60);

	CHECK_EQ(records_of(s, OPEN, BSN_SLICE_HELD), s->open_runs);
	CHECK_EQ(records_of(s, LISTED, BSN_SLICE_HELD), 1);
	CHECK_EQ(records_of(s, ALONE, BSN_SLICE_HELD), 1);
	CHECK_EQ(records_of(s, COLLECTED, BSN_SLICE_HELD), s->collected);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], exited);
	CHECK_EQ(bsn_slice_info(s->n, trace_id(COLLECTED), &slice), 0);
	CHECK_EQ(slice.open_handles, exited ? 0 : 1);
	if (!released) {
		CHECK_EQ(bsn_slice_info(s->n, trace_id(LOST), &slice), 0);
		CHECK_EQ(slice.flags, BSN_SLICE_HELD | BSN_SLICE_LOSSY);
		CHECK_EQ(slice.open_handles, exited ? 0 : 1);
		decode_slice(s->n, trace_id(LOST), &d);
		CHECK_EQ(d.by_kind[BS_PIECE_LOSS], 1);
	}
	CHECK_EQ(records_of(s, GONE_ON, BSN_SLICE_HELD), 2);
	/* The old run of LATE may have been in a segment that went. */
	collect(s->n, trace_id(LATE), s->now, &slice);
	CHECK(slice.flags & BSN_SLICE_HELD);

	/* All goes on. */
	if (!exited) {
		w_record(&s->other, BS_RECORD_DATA, "last", 4, s->now);
		w_end(&s->other, BS_RUN_LAST);
		w_lose_run(&s->late, trace_id(LOST), LOST_HANDLE, BS_RUN_LAST,
			   100);
		bsn_poll(s->n, s->now);
		decode_slice(s->n, trace_id(COLLECTED), &d);
		CHECK_EQ(d.records, s->collected + 1);
		CHECK_EQ(bsn_slice_info(s->n, trace_id(COLLECTED), &slice), 0);
		CHECK_EQ(slice.open_handles, 0);
		if (!bsn_slice_info(s->n, trace_id(LOST), &slice))
			CHECK_EQ(slice.open_handles, 0);
	}
	for (uint32_t i = 0; i < 100; i++) {
		fill(s);
		bsn_poll(s->n, s->now);
		check_invariants(s->n);
	}
	CHECK(check_fillers(s) > evicted);
	collect(s->n, trace_id(PARKED), s->now, &slice);
	CHECK_EQ(slice.flags, EVICTED_BY_FINGERPRINT);
	for (int i = exited; i < WRITERS; i++)
		CHECK_EQ(bsn_client_exited(s->n, s->w[exited ? 0 : i].number,
					   s->now),
			 0);
	bsn_get_metrics(s->n, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.stock_bytes, 0);
	CHECK_EQ(m.active_bytes, 0);
	CHECK_EQ(m.clients, 0);
}

static void check_tiny(struct stage *s)
{
	struct bsn_slice slice;
	struct bsn_metrics m;

	bsn_poll(s->n, s->now);
	check_invariants(s->n);
	bsn_get_metrics(s->n, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(bsn_slice_info(s->n, trace_id(COLLECTED), &slice), 0);
	CHECK_EQ(slice.flags, BSN_SLICE_HELD);
	CHECK_EQ(slice.open_handles, 0);
	decode_slice(s->n, trace_id(COLLECTED), &d);
	CHECK_EQ(d.records, s->collected);
}

/* All that it does not hold is in the rings, or free. */
static void check_stocked(struct stage *s)
{
	struct bsn_metrics m;

	bsn_poll(s->n, s->now + 600 * SECOND);
	check_invariants(s->n);
	bsn_get_metrics(s->n, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.active_bytes, WRITERS * SEG);
	CHECK_EQ(m.stock_bytes, WRITERS * 8 * SEG);
	CHECK_EQ(stocks(s, false), WRITERS * 8);
}

/* ------------------------------------------------------------------ kills --- */

static int child_ends(pid_t child)
{
	int status;

	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* The act, in a process that ends at that store. False: it was done before. */
static bool killed(struct stage *s, act_fn *act, uint64_t store)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0);
	if (!child) {
		kill_arm(store);
		act(s);
		told[0] = kill_stores();
		_exit(0);
	}
	status = child_ends(child);
	CHECK(status == 0 || status == KILLED);
	return status == KILLED;
}

static void checked(struct stage *s, bool exited, bool released, uint64_t first,
		    uint64_t second)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		adopt_all(s);
		if (s->is_tiny) {
			check_tiny(s);
			_exit(0);
		}
		if (s->is_stocked) {
			check_stocked(s);
			_exit(0);
		}
		if (exited)
			CHECK_EQ(bsn_client_exited(s->n, s->w[1].number,
						   s->now),
				 0);
		check_all(s, exited, released);
		_exit(0);
	}
	if (child_ends(child)) {
		fprintf(stderr, "killed at store %ju, then %ju\n",
			(uintmax_t)first, (uintmax_t)second);
		abort();
	}
}

static void at_every_store(const char *name, void (*stage)(struct stage *s),
			   act_fn *act)
{
	bool exited = act == act_exit, released = act == act_release;
	struct stage s;
	uint64_t stores, step, kills = 0;

	stage(&s);
	stage_save(&s);
	CHECK(!killed(&s, act, KILL_NEVER));
	stores = told[0];
	CHECK(stores > 20);
	step = stores / kills_most + 1;
	for (uint64_t k = random_u64() % step; k < stores; k += step) {
		stage_restore(&s);
		CHECK(killed(&s, act, k));
		checked(&s, exited, released, k, KILL_NEVER);
		kills++;
		/* And its successor too, anywhere. */
		stage_restore(&s);
		CHECK(killed(&s, act, k));
		killed(&s, act_adopt, random_u64() % ADOPT_STORES);
		checked(&s, exited, released, k, 1);
	}
	stage_restore(&s);
	printf("%s: killed at %ju of %ju stores\n", name, (uintmax_t)kills,
	       (uintmax_t)stores);
	fflush(stdout);
	stage_end(&s);
}

int main(int argc, char **argv)
{
	kills_most = amount_of(argc, argv, 120).much;
	told = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
		    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(told != MAP_FAILED);
	at_every_store("poll", stage_full, act_poll);
	at_every_store("collect", stage_full, act_collect);
	at_every_store("exit", stage_full, act_exit);
	at_every_store("attach", stage_full, act_attach);
	at_every_store("release", stage_full, act_release);
	at_every_store("adopt", stage_full, act_adopt);
	at_every_store("poll of tiny arenas", stage_tiny, act_poll);
	at_every_store("poll that takes back", stage_stocked, act_shrink);
	free(d.bytes);
	return 0;
}
