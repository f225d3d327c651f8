/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mapping what the daemon sends, and putting another segment in the place of
 * one that threads use.
 *
 * Threads write to their slots at every begin and end, and read the policy at
 * every begin. They take no lock for that and must not be waited for. So what
 * is replaced is the memory behind their addresses: mremap() puts the new
 * mapping where the old one was. A thread that comes by meanwhile waits in the
 * page fault; once mremap() has returned, no processor knows the old pages any
 * more. A pointer to a slot never changes, and there is nothing to free.
 *
 * That does not do for the trigger queue: who has claimed a cell of the old one
 * must fill that cell. The context is therefore mapped twice. Threads show
 * themselves through one mapping, whose memory changes. They fire through the
 * other, whose address changes; who is inside says so (struct bs_member), and
 * the old one is unmapped when nobody is.
 *
 * Who reads more than a word of the policy reads its `number` before and after,
 * and begins anew where it changed.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client.h"

/* For whoever fires; a push takes less than a microsecond, unless its thread
 * waits for a processor. Half a second in all: then a debugger has stopped it. */
#define PUSH_PAUSE_NS 100000
#define PUSH_PAUSES 5000

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

bool bs_map_in_place(const void *place, const void *with, size_t bytes)
{
	if (mremap((void *)with, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
		   place) != MAP_FAILED)
		return true;
	/* Out of memory for the kernel's own bookkeeping. If it had unmapped
	 * the place before it found out, threads must still find memory there:
	 * this does nothing where something is mapped. */
	(void)mmap((void *)place, bytes, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	bs_unmap(with, bytes);
	return false;
}

const char *bs_policy_replace(struct bs_attachment *a, int fd)
{
	const char *reason;
	const struct bs_policy *p = bs_policy_map(fd, &reason);

	if (p && !bs_map_in_place(a->policy, p, BS_POLICY_BYTES))
		reason = bs_no_room;
	return reason;
}

/* What stands in a slot of the new context until it is known what its thread
 * shows: no trace has this id. Nobody finds it, since the slot has no tid. */
#define UNKNOWN 0xdf0b7a1c5e92a843ull

static void settle(uint64_t *word, uint64_t shown)
{
	uint64_t unknown = UNKNOWN;

	/* If it is something else, the thread has begun or ended since. */
	compare_and_swap(word, &unknown, shown);
}

/* The slots of the old context do not change any more. */
static void copy_slots(const struct bs_attachment *a,
		       struct bs_context_segment *to,
		       const struct bs_context_segment *from)
{
	for (uint32_t i = 0; i < a->slots_touched; i++) {
		const struct bs_thread_slot *old = &from->slots[i];
		struct bs_thread_slot *slot = &to->slots[i];

		settle(&slot->trace_hi, READ_ONCE(old->trace_hi));
		settle(&slot->trace_lo, READ_ONCE(old->trace_lo));
		store_release(&slot->tid, READ_ONCE(old->tid));
	}
}

const char *bs_context_replace(struct bs_attachment *a, int fd,
			       struct bs_context_segment **old)
{
	struct bs_context_segment *context, *queue;
	const char *reason;

	context = bs_context_map(fd, &reason);
	if (!context)
		return reason;
	queue = bs_context_map(fd, &reason);
	if (!queue) {
		bs_unmap(context, sizeof(*context));
		return reason;
	}
	for (uint32_t i = 0; i < a->slots_touched; i++) {
		WRITE_ONCE(queue->slots[i].tid, 0);
		WRITE_ONCE(queue->slots[i].trace_hi, UNKNOWN);
		WRITE_ONCE(queue->slots[i].trace_lo, UNKNOWN);
	}
	if (!bs_map_in_place(a->context, context, sizeof(*context))) {
		bs_unmap(queue, sizeof(*queue));
		return bs_no_room;
	}
	*old = a->queue;
	copy_slots(a, queue, *old);
	store_release(&a->queue, queue);
	return NULL;
}

static bool anybody_pushes(const struct bs_context_segment *queue)
{
	for (const struct bs_member *m = bs_members; m; m = m->next) {
		if (load_acquire(&m->pushing) == queue)
			return true;
	}
	return false;
}

bool bs_queue_unmap(struct bs_context_segment *queue)
{
	const struct timespec pause = {.tv_nsec = PUSH_PAUSE_NS};
	int pauses = 0;

	/* See queue_enter(). */
	full_fence();
	while (anybody_pushes(queue)) {
		if (pauses++ == PUSH_PAUSES)
			return false;
		pthread_mutex_unlock(&bs_process.lock);
		nanosleep(&pause, NULL);
		pthread_mutex_lock(&bs_process.lock);
	}
	bs_unmap(queue, sizeof(*queue));
	return true;
}
