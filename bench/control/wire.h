/* SPDX-License-Identifier: Apache-2.0 */
/*
 * As much of protobuf's encoding as a fleet needs of protocol/backsight.proto:
 * fields that are varints, 8 bytes, or bytes.
 */
#ifndef BENCH_CONTROL_WIRE_H
#define BENCH_CONTROL_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum wire_type {
	WIRE_VARINT = 0,
	WIRE_FIXED64 = 1,
	WIRE_BYTES = 2,
};

/* What is left to read of a message. */
struct wire {
	const uint8_t *at;
	const uint8_t *end;
};

/* One field: its value, or its bytes. */
struct wire_field {
	uint32_t number;
	uint64_t value;
	struct wire bytes;
};

static inline bool wire_varint(struct wire *w, uint64_t *value)
{
	*value = 0;
	for (unsigned shift = 0; shift < 64 && w->at < w->end; shift += 7) {
		uint8_t byte = *w->at++;

		*value |= (uint64_t)(byte & 0x7f) << shift;
		if (!(byte & 0x80))
			return true;
	}
	return false;
}

/* The next field; false at the end, and where the rest makes no sense: `at` is
 * not `end` then. */
static inline bool wire_next(struct wire *w, struct wire_field *field)
{
	struct wire rest = *w;
	uint64_t tag;

	if (!wire_varint(&rest, &tag))
		return false;
	*field = (struct wire_field){.number = (uint32_t)(tag >> 3)};
	switch (tag & 7) {
	case WIRE_VARINT:
		if (!wire_varint(&rest, &field->value))
			return false;
		break;
	case WIRE_FIXED64:
		if (rest.end - rest.at < 8)
			return false;
		memcpy(&field->value, rest.at, 8);
		rest.at += 8;
		break;
	case WIRE_BYTES:
		if (!wire_varint(&rest, &field->value) ||
		    field->value > (uint64_t)(rest.end - rest.at))
			return false;
		field->bytes = (struct wire){rest.at, rest.at + field->value};
		rest.at += field->value;
		break;
	default:
		return false;
	}
	*w = rest;
	return true;
}

/* The first field of a number; false if there is none. */
static inline bool wire_find(struct wire w, uint32_t number,
			     struct wire_field *field)
{
	while (wire_next(&w, field))
		if (field->number == number)
			return true;
	return false;
}

static inline size_t wire_put_varint(uint8_t *to, uint64_t value)
{
	size_t n = 0;

	for (; value > 0x7f; value >>= 7)
		to[n++] = (uint8_t)(value | 0x80);
	to[n++] = (uint8_t)value;
	return n;
}

static inline size_t wire_put_tag(uint8_t *to, uint32_t number,
				  enum wire_type type)
{
	return wire_put_varint(to, (uint64_t)number << 3 | type);
}

static inline size_t wire_put_fixed64(uint8_t *to, uint32_t number,
				      uint64_t value)
{
	size_t n = wire_put_tag(to, number, WIRE_FIXED64);

	memcpy(to + n, &value, 8);
	return n + 8;
}

#endif
