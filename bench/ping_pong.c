/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two threads that hand a byte to and fro, bound to one CPU by who starts them: through
 * pipes, which is nothing but context switches, or with "tcp" through a connection.
 * ping_pong [attached] [tcp]: attached, each thread works on a trace meanwhile. What it
 * reads and says: see rounds.h.
 */
#include <pthread.h>

#include "connection.h"

/* Until the scheduler and the caches know the pair. */
#define WARM_UP 1000

static int there[2], back[2];
static bool by_tcp;

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

/* Both directions of it: what is written to there[1] is read from there[0]. */
static void connect_both_ways(void)
{
	struct connection c = connect_pair(0);

	there[1] = c.client;
	there[0] = c.server;
	back[1] = dup(c.server);
	back[0] = dup(c.client);
	require(back[0] >= 0 && back[1] >= 0, "dup");
}

static struct took measure(long times)
{
	struct took start, took;
	pthread_t other;

	if (by_tcp)
		connect_both_ways();
	else
		require(!pipe(there) && !pipe(back), "pipe");
	require(!pthread_create(&other, NULL, answer, NULL), "thread");
	begin(2);
	go_to_and_fro(WARM_UP);
	start = clocks();
	go_to_and_fro(times);
	took = since(start);
	end();
	if (by_tcp)
		shutdown(there[1], SHUT_WR);
	close(there[1]);
	pthread_join(other, NULL);
	close(there[0]);
	close(back[0]);
	close(back[1]);
	return took;
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		attached |= !strcmp(argv[i], "attached");
		by_tcp |= !strcmp(argv[i], "tcp");
	}
	serve_rounds(measure);
	return 0;
}
