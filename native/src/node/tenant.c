/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quotas: whose segments go when memory is short. A tenant is a user, or a group
 * of users, whose processes are counted together. It has a share of the pool, of
 * which nobody else can push it out:
 *
 *   with a quota   so many bytes
 *   without        an equal part of what quotas leave, but only of what was
 *                  written within the last minute: what is older is worth less
 *                  than another's last seconds
 *
 * What nobody uses of his share is for all: who is over his own competes for it by
 * age, as if there were no shares.
 */
#include <errno.h>
#include <stdlib.h>

#include "internal.h"

/* Longer than what a trigger looks back on. */
#define FAIR_NS (60 * NS_PER_S)

/* -------------------------------------------------------------- tenants --- */

static struct tenant *tenant_find(const struct bsn *n, uint64_t key)
{
	struct tenant *t = n->tenants.first;

	while (t && t->key != key)
		t = t->next;
	return t;
}

static struct tenant *tenant_get(struct bsn *n, uint64_t key)
{
	struct tenant *t = tenant_find(n, key);

	if (t)
		return t;
	t = calloc(1, sizeof(*t));
	if (!t)
		return NULL;
	t->key = key;
	list_init(&t->sealed);
	t->next = n->tenants.first;
	n->tenants.first = t;
	return t;
}

void tenants_init(struct bsn *n)
{
	list_init(&n->tenants.nobody.sealed);
}

void tenants_free(struct bsn *n)
{
	while (n->tenants.first) {
		struct tenant *t = n->tenants.first;

		n->tenants.first = t->next;
		free(t);
	}
}

/* An equal part each of what quotas leave. */
static void share_out(struct bsn *n)
{
	uint32_t left = n->pool.threshold, without = 0;
	struct tenant *t;

	for (t = n->tenants.first; t; t = t->next) {
		if (t->has_quota)
			left -= t->share < left ? t->share : left;
		else
			without++;
	}
	for (t = n->tenants.first; t; t = t->next) {
		if (!t->has_quota)
			t->share = left / without;
	}
}

static void count_live(struct bsn *n, struct tenant *t, int32_t clients)
{
	n->tenants.live -= t->live > 0;
	t->live += (uint32_t)clients;
	n->tenants.live += t->live > 0;
}

/* Until it is told whose it is, it is nobody's. */
void tenant_enter(struct bsn *n, struct client *c)
{
	c->tenant = &n->tenants.nobody;
	c->tenant->clients++;
	count_live(n, c->tenant, 1);
}

/* It is gone; what it wrote is still there. */
void tenant_exit(struct bsn *n, struct client *c)
{
	count_live(n, c->tenant, -1);
}

void tenant_leave(struct bsn *n, struct client *c)
{
	struct tenant *t = c->tenant, **link = &n->tenants.first;

	if (--t->clients || t->has_quota || t == &n->tenants.nobody)
		return;
	while (*link != t)
		link = &(*link)->next;
	*link = t->next;
	free(t);
	share_out(n);
}

/* Whose one is that has just come is not known yet. */
bool tenant_has_others(const struct bsn *n, const struct tenant *t)
{
	const struct tenant *nobody = &n->tenants.nobody;
	uint32_t clients = t->clients;

	if (t != nobody)
		clients += nobody->clients;
	return n->clients.count > clients;
}

/* ------------------------------------------------------------- segments --- */

void tenant_count(struct client *c, int32_t segments)
{
	c->held += (uint32_t)segments;
	if (c->tenant)
		c->tenant->held += (uint32_t)segments;
}

void tenant_seal(struct bsn *n, struct frame *f)
{
	struct list *l;

	f->next_tenant = NONE;
	/* The keep arena is everybody's. */
	if (!f->client->tenant)
		return;
	l = &f->client->tenant->sealed;
	f->prev_tenant = l->tail;
	if (l->tail == NONE)
		l->head = frame_number(n, f);
	else
		frame_at(n, l->tail)->next_tenant = frame_number(n, f);
	l->tail = frame_number(n, f);
	l->count++;
}

