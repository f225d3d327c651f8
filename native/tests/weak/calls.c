/* SPDX-License-Identifier: Apache-2.0 */
/* The accesses that the compiler tells of (tsan_calls.h); and libc and the kernel,
 * as far as they read, write, wait or tell the time. Memory that is not shared is
 * accessed as it always is. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "mapping.h"
#include "model.h"
#include "tsan_calls.h"

/* The linker wants these names. */
/* NOLINTBEGIN(bugprone-reserved-identifier) */

#define SITE __builtin_return_address(0)

static bool is_watched(const void *at)
{
	return turns_are_running() && memory_is_shared(at);
}

/* ------------------------------------------------------------- the compiler --- */

void called_read(const void *at, size_t bytes, const void *site)
{
	if (bytes && is_watched(at))
		memory_read(at, bytes, site);
}

void called_write(void *at, size_t bytes, const void *site)
{
	if (!bytes || !is_watched(at))
		return;
	turns_mortal(site);
	memory_write(at, bytes, site);
}

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

bool called_atomic(struct atomic_call *c)
{
	static const enum op_kind ops[] = {
		[ATOMIC_LOAD] = OP_LOAD,     [ATOMIC_STORE] = OP_STORE,
		[ATOMIC_CHANGE] = OP_CHANGE, [ATOMIC_SWAP] = OP_CHANGE,
		[ATOMIC_FENCE] = OP_FENCE,   [ATOMIC_LIGHT_FENCE] = OP_LIGHT,
	};

	if (c->at ? !is_watched(c->at) : !turns_are_running())
		return false;
	step(ops[c->kind], c->at, c->bytes, c->order, c->site);
	switch (c->kind) {
	case ATOMIC_LOAD:
		c->was = memory_load(c->at, c->bytes, c->order);
		break;
	case ATOMIC_STORE:
		memory_store(c->at, c->bytes, c->value, c->order);
		break;
	case ATOMIC_CHANGE:
		c->was = memory_change(c->at, c->bytes, c->change, c->value,
				       c->order);
		break;
	case ATOMIC_SWAP:
		c->was = memory_swap(c->at, c->bytes, c->expected, c->value,
				     c->order, c->failure_order);
		break;
	case ATOMIC_FENCE:
		memory_fence(c->order);
		break;
	case ATOMIC_LIGHT_FENCE:
		memory_light_fence();
		break;
	}
	return true;
}

/* ------------------------------------------------------------------ libc --- */

/* What is checked calls them so (meson.build): we need the real ones. */
void *weak_memcpy(void *to, const void *from, size_t bytes);
void *weak_memmove(void *to, const void *from, size_t bytes);
void *weak_memset(void *to, int value, size_t bytes);
int weak_memcmp(const void *a, const void *b, size_t bytes);
void *weak_memcpy(void *to, const void *from, size_t bytes)
{
	called_read(from, bytes, SITE);
	called_write(to, bytes, SITE);
	return memmove(to, from, bytes);
}

void *weak_memmove(void *to, const void *from, size_t bytes)
{
	called_read(from, bytes, SITE);
	called_write(to, bytes, SITE);
	return memmove(to, from, bytes);
}

void *weak_memset(void *to, int value, size_t bytes)
{
	called_write(to, bytes, SITE);
	return memset(to, value, bytes);
}

int weak_memcmp(const void *a, const void *b, size_t bytes)
{
	called_read(a, bytes, SITE);
	called_read(b, bytes, SITE);
	return memcmp(a, b, bytes);
}

/* Only those that parties share are locks here; the others are free. */
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_trylock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __real_pthread_mutex_lock(pthread_mutex_t *mutex);
int __real_pthread_mutex_trylock(pthread_mutex_t *mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t *mutex);

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex)
{
	if (!turns_are_running())
		return __real_pthread_mutex_lock(mutex);
	if (memory_is_shared(mutex))
		turns_lock(mutex, SITE);
	return 0;
}

int __wrap_pthread_mutex_trylock(pthread_mutex_t *mutex)
{
	if (!turns_are_running())
		return __real_pthread_mutex_trylock(mutex);
	if (!memory_is_shared(mutex))
		return 0;
	return turns_trylock(mutex, SITE) ? 0 : EBUSY;
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

static long membarrier(va_list args, const void *site)
{
	if (va_arg(args, int) != MEMBARRIER_CMD_PRIVATE_EXPEDITED)
		return 0; /* registered */
	step(OP_HEAVY, NULL, 0, __ATOMIC_SEQ_CST, site);
	memory_heavy_fence();
	return 0;
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
	case SYS_membarrier:
		result = membarrier(args, site);
		break;
	case SYS_munlock:
		result = 0;
		break;
	default:
		fprintf(stderr, "system call %ld is not known here\n", number);
		abort();
	}
	va_end(args);
	return result;
}

/* NOLINTEND(bugprone-reserved-identifier) */
