/* SPDX-License-Identifier: Apache-2.0 */
/* Triggers, and the spans and percentages that need no test of their own. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){0xabcdull << 48, number};
}

static struct bs_stats stats(void)
{
	struct bs_stats s;

	bs_get_stats(&s);
	return s;
}

static void test_unattached(void)
{
	CHECK_EQ(bs_trigger(trace(1), "slow", NULL, NULL, 0), -ENOTCONN);
	CHECK_EQ(stats().triggers_unattached, 1);
	CHECK_EQ(stats().triggers_lost, 0);
}

static void test_cell(void)
{
	struct bs_trace_id laterals[40];
	struct bs_trigger_cell cell;
	char why[200];

	for (uint64_t i = 0; i < 40; i++)
		laterals[i] = trace(100 + i);
	memset(why, 'w', sizeof(why));
	/* A sequence of three bytes that the cut falls into. */
	memcpy(why + BS_TRIGGER_WHY_MAX - 1, "\xe2\x82\xac", 3);
	why[sizeof(why) - 1] = '\0';
	CHECK_EQ(bs_trigger(trace(1), "slow.checkout", why, laterals, 40), 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(cell.trace_hi, trace(1).hi);
	CHECK_EQ(cell.trace_lo, 1);
	CHECK_EQ(cell.source, BS_TRIGGER_APPLICATION);
	CHECK(cell.ticks != 0);
	CHECK(!strcmp(cell.name, "slow.checkout"));
	CHECK_EQ(strlen(cell.why), BS_TRIGGER_WHY_MAX - 1);
	CHECK_EQ(cell.n_laterals, BS_LATERALS_MAX);
	CHECK_EQ(cell.laterals[BS_LATERALS_MAX - 1].lo,
		 100 + BS_LATERALS_MAX - 1);

	CHECK_EQ(bs_trigger(trace(2), "a", NULL, NULL, 0), 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(cell.why[0], 0);
	CHECK_EQ(cell.n_laterals, 0);
	CHECK(!fake_node_trigger(&node, &cell));
}

static void test_names(void)
{
	struct bs_trigger_cell cell;

	CHECK_EQ(bs_trigger(trace(1), "", NULL, NULL, 0), -EINVAL);
	CHECK_EQ(bs_trigger(trace(1), "Slow", NULL, NULL, 0), -EINVAL);
	CHECK_EQ(bs_trigger(trace(1), "a b", NULL, NULL, 0), -EINVAL);
	CHECK_EQ(bs_trigger(trace(1), "a;b", NULL, NULL, 0), -EINVAL);
	CHECK_EQ(bs_trigger(trace(1), "a23456789.123456789-123456789_12", NULL,
			    NULL, 0),
		 -EINVAL);
	CHECK_EQ(bs_trigger((struct bs_trace_id){0, 0}, "a", NULL, NULL, 0),
		 -EINVAL);
	CHECK_EQ(stats().triggers_malformed, 6);
	CHECK(!fake_node_trigger(&node, &cell));
	CHECK_EQ(bs_trigger(trace(1), "a23456789.123456789-123456789_1", NULL,
			    NULL, 0),
		 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(strlen(cell.name), BS_TRIGGER_NAME_MAX);
}

static void test_queue_full(void)
{
	struct bs_trigger_cell cell;

	for (uint64_t i = 1; i <= BS_TRIGGER_CELLS; i++)
		CHECK_EQ(bs_trigger(trace(i), "t", NULL, NULL, 0), 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(bs_trigger(trace(999), "t", NULL, NULL, 0), -EAGAIN);
	CHECK_EQ(node.context->triggers_lost, 3);
	CHECK_EQ(stats().triggers_lost, 3);
	CHECK_EQ(stats().triggers_unattached, 1);
	for (uint64_t i = 1; i <= BS_TRIGGER_CELLS; i++) {
		CHECK(fake_node_trigger(&node, &cell));
		CHECK_EQ(cell.trace_lo, i);
	}
	CHECK(!fake_node_trigger(&node, &cell));
	CHECK_EQ(bs_trigger(trace(1000), "t", NULL, NULL, 0), 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(cell.trace_lo, 1000);
}

/* Numbers that make no sense end in a loss, not in a loop. */
static void test_queue_nonsense(void)
{
	uint32_t cell = node.context->trigger_head % BS_TRIGGER_CELLS;
	uint32_t seq = node.context->cells[cell].seq;

	store_release(&node.context->cells[cell].seq, seq + 12345);
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), -EAGAIN);
	store_release(&node.context->cells[cell].seq, seq);
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), 0);
}

