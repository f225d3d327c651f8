/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of segments, and what is looked for in them. */
#ifndef BSN_SEARCH_H
#define BSN_SEARCH_H

#include "keep.h"
#include "slices.h"

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
	bool has_more;	  /* and another part of it behind them */
	uint32_t records; /* offset of the first record */
	uint32_t bytes;	  /* of records, committed */
};

/* From the first entry of a directory to the last. */
struct walk {
	uint32_t runs;
	uint32_t end; /* of the run that was opened last */
};

/* A handle of the trace that is looked for, as far as its runs were met. */
struct met {
	uint32_t client, handle; /* client NONE: no entry */
	uint32_t runs;
	union {
		uint32_t seq_max;
		uint32_t ends_lost; /* of the entry of a process: handles */
	};
	/* Where parts of kept runs end that have more behind them, less where parts
	 * begin: 0 if each has the next. */
	uint32_t ends;
	bool first : 1, last : 1, lossy : 1, live : 1;
	bool begun : 1;	    /* its first run was met, or is lost */
	bool closed : 1;    /* in the slice, though its end is lost */
	bool exit_told : 1; /* of the entry of a process */
};
_Static_assert(sizeof(struct met) == 24, "see MET_SHARE");

struct met_page {
	struct met *met; /* room is a power of two; half of it at most is used */
	uint32_t n, room;
};

/* Handles that were met, by process and handle. */
struct met_table {
	struct met_page one;
	struct met_page *pages; /* NULL: there is but one */
	uint32_t n, room;	/* of all */
};

/* A part of a kept run that is not its first. */
struct later {
	struct later *left, *right; /* parts.c */
	uint32_t rank;
	uint32_t number; /* in the order in which they were met */
	struct run run;
	struct frame frame; /* that has its records, from the beginning */
	uint8_t records[];
};

/* Layers of gone.c. */
struct gone_seen {
	uint64_t layer, loss_layer;
};

/* One trace that is looked for. */
struct search {
	struct bs_trace_id id;
	uint64_t fingerprint;
	struct sink to;
	struct met_table met;
	struct later *later; /* parts that follow on others: the first */
	uint32_t parts;	     /* of these, ever */
	uint64_t later_bytes;
	uint64_t begun_ns;  /* of the earliest record */
	uint64_t active_ns; /* of the latest */
	uint64_t evicted_ns; /* of what processes with runs wrote, the latest that is gone */
	uint64_t granted_ns;	 /* of the oldest segment with a run */
	uint64_t untied_from_ns; /* of losses after its runs' segments began */
	uint32_t why;		 /* enum gone, when the pass began; before: */
	struct gone_seen seen;	 /* so far gone.c was looked at */
	uint64_t forgotten_to_ns; /* what was evicted until then it did not know */
	bool failed;		  /* no memory: what was met is not known */
	bool forgotten; /* what a process had of it may be, that has a part */
	struct pass *pass; /* that looks for it, or did */
	uint64_t number;   /* of the node's, in order */
	struct search *next;
};

/* What a pass looks for: wanted.c. */
struct wanted {
	struct filter filter;	   /* of fingerprints */
	struct filter kept_filter; /* of names in the keep arena */
	uint64_t secret;
	uint32_t bits;		  /* 2 to this are the places of each table */
	uint32_t *lows;		  /* low halves of both */
	uint32_t *tags;		  /* of fingerprints */
	struct search **searches; /* by id */
	struct vain *vain;	  /* NULL: nothing was in vain yet */
	uint32_t n_vain;
};

/* A frame that a pass has visited a part of. */
struct visit {
	uint32_t frame; /* NONE: there is none */
	uint32_t entry; /* the next */
	struct walk walk;
};

