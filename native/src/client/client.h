/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of libbacksight share.
 *
 *   attachment.c  what one attachment is: four segments, checked
 *   mapping.c     mapping them
 *   replace.c     putting another one in the place of one that threads use
 *   retire.c      what is left of one that was replaced
 *   attach.c      the thread that gets one, and the next one
 *   link.[ch]     its connection to the daemon
 *   thread.c      a thread's place in the current attachment
 *   writer.[ch]   runs and records in the thread's segment
 *   prefault.c    the thread that meets the pages of segments to come
 *   park.c        segments of idle threads, for others to go on in
 *   handles.c     numbers of handles, and the table of those that are open
 *   trace.c       the two forms of the API on top of it
 *   show.c        what threads show of what they work on
 *   propagate.c   breadcrumbs, and the value that travels with a request
 *   trigger.c     the trigger queue
 *   span.c        the two records of a span
 *   stats.c       counters
 *   fork.c        what a child process means for all of it
 *
 * Locking: the data path takes no lock. bs_lock is held where a thread joins
 * or leaves an attachment, where an attachment is published, and by fork().
 */
#ifndef BS_CLIENT_H
#define BS_CLIENT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "abi.h"
#include "backsight.h"
#include "barrier.h"
#include "hash.h"

/* -------------------------------------------------------- attachment --- */

/* Handle numbers say whose they are (abi/channel.h), so no two threads share a
 * counter. Threads without a slot draw from one that they do share. */
#define BS_HANDLE_SHARED (BS_THREAD_SLOTS << BS_HANDLE_COUNT_BITS)

/* Where the next owner of a slot goes on. Kept here, so that nothing read from
 * shared memory has to be believed. */
struct bs_slot_state {
	uint32_t segment; /* BS_SEGMENT_NONE: none yet */
	uint32_t cursor;  /* offset in it */
	uint32_t runs;	  /* in its directory */
	uint32_t next_handle;
};

/* A segment that is parked, and where to go on in it. */
struct bs_place {
	uint64_t life; /* in its header, while nobody went on there */
	uint32_t segment;
	uint32_t cursor;
	uint32_t runs;
};

struct bs_attachment {
	struct bs_attachment *next; /* of all that are mapped; bs_lock */
	uint64_t epoch;		    /* never the same twice, also over fork */
	uint32_t refs; /* threads in it, and one while current; bs_lock */
	uint32_t slots_free;
	uint32_t slots_touched; /* none beyond was ever used; bs_lock */
	uint32_t shared_handles;

	unsigned char *arena;
	size_t arena_bytes;
	uint32_t segments;
	unsigned char *channel_bytes;
	struct bs_channel_header *channel; /* NULL: unattached, as are... */
	struct bs_grant_ring *grants;
	uint32_t *open_handles;
	/* One segment, mapped twice: replace.c says why. Of the first the
	 * thread slots are used, and records_unattributed; it stays where it is. */
	struct bs_context_segment *context; /* ...these */
	struct bs_context_segment *queue;

	/* Attach thread only. context_number: of the news that brought the
	 * context, 0 if it came with the attachment. queue_before: the old queue,
	 * while a thread may be inside. */
	uint64_t context_number;
	struct bs_context_segment *queue_before;

	const struct bs_policy *policy;
	uint64_t percentage_state; /* bs_hash_prepare() */
	uint64_t node_id;
	uint64_t token[2];

	/* By bs_attachment_retire_old(): nobody takes a segment of it, or a slot;
	 * and of its arena is left what somebody is in. */
	bool is_retired;
	bool is_torn; /* bs_lock */

	/* Up to which position of the grant ring segments are populated, when
	 * the last one was taken, and whether one ever was soon after another. */
	uint32_t populated_to;
	uint64_t taken_ns;
	bool takes_often;

	/* How far the node filled the stock when it last did: the head then,
	 * and the number that waited. */
	uint32_t stock_head;
	uint32_t stock_full;

	uint64_t slots_used[BS_THREAD_SLOTS / 64]; /* bits; bs_lock */
	struct bs_slot_state slots[BS_THREAD_SLOTS];

