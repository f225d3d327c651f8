/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that is given back all at once, and stays where it is until then. */
#include <stdlib.h>
#include <string.h>

#include "spans.h"

#define BLOCK_BYTES ((size_t)8 << 10)

struct block {
	struct block *next;
	max_align_t bytes[];
};

void *arena_take(struct arena *a, size_t n)
{
	void *taken;

	n = (n + sizeof(uint64_t) - 1) & ~(sizeof(uint64_t) - 1);
	if (!a->blocks || n > (size_t)(a->end - a->at)) {
		size_t bytes = n > BLOCK_BYTES ? n : BLOCK_BYTES;
		struct block *block = malloc(sizeof(*block) + bytes);

		if (!block)
			return NULL;
		block->next = a->blocks;
		a->blocks = block;
		a->at = (uint8_t *)block->bytes;
		a->end = a->at + bytes;
	}
	taken = a->at;
	a->at += n;
	return taken;
}

void *arena_copy(struct arena *a, const void *from, size_t n)
{
	void *copy = arena_take(a, n);

	if (copy && n)
		memcpy(copy, from, n);
	return copy;
}

void arena_free(struct arena *a)
{
	while (a->blocks) {
		struct block *next = a->blocks->next;

		free(a->blocks);
		a->blocks = next;
	}
	a->at = a->end = NULL;
}
