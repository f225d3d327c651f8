/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the decoder share; decode.h says what it is. */
#ifndef BS_DECODE_INTERNAL_H
#define BS_DECODE_INTERNAL_H

#include "decode.h"

/* ---------------------------------------------------------- memory --- */

/* An array that grows. Its entries are of one size. */
struct array {
	uint8_t *entries;
	uint32_t count, room;
	uint32_t entry_bytes;
};

#define ARRAY_OF(type) ((struct array){.entry_bytes = sizeof(type)})

/* A new entry at the end, of zeros; NULL without memory. */
void *array_add(struct array *a);
/* So many, as they are. False without memory. */
bool array_append(struct array *a, const void *entries, size_t n);
void array_free(struct array *a);

static inline void *array_at(const struct array *a, uint32_t i)
{
	return a->entries + (size_t)i * a->entry_bytes;
}

/*
 * Entries by the first `key_bytes` of them, a multiple of 4, in the order in which
 * they were added. Where many are, they are found by a hash that starts from the
 * table's address: nobody outside can choose keys that meet.
 */
struct table {
	struct array array;
	uint32_t key_bytes;
	uint32_t places; /* of the index: a power of two, or 0 */
	uint32_t *index; /* 0: free; else the entry's number + 1 */
};

#define TABLE_OF(type, key)                                                    \
	((struct table){.array = ARRAY_OF(type), .key_bytes = (key)})

void *table_find(const struct table *t, const void *key);
/* The one with that key, or a new one, of zeros but for it; NULL without memory. */
void *table_put(struct table *t, const void *key);
void table_free(struct table *t);

/* --------------------------------------------------------- decoder --- */

/* Takes a record; what it returns, if negative, ends the reading. */
typedef int (*take_record)(void *arg, const struct bsd_record *record);

struct run_head {
	uint32_t client, handle, seq, from, bytes;
	uint16_t flags;
};

struct bsd_slice {
	struct table handles; /* struct bsd_handle */
	struct table runs;    /* struct run */
	struct table clients; /* struct bsd_client */
	struct table pairs;   /* struct bs_clock_pair, by its ticks */
	struct array
		by_ticks; /* the numbers of the pairs, once they are sorted */
	uint64_t malformed;
	uint64_t run_bytes; /* of all runs, up to where they are here */
	uint32_t processes, exited, lossy, foreign; /* how many clients are */

	uint8_t *pending; /* of a piece or record that is not whole */
	uint32_t pending_bytes, pending_room;
	uint32_t needed; /* bytes from where it is worth looking again */

	struct run_head run; /* the piece being read */
	uint32_t left;	     /* of its content */
	uint32_t skip;	     /* of that, to pass over without a look */
	bool in_run;
	bool broken;
};

void slice_init(struct bsd_slice *s);
void slice_release(struct bsd_slice *s);
int slice_feed(struct bsd_slice *s, const uint8_t *bytes, size_t n,
	       take_record take, void *arg);
uint64_t slice_items(const struct bsd_slice *s);

/* The payload of a record, by its type. False if it is too short for that. */
bool record_decode(struct bsd_record *r, const uint8_t *payload,
		   uint32_t bytes);

static inline uint16_t get16(const uint8_t *b)
{
	return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t get32(const uint8_t *b)
{
	return get16(b) | (uint32_t)get16(b + 2) << 16;
}

static inline uint64_t get64(const uint8_t *b)
{
	return get32(b) | (uint64_t)get32(b + 4) << 32;
}

/* -------------------------------------------------------- evidence --- */

struct span {
	uint64_t span_id, parent_id;
};

/* A start that waits for its end. Of the name, where it is in `names`: a byte of
 * length, and the bytes. */
struct start {
	uint64_t span_id;
	uint32_t client;
	uint32_t name_at;
};

struct end {
	uint64_t span_id;
	uint32_t client;
};

struct hop {
	uint64_t node, span_id;
	uint32_t handle, hop;
	uint32_t client; /* that wrote it, no part of what tells hops apart */
};

/* What a client span sent nobody answered. The address and the error are in `texts`. */
struct unanswered {
	uint64_t span_id;
	uint32_t client, handle;
	uint32_t text_at;
	uint8_t address_bytes, error_bytes;
	bool excused; /* it was not sent, and it is said to whom: nothing is missing */
};

/* One node's slice. */
struct part {
	uint64_t node;
	struct bsd_slice slice;
	struct array spans;	 /* struct span */
	struct array starts;	 /* struct start, less those that are met */
	struct array ends;	 /* struct end, likewise */
	struct array hops_out;	 /* struct hop */
	struct array hops_in;	 /* struct hop */
	struct array names;	 /* bytes */
	struct array unanswered; /* struct unanswered */
	struct array texts;	 /* bytes */
	struct bsd_extent extent;
	uint64_t truncated;
	uint64_t items;
};

struct bsd_evidence {
	uint64_t limit;
	uint64_t items;
	struct array parts; /* struct part * */
	struct bsd_extent given_up;
	bool gave_up;
	bool judged; /* nothing came since */
	uint32_t few;
	struct array findings; /* struct bsd_finding */
	struct array crumbs;   /* struct bsd_crumb, of the last bytes */
	struct array crumb_names;
};

static inline struct part *part_at(const struct bsd_evidence *e, uint32_t i)
{
	return *(struct part **)array_at(&e->parts, i);
}

/* Fill in the findings. */
int judge(struct bsd_evidence *e);

#endif
