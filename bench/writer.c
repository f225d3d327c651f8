/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures the client library beside a node daemon that drains it.
 *
 *   writer tracepoint  BYTES TIMESTAMP THREADS OPERATIONS REPETITIONS POOL
 *   writer memcpy      BYTES           THREADS OPERATIONS REPETITIONS POOL
 *   writer begin_end   RECORDS         THREADS OPERATIONS REPETITIONS POOL
 *   writer trace       RATE_PER_S      THREADS OPERATIONS REPETITIONS POOL
 *   writer burst       TRACES NODE     THREADS OPERATIONS REPETITIONS POOL
 *   writer interleaved BYTES           THREADS OPERATIONS REPETITIONS POOL
 *   writer pickup      TRIGGERS NODE
 *   writer wake        CORE WAKES
 *   writer idle
 *
 * OPERATIONS are those of one thread in one repetition; POOL is the node's
 * budget in bytes, which the writer fills once before the first repetition.
 * RATE_PER_S is the rate of all threads together, 0: as fast as it goes. A
 * burst of TRACES goes as fast as it may, and the next one begins when the node
 * daemon, whose pid NODE is, has come to rest; that wait is not in the times.
 *
 * What is measured is public: of the shared memory only the trigger queue is
 * read, to see when a trigger is picked up.
 *
 * Each repetition prints one line of JSON: what an operation cost the thread
 * that did it in CPU time and in elapsed time, in ns, and what was lost. Both
 * clocks are around the whole loop, so no clock's own cost is inside. `pickup`
 * prints a line a trigger, `wake`
 * one a wake-up, with no node in it, `idle` one when it is attached; it stays until its
 * standard input is closed.
 */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "backsight.h"
#include "barrier.h"

/* What the published benchmarks of such systems write to a trace. */
#define TRACE_BYTES 16384u
#define SHORT_TRACE_BYTES 100u
#define SHORT_RECORD_BYTES 8u
#define HANDLES 8u
#define RECORDS_PER_HANDLE 64u
#define WARM_UP_RECORD_BYTES 2048u
#define PACED_BATCH 64u
#define ATTACH_TIMEOUT_MS 30000
#define THREADS_MAX 64u
/* Long against what the daemon does after a trigger, so that it sleeps. */
#define PICKUP_PAUSE_NS 10000000
/* A daemon that sleeps and used no CPU time for so long has nothing to do. */
#define REST_NS 1000000
#define REST_POLL_NS 20000
#define REST_TIMEOUT_NS 10000000000

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define HIDE_FROM_COMPILER() __asm__ volatile("" : : : "memory")

enum operation {
	TRACEPOINT,
	MEMCPY,
	BEGIN_END,
	TRACE,
	BURST,
	INTERLEAVED
};

struct job {
	enum operation operation;
	pid_t node;
	size_t bytes;
	unsigned int records;
	bool timestamp;
	bool is_first;	     /* of the threads */
	uint64_t rate_per_s; /* of this thread */
	uint64_t burst;
	uint64_t operations; /* at least; whole traces are written */
	uint64_t done;
	unsigned char *memory;
	size_t memory_bytes;
	uint64_t seed;
	pthread_barrier_t *barrier;
	uint64_t cpu_ns, elapsed_ns;
};

