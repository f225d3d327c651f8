/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands for many nodes that report traces to one coordinator, over real gRPC.
 *
 *   fleet PLAN PORT RATE_PER_S IN_FLIGHT WARM_UP_MS WINDOW_MS DRAIN_MS RELEASED SEED
 *
 * PLAN is bench/control/plan.py's: who the nodes are, and of each trace what each of
 * its three nodes says, encoded. A trace is fired on its first node, which says
 * so, how much it has, and sends its slice. The others do when they are asked.
 * That is what backsight-node does for a trace that is over, without the time
 * that it takes to look for it.
 *
 * RATE_PER_S traces are fired a second, at random moments (0: no rate), or as
 * many as keep IN_FLIGHT of them not durable. A trace is durable once the
 * coordinator acknowledged its trigger and all three slices.
 *
 * Each node has two connections, as a node that reports something has. All are
 * made first, then the program says "connected". Told "go" on standard input, it
 * fires for WARM_UP_MS, says "begin", for WINDOW_MS, says "end", and waits until all
 * traces are durable (RELEASED 1: and all nodes are told to forget them), DRAIN_MS at
 * most. Then it says what it measured, in a line of JSON, and stays connected until
 * its standard input ends.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "common.h"
#include "stream.h"
#include "wire.h"

#define NODES_A_TRACE 3u

/* Nodes that are not welcome yet: of an address that has many connections on which nothing is
 * called yet, the coordinator ends some. */
#define GREETINGS_AT_ONCE 16u
#define EVENTS_AT_ONCE 256
#define MS_NS 1000000ull

/* Features (protocol/versions.py): a message may carry several chunks, so many, and
 * so many bytes (appliance/uplink.py). */
#define CHUNK_LISTS 4u
#define LIST_CHUNKS 256u
#define LIST_BYTES (256u << 10)

/* Fields of protocol/backsight.proto. */
enum {
	BATCH_MESSAGES = 1,
	COORDINATOR_WELCOME = 1,
	COORDINATOR_REFUSED = 2,
	COORDINATOR_COLLECT = 3,
	COORDINATOR_TRIGGER_ACK = 4,
	COORDINATOR_RELEASE = 6,
	COORDINATOR_CLOCK_PROBE = 7,
	WELCOME_FEATURES = 3,
	REFUSED_REASON = 1,
	COLLECT_TRACES = 2,
	TRIGGER_ACK_GROUP = 1,
	GROUP_PRIMARY = 2,
	RELEASE_TRACE = 1,
	CLOCK_PROBE_NUMBER = 1,
	NODE_CLOCK_REPLY = 5,
	CLOCK_REPLY_NUMBER = 1,
	CLOCK_REPLY_RECEIVED_NS = 2,
	CLOCK_REPLY_SENT_NS = 3,
	CHUNK_FURTHER = 8,
	REPLY_ACKS = 1,
	REPLY_CREDIT = 2,
	ACK_TRACE = 1,
	ACK_OFFSET = 2,
};

/* ----------------------------------------------------------------- plan --- */

struct span_of_plan {
	uint64_t offset;
	uint64_t size;
};

struct plan_node {
	struct span_of_plan hello;   /* a NodeBatch */
	struct span_of_plan opening; /* a SliceChunk */
};

struct plan_part {
	uint64_t node;
	uint64_t slice_bytes;
	struct span_of_plan status; /* a NodeBatch */
	struct span_of_plan chunk;  /* a SliceChunk: all of the slice */
};

/* The last eight bytes of the id are its number, from 1 on, big-endian. */
struct plan_trace {
	uint8_t id[16];
	struct span_of_plan fired; /* a NodeBatch */
	struct plan_part parts[NODES_A_TRACE];
};

struct plan_head {
	uint64_t n_nodes;
	uint64_t n_traces;
};

/* ---------------------------------------------------------------- fleet --- */

/* A chunk that waits for credit, or for the end of the turn. */
struct waiting {
	const struct plan_part *part;
	struct waiting *next;
};

struct node {
	struct stream control;
	struct stream slices;
	struct bytes said; /* a NodeBatch, sent at the end of the turn */
	struct waiting *first;
	struct waiting **last;
	uint64_t credit;
	bool is_welcome;
	bool has_lists;
	bool is_dirty;
};

