/* SPDX-License-Identifier: Apache-2.0 */
/* What searches look at of a trace, over all of its slices. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "spans.h"

/* Of one span: attributes, its resource's, those of its events. SDKs stop at 128
 * attributes. */
#define TAGS_MAX 192u

/* Nobody searches for a whole stack trace, or statement; as Jaeger over
 * Elasticsearch. */
#define SEARCHED_CHARACTERS_MAX 256u

/* Of UTF-8. */
#define CHARACTER_BYTES_MAX 4u

#define TIME_MAX_NS INT64_MAX

enum {
	OK = 1,
	ERROR = 2
}; /* OTLP's status codes */

/* Of OTLP's kinds of spans. */
static const char *const kinds[] = {"",	      "internal", "server",
				    "client", "producer", "consumer"};
#define KINDS (sizeof(kinds) / sizeof(*kinds))

struct service {
	uint64_t hash;
	struct bsd_service said;
};

struct operation {
	uint64_t hash;
	uint32_t service, kind;
	struct bsd_text name;
};

/* The service that the last span of an id is of. */
struct owner {
	uint64_t span_id;
	uint32_t service;
};

struct child {
	uint64_t parent_id;
	uint32_t service;
};

struct call {
	uint32_t caller, callee;
	uint64_t count;
};

/* What spans of one process, with one resource, have in common; of one slice. */
struct origin {
	const struct bsd_resource *resource;
	uint32_t client;
	uint32_t service;
	uint32_t first_tag, tags; /* in `origin_tags` */
};

#define ORIGIN_KEY_BYTES 12u

struct bsd_index {
	uint64_t rows_max;
	struct arena arena;
	struct out words;
	struct table services;	  /* struct service */
	struct table operations;  /* struct operation */
	struct table owners;	  /* struct owner */
	struct array children;	  /* struct child */
	struct array rows;	  /* struct bsd_row */
	struct array tags;	  /* bytes */
	struct table origins;	  /* struct origin */
	struct array origin_tags; /* uint64_t */
	bool has_root;
	uint64_t root_start_ns;
	struct bsd_text root_service, root_operation;
	uint64_t start_ns, end_ns;
	uint64_t spans, errors;

	/* As they are told. */
	struct array told_services;   /* struct bsd_service */
	struct array told_operations; /* struct bsd_operation */
	struct array told_names;      /* bytes */
	struct array told_calls;      /* struct bsd_call */
};

int bsd_index_new(uint64_t rows_max, struct bsd_index **index)
{
	struct bsd_index *x = calloc(1, sizeof(*x));

	if (!x)
		return -ENOMEM;
	x->rows_max = rows_max;
	x->services = TABLE_OF(struct service, sizeof(uint64_t));
	x->operations = TABLE_OF(struct operation, 2 * sizeof(uint64_t));
	x->owners = TABLE_OF(struct owner, sizeof(uint64_t));
	x->children = ARRAY_OF(struct child);
	x->rows = ARRAY_OF(struct bsd_row);
	x->tags = ARRAY_OF(uint8_t);
	x->origins = TABLE_OF(struct origin, ORIGIN_KEY_BYTES);
	x->origin_tags = ARRAY_OF(uint64_t);
	x->start_ns = TIME_MAX_NS;
	x->told_services = ARRAY_OF(struct bsd_service);
	x->told_operations = ARRAY_OF(struct bsd_operation);
	x->told_names = ARRAY_OF(uint8_t);
	x->told_calls = ARRAY_OF(struct bsd_call);
	*index = x;
	return 0;
}

void bsd_index_free(struct bsd_index *index)
{
	if (!index)
		return;
	arena_free(&index->arena);
	out_free(&index->words);
	table_free(&index->services);
	table_free(&index->operations);
	table_free(&index->owners);
	array_free(&index->children);
	array_free(&index->rows);
	array_free(&index->tags);
	table_free(&index->origins);
	array_free(&index->origin_tags);
	array_free(&index->told_services);
	array_free(&index->told_operations);
	array_free(&index->told_names);
	array_free(&index->told_calls);
	free(index);
}