	/* Oldest first; the node may have taken some. bs_lock. */
	struct bs_place parked[BS_PARKED_MAX];
	uint32_t n_parked;
};

/* Unattached is an attachment too: one without slots. */
extern struct bs_attachment bs_nowhere;
extern struct bs_attachment *bs_attachments; /* bs_lock */
extern uint64_t bs_epoch;		     /* last one given; bs_lock */
extern uint64_t bs_fork_epoch; /* up to here they were the parent's */

/*
 * What must not be believed in a child process. It is zero there from the start
 * (MADV_WIPEONFORK), whoever made the child and however: the attachment, whose
 * mappings the child does not have, and the locks, which a thread may hold that
 * it does not have. Comments say bs_lock for `lock`.
 */
#if defined(__x86_64__)
#define BS_PAGE_BYTES_MAX 4096
#else
#define BS_PAGE_BYTES_MAX 65536
#endif

extern struct bs_process {
	/* Read at each begin; NULL: a child of ours, or too early. */
	struct bs_attachment *current;
	bool clock_is_counter;
	uint8_t pad0[BS_CACHE_LINE - sizeof(void *) - sizeof(bool)];
	pthread_mutex_t lock;
	pthread_cond_t changed; /* current, or something of attach.c */
	uint8_t pad1[BS_PAGE_BYTES_MAX - BS_CACHE_LINE -
		     sizeof(pthread_mutex_t) - sizeof(pthread_cond_t)];
} bs_process;

_Static_assert(sizeof(struct bs_process) == BS_PAGE_BYTES_MAX, "a page");

/* In a child: begin from nowhere. */
void bs_process_renew(void);

static inline bool bs_process_is_new(void)
{
	return unlikely(!READ_ONCE(bs_process.current));
}

/* What is not told of fork() calls this before it looks at anything else. */
static inline void bs_process_check(void)
{
	if (bs_process_is_new())
		bs_process_renew();
}

/* Map and check what a daemon sent. NULL, and why in *reason. */
struct bs_attachment *bs_attachment_map(const struct bs_attach_reply *reply,
					const int fds[BS_FDS],
					const char **reason);
/* A daemon came back to it, and may have written to its channel: NULL, or why it is
 * not to be used any more. */
const char *bs_attachment_resume(const struct bs_attachment *a);
/* Make it current. bs_lock held; returns the old one if nobody is left in it,
 * for bs_attachment_unmap() after the lock. */
struct bs_attachment *bs_attachment_publish(struct bs_attachment *a);
struct bs_attachment *bs_attachment_put(struct bs_attachment *a);
void bs_attachment_unmap(struct bs_attachment *a);
/* Threads that are in those which are not current may not come by for long.
 * They keep no more of them than they can touch. bs_lock held, and given up at
 * times. */
void bs_attachment_retire_old(void);
/* A member leaves it. bs_lock held. */
void bs_attachment_let_go(const struct bs_attachment *a,
			  struct bs_segment_header *segment);

static inline struct bs_thread_area *
bs_attachment_area(const struct bs_attachment *a, uint32_t slot)
{
	return (struct bs_thread_area *)(a->channel_bytes +
					 BS_CHANNEL_AREAS_OFFSET) +
	       slot;
}

static inline struct bs_segment_header *
bs_segment_at(const struct bs_attachment *a, uint32_t segment)
{
	return (struct bs_segment_header *)(a->arena +
					    (size_t)segment * BS_SEGMENT_BYTES);
}

/* ---------------------------------------------------------- prefault --- */

/* Meet its pages. */
void bs_segment_populate(struct bs_segment_header *segment);
bool bs_prefault_is_ready(const struct bs_attachment *a, uint32_t position);
/* Somebody took the grant at this position. */
void bs_prefault_taken(struct bs_attachment *a, uint32_t position);

/* For the attach thread. */
void bs_prefault_start(void);
void bs_prefault_stop(void);
bool bs_prefault_runs(void);
/* bs_lock held. */
bool bs_prefault_works_on(const struct bs_attachment *a);
/* After fork(), in the child. */
void bs_prefault_forget(void);

