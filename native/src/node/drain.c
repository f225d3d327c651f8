/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From shared memory into the index. Everything here reads what a client may
 * change at any moment, or have filled with lies: each field is read once and
 * checked against the node's own tables. What cannot be right is counted, and
 * the traces that it may concern are flagged.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Slots beyond the highest known are looked for where a segment was taken, and
 * this often besides: for threads that only ever lost. */
#define SCAN_NS NS_PER_S

/* A trigger that claims to be older was stamped by a clock that is not ours. */
#define TRIGGER_AGE_MAX_NS (3600 * NS_PER_S)

static bool run_fits(uint32_t offset, uint32_t committed)
{
	return offset % 8 == 0 && offset >= FIRST_RUN &&
	       offset <= SEGMENT - RUN_HEADER && committed % 8 == 0 &&
	       committed <= SEGMENT - RUN_HEADER - offset;
}

/* ---------------------------------------------------------------- runs --- */

/*
 * Read a run out of the log into private memory: header, records, and where in
 * the run as it was written they begin. False: the log holds another run than
 * the index says.
 */
bool log_read(struct bsn *n, uint32_t r, struct bs_run_header *header,
	      uint8_t *records, uint32_t *bytes, uint32_t *from)
{
	const struct run *run = &n->index.runs[r];
	const struct trace *trace = &n->index.traces[run->trace];
	const struct frame *f = run_frame(n, r);
	uint32_t offset = run->offset8 * 8u;
	const uint8_t *at = frame_bytes(f) + offset;
	const struct bs_run_header *h = (const struct bs_run_header *)at;
	uint32_t committed = load_acquire(&h->committed_bytes);

	header->trace_hi = READ_ONCE(h->trace_hi);
	header->trace_lo = READ_ONCE(h->trace_lo);
	header->handle = READ_ONCE(h->handle);
	header->seq = READ_ONCE(h->seq);
	if (header->trace_hi != trace->hi || header->trace_lo != trace->lo ||
	    READ_ONCE(h->generation) != f->generation ||
	    !run_fits(offset, committed))
		return false;
	*from = 0;
	at += RUN_HEADER;
	if (f->client == &n->keep) {
		const struct kept_run *kept = (const struct kept_run *)at;

		*from = kept->from;
		at += sizeof(*kept);
		committed -= sizeof(*kept);
	}
	memcpy(records, at, committed);
	*bytes = committed;
	return true;
}

/* Losses of a client since its last drain, of nobody knows which traces. */
static void untied_loss(struct bsn *n, struct client *c)
{
	uint64_t oldest = pool_oldest_ns(n);

	/* One interval: an old one is dropped when all that it could concern is
	 * gone from the pool, else both are joined. */
	if (!c->untied_to_ns || c->drained_ns < c->untied_from_ns ||
	    (n->counts.reclaims && ns_since(n, c->untied_to_ns) > oldest))
		c->untied_from_ns = c->drained_ns;
	client_note_untied(n, c);
	c->untied_news = true;
}

static void corrupt(struct bsn *n, struct client *c)
{
	n->counts.corrupt++;
	untied_loss(n, c);
}

/* How far into its log a predecessor copied what belonged to slices. */
static const struct progress *progress_of(const struct client *c,
					  const struct frame *f)
{
	if (f->slot >= BS_THREAD_SLOTS || !c->progress ||
	    !progress_epoch(&c->progress[f->slot]))
		return NULL;
	return &c->progress[f->slot];
}

/* Whether it lay before the predecessor's place in the thread's log. */
static bool was_passed(const struct bsn *n, const struct client *c,
		       const struct frame *f, uint32_t offset)
{
	const struct progress *p = progress_of(c, f);
	uint32_t i;

	if (!p || p->segment >= c->n_segments)
		return false;
	if (p->segment == f->segment)
		return p->generation == f->generation &&
		       offset < p->indexed_to8 * 8u;
	i = c->segments[p->segment].frame;
	return i < n->frames_room && n->frames[i].client == c &&
	       n->frames[i].segment == p->segment &&
	       n->frames[i].generation == p->generation &&
	       f->granted_ns < n->frames[i].granted_ns;
}

/* A run of a collected trace that a walk after a restart finds. True: it is in
 * its slice. False: copy it, from *copied on. */