__attribute__((noreturn)) static void die(const char *what)
{
	fprintf(stderr, "writer: %s\n", what);
	exit(1);
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	if (clock_gettime(clock, &t))
		die("a clock cannot be read");
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* An id that differs for each trace and costs a multiplication. */
ALWAYS_INLINE struct bs_trace_id next_id(uint64_t *counter)
{
	uint64_t n = ++*counter;

	return (struct bs_trace_id){n * 0x9e3779b97f4a7c15ull, n};
}

static size_t record_bytes(size_t payload_bytes)
{
	return (sizeof(struct bs_record_header) + payload_bytes +
		BS_RECORD_ALIGN - 1) &
	       ~(size_t)(BS_RECORD_ALIGN - 1);
}

/* ---------------------------------------------------------- operations --- */

/*
 * Applications record structures, whose size the compiler knows and uses; so
 * must we, for the tracepoint and for the copy that it is compared with.
 */
#define RETURN_WITH_CONSTANT_SIZE(bytes, call)                                 \
	do {                                                                   \
		switch (bytes) {                                               \
		case 8:                                                        \
			return call(8);                                        \
		case 32:                                                       \
			return call(32);                                       \
		case 128:                                                      \
			return call(128);                                      \
		case 512:                                                      \
			return call(512);                                      \
		case 2048:                                                     \
			return call(2048);                                     \
		default:                                                       \
			die("BYTES is one of 8, 32, 128, 512, 2048");          \
		}                                                              \
	} while (0)

ALWAYS_INLINE uint64_t tracepoints(const struct job *job,
				   const unsigned char *payload, size_t bytes,
				   bool timestamp)
{
	uint64_t counter = job->seed;
	uint64_t done = 0;
	uint64_t per_trace = TRACE_BYTES / bytes;

	for (; done < job->operations; done += per_trace) {
		bs_begin(next_id(&counter));
		for (uint64_t k = 0; k < per_trace; k++)
			bs_record_at(BS_RECORD_DATA, payload, bytes,
				     timestamp ? bs_clock_ticks() : 0);
		bs_end();
	}
	return done;
}

static uint64_t run_tracepoints(const struct job *job,
				const unsigned char *payload)
{
#define STAMPED(n) tracepoints(job, payload, n, true)
#define UNSTAMPED(n) tracepoints(job, payload, n, false)
	if (job->timestamp)
		RETURN_WITH_CONSTANT_SIZE(job->bytes, STAMPED);
	else
		RETURN_WITH_CONSTANT_SIZE(job->bytes, UNSTAMPED);
}

/* The floor: the same bytes at the same places, one segment after the other
 * around the pool, without header, bounds or publication. */
ALWAYS_INLINE uint64_t copies(const struct job *job,
			      const unsigned char *payload, size_t bytes)
{
	const size_t step = (sizeof(struct bs_record_header) + bytes +
			     BS_RECORD_ALIGN - 1) &
			    ~(size_t)(BS_RECORD_ALIGN - 1);
	const size_t first = sizeof(struct bs_segment_header) +
			     sizeof(struct bs_run_header) +
			     sizeof(struct bs_record_header);
	size_t segments = job->memory_bytes / BS_SEGMENT_BYTES;
	size_t segment = 0;
	uint64_t done = 0;

	while (done < job->operations) {
		unsigned char *at = job->memory + segment * BS_SEGMENT_BYTES;
		unsigned char *end = at + BS_SEGMENT_BYTES;

		for (at += first; at + bytes <= end; at += step) {
			memcpy(at, payload, bytes);
			HIDE_FROM_COMPILER();
			done++;
		}
		segment = segment + 1 < segments ? segment + 1 : 0;
	}
	return done;
}

static uint64_t run_copies(const struct job *job, const unsigned char *payload)
{
#define COPY(n) copies(job, payload, n)
	RETURN_WITH_CONSTANT_SIZE(job->bytes, COPY);
}

static uint64_t run_begin_end(const struct job *job,
			      const unsigned char *payload)
{
	uint64_t counter = job->seed;
	uint64_t done = 0;

	for (; done < job->operations; done++) {
		bs_begin(next_id(&counter));
		for (unsigned int k = 0; k < job->records; k++)
			bs_record_at(BS_RECORD_DATA, payload,
				     SHORT_RECORD_BYTES, 0);
		bs_end();
	}
	return done;
}

ALWAYS_INLINE void write_trace(uint64_t *counter, const unsigned char *payload)
{
	bs_begin(next_id(counter));
	bs_record_at(BS_RECORD_DATA, payload, SHORT_TRACE_BYTES, 0);
	bs_end();
}

static uint64_t run_traces(const struct job *job, const unsigned char *payload)
{
	uint64_t counter = job->seed;
	uint64_t done = 0;
	uint64_t start = clock_ns(CLOCK_MONOTONIC);

	for (; done < job->operations; done++) {
		if (job->rate_per_s && done % PACED_BATCH == 0) {
			uint64_t due =
				start + (uint64_t)((double)done * 1e9 /
						   (double)job->rate_per_s);

			while (clock_ns(CLOCK_MONOTONIC) < due)
				;
		}
		write_trace(&counter, payload);
	}
	return done;
}

/* Whether a thread of the process runs, or wants to. */
static bool is_runnable(pid_t pid)
{
	char path[64], stat[512];
	bool runnable = false;
	struct dirent *task;
	DIR *tasks;

	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	tasks = opendir(path);
	if (!tasks)
		die("the node daemon is gone");
	while (!runnable && (task = readdir(tasks))) {
		const char *state;
		FILE *file;

		snprintf(path, sizeof(path), "/proc/%d/task/%.16s/stat", pid,
			 task->d_name);
		file = fopen(path, "r");
		if (!file)
			continue; /* "." and "..", or a thread that ended */
		/* proc(5): the name, which may hold anything, and the state. */
		state = fgets(stat, sizeof(stat), file) ? strrchr(stat, ')')
							: NULL;
		runnable = state && state[1] && state[2] == 'R';
		fclose(file);
	}
	closedir(tasks);
	return runnable;
}

/* Until the node has done what there is to do for it now. How it learns what
 * was written, and when, is its own affair. */
static void await_rest(pid_t pid)
{
	uint64_t begun_ns = clock_ns(CLOCK_MONOTONIC);
	uint64_t since_ns = begun_ns, time_ns = begun_ns;
	uint64_t used_ns = 0;
	clockid_t clock;

	if (clock_getcpuclockid(pid, &clock))
		die("the node daemon is gone");
	while (time_ns - since_ns < REST_NS || is_runnable(pid)) {
		uint64_t next_ns = time_ns + REST_POLL_NS;
		uint64_t now_used_ns = clock_ns(clock);

		if (now_used_ns != used_ns) {
			used_ns = now_used_ns;
			since_ns = time_ns;
		}
		/* No sleep: this core stays awake, as under load. */
		while ((time_ns = clock_ns(CLOCK_MONOTONIC)) < next_ns)
			;
		if (time_ns - begun_ns > REST_TIMEOUT_NS)
			die("the node daemon does not come to rest");
	}
}

static uint64_t run_bursts(struct job *job, const unsigned char *payload)
{
	uint64_t counter = job->seed;
	uint64_t done = 0;

	while (done < job->operations) {
		uint64_t elapsed_ns, cpu_ns;

		/* One waits for all, and all begin together. */
		pthread_barrier_wait(job->barrier);
		if (job->is_first)
			await_rest(job->node);
		pthread_barrier_wait(job->barrier);
		elapsed_ns = clock_ns(CLOCK_MONOTONIC);
		cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
		for (uint64_t i = 0; i < job->burst; i++)
			write_trace(&counter, payload);
		job->cpu_ns += clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
		job->elapsed_ns += clock_ns(CLOCK_MONOTONIC) - elapsed_ns;
		done += job->burst;
	}
	return done;
}

/* An event loop: requests take turns, one record each. */
static uint64_t run_interleaved(const struct job *job,
				const unsigned char *payload)
{
	struct bs_trace traces[HANDLES];
	uint64_t counter = job->seed;
	uint64_t done = 0;

	while (done < job->operations) {
		for (unsigned int h = 0; h < HANDLES; h++)
			bs_open(&traces[h], next_id(&counter));
		for (unsigned int k = 0; k < RECORDS_PER_HANDLE; k++) {
			for (unsigned int h = 0; h < HANDLES; h++)
				bs_write(&traces[h], BS_RECORD_DATA, payload,
					 job->bytes);
		}
		for (unsigned int h = 0; h < HANDLES; h++)
			bs_close(&traces[h]);
		done += HANDLES * RECORDS_PER_HANDLE;
	}
	return done;
}

/* --------------------------------------------------------- repetitions --- */

static void *run(void *argument)
{
	struct job *job = argument;
	unsigned char *payload = calloc(1, BS_PAYLOAD_MAX);
	uint64_t cpu_ns, elapsed_ns;

	if (!payload)
		die("out of memory");
	/* The thread's first record takes its slot and its first segment. */
	if (job->operation != MEMCPY) {
		bs_begin((struct bs_trace_id){job->seed, 1});
		bs_tracepoint(payload, SHORT_RECORD_BYTES);
		bs_end();
	}
	pthread_barrier_wait(job->barrier);
	elapsed_ns = clock_ns(CLOCK_MONOTONIC);
	cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
	switch (job->operation) {
	case TRACEPOINT:
		job->done = run_tracepoints(job, payload);
		break;
	case MEMCPY:
		job->done = run_copies(job, payload);
		break;
	case BEGIN_END:
		job->done = run_begin_end(job, payload);
		break;
	case TRACE:
		job->done = run_traces(job, payload);
		break;
	case BURST:
		job->done = run_bursts(job, payload);
		goto out;
	case INTERLEAVED:
		job->done = run_interleaved(job, payload);
		break;
	}
	job->cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
	job->elapsed_ns = clock_ns(CLOCK_MONOTONIC) - elapsed_ns;
out:
	free(payload);
	return NULL;
}

static void repeat(const struct job *pattern, unsigned int threads,
		   unsigned int repetition)
{
	struct job jobs[THREADS_MAX];
	pthread_t ids[THREADS_MAX];
	pthread_barrier_t barrier;
	struct bs_stats before, after;
	uint64_t cpu_ns = 0, elapsed_ns = 0, done = 0;

	if (pthread_barrier_init(&barrier, NULL, threads))
		die("no barrier");
	bs_get_stats(&before);
	for (unsigned int i = 0; i < threads; i++) {
		jobs[i] = *pattern;
		jobs[i].barrier = &barrier;
		jobs[i].is_first = i == 0;
		jobs[i].rate_per_s = pattern->rate_per_s / threads;
		jobs[i].seed = ((uint64_t)repetition * threads + i + 1) << 40;
		jobs[i].memory_bytes = pattern->memory_bytes / threads;
		if (pattern->memory)
			jobs[i].memory += i * jobs[i].memory_bytes;
		if (pthread_create(&ids[i], NULL, run, &jobs[i]))
			die("no thread");
	}
	for (unsigned int i = 0; i < threads; i++) {
		pthread_join(ids[i], NULL);
		cpu_ns += jobs[i].cpu_ns;
		elapsed_ns += jobs[i].elapsed_ns;
		done += jobs[i].done;
	}
	bs_get_stats(&after);
	pthread_barrier_destroy(&barrier);
	printf("{\"cpu_ns\": %.3f, \"elapsed_ns\": %.3f, \"operations\": %" PRIu64
	       ", \"runs\": %" PRIu64 ", \"runs_lost\": %" PRIu64
	       ", \"records_lost\": %" PRIu64 "}\n",
	       (double)cpu_ns / (double)done, (double)elapsed_ns / (double)done,
	       done, after.runs - before.runs,
	       after.runs_lost - before.runs_lost,
	       after.records_lost - before.records_lost);
	fflush(stdout);
}

/*
 * A process meets new memory once, at microseconds a page; then it goes round
 * in what it has. That is the state to measure, so go round once, and when
 * the node falls behind, wait for it.
 */
static void warm_up(uint64_t pool_bytes)
{
	static const unsigned char payload[WARM_UP_RECORD_BYTES];
	const struct timespec pause = {.tv_nsec = 1000000};
	uint64_t written = 0;
	uint64_t counter = 0;

	while (written < pool_bytes) {
		bool lost = false;

		bs_begin(next_id(&counter));
		for (size_t k = 0; k < TRACE_BYTES / sizeof(payload); k++) {
			if (bs_tracepoint(payload, sizeof(payload)))
				lost = true;
			else
				written += record_bytes(sizeof(payload));
		}
		bs_end();
		if (lost)
			nanosleep(&pause, NULL);
	}
}

/* -------------------------------------------------------------- pickup --- */

/* The context, by its size and its magic, among what is shared with the node. */
static struct bs_context_segment *find_context(void)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	const size_t wanted = (sizeof(struct bs_context_segment) + page - 1) &
			      ~(page - 1);
	struct bs_context_segment *found = NULL;
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];

	if (!maps)
		die("/proc/self/maps cannot be read");
	while (fgets(line, sizeof(line), maps)) {
		void *from, *to;

		if (strstr(line, " /memfd:") &&
		    sscanf(line, "%p-%p", &from, &to) == 2 &&
		    (size_t)((char *)to - (char *)from) == wanted &&
		    *(const uint32_t *)from == BS_ABI_MAGIC)
			found = from;
	}
	fclose(maps);
	if (!found)
		die("no context is mapped");
	return found;
}

