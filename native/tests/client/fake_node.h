/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's side of abi.h, by hand: a test decides what is granted, when an
 * answer comes and what is wrong with it, and reads directories and rings as a
 * node would. One process's client at a time.
 */
#ifndef BS_FAKE_NODE_H
#define BS_FAKE_NODE_H

#include <stdbool.h>

#include "abi.h"
#include "barrier.h"
#include "hash.h"

#define FAKE_NODE_NAME "test-node"

struct fake_node {
	char directory[64];
	char path[96];
	int listener;
	int connection; /* -1: none */
	struct bs_attach_request request;
	uint64_t token; /* of the last attachment */
	uint32_t clock; /* enum bs_clock; of the next */

	/* The attachment; one that is replaced stays mapped by the client. */
	int fds[BS_FDS];
	uint32_t segments;
	unsigned char *arena;
	struct bs_channel_header *channel;
	struct bs_grant_ring *grants;
	uint32_t *open_handles;
	struct bs_thread_area *areas;
	struct bs_context_segment *context;
	struct bs_policy *policy;
	uint32_t generation; /* of the last grant */
	uint32_t trigger_tail;
	struct fake_place {
		uint32_t grant; /* by its position in the ring */
		uint32_t run;	/* of that segment */
		uint32_t end;	/* of the last run; 0: none */
	} read[BS_THREAD_SLOTS];
};

/* A run as the directory tells of it, and what stands there. */
struct fake_run {
	uint32_t segment;
	uint32_t offset;
	uint32_t flags;
	struct bs_trace_id id;
	uint32_t handle, seq;
	const uint32_t *word;
	const unsigned char *records;
};

/* Listen on a socket of its own, which BACKSIGHT_SOCKET names from now on. */
void fake_node_open(struct fake_node *n);
void fake_node_close(struct fake_node *n);

/* Make the four memfds of a new attachment, filled in as they should be. */
void fake_node_make(struct fake_node *n, uint32_t segments);

/* Wait for a client that is still there, and read its request. */
void fake_node_accept(struct fake_node *n);
void fake_node_fill_reply(const struct fake_node *n,
			  struct bs_attach_reply *reply);
void fake_node_send(struct fake_node *n, const void *bytes, size_t size,
		    const int *fds, int n_fds);
/* Wait until the client hangs up. */
void fake_node_wait_hangup(struct fake_node *n);
void fake_node_hang_up(struct fake_node *n);

/* All of it: a new attachment, with that many segments, of which so many are
 * granted. Returns when the client has it. */
void fake_node_attach(struct fake_node *n, uint32_t segments, uint32_t granted);

/* Grant a segment: a new generation. */
void fake_node_grant(struct fake_node *n, uint32_t segment, bool fresh);

/* The next closed run of a slot; false when there is none. */
bool fake_node_run(struct fake_node *n, uint32_t slot, struct fake_run *run);
/* The one after it, which is open; false when there is none. */
bool fake_node_open_run(struct fake_node *n, uint32_t slot,
			struct fake_run *run);
/* The next loss that a slot tells of; false when there is none. */
bool fake_node_loss(struct fake_node *n, uint32_t slot, struct bs_loss *loss);
/* The record at *offset, which moves on; NULL at the end. */
const struct bs_record_header *fake_run_record(const struct fake_run *run,
					       uint32_t *offset);
/* Bytes of records, so far. */
uint32_t fake_run_committed(const struct fake_run *run);
int fake_run_count(const struct fake_run *run);

/* Another context, as it should be, and its fd. */
struct bs_context_segment *fake_node_make_context(int *fd);
void fake_node_news(struct fake_node *n, enum bs_news_kind kind,
		    uint64_t number, int fd);
/* Whether the answer to that news has come. */
bool fake_node_answered(struct fake_node *n, uint64_t number);
/* From now on this context is the node's; the old one is the caller's. */
void fake_node_use_context(struct fake_node *n,
			   struct bs_context_segment *context, int fd);

/* The next trigger of a queue. */
bool fake_queue_trigger(struct bs_context_segment *queue, uint32_t *tail,
			struct bs_trigger_cell *cell);
/* The next trigger, copied; false when there is none. */
bool fake_node_trigger(struct fake_node *n, struct bs_trigger_cell *cell);

/* Places of the table of open handles that are taken. */
uint32_t fake_node_open_handles(const struct fake_node *n);

/* Slots that threads own. */
int fake_node_owned_slots(const struct fake_node *n);

#endif