static bool was_copied(const struct bsn *n, const struct client *c,
		       const struct frame *f, uint32_t r, uint32_t *copied)
{
	const struct run *run = &n->index.runs[r];
	const struct progress *p = progress_of(c, f);

	if (was_passed(n, c, f, run->offset8 * 8u))
		return true;
	if (p && p->segment == f->segment && p->generation == f->generation &&
	    p->indexed_to8 == run->offset8)
		*copied = p->open_copied;
	return false;
}

/* A run of a live client into the index, and to its slice. */
static uint32_t index_run(struct bsn *n, struct client *c, struct frame *f,
			  struct bs_trace_id id, uint32_t offset,
			  uint16_t flags)
{
	uint32_t copied = NONE;
	uint32_t r;

	if (unlikely(!(id.hi | id.lo))) {
		corrupt(n, c);
		return NONE;
	}
	r = run_add(n, id, f, offset, flags);
	if (unlikely(r == NONE)) {
		/* The index is full of what may not be reclaimed. */
		n->counts.runs_lost++;
		trace_flag(n, id, BSN_SLICE_LOSSY);
		untied_loss(n, c);
		return NONE;
	}
	if (unlikely(flags & BS_RUN_LOSSY))
		trace_flag(n, id, BSN_SLICE_LOSSY);
	if (unlikely(n->index.traces[n->index.runs[r].trace].flags &
		     TRACE_COLLECTED) &&
	    !(n->adopting && was_copied(n, c, f, r, &copied)))
		slice_run_arrived(n, r, copied);
	return r;
}

/* The run that was open is closed now. */
static void close_run(struct bsn *n, struct frame *f, uint16_t flags)
{
	uint32_t r = f->open_run;
	struct run *run = &n->index.runs[r];
	uint16_t old = run->flags;

	run->flags = (old & ~(RUN_ABI_FLAGS | RUN_OPEN)) |
		     (flags & RUN_ABI_FLAGS);
	if (run->trace != NONE && !(old & RUN_DEAD)) {
		struct trace *trace = &n->index.traces[run->trace];
		struct bs_trace_id id = {trace->hi, trace->lo};

		if (flags & BS_RUN_LOSSY)
			trace_flag(n, id, BSN_SLICE_LOSSY);
		if (trace->flags & TRACE_COLLECTED)
			slice_run_arrived(n, r, f->open_copied);
		else
			trace->active = coarse(n->now_ns);
		trace->flags &= ~TRACE_REPORTED;
	}
	f->open_run = NONE;
	f->open_copied = NONE;
}

enum step {
	STEP_END,  /* no header of this life of the segment */
	STEP_OPEN, /* the open run */
	STEP_RUN,  /* one closed run went into the index */
	STEP_BAD,
};

/* To make room, a reclaim first looks at the open runs of all threads. That walks
 * their segments, also the one whose runs are about to go into the index: so it
 * is done before indexed_to is looked at, and not in between. */
static void look_before_reclaim(struct bsn *n)
{
	if (unlikely(!run_room(n)) && !n->open_runs_seen)
		drain_open_runs(n);
}

/* One run header at indexed_to, which may reach up to limit. killed: nobody
 * writes here any more, so an open run is over too. */
static enum step walk_step(struct bsn *n, struct client *c, struct frame *f,
			   uint32_t limit, bool killed)
{
	const struct bs_run_header *h;
	struct bs_trace_id id;
	uint32_t committed, at;
	uint16_t flags;

	look_before_reclaim(n);
	at = f->indexed_to;
	if (at + RUN_HEADER > limit)
		return STEP_END;
	h = (const struct bs_run_header *)(frame_bytes(f) + at);
	if (load_acquire(&h->generation) != f->generation)
		return STEP_END;
	flags = load_acquire(&h->flags);
	committed = load_acquire(&h->committed_bytes);
	id.hi = READ_ONCE(h->trace_hi);
	id.lo = READ_ONCE(h->trace_lo);
	if (committed % 8 || committed > limit - at - RUN_HEADER)
		return STEP_BAD;
	if (!(flags & BS_RUN_CLOSED) && !killed) {
		if (f->open_run == NONE) {
			f->open_copied = NONE;
			f->open_run =
				index_run(n, c, f, id, at,
					  (flags & RUN_ABI_FLAGS) | RUN_OPEN);
			n->counts.runs_walked++;
		}
		return STEP_OPEN;
	}
	if (f->open_run != NONE) {
		close_run(n, f, flags);
	} else {
		index_run(n, c, f, id, at, flags & RUN_ABI_FLAGS);
		n->counts.runs_walked++;
	}
	f->indexed_to = at + RUN_HEADER + committed;
	/* Behind the one that its thread was killed in there is none: what looks
	 * like it is a payload that was being written. */
	if (!(flags & BS_RUN_CLOSED) && limit == SEGMENT)
		f->indexed_to = SEGMENT;
	frame_progressed(f);
	return STEP_RUN;
}

