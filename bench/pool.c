/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a full pool holds, and what it takes to find a trace in it.
 *
 *   pool horizon POOL TRACE_BYTES SAMPLES SECONDS
 *   pool lookup  POOL TRACE_BYTES TRACES TIMES
 *   pool restart POOL TRACE_BYTES TIMES
 *   pool triggers POOL TRACE_BYTES RATE SECONDS
 *
 * The data plane (node.h) is in this process, without a daemon around it, so
 * that its CPU time is that of the process. A child writes with libbacksight,
 * and waits after each piece until the node has polled: nothing is lost,
 * however busy the machine is, so what is held tells of the pool alone.
 *
 * The pool of POOL bytes is written over until each segment was reclaimed once,
 * with traces of TRACE_BYTES of payload in records of at most 128 bytes, by one
 * handle each. Then one line of JSON is printed: `horizon` says how many traces
 * can be had back whole (of SAMPLES, spread evenly), `lookup` and `restart` a
 * line each time; `triggers` what it costs when the writer fires RATE triggers a
 * second, each for a trace of its own, and each slice is read and released. CPU
 * time is that of all threads of this process, in ns.
 *
 * The pool is written over in a moment, and a writer of that rate has a large stock
 * of segments in hand, which hold nothing yet. So the node is told another time
 * (it asks no clock itself): for `horizon`, that as many bytes of payload as the
 * pool has took SECONDS. 0: as long as they did.
 */
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "abi.h"
#include "common.h"
#include "node.h"

#define RECORD_BYTES 128u
#define TRACE_BYTES_MAX (1u << 20)
#define LOOKUPS_MAX 1000u

/* What the child writes between two polls: what any stock of segments and any
 * ring has room for. */
#define PIECE_TRACES 600u
#define PIECE_BYTES (96u << 10)

/* Of the pool, in payload: headers add to it, so it is gone round for sure. */
#define WRITTEN_OF_POOL 1.25

/* Traces to look for are among the younger half of those held: of the oldest,
 * some are kept longer than others. */
#define LOOKED_FOR_OF_HELD 0.5
#define LOOKUP_SAMPLES 256u
#define LOOKUP_TIMEOUT_NS (60 * SECOND_NS)

/* Of a tree that is compared: it gave a process three fds, looked for a trace in an
 * index, and knew no passes. */
#if BS_ABI_VERSION < 2
#define BS_FDS 3
#define BSN_SLICE_SEARCHING 0
#endif

static uint64_t passes_of(const struct bsn_metrics *m)
{
#if BS_ABI_VERSION >= 2
	return m->passes;
#else
	(void)m;
	return 0;
#endif
}

static uint64_t entries_of(const struct bsn_metrics *m)
{
#if BS_ABI_VERSION >= 2
	return m->entries_searched;
#else
	(void)m;
	return 0;
#endif
}

/* What the child says after a piece, and is answered with. */
enum said {
	PIECE = 'p',
	LAST = 'l',
	LOST = 'x',
	FIRED = 'f'
};

struct bench {
	struct bsn *node;
	struct bsn_config config;
	int child; /* the way to it, or in it to this process */
	uint64_t trace_bytes;
	uint64_t traces; /* to write */
	uint64_t rate;	 /* of triggers, a second; 0: none are fired */
	uint64_t seconds;
	uint64_t fill_ns;    /* what it takes to write POOL bytes */
	uint64_t skipped_ns; /* what the node's time is ahead of ours */
	uint64_t paired_ns;
	int client;
	pid_t writer;
	struct bsn_client_fds fds;
	unsigned char *buffer;
};

