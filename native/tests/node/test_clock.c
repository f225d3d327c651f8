/* SPDX-License-Identifier: Apache-2.0 */
/* What ticks the node reads: those that clients stamp, how fast they are, and what
 * they are in Unix time. */
#include <errno.h>

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

/* ----------------------------------------------------------------- pairs --- */

static struct decoded d;

/* The Unix time that a slice has for a record of these ticks. */
static uint64_t realtime_of(struct bsn *n, struct wthread *t, uint64_t id,
			    uint64_t ticks)
{
	struct bs_clock_pair pair = {0};
	struct bsn_slice s;

	CHECK(w_trace(t, trace_id(id), 100, ticks));
	collect(n, trace_id(id), START, &s);
	decode_slice(n, trace_id(id), &d);
	for (uint32_t i = 0; i < d.n_pieces; i++) {
		if (d.pieces[i].kind == BS_PIECE_CLOCK)
			memcpy(&pair, d.content[i], sizeof(pair));
	}
	CHECK_EQ(pair.ticks_per_s, SECOND);
	return pair.realtime_ns;
}

/* What processes wrote and will write has the ticks of the daemon that they were
 * attached by, whatever its successor would choose. */
static void a_predecessors_clock_goes_on(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct writer w;
	struct bsn *n;
	uint64_t per_s;
	bool is_counter;

	config.clock_is_counter = true;
	config.ticks_per_s = 3 * SECOND;
	n = test_node(&config);
	bsn_clock_source(n, &is_counter, &per_s);
	CHECK(is_counter);
	CHECK_EQ(per_s, 3 * SECOND);
	writer_attach(&w, n, START);
	CHECK_EQ(w_header(&w)->clock, BS_CLOCK_COUNTER);
	config.clock_is_counter = false;
	config.ticks_per_s = SECOND;
	n = restart(n, &config, &w, 1, START);
	bsn_clock_source(n, &is_counter, &per_s);
	CHECK(is_counter);
	CHECK_EQ(per_s, 3 * SECOND);
	CHECK_EQ(w_header(&w)->clock, BS_CLOCK_COUNTER);
	CHECK_EQ(w_header(&w)->ticks_per_s, 3 * SECOND);
	/* What it read of the other clock is forgotten: this would be earlier. */
	CHECK_EQ(bsn_clock_pair(n, START / 2, START, START), 0);
	CHECK_EQ(bsn_clock_pair(n, START / 2 - 1, START, START), -EINVAL);
	free_with_writer(n, &w);
}

/* A counter that began anew, as after a suspend: from then on its ticks mean what
 * the new readings say, and no reading of before. */
static void a_clock_that_goes_back_is_taken_up_again(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t s = 1; s <= 10; s++)
		CHECK_EQ(bsn_clock_pair(n, START + s * SECOND,
					START + s * SECOND, s * SECOND),
			 0);
	CHECK_EQ(realtime_of(n, &t, 1, START + 8 * SECOND), 8 * SECOND);
	/* One that was slow on its way changes nothing. */
	CHECK_EQ(bsn_clock_pair(n, START + 10 * SECOND - MS,
				START + 10 * SECOND - MS, 1),
		 -EINVAL);
	/* Now it goes back by five seconds, while time goes on. */
	CHECK_EQ(bsn_clock_pair(n, START + 5 * SECOND, START + 11 * SECOND,
				11 * SECOND),
		 0);
	CHECK_EQ(realtime_of(n, &t, 2, START + 8 * SECOND), 11 * SECOND);
	CHECK_EQ(bsn_clock_pair(n, START + 8 * SECOND, START + 14 * SECOND,
				14 * SECOND),
		 0);
	CHECK_EQ(realtime_of(n, &t, 3, START + 8 * SECOND), 14 * SECOND);
	/* What it had read before it went back stays. */
	CHECK_EQ(realtime_of(n, &t, 4, START + 4 * SECOND), 4 * SECOND);
	free_with_writer(n, &w);
}

/* However many: the last minutes second by second, what was before the more
 * coarsely, the longer ago it is. */
static void readings_of_days_are_thinned(void)
{
	const uint64_t count = 100000;
	struct bsn_config config = test_config(8 << 20);
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t s = 1; s <= count; s++)
		CHECK_EQ(bsn_clock_pair(n, START + s * SECOND,
					START + s * SECOND, s * SECOND),
			 0);
	for (uint64_t s = count - 120; s <= count; s += 20)
		CHECK_EQ(realtime_of(n, &t, s, START + s * SECOND), s * SECOND);
	for (uint64_t age_s = 200; age_s < count; age_s = age_s * 5 / 4) {
		uint64_t s = count - age_s;
		uint64_t got = realtime_of(n, &t, s, START + s * SECOND);
		uint64_t off = got > s * SECOND ? got - s * SECOND
						: s * SECOND - got;

		CHECK(off <= age_s * SECOND / 50);
	}
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(a_clock_that_goes_back_is_taken_up_again);
	RUN(a_predecessors_clock_goes_on);
	RUN(readings_of_days_are_thinned);
	RUN(monotonic_ticks_are_nanoseconds);
#if BS_HAS_CPU_COUNTER
	RUN(the_counter_runs_with_monotonic);
	RUN(node_and_client_read_the_same_counter);
#endif
#if defined(__aarch64__)
	RUN(the_counter_has_the_rate_of_its_register);
#endif
	free(d.bytes);
	return 0;
}
