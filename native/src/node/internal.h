/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of the data plane share. node.h says what it does.
 *
 *   node.c      life, configuration, the order of work in a poll
 *   ledger.c    the node's own record of what it granted; outlives the daemon
 *   pool.c      the budget: which segment has memory, and who may write there
 *   grants.c    stocks: how many segments a process has in hand
 *   client.c    one process: its memfds, its mappings, its end
 *   adopt.c     processes and segments that a predecessor knew
 *   threads.c   which segments threads are in, or left; what they lost
 *   memory.c    what a process touched of its arena and was not granted
 *   triggers.c  the trigger queues
 *   search.c    a pass over the directories, for all traces that wait
 *   verdict.c   what a search met, and whether that was all
 *   watch.c     what traces write that are collected already
 *   runs.c      one run of one segment, read and checked
 *   evict.c     what happens to the runs of a segment that is reclaimed
 *   gone.c      fingerprints of traces that lost something
 *   tenant.c    quotas: whose segments go when memory is short
 *   keep.c      the keep arena: runs of open handles from reclaimed segments
 *   store.c     blocks and slices of the report store
 *   policy.c    the table of what the node wants of its clients
 *   mark.c      marks of slices: commit and recovery
 *   slice.c     copying runs into slices
 *   recent.c    what the pool holds of the last seconds
 *   clock.c     pairs of record ticks and Unix time
 *   wait.c      doorbells
 *   metrics.c   numbers
 *
 * Two kinds of memory meet here. What a client can write (its arena, channel,
 * context) is read once, with the vocabulary of barrier.h, and checked. What
 * only the node writes (everything in this header; the ledger; the keep arena;
 * the report store) is believed.
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

/* ------------------------------------------------------------ ledger --- */

enum frame_state {
	FRAME_FREE = 0,
	FRAME_BACKED, /* has memory, waits to be granted again */
	FRAME_STOCK,
	FRAME_ACTIVE,
	FRAME_SEALED,
	FRAME_PARKED,
};

#define FRAME_STATES 6

/* How far a segment was watched for slices (watch.c), as of a commit. */
struct watched {
	uint64_t epoch;	  /* of the store; 0: none */
	uint32_t scanned; /* directory entries */
	uint32_t copied;  /* of the run after them; NONE: nothing */
};

/* What the node knows of a segment that it granted. */
struct grant_record {
	uint64_t granted_ns; /* all differ */
	uint64_t sealed;     /* or parked: when; all differ: 0: never */
	uint32_t client;     /* number; 0: the keep arena */
	uint32_t segment;
	uint32_t generation;
	uint16_t parked_runs; /* in the directory, when it was parked */
	uint8_t state;	      /* enum frame_state; written last */
	uint8_t zero;
	struct watched watched[2]; /* the newest that is committed counts */
};
_Static_assert(sizeof(struct grant_record) == 64, "a cache line");

struct ledger_header {
	uint64_t magic;
	uint32_t version;
	uint32_t n_records;
	uint32_t n_buckets; /* of gone.c */
	uint32_t keep_segments;
	uint64_t granted_ns;   /* of the latest grant */
	uint64_t sealed;       /* of the latest seal, or parking */
	uint64_t untied_to_ns; /* the latest loss of nobody knows which trace */
	/* Of what was reclaimed, when the last was sealed: what was written since
	 * is still there, whoever wrote it. 0: nothing was. */
	uint64_t reclaimed_to_ns;
	/* While a segment is reclaimed: where the keep arena ended before. What
	 * was kept since stands in that segment too. NONE: none is. */
	uint32_t reclaiming;   /* frame */
	uint32_t reclaim_keep; /* frame that was appended to, or NONE */
	uint32_t reclaim_runs; /* of it */
	uint32_t zero;
	uint64_t reclaim_granted_ns;
	/* What processes lost before that, of nobody knows which traces, slices
	 * that are committed know. */
	uint64_t told_ns;
};

struct ledger {
	int fd;
	uint8_t *map;
	uint64_t bytes;
	struct ledger_header *header;
	struct grant_record *records;
	uint32_t *gone;
	uint32_t bucket_bits; /* of gone: 2 to this are its buckets */
	uint8_t *keep;
	bool adopted;
};

