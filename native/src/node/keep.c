/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keep arena: runs of open handles, from segments that were reclaimed. A
 * part of the ledger, of segments and runs like any arena, so that a search
 * finds them like any others. Three differences: a run's content begins with
 * struct kept_run; each segment names the processes whose runs it holds (struct
 * keep_owner, between the runs), because they may be long gone; and an entry has
 * not the fingerprint of its trace, but that under a disguise: a secret makes it
 * of the rest of the id, which is in the header.
 *
 * Who chooses trace ids may choose as many with one fingerprint as he likes. In a
 * process's segments a search looks at some of them, and then at no more of that
 * process. Here stand those of all processes, side by side, for as long as their
 * handles are open. Under the disguise each trace has a name of its own, so a search
 * meets no other's, however many alike there are.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

/* Room in the current segment under which a run that does not fit is not
 * begun there: a header costs more than it is worth. */
#define PART_MIN 1024u

#define ENTRY 8u

int keep_init(struct bsn *n)
{
	struct client *k = &n->keep.arena;

	free(k->segments);
	memset(&n->keep, 0, sizeof(n->keep));
	k->n_segments = n->ledger.header->keep_segments;
	k->arena = n->ledger.keep;
	k->arena_bytes = (uint64_t)k->n_segments * SEGMENT;
	k->segments_free = NONE;
	k->live = true;
	list_init(&k->backed);
	list_init(&k->sealed);
	list_init(&k->unclaimed);
	list_init(&k->active);
	list_init(&k->parked);
	n->keep.frame = NONE;
	k->segments = calloc(k->n_segments, sizeof(*k->segments));
	return k->segments ? 0 : -ENOMEM;
}

void keep_free(struct bsn *n)
{
	free(n->keep.arena.segments);
	n->keep.arena.segments = NULL;
}

/* ------------------------------------------------------------- writing --- */

static struct bs_segment_header *header_at(const struct frame *f)
{
	return (struct bs_segment_header *)f->bytes;
}

static bool next_frame(struct bsn *n)
{
	struct bs_segment_header *h;
	struct frame *f;

	if (n->keep.frame != NONE)
		frame_seal(n, frame_at(n, n->keep.frame));
	n->keep.frame = NONE;
	f = pool_take_kept(n);
	if (!f)
		return false;
	frame_start(n, f);
	h = header_at(f);
	h->runs = 0;
	h->slot = 0;
	store_release(&h->life,
		      bs_life(record_of(n, f)->generation, BS_SEGMENT_HELD));
	frame_set_state(n, f, FRAME_ACTIVE);
	n->keep.frame = frame_number(n, f);
	n->keep.at = FIRST_RUN;
	n->keep.n_owners = 0;
	return true;
}

/* Behind what is there; before the directory. */
static uint32_t room_left(const struct bsn *n)
{
	uint32_t floor;

	if (n->keep.frame == NONE)
		return 0;
	floor = SEGMENT - ENTRY * header_at(frame_at(n, n->keep.frame))->runs;
	return floor > n->keep.at ? floor - n->keep.at : 0;
}

static uint32_t find_owner(const struct bsn *n, uint32_t number)
{
	for (uint32_t i = 0; i < n->keep.n_owners; i++) {
		if (n->keep.owners[i].number == number)
			return n->keep.owners[i].at;
	}
	return NONE;
}

static uint32_t put_owner(struct bsn *n, const struct keep_owner *owner)
{
	struct keep *k = &n->keep;
	uint32_t at = k->at;

	memcpy(frame_at(n, k->frame)->bytes + at, owner, sizeof(*owner));
	k->at += (uint32_t)sizeof(*owner);
	if (k->n_owners < KEEP_OWNERS) {
		k->owners[k->n_owners].number = owner->number;
		k->owners[k->n_owners++].at = at;
	}
	return at;
}

bool keep_owner_of(const struct frame *f, uint32_t offset,
		   struct keep_owner *owner)
{
	if (offset < FIRST_RUN || offset > SEGMENT - sizeof(*owner))
		return false;
	memcpy(owner, f->bytes + offset, sizeof(*owner));
	return true;
}

