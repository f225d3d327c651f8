/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The budget. A frame is a segment that has memory; there are pool_bytes / 64 K
 * of them, over all arenas. A segment that is reclaimed keeps its memory until
 * somebody else needs it: granting it again to the same process costs nothing.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

/* A stock must outlast a pause of the node of some 10 ms; twice that, because
 * the rate is an estimate. */
#define STOCK_NS (20 * NS_PER_MS)

/* What a quiet process finds: a few threads start without waiting for the
 * node. */
#define STOCK_MIN 4u

/* What a process finds that has just attached, when all threads of its pool may
 * begin at once. It decays like any rate, so that workers that were forked and
 * wait hold little. */
#define STOCK_FIRST 32u
#define RATE_FIRST_PER_S ((STOCK_FIRST - STOCK_MIN) * (NS_PER_S / STOCK_NS))

/* The rate's peak is forgotten by half in this time, so that a burst that
 * comes back within a second is met by some stock. */
#define RATE_HALF_LIFE_NS (250 * NS_PER_MS)

/* --------------------------------------------------------------- lists --- */

void list_init(struct list *l)
{
	l->head = l->tail = NONE;
	l->count = 0;
}

static void own_push(struct bsn *n, struct list *l, struct frame *f)
{
	uint32_t i = frame_number(n, f);

	f->next_own = NONE;
	if (l->tail == NONE)
		l->head = i;
	else
		n->frames[l->tail].next_own = i;
	l->tail = i;
	l->count++;
}

static struct frame *own_pop(struct bsn *n, struct list *l)
{
	struct frame *f;

	if (l->head == NONE)
		return NULL;
	f = &n->frames[l->head];
	l->head = f->next_own;
	if (l->head == NONE)
		l->tail = NONE;
	l->count--;
	return f;
}

/* -------------------------------------------------------------- frames --- */

static bool has_memory_counted(enum frame_state state)
{
	return state == FRAME_STOCK || state == FRAME_ACTIVE ||
	       state == FRAME_SEALED;
}

void frame_set_state(struct bsn *n, struct frame *f, enum frame_state state)
{
	if (f->client != &n->keep) {
		if (has_memory_counted(f->state))
			n->by_state[f->state]--;
		if (has_memory_counted(state))
			n->by_state[state]++;
	}
	f->state = state;
}

/* Room in the table for so many more, beyond the budget where a predecessor had
 * a larger one. The table may move. */
int frames_reserve(struct bsn *n, uint32_t count)
{
	uint32_t room = n->frames_room;
	struct frame *frames;

	if (n->frames_used + count <= room)
		return 0;
	room += room / 2 + count;
	frames = realloc(n->frames, room * sizeof(*frames));
	if (!frames)
		return -ENOMEM;
	memset(frames + n->frames_room, 0,
	       (room - n->frames_room) * sizeof(*frames));
	n->frames = frames;
	n->frames_room = room;
	return 0;
}

struct frame *frame_new(struct bsn *n, struct client *c, uint32_t segment,
			enum frame_state state)
{
	struct frame *f;

	if (n->frames_free != NONE) {
		f = &n->frames[n->frames_free];
		n->frames_free = f->next;
	} else if (n->frames_fresh < n->frames_room) {
		f = &n->frames[n->frames_fresh++];
	} else {
		return NULL;
	}
	memset(f, 0, sizeof(*f));
	f->client = c;
	f->segment = segment;
	f->prev = f->next = f->next_own = NONE;
	f->chunk = NONE;
	f->open_run = NONE;
	f->indexed_to = FIRST_RUN;
	f->slot = SLOT_UNKNOWN;
	f->generation = c->segments[segment].generation;
	frame_set_state(n, f, state);
	c->segments[segment].frame = frame_number(n, f);
	c->frames++;
	n->frames_used++;
	return f;
}

/* Give the memory back. The frame is in no list. */
void frame_drop(struct bsn *n, struct frame *f)
{
	struct client *c = f->client;
	struct segment *s = &c->segments[f->segment];

	/* Failure leaves old bytes behind, of this process and in its own
	 * arena; the next generation tells them from new ones. */
	(void)madvise(frame_bytes(f), SEGMENT, MADV_REMOVE);
	frame_set_state(n, f, FRAME_FREE);
	s->touched = 0; /* the process's pages are gone too */
	s->frame = c->segments_free;
	c->segments_free = f->segment;
	c->frames--;
	n->frames_used--;
	f->client = NULL;
	f->next = n->frames_free;
	n->frames_free = frame_number(n, f);
}

