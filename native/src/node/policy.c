/* SPDX-License-Identifier: Apache-2.0 */
/* The policy table (abi/policy.h). */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

/*
 * How long a trace can be triggered that was recorded before the percentage was
 * lowered. What fires for it does so after seconds or minutes: when a slow request
 * or a batch ends, when somebody reads an alert. Whoever fires meanwhile for one
 * that is not recorded any more has it collected, as a trace of which all is
 * missing: so the while is no longer.
 */
#define EARLIER_NS (300 * NS_PER_S)

/* Also while no less is recorded than then: who has read that less is, and reads this
 * next, must find it. */
static bool earlier_holds(const struct bsn *n)
{
	return n->now_ns < n->ledger.header->earlier_until_ns;
}

static void fill(struct bsn *n)
{
	uint64_t threshold = n->config.percentage_threshold;
	struct ledger_header *h = n->ledger.header;
	struct bs_policy *p = n->policy;

	/* A successor must know of the highest that processes may have read. */
	if (threshold > h->percentage_threshold)
		store_release(&h->percentage_threshold, threshold);
	WRITE_ONCE(p->earlier_threshold,
		   earlier_holds(n) ? h->earlier_threshold : 0);
	store_release(&p->percentage_threshold, threshold);
	WRITE_ONCE(p->trust_incoming, n->config.trust_incoming);
	store_release(&h->percentage_threshold, threshold);
}

/* Processes recorded by it until now. */
static void remember(struct bsn *n, uint64_t threshold)
{
	struct ledger_header *h = n->ledger.header;

	if (!h->granted_ns || threshold <= n->config.percentage_threshold)
		return;
	if (n->now_ns >= h->earlier_until_ns ||
	    threshold > h->earlier_threshold)
		WRITE_ONCE(h->earlier_threshold, threshold);
	store_release(&h->earlier_until_ns, n->now_ns + EARLIER_NS);
}

int policy_init(struct bsn *n)
{
	int fd = memfd_new("backsight-policy");

	if (fd < 0)
		return fd;
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
	n->policy->version = BS_ABI_OLDEST; /* one table, for clients of any */
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

void policy_adopt(struct bsn *n)
{
	remember(n, n->ledger.header->percentage_threshold);
	fill(n);
}

void policy_renew(struct bsn *n)
{
	if (n->policy->earlier_threshold && !earlier_holds(n))
		fill(n);
}

int bsn_policy_fd(struct bsn *n)
{
	return n->policy_fd;
}

void bsn_set_sampling(struct bsn *n, uint64_t percentage_threshold,
		      bool trust_incoming)
{
	uint64_t before;

	node_lock(n);
	before = n->config.percentage_threshold;
	n->config.percentage_threshold = percentage_threshold;
	remember(n, before);
	n->config.trust_incoming = trust_incoming;
	fill(n);
	node_unlock(n);
}