/* The node frees a trigger's cell when it takes the trigger; that is the
 * moment. It must sleep before: how fast it looks when it is awake, a loop
 * would not tell. */
static void pickup(uint64_t triggers, pid_t node)
{
	const struct timespec pause = {.tv_nsec = PICKUP_PAUSE_NS};
	static const unsigned char payload[SHORT_TRACE_BYTES];
	struct bs_context_segment *context = find_context();
	uint64_t counter = 0;

	for (uint64_t i = 0; i < triggers; i++) {
		uint32_t position = READ_ONCE(context->trigger_head);
		struct bs_trigger_cell *cell =
			&context->cells[position % BS_TRIGGER_CELLS];
		struct bs_trace_id id = next_id(&counter);
		uint64_t begun_ns;

		bs_begin(id);
		bs_tracepoint(payload, sizeof(payload));
		bs_end();
		nanosleep(&pause, NULL);
		await_rest(node);
		begun_ns = clock_ns(CLOCK_MONOTONIC);
		if (bs_trigger(id, "bench", NULL, NULL, 0))
			die("a trigger was refused");
		while (load_acquire(&cell->seq) != position + BS_TRIGGER_CELLS)
			;
		printf("{\"pickup_ns\": %" PRIu64 "}\n",
		       clock_ns(CLOCK_MONOTONIC) - begun_ns);
	}
}

