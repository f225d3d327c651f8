/* SPDX-License-Identifier: Apache-2.0 */
/*
 * As much of HTTP/1.1 as a benchmark's services need from each other and from
 * wrk: messages with a Content-Length or without a body.
 */
#ifndef BENCH_HTTP_MESSAGE_H
#define BENCH_HTTP_MESSAGE_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

/* The value of a header, in place; NULL where there is none. */
static inline const char *header(const char *head, const char *name,
				 size_t *bytes)
{
	size_t name_bytes = strlen(name);
	const char *line = head;

	*bytes = 0;
	while ((line = strstr(line, "\r\n"))) {
		line += 2;
		if (strncasecmp(line, name, name_bytes) == 0 &&
		    line[name_bytes] == ':') {
			const char *value = line + name_bytes + 1;

			value += strspn(value, " ");
			*bytes = strcspn(value, "\r");
			return value;
		}
	}
	return NULL;
}

/* Where the body of a whole message begins; 0: more is to come. in is a string. */
static inline size_t whole(const char *in, size_t in_bytes)
{
	const char *end = strstr(in, "\r\n\r\n");
	const char *length;
	size_t head_bytes, bytes;

	if (!end)
		return 0;
	head_bytes = (size_t)(end - in) + 4;
	length = header(in, "content-length", &bytes);
	if (length && in_bytes < head_bytes + strtoul(length, NULL, 10))
		return 0;
	return head_bytes;
}

/* Sockets block: who reads the answer waits for it, and has nothing else to say. */
static inline bool send_all(int fd, const char *bytes, size_t n)
{
	while (n) {
		ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);

		if (sent <= 0)
			return false;
		bytes += sent;
		n -= (size_t)sent;
	}
	return true;
}

#endif
