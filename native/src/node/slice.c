/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying runs out of the log into slices: pieces (abi/slice.h). A run is copied into
 * private memory first and judged there, so that what is judged is what is
 * kept.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* ------------------------------------------------------------- records --- */

static uint32_t record_bytes(const uint8_t *record, uint32_t left)
{
	struct bs_record_header h;
	uint32_t need;

	if (left < sizeof(h))
		return 0;
	memcpy(&h, record, sizeof(h));
	if (h.payload_bytes > BS_PAYLOAD_MAX)
		return 0;
	need = (uint32_t)bs_record_bytes(h.payload_bytes);
	return need <= left ? need : 0;
}

/* Bytes of the longest prefix of whole records that fits in room. */
uint32_t records_whole(const uint8_t *records, uint32_t bytes, uint32_t room,
		       bool *malformed)
{
	uint32_t at = 0;

	while (at < bytes) {
		uint32_t need = record_bytes(records + at, bytes - at);

		if (!need) {
			*malformed = true;
			break;
		}
		if (need > room - at)
			break;
		at += need;
	}
	return at;
}

/* When the last of them was written, 0: they do not say; and how many there are. They
 * may be of a segment that is being written. */
uint64_t records_last_ticks(const uint8_t *records, uint32_t bytes,
			    uint32_t *count)
{
	uint64_t last = 0;

	*count = 0;
	for (uint32_t at = 0; at < bytes;) {
		uint32_t need = record_bytes(records + at, bytes - at);
		struct bs_record_header h;

		if (!need)
			break;
		memcpy(&h, records + at, sizeof(h));
		if (h.ticks)
			last = h.ticks;
		at += need;
		++*count;
	}
	return last;
}

static void add_crumb(struct bsn *n, struct slice *s, uint64_t node)
{
	if (!node || node == n->node_id)
		return;
	for (uint32_t i = 0; i < s->n_crumbs; i++) {
		if (s->crumbs[i] == node)
			return;
	}
	if (s->n_crumbs == BSN_CRUMBS_MAX)
		s->flags |= BSN_SLICE_CRUMBS_CUT;
	else
		s->crumbs[s->n_crumbs++] = node;
}

/* Crumbs of whole records, and their times. */
static void scan_records(struct bsn *n, struct slice *s, const uint8_t *records,
			 uint32_t bytes, struct ticks *ticks)
{
	for (uint32_t at = 0; at < bytes;) {
		uint32_t need = record_bytes(records + at, bytes - at);
		const uint8_t *payload =
			records + at + sizeof(struct bs_record_header);
		struct bs_record_header h;
		uint64_t node;

		if (!need)
			break;
		memcpy(&h, records + at, sizeof(h));
		if (!ticks->first)
			ticks->first = h.ticks;
		if (h.ticks)
			ticks->last = h.ticks;
		/* Both payloads begin with a node's id: of the node that is
		 * named, of the one that injected the context. A hop out names
		 * this node, which is no news. */
		if ((h.type == BS_RECORD_BREADCRUMB &&
		     h.payload_bytes >= sizeof(node)) ||
		    ((h.type == BS_RECORD_HOP_IN ||
		      h.type == BS_RECORD_HOP_OUT) &&
		     h.payload_bytes >= sizeof(struct bs_hop))) {
			memcpy(&node, payload, sizeof(node));
			add_crumb(n, s, node);
		}
		at += need;
	}
}

/* -------------------------------------------------------------- pieces --- */

static bool sink_put(struct bsn *n, struct sink *to, const void *head,
		     size_t head_bytes, const void *body, size_t body_bytes)
{
	struct slice *s = to->slice;

	if (!to->buffer)
		return slice_append(n, s, head, head_bytes, body, body_bytes);
	if (head_bytes + body_bytes > to->room)
		return false;
	memcpy(to->buffer, head, head_bytes);
	if (body_bytes)
		memcpy(to->buffer + head_bytes, body, body_bytes);
	to->buffer += head_bytes + body_bytes;
	to->room -= head_bytes + body_bytes;
	s->bytes += head_bytes + body_bytes;
	return true;
}

