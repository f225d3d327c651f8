/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) OR Apache-2.0 */
/*
 * What producers of the trigger queue do (context.h, where the protocol stands):
 * threads in C, probes in BPF C. The node, which consumes, is native/src/node/triggers.c.
 */
#ifndef BS_ABI_TRIGGER_QUEUE_H
#define BS_ABI_TRIGGER_QUEUE_H

#include "abi/context.h"
#include "barrier.h"

/*
 * A cell for this producer alone, to be filled and committed; NULL: none is free.
 * Each round that fails saw another producer succeed, or a queue whose numbers
 * make no sense. So `rounds` is more than there can be producers at once.
 */
static inline struct bs_trigger_cell *
bs_cell_claim(struct bs_context_segment *c, uint32_t rounds, uint32_t *position)
{
	uint32_t head = READ_ONCE(c->trigger_head);

	for (uint32_t round = 0; round < rounds; round++) {
		struct bs_trigger_cell *cell =
			&c->cells[head % BS_TRIGGER_CELLS];
		uint32_t seq = load_acquire(&cell->seq);

		if (seq == head) {
			if (compare_and_swap(&c->trigger_head, &head,
					     head + 1)) {
				*position = head;
				return cell;
			}
		} else if ((int32_t)(seq - head) < 0) {
			return 0;
		} else {
			head = READ_ONCE(c->trigger_head);
		}
	}
	return 0;
}

/* False: the node has skipped the cell, which stayed claimed for too long, and may
 * be somebody else's by now. The trigger is lost. */
static inline bool bs_cell_commit(struct bs_trigger_cell *cell,
				  uint32_t position)
{
	return compare_and_swap(&cell->seq, &position, position + 1);
}

#endif
