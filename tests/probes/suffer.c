/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process to which what a probe looks for happens: suffer CAUSE [ARGUMENT].
 *
 * The victim is a thread in a trace of its own. So is who causes it (the lateral), where
 * that is a thread of this process, and so is a thread beside them to which nothing
 * happens (the innocent). Prints their ids and how long the victim waited, as it saw it;
 * once for each line that it reads, until there is none.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "backsight.h"

#define MS 1000000ull
#define ATTACH_TIMEOUT_MS 30000

static struct bs_trace_id victim, lateral, innocent;
static pthread_mutex_t contended = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t in_place;
static pthread_barrier_t taken, let_go; /* of two, each time once more */
static bool over;
static int pipe_fds[2];

static void require(bool holds, const char *what)
{
	if (holds)
		return;
	perror(what);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
	const struct timespec time = {.tv_sec = (time_t)(ns / 1000000000),
				      .tv_nsec = (long)(ns % 1000000000)};

	nanosleep(&time, NULL);
}

static struct bs_trace_id new_trace(void)
{
	struct bs_trace_id id;

	require(getrandom(&id, sizeof(id), 0) == sizeof(id), "getrandom");
	return id;
}

static uint64_t begin(struct bs_trace_id id, const char *name)
{
	uint64_t span = id.lo | 1;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	bs_begin(id);
	bs_span_start(NULL, span, 0,
		      (uint64_t)now.tv_sec * 1000000000ull +
			      (uint64_t)now.tv_nsec,
		      1, name);
	return span;
}

static void end(uint64_t span, const char *name)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	bs_span_end(NULL, span,
		    (uint64_t)now.tv_sec * 1000000000ull +
			    (uint64_t)now.tv_nsec,
		    0, name, NULL, 0);
	bs_end();
}

/* On the CPU with which the caller says; here the first that we may use. */
static void pin(void)
{
	cpu_set_t allowed, one;

	require(!sched_getaffinity(0, sizeof(allowed), &allowed), "affinity");
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &allowed))
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		require(!sched_setaffinity(0, sizeof(one), &one), "affinity");
		return;
	}
}

/* How long this thread has been on a run queue so far, as the scheduler counts
 * (proc_pid_schedstat(5)). */
static uint64_t run_delay_ns(void)
{
	FILE *file = fopen("/proc/thread-self/schedstat", "re");
	uint64_t ran, waited;

	require(file && fscanf(file, "%" SCNu64 " %" SCNu64, &ran, &waited) ==
				2,
		"schedstat");
	fclose(file);
	return waited;
}

static void print_result(uint64_t took_ns)
{
	printf("{\"victim\": \"%016" PRIx64 "%016" PRIx64
	       "\", \"lateral\": \"%016" PRIx64 "%016" PRIx64
	       "\", \"innocent\": \"%016" PRIx64 "%016" PRIx64
	       "\", \"took_ns\": %" PRIu64 "}\n",
	       victim.hi, victim.lo, lateral.hi, lateral.lo, innocent.hi,
	       innocent.lo, took_ns);
	fflush(stdout);
}

/* ------------------------------------------------------------ causes --- */

static void *another_hog(void *nothing)
{
	uint64_t span = begin(lateral, "hog");

	pin();
	while (!__atomic_load_n(&over, __ATOMIC_RELAXED))
		;
	end(span, "hog");
	return nothing;
}

/* So many turns the victim has to wait. Each is some 3 ms long, on few CPUs 1 ms. */
#define HOGS 4

static void *hog(void *nothing)
{
	pthread_t others[HOGS - 1];

	for (int i = 0; i < HOGS - 1; i++)
		pthread_create(&others[i], NULL, another_hog, NULL);
	pthread_barrier_wait(&in_place);
	another_hog(nothing);
	for (int i = 0; i < HOGS - 1; i++)
		pthread_join(others[i], NULL);
	return nothing;
}