/* One pass over the directories for several searches. */
struct pass {
	struct wanted wanted;
	/* Searches join it one after the other; it begins when all have. */
	bool joining;
	bool over;	   /* it has looked through all */
	uint32_t cost;	   /* since others had the lock, in entries */
	uint64_t *visited; /* a bit a frame: all of it was */
	struct visit in;
	/* Where it is in the list of the sealed: the frame that was last; NONE: at
	 * the beginning. Of the node's list, or that of the keep arena. */
	uint32_t at;
	bool through_keep;
	/* Of the keep arena, what was there when the pass began: what is added
	 * comes from segments that are visited before they are reclaimed. */
	uint64_t granted_ns; /* the latest grant */
	uint64_t sealed;  /* the latest seal when it had been through these */
	uint64_t entered; /* frames among the active until then */
	uint32_t keep_frame, keep_runs;
	bool is_peek; /* also what watch.c will serve slices */
	struct pass *next;
};

/* runs.c */
struct walk walk_of(const struct frame *f, uint32_t generation);
uint32_t runs_count(const struct frame *f, uint32_t generation);
/* The trace that an entry and its run header name; zero: neither can be read. */
struct bs_trace_id run_id(const struct bsn *n, const struct frame *f,
			  uint64_t entry);
/* With acquire: if it says CLOSED, the run is final. */
static inline uint64_t run_entry(const struct frame *f, uint32_t index)
{
	return load_acquire(bs_directory(f->bytes, index));
}

/* Read an entry's run. False: it lies. */
bool run_open(struct bsn *n, struct frame *f, uint32_t index, uint64_t entry,
	      struct walk *walk, struct run *run);

/* search.c */
/* Look for a slice's trace with the next pass. */
void search_later(struct bsn *n, struct slice *slice);
/* Look for all that wait, up to this number, unless that is not due yet. The later ones
 * are for who has looked at all processes since. */
void search_waiting(struct bsn *n, uint64_t last);
/* 0: at once. */
uint64_t search_due_in_ns(const struct bsn *n);
/* Look for so many through all of the pool, in pieces. */
int search_all(struct bsn *n, struct search *searches, uint32_t count);
/* All was looked at, unless it failed. In pieces, too. */
void search_judge_all(struct bsn *n, struct search *searches, bool failed);
uint64_t search_cost(const struct bsn *n);

/* pass.c */
/* In pieces. Negative errno: nothing is begun. */
int pass_begin(struct bsn *n, struct pass *p, struct search *searches,
	       uint32_t count);
void pass_run(struct bsn *n, struct pass *p);
void pass_end(struct bsn *n, struct pass *p);
/* When its searches are judged: until then it stays where it is. */
void pass_free(struct pass *p);
/* A segment is about to lose its content. */
void pass_before_reclaim(struct bsn *n, struct frame *f);
/* One is about to go from the list of the sealed. */
void pass_before_unseal(struct bsn *n, const struct frame *f);
bool pass_has_met(const struct bsn *n, const struct search *s,
		  const struct frame *f);

/* wanted.c */
/* For so many searches. */
int wanted_init(const struct bsn *n, struct wanted *w, uint32_t count);
void wanted_add(const struct bsn *n, struct wanted *w, struct search *s);
void wanted_free(struct wanted *w);
struct search *wanted_find(const struct wanted *w, struct bs_trace_id id);
/* A process's entry was looked at, and is not of a trace that is wanted. */
void wanted_in_vain(struct wanted *w, uint32_t client, uint64_t fingerprint);
/* True: so were too many of that fingerprint, and this one is not looked at. */
bool wanted_passes_over(struct wanted *w, uint32_t client,
			uint64_t fingerprint);
/* Whether one was not, of whatever process. */
bool wanted_passed_over(const struct wanted *w, uint64_t fingerprint);
bool wanted_has_low(const struct wanted *w, uint64_t name);
bool wanted_has_fingerprint(const struct wanted *w, uint64_t fingerprint);
/* By one of the two filters. Of the name the low half is enough: of most no more is
 * looked at. */
static inline bool wanted_may_have(const struct wanted *w,
				   const struct filter *filter, uint64_t name)
{
	return unlikely(filter_has(filter, name)) && wanted_has_low(w, name);
}

/* column.c */
/* False: there is no room for it. */
bool column_make(struct bsn *n, struct frame *f);
/* The frame is sealed no more. */
void column_drop(struct bsn *n, struct frame *f);

/* verdict.c */
/* What is judged under one hold of the lock, in places of tables of what searches
 * met: 100 us. */
