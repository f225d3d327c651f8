/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What slices say (abi/slice.h): the one reader of them, for all programs.
 *
 * A slice comes from a machine that is not trusted, in chunks that may end at any
 * byte, and may be cut short for good. So:
 *
 * - nothing that it says is believed. What makes no sense is counted as malformed,
 *   and so are flags and formats of records that are not known;
 * - a record is given out as soon as it is whole, so that a cut slice reads as a
 *   prefix of the whole one, and any split into chunks reads as the whole;
 * - what is remembered is bounded by the bytes that came, never by what they claim.
 *
 * There are no sockets, files, clocks or threads in here. No function takes a lock:
 * whoever has an object calls from one thread at a time. What points into an object
 * is valid until the next call that is not const. Functions that may fail return a
 * negative errno; it is -ENOMEM, but where said. After that the object can be freed,
 * and nothing else.
 */
#ifndef BS_DECODE_H
#define BS_DECODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bsd_slice;
struct bsd_records;
struct bsd_evidence;

/* ------------------------------------------------------------- a slice --- */

/*
 * One record. What its type has not is 0. What is of no fixed size follows as
 * bytes: of the name, then of the rest.
 */
struct bsd_record {
	uint64_t ticks; /* when it was written, see bsd_slice_time(); 0: unknown */
	uint64_t span_id;   /* SPAN_*, HOP_* */
	uint64_t parent_id; /* SPAN_START */
	uint64_t time_ns;   /* SPAN_START, SPAN_END: Unix time */
	uint64_t node_id;   /* HOP_*: where it was injected; BREADCRUMB */
	uint32_t client;
	uint32_t handle;
	uint32_t hop;	     /* HOP_* */
	uint32_t injector;   /* HOP_*: the handle that injected it */
	uint32_t scope;	     /* SCOPE: its number; SPAN_DETAIL */
	uint32_t name_bytes; /* SPAN_START, SPAN_END, BREADCRUMB */
	uint32_t rest_bytes; /* SPAN_END: attributes; all of DATA, and so on */
	uint16_t status;     /* SPAN_END */
	uint16_t part;	     /* SPAN_DETAIL: this one */
	uint16_t parts;	     /* of so many */
	uint8_t type;	     /* enum bs_record_type, or one that is newer */
	uint8_t kind;	     /* SPAN_START */
	bool truncated;
	const uint8_t *bytes;
};

/* What came of one handle. A handle is whole if its runs are, from FIRST to LAST. */
struct bsd_handle {
	uint32_t client;
	uint32_t handle;
	uint32_t runs;	   /* how many are there */
	uint32_t seq_max;  /* the last of them */
	uint32_t last_seq; /* the one with LAST, if `closed` */
	bool first;	   /* its first run is there */
	bool closed;
	bool lossy;
	bool hole; /* bytes inside a run are missing */
};

enum bsd_handle_problem {
	BSD_HANDLE_WHOLE = 0,
	BSD_HANDLE_NO_FIRST = 1,
	BSD_HANDLE_HOLE = 2,
	BSD_HANDLE_OPEN = 3,	/* it was never closed */
	BSD_HANDLE_BEYOND = 4,	/* a run comes after the last */
	BSD_HANDLE_MISSING = 5, /* fewer runs than there were */
};

/* Who writes: a process's number on its node. */
struct bsd_client {
	uint32_t client;
	uint32_t pid;
	bool named;	  /* pid and service are known */
	bool exited;	  /* what it had open stays open */
	bool lossy;	  /* it lost records of this trace */
	bool foreign;	  /* its records are in a format that is not known */
	char service[64]; /* any bytes; ends at a 0, if there is one */
};

struct bsd_slice_info {
	uint64_t malformed; /* how often something made no sense */
	uint64_t items; /* what is remembered, in pieces of some 150 bytes */
	uint64_t least_bytes; /* of a slice that says the same: each run in one
			       * piece, what is repeated once */
	uint32_t handles;
	uint32_t clients;
	uint32_t clock_pairs;
	bool whole;  /* the bytes so far end where a piece ends */
	bool broken; /* the sizes make no sense: nothing more is read */
};

int bsd_slice_new(struct bsd_slice **slice);
void bsd_slice_free(struct bsd_slice *slice);

/* Take the next bytes. `records` has those that became whole; NULL: they are dropped. */
int bsd_slice_feed(struct bsd_slice *slice, const uint8_t *bytes, size_t n,
		   struct bsd_records *records);

struct bsd_slice_info bsd_slice_info(const struct bsd_slice *slice);

/* As many as the info says, in the order in which they came up. */
const struct bsd_handle *bsd_slice_handles(const struct bsd_slice *slice);
const struct bsd_client *bsd_slice_clients(const struct bsd_slice *slice);