/* All closed runs from indexed_to on, and the open one. Returns how many. */
static uint32_t walk(struct bsn *n, struct client *c, struct frame *f,
		     bool killed)
{
	uint32_t closed = 0;
	enum step step;

	while ((step = walk_step(n, c, f, SEGMENT, killed)) == STEP_RUN)
		closed++;
	if (step == STEP_BAD)
		corrupt(n, c);
	return closed;
}

/* The thread has moved on, or is dead: the segment is complete. */
static void finish_frame(struct bsn *n, struct client *c, struct thread *t,
			 struct frame *f)
{
	uint32_t found = walk(n, c, f, true);

	if (t)
		t->missing -= (int32_t)found;
	if (f->open_run != NONE)
		close_run(n, f, n->index.runs[f->open_run].flags);
	frame_seal(n, f);
}

/*
 * The thread is in this frame now. What it took before is complete; if its ring
 * was full meanwhile, that may be whole segments that no news ever named.
 */
static void move_to_frame(struct bsn *n, struct client *c, uint32_t slot,
			  uint32_t frame)
{
	struct thread *t = &c->threads[slot];
	uint32_t before = NONE;
	uint32_t i, next;

	if (t->frame != NONE)
		finish_frame(n, c, t, &n->frames[t->frame]);
	t->frame = NONE;
	for (i = c->unclaimed.head; i != NONE && i != frame; i = next) {
		struct frame *f = &n->frames[i];
		const struct bs_segment_header *h =
			(const void *)frame_bytes(f);

		next = f->next_own;
		if (READ_ONCE(h->slot) != slot) {
			before = i;
			continue;
		}
		pool_unclaimed_remove(n, c, i, before);
		f->slot = (uint16_t)slot;
		finish_frame(n, c, t, f);
	}
	if (i == frame)
		pool_unclaimed_remove(n, c, i, before);
	n->frames[frame].slot = (uint16_t)slot;
	t->frame = frame;
	t->homeless = 0;
	thread_progressed(c, slot);
}

/* ---------------------------------------------------------------- ring --- */

/* Records were dropped where they were written. The entry goes into the
 * trace's chain, as a run without bytes, at the segment that the thread was
 * appending to: it says which process lost, and which handles it opened. */
static void index_loss(struct bsn *n, struct client *c, struct thread *t,
		       const struct bs_run_entry *e)
{
	struct bs_trace_id id = {e->trace_hi, e->trace_lo};
	uint16_t flags = (e->flags & RUN_ABI_FLAGS) | RUN_GHOST | BS_RUN_LOSSY;

	if (!(id.hi | id.lo)) {
		corrupt(n, c);
		return;
	}
	if (t->frame != NONE) {
		struct frame *f = &n->frames[t->frame];

		if (f->ghosts == GHOSTS_MAX) {
			untied_loss(n, c);
			return;
		}
		f->ghosts++;
		index_run(n, c, f, id, 0, flags);
	} else {
		uint32_t trace;

		if (t->homeless == GHOSTS_MAX) {
			untied_loss(n, c);
			return;
		}
		t->homeless++;
		trace_flag(n, id, BSN_SLICE_LOSSY);
		trace = trace_find(n, id);
		if (trace == NONE)
			untied_loss(n, c);
		else if (n->index.traces[trace].flags & TRACE_COLLECTED)
			slice_loss_arrived(n, trace, c, flags);
	}
}

static void entry_bad(struct bsn *n, struct client *c,
		      const struct bs_run_entry *e)
{
	struct bs_trace_id id = {e->trace_hi, e->trace_lo};
	uint32_t trace = trace_find(n, id);

	/* Of a trace that nobody else knows nothing is remembered for a lie. */
	corrupt(n, c);
	if (trace != NONE)
		trace_flag_at(n, trace, BSN_SLICE_CORRUPT);
}

