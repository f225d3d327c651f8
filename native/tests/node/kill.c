/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "kill.h"
#include "tsan_calls.h"

/* -------------------------------------------------------------- mappings --- */

/* Of a node and its clients, and of a successor in the same process. */
#define RANGES_MAX 256

static struct {
	uintptr_t from, to;
} ranges[RANGES_MAX];
static uint32_t n_ranges;

/* NOLINTBEGIN(bugprone-reserved-identifier): the linker's names */
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
/* NOLINTEND(bugprone-reserved-identifier) */

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

void called_read(const void *at, size_t bytes, const void *site)
{
	(void)at;
	(void)bytes;
	(void)site;
}

void called_write(void *at, size_t bytes, const void *site)
{
	(void)bytes;
	(void)site;
	before_store(at);
}

bool called_atomic(struct atomic_call *call)
{
	if (call->at && call->kind != ATOMIC_LOAD)
		before_store(call->at);
	return false;
}

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
