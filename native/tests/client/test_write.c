/* SPDX-License-Identifier: Apache-2.0 */
/* Begin, records, end and handles, as the node finds them. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){0x0af7651916cd43ddull, number};
}

static void check_run(const struct fake_run *run, uint64_t number,
		      uint16_t flags, int records)
{
	CHECK_EQ(run->entry.trace_hi, trace(number).hi);
	CHECK_EQ(run->entry.trace_lo, number);
	CHECK_EQ(run->entry.flags, flags);
	CHECK_EQ(fake_run_count(run), records);
}

static void expect_run(uint64_t number, uint16_t flags, int records)
{
	struct fake_run run;

	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, number, flags, records);
}

static void expect_nothing(void)
{
	struct fake_run run;

	CHECK(!fake_node_run(&node, 0, &run));
}

static void test_begin_tracepoint_end(void)
{
	char payload[100];
	const struct bs_record_header *h;
	struct fake_run run;
	uint32_t offset = 0;

	memset(payload, 'x', sizeof(payload));
	CHECK_EQ(bs_tracepoint(payload, 1), -ENOENT);
	CHECK_EQ(bs_end(), -ENOENT);
	CHECK_EQ(bs_begin(trace(0x11)), 0);
	CHECK_EQ(node.context->slots[0].trace_lo, 0x11);
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_record_at(BS_RECORD_DATA, "abc", 3, 77), 0);
	expect_nothing();

	/* Open runs are found in the log. */
	CHECK(fake_node_run_at(&node, node.areas[0].segment,
			       sizeof(struct bs_segment_header), &run));
	CHECK_EQ(run.header->flags, BS_RUN_FIRST);
	CHECK_EQ(fake_run_count(&run), 3);

	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(node.context->slots[0].trace_lo, 0);
	CHECK_EQ(bs_tracepoint(payload, 1), -ENOENT);
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x11, BS_RUN_FIRST | BS_RUN_LAST, 3);
	CHECK_EQ(run.entry.offset, sizeof(struct bs_segment_header));
	CHECK_EQ(run.header->seq, 0);
	h = fake_run_record(&run, &offset);
	CHECK_EQ(h->payload_bytes, sizeof(payload));
	CHECK_EQ(h->type, BS_RECORD_DATA);
	CHECK(h->ticks != 0);
	CHECK(!memcmp(h + 1, payload, sizeof(payload)));
	h = fake_run_record(&run, &offset);
	CHECK_EQ(h->payload_bytes, 0);
	h = fake_run_record(&run, &offset);
	CHECK_EQ(h->ticks, 77);
	CHECK(!memcmp(h + 1, "abc", 3));
	expect_nothing();
}

static void test_begin_without_records_costs_no_memory(void)
{
	struct bs_thread_area *area = &node.areas[0];
	struct bs_trace handle;
	uint64_t runs = area->runs;

	for (int i = 0; i < 1000; i++) {
		CHECK_EQ(bs_begin(trace(0x12)), 0);
		CHECK_EQ(bs_end(), 0);
		CHECK_EQ(bs_open(&handle, trace(0x12)), 0);
		CHECK_EQ(bs_close(&handle), 0);
	}
	CHECK_EQ(area->runs, runs);
	expect_nothing();
}

static void test_begin_ends_what_was_open(void)
{
	CHECK_EQ(bs_begin(trace(0x13)), 0);
	CHECK_EQ(bs_tracepoint("a", 1), 0);
	CHECK_EQ(bs_begin(trace(0x14)), 0);
	expect_run(0x13, BS_RUN_FIRST | BS_RUN_LAST, 1);
	CHECK_EQ(bs_tracepoint("b", 1), 0);
	CHECK_EQ(bs_end(), 0);
	expect_run(0x14, BS_RUN_FIRST | BS_RUN_LAST, 1);
}

/* A tracepoint after writes to a handle must not land in that handle's run. */
static void test_interleaved(void)
{
	struct bs_trace a, b;
	struct fake_run run;
	uint32_t handle;

	CHECK_EQ(bs_begin(trace(0x20)), 0);
	CHECK_EQ(bs_open(&a, trace(0x21)), 0);
	CHECK_EQ(bs_open(&b, trace(0x21)), 0);
	CHECK_EQ(bs_tracepoint("1", 1), 0);
	CHECK_EQ(bs_write(&a, BS_RECORD_DATA, "2", 1), 0);
	CHECK_EQ(bs_write(&a, BS_RECORD_DATA, "3", 1), 0);
	CHECK_EQ(bs_write(&b, BS_RECORD_DATA, "4", 1), 0);
	CHECK_EQ(bs_tracepoint("5", 1), 0);
	CHECK_EQ(bs_write(NULL, BS_RECORD_DATA, "6", 1), 0);
	CHECK_EQ(bs_close(&a), 0);
	CHECK_EQ(bs_write(&b, BS_RECORD_DATA, "7", 1), 0);
	CHECK_EQ(bs_close(&b), 0);
	CHECK_EQ(bs_end(), 0);

	expect_run(0x20, BS_RUN_FIRST, 1);
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x21, BS_RUN_FIRST, 2);
	handle = run.header->handle;
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x21, BS_RUN_FIRST, 1);
	CHECK(run.header->handle != handle);
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x20, 0, 2);
	CHECK_EQ(run.header->seq, 1);
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x21, BS_RUN_LAST, 0);
	CHECK_EQ(run.header->handle, handle);
	CHECK_EQ(run.header->seq, 1);
	expect_run(0x21, BS_RUN_LAST, 1);
	expect_run(0x20, BS_RUN_LAST, 0);
	expect_nothing();
}

