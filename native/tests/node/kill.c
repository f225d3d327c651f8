/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "kill.h"

/* The compiler and the linker want these names, and macros take types. */
/* NOLINTBEGIN(bugprone-reserved-identifier, bugprone-macro-parentheses) */

/* -------------------------------------------------------------- mappings --- */

/* Of a node and its clients, and of a successor in the same process. */
#define RANGES_MAX 256

static struct {
	uintptr_t from, to;
} ranges[RANGES_MAX];
static uint32_t n_ranges;

/* What the linker calls instead of the three (--wrap), as they are named where
 * an off_t has 64 bits. */
void *__wrap_mmap64(void *at, size_t bytes, int access, int flags, int fd,
		    off_t offset);
int __wrap_munmap(void *at, size_t bytes);
int __wrap_madvise(void *at, size_t bytes, int advice);
void *__real_mmap64(void *at, size_t bytes, int access, int flags, int fd,
		    off_t offset);
int __real_munmap(void *at, size_t bytes);
int __real_madvise(void *at, size_t bytes, int advice);

void *__wrap_mmap64(void *at, size_t bytes, int access, int flags, int fd,
		    off_t offset)
{
	void *got = __real_mmap64(at, bytes, access, flags, fd, offset);

	if (got != MAP_FAILED && flags & MAP_SHARED && fd >= 0) {
		CHECK(n_ranges < RANGES_MAX);
		ranges[n_ranges].from = (uintptr_t)got;
		ranges[n_ranges++].to = (uintptr_t)got + bytes;
	}
	return got;
}

int __wrap_munmap(void *at, size_t bytes)
{
	for (uint32_t i = 0; i < n_ranges; i++) {
		if (ranges[i].from == (uintptr_t)at) {
			ranges[i] = ranges[--n_ranges];
			break;
		}
	}
	return __real_munmap(at, bytes);
}

/* A process that is forked has the node's mappings, too. */
int __wrap_madvise(void *at, size_t bytes, int advice)
{
	return advice == MADV_DONTFORK ? 0 : __real_madvise(at, bytes, advice);
}

/* ---------------------------------------------------------------- stores --- */

static uint64_t stores, deadline = KILL_NEVER;
static bool armed;

void kill_arm(uint64_t store)
{
	stores = 0;
	deadline = store;
	armed = true;
}

uint64_t kill_stores(void)
{
	return stores;
}

static bool is_shared(uintptr_t at)
{
	for (uint32_t i = 0; i < n_ranges; i++) {
		if (at >= ranges[i].from && at < ranges[i].to)
			return true;
	}
	return false;
}

static void before_store(const void *at)
{
	if (!armed || !is_shared((uintptr_t)at))
		return;
	if (stores++ == deadline)
		_exit(KILLED);
}

/* What the compiler calls. */

#define READ_OF(name)                                                          \
	void name(const void *at);                                             \
	void name(const void *at)                                              \
	{                                                                      \
		(void)at;                                                      \
	}

#define WRITE_OF(name)                                                         \
	void name(void *at);                                                   \
	void name(void *at)                                                    \
	{                                                                      \
		before_store(at);                                              \
	}

READ_OF(__tsan_read1)
READ_OF(__tsan_read2)
READ_OF(__tsan_read4)
READ_OF(__tsan_read8)
READ_OF(__tsan_read16)
READ_OF(__tsan_unaligned_read2)
READ_OF(__tsan_unaligned_read4)
READ_OF(__tsan_unaligned_read8)
READ_OF(__tsan_unaligned_read16)
WRITE_OF(__tsan_write1)
WRITE_OF(__tsan_write2)
WRITE_OF(__tsan_write4)
WRITE_OF(__tsan_write8)
WRITE_OF(__tsan_write16)
WRITE_OF(__tsan_unaligned_write2)
WRITE_OF(__tsan_unaligned_write4)
WRITE_OF(__tsan_unaligned_write8)
WRITE_OF(__tsan_unaligned_write16)
READ_OF(__tsan_func_entry)

void __tsan_init(void);
void __tsan_init(void)
{
}

void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}

void __tsan_read_range(const void *at, unsigned long bytes);
void __tsan_read_range(const void *at, unsigned long bytes)
{
	(void)at;
	(void)bytes;
}

