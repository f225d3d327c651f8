/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The node's data plane: pool, search, eviction, report store.
 *
 * A library without sockets or clocks of its own: the caller brings the time
 * (CLOCK_MONOTONIC ns) and asks. Only bsn_wait() sleeps; for more than 127
 * clients it has threads that sleep, too, until bsn_free(). All functions
 * but bsn_wait() and bsn_wake() take the pool's lock inside, so the control
 * plane may call them from its own thread while a worker thread loops over
 * bsn_wait() and bsn_poll(). No function keeps a Python object or a pointer of
 * the caller's.
 *
 *      clients' arenas, channels, contexts  (abi.h)
 *                 |  bsn_poll: what is full, what was lost, grants, reclaim
 *                 |
 *                 |  a trigger: one pass over the directories for all traces
 *                 v  that wait; bsn_poll: what they write later
 *      report store: trace -> slice (a byte string in 2 KiB blocks)
 *                 |  bsn_slice_read / _trim / _release
 *                 v
 *      the control plane
 *
 * No index. The node does nothing for a trace that is not triggered; its work
 * is per segment. What a trace wrote is found when somebody asks for it, in
 * the directories that the writers keep (abi/arena.h). One pass serves all that
 * wait, and passes keep to a quarter of a core: after one that was long, traces
 * wait a while for the next (search.c).
 *
 * Eviction. The pool is a budget of segments over all arenas. Above
 * reclaim_percent of it the segment that was sealed first is reclaimed; those of
 * users who are within their share go last (tenant.c). Runs
 * of handles that are still open are copied forward into the keep arena (in
 * the ledger, of the same budget, at most a quarter of it). All other runs
 * leave the fingerprint of their trace behind (`tombstones`). Whether a trace
 * is whole is judged when it is collected: a fingerprint that was left behind,
 * a handle without its first run or with a gap in the numbers of its runs
 * makes it BSN_SLICE_EVICTED, also after a restart: the ledger stays.
 *
 * Report store. A memfd of its own of store_bytes, in blocks that describe
 * themselves (trace, primary, trigger, number in the slice, bytes), so that a
 * new daemon finds every unreported slice in it. Full: the copy stops, the
 * slice is marked BSN_SLICE_STORE_FULL and BSN_EVENT_STORE_FULL is raised; the
 * control plane keeps it from coming to that by abandoning in time.
 *
 * Epochs. A trace that is collected, released and collected again has another
 * slice, and so has one whose store was lost; their bytes must not be taken for
 * each other's. So each collection gets a number of 1 to 2^63 - 1, which the
 * store keeps with the slice: a random one to begin with, when the store is
 * made, and one more each time. A time would not do: CLOCK_MONOTONIC begins
 * anew with each boot, and two collections may fall into one instant.
 */
#ifndef BACKSIGHT_NODE_H
#define BACKSIGHT_NODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backsight.h"

#define BSN_EXPORT __attribute__((visibility("default")))

struct bsn;

struct bsn_config {
	char node_name[BS_NODE_NAME_MAX + 1];
	uint64_t pool_bytes;	  /* all arenas together; >= 4 MiB */
	uint64_t arena_bytes;	  /* of one process, virtual; <= pool */
	uint64_t store_bytes;	  /* report store; >= 1 MiB */
	uint64_t trace_bytes_max; /* of a slice; more is `truncated` */
	uint64_t cluster_seed;
	uint64_t percentage_threshold; /* abi/policy.h */
	uint32_t reclaim_percent;      /* of the pool; 98. Some segments are
					* left free in any case */
	uint32_t clients_max;
	uint32_t tombstones; /* traces that lost something, to be remembered,
			      * some 6 bytes each; 0: from pool */
	bool trust_incoming;
	bool clock_is_counter;
	uint64_t ticks_per_s;
	/* bsn_thread_cpu_ns(): by it searches keep to their share of a core.
	 * NULL: they do not wait. */
	uint64_t (*thread_cpu_ns)(void);
};

