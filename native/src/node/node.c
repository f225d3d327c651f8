/* SPDX-License-Identifier: Apache-2.0 */
/* Life and configuration of a node; its work; its slices. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

#define POOL_MIN (4ull << 20)
#define STORE_MIN (1ull << 20)

/* Runs are numbered in 32 bits, and one of 256 bytes is what index_init()
 * reckons with: half of what that allows, for what it adds on top. */
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
		  : check_range(to, "tombstones", c->tombstones, 1, 1u << 28);
	err = err ? err
		  : check_range(to, "ticks_per_s", c->ticks_per_s, 1000,
				1000000000000ull);
	if (!err && c->index_traces)
		err = check_range(to, "index_traces", c->index_traces, 64,
				  1u << 31);
	if (!err && c->index_runs)
		err = check_range(to, "index_runs", c->index_runs, 64,
				  1u << 31);
	return err;
}

/* ---------------------------------------------------------------- life --- */

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
	pthread_mutex_init(&n->lock, NULL);
	n->config = *config;
	n->node_id = bs_fnv1a64(BS_FNV1A64_BASIS, config->node_name,
				strlen(config->node_name));
	n->keep_fd = n->store.fd = -1;
	n->scratch = malloc(SEGMENT);
	n->events = calloc(EVENTS_MAX, sizeof(*n->events));
	n->clients = calloc(config->clients_max, sizeof(struct client *));
	err = n->scratch && n->events && n->clients ? 0 : -ENOMEM;
	err = err ? err : pool_init(n);
	err = err ? err : index_init(n);
	err = err ? err : keep_init(n);
	err = err ? err : store_init(n);
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
	for (uint32_t i = 0; n->clients && i < n->n_clients; i++)
		client_free(n->clients[i]);
	client_release_retired(n);
	keep_free(n);
	store_free(n);
	index_free(&n->index);
	pool_free(n);
	free(n->clients);
	free(n->events);
	free(n->scratch);
	free(n->chain);
	free(n->drained);
	pthread_mutex_destroy(&n->lock);
	free(n);
}

int bsn_store_fd(struct bsn *n)
{
	return n->store.fd;
}

int bsn_keep_fd(struct bsn *n)
{
	return n->keep_fd;
}

int bsn_adopt_store(struct bsn *n, uint64_t now_ns, int fd)
{
	int err;

	pthread_mutex_lock(&n->lock);
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	err = n->n_clients || n->store.n_slices ? -EBUSY : store_adopt(n, fd);
	pthread_mutex_unlock(&n->lock);
	return err;
}

int bsn_adopt_keep(struct bsn *n, uint64_t now_ns, int fd)
{
	int err;

	pthread_mutex_lock(&n->lock);
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	err = n->n_clients || n->keep.frames ? -EBUSY : keep_adopt(n, fd);
	pthread_mutex_unlock(&n->lock);
	return err;
}

/* ---------------------------------------------------------------- work --- */

static int events_waiting(struct bsn *n)
{
	uint64_t waiting = n->events_head - n->events_tail + n->n_drained;

	return (int)(waiting + (store_next_changed(n) != NULL));
}

/* Everything that was written so far, into the index. */
static void drain_all(struct bsn *n)
{
	struct client *c;

	n->open_runs_seen = false;
	for_each_client(n, c)
		drain_client(n, c);
}

static void give_back_cells(struct bsn *n)
{
	struct client *c;

	for_each_client(n, c)
		drain_triggers_done(c);
}

/* All of before is adopted: from here on it is committed what becomes of it. */
static void recover(struct bsn *n)
{
	if (n->recovered)
		return;
	n->recovered = true;
	slice_close_gone(n);
	pool_shrink(n);
}

void node_catch_up(struct bsn *n, uint64_t now_ns)
{
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	recover(n);
	drain_all(n);
	drain_open_runs(n);
}

int bsn_poll(struct bsn *n, uint64_t now_ns)
{
	struct client *c;
	int waiting;

	pthread_mutex_lock(&n->lock);
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	recover(n);
	drain_all(n);
	/* Also of those that are gone: they may have left more than there was
	 * room for. */
	for_each_client(n, c)
		drain_triggers(n, c);
	/* What was skipped or refused is nobody's business. */
	if (!n->triggers_unsettled)
		give_back_cells(n);
	if (n->store.n_slices)
		drain_open_runs(n);
	for_each_client(n, c) {
		if (c->live)
			pool_take_back(n, c);
	}
	for_each_client(n, c) {
		if (c->live)
			pool_grant(n, c);
	}
	drain_publish(n);
	waiting = events_waiting(n);
	pthread_mutex_unlock(&n->lock);
	return waiting;
}

