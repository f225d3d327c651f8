/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a node cannot know to be whole it does not call whole: after losses that nobody
 * can tell the trace of, over a restart, and where evictions are forgotten.
 */
#include "node/internal.h"
#include "writer.h"

#define POOL (8ull << 20)
#define SEGMENTS ((uint32_t)(POOL / SEG))

#define QUIET 1000u
#define NOISY 1001u

#define T trace_id(1u << 30) /* what it is all about */
#define OTHER trace_id((1u << 30) + 1)

/* A process with one thread that writes traces of its own. */
struct user {
	struct writer w;
	struct wthread t;
	uint64_t next;
};

static void attach(struct user *u, struct bsn *n, uint64_t tenant, uint64_t now)
{
	*u = (struct user){.next = tenant * 1000000};
	writer_attach(&u->w, n, now);
	CHECK_EQ(bsn_client_tenant(n, u->w.number, tenant, now), 0);
	u->t = writer_thread(&u->w, 0);
}

static void end(struct bsn *n, struct user *one, struct user *other)
{
	writer_close(&one->w);
	writer_close(&other->w);
	bsn_free(n);
}

/* Other traces, until so many segments are full. */
static void fill(struct user *u, struct bsn *n, uint32_t segments,
		 uint32_t bytes, uint64_t *now)
{
	while (segments) {
		uint32_t before = u->t.segment;

		if (!w_trace(&u->t, trace_id(u->next), bytes, *now)) {
			bsn_poll(n, *now += MS);
			continue;
		}
		u->next++;
		segments -= u->t.segment != before;
	}
	bsn_poll(n, *now += MS);
}

/* Runs without a record up to the end of a segment, and T as the last in it. */
static void end_segment_with_t(struct user *u)
{
	const uint32_t segment = u->t.segment;

	while (u->t.cursor + 200 < SEG - 8 * u->t.runs - 200)
		CHECK(w_trace(&u->t, trace_id(u->next++), 0, 0));
	CHECK(w_trace(&u->t, T, 100, 0));
	CHECK_EQ(u->t.segment, segment);
}

/* A thread without a slot loses a record of nobody knows which trace. */
static void lose_untied(struct user *u, struct bsn *n, uint64_t *now)
{
	WRITE_ONCE(u->w.context->records_unattributed, 1);
	fetch_add(&w_grants(&u->w)->losses, 1);
	bsn_poll(n, *now += MS);
}

/* A handle that goes on: its first run. */
static uint32_t open_t(struct user *u, struct wthread *root, uint64_t now)
{
	uint32_t handle = ++root->handle;

	w_list(&u->w, handle, true);
	CHECK(w_begin(root, T, handle, 0, BS_RUN_FIRST, 200));
	w_record(root, BS_RECORD_DATA, "root", 4, now);
	w_end(root, 0);
	for (uint64_t i = 0; i < 4; i++)
		CHECK(w_trace(root, trace_id(100 + i), 30000, now));
	return handle;
}

static void close_t(struct user *u, struct wthread *root, uint32_t handle,
		    uint64_t now)
{
	CHECK(w_begin(root, T, handle, 1, 0, 200));
	w_record(root, BS_RECORD_DATA, "end", 3, now);
	w_end(root, BS_RUN_LAST);
	w_list(&u->w, handle, false);
}

/* ------------------------------------------------------------- restarts --- */

static void lose_channel(struct user *u, struct bsn *n, uint64_t *now)
{
	CHECK_EQ(bsn_client_lost(n, u->w.number, *now), 0);
}

/* More than there is room for, and then one of T. */
static void lose_very_many(struct user *u, struct bsn *n, uint64_t *now)
{
	const uint32_t whole = BS_RUN_FIRST | BS_RUN_LAST;

	for (uint64_t k = 0; k < 3 * test_config(POOL).tombstones; k++) {
		if (k % BS_LOSS_RING_ENTRIES == 0)
			bsn_poll(n, *now += MS);
		w_lose(&u->t, trace_id(1000000 + k), whole, 100);
	}
	bsn_poll(n, *now += MS);
	w_lose(&u->t, T, whole, 100);
}