/* Append a piece. False: it is not there, and the slice says why. */
static bool put_piece(struct bsn *n, struct sink *to,
		      const struct bs_piece_header *h, const void *content)
{
	struct slice *s = to->slice;

	if (s->bytes + sizeof(*h) + h->bytes > n->config.trace_bytes_max) {
		s->flags |= BSN_SLICE_TRUNCATED;
		return false;
	}
	if (sink_put(n, to, h, sizeof(*h), content, h->bytes)) {
		s->flags |= BSN_SLICE_HELD;
		return true;
	}
	if (!to->buffer) {
		if (!(s->flags & BSN_SLICE_STORE_FULL))
			s->full_event = true;
		s->flags |= BSN_SLICE_STORE_FULL;
	}
	return false;
}

static void put_process(struct bsn *n, struct sink *to, struct part *part,
			const struct keep_owner *owner)
{
	struct bs_piece_header h = {
		.bytes = sizeof(struct bs_piece_process),
		.kind = BS_PIECE_PROCESS,
		.client = owner->number,
	};
	struct bs_piece_process p = {.pid = owner->pid};

	if (part->introduced)
		return;
	memcpy(p.service, owner->service, sizeof(p.service));
	part->introduced = put_piece(n, to, &h, &p);
}

static void put_pair(struct bsn *n, struct sink *to, uint64_t ticks)
{
	const struct pair *pair = clock_nearest(&n->clock, ticks);
	struct slice *s = to->slice;
	struct bs_piece_header h = {
		.bytes = sizeof(struct bs_clock_pair),
		.kind = BS_PIECE_CLOCK,
	};
	struct bs_clock_pair p;

	if (!pair || (pair->ticks == s->last_pair_ticks &&
		      pair->realtime_ns == s->last_pair_realtime_ns))
		return;
	p.ticks = pair->ticks;
	p.realtime_ns = pair->realtime_ns;
	p.ticks_per_s = n->config.ticks_per_s;
	if (put_piece(n, to, &h, &p)) {
		s->last_pair_ticks = pair->ticks;
		s->last_pair_realtime_ns = pair->realtime_ns;
	}
}

static void put_bare(struct bsn *n, struct sink *to, enum bs_piece_kind kind,
		     uint32_t client, uint32_t flags)
{
	struct bs_piece_header h = {
		.kind = (uint16_t)kind,
		.flags = (uint16_t)flags,
		.client = client,
	};

	put_piece(n, to, &h, NULL);
}

/*
 * Copy a run, or what it grew by since `copied` bytes of it were (NONE: it is
 * new to the slice). Returns how much of it is copied now; *ticks: of that.
 */