static void index_entry(struct bsn *n, struct client *c, uint32_t slot,
			const struct bs_run_entry *e)
{
	struct bs_trace_id id = {e->trace_hi, e->trace_lo};
	struct thread *t = &c->threads[slot];
	struct frame *f;
	uint32_t i;

	n->counts.runs_drained++;
	if (unlikely(e->segment == BS_SEGMENT_NONE)) {
		index_loss(n, c, t, e);
		return;
	}
	if (unlikely(e->segment >= c->n_segments))
		goto bad;
	i = c->segments[e->segment].frame;
	if (unlikely(e->segment >= c->segments_fresh || i >= n->frames_room))
		goto bad;
	f = &n->frames[i];
	if (unlikely(f->client != c || f->segment != e->segment ||
		     f->generation != e->generation ||
		     !run_fits(e->offset, e->committed_bytes)))
		goto bad;
	if (unlikely(f->state == FRAME_STOCK))
		pool_observe_grants(n, c);
	if (unlikely(f->state == FRAME_SEALED && e->offset < f->indexed_to)) {
		t->missing++;
		return;
	}
	if (unlikely(f->state != FRAME_ACTIVE))
		goto bad;
	if (unlikely(f->slot != slot && f->slot != SLOT_UNKNOWN))
		goto bad;
	if (unlikely(t->frame != i))
		move_to_frame(n, c, slot, i);
	/* Where news was dropped, the log tells. */
	for (look_before_reclaim(n); unlikely(f->indexed_to < e->offset);
	     look_before_reclaim(n)) {
		if (walk_step(n, c, f, e->offset, true) != STEP_RUN) {
			corrupt(n, c);
			f->open_run = NONE;
			f->indexed_to = e->offset;
			break;
		}
		t->missing--;
	}
	if (unlikely(e->offset < f->indexed_to)) {
		/* The walk was here before the news. */
		t->missing++;
		return;
	}
	if (unlikely(f->open_run != NONE)) {
		const struct run *run = &n->index.runs[f->open_run];

		if (run->trace != NONE &&
		    !id_is(&n->index.traces[run->trace], id))
			entry_bad(n, c, e);
		close_run(n, f, e->flags);
	} else {
		index_run(n, c, f, id, e->offset, e->flags & RUN_ABI_FLAGS);
	}
	f->indexed_to = e->offset + RUN_HEADER + e->committed_bytes;
	return;
bad:
	entry_bad(n, c, e);
}

static void drain_ring(struct bsn *n, struct client *c, uint32_t slot,
		       uint32_t head)
{
	struct bs_thread_area *a = area_of(c, slot);
	struct thread *t = &c->threads[slot];
	struct bs_run_entry batch[BATCH];

	while (t->tail != head) {
		uint64_t hashes[BATCH];
		uint32_t count = head - t->tail;

		if (count > BATCH)
			count = BATCH;
		for (uint32_t i = 0; i < count; i++) {
			const volatile struct bs_run_entry *e =
				&a->entries[(t->tail + i) % BS_RUN_RING_ENTRIES];
			struct bs_trace_id id;

			batch[i].trace_hi = e->trace_hi;
			batch[i].trace_lo = e->trace_lo;
			batch[i].segment = e->segment;
			batch[i].generation = e->generation;
			batch[i].flags = e->flags;
			batch[i].offset = e->offset;
			batch[i].committed_bytes = e->committed_bytes;
			id.hi = batch[i].trace_hi;
			id.lo = batch[i].trace_lo;
			hashes[i] = index_hash(&n->index, id);
			index_prefetch_bucket(&n->index, hashes[i]);
		}
		for (uint32_t i = 0; i < count; i++)
			index_prefetch_trace(&n->index, hashes[i]);
		for (uint32_t i = 0; i < count; i++)
			index_entry(n, c, slot, &batch[i]);
		t->tail += count;
	}
	thread_progressed(c, slot);
}