struct trace {
	uint64_t fired_ns; /* when it was due; 0: not yet */
	uint64_t durable_ns;
	bool in_window;
	bool is_acknowledged;
	uint8_t durable; /* a bit a part */
	uint8_t released;
	uint8_t reported;
};

struct fleet {
	const uint8_t *bytes; /* the plan */
	const struct plan_node *plan_nodes;
	const struct plan_trace *plan_traces;
	uint64_t n_nodes;
	uint64_t n_traces;
	struct node *nodes;
	struct trace *traces;
	struct waiting *waiting; /* NODES_A_TRACE a trace */
	struct node **dirty;
	uint64_t n_dirty;
	uint64_t n_welcome;
	uint64_t fired;
	uint64_t durable;
	uint64_t released;
	uint64_t window_durable;
	uint64_t sent; /* messages of gRPC */
	uint64_t received;
	uint64_t late_max_ns;
	int epoll;
};

static uint64_t now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

static void touch(struct fleet *fleet, struct node *node)
{
	if (node->is_dirty)
		return;
	node->is_dirty = true;
	fleet->dirty[fleet->n_dirty++] = node;
}

static void say(struct fleet *fleet, struct node *node,
		struct span_of_plan what)
{
	bytes_add(&node->said, fleet->bytes + what.offset, what.size);
	touch(fleet, node);
}

/* The trace of an id, and its number from 0 on. */
static uint64_t number_of(const struct fleet *fleet, struct wire id)
{
	uint64_t number;

	if (id.end - id.at != 16)
		die("a trace id has not 16 bytes");
	memcpy(&number, id.at + 8, sizeof(number));
	number = be64toh(number) - 1;
	if (number >= fleet->n_traces ||
	    memcmp(fleet->plan_traces[number].id, id.at, 16) != 0)
		die("the coordinator speaks of a trace that nobody fired");
	return number;
}

static unsigned part_of(const struct fleet *fleet, uint64_t number,
			const struct node *node)
{
	const struct plan_part *parts = fleet->plan_traces[number].parts;

	for (unsigned i = 0; i < NODES_A_TRACE; i++)
		if (&fleet->nodes[parts[i].node] == node)
			return i;
	die("the coordinator asks a node that has no part in a trace");
}

static void report(struct fleet *fleet, uint64_t number, unsigned i)
{
	const struct plan_part *part = &fleet->plan_traces[number].parts[i];
	struct node *node = &fleet->nodes[part->node];
	struct waiting *waiting = &fleet->waiting[number * NODES_A_TRACE + i];

	say(fleet, node, part->status);
	if (fleet->traces[number].reported & 1u << i)
		return; /* asked again: the slice is on its way */
	fleet->traces[number].reported |= (uint8_t)(1u << i);
	*waiting = (struct waiting){.part = part};
	*node->last = waiting;
	node->last = &waiting->next;
}

static void fire(struct fleet *fleet, uint64_t due_ns, bool in_window)
{
	uint64_t number = fleet->fired++;
	const struct plan_trace *plan = &fleet->plan_traces[number];
	struct trace *trace = &fleet->traces[number];
	uint64_t late_ns = now_ns() - due_ns;

	if (in_window && late_ns > fleet->late_max_ns)
		fleet->late_max_ns = late_ns;
	trace->fired_ns = due_ns;
	trace->in_window = in_window;
	say(fleet, &fleet->nodes[plan->parts[0].node], plan->fired);
	report(fleet, number, 0);
}

static void look_whether_durable(struct fleet *fleet, struct trace *trace)
{
	if (trace->durable_ns || !trace->is_acknowledged ||
	    trace->durable != (1u << NODES_A_TRACE) - 1)
		return;
	trace->durable_ns = now_ns();
	fleet->durable++;
}

/* -------------------------------------------------------------- messages --- */

static struct fleet *the_fleet; /* nghttp2 hands on one pointer: the stream */

static void on_clock_probe(struct fleet *fleet, struct node *node,
			   struct wire probe)
{
	const uint64_t received_ns = clock_ns(CLOCK_REALTIME);
	struct wire_field field = {0};
	uint8_t reply[64], message[80], batch[96];
	size_t size = 0, message_size, batch_size;