#define PIECE_MET 20000u
int search_init(const struct bsn *n, struct search *s, struct bs_trace_id id,
		struct sink to);
void search_free(struct bsn *n, struct search *s);
void search_meet(struct bsn *n, struct search *s, const struct run *run,
		 struct ticks ticks);
/* One that was open then. */
void search_meet_again(struct bsn *n, struct search *s, const struct run *run,
		       uint64_t last_ticks);
/* Records of a handle were lost; flags as of struct bs_loss. */
void search_loss(struct bsn *n, struct search *s, const struct client *c,
		 uint32_t handle, uint32_t flags);
/* All was looked at. */
void search_conclude(struct bsn *n, struct search *s, uint32_t *cost);

/* met.c */
int met_init(struct met_table *t);
void met_free(struct bsn *n, struct met_table *t);
/* NULL: it was not met. */
struct met *met_find(const struct bsn *n, struct met_table *t, uint32_t client,
		     uint32_t handle);
/* NULL: there is no room for more. Others may have moved. */
struct met *met_get(struct bsn *n, struct met_table *t, uint32_t client,
		    uint32_t handle);
/* Once there are several, they are as many for ever. */
uint32_t met_pages(const struct met_table *t);
struct met_page *met_page(struct met_table *t, uint32_t i);

/* parts.c */
/* A part of a kept run that is not the first: it has its turn at the end. */
void search_put_off(struct bsn *n, struct search *s, const struct run *run);
/* The next of these. False: that was all. */
bool search_put_part(struct bsn *n, struct search *s, uint32_t *bytes);
void parts_free(struct search *s);

/* watch.c */
void watch_frame(struct bsn *n, struct frame *f, bool final);
/* The same, or so much that n->cost is `end`. Returns whether slices were served all
 * that is there. */
bool watch_until(struct bsn *n, struct frame *f, bool final, uint64_t end);
/* All that live processes write to now, in pieces; those that are quiet less
 * often. */
void watch_all(struct bsn *n);
/* As threads_observe(). */
struct client *watch_in_pieces(struct bsn *n, struct client *c, uint64_t *end);
/* Also what they may go on to write to, and at once. */
void watch_at_once(struct bsn *n);
void watch_from(struct bsn *n, struct frame *f, uint32_t copied);
void watch_save(struct bsn *n, uint64_t epoch);
bool watch_is_dirty(const struct bsn *n);
void watch_adopt(struct bsn *n, struct frame *f);

/* gone.c */
enum gone {
	GONE_EVICTED = 0x01,
	GONE_ABANDONED = 0x02,
	GONE_LOSSY = 0x04,
	GONE_REPORTED = 0x08, /* all of it, by a slice that was released */
	GONE_ALL = 0x0f,
};
/* Of a table that remembers so many traces. */
uint32_t gone_buckets(uint64_t entries);
bool gone_buckets_are_valid(uint32_t buckets);
/* Those of losses, beside so many. */
uint32_t gone_loss_buckets(uint32_t buckets);
/* So many of evictions are remembered at least. */
uint64_t gone_room(const struct ledger *l);
void gone_point(struct ledger *l, struct gone_bucket *buckets);
bool gone_add(struct bsn *n, uint64_t fingerprint, uint32_t why);
/* In the young layer of losses; of no end while there will be another after it. */
struct gone_losses_left {
	uint64_t layer;
	uint32_t entries;
};
struct gone_losses_left gone_losses_left(const struct bsn *n);
uint32_t gone_why(const struct bsn *n, uint64_t fingerprint);
/* Who looked when these layers were the young ones need look only at what came
 * since. */
struct gone_seen gone_seen(const struct bsn *n);
uint32_t gone_why_since(const struct bsn *n, uint64_t fingerprint,
			struct gone_seen since);
/* Evictions. In a batch each costs a sixth less than by gone_add(). */
#define GONE_BATCH 256u
struct gone_batch {
	uint32_t count;
	struct {
		uint64_t fingerprint : 60;
		uint64_t why : 4;
	} gone[GONE_BATCH];
};
void gone_add_batch(struct bsn *n, struct gone_batch *batch);

#endif
