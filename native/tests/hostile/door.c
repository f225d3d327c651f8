// SPDX-License-Identifier: Apache-2.0
/* Attacks on the daemon's socket, of users who may attach and of others. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "attacks.h"

/* Open files that a process may have, with room for others. */
#define CONNECTIONS 900

/* File descriptors that a packet brings along. */
#define SENT_FDS 64

static int connections[CONNECTIONS];
static uint32_t n_connections;

/* One that waits more, or all anew. */
static int add_connection(struct target *t)
{
	int fd;

	if (n_connections == CONNECTIONS)
		while (n_connections)
			close(connections[--n_connections]);
	fd = target_connect(t);
	if (fd >= 0)
		connections[n_connections++] = fd;
	return fd;
}

void stay_silent(struct target *t)
{
	for (uint32_t i = 0; i < 8; i++)
		add_connection(t);
}

static void send_fds(int connection, const void *bytes, size_t n)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * SENT_FDS)];
	} control = {0};
	struct iovec iov = {(void *)bytes, n};
	struct msghdr m = {.msg_iov = &iov,
			   .msg_iovlen = 1,
			   .msg_control = &control,
			   .msg_controllen = sizeof(control)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	int fds[SENT_FDS];

	for (uint32_t i = 0; i < SENT_FDS; i++)
		fds[i] = STDIN_FILENO;
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(c), fds, sizeof(fds));
	sendmsg(connection, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* A packet of any length and content, or nearly a right one; some with files. */
static void send_garbage(int connection)
{
	static uint8_t bytes[60000];
	struct bs_attach_request request = {.magic = BS_ABI_MAGIC,
					    .version = (uint32_t)lie(),
					    .oldest = (uint32_t)lie(),
					    .pid = (int32_t)lie(),
					    .features = lie(),
					    .token = {lie(), lie()}};
	size_t n = below(2) ? sizeof(request) : below(sizeof(bytes));

	for (size_t i = 0; i < n; i += 8)
		memcpy(bytes + i, &(uint64_t){random_u64()}, 8);
	for (size_t i = 0; i < sizeof(request.service); i++)
		request.service[i] = (char)random_u64();
	if (below(2)) {
		if (below(2))
			request.version = request.oldest = BS_ABI_VERSION;
		memcpy(bytes, &request, sizeof(request));
	}
	if (below(4) == 0)
		send_fds(connection, bytes, n);
	else
		send(connection, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void say_garbage(struct target *t)
{
	int fd = add_connection(t);

	if (fd >= 0)
		send_garbage(fd);
}

/* Where nobody expects a word: attached. */
void say_garbage_attached(struct target *t)
{
	struct bs_attach_news news = {BS_ABI_MAGIC, below(4), lie()};

	if (below(2))
		send(t->connection, &news, sizeof(news),
		     MSG_NOSIGNAL | MSG_DONTWAIT);
	else
		send_garbage(t->connection);
}

void storm(struct target *t)
{
	for (uint32_t i = 0; i < 32; i++) {
		int fd = target_connect(t);

		if (fd >= 0)
			close(fd);
	}
}

/* Attach as it should be, and leave at once, alive: with something in the pool. */
void attach_and_leave(struct target *t)
{
	if (!target_attach(t))
		return;
	lie_in_directories(t);
	lie_of_losses(t);
	target_detach(t);
}