static uint64_t wait_for_cpu(void)
{
	uint64_t start, before;

	pin();
	pthread_barrier_wait(&in_place);
	start = now_ns();
	before = run_delay_ns();
	while (now_ns() - start < 400 * MS)
		;
	return run_delay_ns() - before;
}

/* Its group may run for a part of the time. */
static uint64_t run_beyond_quota(void)
{
	struct timespec ran;
	uint64_t start, waited_ns;

	pthread_barrier_wait(&in_place);
	start = now_ns();
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
	waited_ns =
		(uint64_t)ran.tv_sec * 1000000000ull + (uint64_t)ran.tv_nsec;
	while (now_ns() - start < 1000 * MS)
		;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
	return now_ns() - start -
	       ((uint64_t)ran.tv_sec * 1000000000ull + (uint64_t)ran.tv_nsec -
		waited_ns);
}

#define HELD_NS (60 * MS)

static bool victim_locks;

/* On a busy machine it may be a while until the victim waits. It is the first thread,
 * whose state /proc/self/stat has. */
static void await_victim(void)
{
	char state = 0;

	while (state != 'S') {
		FILE *file = fopen("/proc/self/stat", "re");
		bool locks = __atomic_load_n(&victim_locks, __ATOMIC_RELAXED);

		require(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1,
			"stat");
		fclose(file);
		if (!locks)
			state = 0;
	}
}

static void *holder(void *nothing)
{
	uint64_t span = begin(lateral, "holder");

	pthread_mutex_lock(&contended);
	pthread_barrier_wait(&in_place);
	await_victim();
	sleep_ns(HELD_NS);
	pthread_mutex_unlock(&contended);
	end(span, "holder");
	return nothing;
}

static uint64_t wait_for_lock(void)
{
	uint64_t start;

	pthread_barrier_wait(&in_place);
	start = now_ns();
	__atomic_store_n(&victim_locks, true, __ATOMIC_RELAXED);
	pthread_mutex_lock(&contended);
	pthread_mutex_unlock(&contended);
	return now_ns() - start;
}

static void *writer(void *nothing)
{
	pthread_barrier_wait(&in_place);
	sleep_ns(HELD_NS);
	require(write(pipe_fds[1], "", 1) == 1, "pipe");
	return nothing;
}

static void read_pipe(void)
{
	char byte;

	require(read(pipe_fds[0], &byte, 1) == 1, "pipe");
}

static uint64_t wait_for_pipe(void)
{
	uint64_t start;

	pthread_barrier_wait(&in_place);
	start = now_ns();
	read_pipe();
	return now_ns() - start;
}

static const char *path;

/* Asks the disk for something too, and does not wait long. */
static void *other_writer(void *nothing)
{
	char name[4096];
	uint64_t span = begin(lateral, "other writer");
	int fd;

	snprintf(name, sizeof(name), "%s.other", path);
	fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	require(fd >= 0 && write(fd, name, sizeof(name)) == sizeof(name), name);
	/* The victim waits at once, and fires then. */
	require(!fdatasync(fd), "fdatasync");
	pthread_barrier_wait(&in_place);
	while (!__atomic_load_n(&over, __ATOMIC_RELAXED)) {
		require(pwrite(fd, name, sizeof(name), 0) == sizeof(name),
			name);
		require(!fdatasync(fd), "fdatasync");
	}
	close(fd);
	end(span, "other writer");
	return nothing;
}

static int write_mib(const char *name, int mib)
{
	static char block[1 << 20];
	int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	require(fd >= 0, name);
	memset(block, 1, sizeof(block));
	for (int i = 0; i < mib; i++)
		require(write(fd, block, sizeof(block)) == sizeof(block), name);
	return fd;
}

static uint64_t sync_file(int fd)
{
	uint64_t start = now_ns();

	require(!fsync(fd), "fsync");
	return now_ns() - start;
}

