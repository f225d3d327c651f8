/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Until a daemon has nothing to do.
 */
#ifndef BENCH_REST_H
#define BENCH_REST_H

#include <dirent.h>

#include "common.h"

/* A daemon that sleeps and used no CPU time for so long has nothing to do. */
#define REST_NS 1000000
#define REST_POLL_NS 20000
#define REST_TIMEOUT_NS (10 * SECOND_NS)

/* Whether a thread of the process runs, or wants to. */
static inline bool is_runnable(pid_t pid)
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
static inline void await_rest(pid_t pid)
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

#endif
