/* SPDX-License-Identifier: Apache-2.0 */
/* Breadcrumbs and contexts: the grammar of propagate.c by its vectors. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "fake_node.h"

#define NODE_A "af63dc4c8601ec8c" /* FNV-1a of "a" */
#define NODE_B "af63df4c8601f1a5" /* of "b" */
#define NODE_C "af63de4c8601eff2" /* of "c" */

static struct fake_node node;
static char self[17];

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){1, number};
}

static const struct bs_record_header *record(struct fake_run *run,
					     uint32_t *offset, uint16_t type,
					     size_t payload_bytes)
{
	const struct bs_record_header *h = fake_run_record(run, offset);

	CHECK(h);
	CHECK_EQ(h->type, type);
	CHECK_EQ(h->payload_bytes, payload_bytes);
	return h;
}

static void expect_crumb(struct fake_run *run, uint32_t *offset,
			 const char *name, bool with_name)
{
	size_t bytes = with_name ? strlen(name) : 0;
	const struct bs_record_header *h =
		record(run, offset, BS_RECORD_BREADCRUMB, 8 + bytes);
	uint64_t id;

	memcpy(&id, h + 1, 8);
	CHECK_EQ(id, bs_node_id(name));
	CHECK(!memcmp((const char *)(h + 1) + 8, name, bytes));
}

static void test_ids(void)
{
	CHECK_EQ(bs_node_id("a"), 0xaf63dc4c8601ec8cull);
	CHECK_EQ(bs_node_id("b"), 0xaf63df4c8601f1a5ull);
	CHECK_EQ(bs_node_id("c"), 0xaf63de4c8601eff2ull);
	CHECK_EQ(bs_node_ref()[0], '#');
	CHECK_EQ(strlen(bs_node_ref()), 17);
	CHECK(!strcmp(bs_node_ref() + 1, self));
}

static void test_breadcrumbs(void)
{
	static char name[80];
	struct bs_stats stats;
	struct bs_trace handle;
	struct fake_run run;
	uint32_t offset = 0;

	memset(name, 'n', sizeof(name) - 1);
	CHECK_EQ(bs_breadcrumb(NULL, "a"), -ENOENT);
	bs_open(&handle, trace(1));
	CHECK_EQ(bs_breadcrumb(&handle, "a"), 0);
	CHECK_EQ(bs_breadcrumb(&handle, "#" NODE_B), 0);
	CHECK_EQ(bs_breadcrumb(&handle, ""), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "#"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "#af63df4c8601f1a"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "#af63df4c8601f1a50"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "#AF63DF4C8601F1A5"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "a/b"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "@"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "@localhost"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "@10.0.0.1 "), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "@10.1"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, "@dead.beef"), -EINVAL);
	CHECK_EQ(bs_breadcrumb(&handle, name), -EINVAL);
	bs_get_stats(&stats);
	CHECK_EQ(stats.breadcrumbs_malformed, 12);
	name[BS_NODE_NAME_MAX] = '\0';
	CHECK_EQ(bs_breadcrumb(&handle, name), 0);
	CHECK_EQ(bs_breadcrumb(&handle, "@10.0.0.1"), 0);
	CHECK_EQ(bs_breadcrumb(&handle, "@fe80::1"), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK_EQ(bs_breadcrumb(&handle, "a"), -ENOENT);
	CHECK(fake_node_run(&node, 0, &run));
	expect_crumb(&run, &offset, "a", true);
	expect_crumb(&run, &offset, "b", false);
	expect_crumb(&run, &offset, name, true);
	expect_crumb(&run, &offset, "@10.0.0.1", true);
	expect_crumb(&run, &offset, "@fe80::1", true);
	CHECK(!fake_run_record(&run, &offset));
}

static void check_hop(const struct bs_record_header *h, uint64_t node_id,
		      uint64_t span_id, uint32_t hop, uint32_t handle)
{
	struct bs_hop got;

	memcpy(&got, h + 1, sizeof(got));
	CHECK_EQ(got.node_id, node_id);
	CHECK_EQ(got.span_id, span_id);
	CHECK_EQ(got.hop, hop);
	CHECK_EQ(got.handle, handle);
}

