/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of the data plane share. node.h says what it does.
 *
 *   node.c     life, configuration, the order of work in a poll
 *   pool.c     the budget: which segment has memory, and who may write there
 *   client.c   one process: its memfds, its mappings, its end
 *   drain.c    from shared memory into the index; the only reader of rings
 *   index.c    trace -> runs
 *   evict.c    what happens to the traces of a segment that is reclaimed
 *   keep.c     the keep arena: runs that got a second chance
 *   tombs.c    what is remembered of traces that lost something
 *   store.c    blocks, marks, commit and recovery of the report store
 *   slice.c    copying runs out of the log into slices
 *   clock.c    pairs of record ticks and Unix time
 *   wait.c     doorbells
 *   metrics.c  numbers
 *
 * Two kinds of memory meet here. What a client can write (its arena, channel,
 * context) is read once, with the vocabulary of barrier.h, and checked. What
 * only the node writes (everything in this header; the keep arena; the report
 * store) is believed.
 */
#ifndef BSN_INTERNAL_H
#define BSN_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "barrier.h"
#include "node.h"

#define NONE UINT32_MAX
#define SEGMENT BS_SEGMENT_BYTES
#define NS_PER_S 1000000000ull
#define NS_PER_MS 1000000ull
#define FIRST_RUN ((uint32_t)sizeof(struct bs_segment_header))
#define RUN_HEADER ((uint32_t)sizeof(struct bs_run_header))
#define PIECE_ALIGN 8u

/* Runs that are looked up together, so that their cache misses overlap: more
 * than a core has misses in flight gains nothing. */
#define BATCH 32u

/* ------------------------------------------------------------- index --- */

/* What is known about a trace; the low bits are enum bsn_slice_flags. */
#define TRACE_COLLECTED 0x8000u /* `slice` is its slice */
#define TRACE_PARTIAL 0x4000u	/* only there is some of it, or may be */
#define TRACE_REPORTED 0x2000u	/* all of it, by a slice that was released */
#define TRACE_OWN_FLAGS (TRACE_COLLECTED | TRACE_PARTIAL | TRACE_REPORTED)

struct trace {
	uint64_t hi;
	uint64_t lo;
	uint32_t next;	 /* in its bucket, or in the free list */
	uint32_t newest; /* run, or NONE */
	union {
		uint32_t active; /* coarse time of the latest run, see coarse() */
		uint32_t slice; /* if TRACE_COLLECTED */
	};
	uint16_t flags;
	uint16_t tombs; /* entries of the tombstone ring that name it */
};
_Static_assert(sizeof(struct trace) == 32, "two traces a cache line");

/* Of a run in the index: BS_RUN_FIRST, LAST, LOSSY, and */
#define RUN_DEAD 0x0100u  /* of a trace that was evicted: never copied again */
#define RUN_GHOST 0x0200u /* a loss: there is nothing in the log */
#define RUN_OPEN 0x0400u  /* still being written */
#define RUN_ABI_FLAGS (BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY)

struct run {
	uint32_t older;	  /* of the same trace, or NONE */
	uint32_t trace;	  /* NONE: taken out */
	uint16_t offset8; /* of its header in the segment, / 8 */
	uint16_t flags;
};
_Static_assert(sizeof(struct run) == 12, "runs dominate the index");

/* Runs are allocated to a segment in chunks, so that all runs of a segment
 * are found without looking into the segment. */
#define CHUNK_RUNS 64u

struct chunk {
	uint32_t frame;
	uint32_t next; /* older one of the frame, or in the free list */
	uint32_t used;
};

struct index {
	struct trace *traces;
	uint32_t *buckets;
	struct run *runs;
	struct chunk *chunks;
	uint32_t n_traces, n_buckets, n_chunks;
	uint32_t traces_fresh, chunks_fresh; /* never used from here on */
	uint32_t traces_free, chunks_free;   /* lists */
	uint32_t traces_used, chunks_used;
	uint64_t runs_used;
	uint64_t secret[2]; /* trace ids are chosen by strangers */
};

/* -------------------------------------------------------------- pool --- */

enum frame_state {
	FRAME_FREE = 0, /* not in use; segments without memory have no frame */
	FRAME_BACKED,	/* has memory, waits to be granted again */
	FRAME_STOCK,
	FRAME_ACTIVE,
	FRAME_SEALED,
};

