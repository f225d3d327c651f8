/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Values as searches compare them: text_of() of formats/tags.py, which is Jaeger's. A
 * list or a map is as json.dumps() writes it, without spaces.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "spans.h"

/* Whole numbers below are written without a point and an exponent. */
#define WHOLE_MAX 1e21

/* A sign, and 309 digits at most. */
#define NUMBER_BYTES 320u

/* Digits of a double that tell it from all others. */
#define DIGITS_MAX 17

static void put(struct out *out, const char *text)
{
	out_bytes(out, text, strlen(text));
}

static const char *not_finite(double real)
{
	return isnan(real) ? "nan" : real < 0 ? "-inf" : "inf";
}

/* One more in the last digit. */
static void step_up(char *digits)
{
	char *at = strchr(digits, 'e') - 1;

	while (at > digits && (*at == '9' || *at == '.')) {
		if (*at == '9')
			*at = '0';
		at--;
	}
	*at += *at != '9';
}

/* The fewest digits that tell it from others, and the power of ten of the first. Of a
 * power of two the next larger number is twice as far away as the next smaller one:
 * there the nearest digits may be another number's, and those above are not. */
static int shortest(double real, char *digits, size_t room)
{
	int precision = 0, exponent;
	char *mark;

	do {
		snprintf(digits, room, "%.*e", precision, real);
		if (strtod(digits, NULL) != real)
			step_up(digits);
	} while (++precision < DIGITS_MAX && strtod(digits, NULL) != real);
	if (strtod(digits, NULL) != real)
		snprintf(digits, room, "%.*e", DIGITS_MAX - 1, real);
	mark = strchr(digits, 'e');
	exponent = (int)strtol(mark + 1, NULL, 10);
	*mark = '\0';
	if (digits[1] == '.')
		memmove(digits + 1, digits + 2, strlen(digits + 2) + 1);
	return exponent;
}

/* As repr() of Python writes it: with an exponent below 1e-4 and from 1e16 on. */
static void put_real(struct out *out, double real)
{
	char digits[DIGITS_MAX + 10], text[16];
	int exponent = shortest(fabs(real), digits, sizeof(digits));
	int n = (int)strlen(digits);

	if (exponent < -4 || exponent >= 16) {
		snprintf(text, sizeof(text), "e%+03d", exponent);
		put(out, text);
		if (n > 1) {
			put(out, digits + 1);
			put(out, ".");
		}
		out_bytes(out, digits, 1);
	} else if (exponent < 0) {
		put(out, digits);
		for (int i = exponent + 1; i < 0; i++)
			put(out, "0");
		put(out, "0.");
	} else {
		put(out, n > exponent + 1 ? digits + exponent + 1 : "0");
		put(out, ".");
		for (int i = n; i < exponent + 1; i++)
			put(out, "0");
		out_bytes(out, digits,
			  (size_t)(n < exponent + 1 ? n : exponent + 1));
	}
	if (signbit(real))
		put(out, "-");
}

static void put_whole(struct out *out, double real)
{
	char text[NUMBER_BYTES];

	/* Not "-0". */
	snprintf(text, sizeof(text), "%.0f", real == 0 ? 0.0 : real);
	put(out, text);
}

static void put_base64(struct out *out, const uint8_t *b, size_t n)
{
	static const char digits[] =
		"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
		"abcdefghijklmnopqrstuvwxyz0123456789+/";

	for (size_t left = n; left;) {
		size_t some = left % 3 ? left % 3 : 3;
		const uint8_t *at = b + left - some;
		uint32_t bits = (uint32_t)at[0] << 16 |
				(some > 1 ? (uint32_t)at[1] << 8 : 0) |
				(some > 2 ? at[2] : 0);
		char four[4] = {
			digits[bits >> 18],
			digits[bits >> 12 & 63],
			some > 1 ? digits[bits >> 6 & 63] : '=',
			some > 2 ? digits[bits & 63] : '=',
		};

		out_bytes(out, four, sizeof(four));
		left -= some;
	}
}

/* ---------------------------------------------------------------- json --- */

static uint32_t code_point(const uint8_t *b, size_t n)
{
	uint32_t code = n == 1 ? b[0] : b[0] & (0x7fu >> n);

	for (size_t i = 1; i < n; i++)
		code = code << 6 | (b[i] & 0x3f);
	return code;
}

