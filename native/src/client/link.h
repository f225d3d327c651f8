/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection to the daemon. There is one, and the attach thread owns it.
 *
 * A daemonising application may close its descriptor, and get the number back
 * for a file of its own, so it is used only while it still is the socket that
 * it was. So it is with those that a packet brings. All under bs_lock.
 */
#ifndef BS_LINK_H
#define BS_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/un.h>

/* More than any packet brings; more still are noticed, and closed. */
#define BS_LINK_FDS_MAX 8

/* Room for what a newer daemon adds to a packet. */
#define BS_LINK_PACKET_MAX 1024

/* Which file it is, whatever its number. */
struct bs_file {
	dev_t device;
	ino_t inode;
};

struct bs_packet {
	size_t bytes; /* that came; those beyond are 0 */
	int n_fds;    /* the caller's; -1: some were lost */
	int fds[BS_LINK_FDS_MAX];
	struct bs_file files[BS_LINK_FDS_MAX];
	_Alignas(8) unsigned char content[BS_LINK_PACKET_MAX];
};

/* 0, or a negative errno. */
int bs_link_open(const struct sockaddr_un *address);
void bs_link_close(void);
/* Make whoever waits for it return. */
void bs_link_shut(void);
int bs_link_send(const void *packet, size_t bytes);

/* Wait until there is something to read; bs_lock is given up meanwhile. 1; 0 on
 * time-out, a negative errno if the socket is not ours any more. */
int bs_link_wait(int timeout_ms);
/* False when the daemon hung up. */
bool bs_link_receive(struct bs_packet *packet);
void bs_packet_close_fds(struct bs_packet *packet);

#endif
