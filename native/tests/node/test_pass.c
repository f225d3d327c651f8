/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a pass: what is to be seen to at one moment, and may be much. */
/* For what is static there. */
#include "node/pass.c" /* NOLINT(bugprone-suspicious-include) */

#include "writer.h"

enum {
	SEGMENTS = 220,
	ENTRIES = 100
};

static const struct bs_trace_id wanted = {1, 2};

/* By as many threads of one process, each of which writes of the trace. */
static void enter(struct bsn *n, struct writer *w)
{
	uint64_t end = UINT64_MAX;

	for (uint32_t i = 0; i < SEGMENTS; i++) {
		struct wthread t = writer_thread(w, i);

		CHECK(w_take_segment(&t));
		CHECK(w_trace(&t, wanted, 0, START));
		for (uint32_t k = 1; k < ENTRIES; k++)
			CHECK(w_trace(&t, trace_id(k), 0, START));
	}
	CHECK(threads_observe(n, n->clients.all[0], &end));
}

static uint32_t count_visited(const struct bsn *n, const struct pass *p)
{
	uint32_t count = 0;

	for (uint32_t i = n->clients.all[0]->active.head; i != NONE;
	     i = frame_at(n, i)->next_own)
		count += is_visited(p, i);
	return count;
}

/* After the pass was through their process. */
static void what_threads_entered_since_is_visited_in_pieces(void)
{
	const uint32_t most = PIECE_ENTRIES / ENTRIES;
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	uint32_t before, now = 0, pieces = 1, cost = 0;
	struct search *searches;
	struct slice *slice;
	struct writer w;
	struct pass p;

	writer_attach(&w, n, START);
	bsn_poll(n, START);
	node_lock(n);
	slice = slice_new(n, wanted, wanted, "test");
	CHECK(slice);
	search_later(n, slice);
	searches = n->searches;
	n->searches = NULL;
	CHECK_EQ(pass_begin(n, &p, searches, 1), 0);
	p.sealed = n->ledger.header->sealed;
	p.entered = n->pool.entered;
	enter(n, &w);
	for (before = 0; !visit_active_since(n, &p, &cost); before = now) {
		now = count_visited(n, &p);
		CHECK(now > before && now - before <= most);
		cost = 0;
		pieces++;
	}
	CHECK(pieces > 1);
	CHECK_EQ(count_visited(n, &p), SEGMENTS);
	CHECK_EQ(searches->met.n, SEGMENTS);
	pass_end(n, &p);
	search_judge_all(n, searches, false);
	pass_free(&p);
	search_free(n, searches);
	free(searches);
	node_unlock(n);
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(what_threads_entered_since_is_visited_in_pieces);
	return 0;
}
