/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An application that fires numbered triggers all the time, for
 * tests/cluster/test_contexts.py:
 *
 *   trigger_load THREADS
 *
 * The id of the n-th trigger of thread t is {process, t << 32 | n}, from 1 on. When
 * it is attached it prints "attached"; at the end of standard input it prints how
 * many triggers of each thread were taken, in a line, and ends.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "backsight.h"
#include "barrier.h"

#define THREADS_MAX 64u

/* The node and all others that fire have the processors between two. */
#define PAUSE_NS 200000

struct firing {
	pthread_t thread;
	uint64_t number; /* of the thread */
	uint64_t fired;
};

static bool stop;

static void *fire(void *argument)
{
	const struct timespec pause = {.tv_nsec = PAUSE_NS};
	struct firing *f = argument;

	while (!READ_ONCE(stop)) {
		struct bs_trace_id id = {
			(uint64_t)getpid(),
			f->number << 32 | (f->fired + 1),
		};

		/* The slot shows something, which moves too. */
		bs_begin(id);
		/* One that finds no room is not counted, and its number is used
		 * again. */
		if (!bs_trigger(id, "load", NULL, NULL, 0))
			f->fired++;
		bs_end();
		nanosleep(&pause, NULL);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct firing firing[THREADS_MAX] = {0};
	unsigned long threads = argc == 2 ? strtoul(argv[1], NULL, 10) : 0;

	if (threads < 1 || threads > THREADS_MAX) {
		fprintf(stderr, "usage: trigger_load THREADS, 1 to %u\n",
			THREADS_MAX);
		return 2;
	}
	if (bs_wait_attached(60000)) {
		fprintf(stderr, "trigger_load: no node to attach to\n");
		return 1;
	}
	puts("attached");
	fflush(stdout);
	for (unsigned long i = 0; i < threads; i++) {
		firing[i].number = i;
		if (pthread_create(&firing[i].thread, NULL, fire, &firing[i]))
			return 1;
	}
	while (getchar() != EOF)
		;
	WRITE_ONCE(stop, true);
	for (unsigned long i = 0; i < threads; i++) {
		pthread_join(firing[i].thread, NULL);
		printf("%lu ", (unsigned long)firing[i].fired);
	}
	puts("");
	return 0;
}
