/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attributes, in both forms: MessagePack, and the plain one of a span's end.
 *
 * Anybody may have written it. An empty map is one byte, and four times as much in
 * memory; the head of an array claims what it likes. So the heads are walked first:
 * of what is broken, or too much, nothing is made.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backsight.h"
#include "spans.h"

/* Of one record: so one that is nothing but containers leaves the others readable. */
#define RECORD_ITEMS_MAX (SLICE_ITEMS_MAX / 16)
#define CONTAINER_ITEMS 4u

/* Nesting that is read at all, and that a value may have: deeper than any is meant to
 * be. */
#define READ_DEPTH_MAX 64u
#define VALUE_DEPTH_MAX 32u

/* Up to so many keys are compared with each other. */
#define FEW_KEYS 16u

/* --------------------------------------------------------- messagepack --- */

enum shape {
	SCALAR,
	BYTES,
	TEXT,
	LIST,
	MAP,
	BROKEN
};

struct head {
	enum shape shape;
	uint32_t head_bytes; /* with the first */
	uint64_t n;	     /* bytes that follow, or items, a pair being two */
};

static uint64_t big_endian(const uint8_t *b, uint32_t bytes)
{
	uint64_t value = 0;

	for (uint32_t i = 0; i < bytes; i++)
		value = value << 8 | b[i];
	return value;
}

/* Of a type that is followed by its length. */
static struct head sized(enum shape shape, uint32_t width, const uint8_t *b,
			 size_t left)
{
	struct head h = {shape, 1 + width, 0};

	if (left < h.head_bytes)
		return (struct head){.shape = BROKEN};
	h.n = big_endian(b + 1, width);
	if (shape == MAP)
		h.n *= 2;
	return h;
}

static struct head scalar(uint32_t bytes)
{
	return (struct head){SCALAR, 1, bytes};
}

static struct head read_head(const uint8_t *b, size_t left)
{
	uint8_t first = b[0];

	if (first <= 0x7f || first >= 0xe0)
		return scalar(0);
	if (first <= 0x8f)
		return (struct head){MAP, 1, 2 * (first & 0x0f)};
	if (first <= 0x9f)
		return (struct head){LIST, 1, first & 0x0f};
	if (first <= 0xbf)
		return (struct head){TEXT, 1, first & 0x1f};
	switch (first) {
	case 0xc0:
	case 0xc2:
	case 0xc3:
		return scalar(0);
	case 0xc4:
	case 0xc5:
	case 0xc6:
		return sized(BYTES, 1u << (first - 0xc4), b, left);
	case 0xca:
		return scalar(4);
	case 0xcb:
		return scalar(8);
	case 0xcc:
	case 0xcd:
	case 0xce:
	case 0xcf:
		return scalar(1u << (first - 0xcc));
	case 0xd0:
	case 0xd1:
	case 0xd2:
	case 0xd3:
		return scalar(1u << (first - 0xd0));
	case 0xd9:
	case 0xda:
	case 0xdb:
		return sized(TEXT, 1u << (first - 0xd9), b, left);
	case 0xdc:
	case 0xdd:
		return sized(LIST, 2u << (first - 0xdc), b, left);
	case 0xde:
	case 0xdf:
		return sized(MAP, 2u << (first - 0xde), b, left);
	default:
		return (struct head){.shape = BROKEN};
	}
}

struct level {
	uint64_t left;
	bool is_map;
};

/* Whether all of it makes sense, and does not claim more than `allowed` items.
 * `items`: as many as the heads claim, up to where it was looked at. */
