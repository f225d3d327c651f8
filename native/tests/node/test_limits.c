/* SPDX-License-Identifier: Apache-2.0 */
/* What one process can make the node do, and take from others: so much. */
#include <pthread.h>
#include <sched.h>

#include "writer.h"

static struct decoded d;

static uint32_t stop;

/* Every cell is committed again as soon as it was given back. */
static void *commit_for_ever(void *argument)
{
	struct bs_context_segment *x = argument;

	while (!READ_ONCE(stop)) {
		for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++) {
			uint32_t seq = READ_ONCE(x->cells[i].seq);

			if (seq % BS_TRIGGER_CELLS == i)
				store_release(&x->cells[i].seq, seq + 1);
		}
	}
	return NULL;
}

static void triggers_without_end(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics before, after;
	pthread_t liar;
	struct writer w;

	writer_attach(&w, n, START);
	CHECK_EQ(pthread_create(&liar, NULL, commit_for_ever, w.context), 0);
	bsn_get_metrics(n, &after);
	while (after.corrupt < 1000 * BS_TRIGGER_CELLS) {
		before = after;
		bsn_poll(n, START);
		bsn_get_metrics(n, &after);
		CHECK(after.corrupt - before.corrupt <= BS_TRIGGER_CELLS);
		if (after.corrupt == before.corrupt)
			sched_yield();
	}
	WRITE_ONCE(stop, 1);
	pthread_join(liar, NULL);
	writer_close(&w);
	bsn_free(n);
}

int main(void)
{
	RUN(triggers_without_end);
	free(d.bytes);
	return 0;
}
