/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backsight client API: record every request in full into the node's pool.
 *
 * A request is a trace. Wherever it runs, the program calls begin, writes
 * records, and calls end; nothing leaves the node. When something goes wrong
 * anywhere, bs_trigger() names the trace, and what was written about it is
 * collected from every node that it visited.
 *
 *	bs_begin(id);                          // id: the W3C trace id
 *	bs_tracepoint(&event, sizeof(event));  // single nanoseconds
 *	bs_end();
 *
 * Two forms write the same data. The thread-local form (bs_begin ... bs_end)
 * suits a thread that works on one request at a time. The handle form
 * (bs_open, bs_write, bs_close) suits event loops and thread pools, where
 * requests interleave on one thread or one request runs on several; the
 * thread-local form is the handle form on a handle that the thread owns.
 *
 * No call blocks, none needs the node daemon: with no daemon, or no free
 * memory, records are dropped and counted, and the program runs on. The
 * library attaches by itself when a daemon appears. When the daemon goes,
 * records and triggers go on into the memory that it gave, until the next one
 * is there: under a service manager that one takes the memory up. If it has
 * not kept it, they are lost, and not counted. All functions are safe to
 * call from any thread, none from a signal handler; nor may a handler leave one
 * by longjmp(), or a thread be cancelled in one asynchronously. A child process
 * starts unattached and attaches anew; a request that was open in the parent
 * stays the parent's. Only after a raw clone() the child must not begin with
 * bs_record_at(), which may still be where the parent is; and one that shares
 * its parent's memory, as after vfork(), must call nothing of this.
 *
 * Functions return 0 or a positive count for success and a negative errno
 * for failure. A caller may ignore all of them: a failure costs that record or
 * trigger only, and is counted (bs_get_stats). Not counted are -ENOENT and the
 * zero id, which say that there is no trace, and failures of bs_serialize().
 *
 * Environment: BACKSIGHT_SOCKET  the daemon's socket
 *                                (default /run/backsight/node.sock)
 *              BACKSIGHT_SERVICE the service's name (default: the program's)
 *              BACKSIGHT_DISABLE any value but "" or "0": never attach
 *              BACKSIGHT_DEBUG   any value but "" or "0": say on standard error
 *                                why the process is not attached
 */
#ifndef BACKSIGHT_H
#define BACKSIGHT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define BS_EXPORT __attribute__((visibility("default")))

/* The W3C trace id as two integers: "0af7651916cd43dd8448eb211c80319c" is
 * hi 0x0af7651916cd43dd, lo 0x8448eb211c80319c. All zero means no trace. */
struct bs_trace_id {
	uint64_t hi;
	uint64_t lo;
};

/* What a record is. The node reads only BS_RECORD_BREADCRUMB and the HOPs;
 * everything else is opaque to it. */
enum bs_record_type {
	BS_RECORD_DATA = 1,	  /* any bytes of the application */
	BS_RECORD_SPAN_START = 2, /* struct bs_span_start + name */
	BS_RECORD_SPAN_END = 3,	  /* struct bs_span_end + name + attributes */
	BS_RECORD_HOP_OUT = 4,	  /* struct bs_hop: a context was injected */
	BS_RECORD_HOP_IN = 5,	  /* struct bs_hop: a context was extracted */
	BS_RECORD_BREADCRUMB = 6, /* u64 node id + node name, no terminator */
	/* Of OpenTelemetry, in MessagePack, as the library's integrations write
	 * it; what is inside may change with them. */
	BS_RECORD_RESOURCE = 7,	   /* for the handle's spans */
	BS_RECORD_SCOPE = 8,	   /* u32 number + the scope */
	BS_RECORD_SPAN_DETAIL = 9, /* struct bs_span_detail + a part */
	BS_RECORD_KERNEL = 10,	   /* struct bs_kernel_event: of a probe */
	BS_RECORD_UNANSWERED = 11, /* struct bs_unanswered + address + error */
};

/*
 * A record in memory: this header, the payload, then zero to three bytes of
 * padding up to a multiple of four. The length counts the payload alone.
 */
struct __attribute__((packed, aligned(4))) bs_record_header {
	uint16_t payload_bytes;
	uint8_t type;	/* enum bs_record_type */
	uint8_t flags;	/* BS_RECORD_TRUNCATED */
	uint64_t ticks; /* bs_clock_ticks() when it was written; 0: unknown */
};

#define BS_RECORD_TRUNCATED 1u

#define BS_RECORD_ALIGN 4u

/* Larger payloads are refused with -EMSGSIZE: a record never crosses a
 * segment (64 KiB), and half a segment bounds what is wasted at its end. */
#define BS_PAYLOAD_MAX 32768u

