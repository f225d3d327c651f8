// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The kernel drops a packet of a TCP socket, and says why. */
#include <bpf/bpf_endian.h>

#include "socket.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

extern int LINUX_KERNEL_VERSION __kconfig;

/* Since then the receiving socket is said too. */
#define RX_SK_VERSION ((6 << 16) + (11 << 8))

static __always_inline void dropped(const struct probes_settings *settings_now,
				    struct sock *sk, __u32 reason,
				    const struct sk_buff *sent)
{
	struct bs_kernel_event event = {.kind = BS_KERNEL_PACKET_DROP};
	const struct reason *why = bpf_map_lookup_elem(&reasons, &reason);
	__u32 stretch = SENT_MAX;
	struct socket *socket;

	if (!why || !why->name[0])
		return;
	socket = socket_of(sk);
	if (!socket)
		return;
	event.time_ns = bpf_ktime_get_ns();
	__builtin_memcpy(event.name, why->name, sizeof(event.name));
	if (sent && is_going_out(sk, sent))
		stretch = stretch_of(socket, seq_of_packet(sent));
	report_of(settings_now, socket, sk, stretch, &event);
}

SEC("tp_btf/kfree_skb")
int BPF_PROG(on_drop, struct sk_buff *skb, void *location, __u32 reason,
	     struct sock *rx_sk)
{
	const struct probes_settings *settings_now = only(&settings);
	struct sock *sk = skb->sk;
	struct timed timed;

	if (!settings_now || settings_now->bypass)
		return 0;
	timed = timed_begin(PROGRAM_on_drop);
	if (sk)
		dropped(settings_now, sk, reason, skb);
	else if (LINUX_KERNEL_VERSION >= RX_SK_VERSION && rx_sk)
		dropped(settings_now, rx_sk, reason, 0);
	timed_end(&timed);
	return 0;
}
