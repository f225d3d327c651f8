/* SPDX-License-Identifier: Apache-2.0 */
/* What joins records into spans, and what is made of these. */
#ifndef BS_DECODE_SPANS_H
#define BS_DECODE_SPANS_H

#include "internal.h"

/* ---------------------------------------------------------- memory --- */

struct block;

/* All that is taken is given back at once. */
struct arena {
	struct block *blocks;
	uint8_t *at, *end;
};

/* Aligned to 8; NULL without memory. */
void *arena_take(struct arena *a, size_t n);
void *arena_copy(struct arena *a, const void *from, size_t n);
void arena_free(struct arena *a);

/* ------------------------------------------------------------ text --- */

/* False without memory. The text may point to the bytes. */
bool text_of(struct arena *a, const uint8_t *bytes, size_t n,
	     struct bsd_text *text);
size_t text_characters(struct bsd_text text);
/* As their code points compare. */
int text_compare(struct bsd_text a, struct bsd_text b);

static inline struct bsd_text value_text(const struct bsd_value *v)
{
	return (struct bsd_text){v->bytes, v->n};
}

static inline struct bsd_text literal(const char *text)
{
	return (struct bsd_text){(const uint8_t *)text, __builtin_strlen(text)};
}

static inline struct bsd_value text_value(struct bsd_text text)
{
	return (struct bsd_value){.type = BSD_VALUE_TEXT,
				  .n = (uint32_t)text.bytes,
				  .bytes = text.at};
}

/* ---------------------------------------------------------- values --- */

/* Items that the MessagePack of a slice may hold, a container as four of them: it
 * takes four times the memory in whoever makes objects of it. Some 100 MiB at worst.
 * Of spans with a dozen attributes each, 16 MiB hold fewer. */
#define SLICE_ITEMS_MAX (1u << 20)

/* -EINVAL if the bytes are broken, or say too much. The value points to the bytes. */
int msgpack_read(struct arena *a, uint64_t *items_left, const uint8_t *bytes,
		 size_t n, struct bsd_value *value);

/* Attributes of a span's end; what makes no sense is counted. */
int plain_read(struct arena *a, const uint8_t *b, size_t n,
	       struct bsd_value *map, uint64_t *malformed);

/* Of pairs with the same text as key one stays, where the first was, with the value
 * of the last. False without memory. */
bool map_unique(struct bsd_value *map, struct bsd_value *items);

/* Only pairs that are attributes: how many were not. */
uint64_t map_keep_attributes(struct bsd_value *map);

const struct bsd_value *map_find(const struct bsd_value *map,
				 struct bsd_text key);

/* --------------------------------------------------------- joining --- */

#define NONE UINT32_MAX

/* What came of one span id of a client: its starts and the parts of its detail. */
struct same_id {
	uint64_t span_id;
	uint32_t client;
	uint32_t first_start; /* the first that has no end; NONE */
	uint32_t last_start;
	uint32_t first_part, last_part; /* in `parts`; NONE */
	uint32_t starts, parts;
};

#define SAME_ID_KEY_BYTES 12u

struct detail_part {
	struct bsd_record record;
	uint32_t next;
};

/* By handle. */
struct told_resource {
	uint32_t client, handle;
	const struct bsd_resource *resource;
};

struct told_scope {
	uint32_t client, handle, number;
	const struct bsd_scope *scope;
};

struct kernel {
	struct bsd_record record;
	uint64_t end_ns;
	uint64_t span_id;
	struct bsd_text name;
	struct bsd_value attributes;
	bool told; /* its words are there */
};

/* Bytes that are written from the end to the front, so that each length is known
 * where it is written. */
struct out {
	uint8_t *bytes;
	size_t room;
	size_t at; /* where what is written begins */
	bool failed;
};

struct bsd_spans {
	struct bsd_slice slice;
	struct arena arena;
	uint64_t items_left;
	uint64_t malformed;    /* without the slice's */
	struct array spans;    /* struct bsd_span */
	struct array next;     /* of each, the next start of its id; NONE */
	struct table ids;      /* struct same_id */
	struct array detailed; /* the numbers of those with a detail, in order */
	struct array parts;    /* struct detail_part */
	struct array ends;     /* struct bsd_record */
	struct array others;   /* likewise */
	struct array unstarted;
	struct array kernels;	/* struct kernel */
	struct table resources; /* struct told_resource */
	struct table scopes;	/* struct told_scope */
	bool joined;

	/* Of what is made of it, the last one. */
	struct arena made;
	struct out out;
};

static inline struct bsd_span *span_at(const struct bsd_spans *s,
				       uint32_t number)
{
	return array_at(&s->spans, number);
}

int spans_add(struct bsd_spans *s, const struct bsd_span *span);

/* A name that the records of start and end cut, which its detail has whole. */
struct long_name {
	uint32_t span;
	struct bsd_text name;
};

/* Each span by its detail. Names are told apart, since ends come later and bring the
 * cut ones. */
int spans_describe(struct bsd_spans *s, struct array *long_names);
/* Each event of the kernel's that has words, as a span. */
int spans_join_kernels(struct bsd_spans *s);

/* Whether a span of the slice has that id. */
bool spans_have(const struct bsd_spans *s, uint32_t client, uint64_t span_id);

/* The stamps of local roots, as a map. */
int read_stamps(struct arena *a, const struct bsd_about *about,
		struct bsd_value *stamps);
/* The attributes of a span, with the stamps if it is a local root. */
int stamped_attributes(struct arena *a, const struct bsd_spans *s,
		       const struct bsd_span *span,
		       const struct bsd_value *stamps,
		       struct bsd_value *attributes);

/* What the span's process says that it is, or else what its node knows of it. */
int resource_attributes(struct arena *a, const struct bsd_spans *s,
			const struct bsd_span *span, struct bsd_text node,
			struct bsd_value *attributes);

/* The name of the attribute that says so of a span without its end. */
#define UNFINISHED "backsight.unfinished"
#define UNKNOWN_SERVICE "unknown_service"

/* The span's service, by its resource or else its process. */
bool service_of(struct arena *a, const struct bsd_spans *s,
		const struct bsd_span *span, struct bsd_text *service);

/* A value as searches compare it: into `out`, before what is there. */
void words_write(struct out *out, const struct bsd_value *value);

/* Before what is there. */
void out_bytes(struct out *out, const void *bytes, size_t n);
void out_free(struct out *out);

static inline struct bsd_text out_written(const struct out *out)
{
	if (out->at == out->room)
		return (struct bsd_text){0};
	return (struct bsd_text){out->bytes + out->at, out->room - out->at};
}

#endif