	wire_find(probe, CLOCK_PROBE_NUMBER, &field);
	size += wire_put_tag(reply + size, CLOCK_REPLY_NUMBER, WIRE_VARINT);
	size += wire_put_varint(reply + size, field.value);
	size += wire_put_fixed64(reply + size, CLOCK_REPLY_RECEIVED_NS,
				 received_ns);
	size += wire_put_fixed64(reply + size, CLOCK_REPLY_SENT_NS,
				 clock_ns(CLOCK_REALTIME));
	message_size = wire_put_tag(message, NODE_CLOCK_REPLY, WIRE_BYTES);
	message_size += wire_put_varint(message + message_size, size);
	memcpy(message + message_size, reply, size);
	message_size += size;
	batch_size = wire_put_tag(batch, BATCH_MESSAGES, WIRE_BYTES);
	batch_size += wire_put_varint(batch + batch_size, message_size);
	memcpy(batch + batch_size, message, message_size);
	batch_size += message_size;
	bytes_add(&node->said, batch, batch_size);
	touch(fleet, node);
}

static void on_collect(struct fleet *fleet, struct node *node,
		       struct wire collect)
{
	struct wire_field field;

	while (wire_next(&collect, &field)) {
		if (field.number == COLLECT_TRACES) {
			uint64_t number = number_of(fleet, field.bytes);

			report(fleet, number, part_of(fleet, number, node));
		}
	}
}

static void on_trigger_ack(struct fleet *fleet, struct wire ack)
{
	struct wire_field group, primary;
	struct trace *trace;

	if (!wire_find(ack, TRIGGER_ACK_GROUP, &group) ||
	    !wire_find(group.bytes, GROUP_PRIMARY, &primary))
		die("an acknowledgement names no trace");
	trace = &fleet->traces[number_of(fleet, primary.bytes)];
	trace->is_acknowledged = true;
	look_whether_durable(fleet, trace);
}

static void on_release(struct fleet *fleet, struct node *node,
		       struct wire release)
{
	struct wire_field field;
	uint64_t number;
	uint8_t bit;

	if (!wire_find(release, RELEASE_TRACE, &field))
		die("a release names no trace");
	number = number_of(fleet, field.bytes);
	bit = (uint8_t)(1u << part_of(fleet, number, node));
	if (!(fleet->traces[number].released & bit))
		fleet->released++;
	fleet->traces[number].released |= bit;
}

static void on_control(struct stream *stream, const uint8_t *data, size_t size)
{
	struct fleet *fleet = the_fleet;
	struct node *node = stream->owner;
	struct wire batch = {data, data + size};
	struct wire_field message, said, field;

	fleet->received++;
	while (wire_next(&batch, &message)) {
		if (!wire_next(&message.bytes, &said))
			continue;
		switch (said.number) {
		case COORDINATOR_WELCOME:
			node->is_welcome = true;
			fleet->n_welcome++;
			node->has_lists = wire_find(said.bytes,
						    WELCOME_FEATURES, &field) &&
					  field.value & CHUNK_LISTS;
			break;
		case COORDINATOR_REFUSED:
			if (!wire_find(said.bytes, REFUSED_REASON, &field))
				die("a node is refused, without a reason");
			fprintf(stderr, "fleet: a node is refused: %.*s\n",
				(int)(field.bytes.end - field.bytes.at),
				(const char *)field.bytes.at);
			exit(1);
		case COORDINATOR_COLLECT:
			on_collect(fleet, node, said.bytes);
			break;
		case COORDINATOR_TRIGGER_ACK:
			on_trigger_ack(fleet, said.bytes);
			break;
		case COORDINATOR_RELEASE:
			on_release(fleet, node, said.bytes);
			break;
		case COORDINATOR_CLOCK_PROBE:
			on_clock_probe(fleet, node, said.bytes);
			break;
		default:
			break;
		}
	}
	if (batch.at != batch.end)
		die("a message of the coordinator makes no sense");
}

