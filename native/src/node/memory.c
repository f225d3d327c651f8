/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process can touch all of its arena, and its memory is nobody's budget if it
 * was not granted. Where there is more than that, all that is not granted is
 * given back to the system, in pieces.
 */
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

/* How often a process's memory is compared with its grants: a system call each. */
#define CHECK_NS NS_PER_S

/* Given back under one hold of the lock: 100 us at 3 us each. */
#define PIECE_SEGMENTS 32u

/* Of st_blocks. */
#define BLOCK 512u

static bool is_granted(const struct bsn *n, const struct client *c, uint32_t s)
{
	uint32_t i = c->segments[s].frame;

	return s < c->segments_fresh && i < n->pool.frames_room &&
	       n->pool.frames[i].client == c &&
	       n->ledger.records[i].segment == s;
}

bool memory_check(struct bsn *n, struct client *c)
{
	struct stat st;

	if (c->take_back != NONE ||
	    ns_since(n, c->memory_checked_ns) < CHECK_NS)
		return false;
	c->memory_checked_ns = n->now_ns;
	if (!fstat(c->arena_fd, &st) &&
	    (uint64_t)st.st_blocks * BLOCK > (uint64_t)c->frames * SEGMENT)
		c->take_back = 0;
	return true;
}

bool memory_take_back(struct bsn *n, struct client *c)
{
	for (uint32_t i = 0; i < PIECE_SEGMENTS && c->take_back != NONE; i++) {
		off_t at = lseek(c->arena_fd, (off_t)c->take_back * SEGMENT,
				 SEEK_DATA);
		uint32_t s = at < 0 ? c->n_segments : (uint32_t)(at / SEGMENT);

		c->take_back = s < c->n_segments ? s + 1 : NONE;
		if (s >= c->n_segments || is_granted(n, c, s) ||
		    madvise(c->arena + (uint64_t)s * SEGMENT, SEGMENT,
			    MADV_REMOVE))
			continue;
		n->counts.taken_back_bytes += SEGMENT;
	}
	return c->take_back != NONE;
}
