/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which threads a process has, told to the programs: by an iterator of theirs
 * (bpf/threads.bpf.c); or, since bcc can have none, as /proc shows them.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "complaints.h"
#include "internal.h"

/* -------------------------------------------------------- by iterator --- */

static struct bpf_link *attach_iterator(const struct bsp *p,
					union bpf_iter_link_info *info)
{
	LIBBPF_OPTS(bpf_iter_attach_opts, options, .link_info = info,
		    .link_info_len = sizeof(*info));

	return bpf_program__attach_iter(
		bpf_object__find_program_by_name(p->base.bpf,
						 "register_threads"),
		&options);
}

/* Have the iterator note all threads that the process has now. */
static int note_by_iterator(struct bsp *p, uint32_t number, uint32_t client,
			    int pidfd)
{
	union bpf_iter_link_info info = {.task = {.pid_fd = (uint32_t)pidfd}};
	struct bpf_link *link;
	char nothing[64];
	int fd, err = 0;
	ssize_t got;

	p->registration->process = number;
	p->registration->client = client;
	p->registration->threads = p->registration->failed = 0;
	link = attach_iterator(p, &info);
	if (!link)
		return -errno;
	fd = bpf_iter_create(bpf_link__fd(link));
	if (fd < 0) {
		err = fd;
		goto out;
	}
	do {
		got = read(fd, nothing, sizeof(nothing));
	} while (got > 0 || (got < 0 && errno == EINTR));
	if (got < 0)
		err = -errno;
	close(fd);
	if (!err && !p->registration->threads)
		err = p->registration->failed ? -ENOMEM : -ESRCH;
out:
	bpf_link__destroy(link);
	return err;
}

/* ------------------------------------------------------------ by /proc --- */

/* PROC_PID_INIT_INO of the kernel (linux/proc_ns.h). */
#define FIRST_PID_NAMESPACE 0xeffffffcu

static int require_first_pid_namespace(void)
{
	struct stat own;

	if (stat("/proc/self/ns/pid", &own))
		return -errno;
	if (own.st_ino == FIRST_PID_NAMESPACE)
		return 0;
	complaints_say(
		"bcc's programs know threads by their numbers in the "
		"machine's own pid namespace, and this process is in "
		"another one; take the loader `core`");
	return -EOPNOTSUPP;
}

/* The last number in a line of a file of /proc that begins so; 0: there is none. */
static uint32_t last_number(const char *path, const char *name)
{
	char line[256], *number = NULL;
	FILE *file = fopen(path, "re");
	long found = 0;

	if (!file)
		return 0;
	while (!number && fgets(line, sizeof(line), file)) {
		if (!strncmp(line, name, strlen(name)))
			number = strrchr(line, '\t');
	}
	fclose(file);
	if (number)
		found = strtol(number, NULL, 10);
	return found > 0 ? (uint32_t)found : 0;
}

/* 0: it is gone, or not to be seen from here. */
static uint32_t tgid_of(int pidfd)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", pidfd);
	return last_number(path, "Pid:");
}

static int note_thread(struct bsp *p, uint32_t tgid, uint32_t pid,
		       struct probes_thread *thread)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%u/task/%u/status", tgid, pid);
	thread->tid = last_number(path, "NSpid:");
	if (!thread->tid) /* it ended meanwhile */
		return 0;
	if (bpf_map_update_elem(map_fd(p, "threads_by_pid"), &pid, thread,
				BPF_ANY))
		return -errno;
	if (!access(path, F_OK))
		return 1;
	/* It ended before it was noted, so nobody forgets it. */
	bpf_map_delete_elem(map_fd(p, "threads_by_pid"), &pid);
	return 0;
}

static int note_by_proc(struct bsp *p, uint32_t number, uint32_t client,
			int pidfd)
{
	struct probes_thread thread = {.process = number, .client = client};
	const struct dirent *entry;
	uint32_t tgid = tgid_of(pidfd);
	int noted = 0, err = 0;
	char path[64];
	DIR *threads;

	snprintf(path, sizeof(path), "/proc/%u/task", tgid);
	threads = tgid ? opendir(path) : NULL;
	/* It is there, but /proc hides it (hidepid of proc(5)). */
	if (!threads)
		return tgid_of(pidfd) ? -EACCES : -ESRCH;
	while (err >= 0 && (entry = readdir(threads))) {
		uint32_t pid = (uint32_t)strtoul(entry->d_name, NULL, 10);

		if (!pid)
			continue;
		err = note_thread(p, tgid, pid, &thread);
		noted += err > 0;
	}
	closedir(threads);
	if (err < 0)
		return err;
	/* Who has come by its number since is nobody of ours. */
	return noted && tgid_of(pidfd) ? 0 : -ESRCH;
}

/* -------------------------------------------------------------- either --- */

int try_to_note_threads(struct bsp *p)
{
	union bpf_iter_link_info info = {};
	struct bpf_link *link;
	int self, err = 0;

	if (p->loader == BSP_BCC)
		return require_first_pid_namespace();
	/* Iterators over the threads of one process are of Linux 6.1. */
	self = (int)syscall(SYS_pidfd_open, getpid(), 0);
	if (self < 0)
		return -errno;
	info.task.pid_fd = (uint32_t)self;
	link = attach_iterator(p, &info);
	if (!link)
		err = -errno;
	bpf_link__destroy(link);
	close(self);
	return err;
}

int find_tgid(struct bsp *p, uint32_t number,
	      const struct bsp_newcomer *newcomer, uint32_t *tgid)
{
	int err;

	if (p->loader == BSP_BCC) {
		*tgid = tgid_of(newcomer->pidfd);
		return *tgid ? 0 : -ESRCH;
	}
	/* The number that it has here may not be the kernel's own. */
	err = note_by_iterator(p, number, newcomer->client, newcomer->pidfd);
	*tgid = p->registration->tgid;
	return err;
}

int note_threads(struct bsp *p, uint32_t number,
		 const struct bsp_newcomer *newcomer)
{
	if (p->loader == BSP_BCC)
		return note_by_proc(p, number, newcomer->client,
				    newcomer->pidfd);
	return note_by_iterator(p, number, newcomer->client, newcomer->pidfd);
}

/* What goes with the thread goes by itself. */
void forget_threads(struct bsp *p)
{
	int fd = map_fd(p, "threads_by_pid");
	struct probes_thread thread;
	uint32_t pid, next;
	int err;

	if (p->loader != BSP_BCC)
		return;
	err = bpf_map_get_next_key(fd, NULL, &next);
	while (!err) {
		pid = next;
		err = bpf_map_get_next_key(fd, &pid, &next);
		if (!bpf_map_lookup_elem(fd, &pid, &thread) &&
		    (thread.process >= PROBES_PROCESSES_MAX ||
		     !p->processes[thread.process].used))
			bpf_map_delete_elem(fd, &pid);
	}
}
