/* SPDX-License-Identifier: Apache-2.0 */
/* The policy table (abi/policy.h). */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hash.h"
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

static struct left_out *first_over(struct ledger_header *h,
				   const struct left_out *but)
{
	struct left_out *first = NULL;

	for (uint32_t i = 0; i < LEFT_OUT_MAX; i++) {
		struct left_out *l = &h->left_out[i];

		if (l != but && (!first || l->until_ns < first->until_ns))
			first = l;
	}
	return first;
}

/* A place for one more. Of many changes the oldest two become one: it leaves out as many
 * traces as both, for as long as the later one. */
static struct left_out *make_place(struct ledger_header *h)
{
	struct left_out *place = first_over(h, NULL);
	struct left_out *next = first_over(h, place);

	if (!place->until_ns)
		return place;
	if (place->low < next->low)
		WRITE_ONCE(next->low, place->low);
	if (place->high > next->high)
		WRITE_ONCE(next->high, place->high);
	store_release(&place->until_ns, 0);
	return place;
}

/* Before processes read the new one. Some begin handles by the old one for a while yet:
 * a thread that has just read it; all, after a restart, until they have the successor's
 * table. Returns whether there is a difference. */
static bool leave_out(struct bsn *n, uint64_t before)
{
	struct ledger_header *h = n->ledger.header;
	uint64_t threshold = n->config.percentage_threshold;
	struct left_out *l;

	if (!h->granted_ns || threshold == before)
		return false;
	l = make_place(h);
	WRITE_ONCE(l->low, threshold < before ? threshold : before);
	WRITE_ONCE(l->high, threshold < before ? before : threshold);
	store_release(&l->until_ns, n->now_ns + TRACE_NS);
	return true;
}

static bool is_between(const struct left_out *l, uint64_t hash)
{
	return hash >= l->low &&
	       (hash < l->high || l->high == BS_PERCENTAGE_ALL);
}

bool policy_left_out(const struct bsn *n, struct bs_trace_id id,
		     uint64_t granted_ns)
{
	for (uint32_t i = 0; i < LEFT_OUT_MAX; i++) {
		const struct left_out *l = &n->ledger.header->left_out[i];
		uint64_t state;

		/* A trace of which all that is found is younger began after the
		 * change (TRACE_NS). */
		if (n->now_ns >= l->until_ns && granted_ns >= l->until_ns)
			continue;
		state = bs_hash_prepare(BS_HASH_PERCENTAGE,
					sizeof(BS_HASH_PERCENTAGE) - 1,
					n->config.cluster_seed);
		if (is_between(l, bs_hash_trace(state, id)))
			return true;
	}
	return false;
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
	leave_out(n, n->ledger.header->percentage_threshold);
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
	/* Before all are adopted, the first poll tells the slices. */
	if (leave_out(n, before) && n->recovered) {
		slices_left_out(n, true);
		store_publish(n);
	}
	fill(n);
	node_unlock(n);
}
