/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spans from their records, which come in any order: the threads of a process write
 * one trace into several runs, and the slice may hold the end of a span before its
 * start, so they are joined last.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "abi/kernel_event.h"
#include "backsight.h"
#include "spans.h"

/* Spans before an event of the kernel's, the latest first, among which the one around
 * it is looked for. Both may be as many as a slice has room for. */
#define SPANS_LOOKED_AT 256u

#define INTERNAL 1u /* OTLP's SpanKind */

#define TRACE_ID_BYTES 16u

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

/* -------------------------------------------------------------- fields --- */

/* A MessagePack array, item by item. What makes no sense is counted, and reads as
 * empty. */
struct fields {
	const struct bsd_value *items;
	uint32_t n, at;
	uint64_t malformed;
};

static struct fields fields_of(const struct bsd_value *value)
{
	if (value && value->type == BSD_VALUE_LIST)
		return (struct fields){.items = value->items, .n = value->n};
	return (struct fields){.malformed = 1};
}

static int read_fields(struct bsd_spans *s, const uint8_t *bytes, size_t n,
		       struct fields *fields)
{
	struct bsd_value value;
	int error = msgpack_read(&s->arena, &s->items_left, bytes, n, &value);

	*fields = fields_of(error ? NULL : &value);
	return error == -ENOMEM ? error : 0;
}

/* The next one, if it is of that type; NULL if it is none, or not there. */
static const struct bsd_value *next_of(struct fields *f,
				       enum bsd_value_type type)
{
	const struct bsd_value *item;

	if (f->at == f->n)
		return NULL;
	item = &f->items[f->at++];
	if (item->type == type)
		return item;
	f->malformed++;
	return NULL;
}

static struct bsd_text next_text(struct fields *f)
{
	const struct bsd_value *item = next_of(f, BSD_VALUE_TEXT);

	return item ? value_text(item) : (struct bsd_text){0};
}

static uint64_t next_number(struct fields *f)
{
	const struct bsd_value *item;

	if (f->at < f->n && f->items[f->at].type == BSD_VALUE_UINT)
		return f->items[f->at++].natural;
	item = next_of(f, BSD_VALUE_INT);
	if (!item || item->integer >= 0)
		return item ? (uint64_t)item->integer : 0;
	f->malformed++;
	return 0;
}

static void next_raw(struct fields *f, uint8_t *raw, uint32_t n)
{
	const struct bsd_value *item = next_of(f, BSD_VALUE_BYTES);

	if (item && item->n == n) {
		memcpy(raw, item->bytes, n);
		return;
	}
	/* Of another type it was counted already; then as often as if it were empty. */
	f->malformed++;
	memset(raw, 0, n);
}

static struct bsd_value next_attributes(struct fields *f)
{
	const struct bsd_value *item = next_of(f, BSD_VALUE_MAP);
	struct bsd_value map = {.type = BSD_VALUE_MAP};

	if (item) {
		map = *item;
		f->malformed += map_keep_attributes(&map);
	}
	return map;
}

static struct fields next_list(struct fields *f)
{
	const struct bsd_value *item = next_of(f, BSD_VALUE_LIST);

	return item ? fields_of(item) : (struct fields){0};
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

static int add_span(struct bsd_spans *s, const struct bsd_span *span)
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
	return add_span(s, &span);
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

	if (!told || !resource || read_fields(s, r->bytes, r->rest_bytes, &f))
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

	if (!told || !scope || read_fields(s, r->bytes, r->rest_bytes, &f))
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

static struct bsd_span *span_at(const struct bsd_spans *s, uint32_t number)
{
	return array_at(&s->spans, number);
}

/* The parts of a detail in one. False, and NULL, if they are not one's. */
static int whole_detail(struct bsd_spans *s, const struct same_id *same,
			const uint8_t **bytes, size_t *n)
{
	const struct detail_part *first = array_at(&s->parts, same->first_part);
	const struct detail_part *part;
	uint32_t number = same->first_part;
	uint8_t *joined;
	bool fits = same->parts == first->record.parts;

	*bytes = NULL;
	*n = 0;
	for (uint32_t i = 0; i < same->parts; i++, number = part->next) {
		part = array_at(&s->parts, number);
		fits &= part->record.part == i &&
			part->record.parts == first->record.parts;
		*n += part->record.rest_bytes;
	}
	if (!fits)
		return 0;
	*bytes = first->record.bytes;
	if (same->parts == 1)
		return 0;
	*bytes = joined = arena_take(&s->arena, *n);
	if (!joined)
		return -ENOMEM;
	number = same->first_part;
	for (uint32_t i = 0; i < same->parts; i++, number = part->next) {
		part = array_at(&s->parts, number);
		memcpy(joined, part->record.bytes, part->record.rest_bytes);
		joined += part->record.rest_bytes;
	}
	return 0;
}

/* One that is no array takes a byte, and would be made an object of. */
static bool next_fields(struct fields *list, struct fields *item)
{
	while (list->at < list->n) {
		*item = fields_of(&list->items[list->at++]);
		if (!item->malformed)
			return true;
		list->malformed++;
	}
	return false;
}

static uint32_t count_lists(const struct fields *f)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < f->n; i++)
		count += f->items[i].type == BSD_VALUE_LIST;
	return count;
}

