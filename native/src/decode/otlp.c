/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The spans of a slice as OTLP: protobuf, by the numbers of trace.proto, common.proto
 * and resource.proto (formats/opentelemetry).
 *
 * A message is written from its last field to its first, so that its length is known
 * when that is written. All is put in order before: by process, as it describes
 * itself, and by instrumentation scope.
 */
#include <errno.h>
#include <string.h>

#include "hash.h"
#include "spans.h"

enum wire {
	VARINT = 0,
	FIXED64 = 1,
	LENGTH = 2,
	FIXED32 = 5
};

/* ------------------------------------------------------------ protobuf --- */

static void put_varint(struct out *out, uint64_t value)
{
	uint8_t bytes[10];
	size_t n = 0;

	do {
		bytes[n] = (uint8_t)(value | 0x80);
		value >>= 7;
		n++;
	} while (value);
	bytes[n - 1] &= 0x7f;
	out_bytes(out, bytes, n);
}

static void put_tag(struct out *out, uint32_t field, enum wire wire)
{
	put_varint(out, (uint64_t)field << 3 | wire);
}

/* Where a message ends, which is written next. */
static size_t message_end(const struct out *out)
{
	return out->room - out->at;
}

/* What was written since then is a message, or a text. */
static void put_head(struct out *out, uint32_t field, size_t end)
{
	put_varint(out, out->room - out->at - end);
	put_tag(out, field, LENGTH);
}

/* Of what follows each is left out where it is empty or 0. */
static void put_bytes(struct out *out, uint32_t field, const void *bytes,
		      size_t n)
{
	if (!n)
		return;
	out_bytes(out, bytes, n);
	put_varint(out, n);
	put_tag(out, field, LENGTH);
}

static void put_text(struct out *out, uint32_t field, struct bsd_text text)
{
	put_bytes(out, field, text.at, text.bytes);
}

static void put_number(struct out *out, uint32_t field, uint64_t value)
{
	if (!value)
		return;
	put_varint(out, value);
	put_tag(out, field, VARINT);
}

static void put_little_endian(struct out *out, uint64_t value, uint32_t bytes)
{
	uint8_t b[8];

	for (uint32_t i = 0; i < bytes; i++)
		b[i] = (uint8_t)(value >> (8 * i));
	out_bytes(out, b, bytes);
}

static void put_fixed64(struct out *out, uint32_t field, uint64_t value)
{
	if (!value)
		return;
	put_little_endian(out, value, 8);
	put_tag(out, field, FIXED64);
}

static void put_fixed32(struct out *out, uint32_t field, uint32_t value)
{
	if (!value)
		return;
	put_little_endian(out, value, 4);
	put_tag(out, field, FIXED32);
}

static void put_id(struct out *out, uint32_t field, uint64_t id)
{
	uint8_t b[8];

	for (uint32_t i = 0; i < 8; i++)
		b[i] = (uint8_t)(id >> (56 - 8 * i));
	put_bytes(out, field, b, id ? sizeof(b) : 0);
}

/* -------------------------------------------------------------- values --- */

static void put_any_value(struct out *out, const struct bsd_value *value);

/* NOLINTNEXTLINE(misc-no-recursion) - as deep as a value may be */
static void put_key_value(struct out *out, uint32_t field,
			  const struct bsd_value *pair)
{
	size_t end = message_end(out), value_end = end;

	put_any_value(out, pair + 1);
	put_head(out, 2, value_end);
	put_text(out, 1, value_text(pair));
	put_head(out, field, end);
}

/* NOLINTNEXTLINE(misc-no-recursion) */
static void put_attributes(struct out *out, uint32_t field,
			   const struct bsd_value *map)
{
	for (uint32_t i = map->n; i-- > 0;)
		put_key_value(out, field, &map->items[2 * (size_t)i]);
}

