/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two threads that hand a byte to and fro through pipes, bound to one CPU by who
 * starts them: nothing but context switches. ping_pong [attached]: with it, each
 * thread works on a trace meanwhile.
 *
 * Says "ready"; for each number of round trips that it reads, how long one took, in ns.
 */
#include <pthread.h>

#include "common.h"

/* Until the scheduler and the caches know the pair. */
#define WARM_UP 1000

static int there[2], back[2];
static bool attached;

static void require(bool holds, const char *what)
{
	if (!holds)
		die(what);
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

static double measure(long times)
{
	pthread_t other;
	uint64_t start, took;

	require(!pipe(there) && !pipe(back), "pipe");
	require(!pthread_create(&other, NULL, answer, NULL), "thread");
	begin(2);
	go_to_and_fro(WARM_UP);
	start = clock_ns(CLOCK_MONOTONIC);
	go_to_and_fro(times);
	took = clock_ns(CLOCK_MONOTONIC) - start;
	end();
	close(there[1]);
	pthread_join(other, NULL);
	close(there[0]);
	close(back[0]);
	close(back[1]);
	return (double)took / (double)times;
}

int main(int argc, char **argv)
{
	char line[32];

	attached = argc > 1 && !strcmp(argv[1], "attached");
	if (attached)
		must_attach();
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		printf("%.1f\n", measure(strtol(line, NULL, 10)));
		fflush(stdout);
	}
	return 0;
}
