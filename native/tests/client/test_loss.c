/* SPDX-License-Identifier: Apache-2.0 */
/* No memory, no room to tell of it, nonsense from the node, and the doorbell. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){7, number};
}

static struct bs_stats stats(void)
{
	struct bs_stats s;

	bs_get_stats(&s);
	return s;
}

static void expect_run(uint64_t number, uint32_t flags, uint32_t bytes)
{
	struct fake_run run;

	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.id.lo, number);
	CHECK_EQ(run.flags, flags);
	CHECK_EQ(fake_run_committed(&run), bytes);
}

static struct bs_loss expect_loss(uint64_t number, uint32_t flags,
				  uint64_t bytes)
{
	struct bs_loss loss;

	CHECK(fake_node_loss(&node, 0, &loss));
	CHECK_EQ(loss.trace_hi, trace(number).hi);
	CHECK_EQ(loss.trace_lo, number);
	CHECK_EQ(loss.flags, flags);
	CHECK_EQ(loss.payload_bytes, bytes);
	return loss;
}

static void expect_no_loss(void)
{
	struct bs_loss loss;

	CHECK(!fake_node_loss(&node, 0, &loss));
}

/* Nothing was granted: everything is lost, counted and told. */
static void test_no_segment(void)
{
	struct bs_stats before = stats(), after;
	uint32_t own, other;
	struct bs_trace handle;
	struct fake_run run;

	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("12345", 5), -ENOSPC);
	CHECK_EQ(bs_tracepoint("12345", 5), -ENOSPC);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "123", 3), -ENOSPC);
	CHECK_EQ(bs_tracepoint("1", 1), -ENOSPC);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_close(&handle), 0);

	own = expect_loss(1, BS_RUN_FIRST, 0).handle;
	other = expect_loss(2, BS_RUN_FIRST, 0).handle;
	CHECK(own && other && own != other);
	CHECK_EQ(expect_loss(1, 0, 0).handle, own);
	CHECK_EQ(expect_loss(1, BS_RUN_LAST, 1).handle, own);
	CHECK_EQ(expect_loss(2, 0, 0).handle, other);
	CHECK_EQ(expect_loss(2, BS_RUN_LAST, 0).handle, other);
	expect_no_loss();
	CHECK(!fake_node_run(&node, 0, &run));
	after = stats();
	CHECK_EQ(after.runs - before.runs, 0);
	CHECK_EQ(after.runs_lost - before.runs_lost, 4);
	CHECK_EQ(after.records_lost - before.records_lost, 4);
	CHECK_EQ(after.payload_bytes_lost - before.payload_bytes_lost, 14);
	CHECK_EQ(node.areas[0].runs_lost, after.runs_lost);
	CHECK_EQ(node.areas[0].records_lost, after.records_lost);
	CHECK_EQ(node.areas[0].payload_bytes_lost, after.payload_bytes_lost);
}

/* Whoever loses may be killed before the handle is closed. */
static void test_told_at_once(void)
{
	static char oversized[BS_PAYLOAD_MAX + 1];
	uint32_t losses = node.grants->losses, handle;
	struct bs_trace trace_2;

	CHECK_EQ(bs_begin(trace(1)), 0);
	expect_no_loss();
	CHECK_EQ(bs_tracepoint("12345", 5), -ENOSPC);
	handle = expect_loss(1, BS_RUN_FIRST, 0).handle;
	CHECK_EQ(node.grants->losses, losses + 1);
	CHECK_EQ(bs_tracepoint("12345", 5), -ENOSPC);
	CHECK_EQ(bs_tracepoint(oversized, sizeof(oversized)), -EMSGSIZE);
	expect_no_loss();
	CHECK_EQ(bs_open(&trace_2, trace(2)), 0);
	/* No run is open that says so. */
	CHECK_EQ(bs_write(&trace_2, BS_RECORD_DATA, oversized,
			  sizeof(oversized)),
		 -EMSGSIZE);
	CHECK(expect_loss(2, 0, 0).handle != handle);
	CHECK_EQ(node.grants->losses, losses + 2);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(expect_loss(1, BS_RUN_LAST, 10).handle, handle);
	CHECK_EQ(bs_close(&trace_2), 0);
	expect_loss(2, BS_RUN_FIRST, 0);
	expect_loss(2, BS_RUN_LAST, 0);
	expect_no_loss();
	CHECK_EQ(node.grants->losses, losses + 5);
}