#define BS_NODE_NAME_MAX 63    /* bytes of a node's name, as of a DNS label */
#define BS_TRIGGER_NAME_MAX 31 /* bytes; [a-z0-9_.-] */
#define BS_TRIGGER_WHY_MAX 95  /* bytes; longer texts are cut */
#define BS_LATERALS_MAX 32     /* of a group; more are cut */
#define BS_CONTEXT_MAX 128     /* bytes of the tracestate value */

/*
 * A handle: one open trace of this process. The caller owns the memory and
 * must not look inside; it must stay where it is between bs_open and bs_close.
 * Several threads may write to one handle at the same time. bs_close must
 * come after the last write of every thread.
 */
struct bs_trace {
	struct bs_trace_id id;
	uint64_t handle_seq;
	uint32_t next_hop;
	uint32_t flags;
	uint64_t crumbs[3];
	uint64_t attachment;
};

/*
 * The thread's position in its segment. Published here only so that
 * bs_tracepoint can be inlined: a bounds check, a copy, one ordered store.
 * cursor == limit == NULL when no run is open, so that none has room.
 */
struct bs_writer {
	unsigned char *cursor; /* where the next record header goes */
	unsigned char *limit;  /* end of the segment */
	uint32_t *word;	       /* of the open run; says how much is written */
	uint32_t word_base;    /* of it, but for the cursor */
};

extern BS_EXPORT __thread struct bs_writer bs_writer
	__attribute__((tls_model("initial-exec")));

/* ------------------------------------------------------------- clock --- */

/* The CPU's counter: the TSC, or arm64's virtual counter, which the kernel's
 * own clock reads. A call of the kernel's would cost several times as much. */
#if defined(__x86_64__)
#define BS_HAS_CPU_COUNTER 1
static inline uint64_t bs_cpu_counter(void)
{
	return __rdtsc();
}
#elif defined(__aarch64__)
#define BS_HAS_CPU_COUNTER 1
static inline uint64_t bs_cpu_counter(void)
{
	uint64_t ticks;

	__asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(ticks));
	return ticks;
}
#else
#define BS_HAS_CPU_COUNTER 0
#endif

/* Ticks of the node's record clock: the CPU's counter where the node knows
 * that it is the same on all CPUs and runs evenly, else CLOCK_MONOTONIC
 * nanoseconds. The node stores the relation to real time beside the data once
 * a second. */
BS_EXPORT uint64_t bs_clock_ticks_slow(void);
extern BS_EXPORT const bool *const bs_clock_is_counter;

static inline uint64_t bs_clock_ticks(void)
{
#if BS_HAS_CPU_COUNTER
	if (__builtin_expect(
		    __atomic_load_n(bs_clock_is_counter, __ATOMIC_RELAXED), 1))
		return bs_cpu_counter();
#endif
	return bs_clock_ticks_slow();
}

/* -------------------------------------------------- thread-local form --- */

/* Start writing about a trace on this thread. A trace that was still open on
 * the thread is ended first. Returns 0, or -EINVAL for the zero id. */
BS_EXPORT int bs_begin(struct bs_trace_id id);

/* End it. -ENOENT when none is open. */
BS_EXPORT int bs_end(void);

/* Before the first record of a run: begin the run in bs_writer, with room for a
 * record of so many bytes with its header. False where there is more to do than
 * that, which bs_tracepoint_slow() does. */
BS_EXPORT bool bs_writer_open(size_t record_bytes);
BS_EXPORT int bs_tracepoint_slow(uint8_t type, const void *payload,
				 size_t payload_bytes, uint64_t ticks);

/* Of the word the upper 14 bits are the length of the records, in units of four
 * bytes, and the others do not change. */
static inline uint32_t bs_writer_word(const struct bs_writer *w)
{
	return ((uint32_t)(uintptr_t)w->cursor << 16) + w->word_base;
}

/* The node may read the run at any moment: the length must not become visible
 * before the record (pairs with the acquire load there). */
static inline void bs_writer_commit(struct bs_writer *w)
{
	__atomic_store_n(w->word, bs_writer_word(w), __ATOMIC_RELEASE);
}

/* Write one record of any type at a given time. Returns 0; -EMSGSIZE over
 * BS_PAYLOAD_MAX; -ENOENT with no open trace; -ENOSPC when it was lost. */
static inline int bs_record_at(uint8_t type, const void *payload,
			       size_t payload_bytes, uint64_t ticks)
{
	struct bs_writer *w = &bs_writer;
	struct bs_record_header *h;
	size_t need;

	if (__builtin_expect(payload_bytes > BS_PAYLOAD_MAX, 0))
		return bs_tracepoint_slow(type, payload, payload_bytes, ticks);
	need = (sizeof(*h) + payload_bytes + BS_RECORD_ALIGN - 1) &
	       ~(size_t)(BS_RECORD_ALIGN - 1);
	if (__builtin_expect(need > (size_t)(w->limit - w->cursor), 0) &&
	    !bs_writer_open(need))
		return bs_tracepoint_slow(type, payload, payload_bytes, ticks);
	h = (struct bs_record_header *)w->cursor;
	h->payload_bytes = (uint16_t)payload_bytes;
	h->type = type;
	h->flags = 0;
	h->ticks = ticks;
	memcpy(h + 1, payload, payload_bytes);
	w->cursor += need;
	bs_writer_commit(w);
	return 0;
}

