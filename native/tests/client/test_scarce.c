/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library does where the system gives it nothing. The test has the library
 * in itself; the attach thread makes no tick (TICK_MS).
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fake_node.h"
#include "writer.h"

static struct fake_node node;
static int threads_alone; /* before the library started one */

static struct bs_trace_id trace(uint64_t i)
{
	return (struct bs_trace_id){0xab, i};
}

/* ---------------------------------------------------------------- memory --- */

static uint64_t address_space(void)
{
	uint64_t pages;
	FILE *f = fopen("/proc/self/statm", "r");

	CHECK(f);
	CHECK_EQ(fscanf(f, "%" SCNu64, &pages), 1);
	fclose(f);
	return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* A thread stands in the arena of a daemon that is gone. Where there is no memory for
 * its segment the arena stays, until there is. */
static void an_old_arena_goes_when_there_is_room(void)
{
	struct bs_attachment *old, *unused;
	struct rlimit limit, none;

	fake_node_attach(&node, 16, 1);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(getrlimit(RLIMIT_AS, &limit), 0);
	none = limit;
	none.rlim_cur = address_space();

	pthread_mutex_lock(&bs_process.lock);
	old = bs_process.current;
	unused = bs_attachment_publish(&bs_nowhere);
	CHECK(!unused);
	CHECK_EQ(setrlimit(RLIMIT_AS, &none), 0);
	bs_attachment_retire_old();
	CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
	if (old->is_torn)
		printf("  not here: this emulator limits nothing\n");
	bs_attachment_retire_old();
	CHECK(old->is_torn);
	pthread_mutex_unlock(&bs_process.lock);

	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	fake_node_hang_up(&node);
}

/* A process may want all of its memory there at once. Of the arena it gets what it
 * writes to all the same. */
static void an_arena_is_not_locked(void)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = 8 * page;
	int fd = memfd_create("arena", MFD_ALLOW_SEALING);
	unsigned char *arena, *other;
	const char *reason;
	struct stat st;

	CHECK_EQ(ftruncate(fd, (off_t)bytes), 0);
	CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK), 0);
	/* Sanitizers make nothing of mlockall(). */
	CHECK_EQ(syscall(SYS_mlockall, MCL_FUTURE), 0);
	arena = bs_map_arena(fd, bytes, &reason);
	CHECK(arena);
	CHECK_EQ(fstat(fd, &st), 0);
	CHECK_EQ(st.st_blocks, 0);
	arena[3 * page] = 1;
	CHECK_EQ(fstat(fd, &st), 0);
	CHECK_EQ((size_t)st.st_blocks * 512, page);

	/* The test itself: of another mapping all would be there. */
	other = bs_map(fd, bytes, true, &reason);
	CHECK(other);
	CHECK_EQ(fstat(fd, &st), 0);
	CHECK_EQ((size_t)st.st_blocks * 512, bytes);
	CHECK_EQ(syscall(SYS_munlockall), 0);
	bs_unmap(other, bytes);
	bs_unmap(arena, bytes);
	close(fd);
}

/* For who may lock what he likes there is no limit. */
static void may_lock_all(bool may)
{
	static struct __user_cap_data_struct before[_LINUX_CAPABILITY_U32S_3];
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3,
						  0};
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

	if (!may)
		CHECK_EQ(syscall(SYS_capget, &header, before), 0);
	memcpy(data, before, sizeof(data));
	if (!may)
		data[0].effective &= ~(1u << CAP_IPC_LOCK);
	CHECK_EQ(syscall(SYS_capset, &header, data), 0);
}

/* qemu maps more of its own meanwhile (linux-user, mremap). */
static bool mapping_can_grow(int fd, size_t bytes)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *p = mmap(NULL, page, PROT_NONE, MAP_SHARED, fd, 0), *grown;

	CHECK(p != MAP_FAILED);
	CHECK_EQ(syscall(SYS_munlock, p, page), 0);
	grown = mremap(p, page, bytes, MREMAP_MAYMOVE);
	munmap(grown == MAP_FAILED ? p : grown,
	       grown == MAP_FAILED ? page : bytes);
#ifdef __x86_64__
	CHECK(grown != MAP_FAILED);
#endif
	return grown != MAP_FAILED;
}

