/* SPDX-License-Identifier: Apache-2.0 */
/* What an attacker sees of the node that it attacks: its socket and its memory. */
#ifndef BS_HOSTILE_TARGET_H
#define BS_HOSTILE_TARGET_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/un.h>

#include "abi.h"

/* Which traces honest clients write: a file that they keep up to date, mapped. */
struct aim {
	uint64_t hi;
	uint64_t next_lo; /* of the trace that comes next */
};

struct target {
	struct sockaddr_un address;
	const struct aim *aim;
	int connection; /* -1: not attached; so are the mappings only then */
	uint8_t *arena, *channel;
	struct bs_context_segment *context;
	uint64_t arena_bytes;
	uint64_t steps; /* that the attack made so far */
};

/* A socket that is connected, or a negative errno. */
int target_connect(const struct target *t);

/* As a client would, with the credentials of this process: false if refused. */
bool target_attach(struct target *t);
void target_detach(struct target *t);

/* Whether the daemon hung up. */
bool target_is_gone(const struct target *t);

static inline struct bs_grant_ring *target_grants(const struct target *t)
{
	return (void *)(t->channel + BS_CHANNEL_GRANTS_OFFSET);
}

static inline uint32_t *target_handles(const struct target *t)
{
	return (void *)(t->channel + BS_CHANNEL_HANDLES_OFFSET);
}

static inline struct bs_thread_area *target_area(const struct target *t,
						 uint32_t slot)
{
	return (struct bs_thread_area *)(t->channel + BS_CHANNEL_AREAS_OFFSET) +
	       slot;
}

static inline uint8_t *target_segment(const struct target *t, uint64_t segment)
{
	return t->arena +
	       segment % (t->arena_bytes / BS_SEGMENT_BYTES) * BS_SEGMENT_BYTES;
}

/* A trace that honest clients wrote lately, or will write soon. */
struct bs_trace_id target_honest_trace(const struct target *t);

/* One that is over, and was fired by few. */
struct bs_trace_id target_finished_trace(const struct target *t);

/* Numbers from a seed, which all files draw from (random.h has one in each). */
void random_seed(uint64_t seed);
uint64_t random_u64(void);
uint32_t below(uint32_t limit);

/* Half of all times a number at random, else one at a bound of something. */
uint64_t lie(void);

#endif