/* Why a trace is not, or not whole, on this node. */
enum bsn_slice_flags {
	BSN_SLICE_HELD = 0x01,	      /* something is or was in the store */
	BSN_SLICE_EVICTED = 0x02,     /* lost to eviction, wholly or in part */
	BSN_SLICE_LOSSY = 0x04,	      /* records were dropped when written */
	BSN_SLICE_TRUNCATED = 0x08,   /* more than trace_bytes_max */
	BSN_SLICE_ABANDONED = 0x10,   /* given up under overload */
	BSN_SLICE_STORE_FULL = 0x20,  /* no room to copy it */
	BSN_SLICE_MAYBE_LOSSY = 0x40, /* a loss nearby could not be tied to
				       * its trace; or not all that may be of
				       * this one was looked at, or recorded:
				       * the percentage changed */
	BSN_SLICE_CORRUPT = 0x80,     /* a directory or a record of it made no
				       * sense */
	BSN_SLICE_CRUMBS_CUT = 0x100, /* more than BSN_CRUMBS_MAX */
	BSN_SLICE_SEARCHING = 0x200,  /* what is held of it is not known yet;
				       * BSN_EVENT_SLICE_CHANGED when it is */
	BSN_SLICE_BY_FINGERPRINT = 0x400, /* with EVICTED: only a fingerprint
					   * says so, which is another trace's
					   * once in millions (gone.c) */
};

/* Distinct nodes that one trace's slice on one node may name: generous for a
 * fan-out, small against ten thousand forged ones. */
#define BSN_CRUMBS_MAX 64

struct bsn_slice {
	struct bs_trace_id id;
	struct bs_trace_id primary; /* the group: trace that was triggered */
	char trigger[BS_TRIGGER_NAME_MAX + 1];
	uint64_t bytes;		/* appended so far, from the beginning */
	uint64_t trimmed_bytes; /* of these, freed again */
	uint64_t collected_ns;	/* when it was triggered here */
	uint64_t changed_ns;	/* when something was last appended */
	uint64_t epoch;		/* of this collection alone; see above */
	uint32_t open_handles;	/* of live processes */
	uint32_t flags;		/* enum bsn_slice_flags */
	uint32_t n_crumbs;
	uint64_t crumbs[BSN_CRUMBS_MAX]; /* node ids: where else to look */
};

enum bsn_event_kind {
	BSN_EVENT_TRIGGER = 1,	      /* a process fired one */
	BSN_EVENT_SLICE_CHANGED = 2,  /* bytes, crumbs, open_handles or flags of
				      * a collected slice, since bsn_collect()
				      * told them; coalesced */
	BSN_EVENT_CLIENT_DRAINED = 3, /* a dead client's last segment is gone */
	BSN_EVENT_STORE_FULL = 4,
};

struct bsn_event {
	uint32_t kind;
	uint32_t client;
	uint64_t time_ns; /* CLOCK_MONOTONIC, of the trigger */
	struct bs_trace_id id;
	char trigger[BS_TRIGGER_NAME_MAX + 1];
	/* Text; of the kernel, a struct bs_kernel_event as it came. */
	char why[BS_TRIGGER_WHY_MAX + 1];
	uint32_t source; /* enum bs_trigger_source */
	uint32_t n_laterals;
	struct bs_trace_id laterals[BS_LATERALS_MAX];
};

