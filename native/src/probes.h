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

/* Who puts in what the running kernel is like: libbpf into objects that were compiled
 * ahead, or bcc, which compiles where they run. */
enum bsp_loader {
	BSP_CORE,
	BSP_BCC,
};

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
	uint64_t map_errors; /* no memory for what it had to note */
	uint64_t bytes;	     /* of the kernel's memory, its code */
};

/* Of the kernel's memory, as it counts it. */
struct bsp_memory {
	uint64_t programs_bytes;
	uint64_t maps_bytes;	 /* what grows with threads and sockets, too */
	uint64_t contexts_bytes; /* of processes that are registered */
};

struct bsp_written {
	uint64_t records;     /* into the pool */
	uint64_t breadcrumbs; /* too */
	uint64_t refused; /* nobody recorded that trace, or no node was there */
};

/* What bcc is to compile: how this kernel's structures are laid out, and bpf/<name>.bpf.c
 * after that; C that includes nothing. What it makes of it is the code in what follows:
 * functions, each as its name (32 bytes, NUL-padded), how many instructions (32 bits),
 * 4 bytes of zeros, and the instructions. */
int bsp_layout(char **text, char *message, size_t message_bytes);
void bsp_layout_free(char *text);
const char *bsp_source(const char *name); /* NULL: there is none of that name */

/* The maps that all probes share, and who our threads are. By bcc: with the code of
 * "threads". The caller frees it. */
int bsp_new(struct bsp **made, enum bsp_loader loader, const void *code,
	    size_t code_bytes, char *message, size_t message_bytes);
void bsp_free(struct bsp *p);

/* Load and attach bpf/<name>.bpf.c, by bcc: with its code. -EALREADY: it is. */
int bsp_attach(struct bsp *p, const char *name, const void *code,
	       size_t code_bytes, char *message, size_t message_bytes);
int bsp_detach(struct bsp *p, const char *name);

/* Contexts (abi/context.h): their size, and the fd of one of zeros, which is the
 * caller's to close. */
size_t bsp_context_bytes(void);
int bsp_context(void);

/* Have processes be ours, each of which shows itself in that context, and is that client
 * of the node. Many at once take little longer than one, which takes ten milliseconds. */
#define BSP_NEWCOMERS_MAX 64
struct bsp_newcomer {
	uint32_t client;
	int pidfd;
	int context;
	int number; /* out: for bsp_unregister(); -ENOSPC: there are too many */
};
void bsp_register(struct bsp *p, struct bsp_newcomer *some, size_t count);
/* -ENOENT: one of them was nobody's; the others are gone. */
int bsp_unregister(struct bsp *p, const uint32_t *numbers, size_t count);

/* 0 ns of an interval: no limit. UINT64_MAX as a threshold: never. */
int bsp_set_kind(struct bsp *p, uint32_t kind, const char *trigger,
		 uint64_t fire_ns, uint64_t record_ns, uint64_t interval_ns,
		 uint64_t burst_ns);
void bsp_set_coalescing(struct bsp *p, uint64_t ns);
void bsp_set_bypass(struct bsp *p, bool bypass);
/* Whether it is told who uses connections, and whether their peers are breadcrumbs. */
void bsp_set_uses(struct bsp *p, bool uses, bool breadcrumbs);

/* Write records as they come, and add 1 to `bell`, an eventfd, when a trigger is in
 * a queue; until bsp_stop(). The calling thread shows itself in the pool like any. */
int bsp_run(struct bsp *p);
void bsp_stop(struct bsp *p);

/* Whom to ring for: a duplicate is kept; -1: nobody. */
int bsp_set_bell(struct bsp *p, int bell);

/* Traces that used a connection lately, through that device or by that port of
 * a network namespace, the last one first; 0: any. Two words each; how many. Known while
 * programs look at sockets, of the last USERS_MAX uses. */
size_t bsp_get_users(struct bsp *p, uint32_t namespace, uint32_t device,
		     uint16_t port, uint64_t within_ns, uint64_t *ids,
		     size_t most);

int bsp_get_counts(struct bsp *p, uint32_t kind, struct bsp_counts *counts);
/* Of the programs that are attached; how many. */
int bsp_get_programs(struct bsp *p, struct bsp_program *programs, size_t most);
void bsp_get_written(struct bsp *p, struct bsp_written *written);
/* It asks about each map: for who asks now and then. */
void bsp_get_memory(struct bsp *p, struct bsp_memory *memory);

#endif
