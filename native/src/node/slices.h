/* SPDX-License-Identifier: Apache-2.0 */
/* The report store: traces that were collected. */
#ifndef BSN_SLICES_H
#define BSN_SLICES_H

#include "clients.h"

#define BLOCK_BYTES 2048u
#define BLOCK_HEADER 32u
#define BLOCK_CONTENT (BLOCK_BYTES - BLOCK_HEADER)

/* Processes with a part in a slice that a mark remembers over a restart, as many as
 * fit, those with open handles first. Of further ones a successor thinks that they
 * have the trace closed: it may tell earlier that the trace is quiet, and what comes
 * is reported all the same. */
#define MARK_PARTS 48u

struct part {
	uint32_t client;
	uint32_t open;	   /* handles: those of slice.handles that are, and */
	uint32_t unlisted; /* of these, which is not known: a predecessor
			    * counted them, or there were too many */
	bool introduced;   /* the slice has its PROCESS piece */
};

/*
 * Handles of a slice that are known by their numbers, so that an end counts only where
 * the slice has the beginning, and once. They are those that are open; and those whose
 * end was met and no beginning: that may be gone, or one of the unlisted, or it stands
 * in a segment that is looked at later, since another thread wrote it. So of a handle
 * that began and ended between two looks either may be met first.
 *
 * They are few: hardly a trace has as many open in one node, or ended between two looks,
 * and a list of so many is read in no time (3 KiB). The oldest end gives way to what is
 * new; from then on, and after a restart, it is asked of the process if a handle that
 * begins is open still. Then, and with more that are open, a count may be too low: one
 * that had no place in the table of its process is taken for closed, and the end of one
 * that is not known any more for that of another. A trace is told to be quiet earlier,
 * and what comes is reported all the same.
 */
#define SLICE_HANDLES_MAX 256u

struct slice_handle {
	uint32_t client, handle;
	bool ended;
	bool took; /* one of the unlisted, which it may have been */
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
	struct slice_handle *handles;
	uint32_t n_handles, handles_room;
	bool ends_forgotten;	  /* some, or a predecessor's */
	uint64_t last_pair_ticks; /* of the CLOCK piece written last */
	uint64_t last_pair_realtime_ns;

	uint32_t *blocks; /* block numbers of content [first_block, ...) */
	uint32_t first_block, n_blocks, blocks_room;
	uint32_t mark;	 /* its mark block, and its place in store.slices */
	uint8_t saved;	 /* which of the mark's states is the newer */
	bool dirty;	 /* mark not yet written */
	bool changed;	 /* event waits */
	bool full_event; /* event waits */
	bool parts_forgotten; /* a predecessor's; some, or all */
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
	uint32_t n_blocks;   /* of the file */
	uint32_t blocks_max; /* of them, as configured */
	uint32_t fresh, free, used;
	uint32_t *free_next;
	struct slice **slices; /* by mark block */
	uint32_t n_slices;
	uint32_t *buckets; /* by fingerprint: marks */
	uint32_t n_buckets;
	struct filter filter; /* of all slices, and of some that were */
	struct filter next;   /* that is being made, of so many buckets */
	uint32_t renewed;     /* NONE: none is */
	uint32_t removed;     /* slices, since the latest was begun */
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

static inline void filter_add(struct filter *f, uint64_t fingerprint)
{
	f->words[fingerprint % FILTER_BITS / 64] |= 1ull << (fingerprint % 64);
}

static inline bool filter_has(const struct filter *f, uint64_t fingerprint)
{
	return f->words[fingerprint % FILTER_BITS / 64] >> (fingerprint % 64) &
	       1;
}

/* store.c */
int store_init(struct bsn *n);
int store_adopt(struct bsn *n, int fd);
void store_free(struct bsn *n);
struct slice *slice_find(const struct bsn *n, struct bs_trace_id id);
struct slice *slice_new(struct bsn *n, struct bs_trace_id id,
			struct bs_trace_id primary, const char *trigger);
size_t slice_read(const struct bsn *n, const struct slice *s, uint64_t offset,
		  uint8_t *to, size_t bytes);
bool slice_trim(struct bsn *n, struct slice *s, uint64_t offset);
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
uint64_t records_last_ticks(const uint8_t *records, uint32_t bytes,
			    uint32_t *count);
uint32_t records_whole(const uint8_t *records, uint32_t bytes, uint32_t room,
		       bool *malformed);
/* Of the first and of the last record that has a time; 0: none has. */
struct ticks {
	uint64_t first, last;
};
/* Copy a run into its trace's slice, from `copied` bytes of it on (NONE: it is
 * new). Returns how much of it is copied now. */
uint32_t slice_copy_run(struct bsn *n, struct sink *to, const struct run *run,
			uint32_t copied, struct ticks *ticks);
void slice_loss_arrived(struct bsn *n, struct slice *s, const struct client *c,
			uint32_t handle, uint32_t flags);
/* That processes lost something of nobody knows which traces. In pieces. */
void slices_untied_losses(struct bsn *n);
/* Nor may they have all of a trace, since the percentage changed. In pieces. */
void slices_left_out(struct bsn *n, bool give_way);
/* What processes that are gone had open stays unfinished. */
void slices_close_gone(struct bsn *n, bool give_way);
void slice_put_exit(struct bsn *n, struct sink *to, uint32_t client);
void slice_fill(const struct slice *s, struct bsn_slice *out);

/* handles.c */
struct part *slice_part(struct slice *s, uint32_t client);
uint32_t slice_open_handles(const struct slice *s);
/* While the slice is looked for, the search counts, which knows what was met (verdict.c). */
void slice_open_handle(struct bsn *n, struct slice *s, struct part *part,
		       uint32_t handle);
void slice_close_handle(struct bsn *n, struct slice *s, struct part *part,
			uint32_t handle);
/* Else: of a run that was copied, what it says of its handle; and of one that was lost. */
void slice_count_run(struct bsn *n, struct slice *s, const struct run *run,
		     bool is_new);
void slice_count_flags(struct bsn *n, struct slice *s, uint32_t client,
		       uint32_t handle, uint32_t flags);
/* So many, of those that are not known by their numbers. */
void slice_close_unlisted(struct part *part, uint32_t handles);
/* Its process is gone. */
void slice_close_all(struct slice *s, struct part *part);

#endif