static void drain_thread(struct bsn *n, struct client *c, uint32_t slot)
{
	struct bs_thread_area *a = area_of(c, slot);
	struct thread *t = &c->threads[slot];
	/* In this order: a run that was counted lies in this segment or before
	 * it, and the news of what lies before it is there. */
	uint32_t unannounced = load_acquire(&a->runs_unannounced);
	uint32_t segment = load_acquire(&a->segment);
	uint32_t head = load_acquire(&a->run_head);

	if (head != t->tail) {
		if (unlikely(head - t->tail > BS_RUN_RING_ENTRIES)) {
			corrupt(n, c);
			t->tail = head;
			thread_progressed(c, slot);
		}
		drain_ring(n, c, slot, head);
	}
	if (segment < c->segments_fresh) {
		uint32_t i = c->segments[segment].frame;
		struct frame *f = i < n->frames_room ? &n->frames[i] : NULL;

		if (f && f->client == c && f->segment == segment &&
		    i != t->frame) {
			const struct bs_segment_header *h =
				(const void *)frame_bytes(f);

			if (f->state == FRAME_STOCK)
				pool_observe_grants(n, c);
			if (f->state == FRAME_ACTIVE &&
			    (f->slot == slot || (f->slot == SLOT_UNKNOWN &&
						 READ_ONCE(h->slot) == slot)))
				move_to_frame(n, c, slot, i);
		}
	}
	if (unlikely(unannounced != t->unannounced)) {
		t->missing += (int32_t)(unannounced - t->unannounced);
		t->unannounced = unannounced;
		if (t->frame != NONE)
			t->missing -= (int32_t)walk(n, c, &n->frames[t->frame],
						    false);
		thread_progressed(c, slot);
	}
	if (unlikely(t->missing > 0)) {
		/* More news was dropped than runs were found: losses. (Less is
		 * normal: a walk is ahead of the news.) */
		untied_loss(n, c);
		t->missing = 0;
	}
}

/* Slots in use, without touching the areas of those that are not: each would
 * cost a page. */
static void find_threads(struct bsn *n, struct client *c)
{
	bool all = !c->scanned_ns || n->now_ns - c->scanned_ns >= SCAN_NS;

	if (all) {
		for (uint32_t i = BS_THREAD_SLOTS; i-- > c->threads_used;) {
			if (READ_ONCE(c->context->slots[i].tid)) {
				c->threads_used = i + 1;
				break;
			}
		}
		c->scanned_ns = n->now_ns ? n->now_ns : 1;
	}
	/* A thread may have come, written and gone since the last look. */
	for (uint32_t i = c->unclaimed.head; i != NONE;
	     i = n->frames[i].next_own) {
		const struct bs_segment_header *h =
			(const void *)frame_bytes(&n->frames[i]);
		uint32_t slot = READ_ONCE(h->slot);

		if (slot < BS_THREAD_SLOTS && slot >= c->threads_used)
			c->threads_used = slot + 1;
	}
	while (c->threads_used < BS_THREAD_SLOTS) {
		const struct bs_thread_area *a = area_of(c, c->threads_used);

		if (!READ_ONCE(a->owner_tid) && !READ_ONCE(a->run_head))
			break;
		c->threads_used++;
	}
}

/* ------------------------------------------------------------ triggers --- */

static bool name_is_valid(const char *name)
{
	size_t i = 0;

	for (; i < BS_TRIGGER_NAME_MAX + 1 && name[i]; i++) {
		char ch = name[i];

		if (!((ch >= 'a' && ch <= 'z') || (ch >= '0' && ch <= '9') ||
		      ch == '_' || ch == '.' || ch == '-'))
			return false;
	}
	return i && i <= BS_TRIGGER_NAME_MAX;
}

static void copy_text(char *to, const char *from, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = READ_ONCE(from[i]);
	to[bytes - 1] = 0;
	/* Nothing after the end: it may be anything. */
	memset(to + strlen(to), 0, bytes - strlen(to));
}

static void take_trigger(struct bsn *n, struct client *c,
			 const struct bs_trigger_cell *cell)
{
	struct bsn_event *e = &n->events[n->events_head % EVENTS_MAX];
	uint16_t n_laterals = READ_ONCE(cell->n_laterals);
	uint64_t ticks = READ_ONCE(cell->ticks);

	memset(e, 0, sizeof(*e));
	e->kind = BSN_EVENT_TRIGGER;
	e->client = c->number;
	e->id.hi = READ_ONCE(cell->trace_hi);
	e->id.lo = READ_ONCE(cell->trace_lo);
	e->source = READ_ONCE(cell->source);
	copy_text(e->trigger, cell->name, sizeof(e->trigger));
	copy_text(e->why, cell->why, sizeof(e->why));
	if (!(e->id.hi | e->id.lo) || !name_is_valid(e->trigger) ||
	    e->source < BS_TRIGGER_APPLICATION ||
	    e->source > BS_TRIGGER_KERNEL || n_laterals > BS_LATERALS_MAX) {
		n->counts.corrupt++;
		return;
	}
	for (uint32_t i = 0; i < n_laterals; i++) {
		struct bs_trace_id id;

		id.hi = READ_ONCE(cell->laterals[i].hi);
		id.lo = READ_ONCE(cell->laterals[i].lo);
		if (id.hi | id.lo)
			e->laterals[e->n_laterals++] = id;
	}
	e->time_ns = clock_monotonic(n, ticks);
	if (e->time_ns > n->now_ns ||
	    n->now_ns - e->time_ns > TRIGGER_AGE_MAX_NS)
		e->time_ns = n->now_ns;
	n->events_head++;
	n->triggers_unsettled = true;
	n->counts.triggers++;
}