#define FRAME_STATES 5

/* A segment that has memory. There are as many frames as the budget allows. */
struct frame {
	struct client *client;
	uint64_t granted_ns;
	uint32_t segment;
	uint32_t prev, next;  /* sealed list of the node; next: free list */
	uint32_t next_own;    /* sealed, backed or unclaimed list */
	uint32_t chunk;	      /* newest chunk of runs */
	uint32_t indexed_to;  /* where the first run not in the index starts */
	uint32_t open_run;    /* in the index, but still open: starts there */
	uint32_t open_copied; /* of its records, into a slice; NONE: nothing, not
			       * even that there is such a run */
	uint16_t generation;
	uint16_t slot;	 /* SLOT_UNKNOWN until it is seen */
	uint16_t ghosts; /* runs of it that are losses: at most GHOSTS_MAX */
	uint8_t state;
	bool to_seal; /* found full, while its process is being adopted */
};

/* Losses that a thread announces while it stands in one segment get an entry
 * in the index each, up to as many as the segment could hold runs of one
 * record: so the index is no cheaper to fill by announcing than by writing. */
#define GHOSTS_MAX                                                             \
	(SEGMENT / (RUN_HEADER + (uint32_t)sizeof(struct bs_record_header)))

#define SLOT_UNKNOWN 0xffffu

struct list {
	uint32_t head, tail, count;
};

/* ------------------------------------------------------------ client --- */

struct segment {
	uint32_t frame; /* NONE while without memory; or link of free list */
	uint16_t generation;
	uint16_t touched; /* the client has had it before */
};

/* How far the node got in a thread's log and ring, saved in the thread area so
 * that a successor knows what was copied into slices already. Two of them:
 * the newest whose epoch the report store has committed counts. */
struct progress {
	uint32_t epoch_high; /* of 64 bits: 32 are through in weeks */
	uint32_t epoch_low;
	uint32_t tail;
	uint32_t segment;
	uint16_t generation;
	uint16_t indexed_to8; /* / 8 */
	uint32_t open_copied;
	uint32_t unannounced;
};
_Static_assert(sizeof(struct progress) * 2 <=
		       sizeof(((struct bs_thread_area *)0)->node_private),
	       "two of them fit on the node's line");

/* 0: none. */
static inline uint64_t progress_epoch(const struct progress *p)
{
	return (uint64_t)p->epoch_high << 32 | p->epoch_low;
}

struct thread {
	uint32_t tail;	      /* own copy of run_tail */
	uint32_t frame;	      /* that it appends to, or NONE */
	uint32_t unannounced; /* as last seen */
	int64_t missing; /* news that was dropped, less runs found by walking */
	uint32_t homeless; /* losses told before it had a segment */
	uint8_t saved;	   /* which progress is the newer */
	bool dirty;	   /* tail or progress not yet published */
};

struct client {
	uint32_t number; /* 0: the keep arena */
	int pid;
	char service[64];
	bool live;
	uint8_t *arena;
	uint64_t arena_bytes;
	uint8_t *channel;
	struct bs_context_segment *context;

	struct segment *segments;
	uint32_t n_segments;
	uint32_t segments_fresh; /* never used from here on */
	uint32_t segments_free;	 /* list */
	uint32_t frames;	 /* with memory, in any state */
	struct list backed;
	struct list unclaimed; /* active, by grant: whose, no news has told */
	struct list sealed;    /* in the order of the node's list */

	uint32_t grant_head, grant_tail;
	uint32_t granted[BS_GRANT_RING_ENTRIES]; /* frames; the ring's own copy */
	uint32_t stock_target;
	uint32_t stock_granted; /* that waited when it was last filled */
	uint32_t taken;		/* since rate_ns */
	uint64_t rate_ns;
	uint64_t decayed_ns;
	uint64_t rate_per_s; /* segments, peak hold */

	uint32_t threads_used; /* none beyond was ever used */
	uint64_t scanned_ns;   /* all slots; 0: do it */
	uint64_t unattributed; /* as last seen */
	uint64_t drained_ns;
	uint64_t exited_ns;
	struct thread threads[BS_THREAD_SLOTS];
	bool dirty; /* one of them is */

	uint32_t trigger_tail;
	uint32_t trigger_kept; /* cells before are given back to the client */
	uint64_t stuck_ns;     /* since when a claimed cell is not committed */