/* Whose the run of an entry is. */
static bool keep_owner_of_entry(const struct frame *f, uint64_t entry,
				struct keep_owner *owner)
{
	struct kept_run kept;

	memcpy(&kept,
	       f->bytes + bs_entry_offset(entry) +
		       bs_run_header_bytes(bs_entry_flags(entry)),
	       sizeof(kept));
	return keep_owner_of(f, kept.owner, owner);
}

/* Of what a header has of the id. By the ledger's secret, which a successor has, too. */
uint64_t keep_disguise(const struct bsn *n, uint64_t hi, uint64_t mix)
{
	const struct bs_trace_id in_header = {hi, mix & BS_WORD_MIX_MASK};

	return bs_hash_trace(n->ledger.header->secret, in_header) >>
	       BS_ENTRY_FINGERPRINT_SHIFT;
}

/* What a kept run takes up there. */
static uint32_t kept_size(uint32_t flags, uint32_t committed_bytes)
{
	return bs_run_header_bytes(flags) + committed_bytes + ENTRY;
}

/* Nobody has more of the arena than four times what is left: one alone has most
 * of it, and however many have all they can, there is room for the next. */
#define SHARE_OF_LEFT 4u

static bool is_within_share(const struct bsn *n, const struct run *run)
{
	const struct client *k = &n->keep.arena;
	const struct client *c = client_find(n, run->owner.number);
	uint64_t used = k->frames - k->backed.count;
	uint64_t left = used < n->pool.keep_max
				? (n->pool.keep_max - used) * SEGMENT
				: 0;

	return !c || c->kept_bytes + run->bytes <= SHARE_OF_LEFT * left;
}

/* Its runs are kept anew, or not. */
static void forget(struct bsn *n, const struct frame *f)
{
	uint32_t runs = runs_count(f, record_of(n, f)->generation);

	for (uint32_t i = 0; i < runs; i++) {
		uint64_t entry = run_entry(f, i);
		uint32_t flags = bs_entry_flags(entry);
		const struct bs_run_header *h =
			(const void *)(f->bytes + bs_entry_offset(entry));
		uint32_t bytes = kept_size(flags, bs_word_committed(h->word));
		struct keep_owner owner;
		struct client *c = NULL;

		if (keep_owner_of_entry(f, entry, &owner))
			c = client_find(n, owner.number);
		/* A predecessor's are not counted. */
		if (c)
			c->kept_bytes -= c->kept_bytes < bytes ? c->kept_bytes
							       : bytes;
	}
}

/*
 * A segment is reclaimed: what of it is kept stands there twice until it is
 * given up. If that is never (the daemon is killed), a successor leaves the
 * copies out that were made since, and makes them again in its time.
 */
void keep_reclaim_begins(struct bsn *n, const struct frame *f)
{
	struct ledger_header *h = n->ledger.header;

	h->reclaim_keep = n->keep.frame;
	if (n->keep.frame != NONE)
		h->reclaim_runs = header_at(frame_at(n, n->keep.frame))->runs;
	h->reclaim_granted_ns = h->granted_ns;
	store_release(&h->reclaiming, frame_number(n, f));
	if (f->client == &n->keep.arena)
		forget(n, f);
}

void keep_reclaim_ends(struct bsn *n)
{
	store_release(&n->ledger.header->reclaiming, NONE);
}