/*
 * Cells are not given back here, but when the control plane has seen to what
 * stood in them (drain_triggers_done): a trigger that was taken out of its
 * queue and not yet collected would be nowhere if the daemon were killed.
 */
void drain_triggers(struct bsn *n, struct client *c)
{
	struct bs_context_segment *x = c->context;

	while (n->events_head - n->events_tail < EVENTS_MAX) {
		uint32_t t = c->trigger_tail;
		struct bs_trigger_cell *cell = &x->cells[t % BS_TRIGGER_CELLS];
		uint32_t seq = load_acquire(&cell->seq);
		uint32_t claimed = READ_ONCE(x->trigger_head) - t;

		/* Once around at most, however fast cells are committed. */
		if (t - c->trigger_kept == BS_TRIGGER_CELLS)
			break;
		if (seq == t + 1) {
			take_trigger(n, c, cell);
		} else if (!claimed || claimed > BS_TRIGGER_CELLS) {
			/* Empty. A late commit of a cell that was skipped would
			 * stop the queue when it comes round again. */
			if (seq != t) {
				n->counts.corrupt++;
				store_release(&cell->seq, t);
			}
			break;
		} else {
			if (!c->stuck_ns)
				c->stuck_ns = n->now_ns ? n->now_ns : 1;
			if (n->now_ns - c->stuck_ns < CELL_STUCK_NS && c->live)
				break;
			n->counts.cells_skipped++;
		}
		c->stuck_ns = 0;
		c->trigger_tail = t + 1;
	}
}

/* Claimed and not yet taken. */
uint32_t drain_triggers_left(const struct client *c)
{
	uint32_t claimed =
		READ_ONCE(c->context->trigger_head) - c->trigger_tail;

	return claimed <= BS_TRIGGER_CELLS ? claimed : 0;
}

void drain_triggers_done(struct client *c)
{
	for (; c->trigger_kept != c->trigger_tail; c->trigger_kept++) {
		uint32_t t = c->trigger_kept;

		store_release(&c->context->cells[t % BS_TRIGGER_CELLS].seq,
			      t + BS_TRIGGER_CELLS);
	}
}

/* ---------------------------------------------------------------- work --- */

void drain_client(struct bsn *n, struct client *c)
{
	uint64_t unattributed;

	if (!c->live)
		return;
	pool_observe_grants(n, c);
	find_threads(n, c);
	for (uint32_t i = 0; i < c->threads_used; i++)
		drain_thread(n, c, i);
	/* A thread has taken one at most of which it has not told yet. More are
	 * a lie, and would be memory that nobody can reclaim. */
	while (unlikely(c->unclaimed.count > BS_THREAD_SLOTS)) {
		uint32_t i = c->unclaimed.head;

		corrupt(n, c);
		pool_unclaimed_remove(n, c, i, NONE);
		finish_frame(n, c, NULL, &n->frames[i]);
	}
	unattributed = READ_ONCE(c->context->records_unattributed);
	if (unattributed != c->unattributed) {
		c->unattributed = unattributed;
		untied_loss(n, c);
	}
	/* All slices are looked at: once a drain, not at each lie. */
	if (unlikely(c->untied_news))
		slice_untied_loss(n, c, c->drained_ns);
	c->untied_news = false;
	c->drained_ns = n->now_ns;
}

/* Index the open runs of all threads, and copy what they grew by if their trace
 * is collected. */
void drain_open_runs(struct bsn *n)
{
	struct client *c;

	n->open_runs_seen = true;
	for_each_client(n, c) {
		if (!c->live)
			continue;
		for (uint32_t i = 0; i < c->threads_used; i++) {
			struct thread *t = &c->threads[i];
			struct frame *f;
			uint32_t r;

			if (t->frame == NONE)
				continue;
			f = &n->frames[t->frame];
			if (f->state != FRAME_ACTIVE)
				continue;
			r = f->open_run;
			if (r == NONE)
				t->missing -= (int32_t)walk(n, c, f, false);
			else if (n->index.runs[r].trace != NONE &&
				 !(n->index.runs[r].flags & RUN_DEAD) &&
				 n->index.traces[n->index.runs[r].trace].flags &
					 TRACE_COLLECTED)
				slice_run_arrived(n, r, f->open_copied);
		}
	}
}

