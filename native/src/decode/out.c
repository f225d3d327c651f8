/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes that are written from the end to the front. */
#include <stdlib.h>
#include <string.h>

#include "spans.h"

#define FIRST_BYTES ((size_t)4 << 10)

static bool make_room(struct out *out, size_t n)
{
	size_t written = out->room - out->at;
	size_t room = out->room ? out->room : FIRST_BYTES;
	uint8_t *bytes;

	if (out->failed)
		return false;
	if (n <= out->at)
		return true;
	while (room - written < n)
		room *= 2;
	bytes = malloc(room);
	if (!bytes) {
		out->failed = true;
		return false;
	}
	if (written)
		memcpy(bytes + room - written, out->bytes + out->at, written);
	free(out->bytes);
	out->bytes = bytes;
	out->room = room;
	out->at = room - written;
	return true;
}

void out_bytes(struct out *out, const void *bytes, size_t n)
{
	if (!n || !make_room(out, n))
		return;
	out->at -= n;
	memcpy(out->bytes + out->at, bytes, n);
}

void out_free(struct out *out)
{
	free(out->bytes);
	*out = (struct out){0};
}