static void on_ack(struct fleet *fleet, struct node *node, struct wire ack)
{
	struct wire_field id, offset = {0};
	uint64_t number;
	unsigned i;

	if (!wire_find(ack, ACK_TRACE, &id))
		die("an acknowledgement names no trace");
	wire_find(ack, ACK_OFFSET, &offset);
	number = number_of(fleet, id.bytes);
	i = part_of(fleet, number, node);
	if (offset.value < fleet->plan_traces[number].parts[i].slice_bytes)
		return;
	fleet->traces[number].durable |= (uint8_t)(1u << i);
	look_whether_durable(fleet, &fleet->traces[number]);
}

static void on_slice_reply(struct stream *stream, const uint8_t *data,
			   size_t size)
{
	struct fleet *fleet = the_fleet;
	struct node *node = stream->owner;
	struct wire reply = {data, data + size};
	struct wire_field field;

	fleet->received++;
	while (wire_next(&reply, &field)) {
		if (field.number == REPLY_ACKS)
			on_ack(fleet, node, field.bytes);
		else if (field.number == REPLY_CREDIT)
			node->credit += field.value;
	}
	if (reply.at != reply.end)
		die("a message of the coordinator makes no sense");
	touch(fleet, node);
}

/* --------------------------------------------------------------- sending --- */

/* As many of the chunks that wait as one message and the credit allow; whether any. */
static bool send_chunks(struct fleet *fleet, struct node *node)
{
	static struct bytes message;
	uint64_t bytes = 0;
	unsigned count = 0, count_max = node->has_lists ? LIST_CHUNKS : 1;

	message.size = 0;
	while (node->first && count < count_max) {
		const struct plan_part *part = node->first->part;
		uint8_t head[16];
		size_t size;

		if (part->slice_bytes > node->credit ||
		    (count && bytes + part->slice_bytes > LIST_BYTES))
			break;
		node->credit -= part->slice_bytes;
		bytes += part->slice_bytes;
		if (count++) {
			size = wire_put_tag(head, CHUNK_FURTHER, WIRE_BYTES);
			size += wire_put_varint(head + size, part->chunk.size);
			bytes_add(&message, head, size);
		}
		bytes_add(&message, fleet->bytes + part->chunk.offset,
			  part->chunk.size);
		node->first = node->first->next;
		if (!node->first)
			node->last = &node->first;
	}
	if (!count)
		return false;
	stream_send(&node->slices, message.data, message.size);
	fleet->sent++;
	return true;
}

static void flush(struct fleet *fleet)
{
	for (uint64_t i = 0; i < fleet->n_dirty; i++) {
		struct node *node = fleet->dirty[i];

		node->is_dirty = false;
		if (node->said.size) {
			stream_send(&node->control, node->said.data,
				    node->said.size);
			node->said.size = 0;
			fleet->sent++;
		}
		while (send_chunks(fleet, node))
			;
		stream_flush(&node->control);
		stream_flush(&node->slices);
	}
	fleet->n_dirty = 0;
}

/* Hear whatever comes until then, at most once, and answer. */
static void turn(struct fleet *fleet, uint64_t until_ns)
{
	struct epoll_event events[EVENTS_AT_ONCE];
	uint64_t now = now_ns(), wait_ns = until_ns > now ? until_ns - now : 0;
	const struct timespec timeout = {(time_t)(wait_ns / SECOND_NS),
					 (long)(wait_ns % SECOND_NS)};
	int n;

	flush(fleet);
	n = epoll_pwait2(fleet->epoll, events, EVENTS_AT_ONCE, &timeout, NULL);
	if (n < 0 && errno != EINTR)
		die("epoll does not wait");
	for (int i = 0; i < n; i++) {
		struct stream *stream = events[i].data.ptr;

		if (!stream)
			continue; /* standard input */
		if (events[i].events & ~(uint32_t)EPOLLOUT)
			stream_read(stream);
		touch(fleet, stream->owner);
	}
	flush(fleet);
}

/* ----------------------------------------------------------- connections --- */

static void open_one(struct fleet *fleet, struct stream *stream,
		     struct node *node, const struct sockaddr_in *to,
		     const char *path)
{
	struct epoll_event event = {
		.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
		.data.ptr = stream,
	};

	stream->owner = node;
	stream_open(stream, to, path);
	if (epoll_ctl(fleet->epoll, EPOLL_CTL_ADD, stream->fd, &event))
		die("epoll takes no more");
}

