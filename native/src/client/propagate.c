/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where else a trace was or will be: breadcrumbs, and the value that travels
 * with a request as our member of the W3C tracestate header.
 *
 *   value    = "1" "-" hop "-" handle "-" nodes *2( ";" trigger )
 *   hop      = 8HEX            struct bs_hop.hop
 *   handle   = 8HEX            struct bs_hop.handle
 *   nodes    = 1*3( 16HEX )    the nodes last visited, who injected it first
 *   trigger  = 1*31( %x61-7A / %x30-39 / "_" / "." / "-" )
 *   HEX      = %x30-39 / %x61-66        no capitals
 *
 *   1-00000002-00800001-af63dc4c8601ec8caf63df4c8601f1a5;latency.checkout
 *
 * "1" is the version. At most 128 bytes: of two long trigger names the second
 * is left out. All characters are allowed in a tracestate value.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>

#include "writer.h"

#define NODES 3

#define HEX32 8
#define HEX64 16

/* ---------------------------------------------------------------- hex --- */

static char *put_hex(char *to, uint64_t value, int digits)
{
	for (int i = digits - 1; i >= 0; i--) {
		to[i] = "0123456789abcdef"[value & 15];
		value >>= 4;
	}
	return to + digits;
}

static bool get_hex(const char **from, const char *end, int digits,
		    uint64_t *value)
{
	if (end - *from < digits)
		return false;
	*value = 0;
	for (int i = 0; i < digits; i++) {
		char c = *(*from)++;

		if (c >= '0' && c <= '9')
			*value = *value << 4 | (uint64_t)(c - '0');
		else if (c >= 'a' && c <= 'f')
			*value = *value << 4 | (uint64_t)(c - 'a' + 10);
		else
			return false;
	}
	return true;
}

static bool get_char(const char **from, const char *end, char c)
{
	if (*from == end || **from != c)
		return false;
	(*from)++;
	return true;
}

/* -------------------------------------------------------------- nodes --- */

uint64_t bs_node_id(const char *name)
{
	return bs_fnv1a64(BS_FNV1A64_BASIS, name, strlen(name));
}

const char *bs_node_ref(void)
{
	bs_thread_enter(&bs_thread);
	return bs_thread.node_ref;
}

/* "@" and an IP address; "@" is in no node's name. Whoever reads it takes nothing else for
 * one, and then misses a node. */
static bool address_is_valid(const char *address, size_t bytes)
{
	struct in6_addr parsed;

	/* As inet_ntop() writes it. */
	if (bytes < 2 || address[0] != '@' ||
	    strspn(address + 1, "0123456789abcdef.:") != bytes - 1)
		return false;
	return inet_pton(AF_INET, address + 1, &parsed) == 1 ||
	       inet_pton(AF_INET6, address + 1, &parsed) == 1;
}

static bool node_name_is_valid(const char *name, size_t bytes)
{
	if (bytes == 0 || bytes > BS_NODE_NAME_MAX)
		return false;
	for (size_t i = 0; i < bytes; i++) {
		char c = name[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
		      (c >= '0' && c <= '9') || c == '_' || c == '.' ||
		      c == '-'))
			return false;
	}
	return true;
}

static int append_breadcrumb(struct bs_thread *t, struct bs_trace *trace,
			     uint64_t id, const char *name, size_t name_bytes)
{
	const struct bs_part parts[2] = {
		{&id, sizeof(id)},
		{name, name_bytes},
	};

	return bs_append(t, trace, BS_RECORD_BREADCRUMB, 0, bs_clock_ticks(),
			 parts, 2);
}

static int append_hop(struct bs_thread *t, struct bs_trace *trace, uint8_t type,
		      const struct bs_hop *hop)
{
	const struct bs_part part = {hop, sizeof(*hop)};

	return bs_append(t, trace, type, 0, bs_clock_ticks(), &part, 1);
}

/* NULL when there is none, it is closed, or it is the parent's. */
static struct bs_trace *open_trace_of(struct bs_thread *t,
				      struct bs_trace *trace)
{
	if (!trace)
		return t->own_open ? &t->own : NULL;
	return READ_ONCE(trace->attachment) > bs_fork_epoch ? trace : NULL;
}

int bs_breadcrumb(struct bs_trace *trace, const char *node)
{
	struct bs_thread *t = &bs_thread;
	size_t bytes = strnlen(node, BS_NODE_NAME_MAX + 1);
	const char *end = node + bytes;
	uint64_t id;

	trace = open_trace_of(t, trace);
	if (!trace)
		return -ENOENT;
	if (get_char(&node, end, '#')) {
		if (!get_hex(&node, end, HEX64, &id) || node != end)
			goto malformed;
		return append_breadcrumb(t, trace, id, NULL, 0);
	}
	if (!node_name_is_valid(node, bytes) && !address_is_valid(node, bytes))
		goto malformed;
	return append_breadcrumb(t, trace, bs_node_id(node), node, bytes);
malformed:
	bs_thread_enter(t);
	BS_COUNT_THREAD(t, breadcrumbs_malformed, 1);
	return -EINVAL;
}

/* ----------------------------------------------------------- contexts --- */

struct context {
	uint64_t hop;
	uint64_t handle;
	uint64_t nodes[NODES];
	const char *triggers[BS_FIRED_NAMES];
	size_t trigger_bytes[BS_FIRED_NAMES];
	int n_nodes;
	int n_triggers;
};

