/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text from bytes that may be none: what was cut within a character, or is no UTF-8,
 * is text all the same.
 */
#include <string.h>

#include "spans.h"

#define REPLACED "\xef\xbf\xbd" /* U+FFFD */
#define REPLACED_BYTES 3u

/* Of the second byte of a sequence, by the first. The others are 0x80 to 0xbf. */
static void second_range(uint8_t first, uint8_t *low, uint8_t *high)
{
	*low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
	*high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
}

/* How many bytes a character takes; negative: so many that begin none, which one
 * replacement stands for (the Unicode Standard, 3.9, "maximal subparts"). */
static int character(const uint8_t *b, size_t n)
{
	int length = b[0] < 0x80		    ? 1
		     : b[0] >= 0xc2 && b[0] <= 0xdf ? 2
		     : b[0] >= 0xe0 && b[0] <= 0xef ? 3
		     : b[0] >= 0xf0 && b[0] <= 0xf4 ? 4
						    : 0;
	uint8_t low, high;

	if (!length)
		return -1;
	second_range(b[0], &low, &high);
	for (int i = 1; i < length; i++) {
		if ((size_t)i == n || b[i] < low || b[i] > high)
			return -i;
		low = 0x80;
		high = 0xbf;
	}
	return length;
}

/* Up to the first byte of no character. */
static size_t valid_bytes(const uint8_t *b, size_t n)
{
	size_t at = 0;

	while (at < n) {
		uint64_t eight;
		int length;

		/* Most text is ASCII. */
		if (n - at >= sizeof(eight)) {
			memcpy(&eight, b + at, sizeof(eight));
			if (!(eight & 0x8080808080808080ull)) {
				at += sizeof(eight);
				continue;
			}
		}
		length = character(b + at, n - at);
		if (length < 0)
			break;
		at += (size_t)length;
	}
	return at;
}

/* All of it, with replacements: into `to`, if that is there. How many bytes. */
static size_t replace(const uint8_t *b, size_t n, uint8_t *to)
{
	size_t at = 0, made = 0;

	while (at < n) {
		int length = character(b + at, n - at);
		const void *from = length < 0 ? (const void *)REPLACED : b + at;
		size_t bytes = length < 0 ? REPLACED_BYTES : (size_t)length;

		if (to)
			memcpy(to + made, from, bytes);
		made += bytes;
		at += (size_t)(length < 0 ? -length : length);
	}
	return made;
}

bool text_of(struct arena *a, const uint8_t *bytes, size_t n,
	     struct bsd_text *text)
{
	uint8_t *replaced;

	*text = (struct bsd_text){bytes, n};
	if (valid_bytes(bytes, n) == n)
		return true;
	text->bytes = replace(bytes, n, NULL);
	text->at = replaced = arena_take(a, text->bytes);
	if (!replaced)
		return false;
	replace(bytes, n, replaced);
	return true;
}

size_t text_characters(struct bsd_text text)
{
	size_t count = 0;

	for (size_t i = 0; i < text.bytes; i++)
		count += (text.at[i] & 0xc0) != 0x80;
	return count;
}

int text_compare(struct bsd_text a, struct bsd_text b)
{
	size_t both = a.bytes < b.bytes ? a.bytes : b.bytes;
	int order = both ? memcmp(a.at, b.at, both) : 0;

	return order ? order : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}