static void open_all(struct fleet *fleet, uint16_t port)
{
	const struct sockaddr_in to = {
		.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};

	for (uint64_t i = 0; i < fleet->n_nodes; i++) {
		struct node *node = &fleet->nodes[i];
		const struct plan_node *plan = &fleet->plan_nodes[i];

		node->last = &node->first;
		node->control.on_message = on_control;
		node->slices.on_message = on_slice_reply;
		open_one(fleet, &node->control, node, &to,
			 "/backsight.v1.Coordinator/Control");
		say(fleet, node, plan->hello);
		open_one(fleet, &node->slices, node, &to,
			 "/backsight.v1.Coordinator/Slices");
		stream_send(&node->slices, fleet->bytes + plan->opening.offset,
			    plan->opening.size);
		while (i + 1 - fleet->n_welcome >= GREETINGS_AT_ONCE ||
		       (i + 1 == fleet->n_nodes &&
			fleet->n_welcome < fleet->n_nodes))
			turn(fleet, now_ns() + SECOND_NS);
	}
}

/* ----------------------------------------------------------------- firing --- */

struct load {
	double rate_per_s;
	uint64_t in_flight;
	uint64_t next_ns; /* when the next is due, of a rate */
	uint16_t dice[3];
};

/* Gaps as between events of many that know nothing of each other. */
static uint64_t gap_ns(struct load *load)
{
	return (uint64_t)(-log(1 - erand48(load->dice)) * (double)SECOND_NS /
			  load->rate_per_s);
}

/* Until then, or the end of the plan. */
static void fire_until(struct fleet *fleet, struct load *load,
		       uint64_t until_ns, bool in_window)
{
	for (;;) {
		uint64_t now = now_ns(), wait_ns = until_ns;

		if (now >= until_ns)
			return;
		while (load->rate_per_s > 0 && load->next_ns <= now &&
		       fleet->fired < fleet->n_traces) {
			fire(fleet, load->next_ns, in_window);
			load->next_ns += gap_ns(load);
		}
		while (fleet->fired - fleet->durable < load->in_flight &&
		       fleet->fired < fleet->n_traces)
			fire(fleet, now, in_window);
		if (fleet->fired == fleet->n_traces)
			return;
		if (load->rate_per_s > 0 && load->next_ns < wait_ns)
			wait_ns = load->next_ns;
		turn(fleet, wait_ns);
	}
}

static bool is_drained(const struct fleet *fleet, bool released)
{
	return fleet->durable == fleet->fired &&
	       (!released || fleet->released == NODES_A_TRACE * fleet->fired);
}

/* ------------------------------------------------------------- what it says --- */

static int by_value(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static double at_ms(const uint64_t *sorted, uint64_t n, double share)
{
	return n ? (double)sorted[(uint64_t)((double)(n - 1) * share)] / MS_NS
		 : 0;
}

static void print(const struct fleet *fleet, uint64_t window_ns,
		  uint64_t window_cpu_ns)
{
	uint64_t *latency_ns = calloc(fleet->fired + 1, sizeof(*latency_ns));
	uint64_t n = 0, in_window = 0;

	if (!latency_ns)
		die("no memory");
	for (uint64_t i = 0; i < fleet->fired; i++) {
		const struct trace *trace = &fleet->traces[i];

		in_window += trace->in_window;
		if (trace->in_window && trace->durable_ns)
			latency_ns[n++] = trace->durable_ns - trace->fired_ns;
	}
	qsort(latency_ns, n, sizeof(*latency_ns), by_value);
	printf("{\"fired\": %" PRIu64 ", \"durable\": %" PRIu64
	       ", \"released\": %" PRIu64 ", \"window_fired\": %" PRIu64
	       ", \"window_durable\": %" PRIu64
	       ", \"window_s\": %.3f, \"p50_ms\": %.2f, \"p90_ms\": %.2f"
	       ", \"p99_ms\": %.2f, \"max_ms\": %.2f, \"late_max_ms\": %.2f"
	       ", \"fleet_cpu_share\": %.3f, \"sent\": %" PRIu64
	       ", \"received\": %" PRIu64 "}\n",
	       fleet->fired, fleet->durable, fleet->released, in_window,
	       fleet->window_durable, (double)window_ns / SECOND_NS,
	       at_ms(latency_ns, n, 0.5), at_ms(latency_ns, n, 0.9),
	       at_ms(latency_ns, n, 0.99), at_ms(latency_ns, n, 1),
	       (double)fleet->late_max_ns / MS_NS,
	       (double)window_cpu_ns / (double)window_ns, fleet->sent,
	       fleet->received);
	fflush(stdout);
	free(latency_ns);
}

static void tell(const char *what)
{
	printf("%s\n", what);
	fflush(stdout);
}

/* Whether standard input has a line, or its end. */
static bool is_told(void)
{
	struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};

	return poll(&input, 1, 0) > 0;
}

