/* SPDX-License-Identifier: Apache-2.0 */
#include "process.h"

#include <string.h>
#include <unistd.h>

#include "check.h"

struct bsn *node;
int client_number;
struct bs_attachment *attachment;

static struct bsn_client_fds fds;
static struct bsn_config config;

/* What the rest of the library wants of attach.c: nothing happens there. */
void bs_attach_start(void)
{
}

void bs_attach_forget(void)
{
}

uint64_t bs_attach_count(void)
{
	return 1;
}

struct bs_trace_id trace_id(uint64_t i)
{
	struct bs_trace_id id = {0x1000000000000000ull + i,
				 i * 0x9e3779b97f4a7c15ull + 1};

	return id;
}

static struct bsn *node_new(void)
{
	char message[256] = "";
	struct bsn *n = NULL;

	CHECK_EQ(bsn_new(&config, &n, message, sizeof(message)), 0);
	CHECK_EQ(bsn_clock_pair(n, START, START, START), 0);
	return n;
}

/* To a daemon that knows nothing of any other; not published. */
static struct bs_attachment *attach_to_new_node(void)
{
	const char *reason = "";
	struct bs_attach_reply reply = {.arena_bytes = config.arena_bytes};
	struct bs_attachment *a;

	node = node_new();
	client_number =
		bsn_client_add(node, (int)getpid(), "tester", START, &fds);
	CHECK(client_number > 0);
	bsn_poll(node, START);

	a = bs_attachment_map(&reply,
			      (int[BS_FDS]){fds.arena, fds.channel, fds.context,
					    bsn_policy_fd(node)},
			      &reason);
	if (!a)
		fprintf(stderr, "%s\n", reason);
	CHECK(a);
	return a;
}

void process_start(uint32_t segments)
{
	config = (struct bsn_config){
		.node_name = "node-a",
		.pool_bytes = POOL_BYTES,
		.arena_bytes = (uint64_t)segments * BS_SEGMENT_BYTES,
		.store_bytes = 1 << 20,
		.trace_bytes_max = 2 * BS_PAYLOAD_MAX,
		.percentage_threshold = UINT64_MAX,
		.reclaim_percent = 90,
		.clients_max = 4,
		.tombstones = 4096,
		.ticks_per_s = 1000000000,
	};
	attachment = attach_to_new_node();
	process_publish();
}

void process_find_other_daemon(void)
{
	attachment = attach_to_new_node();
}

void process_publish(void)
{
	pthread_mutex_lock(&bs_process.lock);
	bs_attachment_publish(attachment);
	pthread_mutex_unlock(&bs_process.lock);
}

void process_succeed(void)
{
	int store = dup(bsn_store_fd(node)), keep = dup(bsn_keep_fd(node));

	node = node_new();
	CHECK_EQ(bsn_adopt_keep(node, START, keep), 0);
	CHECK_EQ(bsn_adopt_store(node, START, store), 0);
	CHECK_EQ(bsn_client_adopt(node, client_number, (int)getpid(), "tester",
				  START, &fds),
		 client_number);
	close(store);
	close(keep);
}

void process_join(void)
{
	bs_thread_enter(&bs_thread);
	CHECK(bs_thread_has_slot(&bs_thread));
}
