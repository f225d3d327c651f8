/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keep arena: runs that got a second chance. A memfd of the node's own, of
 * segments and runs like any arena, so that a successor finds everything by
 * walking it. Two differences: a run's content begins with struct kept_run,
 * and each segment names the processes whose runs it holds (struct keep_owner
 * as the content of a run without a trace), because they may be long gone.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

/* Room in the current segment under which a run that does not fit is not
 * begun there: a header costs more than it is worth. */
#define PART_MIN 1024u

static int keep_map(struct bsn *n, int fd, uint64_t bytes)
{
	void *map = map_shared(fd, bytes);

	if (!map)
		return -ENOMEM;
	n->keep_fd = fd;
	n->keep_map_bytes = bytes;
	n->tombs = map;
	return 0;
}

static int keep_ready(struct bsn *n)
{
	struct client *k = &n->keep;

	k->n_segments = n->tombs->keep_segments;
	k->arena = (uint8_t *)n->tombs + tombs_bytes(n->tombs->entries);
	k->arena_bytes = (uint64_t)k->n_segments * SEGMENT;
	k->segments = calloc(k->n_segments, sizeof(*k->segments));
	k->segments_free = NONE;
	k->segments_fresh = 0;
	k->live = true;
	list_init(&k->backed);
	list_init(&k->sealed);
	n->keep_frame = NONE;
	return k->segments ? tombs_load(n) : -ENOMEM;
}

int keep_init(struct bsn *n)
{
	uint64_t bytes = tombs_bytes(n->config.tombstones) +
			 (uint64_t)n->keep_max * SEGMENT;
	int fd = memfd_sealed("backsight-keep", bytes);
	int err;

	if (fd < 0)
		return fd;
	err = keep_map(n, fd, bytes);
	if (err) {
		close(fd);
		return err;
	}
	tombs_make(n, n->config.tombstones, n->keep_max);
	return keep_ready(n);
}

void keep_free(struct bsn *n)
{
	if (n->tombs)
		munmap(n->tombs, n->keep_map_bytes);
	if (n->keep_fd >= 0)
		close(n->keep_fd);
	free(n->keep.segments);
	free(n->tomb_traces);
	n->tombs = NULL;
	n->keep_fd = -1;
	n->keep.segments = NULL;
	n->tomb_traces = NULL;
}

/* ------------------------------------------------------------- writing --- */

/* What stands there is left from an earlier life of the segment, perhaps what a
 * process wrote to look like a header of this one: a successor must not take it
 * for the next run. */
static void keep_end(const struct frame *f, uint32_t at)
{
	struct bs_run_header *h = (struct bs_run_header *)(frame_bytes(f) + at);

	if (at <= SEGMENT - RUN_HEADER)
		WRITE_ONCE(h->generation, 0);
}

static bool keep_next_frame(struct bsn *n)
{
	struct frame *f;

	if (n->keep_frame != NONE)
		frame_seal(n, &n->frames[n->keep_frame]);
	n->keep_frame = NONE;
	f = frame_take_kept(n);
	if (!f)
		return false;
	keep_end(f, FIRST_RUN);
	frame_start(n, f, 0);
	frame_set_state(n, f, FRAME_ACTIVE);
	n->keep_frame = frame_number(n, f);
	n->keep_at = FIRST_RUN;
	n->keep_owners = 0;
	return true;
}

/*
 * A segment is reclaimed: what of it is kept stands there twice until it is
 * given up. If that is never (the daemon is killed), a successor leaves the
 * copies out that were made since, and makes them again in its time.
 */
void keep_reclaim_begins(struct bsn *n)
{
	struct tomb_ring *ring = n->tombs;

	ring->reclaim_segment = ring->reclaim_at = 0;
	if (n->keep_frame != NONE) {
		ring->reclaim_segment = n->frames[n->keep_frame].segment;
		ring->reclaim_at = n->keep_at;
	}
	store_release(&ring->reclaim_granted_ns, n->granted_ns);
}

void keep_reclaim_ends(struct bsn *n)
{
	store_release(&n->tombs->reclaim_granted_ns, 0ull);
}

static uint32_t keep_room(const struct bsn *n)
{
	return n->keep_frame == NONE ? 0 : SEGMENT - n->keep_at;
}

/* Append header and content; there is room. Returns the header's offset. */
static uint32_t keep_append(struct bsn *n, struct bs_trace_id id,
			    const struct bs_run_header *like, uint16_t flags,
			    const void *head, uint32_t head_bytes,
			    const void *body, uint32_t body_bytes)
{
	struct frame *f = &n->frames[n->keep_frame];
	uint32_t at = n->keep_at;
	uint8_t *to = frame_bytes(f) + at;
	struct bs_run_header *h = (struct bs_run_header *)to;

	memcpy(to + RUN_HEADER, head, head_bytes);
	if (body_bytes)
		memcpy(to + RUN_HEADER + head_bytes, body, body_bytes);
	h->trace_hi = id.hi;
	h->trace_lo = id.lo;
	h->committed_bytes = head_bytes + body_bytes;
	h->handle = like ? like->handle : 0;
	h->seq = like ? like->seq : 0;
	h->flags = flags;
	n->keep_at += RUN_HEADER + head_bytes + body_bytes;
	keep_end(f, n->keep_at);
	/* A successor must not find half a run. */
	store_release(&h->generation, f->generation);
	return at;
}