/* Write bytes of the application, stamped now. */
static inline int bs_tracepoint(const void *payload, size_t payload_bytes)
{
	return bs_record_at(BS_RECORD_DATA, payload, payload_bytes,
			    bs_clock_ticks());
}

/* ---------------------------------------------------------- handles --- */

/* Open a trace on a handle. 0, or -EINVAL for the zero id. */
BS_EXPORT int bs_open(struct bs_trace *trace, struct bs_trace_id id);
BS_EXPORT int bs_close(struct bs_trace *trace);

/*
 * This thread works on that trace from now on, NULL: on no handle's. It is for who
 * watches threads from outside, as the node's probes do in the kernel: what happens to
 * the thread is then told of this trace. A thread that goes from one handle to another
 * says so each time, and NULL when it waits for more work. bs_begin() and bs_end() say so
 * by themselves for the thread's own trace. Once a handle is closed no thread shows it.
 * 0; -ENOENT for a handle that is not open, which is as NULL; -ENOSPC where the thread
 * has no slot to show it in.
 */
BS_EXPORT int bs_show(struct bs_trace *trace);

/* As bs_record_at, to a handle. NULL means the thread's open trace, here and
 * in all functions below. */
BS_EXPORT int bs_write(struct bs_trace *trace, uint8_t type,
		       const void *payload, size_t payload_bytes);

/* ------------------------------------------------------------- spans --- */

struct bs_span_start {
	uint64_t span_id;
	uint64_t parent_id; /* 0: the root */
	uint64_t start_ns;  /* Unix time */
	uint8_t kind;	    /* OTLP SpanKind */
	uint8_t name_bytes; /* of the name that follows */
	uint8_t zero[6];
};

/* A start record is at most 64 bytes, so the name is cut to what is left; the
 * end record repeats a name that was cut. */
#define BS_SPAN_START_NAME_MAX (64 - sizeof(struct bs_span_start))

struct bs_span_end {
	uint64_t span_id;
	uint64_t end_ns;     /* Unix time */
	uint16_t name_bytes; /* 0: the start record held it whole */
	uint16_t status;     /* OTLP StatusCode: 0 unset, 1 ok, 2 error */
	uint32_t attributes_bytes;
};

/*
 * What OpenTelemetry says of a span beyond that: attributes of all types,
 * events, links, and so on, in MessagePack, which is cut into parts where it is
 * larger than a record. Written before the end of the span, whose own attributes
 * are then empty. A handle's RESOURCE and SCOPE records stand in its log before
 * the first span that needs them.
 */
struct bs_span_detail {
	uint64_t span_id;
	uint32_t scope; /* number of a SCOPE record of this handle; 0: none */
	uint16_t part;	/* 0, 1, ... */
	uint16_t parts; /* at least 1 */
};

/*
 * Nobody answered what a client span sent: the IP address that it was sent to, and why
 * (an exception, a timeout), as text. It counts only in the handle that sent. Write a
 * breadcrumb by the address beside it ("@10.0.0.7"): whoever is there is asked.
 *
 * BS_REACH_NONE: no connection came about (refused, unreachable, a timeout of the
 * connect), in no try, so no byte of the request was sent, and nobody misses its other
 * end. It counts only with an address. BS_REACH_UNKNOWN, and all other values: somebody
 * may have got it, say behind a virtual address, so the other end is missing; address
 * and error are told with that.
 */
struct bs_unanswered {
	uint64_t span_id;
	uint32_t address_bytes;
	uint32_t reach; /* enum bs_reach */
};

enum bs_reach {
	BS_REACH_UNKNOWN = 0,
	BS_REACH_NONE = 1,
};

/* One attribute: this header, the key, the value, with no padding. */
struct bs_attribute_header {
	uint8_t type; /* enum bs_attribute_type */
	uint8_t key_bytes;
	uint16_t value_bytes;
};

enum bs_attribute_type {
	BS_ATTRIBUTE_STRING = 1, /* UTF-8 */
	BS_ATTRIBUTE_INT = 2,	 /* int64_t, host byte order */
	BS_ATTRIBUTE_DOUBLE = 3, /* IEEE 754 double, host byte order */
	BS_ATTRIBUTE_BOOL = 4,	 /* one byte, 0 or 1 */
	BS_ATTRIBUTE_BYTES = 5,
};

