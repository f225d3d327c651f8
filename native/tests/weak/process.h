/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node, and the client library attached to it, in one process and without the
 * socket in between: in place of attach.c and link.c. Linked with mapping.c both
 * sides have the same addresses.
 */
#ifndef BS_TEST_WEAK_PROCESS_H
#define BS_TEST_WEAK_PROCESS_H

#include "client.h"
#include "node.h"

#define START (1000ull * 1000000000ull)
/* Small, so that a pass over all of it is short. */
#define POOL_BYTES (4u << 20)

extern struct bsn *node;
extern int client_number;
extern struct bs_attachment *attachment;

/* segments: of the client's arena. A quarter is its stock. */
void process_start(uint32_t segments);
/* Another daemon comes, which knows nothing of the one before. The client moves to
 * it with process_publish(). */
void process_find_other_daemon(void);
void process_publish(void);
/* Another daemon takes over: all that it knows stands in memfds. */
void process_succeed(void);
/* The calling thread takes a slot. */
void process_join(void);
/* What the client says of itself to whoever asks. */
struct bs_trace_id trace_id(uint64_t i);

#endif
