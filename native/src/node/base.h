/* SPDX-License-Identifier: Apache-2.0 */
/* What all parts of the data plane need. */
#ifndef BSN_BASE_H
#define BSN_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "barrier.h"
#include "node.h"

#define NONE UINT32_MAX
#define SEGMENT BS_SEGMENT_BYTES
#define NS_PER_S 1000000000ull
#define NS_PER_MS 1000000ull
#define FIRST_RUN ((uint32_t)sizeof(struct bs_segment_header))

struct bsn;

static inline bool id_is_zero(struct bs_trace_id id)
{
	return !(id.hi | id.lo);
}

static inline bool id_equal(struct bs_trace_id a, struct bs_trace_id b)
{
	return a.hi == b.hi && a.lo == b.lo;
}

#endif
