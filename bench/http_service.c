/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One of two services that call each other over HTTP/1.1, traced or not as each
 * request wants.
 *
 *   http_service PORT THREADS ITEMS EVENTS [NEXT_PORT]
 *
 *   GET /plain, GET /traced    a document of ITEMS items as JSON
 *   GET /stats                 struct bs_stats of this process as JSON
 *
 * Without NEXT_PORT it renders the items. With it, it renders half of its own,
 * has the service on that port of this machine answer the same request, reads
 * each item of the answer, and renders the rest: so most of its time goes into
 * what services do, formatting and parsing.
 *
 * Each thread runs an event loop over its connections (epoll); a request that
 * waits for the next service leaves its handle open, and others go on meanwhile.
 * Of a traced one each service records a span, its hops with the other, and
 * EVENTS records of EVENT_BYTES, between the items. The context goes along in
 * traceparent and tracestate. `x-collect: yes` fires a trigger on it at its end.
 *
 * It prints `ready` when it is attached. Whoever calls is trusted: it is for
 * benchmarks on one machine.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "common.h"
#include "http_message.h"

#define THREADS_MAX 16u
#define BACKLOG 128
#define EPOLL_EVENTS 64
#define LINE_MAX 128u
#define HEAD_MAX 1024u
#define ITEMS_MAX 4096u
#define MESSAGE_MAX (HEAD_MAX + (2 * ITEMS_MAX) * LINE_MAX)
#define SPAN_KIND_SERVER 2

/* With its header, of 12 bytes, 128 in the log: a line of a log, or a few fields. */
struct event {
	uint32_t item;
	uint32_t price_cents;
	char text[108];
};

#define EVENT_BYTES 116u
_Static_assert(sizeof(struct event) == EVENT_BYTES, "as the head says");

struct loop;

/* A connection, and what its request has come to. */
struct connection {
	struct loop *loop;
	struct connection *other; /* the same request's to the next service, or
				   * from who asked */
	struct connection *next_dead;
	bool is_to_next;
	bool is_dead;
	int fd;
	char *in;
	size_t in_bytes;

	bool is_traced;
	bool is_to_be_collected;
	struct bs_trace_id id;
	uint64_t span_id;
	struct bs_trace trace;
	char *out; /* body so far */
	size_t out_bytes;
};

struct loop {
	int epoll;
	uint64_t random;
	struct connection *dead;
	char *message;
};

static struct {
	uint64_t items, events;
	uint16_t next_port; /* 0: none */
	unsigned int threads;
	unsigned int turn; /* of the loop that gets the next connection */
	int listener;
	struct loop loops[THREADS_MAX];
} service;

static uint64_t next_random(struct loop *l)
{
	l->random ^= l->random << 13;
	l->random ^= l->random >> 7;
	l->random ^= l->random << 17;
	return l->random;
}

/* ----------------------------------------------------------------- work --- */

static void record_event(struct connection *c, uint64_t item, uint64_t cents,
			 const char *line, size_t line_bytes)
{
	struct event event = {.item = (uint32_t)item,
			      .price_cents = (uint32_t)cents};

	if (line_bytes > sizeof(event.text))
		line_bytes = sizeof(event.text);
	memcpy(event.text, line, line_bytes);
	bs_write(&c->trace, BS_RECORD_DATA, &event, sizeof(event));
}

/* Items from one number to another, and between them their share of the events. When
 * one is due is reckoned traced or not: it is no part of what tracing costs. */
static void render(struct connection *c, uint64_t from, uint64_t to)
{
	uint64_t due = service.events * from % service.items;

	for (uint64_t i = from; i < to; i++) {
		char *line = c->out + c->out_bytes;
		uint64_t cents = i * 7919 % 100000;
		int bytes = snprintf(
			line, LINE_MAX,
			"%s{\"id\": %" PRIu64 ", \"name\": \"item %" PRIu64
			"\", \"price\": %.2f, \"stock\": %" PRIu64 "}",
			i ? ",\n" : "[", i, i, (double)cents / 100,
			i * 31 % 100);

		c->out_bytes += (size_t)bytes;
		due += service.events;
		for (; due >= service.items; due -= service.items) {
			if (c->is_traced)
				record_event(c, i, cents, line, (size_t)bytes);
		}
	}
}

