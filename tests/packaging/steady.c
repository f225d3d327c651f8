/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An application that records requests at a steady pace, whatever becomes of the node, for
 * tests/packaging/test_continuity.py:
 *
 *   steady TRACES_PER_S TRIGGER_EVERY
 *
 * Once it is attached it prints "attached". Of each so many traces it triggers one, and prints its
 * id. At the end of standard input it prints what came of it, as JSON, and ends:
 *
 *   traces, triggered
 *   errors      calls that failed
 *   lost        what the library counts as lost, records and triggers
 *   blocked     traces in which the thread gave its CPU away by itself: a call waited for something
 *   faulted     the same where it met memory for the first time, for which the kernel may wait
 *   elapsed_ns  from the first trace to the last
 *   slowest_ns  the longest time that one trace took, all its calls together
 */
#include <inttypes.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "backsight.h"

#define NS_PER_S 1000000000ull
#define ATTACH_TIMEOUT_MS 60000

/* What a request of a service leaves behind: its own span, and three of what it called. */
#define SPANS 4u

struct steady {
	uint64_t traces;
	uint64_t triggered;
	uint64_t errors;
	uint64_t blocked;
	uint64_t faulted;
	uint64_t slowest_ns;
	uint64_t elapsed_ns;
	uint64_t process; /* upper half of each trace id */
};

static uint64_t now_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* How often this thread gave its CPU away without being made to, and met new memory. */
static struct rusage usage_now(void)
{
	struct rusage usage;

	getrusage(RUSAGE_THREAD, &usage);
	return usage;
}

static void count(struct steady *s, int result)
{
	if (result < 0)
		s->errors++;
}

static void record(struct steady *s, struct bs_trace_id id, bool fires)
{
	struct bs_trace trace;

	count(s, bs_open(&trace, id));
	for (uint64_t span = 1; span <= SPANS; span++)
		count(s, bs_span_start(&trace, span, span - 1,
				       now_ns(CLOCK_REALTIME), 1, "GET /cart"));
	for (uint64_t span = SPANS; span >= 1; span--)
		count(s, bs_span_end(&trace, span, now_ns(CLOCK_REALTIME), 0,
				     NULL, NULL, 0));
	if (fires)
		count(s, bs_trigger(id, "steady", NULL, NULL, 0));
	count(s, bs_close(&trace));
}

static void request(struct steady *s, bool fires)
{
	struct bs_trace_id id = {s->process, s->traces + 1};
	uint64_t began_ns = now_ns(CLOCK_MONOTONIC);
	struct rusage before = usage_now(), after;
	uint64_t took_ns;

	record(s, id, fires);
	after = usage_now();
	if (after.ru_nvcsw != before.ru_nvcsw) {
		if (after.ru_minflt == before.ru_minflt)
			s->blocked++;
		else
			s->faulted++;
	}
	took_ns = now_ns(CLOCK_MONOTONIC) - began_ns;
	if (took_ns > s->slowest_ns)
		s->slowest_ns = took_ns;
	s->traces++;
	if (!fires)
		return;
	s->triggered++;
	printf("%016" PRIx64 "%016" PRIx64 "\n", id.hi, id.lo);
}

static bool input_ended(void)
{
	struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
	char byte;

	return poll(&input, 1, 0) == 1 && read(STDIN_FILENO, &byte, 1) <= 0;
}

static void print(const struct steady *s)
{
	struct bs_stats stats;

	bs_get_stats(&stats);
	printf("{\"traces\": %" PRIu64 ", \"triggered\": %" PRIu64
	       ", \"errors\": %" PRIu64 ", \"blocked\": %" PRIu64
	       ", \"faulted\": %" PRIu64 ", \"slowest_ns\": %" PRIu64
	       ", \"elapsed_ns\": %" PRIu64 ", \"lost\": %" PRIu64
	       ", \"attachments\": %" PRIu64 "}\n",
	       s->traces, s->triggered, s->errors, s->blocked, s->faulted,
	       s->slowest_ns, s->elapsed_ns,
	       stats.records_lost + stats.triggers_lost +
		       stats.triggers_unattached,
	       stats.attachments);
}

int main(int argc, char **argv)
{
	uint64_t per_s = argc == 3 ? strtoull(argv[1], NULL, 10) : 0;
	uint64_t every = argc == 3 ? strtoull(argv[2], NULL, 10) : 0;
	struct steady s = {0};
	uint64_t began_ns, next_ns;

	if (!per_s || !every) {
		fprintf(stderr, "usage: steady TRACES_PER_S TRIGGER_EVERY\n");
		return 2;
	}
	if (getrandom(&s.process, sizeof(s.process), 0) != sizeof(s.process)) {
		perror("steady");
		return 1;
	}
	if (bs_wait_attached(ATTACH_TIMEOUT_MS)) {
		fprintf(stderr, "steady: no node to attach to\n");
		return 1;
	}
	setlinebuf(stdout);
	puts("attached");

	began_ns = next_ns = now_ns(CLOCK_MONOTONIC);
	while (!input_ended()) {
		struct timespec next;

		request(&s, s.traces % every == 0);
		next_ns += NS_PER_S / per_s;
		next.tv_sec = (time_t)(next_ns / NS_PER_S);
		next.tv_nsec = (long)(next_ns % NS_PER_S);
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
	}
	s.elapsed_ns = now_ns(CLOCK_MONOTONIC) - began_ns;
	print(&s);
	return 0;
}