void frame_seal(struct bsn *n, struct frame *f)
{
	uint32_t i = frame_number(n, f);

	frame_set_state(n, f, FRAME_SEALED);
	f->next = NONE;
	f->prev = n->sealed.tail;
	if (f->prev == NONE)
		n->sealed.head = i;
	else
		n->frames[f->prev].next = i;
	n->sealed.tail = i;
	n->sealed.count++;
	own_push(n, &f->client->sealed, f);
}

static void sealed_remove(struct bsn *n, struct frame *f)
{
	if (f->prev == NONE)
		n->sealed.head = f->next;
	else
		n->frames[f->prev].next = f->next;
	if (f->next == NONE)
		n->sealed.tail = f->prev;
	else
		n->frames[f->next].prev = f->prev;
	n->sealed.count--;
	/* Both lists have the same order, so it is its client's first too. */
	own_pop(n, &f->client->sealed);
}

static int by_grant(const void *a, const void *b, void *frames)
{
	const struct frame *f =
		(const struct frame *)frames + *(const uint32_t *)a;
	const struct frame *g =
		(const struct frame *)frames + *(const uint32_t *)b;

	return f->granted_ns < g->granted_ns ? -1
					     : f->granted_ns > g->granted_ns;
}

void frames_sort(struct bsn *n, uint32_t *frames, uint32_t count)
{
	qsort_r(frames, count, sizeof(*frames), by_grant, n->frames);
}

/* Segments of a process from before a restart, by rising age of grant, into
 * the node's list where they belong. */
void frames_merge_sealed(struct bsn *n, uint32_t *frames, uint32_t count)
{
	uint32_t at = n->sealed.head;

	for (uint32_t k = 0; k < count; k++) {
		struct frame *f = &n->frames[frames[k]];
		struct frame *before;

		while (at != NONE && n->frames[at].granted_ns <= f->granted_ns)
			at = n->frames[at].next;
		if (at == NONE) {
			frame_seal(n, f);
			continue;
		}
		frame_set_state(n, f, FRAME_SEALED);
		before = &n->frames[at];
		f->next = at;
		f->prev = before->prev;
		before->prev = frames[k];
		if (f->prev == NONE)
			n->sealed.head = frames[k];
		else
			n->frames[f->prev].next = frames[k];
		n->sealed.count++;
		own_push(n, &f->client->sealed, f);
	}
}

/* ------------------------------------------------------------- reclaim --- */

/* How old the oldest that waits for reclaim is: what was written within this
 * time is still here. */
uint64_t pool_oldest_ns(const struct bsn *n)
{
	if (n->sealed.head == NONE)
		return 0;
	return ns_since(n, n->frames[n->sealed.head].granted_ns);
}

/* It has memory, and waits to be granted again. */
void frame_back(struct bsn *n, struct frame *f)
{
	/* A successor must not take what is left there for a segment in use. */
	WRITE_ONCE(((struct bs_segment_header *)frame_bytes(f))->magic, 0);
	frame_set_state(n, f, FRAME_BACKED);
	own_push(n, &f->client->backed, f);
}

static void reclaim(struct bsn *n, struct frame *f, bool second_chance)
{
	struct client *c = f->client;

	keep_reclaim_begins(n);
	evict_frame(n, f, second_chance);
	keep_reclaim_ends(n);
	/* Here a kill leaves it and its copies; the reader of slices drops what
	 * is there twice. */
	WRITE_ONCE(((struct bs_segment_header *)frame_bytes(f))->magic, 0);
	sealed_remove(n, f);
	n->counts.reclaims++;
	if (c->live) {
		frame_back(n, f);
		return;
	}
	frame_drop(n, f);
	client_check_drained(n, c);
}

void pool_drop_backed(struct bsn *n, struct client *c)
{
	struct frame *f;

	while ((f = own_pop(n, &c->backed)))
		frame_drop(n, f);
}