	struct progress *progress; /* of each thread, while being adopted */

	/* Losses that no trace could be blamed for happened between. */
	uint64_t untied_from_ns, untied_to_ns;
	bool untied_news; /* slices do not know of the latest */

	struct client *retired; /* next, of those to be unmapped */
};

/* ------------------------------------------------------------- store --- */

#define BLOCK_BYTES 2048u
#define BLOCK_HEADER 32u
#define BLOCK_CONTENT (BLOCK_BYTES - BLOCK_HEADER)

/* Processes with open handles that a mark remembers over a restart, as many as
 * fit. Of further ones a successor thinks that they have the trace closed: it
 * may tell earlier that the trace is quiet, and what comes is reported all the
 * same. */
#define MARK_OPENS 48u

struct part {
	uint32_t client;
	int32_t open;	 /* FIRSTs - LASTs */
	bool introduced; /* the slice has its PROCESS piece */
};

struct slice {
	struct bs_trace_id id;
	struct bs_trace_id primary;
	char trigger[BS_TRIGGER_NAME_MAX + 1];
	uint64_t bytes, trimmed_bytes;
	uint64_t collected_ns, changed_ns;
	uint64_t epoch;
	uint32_t flags;
	uint32_t trace; /* index */
	uint32_t n_crumbs;
	uint64_t crumbs[BSN_CRUMBS_MAX];

	struct part *parts;
	uint32_t n_parts, parts_room;
	uint64_t last_pair_ticks; /* of the CLOCK piece written last */
	uint64_t last_pair_realtime_ns;

	uint32_t *blocks; /* block numbers of content [first_block, ...) */
	uint32_t first_block, n_blocks, blocks_room;
	uint32_t mark;	 /* its mark block, and its place in store.slices */
	uint8_t saved;	 /* which of the mark's states is the newer */
	bool dirty;	 /* mark not yet written */
	bool changed;	 /* event waits */
	bool full_event; /* event waits */
	bool adopted;	 /* begun by a predecessor */
	uint32_t next_dirty;
};

struct store {
	int fd;
	uint8_t *map;
	uint64_t bytes;
	uint32_t n_blocks;
	uint32_t fresh, free, used; /* as in the index */
	uint32_t *free_next;
	struct slice **slices; /* by mark block */
	uint32_t n_slices;
	uint32_t dirty;			     /* list of slices */
	uint32_t changed_head, changed_tail; /* queue of marks */
	uint32_t *changed_next;
	bool *queued;
};

/* Where the bytes of pieces go: a slice in the store, or a buffer (peek). */
struct sink {
	struct slice *slice;
	uint8_t *buffer; /* NULL: into the store */
	size_t room;
};

/* ------------------------------------------------------------- clock --- */

#define CLOCK_PAIRS 1024u

struct pair {
	uint64_t ticks, monotonic_ns, realtime_ns;
};

struct clock {
	struct pair pairs[CLOCK_PAIRS]; /* by rising ticks */
	uint32_t n;
};

/* -------------------------------------------------------------- node --- */

/* A producer between claim and commit of a trigger cell runs a few instructions;
 * after this long it was killed there. */
#define CELL_STUCK_NS (100 * NS_PER_MS)

/* Triggers that wait for the control plane; more stay in the clients' queues,
 * which then fill and count. */
#define EVENTS_MAX 1024u

struct bsn {
	pthread_mutex_t lock;
	struct bsn_config config;
	uint64_t node_id;
	uint64_t now_ns;

	struct frame *frames;
	uint32_t n_frames;    /* the budget */
	uint32_t frames_room; /* of the table: what a predecessor granted, too */
	uint32_t frames_fresh, frames_free;
	uint32_t frames_used; /* that have memory */
	uint32_t threshold;   /* reclaim above it */
	uint32_t keep_max;
	uint32_t by_state[FRAME_STATES]; /* of clients */
	struct list sealed;		 /* of the node, oldest first */
	bool open_runs_seen;		 /* in this poll */
	bool adopting;			 /* walking what a predecessor knew */
	uint64_t granted_ns;		 /* of the latest grant: all differ */
	uint64_t untied_to_ns;		 /* the latest untied loss of any */

	struct index index;