/* Nor does it count towards how much the process may lock. */
static void an_arena_needs_no_limit(void)
{
	const size_t bytes = 256 << 10;
	int fd = memfd_create("arena", MFD_ALLOW_SEALING);
	struct rlimit limit, little;
	const char *reason = NULL;
	void *arena, *other;
	bool can_grow;

	CHECK_EQ(ftruncate(fd, (off_t)bytes), 0);
	CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK), 0);
	CHECK_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
	little = limit;
	little.rlim_cur = bytes / 4;
	may_lock_all(false);
	CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &little), 0);
	CHECK_EQ(syscall(SYS_mlockall, MCL_FUTURE), 0);
	can_grow = mapping_can_grow(fd, bytes);
	arena = bs_map_arena(fd, bytes, &reason);
	other = bs_map(fd, bytes, true, &reason);
	CHECK_EQ(syscall(SYS_munlockall), 0);
	CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
	may_lock_all(true);
	if (!can_grow)
		printf("  not here: this emulator lets no mapping grow\n");
	CHECK(arena || !can_grow);
	CHECK(!other);
	CHECK(reason == bs_no_lock || !can_grow);
	bs_unmap(arena, bytes);
	close(fd);
}

/* ------------------------------------------------------------- debuggers --- */

/* A debugger stops a thread where it is, for as long as it likes. */
static void nobody_waits_for_a_thread_that_is_stopped(void)
{
	struct bs_context_segment *queue;
	struct bs_attachment *old, *unused;
	const char *reason;

	fake_node_attach(&node, 16, 1);
	CHECK_EQ(bs_begin(trace(3)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	pthread_mutex_lock(&bs_process.lock);

	/* While it takes a segment. */
	WRITE_ONCE(bs_thread.member->is_taking, true);
	old = bs_process.current;
	unused = bs_attachment_publish(&bs_nowhere);
	CHECK(!unused);
	bs_attachment_retire_old();
	CHECK(!old->is_torn);
	WRITE_ONCE(bs_thread.member->is_taking, false);
	bs_attachment_retire_old();
	CHECK(old->is_torn);

	/* While it fires. */
	queue = bs_context_map(node.fds[BS_FD_CONTEXT], &reason);
	CHECK(queue);
	WRITE_ONCE(bs_thread.member->pushing, queue);
	CHECK(!bs_queue_unmap(queue));
	CHECK_EQ(queue->magic, BS_ABI_MAGIC);
	WRITE_ONCE(bs_thread.member->pushing, NULL);
	CHECK(bs_queue_unmap(queue));
	pthread_mutex_unlock(&bs_process.lock);
	CHECK_EQ(bs_end(), 0);
	fake_node_hang_up(&node);
}

/* So, sends a policy that trusts, and waits until that is taken. */
static void be_heard(uint64_t number)
{
	struct bs_policy *policy;
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	CHECK_EQ(ftruncate(fd, BS_POLICY_BYTES), 0);
	policy = mmap(NULL, BS_POLICY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		      fd, 0);
	CHECK(policy != MAP_FAILED);
	*policy = *node.policy;
	policy->trust_incoming = 1;
	CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK), 0);
	fake_node_news(&node, BS_NEWS_POLICY, number, fd);
	while (!bs_trusts_incoming())
		sched_yield();
	munmap(policy, BS_POLICY_BYTES);
	close(fd);
}

/* The daemon hears of it when the thread has left the queue, however late. */
static void who_stays_in_a_queue_is_waited_for(void)
{
	struct bs_context_segment *context, *old;
	struct bs_attachment *unused;
	int fd;

	fake_node_attach(&node, 16, 1);
	CHECK_EQ(bs_wait_attached(-1), 0);
	CHECK_EQ(bs_begin(trace(3)), 0);
	old = bs_process.current->queue;
	WRITE_ONCE(bs_thread.member->pushing, old);
	context = fake_node_make_context(&fd);
	fake_node_news(&node, BS_NEWS_CONTEXT, 1, fd);
	/* It comes after what is heard before. */
	be_heard(2);
	CHECK(!fake_node_answered(&node, 1));
	CHECK_EQ(READ_ONCE(old->magic), BS_ABI_MAGIC);
	CHECK_EQ(context->slots[0].trace_lo, 3);
	WRITE_ONCE(bs_thread.member->pushing, NULL);
	fake_node_news(&node, BS_NEWS_POLICY, 3, STDERR_FILENO);
	while (!fake_node_answered(&node, 1))
		sched_yield();
	CHECK_EQ(bs_end(), 0);
	munmap(node.context, sizeof(*node.context));
	fake_node_use_context(&node, context, fd);
	pthread_mutex_lock(&bs_process.lock);
	unused = bs_attachment_publish(&bs_nowhere);
	CHECK(!unused);
	pthread_mutex_unlock(&bs_process.lock);
	fake_node_hang_up(&node);
}

