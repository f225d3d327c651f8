/* SPDX-License-Identifier: Apache-2.0 */
/* The clocks themselves; the rest of the data plane is told the time. */
#include <time.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "internal.h"

/* Of a few readings the one that nothing came between. */
#define READINGS 5

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static uint64_t read_ticks(bool tsc)
{
#if defined(__x86_64__)
	unsigned int cpu;

	if (tsc)
		return __rdtscp(&cpu);
#endif
	(void)tsc;
	return clock_ns(CLOCK_MONOTONIC);
}

void bsn_clock_read(bool tsc, uint64_t *ticks, uint64_t *monotonic_ns,
		    uint64_t *realtime_ns)
{
	uint64_t best = UINT64_MAX;

	for (int i = 0; i < READINGS; i++) {
		uint64_t before = read_ticks(tsc);
		uint64_t monotonic = clock_ns(CLOCK_MONOTONIC);
		uint64_t realtime = clock_ns(CLOCK_REALTIME);
		uint64_t took = read_ticks(tsc) - before;

		if (took >= best)
			continue;
		best = took;
		*ticks = before + took / 2;
		*monotonic_ns = monotonic;
		*realtime_ns = realtime;
	}
}