struct bsn_metrics {
	uint64_t pool_bytes;	  /* budget */
	uint64_t pool_used_bytes; /* granted: stock, active, sealed, kept */
	/* What is parked counts as sealed: it waits for reclaim. */
	uint64_t stock_bytes, active_bytes, sealed_bytes, keep_bytes;
	uint64_t store_bytes, store_used_bytes;
	/* What was written within this time is still there; 0: all is. */
	uint64_t horizon_ns;
	uint64_t reclaims; /* segments */
	uint64_t runs_lost, records_lost;
	uint64_t payload_bytes, payload_bytes_lost;
	uint64_t runs_evicted, second_chances;
	uint64_t gone,
		gone_forgotten;	   /* fingerprints: held; dropped for others */
	uint64_t searches, passes; /* traces looked for; passes for them */
	uint64_t entries_searched; /* of directories */
	uint64_t column_bytes;	   /* copies of sealed directories, for that */
	uint64_t entries_watched;  /* likewise, while there are slices */
	uint64_t false_hits;	   /* fingerprints of another trace */
	uint64_t corrupt;	   /* contradictions met in shared memory */
	uint64_t taken_back_bytes; /* memory of segments that were not granted */
	uint64_t triggers, triggers_lost, cells_skipped;
	uint64_t clients;
	uint64_t slices; /* in the store or marked */

	/* Of bsn_wait(), and of the threads behind it. */
	uint64_t wake_ups;
};

/* Of the report store: what is asked at every turn. */
struct bsn_usage {
	uint64_t store_bytes, store_used_bytes;
	uint64_t slices; /* in the store or marked */
};

/* ------------------------------------------------------------- life --- */

/* -EINVAL names the field in message (may be NULL). */
BSN_EXPORT int bsn_new(const struct bsn_config *config, struct bsn **node,
		       char *message, size_t message_bytes);
BSN_EXPORT void bsn_free(struct bsn *node);

/* The fds that outlive the daemon in the fd store, or are given back from it:
 * the report store and the ledger, of which the keep arena is a part.
 * bsn_adopt_* must come before the first client; -EPROTO when the content is
 * not ours. Without the ledger no client can be adopted. */
BSN_EXPORT int bsn_store_fd(struct bsn *node);
BSN_EXPORT int bsn_keep_fd(struct bsn *node);
BSN_EXPORT int bsn_adopt_store(struct bsn *node, uint64_t now_ns, int fd);
BSN_EXPORT int bsn_adopt_keep(struct bsn *node, uint64_t now_ns, int fd);

/* What ticks are: as struct bsn_config said, or a predecessor whose ledger was
 * adopted. Then the next reading should be stored at once. */
BSN_EXPORT void bsn_clock_source(struct bsn *node, bool *is_counter,
				 uint64_t *ticks_per_s);

/* One second apart at best: the relation of the three clocks. */
BSN_EXPORT int bsn_clock_pair(struct bsn *node, uint64_t ticks,
			      uint64_t monotonic_ns, uint64_t realtime_ns);

/* For bsn_clock_pair(): the three clocks, read together. counter: ticks are
 * those of the CPU's counter; else CLOCK_MONOTONIC ns. */
BSN_EXPORT void bsn_clock_read(bool counter, uint64_t *ticks,
			       uint64_t *monotonic_ns, uint64_t *realtime_ns);

/* CPU time of the calling thread. */
BSN_EXPORT uint64_t bsn_thread_cpu_ns(void);

/* ---------------------------------------------------------- clients --- */

struct bsn_client_fds {
	int arena, channel, context;
};

/* A new client: creates and seals its memfds (owned by the caller from here
 * on; the node keeps mappings, and a duplicate of the arena's), grants its first segments. Returns
 * the client's number (> 0), -ENOSPC over clients_max. */
BSN_EXPORT int bsn_client_add(struct bsn *node, int pid, const char *service,
			      uint64_t now_ns, struct bsn_client_fds *fds);

/* One from before a restart, with the number that it had. The number is the
 * caller's to keep, where the client cannot write. -EINVAL where it is none,
 * or another client's; -EPROTO after the first poll, or where nobody knows
 * what it was granted. */
BSN_EXPORT int bsn_client_adopt(struct bsn *node, int number, int pid,
				const char *service, uint64_t now_ns,
				const struct bsn_client_fds *fds);

/* What the attach agreed on (abi/attach.h), right after it was added or adopted:
 * before anybody is sent what was made, which is of the newest version until
 * then. Its shared memory says so, and what is made for it later. The caller
 * keeps it, as it does the number. -EPROTO: this node does not speak that, or
 * does not know these features. */
