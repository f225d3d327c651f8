/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PROBES_INTERNAL_H
#define PROBES_INTERNAL_H

#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <pthread.h>
#include <time.h>

#include "abi/context.h"
#include "barrier.h"
#include "interface.h"
#include "probes.h"

/* A program of these objects; their compiler has put them into ours. */
struct embedded {
	const char *name;
	const unsigned char *bytes;
	size_t size;
};

extern const struct embedded embedded_objects[];
extern const size_t embedded_count;

extern const struct probes_syscall syscall_table[PROBES_SYSCALLS];

#define OBJECTS_MAX 16
#define LINKS_MAX 8

struct object {
	const struct embedded *of;
	struct bpf_object *bpf;
	struct bpf_link *links[LINKS_MAX];
	uint32_t n_links;
};

struct process {
	bool used;
	uint32_t tgid;
};

struct bsp {
	struct object
		base; /* the first that is loaded: the others use its maps */
	struct object others[OBJECTS_MAX];
	struct probes_settings *settings;
	struct probes_registration *registration;
	uint16_t *filter;
	struct process processes[PROBES_PROCESSES_MAX];
	int cpus;

	/* Of the thread in bsp_run(). */
	struct ring_buffer *bells, *records;
	pthread_mutex_t lock; /* of the bell */
	int bell;
	int stop; /* eventfd */
	bool stopping;
	struct bsp_written written;
	uint64_t paired_ticks, paired_ns; /* of one moment, at the start */
};

static inline uint64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

int map_fd(const struct bsp *p, const char *name);

int records_open(struct bsp *p);
void records_close(struct bsp *p);

#endif
