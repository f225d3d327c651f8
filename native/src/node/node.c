/* SPDX-License-Identifier: Apache-2.0 */
/* Life and configuration of a node; its work. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "hash.h"
#include "internal.h"

#define POOL_MIN (4ull << 20)
#define STORE_MIN (1ull << 20)

/* Frames are numbered in 32 bits; far more than a machine has. */
#define POOL_MAX (1ull << 39)

/* So are blocks of 2 KiB. */
#define STORE_MAX (1ull << 41)

/* A slice must hold at least one record of the largest size. */
#define TRACE_BYTES_MIN (2ull * BS_PAYLOAD_MAX)

/* ------------------------------------------------------- configuration --- */

struct complaint {
	char *message;
	size_t bytes;
};

__attribute__((format(printf, 2, 3))) static int
complain(const struct complaint *to, const char *format, ...)
{
	va_list args;

	if (to->message && to->bytes) {
		va_start(args, format);
		vsnprintf(to->message, to->bytes, format, args);
		va_end(args);
	}
	return -EINVAL;
}

static int check_range(const struct complaint *to, const char *field,
		       uint64_t value, uint64_t min, uint64_t max)
{
	if (value >= min && value <= max)
		return 0;
	return complain(to,
			"%s is %llu; it must be at least %llu and at most %llu",
			field, (unsigned long long)value,
			(unsigned long long)min, (unsigned long long)max);
}

static int check_config(const struct bsn_config *c, const struct complaint *to)
{
	size_t name = strnlen(c->node_name, sizeof(c->node_name));
	int err = 0;

	if (!name || name > BS_NODE_NAME_MAX)
		return complain(
			to,
			"node_name is empty or not terminated; it must have 1 to %d bytes",
			BS_NODE_NAME_MAX);
	err = err ? err
		  : check_range(to, "pool_bytes", c->pool_bytes, POOL_MIN,
				POOL_MAX);
	err = err ? err
		  : check_range(to, "arena_bytes", c->arena_bytes, SEGMENT,
				c->pool_bytes);
	if (!err && c->arena_bytes % SEGMENT)
		err = complain(
			to, "arena_bytes is %llu; it must be a multiple of %u",
			(unsigned long long)c->arena_bytes, SEGMENT);
	err = err ? err
		  : check_range(to, "store_bytes", c->store_bytes, STORE_MIN,
				STORE_MAX);
	err = err ? err
		  : check_range(to, "trace_bytes_max", c->trace_bytes_max,
				TRACE_BYTES_MIN, STORE_MAX);
	err = err ? err
		  : check_range(to, "reclaim_percent", c->reclaim_percent, 10,
				100);
	err = err ? err
		  : check_range(to, "clients_max", c->clients_max, 1, 65536);
	err = err ? err
		  : check_range(to, "tombstones", c->tombstones, 0, 1u << 30);
	err = err ? err
		  : check_range(to, "ticks_per_s", c->ticks_per_s, 1000,
				1000000000000ull);
	return err;
}

/* ---------------------------------------------------------------- life --- */

static int make_secret(struct bsn *n)
{
	if (getrandom(&n->secret, sizeof(n->secret), 0) != sizeof(n->secret))
		return -EIO;
	n->secret |= 1;
	return 0;
}

int bsn_new(const struct bsn_config *config, struct bsn **node, char *message,
	    size_t message_bytes)
{
	struct complaint to = {message, message_bytes};
	struct bsn *n;
	int err = check_config(config, &to);

	if (err)
		return err;
	n = calloc(1, sizeof(*n));
	if (!n)
		return -ENOMEM;
	pthread_mutex_init(&n->gate, NULL);
	pthread_mutex_init(&n->lock, NULL);
	n->config = *config;
	n->priority_seed = config->cluster_seed;
	n->node_id = bs_fnv1a64(BS_FNV1A64_BASIS, config->node_name,
				strlen(config->node_name));
	n->ledger.fd = n->store.fd = n->policy_fd = -1;
	n->scratch = malloc(SEGMENT);
	n->events.ring = calloc(EVENTS_MAX, sizeof(*n->events.ring));
	n->clients.all = calloc(config->clients_max, sizeof(struct client *));
	err = n->scratch && n->events.ring && n->clients.all ? 0 : -ENOMEM;
	err = err ? err : make_secret(n);
	tenants_init(n);
	err = err ? err : ledger_init(n);
	err = err ? err : pool_init(n);
	err = err ? err : keep_init(n);
	err = err ? err : store_init(n);
	err = err ? err : policy_init(n);
	err = err ? err : wait_init(n);
	if (err) {
		complain(&to, "no memory for the pool's tables: %s",
			 strerror(-err));
		bsn_free(n);
		return err;
	}
	*node = n;
	return 0;
}