uint32_t slice_copy_run(struct bsn *n, struct sink *to, const struct run *run,
			uint32_t copied, struct ticks *ticks)
{
	struct slice *s = to->slice;
	struct bs_piece_header piece = {.kind = BS_PIECE_RUN};
	uint32_t flags = run->flags & ~BS_RUN_CLOSED;
	struct part *part = slice_part(s, run->owner.number);
	uint32_t from = copied == NONE ? 0 : copied;
	uint32_t whole, fits;
	bool malformed = false;

	*ticks = (struct ticks){0};
	/* Its flags are told when it is closed, and not at each look. */
	if (!(run->flags & BS_RUN_CLOSED) && run->live) {
		flags &= ~BS_RUN_LAST;
		if (copied == run->bytes)
			return copied;
	}
	if (flags & BS_RUN_LOSSY)
		s->flags |= BSN_SLICE_LOSSY;
	if (from > run->bytes) {
		/* Committed bytes never shrink. */
		n->counts.corrupt++;
		s->flags |= BSN_SLICE_CORRUPT;
		return copied;
	}
	if (run->bytes == from && copied != NONE &&
	    !(flags & (BS_RUN_LAST | BS_RUN_LOSSY)))
		return copied;
	if (part)
		put_process(n, to, part, &run->owner);
	memcpy(n->scratch, run->frame->bytes + run->records + from,
	       run->bytes - from);
	whole = records_whole(n->scratch, run->bytes - from, SEGMENT,
			      &malformed);
	if (malformed) {
		n->counts.corrupt++;
		s->flags |= BSN_SLICE_CORRUPT;
	}
	scan_records(n, s, n->scratch, whole, ticks);
	if (ticks->first)
		put_pair(n, to, ticks->first);
	piece.flags = (uint16_t)flags;
	piece.client = run->owner.number;
	piece.handle = run->handle;
	piece.seq = run->seq;
	piece.from = run->from + from;
	/* Cut on whole records what would exceed the limit. */
	fits = whole;
	if (s->bytes + sizeof(piece) + whole > n->config.trace_bytes_max) {
		uint64_t used = s->bytes + sizeof(piece);

		fits = used >= n->config.trace_bytes_max
			       ? 0
			       : records_whole(
					 n->scratch, whole,
					 (uint32_t)(n->config.trace_bytes_max -
						    used),
					 &malformed);
		s->flags |= BSN_SLICE_TRUNCATED;
	}
	piece.bytes = fits;
	if (fits || !whole)
		put_piece(n, to, &piece, n->scratch);
	/* What cannot be read is not read again. */
	return malformed ? run->bytes : from + whole;
}

/* -------------------------------------------------------------- slices --- */

void slice_loss_arrived(struct bsn *n, struct slice *s, const struct client *c,
			uint32_t handle, uint32_t flags)
{
	struct sink to = {.slice = s};
	struct keep_owner owner = {.number = c->number,
				   .pid = (uint32_t)c->pid};
	struct part *part = slice_part(s, c->number);

	memcpy(owner.service, c->service, sizeof(owner.service));
	s->flags |= BSN_SLICE_LOSSY;
	if (s->search)
		search_loss(n, s->search, c, handle, flags);
	else if (c->live)
		slice_count_flags(n, s, c->number, handle, flags);
	if (part)
		put_process(n, &to, part, &owner);
	put_bare(n, &to, BS_PIECE_LOSS, c->number, flags);
	slice_dirty(n, s);
}

/* Slices, and places for them, that are looked at under one hold of the lock. */
#define SLICES_A_PIECE 50u
#define PLACES_A_PIECE 50000u

/* All of them, one after the other; start with *place 0. Some may come and go where
 * others have the lock. */
static struct slice *next_slice(struct bsn *n, uint32_t *place, uint32_t *count,
				bool give_way)
{
	const struct store *s = &n->store;

	while (s->n_slices && ++*place < s->fresh) {
		if (give_way && *count >= PLACES_A_PIECE) {
			*count = 0;
			node_commit_and_give_way(n);
		}
		if (s->slices[*place]) {
			*count += PLACES_A_PIECE / SLICES_A_PIECE;
			return s->slices[*place];
		}
		++*count;
	}
	return NULL;
}

/* A process lost something since from_ns, of nobody knows which traces. */
struct news {
	uint32_t client; /* number: it may be forgotten meanwhile */
	uint64_t from_ns;
};

/* Of so many processes all slices are told at once; of more, of as many again. */
#define NEWS_MAX 256u

static int by_client(const void *a, const void *b)
{
	const struct news *x = a, *y = b;

	return x->client < y->client ? -1 : x->client > y->client;
}

/* Ordered by process. Returns how many. */
static uint32_t take_news(struct bsn *n, struct news news[NEWS_MAX])
{
	struct client *c;
	uint32_t count = 0;

	for_each_client(n, c) {
		if (!c->untied_news || count == NEWS_MAX)
			continue;
		c->untied_news = false;
		news[count++] = (struct news){c->number, c->untied_news_ns};
	}
	qsort(news, count, sizeof(*news), by_client);
	return count;
}

