/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) OR Apache-2.0 */
/*
 * What the probes and their loader (native/src/probes) both know: the values of the
 * maps that they share. Programs and loader are of one build, so this has no version.
 */
#ifndef BPF_INTERFACE_H
#define BPF_INTERFACE_H

#include "abi/kernel_event.h"
#include "abi/types.h"

/* Processes at a time; no more can be attached to a node (clients_max). */
#define PROBES_PROCESSES_MAX 1024u

/*
 * How many processes of ours there are whose tgid has these low bits. A thread
 * whose process has 0 here is none of ours: that is all that a context switch of
 * anybody else's costs, some 2 ns, where a look at its task storage takes 15.
 */
#define PROBES_FILTER_ENTRIES 4096u

/* What was done last for traces: who finds it there does not do it again. */
#define PROBES_RECENT_ENTRIES 4096u

/* Above any system call's number: x86 and arm64 both have fewer than 480. */
#define PROBES_SYSCALLS 512u

/* Above any reason for which a packet is dropped. */
#define PROBES_REASONS 256u

#define PROBES_NEVER (~0ull)

/* What is known of a thread of an attached process. Its task storage goes with it. */
struct probes_thread {
	uint32_t process;
	uint32_t client;      /* which that is for the node */
	uint32_t tid;	      /* in its own namespace: as its slot shows it */
	uint32_t slot;	      /* where it was last; perhaps another's by now */
	uint32_t syscall;     /* in which it went off the CPU */
	uint32_t slots_taken; /* of its process, when it was last sought */
	uint64_t slot_sought_ns;
	uint64_t off_ns;	     /* when it last went off the CPU */
	uint64_t waking_ns;	     /* when it was last woken up */
	uint64_t waker_hi, waker_lo; /* trace of who did; 0: none */
	uint32_t waker_pid;
	uint32_t nr_throttled; /* of its group, when it went off */
	char waker_comm[BS_KERNEL_COMM_BYTES];
	uint32_t disk;	     /* that it asked last; 0: none */
	uint32_t disk_bytes; /* for so much, in that trace and without a pause */
	uint32_t disk_asked; /* of which it asked that, which may be made of others */
	uint64_t disk_asked_ns;	   /* when, */
	uint64_t disk_hi, disk_lo; /* and in which trace */
	char disk_name[16];
	uint8_t off_why; /* enum off_why */
};

struct probes_threshold {
	uint64_t fire_ns; /* from here on it fires; PROBES_NEVER: it does not */
	uint64_t record_ns; /* from here on it goes into the trace */
	uint64_t interval_ns; /* between two firings on one CPU, in the long run */
	uint64_t burst_ns;    /* so far may they run ahead of that */
	char name[32];	      /* of the trigger, NUL-padded */
};

/* Changed while programs run, a word at a time. */
struct probes_settings {
	uint32_t bypass;      /* 1: do nothing at all */
	uint32_t breadcrumbs; /* 1: peers are breadcrumbs */
	uint32_t uses;	      /* 1: tell who uses which connection */
	uint32_t zero;
	uint64_t coalesce_ns; /* a trace does not fire for the same again within this */
	/* Below these a wait that is over is nothing to any kind: the least thresholds of
	 * those for a CPU, and of those for something else. */
	uint64_t least_unrun_ns;
	uint64_t least_blocked_ns;
	/* What began earlier was not seen from there on. */
	uint64_t valid_since_ns;
	uint64_t sockets_since_ns; /* who writes is noted since then */
	struct probes_threshold kinds[BS_KERNEL_KINDS];
};

enum probes_syscall_class {
	SYSCALL_IGNORED = 0, /* waits for work, or is not known */
	SYSCALL_BLOCKS = 1,
	SYSCALL_FUTEX = 2,
	SYSCALL_EXITS = 3, /* its end wakes who joins the thread */
};

struct probes_syscall {
	uint8_t class;
	char name[23]; /* NUL-padded */
};

_Static_assert(sizeof(struct probes_syscall) == BS_KERNEL_NAME_BYTES, "");

/* Between a loader and the iterator that registers a process; one at a time. */
struct probes_registration {
	uint32_t process; /* in: which one it is to be */
	uint32_t client;  /* in: which one it is for the node */
	uint32_t tgid;	  /* out */
	uint32_t threads; /* out: those that are known now */
	uint32_t failed; /* out: those without memory for what is known of a thread */
	uint32_t zero;
};

