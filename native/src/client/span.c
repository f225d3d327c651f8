/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "writer.h"

static struct bs_trace *trace_or_own(struct bs_thread *t,
				     struct bs_trace *trace)
{
	if (trace)
		return trace;
	return t->own_open ? &t->own : NULL;
}

int bs_span_start(struct bs_trace *trace, uint64_t span_id, uint64_t parent_id,
		  uint64_t start_ns, uint8_t kind, const char *name)
{
	struct bs_thread *t = &bs_thread;
	size_t name_bytes = strnlen(name, BS_SPAN_START_NAME_MAX + 1);
	struct bs_span_start start = {
		.span_id = span_id,
		.parent_id = parent_id,
		.start_ns = start_ns,
		.kind = kind,
	};
	struct bs_part parts[2] = {{&start, sizeof(start)}, {name, 0}};

	trace = trace_or_own(t, trace);
	if (!trace)
		return -ENOENT;
	parts[1].n = bs_utf8_cut(name, name_bytes, BS_SPAN_START_NAME_MAX);
	start.name_bytes = (uint8_t)parts[1].n;
	return bs_append(t, trace, BS_RECORD_SPAN_START, 0, bs_clock_ticks(),
			 parts, 2);
}

/* Bytes of the whole attributes in the first `max`, or -EINVAL if they are not
 * encoded as backsight.h says. */
static long whole_attributes(const unsigned char *attributes, size_t bytes,
			     size_t max)
{
	size_t whole = 0;
	size_t at = 0;

	while (at < bytes) {
		struct bs_attribute_header h;

		if (bytes - at < sizeof(h))
			return -EINVAL;
		memcpy(&h, attributes + at, sizeof(h));
		at += sizeof(h);
		if (bytes - at < (size_t)h.key_bytes + h.value_bytes)
			return -EINVAL;
		at += (size_t)h.key_bytes + h.value_bytes;
		if (at <= max)
			whole = at;
	}
	return (long)whole;
}

int bs_span_end(struct bs_trace *trace, uint64_t span_id, uint64_t end_ns,
		uint16_t status, const char *name, const void *attributes,
		size_t attributes_bytes)
{
	struct bs_thread *t = &bs_thread;
	struct bs_span_end end = {
		.span_id = span_id,
		.end_ns = end_ns,
		.status = status,
	};
	struct bs_part parts[3] = {{&end, sizeof(end)}};
	size_t room = BS_PAYLOAD_MAX - sizeof(end);
	uint16_t flags = 0;
	size_t name_bytes;
	long whole;

	trace = trace_or_own(t, trace);
	if (!trace)
		return -ENOENT;
	if (name) {
		name_bytes = strlen(name);
		parts[1].bytes = name;
		parts[1].n = bs_utf8_cut(name, name_bytes, room);
		if (parts[1].n < name_bytes)
			flags = BS_RECORD_TRUNCATED;
		room -= parts[1].n;
	}
	if (attributes) {
		whole = whole_attributes(attributes, attributes_bytes, room);
		if (whole < 0) {
			bs_thread_enter(t);
			BS_COUNT_THREAD(t, attributes_malformed, 1);
			return (int)whole;
		}
		parts[2].bytes = attributes;
		parts[2].n = (size_t)whole;
		if (parts[2].n < attributes_bytes)
			flags = BS_RECORD_TRUNCATED;
	}
	end.name_bytes = (uint16_t)parts[1].n;
	end.attributes_bytes = (uint32_t)parts[2].n;
	return bs_append(t, trace, BS_RECORD_SPAN_END, flags, bs_clock_ticks(),
			 parts, 3);
}
