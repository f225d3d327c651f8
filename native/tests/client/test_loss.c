/* SPDX-License-Identifier: Apache-2.0 */
/* No memory, no room for news, nonsense from the node, and the doorbell. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "fake_node.h"

#define QUARTER (BS_RUN_RING_ENTRIES / 4)

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

static void expect_run(uint64_t number, uint16_t flags, uint32_t bytes)
{
	struct fake_run run;

	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.entry.trace_lo, number);
	CHECK_EQ(run.entry.flags, flags);
	CHECK_EQ(run.entry.committed_bytes, bytes);
	CHECK(run.header);
}

static void expect_lost(uint64_t number, uint16_t flags, uint32_t bytes)
{
	struct fake_run run;

	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.entry.trace_lo, number);
	CHECK_EQ(run.entry.segment, BS_SEGMENT_NONE);
	CHECK_EQ(run.entry.flags, flags | BS_RUN_LOSSY);
	CHECK_EQ(run.entry.committed_bytes, bytes);
}

/* Nothing was granted: everything is lost, counted and announced. */
static void test_no_segment(void)
{
	struct bs_stats before = stats(), after;
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

	expect_lost(1, BS_RUN_FIRST, 10);
	expect_lost(2, BS_RUN_FIRST, 3);
	expect_lost(1, BS_RUN_LAST, 1);
	expect_lost(2, BS_RUN_LAST, 0);
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
	expect_lost(3, BS_RUN_FIRST, 1);
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.entry.flags, BS_RUN_LAST | BS_RUN_LOSSY);
	CHECK_EQ(run.header->seq, 1);

	CHECK_EQ(bs_begin(trace(4)), 0);
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), -ENOSPC);
	/* What still fits is kept. */
	CHECK_EQ(bs_tracepoint("3", 1), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(4, BS_RUN_FIRST, sizeof(payload) + 16);
	expect_lost(4, 0, sizeof(payload));
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.entry.flags, BS_RUN_LAST | BS_RUN_LOSSY);
	CHECK_EQ(run.header->seq, 2);

	/* The next trace has nothing to do with it. */
	CHECK_EQ(bs_begin(trace(5)), 0);
	CHECK_EQ(bs_tracepoint("4", 1), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(5, BS_RUN_FIRST | BS_RUN_LAST, 24);
}

