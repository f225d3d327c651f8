/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long the node's lock is held at most, in what is dearest. Not a test, since it
 * tells times: `build/native/tests/node/holds [SCENARIO...]`.
 *
 * The linker puts the functions below in the place of those that lock (--wrap), so the
 * library is the one that is measured elsewhere. A hold's time is CPU time of the
 * thread: what the machine does for others meanwhile is not in it. Each scenario is
 * run several times, and the run with the shortest longest hold counts.
 */
#include <stdlib.h>
#include <time.h>

#include "node/internal.h"
#include "writer.h"

#define RUNS 3u

/* --------------------------------------------------------------- measure --- */

static struct {
	const struct bsn *n; /* NULL: nothing is measured */
	uint64_t begun_ns;
	uint64_t longest_ns, sum_ns;
	uint64_t longest_cost, begun_cost; /* of the longest, in entries */
	uint32_t holds;
} measured;

static uint64_t cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static void hold_begins(void)
{
	measured.begun_cost = measured.n->cost;
	measured.begun_ns = cpu_ns();
}

static void hold_ends(void)
{
	uint64_t ns = cpu_ns() - measured.begun_ns;

	measured.holds++;
	measured.sum_ns += ns;
	if (ns <= measured.longest_ns)
		return;
	measured.longest_ns = ns;
	measured.longest_cost = measured.n->cost - measured.begun_cost;
}

/* NOLINTBEGIN(bugprone-reserved-identifier): the linker's names */
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t *mutex);

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex)
{
	int result = __real_pthread_mutex_lock(mutex);

	if (measured.n && mutex == &measured.n->lock)
		hold_begins();
	return result;
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex)
{
	if (measured.n && mutex == &measured.n->lock)
		hold_ends();
	return __real_pthread_mutex_unlock(mutex);
}
/* NOLINTEND(bugprone-reserved-identifier) */

static void measure(const struct bsn *n)
{
	memset(&measured, 0, sizeof(measured));
	measured.n = n;
}

static void measure_end(void)
{
	measured.n = NULL;
}

/* ------------------------------------------------------------- scenarios --- */

static struct bsn *node_of(uint64_t pool_bytes)
{
	struct bsn_config config = test_config(pool_bytes);

	config.store_bytes = 256 << 20;
	config.trace_bytes_max = 64 << 20;
	config.tombstones = 1 << 22;
	return test_node(&config);
}

/* A search meets as many handles as can be told apart, all of them open when it
 * began, and none any more: their ends are lost. */