static bool walk(const uint8_t *b, size_t n, uint64_t allowed, uint64_t *items)
{
	struct level outer[READ_DEPTH_MAX + 1];
	struct level now = {1, false};
	uint32_t depth = 0;
	size_t at = 0;

	*items = 1;
	for (;;) {
		bool is_key;
		struct head h;

		while (!now.left) {
			if (!depth)
				return at == n;
			now = outer[--depth];
		}
		if (at >= n)
			return false;
		h = read_head(b + at, n - at);
		if (h.shape == BROKEN)
			return false;
		is_key = now.is_map && now.left % 2 == 0;
		now.left--;
		if (h.shape != LIST && h.shape != MAP) {
			if (h.n + h.head_bytes > n - at)
				return false;
			at += h.head_bytes + (size_t)h.n;
			continue;
		}
		at += h.head_bytes;
		if (is_key || depth == READ_DEPTH_MAX)
			return false;
		outer[depth++] = now;
		now = (struct level){h.n, h.shape == MAP};
		/* An array gets room for what its head claims. */
		*items += CONTAINER_ITEMS - 1 + h.n;
		if (*items > allowed)
			return false;
	}
}

static int64_t sign_extended(uint64_t value, uint32_t bytes)
{
	uint32_t shift = 64 - 8 * bytes;

	return (int64_t)(value << shift) >> shift;
}

static struct bsd_value unsigned_value(uint64_t value)
{
	if (value <= INT64_MAX)
		return (struct bsd_value){.type = BSD_VALUE_INT,
					  .integer = (int64_t)value};
	return (struct bsd_value){.type = BSD_VALUE_UINT, .natural = value};
}

static struct bsd_value real_value(double value)
{
	return (struct bsd_value){.type = BSD_VALUE_REAL, .real = value};
}

static struct bsd_value scalar_value(const uint8_t *b, uint32_t bytes)
{
	uint64_t raw = big_endian(b + 1, bytes);
	uint32_t narrow = (uint32_t)raw;
	double real;
	float single;

	if (b[0] <= 0x7f)
		return unsigned_value(b[0]);
	if (b[0] >= 0xe0)
		return (struct bsd_value){.type = BSD_VALUE_INT,
					  .integer = (int8_t)b[0]};
	switch (b[0]) {
	case 0xc0:
		return (struct bsd_value){.type = BSD_VALUE_NIL};
	case 0xc2:
	case 0xc3:
		return (struct bsd_value){.type = BSD_VALUE_BOOL,
					  .integer = b[0] == 0xc3};
	case 0xca:
		memcpy(&single, &narrow, sizeof(single));
		return real_value(single);
	case 0xcb:
		memcpy(&real, &raw, sizeof(real));
		return real_value(real);
	default:
		break;
	}
	if (b[0] <= 0xcf)
		return unsigned_value(raw);
	return (struct bsd_value){.type = BSD_VALUE_INT,
				  .integer = sign_extended(raw, bytes)};
}

/* Of what walk() took. How many bytes, or -ENOMEM. It nests READ_DEPTH_MAX deep at
 * most. */
/* NOLINTNEXTLINE(misc-no-recursion) */
static int64_t parse(struct arena *a, const uint8_t *b, size_t left,
		     struct bsd_value *value)
{
	struct head h = read_head(b, left);
	size_t at = h.head_bytes;
	struct bsd_value *items;
	struct bsd_text text;

	if (h.shape == SCALAR) {
		*value = scalar_value(b, (uint32_t)h.n);
		return (int64_t)(at + h.n);
	}
	if (h.shape == BYTES || h.shape == TEXT) {
		text = (struct bsd_text){b + at, h.n};
		if (h.shape == TEXT && !text_of(a, b + at, h.n, &text))
			return -ENOMEM;
		*value = (struct bsd_value){
			.type = h.shape == TEXT ? BSD_VALUE_TEXT
						: BSD_VALUE_BYTES,
			.n = (uint32_t)text.bytes,
			.bytes = text.at,
		};
		return (int64_t)(at + h.n);
	}
	/* No more than there are bytes: each takes at least one. */
	items = arena_take(a, h.n * sizeof(*items));
	if (!items)
		return -ENOMEM;
	for (uint64_t i = 0; i < h.n; i++) {
		int64_t used = parse(a, b + at, left - at, &items[i]);

		if (used < 0)
			return used;
		at += (size_t)used;
	}
	*value = (struct bsd_value){
		.type = h.shape == MAP ? BSD_VALUE_MAP : BSD_VALUE_LIST,
		.n = (uint32_t)(h.shape == MAP ? h.n / 2 : h.n),
		.items = items,
	};
	if (h.shape == MAP && !map_unique(value, items))
		return -ENOMEM;
	return (int64_t)at;
}