/* ---------------------------------------------------------------- wake --- */

static void bind_to(uint64_t core)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(core, &set);
	if (core >= CPU_SETSIZE || sched_setaffinity(0, sizeof(set), &set))
		die("no such core");
}

struct bell {
	uint32_t rung;
	uint32_t apart[15];
	uint32_t answered;
};

/* What a pick-up cannot be faster than: another process, which sleeps on that
 * core, is woken by a futex and answers. */
static void wake(uint64_t core, uint64_t wakes)
{
	const struct timespec pause = {.tv_nsec = PICKUP_PAUSE_NS};
	struct bell *bell = mmap(NULL, sizeof(*bell), PROT_READ | PROT_WRITE,
				 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t sleeper;

	if (bell == MAP_FAILED)
		die("out of memory");
	sleeper = fork();
	if (sleeper < 0)
		die("no process");
	for (uint32_t i = 0; sleeper == 0 && i < wakes; i++) {
		if (i == 0)
			bind_to(core);
		while (load_acquire(&bell->rung) == i)
			syscall(SYS_futex, &bell->rung, FUTEX_WAIT, i, NULL,
				NULL, 0);
		store_release(&bell->answered, i + 1);
	}
	if (sleeper == 0)
		_exit(0);
	for (uint32_t i = 0; i < wakes; i++) {
		uint64_t begun_ns;

		nanosleep(&pause, NULL);
		begun_ns = clock_ns(CLOCK_MONOTONIC);
		fetch_add(&bell->rung, 1);
		syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL,
			0);
		while (load_acquire(&bell->answered) != i + 1)
			;
		printf("{\"wake_ns\": %" PRIu64 "}\n",
		       clock_ns(CLOCK_MONOTONIC) - begun_ns);
	}
	waitpid(sleeper, NULL, 0);
}