void bsn_free(struct bsn *n)
{
	if (!n)
		return;
	wait_free(n); /* it listens to clients */
	for (uint32_t i = 0; n->clients.all && i < n->clients.count; i++)
		client_free(n->clients.all[i]);
	while (n->searches) {
		struct search *s = n->searches;

		n->searches = s->next;
		search_free(n, s);
		free(s);
	}
	tenants_free(n);
	keep_free(n);
	store_free(n);
	pool_free(n);
	ledger_free(n);
	policy_free(n);
	free(n->adoption.frames);
	free(n->clients.all);
	free(n->clients.drained);
	free(n->events.ring);
	free(n->scratch);
	pthread_mutex_destroy(&n->lock);
	pthread_mutex_destroy(&n->gate);
	free(n);
}

int bsn_store_fd(struct bsn *n)
{
	return n->store.fd;
}

int bsn_keep_fd(struct bsn *n)
{
	return n->ledger.fd;
}

/* ---------------------------------------------------------------- lock --- */

/* A mutex alone lets a thread that gives it up and takes it again pass one that
 * waits. Who waits for `lock` holds `gate`. */
void node_lock(struct bsn *n)
{
	pthread_mutex_lock(&n->gate);
	pthread_mutex_lock(&n->lock);
	pthread_mutex_unlock(&n->gate);
}

void node_unlock(struct bsn *n)
{
	pthread_mutex_unlock(&n->lock);
}

void node_give_way(struct bsn *n)
{
	node_unlock(n);
	node_lock(n);
}

void node_commit_and_give_way(struct bsn *n)
{
	store_publish(n);
	node_give_way(n);
}

void node_set_time(struct bsn *n, uint64_t now_ns)
{
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
}

/* ---------------------------------------------------------------- work --- */

static int events_waiting(struct bsn *n)
{
	uint64_t waiting =
		n->events.head - n->events.tail + n->clients.n_drained;

	return (int)(waiting + (store_next_changed(n) != NULL));
}

/* Of triggers that are in the control plane's hands. */
static void give_back_cells(struct bsn *n)
{
	struct client *c;
	uint32_t count = 0;

	for_each_client(n, c) {
		triggers_done(c);
		if (++count % CLIENTS_A_PIECE)
			continue;
		node_give_way(n);
		/* More were taken meanwhile: those are done with after them. */
		if (n->events.unsettled)
			break;
	}
}

/* All of before is adopted: from here on it is committed what becomes of it. */
void node_recover(struct bsn *n)
{
	if (n->recovered)
		return;
	n->recovered = true;
	adopt_end(n);
	slices_close_gone(n, false);
	slices_left_out(n, false);
	for (uint32_t i = 1; n->store.n_slices && i < n->store.fresh; i++) {
		struct slice *s = n->store.slices[i];

		if (s && s->flags & BSN_SLICE_SEARCHING && !s->search)
			search_later(n, s);
	}
	/* What a predecessor did not see before it was parked. */
	if (n->store.n_slices)
		watch_at_once(n);
	pool_shrink(n);
}

/* What was written and lost until now. */
static void observe_all(struct bsn *n)
{
	uint64_t end = n->cost + PIECE_ENTRIES;
	struct client *c;

	for_each_client(n, c) {
		if (c->live)
			c = threads_observe(n, c, &end);
		if (c && c->live)
			c = losses_read(n, c, &end);
		n->cost += PIECE_ENTRIES / CLIENTS_A_PIECE;
		if (c)
			threads_give_way(n, c, &end);
	}
}