int msgpack_read(struct arena *a, uint64_t *items_left, const uint8_t *bytes,
		 size_t n, struct bsd_value *value)
{
	uint64_t allowed = *items_left < RECORD_ITEMS_MAX ? *items_left
							  : RECORD_ITEMS_MAX;
	uint64_t items;
	bool fits = walk(bytes, n, allowed, &items);
	int64_t used;

	/* Broken or not: the walk took its time. */
	*items_left -= items < allowed ? items : allowed;
	if (!fits)
		return -EINVAL;
	used = parse(a, bytes, n, value);
	return used < 0 ? (int)used : 0;
}

/* ---------------------------------------------------------------- maps --- */

static struct bsd_text key_of(const struct bsd_value *items, uint32_t pair)
{
	return value_text(&items[2 * (size_t)pair]);
}

static bool is_text(const struct bsd_value *items, uint32_t pair)
{
	return items[2 * (size_t)pair].type == BSD_VALUE_TEXT;
}

static int compare_pairs(const void *one, const void *other, void *items)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
	int order = text_compare(key_of(items, a), key_of(items, b));

	return order ? order : (a > b) - (a < b);
}

/* For each pair the first one of its key. */
static void find_first_few(const struct bsd_value *items, uint32_t n,
			   uint32_t *first)
{
	for (uint32_t i = 0; i < n; i++) {
		first[i] = i;
		for (uint32_t k = 0; is_text(items, i) && k < i; k++) {
			if (is_text(items, k) &&
			    !text_compare(key_of(items, k), key_of(items, i))) {
				first[i] = k;
				break;
			}
		}
	}
}

static bool find_first_many(struct bsd_value *items, uint32_t n,
			    uint32_t *first)
{
	uint32_t *sorted = malloc(n * sizeof(*sorted));
	uint32_t texts = 0;

	if (!sorted)
		return false;
	for (uint32_t i = 0; i < n; i++) {
		first[i] = i;
		if (is_text(items, i))
			sorted[texts++] = i;
	}
	qsort_r(sorted, texts, sizeof(*sorted), compare_pairs, items);
	for (uint32_t i = 1; i < texts; i++) {
		if (!text_compare(key_of(items, sorted[i - 1]),
				  key_of(items, sorted[i])))
			first[sorted[i]] = first[sorted[i - 1]];
	}
	free(sorted);
	return true;
}

bool map_unique(struct bsd_value *map, struct bsd_value *items)
{
	uint32_t few[FEW_KEYS], *first = few;
	uint32_t kept = 0, n = map->n;
	bool done = true;

	if (n > FEW_KEYS)
		first = malloc(n * sizeof(*first));
	if (!first)
		return false;
	if (n > FEW_KEYS)
		done = find_first_many(items, n, first);
	else
		find_first_few(items, n, first);
	for (uint32_t i = 0; done && i < n; i++) {
		const struct bsd_value *pair = &items[2 * (size_t)i];

		if (first[i] != i) {
			/* Where the first one went: it is before this one. */
			items[2 * (size_t)first[first[i]] + 1] = pair[1];
			continue;
		}
		memmove(&items[2 * (size_t)kept], pair, 2 * sizeof(*pair));
		/* From here on, where it is now. */
		first[i] = kept++;
	}
	map->n = kept;
	if (first != few)
		free(first);
	return done;
}

/* NOLINTNEXTLINE(misc-no-recursion) */
static bool is_value(const struct bsd_value *value, uint32_t depth)
{
	if (value->type != BSD_VALUE_LIST && value->type != BSD_VALUE_MAP)
		return true;
	if (depth == VALUE_DEPTH_MAX)
		return false;
	for (uint32_t i = 0; i < value->n; i++) {
		const struct bsd_value *item = &value->items[i];

		if (value->type == BSD_VALUE_MAP) {
			if (!is_text(value->items, i))
				return false;
			item = &value->items[2 * (size_t)i + 1];
		}
		if (!is_value(item, depth + 1))
			return false;
	}
	return true;
}