static uint32_t keep_find_owner(const struct bsn *n, uint32_t number)
{
	for (uint32_t i = 0; i < n->keep_owners; i++) {
		if (n->keep_owner[i].number == number)
			return n->keep_owner[i].at;
	}
	return NONE;
}

static uint32_t keep_put_owner(struct bsn *n, const struct keep_owner *owner)
{
	struct bs_trace_id none = {0};
	uint32_t at = keep_append(n, none, NULL, KEPT_OWNER | BS_RUN_CLOSED,
				  owner, sizeof(*owner), NULL, 0);

	if (n->keep_owners < sizeof(n->keep_owner) / sizeof(*n->keep_owner)) {
		n->keep_owner[n->keep_owners].number = owner->number;
		n->keep_owner[n->keep_owners++].at = at;
	}
	return at;
}

bool keep_owner_of(const struct bsn *n, uint32_t r, struct keep_owner *owner)
{
	const struct frame *f = run_frame(n, r);
	const uint8_t *bytes = frame_bytes(f);
	uint32_t offset = n->index.runs[r].offset8 * 8u;
	const struct kept_run *kept =
		(const struct kept_run *)(bytes + offset + RUN_HEADER);

	if (kept->owner > SEGMENT - RUN_HEADER - sizeof(*owner))
		return false;
	memcpy(owner, bytes + kept->owner + RUN_HEADER, sizeof(*owner));
	return true;
}

/* When the segment was granted that the run was written in. */
uint64_t keep_granted_ns(const struct bsn *n, uint32_t r)
{
	const struct kept_run *kept =
		(const struct kept_run *)(frame_bytes(run_frame(n, r)) +
					  n->index.runs[r].offset8 * 8u +
					  RUN_HEADER);

	return kept->granted_ns;
}

/*
 * Copy a run of a sealed segment, in one part or in several, each a run of its
 * own to the index, from *newest to *oldest. False: no room, or the log holds
 * something else than the index says.
 */
bool keep_run(struct bsn *n, uint32_t r, uint32_t *newest, uint32_t *oldest)
{
	const struct run *run = &n->index.runs[r];
	const struct trace *trace = &n->index.traces[run->trace];
	const struct frame *f = run_frame(n, r);
	struct bs_trace_id id = {trace->hi, trace->lo};
	struct bs_run_header like = {0};
	struct keep_owner owner = {0};
	uint16_t ghost = run->flags & RUN_GHOST ? KEPT_GHOST : 0;
	uint16_t run_flags = run->flags;
	uint32_t bytes = 0, done = 0, from = 0;
	uint64_t granted_ns = f->granted_ns;

	*newest = *oldest = NONE;
	if (f->client == &n->keep) {
		if (!keep_owner_of(n, r, &owner))
			return false;
		granted_ns = keep_granted_ns(n, r);
	} else {
		owner.number = f->client->number;
		owner.pid = (uint32_t)f->client->pid;
		memcpy(owner.service, f->client->service,
		       sizeof(owner.service));
	}
	if (!ghost && !log_read(n, r, &like, n->scratch, &bytes, &from)) {
		n->counts.corrupt++;
		trace_flag(n, id, BSN_SLICE_CORRUPT);
		return false;
	}
	do {
		uint32_t at = keep_find_owner(n, owner.number), room, part, k;
		uint32_t overhead = RUN_HEADER + sizeof(struct kept_run);
		struct kept_run kept;
		uint16_t flags;
		bool malformed = false;

		if (at == NONE)
			overhead += RUN_HEADER + sizeof(owner);
		room = keep_room(n);
		if (room < overhead || (room - overhead < bytes - done &&
					room - overhead < PART_MIN)) {
			if (!keep_next_frame(n))
				return false;
			continue;
		}
		room -= overhead;
		part = records_whole(n->scratch + done, bytes - done, room,
				     &malformed);
		if (malformed) {
			trace_flag(n, id, BSN_SLICE_CORRUPT);
			bytes = done + part; /* what follows cannot be read */
		}
		if (!part && done < bytes) {
			if (!keep_next_frame(n))
				return false;
			continue;
		}
		if (at == NONE)
			at = keep_put_owner(n, &owner);
		flags = run_flags & RUN_ABI_FLAGS;
		if (done)
			flags &= ~BS_RUN_FIRST;
		if (done + part < bytes)
			flags &= ~BS_RUN_LAST;
		kept.granted_ns = granted_ns;
		kept.owner = at;
		kept.from = from + done;
		at = keep_append(n, id, &like, flags | ghost | BS_RUN_CLOSED,
				 &kept, sizeof(kept), n->scratch + done, part);
		k = run_alloc(n, &n->frames[n->keep_frame], at,
			      flags | (ghost ? RUN_GHOST : 0));
		if (k == NONE)
			return false;
		n->index.runs[k].older = *newest;
		if (*oldest == NONE)
			*oldest = k;
		*newest = k;
		done += part;
	} while (done < bytes || *newest == NONE);
	return true;
}