static int read_events(struct bsd_spans *s, struct fields *f,
		       struct bsd_span *span)
{
	struct fields list = next_list(f), event;
	struct bsd_span_event *events =
		arena_take(&s->arena, count_lists(&list) * sizeof(*events));

	if (!events)
		return -ENOMEM;
	span->events = events;
	while (next_fields(&list, &event)) {
		struct bsd_span_event *e = &events[span->n_events++];

		e->name = next_text(&event);
		e->time_ns = next_number(&event);
		e->attributes = next_attributes(&event);
		e->dropped_attributes = next_number(&event);
		f->malformed += event.malformed;
	}
	f->malformed += list.malformed;
	return 0;
}

static int read_links(struct bsd_spans *s, struct fields *f,
		      struct bsd_span *span)
{
	struct fields list = next_list(f), link;
	struct bsd_link *links =
		arena_take(&s->arena, count_lists(&list) * sizeof(*links));

	if (!links)
		return -ENOMEM;
	span->links = links;
	while (next_fields(&list, &link)) {
		struct bsd_link *l = &links[span->n_links++];

		next_raw(&link, l->trace_id, TRACE_ID_BYTES);
		l->span_id = next_number(&link);
		l->attributes = next_attributes(&link);
		l->trace_state = next_text(&link);
		l->flags = next_number(&link);
		l->dropped_attributes = next_number(&link);
		f->malformed += link.malformed;
	}
	f->malformed += list.malformed;
	return 0;
}

/* A name that start and end record cut is kept for last: `long_name` of the span. */
static int describe(struct bsd_spans *s, const struct same_id *same,
		    struct bsd_text *long_name)
{
	const struct detail_part *first = array_at(&s->parts, same->first_part);
	struct bsd_span *span = span_at(s, same->first_start);
	const struct told_scope *scope;
	const uint8_t *bytes;
	struct fields f;
	size_t n;
	int error = whole_detail(s, same, &bytes, &n);

	if (error)
		return error;
	if (!bytes) {
		s->malformed++;
		return 0;
	}
	error = read_fields(s, bytes, n, &f);
	if (error)
		return error;
	scope = table_find(&s->scopes, (uint32_t[]){span->client, span->handle,
						    first->record.scope});
	span->scope = scope ? scope->scope : NULL;
	span->attributes = next_attributes(&f);
	error = read_events(s, &f, span);
	if (!error)
		error = read_links(s, &f, span);
	if (error)
		return error;
	span->status_message = next_text(&f);
	span->trace_state = next_text(&f);
	span->flags = next_number(&f);
	span->dropped_attributes = next_number(&f);
	span->dropped_events = next_number(&f);
	span->dropped_links = next_number(&f);
	*long_name = next_text(&f);
	s->malformed += f.malformed;
	return 0;
}

struct long_name {
	uint32_t span;
	struct bsd_text name;
};

/* Ids are random: only who lies has one twice, and would have a copy for each. So the
 * first span of it is described. */
static int describe_all(struct bsd_spans *s, struct array *long_names)
{
	for (uint32_t i = 0; i < s->detailed.count; i++) {
		const struct same_id *same = array_at(
			&s->ids.array, *(uint32_t *)array_at(&s->detailed, i));
		struct long_name long_name = {.span = same->first_start};
		int error;

		if (same->first_start == NONE)
			continue;
		error = describe(s, same, &long_name.name);
		if (error)
			return error;
		if (long_name.name.bytes &&
		    !array_append(long_names, &long_name, 1))
			return -ENOMEM;
	}
	return 0;
}

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

/* -------------------------------------------------------------- kernel --- */

int64_t bsd_spans_kernels(struct bsd_spans *spans)
{
	struct kernel *kernels = (struct kernel *)spans->kernels.entries;
	uint32_t kept = 0;

	for (uint32_t i = 0; i < spans->kernels.count; i++) {
		int error = bsd_slice_time(&spans->slice,
					   kernels[i].record.ticks,
					   &kernels[i].end_ns);

		if (error == -ENOMEM)
			return error;
		if (!error)
			kernels[kept++] = kernels[i];
	}
	spans->kernels.count = kept;
	return kept;
}

