/* SPDX-License-Identifier: Apache-2.0 */
/* Begin, records, end and handles, as the node finds them. */
#include <errno.h>
#include <pthread.h>
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
	CHECK_EQ(run->id.hi, trace(number).hi);
	CHECK_EQ(run->id.lo, number);
	CHECK_EQ(run->flags, flags);
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

	/* What is open is found too. */
	CHECK(fake_node_open_run(&node, 0, &run));
	CHECK_EQ(run.flags, BS_RUN_FIRST);
	CHECK_EQ(fake_run_count(&run), 3);
	CHECK_EQ(node.areas[0].own_handle, run.handle);
	CHECK(run.handle != 0);

	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(node.context->slots[0].trace_lo, 0);
	CHECK_EQ(node.areas[0].own_handle, 0);
	CHECK_EQ(bs_tracepoint(payload, 1), -ENOENT);
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x11, BS_RUN_FIRST | BS_RUN_LAST, 3);
	CHECK_EQ(run.offset, sizeof(struct bs_segment_header));
	CHECK_EQ(run.seq, 0);
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
	handle = run.handle;
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x21, BS_RUN_FIRST, 1);
	CHECK(run.handle != handle);
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x20, 0, 2);
	CHECK_EQ(run.seq, 1);
	CHECK(fake_node_run(&node, 0, &run));
	check_run(&run, 0x21, BS_RUN_LAST, 0);
	CHECK_EQ(run.handle, handle);
	CHECK_EQ(run.seq, 1);
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

static void *write_oversized(void *handle)
{
	static char payload[BS_PAYLOAD_MAX + 1];

	CHECK_EQ(bs_write(handle, BS_RECORD_DATA, payload, sizeof(payload)),
		 -EMSGSIZE);
	return NULL;
}

/* One that a thread was refused is missing from a run that another has open. */
static void test_oversized_by_another(void)
{
	struct bs_trace handle;
	pthread_t thread;

	CHECK_EQ(bs_open(&handle, trace(0x32)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "x", 1), 0);
	CHECK_EQ(pthread_create(&thread, NULL, write_oversized, &handle), 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(bs_close(&handle), 0);
	expect_run(0x32, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY, 1);
}

/* Whatever an earlier life left in the segments to come, but for their headers:
 * nobody must be misled by it. */
static void soil_stock(void)
{
	const struct bs_grant *grants = node.grants->entries;

	for (uint32_t i = node.grants->tail; i != node.grants->head; i++) {
		unsigned char *segment =
			node.arena +
			(size_t)(grants[i].segment & ~BS_GRANT_FRESH) *
				BS_SEGMENT_BYTES;

		memset(segment + sizeof(struct bs_segment_header), 0xff,
		       BS_SEGMENT_BYTES - sizeof(struct bs_segment_header));
	}
}

/* Runs go on in the next segment. */
static void test_segments(void)
{
	const struct bs_record_header *h;
	uint64_t expected = 0, got;
	struct fake_run run;
	uint32_t seq = 0;

	soil_stock();
	CHECK_EQ(bs_begin(trace(0x40)), 0);
	for (uint64_t i = 0; i < 5000; i++)
		CHECK_EQ(bs_tracepoint(&i, sizeof(i)), 0);
	CHECK_EQ(bs_end(), 0);

	do {
		uint32_t offset = 0;

		CHECK(fake_node_run(&node, 0, &run));
		CHECK_EQ(run.seq, seq);
		CHECK_EQ((run.flags & BS_RUN_FIRST) != 0, seq == 0);
		if (seq++ > 0)
			CHECK_EQ(run.offset, sizeof(struct bs_segment_header));
		while ((h = fake_run_record(&run, &offset))) {
			memcpy(&got, h + 1, sizeof(got));
			CHECK_EQ(got, expected++);
		}
	} while (!(run.flags & BS_RUN_LAST));
	CHECK_EQ(expected, 5000);
	CHECK_EQ(seq, 3);
	expect_nothing();
}

static uint32_t runs_in(uint32_t segment)
{
	return ((struct bs_segment_header *)(node.arena +
					     (size_t)segment *
						     BS_SEGMENT_BYTES))
		->runs;
}

/* Traces of one record, until one stands in another segment. */
static uint32_t fill_segment(size_t payload_bytes)
{
	static const char payload[BS_PAYLOAD_MAX];
	uint32_t segment = node.areas[0].segment;

	while (node.areas[0].segment == segment) {
		CHECK_EQ(bs_begin(trace(0x4f)), 0);
		CHECK_EQ(bs_tracepoint(payload, payload_bytes), 0);
		CHECK_EQ(bs_end(), 0);
	}
	return segment;
}

/* Five runs with their entries would take eight bytes more than there are. */
static void test_entry_needs_room_too(void)
{
	const uint32_t runs_bytes =
		BS_SEGMENT_BYTES - sizeof(struct bs_segment_header) + 8;
	const size_t payload_bytes =
		runs_bytes / 5 - bs_run_header_bytes(BS_RUN_FIRST) -
		sizeof(struct bs_record_header) - sizeof(uint64_t);
	struct fake_run run;

	CHECK_EQ(runs_bytes % 5, 0);
	CHECK_EQ(payload_bytes % 4, 0);
	fill_segment(payload_bytes);
	CHECK_EQ(runs_in(fill_segment(payload_bytes)), 4);
	while (fake_node_run(&node, 0, &run))
		CHECK_EQ(fake_run_count(&run), 1);
}

/* A segment is full where the next run and its entry would meet, not before. */
static void test_segment_is_filled(void)
{
	const uint32_t run_bytes = bs_run_header_bytes(BS_RUN_FIRST) +
				   sizeof(struct bs_record_header) +
				   sizeof(uint64_t);
	const uint32_t room =
		BS_SEGMENT_BYTES - sizeof(struct bs_segment_header);
	struct bs_thread_area *area = &node.areas[0];
	uint32_t full;
	struct fake_run run;

	fill_segment(0);
	full = fill_segment(0);
	CHECK_EQ(runs_in(full), room / run_bytes);
	CHECK_EQ(runs_in(area->segment), 1);
	while (fake_node_run(&node, 0, &run))
		CHECK_EQ(fake_run_count(&run), 1);

	/* Nor do the records of a run come nearer to the directory than that. */
	full = area->segment;
	CHECK_EQ(bs_begin(trace(0x52)), 0);
	while (area->segment == full)
		CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.segment, full);
	CHECK(BS_SEGMENT_BYTES - 2 * sizeof(uint64_t) - run.offset -
		      bs_run_header_bytes(run.flags) -
		      fake_run_committed(&run) <
	      sizeof(struct bs_record_header));
	CHECK(fake_node_run(&node, 0, &run));
	expect_nothing();
}

