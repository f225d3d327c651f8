// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* A segment is sent once more: it was lost, or its acknowledgement was. */
#include "socket.h"

LICENSE_IS("Dual BSD/GPL");

#define TCP_SYN_SENT 2
#define ICSK_TIME_LOSS_PROBE 5

/* The number that the stream began with is not kept, but what was acknowledged since.
 * (On the side that asked for the connection, the SYN is counted as a byte.) */
static __always_inline __u64 position_of(const struct sock *sk, __u32 seq)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;

	return READ(tcp, bytes_acked) + (__u32)(seq - READ(tcp, snd_una));
}

/* Nothing says yet that it was lost: the timer for that has run out (tcp_send_loss_probe()
 * of the kernel, which takes the word back when it has sent). */
static __always_inline bool is_probe(const struct sock *sk)
{
	const struct inet_connection_sock *connection =
		(const struct inet_connection_sock *)sk;

	return READ(connection, icsk_pending) == ICSK_TIME_LOSS_PROBE;
}

TRACEPOINT(tcp_retransmit_skb, on_retransmit, struct sock *sk,
	   struct sk_buff *skb)
{
	const struct probes_settings *s = only(MAP(settings));
	struct bs_kernel_event event = {};
	const struct tcp_skb_cb *segment;
	struct socket *socket;
	struct timed timed;
	__u32 stretch, seq;

	if (!s || s->bypass)
		return 0;
	socket = socket_of(sk);
	if (!socket)
		return 0;
	timed = timed_begin(PROGRAM_on_retransmit);
	event.time_ns = bpf_ktime_get_ns();
	event.kind = is_probe(sk) ? BS_KERNEL_TCP_LOSS_PROBE
				  : BS_KERNEL_TCP_RETRANSMIT;
	if (FIELD(sk, __sk_common.skc_state) == TCP_SYN_SENT) {
		event.kind = BS_KERNEL_TCP_SYN_RETRANSMIT;
		/* Nothing else was sent yet. */
		stretch = (socket->next - 1) % SENT_MAX;
	} else {
		segment = (const struct tcp_skb_cb *)&skb->cb;
		seq = READ(segment, seq);
		stretch = stretch_of(socket, seq);
		event.position = position_of(sk, seq);
	}
	report_of(s, socket, sk, stretch, &event);
	timed_end(&timed);
	return 0;
}
