/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of the data plane share. node.h says what it does.
 *
 *   node.c      life, configuration, the order of work in a poll
 *   collect.c   what others ask about a trace
 *   ledger.c    the node's own record of what it granted; outlives the daemon
 *   frame.c     one segment: what becomes of it, and the lists that it is in
 *   pool.c      the budget: which segment has memory, and who may write there
 *   grants.c    stocks: how many segments a process has in hand
 *   client.c    one process: its memfds, its mappings, its end
 *   adopt.c     processes and segments that a predecessor knew
 *   threads.c   which segments threads are in, or left
 *   losses.c    what they lost
 *   memfd.c     memory that has a file descriptor
 *   memory.c    what a process touched of its arena and was not granted
 *   triggers.c  the trigger queues
 *   search.c    traces that wait to be looked for, and when
 *   pass.c      through all directories once, for all of these
 *   wanted.c    what a pass looks for
 *   column.c    fingerprints of what is sealed, where searches read them
 *   parts.c     runs that were kept in parts, in their order
 *   met.c       the handles that a search met
 *   verdict.c   whether what it met was all
 *   watch.c     what traces write that are collected already
 *   runs.c      one run of one segment, read and checked
 *   evict.c     what happens to the runs of a segment that is reclaimed
 *   gone.c      fingerprints of traces that lost something
 *   tenant.c    quotas: whose segments go when memory is short
 *   keep.c      the keep arena: runs of open handles from reclaimed segments
 *   store.c     blocks and slices of the report store
 *   policy.c    the table of what the node wants of its clients
 *   mark.c      marks of slices: commit and recovery
 *   slice.c     copying runs into slices
 *   recent.c    what the pool holds of the last seconds
 *   clock.c     pairs of record ticks and Unix time
 *   read_clock.c  the clocks that they are of, read together
 *   wait.c      doorbells
 *   metrics.c   numbers
 *
 * Two kinds of memory meet here. What a client can write (its arena, channel,
 * context) is read once, with the vocabulary of barrier.h, and checked. What
 * only the node writes (everything in this header; the ledger; the keep arena;
 * the report store) is believed.
 */
#ifndef BSN_INTERNAL_H
#define BSN_INTERNAL_H

#include <pthread.h>

#include "clock.h"
#include "search.h"

/* A producer between claim and commit of a trigger cell runs a few instructions;
 * after this long it was killed there. */
#define CELL_STUCK_NS (100 * NS_PER_MS)

/* For how long a trace is written at most, as far as what is not known of it goes: what
 * a process lost, or left out, so long before or after what there is of a trace was
 * not of it. */
#define TRACE_NS (300 * NS_PER_S)

/* Triggers that wait for the control plane; more stay in the clients' queues,
 * which then fill and count. */
#define EVENTS_MAX 1024u

struct events {
	struct bsn_event *ring;
	uint32_t head, tail;
	uint32_t turn; /* client that is looked at first */
	/* A trigger was taken since the control plane was done with all. */
	bool unsettled;
};

struct waiting {
	uint32_t wake_word;  /* futex; counts bsn_wake() */
	uint32_t wakes_seen; /* by a bsn_wait() that returned */
	/* In some queue a cell is claimed and not committed, as of the latest
	 * poll or since. */
	bool cell_is_stuck;
	struct group *groups;
	uint32_t n_groups;
	uint64_t wake_ups; /* of all threads that sleep for the node */
	uint32_t in_vain; /* rings, one after the other, for which there was no work */
};

/* Frames that a predecessor granted, by client, until the first poll. */
struct adoption {
	uint32_t *frames;
	uint32_t count;
};

struct bsn {
	/* node_lock() takes both, so that who waits gets its turn between two
	 * pieces of a long work. */
	pthread_mutex_t gate, lock;
	struct bsn_config config;
	uint64_t priority_seed; /* bsn_set_priority_seed() */
	uint64_t node_id;
	uint64_t secret; /* odd: of tables with places by what others choose */
	uint64_t now_ns;