/* --------------------------------------------------------- open handles --- */

static void test_open_handles_are_listed(void)
{
	static struct bs_trace many[3 * BS_OPEN_PROBES];
	const uint32_t n = sizeof(many) / sizeof(many[0]);
	struct fake_run run;

	CHECK_EQ(fake_node_open_handles(&node), 0);
	for (uint32_t i = 0; i < n; i++)
		CHECK_EQ(bs_open(&many[i], trace(0x60 + i)), 0);
	CHECK_EQ(fake_node_open_handles(&node), n);
	CHECK_EQ(bs_write(&many[5], BS_RECORD_DATA, "", 0), 0);
	CHECK(fake_node_open_run(&node, 0, &run));
	CHECK_EQ(node.open_handles[bs_handle_place(run.handle)], run.handle);
	for (uint32_t i = 0; i < n; i++) {
		CHECK_EQ(bs_close(&many[i]), 0);
		CHECK_EQ(fake_node_open_handles(&node), n - 1 - i);
	}
	expect_run(0x65, BS_RUN_FIRST | BS_RUN_LAST, 1);
	CHECK_EQ(node.areas[0].handles_unlisted, 0);
}

/* Handles that stay open are stepped over; where too many stand side by side,
 * the next one goes without, and takes nobody's place when it is closed. */
static void test_open_handles_without_a_place(void)
{
	struct bs_trace handle, next;

	for (uint32_t i = 0; i < BS_OPEN_HANDLES; i++)
		node.open_handles[i] = UINT32_MAX;
	CHECK_EQ(bs_open(&handle, trace(0x70)), 0);
	CHECK_EQ(node.areas[0].handles_unlisted, 1);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_close(&handle), 0);
	expect_run(0x70, BS_RUN_FIRST | BS_RUN_LAST, 1);
	CHECK_EQ(fake_node_open_handles(&node), BS_OPEN_HANDLES);

	/* The one place that is left is found if it is near. */
	CHECK_EQ(bs_open(&handle, trace(0x71)), 0);
	node.open_handles[((handle.handle_seq >> 32) + BS_OPEN_PROBES) %
			  BS_OPEN_HANDLES] = 0;
	CHECK_EQ(bs_open(&next, trace(0x72)), 0);
	CHECK_EQ(fake_node_open_handles(&node), BS_OPEN_HANDLES);
	CHECK_EQ(node.areas[0].handles_unlisted, 2);
	CHECK_EQ(bs_close(&next), 0);
	CHECK_EQ(fake_node_open_handles(&node), BS_OPEN_HANDLES - 1);
	CHECK_EQ(bs_close(&handle), 0);
	memset(node.open_handles, 0, BS_OPEN_HANDLES * sizeof(uint32_t));
	expect_nothing();
}

int main(void)
{
	fake_node_open(&node);
	fake_node_attach(&node, 16, 16);
	RUN(test_begin_tracepoint_end);
	RUN(test_begin_without_records_costs_no_memory);
	RUN(test_begin_ends_what_was_open);
	RUN(test_interleaved);
	RUN(test_closed_handle);
	RUN(test_oversized);
	RUN(test_oversized_by_another);
	RUN(test_segments);
	RUN(test_segment_is_filled);
	RUN(test_entry_needs_room_too);
	RUN(test_open_handles_are_listed);
	RUN(test_open_handles_without_a_place);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
