/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library of today beside a node of the day when ABI 2 was frozen: what it
 * writes, loses and fires is where such a node looks for it, and what such a node
 * tells it, it does.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "abi2.h"
#include "backsight.h"
#include "check.h"

#define SEGMENTS 4u
#define RECORD_BYTES 100u
#define PATIENCE_MS 60000

struct node {
	char directory[64], path[96];
	int listener, connection;
	int fds[ABI2_FDS];
	struct abi2_request request;
	unsigned char *arena;
	struct abi2_channel *channel;
	struct abi2_grants *grants;
	struct abi2_area *areas;
	struct abi2_context *context;
	struct abi2_policy *policy;
};

static const struct bs_trace_id id = {0x0af7651916cd43dd, 0x8448eb211c80319c};

/* ----------------------------------------------------------------- node --- */

static void *make(int *fd, size_t bytes)
{
	void *p;

	*fd = memfd_create("frozen", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK(*fd >= 0);
	CHECK_EQ(ftruncate(*fd, (off_t)bytes), 0);
	CHECK_EQ(fcntl(*fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK), 0);
	p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	CHECK(p != MAP_FAILED);
	return p;
}

static struct abi2_context *make_context(int *fd)
{
	struct abi2_context *c = make(fd, sizeof(*c));

	c->magic = ABI2_MAGIC;
	c->version = ABI2_VERSION;
	c->thread_slots = ABI2_SLOTS;
	c->trigger_cells = ABI2_CELLS;
	for (uint32_t i = 0; i < ABI2_CELLS; i++)
		c->cells[i].seq = i;
	return c;
}

static struct abi2_policy *make_policy(int *fd, uint64_t number,
				       uint64_t threshold)
{
	struct abi2_policy *p = make(fd, ABI2_POLICY_BYTES);

	p->magic = ABI2_MAGIC;
	p->version = ABI2_VERSION;
	p->bytes = ABI2_POLICY_BYTES;
	p->number = number;
	p->percentage_threshold = threshold;
	CHECK_EQ(fcntl(*fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
	return p;
}

static void fill(struct node *n)
{
	unsigned char *channel;

	n->arena = make(&n->fds[0], (size_t)SEGMENTS * ABI2_SEGMENT_BYTES);
	channel = make(&n->fds[1], ABI2_CHANNEL_BYTES);
	n->context = make_context(&n->fds[2]);
	n->policy = make_policy(&n->fds[3], 1, ABI2_PERCENTAGE_ALL);
	n->channel = (void *)channel;
	n->grants = (void *)(channel + ABI2_GRANTS_OFFSET);
	n->areas = (void *)(channel + ABI2_AREAS_OFFSET);

	n->channel->magic = ABI2_MAGIC;
	n->channel->version = ABI2_VERSION;
	n->channel->arena_bytes = (uint64_t)SEGMENTS * ABI2_SEGMENT_BYTES;
	n->channel->ticks_per_s = 1000000000;
	n->channel->node_id = bs_node_id("frozen");
	memcpy(n->channel->node_name, "frozen", 6);

	for (uint32_t i = 0; i < SEGMENTS; i++) {
		n->grants->entries[i].segment = i | ABI2_GRANT_FRESH;
		n->grants->entries[i].generation = 7 + i;
	}
	__atomic_store_n(&n->grants->head, SEGMENTS, __ATOMIC_RELEASE);
}

static void node_open(struct node *n)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	memset(n, 0, sizeof(*n));
	make_directory(n->directory, sizeof(n->directory));
	snprintf(n->path, sizeof(n->path), "%s/node.sock", n->directory);
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", n->path);
	n->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(n->listener >= 0);
	CHECK_EQ(bind(n->listener, (void *)&address, sizeof(address)), 0);
	CHECK_EQ(listen(n->listener, 8), 0);
	CHECK_EQ(setenv("BACKSIGHT_SOCKET", n->path, 1), 0);
	fill(n);
}

static void await(int fd)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};

	CHECK_EQ(poll(&p, 1, PATIENCE_MS), 1);
}

