// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which trace wrote what into a TCP socket: noted when it is written, in the thread
 * that writes, for whatever befalls the segments later (socket.h).
 *
 * So it is known who uses which connection, as it is when a trace reads. Its peer is a
 * breadcrumb, where the application drops none: a hint, since behind a proxy there is
 * another one. Through which device it goes tells whom a link that goes down hits.
 *
 * Linux 6.16 and later say so before they take what is written. A thread may wait in
 * the middle of a write, while what it wrote first is on its way already. Earlier ones
 * say so afterwards: since 6.3 by a tracepoint, before by the end of tcp_sendmsg().
 */
#include "socket.h"

LICENSE_IS("Dual BSD/GPL");

#define TCP_CLOSE 7
#define TCP_SYN_SENT 2

/* A breadcrumb is dropped again once in such a time, since the segment that holds the
 * last one may be gone. */
#define CRUMB_AGAIN_NS 5000000000ull
#define CRUMB (PROBES_USE - 1)

static __always_inline bool is_last_writer(const struct socket *socket,
					   const struct shown *s)
{
	const struct sent *last = &socket->sent[(socket->next - 1) % SENT_MAX];

	return last->hi == s->hi && last->lo == s->lo;
}

/* socket: where it stands, if it was told; NULL: it is kept for others. */
static __always_inline void
tell_use(const struct sock *sk, struct socket *socket, const struct shown *s,
	 const struct probes_thread *t, __u64 now, const struct timed *timed)
{
	const struct probes_settings *settings_now = only(MAP(settings));
	struct bs_kernel_event event = {.kind = PROBES_USE};
	struct used used = {};
	__u64 what, use, crumb;

	if (!settings_now || !settings_now->uses)
		return;
	if (socket && !is_last_writer(socket, s))
		socket = 0;
	if (socket && now - socket->used_ns < PROBES_USE_EVERY_NS)
		return;
	name_peer(sk, &event);
	__builtin_memcpy(&what, &event.peer[8], sizeof(what));
	what ^= s->hi ^ s->lo;
	used.port = FIELD(sk, __sk_common.skc_num);
	use = mixed(what + used.port, PROBES_USE);
	if (done_lately(MAP(uses), use, now, PROBES_USE_EVERY_NS))
		return;
	crumb = mixed(what, CRUMB);
	event.time_ns = now;
	event.client = t->client;
	used.namespace = READ(sk, __sk_common.skc_net.net, ns.inum);
	used.device = READ(sk, sk_dst_cache, dev, ifindex);
	used.is_crumb = settings_now->breadcrumbs &&
			!done_lately(MAP(uses), crumb, now, CRUMB_AGAIN_NS);
	if (!send_record(s, &event, &used)) {
		count_map_error(timed);
		return;
	}
	note_done(MAP(uses), use, now);
	if (used.is_crumb)
		note_done(MAP(uses), crumb, now);
	if (socket)
		socket->used_ns = now;
}

/* Of a time after which nobody noted who wrote. */
static __always_inline void forget_writers(struct socket *socket)
{
	struct sent *last = &socket->sent[SENT_MAX - 1];

	socket->next = 0;
	last->hi = last->lo = 0;
	last->is_connecting = false;
}

/* From there on. */
static __always_inline void note_sent(struct sock *sk, __u32 start,
				      bool is_connecting,
				      const struct timed *timed)
{
	__u64 now = bpf_ktime_get_ns();
	struct shown shown = {};
	struct probes_thread *t = current_thread(now, &shown);
	const struct probes_settings *settings_now;
	struct socket *socket;
	struct sent *last, *sent;
	bool was_connecting;

	/* Of no trace, after one: that one's stretch ends there. */
	socket = t ? socket_make(sk) : socket_of(sk);
	if (!socket && t)
		count_map_error(timed);
	settings_now = only(MAP(settings));
	if (!socket || !settings_now)
		return;
	if (socket->noted_ns < settings_now->sockets_since_ns)
		forget_writers(socket);
	socket->noted_ns = now;
	last = &socket->sent[(socket->next - 1) % SENT_MAX];
	was_connecting = last->is_connecting;
	if (was_connecting) {
		last->start = start;
		last->is_connecting = false;
	}
	if (last->hi != shown.hi || last->lo != shown.lo) {
		sent = &socket->sent[socket->next % SENT_MAX];
		sent->start = start;
		sent->is_connecting = is_connecting;
		sent->hi = shown.hi;
		sent->lo = shown.lo;
		sent->process = t ? t->process : 0;
		sent->client = t ? t->client : 0;
		socket->next++;
		socket->used_ns = 0;
	}
	/* Through which device is known once something goes. */
	if (t && !is_connecting)
		tell_use(sk, socket, &shown, t, now, timed);
}