static void test_closed_handle(void)
{
	struct bs_trace handle;

	CHECK_EQ(bs_open(&handle, trace(0x25)), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(bs_close(&handle), -ENOENT);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), -ENOENT);
	CHECK_EQ(bs_open(&handle, (struct bs_trace_id){0, 0}), -EINVAL);
	CHECK_EQ(bs_begin((struct bs_trace_id){0, 0}), -EINVAL);
	expect_nothing();
}

static void test_oversized(void)
{
	static char payload[BS_PAYLOAD_MAX + 1];
	struct bs_stats stats;

	CHECK_EQ(bs_begin(trace(0x30)), 0);
	CHECK_EQ(bs_tracepoint(payload, BS_PAYLOAD_MAX), 0);
	CHECK_EQ(bs_tracepoint(payload, BS_PAYLOAD_MAX + 1), -EMSGSIZE);
	CHECK_EQ(bs_tracepoint(payload, SIZE_MAX), -EMSGSIZE);
	CHECK_EQ(bs_end(), 0);
	expect_run(0x30, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 1);
	CHECK_EQ(bs_begin(trace(0x31)), 0);
	CHECK_EQ(bs_tracepoint(payload, BS_PAYLOAD_MAX + 1), -EMSGSIZE);
	CHECK_EQ(bs_end(), 0);
	expect_run(0x31, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 0);
	bs_get_stats(&stats);
	CHECK_EQ(stats.records_oversized, 3);
	CHECK_EQ(stats.records_lost, 0);
}

/* Runs go on in the next segment; a walk over the log finds what the ring
 * announced, in the order in which it was written, and no more, also where the
 * memory looks like headers of the generation to come. */
static void test_segments(void)
{
	const struct bs_record_header *h;
	struct bs_grant *grants = node.grants->entries;
	uint64_t expected = 0, got;
	struct fake_run run, walked;
	uint32_t seq = 0, at = 0;

	for (uint32_t i = node.grants->tail; i != node.grants->head; i++) {
		uint16_t *from =
			(uint16_t *)(node.arena + (size_t)grants[i].segment *
							  BS_SEGMENT_BYTES);

		for (at = sizeof(struct bs_segment_header) / 2;
		     at < BS_SEGMENT_BYTES / 2; at++)
			from[at] = grants[i].generation;
	}

	CHECK_EQ(bs_begin(trace(0x40)), 0);
	for (uint64_t i = 0; i < 5000; i++)
		CHECK_EQ(bs_tracepoint(&i, sizeof(i)), 0);
	CHECK_EQ(bs_end(), 0);

	do {
		uint32_t offset = 0;

		CHECK(fake_node_run(&node, 0, &run));
		CHECK_EQ(run.header->seq, seq);
		CHECK_EQ((run.entry.flags & BS_RUN_FIRST) != 0, seq == 0);
		if (seq++ > 0) {
			at = sizeof(struct bs_segment_header);
			CHECK(fake_node_run_at(&node, run.entry.segment, at,
					       &walked));
			CHECK(walked.header == run.header);
			at += sizeof(*run.header) + run.header->committed_bytes;
			CHECK(!fake_node_run_at(&node, run.entry.segment, at,
						&walked));
		}
		while ((h = fake_run_record(&run, &offset))) {
			memcpy(&got, h + 1, sizeof(got));
			CHECK_EQ(got, expected++);
		}
	} while (!(run.entry.flags & BS_RUN_LAST));
	CHECK_EQ(expected, 5000);
	CHECK_EQ(seq, 3);
	expect_nothing();

	/* The next run stands where the last one ended. */
	CHECK_EQ(bs_begin(trace(0x41)), 0);
	CHECK_EQ(bs_tracepoint("", 1), 0);
	CHECK(fake_node_run_at(&node, run.entry.segment, at, &walked));
	CHECK_EQ(walked.header->trace_lo, 0x41);
	CHECK_EQ(bs_end(), 0);
	expect_run(0x41, BS_RUN_FIRST | BS_RUN_LAST, 1);
}

int main(void)
{
	fake_node_open(&node);
	fake_node_attach(&node, 8, 8);
	RUN(test_begin_tracepoint_end);
	RUN(test_begin_without_records_costs_no_memory);
	RUN(test_begin_ends_what_was_open);
	RUN(test_interleaved);
	RUN(test_closed_handle);
	RUN(test_oversized);
	RUN(test_segments);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