/* Its packet may be longer than what we know of. */
static void receive_request(struct node *n)
{
	await(n->listener);
	n->connection = accept4(n->listener, NULL, NULL, SOCK_CLOEXEC);
	CHECK(n->connection >= 0);
	await(n->connection);
	CHECK(recv(n->connection, &n->request, sizeof(n->request), 0) ==
	      sizeof(n->request));
	CHECK_EQ(n->request.magic, ABI2_MAGIC);
	CHECK(n->request.oldest <= ABI2_VERSION);
	CHECK(n->request.version >= ABI2_VERSION);
	CHECK_EQ(n->request.pid, getpid());
}

static void send_with_fds(const struct node *n, const void *packet,
			  size_t bytes, const int *fds, size_t n_fds)
{
	union {
		char bytes[CMSG_SPACE(ABI2_FDS * sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct iovec iov = {(void *)packet, bytes};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};

	if (n_fds) {
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		control.align.cmsg_level = SOL_SOCKET;
		control.align.cmsg_type = SCM_RIGHTS;
		control.align.cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		memcpy(CMSG_DATA(&control.align), fds, n_fds * sizeof(int));
	}
	CHECK_EQ(sendmsg(n->connection, &message, MSG_NOSIGNAL), bytes);
}

static void answer(const struct node *n, bool resumed)
{
	const struct abi2_reply reply = {
		.magic = ABI2_MAGIC,
		.version = ABI2_VERSION,
		.resumed = resumed,
		.token = {1, 2},
		.arena_bytes = (uint64_t)SEGMENTS * ABI2_SEGMENT_BYTES,
	};

	send_with_fds(n, &reply, sizeof(reply), n->fds, resumed ? 0 : ABI2_FDS);
}

static void tell(const struct node *n, uint32_t kind, uint64_t number, int fd)
{
	const struct abi2_news news = {ABI2_MAGIC, kind, number};

	send_with_fds(n, &news, sizeof(news), &fd, 1);
}

static void await_answer(const struct node *n, uint64_t number)
{
	struct abi2_news news;

	await(n->connection);
	CHECK_EQ(recv(n->connection, &news, sizeof(news), 0), sizeof(news));
	CHECK_EQ(news.magic, ABI2_MAGIC);
	CHECK_EQ(news.kind, ABI2_NEWS_CONTEXT);
	CHECK_EQ(news.number, number);
}

static void attach(struct node *n)
{
	/* The library attaches with its first use. */
	bs_wait_attached(0);
	receive_request(n);
	answer(n, false);
	CHECK_EQ(bs_wait_attached(PATIENCE_MS), 0);
}

static void node_close(struct node *n)
{
	bs_shutdown();
	close(n->connection);
	close(n->listener);
	unlink(n->path);
	rmdir(n->directory);
}

/* -------------------------------------------------------------- reading --- */

/* The run of the index in segment 0, which holds so many records. */
static const struct abi2_run *check_run(const struct node *n, uint32_t index,
					uint32_t offset, uint32_t flags,
					struct bs_trace_id of, uint32_t records)
{
	const unsigned char *end = n->arena + ABI2_SEGMENT_BYTES;
	uint64_t mix = abi2_mix(of.hi, of.lo);
	uint64_t entry;
	const struct abi2_run *run = (const void *)(n->arena + offset);
	size_t header = flags & ABI2_FIRST ? 16 : 20;
	const struct abi2_record *r;

	memcpy(&entry, end - 8 * (index + 1), sizeof(entry));
	CHECK_EQ(entry, abi2_entry(mix, offset, flags));
	CHECK_EQ(run->trace_hi[0], (uint32_t)of.hi);
	CHECK_EQ(run->trace_hi[1], (uint32_t)(of.hi >> 32));
	CHECK_EQ(run->word,
		 records * (uint32_t)(sizeof(*r) + RECORD_BYTES) / 4 << 18 |
			 ((uint32_t)mix & 0x3ffff));
	for (uint32_t i = 0; i < records; i++) {
		r = (const void *)(n->arena + offset + header +
				   i * (sizeof(*r) + RECORD_BYTES));
		CHECK_EQ(r->payload_bytes, RECORD_BYTES);
		CHECK_EQ(r->type, ABI2_RECORD_DATA);
		CHECK_EQ(((const char *)(r + 1))[RECORD_BYTES - 1], 'x');
	}
	return run;
}

static void write_record(void)
{
	char payload[RECORD_BYTES];

	memset(payload, 'x', sizeof(payload));
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
}

static void what_it_writes_is_found(void)
{
	struct abi2_segment *s;
	struct node n;

	node_open(&n);
	attach(&n);
	CHECK_EQ(bs_begin(id), 0);
	CHECK_EQ(n.context->slots[0].trace_hi, id.hi);
	CHECK_EQ(n.context->slots[0].trace_lo, id.lo);
	write_record();
	write_record();
	s = (void *)n.arena;
	CHECK_EQ(s->life, (uint64_t)ABI2_HELD << 32 | 7);
	CHECK_EQ(s->slot, 0);
	CHECK_EQ(s->runs, 1);
	CHECK_EQ(n.grants->tail, 1);
	CHECK_EQ(n.areas[0].segment, 0);
	CHECK_EQ(n.areas[0].owner_tid, (uint32_t)gettid());
	check_run(&n, 0, ABI2_FIRST_RUN, ABI2_FIRST, id, 2);
	CHECK_EQ(n.areas[0].own_handle,
		 check_run(&n, 0, ABI2_FIRST_RUN, ABI2_FIRST, id, 2)->handle);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(n.areas[0].own_handle, 0);
	check_run(&n, 0, ABI2_FIRST_RUN, ABI2_FIRST | ABI2_LAST | ABI2_CLOSED,
		  id, 2);
	node_close(&n);
}

/* A handle that is interrupted has a second run, with its number. */
static void what_goes_on_later_is_found(void)
{
	const struct bs_trace_id other = {1, 2};
	char payload[RECORD_BYTES];
	const struct abi2_run *run;
	struct bs_trace trace;
	struct node n;

	memset(payload, 'x', sizeof(payload));
	node_open(&n);
	attach(&n);
	CHECK_EQ(bs_open(&trace, id), 0);
	CHECK_EQ(bs_write(&trace, BS_RECORD_DATA, payload, RECORD_BYTES), 0);
	CHECK_EQ(bs_begin(other), 0);
	write_record();
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_write(&trace, BS_RECORD_DATA, payload, RECORD_BYTES), 0);
	CHECK_EQ(bs_close(&trace), 0);

	run = check_run(&n, 0, 64, ABI2_FIRST | ABI2_CLOSED, id, 1);
	check_run(&n, 1, 64 + 128, ABI2_FIRST | ABI2_LAST | ABI2_CLOSED, other,
		  1);
	CHECK_EQ(check_run(&n, 2, 64 + 256, ABI2_LAST | ABI2_CLOSED, id, 1)
			 ->handle,
		 run->handle);
	CHECK_EQ(((const struct abi2_run *)(n.arena + 64 + 256))->seq, 1);
	node_close(&n);
}

static void what_it_fires_is_found(void)
{
	const struct abi2_cell *cell;
	struct node n;

	node_open(&n);
	attach(&n);
	CHECK_EQ(bs_trigger(id, "slow", "took 2 s", NULL, 0), 0);
	cell = &n.context->cells[0];
	CHECK_EQ(cell->seq, 1);
	CHECK_EQ(cell->source, ABI2_TRIGGER_APPLICATION);
	CHECK_EQ(cell->trace_hi, id.hi);
	CHECK_EQ(cell->trace_lo, id.lo);
	CHECK(!strcmp(cell->name, "slow") && !strcmp(cell->why, "took 2 s"));
	node_close(&n);
}

/* No more grants: what is lost is told, by trace. */
static void what_it_loses_is_told(void)
{
	char payload[32768];
	struct node n;

	memset(payload, 0, sizeof(payload));
	node_open(&n);
	attach(&n);
	CHECK_EQ(bs_begin(id), 0);
	while (!bs_tracepoint(payload, sizeof(payload)))
		;
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(n.grants->tail, SEGMENTS);
	/* When it is lost, and when the handle is closed. */
	CHECK_EQ(n.grants->losses, 2);
	CHECK_EQ(n.areas[0].loss_head, 2);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(n.areas[0].losses[i].trace_hi, id.hi);
		CHECK_EQ(n.areas[0].losses[i].trace_lo, id.lo);
	}
	CHECK_EQ(n.areas[0].losses[1].payload_bytes, sizeof(payload));
	node_close(&n);
}

