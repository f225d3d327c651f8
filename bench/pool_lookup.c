/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it takes to find traces in a full pool.
 *
 *   pool_lookup POOL TRACE_BYTES TRACES TIMES
 *
 * TIMES times, so many traces are collected at once, of a pool of POOL bytes that
 * is full of traces of TRACE_BYTES (full_pool.h). Prints a line of JSON each
 * time: until all are found, CPU time of all threads of this process, and
 * elapsed time, in ns.
 */
#include "full_pool.h"

#define LOOKUPS_MAX 1000u
#define LOOKUP_TIMEOUT_NS (60 * SECOND_NS)

/* Collected, and nothing is missing. While a node is still looking, it says
 * something else of the trace. */
static bool is_found(struct full_pool *p, struct bs_trace_id id,
		     uint32_t *flags)
{
	struct bsn_slice slice;

	if (bsn_slice_info(p->node, id, &slice))
		die("a trace that was asked for is not collected");
	*flags = slice.flags;
	return slice.flags == BSN_SLICE_HELD && slice.bytes >= p->trace_bytes;
}

static void await_found(struct full_pool *p, struct bs_trace_id id)
{
	uint64_t deadline_ns = now_ns(p) + LOOKUP_TIMEOUT_NS;
	uint32_t flags;

	while (!is_found(p, id, &flags)) {
		if (now_ns(p) > deadline_ns) {
			fprintf(stderr,
				"pool_lookup: trace %" PRIu64 " of %" PRIu64
				" was not found: flags %#x\n",
				id.lo, p->traces, flags);
			exit(1);
		}
		full_pool_poll(p);
	}
}

static void look_up(struct full_pool *p, uint64_t count, uint64_t held,
		    uint64_t *random)
{
	uint64_t cpu_ns, elapsed_ns;
	struct bs_trace_id ids[LOOKUPS_MAX];
	struct bsn_slice slice;

	for (uint64_t i = 0; i < count; i++) {
		*random = *random * 6364136223846793005ull + 1;
		/* Each from a part of its own, so that none is there twice. */
		ids[i] = nth_id(p->traces - i * (held / count) -
				(*random >> 33) % (held / count));
	}
	elapsed_ns = now_ns(p);
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	for (uint64_t i = 0; i < count; i++) {
		if (bsn_collect(p->node, ids[i], ids[i], "bench", now_ns(p),
				&slice))
			die("a trace cannot be collected");
	}
	for (uint64_t i = 0; i < count; i++)
		await_found(p, ids[i]);
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
	elapsed_ns = now_ns(p) - elapsed_ns;
	for (uint64_t i = 0; i < count; i++)
		bsn_slice_release(p->node, ids[i], false, now_ns(p));
	full_pool_poll(p);
	printf("{\"cpu_ns\": %" PRIu64 ", \"elapsed_ns\": %" PRIu64 "}\n",
	       cpu_ns, elapsed_ns);
}

static void lookup(struct full_pool *p, uint64_t count, uint64_t times)
{
	uint64_t random = 1, held;

	if (count < 1 || count > LOOKUPS_MAX)
		die("1 to 1000 traces at once");
	full_pool_fill(p);
	held = full_pool_to_look_for(p);
	if (held < count)
		die("the pool does not hold as many traces as are looked for");
	for (uint64_t i = 0; i < times; i++)
		look_up(p, count, held, &random);
}

int main(int argc, char **argv)
{
	struct full_pool p;

	if (argc != 5)
		die("usage: pool_lookup POOL TRACE_BYTES TRACES TIMES");
	p = full_pool_of(argv[1], argv[2]);
	lookup(&p, number(argv[3]), number(argv[4]));
	full_pool_free(&p);
	return 0;
}