/* Of a text, from the index's address: nobody outside can choose texts that meet. */
static uint64_t text_hash(const struct bsd_index *x, struct bsd_text text)
{
	uint64_t hash = bs_fmix64((uintptr_t)x ^ text.bytes), word;

	for (size_t at = 0; at < text.bytes; at += sizeof(word)) {
		size_t n = text.bytes - at;

		word = 0;
		memcpy(&word, text.at + at,
		       n < sizeof(word) ? n : sizeof(word));
		hash = bs_fmix64(hash ^ word);
	}
	return hash;
}

/* ---------------------------------------------------------------- tags --- */

uint64_t bsd_tag_hash(const uint8_t *key, size_t key_bytes,
		      const uint8_t *value, size_t value_bytes)
{
	uint64_t hash = bs_fnv1a64(BS_FNV1A64_BASIS, key, key_bytes);

	hash = bs_fnv1a64(hash, "", 1);
	hash = bs_fnv1a64(hash, value, value_bytes);
	return bs_fmix64(hash) & ((1ull << (8 * BSD_TAG_BYTES)) - 1);
}

struct tags {
	uint64_t hashes[TAGS_MAX];
	uint32_t n;
};

static void add_tag(struct bsd_index *x, struct tags *tags, struct bsd_text key,
		    const struct bsd_value *value)
{
	struct bsd_text text = value_text(value);

	if (tags->n == TAGS_MAX)
		return;
	if (value->type != BSD_VALUE_TEXT) {
		x->words.at = x->words.room;
		words_write(&x->words, value);
		text = out_written(&x->words);
	}
	if (text.bytes > CHARACTER_BYTES_MAX * SEARCHED_CHARACTERS_MAX ||
	    text_characters(text) > SEARCHED_CHARACTERS_MAX)
		return;
	tags->hashes[tags->n++] =
		bsd_tag_hash(key.at, key.bytes, text.at, text.bytes);
}

static void add_text_tag(struct bsd_index *x, struct tags *tags,
			 const char *key, struct bsd_text text)
{
	struct bsd_value value = text_value(text);

	add_tag(x, tags, literal(key), &value);
}

static void add_map_tags(struct bsd_index *x, struct tags *tags,
			 const struct bsd_value *map)
{
	/* Of what is read for the index; no export leaves as much out. */
	const struct bsd_text left_out = literal("backsight.bytes_left_out");

	for (uint32_t i = 0; i < map->n; i++) {
		const struct bsd_value *pair = &map->items[2 * (size_t)i];

		if (text_compare(value_text(pair), left_out))
			add_tag(x, tags, value_text(pair), pair + 1);
	}
}

/* A span's attributes, and what stands in fields with OpenTelemetry; as tags_of() of
 * formats/tags.py. */
static void add_span_tags(struct bsd_index *x, struct tags *tags,
			  const struct bsd_span *span,
			  const struct bsd_value *attributes)
{
	add_map_tags(x, tags, attributes);
	if (!span->finished)
		add_text_tag(x, tags, UNFINISHED, literal("true"));
	if (span->scope && span->scope->name.bytes)
		add_text_tag(x, tags, "otel.scope.name", span->scope->name);
	if (span->scope && span->scope->version.bytes)
		add_text_tag(x, tags, "otel.scope.version",
			     span->scope->version);
	if (span->kind && span->kind < KINDS)
		add_text_tag(x, tags, "span.kind", literal(kinds[span->kind]));
	if (span->status == ERROR) {
		add_text_tag(x, tags, "otel.status_code", literal("ERROR"));
		add_text_tag(x, tags, "error", literal("true"));
	} else if (span->status == OK) {
		add_text_tag(x, tags, "otel.status_code", literal("OK"));
	}
	if (span->status_message.bytes)
		add_text_tag(x, tags, "otel.status_description",
			     span->status_message);
	if (span->trace_state.bytes)
		add_text_tag(x, tags, "w3c.tracestate", span->trace_state);
}

