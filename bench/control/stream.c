/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <arpa/inet.h>
#include <endian.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/socket.h>

#include "common.h"

/* Before each message of gRPC: whether it is compressed, and its length. */
#define HEAD_BYTES 5u

/* What the coordinator may send before it is told to go on. */
#define WINDOW_BYTES (1 << 20)

#define READ_BYTES (64u << 10)

void bytes_add(struct bytes *bytes, const void *data, size_t size)
{
	if (bytes->size + size > bytes->room) {
		bytes->room = 2 * (bytes->size + size);
		bytes->data = realloc(bytes->data, bytes->room);
		if (!bytes->data)
			die("no memory");
	}
	memcpy(bytes->data + bytes->size, data, size);
	bytes->size += size;
}

/* Forget what was taken, once all is. */
static void bytes_taken(struct bytes *bytes, size_t *from)
{
	if (*from == bytes->size)
		*from = bytes->size = 0;
}

/* ---------------------------------------------------- what nghttp2 calls --- */

static ssize_t on_read(nghttp2_session *session, int32_t id, uint8_t *to,
		       size_t room, uint32_t *flags,
		       nghttp2_data_source *source, void *context)
{
	struct stream *stream = context;
	size_t size = stream->out.size - stream->out_from;

	(void)session;
	(void)id;
	(void)flags;
	(void)source;
	if (!size) {
		stream->is_deferred = true;
		return NGHTTP2_ERR_DEFERRED;
	}
	if (size > room)
		size = room;
	memcpy(to, stream->out.data + stream->out_from, size);
	stream->out_from += size;
	bytes_taken(&stream->out, &stream->out_from);
	return (ssize_t)size;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t id,
		   const uint8_t *data, size_t size, void *context)
{
	struct stream *stream = context;
	size_t from = 0;

	(void)session;
	(void)flags;
	(void)id;
	bytes_add(&stream->in, data, size);
	while (stream->in.size - from >= HEAD_BYTES) {
		const uint8_t *head = stream->in.data + from;
		uint32_t length;

		memcpy(&length, head + 1, sizeof(length));
		length = be32toh(length);
		if (stream->in.size - from - HEAD_BYTES < length)
			break;
		if (head[0])
			die("a message is compressed, which nobody asked for");
		stream->on_message(stream, head + HEAD_BYTES, length);
		from += HEAD_BYTES + length;
	}
	memmove(stream->in.data, stream->in.data + from,
		stream->in.size - from);
	stream->in.size -= from;
	return 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame,
		     const uint8_t *name, size_t name_size,
		     const uint8_t *value, size_t value_size, uint8_t flags,
		     void *context)
{
	struct stream *stream = context;
	size_t used = strlen(stream->status);

	(void)session;
	(void)frame;
	(void)flags;
	if (name_size >= 5 && !memcmp(name, "grpc-", 5))
		snprintf(stream->status + used, sizeof(stream->status) - used,
			 " %.*s: %.*s", (int)name_size, (const char *)name,
			 (int)value_size, (const char *)value);
	return 0;
}

__attribute__((noreturn)) static void ended(const struct stream *stream)
{
	fprintf(stderr, "fleet: the coordinator ended a stream:%s\n",
		*stream->status ? stream->status : " it gave no reason");
	exit(1);
}

static int on_close(nghttp2_session *session, int32_t id, uint32_t code,
		    void *context)
{
	(void)session;
	(void)id;
	(void)code;
	ended(context);
}

static nghttp2_session *new_session(struct stream *stream)
{
	nghttp2_session_callbacks *callbacks;
	nghttp2_session *session;

	if (nghttp2_session_callbacks_new(&callbacks))
		die("no memory");
	nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks,
								  on_data);
	nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
	nghttp2_session_callbacks_set_on_stream_close_callback(callbacks,
							       on_close);
	if (nghttp2_session_client_new(&session, callbacks, stream))
		die("no memory");
	nghttp2_session_callbacks_del(callbacks);
	return session;
}

