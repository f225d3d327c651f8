/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code that is compiled with -fsanitize=thread calls a function at each of its
 * accesses to memory. Linked with tsan_calls.c instead of TSan it calls these here,
 * which a test defines.
 */
#ifndef BS_TEST_TSAN_CALLS_H
#define BS_TEST_TSAN_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum atomic_kind {
	ATOMIC_LOAD,
	ATOMIC_STORE,
	ATOMIC_CHANGE, /* exchange, fetch_add and the like */
	ATOMIC_SWAP,   /* compare_exchange */
	ATOMIC_FENCE,
	ATOMIC_LIGHT_FENCE, /* of the compiler alone: light_fence() */
};

struct atomic_call {
	enum atomic_kind kind;
	void *at;
	uint32_t bytes;
	int order;	   /* __ATOMIC_* */
	int failure_order; /* of a swap that finds something else */
	const void *site;  /* the return address of the call */
	uint64_t value;	   /* that is stored, or changes what is there */
	uint64_t expected;
	uint64_t (*change)(uint64_t was, uint64_t value);
	uint64_t was; /* answered: what was there */
};

/* Before accesses that are not atomic. */
void called_read(const void *at, size_t bytes, const void *site);
void called_write(void *at, size_t bytes, const void *site);
/* True: the access was made. False: it still is to be made, as always. */
bool called_atomic(struct atomic_call *call);

#endif
