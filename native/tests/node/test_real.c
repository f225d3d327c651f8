/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libbacksight itself against the node: four threads write and trigger, a
 * worker sleeps on the doorbell and polls, a third party asks and collects, and
 * their context is replaced all the time.
 */
#include <errno.h>
#include <sched.h>

#include "serve.h"

#define THREADS 4
#define TRACES 2000
#define RECORDS 5
#define EVERY 50 /* that is triggered */
/* So many triggers of each thread between two contexts, at most. */
#define TRIGGERS_A_CONTEXT 2

static struct bsn *node;
static uint32_t written;  /* by all writers */
static uint32_t settled;  /* and no context is being replaced */
static uint32_t stopping; /* no more events will come */
static uint32_t triggered[THREADS * TRACES];
static uint32_t moves; /* from one context to the next */

/* What appliance/contexts.py does. */
static void move(int client, int peer)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct bs_attach_news answer, news = {
					      .magic = BS_ABI_MAGIC,
					      .kind = BS_NEWS_CONTEXT,
					      .number = moves + 1,
				      };
	struct iovec iov = {&news, sizeof(news)};
	struct msghdr message = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct cmsghdr *c = CMSG_FIRSTHDR(&message);
	int fd = bsn_client_context(node, client, -1);
	int left;

	CHECK(fd >= 0);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof(int));
	CHECK_EQ(sendmsg(peer, &message, 0), sizeof(news));
	close(fd);
	CHECK_EQ(recv(peer, &answer, sizeof(answer), 0), sizeof(answer));
	CHECK(!memcmp(&answer, &news, sizeof(news)));
	while ((left = bsn_client_context_done(node, client, now_ns())) ==
	       -EAGAIN) {
		bsn_wake(node);
		sched_yield();
	}
	CHECK_EQ(left, 0);
	store_release(&moves, moves + 1);
}

static void move_on(const struct server *s, int peer)
{
	while (!load_acquire(&written))
		move(s->client, peer);
	store_release(&settled, 1);
}

static void *work(void *unused)
{
	struct bsn_event events[64];

	(void)unused;
	for (;;) {
		bool last = load_acquire(&stopping);

		bsn_poll(node, now_ns());
		for (int n; (n = bsn_events(node, events, 64)) > 0;) {
			for (int i = 0; i < n; i++) {
				const struct bsn_event *e = &events[i];
				struct bsn_slice s;

				if (e->kind != BSN_EVENT_TRIGGER)
					continue;
				CHECK(!strcmp(e->trigger, "fiftieth"));
				CHECK_EQ(bsn_collect(node, e->id, e->id,
						     e->trigger, now_ns(), &s),
					 0);
				fetch_add(&triggered[e->id.lo - 1], 1);
			}
		}
		bsn_events_done(node);
		if (last)
			return NULL;
		bsn_wait(node, -1);
	}
}

static void *write_traces(void *argument)
{
	uint64_t thread = *(const uint64_t *)argument;

	for (uint64_t i = 0; i < TRACES; i++) {
		struct bs_trace_id id = {7, thread * TRACES + i + 1};

		CHECK_EQ(bs_begin(id), 0);
		for (uint64_t k = 0; k < RECORDS; k++) {
			uint64_t payload[4] = {id.lo, k};

			bs_tracepoint(payload, sizeof(payload));
			if (k == 2 && i % EVERY == 0)
				CHECK_EQ(bs_trigger(id, "fiftieth", "i", NULL,
						    0),
					 0);
		}
		CHECK_EQ(bs_end(), 0);
		/* Not faster than the node is scheduled: it must not lose. */
		while (i % EVERY == 0 && !READ_ONCE(triggered[id.lo - 1]))
			sched_yield();
		while (load_acquire(&moves) < i / EVERY / TRIGGERS_A_CONTEXT)
			sched_yield();
	}
	return NULL;
}