void node_catch_up(struct bsn *n, uint64_t now_ns)
{
	node_set_time(n, now_ns);
	node_recover(n);
	observe_all(n);
	/* Of what was lost the next poll tells the slices. */
	if (n->untied_news)
		bsn_wake(n);
}

static void grant_all(struct bsn *n)
{
	struct client *c;
	uint32_t count = 0;

	for_each_client(n, c) {
		uint32_t number = c->number;

		while (c && c->live && grants_take_back(n, c)) {
			node_give_way(n);
			c = client_find(n, number);
		}
		if (++count % CLIENTS_A_PIECE == 0)
			node_give_way(n);
	}
	for_each_client(n, c) {
		uint32_t number = c->number;

		while (c && c->live && grants_fill(n, c)) {
			node_give_way(n);
			c = client_find(n, number);
		}
		if (++count % CLIENTS_A_PIECE == 0)
			node_give_way(n);
	}
}

/* Pieces of memory that one poll takes back, of each process: 64 MiB. */
#define TAKE_BACK_PIECES 32u

static void take_back_all(struct bsn *n)
{
	struct client *c;
	uint32_t count = 0;
	bool more = true;

	for_each_client(n, c) {
		/* A system call, once a second. */
		if (memory_check(n, c) && ++count % CLIENTS_A_PIECE == 0)
			node_give_way(n);
	}
	for (uint32_t i = 0; more && i < TAKE_BACK_PIECES; i++) {
		more = false;
		for_each_client(n, c) {
			if (c->take_back == NONE)
				continue;
			more |= memory_take_back(n, c);
			node_give_way(n);
		}
	}
}

int bsn_poll(struct bsn *n, uint64_t now_ns)
{
	uint64_t looked_ns, last_search;
	int waiting;

	node_lock(n);
	node_set_time(n, now_ns);
	node_recover(n);
	looked_ns = n->now_ns;
	last_search = n->searches_made;
	policy_renew(n);
	n->waiting.cell_is_stuck = false;
	observe_all(n);
	/* Also of those that are gone: they may have left more than there was
	 * room for. */
	triggers_take_all(n);
	/* What was skipped or refused is nobody's business. */
	if (!n->events.unsettled)
		give_back_cells(n);
	if (n->store.n_slices)
		watch_all(n);
	search_waiting(n, last_search);
	n->searched_at_once = false;
	slices_untied_losses(n);
	grant_all(n);
	take_back_all(n);
	store_publish(n);
	/* Another thread may be in the midst of it, of a process that ended. */
	if (!n->telling)
		store_release(&n->ledger.header->told_ns, looked_ns);
	waiting = events_waiting(n);
	node_unlock(n);
	return waiting;
}

int bsn_events(struct bsn *n, struct bsn_event *events, int room)
{
	int count = 0;
	bool was_full;

	node_lock(n);
	was_full = n->events.head - n->events.tail == EVENTS_MAX;
	while (count < room) {
		struct bsn_event *e = &events[count];
		struct slice *s;

		if (n->events.head != n->events.tail) {
			*e = n->events.ring[n->events.tail++ % EVENTS_MAX];
			count++;
			continue;
		}
		memset(e, 0, sizeof(*e));
		e->time_ns = n->now_ns;
		if (n->clients.n_drained) {
			e->kind = BSN_EVENT_CLIENT_DRAINED;
			e->client = n->clients.drained[--n->clients.n_drained];
			count++;
			continue;
		}
		s = store_next_changed(n);
		if (!s)
			break;
		e->id = s->id;
		if (s->full_event) {
			e->kind = BSN_EVENT_STORE_FULL;
			s->full_event = false;
		} else {
			e->kind = BSN_EVENT_SLICE_CHANGED;
			s->changed = false;
		}
		count++;
	}
	node_unlock(n);
	/* Triggers that found no room wait in their queues, and ring no more. */
	if (was_full && count)
		bsn_wake(n);
	return count;
}

void bsn_events_done(struct bsn *n)
{
	node_lock(n);
	/* Triggers that wait here are in nobody's hands yet. */
	if (n->events.head == n->events.tail) {
		n->events.unsettled = false;
		give_back_cells(n);
	}
	node_unlock(n);
}
