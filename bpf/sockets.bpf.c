// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which trace wrote what into a TCP socket: noted when it is written, in the thread
 * that writes, for whatever befalls the segments later (socket.h).
 *
 * So the peer is known too: a breadcrumb, where the application drops none. It is a
 * hint: behind a proxy there is another one.
 *
 * Linux 6.16 and later say so before they take what is written. A thread may wait in
 * the middle of a write, while what it wrote first is on its way already. Earlier ones
 * say so afterwards: since 6.3 by a tracepoint, before by the end of tcp_sendmsg().
 */
#include <bpf/bpf_endian.h>

#include "socket.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define TCP_CLOSE 7
#define TCP_SYN_SENT 2

/* A trace tells of a peer once in such a time: a connection may be of many traces in turn. */
#define PEER_AGAIN_NS 5000000000ull

static __always_inline void tell_peer(const struct sock *sk,
				      const struct shown *s,
				      const struct thread *t, __u64 now)
{
	const struct probes_settings *settings_now = only(&settings);
	struct bs_kernel_event event = {.kind = PROBES_PEER};
	__u64 peer, what;

	if (!settings_now || !settings_now->breadcrumbs)
		return;
	name_peer(sk, &event);
	__builtin_memcpy(&peer, &event.peer[8], sizeof(peer));
	what = mixed(s->hi ^ s->lo ^ peer, PROBES_PEER);
	if (done_lately(what, now, PEER_AGAIN_NS))
		return;
	event.time_ns = now;
	event.client = t->client;
	if (send_record(s, &event))
		note_done(what, now);
}

/* From there on. */
static __always_inline void note_sent(struct sock *sk, __u32 start,
				      bool is_connecting)
{
	__u64 now = bpf_ktime_get_ns();
	struct shown shown = {};
	struct thread *t = current_thread(now, &shown);
	struct socket *socket;
	struct sent *last, *sent;

	/* Of no trace, after one: that one's stretch ends there. */
	socket = bpf_sk_storage_get(&sockets, sk, 0,
				    t ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	if (!socket)
		return;
	last = &socket->sent[(socket->next - 1) % SENT_MAX];
	if (last->is_connecting) {
		last->start = start;
		last->is_connecting = false;
	}
	if (last->hi == shown.hi && last->lo == shown.lo)
		return;
	sent = &socket->sent[socket->next % SENT_MAX];
	sent->start = start;
	sent->is_connecting = is_connecting;
	sent->hi = shown.hi;
	sent->lo = shown.lo;
	sent->process = t ? t->process : 0;
	sent->client = t ? t->client : 0;
	socket->next++;
	if (t)
		tell_peer(sk, &shown, t, now);
}

static __always_inline __u32 write_seq(const struct sock *sk)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;

	return BPF_CORE_READ(tcp, write_seq);
}

static __always_inline bool is_off(void)
{
	const struct probes_settings *s = only(&settings);

	return !s || s->bypass;
}

SEC("tp_btf/tcp_sendmsg_locked")
int BPF_PROG(on_send, struct sock *sk)
{
	struct timed timed;

	if (is_off())
		return 0;
	timed = timed_begin(PROGRAM_on_send);
	note_sent(sk, write_seq(sk), false);
	timed_end(&timed);
	return 0;
}

SEC("?tp_btf/sock_send_length")
int BPF_PROG(on_sent, struct sock *sk, int bytes, int flags)
{
	struct timed timed;

	if (bytes <= 0 || sk->sk_protocol != IPPROTO_TCP || is_off())
		return 0;
	timed = timed_begin(PROGRAM_on_sent);
	note_sent(sk, write_seq(sk) - bytes, false);
	timed_end(&timed);
	return 0;
}

SEC("?fexit/tcp_sendmsg")
int BPF_PROG(on_sendmsg, struct sock *sk, void *message, __u64 size, int bytes)
{
	struct timed timed;

	if (bytes <= 0 || is_off())
		return 0;
	timed = timed_begin(PROGRAM_on_sendmsg);
	note_sent(sk, write_seq(sk) - bytes, false);
	timed_end(&timed);
	return 0;
}

/* A connection that is being made: its first segment is of the trace that makes it. */
SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(on_state, struct sock *sk, int before, int after)
{
	struct timed timed;

	if (before != TCP_CLOSE || after != TCP_SYN_SENT ||
	    sk->sk_protocol != IPPROTO_TCP || is_off())
		return 0;
	timed = timed_begin(PROGRAM_on_state);
	/* Its number is chosen later. */
	note_sent(sk, 0, true);
	timed_end(&timed);
	return 0;
}
