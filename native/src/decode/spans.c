/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spans from their records, which come in any order: the threads of a process write
 * one trace into several runs, and the slice may hold the end of a span before its
 * start, so they are joined last.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backsight.h"
#include "fields.h"

int bsd_spans_new(struct bsd_spans **spans)
{
	struct bsd_spans *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	slice_init(&s->slice);
	s->items_left = SLICE_ITEMS_MAX;
	s->spans = ARRAY_OF(struct bsd_span);
	s->next = ARRAY_OF(uint32_t);
	s->ids = TABLE_OF(struct same_id, SAME_ID_KEY_BYTES);
	s->detailed = ARRAY_OF(uint32_t);
	s->parts = ARRAY_OF(struct detail_part);
	s->ends = ARRAY_OF(struct bsd_record);
	s->others = ARRAY_OF(struct bsd_record);
	s->unstarted = ARRAY_OF(struct bsd_record);
	s->kernels = ARRAY_OF(struct kernel);
	s->resources = TABLE_OF(struct told_resource, 2 * sizeof(uint32_t));
	s->scopes = TABLE_OF(struct told_scope, 3 * sizeof(uint32_t));
	*spans = s;
	return 0;
}

void bsd_spans_free(struct bsd_spans *spans)
{
	if (!spans)
		return;
	slice_release(&spans->slice);
	arena_free(&spans->arena);
	arena_free(&spans->made);
	array_free(&spans->spans);
	array_free(&spans->next);
	table_free(&spans->ids);
	array_free(&spans->detailed);
	array_free(&spans->parts);
	array_free(&spans->ends);
	array_free(&spans->others);
	array_free(&spans->unstarted);
	array_free(&spans->kernels);
	table_free(&spans->resources);
	table_free(&spans->scopes);
	out_free(&spans->out);
	free(spans);
}

/* -------------------------------------------------------------- taking --- */

static struct same_id *same_id_of(struct bsd_spans *s, uint32_t client,
				  uint64_t span_id)
{
	struct same_id key = {.span_id = span_id, .client = client};
	uint32_t before = s->ids.array.count;
	struct same_id *same = table_put(&s->ids, &key);

	if (same && s->ids.array.count != before)
		same->first_start = same->last_start = same->first_part =
			same->last_part = NONE;
	return same;
}

int spans_add(struct bsd_spans *s, const struct bsd_span *span)
{
	struct same_id *same = same_id_of(s, span->client, span->span_id);
	uint32_t number = s->spans.count, none = NONE;

	if (!same || !array_append(&s->spans, span, 1) ||
	    !array_append(&s->next, &none, 1))
		return -ENOMEM;
	if (same->first_start == NONE)
		same->first_start = number;
	else
		*(uint32_t *)array_at(&s->next, same->last_start) = number;
	same->last_start = number;
	same->starts++;
	return 0;
}

static int take_start(struct bsd_spans *s, const struct bsd_record *r)
{
	struct bsd_span span = {
		.span_id = r->span_id,
		.parent_id = r->parent_id,
		.start_ns = r->time_ns,
		.attributes = {.type = BSD_VALUE_MAP},
		.client = r->client,
		.handle = r->handle,
		.kind = r->kind,
	};

	if (!text_of(&s->arena, r->bytes, r->name_bytes, &span.name))
		return -ENOMEM;
	return spans_add(s, &span);
}

static int take_detail(struct bsd_spans *s, const struct bsd_record *r)
{
	struct same_id *same = same_id_of(s, r->client, r->span_id);
	struct detail_part part = {.record = *r, .next = NONE};
	uint32_t number = s->parts.count, which;

	if (!same || !array_append(&s->parts, &part, 1))
		return -ENOMEM;
	which = (uint32_t)(same - (struct same_id *)s->ids.array.entries);
	if (same->first_part == NONE) {
		same->first_part = number;
		if (!array_append(&s->detailed, &which, 1))
			return -ENOMEM;
	} else {
		((struct detail_part *)array_at(&s->parts, same->last_part))
			->next = number;
	}
	same->last_part = number;
	same->parts++;
	return 0;
}

static int take_resource(struct bsd_spans *s, const struct bsd_record *r)
{
	struct told_resource *told =
		table_put(&s->resources, (uint32_t[]){r->client, r->handle});
	struct bsd_resource *resource =
		arena_take(&s->arena, sizeof(*resource));
	struct fields f;

	if (!told || !resource || fields_read(s, r->bytes, r->rest_bytes, &f))
		return -ENOMEM;
	resource->attributes = next_attributes(&f);
	resource->schema_url = next_text(&f);
	s->malformed += f.malformed;
	told->resource = resource;
	return 0;
}

static int take_scope(struct bsd_spans *s, const struct bsd_record *r)
{
	struct told_scope *told = table_put(
		&s->scopes, (uint32_t[]){r->client, r->handle, r->scope});
	struct bsd_scope *scope = arena_take(&s->arena, sizeof(*scope));
	struct fields f;

	if (!told || !scope || fields_read(s, r->bytes, r->rest_bytes, &f))
		return -ENOMEM;
	scope->name = next_text(&f);
	scope->version = next_text(&f);
	scope->schema_url = next_text(&f);
	scope->attributes = next_attributes(&f);
	s->malformed += f.malformed;
	told->scope = scope;
	return 0;
}