/* ----------------------------------------------------------- mapping --- */

/* NULL, and why in *reason. */
void *bs_map(int fd, size_t bytes, bool writable, const char **reason);
/* The same, without any of its memory. */
void *bs_map_arena(int fd, size_t bytes, const char **reason);
void bs_unmap(const void *mapping, size_t bytes);
/* Put a mapping in the place of another one. `with` is unmapped where it was,
 * also on failure. -ENOMEM: what was there still is; -EFAULT: there is memory of
 * zeros instead. */
int bs_map_in_place(const void *place, const void *with, size_t bytes);
/* Reasons by themselves: who gives something back may try again. */
extern const char bs_no_room[];
extern const char bs_no_lock[];

/* As bs_map(), and checked. */
struct bs_context_segment *bs_context_map(int fd, const char **reason);
const struct bs_policy *bs_policy_map(int fd, const char **reason);

/* ------------------------------------------------------------ thread --- */

enum bs_run_state {
	BS_RUN_NONE = 0, /* no run is open */
	BS_RUN_OPEN,	 /* at `run` in the segment */
	BS_RUN_LOST,	 /* in the null segment: its records are only counted */
};

/* A trace's flags: BS_RUN_LOSSY as in its runs, and */
#define BS_TRACE_UNRECORDED 0x10000u /* left out by the trace percentage */
#define BS_TRACE_SHOWN 0x20000u	     /* by some thread, once: bs_show() */
/* Those that stay when the trace goes on in another attachment. */
#define BS_TRACE_KEPT (BS_RUN_LOSSY | BS_TRACE_SHOWN)

/* What threads count themselves, because no area counts it. */
struct bs_counters {
	uint64_t runs;
	uint64_t runs_lost;
	uint64_t records_lost;
	uint64_t payload_bytes_lost;
	uint64_t records_oversized;
	uint64_t contexts_malformed;
	uint64_t breadcrumbs_malformed;
	uint64_t attributes_malformed;
	uint64_t triggers_malformed;
	uint64_t triggers_unattached;
	uint64_t triggers_unrecorded;
	uint64_t triggers_lost;
};

struct bs_thread {
	struct bs_attachment *attachment; /* NULL: joined none yet */
	uint64_t epoch;			  /* the attachment's */
	struct bs_thread_area *area;	  /* NULL: no slot */
	struct bs_thread_slot *slot;

	/* The segment: its first free byte, while no run is open, and the last
	 * entry of its directory. In between there is room. */
	unsigned char *cursor;
	unsigned char *floor;
	struct bs_segment_header *segment; /* NULL: none */
	uint32_t runs;			   /* in the directory */

	/* The run. While it is open, its position is in bs_writer if it belongs
	 * to the thread's own trace, else in `writer`: bs_tracepoint writes to
	 * wherever bs_writer is. */
	uint8_t run_state; /* enum bs_run_state */
	bool run_is_own;   /* else whose, in the next two */
	uint32_t run_handle;
	struct bs_trace_id run_id;
	uint32_t run_seq;
	uint64_t run_entry; /* as in the directory; of a lost run the flags */
	struct bs_writer writer;
	uint64_t lost_bytes; /* payload, in this run */
	uint32_t loss_head;  /* our end of the ring */

	uint32_t next_handle;
	uint32_t slot_number;
	struct bs_trace own; /* the thread-local form's handle */
	bool own_open;

	struct bs_member *member; /* NULL: none */
	char node_ref[24];
};

/* Static TLS is scarce for libraries that are loaded late. */
_Static_assert(sizeof(struct bs_thread) + sizeof(struct bs_writer) <= 512,
	       "fits in what dlopen() can have");

extern __thread struct bs_thread bs_thread
	__attribute__((tls_model("initial-exec")));

/*
 * What others need of a thread. It is not in the thread's own memory, because
 * a thread can end without telling us: its destructors may trace after ours ran
 * for the last time. Whoever is missing then is found by bs_thread_reap().
 */
