/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The report store in memory: a memfd of blocks. Block 0 is the header; a slice
 * has one mark block, and data blocks that hold its bytes in order. store.c has
 * the blocks, mark.c what of them counts after a crash.
 */
#ifndef BSN_STORE_H
#define BSN_STORE_H

#include "internal.h"

#define STORE_MAGIC 0x45524f5453425342ull
#define STORE_VERSION 5u
#define BLOCK_MAGIC 0x4b4c4253u

enum block_kind {
	BLOCK_MARK = 1,
	BLOCK_DATA = 2
};

struct store_header {
	uint64_t magic;
	uint32_t version;
	uint32_t block_bytes;
	uint32_t n_blocks;
	uint32_t next_client;	   /* number that no process had yet */
	uint64_t epoch;		   /* of the last commit */
	uint64_t next_slice_epoch; /* number that no slice had yet */
	/* Of the ledger, as of a commit, by whether its number is odd: segments
	 * that were sealed since are watched again by a successor. */
	uint64_t sealed[2];
	/* From here on none was ever used. Which have memory would say it too, but a
	 * page that the kernel moves just then seems to be none (SEEK_DATA). */
	uint32_t blocks_fresh;
	uint32_t zero;
};

struct block {
	uint32_t magic; /* 0: free */
	uint16_t kind;
	uint16_t zero;
	uint32_t mark;	 /* block number of the slice's mark */
	uint32_t number; /* of a data block in its slice: 0, 1, ... */
	uint64_t trace_hi;
	uint64_t trace_lo;
	uint8_t content[];
};
_Static_assert(sizeof(struct block) == BLOCK_HEADER, "32 of 2048 bytes");

struct mark_state {
	uint64_t epoch; /* 0: none */
	uint64_t bytes, trimmed_bytes, changed_ns;
	uint32_t flags;
	uint32_t n_crumbs, n_parts;
	uint32_t has_all_parts;
	uint64_t crumbs[BSN_CRUMBS_MAX];
	struct {
		uint32_t client;
		int32_t open;
	} parts[MARK_PARTS];
};

struct mark {
	struct block block;
	struct bs_trace_id primary;
	char trigger[BS_TRIGGER_NAME_MAX + 1];
	uint64_t collected_ns;
	uint64_t slice_epoch;
	struct mark_state state[2];
};
_Static_assert(sizeof(struct mark) <= BLOCK_BYTES, "a mark is one block");

static inline struct store_header *store_header(const struct store *s)
{
	return (struct store_header *)s->map;
}

static inline struct block *block_at(const struct store *s, uint32_t i)
{
	return (struct block *)(s->map + (uint64_t)i * BLOCK_BYTES);
}

static inline struct mark *mark_at(const struct store *s, uint32_t i)
{
	return (struct mark *)block_at(s, i);
}

uint32_t block_take(struct store *s);
void block_free(struct store *s, uint32_t i);
void block_fill(struct store *s, uint32_t i, enum block_kind kind,
		uint32_t mark, uint32_t number, struct bs_trace_id id);
struct slice *slice_make(struct bsn *n, uint32_t mark, struct bs_trace_id id);
int store_tables(struct bsn *n);

#endif
