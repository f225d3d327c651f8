/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a program shares that does something as often as it is told, in a trace or not,
 * for who measures what that costs: it says "ready", and for each number that it reads,
 * how long one time took and how much CPU time of its own, in ns.
 */
#ifndef BENCH_ROUNDS_H
#define BENCH_ROUNDS_H

#include "common.h"

struct took {
	uint64_t wall_ns;
	uint64_t cpu_ns; /* of all threads */
};

/* Attached to a node: each thread works on a trace while it does it. */
static bool attached;

static inline void require(bool holds, const char *what)
{
	if (!holds)
		die(what);
}

static inline void begin(uint64_t trace)
{
	if (attached)
		bs_begin((struct bs_trace_id){0x70696e67706f6e67, trace});
}

static inline void end(void)
{
	if (attached)
		bs_end();
}

static inline struct took clocks(void)
{
	return (struct took){clock_ns(CLOCK_MONOTONIC),
			     clock_ns(CLOCK_PROCESS_CPUTIME_ID)};
}

static inline struct took since(struct took start)
{
	struct took now = clocks();

	return (struct took){now.wall_ns - start.wall_ns,
			     now.cpu_ns - start.cpu_ns};
}

static inline void serve_rounds(struct took (*measure)(long times))
{
	char line[32];

	if (attached)
		must_attach();
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		long times = (long)number(strtok(line, "\n"));
		struct took took;

		require(times > 0, "as often as that");
		took = measure(times);
		printf("%.1f %.1f\n", (double)took.wall_ns / (double)times,
		       (double)took.cpu_ns / (double)times);
		fflush(stdout);
	}
}

#endif