/* ------------------------------------------------------------ adoption --- */

/* Something that was kept is not found again, nobody knows of which traces. */
static void keep_lost(struct bsn *n)
{
	n->tombs->overrun_ns = n->now_ns;
	n->tombs->gone_untied_ns = n->untied_to_ns = n->now_ns;
}

static void keep_walk(struct bsn *n, struct frame *f)
{
	const struct tomb_ring *ring = n->tombs;
	const uint8_t *bytes = frame_bytes(f);
	uint32_t at = FIRST_RUN;
	uint32_t end = SEGMENT;

	if (ring->reclaim_granted_ns && ring->reclaim_at &&
	    f->segment == ring->reclaim_segment)
		end = ring->reclaim_at;
	while (at + RUN_HEADER <= end) {
		const struct bs_run_header *h =
			(const struct bs_run_header *)(bytes + at);
		uint32_t content = h->committed_bytes;
		struct bs_trace_id id = {h->trace_hi, h->trace_lo};
		uint16_t flags = h->flags & RUN_ABI_FLAGS;

		if (load_acquire(&h->generation) != f->generation ||
		    content % 8 || content > SEGMENT - RUN_HEADER - at)
			break;
		if (h->flags & KEPT_GHOST)
			flags |= RUN_GHOST;
		if (!(h->flags & KEPT_OWNER) &&
		    content >= sizeof(struct kept_run)) {
			if (run_add(n, id, f, at, flags) == NONE)
				keep_lost(n);
			n->counts.runs_walked++;
		}
		at += RUN_HEADER + content;
	}
	f->indexed_to = at;
}

/* What a predecessor kept. Nothing else is in the pool yet. */
int keep_adopt(struct bsn *n, int fd)
{
	uint64_t bytes;
	int err = memfd_check(fd, &bytes);
	struct tomb_ring *ring;
	uint32_t *found, count = 0;

	if (err)
		return err;
	ring = map_shared(fd, bytes ? bytes : 1);
	if (!ring)
		return -EPROTO;
	if (!tombs_valid(ring, bytes)) {
		munmap(ring, bytes);
		return -EPROTO;
	}
	fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0) {
		err = -errno;
		munmap(ring, bytes);
		return err;
	}
	for (uint32_t i = 0; i < n->tombs->entries; i++) {
		if (n->tomb_traces[i] == NONE)
			continue;
		n->index.traces[n->tomb_traces[i]].tombs = 0;
		trace_put(n, n->tomb_traces[i]);
	}
	keep_free(n);
	n->counts.tombstones = 0;
	n->keep_fd = fd;
	n->keep_map_bytes = bytes;
	n->tombs = ring;
	/* Flags of traces of processes that are gone may not have fitted. */
	if (ring->gone_untied_ns < ring->overrun_ns)
		ring->gone_untied_ns = ring->overrun_ns;
	if (ring->gone_untied_ns > n->untied_to_ns)
		n->untied_to_ns = ring->gone_untied_ns;
	err = keep_ready(n);
	if (err)
		return err;
	found = malloc(((size_t)n->keep.n_segments + 1) * sizeof(*found));
	if (!found)
		return -ENOMEM;
	n->keep.segments_fresh = n->keep.n_segments;
	for (uint32_t i = 0; i < n->keep.n_segments; i++) {
		struct segment *s = &n->keep.segments[i];
		struct bs_segment_header h = {0};
		struct frame *f = NULL;

		if (segment_has_memory(fd, tombs_bytes(ring->entries) +
						   (uint64_t)i * SEGMENT))
			memcpy(&h, n->keep.arena + (uint64_t)i * SEGMENT,
			       sizeof(h));
		s->generation = h.generation;
		if (h.magic == BS_ABI_MAGIC && h.segment == i && h.generation &&
		    (!ring->reclaim_granted_ns ||
		     h.granted_ns <= ring->reclaim_granted_ns)) {
			if (!frames_reserve(n, 1))
				f = frame_new(n, &n->keep, i, FRAME_ACTIVE);
			else
				keep_lost(n);
		}
		if (!f) {
			s->frame = n->keep.segments_free;
			n->keep.segments_free = i;
			continue;
		}
		f->granted_ns = h.granted_ns;
		found[count++] = frame_number(n, f);
	}
	frames_sort(n, found, count);
	for (uint32_t i = 0; i < count; i++)
		keep_walk(n, &n->frames[found[i]]);
	keep_reclaim_ends(n);
	frames_merge_sealed(n, found, count);
	free(found);
	n->keep_adopted = true;
	return 0;
}
