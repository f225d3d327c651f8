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
struct bsd_spans;
struct bsd_index;

/* ------------------------------------------------------------- a slice --- */

/*
 * One record. What its type has not is 0. What is of no fixed size follows as
 * bytes: of the name, then of the rest.
 */
struct bsd_record {
	uint64_t ticks; /* when it was written, see bsd_slice_time(); 0: unknown */
	uint64_t span_id;   /* SPAN_*, HOP_*, UNANSWERED */
	uint64_t parent_id; /* SPAN_START */
	uint64_t time_ns;   /* SPAN_START, SPAN_END: Unix time */
	uint64_t node_id;   /* HOP_*: where it was injected; BREADCRUMB */
	uint32_t client;
	uint32_t handle;
	uint32_t hop;	     /* HOP_* */
	uint32_t injector;   /* HOP_*: the handle that injected it */
	uint32_t scope;	     /* SCOPE: its number; SPAN_DETAIL */
	uint32_t name_bytes; /* SPAN_START, SPAN_END, BREADCRUMB; UNANSWERED:
			      * the address */
	uint32_t rest_bytes; /* SPAN_END: attributes; UNANSWERED: the error; all
			      * of DATA, and so on */
	uint16_t status;     /* SPAN_END */
	uint16_t part;	     /* SPAN_DETAIL: this one */
	uint16_t parts;	     /* of so many */
	uint8_t type;	     /* enum bs_record_type, or one that is newer */
	uint8_t kind;	     /* SPAN_START */
	bool truncated;
	bool unsent; /* UNANSWERED: no byte of the request was (BS_REACH_NONE) */
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
	bool address; /* the name is "@" and an IP address; whether `node` is
		       * the hash of it is not looked at */
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
	BSD_FINDING_HOP_OUT_UNMET = 6,	/* span_id, handle, number: the hop; if
					 * who sent says that nobody answered,
					 * name: the address, and behind it as
					 * many bytes as `other` says of the
					 * error */
	BSD_FINDING_HOP_IN_UNMET = 7,	/* likewise; other: where it arrived */
	BSD_FINDING_HOP_UNANSWERED = 8, /* like HOP_OUT_UNMET with a name, but
					 * nothing is missing by that: it was
					 * not sent */
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

/* ----------------------------------------------------- spans of a slice --- */

/* UTF-8, whatever was written: what is none is replaced by U+FFFD. */
struct bsd_text {
	const uint8_t *at;
	size_t bytes;
};

enum bsd_value_type {
	BSD_VALUE_NIL = 0,
	BSD_VALUE_BOOL = 1,  /* integer: 0 or 1 */
	BSD_VALUE_INT = 2,   /* integer */
	BSD_VALUE_UINT = 3,  /* natural: above INT64_MAX */
	BSD_VALUE_REAL = 4,  /* real */
	BSD_VALUE_TEXT = 5,  /* n bytes of UTF-8 */
	BSD_VALUE_BYTES = 6, /* n bytes */
	BSD_VALUE_LIST = 7,  /* n items */
	BSD_VALUE_MAP =
		8, /* n pairs: a key, which is a text, and a value, by turns.
			      * No key is there twice */
};

struct bsd_value {
	enum bsd_value_type type;
	uint32_t n;
	union {
		int64_t integer;
		uint64_t natural;
		double real;
		const uint8_t *bytes;
		const struct bsd_value *items;
	};
};

/* What a process says that it is; its attributes are a map, here and below. */
struct bsd_resource {
	struct bsd_value attributes;
	struct bsd_text schema_url;
};

/* The instrumentation that made a span. */
struct bsd_scope {
	struct bsd_text name;
	struct bsd_text version;
	struct bsd_text schema_url;
	struct bsd_value attributes;
};

struct bsd_span_event {
	struct bsd_text name;
	uint64_t time_ns;
	struct bsd_value attributes;
	uint64_t dropped_attributes;
};

struct bsd_link {
	uint8_t trace_id[16];
	uint64_t span_id;
	struct bsd_value attributes;
	struct bsd_text trace_state;
	uint64_t flags;
	uint64_t dropped_attributes;
};

/* As its node saw it; times are Unix time by the node's clock. */
struct bsd_span {
	uint64_t span_id;
	uint64_t parent_id;
	uint64_t start_ns;
	uint64_t end_ns; /* of one that is finished */
	uint64_t flags;
	uint64_t dropped_attributes;
	uint64_t dropped_events;
	uint64_t dropped_links;
	struct bsd_text name;
	struct bsd_text status_message;
	struct bsd_text trace_state;
	struct bsd_value attributes;
	const struct bsd_resource *resource; /* NULL: it said nothing */
	const struct bsd_scope *scope;	     /* likewise */
	const struct bsd_span_event *events;
	const struct bsd_link *links;
	uint32_t n_events;
	uint32_t n_links;
	uint32_t client;
	uint32_t handle;
	uint16_t status;
	uint8_t kind;
	bool finished;
};

/*
 * The records of a slice, joined into spans: in the order of their starts, whatever
 * came first. What probes saw (KERNEL) becomes spans too, if its words are given
 * (bsd_spans_kernel_words) before it is joined; they come last.
 */
int bsd_spans_new(struct bsd_spans **spans);
void bsd_spans_free(struct bsd_spans *spans);
int bsd_spans_feed(struct bsd_spans *spans, const uint8_t *bytes, size_t n);
const struct bsd_slice *bsd_spans_slice(const struct bsd_spans *spans);

/* KERNEL records that have a time, and the end of each by the node's clock. How many,
 * or a negative errno. Once all bytes are there. */
int64_t bsd_spans_kernels(struct bsd_spans *spans);
const struct bsd_record *bsd_spans_kernel(const struct bsd_spans *spans,
					  size_t i, uint64_t *end_ns);
/* Its id, its name, which is UTF-8, and its attributes, a map in MessagePack. */
int bsd_spans_kernel_words(struct bsd_spans *spans, size_t i, uint64_t span_id,
			   const uint8_t *name, size_t name_bytes,
			   const uint8_t *attributes, size_t attributes_bytes);

/* After all bytes; nothing may be fed after it. */
int bsd_spans_join(struct bsd_spans *spans);
size_t bsd_spans_count(const struct bsd_spans *spans);
const struct bsd_span *bsd_spans_at(const struct bsd_spans *spans);
/* Of the slice, and of what spans say. */
uint64_t bsd_spans_malformed(const struct bsd_spans *spans);

/* The other records, in their order: hops, breadcrumbs, DATA and what is newer. */
size_t bsd_spans_others_count(const struct bsd_spans *spans);
const struct bsd_record *bsd_spans_others(const struct bsd_spans *spans);
/* Ends whose start is not in the slice. */
size_t bsd_spans_unstarted_count(const struct bsd_spans *spans);
const struct bsd_record *bsd_spans_unstarted(const struct bsd_spans *spans);

/* ----------------------------------------------------- what is made of it --- */

/* What stands besides on the local roots, the first span of the trace in each process:
 * a map in MessagePack. It goes over what they have by these names. */
struct bsd_about {
	const uint8_t *stamps;
	size_t stamps_bytes;
	const uint8_t *node; /* the name of it, UTF-8 */
	size_t node_bytes;
	int64_t clock_offset_ns; /* taken off all times */
};

struct bsd_bytes {
	int error; /* -EINVAL: the stamps are no such map */
	const uint8_t *at;
	size_t n;
};

/* OTLP's TracesData; one behind the other they are one again. Until the next call. */
struct bsd_bytes bsd_spans_otlp(struct bsd_spans *spans,
				const uint8_t trace_id[16],
				struct bsd_about about);

/* A value as searches compare it, as in formats/tags.py. Until the next call. */
struct bsd_bytes bsd_spans_words(struct bsd_spans *spans,
				 const struct bsd_value *value);

/*
 * What searches look at, of all slices of a trace: a row for each span, whose tags are
 * hashes; what a list of traces shows of it; and who called whom.
 */

/* Bytes of the hash of a tag. Half of what the index takes: a search over a million
 * spans with 20 tags each finds one wrongly in one of 50,000 times. */
#define BSD_TAG_BYTES 5

struct bsd_row {
	uint64_t start_ns;
	uint64_t duration_ns;
	uint32_t operation;  /* which of the operations */
	uint32_t tags_bytes; /* in `tags`, one row's behind the other's */
};

/* In `names` stand its service and its name, one operation's behind the other's. */
struct bsd_operation {
	uint32_t service_bytes;
	uint32_t name_bytes;
	uint32_t kind; /* OTLP's, 0: none that is known */
};

struct bsd_service {
	struct bsd_text name;
	uint64_t spans;
	uint64_t errors;
};

struct bsd_call {
	uint32_t caller; /* which of the services */
	uint32_t callee;
	uint64_t count;
};

struct bsd_index_rows {
	int error;
	size_t n_rows, n_tags, n_operations, n_names, n_services, n_calls;
	const struct bsd_row *rows;
	const uint8_t *tags;
	const struct bsd_operation *operations;
	const uint8_t *names;
	const struct bsd_service *services; /* by their names */
	const struct bsd_call *calls;
	struct bsd_text root_service; /* of the first root; empty without one */
	struct bsd_text root_operation;
	uint64_t start_ns, end_ns;
	uint64_t spans, errors;
	uint64_t orphans; /* spans whose parent nobody delivered */
};

/* Of more spans than `rows_max` only the sums are known. */
int bsd_index_new(uint64_t rows_max, struct bsd_index **index);
void bsd_index_free(struct bsd_index *index);
/* The spans of one slice, which are joined, and stay until the rows are read. */
int bsd_index_add(struct bsd_index *index, struct bsd_spans *spans,
		  struct bsd_about about);
struct bsd_index_rows bsd_index_rows(struct bsd_index *index);
/* The lower bytes of it, the lowest first, are what stands in `tags`. */
uint64_t bsd_tag_hash(const uint8_t *key, size_t key_bytes,
		      const uint8_t *value, size_t value_bytes);

#endif
