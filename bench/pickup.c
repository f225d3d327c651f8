/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures how long a process waits until another one has done with it.
 *
 *   pickup trigger TRIGGERS NODE
 *   pickup wake    CORE WAKES
 *
 * `trigger`: from bs_trigger() until the node daemon, whose pid NODE is and
 * which slept, has done with the trigger. Of the shared memory only the trigger
 * queue is read. `wake`: what that cannot be faster than, with no node in it.
 * A line of JSON each time, in ns.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "abi.h"
#include "barrier.h"
#include "common.h"
#include "rest.h"

#define TRACE_BYTES 100u
/* Long against what the daemon does after a trigger, so that it sleeps. */
#define PAUSE_NS 10000000

/* -------------------------------------------------------------- trigger --- */

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
static void trigger(uint64_t triggers, pid_t node)
{
	const struct timespec pause = {.tv_nsec = PAUSE_NS};
	static const unsigned char payload[TRACE_BYTES];
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
	const struct timespec pause = {.tv_nsec = PAUSE_NS};
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

/* ----------------------------------------------------------------- main --- */

int main(int argc, char **argv)
{
	const char *name = argc == 4 ? argv[1] : "";

	if (!strcmp(name, "trigger")) {
		must_attach();
		trigger(number(argv[2]), (pid_t)number(argv[3]));
	} else if (!strcmp(name, "wake")) {
		wake(number(argv[2]), number(argv[3]));
	} else {
		die("usage: see the head of pickup.c");
	}
	return 0;
}
