/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel told of a trace, as spans of the processes that it was about. */
#include <errno.h>
#include <stdlib.h>

#include "abi/kernel_event.h"
#include "spans.h"

/* Spans before an event of the kernel's, the latest first, among which the one around
 * it is looked for. Both may be as many as a slice has room for. */
#define SPANS_LOOKED_AT 256u

#define INTERNAL 1u /* OTLP's SpanKind */

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

	return spans_add(s, &span);
}

int spans_join_kernels(struct bsd_spans *s)
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
