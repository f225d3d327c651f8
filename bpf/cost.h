/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a program costs. The kernel would say so too (kernel.bpf_stats_enabled), but
 * only to who has CAP_SYS_ADMIN, and at the cost of all programs of the machine.
 * Here each program times one in so many of its own runs. What the kernel does before
 * and after a program is not in it.
 */
#ifndef BPF_COST_H
#define BPF_COST_H

#include "maps.h"

struct timed {
	struct probes_cost *cost;
	__u64 since_ns; /* 0: this run is not timed */
};

static __always_inline struct timed timed_begin(__u32 program)
{
	struct timed t = {.cost = bpf_map_lookup_elem(MAP(costs), &program)};

	/* Not the first one, which meets cold caches. */
	if (t.cost &&
	    t.cost->runs++ % PROBES_TIMED_EVERY == PROBES_TIMED_EVERY / 2)
		t.since_ns = bpf_ktime_get_ns();
	return t;
}

static __always_inline void timed_end(const struct timed *t)
{
	if (t->since_ns && t->cost) {
		t->cost->timed_ns += bpf_ktime_get_ns() - t->since_ns;
		t->cost->timed_runs++;
	}
}

/* The run's program had no memory for what it had to note. */
static __always_inline void count_map_error(const struct timed *t)
{
	if (t->cost)
		t->cost->map_errors++;
}

#endif
