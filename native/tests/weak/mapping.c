/* SPDX-License-Identifier: Apache-2.0 */
#include "mapping.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "check.h"

/* What the linker calls is named so. */
/* NOLINTBEGIN(bugprone-reserved-identifier) */

#define MAPPINGS_MAX 64

bool mapping_is_private;
void (*mapping_ends)(void *at, size_t bytes);

static struct mapping {
	void *at;
	dev_t device;
	ino_t inode;
	uint32_t users;
} mappings[MAPPINGS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *__wrap_mmap64(void *at, size_t bytes, int access, int flags, int fd,
		    off_t offset);
int __wrap_munmap(void *at, size_t bytes);
int __wrap_madvise(void *at, size_t bytes, int advice);
void *__real_mmap64(void *at, size_t bytes, int access, int flags, int fd,
		    off_t offset);
int __real_munmap(void *at, size_t bytes);
int __real_madvise(void *at, size_t bytes, int advice);

static struct mapping *find(const struct stat *st)
{
	struct mapping *free = NULL;

	for (uint32_t i = 0; i < MAPPINGS_MAX; i++) {
		struct mapping *m = &mappings[i];

		if (m->users && m->device == st->st_dev &&
		    m->inode == st->st_ino)
			return m;
		if (!m->users)
			free = m;
	}
	CHECK(free);
	free->device = st->st_dev;
	free->inode = st->st_ino;
	return free;
}

void *__wrap_mmap64(void *at, size_t bytes, int access, int flags, int fd,
		    off_t offset)
{
	struct mapping *m;
	struct stat st;

	if (fd < 0 || !(flags & MAP_SHARED) || at || offset)
		return __real_mmap64(at, bytes, access, flags, fd, offset);
	CHECK_EQ(fstat(fd, &st), 0);
	pthread_mutex_lock(&lock);
	m = find(&st);
	if (!m->users) {
		if (mapping_is_private)
			flags = (flags & ~MAP_TYPE) | MAP_PRIVATE;
		m->at = __real_mmap64(NULL, bytes, PROT_READ | PROT_WRITE,
				      flags, fd, 0);
	}
	m->users += m->at != MAP_FAILED;
	pthread_mutex_unlock(&lock);
	return m->at;
}

int __wrap_munmap(void *at, size_t bytes)
{
	bool is_used = false;

	if (mapping_ends)
		mapping_ends(at, bytes);
	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < MAPPINGS_MAX; i++) {
		if (mappings[i].users && mappings[i].at == at)
			is_used = --mappings[i].users > 0;
	}
	pthread_mutex_unlock(&lock);
	return is_used ? 0 : __real_munmap(at, bytes);
}

int __wrap_madvise(void *at, size_t bytes, int advice)
{
	switch (advice) {
	case MADV_DONTFORK: /* the process of an execution has all of it */
	case MADV_WIPEONFORK:
	case MADV_POPULATE_WRITE:
		return 0;
	case MADV_REMOVE:
		if (!mapping_is_private)
			break;
		memset(at, 0, bytes);
		return 0;
	default:
		break;
	}
	return __real_madvise(at, bytes, advice);
}

/* NOLINTEND(bugprone-reserved-identifier) */
