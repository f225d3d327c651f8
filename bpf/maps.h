/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps that all probes share. Each object declares them all; the loader makes
 * them once and gives them to each object.
 *
 *   processes   array of maps: number of a process -> its context segment
 *   owners      number of a process -> which client of the node it is
 *   threads     of each thread of these: struct probes_thread; by bcc: threads_by_pid
 *   filter      by tgid: whether it may be one of ours
 *   sockets     of each TCP socket that a trace wrote into: which one wrote what; by bcc:
 *               sockets_by_address, each begun as blank_socket
 *   registration  what the iterator over the threads of a process is to note
 *   disks       who asked which disk for something lately
 *   crashed     which processes have
 *   settings    thresholds, rates, the bypass word
 *   syscalls    by number: what it means to be blocked in it, and its name
 *   reasons     by number: why a packet is dropped
 *   records     ring: what goes into traces
 *   bell        ring: a process has a trigger in its queue
 *   counts, costs  what each kind of event, and each program, has come to
 *   used_until  how much of its rate a CPU has used
 *   recent      what was done lately for a trace, and is not done again
 *   uses        the same, of uses of connections, of which there are many more
 */
#ifndef BPF_MAPS_H
#define BPF_MAPS_H

#include "abi/context.h"
#include "interface.h"
#include "kernel.h"

struct by_tgid {
	__u16 processes[PROBES_FILTER_ENTRIES];
};

struct reason {
	char name[BS_KERNEL_NAME_BYTES];
};

/* What a trace wrote into a TCP socket without a break: up to where the next begins. */
struct sent {
	__u32 start; /* sequence number */
	__u32 process;
	__u64 hi, lo; /* both 0: of no trace */
	__u32 client;
	__u32 is_connecting; /* its number is not known yet */
};

/* What is not acknowledged yet, and waits to be sent, must be among them: some hundred
 * writes of other traces each, 4 KiB of memory for a socket. */
#define SENT_MAX 128

struct socket {
	__u32 next; /* counts stretches */
	__u32 rtt_least_us;
	__u64 readable_since_ns; /* data lies there, and nobody has read since */
	__u64 used_ns;	/* when it was told that who wrote last uses it */
	__u64 noted_ns; /* when anything was noted last */
	__u8 is_shut;	/* the peer's window is zero */
	struct sent sent[SENT_MAX];
};

#define DISK_USERS 8

/* What a disk was asked for longer ago it has done. */
#define ASKED_LATELY_NS 1000000000ull

/* Who asked a disk for something lately. */
struct disk {
	__u32 next, zero;
	struct {
		__u64 hi, lo, asked_ns;
	} users[DISK_USERS];
};

struct recent {
	__u64 what; /* of trace and kind, mixed */
	__u64 done_ns;
};

#ifndef PROBES_BY_BCC

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, PROBES_PROCESSES_MAX);
	__type(key, __u32);
	__array(
		values, struct {
			__uint(type, BPF_MAP_TYPE_ARRAY);
			__uint(max_entries, 1);
			__uint(map_flags, BPF_F_MMAPABLE);
			__uint(key_size, sizeof(__u32));
			__uint(value_size, sizeof(struct bs_context_segment));
		});
} processes SEC(".maps");

/* Which client of the node each of these is, and one more; 0: none. A socket outlives
 * who wrote into it, and numbers are given anew. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBES_PROCESSES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} owners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct probes_thread);
} threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct by_tgid);
} filter SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct probes_settings);
} settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct probes_registration);
} registration SEC(".maps");

/* Why packets are dropped, by number; "" for what is no loss. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBES_REASONS);
	__type(key, __u32);
	__type(value, struct reason);
} reasons SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBES_SYSCALLS);
	__type(key, __u32);
	__type(value, struct probes_syscall);
} syscalls SEC(".maps");

/* The traces of some thousand events; the loader reads them ten times a second. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} records SEC(".maps");

/* A word each. Where it is full, its reader is about to look at all of them. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} bell SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 256);
	__type(key,
	       __u32); /* major and first minor, as disk_of() puts them together */
	__type(value, struct disk);
} disks SEC(".maps");

/* By number of a process: its tgid when it crashed; one trigger is enough. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBES_PROCESSES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} crashed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBES_RECENT_ENTRIES);
	__type(key, __u32);
	__type(value, struct recent);
} recent SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBES_RECENT_ENTRIES);
	__type(key, __u32);
	__type(value, struct recent);
} uses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, BS_KERNEL_KINDS);
	__type(key, __u32);
	__type(value, struct probes_counts);
} counts SEC(".maps");

/* Until when a CPU has used up what it may fire, by kind (see may_fire()). */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, BS_KERNEL_KINDS);
	__type(key, __u32);
	__type(value, __u64);
} used_until SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PROBES_PROGRAMS);
	__type(key, __u32);
	__type(value, struct probes_cost);
} costs SEC(".maps");

/* What programs have in place of these two that bcc compiles. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 16);
	__type(key, __u32);
	__type(value, struct probes_thread);
} threads_by_pid SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1 << 14);
	__type(key, __u64);
	__type(value, struct socket);
} sockets_by_address SEC(".maps");

/* As a socket begins. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct socket);
} blank_socket SEC(".maps");

#endif

static __always_inline void *only(void *map)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(map, &zero);
}

#endif
