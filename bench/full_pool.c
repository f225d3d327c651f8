/* SPDX-License-Identifier: Apache-2.0 */
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "abi.h"
#include "full_pool.h"

#define RECORD_BYTES 128u

/* What the child writes between two polls: what any stock of segments and any
 * ring has room for. */
#define PIECE_TRACES 600u
#define PIECE_BYTES (96u << 10)

/* Of the pool, in payload: headers add to it, so it is gone round for sure. */
#define WRITTEN_OF_POOL 1.25

/* Traces to look for are among the younger half of those held. */
#define LOOKED_FOR_OF_HELD 0.5
#define LOOK_FOR_SAMPLES 256u

/* Of a tree that is compared: it gave a process three fds. */
#if BS_ABI_VERSION < 2
#define BS_FDS 3
#endif

/* What the child says after a piece, and is answered with. */
enum said {
	PIECE = 'p',
	LAST = 'l',
	LOST = 'x',
	DONE = 'd'
};

struct full_pool full_pool_of(const char *pool_bytes, const char *trace_bytes)
{
	struct full_pool p = {
		/* As `backsight-node` has it by default. */
		.config =
			{
				.node_name = "bench",
				.pool_bytes = number(pool_bytes),
				.arena_bytes = number(pool_bytes),
				.store_bytes = 64 << 20,
				.trace_bytes_max = 16 << 20,
				.percentage_threshold = UINT64_MAX,
				.reclaim_percent = 98,
				.clients_max = 256,
#if BS_ABI_VERSION < 2
				.tombstones = 65536, /* its default */
#endif
				.ticks_per_s = SECOND_NS,
			},
		.trace_bytes = number(trace_bytes),
		.buffer = malloc(SLICE_BYTES_MAX),
	};

	if (!p.buffer)
		die("out of memory");
	if (p.trace_bytes < 1 || p.trace_bytes > TRACE_BYTES_MAX)
		die("TRACE_BYTES is 1 to 1048576");
	p.traces = (uint64_t)(WRITTEN_OF_POOL * (double)p.config.pool_bytes /
			      (double)p.trace_bytes);
	return p;
}

void full_pool_free(struct full_pool *p)
{
	bsn_free(p->node);
	free(p->buffer);
	close(p->other);
	waitpid(p->writer, NULL, 0);
}

/* --------------------------------------------------------------- writer --- */

static bool write_trace(uint64_t number, uint64_t trace_bytes)
{
	static const unsigned char payload[RECORD_BYTES];
	bool lost = false;

	bs_begin(nth_id(number));
	for (uint64_t left = trace_bytes; left;) {
		size_t bytes = left < RECORD_BYTES ? left : RECORD_BYTES;

		lost |= bs_tracepoint(payload, bytes) != 0;
		left -= bytes;
	}
	bs_end();
	return !lost;
}

/* Until the node has polled. */
static void say(const struct full_pool *p, enum said what)
{
	char c = (char)what;

	if (write(p->other, &c, 1) != 1 || read(p->other, &c, 1) != 1)
		exit(0);
}

static uint64_t piece_traces(const struct full_pool *p)
{
	uint64_t traces = (PIECE_BYTES + p->trace_bytes - 1) / p->trace_bytes;

	return traces < PIECE_TRACES ? traces : PIECE_TRACES;
}

static void write_all(const struct full_pool *p)
{
	uint64_t piece = piece_traces(p), word;

	must_attach();
	for (uint64_t i = 1; i <= p->traces; i++) {
		if (!write_trace(i, p->trace_bytes))
			say(p, LOST);
		if (i % piece == 0)
			say(p, PIECE);
	}
	/* The answer is the end: it is attached as long as it is looked at. */
	say(p, LAST);
	if (p->then) {
		if (read(p->other, &word, sizeof(word)) != sizeof(word))
			exit(0);
		p->then(p, word);
		say(p, DONE);
	}
	exit(0);
}

/* ----------------------------------------------------------------- node --- */

/* What appliance/attach.py does, for the one process that asks. */
static void attach(struct full_pool *p, int listener)
{
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
	int peer = accept(listener, NULL, NULL);

	if (peer < 0 || recv(peer, &request, sizeof(request), 0) !=
				(ssize_t)sizeof(request))
		die("the writer does not ask to be attached");
	p->client = bsn_client_add(p->node, request.pid, request.service,
				   now_ns(p), &p->fds);
	if (p->client <= 0)
		die("the node takes no client");
	reply.arena_bytes = (uint64_t)lseek(p->fds.arena, 0, SEEK_END);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(BS_FDS * sizeof(int));
	memcpy(
		CMSG_DATA(c),
		(int[BS_FDS]) {
			p->fds.arena, p->fds.channel, p->fds.context,
#if BS_ABI_VERSION >= 2
				bsn_policy_fd(p->node),
#endif
		},
		BS_FDS * sizeof(int));
	if (sendmsg(peer, &message, 0) != (ssize_t)sizeof(reply))
		die("the writer does not take its attachment");
	/* The connection stays open with this process. */
}