static void put_run(struct bsn *n, const struct run *run, uint32_t flags,
		    const struct kept_run *kept, const uint8_t *records,
		    uint32_t bytes)
{
	struct frame *f = frame_at(n, n->keep.frame);
	struct bs_segment_header *h = header_at(f);
	uint8_t *to = f->bytes + n->keep.at;
	uint32_t committed = (uint32_t)sizeof(*kept) + bytes;
	uint64_t mix = bs_trace_mix(run->id.hi, run->id.lo);
	uint64_t name = mix >> BS_ENTRY_FINGERPRINT_SHIFT ^
			keep_disguise(n, run->id.hi, mix);
	struct bs_run_header header = {
		.trace_hi = {(uint32_t)run->id.hi,
			     (uint32_t)(run->id.hi >> 32)},
		.word = bs_word(mix, committed),
		.handle = run->handle,
		.seq = run->seq,
	};
	struct client *c;

	memcpy(to, &header, bs_run_header_bytes(flags));
	to += bs_run_header_bytes(flags);
	memcpy(to, kept, sizeof(*kept));
	if (bytes)
		memcpy(to + sizeof(*kept), records, bytes);
	*bs_directory(f->bytes, h->runs) =
		bs_entry(name, n->keep.at, flags | BS_RUN_CLOSED);
	n->keep.at += bs_run_header_bytes(flags) + committed;
	/* A successor must not find half a run. */
	store_release(&h->runs, h->runs + 1);
	c = client_find(n, run->owner.number);
	if (c)
		c->kept_bytes += kept_size(flags, committed);
}

/*
 * Copy a run, in one part or in several, each a run of its own with the number
 * of the whole, which says whether more follows: what it is kept with now it may
 * not be kept with again. False: no room, or its records make no sense.
 */
bool keep_run(struct bsn *n, const struct run *run)
{
	uint32_t bytes = run->bytes, done = 0;
	bool malformed = false;

	if (!is_within_share(n, run))
		return false;
	memcpy(n->scratch, run->frame->bytes + run->records, bytes);
	/* Once at least: a run without records tells of its handle. */
	for (;;) {
		uint32_t at = find_owner(n, run->owner.number);
		uint32_t overhead = (uint32_t)sizeof(struct bs_run_header) +
				    ENTRY + (uint32_t)sizeof(struct kept_run);
		uint32_t flags = run->flags, room, part;
		struct kept_run kept;

		if (at == NONE)
			overhead += (uint32_t)sizeof(run->owner);
		room = room_left(n);
		if (room < overhead || (room - overhead < bytes - done &&
					room - overhead < PART_MIN)) {
			if (!next_frame(n))
				return false;
			continue;
		}
		part = records_whole(n->scratch + done, bytes - done,
				     room - overhead, &malformed);
		if (malformed)
			bytes = done + part; /* what follows cannot be read */
		if (!part && done < bytes) {
			if (!next_frame(n))
				return false;
			continue;
		}
		if (at == NONE)
			at = put_owner(n, &run->owner);
		if (done)
			flags &= ~BS_RUN_FIRST;
		if (done + part < bytes)
			flags &= ~BS_RUN_LAST;
		kept.granted_ns = run->granted_ns;
		kept.owner = at;
		kept.from = (uint16_t)(run->from + done);
		kept.has_more = run->has_more || malformed ||
				done + part < bytes;
		put_run(n, run, flags, &kept, n->scratch + done, part);
		done += part;
		if (done == bytes)
			break;
	}
	if (malformed)
		n->counts.corrupt++;
	return !malformed;
}

/* ------------------------------------------------------------ adoption --- */

/* A predecessor's frames are there. It was killed while it reclaimed one, which
 * is still there: drop what it had kept of it. */
void keep_adopt(struct bsn *n)
{
	struct ledger_header *h = n->ledger.header;
	const struct list *sealed = &n->keep.arena.sealed;
	uint32_t i = h->reclaiming, next;

	if (i >= n->pool.frames_room ||
	    (n->ledger.records[i].state != FRAME_SEALED &&
	     n->ledger.records[i].state != FRAME_PARKED))
		goto out;
	if (h->reclaim_keep < n->pool.frames_room &&
	    n->pool.frames[h->reclaim_keep].client == &n->keep.arena &&
	    n->ledger.records[h->reclaim_keep].granted_ns <=
		    h->reclaim_granted_ns) {
		struct bs_segment_header *k =
			header_at(frame_at(n, h->reclaim_keep));

		if (h->reclaim_runs < k->runs)
			k->runs = h->reclaim_runs;
	}
	for (uint32_t k = sealed->head; k != NONE; k = next) {
		next = frame_at(n, k)->next_own;
		if (n->ledger.records[k].granted_ns > h->reclaim_granted_ns)
			header_at(frame_at(n, k))->runs = 0;
	}
out:
	keep_reclaim_ends(n);
}
