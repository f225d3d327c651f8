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
	BS_KERNEL_TCP_RETRANSMIT = 6,
	BS_KERNEL_TCP_SYN_RETRANSMIT = 7,
	BS_KERNEL_TCP_RESET_SENT = 8,
	BS_KERNEL_TCP_RESET_RECEIVED = 9,
	BS_KERNEL_TCP_ZERO_WINDOW = 10, /* the peer takes no more for now */
	BS_KERNEL_TCP_RTT = 11, /* far above what it was on that connection */
	BS_KERNEL_TCP_READ_DELAY = 12, /* nobody read what came */
	BS_KERNEL_CRASH = 13,	       /* a fatal signal */
	BS_KERNEL_PACKET_DROP = 14,    /* by the kernel, for a reason */
	BS_KERNEL_QDISC_DELAY = 15,    /* between a device's queue's ends */
	BS_KERNEL_TCP_LOSS_PROBE = 16, /* nobody confirmed it soon */
	BS_KERNEL_KINDS = 17,
};

/* How sure it is that it happened to that trace. */
enum bs_kernel_confidence {
	BS_KERNEL_EXACT = 0,
	BS_KERNEL_OF_SOCKET = 1, /* the trace that used the socket last */
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
	uint32_t number; /* of the system call, the signal; the peer's port; or _NO_NUMBER */
	uint32_t other_pid; /* who ran instead, or woke it, in the first pid namespace; 0: not known */
	uint32_t confidence; /* enum bs_kernel_confidence */
	uint64_t other_ns;   /* how much of the time that one ran */
	union {
		char other_comm[BS_KERNEL_COMM_BYTES]; /* NUL-padded */
		uint8_t peer[16]; /* of a connection: IPv6, or IPv4 mapped (RFC 4291) */
		char device[16]; /* of an I/O wait, NUL-padded */
	};
	char name[BS_KERNEL_NAME_BYTES]; /* NUL-padded; of what, depends on the kind */
	union {
		uint64_t position; /* of a TCP segment: bytes of the stream before it */
		uint64_t bytes; /* of an I/O wait: what the thread asked the disk for */
	};
};

#define BS_KERNEL_NO_NUMBER (~0u)

_Static_assert(sizeof(struct bs_kernel_event) == 96, "ABI");

#endif