/* ----------------------------------------------------------------- ours --- */

static int connected(const struct sockaddr_in *to)
{
	const int on = 1;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		die("no socket; allow more open files: ulimit -n");
	if (connect(fd, (const struct sockaddr *)to, sizeof(*to)))
		die("no coordinator there");
	if (fcntl(fd, F_SETFL, O_NONBLOCK) ||
	    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		die("a socket does not take its options");
	return fd;
}

void stream_open(struct stream *stream, const struct sockaddr_in *to,
		 const char *path)
{
	const nghttp2_settings_entry settings[] = {
		{NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
		{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, WINDOW_BYTES},
	};
	const nghttp2_data_provider provider = {.read_callback = on_read};
	char authority[64];
	const char *const headers[][2] = {
		{":method", "POST"},
		{":scheme", "http"},
		{":path", path},
		{":authority", authority},
		{"content-type", "application/grpc"},
		{"te", "trailers"},
		{"user-agent", "backsight-fleet"},
	};
	nghttp2_nv fields[sizeof(headers) / sizeof(headers[0])];

	snprintf(authority, sizeof(authority), "%s:%u", inet_ntoa(to->sin_addr),
		 ntohs(to->sin_port));
	for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++)
		fields[i] = (nghttp2_nv){
			.name = (uint8_t *)headers[i][0],
			.value = (uint8_t *)headers[i][1],
			.namelen = strlen(headers[i][0]),
			.valuelen = strlen(headers[i][1]),
		};
	stream->fd = connected(to);
	stream->session = new_session(stream);
	if (nghttp2_submit_settings(stream->session, NGHTTP2_FLAG_NONE,
				    settings,
				    sizeof(settings) / sizeof(settings[0])) ||
	    nghttp2_session_set_local_window_size(
		    stream->session, NGHTTP2_FLAG_NONE, 0, WINDOW_BYTES))
		die("HTTP/2 does not take its settings");
	stream->id = nghttp2_submit_request(stream->session, NULL, fields,
					    sizeof(fields) / sizeof(fields[0]),
					    &provider, NULL);
	if (stream->id < 0)
		die("HTTP/2 does not take a request");
}

void stream_send(struct stream *stream, const void *message, size_t size)
{
	const uint32_t length = htobe32((uint32_t)size);
	uint8_t head[HEAD_BYTES] = {0};

	memcpy(head + 1, &length, sizeof(length));
	bytes_add(&stream->out, head, sizeof(head));
	bytes_add(&stream->out, message, size);
}

void stream_read(struct stream *stream)
{
	static uint8_t buffer[READ_BYTES];

	for (;;) {
		ssize_t size = read(stream->fd, buffer, sizeof(buffer));

		if (size < 0 && errno == EAGAIN)
			return;
		if (size <= 0)
			ended(stream);
		if (nghttp2_session_mem_recv(stream->session, buffer,
					     (size_t)size) != size)
			die("the coordinator breaks HTTP/2");
	}
}

void stream_flush(struct stream *stream)
{
	const uint8_t *frame;
	ssize_t size;

	if (stream->is_deferred && stream->out.size) {
		stream->is_deferred = false;
		if (nghttp2_session_resume_data(stream->session, stream->id))
			die("HTTP/2 does not go on");
	}
	while ((size = nghttp2_session_mem_send(stream->session, &frame)) > 0)
		bytes_add(&stream->wire, frame, (size_t)size);
	if (size < 0)
		die("HTTP/2 cannot send");
	while (stream->wire_from < stream->wire.size) {
		size = write(stream->fd, stream->wire.data + stream->wire_from,
			     stream->wire.size - stream->wire_from);
		if (size < 0 && errno == EAGAIN)
			return;
		if (size < 0)
			ended(stream);
		stream->wire_from += (size_t)size;
	}
	bytes_taken(&stream->wire, &stream->wire_from);
}