/* That no counter of the process tells. */
static void a_restart_forgets_no_doubt(void)
{
	void (*const lose[])(struct user *, struct bsn *,
			     uint64_t *) = {lose_channel, lose_very_many};

	for (uint32_t i = 0; i < 2; i++) {
		struct bsn_config config = test_config(POOL);
		struct bsn *n = test_node(&config);
		struct user u;
		uint64_t now = START;

		attach(&u, n, QUIET, now);
		CHECK(w_trace(&u.t, T, 100, now));
		lose[i](&u, n, &now);
		bsn_poll(n, now += MS);
		bsn_poll(n, now += MS);
		CHECK_EQ(flags_of(n, T, now), BSN_SLICE_MAYBE_LOSSY);
		n = restart(n, &config, &u.w, 1, now);
		bsn_poll(n, now += MS);
		CHECK_EQ(flags_of(n, T, now), BSN_SLICE_MAYBE_LOSSY);
		free_with_writers(n, &u.w, 1);
	}
}

static void what_is_not_adopted_is_lost(void)
{
	struct bsn_config config = test_config(POOL);
	struct bsn *n = test_node(&config);
	struct writer w[2];
	struct wthread t;
	uint64_t now = START;

	for (uint32_t i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t = writer_thread(&w[i], 0);
		CHECK(w_trace(&t, T, 100, now));
	}
	CHECK(w_trace(&t, OTHER, 100, now));
	bsn_poll(n, now += MS);
	n = restart(n, &config, w, 1, now);
	bsn_poll(n, now += MS);
	CHECK_EQ(flags_of(n, T, now), BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(flags_of(n, OTHER, now), BSN_SLICE_MAYBE_LOSSY);
	free_with_writers(n, w, 2);
}

/* --------------------------------------------------------------- slices --- */

enum joins {
	LOST_BEFORE,
	LOST_AFTER,
	LOST_AS_IT_CAME
};

/* A process that lost something gets a part in a slice that was judged. */
static void who_joins_a_slice(enum joins how)
{
	const uint32_t doubted = BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY;
	struct bsn_config config = test_config(POOL);
	struct bsn *n = test_node(&config);
	struct user holder, late;
	uint64_t now = START;
	struct bsn_slice s;

	attach(&holder, n, QUIET, now);
	attach(&late, n, QUIET, now);
	CHECK(w_trace(&late.t, OTHER, 100, now));
	CHECK(w_trace(&holder.t, T, 100, now));
	bsn_poll(n, now += MS);
	if (how == LOST_BEFORE)
		lose_untied(&late, n, &now);
	collect(n, T, now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	bsn_poll(n, now += MS);
	if (how == LOST_AFTER)
		lose_untied(&late, n, &now);
	if (how == LOST_AS_IT_CAME)
		lose_channel(&late, n, &now);
	CHECK(w_trace(&late.t, T, 100, now));
	bsn_poll(n, now += MS);
	bsn_poll(n, now += 100 * MS);
	CHECK_EQ(bsn_slice_info(n, T, &s), 0);
	CHECK_EQ(s.flags, doubted);
	end(n, &holder, &late);
}

static void who_joins_a_slice_is_asked_what_he_lost(void)
{
	who_joins_a_slice(LOST_BEFORE);
	who_joins_a_slice(LOST_AFTER);
	who_joins_a_slice(LOST_AS_IT_CAME);
}

/* A later loss does not end the doubt of an earlier one, while kept runs are of its time. */
static void kept_runs_stay_in_doubt(void)
{
	const uint32_t doubted = BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY;
	struct bsn_config config = test_config(POOL);
	struct user u, other;
	struct wthread root;
	uint64_t now = START;
	struct bsn_slice s;
	uint32_t handle;
	struct bsn *n;

	config.tombstones = 1u << 20;
	n = test_node(&config);
	attach(&u, n, QUIET, now);
	attach(&other, n, NOISY, now);
	root = writer_thread(&u.w, 1);
	handle = open_t(&u, &root, now);
	lose_channel(&u, n, &now);
	bsn_poll(n, now += 310 * SECOND);
	fill(&u, n, 3 * SEGMENTS, 1000, &now);
	for (uint64_t i = 0; i < 3; i++)
		CHECK(w_trace(&root, trace_id(200 + i), 30000, now));
	bsn_poll(n, now += 61 * SECOND);
	fill(&u, n, 3 * SEGMENTS, 1000, &now);
	fill(&other, n, 3 * SEGMENTS, 1000, &now);
	fill(&u, n, 3 * SEGMENTS, 1000, &now);
	close_t(&u, &root, handle, now);
	bsn_poll(n, now += 400 * SECOND);
	lose_channel(&u, n, &now);
	bsn_poll(n, now += MS);
	collect(n, T, now, &s);
	CHECK_EQ(s.flags, doubted);
	end(n, &u, &other);
}

/* ------------------------------------------------- what is gone is forgotten --- */

/* It was triggered, and is reclaimed before its pass, beside too many for its share. */
static void who_waits_for_a_pass_is_not_forgotten(void)
{
	struct bsn_config config = test_config(POOL);
	struct user quiet, noisy;
	uint64_t now = START;
	struct bsn_slice s;
	struct bsn *n;

	config.tombstones = 0;
	n = test_node(&config);
	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	fill(&noisy, n, SEGMENTS / 4, 0, &now);
	end_segment_with_t(&noisy);
	fill(&noisy, n, 1, 0, &now);
	CHECK_EQ(flags_of(n, T, now), 0);
	CHECK_EQ(bsn_collect(n, OTHER, OTHER, "test", now, &s), 0);
	CHECK_EQ(bsn_collect(n, T, T, "test", now, &s), 0);
	CHECK(s.flags & BSN_SLICE_SEARCHING);
	node_lock(n);
	for (uint32_t i = 0; i <= SEGMENTS / 4 + 1; i++)
		pool_reclaim(n, NULL, true);
	node_unlock(n);
	bsn_poll(n, now += MS);
	CHECK_EQ(bsn_slice_info(n, T, &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT);
	end(n, &quiet, &noisy);
}

/* Also of who has fewer places than segments. */
static void each_segment_may_leave_something(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct user quiet, noisy;
	uint64_t now = START;
	struct bsn *n;

	config.tombstones = 600;
	config.store_bytes = 4 << 20;
	n = test_node(&config);
	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	CHECK(w_trace(&quiet.t, T, 100, now));
	fill(&quiet, n, (64 << 20) / SEG + 1, 30000, &now);
	CHECK_EQ(flags_of(n, T, now),
		 BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT);
	end(n, &quiet, &noisy);
}

/* The root of a long trace is kept, and a child of another thread is evicted. Who began
 * since then, or lost nothing, is not doubted. */
static void a_trace_that_outlives_the_memory_is_doubted(bool restarts)
{
	struct bsn_config config = test_config(POOL);
	struct user u, other;
	struct wthread root;
	uint64_t now = START;
	struct bsn_slice s;
	uint32_t handle;
	struct bsn *n;

	config.tombstones = 0;
	n = test_node(&config);
	attach(&u, n, QUIET, now);
	attach(&other, n, QUIET, now);
	CHECK(w_trace(&other.t, OTHER, 100, now));
	root = writer_thread(&u.w, 1);
	handle = open_t(&u, &root, now);
	CHECK(w_trace(&u.t, T, 100, now));
	fill(&u, n, SEGMENTS, 100, &now);
	CHECK_EQ(flags_of(n, T, now),
		 BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT);
	fill(&u, n, 3 * SEGMENTS, 100, &now);
	if (restarts) {
		struct writer w[] = {u.w, other.w};

		n = restart(n, &config, w, 2, now);
		bsn_poll(n, now += MS);
	}
	CHECK_EQ(flags_of(n, T, now), BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(flags_of(n, OTHER, now), 0);
	CHECK_EQ(flags_of(n, trace_id(u.next - 1), now), 0);
	close_t(&u, &root, handle, now);
	bsn_poll(n, now += MS);
	collect(n, T, now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(s.open_handles, 0);
	end(n, &u, &other);
}

static void a_trace_that_outlives_the_memory(void)
{
	a_trace_that_outlives_the_memory_is_doubted(false);
	a_trace_that_outlives_the_memory_is_doubted(true);
}

int main(void)
{
	RUN(a_restart_forgets_no_doubt);
	RUN(what_is_not_adopted_is_lost);
	RUN(who_joins_a_slice_is_asked_what_he_lost);
	RUN(kept_runs_stay_in_doubt);
	RUN(who_waits_for_a_pass_is_not_forgotten);
	RUN(each_segment_may_leave_something);
	RUN(a_trace_that_outlives_the_memory);
	return 0;
}
