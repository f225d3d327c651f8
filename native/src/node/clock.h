/* SPDX-License-Identifier: Apache-2.0 */
/* Record ticks and Unix time. */
#ifndef BSN_CLOCK_H
#define BSN_CLOCK_H

#include "base.h"

#define CLOCK_PAIRS 1024u

struct pair {
	uint64_t ticks, monotonic_ns, realtime_ns;
};

struct clock {
	struct pair pairs[CLOCK_PAIRS]; /* by rising ticks */
	uint32_t n;
};

/* clock.c */
const struct pair *clock_nearest(const struct clock *k, uint64_t ticks);
/* Go on with the ticks of a predecessor: processes that are attached have them, and
 * what they wrote. */
void clock_adopt(struct bsn *n);
uint64_t clock_monotonic(const struct bsn *n, uint64_t ticks);

#endif