/* What a caller makes of an answer: it reads each item. */
static double total_of(const char *body)
{
	double total = 0;

	while ((body = strstr(body, "\"price\": "))) {
		body += strlen("\"price\": ");
		total += strtod(body, (char **)&body);
		body = strstr(body, "\"stock\": ");
		if (!body)
			break;
		total +=
			(double)strtoul(body + strlen("\"stock\": "), NULL, 10);
	}
	return total;
}

/* -------------------------------------------------------------- tracing --- */

static uint64_t hex(const char *digits)
{
	char text[17] = "";

	memcpy(text, digits, 16);
	return strtoull(text, NULL, 16);
}

/* traceparent: 00-<32 hex: trace>-<16 hex: span>-01 */
static void begin_trace(struct connection *c)
{
	size_t bytes, state_bytes;
	const char *parent = header(c->in, "traceparent", &bytes);
	const char *state = header(c->in, "tracestate", &state_bytes);
	uint64_t parent_id = 0;

	if (parent && bytes == 55)
		c->id = (struct bs_trace_id){hex(parent + 3), hex(parent + 19)};
	else
		c->id = (struct bs_trace_id){next_random(c->loop),
					     next_random(c->loop)};
	c->span_id = next_random(c->loop);
	bs_open(&c->trace, c->id);
	/* Of a caller without a context of ours, nothing was recorded. */
	if (parent && bytes == 55 && state && state_bytes > 3 &&
	    !strncmp(state, "bs=", 3)) {
		parent_id = hex(parent + 36);
		bs_deserialize(&c->trace, parent_id, state + 3,
			       state_bytes - 3);
	}
	bs_span_start(&c->trace, c->span_id, parent_id,
		      clock_ns(CLOCK_REALTIME), SPAN_KIND_SERVER,
		      "GET /traced");
}

static void end_trace(struct connection *c)
{
	bs_span_end(&c->trace, c->span_id, clock_ns(CLOCK_REALTIME), 0, NULL,
		    NULL, 0);
	bs_close(&c->trace);
	c->is_traced = false;
	if (c->is_to_be_collected)
		bs_trigger(c->id, "bench", "who asked wants it", NULL, 0);
}

/* ------------------------------------------------------------- requests --- */

static void forget(struct connection *c)
{
	if (c->is_dead)
		return;
	c->is_dead = true;
	close(c->fd);
	if (c->is_traced)
		bs_close(&c->trace);
	/* Events of this round may still name it. */
	c->next_dead = c->loop->dead;
	c->loop->dead = c;
	if (c->other)
		forget(c->other);
}

static void answer(struct connection *c, double total)
{
	char *out = c->loop->message;
	int head_bytes, tail_bytes;
	const char *node = "";
	char tail[64];

	tail_bytes =
		snprintf(tail, sizeof(tail), ",\n{\"total\": %.2f}]\n", total);
	if (c->is_traced) {
		node = bs_node_ref();
		end_trace(c);
	}
	head_bytes = snprintf(out, HEAD_MAX,
			      "HTTP/1.1 200 OK\r\n"
			      "Content-Type: application/json\r\n"
			      "Content-Length: %zu\r\n"
			      "X-Node: %s\r\n\r\n",
			      c->out_bytes + (size_t)tail_bytes, node);
	memcpy(out + head_bytes, c->out, c->out_bytes);
	memcpy(out + head_bytes + c->out_bytes, tail, (size_t)tail_bytes);
	c->in_bytes = 0;
	if (!send_all(c->fd, out,
		      (size_t)head_bytes + c->out_bytes + (size_t)tail_bytes))
		forget(c);
}