static void add_event_tags(struct bsd_index *x, struct tags *tags,
			   const struct bsd_span *span)
{
	for (uint32_t i = 0; i < span->n_events && tags->n < TAGS_MAX; i++) {
		add_text_tag(x, tags, "event", span->events[i].name);
		for (uint32_t k = 0; k < span->events[i].attributes.n; k++) {
			const struct bsd_value *pair =
				&span->events[i].attributes.items[2 * (size_t)k];

			add_tag(x, tags, value_text(pair), pair + 1);
		}
	}
}

/* Each once. How many bytes, or a negative errno. */
static int64_t put_tags(struct bsd_index *x, const struct tags *tags)
{
	uint8_t bytes[TAGS_MAX * BSD_TAG_BYTES];
	size_t n = 0;

	for (uint32_t i = 0; i < tags->n; i++) {
		uint32_t k = 0;

		while (tags->hashes[k] != tags->hashes[i])
			k++;
		if (k < i)
			continue;
		for (uint32_t byte = 0; byte < BSD_TAG_BYTES; byte++)
			bytes[n++] = (uint8_t)(tags->hashes[i] >> (8 * byte));
	}
	return array_append(&x->tags, bytes, n) ? (int64_t)n : -ENOMEM;
}

/* ------------------------------------------------------------- slices --- */

static int64_t service_number(struct bsd_index *x, struct bsd_text name)
{
	uint64_t hash = text_hash(x, name);
	struct service *service = table_put(&x->services, &hash);

	if (!service)
		return -ENOMEM;
	service->said.name = name;
	return service - (struct service *)x->services.array.entries;
}

static int make_origin(struct bsd_index *x, struct bsd_spans *s,
		       const struct bsd_span *span, struct bsd_text node,
		       struct origin *origin)
{
	struct tags tags = {.n = 0};
	struct bsd_value attributes;
	struct bsd_text service;
	int64_t number;
	int error = resource_attributes(&x->arena, s, span, node, &attributes);

	if (error || !service_of(&x->arena, s, span, &service))
		return -ENOMEM;
	number = service_number(x, service);
	if (number < 0)
		return (int)number;
	origin->service = (uint32_t)number;
	for (uint32_t i = 0; i < attributes.n; i++)
		add_tag(x, &tags, value_text(&attributes.items[2 * (size_t)i]),
			&attributes.items[2 * (size_t)i + 1]);
	origin->first_tag = x->origin_tags.count;
	origin->tags = tags.n;
	return array_append(&x->origin_tags, tags.hashes, tags.n) ? 0 : -ENOMEM;
}

static const struct origin *origin_of(struct bsd_index *x, struct bsd_spans *s,
				      const struct bsd_span *span,
				      struct bsd_text node)
{
	struct origin key = {.resource = span->resource,
			     .client = span->client};
	uint32_t before = x->origins.array.count;
	struct origin *origin = table_put(&x->origins, &key);

	if (!origin || (x->origins.array.count != before &&
			make_origin(x, s, span, node, origin)))
		return NULL;
	return origin;
}

static void meet_root(struct bsd_index *x, uint64_t begun_ns,
		      struct bsd_text service, struct bsd_text name)
{
	int order;

	if (x->has_root) {
		order = (begun_ns > x->root_start_ns) -
			(begun_ns < x->root_start_ns);
		if (!order)
			order = text_compare(service, x->root_service);
		if (!order)
			order = text_compare(name, x->root_operation);
		if (order >= 0)
			return;
	}
	x->has_root = true;
	x->root_start_ns = begun_ns;
	x->root_service = service;
	x->root_operation = name;
}