/* All that is left of a process that is gone. It is freed on the way. */
void pool_drop_client(struct bsn *n, struct client *c)
{
	pool_drop_backed(n, c);
	for (uint32_t s = 0; s < c->segments_fresh; s++) {
		uint32_t i = c->segments[s].frame;

		/* Only of a process whose adoption failed. */
		if (i < n->frames_room && n->frames[i].client == c &&
		    n->frames[i].segment == s &&
		    n->frames[i].state != FRAME_SEALED)
			frame_seal(n, &n->frames[i]);
	}
	if (!c->sealed.count) {
		client_check_drained(n, c);
		return;
	}
	for (uint32_t left = c->sealed.count; left--;)
		reclaim(n, &n->frames[c->sealed.head], true);
}

/* Reclaim the oldest segment. False: there is none. */
bool pool_reclaim(struct bsn *n, bool second_chance)
{
	if (n->sealed.head == NONE)
		return false;
	if (second_chance && !n->open_runs_seen) {
		/* Which traces are open, also those whose first run is. */
		drain_open_runs(n);
		if (n->sealed.head == NONE)
			return false;
	}
	reclaim(n, &n->frames[n->sealed.head], second_chance);
	return true;
}

/* -------------------------------------------------------------- grants --- */

static void populate(uint8_t *bytes)
{
#ifdef MADV_POPULATE_WRITE
	if (!madvise(bytes, SEGMENT, MADV_POPULATE_WRITE))
		return;
#endif
	/* Kernels before 5.14: nobody writes here before the grant. */
	for (uint32_t i = 0; i < SEGMENT; i += 4096)
		WRITE_ONCE(bytes[i], 0);
}

static struct frame *frame_unused(struct bsn *n, struct client *c)
{
	uint32_t segment = c->segments_free;
	struct frame *f;

	if (segment != NONE)
		c->segments_free = c->segments[segment].frame;
	else if (c->segments_fresh < c->n_segments)
		segment = c->segments_fresh++;
	else
		return NULL;
	f = frame_new(n, c, segment, FRAME_BACKED);
	if (!f) {
		c->segments[segment].frame = c->segments_free;
		c->segments_free = segment;
		return NULL;
	}
	populate(frame_bytes(f));
	return f;
}

/* Memory that another process's arena holds and nobody uses. */
static bool steal(struct bsn *n, const struct client *for_whom)
{
	for (uint32_t i = 0; i < n->n_clients; i++) {
		struct client *c = n->clients[i];
		struct frame *f;

		if (c == for_whom || !(f = own_pop(n, &c->backed)))
			continue;
		frame_drop(n, f);
		return true;
	}
	if (&n->keep != for_whom && n->keep.backed.count) {
		frame_drop(n, own_pop(n, &n->keep.backed));
		return true;
	}
	return false;
}

/* A predecessor had a larger budget. */
void pool_shrink(struct bsn *n)
{
	while (n->frames_used > n->n_frames) {
		if (!steal(n, NULL) && !pool_reclaim(n, true))
			break;
	}
}

/*
 * A segment with memory for c, or NULL. The loop is bounded: each round either
 * ends, or takes one from the list of the sealed; those that came to it
 * meanwhile (the keep arena's) get no second chance.
 */
struct frame *frame_take(struct bsn *n, struct client *c)
{
	uint32_t chances = n->sealed.count;

	for (;;) {
		struct frame *f = own_pop(n, &c->backed);
		bool arena_full = c->segments_free == NONE &&
				  c->segments_fresh == c->n_segments;
		bool second_chance;

		if (f)
			return f;
		if (!arena_full) {
			if (n->frames_used < n->threshold)
				return frame_unused(n, c);
			if (steal(n, c))
				continue;
		}
		second_chance = chances > 0;
		if (chances)
			chances--;
		if (arena_full) {
			/* Its arena is smaller than its share: its own oldest
			 * must go. */
			if (c->sealed.head == NONE)
				return NULL;
			if (second_chance && !n->open_runs_seen)
				drain_open_runs(n);
			if (c->sealed.head == NONE)
				continue;
			reclaim(n, &n->frames[c->sealed.head], second_chance);
			continue;
		}
		if (pool_reclaim(n, second_chance))
			continue;
		/* All is being written to: up to the budget, then nothing. */
		if (n->frames_used < n->n_frames)
			return frame_unused(n, c);
		return NULL;
	}
}

/* One for the keep arena, which asks in the middle of a reclaim: what lies
 * between the threshold and the budget is for this. */