	struct client keep; /* the keep arena is a client to the pool */
	int keep_fd;
	uint64_t keep_map_bytes; /* tombstones, then segments */
	uint32_t keep_frame;	 /* appended to, or NONE */
	uint32_t keep_at;	 /* offset in it */
	uint32_t keep_owners;	 /* in keep_frame, of those remembered here: */
	struct {
		uint32_t number, at;
	} keep_owner[64];

	struct tomb_ring *tombs; /* in the keep memfd */
	uint32_t *tomb_traces;	 /* ring slot -> trace */

	struct client **clients;
	uint32_t n_clients;
	uint32_t *drained; /* numbers: events that wait */
	uint32_t n_drained, drained_room;

	struct store store;
	struct clock clock;
	uint8_t *scratch; /* one segment, private: a run while it is judged */
	uint32_t *chain;  /* runs of a trace, oldest first */
	uint32_t chain_room;

	struct bsn_event *events;
	uint32_t events_head, events_tail;

	uint32_t wake_word;  /* futex; counts bsn_wake() */
	uint32_t wakes_seen; /* by a bsn_wait() that returned */
	/* The first poll was. Before it nothing is committed: what a predecessor
	 * saved and did not commit, in logs that are not adopted yet, would
	 * count from then on. */
	bool recovered;
	bool keep_adopted, store_adopted;
	/* A trigger was taken since the control plane was done with all. */
	bool triggers_unsettled;
	uint32_t waiting; /* threads in bsn_wait */
	struct client *retired;

	struct bsn_metrics counts; /* what only grows, of clients gone too */
};

static inline struct bs_thread_area *area_of(const struct client *c, uint32_t i)
{
	return (struct bs_thread_area *)(c->channel + BS_CHANNEL_AREAS_OFFSET) +
	       i;
}

static inline struct bs_channel_header *header_of(const struct client *c)
{
	return (struct bs_channel_header *)c->channel;
}

static inline struct bs_grant_ring *grants_of(const struct client *c)
{
	return (struct bs_grant_ring *)(c->channel + BS_CHANNEL_GRANTS_OFFSET);
}

static inline uint8_t *frame_bytes(const struct frame *f)
{
	return f->client->arena + (uint64_t)f->segment * SEGMENT;
}

static inline uint32_t frame_number(const struct bsn *n, const struct frame *f)
{
	return (uint32_t)(f - n->frames);
}

static inline struct frame *run_frame(const struct bsn *n, uint32_t run)
{
	return &n->frames[n->index.chunks[run / CHUNK_RUNS].frame];
}

/* How far the node got with a thread is other than what is committed. */
static inline void thread_progressed(struct client *c, uint32_t slot)
{
	c->threads[slot].dirty = true;
	c->dirty = true;
}

static inline void frame_progressed(const struct frame *f)
{
	if (f->slot < BS_THREAD_SLOTS)
		thread_progressed(f->client, f->slot);
}

static inline uint64_t ns_since(const struct bsn *n, uint64_t then_ns)
{
	return n->now_ns > then_ns ? n->now_ns - then_ns : 0;
}

/* Read all that processes announced, and what they have open. */
void node_catch_up(struct bsn *n, uint64_t now_ns);

/* About a millisecond, in 32 bits: it wraps after 52 days, so only ages are
 * compared. */
static inline uint32_t coarse(uint64_t ns)
{
	return (uint32_t)(ns >> 20);
}

static inline uint64_t coarse_age(const struct bsn *n, uint64_t then_ns)
{
	return n->now_ns > then_ns ? (n->now_ns >> 20) - (then_ns >> 20) : 0;
}

/*
 * All processes, live or not, from the last to the first: when one that is gone
 * leaves the array meanwhile, the last takes its place, which was seen already.
 */
static inline struct client *client_before(const struct bsn *n, uint32_t *i)
{
	while ((*i)-- > 0) {
		if (*i < n->n_clients)
			return n->clients[*i];
	}
	return NULL;
}

#define for_each_client(n, c)                                                  \
	for (uint32_t i_ = (n)->n_clients; ((c) = client_before(n, &i_));)

static inline bool id_is(const struct trace *t, struct bs_trace_id id)
{
	return t->hi == id.hi && t->lo == id.lo;
}

