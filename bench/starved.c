/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is lost where a node daemon rarely gets a processor.
 *
 *   starved RATE_PER_S BURST WINDOW_MS WINDOWS LOOPS
 *
 * LOOPS processes do nothing but use processors, at the priority of everybody
 * else. Beside them this one writes traces of 4 KiB, one record each: BURST of
 * them as fast as it goes, RATE_PER_S in the mean. Where it is late, since it
 * too must wait for a processor, bursts follow each other until it is not.
 *
 * Each window prints one line of JSON: how many traces were written, how many
 * of them were lost, and how long it took.
 */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "common.h"

#define TRACE_BYTES 4096u
#define LOOPS_MAX 64u

static void wait_until(uint64_t due_ns)
{
	const struct timespec due = {
		.tv_sec = (time_t)(due_ns / SECOND_NS),
		.tv_nsec = (long)(due_ns % SECOND_NS),
	};

	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
}

static pid_t start_loop(void)
{
	pid_t parent = getpid();
	pid_t pid = fork();

	if (pid < 0)
		die("no process");
	if (pid)
		return pid;
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent)
		exit(1);
	for (;;)
		__asm__ volatile("" : : : "memory");
}

static uint64_t write_burst(uint64_t *counter, uint64_t traces)
{
	static const unsigned char payload[TRACE_BYTES];
	uint64_t lost = 0;

	while (traces--) {
		bs_begin(next_id(counter));
		lost += bs_tracepoint(payload, sizeof(payload)) != 0;
		bs_end();
	}
	return lost;
}

int main(int argc, char **argv)
{
	uint64_t rate_per_s, burst, window_ns, windows, loops, every_ns, due_ns;
	uint64_t counter = 0;
	pid_t pids[LOOPS_MAX];

	if (argc != 6)
		die("usage: see the head of starved.c");
	rate_per_s = number(argv[1]);
	burst = number(argv[2]);
	window_ns = number(argv[3]) * 1000000;
	windows = number(argv[4]);
	loops = number(argv[5]);
	if (!rate_per_s || !burst || loops > LOOPS_MAX)
		die("at least one trace a second and a burst, at most 64 loops");
	every_ns = burst * SECOND_NS / rate_per_s;

	must_attach();
	for (uint64_t i = 0; i < loops; i++)
		pids[i] = start_loop();
	due_ns = clock_ns(CLOCK_MONOTONIC);
	for (uint64_t i = 0; i < windows; i++) {
		uint64_t begun_ns = clock_ns(CLOCK_MONOTONIC);
		uint64_t now_ns = begun_ns;
		uint64_t traces = 0, lost = 0;

		while (now_ns - begun_ns < window_ns) {
			wait_until(due_ns);
			due_ns += every_ns;
			lost += write_burst(&counter, burst);
			traces += burst;
			now_ns = clock_ns(CLOCK_MONOTONIC);
		}
		printf("{\"traces\": %" PRIu64 ", \"lost\": %" PRIu64
		       ", \"elapsed_ns\": %" PRIu64 "}\n",
		       traces, lost, now_ns - begun_ns);
		fflush(stdout);
	}
	for (uint64_t i = 0; i < loops; i++) {
		kill(pids[i], SIGKILL);
		waitpid(pids[i], NULL, 0);
	}
	return 0;
}
