/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the programs that measure share.
 */
#ifndef BENCH_COMMON_H
#define BENCH_COMMON_H

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "backsight.h"

#define SECOND_NS 1000000000ull
#define ATTACH_TIMEOUT_MS 30000

#define ALWAYS_INLINE static inline __attribute__((always_inline))

__attribute__((noreturn)) static inline void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
	exit(1);
}

static inline uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	if (clock_gettime(clock, &t))
		die("a clock cannot be read");
	return (uint64_t)t.tv_sec * SECOND_NS + (uint64_t)t.tv_nsec;
}

/* An argument. */
static inline uint64_t number(const char *text)
{
	char *end;
	uint64_t value;

	errno = 0;
	value = strtoull(text, &end, 10);
	if (!*text || *end || errno)
		die("arguments are whole numbers, see the head of the source");
	return value;
}

static inline void must_attach(void)
{
	if (bs_wait_attached(ATTACH_TIMEOUT_MS))
		die("no node daemon to attach to");
}

/* Ids that differ as those of a random generator do, and cost a multiplication. */
ALWAYS_INLINE struct bs_trace_id nth_id(uint64_t n)
{
	return (struct bs_trace_id){n * 0x9e3779b97f4a7c15ull, n};
}

ALWAYS_INLINE struct bs_trace_id next_id(uint64_t *counter)
{
	return nth_id(++*counter);
}

#endif