/* As the node is told. */
static uint64_t now_ns(const struct bench *b)
{
	return clock_ns(CLOCK_MONOTONIC) + b->skipped_ns;
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
static void say(const struct bench *b, enum said what)
{
	char c = (char)what;

	if (write(b->child, &c, 1) != 1 || read(b->child, &c, 1) != 1)
		exit(0);
}

/* So often what is due is fired: for a few polls it is enough at any rate. */
#define FIRE_EVERY_NS (SECOND_NS / 1000)

/* For traces spread evenly over the youngest of them, as many as it is told. */
static void fire_all(const struct bench *b)
{
	const struct timespec pause = {.tv_nsec = FIRE_EVERY_NS};
	uint64_t count = b->rate * b->seconds, span, begun_ns;

	if (read(b->child, &span, sizeof(span)) != sizeof(span))
		exit(0);
	begun_ns = now_ns(b);
	for (uint64_t i = 0; i < count;) {
		uint64_t passed_ns = now_ns(b) - begun_ns;

		/* When the queue is full it falls behind. */
		while (i < count && i * SECOND_NS < passed_ns * b->rate &&
		       !bs_trigger(nth_id(b->traces - i * (span / count)),
				   "bench", NULL, NULL, 0))
			i++;
		nanosleep(&pause, NULL);
	}
	say(b, FIRED);
}

static uint64_t piece_traces(const struct bench *b)
{
	uint64_t traces = (PIECE_BYTES + b->trace_bytes - 1) / b->trace_bytes;

	return traces < PIECE_TRACES ? traces : PIECE_TRACES;
}

static void write_all(const struct bench *b)
{
	uint64_t piece = piece_traces(b);

	must_attach();
	for (uint64_t i = 1; i <= b->traces; i++) {
		if (!write_trace(i, b->trace_bytes))
			say(b, LOST);
		if (i % piece == 0)
			say(b, PIECE);
	}
	/* The answer is the end: it is attached as long as it is looked at. */
	say(b, LAST);
	if (b->rate)
		fire_all(b);
	exit(0);
}

/* ----------------------------------------------------------------- node --- */

/* What appliance/attach.py does, for the one process that asks. */
static void attach(struct bench *b, int listener)
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
	b->client = bsn_client_add(b->node, request.pid, request.service,
				   now_ns(b), &b->fds);
	if (b->client <= 0)
		die("the node takes no client");
	reply.arena_bytes = (uint64_t)lseek(b->fds.arena, 0, SEEK_END);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(BS_FDS * sizeof(int));
	memcpy(
		CMSG_DATA(c),
		(int[BS_FDS]) {
			b->fds.arena, b->fds.channel, b->fds.context,
#if BS_ABI_VERSION >= 2
				bsn_policy_fd(b->node),
#endif
		},
		BS_FDS * sizeof(int));
	if (sendmsg(peer, &message, 0) != (ssize_t)sizeof(reply))
		die("the writer does not take its attachment");
	/* The connection stays open with this process. */
}

static void pair_clocks(struct bench *b, uint64_t time_ns)
{
	uint64_t ticks, monotonic_ns, realtime_ns;

	if (b->paired_ns && time_ns - b->paired_ns < SECOND_NS)
		return;
	bsn_clock_read(false, &ticks, &monotonic_ns, &realtime_ns);
	bsn_clock_pair(b->node, ticks, monotonic_ns + b->skipped_ns,
		       realtime_ns + b->skipped_ns);
	b->paired_ns = time_ns;
}

static void poll_once(struct bench *b)
{
	struct bsn_event events[64];
	uint64_t time_ns = now_ns(b);

	pair_clocks(b, time_ns);
	if (bsn_poll(b->node, time_ns) < 0)
		die("a poll failed");
	while (bsn_events(b->node, events, 64) > 0)
		;
	bsn_events_done(b->node);
}

static void new_node(struct bench *b)
{
	char message[256] = "";

	if (bsn_new(&b->config, &b->node, message, sizeof(message)))
		die(message);
	b->paired_ns = 0;
}

/* What is added to the time that a piece took. */
static uint64_t piece_ns(const struct bench *b)
{
	return (uint64_t)((double)b->fill_ns * (double)piece_traces(b) *
			  (double)b->trace_bytes /
			  (double)b->config.pool_bytes);
}

