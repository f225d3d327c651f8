/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) OR Apache-2.0 */
/*
 * What a probe in the kernel saw of a trace. It stands in the cell of the trigger that
 * it fired, and as the payload of a record (BS_RECORD_KERNEL) in the trace. Probes
 * write numbers; protocol/kernel_events.py makes words of them.
 */
#ifndef BS_ABI_KERNEL_EVENT_H
#define BS_ABI_KERNEL_EVENT_H

#include "abi/types.h"

/* Never used for something else. Others may come; readers show them as a number. */
enum bs_kernel_event_kind {
	BS_KERNEL_RUN_QUEUE = 1,     /* runnable, and not run */
	BS_KERNEL_CPU_THROTTLED = 2, /* the same, for a CPU quota */
	BS_KERNEL_LOCK_WAIT = 3,     /* in futex(2) */
	BS_KERNEL_IO_WAIT = 4,	     /* for a disk */
	BS_KERNEL_BLOCKED = 5,	     /* in another system call */
	BS_KERNEL_KINDS = 6,
};

#define BS_KERNEL_COMM_BYTES 16u
#define BS_KERNEL_NAME_BYTES 24u

struct bs_kernel_event {
	uint64_t time_ns;     /* CLOCK_MONOTONIC, when it was over */
	uint64_t duration_ns; /* and how long it took */
	uint32_t client;      /* the process, as its node numbers it */
	uint32_t tid;	      /* the thread, in its own pid namespace */
	uint16_t kind;	      /* enum bs_kernel_event_kind */
	uint16_t cpu;
	uint32_t number; /* of the system call, if it was in one; else BS_KERNEL_NO_NUMBER */
	uint32_t other_pid; /* who ran instead, or woke it, in the first pid namespace; 0: not known */
	uint32_t zero;
	uint64_t other_ns; /* how much of the time that one ran */
	char other_comm[BS_KERNEL_COMM_BYTES]; /* NUL-padded */
	char name[BS_KERNEL_NAME_BYTES];       /* NUL-padded */
	uint64_t reserved;
};

#define BS_KERNEL_NO_NUMBER (~0u)

_Static_assert(sizeof(struct bs_kernel_event) == 96, "ABI");

#endif
