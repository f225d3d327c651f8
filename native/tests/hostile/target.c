// SPDX-License-Identifier: Apache-2.0
#include "target.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "barrier.h"

/* A daemon under attack may take its time. */
#define REPLY_TIMEOUT_MS 5000

/* Honest traces that an attacker is after: those of the last second or so. */
#define AIM_BACK 512
#define AIM_AHEAD 64

static uint64_t random_state;

void random_seed(uint64_t seed)
{
	random_state = seed * 2654435761u + 1;
}

uint64_t random_u64(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state * 0x2545f4914f6cdd1dull;
}

uint32_t below(uint32_t limit)
{
	return (uint32_t)(random_u64() % limit);
}

int target_connect(const struct target *t)
{
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -errno;
	if (connect(fd, (const struct sockaddr *)&t->address,
		    sizeof(t->address))) {
		int error = errno;

		close(fd);
		return -error;
	}
	return fd;
}

static bool receive(int connection, struct bs_attach_reply *reply,
		    int fds[BS_FDS])
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * BS_FDS)];
	} control;
	struct iovec iov = {reply, sizeof(*reply)};
	struct msghdr m = {.msg_iov = &iov,
			   .msg_iovlen = 1,
			   .msg_control = &control,
			   .msg_controllen = sizeof(control)};
	struct pollfd p = {.fd = connection, .events = POLLIN};
	const struct cmsghdr *c;

	memset(reply, 0, sizeof(*reply));
	if (poll(&p, 1, REPLY_TIMEOUT_MS) <= 0 ||
	    recvmsg(connection, &m, MSG_CMSG_CLOEXEC) <= 0)
		return false;
	c = CMSG_FIRSTHDR(&m);
	if (!c || c->cmsg_len != CMSG_LEN(sizeof(int) * BS_FDS))
		return false;
	memcpy(fds, CMSG_DATA(c), sizeof(int) * BS_FDS);
	return true;
}

static void *map(int fd, size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	return at == MAP_FAILED ? NULL : at;
}

bool target_attach(struct target *t)
{
	struct bs_attach_request request = {.magic = BS_ABI_MAGIC,
					    .version = BS_ABI_VERSION,
					    .oldest = BS_ABI_OLDEST,
					    .pid = getpid(),
					    .service = "hostile"};
	struct bs_attach_reply reply;
	int fds[BS_FDS];

	t->connection = target_connect(t);
	if (t->connection < 0)
		return false;
	if (send(t->connection, &request, sizeof(request), MSG_NOSIGNAL) !=
		    sizeof(request) ||
	    !receive(t->connection, &reply, fds)) {
		close(t->connection);
		t->connection = -1;
		return false;
	}
	t->arena_bytes = reply.arena_bytes;
	t->arena = map(fds[BS_FD_ARENA], t->arena_bytes);
	t->channel = map(fds[BS_FD_CHANNEL], BS_CHANNEL_BYTES);
	t->context = map(fds[BS_FD_CONTEXT], sizeof(*t->context));
	for (int i = 0; i < BS_FDS; i++)
		close(fds[i]);
	if (t->arena && t->channel && t->context)
		return true;
	target_detach(t);
	return false;
}

void target_detach(struct target *t)
{
	if (t->arena)
		munmap(t->arena, t->arena_bytes);
	if (t->channel)
		munmap(t->channel, BS_CHANNEL_BYTES);
	if (t->context)
		munmap(t->context, sizeof(*t->context));
	close(t->connection);
	t->arena = t->channel = NULL;
	t->context = NULL;
	t->connection = -1;
}

bool target_is_gone(const struct target *t)
{
	struct pollfd p = {.fd = t->connection, .events = POLLIN};
	char byte;

	return poll(&p, 1, 0) > 0 &&
	       recv(t->connection, &byte, 1, MSG_DONTWAIT) <= 0;
}

struct bs_trace_id target_honest_trace(const struct target *t)
{
	uint64_t next = READ_ONCE(t->aim->next_lo);

	return (struct bs_trace_id){READ_ONCE(t->aim->hi),
				    next + AIM_AHEAD -
					    below(AIM_AHEAD + AIM_BACK)};
}

struct bs_trace_id target_finished_trace(const struct target *t)
{
	return (struct bs_trace_id){READ_ONCE(t->aim->hi),
				    READ_ONCE(t->aim->next_lo) - AIM_AHEAD -
					    below(AIM_BACK)};
}

uint64_t lie(void)
{
	static const uint64_t likely_lies[] = {
		0,     1,     8,	  31,	      32,	  63,
		64,    255,   256,	  1638,	      2048,	  4096,
		8191,  8192,  32768,	  65504,      65535,	  65536,
		65537, 65600, 0x7fffffff, 0x80000000, 0xffffffff, UINT64_MAX,
	};

	if (below(2))
		return random_u64();
	return likely_lies[below(sizeof(likely_lies) / 8)] + below(3) - 1;
}
