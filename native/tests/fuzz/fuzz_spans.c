/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Applications say what they like of their spans. The input is how the slice is cut
 * into chunks, and the slice.
 *
 * What must hold: nothing crashes or leaks; what is made of it is the same however it
 * was cut, and as large as it may be; OTLP has all spans, and is protobuf to the last
 * byte; every text is UTF-8.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "decode.h"
#include "input.h"

#define NODE "node-1"
#define ROWS_MAX 50

static const uint8_t trace_id[16] = {1, 2, 3};
/* {"backsight.trigger": "slow", "backsight.lateral": true} */
static const uint8_t stamps[] =
	"\x82\xb1"
	"backsight.trigger\xa4slow\xb1"
	"backsight.lateral\xc3";

/* ------------------------------------------------------------ protobuf --- */

enum message {
	NO_MESSAGE,
	TRACES,
	RESOURCE_SPANS,
	RESOURCE,
	SCOPE_SPANS,
	SCOPE,
	SPAN,
	EVENT,
	LINK,
	STATUS,
	KEY_VALUE,
	ANY_VALUE,
	ARRAY,
	MAP,
	MESSAGES
};

#define FIELDS 17

/* What is in which field of a message. */
static const enum message within[MESSAGES][FIELDS] = {
	[TRACES] = {[1] = RESOURCE_SPANS},
	[RESOURCE_SPANS] = {[1] = RESOURCE, [2] = SCOPE_SPANS},
	[RESOURCE] = {[1] = KEY_VALUE},
	[SCOPE_SPANS] = {[1] = SCOPE, [2] = SPAN},
	[SCOPE] = {[3] = KEY_VALUE},
	[SPAN] = {[9] = KEY_VALUE, [11] = EVENT, [13] = LINK, [15] = STATUS},
	[EVENT] = {[3] = KEY_VALUE},
	[LINK] = {[4] = KEY_VALUE},
	[KEY_VALUE] = {[2] = ANY_VALUE},
	[ANY_VALUE] = {[5] = ARRAY, [6] = MAP},
	[ARRAY] = {[1] = ANY_VALUE},
	[MAP] = {[1] = KEY_VALUE},
};

static uint64_t take_varint(const uint8_t **at, const uint8_t *end)
{
	uint64_t value = 0;

	for (uint32_t shift = 0;; shift += 7) {
		CHECK(*at < end);
		CHECK(shift < 70);
		value |= (uint64_t)(**at & 0x7f) << shift;
		if (!(*(*at)++ & 0x80))
			return value;
	}
}

/* How many spans are in it. */
/* NOLINTNEXTLINE(misc-no-recursion) */
static size_t walk(enum message message, const uint8_t *at, const uint8_t *end)
{
	size_t spans = message == SPAN;

	while (at < end) {
		uint64_t tag = take_varint(&at, end);
		uint64_t n = 0;

		CHECK(tag >> 3 && tag >> 3 < FIELDS);
		switch (tag & 7) {
		case 0:
			take_varint(&at, end);
			break;
		case 1:
			n = 8;
			break;
		case 2:
			n = take_varint(&at, end);
			break;
		default:
			CHECK_EQ(tag & 7, 5);
			n = 4;
		}
		CHECK(n <= (size_t)(end - at));
		if ((tag & 7) == 2 && within[message][tag >> 3])
			spans += walk(within[message][tag >> 3], at, at + n);
		at += n;
	}
	return spans;
}

/* --------------------------------------------------------------- texts --- */

static void is_utf8(struct bsd_text text)
{
	for (size_t i = 0; i < text.bytes;) {
		uint8_t b = text.at[i];
		size_t n = b < 0x80 ? 1 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;

		CHECK(b < 0x80 || (b >= 0xc2 && b <= 0xf4));
		CHECK(n <= text.bytes - i);
		for (size_t k = 1; k < n; k++)
			CHECK((text.at[i + k] & 0xc0) == 0x80);
		i += n;
	}
}

/* NOLINTNEXTLINE(misc-no-recursion) */
static void look_at(const struct bsd_value *value)
{
	struct bsd_text text = {value->bytes, value->n};
	uint32_t items = value->n;

	if (value->type == BSD_VALUE_TEXT)
		is_utf8(text);
	if (value->type < BSD_VALUE_LIST)
		return;
	if (value->type == BSD_VALUE_MAP) {
		items *= 2;
		for (uint32_t i = 0; i < items; i += 2)
			CHECK_EQ(value->items[i].type, BSD_VALUE_TEXT);
	}
	for (uint32_t i = 0; i < items; i++)
		look_at(&value->items[i]);
}

static void look_at_span(struct bsd_spans *s, const struct bsd_span *span)
{
	struct bsd_bytes words;

	is_utf8(span->name);
	is_utf8(span->status_message);
	is_utf8(span->trace_state);
	CHECK_EQ(span->attributes.type, BSD_VALUE_MAP);
	look_at(&span->attributes);
	words = bsd_spans_words(s, &span->attributes);
	CHECK_EQ(words.error, 0);
	is_utf8((struct bsd_text){words.at, words.n});
	if (span->resource)
		look_at(&span->resource->attributes);
	if (span->scope)
		look_at(&span->scope->attributes);
	for (uint32_t i = 0; i < span->n_events; i++)
		look_at(&span->events[i].attributes);
	for (uint32_t i = 0; i < span->n_links; i++)
		look_at(&span->links[i].attributes);
}