static int take(void *arg, const struct bsd_record *record)
{
	struct bsd_spans *s = arg;
	struct bsd_record r = *record;
	struct kernel kernel;

	/* What is made of it points to it. */
	r.bytes = arena_copy(&s->arena, r.bytes,
			     (size_t)r.name_bytes + r.rest_bytes);
	if (!r.bytes)
		return -ENOMEM;
	switch (r.type) {
	case BS_RECORD_SPAN_START:
		return take_start(s, &r);
	case BS_RECORD_SPAN_END:
		return array_append(&s->ends, &r, 1) ? 0 : -ENOMEM;
	case BS_RECORD_SPAN_DETAIL:
		return take_detail(s, &r);
	case BS_RECORD_RESOURCE:
		return take_resource(s, &r);
	case BS_RECORD_SCOPE:
		return take_scope(s, &r);
	case BS_RECORD_KERNEL:
		kernel = (struct kernel){.record = r};
		return array_append(&s->kernels, &kernel, 1) ? 0 : -ENOMEM;
	default:
		return array_append(&s->others, &r, 1) ? 0 : -ENOMEM;
	}
}

int bsd_spans_feed(struct bsd_spans *spans, const uint8_t *bytes, size_t n)
{
	if (spans->joined)
		return -EINVAL;
	return slice_feed(&spans->slice, bytes, n, take, spans);
}

/* ------------------------------------------------------------- joining --- */

/* Ends take the starts of their id in order. */
static int join_end(struct bsd_spans *s, const struct bsd_record *r)
{
	struct same_id key = {.span_id = r->span_id, .client = r->client};
	struct same_id *same = table_find(&s->ids, &key);
	struct bsd_text name;
	struct bsd_span *span;

	if (!same || same->first_start == NONE)
		return array_append(&s->unstarted, r, 1) ? 0 : -ENOMEM;
	span = span_at(s, same->first_start);
	same->first_start = *(uint32_t *)array_at(&s->next, same->first_start);
	span->finished = true;
	span->end_ns = r->time_ns;
	span->status = r->status;
	if (!text_of(&s->arena, r->bytes, r->name_bytes, &name))
		return -ENOMEM;
	if (name.bytes)
		span->name = name;
	if (!r->rest_bytes)
		return 0;
	return plain_read(&s->arena, r->bytes + r->name_bytes, r->rest_bytes,
			  &span->attributes, &s->malformed);
}

static int join_ends(struct bsd_spans *s)
{
	int error = 0;

	for (uint32_t i = 0; !error && i < s->ends.count; i++)
		error = join_end(s, array_at(&s->ends, i));
	return error;
}

int bsd_spans_join(struct bsd_spans *spans)
{
	struct array long_names = ARRAY_OF(struct long_name);
	int error = spans->joined ? -EINVAL
				  : spans_describe(spans, &long_names);

	spans->joined = true;
	if (!error)
		error = join_ends(spans);
	for (uint32_t i = 0; !error && i < long_names.count; i++) {
		const struct long_name *l = array_at(&long_names, i);

		span_at(spans, l->span)->name = l->name;
	}
	array_free(&long_names);
	for (uint32_t i = 0; !error && i < spans->spans.count; i++) {
		struct bsd_span *span = span_at(spans, i);
		const struct told_resource *told =
			table_find(&spans->resources,
				   (uint32_t[]){span->client, span->handle});

		span->resource = told ? told->resource : NULL;
	}
	return error ? error : spans_join_kernels(spans);
}

/* -------------------------------------------------------------- asking --- */

const struct bsd_slice *bsd_spans_slice(const struct bsd_spans *spans)
{
	return &spans->slice;
}

size_t bsd_spans_count(const struct bsd_spans *spans)
{
	return spans->spans.count;
}

const struct bsd_span *bsd_spans_at(const struct bsd_spans *spans)
{
	return (const struct bsd_span *)spans->spans.entries;
}

uint64_t bsd_spans_malformed(const struct bsd_spans *spans)
{
	return spans->slice.malformed + spans->malformed;
}

size_t bsd_spans_others_count(const struct bsd_spans *spans)
{
	return spans->others.count;
}

const struct bsd_record *bsd_spans_others(const struct bsd_spans *spans)
{
	return (const struct bsd_record *)spans->others.entries;
}

size_t bsd_spans_unstarted_count(const struct bsd_spans *spans)
{
	return spans->unstarted.count;
}

const struct bsd_record *bsd_spans_unstarted(const struct bsd_spans *spans)
{
	return (const struct bsd_record *)spans->unstarted.entries;
}

bool spans_have(const struct bsd_spans *s, uint32_t client, uint64_t span_id)
{
	struct same_id key = {.span_id = span_id, .client = client};
	const struct same_id *same = table_find(&s->ids, &key);

	return same && same->starts;
}