static uint64_t oldest(const struct news *news, uint32_t count)
{
	uint64_t from_ns = UINT64_MAX;

	for (uint32_t i = 0; i < count; i++)
		from_ns = news[i].from_ns < from_ns ? news[i].from_ns : from_ns;
	return from_ns;
}

/* What was lost may be of a slice that the process has a part in: one that is open, or
 * changed since. After a restart that is so of each process that ever lost something,
 * since the last poll that a predecessor ended: of what was lost before its slices
 * were told. */
static bool may_lack(const struct slice *s, const struct news *news,
		     uint32_t count, uint64_t oldest_ns)
{
	if (s->parts_forgotten && s->changed_ns >= oldest_ns)
		return true;
	for (uint32_t k = 0; k < s->n_parts; k++) {
		const struct part *part = &s->parts[k];
		const struct news key = {.client = part->client};
		const struct news *of =
			bsearch(&key, news, count, sizeof(key), by_client);

		if (of && (part->open || s->changed_ns >= of->from_ns))
			return true;
	}
	return false;
}

static void tell_slices(struct bsn *n, const struct news *news, uint32_t count)
{
	uint64_t oldest_ns = oldest(news, count);
	uint32_t place = 0, looked = 0;
	struct slice *s;

	while ((s = next_slice(n, &place, &looked, true))) {
		if (s->flags & BSN_SLICE_MAYBE_LOSSY ||
		    !may_lack(s, news, count, oldest_ns))
			continue;
		s->flags |= BSN_SLICE_MAYBE_LOSSY;
		slice_dirty(n, s);
	}
}

void slices_untied_losses(struct bsn *n)
{
	struct news news[NEWS_MAX];
	uint32_t count;

	if (!n->untied_news)
		return;
	n->untied_news = false;
	n->telling++;
	do {
		count = take_news(n, news);
		if (count)
			tell_slices(n, news, count);
	} while (count == NEWS_MAX);
	n->telling--;
}

void slices_left_out(struct bsn *n, bool give_way)
{
	uint32_t place = 0, count = 0;
	struct slice *s;

	while ((s = next_slice(n, &place, &count, give_way))) {
		if (s->flags & BSN_SLICE_MAYBE_LOSSY ||
		    !policy_left_out(n, s->id, UINT64_MAX))
			continue;
		s->flags |= BSN_SLICE_MAYBE_LOSSY;
		slice_dirty(n, s);
	}
}

void slices_close_gone(struct bsn *n, bool give_way)
{
	uint32_t place = 0, count = 0;
	struct slice *s;

	while ((s = next_slice(n, &place, &count, give_way))) {
		struct sink to = {.slice = s};

		for (uint32_t k = 0; k < s->n_parts; k++) {
			struct part *part = &s->parts[k];
			const struct client *c;

			if (!part->open)
				continue;
			c = client_find(n, part->client);
			if (c && c->live)
				continue;
			slice_close_all(s, part);
			slice_put_exit(n, &to, part->client);
			slice_dirty(n, s);
		}
	}
}

void slice_put_exit(struct bsn *n, struct sink *to, uint32_t client)
{
	put_bare(n, to, BS_PIECE_EXIT, client, 0);
}

void slice_fill(const struct slice *s, struct bsn_slice *out)
{
	memset(out, 0, sizeof(*out));
	out->id = s->id;
	out->primary = s->primary;
	memcpy(out->trigger, s->trigger, sizeof(out->trigger));
	out->bytes = s->bytes;
	out->trimmed_bytes = s->trimmed_bytes;
	out->collected_ns = s->collected_ns;
	out->changed_ns = s->changed_ns;
	out->epoch = s->epoch;
	out->open_handles = slice_open_handles(s);
	out->flags = s->flags;
	out->n_crumbs = s->n_crumbs;
	memcpy(out->crumbs, s->crumbs, sizeof(out->crumbs));
}