/* Save how far each thread's log is in the index, with the number of the commit
 * that also saves what was copied on the way. */
void drain_save(struct bsn *n, uint64_t epoch)
{
	struct client *c;

	for_each_client(n, c) {
		for (uint32_t i = 0; c->dirty && i < c->threads_used; i++) {
			struct thread *t = &c->threads[i];
			struct bs_thread_area *a = area_of(c, i);
			struct progress p = {
				.epoch_high = (uint32_t)(epoch >> 32),
				.epoch_low = (uint32_t)epoch,
				.tail = t->tail,
				.segment = BS_SEGMENT_NONE,
				.open_copied = NONE,
				.unannounced = t->unannounced,
			};

			if (!t->dirty || (!c->live && t->frame == NONE))
				continue;
			/* Of one that is gone it may be another's by now. */
			if (t->frame != NONE &&
			    n->frames[t->frame].client == c) {
				const struct frame *f = &n->frames[t->frame];

				p.segment = f->segment;
				p.generation = f->generation;
				p.indexed_to8 = (uint16_t)(f->indexed_to / 8);
				p.open_copied = f->open_copied;
			}
			t->saved ^= 1;
			memcpy(&a->node_private[t->saved * sizeof(p) / 4], &p,
			       sizeof(p));
		}
	}
}

/* That is committed: the threads may have their ring entries back. */
void drain_give_back(struct bsn *n)
{
	struct client *c;

	for_each_client(n, c) {
		for (uint32_t i = 0; c->dirty && i < c->threads_used; i++) {
			struct thread *t = &c->threads[i];

			if (t->dirty)
				store_release(&area_of(c, i)->run_tail,
					      t->tail);
			t->dirty = false;
			if (!c->live)
				t->frame = NONE;
		}
		c->dirty = false;
	}
}

/* Commit if there is something to commit. */
void drain_publish(struct bsn *n)
{
	bool any = n->store.dirty != NONE;
	struct client *c;

	for_each_client(n, c)
		any |= c->dirty;
	if (any && n->recovered)
		store_commit(n);
}

/* The process is gone: all that it wrote is final. */
void drain_rest(struct bsn *n, struct client *c)
{
	uint32_t *found = malloc(((size_t)c->frames + 1) * sizeof(*found));
	uint32_t count = 0;

	list_init(&c->unclaimed);
	for (uint32_t s = 0; s < c->segments_fresh; s++) {
		uint32_t i = c->segments[s].frame;

		if (i >= n->frames_room || n->frames[i].client != c ||
		    n->frames[i].segment != s)
			continue;
		if (n->frames[i].state == FRAME_STOCK) {
			frame_drop(n, &n->frames[i]);
		} else if (n->frames[i].state == FRAME_ACTIVE) {
			if (found)
				found[count++] = i;
			else /* no memory for their order */
				finish_frame(n, c, NULL, &n->frames[i]);
		}
	}
	frames_sort(n, found, count);
	for (uint32_t k = 0; k < count; k++) {
		struct frame *f = &n->frames[found[k]];
		struct thread *t =
			f->slot < BS_THREAD_SLOTS ? &c->threads[f->slot] : NULL;

		/* Its last place, until that is committed. */
		if (t)
			t->frame = found[k];
		finish_frame(n, c, t, f);
	}
	free(found);
}

/* ------------------------------------------------------------ adoption --- */

static struct progress saved_progress(const struct bsn *n,
				      const struct bs_thread_area *a,
				      uint8_t *saved)
{
	struct progress best = {0};

	for (uint32_t k = 0; k < 2; k++) {
		struct progress p;
		uint32_t words[sizeof(p) / 4];

		for (uint32_t i = 0; i < sizeof(p) / 4; i++)
			words[i] = READ_ONCE(
				a->node_private[k * sizeof(p) / 4 + i]);
		memcpy(&p, words, sizeof(p));
		if (progress_epoch(&p) > progress_epoch(&best) &&
		    progress_epoch(&p) <= store_epoch(n)) {
			best = p;
			*saved = (uint8_t)k;
		}
	}
	return best;
}