static int add_row(struct bsd_index *x, struct bsd_row row,
		   const struct bsd_span *span, const struct origin *origin,
		   const struct bsd_value *attributes)
{
	struct operation key = {
		.hash = text_hash(x, span->name),
		.service = origin->service,
		.kind = span->kind < KINDS ? span->kind : 0,
	};
	struct operation *operation = table_put(&x->operations, &key);
	struct tags tags = {.n = 0};
	int64_t bytes;

	if (!operation)
		return -ENOMEM;
	operation->name = span->name;
	row.operation =
		(uint32_t)(operation -
			   (struct operation *)x->operations.array.entries);
	add_span_tags(x, &tags, span, attributes);
	for (uint32_t i = 0; i < origin->tags && tags.n < TAGS_MAX; i++)
		tags.hashes[tags.n++] = *(uint64_t *)array_at(
			&x->origin_tags, origin->first_tag + i);
	add_event_tags(x, &tags, span);
	bytes = put_tags(x, &tags);
	row.tags_bytes = (uint32_t)bytes;
	return bytes >= 0 && array_append(&x->rows, &row, 1) ? 0 : -ENOMEM;
}

static struct bsd_row times_of(const struct bsd_span *span,
			       int64_t clock_offset_ns)
{
	__int128 begun = (__int128)span->start_ns - clock_offset_ns;
	__int128 took = span->finished ? (__int128)span->end_ns - span->start_ns
				       : 0;
	struct bsd_row row = {0};

	row.start_ns = begun < 0	     ? 0
		       : begun > TIME_MAX_NS ? TIME_MAX_NS
					     : (uint64_t)begun;
	if (took > 0)
		row.duration_ns = took > TIME_MAX_NS - (__int128)row.start_ns
					  ? TIME_MAX_NS - row.start_ns
					  : (uint64_t)took;
	return row;
}

static int add_span(struct bsd_index *x, struct bsd_spans *s,
		    const struct bsd_span *span, const struct bsd_value *stamps,
		    const struct bsd_about *about)
{
	struct bsd_row row = times_of(span, about->clock_offset_ns);
	struct bsd_text node = {about->node, about->node_bytes};
	const struct origin *origin = origin_of(x, s, span, node);
	struct bsd_value attributes;
	struct service *service;
	struct owner *owner;
	struct child child;

	if (!origin)
		return -ENOMEM;
	service = array_at(&x->services.array, origin->service);
	service->said.spans++;
	service->said.errors += span->status == ERROR;
	x->spans++;
	x->errors += span->status == ERROR;
	if (row.start_ns < x->start_ns)
		x->start_ns = row.start_ns;
	if (row.start_ns + row.duration_ns > x->end_ns)
		x->end_ns = row.start_ns + row.duration_ns;
	owner = table_put(&x->owners, &span->span_id);
	if (!owner)
		return -ENOMEM;
	owner->service = origin->service;
	child = (struct child){span->parent_id, origin->service};
	if (!span->parent_id)
		meet_root(x, row.start_ns, service->said.name, span->name);
	else if (!array_append(&x->children, &child, 1))
		return -ENOMEM;
	if (x->rows.count == x->rows_max)
		return 0;
	if (stamped_attributes(&x->arena, s, span, stamps, &attributes))
		return -ENOMEM;
	return add_row(x, row, span, origin, &attributes);
}

int bsd_index_add(struct bsd_index *index, struct bsd_spans *spans,
		  struct bsd_about about)
{
	struct bsd_value stamps;
	int error = read_stamps(&index->arena, &about, &stamps);

	/* Objects of another slice may lie where those of this one do. */
	table_free(&index->origins);
	index->origin_tags.count = 0;
	for (uint32_t i = 0; !error && i < spans->spans.count; i++)
		error = add_span(index, spans, array_at(&spans->spans, i),
				 &stamps, &about);
	return error ? error : index->words.failed ? -ENOMEM : 0;
}

/* ------------------------------------------------------------- telling --- */

static int compare_services(const void *one, const void *other)
{
	const struct bsd_service *a = one, *b = other;

	return text_compare(a->name, b->name);
}