	struct ledger ledger;
	struct adoption adoption;
	struct pool pool;
	struct keep keep;
	struct clients clients;
	struct tenants tenants;
	struct store store;
	struct clock clock;
	struct events events;
	struct waiting waiting;
	struct pass *passes;	 /* that go on */
	struct search *searches; /* that wait for the next poll's pass */
	uint32_t n_searches;
	uint64_t searches_made; /* ever */
	uint64_t met_bytes;	/* of what they met (met.c) */
	bool searched_at_once;	/* since the latest poll */
	bool untied_news;	/* of some process */
	uint32_t telling;	/* slices of it, so many threads */
	bool losses_unsaved;	/* likewise */
	uint64_t passes_paid_ns; /* when their share of a core has paid for them */
	uint64_t cost;		 /* of what is done in pieces, in entries */
	struct bs_policy *policy;
	int policy_fd;

	uint8_t *scratch; /* one segment, private: a run while it is judged */
	/* The first poll was. Before it nothing is committed: what a predecessor
	 * saved and did not commit, of processes that are not adopted yet, would
	 * count from then on. */
	bool recovered;

	struct bsn_metrics counts; /* what only grows, of clients gone too */
};

void node_lock(struct bsn *n);
void node_unlock(struct bsn *n);
/* Between two pieces of work: let others have the lock. What was looked up or checked
 * before is not used after: processes, slices and segments may be gone, and what a
 * client can write says something else. */
void node_give_way(struct bsn *n);
/* Of work that changes slices: what a piece changed is committed with it, so that
 * no commit is of more than that. */
void node_commit_and_give_way(struct bsn *n);
/* So many clients are looked at in one. */
#define CLIENTS_A_PIECE 16u
/* Or so many entries of directories: 100 us at up to 5 ns. A line of memory that is in
 * no cache, or that a process wrote last, is as dear as some of them. */
#define PIECE_ENTRIES 20000u
#define LINE_ENTRIES 30u
/* Of what is copied: part of it to pages that are new, and in records of 12 bytes, which
 * are looked at one by one. */
#define BYTES_AN_ENTRY 4u
/* Time does not go back; the caller's clock may, over a suspend or a restored
 * machine. */
void node_set_time(struct bsn *n, uint64_t now_ns);
/* As in the first poll, if that was not yet. */
void node_recover(struct bsn *n);
/* What was written so far can be found. */
void node_catch_up(struct bsn *n, uint64_t now_ns);

static inline struct bs_thread_area *area_of(const struct client *c, uint32_t i)
{
	return (struct bs_thread_area *)(c->channel + BS_CHANNEL_AREAS_OFFSET) +
	       i;
}

static inline struct bs_channel_header *header_of(const struct client *c)
{
	return (struct bs_channel_header *)c->channel;
}

static inline struct bs_grant_ring *grants_of(const struct client *c)
{
	return (struct bs_grant_ring *)(c->channel + BS_CHANNEL_GRANTS_OFFSET);
}

static inline uint32_t frame_number(const struct bsn *n, const struct frame *f)
{
	return (uint32_t)(f - n->pool.frames);
}

static inline struct frame *frame_at(const struct bsn *n, uint32_t i)
{
	return &n->pool.frames[i];
}

static inline struct grant_record *record_of(const struct bsn *n,
					     const struct frame *f)
{
	return &n->ledger.records[frame_number(n, f)];
}

static inline uint64_t ns_since(const struct bsn *n, uint64_t then_ns)
{
	return n->now_ns > then_ns ? n->now_ns - then_ns : 0;
}

/*
 * All processes, live or not, from the last to the first: when one that is gone
 * leaves the array meanwhile, the last takes its place, which was seen already.
 */
static inline struct client *client_before(const struct bsn *n, uint32_t *i)
{
	while ((*i)-- > 0) {
		if (*i < n->clients.count)
			return n->clients.all[*i];
	}
	return NULL;
}

#define for_each_client(n, c)                                                  \
	for (uint32_t i_ = (n)->clients.count; ((c) = client_before(n, &i_));)

/* policy.c */
int policy_init(struct bsn *n);
void policy_free(struct bsn *n);
/* The ledger is a predecessor's: it says what that one had recorded. */
void policy_adopt(struct bsn *n);
/* At each poll: what was so for a while is so no more. */
void policy_renew(struct bsn *n);
/* Whether handles of a trace may have been left out, and others not. granted_ns: when
 * the oldest segment was granted that has something of it; UINT64_MAX: none. */
bool policy_left_out(const struct bsn *n, struct bs_trace_id id,
		     uint64_t granted_ns);

#endif