static __always_inline __u32 write_seq(const struct sock *sk)
{
	const struct tcp_sock *tcp = (const struct tcp_sock *)sk;

	return READ(tcp, write_seq);
}

/* Of all that goes through the machine's sockets the least: what a thread of ours does,
 * or what is done to a socket that one of them wrote to. */
static __always_inline bool concerns_us(struct sock *sk)
{
	const struct probes_settings *s = only(MAP(settings));

	return s && !s->bypass && (current_may_be_ours() || socket_of(sk));
}

TRACEPOINT(tcp_sendmsg_locked, on_send, struct sock *sk)
{
	struct timed timed;

	if (!concerns_us(sk))
		return 0;
	timed = timed_begin(PROGRAM_on_send);
	note_sent(sk, write_seq(sk), false, &timed);
	timed_end(&timed);
	return 0;
}

TRACEPOINT_ELSE(sock_send_length, on_sent, struct sock *sk, int bytes,
		int flags)
{
	struct timed timed;

	if (bytes <= 0 || FIELD(sk, sk_protocol) != IPPROTO_TCP ||
	    !concerns_us(sk))
		return 0;
	timed = timed_begin(PROGRAM_on_sent);
	note_sent(sk, write_seq(sk) - bytes, false, &timed);
	timed_end(&timed);
	return 0;
}

/* bcc has no such programs. */
#ifndef PROBES_BY_BCC
SEC("?fexit/tcp_sendmsg")
int BPF_PROG(on_sendmsg, struct sock *sk, void *message, __u64 size, int bytes)
{
	struct timed timed;

	if (bytes <= 0 || !concerns_us(sk))
		return 0;
	timed = timed_begin(PROGRAM_on_sendmsg);
	note_sent(sk, write_seq(sk) - bytes, false, &timed);
	timed_end(&timed);
	return 0;
}
#endif

/* A connection that is being made: its first segment is of the trace that makes it. */
TRACEPOINT(inet_sock_set_state, on_state, struct sock *sk, int before,
	   int after)
{
	struct timed timed;

	if (before != TCP_CLOSE || after != TCP_SYN_SENT ||
	    FIELD(sk, sk_protocol) != IPPROTO_TCP || !concerns_us(sk))
		return 0;
	timed = timed_begin(PROGRAM_on_state);
	/* Its number is chosen later. */
	note_sent(sk, 0, true, &timed);
	timed_end(&timed);
	return 0;
}

/* For who has no storage that goes with the socket. (When it is closed is too early: a
 * reset may be sent after that.) */
TRACEPOINT_BCC(tcp_destroy_sock, on_destroyed, struct sock *sk)
{
	struct timed timed;

	if (!socket_of(sk))
		return 0;
	timed = timed_begin(PROGRAM_on_destroyed);
	socket_forget(sk);
	timed_end(&timed);
	return 0;
}

/* How long what came had to wait for that (tcp_receive.bpf.c says since when). */
static __always_inline void
look_at_delay(const struct probes_settings *settings_now, struct socket *socket,
	      const struct sock *sk, __u64 now)
{
	struct bs_kernel_event event = {
		.kind = BS_KERNEL_TCP_READ_DELAY,
		.time_ns = now,
		.duration_ns = now - socket->readable_since_ns,
	};

	if (socket->readable_since_ns >= settings_now->valid_since_ns)
		report_of(settings_now, socket, sk, SENT_MAX, &event);
	socket->readable_since_ns = 0;
}

/* Somebody has read: one program for two symptoms, since each costs every read of the
 * machine some 50 ns. */
TRACEPOINT(tcp_rcv_space_adjust, on_read, struct sock *sk)
{
	const struct probes_settings *settings_now = only(MAP(settings));
	struct shown shown = {};
	struct socket *socket;
	struct timed timed;
	struct probes_thread *t;
	__u64 now;

	if (!settings_now || !concerns_us(sk))
		return 0;
	timed = timed_begin(PROGRAM_on_read);
	now = bpf_ktime_get_ns();
	t = current_thread(now, &shown);
	socket = socket_of(sk);
	if (t)
		tell_use(sk, socket, &shown, t, now, &timed);
	if (socket && socket->readable_since_ns)
		look_at_delay(settings_now, socket, sk, now);
	timed_end(&timed);
	return 0;
}