/* A trace that lost its beginning goes on where memory becomes available, and
 * is known to be lossy; one that runs out in the middle likewise. */
static void test_memory_comes_and_goes(void)
{
	static char payload[BS_PAYLOAD_MAX];
	struct fake_run run;

	CHECK_EQ(bs_begin(trace(3)), 0);
	CHECK_EQ(bs_tracepoint("1", 1), -ENOSPC);
	fake_node_grant(&node, 0, false);
	CHECK_EQ(bs_tracepoint("2", 1), 0);
	CHECK_EQ(bs_end(), 0);
	expect_loss(3, BS_RUN_FIRST, 0);
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.flags, BS_RUN_LAST | BS_RUN_LOSSY);
	CHECK_EQ(run.seq, 1);

	CHECK_EQ(bs_begin(trace(4)), 0);
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), -ENOSPC);
	/* What still fits is kept. */
	CHECK_EQ(bs_tracepoint("3", 1), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(4, BS_RUN_FIRST, sizeof(payload) + 12);
	expect_loss(4, 0, 0);
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.flags, BS_RUN_LAST | BS_RUN_LOSSY);
	CHECK_EQ(run.seq, 2);

	/* The next trace has nothing to do with it. */
	CHECK_EQ(bs_begin(trace(5)), 0);
	CHECK_EQ(bs_tracepoint("4", 1), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(5, BS_RUN_FIRST | BS_RUN_LAST, 16);
}

/* Of each the beginning and the end. */
#define TRACES_TOLD (BS_LOSS_RING_ENTRIES / 2)

static void lose(uint64_t number)
{
	CHECK_EQ(bs_begin(trace(number)), 0);
	CHECK_EQ(bs_tracepoint("0123456789", 10), -ENOSPC);
	CHECK_EQ(bs_end(), 0);
}

static void expect_lost(uint64_t number)
{
	uint32_t handle = expect_loss(number, BS_RUN_FIRST, 0).handle;

	CHECK_EQ(expect_loss(number, BS_RUN_LAST, 10).handle, handle);
}

/* Where nobody reads the ring, what does not fit is counted. */
static void test_losses_untold(void)
{
	struct bs_thread_area *area = &node.areas[0];

	CHECK_EQ(bs_begin(trace(6)), 0);
	while (!bs_tracepoint("0123456789", 10))
		;
	CHECK_EQ(bs_end(), 0);
	expect_loss(6, 0, 0);
	expect_loss(6, BS_RUN_LAST, 10);
	for (uint32_t i = 0; i < TRACES_TOLD + 10; i++)
		lose(100 + i);
	CHECK_EQ(area->losses_untold, 2 * 10);
	for (uint32_t i = 0; i < TRACES_TOLD; i++)
		expect_lost(100 + i);
	expect_no_loss();
	lose(7);
	expect_lost(7);
	CHECK_EQ(area->losses_untold, 2 * 10);
}

/* Of a handle of whose beginning the ring tells, it tells of the end too. */
static void test_last_place_is_for_the_end(void)
{
	struct bs_thread_area *area = &node.areas[0];
	uint32_t untold = area->losses_untold;
	struct bs_trace open;

	CHECK_EQ(bs_open(&open, trace(8)), 0);
	CHECK_EQ(bs_write(&open, BS_RECORD_DATA, "", 0), -ENOSPC);
	for (uint32_t i = 0; i < TRACES_TOLD - 1; i++)
		lose(100 + i);
	/* One place is left. */
	lose(9);
	CHECK_EQ(area->losses_untold, untold + 1);
	expect_loss(8, BS_RUN_FIRST, 0);
	for (uint32_t i = 0; i < TRACES_TOLD - 1; i++)
		expect_lost(100 + i);
	expect_loss(9, BS_RUN_LAST, 10);
	expect_no_loss();
	CHECK_EQ(bs_close(&open), 0);
	expect_loss(8, 0, 0);
	expect_loss(8, BS_RUN_LAST, 0);
}

