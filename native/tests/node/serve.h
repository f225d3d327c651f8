/* SPDX-License-Identifier: Apache-2.0 */
/* A node that libbacksight of this process attaches to: what appliance/attach.py does. */
#ifndef BS_TEST_SERVE_H
#define BS_TEST_SERVE_H

#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "writer.h"

struct server {
	struct bsn *n;
	int listener;
	int client; /* its number, once it is attached */
	/* With the connection, before it waits for the end; NULL: nothing. */
	void (*attached)(const struct server *s, int peer);
	char directory[64];
	struct sockaddr_un address;
	pthread_t thread;
};

static inline uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

/* One client, until it hangs up. */
static inline void *serve(void *argument)
{
	struct server *s = argument;
	union {
		char bytes[CMSG_SPACE(BS_FDS * sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct bs_attach_request request;
	struct bs_attach_reply reply = {
		.magic = BS_ABI_MAGIC,
		.version = BS_ABI_VERSION,
		.token = {1, 2},
	};
	struct iovec iov = {&reply, sizeof(reply)};
	struct msghdr message = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct cmsghdr *c = CMSG_FIRSTHDR(&message);
	struct bsn_client_fds fds;
	char byte;
	int peer = accept(s->listener, NULL, NULL);

	CHECK(peer >= 0);
	CHECK_EQ(recv(peer, &request, sizeof(request), 0), sizeof(request));
	s->client = bsn_client_add(s->n, request.pid, request.service, now_ns(),
				   &fds);
	CHECK(s->client > 0);
	reply.arena_bytes = (uint64_t)lseek(fds.arena, 0, SEEK_END);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(BS_FDS * sizeof(int));
	memcpy(CMSG_DATA(c),
	       (int[]){fds.arena, fds.channel, fds.context,
		       bsn_policy_fd(s->n)},
	       BS_FDS * sizeof(int));
	CHECK_EQ(sendmsg(peer, &message, 0), sizeof(reply));
	close(fds.arena);
	close(fds.channel);
	close(fds.context);
	if (s->attached)
		s->attached(s, peer);
	CHECK_EQ(recv(peer, &byte, 1, 0), 0); /* until it hangs up */
	close(peer);
	return NULL;
}

/* Where libbacksight finds it at its next attempt. */
static inline void server_open(struct server *s, struct bsn *n)
{
	s->n = n;
	s->address.sun_family = AF_UNIX;
	make_directory(s->directory, sizeof(s->directory));
	snprintf(s->address.sun_path, sizeof(s->address.sun_path),
		 "%s/node.sock", s->directory);
	s->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(s->listener >= 0);
	CHECK_EQ(bind(s->listener, (void *)&s->address, sizeof(s->address)), 0);
	CHECK_EQ(listen(s->listener, 1), 0);
	CHECK_EQ(setenv("BACKSIGHT_SOCKET", s->address.sun_path, 1), 0);
	CHECK_EQ(pthread_create(&s->thread, NULL, serve, s), 0);
}

/* After bs_shutdown(). */
static inline void server_close(struct server *s)
{
	pthread_join(s->thread, NULL);
	CHECK_EQ(bsn_client_exited(s->n, s->client, now_ns()), 0);
	close(s->listener);
	unlink(s->address.sun_path);
	rmdir(s->directory);
}

#endif
