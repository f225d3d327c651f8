/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small client for tests of the node: writes arenas and channels as abi.h
 * says, one step at a time, so that a test can stop between any two.
 */
#ifndef BS_TEST_WRITER_H
#define BS_TEST_WRITER_H

#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi.h"
#include "barrier.h"
#include "check.h"
#include "node.h"

#define SECOND 1000000000ull
#define MS 1000000ull
#define START (1000 * SECOND)
#define SEG BS_SEGMENT_BYTES

/* Of a trace of which nothing is left. */
#define EVICTED_BY_FINGERPRINT (BSN_SLICE_EVICTED | BSN_SLICE_BY_FINGERPRINT)

struct writer {
	struct bsn_client_fds fds;
	int number;
	uint8_t *arena;
	uint64_t arena_bytes;
	uint8_t *channel;
	struct bs_context_segment *context;
};

struct wthread {
	struct writer *w;
	uint32_t slot;
	uint32_t segment;
	uint32_t cursor; /* where the next run or record goes */
	uint32_t runs;	 /* in the segment's directory */
	struct bs_run_header *run;
	struct bs_trace_id run_id;
	uint32_t run_offset, run_records; /* in the segment */
	uint32_t handle;
};

/* ---------------------------------------------------------------- node --- */

static inline struct bsn_config test_config(uint64_t pool_bytes)
{
	struct bsn_config c = {
		.node_name = "node-a",
		.pool_bytes = pool_bytes,
		.arena_bytes = pool_bytes,
		.store_bytes = 4 << 20,
		.trace_bytes_max = 1 << 20,
		.cluster_seed = 1,
		.percentage_threshold = UINT64_MAX,
		.reclaim_percent = 98,
		.clients_max = 64,
		.tombstones = 4096,
		.ticks_per_s = SECOND,
	};

	return c;
}

static inline struct bsn *test_node(const struct bsn_config *config)
{
	struct bsn *n = NULL;
	char message[256] = "";
	int err = bsn_new(config, &n, message, sizeof(message));

	if (err)
		fprintf(stderr, "bsn_new: %d: %s\n", err, message);
	CHECK_EQ(err, 0);
	CHECK_EQ(bsn_clock_pair(n, START, START, START), 0);
	return n;
}

static inline struct bs_trace_id trace_id(uint64_t i)
{
	struct bs_trace_id id = {0x1000000000000000ull + i,
				 i * 0x9e3779b97f4a7c15ull + 1};

	return id;
}

/* -------------------------------------------------------------- client --- */

/* The id of another trace that has the same fingerprint. */
static inline struct bs_trace_id look_alike(struct bs_trace_id id, uint64_t i)
{
	uint64_t hi = id.hi ^ i;

	return (struct bs_trace_id){
		hi, bs_trace_lo(hi, bs_trace_mix(id.hi, id.lo))};
}

