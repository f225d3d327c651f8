/* SPDX-License-Identifier: Apache-2.0 */
/* Records with copies of their bytes, for who does not take them one by one. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct bsd_records {
	struct array records; /* struct bsd_record */
	uint8_t *bytes;
	size_t n_bytes, room;
};

int bsd_records_new(struct bsd_records **records)
{
	*records = calloc(1, sizeof(**records));
	if (!*records)
		return -ENOMEM;
	(*records)->records = ARRAY_OF(struct bsd_record);
	return 0;
}

void bsd_records_free(struct bsd_records *records)
{
	if (!records)
		return;
	array_free(&records->records);
	free(records->bytes);
	free(records);
}

size_t bsd_records_count(const struct bsd_records *records)
{
	return records->records.count;
}

const struct bsd_record *bsd_records_at(const struct bsd_records *records)
{
	return (const struct bsd_record *)records->records.entries;
}

static int make_room(struct bsd_records *to, size_t n)
{
	size_t room = to->room ? to->room : 256;
	uint8_t *bytes;

	while (room < to->n_bytes + n)
		room *= 2;
	if (room == to->room)
		return 0;
	bytes = realloc(to->bytes, room);
	if (!bytes)
		return -ENOMEM;
	to->bytes = bytes;
	to->room = room;
	return 0;
}

static int take(void *arg, const struct bsd_record *record)
{
	struct bsd_records *to = arg;
	size_t n = (size_t)record->name_bytes + record->rest_bytes;
	struct bsd_record *kept = array_add(&to->records);

	if (!kept || make_room(to, n))
		return -ENOMEM;
	*kept = *record;
	if (n)
		memcpy(to->bytes + to->n_bytes, record->bytes, n);
	to->n_bytes += n;
	return 0;
}

int bsd_slice_feed(struct bsd_slice *slice, const uint8_t *bytes, size_t n,
		   struct bsd_records *records)
{
	const uint8_t *at;
	int error;

	if (!records)
		return slice_feed(slice, bytes, n, NULL, NULL);
	records->records.count = 0;
	records->n_bytes = 0;
	error = slice_feed(slice, bytes, n, take, records);
	/* Only now they stay where they are. */
	at = records->bytes;
	for (uint32_t i = 0; i < records->records.count; i++) {
		struct bsd_record *r = array_at(&records->records, i);

		if (r->name_bytes || r->rest_bytes) {
			r->bytes = at;
			at += r->name_bytes + r->rest_bytes;
		}
	}
	return error;
}
