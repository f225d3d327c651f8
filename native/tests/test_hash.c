/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hashes against tests/data/hash_vectors.json, which Python's are held to
 * as well (tests/unit/test_hashing.py). hash_vectors.h is made of it.
 */
#include "check.h"
#include "hash.h"
#include "hash_vectors.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static void texts_hash_as_the_vectors_say(void)
{
	for (size_t i = 0; i < COUNT(fnv1a64_vectors); i++) {
		const struct text_vector *v = &fnv1a64_vectors[i];

		CHECK_EQ(bs_fnv1a64(BS_FNV1A64_BASIS, v->text, v->bytes),
			 v->hash);
	}
}

/* A node's id is the hash of its name. */
static void names_of_nodes_hash_as_the_vectors_say(void)
{
	for (size_t i = 0; i < COUNT(node_id_vectors); i++) {
		const struct text_vector *v = &node_id_vectors[i];

		CHECK_EQ(bs_fnv1a64(BS_FNV1A64_BASIS, v->text, v->bytes),
			 v->hash);
	}
}

static void numbers_mix_as_the_vectors_say(void)
{
	for (size_t i = 0; i < COUNT(fmix64_vectors); i++)
		CHECK_EQ(bs_fmix64(fmix64_vectors[i].in),
			 fmix64_vectors[i].out);
}

static void traces_hash_as_the_vectors_say(void)
{
	for (size_t i = 0; i < COUNT(trace_hash_vectors); i++) {
		const struct trace_vector *v = &trace_hash_vectors[i];
		uint64_t prepared =
			bs_hash_prepare(v->domain, v->domain_bytes, v->seed);

		CHECK_EQ(bs_hash_trace(prepared, v->trace), v->hash);
	}
}

int main(void)
{
	RUN(texts_hash_as_the_vectors_say);
	RUN(names_of_nodes_hash_as_the_vectors_say);
	RUN(numbers_mix_as_the_vectors_say);
	RUN(traces_hash_as_the_vectors_say);
	return 0;
}
