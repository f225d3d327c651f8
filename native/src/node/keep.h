/* SPDX-License-Identifier: Apache-2.0 */
/* The keep arena: runs of open handles from segments that were reclaimed. */
#ifndef BSN_KEEP_H
#define BSN_KEEP_H

#include "clients.h"

struct keep_owner {
	uint32_t number;
	uint32_t pid;
	char service[64];
};

/* What precedes the records of a kept run. */
struct kept_run {
	uint64_t granted_ns; /* of the segment that it was written in */
	uint32_t owner;	     /* offset of its keep_owner in the segment */
	uint16_t from;	     /* offset of the records in the run as written */
	uint16_t has_more;   /* the run goes on behind them, in another part */
};
_Static_assert(sizeof(struct kept_run) == 16, "aligned as run headers are");

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

struct run;

/* keep.c */
/* What tells the name of a kept run from its fingerprint. */
uint64_t keep_disguise(const struct bsn *n, uint64_t hi, uint64_t mix);
int keep_init(struct bsn *n);
void keep_free(struct bsn *n);
bool keep_run(struct bsn *n, const struct run *run);
bool keep_owner_of(const struct frame *f, uint32_t offset,
		   struct keep_owner *owner);
void keep_reclaim_begins(struct bsn *n, const struct frame *f);
void keep_reclaim_ends(struct bsn *n);
void keep_adopt(struct bsn *n);

#endif