/* From here to another node and back: what one side writes, the other reads. */
static void test_round_trip(void)
{
	char first[BS_CONTEXT_MAX + 1], second[BS_CONTEXT_MAX + 1];
	char expected[BS_CONTEXT_MAX + 1];
	struct bs_trace out, in;
	struct fake_run run;
	uint32_t offset = 0;
	int bytes;

	bs_open(&out, trace(2));
	bytes = bs_serialize(&out, 0x51, first, sizeof(first));
	CHECK_EQ(bytes, strlen(first));
	CHECK_EQ(bs_serialize(&out, 0x52, second, sizeof(second)), bytes);
	bs_close(&out);
	CHECK(fake_node_run(&node, 0, &run));
	snprintf(expected, sizeof(expected), "1-00000000-%08x-%s", run.handle,
		 self);
	CHECK(!strcmp(first, expected));
	snprintf(expected, sizeof(expected), "1-00000001-%08x-%s", run.handle,
		 self);
	CHECK(!strcmp(second, expected));
	check_hop(record(&run, &offset, BS_RECORD_HOP_OUT, 24),
		  bs_node_id(FAKE_NODE_NAME), 0x51, 0, run.handle);
	check_hop(record(&run, &offset, BS_RECORD_HOP_OUT, 24),
		  bs_node_id(FAKE_NODE_NAME), 0x52, 1, run.handle);

	/* This node knows itself: no breadcrumb. */
	bs_open(&in, trace(2));
	CHECK_EQ(bs_deserialize(&in, 0x52, second, strlen(second)), 0);
	bs_close(&in);
	offset = 0;
	out.handle_seq = run.handle;
	CHECK(fake_node_run(&node, 0, &run));
	check_hop(record(&run, &offset, BS_RECORD_HOP_IN, 24),
		  bs_node_id(FAKE_NODE_NAME), 0x52, 1,
		  (uint32_t)out.handle_seq);
	CHECK(!fake_run_record(&run, &offset));
}

static void test_visited_nodes(void)
{
	static const char incoming[] =
		"1-0000000a-0000000b-" NODE_A NODE_B NODE_C;
	char value[BS_CONTEXT_MAX + 1], expected[BS_CONTEXT_MAX + 1];
	struct fake_run run;
	uint32_t offset = 0;

	bs_begin(trace(3));
	CHECK_EQ(bs_deserialize(NULL, 0x77, incoming, strlen(incoming)), 0);
	CHECK(bs_serialize(NULL, 0x78, value, sizeof(value)) > 0);
	bs_end();
	CHECK(fake_node_run(&node, 0, &run));
	check_hop(record(&run, &offset, BS_RECORD_HOP_IN, 24), bs_node_id("a"),
		  0x77, 10, 11);
	expect_crumb(&run, &offset, "a", false);
	expect_crumb(&run, &offset, "b", false);
	expect_crumb(&run, &offset, "c", false);
	record(&run, &offset, BS_RECORD_HOP_OUT, 24);
	CHECK(!fake_run_record(&run, &offset));
	snprintf(expected, sizeof(expected), "1-00000000-%08x-%s%s", run.handle,
		 self, NODE_A NODE_B);
	CHECK(!strcmp(value, expected));
}

/* Who does not record a trace sends its context along all the same: who does then knows that
 * something is missing, and where. */
static void test_unrecorded(void)
{
	const char *value = "1-00000000-00800001-" NODE_A NODE_B;
	char sent[BS_CONTEXT_MAX + 1], nodes[3 * 16 + 1];
	struct bs_trace handle;
	struct fake_run run;

	WRITE_ONCE(node.policy->percentage_threshold, 0);
	CHECK_EQ(bs_open(&handle, trace(3)), 0);
	CHECK_EQ(bs_deserialize(&handle, 1, value, strlen(value)), 0);
	CHECK(bs_serialize(&handle, 2, sent, sizeof(sent)) > 0);
	CHECK_EQ(bs_close(&handle), 0);
	WRITE_ONCE(node.policy->percentage_threshold, BS_PERCENTAGE_ALL);
	snprintf(nodes, sizeof(nodes), "%s" NODE_A NODE_B, self);
	CHECK(!strcmp(strrchr(sent, '-') + 1, nodes));
	CHECK(!fake_node_run(&node, 0, &run));
}