BS_EXPORT int bs_span_start(struct bs_trace *trace, uint64_t span_id,
			    uint64_t parent_id, uint64_t start_ns, uint8_t kind,
			    const char *name);
/* attributes: encoded as above, or NULL. name: NULL where it was not cut. */
BS_EXPORT int bs_span_end(struct bs_trace *trace, uint64_t span_id,
			  uint64_t end_ns, uint16_t status, const char *name,
			  const void *attributes, size_t attributes_bytes);

/* ------------------------------------------------- nodes and contexts --- */

/* The payload of HOP_OUT and HOP_IN. A hop is identified by (trace, node,
 * span_id, handle, hop); every hop out must be met by its hop in, or the trace
 * is reported as partial. */
struct bs_hop {
	uint64_t node_id; /* the node that injected the context */
	uint64_t span_id; /* the span that injected it */
	uint32_t hop;	  /* counts the injections of that handle */
	uint32_t handle;  /* the handle that injected it */
};

/* The id of a node: FNV-1a, 64 bits, of its name. */
BS_EXPORT uint64_t bs_node_id(const char *name);

/* This node's id as "#" and 16 hex digits, to put into a response so that the
 * caller can drop a forward breadcrumb; "" while unattached. */
BS_EXPORT const char *bs_node_ref(void);

/* The trace was, or will be, on that node too: a node's name, or "#" and its
 * id in hex as bs_node_ref() gives it, or "@" and an IP address as inet_ntop()
 * writes it: a hint, worth a question if a node is there, and nothing missing
 * if none is. -EINVAL (counted) for anything else. */
BS_EXPORT int bs_breadcrumb(struct bs_trace *trace, const char *node);

/*
 * Inject: the value of our tracestate member ("bs=<value>") for a request
 * that span_id sends. Drops a hop-out record. The value names the last three
 * nodes that the request visited, this one first, and the triggers that fired
 * for it so far. Returns its length (below size), or -ENOSPC; BS_CONTEXT_MAX+1
 * bytes always suffice. -ENOTCONN while unattached: there is no node to name.
 */
BS_EXPORT int bs_serialize(struct bs_trace *trace, uint64_t span_id,
			   char *value, size_t size);

/*
 * Extract: what bs_serialize gave on the calling node. Drops the hop-in
 * record and backward breadcrumbs. span_id: the caller's span, from
 * traceparent. -EINVAL (counted) for a malformed value, which is ignored.
 */
BS_EXPORT int bs_deserialize(struct bs_trace *trace, uint64_t span_id,
			     const char *value, size_t value_bytes);

/* Whether this node's operator has what comes with a request believed: what
 * fired upstream, or was sampled there. False while unattached. */
BS_EXPORT bool bs_trusts_incoming(void);

/* ---------------------------------------------------------- triggers --- */

/*
 * Collect this trace and, as one group that is kept or dropped whole, its
 * laterals. trigger: the rule's name. why: for the person who reads the
 * trace, or NULL. Counted: -EAGAIN when the trigger queue is full, -ENOTCONN
 * while unattached, -EINVAL for the zero id or a name that is none, -ENODATA
 * where none of these traces is among the percentage that is recorded. Not
 * counted is a trigger that was left for the next daemon, where the last one
 * has gone and the next has not kept its memory.
 */
BS_EXPORT int bs_trigger(struct bs_trace_id id, const char *trigger,
			 const char *why, const struct bs_trace_id *laterals,
			 size_t n_laterals);

/* ------------------------------------------------------------ status --- */

struct bs_stats {
	uint64_t runs;	    /* written to the pool */
	uint64_t runs_lost; /* at least one record was dropped */
	uint64_t records_lost;
	uint64_t payload_bytes_lost;
	uint64_t records_oversized; /* refused with -EMSGSIZE */
	uint64_t contexts_malformed;
	uint64_t breadcrumbs_malformed;
	uint64_t attributes_malformed; /* ends of spans refused for them */
	uint64_t triggers_malformed;
	uint64_t triggers_unattached; /* no node, nor memory of one */
	uint64_t triggers_unrecorded; /* of traces of which nothing is recorded */
	uint64_t triggers_lost;	      /* the queue was full, or had moved on */
	uint64_t attachments;	      /* times attached since start */
	bool attached; /* also while that node has gone and no other is there */
};

BS_EXPORT void bs_get_stats(struct bs_stats *stats);

/* Wait until attached: for tests and short-lived tools; services need not.
 * 0, or -ETIMEDOUT. */
BS_EXPORT int bs_wait_attached(int timeout_ms);

/* Close this process's attachment for good, also for children that it forks later;
 * optional, for leak checkers. */
BS_EXPORT void bs_shutdown(void);

#ifdef __cplusplus
}
#endif
#endif
