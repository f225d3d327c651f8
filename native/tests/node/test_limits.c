/* SPDX-License-Identifier: Apache-2.0 */
/* What one process can make the node do, and take from others: so much. */
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>

#include "node/internal.h"
#include "old_kernel.h"
#include "writer.h"

static struct decoded d;

static uint32_t stop;

/* Every cell is committed again as soon as it was given back. */
static void *commit_for_ever(void *argument)
{
	struct bs_context_segment *x = argument;

	while (!READ_ONCE(stop)) {
		for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++) {
			uint32_t seq = READ_ONCE(x->cells[i].seq);

			if (seq % BS_TRIGGER_CELLS == i)
				store_release(&x->cells[i].seq, seq + 1);
		}
	}
	return NULL;
}

static void triggers_without_end(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics before, after;
	pthread_t liar;
	struct writer w;

	writer_attach(&w, n, START);
	CHECK_EQ(pthread_create(&liar, NULL, commit_for_ever, w.context), 0);
	bsn_get_metrics(n, &after);
	while (after.corrupt < 50 * BS_TRIGGER_CELLS) {
		before = after;
		bsn_poll(n, START);
		bsn_get_metrics(n, &after);
		CHECK(after.corrupt - before.corrupt <= BS_TRIGGER_CELLS);
		if (after.corrupt == before.corrupt)
			sched_yield();
	}
	WRITE_ONCE(stop, 1);
	pthread_join(liar, NULL);
	free_with_writer(n, &w);
}

/* Taken and never written to: as many as it can have threads. */
static void grants_that_nobody_uses(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct writer liar, w;
	struct wthread t;
	struct bsn_metrics m;
	struct bsn_slice s;
	uint64_t now = START;

	writer_attach(&liar, n, now);
	writer_attach(&w, n, now);
	t = writer_thread(&w, 0);
	for (uint32_t i = 0; i < 1000; i++) {
		struct bs_grant_ring *ring = w_grants(&liar);

		now += MS;
		store_release(&ring->tail, load_acquire(&ring->head));
		CHECK(w_trace(&t, trace_id(i), 30000, now));
		bsn_poll(n, now);
		check_invariants(n);
	}
	bsn_get_metrics(n, &m);
	CHECK(m.reclaims > 100);
	CHECK(m.active_bytes <= (BS_THREAD_SLOTS + 1) * SEG);
	collect(n, trace_id(999), now, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	decode_slice(n, trace_id(999), &d);
	CHECK_EQ(d.records, 1);
	writer_close(&liar);
	free_with_writer(n, &w);
}

/* An arena as large as its number of segments allows comes back. */
static void a_large_arena_is_adopted(void)
{
	struct bsn_config config = test_config(4ull << 30);
	struct bsn *n;
	struct writer w;
	struct wthread t;
	struct bsn_slice s;

	n = node_with_writer(&config, &w, &t);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	bsn_poll(n, START);
	n = restart(n, &config, &w, 1, START);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	free_with_writer(n, &w);
}

/* Two threads of the caller read the clock, and come in the other order. */
static void time_does_not_go_back(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_client_fds fds;
	struct bsn_slice s;
	struct held held;
	struct writer w;

	writer_attach(&w, n, START + MS);
	CHECK(bsn_client_add(n, 1, "x", START, &fds) > 0);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.collected_ns, START + MS);
	close(fds.arena);
	close(fds.channel);
	close(fds.context);
	held = hold(n);
	bsn_free(n);
	n = test_node(&config);
	CHECK_EQ(bsn_adopt_keep(n, START + MS, held.keep), 0);
	CHECK_EQ(bsn_adopt_store(n, START, held.store), 0);
	CHECK_EQ(bsn_client_adopt(n, w.number, 1234, "tester", START, &w.fds),
		 w.number);
	close(held.keep);
	close(held.store);
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.collected_ns, START + MS);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	collect(n, trace_id(3), START, &s);
	CHECK_EQ(s.collected_ns, START + MS);
	free_with_writer(n, &w);
}

/* To announce losses takes no memory of the pool, and puts no other process's
 * traces in doubt. */