/* News of runs (not of losses) that wait in the ring: the walk finds them. */
static int32_t ring_runs(const struct bs_thread_area *a, uint32_t tail,
			 uint32_t head)
{
	int32_t runs = 0;

	if (head - tail > BS_RUN_RING_ENTRIES)
		return 0;
	for (; tail != head; tail++)
		runs += READ_ONCE(a->entries[tail % BS_RUN_RING_ENTRIES]
					  .segment) != BS_SEGMENT_NONE;
	return runs;
}

static void adopt_thread(struct bsn *n, struct client *c, uint32_t slot)
{
	struct bs_thread_area *a = area_of(c, slot);
	struct thread *t = &c->threads[slot];
	uint32_t unannounced = load_acquire(&a->runs_unannounced);
	uint32_t head = load_acquire(&a->run_head);
	struct progress *p = &c->progress[slot];

	*p = saved_progress(n, a, &t->saved);
	thread_progressed(c, slot);
	t->tail = READ_ONCE(a->run_tail);
	if (progress_epoch(p)) {
		if (head - p->tail <= BS_RUN_RING_ENTRIES)
			t->tail = p->tail;
		t->unannounced = p->unannounced;
		return;
	}
	/* Of the past nothing is known: count from here. */
	for (uint32_t i = 0; i < sizeof(a->node_private) / 4; i++)
		WRITE_ONCE(a->node_private[i], 0);
	t->unannounced = unannounced;
	t->missing = -ring_runs(a, t->tail, head);
}

/* Walk the log of a process that a predecessor served. Its frames are there,
 * with their states and slots. */
int drain_adopted(struct bsn *n, struct client *c, uint32_t *sealed,
		  uint32_t count)
{
	uint32_t *all = malloc(((size_t)c->frames + 1) * sizeof(*all));
	uint32_t n_all = 0;

	c->progress = calloc(BS_THREAD_SLOTS, sizeof(*c->progress));
	if (!c->progress || !all) {
		free(all);
		return -ENOMEM;
	}
	c->scanned_ns = 0;
	find_threads(n, c);
	for (uint32_t k = 0; k < count; k++)
		all[n_all++] = sealed[k];
	for (uint32_t s = 0; s < c->n_segments; s++) {
		uint32_t i = c->segments[s].frame;
		const struct frame *f = i < n->frames_room ? &n->frames[i]
							   : NULL;

		if (!f || f->client != c || f->segment != s)
			continue;
		if (f->slot < BS_THREAD_SLOTS && f->slot >= c->threads_used)
			c->threads_used = f->slot + 1u;
		if (f->state == FRAME_ACTIVE && !f->to_seal)
			all[n_all++] = i;
	}
	for (uint32_t i = 0; i < c->threads_used; i++)
		adopt_thread(n, c, i);
	frames_sort(n, all, n_all);
	n->adopting = true;
	for (uint32_t k = 0; k < n_all; k++) {
		struct frame *f = &n->frames[all[k]];
		struct thread *t =
			f->slot < BS_THREAD_SLOTS ? &c->threads[f->slot] : NULL;
		enum step step;
		uint32_t at = f->indexed_to;

		while ((step = walk_step(n, c, f, SEGMENT, f->to_seal)) ==
		       STEP_RUN) {
			if (t && progress_of(c, f) && !was_passed(n, c, f, at))
				t->missing--;
			at = f->indexed_to;
		}
		if (step == STEP_BAD)
			corrupt(n, c);
		if (f->to_seal)
			continue;
		/* A thread may be between two: then it is in the older one,
			 * until the drain sees it move. */
		if (t && t->frame == NONE)
			t->frame = all[k];
		else
			pool_unclaimed_add(n, c, all[k]);
	}
	n->adopting = false;
	free(all);
	free(c->progress);
	c->progress = NULL;
	return 0;
}

/* Something of what rings the doorbell: see abi.h. */
bool client_has_work(const struct bsn *n, const struct client *c)
{
	const struct bs_trigger_cell *cell =
		&c->context->cells[c->trigger_tail % BS_TRIGGER_CELLS];

	if (load_acquire(&cell->seq) == c->trigger_tail + 1 &&
	    n->events_head - n->events_tail < EVENTS_MAX)
		return true;
	if (c->stock_granted && c->grant_head - READ_ONCE(grants_of(c)->tail) <=
					c->stock_granted / 2)
		return true;
	for (uint32_t i = 0; i < c->threads_used; i++) {
		if (load_acquire(&area_of(c, i)->run_head) -
			    c->threads[i].tail >=
		    BS_RUN_RING_ENTRIES / 4)
			return true;
	}
	return false;
}
