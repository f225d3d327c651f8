/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The policy table: what the node wants of all its clients. One segment for
 * all of them, which only the node can write (F_SEAL_FUTURE_WRITE: a client
 * can map it for reading only).
 *
 * Two kinds of content. A word of its own is written with WRITE_ONCE, read
 * with READ_ONCE and orders nothing. What is of more than a word (rules and
 * probabilities by operation, in time) stands behind `rules_offset` and is
 * replaced as a whole: the node makes another table and sends it over the
 * attach socket (attach.h), so a reader needs no lock and never sees a half.
 * Tables have numbers; a higher one is newer.
 */
#ifndef BS_ABI_POLICY_H
#define BS_ABI_POLICY_H

#include "abi/types.h"

#define BS_POLICY_BYTES 4096u

/* Record all: no hash is compared with it. */
#define BS_PERCENTAGE_ALL UINT64_MAX

struct bs_policy {
	uint32_t magic;
	uint32_t version;
	uint32_t bytes;		 /* of the whole table */
	uint32_t trust_incoming; /* honour triggers that come with a request;
				  * read when one comes */
	uint64_t number;
	uint64_t percentage_threshold; /* record iff hash < this; read when a
					* handle is opened, which is recorded
					* as a whole or not at all */
	uint32_t rules_offset; /* 0: none. A reader skips what it does not
				* know */
	uint32_t rules;
	uint32_t rule_bytes; /* of one; may grow */
	uint32_t zero;
	uint64_t earlier_threshold; /* the highest of lately, also if less: what
				     * was recorded by it can be triggered
				     * still. 0: not said. Written before the
				     * one above is lowered, and stays when that
				     * is raised */
	uint64_t reserved;
};

_Static_assert(sizeof(struct bs_policy) == BS_CACHE_LINE, "ABI");

#endif
