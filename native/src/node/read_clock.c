/* SPDX-License-Identifier: Apache-2.0 */
/* The clocks themselves; the rest of the data plane is told the time. */
#include <time.h>

#include "internal.h"

/* Of a few readings the one that nothing came between. */
#define READINGS 5

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t bsn_thread_cpu_ns(void)
{
	return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

/* Unlike bs_clock_ticks(), not before what stands before it in the program. */
static uint64_t read_ticks(bool counter)
{
#if defined(__x86_64__)
	unsigned int cpu;

	if (counter)
		return __rdtscp(&cpu);
#elif defined(__aarch64__)
	if (counter) {
		__asm__ __volatile__("isb" ::: "memory");
		return bs_cpu_counter();
	}
#endif
	(void)counter;
	return clock_ns(CLOCK_MONOTONIC);
}

void bsn_clock_read(bool counter, uint64_t *ticks, uint64_t *monotonic_ns,
		    uint64_t *realtime_ns)
{
	uint64_t best = UINT64_MAX;

	for (int i = 0; i < READINGS; i++) {
		uint64_t before = read_ticks(counter);
		uint64_t monotonic = clock_ns(CLOCK_MONOTONIC);
		uint64_t realtime = clock_ns(CLOCK_REALTIME);
		uint64_t took = read_ticks(counter) - before;

		if (took >= best)
			continue;
		best = took;
		*ticks = before + took / 2;
		*monotonic_ns = monotonic;
		*realtime_ns = realtime;
	}
}
