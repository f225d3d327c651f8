/* SPDX-License-Identifier: Apache-2.0 */
/* The policy table (abi/policy.h). */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

static void fill(struct bsn *n)
{
	struct bs_policy *p = n->policy;

	WRITE_ONCE(p->percentage_threshold, n->config.percentage_threshold);
	WRITE_ONCE(p->trust_incoming, n->config.trust_incoming);
}

int policy_init(struct bsn *n)
{
	int fd = memfd_create("backsight-policy",
			      MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return -errno;
	n->policy_fd = fd;
	if (ftruncate(fd, BS_POLICY_BYTES))
		return -errno;
	n->policy = map_shared(fd, BS_POLICY_BYTES);
	if (!n->policy)
		return -ENOMEM;
	/* This mapping stays writable; no other one will be. */
	if (fcntl(fd, F_ADD_SEALS,
		  F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE |
			  F_SEAL_SEAL))
		return -errno;
	n->policy->version = BS_ABI_VERSION;
	n->policy->bytes = BS_POLICY_BYTES;
	n->policy->number = 1;
	fill(n);
	n->policy->magic = BS_ABI_MAGIC;
	return 0;
}

void policy_free(struct bsn *n)
{
	if (n->policy)
		munmap(n->policy, BS_POLICY_BYTES);
	if (n->policy_fd >= 0)
		close(n->policy_fd);
}

int bsn_policy_fd(struct bsn *n)
{
	return n->policy_fd;
}

void bsn_set_sampling(struct bsn *n, uint64_t percentage_threshold,
		      bool trust_incoming)
{
	node_lock(n);
	n->config.percentage_threshold = percentage_threshold;
	n->config.trust_incoming = trust_incoming;
	fill(n);
	node_unlock(n);
}
