/* SPDX-License-Identifier: Apache-2.0 */
/* What a record's MessagePack array holds, item by item. */
#ifndef BS_DECODE_FIELDS_H
#define BS_DECODE_FIELDS_H

#include "spans.h"

/* What makes no sense is counted, and reads as empty. */
struct fields {
	const struct bsd_value *items;
	uint32_t n, at;
	uint64_t malformed;
};

/* Of none, or of what is no array: without items. */
struct fields fields_of(const struct bsd_value *value);
/* -ENOMEM is the only error. */
int fields_read(struct bsd_spans *s, const uint8_t *bytes, size_t n,
		struct fields *fields);

/* The next item. One of another type is empty, and so is what is not there. */
struct bsd_text next_text(struct fields *f);
uint64_t next_number(struct fields *f);
void next_raw(struct fields *f, uint8_t *raw, uint32_t n);
struct bsd_value next_attributes(struct fields *f);
struct fields next_list(struct fields *f);

/* The next item of a list of arrays; false at its end. One that is no array takes a
 * byte, and would be made an object of: it is left out. */
bool next_fields(struct fields *list, struct fields *item);
uint32_t count_lists(const struct fields *f);

#endif
