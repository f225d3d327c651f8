/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attaching: packets over the node's Unix socket (SOCK_SEQPACKET).
 *
 *   client  bs_attach_request
 *   node    bs_attach_reply + SCM_RIGHTS [arena, channel, context, policy]
 *
 * A hang-up means that the daemon went away; the client goes on writing into
 * what it has, connects again, and names its token. A daemon that got the
 * memfds back from the fd store answers `resumed` (no fds), and nothing
 * changes for the writers; any other daemon hands out a fresh attachment, to
 * which each thread moves at its next begin.
 *
 * Versions
 * --------
 *
 * Each side says the newest ABI that it speaks and the oldest. The older of
 * the two newest is spoken, if neither side is too young for it; else the node
 * refuses, with a sentence that says which side to update. Features are bits
 * that both must know: what both said is used. A packet may be longer than
 * its struct here: a newer peer has more to say, and what is not known is
 * ignored. Bytes beyond what an older peer sent count as 0.
 *
 * News
 * ----
 *
 * While attached, the node may send bs_attach_news, with one fd:
 *
 *   CONTEXT  use this context segment instead. Threads show themselves there
 *            and fire there from now on; once no thread is inside the old
 *            queue, the client answers with the same packet (no fd), and the
 *            node, which drains the old queue until then, lets go of it.
 *   POLICY   use this policy table instead. Not answered.
 *
 * News of a kind that the client does not know is ignored.
 */
#ifndef BS_ABI_ATTACH_H
#define BS_ABI_ATTACH_H

#include "abi/types.h"

struct bs_attach_request {
	uint32_t magic;
	uint32_t version; /* newest */
	uint32_t oldest;
	int32_t pid;
	uint64_t features;
	uint64_t token[2]; /* zero: a first attachment */
	char service[64];
};

struct bs_attach_reply {
	uint32_t magic;
	uint32_t version; /* that is spoken; of a refusal: the node's newest */
	int32_t status;	  /* 0, or a negative errno, with the reason below */
	uint32_t resumed;
	uint64_t token[2];
	uint64_t arena_bytes;
	char message[128];
	uint64_t features; /* of both */
};

enum bs_attach_fd {
	BS_FD_ARENA,
	BS_FD_CHANNEL,
	BS_FD_CONTEXT,
	BS_FD_POLICY,
	BS_FDS
};

enum bs_news_kind {
	BS_NEWS_CONTEXT = 1,
	BS_NEWS_POLICY = 2,
};

struct bs_attach_news {
	uint32_t magic;
	uint32_t kind;	 /* enum bs_news_kind */
	uint64_t number; /* of this context, and rises; POLICY: ignored */
};

/* None yet. */
#define BS_FEATURES 0ull

static inline int bs_version_is_spoken(uint32_t version)
{
	return version >= BS_ABI_OLDEST && version <= BS_ABI_VERSION;
}

_Static_assert(sizeof(struct bs_attach_request) == 104, "ABI");
_Static_assert(sizeof(struct bs_attach_reply) == 176, "ABI");
_Static_assert(__builtin_offsetof(struct bs_attach_reply, message) == 40,
	       "ABI: where version 1 reads it");
_Static_assert(sizeof(struct bs_attach_news) == 16, "ABI");

#endif