/* A writer that has filled the pool, and the node that holds it. */
static void fill(struct bench *b)
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
	b->writer = fork();
	if (b->writer < 0)
		die("no process");
	b->child = ends[!b->writer];
	close(ends[!!b->writer]);
	if (!b->writer)
		write_all(b);
	new_node(b);
	attach(b, listener);
	close(listener);
	unlink(address.sun_path);
	rmdir(directory);
	for (;;) {
		char what;

		if (read(b->child, &what, 1) != 1)
			die("the writer ended");
		if (what == LOST)
			die("a trace was lost while the pool was filled");
		b->skipped_ns += piece_ns(b);
		/* A poll drains, and the next one grants by what it found. */
		poll_once(b);
		poll_once(b);
		if (what == LAST)
			return;
		if (write(b->child, &what, 1) != 1)
			die("the writer ended");
	}
}

/* ------------------------------------------------------------- measured --- */

static bool is_held(struct bench *b, uint64_t number)
{
	struct bsn_slice slice;
	int64_t bytes = bsn_peek(b->node, nth_id(number), now_ns(b), b->buffer,
				 2 * TRACE_BYTES_MAX, &slice);

	if (bytes < 0)
		die("a trace cannot be looked at");
	return (uint64_t)bytes >= b->trace_bytes && !slice.open_handles &&
	       !(slice.flags & ~(uint32_t)BSN_SLICE_HELD);
}

/* How many traces can be had back whole: of so many, spread evenly over more
 * than the pool can hold. */
static double count_held(struct bench *b, uint64_t samples)
{
	double span = (double)b->config.pool_bytes / (double)b->trace_bytes;
	uint64_t held = 0;

	if (span > (double)b->traces)
		span = (double)b->traces;
	for (uint64_t k = 0; k < samples; k++) {
		double age = ((double)k + 0.5) * span / (double)samples;

		held += is_held(b, b->traces - (uint64_t)age);
	}
	return span * (double)held / (double)samples;
}

static void horizon(struct bench *b, uint64_t samples)
{
	fill(b);
	printf("{\"traces_held\": %.1f, \"traces_written\": %" PRIu64 "}\n",
	       count_held(b, samples), b->traces);
}

/* Collected, and nothing is missing. While a node is still looking, it says
 * something else of the trace. */
static bool is_found(struct bench *b, struct bs_trace_id id, uint32_t *flags)
{
	struct bsn_slice slice;

	if (bsn_slice_info(b->node, id, &slice))
		die("a trace that was asked for is not collected");
	*flags = slice.flags;
	return slice.flags == BSN_SLICE_HELD && slice.bytes >= b->trace_bytes;
}

static void await_found(struct bench *b, struct bs_trace_id id)
{
	uint64_t deadline_ns = now_ns(b) + LOOKUP_TIMEOUT_NS;
	uint32_t flags;

	while (!is_found(b, id, &flags)) {
		if (now_ns(b) > deadline_ns) {
			fprintf(stderr,
				"pool: trace %" PRIu64 " of %" PRIu64
				" was not found: flags %#x\n",
				id.lo, b->traces, flags);
			exit(1);
		}
		poll_once(b);
	}
}

static void look_up(struct bench *b, uint64_t count, uint64_t held,
		    uint64_t *random)
{
	uint64_t cpu_ns, elapsed_ns;
	struct bs_trace_id ids[LOOKUPS_MAX];
	struct bsn_slice slice;

	for (uint64_t i = 0; i < count; i++) {
		*random = *random * 6364136223846793005ull + 1;
		/* Each from a part of its own, so that none is there twice. */
		ids[i] = nth_id(b->traces - i * (held / count) -
				(*random >> 33) % (held / count));
	}
	elapsed_ns = now_ns(b);
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	for (uint64_t i = 0; i < count; i++) {
		if (bsn_collect(b->node, ids[i], ids[i], "bench", now_ns(b),
				&slice))
			die("a trace cannot be collected");
	}
	for (uint64_t i = 0; i < count; i++)
		await_found(b, ids[i]);
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
	elapsed_ns = now_ns(b) - elapsed_ns;
	for (uint64_t i = 0; i < count; i++)
		bsn_slice_release(b->node, ids[i], false, now_ns(b));
	poll_once(b);
	printf("{\"cpu_ns\": %" PRIu64 ", \"elapsed_ns\": %" PRIu64 "}\n",
	       cpu_ns, elapsed_ns);
}

