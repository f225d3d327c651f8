/* SPDX-License-Identifier: Apache-2.0 */
#include "cpp_node.h"

#include "check.h"
#include "fake_node.h"

static struct fake_node node;

void cpp_node_open(void)
{
	fake_node_open(&node);
	fake_node_attach(&node, 2, 2);
}

void cpp_node_close(void)
{
	fake_node_close(&node);
}

int cpp_node_records(uint64_t hi, uint64_t lo)
{
	struct fake_run run;

	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.flags, BS_RUN_FIRST | BS_RUN_LAST);
	CHECK_EQ(run.id.hi, hi);
	CHECK_EQ(run.id.lo, lo);
	return fake_run_count(&run);
}
