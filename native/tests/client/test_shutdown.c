/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bs_shutdown() in the middle of what the attach thread does. The test has the
 * library in itself, and so can stand in a trigger queue for as long as it likes.
 */
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "client.h"
#include "fake_node.h"

static struct fake_node node;

static void *shut_down(void *unused)
{
	(void)unused;
	bs_shutdown();
	/* The attach thread stops that one before it ends. */
	CHECK(!bs_prefault_runs());
	return NULL;
}

/* Whoever comes second waits until all is over: what the attach thread still uses
 * nobody unmaps. */
static void two_at_once(void)
{
	const struct bs_context_segment *queue;
	struct bs_context_segment *context;
	struct bs_attachment *a;
	pthread_t threads[2];
	int fd;

	fake_node_attach(&node, 16, 16);
	CHECK_EQ(bs_begin((struct bs_trace_id){1, 1}), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK(bs_prefault_runs());
	a = bs_thread.attachment;
	queue = load_acquire(&a->queue);
	WRITE_ONCE(bs_thread.member->pushing, queue);
	context = fake_node_make_context(&fd);
	fake_node_news(&node, BS_NEWS_CONTEXT, 1, fd);
	while (load_acquire(&a->queue) == queue)
		sched_yield();

	/* From here on the attach thread waits until we have left it, or is tired
	 * of it. */
	for (int i = 0; i < 2; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, shut_down, NULL), 0);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	CHECK(bs_process.current == &bs_nowhere);
	CHECK(a->is_torn);
	WRITE_ONCE(bs_thread.member->pushing, NULL);
	bs_shutdown();
	CHECK(!bs_attachments);
	munmap(context, sizeof(*context));
	close(fd);
}

int main(void)
{
	fake_node_open(&node);
	RUN(two_at_once);
	fake_node_close(&node);
	return 0;
}