/* Of each kind, on each CPU. */
struct probes_counts {
	uint64_t recorded;
	uint64_t record_lost; /* the ring was full */
	uint64_t fired;
	uint64_t coalesced;
	uint64_t limited;
	uint64_t queue_full; /* of the process */
};

/* Of each program, on each CPU: every 256th run is timed. */
struct probes_cost {
	uint64_t runs;
	uint64_t timed_runs;
	uint64_t timed_ns;
	uint64_t map_errors; /* no memory for what it had to note */
};

#define PROBES_TIMED_EVERY 256u

/* All programs that time themselves. */
#define PROBES_PROGRAM_LIST(X)                                                 \
	X(new_thread)                                                          \
	X(on_exit)                                                             \
	X(on_exec)                                                             \
	X(on_switch)                                                           \
	X(on_waking)                                                           \
	X(on_send)                                                             \
	X(on_sent)                                                             \
	X(on_sendmsg)                                                          \
	X(on_state)                                                            \
	X(on_destroyed)                                                        \
	X(on_retransmit)                                                       \
	X(on_reset_sent)                                                       \
	X(on_reset_received)                                                   \
	X(on_segment)                                                          \
	X(on_read)                                                             \
	X(on_bio)                                                              \
	X(on_drop)                                                             \
	X(on_enqueue)                                                          \
	X(on_dequeue)                                                          \
	X(on_signal)

/* What programs refer to that bcc compiles (by_bcc.h), by number: maps, */
#define PROBES_MAP_LIST(X)                                                     \
	X(processes)                                                           \
	X(owners)                                                              \
	X(threads_by_pid)                                                      \
	X(filter)                                                              \
	X(sockets_by_address)                                                  \
	X(blank_socket)                                                        \
	X(disks)                                                               \
	X(crashed)                                                             \
	X(settings)                                                            \
	X(syscalls)                                                            \
	X(reasons)                                                             \
	X(records)                                                             \
	X(bell)                                                                \
	X(recent)                                                              \
	X(uses)                                                                \
	X(counts)                                                              \
	X(used_until)                                                          \
	X(costs)                                                               \
	X(runners)                                                             \
	X(enqueued_ns)

/* and functions. */
#define PROBES_FUNCTION_LIST(X)                                                \
	X(record)                                                              \
	X(look_at_slot)                                                        \
	X(add_neighbour)                                                       \
	X(add_open)                                                            \
	X(find_open)                                                           \
	X(stint_of)                                                            \
	X(switched)                                                            \
	X(woken)                                                               \
	X(was_off)

enum probes_map {
#define PROBES_MAP(name) MAP_##name,
	PROBES_MAP_LIST(PROBES_MAP)
#undef PROBES_MAP
	PROBES_MAPS,
};

enum probes_function {
#define PROBES_FUNCTION(name) FUNCTION_##name,
	PROBES_FUNCTION_LIST(PROBES_FUNCTION)
#undef PROBES_FUNCTION
	PROBES_FUNCTIONS,
};

/* From here on the numbers of helpers are those of functions. There are some 220. */
#define PROBES_CALLS 0x10000

enum probes_program {
#define PROBES_PROGRAM(name) PROGRAM_##name,
	PROBES_PROGRAM_LIST(PROBES_PROGRAM)
#undef PROBES_PROGRAM
	PROBES_PROGRAMS,
};

/* Of a record that tells which connection a trace used, and of nothing else. */
#define PROBES_USE 0xffffu

/* It is told of a use once in such a time: of each trace, peer and port. */
#define PROBES_USE_EVERY_NS 500000000ull

/* What comes through the ring. */
struct probes_record {
	uint64_t trace_hi;
	uint64_t trace_lo;
	struct bs_kernel_event event;
	/* Of PROBES_USE: */
	uint32_t namespace; /* the inode of the network namespace */
	uint32_t device;    /* its index there; 0: not known */
	uint16_t port;	    /* this side's */
	uint16_t is_crumb;  /* its peer is to be a breadcrumb */
	uint16_t zero[2];
};

#endif
