/* SPDX-License-Identifier: Apache-2.0 */
/* What process.h has made, for the parties of a scenario. */
#ifndef BS_TEST_WEAK_SHARE_H
#define BS_TEST_WEAK_SHARE_H

#include "process.h"
#include "weak.h"
#include "writer.h"

#define NAME(word) weak_name(#word, &(word), sizeof(word))

static inline void share_attachment(void)
{
	weak_share("arena", attachment->arena, attachment->arena_bytes);
	weak_share("channel", attachment->channel_bytes, BS_CHANNEL_BYTES);
	weak_share("context", attachment->context,
		   sizeof(*attachment->context));
	weak_share("attachment", attachment, sizeof(*attachment));
}

/* With that many threads of the client, which are the first parties. */
static inline void share_process(uint32_t segments, uint32_t threads)
{
	struct bs_channel_header *header;
	struct bs_grant_ring *grants;

	process_start(segments);
	weak_private(&bs_thread, sizeof(bs_thread));
	weak_private(&bs_writer, sizeof(bs_writer));
	for (uint32_t i = 0; i < threads; i++)
		weak_as(i, process_join);

	header = attachment->channel;
	grants = attachment->grants;
	share_attachment();
	weak_share("bs_process", &bs_process, sizeof(bs_process));
	for (struct bs_member *m = bs_members; m; m = m->next)
		weak_share("member", m, sizeof(*m));
	NAME(header->doorbell.rung);
	NAME(header->doorbell.sleeping);
	NAME(grants->head);
	NAME(grants->tail);
	NAME(grants->losses);
	NAME(grants->entries);
	NAME(attachment->context->trigger_head);
	NAME(attachment->context->cells);
	NAME(bs_process.lock);
}

#define SCENARIO_MAIN(scenarios)                                               \
	int main(int argc, char **argv)                                        \
	{                                                                      \
		return weak_main(argc, argv, scenarios,                        \
				 sizeof(scenarios) / sizeof((scenarios)[0]));  \
	}

#endif