static void call_next(struct connection *c)
{
	char context[BS_CONTEXT_MAX + 1], trace[3 * BS_CONTEXT_MAX] = "";
	char out[HEAD_MAX];
	int bytes;

	if (c->is_traced &&
	    bs_serialize(&c->trace, c->span_id, context, sizeof(context)) > 0)
		snprintf(trace, sizeof(trace),
			 "Traceparent: 00-%016" PRIx64 "%016" PRIx64
			 "-%016" PRIx64 "-01\r\nTracestate: bs=%s\r\n",
			 c->id.hi, c->id.lo, c->span_id, context);
	bytes = snprintf(out, sizeof(out),
			 "GET /%s HTTP/1.1\r\nHost: next\r\n%s\r\n",
			 c->is_traced ? "traced" : "plain", trace);
	if (!send_all(c->other->fd, out, (size_t)bytes))
		forget(c);
}

static void tell_stats(struct connection *c)
{
	struct bs_stats stats;
	char body[256], out[HEAD_MAX];
	int bytes;

	bs_get_stats(&stats);
	bytes = snprintf(body, sizeof(body),
			 "{\"runs\": %" PRIu64 ", \"runs_lost\": %" PRIu64
			 ", \"records_lost\": %" PRIu64
			 ", \"triggers_lost\": %" PRIu64 "}\n",
			 stats.runs, stats.runs_lost, stats.records_lost,
			 stats.triggers_lost);
	bytes = snprintf(out, sizeof(out),
			 "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s",
			 bytes, body);
	c->in_bytes = 0;
	if (!send_all(c->fd, out, (size_t)bytes))
		forget(c);
}

static void request(struct connection *c)
{
	size_t bytes;

	if (!strncmp(c->in, "GET /stats", strlen("GET /stats"))) {
		tell_stats(c);
		return;
	}
	c->out_bytes = 0;
	c->is_traced = !strncmp(c->in, "GET /traced", strlen("GET /traced"));
	c->is_to_be_collected = header(c->in, "x-collect", &bytes);
	if (c->is_traced)
		begin_trace(c);
	if (c->other) {
		render(c, 0, service.items / 2);
		call_next(c);
	} else {
		render(c, 0, service.items);
		answer(c, 0);
	}
}

/* The next service answered the request of the other connection. */
static void response(struct connection *c, size_t head_bytes)
{
	struct connection *asked = c->other;
	double total = total_of(c->in + head_bytes);
	size_t bytes;
	const char *node = header(c->in, "x-node", &bytes);

	if (asked->is_traced && node && bytes && bytes < HEAD_MAX) {
		char name[HEAD_MAX];

		memcpy(name, node, bytes);
		name[bytes] = 0;
		bs_breadcrumb(&asked->trace, name);
	}
	c->in_bytes = 0;
	render(asked, service.items / 2, service.items);
	answer(asked, total);
}

/* ---------------------------------------------------------- connections --- */

static struct connection *new_connection(struct loop *l, int fd)
{
	struct connection *c = calloc(1, sizeof(*c));
	int yes = 1;

	if (!c)
		die("out of memory");
	c->in = malloc(MESSAGE_MAX + 1);
	c->out = malloc(MESSAGE_MAX);
	if (!c->in || !c->out)
		die("out of memory");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
	c->loop = l;
	c->fd = fd;
	return c;
}

static void watch(struct connection *c)
{
	struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = c};

	if (epoll_ctl(c->loop->epoll, EPOLL_CTL_ADD, c->fd, &wanted))
		die("epoll");
}