/* pool.c */
int pool_init(struct bsn *n);
void pool_free(struct bsn *n);
void list_init(struct list *l);
int frames_reserve(struct bsn *n, uint32_t count);
struct frame *frame_new(struct bsn *n, struct client *c, uint32_t segment,
			enum frame_state state);
void frame_back(struct bsn *n, struct frame *f);
void frame_drop(struct bsn *n, struct frame *f);
void frame_set_state(struct bsn *n, struct frame *f, enum frame_state state);
void frame_seal(struct bsn *n, struct frame *f);
void frames_sort(struct bsn *n, uint32_t *frames, uint32_t count);
bool segment_has_memory(int fd, uint64_t offset);
void frames_merge_sealed(struct bsn *n, uint32_t *frames, uint32_t count);
struct frame *frame_take(struct bsn *n, struct client *c);
uint16_t frame_start(struct bsn *n, struct frame *f, uint32_t slot);
bool pool_reclaim(struct bsn *n, bool second_chance);
void pool_shrink(struct bsn *n);
uint64_t pool_oldest_ns(const struct bsn *n);
struct frame *frame_take_kept(struct bsn *n);
void pool_unclaimed_add(struct bsn *n, struct client *c, uint32_t frame);
void pool_unclaimed_remove(struct bsn *n, struct client *c, uint32_t frame,
			   uint32_t before);
void pool_observe_grants(struct bsn *n, struct client *c);
/* To a process that has just attached. */
void pool_grant_first(struct bsn *n, struct client *c);
/* What a process has too much of, before others get what they lack. */
void pool_take_back(struct bsn *n, struct client *c);
void pool_grant(struct bsn *n, struct client *c);
uint32_t pool_stock(const struct client *c);
void pool_drop_backed(struct bsn *n, struct client *c);
void pool_drop_client(struct bsn *n, struct client *c);
void *map_shared(int fd, uint64_t bytes);
int memfd_sealed(const char *name, uint64_t bytes);
int memfd_check(int fd, uint64_t *bytes);

/* index.c */
int index_init(struct bsn *n);
void index_free(struct index *x);
uint64_t index_hash(const struct index *x, struct bs_trace_id id);
void index_prefetch_bucket(const struct index *x, uint64_t hash);
void index_prefetch_trace(const struct index *x, uint64_t hash);
uint32_t trace_find(const struct bsn *n, struct bs_trace_id id);
uint32_t trace_get(struct bsn *n, struct bs_trace_id id);
void trace_put(struct bsn *n, uint32_t trace);
uint32_t run_add(struct bsn *n, struct bs_trace_id id, struct frame *f,
		 uint32_t offset, uint16_t flags);
bool run_room(struct bsn *n);
uint32_t run_alloc(struct bsn *n, struct frame *f, uint32_t offset,
		   uint16_t flags);
uint32_t trace_chain(struct bsn *n, uint32_t trace);
void frame_forget_runs(struct bsn *n, struct frame *f);

/* evict.c */
void evict_frame(struct bsn *n, struct frame *f, bool second_chance);
void trace_evict(struct bsn *n, uint32_t trace, uint16_t why);
int trace_open_handles(struct bsn *n, uint32_t trace);

/* keep.c */
struct keep_owner {
	uint32_t number;
	uint32_t pid;
	char service[64];
};
struct kept_run {
	uint64_t granted_ns; /* of the segment that it was written in */
	uint32_t owner;	     /* offset of its keep_owner in the segment */
	uint32_t from;	     /* offset of the records in the run as written */
};
#define KEPT_OWNER 0x2000u /* header flag: content is a keep_owner */
#define KEPT_GHOST 0x1000u /* header flag: RUN_GHOST */
int keep_init(struct bsn *n);
int keep_adopt(struct bsn *n, int fd);
void keep_free(struct bsn *n);
bool keep_run(struct bsn *n, uint32_t run, uint32_t *newest, uint32_t *oldest);
bool keep_owner_of(const struct bsn *n, uint32_t run, struct keep_owner *owner);
uint64_t keep_granted_ns(const struct bsn *n, uint32_t run);
void keep_reclaim_begins(struct bsn *n);
void keep_reclaim_ends(struct bsn *n);

/* tombs.c */
struct tomb {
	uint64_t hi, lo;
	uint64_t time_ns;
	uint32_t flags; /* 0: none */
	uint32_t zero;
};