static uint64_t wait_for_disk(void)
{
	int fd = write_mib(path, 64);

	pthread_barrier_wait(&in_place);
	return sync_file(fd);
}

/* After the disk was asked for much else by the same thread, for a trace that did not wait. */
static uint64_t wait_for_less(void)
{
	char name[4096];
	int much, little = write_mib(path, 1);

	snprintf(name, sizeof(name), "%s.much", path);
	pthread_barrier_wait(&in_place);
	bs_end();
	bs_begin(lateral);
	much = write_mib(name, 16);
	require(!sync_file_range(much, 0, 0, SYNC_FILE_RANGE_WRITE),
		"sync_file_range");
	bs_end();
	bs_begin(victim);
	return sync_file(little);
}

/* Waits for work, which is nothing to tell of. */
static uint64_t wait_for_nothing(void)
{
	uint64_t start;

	pthread_barrier_wait(&in_place);
	start = now_ns();
	sleep_ns(HELD_NS);
	return now_ns() - start;
}

static uint64_t wait_for_events(void)
{
	struct epoll_event event = {.events = EPOLLIN};
	int fd = epoll_create1(EPOLL_CLOEXEC);
	uint64_t start, took;

	require(fd >= 0 && !epoll_ctl(fd, EPOLL_CTL_ADD, pipe_fds[0], &event),
		"epoll");
	pthread_barrier_wait(&in_place);
	start = now_ns();
	require(epoll_wait(fd, &event, 1, -1) == 1, "epoll");
	took = now_ns() - start;
	read_pipe();
	close(fd);
	return took;
}

static int listener;
static struct sockaddr_un listens_at;
static socklen_t listens_at_bytes = sizeof(listens_at);

static void *caller(void *nothing)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	pthread_barrier_wait(&in_place);
	sleep_ns(HELD_NS);
	require(!connect(fd, (struct sockaddr *)&listens_at, listens_at_bytes),
		"connect");
	close(fd);
	return nothing;
}

static uint64_t wait_for_caller(void)
{
	uint64_t start, took;
	int fd;

	pthread_barrier_wait(&in_place);
	start = now_ns();
	fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	took = now_ns() - start;
	require(fd >= 0, "accept");
	close(fd);
	return took;
}

/* At an address that the kernel chooses (unix(7)). */
static void listen_to_callers(void)
{
	const struct sockaddr_un any = {.sun_family = AF_UNIX};

	listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	require(!bind(listener, (const struct sockaddr *)&any,
		      sizeof(any.sun_family)) &&
			!listen(listener, 1) &&
			!getsockname(listener, (struct sockaddr *)&listens_at,
				     &listens_at_bytes),
		"listener");
}

/* For the same lock again and again, in the same trace. */
#define TIMES 5

static void *holder_again(void *nothing)
{
	uint64_t span = begin(lateral, "holder");

	pthread_barrier_wait(&in_place);
	for (int i = 0; i < TIMES; i++) {
		pthread_mutex_lock(&contended);
		pthread_barrier_wait(&taken);
		sleep_ns(HELD_NS);
		pthread_mutex_unlock(&contended);
		pthread_barrier_wait(&let_go);
	}
	end(span, "holder");
	return nothing;
}

static uint64_t wait_again(void)
{
	uint64_t start, took = 0;

	pthread_barrier_wait(&in_place);
	for (int i = 0; i < TIMES; i++) {
		pthread_barrier_wait(&taken);
		start = now_ns();
		pthread_mutex_lock(&contended);
		pthread_mutex_unlock(&contended);
		took += now_ns() - start;
		pthread_barrier_wait(&let_go);
	}
	return took;
}

/* In a trace of its own each time: more of them than a trigger queue has cells
 * (BS_TRIGGER_CELLS). */
#define MANY 400

static void *writer_of_many(void *nothing)
{
	pthread_barrier_wait(&in_place);
	for (int i = 0; i < MANY; i++) {
		pthread_barrier_wait(&taken);
		sleep_ns(2 * MS);
		require(write(pipe_fds[1], "", 1) == 1, "pipe");
	}
	return nothing;
}

