/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What triggers cost a node with a full pool.
 *
 *   pool_triggers POOL TRACE_BYTES RATE SECONDS
 *
 * For SECONDS a process fires RATE triggers a second, each for a trace of its
 * own, of a pool of POOL bytes that is full of traces of TRACE_BYTES
 * (full_pool.h), and each slice is read and released. Prints one line of JSON:
 * CPU time of all threads of this process, elapsed time, how often and what was
 * searched, and how long slices took; times in ns.
 */
#include "abi.h"
#include "full_pool.h"

/* For the slices of the last triggers. */
#define TIMEOUT_NS (60 * SECOND_NS)

/* Of a tree that is compared: it looked for a trace in an index, and knew no
 * passes. */
#if BS_ABI_VERSION < 2
#define BSN_SLICE_SEARCHING 0
#endif

/* Of triggers. */
static uint64_t rate_per_s, seconds;

static uint64_t passes_of(const struct bsn_metrics *m)
{
#if BS_ABI_VERSION >= 2
	return m->passes;
#else
	(void)m;
	return 0;
#endif
}

static uint64_t entries_of(const struct bsn_metrics *m)
{
#if BS_ABI_VERSION >= 2
	return m->entries_searched;
#else
	(void)m;
	return 0;
#endif
}

/* --------------------------------------------------------------- writer --- */

/* So often what is due is fired: for a few polls it is enough at any rate. */
#define FIRE_EVERY_NS (SECOND_NS / 1000)

/* For traces spread evenly over so many, the youngest. */
static void fire_all(const struct full_pool *p, uint64_t span)
{
	const struct timespec pause = {.tv_nsec = FIRE_EVERY_NS};
	uint64_t count = rate_per_s * seconds;
	uint64_t begun_ns = now_ns(p);

	for (uint64_t i = 0; i < count;) {
		uint64_t passed_ns = now_ns(p) - begun_ns;

		/* When the queue is full it falls behind. */
		while (i < count && i * SECOND_NS < passed_ns * rate_per_s &&
		       !bs_trigger(nth_id(p->traces - i * (span / count)),
				   "bench", NULL, NULL, 0))
			i++;
		nanosleep(&pause, NULL);
	}
}

/* ----------------------------------------------------------------- node --- */

/* As the daemon does it: what is triggered is collected, and its slice is read and
 * released when its search is over. */
struct triggered {
	uint64_t seen;	/* triggers */
	uint64_t whole; /* slices that were released */
	uint64_t waited_ns, waited_most_ns;
};

__attribute__((noreturn)) static void die_of(const struct bsn_slice *slice)
{
	fprintf(stderr, "flags 0x%x, %llu bytes\n", (unsigned)slice->flags,
		(unsigned long long)slice->bytes);
	die("a trace that was triggered is not whole");
}

/* While slices are held the daemon looks so often (appliance/pump.py). */
#define HELD_WAIT_NS 20000000

static void take_event(struct full_pool *p, const struct bsn_event *e,
		       struct triggered *t)
{
	struct bsn_slice slice;
	uint64_t waited_ns;

	if (e->kind == BSN_EVENT_TRIGGER) {
		t->seen++;
		if (bsn_collect(p->node, e->id, e->id, e->trigger, now_ns(p),
				&slice))
			die("a trace cannot be collected");
		return;
	}
	if (e->kind != BSN_EVENT_SLICE_CHANGED ||
	    bsn_slice_info(p->node, e->id, &slice) ||
	    slice.flags & BSN_SLICE_SEARCHING)
		return;
	if (slice.flags != BSN_SLICE_HELD || slice.bytes < p->trace_bytes)
		die_of(&slice);
	if (bsn_slice_read(p->node, e->id, 0, p->buffer, SLICE_BYTES_MAX) !=
	    (int64_t)slice.bytes)
		die("a slice cannot be read");
	waited_ns = now_ns(p) - slice.collected_ns;
	t->waited_ns += waited_ns;
	if (waited_ns > t->waited_most_ns)
		t->waited_most_ns = waited_ns;
	t->whole++;
	bsn_slice_release(p->node, e->id, false, now_ns(p));
}

static void poll_triggered(struct full_pool *p, struct triggered *t)
{
	struct bsn_event events[256];
	uint64_t time_ns = now_ns(p);
	int count;

	full_pool_pair_clocks(p, time_ns);
	if (bsn_poll(p->node, time_ns) < 0)
		die("a poll failed");
	while ((count = bsn_events(p->node, events, 256)) > 0) {
		for (int i = 0; i < count; i++)
			take_event(p, &events[i], t);
		bsn_events_done(p->node);
	}
}

static void triggers(struct full_pool *p)
{
	struct triggered t = {0};
	struct bsn_metrics before, after;
	uint64_t cpu_ns, elapsed_ns, span;

	full_pool_fill(p);
	span = full_pool_to_look_for(p);
	if (span < rate_per_s * seconds)
		die("the pool does not hold as many traces as are triggered");
	bsn_get_metrics(p->node, &before);
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	elapsed_ns = now_ns(p);
	full_pool_go_on(p, span);
	do {
		bsn_wait(p->node, HELD_WAIT_NS);
		poll_triggered(p, &t);
	} while (!full_pool_writer_is_done(p));
	while (!t.whole || t.whole < rate_per_s * seconds) {
		if (now_ns(p) - elapsed_ns > seconds * SECOND_NS + TIMEOUT_NS)
			die("not all triggers came to a slice");
		bsn_wait(p->node, HELD_WAIT_NS);
		poll_triggered(p, &t);
	}
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
	elapsed_ns = now_ns(p) - elapsed_ns;
	bsn_get_metrics(p->node, &after);
	printf("{\"cpu_ns\": %" PRIu64 ", \"elapsed_ns\": %" PRIu64
	       ", \"triggers\": %" PRIu64 ", \"passes\": %" PRIu64
	       ", \"entries\": %" PRIu64 ", \"found_after_ns\": %" PRIu64
	       ", \"found_after_most_ns\": %" PRIu64 "}\n",
	       cpu_ns, elapsed_ns, t.seen,
	       passes_of(&after) - passes_of(&before),
	       entries_of(&after) - entries_of(&before), t.waited_ns / t.whole,
	       t.waited_most_ns);
}

int main(int argc, char **argv)
{
	struct full_pool p;

	if (argc != 5)
		die("usage: pool_triggers POOL TRACE_BYTES RATE SECONDS");
	p = full_pool_of(argv[1], argv[2]);
	rate_per_s = number(argv[3]);
	seconds = number(argv[4]);
	if (!rate_per_s || !seconds)
		die("at least one trigger a second, for a second");
	p.then = fire_all;
#if BS_ABI_VERSION >= 2
	/* The others look for one set of traces, and poll without a pause. */
	p.config.thread_cpu_ns = bsn_thread_cpu_ns;
#endif
	triggers(&p);
	full_pool_free(&p);
	return 0;
}
