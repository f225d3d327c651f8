/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A gRPC stream to the coordinator, on an HTTP/2 connection of its own, as a
 * node has it. HTTP/2 is libnghttp2's.
 */
#ifndef BENCH_CONTROL_STREAM_H
#define BENCH_CONTROL_STREAM_H

#include <netinet/in.h>
#include <nghttp2/nghttp2.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that grow. */
struct bytes {
	uint8_t *data;
	size_t size;
	size_t room;
};

void bytes_add(struct bytes *bytes, const void *data, size_t size);

struct stream {
	int fd;
	int32_t id;
	nghttp2_session *session;
	struct bytes out; /* messages with their heads, for the session to take */
	size_t out_from;
	struct bytes wire; /* frames, for the socket to take */
	size_t wire_from;
	struct bytes in;  /* the beginning of a message */
	bool is_deferred; /* the session waits for something to send */
	char status[256]; /* why the coordinator ended it */
	void (*on_message)(struct stream *stream, const uint8_t *message,
			   size_t size);
	void *owner;
};

/* Open it; on_message and owner are set before. Whatever fails ends the program. */
void stream_open(struct stream *stream, const struct sockaddr_in *to,
		 const char *path);

/* Have a message go out with the next flush. */
void stream_send(struct stream *stream, const void *message, size_t size);

/* Take all that has come, and send as much as can be. */
void stream_read(struct stream *stream);
void stream_flush(struct stream *stream);

#endif