/* By their names; `place`: where each has gone. */
static int tell_services(struct bsd_index *x, uint32_t *place)
{
	const struct service *s = (struct service *)x->services.array.entries;

	x->told_services.count = 0;
	for (uint32_t i = 0; i < x->services.array.count; i++) {
		if (!array_append(&x->told_services, &s[i].said, 1))
			return -ENOMEM;
	}
	qsort(x->told_services.entries, x->told_services.count,
	      sizeof(struct bsd_service), compare_services);
	for (uint32_t i = 0; i < x->services.array.count; i++) {
		const struct bsd_service *found =
			bsearch(&s[i].said, x->told_services.entries,
				x->told_services.count, sizeof(*found),
				compare_services);

		place[i] = (uint32_t)(found - (struct bsd_service *)
						      x->told_services.entries);
	}
	return 0;
}

static int tell_operations(struct bsd_index *x)
{
	x->told_operations.count = 0;
	x->told_names.count = 0;
	for (uint32_t i = 0; i < x->operations.array.count; i++) {
		const struct operation *o = array_at(&x->operations.array, i);
		const struct service *s =
			array_at(&x->services.array, o->service);
		const struct bsd_text service = s->said.name, name = o->name;
		struct bsd_operation told = {(uint32_t)service.bytes,
					     (uint32_t)name.bytes, o->kind};

		if (!array_append(&x->told_operations, &told, 1) ||
		    !array_append(&x->told_names, service.at, service.bytes) ||
		    !array_append(&x->told_names, name.at, name.bytes))
			return -ENOMEM;
	}
	return 0;
}

static int tell_calls(struct bsd_index *x, const uint32_t *place,
		      uint64_t *orphans)
{
	struct table calls = TABLE_OF(struct call, 2 * sizeof(uint32_t));
	int error = 0;

	for (uint32_t i = 0; !error && i < x->children.count; i++) {
		const struct child *child = array_at(&x->children, i);
		const struct owner *owner =
			table_find(&x->owners, &child->parent_id);
		struct call *call;

		*orphans += !owner;
		if (!owner || owner->service == child->service)
			continue;
		call = table_put(&calls,
				 (uint32_t[]){owner->service, child->service});
		if (call)
			call->count++;
		else
			error = -ENOMEM;
	}
	x->told_calls.count = 0;
	for (uint32_t i = 0; !error && i < calls.array.count; i++) {
		const struct call *call = array_at(&calls.array, i);
		struct bsd_call told = {place[call->caller],
					place[call->callee], call->count};

		error = array_append(&x->told_calls, &told, 1) ? 0 : -ENOMEM;
	}
	table_free(&calls);
	return error;
}

struct bsd_index_rows bsd_index_rows(struct bsd_index *index)
{
	struct bsd_index_rows rows = {0};
	uint32_t *place = arena_take(
		&index->arena, index->services.array.count * sizeof(*place));

	rows.error = place ? 0 : -ENOMEM;
	if (!rows.error && index->spans)
		rows.error = tell_services(index, place);
	if (!rows.error)
		rows.error = tell_operations(index);
	if (!rows.error)
		rows.error = tell_calls(index, place, &rows.orphans);
	if (rows.error)
		return rows;
	rows.n_rows = index->rows.count;
	rows.n_tags = index->tags.count;
	rows.n_operations = index->told_operations.count;
	rows.n_names = index->told_names.count;
	rows.n_services = index->told_services.count;
	rows.n_calls = index->told_calls.count;
	rows.rows = (const struct bsd_row *)index->rows.entries;
	rows.tags = index->tags.entries;
	rows.operations =
		(const struct bsd_operation *)index->told_operations.entries;
	rows.names = index->told_names.entries;
	rows.services =
		(const struct bsd_service *)index->told_services.entries;
	rows.calls = (const struct bsd_call *)index->told_calls.entries;
	rows.root_service = index->root_service;
	rows.root_operation = index->root_operation;
	rows.start_ns = index->start_ns;
	rows.end_ns = index->end_ns;
	rows.spans = index->spans;
	rows.errors = index->errors;
	return rows;
}