static void lookup(struct bench *b, uint64_t count, uint64_t times)
{
	uint64_t random = 1, held;

	if (count < 1 || count > LOOKUPS_MAX)
		die("1 to 1000 traces at once");
	fill(b);
	held = (uint64_t)(LOOKED_FOR_OF_HELD * count_held(b, LOOKUP_SAMPLES));
	if (held < count)
		die("the pool does not hold as many traces as are looked for");
	for (uint64_t i = 0; i < times; i++)
		look_up(b, count, held, &random);
}

/* The node is gone as by a kill, and its successor goes on with its memory. */
static void restart_once(struct bench *b)
{
	int store = dup(bsn_store_fd(b->node));
	int keep = dup(bsn_keep_fd(b->node));
	uint64_t begun_ns, adopted_ns, polled_ns;

	if (store < 0 || keep < 0)
		die("no file descriptors");
	bsn_free(b->node);
	begun_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	new_node(b);
	pair_clocks(b, now_ns(b));
	if (bsn_adopt_keep(b->node, now_ns(b), keep) ||
	    bsn_adopt_store(b->node, now_ns(b), store) ||
	    bsn_client_adopt(b->node, b->client, b->writer, "pool", now_ns(b),
			     &b->fds) != b->client)
		die("the successor does not adopt what was there");
	adopted_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	if (bsn_poll(b->node, now_ns(b)) < 0)
		die("a poll failed");
	polled_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	close(store);
	close(keep);
	printf("{\"adopt_ns\": %" PRIu64 ", \"first_poll_ns\": %" PRIu64 "}\n",
	       adopted_ns - begun_ns, polled_ns - adopted_ns);
}

static void restart(struct bench *b, uint64_t times)
{
	fill(b);
	for (uint64_t i = 0; i < times; i++)
		restart_once(b);
	if (!is_held(b, b->traces))
		die("the successor does not hold the youngest trace");
}

/* As the daemon does it: what is triggered is collected, and its slice is read and
 * released when its search is over. */
struct triggered {
	uint64_t seen;	/* triggers */
	uint64_t whole; /* slices that were released */
	uint64_t waited_ns, waited_most_ns;
};

/* While slices are held the daemon looks so often (appliance/pump.py). */
#define HELD_WAIT_NS 20000000

static void take_event(struct bench *b, const struct bsn_event *e,
		       struct triggered *t)
{
	struct bsn_slice slice;
	uint64_t waited_ns;

	if (e->kind == BSN_EVENT_TRIGGER) {
		t->seen++;
		if (bsn_collect(b->node, e->id, e->id, e->trigger, now_ns(b),
				&slice))
			die("a trace cannot be collected");
		return;
	}
	if (e->kind != BSN_EVENT_SLICE_CHANGED ||
	    bsn_slice_info(b->node, e->id, &slice) ||
	    slice.flags & BSN_SLICE_SEARCHING)
		return;
	if (slice.flags != BSN_SLICE_HELD || slice.bytes < b->trace_bytes)
		die("a trace that was triggered is not whole");
	if (bsn_slice_read(b->node, e->id, 0, b->buffer, 2 * TRACE_BYTES_MAX) !=
	    (int64_t)slice.bytes)
		die("a slice cannot be read");
	waited_ns = now_ns(b) - slice.collected_ns;
	t->waited_ns += waited_ns;
	if (waited_ns > t->waited_most_ns)
		t->waited_most_ns = waited_ns;
	t->whole++;
	bsn_slice_release(b->node, e->id, false, now_ns(b));
}

static void poll_triggered(struct bench *b, struct triggered *t)
{
	struct bsn_event events[256];
	uint64_t time_ns = now_ns(b);
	int count;

	pair_clocks(b, time_ns);
	if (bsn_poll(b->node, time_ns) < 0)
		die("a poll failed");
	while ((count = bsn_events(b->node, events, 256)) > 0) {
		for (int i = 0; i < count; i++)
			take_event(b, &events[i], t);
		bsn_events_done(b->node);
	}
}

