/* SPDX-License-Identifier: Apache-2.0 */
#include "client.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct bs_policy nobodys_policy = {
	.percentage_threshold = BS_PERCENTAGE_ALL,
};

struct bs_attachment bs_nowhere = {
	.epoch = 1,
	.refs = 2, /* it stays when nobody is in it */
	.policy = &nobodys_policy,
};

struct bs_attachment *bs_attachments;
uint64_t bs_epoch = 1;
uint64_t bs_fork_epoch;

static const char *check_channel(const struct bs_attachment *a)
{
	const struct bs_channel_header *h = a->channel;
	size_t name_bytes = strnlen(h->node_name, sizeof(h->node_name));

	if (h->magic != BS_ABI_MAGIC || !bs_version_is_spoken(h->version))
		return "the channel has another version";
	if (h->arena_bytes != a->arena_bytes)
		return "the channel is of another arena";
	if (h->clock > BS_CLOCK_COUNTER ||
	    (h->clock == BS_CLOCK_COUNTER && !BS_HAS_CPU_COUNTER) ||
	    h->ticks_per_s == 0)
		return "the channel's clock makes no sense";
	if (name_bytes == 0 || name_bytes > BS_NODE_NAME_MAX ||
	    bs_fnv1a64(BS_FNV1A64_BASIS, h->node_name, name_bytes) !=
		    h->node_id)
		return "the node's id is not that of its name";
	return NULL;
}

static void use_clock(const struct bs_attachment *a)
{
	WRITE_ONCE(bs_process.clock_is_counter,
		   READ_ONCE(a->channel->clock) == BS_CLOCK_COUNTER);
}

static const char *map_all(struct bs_attachment *a, const int fds[BS_FDS])
{
	const char *reason = NULL;

	a->arena = bs_map_arena(fds[BS_FD_ARENA], a->arena_bytes, &reason);
	if (a->arena)
		a->channel_bytes = bs_map(fds[BS_FD_CHANNEL], BS_CHANNEL_BYTES,
					  true, &reason);
	if (!a->channel_bytes)
		return reason;
	a->channel = (struct bs_channel_header *)a->channel_bytes;
	a->grants = (struct bs_grant_ring *)(a->channel_bytes +
					     BS_CHANNEL_GRANTS_OFFSET);
	a->open_handles =
		(uint32_t *)(a->channel_bytes + BS_CHANNEL_HANDLES_OFFSET);
	reason = check_channel(a);
	if (reason)
		return reason;
	a->context = bs_context_map(fds[BS_FD_CONTEXT], &reason);
	if (a->context)
		a->queue = bs_context_map(fds[BS_FD_CONTEXT], &reason);
	if (a->queue)
		a->policy = bs_policy_map(fds[BS_FD_POLICY], &reason);
	return reason;
}

struct bs_attachment *bs_attachment_map(const struct bs_attach_reply *reply,
					const int fds[BS_FDS],
					const char **reason)
{
	struct bs_attachment *a;

	if (reply->arena_bytes == 0 ||
	    reply->arena_bytes % BS_SEGMENT_BYTES != 0 ||
	    reply->arena_bytes / BS_SEGMENT_BYTES >= BS_SEGMENT_NONE) {
		*reason = "the arena's size makes no sense";
		return NULL;
	}
	a = calloc(1, sizeof(*a));
	if (!a) {
		*reason = bs_no_room;
		return NULL;
	}
	a->refs = 1;
	a->slots_free = BS_THREAD_SLOTS;
	a->arena_bytes = reply->arena_bytes;
	a->segments = (uint32_t)(reply->arena_bytes / BS_SEGMENT_BYTES);
	memcpy(a->token, reply->token, sizeof(a->token));
	for (unsigned int i = 0; i < BS_THREAD_SLOTS; i++)
		a->slots[i].segment = BS_SEGMENT_NONE;
	*reason = map_all(a, fds);
	if (*reason) {
		bs_attachment_unmap(a);
		return NULL;
	}
	a->percentage_state = bs_hash_prepare(BS_HASH_PERCENTAGE,
					      sizeof(BS_HASH_PERCENTAGE) - 1,
					      a->channel->cluster_seed);
	a->node_id = a->channel->node_id;
	use_clock(a);
	return a;
}

const char *bs_attachment_resume(const struct bs_attachment *a)
{
	const char *reason = check_channel(a);

	if (!reason)
		use_clock(a);
	return reason;
}

uint64_t bs_hash_percentage(const struct bs_attachment *a,
			    struct bs_trace_id id)
{
	return bs_hash_trace(a->percentage_state, id);
}

struct bs_attachment *bs_attachment_publish(struct bs_attachment *a)
{
	struct bs_attachment *old = bs_process.current;

	a->epoch = ++bs_epoch;
	if (a == &bs_nowhere) {
		a->refs++;
	} else {
		a->next = bs_attachments;
		bs_attachments = a;
	}
	store_release(&bs_process.current, a);
	pthread_cond_broadcast(&bs_process.changed);
	return bs_attachment_put(old);
}

struct bs_attachment *bs_attachment_put(struct bs_attachment *a)
{
	struct bs_attachment **link = &bs_attachments;

	if (--a->refs)
		return NULL;
	while (*link != a)
		link = &(*link)->next;
	*link = a->next;
	bs_stats_fold_attachment(a);
	return a;
}

void bs_attachment_unmap(struct bs_attachment *a)
{
	int saved = errno;

	if (!a)
		return;
	if (!a->is_torn)
		bs_unmap(a->arena, a->arena_bytes);
	bs_unmap(a->channel_bytes, BS_CHANNEL_BYTES);
	bs_unmap(a->context, sizeof(*a->context));
	bs_unmap(a->queue, sizeof(*a->queue));
	bs_unmap(a->queue_before, sizeof(*a->queue_before));
	bs_unmap(a->policy, BS_POLICY_BYTES);
	free(a);
	errno = saved;
}
