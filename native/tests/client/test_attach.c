/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attaching, to whatever answers, and again. Each test runs in a process of its
 * own, since a process attaches once; they end by themselves, so that nothing
 * of the library's is left that a leak checker would not see.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){3, number};
}

static struct bs_stats stats(void)
{
	struct bs_stats s;

	bs_get_stats(&s);
	return s;
}

static void expect_run(uint64_t number, uint16_t flags, int records)
{
	struct fake_run run;

	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.id.lo, number);
	CHECK_EQ(run.flags, flags);
	CHECK_EQ(fake_run_count(&run), records);
}

#define NODE_MAPPINGS BS_FDS
#define CLIENT_MAPPINGS (BS_FDS + 1) /* the context twice */

static int mappings_named(const char *name)
{
	char line[512];
	int n = 0;
	FILE *f = fopen("/proc/self/maps", "r");

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		n += strstr(line, name) != NULL;
	fclose(f);
	return n;
}

/* Of memfds in this process; the node has four of its own. */
static int mappings(void)
{
	return mappings_named("/memfd:test");
}

static void test_without_a_daemon(void)
{
	struct bs_stats s;

	setenv("BACKSIGHT_SOCKET", "/nonexistent/node.sock", 1);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("123", 3), -ENOSPC);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_wait_attached(0), -ETIMEDOUT);
	s = stats();
	CHECK_EQ(s.runs_lost, 1);
	CHECK_EQ(s.records_lost, 1);
	CHECK_EQ(s.payload_bytes_lost, 3);
	CHECK(!s.attached);
}

static void test_disabled(void)
{
	setenv("BACKSIGHT_DISABLE", "1", 1);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_wait_attached(-1), -ETIMEDOUT);
	CHECK_EQ(bs_end(), 0);
	CHECK(!stats().attached);
}

static void test_request(void)
{
	setenv("BACKSIGHT_SERVICE", "checkout", 1);
	fake_node_attach(&node, 2, 2);
	CHECK_EQ(node.request.version, BS_ABI_VERSION);
	CHECK_EQ(node.request.oldest, BS_ABI_OLDEST);
	CHECK_EQ(node.request.features, BS_FEATURES);
	CHECK_EQ(node.request.pid, getpid());
	CHECK_EQ(node.request.token[0] | node.request.token[1], 0);
	CHECK(!strcmp(node.request.service, "checkout"));
	CHECK(stats().attached);
	CHECK_EQ(stats().attachments, 1);
}

/* A trace that began before the daemon came goes on, and is lossy. */
static void test_daemon_comes_late(void)
{
	struct bs_trace handle, unused;

	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_open(&unused, trace(3)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), -ENOSPC);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), -ENOSPC);
	fake_node_attach(&node, 2, 2);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(node.context->slots[0].trace_lo, 1);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_write(&unused, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_close(&unused), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(1, BS_RUN_FIRST | BS_RUN_LOSSY, 1);
	expect_run(2, BS_RUN_FIRST | BS_RUN_LOSSY, 1);
	expect_run(3, BS_RUN_FIRST | BS_RUN_LAST, 1);
	expect_run(2, BS_RUN_LAST | BS_RUN_LOSSY, 0);
	expect_run(1, BS_RUN_LAST | BS_RUN_LOSSY, 0);
}

/* So is one that only ends after that: the node hears of what was lost. */
static void test_daemon_comes_for_the_end(void)
{
	struct bs_trace handle, unused;
	struct fake_run run;

	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_open(&unused, trace(3)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), -ENOSPC);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), -ENOSPC);
	fake_node_attach(&node, 2, 2);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_close(&unused), 0);
	CHECK_EQ(bs_close(&handle), 0);
	expect_run(1, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 0);
	expect_run(2, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 0);
	CHECK(!fake_node_run(&node, 0, &run));
	CHECK_EQ(fake_node_open_handles(&node), 0);
}

static pthread_barrier_t all_have_begun, may_end;

static void *hold_slot(void *argument)
{
	(void)argument;
	CHECK_EQ(bs_begin(trace(1)), 0);
	pthread_barrier_wait(&all_have_begun);
	pthread_barrier_wait(&may_end);
	CHECK_EQ(bs_end(), 0);
	return NULL;
}

/* Nor can a thread without a slot say for which trace: it says that something was
 * lost. */