static uint64_t wait_in_many_traces(void)
{
	uint64_t start = now_ns();

	pthread_barrier_wait(&in_place);
	for (int i = 0; i < MANY; i++) {
		uint64_t span;

		pthread_barrier_wait(&taken);
		span = begin(new_trace(), "one of many");
		read_pipe();
		end(span, "one of many");
	}
	return now_ns() - start;
}

/* Its traces are open until it is told to go on. */
static uint64_t stay_open(void)
{
	char line[8];

	pthread_barrier_wait(&in_place);
	print_result(0);
	require(fgets(line, sizeof(line), stdin), "stdin");
	return 0;
}

/* Another trace of this process is open when it ends. */
static void *bystander(void *nothing)
{
	begin(lateral, "bystander");
	pthread_barrier_wait(&in_place);
	for (;;)
		pause();
	return nothing;
}

static uint64_t crash(void)
{
	pthread_barrier_wait(&in_place);
	/* Who is told of the ids now is told before they are all that is left. */
	print_result(0);
	__builtin_trap();
}

/* More than its group may have. */
static uint64_t take_memory(void)
{
	static unsigned char *memory;

	pthread_barrier_wait(&in_place);
	print_result(0);
	for (size_t megabytes = 1; megabytes <= 4096; megabytes++) {
		memory = realloc(memory, megabytes << 20);
		require(memory, "memory");
		memset(memory + ((megabytes - 1) << 20), 1, 1 << 20);
	}
	return 0;
}

static uint64_t is_asked_to_end(void)
{
	pthread_barrier_wait(&in_place);
	print_result(0);
	kill(getpid(), SIGTERM);
	pause();
	return 0;
}

/* By a signal of which nobody thought. */
static uint64_t is_surprised_by(int signal)
{
	pthread_barrier_wait(&in_place);
	print_result(0);
	kill(getpid(), signal);
	pause();
	return 0;
}

static uint64_t is_surprised(void)
{
	return is_surprised_by(SIGUSR1);
}

static uint64_t is_surprised_last(void)
{
	return is_surprised_by(SIGRTMAX);
}

static uint64_t ends(void)
{
	pthread_barrier_wait(&in_place);
	print_result(0);
	_exit(0);
}

/* A program that knows nothing of traces crashes in our place. */
static uint64_t executes_another(void)
{
	pthread_barrier_wait(&in_place);
	print_result(0);
	execl("/bin/sh", "sh", "-c", "kill -ILL $$", NULL);
	require(false, "execl");
	return 0;
}

/* As the first process of a pid namespace, which the kernel spares. */
static uint64_t is_spared(void)
{
	sigset_t aborts;

	pthread_barrier_wait(&in_place);
	sigemptyset(&aborts);
	sigaddset(&aborts, SIGABRT);
	pthread_sigmask(SIG_BLOCK, &aborts, NULL);
	pthread_kill(pthread_self(), SIGABRT);
	pthread_sigmask(SIG_UNBLOCK, &aborts, NULL);
	return 0;
}

/* Until somebody continues it. */
static void *stopper(void *nothing)
{
	uint64_t span = begin(lateral, "stopper");

	pthread_mutex_lock(&contended);
	pthread_barrier_wait(&in_place);
	sleep_ns(MS);
	kill(getpid(), SIGSTOP);
	pthread_mutex_unlock(&contended);
	end(span, "stopper");
	return nothing;
}

static void *freezer(void *nothing)
{
	int file = open(path, O_WRONLY | O_CLOEXEC);
	uint64_t span = begin(lateral, "freezer");

	require(file >= 0, path);
	pthread_mutex_lock(&contended);
	pthread_barrier_wait(&in_place);
	sleep_ns(MS);
	require(write(file, "1", 1) == 1, path);
	pthread_mutex_unlock(&contended);
	close(file);
	end(span, "freezer");
	return nothing;
}