void full_pool_pair_clocks(struct full_pool *p, uint64_t time_ns)
{
	uint64_t ticks, monotonic_ns, realtime_ns;

	if (p->paired_ns && time_ns - p->paired_ns < SECOND_NS)
		return;
	bsn_clock_read(false, &ticks, &monotonic_ns, &realtime_ns);
	bsn_clock_pair(p->node, ticks, monotonic_ns + p->skipped_ns,
		       realtime_ns + p->skipped_ns);
	p->paired_ns = time_ns;
}

void full_pool_poll(struct full_pool *p)
{
	struct bsn_event events[64];
	uint64_t time_ns = now_ns(p);

	full_pool_pair_clocks(p, time_ns);
	if (bsn_poll(p->node, time_ns) < 0)
		die("a poll failed");
	while (bsn_events(p->node, events, 64) > 0)
		;
	bsn_events_done(p->node);
}

void full_pool_new_node(struct full_pool *p)
{
	char message[256] = "";

	if (bsn_new(&p->config, &p->node, message, sizeof(message)))
		die(message);
	p->paired_ns = 0;
}

/* What is added to the time that a piece took. */
static uint64_t piece_ns(const struct full_pool *p)
{
	return (uint64_t)((double)p->fill_ns * (double)piece_traces(p) *
			  (double)p->trace_bytes /
			  (double)p->config.pool_bytes);
}

void full_pool_fill(struct full_pool *p)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval timeout = {.tv_sec = ATTACH_TIMEOUT_MS / 1000};
	const char *tmp = getenv("TMPDIR");
	char directory[sizeof(address.sun_path) - sizeof("/node.sock")];
	int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	int ends[2];

	snprintf(directory, sizeof(directory), "%s/backsight-bench-XXXXXX",
		 tmp ? tmp : "/tmp");
	if (!mkdtemp(directory))
		die("no temporary directory, or TMPDIR is too long");
	snprintf(address.sun_path, sizeof(address.sun_path), "%s/node.sock",
		 directory);
	if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO,
				       &timeout, sizeof(timeout)))
		die("no socket");
	if (bind(listener, (void *)&address, sizeof(address)) ||
	    listen(listener, 1) ||
	    setenv("BACKSIGHT_SOCKET", address.sun_path, 1))
		die("no socket to attach at");
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		die("no socket");
	p->writer = fork();
	if (p->writer < 0)
		die("no process");
	p->other = ends[!p->writer];
	close(ends[!!p->writer]);
	if (!p->writer)
		write_all(p);
	full_pool_new_node(p);
	attach(p, listener);
	close(listener);
	unlink(address.sun_path);
	rmdir(directory);
	for (;;) {
		char what;

		if (read(p->other, &what, 1) != 1)
			die("the writer ended");
		if (what == LOST)
			die("a trace was lost while the pool was filled");
		p->skipped_ns += piece_ns(p);
		/* A poll drains, and the next one grants by what it found. */
		full_pool_poll(p);
		full_pool_poll(p);
		if (what == LAST)
			return;
		if (write(p->other, &what, 1) != 1)
			die("the writer ended");
	}
}

/* ----------------------------------------------------------- what it holds --- */

bool full_pool_holds(struct full_pool *p, uint64_t number)
{
	struct bsn_slice slice;
	int64_t bytes = bsn_peek(p->node, nth_id(number), now_ns(p), p->buffer,
				 SLICE_BYTES_MAX, &slice);

	if (bytes < 0)
		die("a trace cannot be looked at");
	return (uint64_t)bytes >= p->trace_bytes && !slice.open_handles &&
	       !(slice.flags & ~(uint32_t)BSN_SLICE_HELD);
}

double full_pool_count_held(struct full_pool *p, uint64_t samples)
{
	double span = (double)p->config.pool_bytes / (double)p->trace_bytes;
	uint64_t held = 0;

	if (span > (double)p->traces)
		span = (double)p->traces;
	for (uint64_t k = 0; k < samples; k++) {
		double age = ((double)k + 0.5) * span / (double)samples;

		held += full_pool_holds(p, p->traces - (uint64_t)age);
	}
	return span * (double)held / (double)samples;
}

uint64_t full_pool_to_look_for(struct full_pool *p)
{
	return (uint64_t)(LOOKED_FOR_OF_HELD *
			  full_pool_count_held(p, LOOK_FOR_SAMPLES));
}

/* ------------------------------------------------------- when it is full --- */

void full_pool_go_on(const struct full_pool *p, uint64_t word)
{
	char c = LAST;

	if (write(p->other, &c, 1) != 1 ||
	    write(p->other, &word, sizeof(word)) != sizeof(word))
		die("the writer ended");
}

bool full_pool_writer_is_done(const struct full_pool *p)
{
	char c;

	return recv(p->other, &c, 1, MSG_DONTWAIT) == 1;
}