static void test_malformed(void)
{
	static const char *const bad[] = {
		"",
		"1",
		"1-",
		"1-00000000-00000000-",
		"2-00000000-00000000-" NODE_A,
		"1-0000000-00000000-" NODE_A,
		"1-000000000-00000000-" NODE_A,
		"1--0000001-00000000-" NODE_A,
		"1-+0000001-00000000-" NODE_A,
		"1-0x000001-00000000-" NODE_A,
		"1-0000000A-00000000-" NODE_A,
		"1-00000000-0000000-" NODE_A,
		"1-00000000 00000000-" NODE_A,
		"1-00000000-00000000-" NODE_A " ",
		" 1-00000000-00000000-" NODE_A,
		"1-00000000-00000000-af63dc4c8601ec8",
		"1-00000000-00000000-AF63DC4C8601EC8C",
		"1-00000000-00000000-" NODE_A "a",
		"1-00000000-00000000-" NODE_A NODE_A NODE_A NODE_A,
		"1-00000000-00000000-" NODE_A ";",
		"1-00000000-00000000-" NODE_A ";;a",
		"1-00000000-00000000-" NODE_A ";A",
		"1-00000000-00000000-" NODE_A ";a;b;c",
		"1-00000000-00000000-" NODE_A ";a;",
		"1-00000000-00000000-" NODE_A
		";a23456789.123456789-123456789_12",
		"1-00000000-00000000-" NODE_A NODE_B NODE_C
		";a23456789.123456789-123456789_1;a23456789.123456789-12345678",
		"1-00000000-00000000-" NODE_A "\xc3\xa9",
	};
	static const char good[] =
		"1-00000000-00000000-" NODE_A NODE_B NODE_C
		";a23456789.123456789-123456789_1;a23456789.123456789-1234567";
	const size_t n = sizeof(bad) / sizeof(bad[0]);
	struct bs_stats stats;
	struct fake_run run;

	bs_begin(trace(4));
	for (size_t i = 0; i < n; i++) {
		if (bs_deserialize(NULL, 1, bad[i], strlen(bad[i])) != -EINVAL)
			fprintf(stderr, "accepted: %s\n", bad[i]);
		CHECK_EQ(bs_deserialize(NULL, 1, bad[i], strlen(bad[i])),
			 -EINVAL);
	}
	/* Cut off anywhere, and with a zero inside. */
	for (size_t i = 0; i < strlen(good); i++) {
		if (i == 36 || i == 52 || i == 68 || (i > 69 && i <= 100) ||
		    i > 101)
			continue; /* where a cut leaves a whole */
		CHECK_EQ(bs_deserialize(NULL, 1, good, i), -EINVAL);
	}
	CHECK_EQ(bs_deserialize(NULL, 1, "1-00000000-00000000-" NODE_A "\0",
				37),
		 -EINVAL);
	bs_end();
	CHECK(!fake_node_run(&node, 0, &run));
	bs_get_stats(&stats);
	CHECK(stats.contexts_malformed > 2 * n);

	CHECK_EQ(strlen(good), BS_CONTEXT_MAX);
	bs_begin(trace(4));
	CHECK_EQ(bs_deserialize(NULL, 1, good, strlen(good)), 0);
	bs_end();
	CHECK(fake_node_run(&node, 0, &run));
}