static bool parse(const char *from, size_t bytes, struct context *c)
{
	const char *end = from + bytes;

	memset(c, 0, sizeof(*c));
	if (bytes > BS_CONTEXT_MAX)
		return false;
	if (!get_char(&from, end, '1') || !get_char(&from, end, '-') ||
	    !get_hex(&from, end, HEX32, &c->hop) ||
	    !get_char(&from, end, '-') ||
	    !get_hex(&from, end, HEX32, &c->handle) ||
	    !get_char(&from, end, '-'))
		return false;
	do {
		if (c->n_nodes == NODES ||
		    !get_hex(&from, end, HEX64, &c->nodes[c->n_nodes]))
			return false;
		c->n_nodes++;
	} while (from != end && *from != ';');

	while (from != end) {
		const char *name = ++from;

		while (from != end && *from != ';')
			from++;
		if (c->n_triggers == BS_FIRED_NAMES ||
		    !bs_trigger_name_is_valid(name, (size_t)(from - name)))
			return false;
		c->triggers[c->n_triggers] = name;
		c->trigger_bytes[c->n_triggers++] = (size_t)(from - name);
	}
	return true;
}

static size_t format(char text[BS_CONTEXT_MAX + 1], const struct bs_hop *hop,
		     const struct bs_trace *trace)
{
	struct bs_fired fired;
	char *to = text;
	int n_nodes = 1;

	*to++ = '1';
	*to++ = '-';
	to = put_hex(to, hop->hop, HEX32);
	*to++ = '-';
	to = put_hex(to, hop->handle, HEX32);
	*to++ = '-';
	to = put_hex(to, hop->node_id, HEX64);
	for (int i = 0; i < NODES && n_nodes < NODES; i++) {
		uint64_t crumb = READ_ONCE(trace->crumbs[i]);

		if (crumb == 0 || crumb == hop->node_id)
			continue;
		to = put_hex(to, crumb, HEX64);
		n_nodes++;
	}
	if (bs_fired_get(trace->id, &fired)) {
		for (int i = 0; i < BS_FIRED_NAMES; i++) {
			size_t bytes = strlen(fired.names[i]);

			if (!bytes ||
			    (size_t)(to - text) + 1 + bytes > BS_CONTEXT_MAX)
				continue;
			*to++ = ';';
			memcpy(to, fired.names[i], bytes);
			to += bytes;
		}
	}
	*to = '\0';
	return (size_t)(to - text);
}

int bs_serialize(struct bs_trace *trace, uint64_t span_id, char *value,
		 size_t size)
{
	struct bs_thread *t = &bs_thread;
	char text[BS_CONTEXT_MAX + 1];
	struct bs_hop hop;
	size_t bytes;

	trace = open_trace_of(t, trace);
	if (!trace)
		return -ENOENT;
	bs_thread_enter(t);
	if (!t->attachment->channel)
		return -ENOTCONN;
	hop = (struct bs_hop){
		.node_id = t->attachment->node_id,
		.span_id = span_id,
		.hop = fetch_add(&trace->next_hop, 1),
		.handle = bs_trace_handle(READ_ONCE(trace->handle_seq)),
	};
	bytes = format(text, &hop, trace);
	if (bytes >= size)
		return -ENOSPC;
	memcpy(value, text, bytes + 1);
	/* Where it is lost, the trace is known to be lossy. */
	append_hop(t, trace, BS_RECORD_HOP_OUT, &hop);
	return (int)bytes;
}

bool bs_trusts_incoming(void)
{
	bs_thread_enter(&bs_thread);
	return READ_ONCE(bs_thread.attachment->policy->trust_incoming);
}

/* What fired upstream counts as fired here, where such things are believed. */
static void fire_incoming(struct bs_thread *t, struct bs_trace_id id,
			  const struct context *c)
{
	if (!READ_ONCE(t->attachment->policy->trust_incoming))
		return;
	for (int i = 0; i < c->n_triggers; i++)
		bs_trigger_push(id, BS_TRIGGER_CONTEXT, c->triggers[i],
				c->trigger_bytes[i], NULL, NULL, 0);
}

int bs_deserialize(struct bs_trace *trace, uint64_t span_id, const char *value,
		   size_t value_bytes)
{
	struct bs_thread *t = &bs_thread;
	struct context c;
	struct bs_hop hop;
	int ret, more;

	trace = open_trace_of(t, trace);
	if (!trace)
		return -ENOENT;
	bs_thread_enter(t);
	if (!parse(value, value_bytes, &c)) {
		BS_COUNT_THREAD(t, contexts_malformed, 1);
		return -EINVAL;
	}
	hop = (struct bs_hop){
		.node_id = c.nodes[0],
		.span_id = span_id,
		.hop = (uint32_t)c.hop,
		.handle = (uint32_t)c.handle,
	};
	ret = append_hop(t, trace, BS_RECORD_HOP_IN, &hop);
	for (int i = 0; i < NODES; i++) {
		WRITE_ONCE(trace->crumbs[i], c.nodes[i]);
		if (i >= c.n_nodes || c.nodes[i] == t->attachment->node_id)
			continue;
		more = append_breadcrumb(t, trace, c.nodes[i], NULL, 0);
		if (!ret)
			ret = more;
	}
	fire_incoming(t, trace->id, &c);
	return ret;
}
