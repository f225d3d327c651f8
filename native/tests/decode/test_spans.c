/* SPDX-License-Identifier: Apache-2.0 */
/* What spans say: values of all kinds, in both forms. That spans, OTLP and rows are
 * right is seen by comparing them with what another reader makes
 * (tests/unit/test_decoding.py). */
#include <math.h>
#include <stdlib.h>

#include "writer.h"

static struct bytes slice, content, said;

/* A span whose detail is MessagePack that is in `said`. */
static struct bsd_spans *read_detail(void)
{
	static struct {
		struct bs_span_detail head;
		uint8_t encoded[1 << 14];
	} detail;
	struct bs_piece_header head = {
		.client = 1, .handle = 1, .flags = WHOLE};
	struct bs_record_header record = {.type = BS_RECORD_SPAN_DETAIL};
	struct bsd_spans *s;

	content.n = slice.n = 0;
	put_start(&content, 1, 0, "GET /");
	detail.head = (struct bs_span_detail){.span_id = 1, .parts = 1};
	CHECK(said.n <= sizeof(detail.encoded));
	memcpy(detail.encoded, said.at, said.n);
	record.payload_bytes = (uint16_t)(sizeof(detail.head) + said.n);
	put(&content, &record, sizeof(record));
	put(&content, &detail, record.payload_bytes);
	put(&content, "\0\0\0",
	    -(size_t)record.payload_bytes % BS_RECORD_ALIGN);
	put_run(&slice, head, &content);
	CHECK_EQ(bsd_spans_new(&s), 0);
	CHECK_EQ(bsd_spans_feed(s, slice.at, slice.n), 0);
	CHECK_EQ(bsd_spans_join(s), 0);
	CHECK_EQ(bsd_spans_count(s), 1);
	return s;
}

static struct bsd_spans *read_attributes(const char *map, size_t n)
{
	said.n = 0;
	put(&said, "\x91", 1);
	put(&said, map, n);
	return read_detail();
}

#define ATTRIBUTES(map) read_attributes(map, sizeof(map) - 1)

static const struct bsd_value *attributes_of(const struct bsd_spans *s)
{
	return &bsd_spans_at(s)->attributes;
}

static void is_text(const struct bsd_value *value, const char *text)
{
	CHECK_EQ(value->type, BSD_VALUE_TEXT);
	CHECK_EQ(value->n, strlen(text));
	CHECK(!memcmp(value->bytes, text, value->n));
}

static void
of_a_key_that_comes_twice_the_last_value_stays_where_the_first_was(void)
{
	struct bsd_spans *s = ATTRIBUTES(
		"\x84\xa1"
		"a\x01\xa1"
		"b\x02\xa1"
		"a\x03\xa1"
		"c\x04");
	const struct bsd_value *map = attributes_of(s);

	CHECK_EQ(map->n, 3);
	is_text(&map->items[0], "a");
	CHECK_EQ(map->items[1].integer, 3);
	is_text(&map->items[2], "b");
	is_text(&map->items[4], "c");
	CHECK_EQ(map->items[5].integer, 4);
	bsd_spans_free(s);
}

static void many_keys_are_told_apart_too(void)
{
	const struct bsd_value *map;
	struct bsd_spans *s;

	said.n = 0;
	put(&said, "\x91\xde\x03\xe8", 4);
	for (int i = 0; i < 1000; i++) {
		char key[] = {(char)0xa2, (char)('a' + i % 20),
			      (char)('a' + i / 20 % 20), (char)(i % 100)};

		put(&said, key, sizeof(key));
	}
	s = read_detail();
	map = attributes_of(s);
	CHECK_EQ(map->n, 400);
	is_text(&map->items[2], "ba");
	/* Of the keys in their order, 800 to 999 came twice again. */
	CHECK_EQ(map->items[3].integer, 801 % 100);
	CHECK_EQ(map->items[2 * 399 + 1].integer, 799 % 100);
	bsd_spans_free(s);
}