struct frame *frame_take_kept(struct bsn *n)
{
	struct frame *f = own_pop(n, &n->keep.backed);

	if (f)
		return f;
	if (n->keep.frames >= n->keep_max)
		return NULL;
	if (n->frames_used >= n->n_frames && !steal(n, &n->keep))
		return NULL;
	return frame_unused(n, &n->keep);
}

/* Begin the segment's next life. Returns its generation. */
uint16_t frame_start(struct bsn *n, struct frame *f, uint32_t slot)
{
	struct segment *s = &f->client->segments[f->segment];
	struct bs_segment_header h = {
		.magic = BS_ABI_MAGIC,
		.segment = f->segment,
		.slot = slot,
	};

	/* A successor orders by it. */
	n->granted_ns = n->now_ns > n->granted_ns ? n->now_ns
						  : n->granted_ns + 1;
	h.granted_ns = n->granted_ns;
	if (++s->generation == 0)
		s->generation = 1;
	h.generation = s->generation;
	/* The grant that follows is a store_release. */
	memcpy(frame_bytes(f), &h, sizeof(h));
	f->generation = s->generation;
	f->granted_ns = n->granted_ns;
	f->indexed_to = FIRST_RUN;
	f->open_run = NONE;
	f->open_copied = NONE;
	f->ghosts = 0;
	f->slot = SLOT_UNKNOWN;
	return s->generation;
}

uint32_t pool_stock(const struct client *c)
{
	return c->grant_head - c->grant_tail;
}

/* A thread took it; which one, is seen when it is heard of. */
void pool_unclaimed_add(struct bsn *n, struct client *c, uint32_t frame)
{
	frame_set_state(n, &n->frames[frame], FRAME_ACTIVE);
	own_push(n, &c->unclaimed, &n->frames[frame]);
}

/* before: what stands before it in the list, or NONE. */
void pool_unclaimed_remove(struct bsn *n, struct client *c, uint32_t frame,
			   uint32_t before)
{
	uint32_t next = n->frames[frame].next_own;

	if (before == NONE)
		c->unclaimed.head = next;
	else
		n->frames[before].next_own = next;
	if (next == NONE)
		c->unclaimed.tail = before;
	c->unclaimed.count--;
	n->frames[frame].next_own = NONE;
}

/* The frames that threads took since the last look become theirs. */
void pool_observe_grants(struct bsn *n, struct client *c)
{
	uint32_t tail = load_acquire(&grants_of(c)->tail);
	uint32_t taken = tail - c->grant_tail;

	if (!taken)
		return;
	if (taken > pool_stock(c)) {
		n->counts.corrupt++;
		return;
	}
	while (c->grant_tail != tail) {
		uint32_t i =
			c->granted[c->grant_tail++ % BS_GRANT_RING_ENTRIES];

		pool_unclaimed_add(n, c, i);
	}
	c->taken += taken;
	/* Whoever took it may be a thread that was never seen. */
	c->scanned_ns = 0;
}

/* Together, stocks may hold half of the pool, and one half of its arena. */
static uint32_t stock_most(const struct bsn *n, const struct client *c)
{
	uint32_t most = n->n_frames / 2 / (n->n_clients > 2 ? n->n_clients : 2);

	if (most > c->n_segments / 2)
		most = c->n_segments / 2;
	if (most > BS_GRANT_RING_ENTRIES)
		most = BS_GRANT_RING_ENTRIES;
	return most < 1 ? 1 : most;
}

static void stock_adapt(struct bsn *n, struct client *c)
{
	uint64_t passed = n->now_ns - c->rate_ns;
	uint64_t halves = (n->now_ns - c->decayed_ns) / RATE_HALF_LIFE_NS;
	uint64_t rate, target;
	uint32_t most = stock_most(n, c);

	if (passed >= NS_PER_MS) {
		rate = c->taken * NS_PER_S / passed;
		/* All was taken: what would have been is unknown. */
		if (!pool_stock(c) && c->taken)
			rate *= 2;
		if (halves) {
			c->rate_per_s = halves < 64 ? c->rate_per_s >> halves
						    : 0;
		}
		c->decayed_ns += halves * RATE_HALF_LIFE_NS;
		if (rate > c->rate_per_s)
			c->rate_per_s = rate;
		if (halves || c->taken)
			c->rate_ns = n->now_ns;
		c->taken = 0;
	}
	target = STOCK_MIN + c->rate_per_s * STOCK_NS / NS_PER_S;
	c->stock_target = (uint32_t)(target < most ? target : most);
}

