/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that has a file descriptor, so that others can map it, or keep it. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

/* Since Linux 6.3. The first releases that know it refuse memory without it where
 * vm.memfd_noexec is 2. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008u
#endif

int memfd_new(const char *name)
{
	const unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);

	/* A kernel that does not know it. */
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, flags);
	return fd < 0 ? -errno : fd;
}

int memfd_sealed(const char *name, uint64_t bytes)
{
	int fd = memfd_new(name);
	int err;

	if (fd < 0)
		return fd;
	if (ftruncate(fd, (off_t)bytes) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)) {
		err = -errno;
		close(fd);
		return err;
	}
	return fd;
}

/* Its size, if it can be neither grown nor shrunk by anybody. */
int memfd_check(int fd, uint64_t *bytes)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0 || fstat(fd, &st))
		return -EPROTO;
	if ((seals & (F_SEAL_GROW | F_SEAL_SHRINK)) !=
	    (F_SEAL_GROW | F_SEAL_SHRINK))
		return -EPROTO;
	*bytes = (uint64_t)st.st_size;
	return 0;
}

/* Of what came back from a service manager: whether it is wrong, or we are short. */
int map_failure(void)
{
	return errno == ENOMEM || errno == EAGAIN ? -errno : -EPROTO;
}

void *map_shared(int fd, uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		return NULL;
	/* A core dump of the daemon must not hold what applications wrote. */
	(void)madvise(p, bytes, MADV_DONTDUMP);
	(void)madvise(p, bytes, MADV_DONTFORK);
	return p;
}
