/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An application with a library of the day when ABI 2 was frozen: one thread, by
 * hand, with the least that a client must do. It stays while the daemons around it
 * become newer (tests/cluster/test_upgrade.py).
 *
 *   frozen_client SOCKET [deaf]
 *
 * It goes over to another context when it is told, unless it is deaf.
 *
 * Two things it does as that library did, and not as the text of the ABI said then,
 * which was mended: it takes a head behind the tail for an empty ring, and commits
 * a trigger by a swap.
 *
 * When it is attached it prints "attached". For each line of standard input,
 *
 *   HI LO RECORDS FIRE
 *
 * it writes a trace of that id (two hexadecimal numbers) with as many records of
 * 100 bytes, fires a trigger for it if FIRE is 1, and prints what it knows by then:
 * how many records it lost, how often it was attached anew, and how often a daemon
 * that came back knew it.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "abi2.h"

#define RECORD_BYTES 100u
#define CONNECT_PAUSE_MS 20
#define CONNECT_TRIES 1500
#define LINE_BYTES 256

#define load_relaxed(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define count_up(p) __atomic_fetch_add((p), 1, __ATOMIC_RELEASE)

struct client {
	const char *path;
	bool is_deaf; /* to news: it has not heard of any */
	int socket;
	struct abi2_request request;

	unsigned char *arena;
	struct abi2_channel *channel;
	struct abi2_grants *grants;
	struct abi2_area *area; /* of slot 0 */
	struct abi2_context *context;

	struct abi2_segment *segment; /* NULL: none */
	uint32_t number;	      /* of the segment */
	unsigned char *cursor, *floor;
	uint32_t handles;
	uint32_t lost, attached, resumed;
};

