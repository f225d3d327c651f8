/* SPDX-License-Identifier: Apache-2.0 */
/* Processes: what they were granted, what they say, what they wait for. */
#ifndef BSN_CLIENTS_H
#define BSN_CLIENTS_H

#include "pool.h"

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

/* A segment that is looked for, for a process: how far that is (pool_take()). */
struct taking {
	bool goes_on;
	uint32_t chances; /* reclaimed ones whose open runs are kept */
	uint32_t left;	  /* that may go to make room for what will be kept */
	bool spare;	  /* others keep what they want */
	bool in_vain; /* nobody has memory to spare, since the latest reclaim */
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
	uint64_t looks;	 /* that were begun at what moves changed */
	uint64_t losses_read_ns;
	uint64_t untied_news_ns; /* of the losses that slices do not know of */
	uint64_t memory_checked_ns;
	uint64_t watched_ns; /* all of its threads (watch.c) */
	uint64_t wrote_ns;   /* one of them, as was seen then */
	/* Until then its stock is as it should be, while it takes nothing, and
	 * shares with as many. */
	uint64_t settled_until_ns;
	uint32_t settled_tail, settled_clients;
	struct taking taking;
	uint32_t threads_used; /* none beyond was ever used */
	struct queue queue;
	struct queue queue_before; /* being replaced; context NULL: none is */

	uint32_t number;  /* 0: the keep arena */
	uint32_t version; /* of the ABI, as was agreed on with it */
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

	uint64_t exited_ns;
	struct thread threads[BS_THREAD_SLOTS];
	struct losses_named losses_named;
	struct told *told; /* in the ledger; NULL: there was no place */
	struct told believed;

	/* Losses that no trace could be blamed for concern what was written between,
	 * TRACE_NS before the first to TRACE_NS after the last. So many of its
	 * segments are in use that were granted by then. */
	uint64_t untied_from_ns, untied_to_ns;
	uint64_t untied_granted_ns;
	uint32_t untied_frames;

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

/* client.c */
struct client *client_new(struct bsn *n, int pid, const char *service,
			  uint64_t arena_bytes);
int client_map(struct client *c, const struct bsn_client_fds *fds);
void client_enter(struct bsn *n, struct client *c, uint32_t number);
void client_fill_header(const struct bsn *n, const struct client *c);
bool client_make_room(struct bsn *n);
bool context_fits(int fd);
void client_check_drained(struct bsn *n, struct client *c);
struct client *client_find(const struct bsn *n, uint32_t number);
void client_in_doubt(struct bsn *n, struct client *c);
void client_untied_loss(struct bsn *n, struct client *c);
void client_adopt_doubt(const struct bsn *n, struct client *c);
void client_evicted(struct client *c, uint64_t until_ns);
/* Whether what it lost may be of a trace that has a run in a segment granted then. */
bool client_may_lack(const struct bsn *n, const struct client *c,
		     uint64_t granted_ns);
/* Not all that is evicted of it now is remembered. */
void client_forget(struct bsn *n, struct client *c);
/* So it was, of what would be in the pool still if that were larger. */
bool client_is_forgotten(const struct bsn *n, const struct client *c);
void client_free(struct client *c);
bool client_has_work(const struct bsn *n, const struct client *c);

/* losses.c */
/* So many slots were used. Losses that a predecessor read are not read again. */
void threads_use(struct bsn *n, struct client *c, uint32_t slots);
/* As threads_observe(). */
struct client *losses_read(struct bsn *n, struct client *c, uint64_t *end);
/* Of threads that have no area: at any time. */
void losses_read_unattributed(struct bsn *n, struct client *c);
/* How far losses were read, in the commit with what came of them; and then give
 * their places back. */
void losses_save(struct bsn *n, uint64_t epoch);
void losses_give_back(struct bsn *n);

/* threads.c */
/* If all that may be done under one hold of the lock is done, let others have it.
 * *end: n->cost then. NULL: its process is gone meanwhile. */
struct client *threads_give_way(struct bsn *n, struct client *c, uint64_t *end);
/* All that its threads took and left until now, in pieces. NULL: it is gone. */
struct client *threads_observe(struct bsn *n, struct client *c, uint64_t *end);
/* A thread appends to that frame. */
void thread_enter(struct bsn *n, struct frame *f);
/* The node has it from here on. False: a thread went on in it. */
bool parked_take(struct bsn *n, struct frame *f);
void threads_finish(struct bsn *n, struct client *c);
bool handle_is_open(const struct client *c, uint32_t handle);

/* triggers.c */
void triggers_start(struct queue *q);
void triggers_take(struct bsn *n, struct client *c);
void triggers_take_all(struct bsn *n);
void triggers_done(struct client *c);
uint32_t triggers_left(const struct client *c);
bool triggers_wait(const struct bsn *n, const struct client *c);

/* wait.c */
int wait_init(struct bsn *n);
void wait_free(struct bsn *n);
void wait_join(struct bsn *n, struct client *c);
void wait_leave(struct client *c);

/* adopt.c */
void adopt_end(struct bsn *n);

/* metrics.c */
/* A process comes, new or adopted; and it is forgotten. */
void metrics_enter(struct bsn *n, struct client *c);
void metrics_leave(struct client *c);
void metrics_read_client(struct bsn *n, struct client *c);
/* In pieces. Returns how many processes live. */
uint32_t metrics_read_all(struct bsn *n);
void metrics_save(struct client *c);

#endif
