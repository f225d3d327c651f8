/* SPDX-License-Identifier: Apache-2.0 */
/* What the details say of their spans: attributes, events, links. */
#include <errno.h>
#include <string.h>

#include "fields.h"

#define TRACE_ID_BYTES 16u

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
	error = fields_read(s, bytes, n, &f);
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

/* Ids are random: only who lies has one twice, and would have a copy for each. So the
 * first span of it is described. */
int spans_describe(struct bsd_spans *s, struct array *long_names)
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