static void put_escaped(struct out *out, const uint8_t *b, size_t n)
{
	static const char *const named[] = {
		['\b'] = "\\b", ['\t'] = "\\t", ['\n'] = "\\n",
		['\f'] = "\\f", ['\r'] = "\\r",
	};
	uint32_t code = code_point(b, n);
	char text[16];

	if (code == '"' || code == '\\') {
		text[0] = '\\';
		text[1] = (char)code;
		text[2] = '\0';
		put(out, text);
	} else if (code >= ' ' && code <= '~') {
		out_bytes(out, b, n);
	} else if (code < sizeof(named) / sizeof(*named) && named[code]) {
		put(out, named[code]);
	} else if (code <= 0xffff) {
		snprintf(text, sizeof(text), "\\u%04" PRIx32, code);
		put(out, text);
	} else {
		code -= 0x10000;
		snprintf(text, sizeof(text), "\\u%04" PRIx32 "\\u%04" PRIx32,
			 0xd800 | code >> 10, 0xdc00 | (code & 0x3ff));
		put(out, text);
	}
}

static void put_json_text(struct out *out, struct bsd_text text)
{
	put(out, "\"");
	for (size_t left = text.bytes; left;) {
		size_t n = 1;

		while ((text.at[left - n] & 0xc0) == 0x80)
			n++;
		put_escaped(out, text.at + left - n, n);
		left -= n;
	}
	put(out, "\"");
}

static void put_json(struct out *out, const struct bsd_value *value);

/* NOLINTNEXTLINE(misc-no-recursion) - as deep as a value may be */
static void put_json_items(struct out *out, const struct bsd_value *value)
{
	bool is_map = value->type == BSD_VALUE_MAP;

	put(out, is_map ? "}" : "]");
	for (uint32_t i = value->n; i-- > 0;) {
		if (!is_map) {
			put_json(out, &value->items[i]);
		} else {
			const struct bsd_value *pair =
				&value->items[2 * (size_t)i];

			put_json(out, pair + 1);
			put(out, ":");
			put_json_text(out, value_text(pair));
		}
		if (i)
			put(out, ",");
	}
	put(out, is_map ? "{" : "[");
}

/* NOLINTNEXTLINE(misc-no-recursion) */
static void put_json(struct out *out, const struct bsd_value *value)
{
	switch (value->type) {
	case BSD_VALUE_NIL:
		put(out, "null");
		break;
	case BSD_VALUE_TEXT:
		put_json_text(out, value_text(value));
		break;
	case BSD_VALUE_BYTES:
		put(out, "\"");
		put_base64(out, value->bytes, value->n);
		put(out, "\"");
		break;
	case BSD_VALUE_REAL:
		if (isfinite(value->real)) {
			put_real(out, value->real);
		} else {
			put_json_text(out, literal(not_finite(value->real)));
		}
		break;
	case BSD_VALUE_LIST:
	case BSD_VALUE_MAP:
		put_json_items(out, value);
		break;
	default:
		words_write(out, value);
	}
}

/* NOLINTNEXTLINE(misc-no-recursion) - put_json() comes here for scalars only */
void words_write(struct out *out, const struct bsd_value *value)
{
	char text[32];

	switch (value->type) {
	case BSD_VALUE_NIL:
		break;
	case BSD_VALUE_BOOL:
		put(out, value->integer ? "true" : "false");
		break;
	case BSD_VALUE_INT:
		snprintf(text, sizeof(text), "%" PRId64, value->integer);
		put(out, text);
		break;
	case BSD_VALUE_UINT:
		snprintf(text, sizeof(text), "%" PRIu64, value->natural);
		put(out, text);
		break;
	case BSD_VALUE_REAL:
		if (!isfinite(value->real))
			put(out, not_finite(value->real));
		else if (fabs(value->real) < WHOLE_MAX &&
			 value->real == trunc(value->real))
			put_whole(out, value->real);
		else
			put_real(out, value->real);
		break;
	case BSD_VALUE_TEXT:
		out_bytes(out, value->bytes, value->n);
		break;
	case BSD_VALUE_BYTES:
		put_base64(out, value->bytes, value->n);
		break;
	default:
		put_json_items(out, value);
	}
}

struct bsd_bytes bsd_spans_words(struct bsd_spans *spans,
				 const struct bsd_value *value)
{
	struct bsd_text words;

	spans->out.at = spans->out.room;
	spans->out.failed = false;
	words_write(&spans->out, value);
	words = out_written(&spans->out);
	return (struct bsd_bytes){
		.error = spans->out.failed ? -ENOMEM : 0,
		.at = words.at,
		.n = words.bytes,
	};
}