BSN_EXPORT int bsn_client_agreed(struct bsn *node, int client, uint32_t version,
				 uint64_t features);

/* Whose memory it is: a number of the caller's for a user, or a group. Once, and
 * right after it was added or adopted: until then it is nobody's, who has no
 * share of the pool. -EBUSY when it is somebody's already, or has written. */
BSN_EXPORT int bsn_client_tenant(struct bsn *node, int client, uint64_t tenant,
				 uint64_t now_ns);

/* The client's process wrote elsewhere before, to memory that is lost: a handle of each
 * trace that it writes to about now may have been there. Right after it was added. */
BSN_EXPORT int bsn_client_lost(struct bsn *node, int client, uint64_t now_ns);

/* So much of the pool nobody else can push out; tenants without a quota share in
 * what is left (tenant.c). */
BSN_EXPORT int bsn_tenant_quota(struct bsn *node, uint64_t tenant,
				uint64_t bytes);

/* What it holds. -ENOENT: it has no quota and no processes. */
BSN_EXPORT int bsn_tenant_bytes(struct bsn *node, uint64_t tenant,
				uint64_t *bytes);

/* Records that a client has lost since it attached, by its own word, as of the last
 * bsn_get_metrics(). 0: it is none, or gone. */
BSN_EXPORT uint64_t bsn_client_records_lost(struct bsn *node, int client);

/* The policy table, for all clients: read-only for whoever maps it. */
BSN_EXPORT int bsn_policy_fd(struct bsn *node);

/* Replace a client's context segment: by the one of fd (a BPF map, or a sealed
 * memfd, of bsn_context_bytes() that are zero), or by a new memfd (fd < 0).
 * Returns the new one's fd, which is the caller's to send to the client; -EBUSY
 * while an earlier one is not done with; -EINVAL for a segment of another size,
 * and for one that was used. Both queues are drained, until the client says that
 * it has moved and the caller says so here: -EAGAIN as long as triggers of the
 * old one are not seen to. */
BSN_EXPORT int bsn_client_context(struct bsn *node, int client, int fd);
BSN_EXPORT int bsn_client_context_done(struct bsn *node, int client,
				       uint64_t now_ns);
BSN_EXPORT uint64_t bsn_context_bytes(void);

/* A predecessor was not done with that one, when it had replaced it by the one
 * that the client was adopted with: drain both again. Right after adopting. */
BSN_EXPORT int bsn_client_adopt_context(struct bsn *node, int client, int fd);

/* Change what struct bsn_config said of these two: for clients that are attached,
 * from the next trace on that each of their threads begins, and for those to
 * come. Traces that were recorded when it was more can be triggered for another
 * five minutes. Of traces that one percentage has recorded, and the other not, some
 * handles may be missing: for five minutes they are BSN_SLICE_MAYBE_LOSSY, those that are
 * held too; then those that have something in a segment that was granted before. */
BSN_EXPORT void bsn_set_sampling(struct bsn *node,
				 uint64_t percentage_threshold,
				 bool trust_incoming);

/* Its process is gone (pidfd): what it had open is closed as unfinished; its
 * segments stay until they are reclaimed. */
BSN_EXPORT int bsn_client_exited(struct bsn *node, int client, uint64_t now_ns);

/* -------------------------------------------------------------- work --- */

/* See what is full and what was lost, look for traces that wait, copy what
 * belongs to collected ones, grant, reclaim. In pieces: others have the lock
 * in between. Returns the number of events that wait. */
BSN_EXPORT int bsn_poll(struct bsn *node, uint64_t now_ns);

/* Take up to n events. Returns how many. */
BSN_EXPORT int bsn_events(struct bsn *node, struct bsn_event *events, int n);

/* All events that were taken are seen to: collected, or refused. Until then
 * their triggers stand in their processes' queues too, where a successor finds
 * them if this daemon is killed, and where they take up room. */