/* -------------------------------------------------------------- pool --- */

/* A segment that counts towards the budget. Frame i has record i. */
struct frame {
	struct client *client;
	uint8_t *bytes;
	uint32_t prev, next; /* list of the node: sealed and parked; next: free
			      * list */
	uint32_t prev_own, next_own;	   /* list of its client */
	uint32_t prev_tenant, next_tenant; /* sealed and parked list */
	uint32_t scanned; /* entries that all slices were served */
	uint32_t copied;  /* of the open run after them, into its slice; NONE */
	uint32_t served;  /* while its directory has as many runs, and no more,
			   * slices were served all; NONE: look */
	uint64_t entered; /* the list of the active: by this in order */
	bool dirty;	  /* differs from what is committed */
	/* Of a sealed one that a pass has met, the low half of each fingerprint
	 * (search.c); else NULL. */
	uint32_t *column;
	uint32_t column_runs;
};

struct list {
	uint32_t head, tail, count;
};

struct pool {
	struct frame *frames;
	uint32_t n_frames;    /* the budget */
	uint32_t frames_room; /* of the table: what a predecessor granted, too */
	uint32_t frames_fresh, frames_free;
	uint32_t frames_used;
	uint32_t backed;    /* of them, those that wait to be granted again */
	uint32_t threshold; /* of the others: reclaim above it */
	uint32_t keep_max;
	uint32_t by_state[FRAME_STATES]; /* of clients */
	struct list sealed;    /* and parked, of the node, oldest first */
	uint64_t column_bytes; /* of all columns (search.c) */
	uint64_t entered;      /* frames in the lists of the active, ever */
	uint32_t *dirty;       /* frames; room for all */
	uint32_t n_dirty;
};

/* ------------------------------------------------------------ tenant --- */

/* A user, or a group, whose processes are counted together. */
struct tenant {
	uint64_t key; /* the caller's */
	struct tenant *next;
	bool has_quota;
	uint32_t share; /* segments, that nobody else can push out */
	uint32_t held;	/* segments: stock, active, sealed */
	uint32_t clients, live;
	struct list sealed; /* and parked, in the order of the node's list */
};

struct tenants {
	struct tenant *first;
	struct tenant nobody; /* of processes whose tenant is not told */
	uint32_t live;	      /* that have processes that live */
};

/* ------------------------------------------------------------ client --- */

struct segment {
	uint32_t frame; /* NONE while it is not granted; or link of free list */
	uint32_t generation;
	bool touched; /* the process has met its memory */
};

struct thread {
	uint32_t loss_tail;	/* read; given back with the commit */
	uint32_t losses_untold; /* as last seen */
};

/* A queue of triggers: of a context segment. */
struct queue {
	struct bs_context_segment *context;
	uint32_t tail;
	uint32_t kept;	       /* cells before are given back to the client */
	uint64_t stuck_ns;     /* since when a claimed cell is not committed */
	uint64_t unattributed; /* records, as last seen */
	/* Its counters, as last believed. */
	uint64_t records_told, triggers_told;
};

/* Counters that a process writes, as last believed. */
struct told {
	uint64_t runs_lost, records_lost;
	uint64_t payload_bytes, payload_bytes_lost;
};

struct client {
	/* What each poll looks at where nothing happened, side by side. */
	bool live;
	bool untied_news;    /* slices do not know of some losses */
	bool losses_unsaved; /* some were read since the last commit */
	uint32_t take_back;  /* segment to go on with, or NONE */
	uint8_t *channel;
	uint32_t grant_head, grant_tail;
	struct list unclaimed; /* taken; their headers are not written yet */
	struct list active;
	uint32_t moves;	 /* as last seen */
	uint32_t losses; /* likewise */
	uint64_t losses_read_ns;
	uint64_t untied_news_ns; /* of the losses that slices do not know of */
	uint64_t memory_checked_ns;
	uint64_t watched_ns; /* all of its threads (watch.c) */
	uint64_t wrote_ns;   /* one of them, as was seen then */
	/* Until then its stock is as it should be, while it takes nothing, and
	 * shares with as many. */
	uint64_t settled_until_ns;
	uint32_t settled_tail, settled_clients;
	uint32_t threads_used; /* none beyond was ever used */
	struct queue queue;
	struct queue queue_before; /* being replaced; context NULL: none is */