/* Which of the kinds it is shows also where it is empty or 0. */
/* NOLINTNEXTLINE(misc-no-recursion) */
static void put_any_value(struct out *out, const struct bsd_value *value)
{
	size_t end = message_end(out);
	uint64_t bits;

	switch (value->type) {
	case BSD_VALUE_NIL:
		break;
	case BSD_VALUE_TEXT:
	/* As in the SDKs, integers beyond 64 bits. */
	case BSD_VALUE_UINT:
		words_write(out, value);
		put_head(out, 1, end);
		break;
	case BSD_VALUE_BOOL:
		put_varint(out, (uint64_t)value->integer);
		put_tag(out, 2, VARINT);
		break;
	case BSD_VALUE_INT:
		put_varint(out, (uint64_t)value->integer);
		put_tag(out, 3, VARINT);
		break;
	case BSD_VALUE_REAL:
		memcpy(&bits, &value->real, sizeof(bits));
		put_little_endian(out, bits, 8);
		put_tag(out, 4, FIXED64);
		break;
	case BSD_VALUE_LIST:
		for (uint32_t i = value->n; i-- > 0;) {
			size_t item_end = message_end(out);

			put_any_value(out, &value->items[i]);
			put_head(out, 1, item_end);
		}
		put_head(out, 5, end);
		break;
	case BSD_VALUE_MAP:
		put_attributes(out, 1, value);
		put_head(out, 6, end);
		break;
	case BSD_VALUE_BYTES:
		out_bytes(out, value->bytes, value->n);
		put_head(out, 7, end);
		break;
	}
}

/* --------------------------------------------------------------- spans --- */

struct writing {
	struct bsd_spans *s;
	struct out *out;
	const uint8_t *trace_id;
	struct bsd_value stamps;
	struct bsd_text node;
	int64_t clock_offset_ns;
	int error;
};

static uint64_t shifted(const struct writing *w, uint64_t time_ns)
{
	__int128 time = (__int128)time_ns - w->clock_offset_ns;

	if (!time_ns || time < 0)
		return 0;
	return time > UINT64_MAX ? UINT64_MAX : (uint64_t)time;
}

static void put_event(const struct writing *w, const struct bsd_span_event *e)
{
	size_t end = message_end(w->out);

	put_number(w->out, 4, (uint32_t)e->dropped_attributes);
	put_attributes(w->out, 3, &e->attributes);
	put_text(w->out, 2, e->name);
	put_fixed64(w->out, 1, shifted(w, e->time_ns));
	put_head(w->out, 11, end);
}

static void put_link(const struct writing *w, const struct bsd_link *l)
{
	size_t end = message_end(w->out);

	put_fixed32(w->out, 6, (uint32_t)l->flags);
	put_number(w->out, 5, (uint32_t)l->dropped_attributes);
	put_attributes(w->out, 4, &l->attributes);
	put_text(w->out, 3, l->trace_state);
	put_id(w->out, 2, l->span_id);
	put_bytes(w->out, 1, l->trace_id, sizeof(l->trace_id));
	put_head(w->out, 13, end);
}

static void put_unfinished(struct out *out)
{
	const struct bsd_value pair[] = {
		text_value(literal(UNFINISHED)),
		{.type = BSD_VALUE_BOOL, .integer = 1},
	};

	put_key_value(out, 9, pair);
}

static void put_span(struct writing *w, const struct bsd_span *span)
{
	struct out *out = w->out;
	size_t end = message_end(out), status_end;
	struct bsd_value attributes;
	int error = stamped_attributes(&w->s->made, w->s, span, &w->stamps,
				       &attributes);

	if (error) {
		w->error = error;
		return;
	}
	put_fixed32(out, 16, (uint32_t)span->flags);
	status_end = message_end(out);
	put_number(out, 3, span->status);
	put_text(out, 2, span->status_message);
	put_head(out, 15, status_end);
	put_number(out, 14, (uint32_t)span->dropped_links);
	for (uint32_t i = span->n_links; i-- > 0;)
		put_link(w, &span->links[i]);
	put_number(out, 12, (uint32_t)span->dropped_events);
	for (uint32_t i = span->n_events; i-- > 0;)
		put_event(w, &span->events[i]);
	put_number(out, 10, (uint32_t)span->dropped_attributes);
	if (!span->finished)
		put_unfinished(out);
	put_attributes(out, 9, &attributes);
	put_fixed64(out, 8, span->finished ? shifted(w, span->end_ns) : 0);
	put_fixed64(out, 7, shifted(w, span->start_ns));
	put_number(out, 6, span->kind);
	put_text(out, 5, span->name);
	put_id(out, 4, span->parent_id);
	put_text(out, 3, span->trace_state);
	put_id(out, 2, span->span_id);
	put_bytes(out, 1, w->trace_id, 16);
	put_head(out, 2, end);
}

