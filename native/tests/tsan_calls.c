/* SPDX-License-Identifier: Apache-2.0 */
/* All that gcc calls for TSan, by the few functions of tsan_calls.h. */
#include "tsan_calls.h"

/* The compiler wants these names, and macros take types. */
/* NOLINTBEGIN(bugprone-reserved-identifier, bugprone-macro-parentheses) */

#define SITE __builtin_return_address(0)

/* ----------------------------------------------------------------- plain --- */

#define READ_OF(name, bytes)                                                   \
	void name(const void *at);                                             \
	void name(const void *at)                                              \
	{                                                                      \
		called_read(at, bytes, SITE);                                  \
	}

#define WRITE_OF(name, bytes)                                                  \
	void name(void *at);                                                   \
	void name(void *at)                                                    \
	{                                                                      \
		called_write(at, bytes, SITE);                                 \
	}

#define PLAIN_OF(bytes)                                                        \
	READ_OF(__tsan_read##bytes, bytes)                                     \
	READ_OF(__tsan_unaligned_read##bytes, bytes)                           \
	WRITE_OF(__tsan_write##bytes, bytes)                                   \
	WRITE_OF(__tsan_unaligned_write##bytes, bytes)

PLAIN_OF(1)
PLAIN_OF(2)
PLAIN_OF(4)
PLAIN_OF(8)
PLAIN_OF(16)

void __tsan_read_range(const void *at, unsigned long bytes);
void __tsan_read_range(const void *at, unsigned long bytes)
{
	called_read(at, bytes, SITE);
}

void __tsan_write_range(void *at, unsigned long bytes);
void __tsan_write_range(void *at, unsigned long bytes)
{
	called_write(at, bytes, SITE);
}

/* ---------------------------------------------------------------- atomic --- */

#define CHANGE_OF(bits, type, name, atomic, expression)                        \
	static uint64_t name##bits(uint64_t was, uint64_t value)               \
	{                                                                      \
		(void)was;                                                     \
		return (type)(expression);                                     \
	}                                                                      \
	type __tsan_atomic##bits##_##name(type *at, type value, int order);    \
	type __tsan_atomic##bits##_##name(type *at, type value, int order)     \
	{                                                                      \
		struct atomic_call call = {.kind = ATOMIC_CHANGE,              \
					   .at = at,                           \
					   .bytes = sizeof(*at),               \
					   .order = order,                     \
					   .site = SITE,                       \
					   .value = value,                     \
					   .change = name##bits};              \
                                                                               \
		if (called_atomic(&call))                                      \
			return (type)call.was;                                 \
		return atomic(at, value, __ATOMIC_SEQ_CST);                    \
	}

#define ATOMICS_OF(bits, type)                                                 \
	type __tsan_atomic##bits##_load(const type *at, int order);            \
	type __tsan_atomic##bits##_load(const type *at, int order)             \
	{                                                                      \
		struct atomic_call call = {.kind = ATOMIC_LOAD,                \
					   .at = (type *)at,                   \
					   .bytes = sizeof(*at),               \
					   .order = order,                     \
					   .site = SITE};                      \
                                                                               \
		if (called_atomic(&call))                                      \
			return (type)call.was;                                 \
		return __atomic_load_n(at, __ATOMIC_SEQ_CST);                  \
	}                                                                      \
	void __tsan_atomic##bits##_store(type *at, type value, int order);     \
	void __tsan_atomic##bits##_store(type *at, type value, int order)      \
	{                                                                      \
		struct atomic_call call = {.kind = ATOMIC_STORE,               \
					   .at = at,                           \
					   .bytes = sizeof(*at),               \
					   .order = order,                     \
					   .site = SITE,                       \
					   .value = value};                    \
                                                                               \
		if (!called_atomic(&call))                                     \
			__atomic_store_n(at, value, __ATOMIC_SEQ_CST);         \
	}                                                                      \
	CHANGE_OF(bits, type, exchange, __atomic_exchange_n, value)            \
	CHANGE_OF(bits, type, fetch_add, __atomic_fetch_add, was + value)      \
	CHANGE_OF(bits, type, fetch_sub, __atomic_fetch_sub, was - value)      \
	CHANGE_OF(bits, type, fetch_or, __atomic_fetch_or, was | value)        \
	CHANGE_OF(bits, type, fetch_and, __atomic_fetch_and, was &value)       \
	static type swap##bits(type *at, type expected, type desired,          \
			       int success, int failure, const void *site)     \
	{                                                                      \
		struct atomic_call call = {.kind = ATOMIC_SWAP,                \
					   .at = at,                           \
					   .bytes = sizeof(*at),               \
					   .order = success,                   \
					   .failure_order = failure,           \
					   .site = site,                       \
					   .value = desired,                   \
					   .expected = expected};              \
                                                                               \
		if (called_atomic(&call))                                      \
			return (type)call.was;                                 \
		__atomic_compare_exchange_n(at, &expected, desired, false,     \
					    __ATOMIC_SEQ_CST,                  \
					    __ATOMIC_SEQ_CST);                 \
		return expected;                                               \
	}                                                                      \
	type __tsan_atomic##bits##_compare_exchange_val(                       \
		type *at, type expected, type desired, int success,            \
		int failure);                                                  \
	type __tsan_atomic##bits##_compare_exchange_val(                       \
		type *at, type expected, type desired, int success,            \
		int failure)                                                   \
	{                                                                      \
		return swap##bits(at, expected, desired, success, failure,     \
				  SITE);                                       \
	}                                                                      \
	int __tsan_atomic##bits##_compare_exchange_strong(                     \
		type *at, type *expected, type desired, int success,           \
		int failure);                                                  \
	int __tsan_atomic##bits##_compare_exchange_strong(                     \
		type *at, type *expected, type desired, int success,           \
		int failure)                                                   \
	{                                                                      \
		type was = swap##bits(at, *expected, desired, success,         \
				      failure, SITE);                          \
                                                                               \
		if (was == *expected)                                          \
			return 1;                                              \
		*expected = was;                                               \
		return 0;                                                      \
	}

ATOMICS_OF(8, uint8_t)
ATOMICS_OF(16, uint16_t)
ATOMICS_OF(32, uint32_t)
ATOMICS_OF(64, uint64_t)

void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order)
{
	struct atomic_call call = {
		.kind = ATOMIC_FENCE, .order = order, .site = SITE};

	if (!called_atomic(&call))
		__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void __tsan_atomic_signal_fence(int order);
void __tsan_atomic_signal_fence(int order)
{
	struct atomic_call call = {
		.kind = ATOMIC_LIGHT_FENCE, .order = order, .site = SITE};

	(void)called_atomic(&call);
}

/* ----------------------------------------------------- no access at all --- */

void __tsan_init(void);
void __tsan_init(void)
{
}

void __tsan_func_entry(const void *site);
void __tsan_func_entry(const void *site)
{
	(void)site;
}

void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}

/* NOLINTEND(bugprone-reserved-identifier, bugprone-macro-parentheses) */
