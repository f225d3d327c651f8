/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two threads on one CPU that hand a byte to and fro through pipes: nothing but context
 * switches. ping_pong [attached]: with it, each thread works on a trace meanwhile.
 *
 * Says "ready"; for each number of round trips that it reads, how long one took, in ns.
 */
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backsight.h"

/* Until the scheduler and the caches know the pair. */
#define WARM_UP 1000

static int there[2], back[2];
static bool attached;

static void require(bool holds, const char *what)
{
	if (holds)
		return;
	perror(what);
	exit(1);
}

static void begin(uint64_t trace)
{
	if (attached)
		bs_begin((struct bs_trace_id){0x70696e67706f6e67, trace});
}

static void end(void)
{
	if (attached)
		bs_end();
}

static void hand_on(int to)
{
	require(write(to, "x", 1) == 1, "write");
}

static bool await(int from)
{
	char byte;

	return read(from, &byte, 1) == 1;
}

static void *answer(void *nothing)
{
	begin(1);
	while (await(there[0]))
		hand_on(back[1]);
	end();
	return nothing;
}

static void go_to_and_fro(long times)
{
	for (long i = 0; i < times; i++) {
		hand_on(there[1]);
		require(await(back[0]), "read");
	}
}

static double now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static double measure(long times)
{
	pthread_t other;
	double start, took;

	require(!pipe(there) && !pipe(back), "pipe");
	require(!pthread_create(&other, NULL, answer, NULL), "thread");
	begin(2);
	go_to_and_fro(WARM_UP);
	start = now_ns();
	go_to_and_fro(times);
	took = now_ns() - start;
	end();
	close(there[1]);
	pthread_join(other, NULL);
	close(there[0]);
	close(back[0]);
	close(back[1]);
	return took / (double)times;
}

static void pin(void)
{
	cpu_set_t allowed, one;

	require(!sched_getaffinity(0, sizeof(allowed), &allowed), "affinity");
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &allowed))
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		require(!sched_setaffinity(0, sizeof(one), &one), "affinity");
		return;
	}
}

static void await_node(void)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct bs_stats stats = {0};

	while (!stats.attached) {
		begin(3);
		end();
		nanosleep(&pause, NULL);
		bs_get_stats(&stats);
	}
}

int main(int argc, char **argv)
{
	char line[32];

	attached = argc > 1 && !strcmp(argv[1], "attached");
	pin();
	if (attached)
		await_node();
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		printf("%.1f\n", measure(strtol(line, NULL, 10)));
		fflush(stdout);
	}
	return 0;
}