struct tomb_ring {
	uint64_t magic;
	uint32_t version;
	uint32_t entries;
	uint32_t keep_segments;
	uint32_t next;
	uint64_t overrun_ns; /* when one that mattered was dropped */
	/* The latest untied loss of a process that is forgotten, but whose runs
	 * may still be kept. */
	uint64_t gone_untied_ns;
	/* While a segment is reclaimed: what was kept before. What was kept since
	 * stands in that segment too, and is not to be found twice. 0: none. */
	uint64_t reclaim_granted_ns; /* of the latest segment */
	uint32_t reclaim_segment, reclaim_at;
	uint8_t pad[4096 - 64];
	struct tomb tombs[];
};
uint64_t tombs_bytes(uint32_t entries);
void tombs_make(struct bsn *n, uint32_t entries, uint32_t keep_segments);
bool tombs_valid(const struct tomb_ring *ring, uint64_t bytes);
int tombs_load(struct bsn *n);
bool tombs_drop_oldest(struct bsn *n);
void trace_flag(struct bsn *n, struct bs_trace_id id, uint16_t flags);
void trace_flag_at(struct bsn *n, uint32_t trace, uint16_t flags);

/* client.c */
void client_check_drained(struct bsn *n, struct client *c);
void client_release_retired(struct bsn *n);
struct client *client_find(const struct bsn *n, uint32_t number);
void client_note_untied(struct bsn *n, struct client *c);
void client_free(struct client *c);

/* drain.c */
bool log_read(struct bsn *n, uint32_t run, struct bs_run_header *header,
	      uint8_t *records, uint32_t *bytes, uint32_t *from);
void drain_client(struct bsn *n, struct client *c);
void drain_triggers(struct bsn *n, struct client *c);
void drain_triggers_done(struct client *c);
uint32_t drain_triggers_left(const struct client *c);
void drain_open_runs(struct bsn *n);
void drain_publish(struct bsn *n);
void drain_save(struct bsn *n, uint64_t epoch);
void drain_give_back(struct bsn *n);
void drain_rest(struct bsn *n, struct client *c);
int drain_adopted(struct bsn *n, struct client *c, uint32_t *sealed,
		  uint32_t count);
bool client_has_work(const struct bsn *n, const struct client *c);

/* store.c */
int store_init(struct bsn *n);
int store_adopt(struct bsn *n, int fd);
void store_free(struct bsn *n);
struct slice *slice_new(struct bsn *n, uint32_t trace, struct bs_trace_id id,
			struct bs_trace_id primary, const char *trigger);
size_t slice_read(const struct bsn *n, const struct slice *s, uint64_t offset,
		  uint8_t *to, size_t bytes);
void slice_trim(struct bsn *n, struct slice *s, uint64_t offset);
struct slice *store_next_changed(struct bsn *n);
void store_reserve_client(struct bsn *n, uint32_t number);
void slice_free(struct bsn *n, struct slice *s);
struct slice *slice_of(const struct bsn *n, uint32_t trace);
void slice_dirty(struct bsn *n, struct slice *s);
bool slice_append(struct bsn *n, struct slice *s, const void *head,
		  size_t head_bytes, const void *body, size_t body_bytes);
void store_commit(struct bsn *n);
uint64_t store_epoch(const struct bsn *n);
uint32_t store_next_client(struct bsn *n);

/* slice.c */
uint32_t records_whole(const uint8_t *records, uint32_t bytes, uint32_t room,
		       bool *malformed);
void slice_run_arrived(struct bsn *n, uint32_t run, uint32_t copied);
void slice_loss_arrived(struct bsn *n, uint32_t trace, const struct client *c,
			uint16_t flags);
void slice_untied_loss(struct bsn *n, const struct client *c, uint64_t from_ns);
void slice_close_gone(struct bsn *n);
void slice_copy_trace(struct bsn *n, struct sink *to, uint32_t trace);
void slice_fill(const struct slice *s, struct bsn_slice *out);
struct part *slice_part(struct slice *s, uint32_t client);
uint32_t slice_open_handles(const struct slice *s);

/* metrics.c */
void metrics_add_client(const struct client *c, struct bsn_metrics *m);

/* clock.c */
const struct pair *clock_nearest(const struct clock *k, uint64_t ticks);
uint64_t clock_monotonic(const struct bsn *n, uint64_t ticks);

#endif