/* Somebody asks all the time. */
static void *ask(void *unused)
{
	static uint8_t buffer[4096];

	(void)unused;
	for (uint64_t i = 0; !load_acquire(&stopping); i++) {
		struct bs_trace_id id = {7, i % (THREADS * TRACES) + 1};
		struct bsn_metrics m;
		struct bsn_slice s;

		bsn_peek(node, id, now_ns(), buffer, sizeof(buffer), &s);
		bsn_get_metrics(node, &m);
		CHECK(m.pool_used_bytes <= m.pool_bytes);
	}
	return NULL;
}

/* Whether one that begins now is recorded. */
static bool is_recorded(uint64_t number)
{
	struct bs_trace_id id = {9, number};
	struct bsn_slice s;

	CHECK_EQ(bs_begin(id), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	collect(node, id, now_ns(), &s);
	return s.flags & BSN_SLICE_HELD;
}

/* What an operator changes, a process that is attached takes up. */
static void follows_the_sampling(void)
{
	struct bs_trace_id open = {9, 1};
	struct bsn_slice s;

	CHECK(!bs_trusts_incoming());
	CHECK_EQ(bs_begin(open), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	bsn_set_sampling(node, 0, true);
	CHECK(bs_trusts_incoming());
	/* It goes on with what it has begun. */
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	collect(node, open, now_ns(), &s);
	/* Of one that it begins now nobody hears. */
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	CHECK(!is_recorded(2));
	bsn_set_sampling(node, UINT64_MAX, false);
	CHECK(is_recorded(3));
	CHECK(!bs_trusts_incoming());
}

int main(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct server server = {.attached = move_on};
	pthread_t worker, asker, writers[THREADS];
	uint64_t numbers[THREADS];
	struct bsn_metrics m;
	struct decoded d = {0};

	node = test_node(&config);
	server_open(&server, node);
	CHECK_EQ(bs_begin((struct bs_trace_id){1, 1}), 0); /* attaches */
	bs_end();
	CHECK_EQ(bs_wait_attached(60000), 0);
	CHECK_EQ(pthread_create(&worker, NULL, work, NULL), 0);
	CHECK_EQ(pthread_create(&asker, NULL, ask, NULL), 0);
	for (uint64_t i = 0; i < THREADS; i++) {
		numbers[i] = i;
		CHECK_EQ(pthread_create(&writers[i], NULL, write_traces,
					&numbers[i]),
			 0);
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(writers[i], NULL);
	store_release(&written, 1);
	while (!load_acquire(&settled))
		sched_yield();
	store_release(&stopping, 1);
	bsn_wake(node);
	pthread_join(worker, NULL);
	pthread_join(asker, NULL);
	bsn_poll(node, now_ns());

	bsn_get_metrics(node, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.triggers, THREADS * TRACES / EVERY);
	CHECK(load_acquire(&moves) >=
	      (TRACES - 1) / EVERY / TRIGGERS_A_CONTEXT);
	CHECK_EQ(m.triggers_lost, 0);
	for (uint32_t i = 0; i < THREADS * TRACES; i++) {
		struct bs_trace_id id = {7, i + 1};
		struct bsn_slice s;
		uint32_t next = 0;

		CHECK_EQ(triggered[i], i % TRACES % EVERY == 0);
		if (!triggered[i])
			continue;
		CHECK_EQ(bsn_slice_info(node, id, &s), 0);
		CHECK_EQ(s.open_handles, 0);
		decode_slice(node, id, &d);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK_EQ(d.records, RECORDS);
		/* In order, and of this trace. */
		for (uint32_t k = 0; k < d.n_pieces; k++) {
			const uint8_t *at = d.content[k];

			if (d.pieces[k].kind != BS_PIECE_RUN)
				continue;
			for (uint32_t b = 0; b < d.pieces[k].bytes; b += 44) {
				uint64_t payload[2];

				memcpy(payload, at + b + 12, sizeof(payload));
				CHECK_EQ(payload[0], id.lo);
				CHECK_EQ(payload[1], next++);
			}
		}
	}
	CHECK_EQ(m.records_lost, 0);
	follows_the_sampling();
	check_invariants(node);

	bs_shutdown();
	server_close(&server);
	bsn_free(node);
	free(d.bytes);
	return 0;
}