/* Take back what a process that has become quiet will not need, or may not have
 * since there are more of them: the node takes a grant as a thread does. */
static void stock_shrink(struct bsn *n, struct client *c)
{
	struct bs_grant_ring *ring = grants_of(c);
	uint32_t most = stock_most(n, c);

	if (most > 2 * c->stock_target)
		most = 2 * c->stock_target;
	while (pool_stock(c) > most) {
		uint32_t tail = c->grant_tail;
		struct frame *f;

		if (!compare_and_swap(&ring->tail, &tail, tail + 1)) {
			pool_observe_grants(n, c);
			return;
		}
		f = &n->frames[c->granted[c->grant_tail++ %
					  BS_GRANT_RING_ENTRIES]];
		/* It has not met that memory yet. */
		if (READ_ONCE(
			    ring->entries[tail % BS_GRANT_RING_ENTRIES].fresh))
			c->segments[f->segment].touched = 0;
		frame_back(n, f);
	}
}

void pool_grant_first(struct bsn *n, struct client *c)
{
	c->rate_per_s = RATE_FIRST_PER_S;
	c->rate_ns = c->decayed_ns = n->now_ns;
	pool_take_back(n, c);
	pool_grant(n, c);
}

void pool_take_back(struct bsn *n, struct client *c)
{
	pool_observe_grants(n, c);
	stock_adapt(n, c);
	stock_shrink(n, c);
}

void pool_grant(struct bsn *n, struct client *c)
{
	struct bs_grant_ring *ring = grants_of(c);

	while (pool_stock(c) < c->stock_target) {
		struct frame *f = frame_take(n, c);
		struct segment *s;
		struct bs_grant *g;

		if (!f)
			break;
		s = &c->segments[f->segment];
		g = &ring->entries[c->grant_head % BS_GRANT_RING_ENTRIES];
		WRITE_ONCE(g->segment, f->segment);
		WRITE_ONCE(g->generation, frame_start(n, f, NONE));
		WRITE_ONCE(g->fresh, !s->touched);
		s->touched = 1;
		frame_set_state(n, f, FRAME_STOCK);
		c->granted[c->grant_head % BS_GRANT_RING_ENTRIES] =
			frame_number(n, f);
		store_release(&ring->head, ++c->grant_head);
	}
	c->stock_granted = pool_stock(c);
}

/* ---------------------------------------------------------------- life --- */

int memfd_sealed(const char *name, uint64_t bytes)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int err;

	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)bytes) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)) {
		err = -errno;
		close(fd);
		return err;
	}
	return fd;
}

/* Its size, if it can be neither grown nor shrunk by anybody. */
int memfd_check(int fd, uint64_t *bytes)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0 || fstat(fd, &st))
		return -EPROTO;
	if ((seals & (F_SEAL_GROW | F_SEAL_SHRINK)) !=
	    (F_SEAL_GROW | F_SEAL_SHRINK))
		return -EPROTO;
	*bytes = (uint64_t)st.st_size;
	return 0;
}

/* Reading a hole would fill it. */
bool segment_has_memory(int fd, uint64_t offset)
{
	return lseek(fd, (off_t)offset, SEEK_DATA) == (off_t)offset;
}

void *map_shared(int fd, uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		return NULL;
	/* A core dump of the daemon must not hold what applications wrote. */
	(void)madvise(p, bytes, MADV_DONTDUMP);
	(void)madvise(p, bytes, MADV_DONTFORK);
	return p;
}

int pool_init(struct bsn *n)
{
	n->n_frames = (uint32_t)(n->config.pool_bytes / SEGMENT);
	n->threshold = (uint32_t)((uint64_t)n->n_frames *
				  n->config.reclaim_percent / 100);
	n->keep_max = n->n_frames / 4;
	n->frames_room = n->n_frames;
	n->frames_free = NONE;
	list_init(&n->sealed);
	n->frames = calloc(n->n_frames, sizeof(*n->frames));
	return n->frames ? 0 : -ENOMEM;
}

void pool_free(struct bsn *n)
{
	free(n->frames);
}
