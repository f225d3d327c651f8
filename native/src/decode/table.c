/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that grows with what is put into it. */
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

/* Up to so many entries are looked through one by one. */
#define FEW 8u

static bool make_room(struct array *a, size_t more)
{
	/* Most have one or two, and there are thousands of traces. */
	size_t room = a->room ? a->room : 2;
	uint8_t *entries;

	if (more <= a->room - a->count)
		return true;
	while (room - a->count < more)
		room *= 2;
	if (room > UINT32_MAX)
		return false;
	entries = realloc(a->entries, room * a->entry_bytes);
	if (!entries)
		return false;
	a->entries = entries;
	a->room = (uint32_t)room;
	return true;
}

void *array_add(struct array *a)
{
	uint8_t *entry;

	if (!make_room(a, 1))
		return NULL;
	entry = array_at(a, a->count++);
	memset(entry, 0, a->entry_bytes);
	return entry;
}

bool array_append(struct array *a, const void *entries, size_t n)
{
	if (!make_room(a, n))
		return false;
	if (n)
		memcpy(array_at(a, a->count), entries, n * a->entry_bytes);
	a->count += (uint32_t)n;
	return true;
}

void array_free(struct array *a)
{
	free(a->entries);
	a->entries = NULL;
	a->count = a->room = 0;
}

static uint32_t place_of(const struct table *t, const void *key)
{
	uint64_t hash = (uintptr_t)t;
	uint32_t word;

	for (uint32_t at = 0; at < t->key_bytes; at += sizeof(word)) {
		memcpy(&word, (const uint8_t *)key + at, sizeof(word));
		hash = bs_fmix64(hash ^ word);
	}
	return (uint32_t)hash & (t->places - 1);
}

static void index_entry(struct table *t, uint32_t number)
{
	uint32_t place = place_of(t, array_at(&t->array, number));

	while (t->index[place])
		place = (place + 1) & (t->places - 1);
	t->index[place] = number + 1;
}

/* At least half of the places are free. */
static bool make_index(struct table *t)
{
	uint32_t places = t->places ? t->places : FEW;
	uint32_t *index;

	while (places / 2 < t->array.count) {
		if (places > UINT32_MAX / 2)
			return false;
		places *= 2;
	}
	if (places == t->places)
		return true;
	index = calloc(places, sizeof(*index));
	if (!index)
		return false;
	free(t->index);
	t->index = index;
	t->places = places;
	for (uint32_t i = 0; i < t->array.count; i++)
		index_entry(t, i);
	return true;
}

void *table_find(const struct table *t, const void *key)
{
	if (!t->places) {
		for (uint32_t i = 0; i < t->array.count; i++) {
			void *entry = array_at(&t->array, i);

			if (!memcmp(entry, key, t->key_bytes))
				return entry;
		}
		return NULL;
	}
	for (uint32_t place = place_of(t, key); t->index[place];
	     place = (place + 1) & (t->places - 1)) {
		void *entry = array_at(&t->array, t->index[place] - 1);

		if (!memcmp(entry, key, t->key_bytes))
			return entry;
	}
	return NULL;
}

void *table_put(struct table *t, const void *key)
{
	void *entry = table_find(t, key);
	uint32_t places = t->places;

	if (entry)
		return entry;
	entry = array_add(&t->array);
	if (!entry)
		return NULL;
	memcpy(entry, key, t->key_bytes);
	if (t->array.count > FEW) {
		if (!make_index(t))
			return NULL;
		if (t->places == places)
			index_entry(t, t->array.count - 1);
	}
	return entry;
}

void table_free(struct table *t)
{
	array_free(&t->array);
	free(t->index);
	t->index = NULL;
	t->places = 0;
}