static void test_daemon_comes_for_the_end_without_a_slot(void)
{
	static pthread_t threads[BS_THREAD_SLOTS];
	struct bs_trace handle, unused;
	struct fake_run run;

	pthread_barrier_init(&all_have_begun, NULL, BS_THREAD_SLOTS + 1);
	pthread_barrier_init(&may_end, NULL, BS_THREAD_SLOTS + 1);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_open(&unused, trace(3)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), -ENOSPC);
	fake_node_attach(&node, 2, 2);
	for (uint32_t i = 0; i < BS_THREAD_SLOTS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, hold_slot, NULL), 0);
	pthread_barrier_wait(&all_have_begun);
	CHECK_EQ(bs_close(&unused), 0);
	CHECK_EQ(node.context->records_unattributed, 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(node.context->records_unattributed, 1);
	pthread_barrier_wait(&may_end);
	for (uint32_t i = 0; i < BS_THREAD_SLOTS; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	CHECK(!fake_node_run(&node, 0, &run));
}

/* ------------------------------------------------------- bad answers --- */

#define ROOM_FOR_FDS 8 /* in the library */
#define MANY_FDS 12
#define FDS_MAX 16

static struct bs_attach_reply reply;
static int sent_fds[FDS_MAX];
static int n_sent;
static size_t n_bytes;

static void bad_magic(void)
{
	reply.magic++;
}

static void bad_version(void)
{
	reply.version = BS_ABI_VERSION + 1;
}

static void bad_old_version(void)
{
	reply.version = BS_ABI_OLDEST - 1;
}

static void bad_features(void)
{
	reply.features = 1ull << 63;
}

static void bad_status(void)
{
	reply.status = -EPROTO;
	memset(reply.message, 'm', sizeof(reply.message));
}

static void bad_resumed(void)
{
	reply.resumed = 1;
	n_sent = 0;
}

static void bad_size(void)
{
	n_bytes = 10;
}

static void bad_half(void)
{
	n_bytes = offsetof(struct bs_attach_reply, features) - 1;
}

static void bad_empty(void)
{
	n_bytes = 0;
	n_sent = 0;
}

static void bad_no_fds(void)
{
	n_sent = 0;
}

static void bad_three_fds(void)
{
	n_sent = 3;
}

static void bad_many_fds(void)
{
	for (n_sent = BS_FDS; n_sent < MANY_FDS; n_sent++)
		sent_fds[n_sent] = node.fds[0];
}

static void bad_fd(void)
{
	sent_fds[1] = STDERR_FILENO;
}

static void bad_order(void)
{
	sent_fds[0] = node.fds[1];
	sent_fds[1] = node.fds[0];
}

static void bad_arena_size(void)
{
	reply.arena_bytes += BS_SEGMENT_BYTES;
}

static void bad_arena_zero(void)
{
	reply.arena_bytes = 0;
}

static void bad_arena_odd(void)
{
	reply.arena_bytes++;
}

static void bad_arena_huge(void)
{
	reply.arena_bytes = (uint64_t)BS_SEGMENT_BYTES << 32;
}

static void bad_channel_magic(void)
{
	node.channel->magic = 0;
}

static void bad_channel_version(void)
{
	node.channel->version = 99;
}

static void bad_channel_arena(void)
{
	node.channel->arena_bytes += BS_SEGMENT_BYTES;
}

static void bad_channel_clock(void)
{
	node.channel->clock = 2;
}

static void bad_channel_ticks(void)
{
	node.channel->ticks_per_s = 0;
}

static void bad_node_id(void)
{
	node.channel->node_id++;
}

static void bad_node_name(void)
{
	memset(node.channel->node_name, 'n', sizeof(node.channel->node_name));
}

static void bad_context_version(void)
{
	node.context->version = 0;
}

static void bad_context_slots(void)
{
	node.context->thread_slots = 1;
}

static void bad_policy_magic(void)
{
	node.policy->magic++;
}

static void bad_policy_version(void)
{
	node.policy->version = BS_ABI_VERSION + 1;
}

static void bad_policy_size(void)
{
	sent_fds[BS_FD_POLICY] = sent_fds[BS_FD_ARENA];
}

static void bad_unsealed(void)
{
	sent_fds[2] = memfd_create("test", MFD_CLOEXEC);
	CHECK_EQ(ftruncate(sent_fds[2], sizeof(*node.context)), 0);
}

static void (*const faults[])(void) = {
	bad_magic,
	bad_version,
	bad_old_version,
	bad_features,
	bad_half,
	bad_status,
	bad_resumed,
	bad_size,
	bad_empty,
	bad_no_fds,
	bad_three_fds,
	bad_many_fds,
	bad_fd,
	bad_order,
	bad_arena_size,
	bad_arena_zero,
	bad_arena_odd,
	bad_arena_huge,
	bad_channel_magic,
	bad_channel_version,
	bad_channel_arena,
	bad_channel_clock,
	bad_channel_ticks,
	bad_node_id,
	bad_node_name,
	bad_context_version,
	bad_context_slots,
	bad_policy_magic,
	bad_policy_version,
	bad_policy_size,
	bad_unsealed,
};

static int open_fds(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

/*
 * How many descriptors a process gets that it has no room for: none from Linux;
 * all from qemu-user, which receives with more room than its program gave.
 */
static int opened_unheard(int sent, int room)
{
	union {
		char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	char byte;
	struct iovec iov = {&byte, 1};
	struct msghdr msg = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = CMSG_SPACE(room * sizeof(int)),
	};
	struct fake_node sender;
	int pair[2], fds[FDS_MAX], before, after;

	CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
	for (int i = 0; i < sent; i++)
		fds[i] = pair[0];
	sender.connection = pair[0];
	fake_node_send(&sender, "x", 1, fds, sent);
	before = open_fds();
	CHECK_EQ(recvmsg(pair[1], &msg, 0), 1);
	memcpy(fds, CMSG_DATA(&control.align), room * sizeof(int));
	for (int i = 0; i < room; i++)
		close(fds[i]);
	after = open_fds();
	close(pair[0]);
	close(pair[1]);
	return after - before;
}

/* After each bad answer the client hangs up, has kept nothing of it, and takes
 * a good one. That begins the back-off anew. */
static void test_bad_answers(void)
{
	const size_t n = sizeof(faults) / sizeof(faults[0]);
	const int unheard = opened_unheard(MANY_FDS, ROOM_FOR_FDS);
	int before = 0;

	bs_wait_attached(0);
	for (size_t i = 0; i < n; i++) {
		fake_node_make(&node, 2);
		fake_node_fill_reply(&node, &reply);
		memcpy(sent_fds, node.fds, sizeof(node.fds));
		n_sent = BS_FDS;
		n_bytes = sizeof(reply);
		faults[i]();
		fake_node_accept(&node);
		fake_node_send(&node, &reply, n_bytes, sent_fds, n_sent);
		fake_node_wait_hangup(&node);
		if (sent_fds[2] != node.fds[2])
			close(sent_fds[2]);
		CHECK_EQ(stats().attachments, i);

		fake_node_make(&node, 2);
		fake_node_accept(&node);
		fake_node_fill_reply(&node, &reply);
		fake_node_send(&node, &reply, sizeof(reply), node.fds, BS_FDS);
		while (stats().attachments == i)
			sched_yield();
		/* This thread is in the old one until it does something. */
		CHECK_EQ(bs_wait_attached(0), 0);
		if (i == 0)
			before = open_fds();
		if (faults[i] == bad_many_fds)
			before += unheard;
		CHECK_EQ(open_fds(), before);
		/* The node's own, and the client's. */
		CHECK_EQ(mappings(), NODE_MAPPINGS + CLIENT_MAPPINGS);
		fake_node_hang_up(&node);
	}
}

/* ------------------------------------------------- packets of others --- */

static void attach_with(const void *bytes, size_t size)
{
	fake_node_accept(&node);
	fake_node_send(&node, bytes, size, node.fds, BS_FDS);
	CHECK_EQ(bs_wait_attached(-1), 0);
}

/* A newer daemon says more. */
static void test_longer_reply(void)
{
	unsigned char bytes[4096];

	fake_node_make(&node, 2);
	bs_wait_attached(0);
	memset(bytes, 0xff, sizeof(bytes));
	fake_node_fill_reply(&node, (struct bs_attach_reply *)bytes);
	attach_with(bytes, sizeof(bytes));
}

/* One from before there were features says less. */
static void test_shorter_reply(void)
{
	fake_node_make(&node, 2);
	bs_wait_attached(0);
	fake_node_fill_reply(&node, &reply);
	attach_with(&reply, offsetof(struct bs_attach_reply, features));
}

static void resume(struct fake_node *n)
{
	uint64_t attachments = stats().attachments;

	fake_node_accept(n);
	CHECK_EQ(n->request.token[0], 1);
	CHECK_EQ(n->request.token[1], n->token);
	fake_node_fill_reply(n, &reply);
	reply.resumed = 1;
	fake_node_send(n, &reply, sizeof(reply), NULL, 0);
	while (stats().attachments == attachments)
		sched_yield();
}

/* News of a kind that this library does not know costs nothing, least of all
 * the connection. */
static void test_unknown_news(void)
{
	unsigned char bytes[4096] = {0};
	struct bs_attach_news *news = (struct bs_attach_news *)bytes;
	int before;

	fake_node_attach(&node, 2, 2);
	before = open_fds();
	*news = (struct bs_attach_news){
		.magic = BS_ABI_MAGIC,
		.kind = 1000,
		.number = 1,
	};
	fake_node_send(&node, bytes, sizeof(*news), node.fds, 1);
	fake_node_send(&node, bytes, sizeof(bytes), NULL, 0);
	fake_node_send(&node, bytes, 4, NULL, 0);
	fake_node_hang_up(&node);
	resume(&node);
	CHECK_EQ(open_fds(), before);
}

/* -------------------------------------------------------- re-attaching --- */

static void test_resumed(void)
{
	struct bs_trace handle;

	fake_node_attach(&node, 2, 2);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	fake_node_hang_up(&node);
	/* The daemon is away, and nobody notices. */
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), 0);
	resume(&node);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(1, BS_RUN_FIRST, 3);
	expect_run(2, BS_RUN_FIRST | BS_RUN_LAST, 1);
	expect_run(1, BS_RUN_LAST, 0);
	CHECK(stats().attached);
}