static bool send_fails;

/* As on a socket whose buffer is full.
 * NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name) */
ssize_t send(int fd, const void *bytes, size_t n, int flags)
{
	if (send_fails) {
		send_fails = false;
		errno = EAGAIN;
		return -1;
	}
	return syscall(SYS_sendto, fd, bytes, n, flags, NULL, 0);
}

/* What could not be said is said later. */
static void an_answer_is_owed_until_it_is_sent(void)
{
	struct bs_context_segment *context;
	struct bs_attachment *unused;
	int fd;

	fake_node_attach(&node, 16, 1);
	CHECK_EQ(bs_begin(trace(3)), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_wait_attached(-1), 0);
	pthread_mutex_lock(&bs_process.lock);
	send_fails = true;
	pthread_mutex_unlock(&bs_process.lock);
	context = fake_node_make_context(&fd);
	fake_node_news(&node, BS_NEWS_CONTEXT, 1, fd);
	be_heard(2);
	CHECK(!send_fails);
	fake_node_news(&node, BS_NEWS_POLICY, 3, node.fds[BS_FD_POLICY]);
	while (bs_trusts_incoming())
		sched_yield();
	CHECK(fake_node_answered(&node, 1));
	munmap(node.context, sizeof(*node.context));
	fake_node_use_context(&node, context, fd);
	pthread_mutex_lock(&bs_process.lock);
	unused = bs_attachment_publish(&bs_nowhere);
	CHECK(!unused);
	pthread_mutex_unlock(&bs_process.lock);
	fake_node_hang_up(&node);
}

static bool mremap_fails;

/* As where the kernel has no memory for a mapping, and finds that out when it has
 * unmapped what was there.
 * NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name) */
void *mremap(void *from, size_t bytes, size_t new_bytes, int flags, ...)
{
	va_list rest;
	void *to;

	va_start(rest, flags);
	to = flags & MREMAP_FIXED ? va_arg(rest, void *) : NULL;
	va_end(rest);
	if (mremap_fails) {
		mremap_fails = false;
		munmap(to, new_bytes);
		errno = ENOMEM;
		return MAP_FAILED;
	}
	/* NOLINTNEXTLINE(performance-no-int-to-ptr) */
	return (void *)syscall(SYS_mremap, from, bytes, new_bytes, flags, to);
}

/* All is recorded where the node's table is gone. */
static void a_policy_that_is_gone_records_all(void)
{
	struct bs_attachment *a;
	const char *reason;

	fake_node_attach(&node, 16, 1);
	CHECK_EQ(bs_begin(trace(3)), 0);
	CHECK_EQ(bs_end(), 0);
	pthread_mutex_lock(&bs_process.lock);
	a = bs_process.current;
	WRITE_ONCE(node.policy->percentage_threshold, 0);
	CHECK_EQ(READ_ONCE(a->policy->percentage_threshold), 0);
	mremap_fails = true;
	reason = bs_policy_replace(a, node.fds[BS_FD_POLICY]);
	CHECK(reason == bs_no_room);
	CHECK(!mremap_fails);
	CHECK_EQ(a->policy->magic, 0);
	CHECK_EQ(READ_ONCE(a->policy->percentage_threshold), BS_PERCENTAGE_ALL);
	/* The next one takes its place. */
	reason = bs_policy_replace(a, node.fds[BS_FD_POLICY]);
	CHECK(!reason);
	CHECK_EQ(READ_ONCE(a->policy->percentage_threshold), 0);
	a = bs_attachment_publish(&bs_nowhere);
	CHECK(!a);
	pthread_mutex_unlock(&bs_process.lock);
	fake_node_hang_up(&node);
}

/* ----------------------------------------------------------------- files --- */

static int not_ours; /* a file of the application's; 0: none */
static int taken_over[BS_FDS], n_taken_over;

static bool is_the_nodes(int fd)
{
	for (int i = 0; i < BS_FDS; i++) {
		if (fd == node.fds[i])
			return true;
	}
	return false;
}

/* What the library calls when it has received its files: then the application
 * closes all, as daemons do, and gets the numbers for files of its own.
 * NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name) */
