/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which trace an event of a TCP socket concerns. It comes in softirq, in whatever
 * thread was interrupted. So each socket knows which trace wrote which stretch of
 * its stream (sockets.bpf.c); a segment is of the trace that wrote its first byte.
 */
#ifndef BPF_SOCKET_H
#define BPF_SOCKET_H

#include "cost.h"
#include "fire.h"

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6

/* In which stretch a byte was; SENT_MAX: it is not known any more. */
static __always_inline __u32 stretch_of(const struct socket *socket, __u32 seq)
{
	for (__u32 i = 1; i <= SENT_MAX; i++) {
		__u32 place = (socket->next - i) % SENT_MAX;

		if (i > socket->next)
			break;
		if ((__s32)(seq - socket->sent[place].start) >= 0)
			return place;
	}
	return SENT_MAX;
}

#define NEIGHBOURS_SOUGHT 16

struct neighbours {
	const struct socket *socket;
	const struct shown *own;
	struct laterals *laterals;
};

LOOP_BODY(add_neighbour)
long add_neighbour(__u32 i, struct neighbours *n)
{
	const struct sent *sent =
		&n->socket->sent[(n->socket->next - 1 - i) % SENT_MAX];

	if (i >= n->socket->next)
		return 1;
	add_lateral(n->laterals, n->own, sent->hi, sent->lo);
	return 0;
}

/* The other traces that wrote last. One may be there twice; the node minds. (By
 * bpf_loop(): the verifier would go through all ways of 16 rounds.) */
static __always_inline void add_neighbours(const struct socket *socket,
					   const struct shown *own,
					   struct laterals *laterals)
{
	struct neighbours n = {socket, own, laterals};

	LOOP(NEIGHBOURS_SOUGHT, add_neighbour, &n);
}

static __always_inline void name_peer(const struct sock *sk,
				      struct bs_kernel_event *event)
{
	event->number = bpf_ntohs(FIELD(sk, __sk_common.skc_dport));
	if (FIELD(sk, __sk_common.skc_family) == AF_INET) {
		__u32 address = FIELD(sk, __sk_common.skc_daddr);

		event->peer[10] = event->peer[11] = 0xff;
		__builtin_memcpy(&event->peer[12], &address, sizeof(address));
	} else {
		bpf_probe_read_kernel(event->peer, sizeof(event->peer),
				      &sk->__sk_common.skc_v6_daddr);
	}
}

#define NO_TRANSPORT_HEADER 0xffff

/* A packet that comes in may be of a socket too. */
static __always_inline bool is_going_out(const struct sock *sk,
					 const struct sk_buff *skb)
{
	__u16 source = 0;

	if (FIELD(skb, transport_header) == NO_TRANSPORT_HEADER)
		return false;
	bpf_probe_read_kernel(&source, sizeof(source),
			      FIELD(skb, head) + FIELD(skb, transport_header));
	return bpf_ntohs(source) == FIELD(sk, __sk_common.skc_num);
}

/* The sequence number of a packet on its way out: as its header has it (RFC 9293). */
static __always_inline __u32 seq_of_packet(const struct sk_buff *skb)
{
	__u32 seq = 0;

	bpf_probe_read_kernel(&seq, sizeof(seq),
			      FIELD(skb, head) + FIELD(skb, transport_header) +
				      4);
	return bpf_ntohl(seq);
}

/* What happened to the trace of a stretch; or, if that is not known, to the trace
 * that wrote last. */
static __always_inline void report_of(const struct probes_settings *settings,
				      struct socket *socket,
				      const struct sock *sk, __u32 stretch,
				      struct bs_kernel_event *event)
{
	struct laterals laterals = {};
	struct shown shown = {};
	const struct sent *sent;
	const __u32 *owner;
	__u32 process;
	void *inner;

	if (socket->noted_ns < settings->sockets_since_ns)
		return;
	if (stretch >= SENT_MAX) {
		stretch = (socket->next - 1) % SENT_MAX;
		event->confidence = BS_KERNEL_OF_SOCKET;
	}
	sent = &socket->sent[stretch % SENT_MAX];
	shown.hi = sent->hi;
	shown.lo = sent->lo;
	process = sent->process;
	owner = bpf_map_lookup_elem(MAP(owners), &process);
	if (!owner || *owner != sent->client + 1)
		return;
	inner = bpf_map_lookup_elem(MAP(processes), &process);
	shown.context = inner ? only(inner) : 0;
	if (!shown.context || !(shown.hi | shown.lo))
		return;
	event->client = sent->client;
	event->cpu = bpf_get_smp_processor_id();
	name_peer(sk, event);
	add_neighbours(socket, &shown, &laterals);
	report(settings, &shown, event, &laterals);
}

#endif