static void attach_anew(void)
{
	uint64_t attachments = stats().attachments;

	fake_node_hang_up(&node);
	fake_node_make(&node, 8);
	for (uint32_t i = 0; i < 8; i++)
		fake_node_grant(&node, i, true);
	fake_node_accept(&node);
	fake_node_fill_reply(&node, &reply);
	fake_node_send(&node, &reply, sizeof(reply), node.fds, BS_FDS);
	while (stats().attachments == attachments)
		sched_yield();
}

static void test_fresh(void)
{
	struct bs_trace handle, unused, silent, idle;
	struct fake_run run;

	fake_node_attach(&node, 2, 2);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_open(&unused, trace(3)), 0);
	CHECK_EQ(bs_open(&idle, trace(4)), 0);
	CHECK_EQ(bs_open(&silent, trace(6)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_write(&idle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	attach_anew();

	/* The trace that is being written goes on where it was. */
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK(!fake_node_run(&node, 0, &run));
	/* All of the old one is still there, but its arena. */
	CHECK_EQ(mappings(), NODE_MAPPINGS + 2 * CLIENT_MAPPINGS - 1);
	CHECK_EQ(bs_end(), 0);

	/* The thread moves, and takes its open handles with it. */
	CHECK_EQ(bs_begin(trace(5)), 0);
	CHECK_EQ(mappings(), NODE_MAPPINGS + CLIENT_MAPPINGS);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_write(&unused, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(bs_close(&unused), 0);
	CHECK_EQ(bs_close(&idle), 0);
	CHECK_EQ(bs_close(&silent), 0);
	expect_run(5, BS_RUN_FIRST, 1);
	expect_run(2, BS_RUN_FIRST | BS_RUN_LOSSY, 1);
	expect_run(3, BS_RUN_FIRST, 1);
	expect_run(5, BS_RUN_LAST, 0);
	expect_run(2, BS_RUN_LAST | BS_RUN_LOSSY, 0);
	expect_run(3, BS_RUN_LAST, 0);
	/* What it wrote is out of reach. */
	expect_run(4, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 0);
	CHECK(!fake_node_run(&node, 0, &run));
	/* What the first attachment counted is not forgotten. */
	CHECK_EQ(stats().runs, 3 + 7);
}

/* The next node records all: what has no beginning there would pass for whole. */
static void test_fresh_for_what_is_left_out(void)
{
	struct bs_trace handle;
	struct fake_run run;

	fake_node_attach(&node, 2, 2);
	WRITE_ONCE(node.policy->percentage_threshold, 0);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	attach_anew();
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(bs_begin(trace(3)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(3, BS_RUN_FIRST | BS_RUN_LAST, 1);
	CHECK(!fake_node_run(&node, 0, &run));
	CHECK_EQ(fake_node_open_handles(&node), 0);
}

/* The next node hears of what was lost with the one before, whose ring nobody reads
 * any more. */
static void test_fresh_for_the_end(void)
{
	struct bs_trace handle;
	struct fake_run run;

	fake_node_attach(&node, 2, 0);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), -ENOSPC);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), -ENOSPC);
	attach_anew();
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_close(&handle), 0);
	expect_run(1, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 0);
	expect_run(2, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 0);
	CHECK(!fake_node_run(&node, 0, &run));
	CHECK_EQ(fake_node_open_handles(&node), 0);
}

