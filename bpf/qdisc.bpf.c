// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* How long a packet waits in the queue of the device that is to send it. */
#include "socket.h"

LICENSE_IS("Dual BSD/GPL");

/* Packets that wait at a time; of more, those that waited longest are forgotten. */
#ifndef PROBES_BY_BCC
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64); /* address of the packet */
	__type(value, __u64);
} enqueued_ns SEC(".maps");
#endif

TRACEPOINT(qdisc_enqueue, on_enqueue, void *qdisc, void *queue,
	   struct sk_buff *skb)
{
	const struct probes_settings *settings_now = only(MAP(settings));
	struct sock *sk = FIELD(skb, sk);
	__u64 packet = (__u64)skb, now;
	struct timed timed;

	if (!settings_now || settings_now->bypass || !sk || !socket_of(sk))
		return 0;
	timed = timed_begin(PROGRAM_on_enqueue);
	now = bpf_ktime_get_ns();
	if (bpf_map_update_elem(MAP(enqueued_ns), &packet, &now, BPF_ANY))
		count_map_error(&timed);
	timed_end(&timed);
	return 0;
}

TRACEPOINT(qdisc_dequeue, on_dequeue, void *qdisc, void *queue, int packets,
	   struct sk_buff *skb)
{
	const struct probes_settings *settings_now = only(MAP(settings));
	struct bs_kernel_event event = {.kind = BS_KERNEL_QDISC_DELAY};
	__u64 packet = (__u64)skb;
	struct socket *socket;
	struct timed timed;
	struct sock *sk;
	__u64 *since_ns;

	if (!settings_now || settings_now->bypass || !skb)
		return 0;
	sk = FIELD(skb, sk);
	socket = sk ? socket_of(sk) : 0;
	if (!socket)
		return 0;
	timed = timed_begin(PROGRAM_on_dequeue);
	since_ns = bpf_map_lookup_elem(MAP(enqueued_ns), &packet);
	if (since_ns) {
		event.time_ns = bpf_ktime_get_ns();
		event.duration_ns = event.time_ns - *since_ns;
		bpf_map_delete_elem(MAP(enqueued_ns), &packet);
		bpf_probe_read_kernel_str(event.name, 16,
					  FIELD(skb, dev)->name);
		report_of(settings_now, socket, sk,
			  stretch_of(socket, seq_of_packet(skb)), &event);
	}
	timed_end(&timed);
	return 0;
}