/* NULL if nothing is known of that one. */
const struct bsd_client *bsd_slice_client(const struct bsd_slice *slice,
					  uint32_t client);

enum bsd_handle_problem bsd_handle_problem(const struct bsd_handle *handle);

/*
 * Unix time, by the node's clock, at these ticks: by the nearest of the pairs that
 * the node wrote, before or behind. Nearest, and not in proportion to those on both
 * sides: between them somebody may have set the clock. -ENODATA for 0, without a
 * pair, and where no clock has that time.
 */
int bsd_slice_time(struct bsd_slice *slice, uint64_t ticks, uint64_t *time_ns);

/* The records of one bsd_slice_feed(), for who does not take them one by one. */
int bsd_records_new(struct bsd_records **records);
void bsd_records_free(struct bsd_records *records);
size_t bsd_records_count(const struct bsd_records *records);
const struct bsd_record *bsd_records_at(const struct bsd_records *records);

/* ------------------------------------------------ evidence of a trace --- */

/*
 * What all slices of one trace say, as far as a verdict needs it. They come from
 * different nodes, interleaved, and one may have the end of a span before its start:
 * spans and parents, starts and ends, hops out and in are matched whichever comes
 * first, when somebody asks.
 */

/* A node that a slice names: by a breadcrumb, whose name may be empty, or a hop. */
struct bsd_crumb {
	uint64_t node;
	uint32_t name_bytes;
	const uint8_t *name;
};

struct bsd_added {
	int error;
	bool gave_up;	/* nothing but the extent is known any more */
	uint64_t items; /* of the whole trace, now */
	size_t n_crumbs;
	const struct bsd_crumb *crumbs;
};

/* Of all spans that came; times are those of their starts and ends. */
struct bsd_extent {
	uint64_t span_count;
	uint64_t start_ns;
	uint64_t end_ns;
	bool timed; /* there are any times */
};

enum bsd_finding_kind {
	BSD_FINDING_LOSSY = 1,		/* client */
	BSD_FINDING_RUN_MISSING = 2,	/* client, handle; number: which of the
					 * slice's handles */
	BSD_FINDING_UNFINISHED = 3,	/* client, span_id, name */
	BSD_FINDING_UNSTARTED = 4,	/* client, span_id */
	BSD_FINDING_PARENT_MISSING = 5, /* span_id; other: the parent */
	BSD_FINDING_HOP_OUT_UNMET = 6,	/* span_id, handle, number: the hop */
	BSD_FINDING_HOP_IN_UNMET = 7,	/* likewise; other: where it arrived */
};

/* What is missing. Of one kind and node a few are told, the last with how many more
 * there are. */
struct bsd_finding {
	uint64_t node;
	uint64_t span_id;
	uint64_t other;
	uint64_t more;
	uint32_t client;
	uint32_t handle;
	uint32_t number;
	uint32_t name_bytes;
	const uint8_t *name;
	enum bsd_finding_kind kind;
};

/* Above `limit` items all is forgotten but the extent. */
int bsd_evidence_new(uint64_t limit, struct bsd_evidence **evidence);
void bsd_evidence_free(struct bsd_evidence *evidence);

/* The next bytes of a node's slice. */
struct bsd_added bsd_evidence_add(struct bsd_evidence *evidence, uint64_t node,
				  const uint8_t *bytes, size_t n);

/* Forget what a node's slice said: it begins another one. The items that are left. */
uint64_t bsd_evidence_restart(struct bsd_evidence *evidence, uint64_t node);

/* Forget all but the extent, for good. */
void bsd_evidence_give_up(struct bsd_evidence *evidence);

struct bsd_extent bsd_evidence_extent(const struct bsd_evidence *evidence);

/* The slices, in the order in which they came up. */
size_t bsd_evidence_slices(const struct bsd_evidence *evidence);
/* Which of them is this node's; -ENOENT if none is. */
int64_t bsd_evidence_find(const struct bsd_evidence *evidence, uint64_t node);
uint64_t bsd_evidence_node(const struct bsd_evidence *evidence, size_t i);
const struct bsd_slice *bsd_evidence_slice(const struct bsd_evidence *evidence,
					   size_t i);
/* Records of it that were cut when they were written. */
uint64_t bsd_evidence_truncated(const struct bsd_evidence *evidence, size_t i);

/* Of each kind and node at most `few`. How many findings, or a negative errno. */
int64_t bsd_evidence_judge(struct bsd_evidence *evidence, uint32_t few);
const struct bsd_finding *
bsd_evidence_findings(const struct bsd_evidence *evidence);

#endif
