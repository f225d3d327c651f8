/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "fields.h"

struct fields fields_of(const struct bsd_value *value)
{
	if (value && value->type == BSD_VALUE_LIST)
		return (struct fields){.items = value->items, .n = value->n};
	return (struct fields){.malformed = 1};
}

int fields_read(struct bsd_spans *s, const uint8_t *bytes, size_t n,
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

struct bsd_text next_text(struct fields *f)
{
	const struct bsd_value *item = next_of(f, BSD_VALUE_TEXT);

	return item ? value_text(item) : (struct bsd_text){0};
}

uint64_t next_number(struct fields *f)
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

void next_raw(struct fields *f, uint8_t *raw, uint32_t n)
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

struct bsd_value next_attributes(struct fields *f)
{
	const struct bsd_value *item = next_of(f, BSD_VALUE_MAP);
	struct bsd_value map = {.type = BSD_VALUE_MAP};

	if (item) {
		map = *item;
		f->malformed += map_keep_attributes(&map);
	}
	return map;
}

struct fields next_list(struct fields *f)
{
	const struct bsd_value *item = next_of(f, BSD_VALUE_LIST);

	return item ? fields_of(item) : (struct fields){0};
}

bool next_fields(struct fields *list, struct fields *item)
{
	while (list->at < list->n) {
		*item = fields_of(&list->items[list->at++]);
		if (!item->malformed)
			return true;
		list->malformed++;
	}
	return false;
}

uint32_t count_lists(const struct fields *f)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < f->n; i++)
		count += f->items[i].type == BSD_VALUE_LIST;
	return count;
}
