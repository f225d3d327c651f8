/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads the probes (bpf/), and does what they need done outside the kernel: says
 * which processes are ours, and writes into the pool what probes saw of a trace.
 *
 * One thread calls all of this but bsp_run(), which another one sleeps in.
 * Functions return a negative errno; `message` says more, for a person.
 */
#ifndef BACKSIGHT_PROBES_H
#define BACKSIGHT_PROBES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bsp;

/* Of a kind of event, since the start, over all CPUs. */
struct bsp_counts {
	uint64_t recorded, record_lost;
	uint64_t fired, coalesced, limited, queue_full;
};

struct bsp_program {
	char name[32];
	char object[32];
	uint64_t runs;
	uint64_t run_ns; /* estimated by those that were timed */
	uint64_t recursion_misses;
	uint64_t verified_instructions;
};

struct bsp_written {
	uint64_t records;     /* into the pool */
	uint64_t breadcrumbs; /* too */
	uint64_t refused; /* nobody recorded that trace, or no node was there */
};

/* The maps that all probes share, and who our threads are. The caller frees it. */
int bsp_new(struct bsp **made, char *message, size_t message_bytes);
void bsp_free(struct bsp *p);

/* Load and attach bpf/<name>.bpf.c. -EALREADY: it is. */
int bsp_attach(struct bsp *p, const char *name, char *message,
	       size_t message_bytes);
int bsp_detach(struct bsp *p, const char *name);

/* Contexts (abi/context.h): their size, and the fd of one of zeros, which is the
 * caller's to close. */
size_t bsp_context_bytes(void);
int bsp_context(void);

/* Have a process be one of ours, that shows itself in that context, and is that client
 * of the node. Its number here, for bsp_unregister(). -ENOSPC: there are too many. */
int bsp_register(struct bsp *p, uint32_t client, int pidfd, int context);
int bsp_unregister(struct bsp *p, int number);

/* 0 ns of an interval: no limit. UINT64_MAX as a threshold: never. */
int bsp_set_kind(struct bsp *p, uint32_t kind, const char *trigger,
		 uint64_t fire_ns, uint64_t record_ns, uint64_t interval_ns,
		 uint64_t burst_ns);
void bsp_set_coalescing(struct bsp *p, uint64_t ns);
void bsp_set_bypass(struct bsp *p, bool bypass);
/* Whether peers to which a trace writes become breadcrumbs of it. */
void bsp_set_breadcrumbs(struct bsp *p, bool breadcrumbs);

/* Write records as they come, and add 1 to `bell`, an eventfd, when a trigger is in
 * a queue; until bsp_stop(). The calling thread shows itself in the pool like any. */
int bsp_run(struct bsp *p);
void bsp_stop(struct bsp *p);

/* Whom to ring for: a duplicate is kept; -1: nobody. */
int bsp_set_bell(struct bsp *p, int bell);

int bsp_get_counts(struct bsp *p, uint32_t kind, struct bsp_counts *counts);
/* Of the programs that are attached; how many. */
int bsp_get_programs(struct bsp *p, struct bsp_program *programs, size_t most);
void bsp_get_written(struct bsp *p, struct bsp_written *written);

#endif
