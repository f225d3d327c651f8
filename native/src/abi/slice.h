/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A slice is what one node holds of one trace, as bytes that can be sent,
 * resumed at any offset and decoded anywhere: a sequence of pieces, each a
 * header and `bytes` of content, appended in the order in which the node
 * copied them out of the log. The pieces of a run that grew while it was
 * copied share (client, handle, seq) and differ in `from`. What stands in a
 * slice twice is the same twice.
 */
#ifndef BS_ABI_SLICE_H
#define BS_ABI_SLICE_H

#include "abi/types.h"

enum bs_piece_kind {
	BS_PIECE_RUN = 1,     /* whole records of a run */
	BS_PIECE_CLOCK = 2,   /* struct bs_clock_pair: for records near to it */
	BS_PIECE_PROCESS = 3, /* struct bs_piece_process of `client` */
	BS_PIECE_LOSS = 4,    /* no content: records of this client's part of
			       * the trace were dropped */
	BS_PIECE_EXIT = 5,    /* no content: the process is gone; what it had
			       * open stays unfinished */
};

struct bs_piece_header {
	uint32_t bytes; /* of content; a multiple of 4 */
	uint16_t kind;
	uint16_t flags;	 /* BS_RUN_* of the run so far */
	uint32_t client; /* a process's number on its node */
	uint32_t handle;
	uint32_t seq;
	uint32_t from; /* offset of the content in its run */
};

struct bs_clock_pair {
	uint64_t ticks;
	uint64_t realtime_ns; /* Unix time at `ticks` */
	uint64_t ticks_per_s;
};

struct bs_piece_process {
	uint32_t pid;
	uint32_t zero; /* the format of the client's records: 0, ABI 2's. Nobody
			* between it and the reader looks into them, so a node
			* that takes clients with another one says so here. */
	char service[64];
};

_Static_assert(sizeof(struct bs_piece_header) == 24, "ABI");
_Static_assert(sizeof(struct bs_clock_pair) == 24, "ABI");
_Static_assert(sizeof(struct bs_piece_process) == 72, "ABI");

#endif