/* The daemon was replaced and kept the memory: the same goes on. */
static void it_goes_on_with_a_daemon_that_knows_it(void)
{
	const struct bs_trace_id other = {1, 2};
	struct node n;

	node_open(&n);
	attach(&n);
	CHECK_EQ(bs_begin(id), 0);
	write_record();
	CHECK_EQ(bs_end(), 0);
	close(n.connection);
	receive_request(&n);
	CHECK_EQ(n.request.token[0], 1);
	CHECK_EQ(n.request.token[1], 2);
	answer(&n, true);
	CHECK_EQ(bs_begin(other), 0);
	write_record();
	CHECK_EQ(bs_end(), 0);
	check_run(&n, 1, 64 + 128, ABI2_FIRST | ABI2_LAST | ABI2_CLOSED, other,
		  1);
	node_close(&n);
}

/* Another context segment: threads show themselves there, and fire there. */
static void it_goes_over_to_another_context(void)
{
	struct abi2_context *next;
	struct node n;
	int fd;

	node_open(&n);
	attach(&n);
	CHECK_EQ(bs_trigger(id, "slow", NULL, NULL, 0), 0);
	CHECK_EQ(bs_begin(id), 0);
	next = make_context(&fd);
	tell(&n, ABI2_NEWS_CONTEXT, 1, fd);
	await_answer(&n, 1);
	CHECK_EQ(next->slots[0].tid, (uint32_t)gettid());
	CHECK_EQ(next->slots[0].trace_hi, id.hi);
	CHECK_EQ(next->slots[0].trace_lo, id.lo);
	CHECK_EQ(bs_trigger(id, "slow", NULL, NULL, 0), 0);
	CHECK_EQ(n.context->trigger_head, 1);
	CHECK_EQ(n.context->cells[0].seq, 1);
	CHECK_EQ(next->trigger_head, 1);
	CHECK_EQ(next->cells[0].seq, 1);
	CHECK_EQ(next->cells[0].trace_lo, id.lo);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(next->slots[0].trace_hi, 0);
	CHECK_EQ(n.context->slots[0].trace_hi, id.hi);
	node_close(&n);
}