static void losses_without_end(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct writer liar, w;
	struct wthread lies, t;
	struct bsn_metrics m;
	struct bsn_slice s;

	config.tombstones = 1 << 16;
	n = test_node(&config);
	writer_attach(&liar, n, START);
	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	lies = writer_thread(&liar, 0);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	CHECK(w_trace(&lies, trace_id(2), 100, START));
	for (uint64_t i = 0; i < 50000; i++) {
		w_lose(&lies, trace_id(100 + i), BS_RUN_FIRST, 0);
		if (i % 500 == 0)
			bsn_poll(n, START + i);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.reclaims, 0);
	CHECK_EQ(m.corrupt, 0);
	CHECK(m.gone <= 101 * BS_LOSS_RING_ENTRIES);
	CHECK_EQ(m.gone_forgotten, 0);
	/* Of each is known that it lost, or that it may have. */
	collect(n, trace_id(100), START, &s);
	CHECK(s.flags & BSN_SLICE_LOSSY);
	collect(n, trace_id(50099), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_MAYBE_LOSSY);
	collect(n, trace_id(2), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	collect(n, trace_id(1), START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	writer_close(&liar);
	free_with_writer(n, &w);
}

/* As a client does it, but that this one has seen that the node will sleep. */
static void *ring(void *argument)
{
	struct writer *w = argument;
	struct bs_doorbell *bell = &w_header(w)->doorbell;

	while (!READ_ONCE(bell->sleeping))
		sched_yield();
	w_trigger(w, trace_id(1), "ring", START);
	__atomic_fetch_add(&bell->rung, 1, __ATOMIC_RELEASE);
	syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	return NULL;
}

/* More processes than one call of the kernel's waits for. */
static void the_last_of_many_rings(void)
{
	enum {
		MANY = 130
	};
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n;
	static struct writer w[MANY];

	config.clients_max = MANY;
	config.arena_bytes = 1 << 20;
	n = test_node(&config);
	for (int i = 0; i < MANY; i++)
		writer_attach(&w[i], n, START);
	CHECK_EQ(bsn_wait(n, 0), 1); /* for those that came */
	bsn_poll(n, START);
	CHECK_EQ(bsn_wait(n, 20 * MS), 0);
	for (int i = 0; i < MANY; i += MANY - 1) {
		struct bsn_event e[2];
		pthread_t ringer;

		CHECK_EQ(pthread_create(&ringer, NULL, ring, &w[i]), 0);
		CHECK_EQ(bsn_wait(n, -1), 1);
		pthread_join(ringer, NULL);
		bsn_poll(n, START);
		CHECK_EQ(bsn_events(n, e, 2), 1);
		CHECK_EQ(e[0].client, w[i].number);
	}
	for (int i = 0; i < MANY; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static struct bsn *sleeper;

/* When it sleeps, or is about to. */
static void *wake(void *argument)
{
	const struct writer *w = argument;

	while (!READ_ONCE(w_header(w)->doorbell.sleeping))
		sched_yield();
	bsn_wake(sleeper);
	return NULL;
}

static void a_wake_ends_the_wait(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct writer w;
	pthread_t waker;

	sleeper = test_node(&config);
	writer_attach(&w, sleeper, START);
	bsn_wait(sleeper, 0);
	bsn_poll(sleeper, START);
	CHECK_EQ(bsn_wait(sleeper, MS), 0);
	CHECK_EQ(pthread_create(&waker, NULL, wake, &w), 0);
	CHECK_EQ(bsn_wait(sleeper, -1), 1);
	pthread_join(waker, NULL);
	free_with_writer(sleeper, &w);
}

static uint64_t cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* What it costs that so many rings of a process make no sense, at best of a few. */
static uint64_t cost_of_nonsense(struct bsn *n, struct writer *w,
				 uint32_t rings)
{
	uint64_t best = UINT64_MAX;

	for (uint32_t k = 0; k < 5; k++) {
		uint64_t before = cpu_ns();

		for (uint32_t i = 0; i < rings; i++) {
			WRITE_ONCE(w_area(w, i)->loss_head,
				   w_area(w, i)->loss_head + 1000000);
			WRITE_ONCE(w_grants(w)->losses,
				   w_grants(w)->losses + 1000000);
		}
		bsn_poll(n, START + k);
		if (cpu_ns() - before < best)
			best = cpu_ns() - before;
	}
	return best;
}

/* Slices that may have lost something are looked for once, not at each lie: there
 * is room for 130,000. */
static void nonsense_costs_one_look_at_slices(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n;
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w, liar;
	struct wthread t;
	uint64_t one, all;

	config.store_bytes = 256 << 20;
	n = test_node(&config);
	writer_attach(&w, n, START);
	writer_attach(&liar, n, START);
	(void)writer_thread(&liar, BS_THREAD_SLOTS - 1);
	t = writer_thread(&w, 0);
	CHECK(w_trace(&t, trace_id(1), 100, START));
	collect(n, trace_id(1), START, &s);
	one = cost_of_nonsense(n, &liar, 1);
	all = cost_of_nonsense(n, &liar, BS_THREAD_SLOTS);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 5 + 5 * BS_THREAD_SLOTS);
	printf("  %llu us for one lie, %llu us for %u\n",
	       (unsigned long long)one / 1000, (unsigned long long)all / 1000,
	       BS_THREAD_SLOTS);
	CHECK(all < 10 * one);
	CHECK_EQ(bsn_slice_info(n, trace_id(1), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	writer_close(&w);
	free_with_writer(n, &liar);
}

/* Of each process that comes there is a place to tell that it is forgotten, whatever
 * memory there is then. */
static void each_end_has_its_place(void)
{
	enum {
		PROCESSES = 40,
		ROUNDS = 3
	};
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e;
	struct writer w[PROCESSES];
	uint32_t told = 0;

	bsn_poll(n, START);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		for (uint32_t i = 0; i < PROCESSES; i++) {
			writer_attach(&w[i], n, START);
			CHECK(n->clients.drained_room >=
			      n->clients.count + n->clients.n_drained);
		}
		for (uint32_t i = 0; i < PROCESSES; i++) {
			CHECK_EQ(bsn_client_exited(n, w[i].number, START), 0);
			writer_close(&w[i]);
		}
	}
	while (bsn_events(n, &e, 1))
		told += e.kind == BSN_EVENT_CLIENT_DRAINED;
	CHECK_EQ(told, ROUNDS * PROCESSES);
	bsn_free(n);
}

int main(void)
{
	RUN(each_end_has_its_place);
	RUN(triggers_without_end);
	RUN(grants_that_nobody_uses);
	RUN(a_large_arena_is_adopted);
	RUN(time_does_not_go_back);
	RUN(nonsense_costs_one_look_at_slices);
	RUN(losses_without_end);
	RUN(the_last_of_many_rings);
	RUN(a_wake_ends_the_wait);
	RUN(forget_futex_waitv);
	RUN(the_last_of_many_rings);
	RUN(a_wake_ends_the_wait);
	free(d.bytes);
	return 0;
}
