/* SPDX-License-Identifier: Apache-2.0 */
/* Which processes are ours (bpf/threads.bpf.c, bpf/thread.h). */
#include <errno.h>
#include <unistd.h>

#include "internal.h"

size_t bsp_context_bytes(void)
{
	return sizeof(struct bs_context_segment);
}

int bsp_context(void)
{
	LIBBPF_OPTS(bpf_map_create_opts, options, .map_flags = BPF_F_MMAPABLE);

	return bpf_map_create(BPF_MAP_TYPE_ARRAY, "bs_context",
			      sizeof(uint32_t),
			      sizeof(struct bs_context_segment), 1, &options);
}

static uint16_t *filter_of(const struct bsp *p, uint32_t tgid)
{
	return &p->filter[tgid & (PROBES_FILTER_ENTRIES - 1)];
}

/* Have the iterator note all threads that the process has now. */
static int note_threads(struct bsp *p, uint32_t number, uint32_t client,
			int pidfd)
{
	union bpf_iter_link_info info = {.task = {.pid_fd = (uint32_t)pidfd}};
	LIBBPF_OPTS(bpf_iter_attach_opts, options, .link_info = &info,
		    .link_info_len = sizeof(info));
	struct bpf_program *program = bpf_object__find_program_by_name(
		p->base.bpf, "register_threads");
	struct bpf_link *link;
	char nothing[64];
	int fd, err = 0;
	ssize_t got;

	p->registration->process = number;
	p->registration->client = client;
	p->registration->threads = p->registration->failed = 0;
	link = bpf_program__attach_iter(program, &options);
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

int bsp_register(struct bsp *p, uint32_t client, int pidfd, int context)
{
	int fd = map_fd(p, "processes");
	const uint32_t owner = client + 1;
	struct process *process;
	uint32_t number;
	int err;

	for (number = 0; number < PROBES_PROCESSES_MAX; number++) {
		if (!p->processes[number].used)
			break;
	}
	if (number == PROBES_PROCESSES_MAX)
		return -ENOSPC;
	process = &p->processes[number];
	if (bpf_map_update_elem(fd, &number, &context, BPF_ANY) ||
	    bpf_map_update_elem(map_fd(p, "owners"), &number, &owner, BPF_ANY))
		return -errno;
	err = note_threads(p, number, client, pidfd);
	if (err) {
		bpf_map_delete_elem(fd, &number);
		return err;
	}
	process->used = true;
	process->tgid = p->registration->tgid;
	WRITE_ONCE(*filter_of(p, process->tgid),
		   *filter_of(p, process->tgid) + 1);
	/* Those that began since then: from here on they are noted as they do. */
	note_threads(p, number, client, pidfd);
	return (int)number;
}

int bsp_unregister(struct bsp *p, int number)
{
	struct process *process;
	uint32_t key = (uint32_t)number;
	const uint32_t nobody = 0;

	if (number < 0 || key >= PROBES_PROCESSES_MAX ||
	    !p->processes[key].used)
		return -ENOENT;
	process = &p->processes[key];
	WRITE_ONCE(*filter_of(p, process->tgid),
		   *filter_of(p, process->tgid) - 1);
	process->used = false;
	bpf_map_update_elem(map_fd(p, "owners"), &key, &nobody, BPF_ANY);
	return bpf_map_delete_elem(map_fd(p, "processes"), &key) ? -errno : 0;
}