static inline struct bs_context_segment *w_map_context(int fd)
{
	struct bs_context_segment *x = mmap(
		NULL, sizeof(*x), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	CHECK((void *)x != MAP_FAILED);
	return x;
}

static inline void writer_map(struct writer *w)
{
	w->arena_bytes = (uint64_t)lseek(w->fds.arena, 0, SEEK_END);
	w->arena = mmap(NULL, w->arena_bytes, PROT_READ | PROT_WRITE,
			MAP_SHARED, w->fds.arena, 0);
	w->channel = mmap(NULL, BS_CHANNEL_BYTES, PROT_READ | PROT_WRITE,
			  MAP_SHARED, w->fds.channel, 0);
	w->context = w_map_context(w->fds.context);
	CHECK(w->arena != MAP_FAILED && w->channel != MAP_FAILED);
}

static inline void writer_attach(struct writer *w, struct bsn *n, uint64_t now)
{
	w->number = bsn_client_add(n, 1234, "tester", now, &w->fds);
	CHECK(w->number > 0);
	writer_map(w);
}

static inline void writer_close(struct writer *w)
{
	munmap(w->arena, w->arena_bytes);
	munmap(w->channel, BS_CHANNEL_BYTES);
	munmap(w->context, sizeof(*w->context));
	close(w->fds.arena);
	close(w->fds.channel);
	close(w->fds.context);
}

static inline struct bs_channel_header *w_header(const struct writer *w)
{
	return (struct bs_channel_header *)w->channel;
}

static inline struct bs_grant_ring *w_grants(const struct writer *w)
{
	return (struct bs_grant_ring *)(w->channel + BS_CHANNEL_GRANTS_OFFSET);
}

static inline struct bs_thread_area *w_area(const struct writer *w,
					    uint32_t slot)
{
	return (struct bs_thread_area *)(w->channel + BS_CHANNEL_AREAS_OFFSET) +
	       slot;
}

/* ------------------------------------------------------------- restart --- */

/* The fds as a holder would have them. */
struct held {
	int store, keep;
};

static inline struct held hold(struct bsn *n)
{
	struct held h = {dup(bsn_store_fd(n)), dup(bsn_keep_fd(n))};

	CHECK(h.store >= 0 && h.keep >= 0);
	return h;
}

static inline struct bsn *restart(struct bsn *n,
				  const struct bsn_config *config,
				  struct writer *w, int writers, uint64_t now)
{
	struct held h = hold(n);
	int number;

	bsn_free(n); /* writes nothing: as good as a kill */
	n = test_node(config);
	CHECK_EQ(bsn_adopt_keep(n, now, h.keep), 0);
	CHECK_EQ(bsn_adopt_store(n, now, h.store), 0);
	for (int i = 0; i < writers; i++) {
		number = bsn_client_adopt(n, w[i].number, 1234, "tester", now,
					  &w[i].fds);
		CHECK_EQ(number, w[i].number);
	}
	close(h.store);
	close(h.keep);
	return n;
}

/* Where store.c has the number of the last commit. */
#define COMMITS_WORD 3

static inline uint64_t *commits_map(struct bsn *n)
{
	uint64_t *header = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED,
				bsn_store_fd(n), 0);

	CHECK(header != MAP_FAILED);
	return &header[COMMITS_WORD];
}

static inline void commits_unmap(uint64_t *commits)
{
	munmap(commits - COMMITS_WORD, 4096);
}

/* -------------------------------------------------------------- thread --- */

static inline uint8_t *w_segment(const struct wthread *t)
{
	return t->w->arena + (uint64_t)t->segment * SEG;
}

static inline struct bs_segment_header *
w_segment_header(const struct wthread *t)
{
	return (struct bs_segment_header *)w_segment(t);
}

static inline struct wthread writer_thread(struct writer *w, uint32_t slot)
{
	struct wthread t = {.w = w, .slot = slot, .segment = BS_SEGMENT_NONE};
	struct bs_thread_area *a = w_area(w, slot);

	WRITE_ONCE(a->segment, BS_SEGMENT_NONE);
	store_release(&a->owner_tid, 100 + slot);
	WRITE_ONCE(w->context->slots[slot].tid, 100 + slot);
	t.handle = slot << BS_HANDLE_COUNT_BITS;
	return t;
}

/* What most tests begin with: a process with one thread writes to a node. */
static inline struct bsn *node_with_writer(const struct bsn_config *config,
					   struct writer *w, struct wthread *t)
{
	struct bsn *n = test_node(config);

	writer_attach(w, n, START);
	*t = writer_thread(w, 0);
	return n;
}

