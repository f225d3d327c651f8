/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which traces used connections lately, and through which devices: for who sees that
 * a link goes down, or a queue is full, and asks whom it hit.
 */
#include <string.h>

#include "internal.h"

void users_add(struct bsp *p, const struct probes_record *r)
{
	struct user *u;

	pthread_mutex_lock(&p->lock);
	u = &p->users[p->users_head++ % USERS_MAX];
	u->time_ns = r->event.time_ns;
	u->id[0] = r->trace_hi;
	u->id[1] = r->trace_lo;
	u->namespace = r->namespace;
	u->device = r->device;
	u->port = r->port;
	pthread_mutex_unlock(&p->lock);
}

static bool is_asked_for(const struct user *u, uint32_t namespace,
			 uint32_t device, uint16_t port)
{
	return u->namespace == namespace && (!device || u->device == device) &&
	       (!port || u->port == port);
}

static bool is_among(const uint64_t *ids, size_t count, const uint64_t *id)
{
	for (size_t i = 0; i < count; i++) {
		if (ids[2 * i] == id[0] && ids[2 * i + 1] == id[1])
			return true;
	}
	return false;
}

size_t bsp_get_users(struct bsp *p, uint32_t namespace, uint32_t device,
		     uint16_t port, uint64_t within_ns, uint64_t *ids,
		     size_t most)
{
	uint64_t now_ns = monotonic_ns();
	size_t found = 0;

	/* Who uses a connection all the time is told of now and then. */
	within_ns += PROBES_USE_EVERY_NS;

	pthread_mutex_lock(&p->lock);
	for (uint32_t i = 1; i <= USERS_MAX && found < most; i++) {
		const struct user *u =
			&p->users[(p->users_head - i) % USERS_MAX];

		/* Of several CPUs: nearly in the order of time. */
		if (!u->time_ns || now_ns - u->time_ns > within_ns)
			continue;
		if (!is_asked_for(u, namespace, device, port) ||
		    is_among(ids, found, u->id))
			continue;
		memcpy(&ids[2 * found++], u->id, sizeof(u->id));
	}
	pthread_mutex_unlock(&p->lock);
	return found;
}
