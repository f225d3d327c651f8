/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What processes that are gone left, and traces of many short runs: neither makes a
 * collection or an eviction dearer than its entries are.
 */
#include <time.h>

#include "between.h"
#include "writer.h"

/* ------------------------------------------------ processes that are gone --- */

#define GONE 200u
#define SEGMENTS_EACH 3u

/* Of the trace, each process left so many handles open. */
#define OPEN_EACH 2u

static struct decoded d;

/* Returns how many runs that are. */
static uint32_t live_and_leave(struct bsn *n, struct bs_trace_id id,
			       uint32_t number)
{
	uint32_t segments = n->pool.sealed.count + SEGMENTS_EACH;
	uint64_t i = (uint64_t)(number + 1) << 32;
	struct wthread t;
	struct writer w;
	uint32_t runs;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t k = 1; k <= OPEN_EACH; k++) {
		CHECK(w_begin(&t, id, k, 0, BS_RUN_FIRST, 100));
		w_record(&t, BS_RECORD_DATA, "left", 4, START);
	}
	t.handle = OPEN_EACH;
	for (runs = OPEN_EACH; n->pool.sealed.count < segments; runs++) {
		CHECK(w_trace(&t, trace_id(i++), 100, START));
		if (runs % 100 == 0)
			bsn_poll(n, START);
	}
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	writer_close(&w);
	return runs;
}

struct leftovers {
	struct bsn *n;
	struct bs_trace_id id;
	uint32_t runs;
};

static struct leftovers leave_all(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct leftovers l = {.id = trace_id(1)};

	config.clients_max = GONE + 1;
	config.arena_bytes = 16 << 20;
	l.n = test_node(&config);
	for (uint32_t i = 0; i < GONE; i++)
		l.runs += live_and_leave(l.n, l.id, i);
	bsn_poll(l.n, START);
	CHECK_EQ(l.n->counts.runs_evicted, 0);
	CHECK_EQ(l.n->clients.count, GONE);
	return l;
}

static void a_collection_reads_once_what_the_dead_left(void)
{
	struct leftovers l = leave_all();
	uint64_t before = l.n->counts.entries_searched;
	struct bsn_slice s;

	collect(l.n, l.id, START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK_EQ(s.open_handles, 0);
	CHECK_EQ(l.n->counts.entries_searched - before, l.runs);
	decode_slice(l.n, l.id, &d);
	CHECK_EQ(d.by_kind[BS_PIECE_PROCESS], GONE);
	CHECK_EQ(d.by_kind[BS_PIECE_RUN], GONE * OPEN_EACH);
	CHECK_EQ(d.by_kind[BS_PIECE_EXIT], GONE);
	check_invariants(l.n);
	bsn_free(l.n);
}

struct look {
	struct bsn *n;
	uint64_t entries;
};

static void *look_between(void *argument)
{
	struct look *look = argument;

	node_lock(look->n);
	look->entries = look->n->counts.entries_searched;
	node_unlock(look->n);
	return NULL;
}

/* However many processes that is, the lock is lent after so many entries. */
static void a_collection_lends_the_lock_beside_the_dead(void)
{
	struct leftovers l = leave_all();
	uint64_t before = l.n->counts.entries_searched, seen;
	struct look look = {.n = l.n};
	struct slice *slice;
	pthread_t thread;

	node_lock(l.n);
	slice = slice_new(l.n, l.id, l.id, "test");
	CHECK(slice);
	search_later(l.n, slice);
	thread = start_between(l.n, look_between, &look);
	search_waiting(l.n, l.n->searches_made);
	end_between(l.n, thread);
	seen = look.entries - before;
	CHECK(seen > 0 && seen < l.runs);
	CHECK(seen <= PIECE_ENTRIES + BS_SEGMENT_RUNS_MAX);
	CHECK_EQ(l.n->counts.entries_searched - before, l.runs);
	bsn_free(l.n);
}

/* ----------------------------------------------------- many short runs --- */

#define SEGMENTS 100u

static uint64_t cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

struct of_runs {
	uint64_t ns, runs;
};

/* What it takes to reclaim segments full of runs without records, which are of one
 * handle of one trace, or each of a trace of its own that lost its first run. */
static struct of_runs reclaim_short_runs(bool of_one, bool is_open)
{
	struct bsn_config config = test_config(64 << 20);
	const uint32_t handle = 1;
	struct of_runs cost;
	struct wthread t;
	struct writer w;
	struct bsn *n;

	config.tombstones = 1 << 20;
	n = node_with_writer(&config, &w, &t);
	if (is_open)
		w_show(&t, handle);
	for (uint32_t i = 1; n->pool.sealed.count < SEGMENTS; i++) {
		CHECK(w_begin(&t, trace_id(of_one ? 1 : i),
			      of_one ? handle : i + 1, i, 0, 0));
		w_end(&t, 0);
		if (i % 10000 == 0)
			bsn_poll(n, START);
	}
	cost.ns = cpu_ns();
	for (uint32_t i = 0; i < SEGMENTS; i++)
		CHECK(pool_reclaim(n, NULL, true));
	cost.ns = cpu_ns() - cost.ns;
	cost.runs = n->counts.runs_evicted + n->counts.second_chances;
	CHECK(cost.runs > 100000);
	CHECK_EQ(!!n->counts.second_chances, is_open);
	check_invariants(n);
	free_with_writer(n, &w);
	return cost;
}

/* At best of a few. */
static uint64_t ps_a_run(bool of_one, bool is_open)
{
	uint64_t best = UINT64_MAX;

	for (uint32_t i = 0; i < 3; i++) {
		struct of_runs cost = reclaim_short_runs(of_one, is_open);

		if (cost.ns * 1000 / cost.runs < best)
			best = cost.ns * 1000 / cost.runs;
	}
	return best;
}

/* A run of it costs what another trace's costs. What is kept is copied, too. */
static void a_trace_of_many_runs_is_evicted_run_by_run(void)
{
	uint64_t others = ps_a_run(false, false);
	uint64_t of_one = ps_a_run(true, false);
	uint64_t kept = ps_a_run(true, true);

	printf("  %llu ps a run, %llu of one trace, %llu of one that is open\n",
	       (unsigned long long)others, (unsigned long long)of_one,
	       (unsigned long long)kept);
	CHECK(of_one < 4 * others);
	CHECK(kept < 20 * others);
}

int main(void)
{
	RUN(a_collection_reads_once_what_the_dead_left);
	RUN(a_collection_lends_the_lock_beside_the_dead);
	RUN(a_trace_of_many_runs_is_evicted_run_by_run);
	free(d.bytes);
	return 0;
}