static void what_is_no_text_is_replaced(void)
{
	/* Cut within a character; a surrogate; and one byte that begins none. */
	struct bsd_spans *s = ATTRIBUTES(
		"\x83\xa3"
		"a\xe2\x82\xa1x\xa3\xed\xa0\x80\xa2\xc3"
		"\xa4\xa1\xff\xa1y");
	const struct bsd_value *map = attributes_of(s);

	CHECK_EQ(map->n, 3);
	is_text(&map->items[0], "a\xef\xbf\xbd");
	is_text(&map->items[2], "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
	is_text(&map->items[3], "\xc3\xa4");
	is_text(&map->items[4], "\xef\xbf\xbd");
	CHECK_EQ(bsd_spans_malformed(s), 0);
	bsd_spans_free(s);
}

static void what_is_no_attribute_is_counted(void)
{
	struct bsd_spans *s = ATTRIBUTES(
		"\x83\x01\x02\xa1"
		"a\x81\x01\x02\xa1"
		"b\xc3");

	CHECK_EQ(bsd_spans_malformed(s), 2);
	CHECK_EQ(attributes_of(s)->n, 1);
	bsd_spans_free(s);
}

/* MessagePack of so many arrays in each other, in the map of the attributes. */
static uint64_t malformed_at_depth(int depth)
{
	struct bsd_spans *s;
	uint64_t malformed;

	said.n = 0;
	put(&said,
	    "\x91\x81\xa1"
	    "a",
	    4);
	for (int i = 0; i < depth; i++)
		put(&said, "\x91", 1);
	put(&said, "\x01", 1);
	s = read_detail();
	malformed = bsd_spans_malformed(s);
	CHECK_EQ(attributes_of(s)->n, !malformed);
	bsd_spans_free(s);
	return malformed;
}

static void values_are_so_deep_and_no_deeper(void)
{
	CHECK_EQ(malformed_at_depth(32), 0);
	CHECK_EQ(malformed_at_depth(33), 1);
	CHECK_EQ(malformed_at_depth(62), 1);
	CHECK_EQ(malformed_at_depth(5000), 1);
}

static void a_detail_claims_no_more_than_it_may(void)
{
	/* An array of 65,536 items, and of as many as there are. */
	struct bsd_spans *s = ATTRIBUTES("\xdd\x00\x01\x00\x00");

	CHECK_EQ(bsd_spans_malformed(s), 1);
	bsd_spans_free(s);
	said.n = 0;
	put(&said, "\x92\x80\xdc\x20\x00", 5);
	for (int i = 0; i < 8192; i++)
		put(&said, "\x90", 1);
	s = read_detail();
	CHECK_EQ(bsd_spans_malformed(s), 0);
	CHECK_EQ(bsd_spans_at(s)->n_events, 8192);
	bsd_spans_free(s);
}

static void says(const struct bsd_value *value, const char *words)
{
	struct bsd_spans *s;
	struct bsd_bytes made;

	CHECK_EQ(bsd_spans_new(&s), 0);
	made = bsd_spans_words(s, value);
	CHECK_EQ(made.error, 0);
	printf("  %.*s\n", (int)made.n, (const char *)made.at);
	CHECK_EQ(made.n, strlen(words));
	CHECK(!memcmp(made.at, words, made.n));
	bsd_spans_free(s);
}

static void real_says(double real, const char *words, const char *in_a_list)
{
	struct bsd_value value = {.type = BSD_VALUE_REAL, .real = real};
	struct bsd_value list = {
		.type = BSD_VALUE_LIST, .n = 1, .items = &value};

	says(&value, words);
	says(&list, in_a_list);
}

static void values_are_told_as_python_tells_them(void)
{
	static const uint8_t text[] = "\"\\\n\x7f\xc3\xa4\xf0\x9f\x98\x80";
	struct bsd_value items[] = {
		{.type = BSD_VALUE_TEXT, .n = sizeof(text) - 1, .bytes = text},
		{.type = BSD_VALUE_BYTES, .n = 2, .bytes = text},
		{.type = BSD_VALUE_NIL},
		{.type = BSD_VALUE_UINT, .natural = UINT64_MAX},
	};
	struct bsd_value list = {
		.type = BSD_VALUE_LIST, .n = 4, .items = items};

	real_says(0.1, "0.1", "[0.1]");
	real_says(1, "1", "[1.0]");
	real_says(-0.0, "0", "[-0.0]");
	real_says(1e16, "10000000000000000", "[1e+16]");
	real_says(123456789.5, "123456789.5", "[123456789.5]");
	real_says(1e21, "1e+21", "[1e+21]");
	real_says(-1.5e-7, "-1.5e-07", "[-1.5e-07]");
	real_says(0.00012, "0.00012", "[0.00012]");
	/* Powers of two, with fewer digits above than below. */
	real_says(0x1p-24, "5.960464477539063e-08", "[5.960464477539063e-08]");
	real_says(0x1p-77, "6.617444900424222e-24", "[6.617444900424222e-24]");
	real_says(5e-324, "5e-324", "[5e-324]");
	real_says(1.7976931348623157e308, "1.7976931348623157e+308",
		  "[1.7976931348623157e+308]");
	real_says(-INFINITY, "-inf", "[\"-inf\"]");
	says(&list,
	     "[\"\\\"\\\\\\n\\u007f\\u00e4\\ud83d\\ude00\",\"Ilw=\","
	     "null,18446744073709551615]");
}

int main(void)
{
	RUN(of_a_key_that_comes_twice_the_last_value_stays_where_the_first_was);
	RUN(many_keys_are_told_apart_too);
	RUN(what_is_no_text_is_replaced);
	RUN(what_is_no_attribute_is_counted);
	RUN(values_are_so_deep_and_no_deeper);
	RUN(a_detail_claims_no_more_than_it_may);
	RUN(values_are_told_as_python_tells_them);
	return 0;
}