static void *nobody(void *nothing)
{
	pthread_barrier_wait(&in_place);
	return nothing;
}

static const struct cause {
	const char *name;
	uint64_t (*happens)(void);
	void *(*cause)(void *);
} causes[] = {
	{"run_queue", wait_for_cpu, hog},
	{"lock_wait", wait_for_lock, holder},
	{"blocked", wait_for_pipe, writer},
	{"io_wait", wait_for_disk, other_writer},
	{"io_wait_for_less", wait_for_less, nobody},
	{"hog_of_another", wait_for_cpu, nobody},
	{"lock_wait_again", wait_again, holder_again},
	{"many", wait_in_many_traces, writer_of_many},
	{"sleep", wait_for_nothing, nobody},
	{"epoll_wait", wait_for_events, writer},
	{"accept", wait_for_caller, caller},
	{"cpu_throttled", run_beyond_quota, nobody},
	{"crash", crash, bystander},
	{"out_of_memory", take_memory, bystander},
	{"asked_to_end", is_asked_to_end, bystander},
	{"is_surprised", is_surprised, bystander},
	{"is_surprised_last", is_surprised_last, bystander},
	{"ends", ends, bystander},
	{"executes_another", executes_another, bystander},
	{"is_spared", is_spared, nobody},
	{"is_stopped", wait_for_lock, stopper},
	{"is_frozen", wait_for_lock, freezer},
	{"stays_open", stay_open, nobody},
};

/* -------------------------------------------------------------- main --- */

static void *work_unharmed(void *nothing)
{
	const struct sched_param first = {.sched_priority = 1};
	uint64_t span;

	/* So that it does not wait for a CPU either, on a busy machine. */
	if (sched_setscheduler(0, SCHED_FIFO, &first))
		perror("suffer: the innocent may have to wait for a CPU");
	span = begin(innocent, "innocent");
	pthread_barrier_wait(&in_place);
	while (!__atomic_load_n(&over, __ATOMIC_RELAXED))
		sleep_ns(MS);
	end(span, "innocent");
	return nothing;
}

static void await_node(void)
{
	if (!bs_wait_attached(ATTACH_TIMEOUT_MS))
		return;
	fputs("suffer: no node\n", stderr);
	exit(1);
}

static void suffer(const struct cause *cause)
{
	pthread_t other, beside;
	uint64_t span, took_ns;

	victim = new_trace();
	lateral = new_trace();
	innocent = new_trace();
	__atomic_store_n(&over, false, __ATOMIC_RELAXED);
	pthread_create(&other, NULL, cause->cause, NULL);
	pthread_create(&beside, NULL, work_unharmed, NULL);
	span = begin(victim, "victim");
	took_ns = cause->happens();
	end(span, "victim");
	__atomic_store_n(&over, true, __ATOMIC_RELAXED);
	pthread_join(other, NULL);
	pthread_join(beside, NULL);
	print_result(took_ns);
}

int main(int argc, char **argv)
{
	const struct cause *cause = NULL;
	char line[8];

	for (size_t i = 0; i < sizeof(causes) / sizeof(causes[0]); i++) {
		if (argc > 1 && !strcmp(causes[i].name, argv[1]))
			cause = &causes[i];
	}
	if (!cause) {
		fputs("usage: suffer CAUSE [PATH]\n", stderr);
		return 2;
	}
	path = argc > 2 ? argv[2] : "suffer.data";
	require(!pipe2(pipe_fds, O_CLOEXEC), "pipe");
	pthread_barrier_init(&in_place, NULL, 3);
	pthread_barrier_init(&taken, NULL, 2);
	pthread_barrier_init(&let_go, NULL, 2);
	listen_to_callers();
	await_node();
	/* Until it is watched, which only who started us knows. */
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin))
		suffer(cause);
	return 0;
}
