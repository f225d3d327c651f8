// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* A connection is broken off, by this side or by the other one. */
#include "socket.h"

LICENSE_IS("Dual BSD/GPL");

static __always_inline void broken(struct sock *sk, __u16 kind)
{
	const struct probes_settings *s = only(MAP(settings));
	struct bs_kernel_event event = {.kind = kind};
	struct socket *socket;

	if (!s || s->bypass)
		return;
	socket = socket_of(sk);
	if (!socket)
		return;
	event.time_ns = bpf_ktime_get_ns();
	/* Whichever segments were lost with it, the last writer's were among them. */
	report_of(s, socket, sk, SENT_MAX, &event);
}

/* Without a socket: nobody listens there, which is nobody's trace. */
TRACEPOINT(tcp_send_reset, on_reset_sent, struct sock *sk)
{
	struct timed timed;

	if (!sk)
		return 0;
	timed = timed_begin(PROGRAM_on_reset_sent);
	broken(sk, BS_KERNEL_TCP_RESET_SENT);
	timed_end(&timed);
	return 0;
}

TRACEPOINT(tcp_receive_reset, on_reset_received, struct sock *sk)
{
	struct timed timed = timed_begin(PROGRAM_on_reset_received);

	broken(sk, BS_KERNEL_TCP_RESET_RECEIVED);
	timed_end(&timed);
	return 0;
}
