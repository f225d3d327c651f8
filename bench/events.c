/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Has something happen over and over that a kernel probe looks at:
 * events [attached] KIND [ARGUMENT].
 *
 * stream PORT  a chunk of bytes goes over a TCP connection over loopback, to that port;
 *              what is lost or slow there is for who starts it to say
 * reset        a TCP connection is made, used, and broken off
 * disk PATH    a block is written to a file, past the cache
 * thread       a thread begins and ends
 * exec         another process begins, runs a program and ends
 * signal       a signal comes that is handled
 *
 * Attached, it happens in a trace. What it reads and says: see rounds.h.
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "connection.h"

/* Some segments of the usual size. */
#define CHUNK_BYTES 8192

/* As O_DIRECT wants them aligned on any disk. */
#define BLOCK_BYTES 4096
#define BLOCKS 64

static const char *argument;

/* ------------------------------------------------------------ stream --- */

/* Reads all, and says so at the end. */
static void *read_all(void *server)
{
	char bytes[CHUNK_BYTES];
	int from = *(int *)server;

	begin(1);
	while (read(from, bytes, sizeof(bytes)) > 0)
		;
	require(write(from, "x", 1) == 1, "write");
	end();
	return NULL;
}

static void stream(long times)
{
	struct connection c = connect_pair((uint16_t)number(argument));
	static const char chunk[CHUNK_BYTES];
	pthread_t reader;
	char byte;

	require(!pthread_create(&reader, NULL, read_all, &c.server), "thread");
	for (long i = 0; i < times; i++)
		require(write(c.client, chunk, sizeof(chunk)) == sizeof(chunk),
			"write");
	shutdown(c.client, SHUT_WR);
	require(read(c.client, &byte, 1) == 1, "read");
	pthread_join(reader, NULL);
	/* The other side first: its port is free for the next one. */
	close(c.client);
	close(c.server);
}

/* ------------------------------------------------------------- reset --- */

static void reset(long times)
{
	/* close(2) breaks it off (socket(7), SO_LINGER). */
	const struct linger at_once = {.l_onoff = 1};
	struct sockaddr_in address;
	int listener = listen_on(0, &address);
	struct connection c;
	char byte;

	for (long i = 0; i < times; i++) {
		c = connect_to(listener, &address);
		/* Each side has written, so that it is known whose it is. */
		require(write(c.client, "x", 1) == 1 &&
				read(c.server, &byte, 1) == 1 &&
				write(c.server, "x", 1) == 1 &&
				read(c.client, &byte, 1) == 1 &&
				!setsockopt(c.server, SOL_SOCKET, SO_LINGER,
					    &at_once, sizeof(at_once)),
			"use it");
		close(c.server);
		close(c.client);
	}
	close(listener);
}

/* -------------------------------------------------------------- disk --- */

static void disk(long times)
{
	static _Alignas(BLOCK_BYTES) const char block[BLOCK_BYTES];
	int fd = open(argument, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);

	require(fd >= 0, argument);
	for (long i = 0; i < times; i++)
		require(pwrite(fd, block, sizeof(block),
			       i % BLOCKS * BLOCK_BYTES) == sizeof(block),
			"pwrite");
	close(fd);
}

/* ----------------------------------------------- thread, exec, signal --- */

static void *nothing_to_do(void *nothing)
{
	return nothing;
}

static void thread(long times)
{
	pthread_t other;

	for (long i = 0; i < times; i++) {
		require(!pthread_create(&other, NULL, nothing_to_do, NULL),
			"thread");
		pthread_join(other, NULL);
	}
}

static void execute(long times)
{
	char *const arguments[] = {"true", NULL};
	char *const environment[] = {NULL};
	pid_t pid;
	int status;

	for (long i = 0; i < times; i++)
		require(!posix_spawn(&pid, "/bin/true", NULL, NULL, arguments,
				     environment) &&
				waitpid(pid, &status, 0) == pid && !status,
			"run true");
}

static void handle(int number)
{
	(void)number;
}

static void signals(long times)
{
	require(signal(SIGUSR1, handle) != SIG_ERR, "signal");
	for (long i = 0; i < times; i++)
		raise(SIGUSR1);
}

/* -------------------------------------------------------------- main --- */

static const struct kind {
	const char *name;
	void (*happen)(long times);
	bool has_argument;
} kinds[] = {
	{"stream", stream, true}, {"reset", reset, false},
	{"disk", disk, true},	  {"thread", thread, false},
	{"exec", execute, false}, {"signal", signals, false},
};

static const struct kind *kind;

static struct took measure(long times)
{
	struct took start = clocks();

	begin(2);
	kind->happen(times);
	end();
	return since(start);
}

int main(int argc, char **argv)
{
	int i = 1;

	if (i < argc && !strcmp(argv[i], "attached")) {
		attached = true;
		i++;
	}
	for (size_t k = 0; i < argc && k < sizeof(kinds) / sizeof(*kinds); k++)
		if (!strcmp(argv[i], kinds[k].name))
			kind = &kinds[k];
	require(kind && argc - i == (kind->has_argument ? 2 : 1),
		"arguments: see the head of the source");
	argument = argv[argc - 1];
	serve_rounds(measure);
	return 0;
}