/* Another policy, which is not answered: so what is told after it is. That it has
 * been told already, by a daemon that went since. */
static void it_goes_by_another_policy(void)
{
	struct node n;
	int contexts, policy;

	node_open(&n);
	attach(&n);
	make_context(&contexts);
	tell(&n, ABI2_NEWS_CONTEXT, 1, contexts);
	await_answer(&n, 1);
	make_policy(&policy, 2, 0);
	tell(&n, ABI2_NEWS_POLICY, 2, policy);
	tell(&n, ABI2_NEWS_CONTEXT, 1, contexts);
	await_answer(&n, 1);
	CHECK_EQ(bs_begin(id), 0);
	write_record();
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(n.grants->tail, 0);
	CHECK_EQ(n.areas[0].loss_head, 0);
	node_close(&n);
}

/* Each in a process of its own: a library that was shut down attaches no more. */
static void run_alone(void (*test)(void))
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		test();
		exit(0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
}

#define RUN_ALONE(test)                                                        \
	do {                                                                   \
		printf("%s\n", #test);                                         \
		fflush(stdout);                                                \
		run_alone(test);                                               \
	} while (0)

int main(void)
{
	RUN_ALONE(what_it_writes_is_found);
	RUN_ALONE(what_goes_on_later_is_found);
	RUN_ALONE(what_it_fires_is_found);
	RUN_ALONE(what_it_loses_is_told);
	RUN_ALONE(it_goes_on_with_a_daemon_that_knows_it);
	RUN_ALONE(it_goes_over_to_another_context);
	RUN_ALONE(it_goes_by_another_policy);
	return 0;
}