/* -------------------------------------------------------------- slices --- */

static struct bsd_spans *read_spans(const uint8_t *bytes, size_t size,
				    size_t most)
{
	static const uint8_t said[] = "\x81\xa1k\x01";
	struct bsd_spans *s;
	uint64_t end_ns;
	int64_t kernels;

	CHECK_EQ(bsd_spans_new(&s), 0);
	for (size_t at = 0; at < size; at += most) {
		size_t n = most < size - at ? most : size - at;

		CHECK_EQ(bsd_spans_feed(s, bytes + at, n), 0);
		if (n < most)
			break;
	}
	kernels = bsd_spans_kernels(s);
	CHECK(kernels >= 0);
	for (int64_t i = 0; i < kernels; i++) {
		CHECK(bsd_spans_kernel(s, (size_t)i, &end_ns)->rest_bytes >=
		      96);
		CHECK_EQ(bsd_spans_kernel_words(s, (size_t)i, (uint64_t)i,
						(const uint8_t *)"kernel", 6,
						said, sizeof(said) - 1),
			 0);
	}
	CHECK_EQ(bsd_spans_join(s), 0);
	CHECK(bsd_spans_count(s) * 44 <= size);
	return s;
}

static void look_at_rows(struct bsd_spans *one, struct bsd_spans *other,
			 struct bsd_about about)
{
	struct bsd_index *index;
	struct bsd_index_rows rows;
	uint64_t tags = 0, names = 0, spans = 0, errors = 0;
	size_t both = bsd_spans_count(one) + bsd_spans_count(other);

	CHECK_EQ(bsd_index_new(ROWS_MAX, &index), 0);
	CHECK_EQ(bsd_index_add(index, one, about), 0);
	CHECK_EQ(bsd_index_add(index, other, about), 0);
	rows = bsd_index_rows(index);
	CHECK_EQ(rows.error, 0);
	CHECK_EQ(rows.spans, both);
	CHECK_EQ(rows.n_rows, both < ROWS_MAX ? both : ROWS_MAX);
	for (size_t i = 0; i < rows.n_rows; i++) {
		CHECK(rows.rows[i].operation < rows.n_operations);
		CHECK_EQ(rows.rows[i].tags_bytes % BSD_TAG_BYTES, 0);
		tags += rows.rows[i].tags_bytes;
	}
	CHECK_EQ(tags, rows.n_tags);
	for (size_t i = 0; i < rows.n_operations; i++) {
		const struct bsd_operation *o = &rows.operations[i];

		is_utf8((struct bsd_text){rows.names + names,
					  o->service_bytes});
		names += o->service_bytes;
		is_utf8((struct bsd_text){rows.names + names, o->name_bytes});
		names += o->name_bytes;
	}
	CHECK_EQ(names, rows.n_names);
	for (size_t i = 0; i < rows.n_services; i++) {
		is_utf8(rows.services[i].name);
		spans += rows.services[i].spans;
		errors += rows.services[i].errors;
	}
	CHECK_EQ(spans, rows.spans);
	CHECK_EQ(errors, rows.errors);
	for (size_t i = 0; i < rows.n_calls; i++) {
		CHECK(rows.calls[i].caller < rows.n_services);
		CHECK(rows.calls[i].callee < rows.n_services);
		CHECK(rows.calls[i].caller != rows.calls[i].callee);
	}
	CHECK(rows.orphans <= rows.spans);
	bsd_index_free(index);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	struct input in = {bytes, bytes + size};
	uint8_t most = take8(&in);
	uint8_t how = take8(&in);
	size_t n = (size_t)(in.end - in.at);
	struct bsd_about about = {
		.stamps = stamps,
		.stamps_bytes = how & 1 ? sizeof(stamps) - 1 : 0,
		.node = (const uint8_t *)NODE,
		.node_bytes = sizeof(NODE) - 1,
		.clock_offset_ns = how & 2   ? 1000000
				   : how & 4 ? INT64_MIN
					     : 0,
	};
	struct bsd_spans *whole = read_spans(in.at, n, n + 1);
	struct bsd_spans *cut = read_spans(in.at, n, 1 + (size_t)most);
	struct bsd_bytes a = bsd_spans_otlp(whole, trace_id, about);
	struct bsd_bytes b = bsd_spans_otlp(cut, trace_id, about);

	CHECK_EQ(a.error, 0);
	CHECK_EQ(bsd_spans_malformed(whole), bsd_spans_malformed(cut));
	CHECK_EQ(a.n, b.n);
	CHECK(!a.n || !memcmp(a.at, b.at, a.n));
	if (a.n)
		CHECK_EQ(walk(TRACES, a.at, a.at + a.n),
			 bsd_spans_count(whole));
	for (size_t i = 0; i < bsd_spans_count(whole); i++)
		look_at_span(whole, &bsd_spans_at(whole)[i]);
	look_at_rows(whole, cut, about);
	bsd_spans_free(whole);
	bsd_spans_free(cut);
	return 0;
}
