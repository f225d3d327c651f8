/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk that forgets what was not synced, for LD_PRELOAD.
 *
 * Of each file in the directory BACKSIGHT_DISK, what it holds when it is synced is copied into
 * BACKSIGHT_DISK_SYNCED; a name that is gone goes there when the directory is synced. So whoever
 * kills the process and looks at the copies sees what a power cut would have left, and the files
 * themselves are what else the disk may have written by then.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

static int copy(const char *from, const char *to)
{
	char beside[PATH_MAX];
	int in, out, error = -1;
	ssize_t n;

	if (snprintf(beside, sizeof(beside), "%s.new", to) >=
	    (int)sizeof(beside))
		return -1;
	in = open(from, O_RDONLY | O_CLOEXEC);
	if (in < 0)
		return -1;
	out = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (out >= 0) {
		do
			n = sendfile(out, in, NULL, 1 << 20);
		while (n > 0);
		error = n < 0 ? -1 : rename(beside, to);
		close(out);
	}
	close(in);
	return error;
}

static int forget_names(const char *disk, const char *synced)
{
	char at[PATH_MAX], kept[PATH_MAX];
	struct dirent *entry;
	DIR *names = opendir(synced);

	if (!names)
		return -1;
	while ((entry = readdir(names))) {
		if (entry->d_name[0] == '.')
			continue;
		snprintf(at, sizeof(at), "%s/%s", disk, entry->d_name);
		snprintf(kept, sizeof(kept), "%s/%s", synced, entry->d_name);
		if (access(at, F_OK) < 0 && errno == ENOENT)
			unlink(kept);
	}
	closedir(names);
	return 0;
}

static int keep(int fd)
{
	const char *disk = getenv("BACKSIGHT_DISK");
	const char *synced = getenv("BACKSIGHT_DISK_SYNCED");
	char link[64], path[PATH_MAX], kept[PATH_MAX];
	size_t length = disk ? strlen(disk) : 0;
	ssize_t n;

	if (!disk || !synced)
		return 0;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	n = readlink(link, path, sizeof(path) - 1);
	if (n < 0)
		return -1;
	path[n] = 0;
	if (strcmp(path, disk) == 0)
		return forget_names(disk, synced);
	if (strncmp(path, disk, length) != 0 || path[length] != '/' ||
	    strchr(path + length + 1, '/'))
		return 0;
	if (snprintf(kept, sizeof(kept), "%s%s", synced, path + length) >=
	    (int)sizeof(kept))
		return -1;
	return copy(path, kept);
}

int fsync(int fd)
{
	return keep(fd);
}

int fdatasync(int fildes)
{
	return keep(fildes);
}