	uint32_t number; /* 0: the keep arena */
	int pid;
	char service[64];
	uint8_t *arena;
	uint64_t arena_bytes;
	int arena_fd; /* to ask how much memory it has */

	struct segment *segments;
	uint32_t n_segments;
	uint32_t segments_fresh; /* never used from here on */
	uint32_t segments_free;	 /* list */
	uint32_t frames;	 /* in any state */
	uint32_t held;		 /* of them, those that count (tenant.c) */
	struct tenant *tenant;	 /* NULL: of the keep arena */
	struct list backed;
	uint64_t kept_bytes;	    /* in the keep arena */
	struct list sealed, parked; /* in the order of the node's list */

	uint32_t *granted; /* frames; the ring's own copy */
	uint32_t stock_target;
	uint32_t stock_granted; /* that waited when it was last filled */
	uint64_t filled_ns;	/* when that was */
	uint32_t taken;		/* since window_ns */
	uint64_t window_ns;
	uint64_t peak_per_s; /* segments */
	uint64_t peak_ns;    /* when it was last halved, or reached */

	uint64_t exited_ns;
	struct thread threads[BS_THREAD_SLOTS];
	struct told told;

	/* Losses that no trace could be blamed for happened between. So many of
	 * its segments were in use, and are: those that were granted by then. */
	uint64_t untied_from_ns, untied_to_ns;
	uint64_t untied_granted_ns;
	uint32_t untied_frames;

	uint32_t false_hits;	      /* in the pass that goes on */
	struct client *next_numbered; /* of the same bucket */
	struct group *group;	      /* that listens to it; NULL: none does */
};

#define CLIENT_BUCKETS 1024u

struct clients {
	struct client **all;
	uint32_t count;
	struct client *numbered[CLIENT_BUCKETS];
	uint32_t *drained; /* numbers: events that wait */
	uint32_t n_drained, drained_room;
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
	uint32_t open;	   /* handles: those of slice.opens, and */
	uint32_t unlisted; /* of these, which is not known: a predecessor
			    * counted them, or there were too many */
	bool introduced;   /* the slice has its PROCESS piece */
};

/* Open handles of a slice that are known by their numbers, so that an end counts
 * only where the slice has the beginning, and once. They are few: hardly a trace
 * has as many open in one node, and a list of so many is read in no time. */
#define SLICE_OPENS_MAX 64u

struct open_handle {
	uint32_t client, handle;
};

struct slice {
	struct bs_trace_id id;
	uint64_t fingerprint;
	struct bs_trace_id primary;
	char trigger[BS_TRIGGER_NAME_MAX + 1];
	uint64_t bytes, trimmed_bytes;
	uint64_t collected_ns, changed_ns;
	uint64_t epoch;
	uint32_t flags;
	uint32_t n_crumbs;
	uint64_t crumbs[BSN_CRUMBS_MAX];
	struct search *search; /* that looks for it; NULL: none does */

	struct part *parts;
	uint32_t n_parts, parts_room;
	struct open_handle *opens; /* room for all; NULL: none yet */
	uint32_t n_opens;
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
	uint32_t next_hashed; /* mark of the next in its bucket */
};

/* One bit for each of so many values of a fingerprint's low bits: most entries
 * of a directory are told from all that is looked for without a memory access
 * outside the core. */
#define FILTER_BITS 65536u

struct filter {
	uint64_t words[FILTER_BITS / 64];
};

struct store {
	int fd;
	uint8_t *map;
	uint64_t bytes;
	uint32_t n_blocks;
	uint32_t fresh, free, used;
	uint32_t *free_next;
	struct slice **slices; /* by mark block */
	uint32_t n_slices;
	uint32_t *buckets; /* by fingerprint: marks */
	uint32_t n_buckets;
	struct filter filter; /* of all slices, and of some that were */
	uint32_t removed;     /* slices, since the filter was made */
	uint32_t dirty;	      /* list of slices */
	uint32_t changed_head, changed_tail; /* queue of marks */
	uint32_t *changed_next;
	bool *queued;
	bool adopted;
};

