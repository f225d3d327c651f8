/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hashes on which nodes must agree without talking to each other.
 *
 * One function in three domains, so that which traces are recorded
 * (percentage), which survive overload (priority) and which coordinator they
 * go to (shard) are independent of each other: with one hash for all, a node
 * that records 10 % would hand the coordinator only the lowest priorities.
 *
 *   s = fnv1a64(domain || seed as 8 bytes LE)
 *   h = fmix64(fmix64(s ^ first half of the trace id) ^ second half)
 *
 * with the halves read as big-endian integers. s does not change while running,
 * so a trace costs four multiplications: below 100 % each begin asks.
 *
 * fnv1a64 is FNV-1a with the 64-bit offset basis and prime; fmix64 is the
 * finaliser of MurmurHash3 (FNV's high bits mix too little for thresholds).
 * Test vectors: tests/data/hash_vectors.json; protocol/hashing.py is the same
 * in Python.
 */
#ifndef BS_HASH_H
#define BS_HASH_H

#include <stddef.h>
#include <stdint.h>

#include "backsight.h"

#define BS_HASH_PERCENTAGE "percentage"
#define BS_HASH_PRIORITY "priority"
#define BS_HASH_SHARD "shard"

#define BS_FNV1A64_BASIS 0xcbf29ce484222325ull
#define BS_FNV1A64_PRIME 0x100000001b3ull

static inline uint64_t bs_fnv1a64(uint64_t state, const void *bytes, size_t n)
{
	const uint8_t *b = bytes;

	for (size_t i = 0; i < n; i++)
		state = (state ^ b[i]) * BS_FNV1A64_PRIME;
	return state;
}

static inline uint64_t bs_fmix64(uint64_t k)
{
	k = (k ^ (k >> 33)) * 0xff51afd7ed558ccdull;
	k = (k ^ (k >> 33)) * 0xc4ceb9fe1a85ec53ull;
	return k ^ (k >> 33);
}

/* The state after domain and seed, which do not change while running. */
static inline uint64_t bs_hash_prepare(const char *domain, size_t domain_bytes,
				       uint64_t seed)
{
	uint64_t state = bs_fnv1a64(BS_FNV1A64_BASIS, domain, domain_bytes);

	for (int i = 0; i < 8; i++)
		state = (state ^ ((seed >> (8 * i)) & 0xff)) * BS_FNV1A64_PRIME;
	return state;
}

static inline uint64_t bs_hash_trace(uint64_t prepared, struct bs_trace_id id)
{
	return bs_fmix64(bs_fmix64(prepared ^ id.hi) ^ id.lo);
}

#endif
