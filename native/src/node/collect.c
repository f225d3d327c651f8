/* SPDX-License-Identifier: Apache-2.0 */
/* What others ask of the node about a trace: collect it, read it, let go of it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

/* Up to so many entries a trace is looked for at once: a pool of 64 MiB. */
#define SEARCH_AT_ONCE 500000u

static int answer_without_slice(struct bsn *n, struct bs_trace_id id,
				struct bsn_slice *out)
{
	uint32_t why = gone_why(n, bs_fingerprint(id.hi, id.lo));

	memset(out, 0, sizeof(*out));
	out->id = id;
	out->flags = BSN_SLICE_STORE_FULL;
	if (why & GONE_EVICTED)
		out->flags |= BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT;
	if (why & GONE_LOSSY)
		out->flags |= BSN_SLICE_LOSSY;
	if (why & GONE_ABANDONED)
		out->flags |= BSN_SLICE_ABANDONED;
	return -ENOSPC;
}

int bsn_collect(struct bsn *n, struct bs_trace_id id,
		struct bs_trace_id primary, const char *trigger,
		uint64_t now_ns, struct bsn_slice *out)
{
	struct slice *s;
	bool is_first = false, at_once;
	int err = 0;

	if (!(id.hi | id.lo))
		return -EINVAL;
	node_lock(n);
	node_set_time(n, now_ns);
	node_recover(n);
	s = slice_find(n, id);
	if (s)
		goto out;
	/* The first one; those that come in the same moment wait for the next
	 * poll, which looks at all processes for them too, and share its pass. */
	at_once = !n->searched_at_once && search_cost(n) <= SEARCH_AT_ONCE;
	if (at_once) {
		n->searched_at_once = true;
		node_catch_up(n, now_ns);
		/* The lock was given up meanwhile. */
		s = slice_find(n, id);
		if (s)
			goto out;
	}
	s = slice_new(n, id, primary, trigger);
	if (!s) {
		err = answer_without_slice(n, id, out);
		goto unlock;
	}
	is_first = !n->searches;
	search_later(n, s);
	/* This one takes along what waits already. */
	if (at_once)
		search_waiting(n, n->searches_made);
	/* The lock was given up meanwhile. */
	s = slice_find(n, id);
	if (!s) {
		err = answer_without_slice(n, id, out);
		goto unlock;
	}
out:
	store_publish(n);
	slice_fill(s, out);
	s->changed = false; /* until now */
unlock:
	node_unlock(n);
	/* bsn_wait() knows until when the others may sleep. */
	if (!err && is_first && out->flags & BSN_SLICE_SEARCHING)
		bsn_wake(n);
	return err;
}

int bsn_slice_info(struct bsn *n, struct bs_trace_id id, struct bsn_slice *out)
{
	struct slice *s;

	node_lock(n);
	s = slice_find(n, id);
	if (s)
		slice_fill(s, out);
	node_unlock(n);
	return s ? 0 : -ENOENT;
}

int64_t bsn_slice_read(struct bsn *n, struct bs_trace_id id, uint64_t offset,
		       void *buffer, size_t bytes)
{
	struct slice *s;
	int64_t result = -ENOENT;

	node_lock(n);
	s = slice_find(n, id);
	/* A search that is not over may be begun anew, by a successor. */
	if (s && offset < s->trimmed_bytes)
		result = -ESTALE;
	else if (s && s->flags & BSN_SLICE_SEARCHING)
		result = 0;
	else if (s) {
		/* What is told somebody must be what a successor tells him. */
		store_publish(n);
		result = (int64_t)slice_read(n, s, offset, buffer, bytes);
	}
	node_unlock(n);
	return result;
}

int bsn_slice_trim(struct bsn *n, struct bs_trace_id id, uint64_t offset)
{
	struct slice *s;
	uint64_t epoch;
	int err = 0;

	node_lock(n);
	node_recover(n);
	s = slice_find(n, id);
	if (!s)
		err = -ENOENT;
	else if (offset > s->bytes)
		err = -EINVAL;
	else
		epoch = s->epoch;
	while (!err && slice_trim(n, s, offset)) {
		node_give_way(n);
		s = slice_find(n, id);
		if (!s || s->epoch != epoch)
			err = -ENOENT;
	}
	node_unlock(n);
	return err;
}

int bsn_slice_release(struct bsn *n, struct bs_trace_id id, bool abandoned,
		      uint64_t now_ns)
{
	struct slice *s;

	node_lock(n);
	node_set_time(n, now_ns);
	node_recover(n);
	s = slice_find(n, id);
	if (s) {
		/* What is left in the pool must not pass for all of it when the
		 * next trigger names it, or a successor's: so this comes first. */
		gone_add(n, s->fingerprint,
			 abandoned ? GONE_ABANDONED : GONE_REPORTED);
		slice_free(n, s);
	}
	node_unlock(n);
	return s ? 0 : -ENOENT;
}

int bsn_slices(struct bsn *n, uint64_t *cursor, struct bsn_slice *slices,
	       int room)
{
	uint64_t i = *cursor ? *cursor : 1;
	int count = 0;

	node_lock(n);
	for (; i < n->store.fresh && count < room; i++) {
		if (n->store.slices[i])
			slice_fill(n->store.slices[i], &slices[count++]);
	}
	node_unlock(n);
	*cursor = i;
	return count;
}

int64_t bsn_peek(struct bsn *n, struct bs_trace_id id, uint64_t now_ns,
		 void *buffer, size_t bytes, struct bsn_slice *out)
{
	uint8_t nothing; /* without a buffer it would be the store */
	struct slice look = {.id = id};
	struct sink to = {
		.slice = &look,
		.buffer = buffer ? buffer : &nothing,
		.room = bytes,
	};
	struct search search;
	struct slice *s;
	int64_t result;

	if (!buffer && bytes)
		return -EINVAL;
	node_lock(n);
	node_catch_up(n, now_ns);
	s = slice_find(n, id);
	if (s) {
		result = (int64_t)slice_read(n, s, s->trimmed_bytes, buffer,
					     bytes);
		slice_fill(s, out);
		goto out;
	}
	result = search_init(n, &search, id, to);
	if (result)
		goto out;
	search_all(n, &search, 1);
	search_free(n, &search);
	slice_fill(&look, out);
	result = (int64_t)look.bytes;
	free(look.parts);
	free(look.handles);
out:
	store_publish(n);
	node_unlock(n);
	return result;
}
