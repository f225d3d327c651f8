/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers from a seed, so that a failure repeats. */
#ifndef BS_TEST_RANDOM_H
#define BS_TEST_RANDOM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t random_state;

static inline void random_seed(uint64_t seed)
{
	random_state = seed * 2654435761u + 1;
}

static inline uint64_t random_u64(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state * 0x2545f4914f6cdd1dull;
}

static inline uint32_t below(uint32_t limit)
{
	return (uint32_t)(random_u64() % limit);
}

/* A program's arguments: how much to do, and the seed, which is printed. */
struct amount {
	uint64_t much, seed;
};

static inline struct amount amount_of(int argc, char **argv, uint64_t much)
{
	struct amount a = {
		.much = argc > 1 ? strtoull(argv[1], NULL, 0) : much,
		.seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1,
	};

	printf("seed %ju\n", (uintmax_t)a.seed);
	fflush(stdout);
	random_seed(a.seed);
	return a;
}

#endif