/* Where the bytes of pieces go: a slice in the store, or a buffer (peek). */
struct sink {
	struct slice *slice;
	uint8_t *buffer; /* NULL: into the store */
	size_t room;
};

/* -------------------------------------------------------------- keep --- */

struct keep_owner {
	uint32_t number;
	uint32_t pid;
	char service[64];
};

/* What precedes the records of a kept run. */
struct kept_run {
	uint64_t granted_ns; /* of the segment that it was written in */
	uint32_t owner;	     /* offset of its keep_owner in the segment */
	uint32_t from;	     /* offset of the records in the run as written */
};

#define KEEP_OWNERS 64u

struct keep {
	struct client arena; /* the keep arena is a client to the pool */
	uint32_t frame;	     /* appended to, or NONE */
	uint32_t at;	     /* offset in it */
	uint32_t n_owners;   /* in that frame, of those remembered here: */
	struct {
		uint32_t number, at;
	} owners[KEEP_OWNERS];
};

/* ------------------------------------------------------------- runs --- */

struct run {
	struct frame *frame;
	uint32_t index;	 /* of its entry */
	uint32_t offset; /* of its header */
	uint32_t flags;	 /* of the entry, read before the header */
	uint32_t end;	 /* offset where the next run starts, at most */
	struct bs_trace_id id;
	uint32_t handle, seq;
	/* Of a kept run what it was when it was written. */
	struct keep_owner owner;
	bool live; /* so is its process */
	uint64_t granted_ns;
	uint32_t from;	  /* where in the run its records begin */
	uint32_t records; /* offset of the first record */
	uint32_t bytes;	  /* of records, committed */
};

/* ------------------------------------------------------------ search --- */

/* A handle of the trace that is looked for, as far as its runs were met. */
struct met {
	uint32_t client, handle; /* client NONE: no entry */
	uint32_t runs;
	uint32_t seq_max;
	bool first, last, lossy, live;
};

/* A part of a kept run that is not its first. */
struct later {
	struct later *next; /* by rising `from` */
	struct run run;
	struct frame frame; /* that has its records, from the beginning */
	uint8_t records[];
};

/* One trace that is looked for. */
struct search {
	struct bs_trace_id id;
	uint64_t fingerprint;
	struct sink to;
	struct met *met; /* a hash table */
	uint32_t n_met, met_room;
	struct later *later; /* parts that follow on others */
	uint64_t later_bytes;
	uint64_t active_ns;	 /* of the latest record */
	uint64_t untied_from_ns; /* of losses after its runs' segments began */
	uint32_t why;		 /* enum gone, when the pass began */
	bool failed;		 /* no memory: what was met is not known */
	struct pass *pass;	 /* that looks for it now */
	bool passed;		 /* it has looked through all */
	struct search *next;
};

/* One pass over the directories for several searches. */
struct pass {
	struct search **searches; /* hash table by fingerprint */
	uint32_t room;
	struct filter filter;
	uint64_t *visited; /* a bit a frame */
	/* Where it is in the list of the sealed: the frame that was last; NONE: at
	 * the beginning. Of the node's list, or that of the keep arena. */
	uint32_t at;
	bool through_keep;
	/* Of the keep arena, what was there when the pass began: what is added
	 * comes from segments that are visited before they are reclaimed. */
	uint64_t granted_ns; /* the latest grant */
	uint64_t sealed;     /* the latest seal */
	uint64_t entered;    /* frames among the active until then */
	uint32_t keep_frame, keep_runs;
	bool is_peek; /* also what watch.c will serve slices */
	struct pass *next;
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

struct events {
	struct bsn_event *ring;
	uint32_t head, tail;
	uint32_t turn; /* client that is looked at first */
	/* A trigger was taken since the control plane was done with all. */
	bool unsettled;
};

struct waiting {
	uint32_t wake_word;  /* futex; counts bsn_wake() */
	uint32_t wakes_seen; /* by a bsn_wait() that returned */
	/* In some queue a cell is claimed and not committed, as of the latest
	 * poll or since. */
	bool cell_is_stuck;
	struct group *groups;
	uint32_t n_groups;
	uint64_t wake_ups; /* of all threads that sleep for the node */
};

/* Frames that a predecessor granted, by client, until the first poll. */
struct adoption {
	uint32_t *frames;
	uint32_t count;
};

struct bsn {
	/* node_lock() takes both, so that who waits gets its turn between two
	 * pieces of a long work. */
	pthread_mutex_t gate, lock;
	struct bsn_config config;
	uint64_t node_id;
	uint64_t now_ns;

