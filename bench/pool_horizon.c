/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a full pool holds.
 *
 *   pool_horizon POOL TRACE_BYTES SAMPLES SECONDS
 *
 * A pool of POOL bytes is filled with traces of TRACE_BYTES (full_pool.h), as if
 * as many bytes of payload as it has took SECONDS; 0: as long as they did.
 * Prints one line of JSON: how many traces can be had back whole, by SAMPLES of
 * them, and how many were written.
 */
#include "full_pool.h"

int main(int argc, char **argv)
{
	struct full_pool p;

	if (argc != 5)
		die("usage: pool_horizon POOL TRACE_BYTES SAMPLES SECONDS");
	p = full_pool_of(argv[1], argv[2]);
	p.fill_ns = number(argv[4]) * SECOND_NS;
	full_pool_fill(&p);
	printf("{\"traces_held\": %.1f, \"traces_written\": %" PRIu64 "}\n",
	       full_pool_count_held(&p, number(argv[3])), p.traces);
	full_pool_free(&p);
	return 0;
}
