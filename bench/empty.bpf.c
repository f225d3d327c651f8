// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* A program that does nothing for each hook on which a probe may be, called as the hook
 * is: what no probe there can be without. */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Not loaded unless asked for: no kernel has all of them. */
#define NOTHING_ON(hook)                                                       \
	SEC("?raw_tp/" #hook) int hook(void *context)                          \
	{                                                                      \
		return 0;                                                      \
	}

NOTHING_ON(block_bio_queue)
NOTHING_ON(inet_sock_set_state)
NOTHING_ON(kfree_skb)
NOTHING_ON(qdisc_dequeue)
NOTHING_ON(qdisc_enqueue)
NOTHING_ON(sched_process_exec)
NOTHING_ON(sched_process_exit)
NOTHING_ON(sched_switch)
NOTHING_ON(sched_waking)
NOTHING_ON(signal_deliver)
NOTHING_ON(sock_send_length)
NOTHING_ON(task_newtask)
NOTHING_ON(tcp_destroy_sock)
NOTHING_ON(tcp_probe)
NOTHING_ON(tcp_rcv_space_adjust)
NOTHING_ON(tcp_receive_reset)
NOTHING_ON(tcp_retransmit_skb)
NOTHING_ON(tcp_send_reset)
NOTHING_ON(tcp_sendmsg_locked)