static inline void free_with_writers(struct bsn *n, struct writer *w,
				     uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static inline void free_with_writer(struct bsn *n, struct writer *w)
{
	free_with_writers(n, w, 1);
}

/* Take a grant, and do not tell who did. */
static inline bool w_grab(struct wthread *t, struct bs_grant *grant)
{
	struct bs_grant_ring *ring = w_grants(t->w);
	uint32_t tail = READ_ONCE(ring->tail);

	do {
		if (tail == load_acquire(&ring->head))
			return false;
		*grant = ring->entries[tail % BS_GRANT_RING_ENTRIES];
	} while (!compare_and_swap(&ring->tail, &tail, tail + 1));
	return true;
}

/* What a segment is from here on. */
static inline void w_set_life(const struct writer *w, uint32_t segment,
			      enum bs_segment_state state)
{
	struct bs_segment_header *h =
		(struct bs_segment_header *)(w->arena +
					     (uint64_t)segment * SEG);

	store_release(&h->life, bs_life(bs_life_generation(h->life), state));
	__atomic_fetch_add(&w_grants(w)->moves, 1, __ATOMIC_RELEASE);
}

static inline void w_settle(struct wthread *t, const struct bs_grant *grant)
{
	uint32_t full = t->segment;
	struct bs_segment_header *h;

	t->segment = grant->segment & ~BS_GRANT_FRESH;
	t->cursor = sizeof(*h);
	t->runs = 0;
	h = w_segment_header(t);
	WRITE_ONCE(h->runs, 0);
	WRITE_ONCE(h->slot, t->slot);
	store_release(&h->life, bs_life(grant->generation, BS_SEGMENT_HELD));
	store_release(&w_area(t->w, t->slot)->segment, t->segment);
	if (full != BS_SEGMENT_NONE)
		w_set_life(t->w, full, BS_SEGMENT_SEALED);
}

/* Its thread has no segment any more; *place is where to go on in it. */
static inline void w_park(struct wthread *t, struct wthread *place)
{
	*place = *t;
	t->segment = BS_SEGMENT_NONE;
	w_set_life(t->w, place->segment, BS_SEGMENT_PARKED);
}

/* False: the node has it. */
static inline bool w_go_on(struct wthread *t, const struct wthread *place)
{
	struct bs_segment_header *h = w_segment_header(place);
	uint64_t life = READ_ONCE(h->life);

	if (bs_life_state(life) != BS_SEGMENT_PARKED ||
	    !compare_and_swap(&h->life, &life,
			      bs_life(bs_life_generation(life),
				      BS_SEGMENT_HELD)))
		return false;
	if (t->segment != BS_SEGMENT_NONE)
		w_set_life(t->w, t->segment, BS_SEGMENT_SEALED);
	t->segment = place->segment;
	t->cursor = place->cursor;
	t->runs = place->runs;
	WRITE_ONCE(h->slot, t->slot);
	__atomic_fetch_add(&w_grants(t->w)->moves, 1, __ATOMIC_RELEASE);
	return true;
}

static inline bool w_take_segment(struct wthread *t)
{
	struct bs_grant grant;

	if (!w_grab(t, &grant))
		return false;
	w_settle(t, &grant);
	return true;
}

/* Something was lost; nobody says of which trace. */
static inline void w_lose_untold(struct wthread *t)
{
	struct bs_thread_area *a = w_area(t->w, t->slot);

	store_release(&a->losses_untold, a->losses_untold + 1);
	__atomic_fetch_add(&w_grants(t->w)->losses, 1, __ATOMIC_RELEASE);
}

/* Free places in the ring. */
static inline uint32_t w_loss_room(const struct wthread *t)
{
	const struct bs_thread_area *a = w_area(t->w, t->slot);

	return BS_LOSS_RING_ENTRIES -
	       (a->loss_head - load_acquire(&a->loss_tail));
}

static inline void w_lose_run(struct wthread *t, struct bs_trace_id id,
			      uint32_t handle, uint32_t flags, uint32_t bytes)
{
	struct bs_thread_area *a = w_area(t->w, t->slot);
	uint32_t head = a->loss_head;

	if (!w_loss_room(t)) {
		w_lose_untold(t);
		return;
	}
	a->losses[head % BS_LOSS_RING_ENTRIES] = (struct bs_loss){
		.trace_hi = id.hi,
		.trace_lo = id.lo,
		.handle = handle,
		.flags = flags,
		.payload_bytes = bytes,
	};
	store_release(&a->loss_head, head + 1);
	__atomic_fetch_add(&w_grants(t->w)->losses, 1, __ATOMIC_RELEASE);
}

static inline void w_lose(struct wthread *t, struct bs_trace_id id,
			  uint32_t flags, uint32_t bytes)
{
	w_lose_run(t, id, 0, flags, bytes);
}

static inline void w_put_entry(struct wthread *t, uint32_t i, uint64_t entry)
{
	store_release(bs_directory(w_segment(t), i), entry);
}

static inline uint32_t w_word(struct bs_trace_id id, uint32_t committed)
{
	return bs_word(bs_trace_mix(id.hi, id.lo), committed);
}

/* The header of a run whose entry has these flags. Returns its bytes. */
static inline uint32_t w_put_header(struct bs_run_header *h,
				    struct bs_trace_id id, uint32_t handle,
				    uint32_t seq, uint32_t flags,
				    uint32_t committed)
{
	WRITE_ONCE(h->trace_hi[0], (uint32_t)id.hi);
	WRITE_ONCE(h->trace_hi[1], (uint32_t)(id.hi >> 32));
	WRITE_ONCE(h->word, w_word(id, committed));
	WRITE_ONCE(h->handle, handle);
	if (!(flags & BS_RUN_FIRST))
		WRITE_ONCE(h->seq, seq);
	return bs_run_header_bytes(flags);
}

/* Open a run with room for bytes of records. False: no segment. */
static inline bool w_begin(struct wthread *t, struct bs_trace_id id,
			   uint32_t handle, uint32_t seq, uint32_t flags,
			   uint32_t bytes)
{
	struct bs_run_header *h;

	if (t->segment == BS_SEGMENT_NONE ||
	    t->cursor + sizeof(*h) + bytes + 8 > SEG - 8 * t->runs) {
		if (!w_take_segment(t))
			return false;
	}
	h = (struct bs_run_header *)(w_segment(t) + t->cursor);
	t->run = h;
	t->run_id = id;
	t->run_records = t->cursor + w_put_header(h, id, handle, seq, flags, 0);
	w_put_entry(t, t->runs,
		    bs_entry(bs_fingerprint(id.hi, id.lo), t->cursor, flags));
	store_release(&w_segment_header(t)->runs, ++t->runs);
	t->run_offset = t->cursor;
	t->cursor = t->run_records;
	return true;
}

static inline void w_commit(struct wthread *t, uint32_t bytes)
{
	store_release(&t->run->word, w_word(t->run_id, bytes));
}

static inline void w_record(struct wthread *t, uint8_t type,
			    const void *payload, uint32_t bytes, uint64_t ticks)
{
	struct bs_record_header *h =
		(struct bs_record_header *)(t->w->arena +
					    (uint64_t)t->segment * SEG +
					    t->cursor);
	uint32_t need = ((uint32_t)sizeof(*h) + bytes + 3) / 4 * 4;

	CHECK(t->cursor + need <= SEG);
	h->payload_bytes = (uint16_t)bytes;
	h->type = type;
	h->flags = 0;
	h->ticks = ticks;
	memset(h + 1, 0, need - sizeof(*h));
	if (bytes)
		memcpy(h + 1, payload, bytes);
	t->cursor += need;
	w_commit(t, t->cursor - t->run_records);
}

static inline void w_end(struct wthread *t, uint32_t flags)
{
	uint64_t entry = READ_ONCE(*bs_directory(w_segment(t), t->runs - 1));

	w_put_entry(t, t->runs - 1, entry | flags | BS_RUN_CLOSED);
	t->run = NULL;
}

/* The handle is open, or not, as the thread shows it. */
static inline void w_show(const struct wthread *t, uint32_t handle)
{
	WRITE_ONCE(w_area(t->w, t->slot)->own_handle, handle);
}

/* The handle is in the table of bs_open(), or not any more. */
static inline void w_list(const struct writer *w, uint32_t handle, bool open)
{
	uint32_t *table = (uint32_t *)(w->channel + BS_CHANNEL_HANDLES_OFFSET);

	WRITE_ONCE(table[bs_handle_place(handle)], open ? handle : 0);
}

/* A whole trace: one run of one record. */
static inline bool w_trace(struct wthread *t, struct bs_trace_id id,
			   uint32_t bytes, uint64_t ticks)
{
	static const uint8_t zeros[BS_PAYLOAD_MAX];
	uint32_t handle = ++t->handle;

	if (!w_begin(t, id, handle, 0, BS_RUN_FIRST, bytes + 24)) {
		w_lose_run(t, id, handle, BS_RUN_FIRST | BS_RUN_LAST, bytes);
		return false;
	}
	w_record(t, BS_RECORD_DATA, zeros, bytes, ticks);
	w_end(t, BS_RUN_LAST);
	return true;
}

static inline void w_trigger(struct writer *w, struct bs_trace_id id,
			     const char *name, uint64_t ticks)
{
	struct bs_context_segment *x = w->context;
	uint32_t p = x->trigger_head++;
	struct bs_trigger_cell *cell = &x->cells[p % BS_TRIGGER_CELLS];

	CHECK_EQ(load_acquire(&cell->seq), p);
	memset(cell->name, 0, sizeof(cell->name));
	memset(cell->why, 0, sizeof(cell->why));
	memcpy(cell->name, name, strlen(name));
	memcpy(cell->why, "because", 7);
	cell->trace_hi = id.hi;
	cell->trace_lo = id.lo;
	cell->ticks = ticks;
	cell->source = BS_TRIGGER_APPLICATION;
	cell->n_laterals = 0;
	store_release(&cell->seq, p + 1);
}

/* -------------------------------------------------------------- slices --- */

#define PIECES_MAX 4096

struct decoded {
	uint8_t *bytes;
	int64_t n_bytes;
	struct bs_piece_header pieces[PIECES_MAX];
	const uint8_t *content[PIECES_MAX];
	uint32_t n_pieces;
	uint32_t records;
	uint32_t by_kind[8];
};

/* Every piece is whole, and every record in it. */
static inline void decode(struct decoded *d)
{
	int64_t at = 0;

	d->n_pieces = d->records = 0;
	memset(d->by_kind, 0, sizeof(d->by_kind));
	while (at < d->n_bytes) {
		struct bs_piece_header *h = &d->pieces[d->n_pieces];

		CHECK(d->n_pieces < PIECES_MAX);
		CHECK(d->n_bytes - at >= (int64_t)sizeof(*h));
		memcpy(h, d->bytes + at, sizeof(*h));
		at += (int64_t)sizeof(*h);
		CHECK_EQ(h->bytes % 4, 0);
		CHECK(h->bytes <= d->n_bytes - at);
		CHECK(h->kind >= BS_PIECE_RUN && h->kind <= BS_PIECE_EXIT);
		d->by_kind[h->kind]++;
		d->content[d->n_pieces++] = d->bytes + at;
		for (uint32_t i = 0; h->kind == BS_PIECE_RUN && i < h->bytes;) {
			struct bs_record_header r;

			CHECK(h->bytes - i >= sizeof(r));
			memcpy(&r, d->bytes + at + i, sizeof(r));
			CHECK(r.payload_bytes <= h->bytes - i - sizeof(r));
			i += ((uint32_t)sizeof(r) + r.payload_bytes + 3) / 4 *
			     4;
			d->records++;
		}
		at += h->bytes;
	}
}

static inline void decode_slice(struct bsn *n, struct bs_trace_id id,
				struct decoded *d)
{
	struct bsn_slice s;

	CHECK_EQ(bsn_slice_info(n, id, &s), 0);
	d->bytes = realloc(d->bytes, s.bytes + 1);
	d->n_bytes = bsn_slice_read(n, id, 0, d->bytes, s.bytes);
	CHECK_EQ(d->n_bytes, s.bytes);
	decode(d);
}

/* Each handle's runs are there from the first, none is missing, none twice, and
 * they are in order. Returns how many handles that are. */
static inline uint32_t check_order(const struct decoded *d)
{
	uint32_t handles = 0;

	for (uint32_t i = 0; i < d->n_pieces; i++) {
		const struct bs_piece_header *h = &d->pieces[i], *last = NULL;

		if (h->kind != BS_PIECE_RUN)
			continue;
		for (uint32_t k = i; k-- && !last;) {
			if (d->pieces[k].kind == BS_PIECE_RUN &&
			    d->pieces[k].client == h->client &&
			    d->pieces[k].handle == h->handle)
				last = &d->pieces[k];
		}
		if (last && h->seq == last->seq) {
			CHECK_EQ(h->from, last->from + last->bytes);
			continue;
		}
		CHECK_EQ(h->seq, last ? last->seq + 1 : 0);
		CHECK_EQ(h->from, 0);
		CHECK_EQ(h->flags & BS_RUN_FIRST, last ? 0 : BS_RUN_FIRST);
		handles += !last;
	}
	return handles;
}

static inline void collect(struct bsn *n, struct bs_trace_id id, uint64_t now,
			   struct bsn_slice *s)
{
	CHECK_EQ(bsn_collect(n, id, id, "test", now, s), 0);
	/* One that came with others waits for the pass of the next poll. */
	if (s->flags & BSN_SLICE_SEARCHING) {
		bsn_poll(n, now);
		CHECK_EQ(bsn_slice_info(n, id, s), 0);
	}
}

/* Without collecting it, or reading any of it: so HELD is not among them. */
static inline uint32_t flags_of(struct bsn *n, struct bs_trace_id id,
				uint64_t now)
{
	struct bsn_slice s;
	uint8_t buffer[1];

	bsn_peek(n, id, now, buffer, 0, &s);
	return s.flags;
}

/* What must hold whatever clients do. */
static inline void check_invariants(struct bsn *n)
{
	struct bsn_metrics m;

	bsn_get_metrics(n, &m);
	CHECK(m.pool_used_bytes <= m.pool_bytes);
	CHECK_EQ(m.stock_bytes + m.active_bytes + m.sealed_bytes + m.keep_bytes,
		 m.pool_used_bytes);
	CHECK(m.keep_bytes <= m.pool_bytes / 4);
	CHECK(m.store_used_bytes <= m.store_bytes);
}

#endif