/* -------------------------------------------------------------- groups --- */

/* A hash of what a process, or a scope, says of itself: who could find another text
 * for one would merge his own process's. */
struct content {
	uint64_t hash;
	uint32_t client;
	uint32_t within; /* which resource, of a scope */
};

#define CONTENT_KEY_BYTES 16u

/* Spans of one resource, or of one scope in one; linked from the last to the first. */
struct group {
	struct content content;
	const struct bsd_resource *resource;
	const struct bsd_scope *scope;
	struct bsd_value attributes; /* of the resource */
	uint32_t last;	 /* scope of the resource, or span of the scope */
	uint32_t before; /* the scope before in the resource */
};

/* By its objects, of which many spans have the same: the scope's group. */
struct known {
	const struct bsd_resource *resource;
	const struct bsd_scope *scope;
	uint32_t client;
	uint32_t group;
};

#define KNOWN_KEY_BYTES 20u

struct groups {
	struct table resources; /* struct group */
	struct table scopes;	/* struct group */
	struct table known;	/* struct known */
	uint32_t *before;	/* of each span, the one before in its scope */
};

/* A hash of what was written since `end`, which is taken back. */
static uint64_t take_hash(struct out *out, size_t end)
{
	size_t n = out->room - out->at - end;
	uint64_t hash =
		n ? bs_fnv1a64(BS_FNV1A64_BASIS, out->bytes + out->at, n)
		  : BS_FNV1A64_BASIS;

	out->at += n;
	return bs_fmix64(hash);
}

static struct group *group_of(struct table *t, const struct content *content,
			      bool *is_new)
{
	uint32_t before = t->array.count;
	struct group *g = table_put(t, content);

	*is_new = g && t->array.count != before;
	return g;
}

static uint32_t number_of(const struct table *t, const struct group *g)
{
	return (uint32_t)(g - (const struct group *)t->array.entries);
}

static void put_scope(struct out *out, const struct bsd_scope *scope)
{
	put_attributes(out, 3, &scope->attributes);
	put_text(out, 2, scope->version);
	put_text(out, 1, scope->name);
}

static uint32_t resource_group(struct writing *w, struct groups *groups,
			       const struct bsd_span *span)
{
	size_t end = message_end(w->out);
	struct content content = {.client = span->client};
	struct bsd_value attributes;
	struct group *g;
	bool is_new;

	if (resource_attributes(&w->s->made, w->s, span, w->node, &attributes))
		return NONE;
	put_attributes(w->out, 1, &attributes);
	content.hash = take_hash(w->out, end);
	g = group_of(&groups->resources, &content, &is_new);
	if (!g)
		return NONE;
	if (is_new) {
		g->resource = span->resource;
		g->attributes = attributes;
		g->last = NONE;
	}
	return number_of(&groups->resources, g);
}

static uint32_t scope_group(struct writing *w, struct groups *groups,
			    const struct bsd_span *span)
{
	static const struct bsd_scope none = {
		.attributes = {.type = BSD_VALUE_MAP}};
	const struct bsd_scope *scope = span->scope ? span->scope : &none;
	size_t end = message_end(w->out);
	struct content content = {.client = span->client};
	struct group *g, *resource;
	bool is_new;

	content.within = resource_group(w, groups, span);
	if (content.within == NONE)
		return NONE;
	put_text(w->out, 4, scope->schema_url);
	put_scope(w->out, scope);
	content.hash = take_hash(w->out, end);
	g = group_of(&groups->scopes, &content, &is_new);
	if (!g)
		return NONE;
	if (is_new) {
		resource = array_at(&groups->resources.array, content.within);
		g->scope = span->scope;
		g->last = NONE;
		g->before = resource->last;
		resource->last = number_of(&groups->scopes, g);
	}
	return number_of(&groups->scopes, g);
}

