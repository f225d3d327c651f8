/* SPDX-License-Identifier: Apache-2.0 */
/* What the compiler calls for TSan; and libc and the kernel, as far as they
 * read, write, wait or tell the time. Memory that is not shared is accessed as
 * it always is. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "mapping.h"
#include "model.h"

/* The compiler and the linker want these names, and macros take types. */
/* NOLINTBEGIN(bugprone-reserved-identifier, bugprone-macro-parentheses) */

#define SITE __builtin_return_address(0)

static bool is_watched(const void *at)
{
	return turns_are_running() && memory_is_shared(at);
}

/* ----------------------------------------------------------------- plain --- */

static void read_plain(const void *at, size_t bytes, const void *site)
{
	if (bytes && is_watched(at))
		memory_read(at, bytes, site);
}

static void write_plain(const void *at, size_t bytes, const void *site)
{
	if (!bytes || !is_watched(at))
		return;
	turns_mortal();
	memory_write(at, bytes, site);
}

#define READ_OF(bytes)                                                         \
	void __tsan_read##bytes(const void *at);                               \
	void __tsan_read##bytes(const void *at)                                \
	{                                                                      \
		read_plain(at, bytes, SITE);                                   \
	}                                                                      \
	void __tsan_unaligned_read##bytes(const void *at);                     \
	void __tsan_unaligned_read##bytes(const void *at)                      \
	{                                                                      \
		read_plain(at, bytes, SITE);                                   \
	}

#define WRITE_OF(bytes)                                                        \
	void __tsan_write##bytes(void *at);                                    \
	void __tsan_write##bytes(void *at)                                     \
	{                                                                      \
		write_plain(at, bytes, SITE);                                  \
	}                                                                      \
	void __tsan_unaligned_write##bytes(void *at);                          \
	void __tsan_unaligned_write##bytes(void *at)                           \
	{                                                                      \
		write_plain(at, bytes, SITE);                                  \
	}

READ_OF(1)
READ_OF(2)
READ_OF(4)
READ_OF(8)
READ_OF(16)
WRITE_OF(1)
WRITE_OF(2)
WRITE_OF(4)
WRITE_OF(8)
WRITE_OF(16)

void __tsan_read_range(const void *at, unsigned long bytes);
void __tsan_read_range(const void *at, unsigned long bytes)
{
	read_plain(at, bytes, SITE);
}

void __tsan_write_range(void *at, unsigned long bytes);
void __tsan_write_range(void *at, unsigned long bytes)
{
	write_plain(at, bytes, SITE);
}

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

/* ---------------------------------------------------------------- atomic --- */

static void step(enum op_kind kind, const void *at, uint32_t bytes, int order,
		 const void *site)
{
	const struct op op = {.kind = kind,
			      .at = at,
			      .bytes = bytes,
			      .order = order,
			      .site = site};

	turns_step(&op);
}

void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order)
{
	if (!turns_are_running())
		return;
	step(OP_FENCE, NULL, 0, order, SITE);
	memory_fence(order);
}

/* Of the compiler alone. */
void __tsan_atomic_signal_fence(int order);
void __tsan_atomic_signal_fence(int order)
{
	(void)order;
}

#define CHANGE_OF(bits, type, name, expression)                                \
	static uint64_t name##bits(uint64_t was, uint64_t operand)             \
	{                                                                      \
		(void)was;                                                     \
		return (type)(expression);                                     \
	}                                                                      \
	type __tsan_atomic##bits##_##name(type *at, type value, int order);    \
	type __tsan_atomic##bits##_##name(type *at, type value, int order)     \
	{                                                                      \
		type was;                                                      \
                                                                               \
		if (!is_watched(at)) {                                         \
			was = *at;                                             \
			*at = (type)name##bits(was, value);                    \
			return was;                                            \
		}                                                              \
		step(OP_CHANGE, at, sizeof(*at), order, SITE);                 \
		return (type)memory_change(at, sizeof(*at), name##bits, value, \
					   order);                             \
	}