static void accept_one(void)
{
	struct loop *l = &service.loops[service.turn];
	int fd = accept4(service.listener, NULL, NULL, SOCK_CLOEXEC);
	struct connection *c;

	if (fd < 0)
		return;
	/* Each thread has as many as any other. */
	service.turn = service.turn + 1 < service.threads ? service.turn + 1
							  : 0;
	c = new_connection(l, fd);
	if (service.next_port) {
		struct sockaddr_in next = {
			.sin_family = AF_INET,
			.sin_port = htons(service.next_port),
			.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
		};

		fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (fd < 0 || connect(fd, (void *)&next, sizeof(next)))
			die("the next service does not answer");
		c->other = new_connection(l, fd);
		c->other->other = c;
		c->other->is_to_next = true;
		watch(c->other);
	}
	watch(c);
	/* The kernel holds it, as what the loop is to be told. */
} /* NOLINT(clang-analyzer-unix.Malloc) */

static void readable(struct connection *c)
{
	ssize_t got =
		recv(c->fd, c->in + c->in_bytes, MESSAGE_MAX - c->in_bytes, 0);
	size_t head_bytes;

	if (got <= 0) {
		forget(c);
		return;
	}
	c->in_bytes += (size_t)got;
	c->in[c->in_bytes] = 0;
	head_bytes = whole(c->in, c->in_bytes);
	if (!head_bytes)
		return;
	if (c->is_to_next)
		response(c, head_bytes);
	else
		request(c);
}

static void bury(struct loop *l)
{
	while (l->dead) {
		struct connection *c = l->dead;

		l->dead = c->next_dead;
		free(c->in);
		free(c->out);
		free(c);
	}
}

static void *run(void *argument)
{
	struct loop *l = argument;
	struct epoll_event events[EPOLL_EVENTS];

	for (;;) {
		int n = epoll_wait(l->epoll, events, EPOLL_EVENTS, -1);

		for (int i = 0; i < n; i++) {
			struct connection *c = events[i].data.ptr;

			if (!c)
				accept_one();
			else if (!c->is_dead)
				readable(c);
		}
		bury(l);
	}
	return NULL;
}

/* ----------------------------------------------------------------- main --- */

static uint64_t at_most(uint64_t max, const char *text)
{
	uint64_t value = number(text);

	if (value > max)
		die("a number is too large, see the head of http_service.c");
	return value;
}

static void listen_at(uint16_t port)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	int yes = 1;

	service.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (service.listener < 0 ||
	    setsockopt(service.listener, SOL_SOCKET, SO_REUSEADDR, &yes,
		       sizeof(yes)) ||
	    bind(service.listener, (void *)&address, sizeof(address)) ||
	    listen(service.listener, BACKLOG))
		die("cannot listen at that port");
}

int main(int argc, char **argv)
{
	struct epoll_event accepting = {.events = EPOLLIN};
	pthread_t thread;

	if (argc != 5 && argc != 6)
		die("usage: see the head of http_service.c");
	listen_at((uint16_t)at_most(UINT16_MAX, argv[1]));
	service.threads = (unsigned int)at_most(THREADS_MAX, argv[2]);
	service.items = at_most(ITEMS_MAX, argv[3]);
	service.events = at_most(UINT32_MAX, argv[4]);
	if (!service.threads || service.items < 2)
		die("a thread and two items, at least");
	if (argc == 6)
		service.next_port = (uint16_t)at_most(UINT16_MAX, argv[5]);
	must_attach();
	for (unsigned int i = 0; i < service.threads; i++) {
		struct loop *l = &service.loops[i];

		l->epoll = epoll_create1(EPOLL_CLOEXEC);
		l->random = (clock_ns(CLOCK_REALTIME) + i) | 1;
		l->message = malloc(MESSAGE_MAX);
		if (l->epoll < 0 || !l->message)
			die("out of memory");
	}
	if (epoll_ctl(service.loops[0].epoll, EPOLL_CTL_ADD, service.listener,
		      &accepting))
		die("epoll");
	puts("ready");
	fflush(stdout);
	for (unsigned int i = 1; i < service.threads; i++) {
		if (pthread_create(&thread, NULL, run, &service.loops[i]))
			die("no thread");
	}
	run(&service.loops[0]);
	return 0;
}