void __tsan_write_range(void *at, unsigned long bytes);
void __tsan_write_range(void *at, unsigned long bytes)
{
	(void)bytes;
	before_store(at);
}

void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order)
{
	(void)order;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#define ATOMICS_OF(bits, type)                                                 \
	type __tsan_atomic##bits##_load(const type *at, int order);            \
	type __tsan_atomic##bits##_load(const type *at, int order)             \
	{                                                                      \
		(void)order;                                                   \
		return __atomic_load_n(at, __ATOMIC_SEQ_CST);                  \
	}                                                                      \
	void __tsan_atomic##bits##_store(type *at, type value, int order);     \
	void __tsan_atomic##bits##_store(type *at, type value, int order)      \
	{                                                                      \
		(void)order;                                                   \
		before_store(at);                                              \
		__atomic_store_n(at, value, __ATOMIC_SEQ_CST);                 \
	}                                                                      \
	type __tsan_atomic##bits##_fetch_add(type *at, type value, int order); \
	type __tsan_atomic##bits##_fetch_add(type *at, type value, int order)  \
	{                                                                      \
		(void)order;                                                   \
		before_store(at);                                              \
		return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);        \
	}                                                                      \
	int __tsan_atomic##bits##_compare_exchange_strong(                     \
		type *at, type *expected, type desired, int success,           \
		int failure);                                                  \
	int __tsan_atomic##bits##_compare_exchange_strong(                     \
		type *at, type *expected, type desired, int success,           \
		int failure)                                                   \
	{                                                                      \
		(void)success;                                                 \
		(void)failure;                                                 \
		before_store(at);                                              \
		return __atomic_compare_exchange_n(at, expected, desired,      \
						   false, __ATOMIC_SEQ_CST,    \
						   __ATOMIC_SEQ_CST);          \
	}                                                                      \
	type __tsan_atomic##bits##_compare_exchange_val(                       \
		type *at, type expected, type desired, int success,            \
		int failure);                                                  \
	type __tsan_atomic##bits##_compare_exchange_val(                       \
		type *at, type expected, type desired, int success,            \
		int failure)                                                   \
	{                                                                      \
		__tsan_atomic##bits##_compare_exchange_strong(                 \
			at, &expected, desired, success, failure);             \
		return expected;                                               \
	}

ATOMICS_OF(8, uint8_t)
ATOMICS_OF(16, uint16_t)
ATOMICS_OF(32, uint32_t)
ATOMICS_OF(64, uint64_t)

/* ---------------------------------------------------------------- images --- */

void image_save(struct image *image, int fd)
{
	struct stat st;
	off_t at = 0;

	CHECK_EQ(fstat(fd, &st), 0);
	image->fd = fd;
	image->size = (uint64_t)st.st_size;
	image->n_parts = 0;
	while ((at = lseek(fd, at, SEEK_DATA)) >= 0) {
		off_t end = lseek(fd, at, SEEK_HOLE);
		uint64_t bytes = (uint64_t)(end - at);
		uint8_t *content = malloc(bytes);

		CHECK(content);
		CHECK(image->n_parts <
		      sizeof(image->parts) / sizeof(*image->parts));
		CHECK_EQ(pread(fd, content, bytes, at), bytes);
		image->parts[image->n_parts].at = (uint64_t)at;
		image->parts[image->n_parts].bytes = bytes;
		image->parts[image->n_parts++].content = content;
		at = end;
	}
}

void image_restore(const struct image *image)
{
	CHECK_EQ(fallocate(image->fd,
			   FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
			   (off_t)image->size),
		 0);
	for (uint32_t i = 0; i < image->n_parts; i++)
		CHECK_EQ(pwrite(image->fd, image->parts[i].content,
				image->parts[i].bytes,
				(off_t)image->parts[i].at),
			 image->parts[i].bytes);
}

void image_free(struct image *image)
{
	for (uint32_t i = 0; i < image->n_parts; i++)
		free(image->parts[i].content);
	image->n_parts = 0;
}

/* NOLINTEND(bugprone-reserved-identifier, bugprone-macro-parentheses) */
