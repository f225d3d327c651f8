/* SPDX-License-Identifier: Apache-2.0 */
#include "link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client.h"

static int sock = -1;
static struct bs_file sock_file;

static bool file_of(int fd, struct bs_file *file)
{
	struct stat st;

	if (fstat(fd, &st))
		return false;
	file->device = st.st_dev;
	file->inode = st.st_ino;
	return true;
}

static bool is_still(int fd, const struct bs_file *file)
{
	struct bs_file now;

	return fd >= 0 && file_of(fd, &now) && now.device == file->device &&
	       now.inode == file->inode;
}

static bool is_ours(void)
{
	return is_still(sock, &sock_file);
}

int bs_link_open(const struct sockaddr_un *address)
{
	sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK,
		      0);
	if (sock < 0)
		return -errno;
	if (!file_of(sock, &sock_file)) {
		int failed = -errno;

		close(sock);
		sock = -1;
		return failed;
	}
	/* A socket that does not block, on a local address: now or never. */
	if (connect(sock, (const struct sockaddr *)address, sizeof(*address)))
		return -errno;
	return 0;
}

void bs_link_close(void)
{
	if (is_ours())
		close(sock);
	sock = -1;
}

void bs_link_shut(void)
{
	if (is_ours())
		shutdown(sock, SHUT_RDWR);
}

int bs_link_send(const void *packet, size_t bytes)
{
	if (!is_ours())
		return -ECONNRESET;
	if (send(sock, packet, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) !=
	    (ssize_t)bytes)
		return -errno;
	return 0;
}

int bs_link_wait(int timeout_ms)
{
	struct pollfd p = {.fd = sock, .events = POLLIN};
	int n;

	if (!is_ours())
		return -ECONNRESET;
	pthread_mutex_unlock(&bs_process.lock);
	n = poll(&p, 1, timeout_ms);
	pthread_mutex_lock(&bs_process.lock);
	if (n > 0 && !is_ours())
		return -ECONNRESET;
	return n < 0 ? 0 : n;
}

static void take_fd(struct bs_packet *packet, int fd)
{
	/* One that is gone already is nobody's. */
	if (!file_of(fd, &packet->files[packet->n_fds]))
		packet->files[packet->n_fds] = (struct bs_file){0};
	packet->fds[packet->n_fds++] = fd;
}

static void take_fds(struct bs_packet *packet, struct msghdr *msg)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c;
	     c = CMSG_NXTHDR(msg, c)) {
		int fd;
		size_t n;

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n && packet->n_fds < BS_LINK_FDS_MAX;
		     i++) {
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int),
			       sizeof(int));
			take_fd(packet, fd);
		}
	}
}

bool bs_link_receive(struct bs_packet *packet)
{
	union {
		char bytes[CMSG_SPACE(BS_LINK_FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = {packet->content, sizeof(packet->content)};
	struct msghdr msg = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	ssize_t got;

	memset(packet, 0, sizeof(*packet));
	got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	/* Told first, and once, if what we sent was not read; what was said
	 * before that comes behind it. */
	if (got < 0 && errno == ECONNRESET)
		got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	if (got <= 0)
		return false;
	packet->bytes = (size_t)got;
	take_fds(packet, &msg);
	if (msg.msg_flags & MSG_CTRUNC) {
		bs_packet_close_fds(packet);
		packet->n_fds = -1;
	}
	return true;
}

void bs_packet_close_fds(struct bs_packet *packet)
{
	for (int i = 0; i < packet->n_fds; i++) {
		if (is_still(packet->fds[i], &packet->files[i]))
			close(packet->fds[i]);
	}
	packet->n_fds = 0;
}