#define ATOMICS_OF(bits, type)                                                 \
	type __tsan_atomic##bits##_load(const type *at, int order);            \
	type __tsan_atomic##bits##_load(const type *at, int order)             \
	{                                                                      \
		if (!is_watched(at))                                           \
			return *at;                                            \
		step(OP_LOAD, at, sizeof(*at), order, SITE);                   \
		return (type)memory_load(at, sizeof(*at), order);              \
	}                                                                      \
	void __tsan_atomic##bits##_store(type *at, type value, int order);     \
	void __tsan_atomic##bits##_store(type *at, type value, int order)      \
	{                                                                      \
		if (!is_watched(at)) {                                         \
			*at = value;                                           \
			return;                                                \
		}                                                              \
		step(OP_STORE, at, sizeof(*at), order, SITE);                  \
		memory_store(at, sizeof(*at), value, order);                   \
	}                                                                      \
	CHANGE_OF(bits, type, exchange, operand)                               \
	CHANGE_OF(bits, type, fetch_add, was + operand)                        \
	CHANGE_OF(bits, type, fetch_sub, was - operand)                        \
	CHANGE_OF(bits, type, fetch_or, was | operand)                         \
	CHANGE_OF(bits, type, fetch_and, was &operand)                         \
	static type swap##bits(type *at, type expected, type desired,          \
			       int success, int failure, const void *site)     \
	{                                                                      \
		type was;                                                      \
                                                                               \
		if (!is_watched(at)) {                                         \
			was = *at;                                             \
			if (was == expected)                                   \
				*at = desired;                                 \
			return was;                                            \
		}                                                              \
		step(OP_CHANGE, at, sizeof(*at), success, site);               \
		return (type)memory_swap(at, sizeof(*at), expected, desired,   \
					 success, failure);                    \
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

/* ------------------------------------------------------------------ libc --- */

/* What is checked calls them so (meson.build): we need the real ones. */
void *weak_memcpy(void *to, const void *from, size_t bytes);
void *weak_memmove(void *to, const void *from, size_t bytes);
void *weak_memset(void *to, int value, size_t bytes);
int weak_memcmp(const void *a, const void *b, size_t bytes);
void *weak_memcpy(void *to, const void *from, size_t bytes)
{
	read_plain(from, bytes, SITE);
	write_plain(to, bytes, SITE);
	return memmove(to, from, bytes);
}

void *weak_memmove(void *to, const void *from, size_t bytes)
{
	read_plain(from, bytes, SITE);
	write_plain(to, bytes, SITE);
	return memmove(to, from, bytes);
}

void *weak_memset(void *to, int value, size_t bytes)
{
	write_plain(to, bytes, SITE);
	return memset(to, value, bytes);
}

int weak_memcmp(const void *a, const void *b, size_t bytes)
{
	read_plain(a, bytes, SITE);
	read_plain(b, bytes, SITE);
	return memcmp(a, b, bytes);
}

/* Only those that parties share are locks here; the others are free. */
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t *mutex);

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex)
{
	if (!turns_are_running())
		return __real_pthread_mutex_lock(mutex);
	if (memory_is_shared(mutex))
		turns_lock(mutex, SITE);
	return 0;
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex)
{
	if (!turns_are_running())
		return __real_pthread_mutex_unlock(mutex);
	if (memory_is_shared(mutex))
		turns_unlock(mutex);
	return 0;
}

/* ---------------------------------------------------------------- kernel --- */

/* What is accessed must have been before: as if it were written. */
static void unmapped(void *at, size_t bytes)
{
	if (is_watched(at))
		memory_write(at, bytes, NULL);
}

__attribute__((constructor)) static void watch_mappings(void)
{
	mapping_ends = unmapped;
}

/* Another memory in that place: whoever accesses it has the old one or the new
 * one, and does not mind. */
