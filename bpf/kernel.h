/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the probes read of the kernel's own structures: these fields and no others.
 * libbpf puts in the offsets that the running kernel has (CO-RE), by the names of
 * structures and fields; so neither order nor size matter here. For bcc the loader lays
 * them out by the same names (native/src/probes/layout.c).
 */
#ifndef BPF_KERNEL_H
#define BPF_KERNEL_H

#ifdef PROBES_BY_BCC

#include "by_bcc.h"

#else

#include "by_core.h"

#pragma clang attribute push(__attribute__((preserve_access_index)),           \
			     apply_to = record)
/* By this the loader knows those that it lays out for bcc. */
#pragma clang attribute push(__attribute__((btf_decl_tag("kernel"))),          \
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

struct signal_struct {
	void *oom_mm;	       /* the OOM killer chose it */
	void *group_exec_task; /* one of its threads executes another program */
	int group_exit_code;
	unsigned int flags;
};

struct task_struct {
	struct signal_struct *signal;
	int pid;
	int tgid;
	unsigned int policy;
	struct pid *thread_pid;
	struct task_struct *group_leader;
	struct sched_entity se;
	struct task_group *sched_task_group;
	unsigned in_iowait : 1;
	unsigned long jobctl;
	struct bio_list *bio_list;
	char comm[16];
};

struct sigaction {
	void *sa_handler;
};

struct k_sigaction {
	struct sigaction sa;
};

struct gendisk {
	int major;
	int first_minor;
	char disk_name[32];
};

struct block_device {
	struct gendisk *bd_disk;
};

struct bvec_iter {
	unsigned int bi_size;
};

struct bio {
	struct block_device *bi_bdev;
	struct bvec_iter bi_iter;
};

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
};

struct net_device {
	char name[16];
	int ifindex;
};

struct dst_entry {
	struct net_device *dev;
};

struct sock_common {
	__u16 skc_family;
	__u16 skc_num;	 /* the port here */
	__u16 skc_dport; /* network byte order */
	__u32 skc_daddr;
	struct in6_addr skc_v6_daddr; /* of linux/in6.h */
	__u8 skc_state;
	struct {
		struct net *net;
	} skc_net;
};

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	struct dst_entry *sk_dst_cache;
};

struct inet_connection_sock {
	__u8 icsk_pending;
};

struct tcp_sock {
	__u32 write_seq;
	__u32 snd_una;
	__u64 bytes_acked;
	__u32 rcv_nxt;
	__u32 srtt_us; /* eighths of a microsecond */
};

struct sk_buff {
	unsigned char *data, *head;
	__u16 transport_header; /* from head */
	struct net_device *dev;
	char cb[48];
	struct sock *sk;
};

struct tcp_skb_cb {
	__u32 seq;
	__u32 end_seq;
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
#pragma clang attribute pop

#endif

#endif