static void test_percentage(void)
{
	const uint64_t threshold = UINT64_MAX / 10;
	uint64_t state = bs_hash_prepare(BS_HASH_PERCENTAGE,
					 strlen(BS_HASH_PERCENTAGE), 42);
	struct bs_trigger_cell cell;
	struct bs_trace handle;
	struct bs_trace_id some = {0}, other = {0};
	struct fake_run run;
	int recorded = 0;

	/* Of a fresh attachment, as the seed is read once. */
	while (fake_node_trigger(&node, &cell))
		;
	WRITE_ONCE(node.policy->percentage_threshold, threshold);
	for (uint64_t i = 1; i <= 1000; i++) {
		bool expected = bs_hash_trace(state, trace(i)) < threshold;

		CHECK_EQ(bs_begin(trace(i)), 0);
		CHECK_EQ(bs_tracepoint("", 0), 0);
		CHECK_EQ(bs_end(), 0);
		CHECK_EQ(bs_open(&handle, trace(i)), 0);
		CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
		CHECK_EQ(bs_breadcrumb(&handle, "n"), 0);
		CHECK_EQ(bs_close(&handle), 0);
		for (int form = 0; form < 2; form++) {
			CHECK_EQ(fake_node_run(&node, 0, &run), expected);
			if (expected)
				CHECK_EQ(run.id.lo, i);
		}
		recorded += expected;
		CHECK_EQ(bs_trigger(trace(i), "t", NULL, NULL, 0),
			 expected ? 0 : -ENODATA);
		CHECK_EQ(fake_node_trigger(&node, &cell), expected);
		if (expected)
			some = trace(i);
		else
			other = trace(i);
	}
	CHECK(recorded > 50 && recorded < 200);
	CHECK_EQ(stats().triggers_unrecorded, 1000 - recorded);
	CHECK_EQ(bs_trigger(other, "t", NULL, &some, 1), 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(bs_trigger(other, "t", NULL, &other, 1), -ENODATA);
	WRITE_ONCE(node.policy->percentage_threshold, UINT64_MAX);
}

/* What was recorded before it was lowered can be triggered, as long as the node says
 * so; a thread's own trace always. */
static void test_percentage_lowered(void)
{
	struct bs_trigger_cell cell;

	CHECK_EQ(bs_begin(trace(1)), 0);
	WRITE_ONCE(node.policy->earlier_threshold, BS_PERCENTAGE_ALL);
	WRITE_ONCE(node.policy->percentage_threshold, 0);
	for (uint64_t i = 1; i <= 2; i++) {
		CHECK_EQ(bs_trigger(trace(i), "t", NULL, NULL, 0), 0);
		CHECK(fake_node_trigger(&node, &cell));
		CHECK_EQ(cell.trace_lo, i);
	}
	WRITE_ONCE(node.policy->earlier_threshold, 0);
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(bs_trigger(trace(2), "t", NULL, NULL, 0), -ENODATA);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), -ENODATA);
	/* That it is open says nothing where it is left out. */
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), -ENODATA);
	CHECK_EQ(bs_end(), 0);
	WRITE_ONCE(node.policy->percentage_threshold, BS_PERCENTAGE_ALL);
}

static const struct bs_record_header *last_record(struct fake_run *run)
{
	uint32_t offset = 0;

	CHECK_EQ(bs_end(), 0);
	CHECK(fake_node_run(&node, 0, run));
	CHECK_EQ(fake_run_count(run), 1);
	return fake_run_record(run, &offset);
}