const struct bsd_record *bsd_spans_kernel(const struct bsd_spans *spans,
					  size_t i, uint64_t *end_ns)
{
	const struct kernel *kernel = array_at(&spans->kernels, (uint32_t)i);

	*end_ns = kernel->end_ns;
	return &kernel->record;
}

int bsd_spans_kernel_words(struct bsd_spans *spans, size_t i, uint64_t span_id,
			   const uint8_t *name, size_t name_bytes,
			   const uint8_t *attributes, size_t attributes_bytes)
{
	struct kernel *kernel = array_at(&spans->kernels, (uint32_t)i);
	const uint8_t *kept = arena_copy(&spans->arena, name, name_bytes);
	const uint8_t *map =
		arena_copy(&spans->arena, attributes, attributes_bytes);
	/* They are ours, and few. */
	uint64_t items_left = SLICE_ITEMS_MAX;
	int error;

	if (!kept || !map)
		return -ENOMEM;
	error = msgpack_read(&spans->arena, &items_left, map, attributes_bytes,
			     &kernel->attributes);
	if (error)
		return error;
	if (kernel->attributes.type != BSD_VALUE_MAP)
		return -EINVAL;
	kernel->span_id = span_id;
	kernel->name = (struct bsd_text){kept, name_bytes};
	kernel->told = true;
	return 0;
}

static int compare_begun(const void *one, const void *other, void *arg)
{
	uint32_t i = *(const uint32_t *)one, k = *(const uint32_t *)other;
	const struct bsd_span *a = span_at(arg, i), *b = span_at(arg, k);

	if (a->client != b->client)
		return a->client < b->client ? -1 : 1;
	if (a->start_ns != b->start_ns)
		return a->start_ns < b->start_ns ? -1 : 1;
	return i < k ? -1 : i > k;
}

/* How many of them are of clients before, or of this one and began by then. */
static uint32_t begun_by(const struct bsd_spans *s, const struct array *begun,
			 uint32_t client, uint64_t time_ns)
{
	uint32_t low = 0, high = begun->count;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		const struct bsd_span *span =
			span_at(s, *(uint32_t *)array_at(begun, middle));

		if (span->client < client ||
		    (span->client == client && span->start_ns <= time_ns))
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* The span of that process which began last before it and was not over. */
static const struct bsd_span *around(const struct bsd_spans *s,
				     const struct array *begun, uint32_t client,
				     uint64_t start_ns, uint64_t end_ns)
{
	uint32_t i = begun_by(s, begun, client, end_ns);
	const struct bsd_span *span;

	for (uint32_t looked = 0; i && looked < SPANS_LOOKED_AT; looked++) {
		span = span_at(s, *(uint32_t *)array_at(begun, --i));
		if (span->client != client)
			break;
		if (!span->finished || span->end_ns >= start_ns)
			return span;
	}
	return NULL;
}

static int join_kernel(struct bsd_spans *s, const struct array *begun,
		       const struct kernel *kernel)
{
	const uint8_t *event = kernel->record.bytes;
	uint64_t duration_ns =
		get64(event + offsetof(struct bs_kernel_event, duration_ns));
	uint32_t client =
		get32(event + offsetof(struct bs_kernel_event, client));
	uint64_t start_ns =
		kernel->end_ns > duration_ns ? kernel->end_ns - duration_ns : 0;
	const struct bsd_span *parent =
		around(s, begun, client, start_ns, kernel->end_ns);
	struct bsd_span span = {
		.span_id = kernel->span_id,
		.parent_id = parent ? parent->span_id : 0,
		.start_ns = start_ns,
		.end_ns = kernel->end_ns,
		.name = kernel->name,
		.attributes = kernel->attributes,
		.resource = parent ? parent->resource : NULL,
		.client = client,
		.handle = kernel->record.handle,
		.kind = INTERNAL,
		.finished = true,
	};

	return add_span(s, &span);
}

static int join_kernels(struct bsd_spans *s)
{
	struct array begun = ARRAY_OF(uint32_t);
	int error = 0;

	if (!s->kernels.count)
		return 0;
	for (uint32_t i = 0; !error && i < s->spans.count; i++)
		error = array_append(&begun, &i, 1) ? 0 : -ENOMEM;
	if (!error && begun.count)
		qsort_r(begun.entries, begun.count, sizeof(uint32_t),
			compare_begun, s);
	for (uint32_t i = 0; !error && i < s->kernels.count; i++) {
		const struct kernel *kernel = array_at(&s->kernels, i);

		if (kernel->told)
			error = join_kernel(s, &begun, kernel);
	}
	array_free(&begun);
	return error;
}

int bsd_spans_join(struct bsd_spans *spans)
{
	struct array long_names = ARRAY_OF(struct long_name);
	int error = spans->joined ? -EINVAL : describe_all(spans, &long_names);

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
	return error ? error : join_kernels(spans);
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