static int put_in_order(struct writing *w, struct groups *groups)
{
	const struct bsd_span *spans = bsd_spans_at(w->s);

	groups->before =
		arena_take(&w->s->made, w->s->spans.count * sizeof(uint32_t));
	if (!groups->before)
		return -ENOMEM;
	for (uint32_t i = 0; i < w->s->spans.count; i++) {
		struct known key = {.resource = spans[i].resource,
				    .scope = spans[i].scope,
				    .client = spans[i].client};
		uint32_t before = groups->known.array.count;
		struct known *known = table_put(&groups->known, &key);
		struct group *g;

		if (!known)
			return -ENOMEM;
		if (groups->known.array.count != before)
			known->group = scope_group(w, groups, &spans[i]);
		if (known->group == NONE)
			return -ENOMEM;
		g = array_at(&groups->scopes.array, known->group);
		groups->before[i] = g->last;
		g->last = i;
	}
	return 0;
}

static void put_scope_spans(struct writing *w, const struct groups *groups,
			    const struct group *g)
{
	struct out *out = w->out;
	size_t end = message_end(out), scope_end;

	if (g->scope)
		put_text(out, 3, g->scope->schema_url);
	for (uint32_t i = g->last; i != NONE; i = groups->before[i])
		put_span(w, array_at(&w->s->spans, i));
	if (g->scope) {
		scope_end = message_end(out);
		put_scope(out, g->scope);
		put_head(out, 1, scope_end);
	}
	put_head(out, 2, end);
}

static void put_resource_spans(struct writing *w, const struct groups *groups,
			       const struct group *g)
{
	struct out *out = w->out;
	size_t end = message_end(out), resource_end;
	const struct group *scope;

	if (g->resource)
		put_text(out, 3, g->resource->schema_url);
	for (uint32_t i = g->last; i != NONE; i = scope->before) {
		scope = array_at(&groups->scopes.array, i);
		put_scope_spans(w, groups, scope);
	}
	resource_end = message_end(out);
	put_attributes(out, 1, &g->attributes);
	put_head(out, 1, resource_end);
	put_head(out, 1, end);
}

static int write_all(struct writing *w)
{
	struct groups groups = {
		.resources = TABLE_OF(struct group, CONTENT_KEY_BYTES),
		.scopes = TABLE_OF(struct group, CONTENT_KEY_BYTES),
		.known = TABLE_OF(struct known, KNOWN_KEY_BYTES),
	};
	int error = put_in_order(w, &groups);

	for (uint32_t i = groups.resources.array.count; !error && i-- > 0;)
		put_resource_spans(w, &groups,
				   array_at(&groups.resources.array, i));
	table_free(&groups.resources);
	table_free(&groups.scopes);
	table_free(&groups.known);
	if (!error)
		error = w->error;
	return !error && w->out->failed ? -ENOMEM : error;
}

struct bsd_bytes bsd_spans_otlp(struct bsd_spans *spans,
				const uint8_t trace_id[16],
				struct bsd_about about)
{
	struct writing w = {
		.s = spans,
		.out = &spans->out,
		.trace_id = trace_id,
		.node = {about.node, about.node_bytes},
		.clock_offset_ns = about.clock_offset_ns,
	};
	struct bsd_bytes made = {0};

	arena_free(&spans->made);
	spans->out.at = spans->out.room;
	spans->out.failed = false;
	made.error = read_stamps(&spans->made, &about, &w.stamps);
	if (!made.error)
		made.error = write_all(&w);
	if (!made.error) {
		struct bsd_text written = out_written(&spans->out);

		made.at = written.at;
		made.n = written.bytes;
	}
	return made;
}
