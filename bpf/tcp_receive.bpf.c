// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * What segments that come in say: the peer takes no more (zero window), the round trip
 * has become long, or data waits here and nobody reads it.
 */
#include "socket.h"

LICENSE_IS("Dual BSD/GPL");

/* A round trip is long if it is so much longer than the shortest of its connection. */
#define RTT_FACTOR 4

/* Smaller ones are of one machine, and vary for reasons of its own. */
#define RTT_LEAST_US 100

static __always_inline void look_at_window(const struct probes_settings *s,
					   struct socket *socket,
					   const struct sock *sk, __u64 now,
					   bool is_shut)
{
	struct bs_kernel_event event = {
		.time_ns = now,
		.kind = BS_KERNEL_TCP_ZERO_WINDOW,
	};

	if (is_shut && !socket->is_shut)
		report_of(s, socket, sk, SENT_MAX, &event);
	socket->is_shut = is_shut;
}

static __always_inline void look_at_rtt(const struct probes_settings *s,
					struct socket *socket,
					const struct sock *sk, __u64 now,
					__u32 rtt_us)
{
	struct bs_kernel_event event = {
		.time_ns = now,
		.duration_ns = (__u64)rtt_us * 1000,
		.kind = BS_KERNEL_TCP_RTT,
	};

	if (!rtt_us)
		return;
	if (!socket->rtt_least_us || rtt_us < socket->rtt_least_us)
		socket->rtt_least_us = rtt_us;
	if (rtt_us < RTT_LEAST_US || rtt_us / RTT_FACTOR < socket->rtt_least_us)
		return;
	report_of(s, socket, sk, SENT_MAX, &event);
}

/* Of the header that the segment begins with (RFC 9293). */
struct tcp_header {
	__u8 ports_and_numbers[13];
	__u8 flags;
	__u16 window;
};

#define TCP_FIN 0x01
#define TCP_RST 0x04

/* Bytes that nobody has had yet. */
static __always_inline bool has_news(const struct tcp_sock *tcp,
				     const struct sk_buff *skb, __u8 flags)
{
	const struct tcp_skb_cb *segment = (const struct tcp_skb_cb *)&skb->cb;
	__u32 end = READ(segment, end_seq) - !!(flags & TCP_FIN);

	return end != READ(segment, seq) &&
	       (__s32)(end - READ(tcp, rcv_nxt)) > 0;
}

TRACEPOINT(tcp_probe, on_segment, struct sock *sk, struct sk_buff *skb)
{
	const struct probes_settings *s = only(MAP(settings));
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;
	struct tcp_header header = {};
	struct socket *socket;
	struct timed timed;
	__u64 now;

	if (!s || s->bypass)
		return 0;
	socket = socket_of(sk);
	if (!socket)
		return 0;
	timed = timed_begin(PROGRAM_on_segment);
	now = bpf_ktime_get_ns();
	/* A reset says of the window that it is zero. */
	if (bpf_probe_read_kernel(&header, sizeof(header), FIELD(skb, data)) ||
	    header.flags & TCP_RST)
		goto out;
	look_at_window(s, socket, sk, now, !header.window);
	look_at_rtt(s, socket, sk, now, READ(tcp, srtt_us) >> 3);
	if (!socket->readable_since_ns && has_news(tcp, skb, header.flags))
		socket->readable_since_ns = now;
out:
	timed_end(&timed);
	return 0;
}
