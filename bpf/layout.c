// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * No program: all structures of kernel.h, so that the loader finds them in this object's
 * BTF, and lays them out for bcc (native/src/probes/layout.c).
 */
#include "kernel.h"

union {
	struct pid pid;
	struct upid upid;
	struct task_group task_group;
	struct signal_struct signal_struct;
	struct task_struct task_struct;
	struct k_sigaction k_sigaction;
	struct gendisk gendisk;
	struct block_device block_device;
	struct bio bio;
	struct net net;
	struct net_device net_device;
	struct dst_entry dst_entry;
	struct sock sock;
	struct inet_connection_sock inet_connection_sock;
	struct tcp_sock tcp_sock;
	struct sk_buff sk_buff;
	struct tcp_skb_cb tcp_skb_cb;
	struct pt_regs___x86 x86;
	struct pt_regs___arm64 arm64;
} structures;
