/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork() in the middle of everything. The child has none of the mappings: one
 * access too many, and it dies.
 */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fake_node.h"

static struct fake_node node;
static struct bs_trace inherited;
static int threads_alone; /* before the library started one */

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){4, number};
}

static void join_child(pid_t pid)
{
	int status;

	CHECK(pid > 0);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
}

/* What was open in the parent stays the parent's. */
static void in_child(void)
{
	struct bs_stats stats;
	char value[BS_CONTEXT_MAX + 1];

	CHECK_EQ(bs_tracepoint("", 0), -ENOENT);
	CHECK_EQ(bs_end(), -ENOENT);
	CHECK_EQ(bs_write(&inherited, BS_RECORD_DATA, "", 0), -ENOENT);
	CHECK_EQ(bs_breadcrumb(&inherited, "a"), -ENOENT);
	CHECK_EQ(bs_serialize(&inherited, 1, value, sizeof(value)), -ENOENT);
	bs_get_stats(&stats);
	CHECK(!stats.attached);
	CHECK_EQ(stats.runs, 0);
	CHECK_EQ(stats.attachments, 0);
	/* Nor does a thread try to. */
	CHECK_EQ(count_threads(), threads_alone);
	/* This is for the node, so it attaches, which may be done at once. */
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), -ENOTCONN);
}

static bool is_asleep(const char *task)
{
	char path[64], line[256] = "";
	const char *state;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/self/task/%.16s/stat", task);
	f = fopen(path, "r");
	if (!f)
		return true;
	if (!fgets(line, sizeof(line), f))
		line[0] = 0;
	fclose(f);
	state = strrchr(line, ')');
	return state && state[2] == 'S';
}

/* The address sanitizer takes no lock at fork(): if another thread was in the midst of
 * an allocation, the child finds the allocator locked for ever. */
static void wait_for_others_to_sleep(void)
{
	bool asleep = false;

	while (!asleep) {
		DIR *tasks = opendir("/proc/self/task");
		const struct dirent *task;

		CHECK(tasks);
		asleep = true;
		while ((task = readdir(tasks)))
			asleep &= task->d_name[0] == '.' ||
				  atoi(task->d_name) == gettid() ||
				  is_asleep(task->d_name);
		closedir(tasks);
		sched_yield();
	}
}

static void test_child_that_does_not_record(void)
{
	uint64_t runs = node.areas[0].runs;
	pid_t pid;

	wait_for_others_to_sleep();
	pid = fork();

	if (pid == 0) {
		in_child();
		CHECK_EQ(bs_close(&inherited), -ENOENT);
		exit(0);
	}
	join_child(pid);
	CHECK_EQ(node.areas[0].runs, runs);
	CHECK_EQ(bs_tracepoint("", 0), 0);
}

/* It attaches anew, as itself. */
static void test_child_that_records(void)
{
	int parent_connection = node.connection;
	struct bs_attach_request parents = node.request;
	struct bs_attach_reply reply;
	struct fake_run run;
	int ready[2];
	char byte;
	pid_t pid;

	CHECK_EQ(pipe(ready), 0);
	pid = fork();
	if (pid == 0) {
		close(ready[0]);
		in_child();
		CHECK_EQ(bs_begin(trace(10)), 0);
		CHECK_EQ(bs_wait_attached(-1), 0);
		CHECK_EQ(bs_tracepoint("", 0), 0);
		CHECK_EQ(bs_write(&inherited, BS_RECORD_DATA, "", 0), -ENOENT);
		CHECK_EQ(bs_end(), 0);
		bs_shutdown();
		exit(0);
	}
	close(ready[1]);
	/* Earlier children may have knocked, and gone. */
	node.connection = -1;
	do {
		fake_node_hang_up(&node);
		fake_node_accept(&node);
	} while (node.request.pid != pid);
	CHECK_EQ(node.request.token[0] | node.request.token[1], 0);
	CHECK(!strcmp(node.request.service, parents.service));
	/* The parent goes on in what it has, which this node drops now. */
	fake_node_make(&node, 2);
	fake_node_grant(&node, 0, true);
	fake_node_fill_reply(&node, &reply);
	fake_node_send(&node, &reply, sizeof(reply), node.fds, BS_FDS);
	join_child(pid);
	CHECK_EQ(read(ready[0], &byte, 1), 0);
	close(ready[0]);
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.id.lo, 10);
	CHECK_EQ(run.flags, BS_RUN_FIRST | BS_RUN_LAST);
	CHECK(!fake_node_run(&node, 0, &run));
	fake_node_hang_up(&node);
	node.connection = parent_connection;
	CHECK_EQ(bs_tracepoint("", 0), 0);
}

/* The connection is the parent's alone: when it goes, the daemon is told, also
 * while a child lives on. */
static void test_connection_is_not_inherited(void)
{
	int hold[2];
	char byte;
	pid_t pid;

	CHECK_EQ(pipe(hold), 0);
	pid = fork();
	if (pid == 0) {
		close(hold[1]);
		CHECK_EQ(read(hold[0], &byte, 1), 0);
		exit(0);
	}
	close(hold[0]);
	bs_shutdown();
	fake_node_wait_hangup(&node);
	close(hold[1]);
	join_child(pid);
}

