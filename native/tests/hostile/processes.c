// SPDX-License-Identifier: Apache-2.0
/* Attacks by processes that die, and by calls of the library. */
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attacks.h"
#include "backsight.h"
#include "barrier.h"

/* What a process that will be killed touches: what it was granted, and as much
 * again of what it was not. */
#define LEFT_BYTES (16u << 20)

#define HANDLES 60000u
#define WASHED_BYTES 1024u
#define WASHED_TRACES 40u /* a step: 8 MB a second */

#define BULK_BYTES (2u << 20)

#define NEIGHBOURS 32u
#define NEIGHBOUR_STEPS 128u /* with the same ones */

/* tests/hostile/truth.py */
#define HONEST_TRIGGER "honest"

#define WAIT_MS 10000

static void leave(struct target *t)
{
	struct bs_context_segment *x;

	/* Dies with us, in case that we are killed. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!target_attach(t))
		_exit(0);
	for (uint32_t i = 0; i < 8; i++)
		lie_in_directories(t);
	for (uint64_t at = 0; at < t->arena_bytes && at < LEFT_BYTES;
	     at += 4096)
		WRITE_ONCE(t->arena[t->arena_bytes - 1 - at], 1);
	/* A trigger that was claimed and never written. */
	x = t->context;
	fetch_add(&x->trigger_head, 1);
	kill(getpid(), SIGKILL);
}

/* A process that attaches, takes more than its own, and is killed. */
void leave_leftovers(struct target *t)
{
	uint64_t seed = random_u64();
	pid_t pid = fork();

	if (pid == 0) {
		random_seed(seed);
		leave(t);
		_exit(0);
	}
	if (pid > 0)
		waitpid(pid, NULL, 0);
}

static struct bs_trace_id fresh_trace(void)
{
	return (struct bs_trace_id){random_u64() | 1, random_u64()};
}

/* As many open handles as there may be, each with something that must be kept. */
void open_handles(struct target *t)
{
	static struct bs_trace *traces;

	(void)t;
	if (!traces) {
		bs_wait_attached(WAIT_MS);
		traces = calloc(HANDLES, sizeof(*traces));
		if (!traces)
			_exit(1);
	}
	for (uint32_t i = 0; i < 100; i++) {
		struct bs_trace *trace = &traces[below(HANDLES)];

		if (trace->id.hi && below(8) == 0)
			bs_close(trace);
		else if (trace->id.hi) {
			bs_write(trace, BS_RECORD_DATA, "still here", 10);
			continue;
		}
		bs_open(trace, fresh_trace());
		bs_write(trace, BS_RECORD_DATA, "open", 4);
	}
}

/* A service that writes as it should, but far more than all others. */
void wash_pool(struct target *t)
{
	static const char payload[WASHED_BYTES];

	if (t->steps == 0)
		bs_wait_attached(WAIT_MS);
	for (uint32_t i = 0; i < WASHED_TRACES; i++) {
		bs_begin(fresh_trace());
		bs_tracepoint(payload, sizeof(payload));
		bs_end();
	}
}

/* By the name under which honest processes fire, for traces that nobody wrote. */
void fire_by_honest_name(struct target *t)
{
	if (t->steps == 0)
		bs_wait_attached(WAIT_MS);
	for (uint32_t i = 0; i < 20; i++)
		bs_trigger(fresh_trace(), HONEST_TRIGGER, "a flood", NULL, 0);
}

/* Large traces, all of which must be collected, by that name too. */
void fire_for_bulk(struct target *t)
{
	static const char payload[BS_PAYLOAD_MAX];
	struct bs_trace_id id = fresh_trace();

	if (t->steps == 0)
		bs_wait_attached(WAIT_MS);
	bs_begin(id);
	for (uint32_t i = 0; i < BULK_BYTES / sizeof(payload); i++)
		bs_tracepoint(payload, sizeof(payload));
	bs_end();
	bs_trigger(id, HONEST_TRIGGER, "bulk", NULL, 0);
}

/* All that it fires for has the same neighbours, which it goes on to write: what
 * happens to one of them concerns every trigger that named it. */
void fire_for_neighbours(struct target *t)
{
	static struct bs_trace neighbours[NEIGHBOURS];
	static struct bs_trace_id ids[NEIGHBOURS];
	struct bs_trace_id id = fresh_trace();

	if (t->steps == 0)
		bs_wait_attached(WAIT_MS);
	for (uint32_t i = 0; i < NEIGHBOURS; i++) {
		if (t->steps % NEIGHBOUR_STEPS == 0) {
			if (t->steps)
				bs_close(&neighbours[i]);
			ids[i] = fresh_trace();
			bs_open(&neighbours[i], ids[i]);
		}
		bs_write(&neighbours[i], BS_RECORD_DATA, "next to it", 10);
	}
	bs_begin(id);
	bs_tracepoint("named", 5);
	bs_end();
	bs_trigger(id, "neighbours", "all of them", ids, NEIGHBOURS);
}
