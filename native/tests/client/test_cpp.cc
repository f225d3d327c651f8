/* SPDX-License-Identifier: Apache-2.0 */
/* The header in a C++ program: what it inlines, and both forms. */
#include <backsight.h>

#include <cerrno>

#include "check.h"
#include "cpp_node.h"

namespace
{

const bs_trace_id id = {0x0af7651916cd43dd, 0x8448eb211c80319c};

void test_thread_local_form()
{
	const int payload[4] = {1, 2, 3, 4};

	CHECK_EQ(bs_begin(id), 0);
	CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
	CHECK_EQ(bs_record_at(BS_RECORD_DATA, "x", 1, bs_clock_ticks()), 0);
	CHECK_EQ(bs_span_start(nullptr, 1, 0, 2, 3, "name"), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(cpp_node_records(id.hi, id.lo), 3);
}

void test_handle_form()
{
	bs_trace trace;

	CHECK_EQ(bs_open(&trace, id), 0);
	CHECK_EQ(bs_write(&trace, BS_RECORD_DATA, "x", 1), 0);
	CHECK_EQ(bs_close(&trace), 0);
	CHECK_EQ(bs_close(&trace), -ENOENT);
	CHECK_EQ(cpp_node_records(id.hi, id.lo), 1);
}

void test_trigger_and_status()
{
	bs_stats stats;

	CHECK_EQ(bs_trigger(id, "t", nullptr, nullptr, 0), 0);
	bs_get_stats(&stats);
	CHECK_EQ(stats.runs, 2);
	CHECK(stats.attached);
}

} // namespace

int main()
{
	cpp_node_open();
	RUN(test_thread_local_form);
	RUN(test_handle_form);
	RUN(test_trigger_and_status);
	bs_shutdown();
	cpp_node_close();
	return 0;
}
