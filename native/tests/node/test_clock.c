/* SPDX-License-Identifier: Apache-2.0 */
/* What ticks the node reads: those that clients stamp, and how fast they are. */
#include "writer.h"

/* Long against what a starved machine puts between the readings of one moment. */
#define INTERVAL (20 * MS)

struct moment {
	uint64_t ticks, monotonic_ns, realtime_ns;
};

static struct moment read_moment(bool counter)
{
	struct moment m;

	bsn_clock_read(counter, &m.ticks, &m.monotonic_ns, &m.realtime_ns);
	return m;
}

/* Ticks a second of CLOCK_MONOTONIC. */
static double measured_rate(bool counter)
{
	struct moment from = read_moment(counter);
	struct moment to;

	do {
		to = read_moment(counter);
		CHECK(to.ticks >= from.ticks);
	} while (to.monotonic_ns - from.monotonic_ns < INTERVAL);
	return (double)(to.ticks - from.ticks) * SECOND /
	       (double)(to.monotonic_ns - from.monotonic_ns);
}

static void check_ratio(double got, double expected)
{
	printf("  %.0f ticks a second, of %.0f\n", got, expected);
	CHECK(got > expected * 0.99);
	CHECK(got < expected * 1.01);
}

static void monotonic_ticks_are_nanoseconds(void)
{
	check_ratio(measured_rate(false), SECOND);
}

#if BS_HAS_CPU_COUNTER
static void the_counter_runs_with_monotonic(void)
{
	double rate = measured_rate(true);

	/* Below that its ticks could not order what a request does. */
	CHECK(rate > 1e6);
	check_ratio(measured_rate(true), rate);
}

static void node_and_client_read_the_same_counter(void)
{
	uint64_t before = bs_cpu_counter();
	struct moment m = read_moment(true);
	uint64_t after = bs_cpu_counter();

	CHECK(before <= m.ticks);
	CHECK(m.ticks <= after);
}
#endif

#if defined(__aarch64__)
static void the_counter_has_the_rate_of_its_register(void)
{
	uint64_t per_s;

	__asm__ __volatile__("mrs %0, cntfrq_el0" : "=r"(per_s));
	check_ratio(measured_rate(true), (double)per_s);
}
#endif

int main(void)
{
	RUN(monotonic_ticks_are_nanoseconds);
#if BS_HAS_CPU_COUNTER
	RUN(the_counter_runs_with_monotonic);
	RUN(node_and_client_read_the_same_counter);
#endif
#if defined(__aarch64__)
	RUN(the_counter_has_the_rate_of_its_register);
#endif
	return 0;
}
