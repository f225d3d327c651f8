/* SPDX-License-Identifier: Apache-2.0 */
/* Segments that have memory, and whose they are. */
#ifndef BSN_POOL_H
#define BSN_POOL_H

#include "ledger.h"

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
	uint64_t looked; /* the latest look at what threads do there (threads.c) */
	bool dirty;	 /* differs from what is committed */
	/* Of a sealed one that a pass has met, the low half of each fingerprint
	 * (column.c); else NULL. */
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
	uint32_t spares;    /* client that is asked first for memory */
	uint32_t keep_max;
	uint32_t by_state[FRAME_STATES]; /* of clients */
	struct list sealed;    /* and parked, of the node, oldest first */
	uint64_t column_bytes; /* of all columns (column.c) */
	uint64_t entered;      /* frames in the lists of the active, ever */
	uint32_t *dirty;       /* frames; room for all */
	uint32_t n_dirty;
};

/* In the layer of losses that was the young one then (losses.c). */
struct losses_named {
	uint64_t layer;
	uint32_t entries;
};

/* A user, or a group, whose processes are counted together. */
struct tenant {
	uint64_t key; /* the caller's */
	struct tenant *next;
	bool has_quota;
	uint32_t share; /* segments, that nobody else can push out */
	uint32_t held;	/* segments: stock, active, sealed */
	uint32_t clients, live;
	uint64_t gone_left; /* of what gone.c has room for (evict.c) */
	struct losses_named losses_named;
	struct list sealed; /* and parked, in the order of the node's list */
};

struct tenants {
	struct tenant *first;
	struct tenant nobody; /* of processes whose tenant is not told */
	uint32_t live;	      /* that have processes that live */
};

/* frame.c */
void list_init(struct list *l);
void own_push(struct bsn *n, struct list *l, struct frame *f);
struct frame *own_pop(struct bsn *n, struct list *l);
void own_remove(struct bsn *n, struct list *l, struct frame *f);
struct frame *frame_new(struct bsn *n, struct client *c, uint32_t segment,
			enum frame_state state);
/* One that a predecessor granted: its record is there. */
void frame_adopt(struct bsn *n, uint32_t i, struct client *c);
void frame_set_state(struct bsn *n, struct frame *f, enum frame_state state);
/* It has memory, and waits to be granted again. */
void frame_back(struct bsn *n, struct frame *f);
/* Begin the segment's next life. */
void frame_start(struct bsn *n, struct frame *f);
void frame_seal(struct bsn *n, struct frame *f);
void frame_seal_again(struct bsn *n, struct frame *f);
/* Nobody appends to it, and its process may go on in it. */
void frame_park(struct bsn *n, struct frame *f);
void frame_park_again(struct bsn *n, struct frame *f);
void frame_unpark(struct bsn *n, struct frame *f);
/* From the lists of the sealed and parked; its state is as before. */
void frame_unseal(struct bsn *n, struct frame *f);
/* Give the memory back. The frame is in no list. */
void frame_drop(struct bsn *n, struct frame *f);

/* pool.c */
int pool_init(struct bsn *n);
void pool_free(struct bsn *n);
/* A segment for c, or NULL. *again: n->cost is `end`, and the lock is to be lent
 * first. */
struct frame *pool_take(struct bsn *n, struct client *c, uint64_t end,
			bool *again);
struct frame *pool_take_kept(struct bsn *n);
/* Reclaim a segment, so that c gets one. False: there is none that may go. */
bool pool_reclaim(struct bsn *n, const struct client *c, bool second_chance);
void pool_shrink(struct bsn *n);
uint64_t pool_horizon_ns(const struct bsn *n);
/* Something that was written before then. What is kept may be older all the same. */
bool pool_may_hold(const struct bsn *n, uint64_t then_ns);
void pool_drop_unused(struct bsn *n, struct client *c);
void pool_drop_client(struct bsn *n, struct client *c);

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
/* Others have processes here, or had some of which something is left. */
bool tenant_has_others(const struct bsn *n, const struct tenant *t);

/* grants.c */
void grants_begin(const struct bsn *n, struct client *c);
void grants_first(struct bsn *n, struct client *c);
/* What a process has too much of, before others get what they lack: a piece. True:
 * there is more. */
bool grants_take_back(struct bsn *n, struct client *c);
/* A piece. True: there is more. */
bool grants_fill(struct bsn *n, struct client *c);
/* Of a process that is gone. False: there is none. */
bool grants_drop_one(struct bsn *n, struct client *c);
uint32_t grants_stock(const struct client *c);
/* How many more it is to get. */
uint32_t grants_wanted(const struct client *c);

/* memory.c */
/* Returns whether it was due. */
bool memory_check(struct bsn *n, struct client *c);
/* A piece. True: there is more. */
bool memory_take_back(struct bsn *n, struct client *c);

/* evict.c */
void evict_frame(struct bsn *n, struct frame *f, bool second_chance);

#endif