/* The node is away: the log has what the ring does not. */
static void test_ring_full(void)
{
	struct bs_thread_area *area = &node.areas[0];
	uint64_t runs = area->runs;
	uint32_t offset = sizeof(struct bs_segment_header), segment;
	struct fake_run run = {0}, next;
	int walked = 0;

	fake_node_grant(&node, 1, true);
	fake_node_grant(&node, 2, true);
	/* So that the walk starts with a segment. */
	CHECK_EQ(bs_begin(trace(6)), 0);
	while (area->segment != 1)
		CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	segment = area->segment;
	while (fake_node_run(&node, 0, &next))
		run = next;
	CHECK(run.header);
	offset += run.header->committed_bytes + sizeof(*run.header);
	CHECK_EQ(run.entry.segment, segment);

	for (uint32_t i = 0; i < BS_RUN_RING_ENTRIES + 10; i++) {
		CHECK_EQ(bs_begin(trace(100 + i)), 0);
		CHECK_EQ(bs_tracepoint("", 0), 0);
		CHECK_EQ(bs_end(), 0);
	}
	CHECK_EQ(area->runs_unannounced, 10);
	CHECK_EQ(area->run_head - area->run_tail, BS_RUN_RING_ENTRIES);
	CHECK(area->runs > runs + BS_RUN_RING_ENTRIES);
	for (;;) {
		if (!fake_node_run_at(&node, segment, offset, &run)) {
			if (segment == area->segment)
				break;
			segment = area->segment;
			offset = sizeof(struct bs_segment_header);
			continue;
		}
		CHECK_EQ(run.header->trace_lo, 100 + walked);
		CHECK(run.header->flags & BS_RUN_CLOSED);
		offset += sizeof(*run.header) + run.header->committed_bytes;
		walked++;
	}
	CHECK_EQ(walked, BS_RUN_RING_ENTRIES + 10);

	for (uint32_t i = 0; i < BS_RUN_RING_ENTRIES; i++) {
		CHECK(fake_node_run(&node, 0, &run));
		CHECK_EQ(run.entry.trace_lo, 100 + i);
	}
	CHECK_EQ(bs_begin(trace(7)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(7, BS_RUN_FIRST | BS_RUN_LAST, 16);
	CHECK_EQ(area->runs_unannounced, 10);
}

static void write_runs(uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		CHECK_EQ(bs_begin(trace(8)), 0);
		CHECK_EQ(bs_tracepoint("", 0), 0);
		CHECK_EQ(bs_end(), 0);
	}
}

static void test_doorbell(void)
{
	struct bs_doorbell *bell = &node.channel->doorbell;
	struct fake_run run;
	uint32_t rung = bell->rung;

	fake_node_grant(&node, 3, true);
	fake_node_grant(&node, 4, true);
	fake_node_grant(&node, 5, true);
	fake_node_grant(&node, 6, true);

	/* Who does not sleep is not woken. */
	write_runs(QUARTER);
	CHECK_EQ(bs_trigger(trace(8), "t", NULL, NULL, 0), 0);
	CHECK_EQ(bell->rung, rung);

	while (fake_node_run(&node, 0, &run))
		;
	store_release(&bell->sleeping, 1);
	write_runs(QUARTER - 1);
	CHECK_EQ(bell->rung, rung);
	write_runs(1);
	CHECK_EQ(bell->rung, rung + 1);
	write_runs(QUARTER - 1);
	CHECK_EQ(bell->rung, rung + 1);
	write_runs(1);
	CHECK_EQ(bell->rung, rung + 2);

	CHECK_EQ(bs_trigger(trace(8), "t", NULL, NULL, 0), 0);
	CHECK_EQ(bell->rung, rung + 3);
	while (fake_node_run(&node, 0, &run))
		;
	store_release(&bell->sleeping, 0);
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
	struct fake_run run;
	uint32_t rung;

	while (node.grants->tail != node.grants->head)
		fill_segment();
	for (uint32_t i = 10; i < 18; i++)
		fake_node_grant(&node, i, true);
	store_release(&bell->sleeping, 1);
	rung = bell->rung;
	for (int i = 0; i < 3; i++)
		fill_segment();
	CHECK_EQ(bell->rung, rung);
	fill_segment(); /* four of eight are used */
	CHECK(bell->rung > rung);
	store_release(&bell->sleeping, 0);
	while (fake_node_run(&node, 0, &run))
		;
}

static void grant_nonsense(uint32_t segment, uint16_t generation)
{
	struct bs_grant *g =
		&node.grants->entries[node.grants->head % BS_GRANT_RING_ENTRIES];

	g->segment = segment;
	g->generation = generation;
	g->fresh = 1;
	store_release(&node.grants->head, node.grants->head + 1);
}

static void test_nonsense_is_not_taken(void)
{
	struct bs_grant_ring *grants = node.grants;
	struct fake_run run;
	uint32_t head;

	while (grants->tail != grants->head)
		fill_segment();
	grant_nonsense(node.segments, 1);
	grant_nonsense(BS_SEGMENT_NONE, 1);
	grant_nonsense(20, 0);
	grant_nonsense(20, 1); /* whose header was never written */
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
	while (fake_node_run(&node, 0, &run))
		;
}

int main(void)
{
	fake_node_open(&node);
	fake_node_attach(&node, 32, 0);
	RUN(test_no_segment);
	RUN(test_memory_comes_and_goes);
	RUN(test_ring_full);
	RUN(test_doorbell);
	RUN(test_doorbell_stock);
	RUN(test_nonsense_is_not_taken);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
