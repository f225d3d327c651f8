/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The low half of each fingerprint of a sealed segment, for searches.
 *
 * Of what is sealed no entry comes or changes, and most of what a look there
 * costs is to reach it, in two pages of its own. So the first pass that meets it
 * copies the low half of each fingerprint, and those that follow read that.
 *
 * That memory is the node's own, beside the pool, so all columns together have a
 * 32nd of the pool's bytes: as much as the runs of a pool of traces of 100 bytes
 * take. Smaller ones are looked for in the directories of what was sealed last.
 */
#include <stdlib.h>

#include "internal.h"

#define COLUMNS_SHARE 32u

static uint64_t column_bytes(uint32_t runs)
{
	return (runs ? runs : 1) * sizeof(uint32_t);
}

bool column_make(struct bsn *n, struct frame *f)
{
	uint32_t runs = runs_count(f, record_of(n, f)->generation);
	uint32_t *column;

	if (n->pool.column_bytes + column_bytes(runs) >
	    n->config.pool_bytes / COLUMNS_SHARE)
		return false;
	column = malloc(column_bytes(runs));
	if (!column)
		return false;
	for (uint32_t k = 0; k < runs; k++)
		column[k] = (uint32_t)bs_entry_fingerprint(
			READ_ONCE(*bs_directory(f->bytes, k)));
	f->column = column;
	f->column_runs = runs;
	n->pool.column_bytes += column_bytes(runs);
	return true;
}

void column_drop(struct bsn *n, struct frame *f)
{
	if (!f->column)
		return;
	n->pool.column_bytes -= column_bytes(f->column_runs);
	free(f->column);
	f->column = NULL;
}
