/* SPDX-License-Identifier: Apache-2.0 */
/* Mapping what the daemon sends, and one mapping in the place of another. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client.h"

const char bs_no_room[] = "there is no room for a segment";
const char bs_no_lock[] =
	"this process has all that it maps locked (MCL_FUTURE), and may not lock "
	"another 2 MiB: raise its limit (RLIMIT_MEMLOCK)";
static const char unsealed[] = "a segment has the wrong size, or no seals";

/* ---------------------------------------------------------------- one --- */

static const char *why_not(void)
{
	return errno == EAGAIN ? bs_no_lock : bs_no_room;
}

static void *map(int fd, size_t bytes, int protection, const char **reason)
{
	void *p = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);

	/* A core dump must not hold the pool, a child must not write to it. */
	if (p != MAP_FAILED && !madvise(p, bytes, MADV_DONTDUMP) &&
	    !madvise(p, bytes, MADV_DONTFORK))
		return p;
	*reason = why_not();
	if (p != MAP_FAILED)
		munmap(p, bytes);
	return NULL;
}

/* The seals promise that it cannot be truncated under our feet; its size must
 * be what the layout says. */
static const char *check_sealed(int fd, size_t bytes)
{
	const int seals = F_SEAL_GROW | F_SEAL_SHRINK;
	struct stat st;
	int got;

	if (fstat(fd, &st) || st.st_size < 0 || (size_t)st.st_size != bytes)
		return unsealed;
	got = fcntl(fd, F_GET_SEALS);
	return got < 0 || (got & seals) != seals ? unsealed : NULL;
}

void *bs_map(int fd, size_t bytes, bool writable, const char **reason)
{
	*reason = check_sealed(fd, bytes);
	if (*reason)
		return NULL;
	return map(fd, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
		   reason);
}

/* By its number: sanitizers make nothing of munlock(). */
static void unlock(const void *p, size_t bytes)
{
	(void)syscall(SYS_munlock, p, bytes);
}

/* What grows when it is not locked does not count towards what may be locked. */
static void *map_growing(int fd, size_t bytes, const char **reason)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *p = map(fd, page, PROT_NONE, reason), *grown;

	if (!p)
		return NULL;
	unlock(p, page);
	grown = mremap(p, page, bytes, MREMAP_MAYMOVE);
	if (grown != MAP_FAILED)
		return grown;
	munmap(p, page);
	*reason = bs_no_room;
	return NULL;
}

/*
 * Of the arena a process has what it was granted. But one that called
 * mlockall(MCL_FUTURE) has all that it maps put into memory: tens of processes
 * would have as many pools. The kernel does not do so where nothing can be
 * accessed, and no more once it is not locked.
 */
void *bs_map_arena(int fd, size_t bytes, const char **reason)
{
	void *p = NULL;

	*reason = check_sealed(fd, bytes);
	if (!*reason)
		p = map(fd, bytes, PROT_NONE, reason);
	if (*reason == bs_no_lock)
		p = map_growing(fd, bytes, reason);
	if (!p)
		return NULL;
	unlock(p, bytes);
	if (!mprotect(p, bytes, PROT_READ | PROT_WRITE))
		return p;
	munmap(p, bytes);
	*reason = bs_no_room;
	return NULL;
}

void bs_unmap(const void *mapping, size_t bytes)
{
	if (mapping)
		munmap((void *)mapping, bytes);
}

/* A BPF map has no seals, and needs none: it never changes its size, and the
 * kernel maps no more than there is. */
static bool is_bpf_map(int fd)
{
	static const char expected[] = "anon_inode:bpf-map";
	char path[32], name[sizeof(expected)];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return readlink(path, name, sizeof(name)) == sizeof(expected) - 1 &&
	       !memcmp(name, expected, sizeof(expected) - 1);
}

struct bs_context_segment *bs_context_map(int fd, const char **reason)
{
	struct bs_context_segment *c;

	*reason = NULL;
	c = is_bpf_map(fd) ? map(fd, sizeof(*c), PROT_READ | PROT_WRITE, reason)
			   : bs_map(fd, sizeof(*c), true, reason);
	if (!c)
		return NULL;
	if (c->magic != BS_ABI_MAGIC || !bs_version_is_spoken(c->version))
		*reason = "the context segment has another version";
	else if (c->thread_slots != BS_THREAD_SLOTS ||
		 c->trigger_cells != BS_TRIGGER_CELLS)
		*reason = "the context segment has another size";
	if (!*reason)
		return c;
	bs_unmap(c, sizeof(*c));
	return NULL;
}

const struct bs_policy *bs_policy_map(int fd, const char **reason)
{
	const struct bs_policy *p = bs_map(fd, BS_POLICY_BYTES, false, reason);

	if (!p)
		return NULL;
	if (p->magic == BS_ABI_MAGIC && bs_version_is_spoken(p->version))
		return p;
	*reason = "the policy table has another version";
	bs_unmap(p, BS_POLICY_BYTES);
	return NULL;
}

/* -------------------------------------------------- one for the other --- */

int bs_map_in_place(const void *place, const void *with, size_t bytes)
{
	const void *zeros;

	if (mremap((void *)with, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
		   place) != MAP_FAILED)
		return 0;
	/* Out of memory for the kernel's own bookkeeping. If it had unmapped
	 * the place before it found out, threads must still find memory there:
	 * this does nothing where something is mapped. */
	zeros = mmap((void *)place, bytes, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	bs_unmap(with, bytes);
	return zeros == place ? -EFAULT : -ENOMEM;
}
