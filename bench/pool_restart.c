/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it takes a node to go on with a full pool.
 *
 *   pool_restart POOL TRACE_BYTES TIMES
 *
 * TIMES times, a node that holds a pool of POOL bytes full of traces of
 * TRACE_BYTES (full_pool.h) is gone, and a successor comes. Prints a line of JSON
 * each time: CPU time of all threads of this process until all is adopted, and
 * of the first poll, in ns.
 */
#include "full_pool.h"

/* The node is gone as by a kill, and its successor goes on with its memory. */
static void restart_once(struct full_pool *p)
{
	int store = dup(bsn_store_fd(p->node));
	int keep = dup(bsn_keep_fd(p->node));
	uint64_t begun_ns, adopted_ns, polled_ns;

	if (store < 0 || keep < 0)
		die("no file descriptors");
	bsn_free(p->node);
	begun_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	full_pool_new_node(p);
	full_pool_pair_clocks(p, now_ns(p));
	if (bsn_adopt_keep(p->node, now_ns(p), keep) ||
	    bsn_adopt_store(p->node, now_ns(p), store) ||
	    bsn_client_adopt(p->node, p->client, p->writer, "pool", now_ns(p),
			     &p->fds) != p->client)
		die("the successor does not adopt what was there");
	adopted_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	if (bsn_poll(p->node, now_ns(p)) < 0)
		die("a poll failed");
	polled_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	close(store);
	close(keep);
	printf("{\"adopt_ns\": %" PRIu64 ", \"first_poll_ns\": %" PRIu64 "}\n",
	       adopted_ns - begun_ns, polled_ns - adopted_ns);
}

static void restart(struct full_pool *p, uint64_t times)
{
	full_pool_fill(p);
	for (uint64_t i = 0; i < times; i++)
		restart_once(p);
	if (!full_pool_holds(p, p->traces))
		die("the successor does not hold the youngest trace");
}

int main(int argc, char **argv)
{
	struct full_pool p;

	if (argc != 4)
		die("usage: pool_restart POOL TRACE_BYTES TIMES");
	p = full_pool_of(argv[1], argv[2]);
	restart(&p, number(argv[3]));
	full_pool_free(&p);
	return 0;
}