struct bs_member {
	/* Two words of the way of each run, park.c: where the thread stands in
	 * its segment, NULL while a run is open or about to be; and whether the
	 * attach thread is taking the segment, or has taken it. */
	const unsigned char *stands_at;
	bool is_called;

	struct bs_member *next, **link; /* of all; bs_lock */
	pid_t tid;
	struct bs_attachment *attachment; /* bs_lock */
	uint32_t slot_number;		  /* BS_THREAD_SLOTS: none; bs_lock */
	struct bs_counters counters;
	/* What the thread does, written by it alone: the trigger queue that it
	 * is inside of; its segment, and whether it is about to take one. */
	const struct bs_context_segment *pushing;
	struct bs_segment_header *segment;
	bool is_taking;
	const unsigned char *stood_at; /* at the last tick; the attach thread's */
} __attribute__((aligned(BS_CACHE_LINE)));

extern struct bs_member *bs_members; /* bs_lock */
extern struct bs_counters bs_strays; /* of threads that are no members */

/* Join bs_process.current, leaving what the thread was in. */
void bs_thread_move(struct bs_thread *t);
/* Leave, and join none. */
void bs_thread_leave(struct bs_thread *t);
/* Take a slot if one is free. */
bool bs_thread_claim(struct bs_thread *t);
/* Members whose thread is gone leave; each time some are looked at. bs_lock held. */
void bs_thread_reap(void);
/* All are looked at; bs_lock is given up meanwhile. */
void bs_thread_reap_all(void);
/* After fork(), in the child. */
void bs_members_forget(void);

static inline void bs_thread_enter(struct bs_thread *t)
{
	if (unlikely(t->attachment != READ_ONCE(bs_process.current)) ||
	    bs_process_is_new())
		bs_thread_move(t);
}

static inline bool bs_thread_has_slot(struct bs_thread *t)
{
	if (likely(t->area != NULL))
		return true;
	return READ_ONCE(t->attachment->slots_free) && bs_thread_claim(t);
}

/* A number for a new handle of a thread with a slot; 0 is none. */
static inline uint32_t bs_thread_draw_own_handle(struct bs_thread *t)
{
	uint32_t handle;

	do {
		handle = t->slot_number << BS_HANDLE_COUNT_BITS |
			 (t->next_handle++ & BS_HANDLE_COUNT_MASK);
	} while (unlikely(!handle));
	return handle;
}

uint64_t bs_hash_percentage(const struct bs_attachment *a,
			    struct bs_trace_id id);

static inline bool bs_thread_records_all(const struct bs_thread *t)
{
	return READ_ONCE(t->attachment->policy->percentage_threshold) ==
	       BS_PERCENTAGE_ALL;
}

/* 0, or BS_TRACE_UNRECORDED. */
static inline uint32_t bs_thread_recorded(const struct bs_thread *t,
					  struct bs_trace_id id)
{
	const struct bs_attachment *a = t->attachment;
	uint64_t threshold = READ_ONCE(a->policy->percentage_threshold);

	if (likely(threshold == BS_PERCENTAGE_ALL) ||
	    bs_hash_percentage(a, id) < threshold)
		return 0;
	return BS_TRACE_UNRECORDED;
}

/* Add to a counter that others may read. */
#define BS_COUNT(counter, n) WRITE_ONCE((counter), (counter) + (n))

/* To one of the thread's. */
#define BS_COUNT_THREAD(t, counter, n)                                         \
	do {                                                                   \
		if (likely((t)->member != NULL))                               \
			BS_COUNT((t)->member->counters.counter, n);            \
		else                                                           \
			fetch_add(&bs_strays.counter, n);                      \
	} while (0)

/* ----------------------------------------------------------- replace --- */

/* The daemon sent another one, which takes the place of the one in use. bs_lock
 * held. NULL, or why not. */
const char *bs_policy_replace(struct bs_attachment *a, int fd);
const char *bs_context_replace(struct bs_attachment *a, int fd,
			       struct bs_context_segment **old_queue);