static void triggers(struct bench *b)
{
	struct triggered t = {0};
	struct bsn_metrics before, after;
	uint64_t cpu_ns, elapsed_ns, span;
	char said;

	fill(b);
	span = (uint64_t)(LOOKED_FOR_OF_HELD * count_held(b, LOOKUP_SAMPLES));
	if (span < b->rate * b->seconds)
		die("the pool does not hold as many traces as are triggered");
	bsn_get_metrics(b->node, &before);
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	elapsed_ns = now_ns(b);
	if (write(b->child, &(char){LAST}, 1) != 1 ||
	    write(b->child, &span, sizeof(span)) != sizeof(span))
		die("the writer ended");
	do {
		bsn_wait(b->node, HELD_WAIT_NS);
		poll_triggered(b, &t);
	} while (recv(b->child, &said, 1, MSG_DONTWAIT) != 1);
	while (!t.whole || t.whole < b->rate * b->seconds) {
		if (now_ns(b) - elapsed_ns >
		    b->seconds * SECOND_NS + LOOKUP_TIMEOUT_NS)
			die("not all triggers came to a slice");
		bsn_wait(b->node, HELD_WAIT_NS);
		poll_triggered(b, &t);
	}
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
	elapsed_ns = now_ns(b) - elapsed_ns;
	bsn_get_metrics(b->node, &after);
	printf("{\"cpu_ns\": %" PRIu64 ", \"elapsed_ns\": %" PRIu64
	       ", \"triggers\": %" PRIu64 ", \"passes\": %" PRIu64
	       ", \"entries\": %" PRIu64 ", \"found_after_ns\": %" PRIu64
	       ", \"found_after_most_ns\": %" PRIu64 "}\n",
	       cpu_ns, elapsed_ns, t.seen,
	       passes_of(&after) - passes_of(&before),
	       entries_of(&after) - entries_of(&before), t.waited_ns / t.whole,
	       t.waited_most_ns);
}

/* ----------------------------------------------------------------- main --- */

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";
	struct bench b = {.client = 0};

	if (argc < 5)
		die("usage: see the head of pool.c");
	/* As `backsight-node` has it by default. */
	b.config = (struct bsn_config){
		.node_name = "bench",
		.pool_bytes = number(argv[2]),
		.arena_bytes = number(argv[2]),
		.store_bytes = 64 << 20,
		.trace_bytes_max = 16 << 20,
		.percentage_threshold = UINT64_MAX,
		.reclaim_percent = 98,
		.clients_max = 256,
		.tombstones = 65536,
		.ticks_per_s = SECOND_NS,
	};
	b.trace_bytes = number(argv[3]);
	if (b.trace_bytes < 1 || b.trace_bytes > TRACE_BYTES_MAX)
		die("TRACE_BYTES is 1 to 1048576");
	b.traces = (uint64_t)(WRITTEN_OF_POOL * (double)b.config.pool_bytes /
			      (double)b.trace_bytes);
	if (!strcmp(name, "triggers") && argc == 6) {
		b.rate = number(argv[4]);
		b.seconds = number(argv[5]);
		if (!b.rate || !b.seconds)
			die("at least one trigger a second, for a second");
#if BS_ABI_VERSION >= 2
		/* The others look for one set of traces, and poll without a pause. */
		b.config.thread_cpu_ns = bsn_thread_cpu_ns;
#endif
	}
	b.buffer = malloc(2 * TRACE_BYTES_MAX);
	if (!b.buffer)
		die("out of memory");
	if (!strcmp(name, "horizon") && argc == 6) {
		b.fill_ns = number(argv[5]) * SECOND_NS;
		horizon(&b, number(argv[4]));
	} else if (!strcmp(name, "lookup") && argc == 6)
		lookup(&b, number(argv[4]), number(argv[5]));
	else if (!strcmp(name, "restart") && argc == 5)
		restart(&b, number(argv[4]));
	else if (!strcmp(name, "triggers") && argc == 6)
		triggers(&b);
	else
		die("usage: see the head of pool.c");
	bsn_free(b.node);
	free(b.buffer);
	close(b.child);
	waitpid(b.writer, NULL, 0);
	return 0;
}
