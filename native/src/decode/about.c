/* SPDX-License-Identifier: Apache-2.0 */
/* What is said of spans besides what they say: stamps, services, resources. */
#include <errno.h>
#include <string.h>

#include "spans.h"

int read_stamps(struct arena *a, const struct bsd_about *about,
		struct bsd_value *stamps)
{
	/* They are ours, and few. */
	uint64_t items_left = SLICE_ITEMS_MAX;
	int error;

	*stamps = (struct bsd_value){.type = BSD_VALUE_MAP};
	if (!about->stamps_bytes)
		return 0;
	error = msgpack_read(a, &items_left, about->stamps, about->stamps_bytes,
			     stamps);
	if (error)
		return error;
	return stamps->type == BSD_VALUE_MAP && !map_keep_attributes(stamps)
		       ? 0
		       : -EINVAL;
}

int stamped_attributes(struct arena *a, const struct bsd_spans *s,
		       const struct bsd_span *span,
		       const struct bsd_value *stamps,
		       struct bsd_value *attributes)
{
	size_t own = 2 * (size_t)span->attributes.n;
	size_t more = 2 * (size_t)stamps->n;
	struct bsd_value *items;

	*attributes = span->attributes;
	if (!stamps->n || spans_have(s, span->client, span->parent_id))
		return 0;
	items = arena_take(a, (own + more) * sizeof(*items));
	if (!items)
		return -ENOMEM;
	if (own)
		memcpy(items, span->attributes.items, own * sizeof(*items));
	memcpy(items + own, stamps->items, more * sizeof(*items));
	*attributes = (struct bsd_value){
		.type = BSD_VALUE_MAP,
		.n = span->attributes.n + stamps->n,
		.items = items,
	};
	return map_unique(attributes, items) ? 0 : -ENOMEM;
}

/* What the node knows of a process's name. */
static bool process_service(struct arena *a, const struct bsd_client *c,
			    struct bsd_text *service)
{
	size_t n = strnlen(c->service, sizeof(c->service));

	if (!text_of(a, (const uint8_t *)c->service, n, service))
		return false;
	if (!service->bytes)
		*service = literal(UNKNOWN_SERVICE);
	return true;
}

bool service_of(struct arena *a, const struct bsd_spans *s,
		const struct bsd_span *span, struct bsd_text *service)
{
	const struct bsd_client *c = bsd_slice_client(&s->slice, span->client);
	const struct bsd_value *name =
		span->resource ? map_find(&span->resource->attributes,
					  literal("service.name"))
			       : NULL;

	*service = literal(UNKNOWN_SERVICE);
	if (name && name->type == BSD_VALUE_TEXT && name->n) {
		*service = value_text(name);
		return true;
	}
	return !c || !c->named || process_service(a, c, service);
}

int resource_attributes(struct arena *a, const struct bsd_spans *s,
			const struct bsd_span *span, struct bsd_text node,
			struct bsd_value *attributes)
{
	const struct bsd_client *c = bsd_slice_client(&s->slice, span->client);
	struct bsd_value *items;
	struct bsd_text service;
	uint32_t n = 0;

	if (span->resource) {
		*attributes = span->resource->attributes;
		return 0;
	}
	items = arena_take(a, 6 * sizeof(*items));
	if (!items)
		return -ENOMEM;
	if (c && c->named) {
		if (!process_service(a, c, &service))
			return -ENOMEM;
		items[n++] = text_value(literal("service.name"));
		items[n++] = text_value(service);
		items[n++] = text_value(literal("process.pid"));
		items[n++] = (struct bsd_value){.type = BSD_VALUE_INT,
						.integer = c->pid};
	}
	items[n++] = text_value(literal("host.name"));
	items[n++] = text_value(node);
	*attributes = (struct bsd_value){
		.type = BSD_VALUE_MAP, .n = n / 2, .items = items};
	return 0;
}
