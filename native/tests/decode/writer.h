/* SPDX-License-Identifier: Apache-2.0 */
/* Slices in memory, piece by piece. */
#ifndef BS_TEST_DECODE_WRITER_H
#define BS_TEST_DECODE_WRITER_H

#include <string.h>

#include "abi/arena.h"
#include "abi/slice.h"
#include "backsight.h"
#include "check.h"
#include "decode.h"

#define WHOLE (BS_RUN_FIRST | BS_RUN_LAST)

struct bytes {
	size_t n;
	uint8_t at[1 << 20];
};

static inline void put(struct bytes *b, const void *from, size_t n)
{
	CHECK(b->n + n <= sizeof(b->at));
	if (n)
		memcpy(b->at + b->n, from, n);
	b->n += n;
}

static inline void put_piece(struct bytes *b, uint16_t kind, uint32_t client,
			     const void *content, uint32_t n)
{
	struct bs_piece_header head = {
		.bytes = n, .kind = kind, .client = client};

	put(b, &head, sizeof(head));
	put(b, content, n);
}

/* A run whose records are in `content`. */
static inline void put_run(struct bytes *b, struct bs_piece_header head,
			   const struct bytes *content)
{
	head.bytes = (uint32_t)content->n;
	head.kind = BS_PIECE_RUN;
	put(b, &head, sizeof(head));
	put(b, content->at, content->n);
}

static inline void put_record(struct bytes *b, uint8_t type, const void *fixed,
			      size_t n, const char *text)
{
	struct bs_record_header head = {
		.payload_bytes = (uint16_t)(n + strlen(text)), .type = type};

	put(b, &head, sizeof(head));
	put(b, fixed, n);
	put(b, text, strlen(text));
	put(b, "\0\0\0", -(n + strlen(text)) % BS_RECORD_ALIGN);
}

static inline void put_start(struct bytes *b, uint64_t span, uint64_t parent,
			     const char *name)
{
	struct bs_span_start start = {
		.span_id = span,
		.parent_id = parent,
		.start_ns = 100 + span,
		.name_bytes = (uint8_t)strlen(name),
	};

	put_record(b, BS_RECORD_SPAN_START, &start, sizeof(start), name);
}

static inline void put_end(struct bytes *b, uint64_t span)
{
	struct bs_span_end end = {.span_id = span, .end_ns = 1000 + span};

	put_record(b, BS_RECORD_SPAN_END, &end, sizeof(end), "");
}

static inline void put_hop(struct bytes *b, uint8_t type, uint64_t node,
			   uint32_t hop)
{
	struct bs_hop h = {.node_id = node, .span_id = 7, .hop = hop};

	put_record(b, type, &h, sizeof(h), "");
}

#endif