__attribute__((noreturn)) static void die(const char *what)
{
	fprintf(stderr, "frozen_client: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* --------------------------------------------------------------- attach --- */

static bool exchange(struct client *c, struct abi2_reply *reply,
		     int fds[ABI2_FDS])
{
	union {
		char bytes[CMSG_SPACE(ABI2_FDS * sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct iovec iov = {reply, sizeof(*reply)};
	struct msghdr message = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	const struct cmsghdr *h;

	snprintf(address.sun_path, sizeof(address.sun_path), "%s", c->path);
	c->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (c->socket < 0)
		die("socket");
	memset(reply, 0, sizeof(*reply));
	if (connect(c->socket, (void *)&address, sizeof(address)) ||
	    send(c->socket, &c->request, sizeof(c->request), MSG_NOSIGNAL) <
		    0 ||
	    recvmsg(c->socket, &message, MSG_CMSG_CLOEXEC) <= 0) {
		close(c->socket);
		return false;
	}
	if (reply->magic != ABI2_MAGIC || reply->status ||
	    reply->version != ABI2_VERSION) {
		fprintf(stderr, "frozen_client: refused: %.128s\n",
			reply->message);
		exit(1);
	}
	h = CMSG_FIRSTHDR(&message);
	if (h && h->cmsg_len == CMSG_LEN(ABI2_FDS * sizeof(int)))
		memcpy(fds, CMSG_DATA(h), ABI2_FDS * sizeof(int));
	else if (!reply->resumed)
		die("no descriptors");
	return true;
}

static void *map(int fd, size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		die("mmap");
	close(fd);
	return p;
}

static void take_attachment(struct client *c, const struct abi2_reply *reply,
			    const int fds[ABI2_FDS])
{
	unsigned char *channel = map(fds[1], ABI2_CHANNEL_BYTES);
	uint32_t nobody = 0;

	c->arena = map(fds[0], reply->arena_bytes);
	c->context = map(fds[2], sizeof(*c->context));
	close(fds[3]); /* it records all, whatever the policy */
	c->channel = (void *)channel;
	c->grants = (void *)(channel + ABI2_GRANTS_OFFSET);
	c->area = (void *)(channel + ABI2_AREAS_OFFSET);
	c->segment = NULL;
	memcpy(c->request.token, reply->token, sizeof(reply->token));
	if (c->channel->magic != ABI2_MAGIC ||
	    c->channel->version != ABI2_VERSION ||
	    c->context->magic != ABI2_MAGIC)
		die("what was attached is not of ABI 2");
	store_relaxed(&c->area->segment, ABI2_SEGMENT_NONE);
	if (!__atomic_compare_exchange_n(&c->area->owner_tid, &nobody,
					 (uint32_t)gettid(), false,
					 __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		die("the first slot is somebody's");
	store_relaxed(&c->context->slots[0].tid, (uint32_t)gettid());
	c->attached++;
}

static void attach(struct client *c)
{
	const struct timespec pause = {.tv_nsec = CONNECT_PAUSE_MS * 1000000};
	struct abi2_reply reply;
	int fds[ABI2_FDS];

	for (int i = 0; !exchange(c, &reply, fds); i++) {
		if (i == CONNECT_TRIES)
			die("no daemon to attach to");
		nanosleep(&pause, NULL);
	}
	if (!reply.resumed)
		take_attachment(c, &reply, fds);
	else if (c->attached)
		c->resumed++;
	else
		die("what the daemon resumed never was");
}

/* It has one thread, which is in no queue here. */
static void take_context(struct client *c, const struct abi2_news *news, int fd)
{
	munmap(c->context, sizeof(*c->context));
	c->context = map(fd, sizeof(*c->context));
	if (send(c->socket, news, sizeof(*news), MSG_NOSIGNAL) < 0)
		die("send");
}

/* False: there is none, for now (EAGAIN) or for good. */
static bool hear(struct client *c)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct abi2_news news = {0};
	struct iovec iov = {&news, sizeof(news)};
	struct msghdr message = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	const struct cmsghdr *h;
	int fd;

	errno = 0;
	if (recvmsg(c->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) <= 0)
		return false;
	h = CMSG_FIRSTHDR(&message);
	if (!h || h->cmsg_len != CMSG_LEN(sizeof(int)))
		return true;
	memcpy(&fd, CMSG_DATA(h), sizeof(fd));
	if (!c->is_deaf && news.magic == ABI2_MAGIC &&
	    news.kind == ABI2_NEWS_CONTEXT)
		take_context(c, &news, fd);
	else
		close(fd); /* it records all, whatever the policy */
	return true;
}

/* Attach anew in the middle of nothing: between two traces. */
static void listen_to_daemon(struct client *c)
{
	while (hear(c))
		;
	if (errno == EAGAIN)
		return;
	close(c->socket);
	attach(c);
}

static void ring(struct client *c)
{
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (!load_relaxed(&c->channel->sleeping))
		return;
	__atomic_fetch_add(&c->channel->rung, 1, __ATOMIC_RELAXED);
	syscall(SYS_futex, &c->channel->rung, FUTEX_WAKE, INT_MAX, NULL, NULL,
		0);
}

/* ---------------------------------------------------------------- write --- */

static bool take_segment(struct client *c)
{
	struct abi2_grants *g = c->grants;
	uint32_t tail = load_acquire(&g->tail);
	uint32_t segment, generation, head;

	do {
		head = load_acquire(&g->head);
		/* The node takes grants back, so the head can be behind. */
		if (head == tail || head - tail > ABI2_GRANTS)
			return false;
		segment = load_relaxed(&g->entries[tail % ABI2_GRANTS].segment);
		generation = load_relaxed(
			&g->entries[tail % ABI2_GRANTS].generation);
	} while (!__atomic_compare_exchange_n(&g->tail, &tail, tail + 1, false,
					      __ATOMIC_ACQ_REL,
					      __ATOMIC_ACQUIRE));
	if (c->segment) {
		uint64_t life = (uint32_t)load_relaxed(&c->segment->life);

		store_release(&c->segment->life,
			      (uint64_t)ABI2_SEALED << 32 | life);
		count_up(&g->moves);
	}
	c->number = segment & ~ABI2_GRANT_FRESH;
	c->segment =
		(void *)(c->arena + (size_t)c->number * ABI2_SEGMENT_BYTES);
	c->cursor = (unsigned char *)c->segment + ABI2_FIRST_RUN;
	c->floor = (unsigned char *)c->segment + ABI2_SEGMENT_BYTES;
	store_relaxed(&c->segment->runs, 0);
	store_relaxed(&c->segment->slot, 0);
	store_release(&c->segment->life, (uint64_t)generation);
	store_release(&c->area->segment, c->number);
	ring(c);
	return true;
}

static void write_records(struct abi2_run *run, unsigned char *cursor,
			  uint32_t mix_bits, uint32_t records)
{
	uint32_t committed = 0;

	for (uint32_t i = 0; i < records; i++) {
		struct abi2_record *r = (void *)(cursor + committed);

		r->payload_bytes = RECORD_BYTES;
		r->type = ABI2_RECORD_DATA;
		r->flags = 0;
		r->ticks = 0; /* unknown */
		memset(r + 1, 'f', RECORD_BYTES);
		committed += (uint32_t)sizeof(*r) + RECORD_BYTES;
		store_release(&run->word, committed / 4 << 18 | mix_bits);
	}
}

/* One run, first and last at once. */
static void write_trace(struct client *c, uint64_t hi, uint64_t lo,
			uint32_t records)
{
	const size_t header = offsetof(struct abi2_run, seq);
	size_t bytes =
		header + records * (sizeof(struct abi2_record) + RECORD_BYTES);
	uint64_t mix = abi2_mix(hi, lo);
	uint32_t mix_bits = (uint32_t)mix & 0x3ffff;
	struct abi2_run *run;
	uint64_t entry;

	if (!c->segment || (size_t)(c->floor - c->cursor) < bytes + 8) {
		if (!take_segment(c)) {
			c->lost += records;
			return;
		}
	}
	run = (void *)c->cursor;
	run->trace_hi[0] = (uint32_t)hi;
	run->trace_hi[1] = (uint32_t)(hi >> 32);
	store_relaxed(&run->word, mix_bits);
	run->handle = ++c->handles;
	store_relaxed(&c->area->own_handle, run->handle);
	entry = abi2_entry(mix,
			   (uint32_t)(c->cursor - (unsigned char *)c->segment),
			   ABI2_FIRST);
	c->floor -= 8;
	store_relaxed((uint64_t *)c->floor, entry);
	store_release(&c->segment->runs, c->segment->runs + 1);
	write_records(run, c->cursor + header, mix_bits, records);
	store_release((uint64_t *)c->floor, entry | ABI2_LAST | ABI2_CLOSED);
	store_relaxed(&c->area->own_handle, 0);
	c->cursor += bytes;
}

static void fire(struct client *c, uint64_t hi, uint64_t lo)
{
	struct abi2_context *x = c->context;
	uint32_t at = load_relaxed(&x->trigger_head);
	struct abi2_cell *cell;

	do {
		cell = &x->cells[at % ABI2_CELLS];
		if (load_acquire(&cell->seq) != at) {
			fprintf(stderr, "frozen_client: the queue is full\n");
			exit(1);
		}
	} while (!__atomic_compare_exchange_n(&x->trigger_head, &at, at + 1,
					      false, __ATOMIC_ACQ_REL,
					      __ATOMIC_ACQUIRE));
	cell->n_laterals = 0;
	cell->source = ABI2_TRIGGER_APPLICATION;
	cell->zero = 0;
	cell->trace_hi = hi;
	cell->trace_lo = lo;
	cell->ticks = 0;
	memset(cell->name, 0, sizeof(cell->name));
	memset(cell->why, 0, sizeof(cell->why));
	memcpy(cell->name, "frozen", 6);
	/* It is another one's by now if the node waited too long for it. */
	if (!__atomic_compare_exchange_n(&cell->seq, &at, at + 1, false,
					 __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		count_up(&x->triggers_lost);
	ring(c);
}

int main(int argc, char **argv)
{
	struct client c = {
		.request =
			{
				.magic = ABI2_MAGIC,
				.version = ABI2_VERSION,
				.oldest = ABI2_VERSION,
				.pid = getpid(),
				.service = "frozen",
			},
	};
	char line[LINE_BYTES];

	c.is_deaf = argc == 3 && !strcmp(argv[2], "deaf");
	if (argc != 2 + c.is_deaf) {
		fprintf(stderr, "usage: frozen_client SOCKET [deaf]\n");
		return 2;
	}
	c.path = argv[1];
	attach(&c);
	puts("attached");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		uint64_t hi, lo;
		uint32_t records;
		int fires;

		if (sscanf(line, "%" SCNx64 " %" SCNx64 " %" SCNu32 " %d", &hi,
			   &lo, &records, &fires) != 4) {
			fprintf(stderr, "frozen_client: not understood: %s",
				line);
			return 2;
		}
		listen_to_daemon(&c);
		write_trace(&c, hi, lo, records);
		if (fires)
			fire(&c, hi, lo);
		printf("%" PRIu32 " %" PRIu32 " %" PRIu32 "\n", c.lost,
		       c.attached, c.resumed);
		fflush(stdout);
	}
	return 0;
}
