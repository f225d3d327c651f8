/* SPDX-License-Identifier: Apache-2.0 */
/* What a node must know of its segments when it was killed: ledger.c. */
#ifndef BSN_LEDGER_H
#define BSN_LEDGER_H

#include "base.h"

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

/* How fast a process writes, in segments (grants.c). */
struct pace {
	uint64_t window_ns; /* since when it is counted: 0: never */
	uint64_t taken;	    /* since then */
	uint64_t peak_per_s;
	uint64_t peak_ns; /* when it was last halved, or reached */
};

/* What a process has counted, as far as the node has told it in its metrics. */
struct told {
	uint32_t client;       /* number; 0: a free place */
	uint32_t threads_used; /* slots that were counted */
	uint64_t runs_lost, records_lost;
	uint64_t payload_bytes, payload_bytes_lost;
	/* Of its context. */
	uint64_t records_unattributed, triggers_lost;
	/* Not counted: when the node did not remember all that was evicted of it, for
	 * the last time (evict.c). */
	uint64_t forgotten_ns;
	/* Nor that: of struct client. */
	uint64_t untied_to_ns;
	/* Until when what was reclaimed of it was written. */
	uint64_t evicted_ns;
	/* Nor that: a successor goes on with it. */
	struct pace pace;
	uint64_t zero[2];
};
_Static_assert(sizeof(struct told) == 2 * BS_CACHE_LINE,
	       "what follows is aligned");

#define GONE_LAYERS 32
#define GONE_LOSS_LAYERS 8

/* policy.c: of traces whose hash is between, handles that began before the percentage
 * changed were recorded and later ones were not, or the reverse. */
struct left_out {
	uint64_t low, high;
	uint64_t until_ns; /* written last. 0: none */
};

#define LEFT_OUT_MAX 4u

struct ledger_header {
	uint64_t magic;
	uint32_t version;
	uint32_t n_records;
	uint32_t n_buckets; /* of gone.c, all layers, but those of losses */
	uint32_t keep_segments;
	uint32_t n_told;
	uint32_t zero;
	uint64_t granted_ns; /* of the latest grant */
	uint64_t sealed;     /* of the latest seal, or parking */
	/* The latest loss of nobody knows which trace, that was counted and not made
	 * up. */
	uint64_t untied_to_ns;
	/* Of what was reclaimed, when the last was sealed: what was written since
	 * is still there, whoever wrote it. 0: nothing was. */
	uint64_t reclaimed_to_ns;
	/* While a segment is reclaimed: where the keep arena ended before. What
	 * was kept since stands in that segment too. NONE: none is. */
	uint32_t reclaiming;   /* frame */
	uint32_t reclaim_keep; /* frame that was appended to, or NONE */
	uint32_t reclaim_runs; /* of it */
	uint32_t frames_fresh; /* from here on no record was ever used */
	uint64_t reclaim_granted_ns;
	/* What processes lost before that, of nobody knows which traces, slices
	 * that are committed know. */
	uint64_t told_ns;
	/* The ticks of all records, old and new. */
	uint64_t ticks_per_s;
	uint64_t clock_is_counter;
	/* policy.c: what is recorded, and what was until it became less. */
	uint64_t percentage_threshold;
	uint64_t earlier_threshold, earlier_until_ns;
	/* gone.c */
	uint64_t secret;     /* odd: of places there, and of names in keep.c */
	uint64_t gone_added; /* entries ever, but losses */
	uint64_t gone_held;  /* losses too */
	uint64_t losses_added;
	/* What gone_added was when a layer of losses was young for the last time. */
	uint64_t losses_left[GONE_LOSS_LAYERS];
	/* All zero in a ledger of before. */
	struct left_out left_out[LEFT_OUT_MAX];
	/* Nothing is there any more that was sealed by then: some of what
	 * reclaimed_to_ns speaks of went out of turn, before older memory. */
	uint64_t gone_to_ns;
	/* gone.c: when each layer of evictions was full, and what of them was forgotten:
	 * those until then. */
	uint64_t gone_full_ns[GONE_LAYERS];
	uint64_t forgotten_to_ns;
};

struct gone_bucket;

/* gone.c, as its header says. */
struct gone_set {
	struct gone_bucket *buckets;
	uint64_t *added_ever;
	uint64_t secret;
	uint32_t layers;
	uint32_t bits;	/* 2 to this are the buckets of a layer */
	uint32_t added; /* entries since the young layer is the young one */
	uint64_t layer; /* the young one: they are numbered from the beginning */
};

struct ledger {
	int fd;
	uint8_t *map;
	uint64_t bytes;
	struct ledger_header *header;
	struct told *told; /* a place a process */
	struct grant_record *records;
	struct gone_set gone, losses;
	uint8_t *keep;
	bool adopted;
};

/* ledger.c */
int ledger_init(struct bsn *n);
int ledger_adopt(struct bsn *n, int fd);
void ledger_number_seal(struct bsn *n, uint32_t frame);
void ledger_free(struct bsn *n);
uint64_t ledger_bytes(uint32_t n_told, uint32_t n_records, uint32_t n_buckets,
		      uint32_t keep_segments);
/* The place of a process; that of 0 is a free one. NULL: there is none. */
struct told *ledger_told(const struct ledger *l, uint32_t client);

/* memfd.c */
/* Ledger and store are made so many times as large as configured, for a successor with more: of
 * their files only what is used has memory. */
#define ROOM_FACTOR 4u

void *map_shared(int fd, uint64_t bytes);
int map_failure(void);
/* Nobody can run it, where the kernel knows how to say so. */
int memfd_new(const char *name);
int memfd_sealed(const char *name, uint64_t bytes);
int memfd_check(int fd, uint64_t *bytes);

#endif