void *__wrap_mremap(void *from, size_t bytes, size_t to_bytes, int flags, ...);
void *__wrap_mremap(void *from, size_t bytes, size_t to_bytes, int flags, ...)
{
	void *place;
	va_list args;

	(void)from;
	CHECK_EQ(bytes, to_bytes);
	va_start(args, flags);
	place = va_arg(args, void *);
	va_end(args);
	return place;
}

/* Every execution has the same time. */
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
	(void)clock;
	*now = (struct timespec){.tv_sec = 1000};
	return 0;
}

int __wrap_nanosleep(const struct timespec *time, struct timespec *left);
int __wrap_nanosleep(const struct timespec *time, struct timespec *left)
{
	(void)time;
	(void)left;
	turns_pause(SITE);
	return 0;
}

/*
 * Sleep on words, of which each has a value. The kernel looks at them and sleeps in
 * one step, and there are fences around it: either who wakes finds the sleeper,
 * or the sleeper sees what was written before.
 */
static long sleep_on(const uint32_t *const *words, const uint32_t *values,
		     uint32_t n, const void *site)
{
	const void *shared[FUTEX_WAITV_MAX];
	uint32_t n_shared = 0;

	for (uint32_t i = 0; i < n; i++) {
		if (memory_is_shared(words[i]))
			shared[n_shared++] = words[i];
		else if (*words[i] != values[i])
			goto again;
	}
	CHECK(n_shared);
	turns_look(shared, n_shared, site);
	memory_fence(__ATOMIC_SEQ_CST);
	for (uint32_t i = 0; i < n; i++) {
		if (memory_is_shared(words[i]) &&
		    memory_load(words[i], sizeof(*words[i]),
				__ATOMIC_RELAXED) != values[i])
			goto again;
	}
	turns_sleep();
	return 0;
again:
	errno = EAGAIN;
	return -1;
}

static long wake_all(const uint32_t *word, const void *site)
{
	step(OP_WAKE, word, 0, __ATOMIC_SEQ_CST, site);
	memory_fence(__ATOMIC_SEQ_CST);
	turns_wake(word);
	return 0;
}

static long futex(va_list args, const void *site)
{
	const uint32_t *word = va_arg(args, const uint32_t *);
	int call = va_arg(args, int) & ~FUTEX_PRIVATE_FLAG;
	uint32_t value = va_arg(args, uint32_t);

	if (call == FUTEX_WAIT)
		return sleep_on(&word, &value, 1, site);
	CHECK_EQ(call, FUTEX_WAKE);
	/* Nobody sleeps on what is not shared. */
	return memory_is_shared(word) ? wake_all(word, site) : 0;
}

static long futex_waitv(va_list args, const void *site)
{
	const struct futex_waitv *waiters =
		va_arg(args, const struct futex_waitv *);
	uint32_t n = va_arg(args, uint32_t);
	const uint32_t *words[FUTEX_WAITV_MAX];
	uint32_t values[FUTEX_WAITV_MAX];

	CHECK(n <= FUTEX_WAITV_MAX);
	for (uint32_t i = 0; i < n; i++) {
		/* NOLINTNEXTLINE(performance-no-int-to-ptr): the kernel's */
		words[i] = (const uint32_t *)(uintptr_t)waiters[i].uaddr;
		values[i] = (uint32_t)waiters[i].val;
	}
	return sleep_on(words, values, n, site);
}

long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...)
{
	const void *site = SITE;
	va_list args;
	long result;

	va_start(args, number);
	switch (number) {
	case SYS_gettid:
		result = 1000 + (long)turns_self();
		break;
	case SYS_futex:
		result = turns_are_running() ? futex(args, site) : 0;
		break;
	case SYS_futex_waitv:
		CHECK(turns_are_running());
		result = futex_waitv(args, site);
		break;
	default:
		fprintf(stderr, "system call %ld is not known here\n", number);
		abort();
	}
	va_end(args);
	return result;
}

/* NOLINTEND(bugprone-reserved-identifier, bugprone-macro-parentheses) */