int mprotect(void *at, size_t bytes, int protection)
{
	for (int fd = 3; not_ours && fd < 64; fd++) {
		if (fcntl(fd, F_GET_SEALS) < 0 || is_the_nodes(fd))
			continue;
		CHECK_EQ(dup2(not_ours, fd), fd);
		CHECK(n_taken_over < BS_FDS);
		taken_over[n_taken_over++] = fd;
	}
	not_ours = 0;
	return (int)syscall(SYS_mprotect, at, bytes, protection);
}

static void the_applications_files_stay_open(void)
{
	struct bs_attach_reply reply;

	fake_node_make(&node, 16);
	bs_wait_attached(0);
	fake_node_accept(&node);
	fake_node_fill_reply(&node, &reply);
	not_ours = open("/dev/null", O_RDONLY | O_CLOEXEC);
	CHECK(not_ours > 0);
	fake_node_send(&node, &reply, sizeof(reply), node.fds, BS_FDS);
	fake_node_wait_hangup(&node);
	CHECK_EQ(n_taken_over, BS_FDS);
	for (int i = 0; i < BS_FDS; i++)
		CHECK(fcntl(taken_over[i], F_GETFD) >= 0);
	for (int i = 0; i < BS_FDS; i++)
		close(taken_over[i]);
}

/* --------------------------------------------------------------- threads --- */

static time_t seconds(void)
{
	struct timespec now;

	CHECK_EQ(clock_gettime(CLOCK_MONOTONIC_COARSE, &now), 0);
	return now.tv_sec;
}

/* The process has as many as it may for a moment, and one more a second later. */
static void it_attaches_when_a_thread_can_be_had(void)
{
	pthread_attr_t all, huge;
	time_t failed_at;

	CHECK_EQ(pthread_getattr_default_np(&all), 0);
	CHECK_EQ(pthread_attr_init(&huge), 0);
	CHECK_EQ(pthread_attr_setstacksize(&huge, (size_t)1 << 50), 0);
	CHECK_EQ(pthread_setattr_default_np(&huge), 0);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(bs_wait_attached(-1), -ETIMEDOUT);
	failed_at = seconds();
	CHECK_EQ(pthread_setattr_default_np(&all), 0);
	pthread_attr_destroy(&huge);
	pthread_attr_destroy(&all);
	while (seconds() == failed_at)
		sched_yield();
	CHECK_EQ(count_threads(), threads_alone);
	CHECK_EQ(bs_begin(trace(1)), 0);
	CHECK_EQ(bs_end(), 0);
	CHECK(count_threads() > threads_alone);
}

/* The library's, by which it is told of a thread's end. */
static void delete_exit_key(void)
{
	for (pthread_key_t key = 0; key < PTHREAD_KEYS_MAX; key++) {
		if (pthread_getspecific(key) != &bs_thread)
			continue;
		CHECK_EQ(pthread_key_delete(key), 0);
		return;
	}
	CHECK(!"the main thread has one");
}

static void *write_to(void *handle)
{
	CHECK_EQ(bs_write(handle, BS_RECORD_DATA, "", 0), -ENOSPC);
	return NULL;
}

/* It cannot write to a handle of another thread's, and says so. */
static void a_thread_that_cannot_join_loses_its_records(void)
{
	struct fake_run run;
	struct bs_trace handle;
	struct bs_stats stats;
	pthread_t thread;

	fake_node_attach(&node, 16, 1);
	CHECK_EQ(bs_wait_attached(-1), 0);
	CHECK_EQ(bs_open(&handle, trace(2)), 0);
	CHECK_EQ(bs_write(&handle, BS_RECORD_DATA, "", 0), 0);
	delete_exit_key();
	CHECK_EQ(pthread_create(&thread, NULL, write_to, &handle), 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(bs_close(&handle), 0);
	CHECK(fake_node_run(&node, 0, &run));
	CHECK_EQ(run.flags, BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY);
	bs_get_stats(&stats);
	CHECK_EQ(stats.records_lost, 1);
}

int main(void)
{
	threads_alone = count_threads();
	fake_node_open(&node);
	RUN(it_attaches_when_a_thread_can_be_had);
	RUN(an_old_arena_goes_when_there_is_room);
	RUN(an_arena_is_not_locked);
	RUN(an_arena_needs_no_limit);
	RUN(nobody_waits_for_a_thread_that_is_stopped);
	RUN(who_stays_in_a_queue_is_waited_for);
	RUN(an_answer_is_owed_until_it_is_sent);
	RUN(a_policy_that_is_gone_records_all);
	RUN(the_applications_files_stay_open);
	RUN(a_thread_that_cannot_join_loses_its_records);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