static void test_span(void)
{
	const struct bs_record_header *h;
	struct bs_span_start start;
	struct bs_span_end end;
	struct fake_run run;
	unsigned char attributes[40000] = {0};
	struct bs_attribute_header a = {
		.type = BS_ATTRIBUTE_BYTES,
		.key_bytes = 2,
		.value_bytes = 19994,
	};

	CHECK_EQ(bs_span_start(NULL, 1, 2, 3, 4, "x"), -ENOENT);
	CHECK_EQ(bs_span_end(NULL, 1, 2, 0, NULL, NULL, 0), -ENOENT);

	bs_begin(trace(1));
	CHECK_EQ(bs_span_start(NULL, 1, 2, 3, 4, "GET /"), 0);
	h = last_record(&run);
	CHECK_EQ(h->type, BS_RECORD_SPAN_START);
	CHECK_EQ(h->payload_bytes, sizeof(start) + 5);
	memcpy(&start, h + 1, sizeof(start));
	CHECK_EQ(start.span_id, 1);
	CHECK_EQ(start.parent_id, 2);
	CHECK_EQ(start.start_ns, 3);
	CHECK_EQ(start.kind, 4);
	CHECK_EQ(start.name_bytes, 5);
	CHECK(!memcmp((const char *)(h + 1) + sizeof(start), "GET /", 5));

	/* A long name is cut, not inside a character. */
	bs_begin(trace(1));
	CHECK_EQ(bs_span_start(NULL, 1, 2, 3, 4,
			       "0123456789012345678901234567890\u00e9"),
		 0);
	h = last_record(&run);
	memcpy(&start, h + 1, sizeof(start));
	CHECK_EQ(start.name_bytes, 31);
	CHECK(h->payload_bytes <= 64);

	bs_begin(trace(1));
	CHECK_EQ(bs_span_end(NULL, 9, 8, 2, "whole name", NULL, 0), 0);
	h = last_record(&run);
	CHECK_EQ(h->type, BS_RECORD_SPAN_END);
	memcpy(&end, h + 1, sizeof(end));
	CHECK_EQ(end.span_id, 9);
	CHECK_EQ(end.end_ns, 8);
	CHECK_EQ(end.status, 2);
	CHECK_EQ(end.name_bytes, 10);
	CHECK_EQ(end.attributes_bytes, 0);

	/* Of attributes that do not fit, whole ones are kept. */
	memcpy(attributes, &a, sizeof(a));
	memcpy(attributes + 20000, &a, sizeof(a));
	bs_begin(trace(1));
	CHECK_EQ(bs_span_end(NULL, 9, 8, 2, NULL, attributes, 40000), 0);
	h = last_record(&run);
	memcpy(&end, h + 1, sizeof(end));
	CHECK_EQ(end.attributes_bytes, 20000);
	CHECK_EQ(h->flags, BS_RECORD_TRUNCATED);

	bs_begin(trace(1));
	CHECK_EQ(bs_span_end(NULL, 9, 8, 2, NULL, attributes, 20001), -EINVAL);
	CHECK_EQ(bs_span_end(NULL, 9, 8, 2, NULL, attributes, 19999), -EINVAL);
	CHECK_EQ(stats().attributes_malformed, 2);
	bs_end();
	CHECK(!fake_node_run(&node, 0, &run));
}

int main(void)
{
	struct bs_attach_reply reply;

	fake_node_open(&node);
	RUN(test_unattached);
	fake_node_make(&node, 8);
	node.channel->cluster_seed = 42;
	for (uint32_t i = 0; i < 8; i++)
		fake_node_grant(&node, i, true);
	fake_node_accept(&node);
	fake_node_fill_reply(&node, &reply);
	fake_node_send(&node, &reply, sizeof(reply), node.fds, BS_FDS);
	CHECK_EQ(bs_wait_attached(-1), 0);
	RUN(test_cell);
	RUN(test_names);
	RUN(test_queue_full);
	RUN(test_queue_nonsense);
	RUN(test_percentage);
	RUN(test_percentage_lowered);
	RUN(test_span);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
