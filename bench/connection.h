/* SPDX-License-Identifier: Apache-2.0 */
/* A TCP connection over loopback, both of whose ends are ours. */
#ifndef BENCH_CONNECTION_H
#define BENCH_CONNECTION_H

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "rounds.h"

struct connection {
	int client, server;
};

/* Port 0: one that is free. */
static inline int listen_on(uint16_t port, struct sockaddr_in *address)
{
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
	socklen_t bytes = sizeof(*address);

	*address = (struct sockaddr_in){.sin_family = AF_INET,
					.sin_port = htons(port)};
	address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	require(!setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one,
			    sizeof(one)) &&
			!bind(listener, (struct sockaddr *)address, bytes) &&
			!listen(listener, 1) &&
			!getsockname(listener, (struct sockaddr *)address,
				     &bytes),
		"listen");
	return listener;
}

/* What is written to it is sent at once. */
static inline struct connection connect_to(int listener,
					   const struct sockaddr_in *address)
{
	struct connection c = {
		.client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
	int one = 1;

	require(!connect(c.client, (const struct sockaddr *)address,
			 sizeof(*address)),
		"connect");
	c.server = accept(listener, NULL, NULL);
	require(c.server >= 0 &&
			!setsockopt(c.client, IPPROTO_TCP, TCP_NODELAY, &one,
				    sizeof(one)) &&
			!setsockopt(c.server, IPPROTO_TCP, TCP_NODELAY, &one,
				    sizeof(one)),
		"accept");
	return c;
}

static inline struct connection connect_pair(uint16_t port)
{
	struct sockaddr_in address;
	int listener = listen_on(port, &address);
	struct connection c = connect_to(listener, &address);

	close(listener);
	return c;
}

#endif