static void drop_runs(void)
{
	struct fake_run run;

	while (fake_node_run(&node, 0, &run))
		;
}

/* A trigger rings, if somebody sleeps; what is written does not, nor a loss. */
static void test_doorbell(void)
{
	struct bs_doorbell *bell = &node.channel->doorbell;
	uint32_t rung = bell->rung;

	CHECK_EQ(bs_trigger(trace(8), "t", NULL, NULL, 0), 0);
	CHECK_EQ(bell->rung, rung);
	store_release(&bell->sleeping, 1);
	lose(8);
	expect_lost(8);
	CHECK_EQ(bell->rung, rung);

	for (uint32_t i = 1; i < 10; i++)
		fake_node_grant(&node, i, true);
	CHECK_EQ(bs_begin(trace(8)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bell->rung, rung);
	for (uint32_t i = 0; i < 500; i++) {
		CHECK_EQ(bs_begin(trace(8)), 0);
		CHECK_EQ(bs_tracepoint("", 0), 0);
		CHECK_EQ(bs_end(), 0);
	}
	CHECK_EQ(bell->rung, rung);
	CHECK_EQ(bs_trigger(trace(8), "t", NULL, NULL, 0), 0);
	CHECK_EQ(bell->rung, rung + 1);
	store_release(&bell->sleeping, 0);
	drop_runs();
}

static void fill_segment(void)
{
	uint32_t tail = node.grants->tail;

	CHECK_EQ(bs_begin(trace(9)), 0);
	while (node.grants->tail == tail)
		CHECK_EQ(bs_tracepoint("0123456789", 10), 0);
	CHECK_EQ(bs_end(), 0);
}

static void test_doorbell_stock(void)
{
	struct bs_doorbell *bell = &node.channel->doorbell;
	uint32_t rung;

	while (node.grants->tail != node.grants->head)
		fill_segment();
	for (uint32_t i = 10; i < 26; i++)
		fake_node_grant(&node, i, true);
	store_release(&bell->sleeping, 1);
	rung = bell->rung;
	fill_segment();
	CHECK_EQ(bell->rung, rung);
	fill_segment(); /* an eighth is used */
	CHECK(bell->rung > rung);
	store_release(&bell->sleeping, 0);
	drop_runs();
}

static void grant_nonsense(uint32_t segment, uint32_t generation)
{
	struct bs_grant *g =
		&node.grants->entries[node.grants->head % BS_GRANT_RING_ENTRIES];

	g->segment = segment;
	g->generation = generation;
	store_release(&node.grants->head, node.grants->head + 1);
}

static void test_nonsense_is_not_taken(void)
{
	struct bs_grant_ring *grants = node.grants;
	uint32_t head;

	while (grants->tail != grants->head)
		fill_segment();
	drop_runs();
	grant_nonsense(node.segments, 1);
	grant_nonsense(node.segments | BS_GRANT_FRESH, 1);
	grant_nonsense(BS_SEGMENT_NONE, 1);
	grant_nonsense(20, 0);
	fake_node_grant(&node, 20, true);
	fill_segment();
	CHECK_EQ(node.areas[0].segment, 20);
	CHECK_EQ(grants->tail, grants->head);

	/* A head from elsewhere. */
	head = grants->head;
	store_release(&grants->head, head - 1);
	CHECK_EQ(bs_begin(trace(10)), 0);
	while (!bs_tracepoint("0123456789", 10))
		;
	store_release(&grants->head, head + BS_GRANT_RING_ENTRIES + 1);
	CHECK_EQ(bs_tracepoint("0123456789", 10), -ENOSPC);
	CHECK_EQ(bs_end(), 0);
	store_release(&grants->head, head);
}

int main(void)
{
	fake_node_open(&node);
	fake_node_attach(&node, 32, 0);
	RUN(test_no_segment);
	RUN(test_told_at_once);
	RUN(test_memory_comes_and_goes);
	RUN(test_losses_untold);
	RUN(test_last_place_is_for_the_end);
	RUN(test_doorbell);
	RUN(test_doorbell_stock);
	RUN(test_nonsense_is_not_taken);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