/* A handle is written where its trace began to move, but the thread's own trace
 * is open too, and moves with it. */
static void test_fresh_with_own_trace_open(void)
{
	struct bs_trace handle;

	fake_node_attach(&node, 2, 2);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	attach_anew();
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(1, BS_RUN_FIRST | BS_RUN_LOSSY, 1);
	expect_run(2, BS_RUN_FIRST | BS_RUN_LAST, 1);
	expect_run(1, BS_RUN_LAST | BS_RUN_LOSSY, 0);
}

/* Who writes first takes a slot before the trace gets its number, which says where
 * the node finds it open. */
static void test_fresh_slot_first(void)
{
	struct bs_trace handle;
	struct fake_run run;

	fake_node_attach(&node, 2, 2);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	attach_anew();
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK(fake_node_run(&node, 0, &run));
	CHECK(bs_handle_slot(run.handle) < BS_THREAD_SLOTS);
}

/* ------------------------------------------------ who does not move on --- */

static void *use(void *arg)
{
	(void)arg;
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	return NULL;
}

static pthread_barrier_t idle_has_written, idle_may_go_on;

static void *write_and_idle(void *arg)
{
	static const char payload[100];

	(void)arg;
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
	pthread_barrier_wait(&idle_has_written);
	pthread_barrier_wait(&idle_may_go_on);
	/* Until its segment is full it goes on where it was, though nobody
	 * reads it; then where it is read. */
	for (size_t i = 0; i < BS_SEGMENT_BYTES / sizeof(payload); i++)
		CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_begin(trace(2)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	return NULL;
}

#define IDLE_THREADS 3

/* An idle thread keeps a segment of its own, not an arena a daemon. */
static void test_replaced_daemons_leave_nothing(void)
{
	pthread_t threads[IDLE_THREADS];

	fake_node_attach(&node, 16, 16);
	pthread_barrier_init(&idle_has_written, NULL, IDLE_THREADS + 1);
	pthread_barrier_init(&idle_may_go_on, NULL, IDLE_THREADS + 1);
	for (int i = 0; i < IDLE_THREADS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, write_and_idle,
					NULL),
			 0);
	pthread_barrier_wait(&idle_has_written);
	for (int i = 0; i < 4; i++) {
		use(NULL);
		attach_anew();
		/* The node's own, and the client's. */
		CHECK_EQ(mappings_named("/memfd:test-arena"), 2);
	}
	pthread_barrier_wait(&idle_may_go_on);
	for (int i = 0; i < IDLE_THREADS; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	use(NULL);
	CHECK_EQ(mappings(), NODE_MAPPINGS + CLIENT_MAPPINGS);
}

static uint64_t address_space(void)
{
	uint64_t pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	CHECK(f);
	CHECK_EQ(fscanf(f, "%" SCNu64, &pages), 1);
	fclose(f);
	return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* The old arena makes room for the new one, though a thread stands in it. */
static void test_no_room(void)
{
	const uint32_t segments = 4096; /* 256 MiB */
	struct rlimit limit;
	uint64_t attachments;

	fake_node_attach(&node, segments, 1);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(getrlimit(RLIMIT_AS, &limit), 0);
	attachments = stats().attachments;
	fake_node_hang_up(&node);
	fake_node_make(&node, segments);
	fake_node_grant(&node, 0, true);
	limit.rlim_cur =
		address_space() + (uint64_t)segments / 2 * BS_SEGMENT_BYTES;
	CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
	if (mmap(NULL, (size_t)segments * BS_SEGMENT_BYTES, PROT_NONE,
		 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED) {
		printf("  not here: this emulator limits nothing\n");
		return;
	}
	for (int i = 0; i < 2; i++) {
		fake_node_accept(&node);
		fake_node_fill_reply(&node, &reply);
		fake_node_send(&node, &reply, sizeof(reply), node.fds, BS_FDS);
		if (i == 0)
			fake_node_wait_hangup(&node);
	}
	CHECK_EQ(node.request.token[0] | node.request.token[1], 0);
	while (stats().attachments == attachments)
		sched_yield();
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_begin(trace(2)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(2, BS_RUN_FIRST | BS_RUN_LAST, 1);
}

static void *wait_for_ever(void *arg)
{
	(void)arg;
	bs_wait_attached(-1);
	return NULL;
}

/* Whoever is cancelled while it waits takes nothing with it. */
static void test_cancelled_wait(void)
{
	pthread_t thread;
	void *result;

	setenv("BACKSIGHT_SOCKET", "/nonexistent/node.sock", 1);
	CHECK_EQ(pthread_create(&thread, NULL, wait_for_ever, NULL), 0);
	CHECK_EQ(pthread_cancel(thread), 0);
	CHECK_EQ(pthread_join(thread, &result), 0);
	CHECK(result == PTHREAD_CANCELED);
	CHECK(!stats().attached);
	CHECK_EQ(bs_wait_attached(0), -ETIMEDOUT);
}

/* A daemonising application closes what it did not open. */
static void test_closed_socket(void)
{
	int fds[2], keep = node.listener;

	fake_node_attach(&node, 2, 2);
	for (int fd = 3; fd < 1024; fd++) {
		bool is_nodes = fd == keep || fd == node.connection;

		for (int i = 0; i < BS_FDS; i++)
			is_nodes |= fd == node.fds[i];
		if (!is_nodes)
			close(fd);
	}
	/* These get the number back, and are not the library's. */
	CHECK_EQ(pipe(fds), 0);
	fake_node_hang_up(&node);
	resume(&node);
	CHECK(fcntl(fds[0], F_GETFD) >= 0);
	CHECK(fcntl(fds[1], F_GETFD) >= 0);
	bs_shutdown();
	CHECK_EQ(write(fds[1], "x", 1), 1);
}

static void test_shutdown(void)
{
	fake_node_attach(&node, 2, 2);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	bs_shutdown();
	fake_node_wait_hangup(&node);
	CHECK_EQ(mappings(), NODE_MAPPINGS);
	CHECK_EQ(fake_node_owned_slots(&node), 0);
	CHECK_EQ(bs_tracepoint("", 0), -ENOSPC);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK(!stats().attached);
	CHECK_EQ(bs_wait_attached(-1), -ETIMEDOUT);
}

/* ------------------------------------------------------------ process --- */

static pid_t library_thread(void)
{
	char path[300], name[32];
	struct dirent *task;
	DIR *tasks = opendir("/proc/self/task");
	pid_t found = 0;

	CHECK(tasks);
	while ((task = readdir(tasks))) {
		FILE *f;

		snprintf(path, sizeof(path), "/proc/self/task/%s/comm",
			 task->d_name);
		f = fopen(path, "r");
		if (f && fgets(name, sizeof(name), f) &&
		    !strcmp(name, "backsight\n"))
			found = atoi(task->d_name);
		if (f)
			fclose(f);
	}
	closedir(tasks);
	CHECK(found);
	return found;
}

static uint32_t signals_taken;

static void take_signal(int signal)
{
	(void)signal;
	fetch_add(&signals_taken, 1);
}

/* The application's signals do not reach the library's thread. It has taken
 * what it does not block when it knocks again. */
static void test_signals(void)
{
	const struct sigaction take = {.sa_handler = take_signal};

	fake_node_attach(&node, 2, 2);
	for (int signal = 1; signal < 32; signal++) {
		if (signal == SIGKILL || signal == SIGSTOP)
			continue;
		CHECK_EQ(sigaction(signal, &take, NULL), 0);
		CHECK_EQ(tgkill(getpid(), library_thread(), signal), 0);
	}
	fake_node_hang_up(&node);
	fake_node_accept(&node);
	CHECK_EQ(signals_taken, 0);
}

/* What the library says while the daemon refuses it twice. */
static void hear(char text[4096], void (*refuse)(void))
{
	int fds[2], saved = dup(STDERR_FILENO);
	ssize_t n;

	CHECK_EQ(pipe2(fds, O_NONBLOCK), 0);
	dup2(fds[1], STDERR_FILENO);
	fake_node_make(&node, 2);
	bs_wait_attached(0);
	for (int i = 0; i < 2; i++) {
		fake_node_accept(&node);
		fake_node_fill_reply(&node, &reply);
		refuse();
		fake_node_send(&node, &reply, sizeof(reply), NULL, 0);
		fake_node_wait_hangup(&node);
	}
	n = read(fds[0], text, 4095);
	dup2(saved, STDERR_FILENO);
	text[n > 0 ? n : 0] = '\0';
}

static void test_silent(void)
{
	char text[4096];

	hear(text, bad_status);
	CHECK_EQ(text[0], '\0');
}

static void test_debug(void)
{
	char text[4096];

	setenv("BACKSIGHT_DEBUG", "1", 1);
	hear(text, bad_status);
	/* Once for each reason. */
	CHECK(strstr(text, "refused: mmmm"));
	CHECK_EQ(strchr(text, '\n') - text, strlen(text) - 1);
}

/* As daemons before version 2 refuse whom they do not know. */
static void refuse_as_version_1(void)
{
	reply.version = 1;
	reply.status = -EPROTO;
	snprintf(reply.message, sizeof(reply.message), "ABI version 2, not 1");
}

static void test_debug_old_daemon(void)
{
	char text[4096];

	setenv("BACKSIGHT_DEBUG", "1", 1);
	hear(text, refuse_as_version_1);
	CHECK(strstr(text,
		     "the daemon speaks version 1 of the shared memory, "
		     "this library 2 to 2: update the daemon"));
}

static void test_debug_old_library(void)
{
	char text[4096];

	setenv("BACKSIGHT_DEBUG", "1", 1);
	hear(text, bad_version);
	CHECK(strstr(text, "update this library"));
}

/* The process ends with its last thread, which is not the library's. */
static void test_main_thread_leaves(void)
{
	pthread_t thread;

	if (count_threads() > 1) {
		printf("  not here: this emulator's own thread stays, and "
		       "nobody can tell it from one of the program's\n");
		return;
	}
	fake_node_attach(&node, 2, 2);
	CHECK_EQ(pthread_create(&thread, NULL, use, NULL), 0);
	CHECK_EQ(pthread_detach(thread), 0);
	pthread_exit(NULL);
}

/* exit() with everything in use. */
static void test_exit(void)
{
	fake_node_attach(&node, 2, 2);
	use(NULL);
	exit(0);
}

static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	{"without_a_daemon", test_without_a_daemon},
	{"disabled", test_disabled},
	{"request", test_request},
	{"daemon_comes_late", test_daemon_comes_late},
	{"daemon_comes_for_the_end", test_daemon_comes_for_the_end},
	{"daemon_comes_for_the_end_without_a_slot",
	 test_daemon_comes_for_the_end_without_a_slot},
	{"bad_answers", test_bad_answers},
	{"longer_reply", test_longer_reply},
	{"shorter_reply", test_shorter_reply},
	{"unknown_news", test_unknown_news},
	{"resumed", test_resumed},
	{"fresh", test_fresh},
	{"fresh_for_the_end", test_fresh_for_the_end},
	{"fresh_for_what_is_left_out", test_fresh_for_what_is_left_out},
	{"fresh_with_own_trace_open", test_fresh_with_own_trace_open},
	{"fresh_with_own_trace_open", test_fresh_slot_first},
	{"replaced_daemons_leave_nothing", test_replaced_daemons_leave_nothing},
	{"no_room", test_no_room},
	{"cancelled_wait", test_cancelled_wait},
	{"closed_socket", test_closed_socket},
	{"shutdown", test_shutdown},
	{"signals", test_signals},
	{"silent", test_silent},
	{"debug", test_debug},
	{"debug_old_daemon", test_debug_old_daemon},
	{"debug_old_library", test_debug_old_library},
	{"main_thread_leaves", test_main_thread_leaves},
	{"exit", test_exit},
};

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
		int status;
		pid_t pid;

		if (argc > 1 && strcmp(argv[1], tests[i].name) != 0)
			continue;
		printf("%s\n", tests[i].name);
		fflush(stdout);
		fake_node_open(&node);
		pid = fork();
		CHECK(pid >= 0);
		if (pid == 0) {
			tests[i].run();
			bs_shutdown();
			exit(0);
		}
		CHECK_EQ(waitpid(pid, &status, 0), pid);
		fake_node_close(&node);
		CHECK_EQ(status, 0);
	}
	return 0;
}