static void closed(void)
{
	struct bsn *n = node_of(256 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 32000; i++) {
		CHECK(w_begin(&t, trace_id(1), 0x10000 + i, 0,
			      BS_RUN_FIRST | BS_RUN_LOSSY, 0));
		w_end(&t, 0);
	}
	bsn_poll(n, START);
	measure(n);
	CHECK_EQ(bsn_collect(n, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	bsn_poll(n, START + MS);
	measure_end();
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK(s.flags & BSN_SLICE_LOSSY);
	CHECK_EQ(s.open_handles, 0);
	free_with_writer(n, &w);
}

/* All threads of as many processes are counted. */
static void metrics(void)
{
	enum {
		PROCESSES = 16
	};
	struct bsn *n = node_of(256 << 20);
	struct writer w[PROCESSES];
	struct bsn_metrics m;

	for (uint32_t i = 0; i < PROCESSES; i++) {
		writer_attach(&w[i], n, START);
		for (uint32_t k = 0; k < BS_THREAD_SLOTS; k++) {
			struct wthread t = writer_thread(&w[i], k);

			w_lose(&t, trace_id(k), BS_RUN_FIRST, 8);
		}
	}
	bsn_poll(n, START + MS);
	measure(n);
	bsn_get_metrics(n, &m);
	measure_end();
	CHECK_EQ(m.clients, PROCESSES);
	free_with_writers(n, w, PROCESSES);
}

static void write_runs(struct wthread *t, uint32_t runs)
{
	for (uint32_t i = 0; i < runs; i++) {
		CHECK(w_begin(t, trace_id(1), 0x10000, i, i ? 0 : BS_RUN_FIRST,
			      0));
		w_end(t, 0);
	}
}

/* A trace of many runs without records: 2,700 in a segment. */
static void found(void)
{
	struct bsn *n = node_of(256 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	write_runs(&t, 60000);
	bsn_poll(n, START);
	measure(n);
	CHECK_EQ(bsn_collect(n, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	measure_end();
	free_with_writer(n, &w);
}

/* The same by a trace that is open, as it is written. */
static void watched(void)
{
	struct bsn *n = node_of(256 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	CHECK_EQ(bsn_collect(n, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	bsn_poll(n, START);
	write_runs(&t, 60000);
	measure(n);
	bsn_poll(n, START + MS);
	measure_end();
	free_with_writer(n, &w);
}

/* It is reclaimed. */
static void reclaimed(void)
{
	struct bsn *n = node_of(16 << 20);
	uint64_t now = START, i = 0;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	w_list(&w, 0x10000, true);
	write_runs(&t, 60000);
	measure(n);
	while (n->counts.reclaims < 100) {
		if (!w_trace(&t, trace_id(++i), 1000, now) || i % 100 == 0)
			bsn_poll(n, now += MS);
	}
	measure_end();
	CHECK(n->counts.second_chances > 30000);
	free_with_writer(n, &w);
}

/* Parts of kept runs, in the order that is worst. */
static void put_off(void)
{
	enum {
		PARTS = 16000
	};
	static uint8_t records[12];
	struct bsn *n = node_of(64 << 20);
	struct frame frame = {.bytes = records};
	struct run run = {.frame = &frame, .bytes = sizeof(records)};
	struct search *search;
	struct slice *slice;

	bsn_poll(n, START);
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	search = n->searches;
	n->searches = NULL;
	node_unlock(n);
	measure(n);
	for (uint32_t i = 0; i < PARTS; i++) {
		/* As many as a pass meets under one hold. */
		if (i % 400 == 0)
			node_lock(n);
		run.owner.number = 1;
		run.from = 12 * (i + 1);
		search_put_off(n, search, &run);
		if (i % 400 == 399)
			node_unlock(n);
	}
	node_lock(n);
	search_judge_all(n, search, false);
	node_unlock(n);
	measure_end();
	search_free(n, search);
	free(search);
	bsn_free(n);
}

/* A successor of a node with a full pool, and as many slices. */
static void restarted(void)
{
	struct bsn_config config = test_config(256 << 20);
	uint64_t now = START, i = 0;
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n;
	struct held h;

	config.store_bytes = 256 << 20;
	config.tombstones = 1 << 22;
	n = test_node(&config);
	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	while (n->counts.reclaims < 100) {
		if (!w_trace(&t, trace_id(++i), 100, now) || i % 1000 == 0)
			bsn_poll(n, now += MS);
	}
	for (uint64_t k = 0; k < 20000; k++)
		CHECK_EQ(bsn_collect(n, trace_id(i - k), trace_id(i - k),
				     "test", now, &s),
			 0);
	/* These are looked for anew. */
	bsn_poll(n, now += 1000 * MS);
	for (uint64_t k = 0; k < 5000; k++)
		CHECK_EQ(bsn_collect(n, trace_id(i - 20000 - k),
				     trace_id(i - 20000 - k), "test", now, &s),
			 0);
	/* Not seen by the predecessor. */
	for (uint64_t k = 0; k < 400000; k++) {
		if (!w_trace(&t, trace_id(++i), 100, now))
			break;
	}
	h = hold(n);
	bsn_free(n);
	n = test_node(&config);
	measure(n);
	CHECK_EQ(bsn_adopt_keep(n, now, h.keep), 0);
	CHECK_EQ(bsn_adopt_store(n, now, h.store), 0);
	CHECK_EQ(bsn_client_adopt(n, w.number, 1234, "tester", now, &w.fds),
		 w.number);
	printf("    adopted: longest %llu us of %u\n",
	       (unsigned long long)measured.longest_ns / 1000, measured.holds);
	measure(n);
	bsn_poll(n, now);
	measure_end();
	close(h.store);
	close(h.keep);
	free_with_writer(n, &w);
}

/* A process tells as many losses as its threads have room for, each of another trace
 * that has a slice. */
static void lied_to(void)
{
	enum {
		LIES = BS_THREAD_SLOTS * BS_LOSS_RING_ENTRIES
	};
	struct bsn *n = node_of(256 << 20);
	struct writer liar, w;
	struct wthread t, lies[BS_THREAD_SLOTS];
	struct bsn_slice s;
	uint64_t now = START;

	writer_attach(&w, n, now);
	writer_attach(&liar, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t k = 0; k < BS_THREAD_SLOTS; k++)
		lies[k] = writer_thread(&liar, k);
	for (uint32_t i = 0; i < LIES; i++) {
		CHECK(w_trace(&t, trace_id(i), 40, now));
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", now,
				     &s),
			 0);
		if (i % 1000 == 0)
			bsn_poll(n, now += SECOND);
	}
	bsn_poll(n, now += SECOND);
	for (uint32_t i = 0; i < LIES; i++)
		w_lose(&lies[i % BS_THREAD_SLOTS], trace_id(i), BS_RUN_FIRST,
		       0);
	measure(n);
	bsn_poll(n, now + MS);
	measure_end();
	writer_close(&liar);
	free_with_writer(n, &w);
}

/* As many searches as a second of triggers may bring, one pass for all. */
static void together(void)
{
	enum {
		SEARCHES = 10000
	};
	struct bsn *n = node_of(256 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	/* Other traces, so that the store does not grow. */
	for (uint32_t i = 0; i < SEARCHES; i++)
		CHECK(w_trace(&t, trace_id(SEARCHES + i), 40, START));
	bsn_poll(n, START);
	/* The first is looked for at once. */
	for (uint32_t i = 0; i < SEARCHES; i++)
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	measure(n);
	bsn_poll(n, START + MS);
	measure_end();
	CHECK_EQ(n->counts.searches, SEARCHES);
	free_with_writer(n, &w);
}

/* Each process has a thread in the one segment that there is for it, and wants more. */
static void exhausted(void)
{
	enum {
		PROCESSES = 1000
	};
	static struct writer w[PROCESSES];
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n;

	config.clients_max = PROCESSES;
	config.arena_bytes = 16 * SEG;
	n = test_node(&config);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		struct wthread t;

		writer_attach(&w[i], n, START);
		t = writer_thread(&w[i], 0);
		if (w_take_segment(&t))
			CHECK(w_trace(&t, trace_id(i), 40, START));
	}
	bsn_poll(n, START);
	measure(n);
	bsn_poll(n, START + MS);
	measure_end();
	free_with_writers(n, w, PROCESSES);
}

/* Runs of as many records as there is room for, of a slice that is full. */
static void truncated(void)
{
	enum {
		RUNS_OF_IT = 400,
		RECORDS = 1000
	};
	struct bsn_config config = test_config(256 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < RUNS_OF_IT; i++) {
		CHECK(w_begin(&t, trace_id(1), 0x10000, i, i ? 0 : BS_RUN_FIRST,
			      RECORDS * 12));
		for (uint32_t k = 0; k < RECORDS; k++)
			w_record(&t, BS_RECORD_DATA, NULL, 0, START);
		w_end(&t, 0);
	}
	bsn_poll(n, START);
	measure(n);
	CHECK_EQ(bsn_collect(n, trace_id(1), trace_id(1), "test", START, &s),
		 0);
	measure_end();
	CHECK(s.flags & BSN_SLICE_TRUNCATED);
	free_with_writer(n, &w);
}

/* All threads of as many processes hold a segment, and one of each fills another. */
static void busy(void)
{
	enum {
		PROCESSES = 16
	};
	static struct wthread t[PROCESSES][BS_THREAD_SLOTS];
	struct writer w[PROCESSES];
	struct bsn *n = node_of(1024 << 20);

	for (uint32_t i = 0; i < PROCESSES; i++) {
		writer_attach(&w[i], n, START);
		for (uint32_t k = 0; k < BS_THREAD_SLOTS; k++) {
			t[i][k] = writer_thread(&w[i], k);
			if (k % 16 == 0)
				bsn_poll(n, START);
			CHECK(w_trace(&t[i][k], trace_id(k), 40, START));
		}
	}
	bsn_poll(n, START);
	for (uint32_t i = 0; i < PROCESSES; i++)
		CHECK(w_take_segment(&t[i][0]));
	measure(n);
	bsn_poll(n, START + MS);
	measure_end();
	free_with_writers(n, w, PROCESSES);
}

/* Segments full of runs of the trace that a pass is to look for go before it is there. */
static void passed(void)
{
	struct bsn *n = node_of(16 << 20);
	struct search *search;
	struct slice *slice;
	uint64_t now = START, i = 1;
	struct wthread t;
	struct writer w;
	struct pass p;

	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	write_runs(&t, 60000);
	bsn_poll(n, START);
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	search_later(n, slice);
	search = n->searches;
	n->searches = NULL;
	CHECK_EQ(pass_begin(n, &p, search, 1), 0);
	node_unlock(n);
	measure(n);
	while (n->counts.reclaims < 50) {
		if (!w_trace(&t, trace_id(++i), 1000, now) || i % 100 == 0)
			bsn_poll(n, now += MS);
	}
	measure_end();
	node_lock(n);
	pass_run(n, &p);
	pass_end(n, &p);
	search_judge_all(n, search, false);
	pass_free(&p);
	search_free(n, search);
	free(search);
	node_unlock(n);
	free_with_writer(n, &w);
}

/* ------------------------------------------------------------------ main --- */

static const struct scenario {
	const char *name;
	void (*run)(void);
} scenarios[] = {
	{"closed", closed},	  {"metrics", metrics},
	{"found", found},	  {"watched", watched},
	{"reclaimed", reclaimed}, {"put_off", put_off},
	{"restarted", restarted}, {"lied_to", lied_to},
	{"together", together},	  {"exhausted", exhausted},
	{"truncated", truncated}, {"busy", busy},
	{"passed", passed},
};

static bool is_asked_for(const char *name, int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], name))
			return true;
	}
	return argc == 1;
}

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof(scenarios) / sizeof(*scenarios); i++) {
		uint64_t best_ns = UINT64_MAX;

		if (!is_asked_for(scenarios[i].name, argc, argv))
			continue;
		for (uint32_t k = 0; k < RUNS; k++) {
			scenarios[i].run();
			if (measured.longest_ns < best_ns)
				best_ns = measured.longest_ns;
		}
		printf("%-10s longest hold %7.1f us; in the last run %u holds, %.1f us, cost of the longest %llu\n",
		       scenarios[i].name, (double)best_ns / 1000,
		       measured.holds, (double)measured.sum_ns / 1000,
		       (unsigned long long)measured.longest_cost);
		fflush(stdout);
	}
	return 0;
}