uint64_t map_keep_attributes(struct bsd_value *map)
{
	struct bsd_value *items = (struct bsd_value *)map->items;
	uint32_t kept = 0, n = map->n;

	for (uint32_t i = 0; i < n; i++) {
		if (!is_text(items, i) ||
		    !is_value(&items[2 * (size_t)i + 1], 0))
			continue;
		if (kept != i)
			memcpy(&items[2 * (size_t)kept], &items[2 * (size_t)i],
			       2 * sizeof(*items));
		kept++;
	}
	map->n = kept;
	return n - kept;
}

const struct bsd_value *map_find(const struct bsd_value *map,
				 struct bsd_text key)
{
	for (uint32_t i = 0; i < map->n; i++) {
		if (!text_compare(key_of(map->items, i), key))
			return &map->items[2 * (size_t)i + 1];
	}
	return NULL;
}

/* ------------------------------------------------------ the plain form --- */

/* One attribute; false if it makes no sense, which does not end the others. */
static bool plain_value(struct arena *a, uint8_t type, const uint8_t *b,
			uint32_t n, struct bsd_value *value, bool *fits)
{
	struct bsd_text text = {b, n};
	double real;

	switch (type) {
	case BS_ATTRIBUTE_STRING:
		*fits = text_of(a, b, n, &text);
		*value = (struct bsd_value){.type = BSD_VALUE_TEXT,
					    .n = (uint32_t)text.bytes,
					    .bytes = text.at};
		return true;
	case BS_ATTRIBUTE_BYTES:
		*value = (struct bsd_value){
			.type = BSD_VALUE_BYTES, .n = n, .bytes = b};
		return true;
	case BS_ATTRIBUTE_INT:
		if (n != sizeof(int64_t))
			return false;
		*value = (struct bsd_value){.type = BSD_VALUE_INT,
					    .integer = (int64_t)get64(b)};
		return true;
	case BS_ATTRIBUTE_DOUBLE:
		if (n != sizeof(real))
			return false;
		memcpy(&real, b, sizeof(real));
		*value = real_value(real);
		return true;
	case BS_ATTRIBUTE_BOOL:
		if (n != 1)
			return false;
		*value = (struct bsd_value){.type = BSD_VALUE_BOOL,
					    .integer = *b != 0};
		return true;
	default:
		return false;
	}
}

int plain_read(struct arena *a, const uint8_t *b, size_t n,
	       struct bsd_value *map, uint64_t *malformed)
{
	const size_t head = sizeof(struct bs_attribute_header);
	/* Each takes at least its header. */
	struct bsd_value *items = arena_take(a, n / head * 2 * sizeof(*items));
	uint32_t pairs = 0;
	size_t at = 0;

	if (!items)
		return -ENOMEM;
	while (at < n) {
		uint32_t key_bytes, value_bytes;
		const uint8_t *key = b + at + head;
		struct bsd_text text;
		bool fits = true;

		if (n - at < head) {
			(*malformed)++;
			break;
		}
		key_bytes =
			b[at + offsetof(struct bs_attribute_header, key_bytes)];
		value_bytes = get16(
			b + at +
			offsetof(struct bs_attribute_header, value_bytes));
		/* The rest cannot be told apart. */
		if (n - at - head < (size_t)key_bytes + value_bytes) {
			(*malformed)++;
			break;
		}
		if (!plain_value(a, b[at], key + key_bytes, value_bytes,
				 &items[2 * (size_t)pairs + 1], &fits)) {
			(*malformed)++;
		} else {
			if (!fits || !text_of(a, key, key_bytes, &text))
				return -ENOMEM;
			items[2 * (size_t)pairs++] =
				(struct bsd_value){.type = BSD_VALUE_TEXT,
						   .n = (uint32_t)text.bytes,
						   .bytes = text.at};
		}
		at += head + key_bytes + value_bytes;
	}
	*map = (struct bsd_value){
		.type = BSD_VALUE_MAP, .n = pairs, .items = items};
	return map_unique(map, items) ? 0 : -ENOMEM;
}
