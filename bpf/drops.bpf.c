// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The kernel drops a packet of a TCP socket, and says why. */
#include "socket.h"

LICENSE_IS("Dual BSD/GPL");

/* Since then the receiving socket is said too. */
#define RX_SK_VERSION ((6 << 16) + (11 << 8))

static __always_inline void dropped(const struct probes_settings *settings_now,
				    struct sock *sk, __u32 reason,
				    const struct sk_buff *sent)
{
	struct bs_kernel_event event = {.kind = BS_KERNEL_PACKET_DROP};
	const struct reason *why = bpf_map_lookup_elem(MAP(reasons), &reason);
	__u32 stretch = SENT_MAX;
	struct socket *socket;

	if (!sk || !why || !why->name[0])
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

/* It may not read all arguments: older kernels have three. */
TRACEPOINT_RAW(kfree_skb, on_drop)
{
	const struct probes_settings *settings_now = only(MAP(settings));
	const struct sk_buff *skb = (const void *)arguments[0];
	__u32 reason = (__u32)arguments[2];
	struct sock *sk = FIELD(skb, sk);
	struct timed timed;

	if (!settings_now || settings_now->bypass)
		return 0;
	timed = timed_begin(PROGRAM_on_drop);
	if (sk)
		dropped(settings_now, sk, reason, skb);
	else if (LINUX_KERNEL_VERSION >= RX_SK_VERSION)
		dropped(settings_now, (void *)READ_ONCE(arguments[3]), reason,
			0);
	timed_end(&timed);
	return 0;
}