/* As fork(), but nobody is told. */
static pid_t raw_clone(void)
{
	return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

/* Whether a child finds zeroes where it was said to: not under qemu-user. */
static bool children_are_wiped(void)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *p = mmap(NULL, page, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int status;
	pid_t pid;

	CHECK(p != MAP_FAILED);
	p[0] = 1;
	CHECK_EQ(madvise(p, page, MADV_WIPEONFORK), 0);
	pid = raw_clone();
	if (pid == 0)
		_exit(p[0]);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	munmap(p, page);
	if (status)
		printf("  not here: this emulator wipes nothing\n");
	return status == 0;
}

/* Whatever such a child calls first must not go where its parent was. */
static void call_first(int which)
{
	static const char context[] = "1-00000000-00000000-af63dc4c8601ec8c";
	char value[BS_CONTEXT_MAX + 1];
	struct bs_trace handle;
	struct bs_stats stats;

	switch (which) {
	case 0:
		CHECK_EQ(bs_begin(trace(1)), 0);
		CHECK_EQ(bs_tracepoint("", 0), -ENOSPC);
		CHECK_EQ(bs_end(), 0);
		break;
	case 1:
		CHECK_EQ(bs_end(), -ENOENT);
		break;
	case 2:
		CHECK_EQ(bs_tracepoint("", 0), -ENOENT);
		break;
	case 3:
		CHECK_EQ(bs_write(&inherited, BS_RECORD_DATA, "", 0), -ENOENT);
		break;
	case 4:
		CHECK_EQ(bs_open(&handle, trace(1)), 0);
		CHECK_EQ(bs_close(&handle), 0);
		break;
	case 5:
		bs_close(&inherited);
		break;
	case 6:
		CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), -ENOTCONN);
		break;
	case 7:
		CHECK(bs_serialize(NULL, 1, value, sizeof(value)) < 0);
		break;
	case 8:
		CHECK(bs_deserialize(NULL, 1, context, strlen(context)) < 0);
		break;
	case 9:
		CHECK(bs_span_start(NULL, 1, 2, 3, 4, "x") < 0);
		break;
	case 10:
		CHECK(bs_breadcrumb(NULL, "a") < 0);
		break;
	case 11:
		CHECK(!bs_trusts_incoming());
		break;
	case 12:
		CHECK_EQ(bs_node_ref()[0], '\0');
		break;
	case 13:
		bs_get_stats(&stats);
		CHECK_EQ(stats.runs, 0);
		break;
	case 14:
		bs_shutdown();
		break;
	default:
		exit(1);
	}
	/* Then as any child. */
	CHECK_EQ(bs_write(&inherited, BS_RECORD_DATA, "", 0), -ENOENT);
	bs_get_stats(&stats);
	CHECK(!stats.attached);
	_exit(0);
}

static void test_raw_clone(void)
{
	uint64_t runs = node.areas[0].runs;

	if (!children_are_wiped())
		return;
	for (int which = 0; which <= 14; which++) {
		pid_t pid = raw_clone();

		if (pid == 0)
			call_first(which);
		join_child(pid);
		/* The trace of the parent goes on. */
		CHECK_EQ(bs_tracepoint("", 0), 0);
	}
	CHECK_EQ(node.areas[0].runs, runs);
}

/* Of a thread that never used the library. */
static void *clone_unused(void *arg)
{
	pid_t pid = raw_clone();

	if (pid == 0)
		call_first(*(int *)arg);
	join_child(pid);
	return NULL;
}

static void test_raw_clone_of_unused_thread(void)
{
	if (!children_are_wiped())
		return;
	for (int which = 0; which <= 14; which++) {
		pthread_t thread;

		CHECK_EQ(pthread_create(&thread, NULL, clone_unused, &which),
			 0);
		CHECK_EQ(pthread_join(thread, NULL), 0);
	}
}

static bool stop;

static void *work(void *arg)
{
	uint64_t number = *(uint64_t *)arg;

	while (!READ_ONCE(stop)) {
		bs_begin(trace(number));
		bs_tracepoint(&number, sizeof(number));
		bs_end();
	}
	return NULL;
}

/* At any moment of other threads. */
static void test_fork_beside_threads(void)
{
	static uint64_t numbers[2] = {1, 2};
	pthread_t threads[2];

	for (int i = 0; i < 2; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, work, &numbers[i]),
			 0);
	for (int i = 0; i < 100; i++) {
		pid_t pid = fork();

		if (pid == 0) {
			bs_begin(trace(1));
			bs_tracepoint("", 0);
			bs_end();
			_exit(0);
		}
		join_child(pid);
	}
	WRITE_ONCE(stop, true);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
}

int main(void)
{
	threads_alone = count_threads();
	fake_node_open(&node);
	fake_node_attach(&node, 4, 4);
	CHECK_EQ(bs_open(&inherited, trace(1)), 0);
	CHECK_EQ(bs_write(&inherited, BS_RECORD_DATA, "", 0), 0);
	CHECK_EQ(bs_begin(trace(2)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	RUN(test_child_that_does_not_record);
	RUN(test_child_that_records);
	RUN(test_raw_clone);
	RUN(test_raw_clone_of_unused_thread);
	RUN(test_fork_beside_threads);
	RUN(test_connection_is_not_inherited);
	fake_node_close(&node);
	return 0;
}
