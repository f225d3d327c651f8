/* SPDX-License-Identifier: Apache-2.0 */
/* A fuzzer's input, read from the front; beyond its end are zeros. */
#ifndef BS_FUZZ_INPUT_H
#define BS_FUZZ_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv);

struct input {
	const uint8_t *at, *end;
};

static inline uint8_t take8(struct input *in)
{
	return in->at < in->end ? *in->at++ : 0;
}

static inline uint16_t take16(struct input *in)
{
	uint16_t low = take8(in);

	return (uint16_t)(low | take8(in) << 8);
}

static inline uint32_t take32(struct input *in)
{
	uint32_t low = take16(in);

	return low | (uint32_t)take16(in) << 16;
}

static inline bool is_over(const struct input *in)
{
	return in->at == in->end;
}

#endif
