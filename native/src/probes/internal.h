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
	const char *source; /* the same for bcc (bcc.h) */
};

extern const struct embedded embedded_objects[];
extern const size_t embedded_count;

extern const struct probes_syscall syscall_table[PROBES_SYSCALLS];

#define OBJECTS_MAX 16
#define PROGRAMS_MAX 8

/* A program that was chosen; libbpf's, or one that stands for it. */
struct loaded {
	const struct bpf_program *program;
	int fd;
	/* By one of these it is attached. */
	struct bpf_link *link;
	int link_fd; /* -1: by the other */
};

struct object {
	const struct embedded *of;
	struct bpf_object *bpf; /* by bcc: the maps, and what was chosen */
	struct loaded programs[PROGRAMS_MAX];
	uint32_t n_programs;
};

struct process {
	bool used;
	uint32_t tgid;
};

/* A power of two: some seconds of six thousand uses each. */
#define USERS_MAX 16384u

/* A trace that wrote into a connection. */
struct user {
	uint64_t time_ns; /* 0: nobody */
	uint64_t id[2];
	uint32_t namespace; /* its inode */
	uint32_t device;    /* its index there */
	uint16_t port;	    /* its own */
};

struct bsp {
	enum bsp_loader loader;
	struct object
		base; /* the first that is loaded: the others use its maps */
	struct object others[OBJECTS_MAX];
	struct probes_settings *settings;
	struct probes_registration *registration;
	uint16_t *filter;
	struct process processes[PROBES_PROCESSES_MAX];
	int nobody; /* a context that shows nothing */
	int cpus;

	/* Of the thread in bsp_run(). */
	struct ring_buffer *bells, *records;
	pthread_mutex_t lock; /* of the bell, and of users */
	int bell;
	int stop; /* eventfd */
	bool stopping;
	struct bsp_written written;
	struct user users[USERS_MAX]; /* a ring */
	uint32_t users_head;
	uint64_t paired_ticks, paired_ns; /* of one moment, at the start */
};

static inline uint64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

const struct embedded *embedded_find(const char *name);
int map_fd(const struct bsp *p, const char *name);

/* For which event a program is; NULL: for no tracepoint. */
const char *tracepoint_of(const struct bpf_program *program);

/* Tell programs of all threads that the process has now. */
int note_threads(struct bsp *p, uint32_t number,
		 const struct bsp_newcomer *newcomer);
/* Its tgid, as programs know it. */
int find_tgid(struct bsp *p, uint32_t number,
	      const struct bsp_newcomer *newcomer, uint32_t *tgid);
/* Of processes that are not ours any more. */
void forget_threads(struct bsp *p);
/* Whether that can be done here. */
int try_to_note_threads(struct bsp *p);

struct btf;
int fill_syscalls(const struct bsp *p);
int fill_reasons(const struct bsp *p, const struct btf *kernel);

/* What began before was not seen by who begins to look now. */
void begin_anew(struct bsp *p);

int records_open(struct bsp *p);
void records_close(struct bsp *p);

void users_add(struct bsp *p, const struct probes_record *r);

#endif