/* The queue to fire into, which stays mapped until the thread leaves it; NULL: none. */
struct bs_context_segment *bs_queue_enter(const struct bs_thread *t);
void bs_queue_leave(const struct bs_thread *t);
/* Has who looks from outside look for threads anew. bs_lock held. */
static inline void bs_slots_taken(struct bs_context_segment *c)
{
	uint32_t taken = c->slots_taken + 1;

	store_release(&c->slots_taken, taken ? taken : 1);
}

/* Wait until nobody fires into it; bs_lock is given up meanwhile. False: somebody does
 * for too long, and it stays. */
bool bs_queue_unmap(struct bs_context_segment *queue);

/* -------------------------------------------------------------- park --- */

/* For the attach thread: first, and at each tick, bs_lock held. Returns whether
 * threads wrote since the tick before. */
void bs_park_start(void);
bool bs_park_idle(void);

/* Its thread has left it: another may go on at the cursor, or none does. bs_lock
 * held, but by a thread that seals its own. */
void bs_segment_park(struct bs_attachment *a, struct bs_segment_header *segment,
		     const unsigned char *cursor);
void bs_segment_seal(struct bs_attachment *a,
		     struct bs_segment_header *segment);

/* Go on in a parked one with room for a run of so many bytes. Only if it may wait,
 * it waits for bs_lock. */
bool bs_parked_take(struct bs_thread *t, size_t bytes, bool may_wait);

/* The thread was called: look whether it has its segment still. */
void bs_thread_answer(struct bs_thread *t);
/* bs_lock held. */
void bs_thread_answer_locked(struct bs_thread *t);

/* ----------------------------------------------------------- handles --- */

uint32_t bs_handle_draw(struct bs_thread *t);
/* And list it as open, where there is a place. */
uint32_t bs_handle_draw_listed(struct bs_thread *t);
void bs_handle_unlist(const struct bs_attachment *a, uint32_t handle);

/* -------------------------------------------------------------- show --- */

/* The thread has a slot: show its own trace there, or nothing. */
void bs_show_own(struct bs_thread *t);
/* The handle is closed: it is shown nowhere. */
void bs_show_no_more(struct bs_thread *t, const struct bs_trace *trace);

/* ------------------------------------------------------------ attach --- */

/* Start the attach thread unless it runs, or must not. bs_lock held. */
void bs_attach_start(void);
/* After fork(), in the child: there is no such thread. */
void bs_attach_forget(void);
/* How often attached so far. bs_lock held. */
uint64_t bs_attach_count(void);

/* ------------------------------------------------------------- other --- */

void bs_doorbell_ring(struct bs_attachment *a);

/* Names of triggers, and node names in contexts: [a-z0-9_.-], 1 to 31. */
bool bs_trigger_name_is_valid(const char *name, size_t bytes);

/* What fired for a trace in this process, or came with it, newest last. */
#define BS_FIRED_NAMES 2
struct bs_fired {
	char names[BS_FIRED_NAMES][BS_TRIGGER_NAME_MAX + 1];
};
bool bs_fired_get(struct bs_trace_id id, struct bs_fired *fired);
void bs_fired_forget(void);

int bs_trigger_push(struct bs_trace_id id, enum bs_trigger_source source,
		    const char *name, size_t name_bytes, const char *why,
		    const struct bs_trace_id *laterals, size_t n_laterals);

/* Length of the longest prefix of at most max bytes that does not end inside
 * a UTF-8 sequence. */
size_t bs_utf8_cut(const char *text, size_t bytes, size_t max);

/* Folded: what has no owner any more. bs_lock. */
void bs_stats_fold_attachment(const struct bs_attachment *a);
void bs_stats_fold_member(const struct bs_member *m);
void bs_stats_forget(void);

static inline bool bs_trace_id_is_zero(struct bs_trace_id id)
{
	return !(id.hi | id.lo);
}

static inline bool bs_trace_id_equal(struct bs_trace_id a, struct bs_trace_id b)
{
	return a.hi == b.hi && a.lo == b.lo;
}

#endif
