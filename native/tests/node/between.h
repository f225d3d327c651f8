/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second thread that has the node's lock between two pieces of a work: it waits
 * for the lock when the work begins, and gets it after the first piece.
 */
#ifndef BS_TEST_BETWEEN_H
#define BS_TEST_BETWEEN_H

#include <pthread.h>
#include <sched.h>

#include "check.h"
#include "node/internal.h"

/* With the lock held: the other thread waits for it when this returns. */
static inline pthread_t start_between(struct bsn *n, void *(*run)(void *),
				      void *argument)
{
	pthread_t thread;

	CHECK_EQ(pthread_create(&thread, NULL, run, argument), 0);
	/* Who waits for the lock holds the gate. */
	while (!pthread_mutex_trylock(&n->gate)) {
		pthread_mutex_unlock(&n->gate);
		sched_yield();
	}
	return thread;
}

/* The work is done. */
static inline void end_between(struct bsn *n, pthread_t thread)
{
	node_unlock(n);
	pthread_join(thread, NULL);
}

/* What its threads took and left until now, in one piece. */
static inline void observe(struct bsn *n, struct client *c)
{
	uint64_t end = UINT64_MAX;

	CHECK(threads_observe(n, c, &end) == c);
}

#endif