static void test_triggers_travel(void)
{
	static const char incoming[] = "1-00000000-00000001-" NODE_A
				       ";up.stream";
	char value[BS_CONTEXT_MAX + 1];
	struct bs_trigger_cell cell;
	struct bs_trace handle;
	struct fake_run run;

	/* Not believed: not fired, not passed on. */
	bs_open(&handle, trace(5));
	CHECK_EQ(bs_deserialize(&handle, 1, incoming, strlen(incoming)), 0);
	CHECK(!fake_node_trigger(&node, &cell));
	CHECK(bs_serialize(&handle, 2, value, sizeof(value)) > 0);
	CHECK(!strchr(value, ';'));
	/* What fires here is, on every handle of the trace. */
	CHECK_EQ(bs_trigger(trace(5), "slow", NULL, NULL, 0), 0);
	CHECK_EQ(bs_trigger(trace(5), "slow", NULL, NULL, 0), 0);
	CHECK(bs_serialize(&handle, 2, value, sizeof(value)) > 0);
	CHECK(!strcmp(strchr(value, ';'), ";slow"));
	bs_close(&handle);
	while (fake_node_trigger(&node, &cell))
		;

	WRITE_ONCE(node.policy->trust_incoming, 1);
	bs_begin(trace(6));
	CHECK_EQ(bs_deserialize(NULL, 1, incoming, strlen(incoming)), 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(cell.source, BS_TRIGGER_CONTEXT);
	CHECK_EQ(cell.trace_lo, 6);
	CHECK(!strcmp(cell.name, "up.stream"));
	CHECK(!fake_node_trigger(&node, &cell));
	CHECK(bs_serialize(NULL, 2, value, sizeof(value)) > 0);
	CHECK(!strcmp(strchr(value, ';'), ";up.stream"));
	CHECK_EQ(bs_trigger(trace(6), "error", NULL, NULL, 0), 0);
	CHECK(bs_serialize(NULL, 2, value, sizeof(value)) > 0);
	CHECK(!strcmp(strchr(value, ';'), ";up.stream;error"));
	bs_end();
	WRITE_ONCE(node.policy->trust_incoming, 0);
	while (fake_node_run(&node, 0, &run))
		;
}

static void test_sizes(void)
{
	char value[BS_CONTEXT_MAX + 1];
	struct fake_run run;

	CHECK_EQ(bs_serialize(NULL, 1, value, sizeof(value)), -ENOENT);
	bs_begin(trace(7));
	value[0] = 'x';
	CHECK_EQ(bs_serialize(NULL, 1, value, 36), -ENOSPC);
	CHECK_EQ(bs_serialize(NULL, 1, value, 0), -ENOSPC);
	CHECK_EQ(value[0], 'x');
	CHECK_EQ(bs_serialize(NULL, 1, value, 37), 36);
	/* Two long names: the second does not fit beside three nodes. */
	CHECK_EQ(bs_deserialize(NULL, 1, "1-00000000-00000001-" NODE_A NODE_B,
				52),
		 0);
	CHECK_EQ(bs_trigger(trace(7), "a23456789.123456789-123456789_1", NULL,
			    NULL, 0),
		 0);
	CHECK_EQ(bs_trigger(trace(7), "b23456789.123456789-123456789_1", NULL,
			    NULL, 0),
		 0);
	CHECK_EQ(bs_serialize(NULL, 1, value, sizeof(value)), 100);
	bs_end();
	/* What was refused left no hop behind. */
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(fake_run_count(&run), 5);
}

int main(void)
{
	char value[BS_CONTEXT_MAX + 1];

	fake_node_open(&node);
	bs_begin(trace(1));
	CHECK_EQ(bs_node_ref()[0], '\0');
	CHECK_EQ(bs_serialize(NULL, 1, value, sizeof(value)), -ENOTCONN);
	bs_end();
	fake_node_attach(&node, 4, 4);
	snprintf(self, sizeof(self), "%016llx",
		 (unsigned long long)bs_node_id(FAKE_NODE_NAME));
	RUN(test_ids);
	RUN(test_breadcrumbs);
	RUN(test_round_trip);
	RUN(test_visited_nodes);
	RUN(test_unrecorded);
	RUN(test_malformed);
	RUN(test_triggers_travel);
	RUN(test_sizes);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