/* Answer the coordinator until a line comes; false: standard input ended. */
static bool wait_for_line(struct fleet *fleet)
{
	struct epoll_event event = {.events = EPOLLIN};
	char line[64];

	if (epoll_ctl(fleet->epoll, EPOLL_CTL_ADD, STDIN_FILENO, &event))
		die("standard input is no pipe");
	while (!is_told())
		turn(fleet, now_ns() + SECOND_NS);
	if (epoll_ctl(fleet->epoll, EPOLL_CTL_DEL, STDIN_FILENO, NULL))
		die("epoll does not forget");
	return read(STDIN_FILENO, line, sizeof(line)) > 0;
}

static void load_plan(struct fleet *fleet, const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	const struct plan_head *head;
	struct stat about;

	if (fd < 0 || fstat(fd, &about))
		die("the plan cannot be read");
	head = mmap(NULL, (size_t)about.st_size, PROT_READ,
		    MAP_PRIVATE | MAP_POPULATE, fd, 0);
	if (head == MAP_FAILED)
		die("the plan cannot be mapped");
	close(fd);
	fleet->bytes = (const uint8_t *)head;
	fleet->n_nodes = head->n_nodes;
	fleet->n_traces = head->n_traces;
	fleet->plan_nodes = (const struct plan_node *)(head + 1);
	fleet->plan_traces =
		(const struct plan_trace *)(fleet->plan_nodes + head->n_nodes);
	fleet->nodes = calloc(fleet->n_nodes, sizeof(*fleet->nodes));
	fleet->dirty = calloc(fleet->n_nodes, sizeof(struct node *));
	fleet->traces = calloc(fleet->n_traces, sizeof(*fleet->traces));
	fleet->waiting = calloc(fleet->n_traces * NODES_A_TRACE,
				sizeof(*fleet->waiting));
	fleet->epoll = epoll_create1(EPOLL_CLOEXEC);
	if (!fleet->nodes || !fleet->dirty || !fleet->traces ||
	    !fleet->waiting || fleet->epoll < 0)
		die("no memory");
}

int main(int argc, char **argv)
{
	struct fleet fleet = {0};
	struct load load = {0};
	uint64_t warm_up_ns, window_ns, drain_ns, begun_ns, cpu_ns, until_ns,
		durable;
	bool released;

	if (argc != 10)
		die("nine arguments, see the head of the source");
	the_fleet = &fleet;
	load_plan(&fleet, argv[1]);
	load.rate_per_s = (double)number(argv[3]);
	load.in_flight = number(argv[4]);
	warm_up_ns = number(argv[5]) * MS_NS;
	window_ns = number(argv[6]) * MS_NS;
	drain_ns = number(argv[7]) * MS_NS;
	released = number(argv[8]) > 0;
	load.dice[0] = (uint16_t)number(argv[9]);
	open_all(&fleet, (uint16_t)number(argv[2]));
	tell("connected");
	if (!wait_for_line(&fleet))
		return 0;

	fleet.sent = fleet.received = 0;
	begun_ns = load.next_ns = now_ns();
	fire_until(&fleet, &load, begun_ns + warm_up_ns, false);
	tell("begin");
	begun_ns = now_ns();
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	durable = fleet.durable;
	fire_until(&fleet, &load, begun_ns + window_ns, true);
	window_ns = now_ns() - begun_ns;
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
	fleet.window_durable = fleet.durable - durable;
	tell("end");
	until_ns = now_ns() + drain_ns;
	while (!is_drained(&fleet, released) && now_ns() < until_ns)
		turn(&fleet, until_ns);
	print(&fleet, window_ns, cpu_ns);
	while (wait_for_line(&fleet))
		;
	return 0;
}
