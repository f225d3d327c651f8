/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the probes read of the kernel's own structures: these fields and no others.
 * libbpf puts in the offsets that the running kernel has (CO-RE), by the names of
 * structures and fields; so neither order nor size matter here.
 */
#ifndef BPF_KERNEL_H
#define BPF_KERNEL_H

#include <linux/bpf.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#pragma clang attribute push(__attribute__((preserve_access_index)),           \
			     apply_to = record)

struct pid_namespace;

struct upid {
	int nr;
};

struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct sched_entity {
	__u64 sum_exec_runtime;
	__u64 prev_sum_exec_runtime;
};

struct cfs_bandwidth {
	int nr_throttled;
};

struct task_group {
	struct cfs_bandwidth cfs_bandwidth;
	struct task_group *parent;
};

struct task_struct {
	int pid;
	int tgid;
	unsigned int policy;
	struct pid *thread_pid;
	struct task_struct *group_leader;
	struct sched_entity se;
	struct task_group *sched_task_group;
	unsigned in_iowait : 1;
	char comm[16];
};

/* x86 and arm64 each have one of these. */
struct pt_regs___x86 {
	unsigned long orig_ax;
};

struct pt_regs___arm64 {
	int syscallno;
};

struct bpf_iter__task {
	struct task_struct *task;
};

#pragma clang attribute pop

#endif