/* ---------------------------------------------------------------- main --- */

static uint64_t number(const char *text)
{
	char *end;
	uint64_t value;

	errno = 0;
	value = strtoull(text, &end, 10);
	if (!*text || *end || errno)
		die("arguments are whole numbers, see the head of writer.c");
	return value;
}

static void must_attach(void)
{
	if (bs_wait_attached(ATTACH_TIMEOUT_MS))
		die("no node daemon to attach to");
}

static void map_memory(struct job *job, uint64_t bytes)
{
	int fd = memfd_create("bench", MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		die("no memory to copy into");
	job->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_POPULATE, fd, 0);
	if (job->memory == MAP_FAILED)
		die("no memory to copy into");
	job->memory_bytes = bytes;
	close(fd);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";
	struct job job = {.bytes = 0};
	uint64_t threads, repetitions, pool_bytes;
	char **rest = argv + 2;

	if (!strcmp(name, "pickup") && argc == 4) {
		must_attach();
		pickup(number(argv[2]), (pid_t)number(argv[3]));
		return 0;
	}
	if (!strcmp(name, "wake") && argc == 4) {
		wake(number(argv[2]), number(argv[3]));
		return 0;
	}
	if (!strcmp(name, "idle") && argc == 2) {
		must_attach();
		puts("{}");
		fflush(stdout);
		while (getchar() != EOF)
			;
		return 0;
	}

	if (!strcmp(name, "tracepoint") && argc == 8) {
		job.operation = TRACEPOINT;
		job.bytes = number(*rest++);
		job.timestamp = number(*rest++);
	} else if (!strcmp(name, "memcpy") && argc == 7) {
		job.operation = MEMCPY;
		job.bytes = number(*rest++);
	} else if (!strcmp(name, "begin_end") && argc == 7) {
		job.operation = BEGIN_END;
		job.records = (unsigned int)number(*rest++);
	} else if (!strcmp(name, "trace") && argc == 7) {
		job.operation = TRACE;
		job.rate_per_s = number(*rest++);
	} else if (!strcmp(name, "burst") && argc == 8) {
		job.operation = BURST;
		job.burst = number(*rest++);
		job.node = (pid_t)number(*rest++);
	} else if (!strcmp(name, "interleaved") && argc == 7) {
		job.operation = INTERLEAVED;
		job.bytes = number(*rest++);
	} else {
		die("usage: see the head of writer.c");
	}
	threads = number(*rest++);
	job.operations = number(*rest++);
	repetitions = number(*rest++);
	pool_bytes = number(*rest);
	if (threads < 1 || threads > THREADS_MAX || job.bytes > BS_PAYLOAD_MAX)
		die("1 to 64 threads, at most 32768 bytes");

	if (job.operation == MEMCPY) {
		map_memory(&job, pool_bytes);
	} else {
		must_attach();
		warm_up(pool_bytes);
	}
	/* The zeroth repetition is for caches, branches and clock speed. */
	for (unsigned int i = 0; i <= repetitions; i++)
		repeat(&job, (unsigned int)threads, i);
	return 0;
}
