/* SPDX-License-Identifier: Apache-2.0 */
/* A trace that is looked for, and others that are in its way. */
#ifndef BS_TEST_WANTED_H
#define BS_TEST_WANTED_H

#include "writer.h"

/* Handles of tests, that no w_trace() uses. */
#define HANDLE 0x10000u

/* The trace that is looked for, and those that are in the way. */
#define WANTED 1u
#define OTHERS 1000000u

/* Other traces, until the thread is in its next segment. */
static inline void write_segment(struct wthread *t, uint64_t now)
{
	static uint64_t other = OTHERS;
	uint32_t segment = t->segment;

	while (t->segment == segment)
		CHECK(w_trace(t, trace_id(other++), 0, now));
}

/* One run of an open handle of WANTED. */
static inline void write_long_run(struct wthread *t, uint32_t handle,
				  uint32_t seq, uint32_t flags, uint32_t bytes,
				  uint64_t now)
{
	static const uint8_t payload[BS_PAYLOAD_MAX];

	CHECK(w_begin(t, trace_id(WANTED), handle, seq, seq ? 0 : BS_RUN_FIRST,
		      bytes + 24));
	w_record(t, BS_RECORD_DATA, payload, bytes, now);
	w_end(t, flags);
}

static inline void write_run(struct wthread *t, uint32_t handle, uint32_t seq,
			     uint32_t flags, uint64_t now)
{
	write_long_run(t, handle, seq, flags, 100, now);
}

#endif