int bsn_events(struct bsn *n, struct bsn_event *events, int room)
{
	int count = 0;
	bool was_full;

	pthread_mutex_lock(&n->lock);
	was_full = n->events_head - n->events_tail == EVENTS_MAX;
	while (count < room) {
		struct bsn_event *e = &events[count];
		struct slice *s;

		if (n->events_head != n->events_tail) {
			*e = n->events[n->events_tail++ % EVENTS_MAX];
			count++;
			continue;
		}
		memset(e, 0, sizeof(*e));
		e->time_ns = n->now_ns;
		if (n->n_drained) {
			e->kind = BSN_EVENT_CLIENT_DRAINED;
			e->client = n->drained[--n->n_drained];
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
	pthread_mutex_unlock(&n->lock);
	/* Triggers that found no room wait in their queues, and ring no more. */
	if (was_full && count)
		bsn_wake(n);
	return count;
}

void bsn_events_done(struct bsn *n)
{
	pthread_mutex_lock(&n->lock);
	/* Triggers that wait here are in nobody's hands yet. */
	if (n->events_head == n->events_tail) {
		n->triggers_unsettled = false;
		give_back_cells(n);
	}
	pthread_mutex_unlock(&n->lock);
}

/* -------------------------------------------------------------- slices --- */

static struct slice *find_slice(struct bsn *n, struct bs_trace_id id)
{
	uint32_t t = trace_find(n, id);

	return t == NONE ? NULL : slice_of(n, t);
}

static void answer_without_slice(struct bsn *n, uint32_t t,
				 struct bs_trace_id id, struct bsn_slice *out)
{
	memset(out, 0, sizeof(*out));
	out->id = id;
	if (t != NONE)
		out->flags = n->index.traces[t].flags & ~TRACE_OWN_FLAGS;
}

int bsn_collect(struct bsn *n, struct bs_trace_id id,
		struct bs_trace_id primary, const char *trigger,
		uint64_t now_ns, struct bsn_slice *out)
{
	struct sink to = {0};
	struct slice *s;
	uint32_t t;
	int err = 0;

	if (!(id.hi | id.lo))
		return -EINVAL;
	pthread_mutex_lock(&n->lock);
	node_catch_up(n, now_ns);
	s = find_slice(n, id);
	if (s) {
		drain_publish(n);
		slice_fill(s, out);
		goto out;
	}
	t = trace_get(n, id);
	s = t == NONE ? NULL : slice_new(n, t, id, primary, trigger);
	if (!s) {
		answer_without_slice(n, t, id, out);
		out->flags |= BSN_SLICE_STORE_FULL;
		if (t != NONE)
			trace_put(n, t);
		err = -ENOSPC;
		goto out;
	}
	to.slice = s;
	slice_copy_trace(n, &to, t);
	n->index.traces[t].flags |= TRACE_COLLECTED;
	n->index.traces[t].slice = s->mark;
	drain_publish(n);
	slice_fill(s, out);
out:
	pthread_mutex_unlock(&n->lock);
	return err;
}

int bsn_slice_info(struct bsn *n, struct bs_trace_id id, struct bsn_slice *out)
{
	struct slice *s;

	pthread_mutex_lock(&n->lock);
	s = find_slice(n, id);
	if (s)
		slice_fill(s, out);
	pthread_mutex_unlock(&n->lock);
	return s ? 0 : -ENOENT;
}

int64_t bsn_slice_read(struct bsn *n, struct bs_trace_id id, uint64_t offset,
		       void *buffer, size_t bytes)
{
	struct slice *s;
	int64_t result = -ENOENT;

	pthread_mutex_lock(&n->lock);
	s = find_slice(n, id);
	if (s && offset < s->trimmed_bytes)
		result = -ESTALE;
	else if (s)
		result = (int64_t)slice_read(n, s, offset, buffer, bytes);
	pthread_mutex_unlock(&n->lock);
	return result;
}

int bsn_slice_trim(struct bsn *n, struct bs_trace_id id, uint64_t offset)
{
	struct slice *s;
	int err = 0;

	pthread_mutex_lock(&n->lock);
	recover(n);
	s = find_slice(n, id);
	if (!s)
		err = -ENOENT;
	else if (offset > s->bytes)
		err = -EINVAL;
	else
		slice_trim(n, s, offset);
	pthread_mutex_unlock(&n->lock);
	return err;
}

int bsn_slice_release(struct bsn *n, struct bs_trace_id id, bool abandoned,
		      uint64_t now_ns)
{
	struct trace *trace;
	struct slice *s;
	uint32_t t;

	pthread_mutex_lock(&n->lock);
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	recover(n);
	s = find_slice(n, id);
	if (s) {
		t = s->trace;
		trace = &n->index.traces[t];
		trace->flags &= ~TRACE_COLLECTED;
		trace->active = coarse(n->now_ns);
		/* What is left in the pool must not pass for all of it when the
		 * next trigger names it, or a successor's: so this comes first. */
		if (abandoned)
			trace_evict(n, t, BSN_SLICE_ABANDONED);
		else if (trace->flags & TRACE_PARTIAL)
			trace_evict(n, t, BSN_SLICE_EVICTED);
		else
			trace->flags |= TRACE_REPORTED;
		trace->flags &= ~TRACE_PARTIAL;
		slice_free(n, s);
		trace_put(n, t);
	}
	pthread_mutex_unlock(&n->lock);
	return s ? 0 : -ENOENT;
}

int bsn_slices(struct bsn *n, uint64_t *cursor, struct bsn_slice *slices,
	       int room)
{
	uint64_t i = *cursor ? *cursor : 1;
	int count = 0;

	pthread_mutex_lock(&n->lock);
	for (; i < n->store.n_blocks && count < room; i++) {
		if (n->store.slices[i])
			slice_fill(n->store.slices[i], &slices[count++]);
	}
	pthread_mutex_unlock(&n->lock);
	*cursor = i;
	return count;
}

int64_t bsn_peek(struct bsn *n, struct bs_trace_id id, uint64_t now_ns,
		 void *buffer, size_t bytes, struct bsn_slice *out)
{
	struct slice *s;
	int64_t result;

	pthread_mutex_lock(&n->lock);
	node_catch_up(n, now_ns);
	s = find_slice(n, id);
	if (s) {
		result = (int64_t)slice_read(n, s, s->trimmed_bytes, buffer,
					     bytes);
		slice_fill(s, out);
	} else {
		struct slice look = {.id = id};
		struct sink to = {
			.slice = &look, .buffer = buffer, .room = bytes};

		slice_copy_trace(n, &to, trace_find(n, id));
		slice_fill(&look, out);
		result = (int64_t)look.bytes;
		free(look.parts);
	}
	drain_publish(n);
	pthread_mutex_unlock(&n->lock);
	return result;
}
