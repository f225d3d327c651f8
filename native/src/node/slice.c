/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying runs out of the log into slices: pieces (abi.h). A run is copied into
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
	need = ((uint32_t)sizeof(h) + h.payload_bytes + BS_RECORD_ALIGN - 1) /
	       BS_RECORD_ALIGN * BS_RECORD_ALIGN;
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

/* Crumbs of whole records; also the time of the first that has one. */
static uint64_t scan_records(struct bsn *n, struct slice *s,
			     const uint8_t *records, uint32_t bytes)
{
	uint64_t ticks = 0;

	for (uint32_t at = 0; at < bytes;) {
		uint32_t need = record_bytes(records + at, bytes - at);
		const uint8_t *payload =
			records + at + sizeof(struct bs_record_header);
		struct bs_record_header h;
		uint64_t node;

		if (!need)
			break;
		memcpy(&h, records + at, sizeof(h));
		if (!ticks)
			ticks = h.ticks;
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
	return ticks;
}

/* --------------------------------------------------------------- parts --- */

struct part *slice_part(struct slice *s, uint32_t client)
{
	for (uint32_t i = 0; i < s->n_parts; i++) {
		if (s->parts[i].client == client)
			return &s->parts[i];
	}
	if (s->n_parts == s->parts_room) {
		uint32_t room = s->parts_room ? 2 * s->parts_room : 4;
		struct part *parts = realloc(s->parts, room * sizeof(*parts));

		if (!parts)
			return NULL;
		s->parts = parts;
		s->parts_room = room;
	}
	s->parts[s->n_parts] = (struct part){.client = client};
	return &s->parts[s->n_parts++];
}

uint32_t slice_open_handles(const struct slice *s)
{
	uint32_t open = 0;

	for (uint32_t i = 0; i < s->n_parts; i++) {
		if (s->parts[i].open > 0)
			open += (uint32_t)s->parts[i].open;
	}
	return open;
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
		     uint32_t client, uint16_t flags)
{
	struct bs_piece_header h = {
		.kind = (uint16_t)kind,
		.flags = flags,
		.client = client,
	};

	put_piece(n, to, &h, NULL);
}

static void count_flags(struct part *part, bool live, uint16_t flags,
			bool first_piece)
{
	if (!part || !live)
		return;
	part->open += first_piece && flags & BS_RUN_FIRST;
	part->open -= !!(flags & BS_RUN_LAST);
}

static bool owner_of(const struct bsn *n, uint32_t r, struct keep_owner *owner,
		     bool *live)
{
	const struct client *c = run_frame(n, r)->client;

	if (c == &n->keep) {
		if (!keep_owner_of(n, r, owner))
			return false;
		c = client_find(n, owner->number);
	} else {
		owner->number = c->number;
		owner->pid = (uint32_t)c->pid;
		memcpy(owner->service, c->service, sizeof(owner->service));
	}
	*live = c && c->live;
	return true;
}

/*
 * Copy a run, or what it grew by since `copied` bytes of it were (NONE: it is
 * new to the slice). Returns how much of it is copied now.
 */
static uint32_t copy_run(struct bsn *n, struct sink *to, uint32_t r,
			 uint32_t copied)
{
	const struct run *run = &n->index.runs[r];
	struct slice *s = to->slice;
	struct keep_owner owner;
	struct bs_run_header h;
	struct bs_piece_header piece = {.kind = BS_PIECE_RUN};
	struct part *part;
	uint32_t bytes, base, from, whole, fits;
	uint16_t flags = run->flags & RUN_ABI_FLAGS;
	bool live, malformed = false, grew;
	uint64_t ticks;

	if (!owner_of(n, r, &owner, &live) ||
	    (!(run->flags & RUN_GHOST) &&
	     !log_read(n, r, &h, n->scratch, &bytes, &base))) {
		n->counts.corrupt++;
		s->flags |= BSN_SLICE_CORRUPT;
		return copied;
	}
	part = slice_part(s, owner.number);
	count_flags(part, live, flags, copied == NONE);
	if (flags & BS_RUN_LOSSY)
		s->flags |= BSN_SLICE_LOSSY;
	if (part)
		put_process(n, to, part, &owner);
	if (run->flags & RUN_GHOST) {
		put_bare(n, to, BS_PIECE_LOSS, owner.number, flags);
		return 0;
	}
	from = copied == NONE ? 0 : copied;
	if (from > bytes) {
		/* Committed bytes never shrink. */
		n->counts.corrupt++;
		s->flags |= BSN_SLICE_CORRUPT;
		return copied;
	}
	grew = bytes > from;
	/* Flags of an open run are told when it is closed, and not at each look. */
	if (!grew && copied != NONE &&
	    (run->flags & RUN_OPEN || !(flags & (BS_RUN_LAST | BS_RUN_LOSSY))))
		return copied;
	whole = records_whole(n->scratch + from, bytes - from, SEGMENT,
			      &malformed);
	if (malformed) {
		n->counts.corrupt++;
		s->flags |= BSN_SLICE_CORRUPT;
	}
	ticks = scan_records(n, s, n->scratch + from, whole);
	if (ticks)
		put_pair(n, to, ticks);
	piece.flags = flags;
	piece.client = owner.number;
	piece.handle = h.handle;
	piece.seq = h.seq;
	piece.from = base + from;
	/* Cut on whole records what would exceed the limit. */
	fits = whole;
	if (s->bytes + sizeof(piece) + whole > n->config.trace_bytes_max) {
		uint64_t used = s->bytes + sizeof(piece);

		fits = used >= n->config.trace_bytes_max
			       ? 0
			       : records_whole(
					 n->scratch + from, whole,
					 (uint32_t)(n->config.trace_bytes_max -
						    used),
					 &malformed);
		s->flags |= BSN_SLICE_TRUNCATED;
	}
	piece.bytes = fits;
	if (fits || !whole)
		put_piece(n, to, &piece, n->scratch + from);
	/* What cannot be read is not read again. */
	return malformed ? bytes : from + whole;
}

/* -------------------------------------------------------------- slices --- */

/* A run of a collected trace came, or grew, or was closed. */
void slice_run_arrived(struct bsn *n, uint32_t r, uint32_t copied)
{
	struct frame *f = run_frame(n, r);
	const struct run *run = &n->index.runs[r];
	struct slice *s = slice_of(n, run->trace);
	struct sink to = {.slice = s};
	uint64_t bytes = s->bytes;
	uint32_t open = slice_open_handles(s), flags = s->flags,
		 crumbs = s->n_crumbs;

	copied = copy_run(n, &to, r, copied);
	if (run->flags & RUN_OPEN || f->open_run == r) {
		f->open_copied = copied;
		frame_progressed(f);
	}
	if (s->bytes != bytes || s->flags != flags || s->n_crumbs != crumbs ||
	    slice_open_handles(s) != open)
		slice_dirty(n, s);
}

void slice_loss_arrived(struct bsn *n, uint32_t trace, const struct client *c,
			uint16_t flags)
{
	struct slice *s = slice_of(n, trace);
	struct sink to = {.slice = s};
	struct keep_owner owner = {.number = c->number,
				   .pid = (uint32_t)c->pid};
	struct part *part = slice_part(s, c->number);

	memcpy(owner.service, c->service, sizeof(owner.service));
	count_flags(part, c->live, flags, true);
	if (part)
		put_process(n, &to, part, &owner);
	put_bare(n, &to, BS_PIECE_LOSS, c->number, flags & RUN_ABI_FLAGS);
	slice_dirty(n, s);
}

/* A process lost something since from_ns, perhaps of a slice that it has a
 * part in: one that is open, or changed since. */
void slice_untied_loss(struct bsn *n, const struct client *c, uint64_t from_ns)
{
	for (uint32_t i = 1; n->store.n_slices && i < n->store.n_blocks; i++) {
		struct slice *s = n->store.slices[i];

		if (!s || s->flags & BSN_SLICE_MAYBE_LOSSY)
			continue;
		if (s->adopted && s->changed_ns >= from_ns) {
			/* Which processes had a part in it is forgotten. */
			s->flags |= BSN_SLICE_MAYBE_LOSSY;
			slice_dirty(n, s);
			continue;
		}
		for (uint32_t k = 0; k < s->n_parts; k++) {
			if (s->parts[k].client == c->number &&
			    (s->parts[k].open > 0 ||
			     s->changed_ns >= from_ns)) {
				s->flags |= BSN_SLICE_MAYBE_LOSSY;
				slice_dirty(n, s);
				break;
			}
		}
	}
}

/* What processes that are gone had open stays unfinished. */
void slice_close_gone(struct bsn *n)
{
	for (uint32_t i = 1; i < n->store.n_blocks; i++) {
		struct slice *s = n->store.slices[i];
		struct sink to = {.slice = s};

		for (uint32_t k = 0; s && k < s->n_parts; k++) {
			struct part *part = &s->parts[k];
			const struct client *c;

			if (part->open <= 0)
				continue;
			c = client_find(n, part->client);
			if (c && c->live)
				continue;
			part->open = 0;
			put_bare(n, &to, BS_PIECE_EXIT, part->client, 0);
			slice_dirty(n, s);
		}
	}
}

/* Processes that are gone and had the trace open, as the index knows it. */
static void copy_exits(struct bsn *n, struct sink *to, uint32_t count)
{
	for (uint32_t k = 0; k < to->slice->n_parts; k++) {
		uint32_t number = to->slice->parts[k].client;
		const struct client *c = client_find(n, number);
		int open = 0;

		if (c && c->live)
			continue;
		for (uint32_t i = 0; i < count; i++) {
			const struct run *run = &n->index.runs[n->chain[i]];
			struct keep_owner owner;
			bool live;

			if (!owner_of(n, n->chain[i], &owner, &live) ||
			    owner.number != number)
				continue;
			open += !!(run->flags & BS_RUN_FIRST);
			open -= !!(run->flags & BS_RUN_LAST);
		}
		if (open > 0)
			put_bare(n, to, BS_PIECE_EXIT, number, 0);
	}
}

/* Some process has it open, or had when it died. */
static bool chain_is_open(const struct bsn *n, uint32_t count)
{
	int open = 0;

	for (uint32_t i = 0; i < count; i++) {
		uint16_t flags = n->index.runs[n->chain[i]].flags;

		open += !!(flags & BS_RUN_FIRST);
		open -= !!(flags & BS_RUN_LAST);
	}
	return open > 0;
}

/* Was a loss that could not be blamed on a trace close to this one? */
static bool maybe_lossy(struct bsn *n, uint32_t t, uint32_t count)
{
	uint64_t oldest = pool_oldest_ns(n);
	const struct trace *trace;
	uint32_t idle = 0;

	if (!n->untied_to_ns)
		return false;
	if (t == NONE || !count)
		return !n->counts.reclaims ||
		       ns_since(n, n->untied_to_ns) <= oldest;
	trace = &n->index.traces[t];
	/* What a trace that is open was to write last may be what was lost; and
	 * when a collected one was last active is not known any more. */
	if (!(trace->flags & TRACE_COLLECTED) && !chain_is_open(n, count))
		idle = coarse(n->now_ns) - trace->active;
	for (uint32_t i = 0; i < count; i++) {
		const struct frame *f = run_frame(n, n->chain[i]);
		const struct client *c = f->client;
		uint64_t granted_ns = f->granted_ns;

		if (c == &n->keep) {
			struct keep_owner owner;

			if (!keep_owner_of(n, n->chain[i], &owner))
				return true;
			granted_ns = keep_granted_ns(n, n->chain[i]);
			c = client_find(n, owner.number);
			if (!c && n->tombs->gone_untied_ns >= granted_ns)
				return true;
		}
		if (c && c->untied_to_ns >= granted_ns &&
		    coarse_age(n, c->untied_from_ns) >= idle)
			return true;
	}
	return false;
}

/* All that the index has of a trace, oldest first. t may be NONE. */
void slice_copy_trace(struct bsn *n, struct sink *to, uint32_t t)
{
	struct slice *s = to->slice;
	uint32_t count = 0;

	if (t != NONE) {
		s->flags |= n->index.traces[t].flags &
			    (BSN_SLICE_EVICTED | BSN_SLICE_LOSSY |
			     BSN_SLICE_ABANDONED | BSN_SLICE_CORRUPT);
		count = trace_chain(n, t);
		if (count == NONE) {
			s->flags |= BSN_SLICE_STORE_FULL;
			count = 0;
		}
	}
	if (maybe_lossy(n, t, count))
		s->flags |= BSN_SLICE_MAYBE_LOSSY;
	for (uint32_t i = 0; i < count; i++) {
		uint32_t r = n->chain[i];
		uint32_t copied = copy_run(n, to, r, NONE);
		struct frame *f = run_frame(n, r);

		if (!to->buffer && f->open_run == r) {
			f->open_copied = copied;
			frame_progressed(f);
		}
	}
	copy_exits(n, to, count);
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
