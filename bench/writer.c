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
 *   writer idle
 *
 * OPERATIONS are those of one thread in one repetition; POOL is the node's
 * budget in bytes, which the writer fills once before the first repetition.
 * RATE_PER_S is the rate of all threads together, 0: as fast as it goes. A
 * burst of TRACES goes as fast as it may, and the next one begins when the node
 * daemon, whose pid NODE is, has come to rest; that wait is not in the times.
 *
 * Each repetition prints one line of JSON: what an operation cost the thread
 * that did it in CPU time and in elapsed time, in ns, and what was lost. Both
 * clocks are around the whole loop, so no clock's own cost is inside. `idle`
 * prints one when it is attached, and stays until its standard input is closed.
 */
#include <pthread.h>
#include <sys/mman.h>

#include "abi.h"
#include "common.h"
#include "rest.h"

/* What the published benchmarks of such systems write to a trace. */
#define TRACE_BYTES 16384u
#define SHORT_TRACE_BYTES 100u
#define SHORT_RECORD_BYTES 8u
#define HANDLES 8u
#define RECORDS_PER_HANDLE 64u
#define WARM_UP_RECORD_BYTES 2048u
#define PACED_BATCH 64u
#define THREADS_MAX 64u

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
	pthread_barrier_t *ready;   /* of all threads and who starts them */
	pthread_barrier_t *barrier; /* of the threads alone */
	uint64_t cpu_ns, elapsed_ns;
};

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
	pthread_barrier_wait(job->ready);
	pthread_barrier_wait(job->ready);
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
	pthread_barrier_t barrier, ready;
	struct bs_stats before, after;
	uint64_t cpu_ns = 0, elapsed_ns = 0, done = 0;

	if (pthread_barrier_init(&barrier, NULL, threads) ||
	    pthread_barrier_init(&ready, NULL, threads + 1))
		die("no barrier");
	for (unsigned int i = 0; i < threads; i++) {
		jobs[i] = *pattern;
		jobs[i].barrier = &barrier;
		jobs[i].ready = &ready;
		jobs[i].is_first = i == 0;
		jobs[i].rate_per_s = pattern->rate_per_s / threads;
		jobs[i].seed = ((uint64_t)repetition * threads + i + 1) << 40;
		jobs[i].memory_bytes = pattern->memory_bytes / threads;
		if (pattern->memory)
			jobs[i].memory += i * jobs[i].memory_bytes;
		if (pthread_create(&ids[i], NULL, run, &jobs[i]))
			die("no thread");
	}
	/* What a thread's first record lost is not the operation's. */
	pthread_barrier_wait(&ready);
	bs_get_stats(&before);
	pthread_barrier_wait(&ready);
	for (unsigned int i = 0; i < threads; i++) {
		pthread_join(ids[i], NULL);
		cpu_ns += jobs[i].cpu_ns;
		elapsed_ns += jobs[i].elapsed_ns;
		done += jobs[i].done;
	}
	bs_get_stats(&after);
	pthread_barrier_destroy(&ready);
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

/* ---------------------------------------------------------------- main --- */

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