	struct ledger ledger;
	struct adoption adoption;
	struct pool pool;
	struct keep keep;
	struct clients clients;
	struct tenants tenants;
	struct store store;
	struct clock clock;
	struct events events;
	struct waiting waiting;
	struct pass *passes;	 /* that go on */
	struct search *searches; /* that wait for the next poll's pass */
	bool searched_at_once;	 /* since the latest poll */
	bool untied_news;	 /* of some process */
	bool losses_unsaved;	 /* likewise */
	uint64_t passes_paid_ns; /* when their share of a core has paid for them */
	uint64_t watch_cost;	 /* of all that watch.c did, in entries */
	struct bs_policy *policy;
	int policy_fd;

	uint8_t *scratch; /* one segment, private: a run while it is judged */
	/* The first poll was. Before it nothing is committed: what a predecessor
	 * saved and did not commit, of processes that are not adopted yet, would
	 * count from then on. */
	bool recovered;

	struct bsn_metrics counts; /* what only grows, of clients gone too */
};

void node_lock(struct bsn *n);
void node_unlock(struct bsn *n);
/* Between two pieces of work: let others have the lock. */
void node_give_way(struct bsn *n);
/* Of work that changes slices: what a piece changed is committed with it, so that
 * no commit is of more than that. */
void node_commit_and_give_way(struct bsn *n);
/* So many clients are looked at in one. */
#define CLIENTS_A_PIECE 16u
/* Time does not go back; the caller's clock may, over a suspend or a restored
 * machine. */
void node_set_time(struct bsn *n, uint64_t now_ns);
/* What was written so far can be found. */
void node_catch_up(struct bsn *n, uint64_t now_ns);

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

static inline uint32_t frame_number(const struct bsn *n, const struct frame *f)
{
	return (uint32_t)(f - n->pool.frames);
}

static inline struct frame *frame_at(const struct bsn *n, uint32_t i)
{
	return &n->pool.frames[i];
}

static inline struct grant_record *record_of(const struct bsn *n,
					     const struct frame *f)
{
	return &n->ledger.records[frame_number(n, f)];
}

static inline uint64_t ns_since(const struct bsn *n, uint64_t then_ns)
{
	return n->now_ns > then_ns ? n->now_ns - then_ns : 0;
}

/*
 * All processes, live or not, from the last to the first: when one that is gone
 * leaves the array meanwhile, the last takes its place, which was seen already.
 */
static inline struct client *client_before(const struct bsn *n, uint32_t *i)
{
	while ((*i)-- > 0) {
		if (*i < n->clients.count)
			return n->clients.all[*i];
	}
	return NULL;
}

#define for_each_client(n, c)                                                  \
	for (uint32_t i_ = (n)->clients.count; ((c) = client_before(n, &i_));)

static inline bool id_is_zero(struct bs_trace_id id)
{
	return !(id.hi | id.lo);
}

static inline bool id_equal(struct bs_trace_id a, struct bs_trace_id b)
{
	return a.hi == b.hi && a.lo == b.lo;
}

/* ledger.c */
int ledger_init(struct bsn *n);
int ledger_adopt(struct bsn *n, int fd);
/* Records up to here have been used ever. */
uint32_t ledger_touched(const struct ledger *l);
void ledger_number_seal(struct bsn *n, uint32_t frame);
void ledger_free(struct bsn *n);
uint64_t ledger_bytes(uint32_t n_records, uint32_t n_buckets,
		      uint32_t keep_segments);

/* policy.c */
int policy_init(struct bsn *n);
void policy_free(struct bsn *n);

/* pool.c */
int pool_init(struct bsn *n);
void pool_free(struct bsn *n);
void list_init(struct list *l);
void own_push(struct bsn *n, struct list *l, struct frame *f);
struct frame *own_pop(struct bsn *n, struct list *l);
void own_remove(struct bsn *n, struct list *l, struct frame *f);
struct frame *frame_new(struct bsn *n, struct client *c, uint32_t segment,
			enum frame_state state);
void frame_adopt(struct bsn *n, uint32_t i, struct client *c);
void frame_back(struct bsn *n, struct frame *f);
void frame_drop(struct bsn *n, struct frame *f);
void frame_set_state(struct bsn *n, struct frame *f, enum frame_state state);
void frame_seal(struct bsn *n, struct frame *f);
void frame_seal_again(struct bsn *n, struct frame *f);
/* Nobody appends to it, and its process may go on in it. */
void frame_park(struct bsn *n, struct frame *f);
void frame_park_again(struct bsn *n, struct frame *f);
void frame_unpark(struct bsn *n, struct frame *f);
struct frame *frame_take(struct bsn *n, struct client *c,
			 uint64_t reclaims_until, bool *again);
struct frame *frame_take_kept(struct bsn *n);
void frame_start(struct bsn *n, struct frame *f);
/* Reclaim a segment, so that c gets one. False: there is none that may go. */
bool pool_reclaim(struct bsn *n, const struct client *c, bool second_chance);
void pool_shrink(struct bsn *n);
uint64_t pool_horizon_ns(const struct bsn *n);
void pool_drop_unused(struct bsn *n, struct client *c);
void pool_drop_client(struct bsn *n, struct client *c);

/* memfd.c */
void *map_shared(int fd, uint64_t bytes);
int memfd_sealed(const char *name, uint64_t bytes);
int memfd_check(int fd, uint64_t *bytes);
/* Behind the last byte between from and to that has memory. Whoever looks at what
 * has none gives it some. */
uint64_t memfd_touched(int fd, uint64_t from, uint64_t to);

/* grants.c */
void grants_first(struct bsn *n, struct client *c);
/* What a process has too much of, before others get what they lack. */
void grants_take_back(struct bsn *n, struct client *c);
/* A piece. True: there is more. */
bool grants_fill(struct bsn *n, struct client *c);
/* Of a process that is gone. False: there is none. */
bool grants_drop_one(struct bsn *n, struct client *c);
uint32_t grants_stock(const struct client *c);
/* How many more it is to get. */
uint32_t grants_wanted(const struct client *c);

/* threads.c */
void threads_use(struct bsn *n, struct client *c, uint32_t slots);
void threads_observe(struct bsn *n, struct client *c);
/* A thread appends to that frame. */
void thread_enter(struct bsn *n, struct frame *f);
/* The node has it from here on. False: a thread went on in it. */
bool parked_take(struct bsn *n, struct frame *f);
void threads_read_losses(struct bsn *n, struct client *c);
/* How far losses were read, in the commit with what came of them; and then give
 * their places back. */
void threads_save_losses(struct bsn *n, uint64_t epoch);
void threads_give_losses_back(struct bsn *n);
void threads_finish(struct bsn *n, struct client *c);
void frames_sort(struct bsn *n, uint32_t *frames, uint32_t count);
bool handle_is_open(const struct client *c, uint32_t handle);

/* memory.c */
/* Returns whether it was due. */
bool memory_check(struct bsn *n, struct client *c);
/* A piece. True: there is more. */
bool memory_take_back(struct bsn *n, struct client *c);

/* triggers.c */
void triggers_start(struct queue *q);
void triggers_take(struct bsn *n, struct client *c);
void triggers_take_all(struct bsn *n);
void triggers_done(struct client *c);
uint32_t triggers_left(const struct client *c);
bool triggers_wait(const struct bsn *n, const struct client *c);

/* runs.c */
/* From the first entry of a directory to the last. */
struct walk {
	uint32_t runs;
	uint32_t end; /* of the run that was opened last */
};
struct walk walk_of(const struct frame *f, uint32_t generation);
uint32_t runs_count(const struct frame *f, uint32_t generation);
/* The trace that an entry and its run header name; zero: neither can be read. */
struct bs_trace_id run_id(const struct frame *f, uint64_t entry);
uint64_t run_entry(const struct frame *f, uint32_t index);
/* Read an entry's run. False: it lies. */
bool run_open(struct bsn *n, struct frame *f, uint32_t index, uint64_t entry,
	      struct walk *walk, struct run *run);

/* search.c */
/* Look for a slice's trace with the next pass. */
void search_later(struct bsn *n, struct slice *slice);
/* Look for all that wait, unless that is not due yet. */
void search_waiting(struct bsn *n);
/* The frame is sealed no more. */
void column_drop(struct bsn *n, struct frame *f);
/* 0: at once. */
uint64_t search_due_in_ns(const struct bsn *n);
/* Look for them through all of the pool; give_way: in pieces, between which
 * others have the lock. */
int search_all(struct bsn *n, struct search *searches, bool give_way);
/* A segment is about to lose its content. */
void search_before_reclaim(struct bsn *n, struct frame *f);
/* One is about to go from the list of the sealed. */
void search_before_unseal(struct bsn *n, const struct frame *f);
uint64_t search_cost(const struct bsn *n);
bool search_has_passed(const struct bsn *n, const struct search *s,
		       const struct frame *f);
void filter_add(struct filter *f, uint64_t fingerprint);
static inline bool filter_has(const struct filter *f, uint64_t fingerprint)
{
	return f->words[fingerprint % FILTER_BITS / 64] >> (fingerprint % 64) &
	       1;
}

/* verdict.c */
int search_init(struct search *s, struct bs_trace_id id, struct sink to);
void search_free(struct search *s);
void search_meet(struct bsn *n, struct search *s, const struct run *run,
		 uint64_t last_ticks);
/* Records of a handle were lost; flags as of struct bs_loss. */
void search_loss(struct search *s, uint32_t client, uint32_t handle,
		 uint32_t flags);
/* A part of a kept run that is not the first: it has its turn at the end. */
void search_put_off(const struct bsn *n, struct search *s,
		    const struct run *run);
/* All was looked at. */
void search_conclude(struct bsn *n, struct search *s);

/* watch.c */
/* Returns whether slices were served all that is there. */
bool watch_frame(struct bsn *n, struct frame *f, bool final);
/* All that live processes write to now, in pieces; those that are quiet less
 * often. */
void watch_all(struct bsn *n);
/* Also what they may go on to write to, and at once. */
void watch_at_once(struct bsn *n);
void watch_from(struct bsn *n, struct frame *f, uint32_t copied);
void watch_save(struct bsn *n, uint64_t epoch);
bool watch_is_dirty(const struct bsn *n);
void watch_adopt(struct bsn *n, struct frame *f);

/* evict.c */
void evict_frame(struct bsn *n, struct frame *f, bool second_chance);

/* gone.c */
enum gone {
	GONE_EVICTED = 0x01,
	GONE_ABANDONED = 0x02,
	GONE_LOSSY = 0x04,
	GONE_REPORTED = 0x08, /* all of it, by a slice that was released */
};
uint32_t gone_buckets(uint64_t entries);
bool gone_add(struct bsn *n, uint64_t fingerprint, uint32_t why);
uint32_t gone_why(const struct bsn *n, uint64_t fingerprint);
void gone_prefetch(const struct bsn *n, uint64_t fingerprint);

/* adopt.c */
void adopt_end(struct bsn *n);

/* tenant.c */
void tenants_init(struct bsn *n);
void tenants_free(struct bsn *n);
void tenant_enter(struct bsn *n, struct client *c);
void tenant_exit(struct bsn *n, struct client *c);
void tenant_leave(struct bsn *n, struct client *c);
void tenant_count(struct client *c, int32_t segments);
void tenant_seal(struct bsn *n, struct frame *f);
void tenant_unseal(struct bsn *n, struct frame *f);
void tenants_unseal_all(struct bsn *n);
uint32_t tenant_victim(const struct bsn *n, const struct client *c);

/* keep.c */
int keep_init(struct bsn *n);
void keep_free(struct bsn *n);
bool keep_run(struct bsn *n, const struct run *run);
bool keep_owner_of(const struct frame *f, uint32_t offset,
		   struct keep_owner *owner);
bool keep_owner_of_entry(const struct frame *f, uint64_t entry,
			 struct keep_owner *owner);
void keep_disown(const struct frame *f, uint32_t index);
void keep_reclaim_begins(struct bsn *n, const struct frame *f);
void keep_reclaim_ends(struct bsn *n);
void keep_adopt(struct bsn *n);

/* client.c */
struct client *client_new(struct bsn *n, int pid, const char *service,
			  uint64_t arena_bytes);
int client_map(struct client *c, const struct bsn_client_fds *fds);
void client_enter(struct bsn *n, struct client *c, uint32_t number);
void client_fill_header(const struct bsn *n, const struct client *c);
bool client_make_room(struct bsn *n);
void client_check_drained(struct bsn *n, struct client *c);
struct client *client_find(const struct bsn *n, uint32_t number);
void client_untied_loss(struct bsn *n, struct client *c);
void client_free(struct client *c);
bool client_has_work(const struct bsn *n, const struct client *c);

/* store.c */
int store_init(struct bsn *n);
int store_adopt(struct bsn *n, int fd);
void store_free(struct bsn *n);
struct slice *slice_find(const struct bsn *n, struct bs_trace_id id);
/* Slices with that fingerprint, one after the other; start with NULL. */
struct slice *slice_next(const struct bsn *n, uint64_t fingerprint,
			 const struct slice *after);
struct slice *slice_new(struct bsn *n, struct bs_trace_id id,
			struct bs_trace_id primary, const char *trigger);
size_t slice_read(const struct bsn *n, const struct slice *s, uint64_t offset,
		  uint8_t *to, size_t bytes);
void slice_trim(struct bsn *n, struct slice *s, uint64_t offset);
struct slice *store_next_changed(struct bsn *n);
void store_reserve_client(struct bsn *n, uint32_t number);
void slice_free(struct bsn *n, struct slice *s);
void slice_dirty(struct bsn *n, struct slice *s);
bool slice_append(struct bsn *n, struct slice *s, const void *head,
		  size_t head_bytes, const void *body, size_t body_bytes);
void store_commit(struct bsn *n);
/* Commit if there is something to commit. */
void store_publish(struct bsn *n);
uint64_t store_epoch(const struct bsn *n);
uint64_t store_sealed(const struct bsn *n);
uint32_t store_next_client(struct bsn *n);

/* slice.c */
uint32_t records_whole(const uint8_t *records, uint32_t bytes, uint32_t room,
		       bool *malformed);
/* Copy a run into its trace's slice, from `copied` bytes of it on (NONE: it is
 * new). Returns how much of it is copied now; *last_ticks: of its last record,
 * if it has one. */
uint32_t slice_copy_run(struct bsn *n, struct sink *to, const struct run *run,
			uint32_t copied, uint64_t *last_ticks);
void slice_loss_arrived(struct bsn *n, struct slice *s, const struct client *c,
			uint32_t handle, uint32_t flags);
/* That processes lost something of nobody knows which traces. In pieces. */
void slices_untied_losses(struct bsn *n);
/* What processes that are gone had open stays unfinished. */
void slices_close_gone(struct bsn *n, bool give_way);
void slice_put_exit(struct bsn *n, struct sink *to, uint32_t client);
void slice_fill(const struct slice *s, struct bsn_slice *out);
struct part *slice_part(struct slice *s, uint32_t client);
uint32_t slice_open_handles(const struct slice *s);
/* It has ended. */
void slice_close_handle(struct slice *s, struct part *part, uint32_t handle);

/* wait.c */
int wait_init(struct bsn *n);
void wait_free(struct bsn *n);
void wait_join(struct bsn *n, struct client *c);
void wait_leave(struct client *c);

/* metrics.c */
void metrics_read_client(struct bsn *n, struct client *c);

/* clock.c */
const struct pair *clock_nearest(const struct clock *k, uint64_t ticks);
uint64_t clock_monotonic(const struct bsn *n, uint64_t ticks);

#endif