BSN_EXPORT void bsn_events_done(struct bsn *node);

/* Sleep until a doorbell rings, bsn_wake() or the timeout. The protocol of
 * abi/channel.h is inside. Returns 1 for work, 0 for the timeout. Not under the lock. */
BSN_EXPORT int bsn_wait(struct bsn *node, int64_t timeout_ns);
BSN_EXPORT void bsn_wake(struct bsn *node);

/* ------------------------------------------------------------ slices --- */

/* A trigger reached this node: copy all that it holds of the trace, and
 * everything written later. Idempotent. The answer (also for a trace never
 * seen: flags without HELD) goes to *slice. In a large pool the next poll
 * looks for the trace, with all others that wait; until then the slice is
 * BSN_SLICE_SEARCHING. -ENOSPC when the mark itself has no room. */
BSN_EXPORT int bsn_collect(struct bsn *node, struct bs_trace_id id,
			   struct bs_trace_id primary, const char *trigger,
			   uint64_t now_ns, struct bsn_slice *slice);

/* What a slice is now. -ENOENT: not collected. */
BSN_EXPORT int bsn_slice_info(struct bsn *node, struct bs_trace_id id,
			      struct bsn_slice *slice);

/* Read from an offset. Returns bytes (0 at the end), -ENOENT, or -ESTALE for
 * an offset that was trimmed. */
BSN_EXPORT int64_t bsn_slice_read(struct bsn *node, struct bs_trace_id id,
				  uint64_t offset, void *buffer, size_t bytes);

/* The other side has made everything before offset durable: free it. The
 * trace stays triggered. */
BSN_EXPORT int bsn_slice_trim(struct bsn *node, struct bs_trace_id id,
			      uint64_t offset);

/* Forget it: memory and mark. A fingerprint says that it was reported, or
 * abandoned. */
BSN_EXPORT int bsn_slice_release(struct bsn *node, struct bs_trace_id id,
				 bool abandoned, uint64_t now_ns);

/* All slices, for recovery after a restart: fills up to n from *cursor (start
 * with 0), returns how many, 0 at the end. */
BSN_EXPORT int bsn_slices(struct bsn *node, uint64_t *cursor,
			  struct bsn_slice *slices, int n);

/* Look without triggering: the slice's bytes as they would be copied now.
 * Returns bytes written (cut at `bytes`), and the flags in *slice. For these
 * alone: no buffer, of 0 bytes. */
BSN_EXPORT int64_t bsn_peek(struct bsn *node, struct bs_trace_id id,
			    uint64_t now_ns, void *buffer, size_t bytes,
			    struct bsn_slice *slice);

/* Hash priorities (hash.h) by this seed instead of the cluster's, which clients can read. */
BSN_EXPORT void bsn_set_priority_seed(struct bsn *node, uint64_t seed);

/* Traces that are not and were not collected, to which a process of that service
 * (empty: any) wrote within the last age_ns, or that are open in one: the ids of at
 * most `room` of them, those of the highest priority (hash.h), highest first. Returns
 * how many, and in *found of about how many. It looks at the whole pool, piece by
 * piece under the lock: for a thread that may take its time. */
BSN_EXPORT int bsn_recent(struct bsn *node, uint64_t now_ns, uint64_t age_ns,
			  const char *service, struct bs_trace_id *ids,
			  int room, uint64_t *found);

/* The same, of these clients, which it sorts. */
BSN_EXPORT int bsn_recent_of(struct bsn *node, uint64_t now_ns, uint64_t age_ns,
			     uint32_t *clients, int n_clients,
			     struct bs_trace_id *ids, int room,
			     uint64_t *found);

/* Looks at every thread of every client: for who asks now and then. */
BSN_EXPORT void bsn_get_metrics(struct bsn *node, struct bsn_metrics *metrics);

/* In constant time. */
BSN_EXPORT void bsn_get_usage(struct bsn *node, struct bsn_usage *usage);

#endif
