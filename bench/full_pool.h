/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool that was written over until each segment was reclaimed once: what the
 * pool_*.c measure.
 *
 * The data plane (node.h) is in this process, without a daemon around it, so
 * that its CPU time is that of the process. A child writes with libbacksight,
 * and waits after each piece until the node has polled: nothing is lost,
 * however busy the machine is, so what is held tells of the pool alone.
 *
 * Traces have so many bytes of payload in records of at most 128 bytes, by one
 * handle each. They are numbered from 1: nth_id(number).
 */
#ifndef BENCH_FULL_POOL_H
#define BENCH_FULL_POOL_H

#include "common.h"
#include "node.h"

#define TRACE_BYTES_MAX (1u << 20)

/* For a slice of any of these traces. */
#define SLICE_BYTES_MAX (2 * TRACE_BYTES_MAX)

struct full_pool {
	struct bsn *node;
	struct bsn_config config;
	uint64_t trace_bytes;
	uint64_t traces; /* that are written */
	/* The pool is written over in a moment, and a writer of that rate has a
	 * large stock of segments in hand, which hold nothing yet. So the node is
	 * told another time (it asks no clock itself): that POOL bytes of payload
	 * took so long. 0: as long as they did. */
	uint64_t fill_ns;
	/* What the writer does in its process when the pool is full and it is
	 * told to go on. NULL: nothing. */
	void (*then)(const struct full_pool *p, uint64_t word);
	unsigned char *buffer; /* of SLICE_BYTES_MAX, for who wants one */

	uint64_t skipped_ns; /* what the node's time is ahead of ours */
	uint64_t paired_ns;
	int other; /* the way to the child, or in it to this process */
	int client;
	pid_t writer;
	struct bsn_client_fds fds;
};

/* From the arguments. Nothing is written, and there is no node. */
struct full_pool full_pool_of(const char *pool_bytes, const char *trace_bytes);
/* The writer has filled the pool, and lives; the node holds what it wrote. */
void full_pool_fill(struct full_pool *p);
void full_pool_free(struct full_pool *p);

/* As the node is told. */
static inline uint64_t now_ns(const struct full_pool *p)
{
	return clock_ns(CLOCK_MONOTONIC) + p->skipped_ns;
}

/* Another node, with the same configuration. */
void full_pool_new_node(struct full_pool *p);
void full_pool_pair_clocks(struct full_pool *p, uint64_t time_ns);
/* And let go what happened. */
void full_pool_poll(struct full_pool *p);

/* Whether it can be had back whole. */
bool full_pool_holds(struct full_pool *p, uint64_t number);
/* How many traces can be had back whole: of so many, spread evenly over more
 * than the pool can hold. */
double full_pool_count_held(struct full_pool *p, uint64_t samples);
/* How many of the youngest to look for: of the oldest, some are kept longer than
 * others. */
uint64_t full_pool_to_look_for(struct full_pool *p);

/* Tell the writer to do what it has to do then. */
void full_pool_go_on(const struct full_pool *p, uint64_t word);
/* It did that, and waits. */
bool full_pool_writer_is_done(const struct full_pool *p);

#endif