void tenant_unseal(struct bsn *n, struct frame *f)
{
	struct list *l;

	if (!f->client->tenant)
		return;
	l = &f->client->tenant->sealed;
	if (f->prev_tenant == NONE)
		l->head = f->next_tenant;
	else
		frame_at(n, f->prev_tenant)->next_tenant = f->next_tenant;
	if (f->next_tenant == NONE)
		l->tail = f->prev_tenant;
	else
		frame_at(n, f->next_tenant)->prev_tenant = f->prev_tenant;
	l->count--;
}

/* The order of sealing is made anew. */
void tenants_unseal_all(struct bsn *n)
{
	list_init(&n->tenants.nobody.sealed);
	for (struct tenant *t = n->tenants.first; t; t = t->next)
		list_init(&t->sealed);
}

/* ------------------------------------------------------------- eviction --- */

static bool is_protected(const struct bsn *n, uint32_t i)
{
	const struct tenant *t = frame_at(n, i)->client->tenant;

	if (!t || t->held > t->share)
		return false;
	return t->has_quota ||
	       ns_since(n, n->ledger.records[i].sealed) < FAIR_NS;
}

static uint32_t older(const struct bsn *n, uint32_t i, uint32_t k)
{
	if (i == NONE || k == NONE)
		return i == NONE ? k : i;
	return n->ledger.records[i].sealed < n->ledger.records[k].sealed ? i
									 : k;
}

static uint32_t oldest_unprotected(const struct bsn *n)
{
	uint32_t oldest = n->tenants.nobody.sealed.head;

	for (const struct tenant *t = n->tenants.first; t; t = t->next) {
		uint32_t i = t->sealed.head;

		if (i != NONE && !is_protected(n, i))
			oldest = older(n, oldest, i);
	}
	return oldest;
}

/*
 * The segment to reclaim so that c gets one (NULL: so that there is room): the
 * oldest that is not protected. Where all are, what c's tenant wrote goes for it,
 * if it is not over its share by what it has in hand. NONE: none may go.
 */
uint32_t tenant_victim(const struct bsn *n, const struct client *c)
{
	uint32_t kept = n->keep.arena.sealed.head;
	uint32_t oldest = n->pool.sealed.head, i;

	if (oldest == NONE || !is_protected(n, oldest))
		return oldest;
	i = oldest_unprotected(n);
	if (i != NONE)
		return older(n, i, kept);
	if (!c || !c->tenant)
		return oldest;
	if (c->tenant->held > c->tenant->share)
		return NONE;
	i = older(n, c->tenant->sealed.head, kept);
	return i == NONE ? oldest : i;
}

/* ------------------------------------------------------------------ API --- */

int bsn_tenant_quota(struct bsn *n, uint64_t tenant, uint64_t bytes)
{
	struct tenant *t;

	node_lock(n);
	t = tenant_get(n, tenant);
	if (t) {
		t->has_quota = true;
		t->share = (uint32_t)(bytes / SEGMENT);
		share_out(n);
	}
	node_unlock(n);
	return t ? 0 : -ENOMEM;
}

int bsn_tenant_bytes(struct bsn *n, uint64_t tenant, uint64_t *bytes)
{
	const struct tenant *t;

	node_lock(n);
	t = tenant_find(n, tenant);
	*bytes = t ? (uint64_t)t->held * SEGMENT : 0;
	node_unlock(n);
	return t ? 0 : -ENOENT;
}

int bsn_client_tenant(struct bsn *n, int client, uint64_t tenant,
		      uint64_t now_ns)
{
	struct client *c;
	struct tenant *t;
	int err = -ENOENT;

	node_lock(n);
	node_set_time(n, now_ns);
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (!c)
		goto out;
	err = -EBUSY;
	if (c->tenant != &n->tenants.nobody || c->sealed.count ||
	    c->parked.count)
		goto out;
	err = -ENOMEM;
	t = tenant_get(n, tenant);
	if (!t)
		goto out;
	err = 0;
	c->tenant->clients--;
	t->clients++;
	if (c->live) {
		count_live(n, c->tenant, -1);
		count_live(n, t, 1);
	}
	c->tenant->held -= c->held;
	t->held += c->held;
	c->tenant = t;
	share_out(n);
	/* Of what is nobody's it may not have had enough. */
	if (c->live && n->recovered)
		grants_first(n, c);
out:
	node_unlock(n);
	return err;
}
