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

static void add_to_filter(const struct bsp *p, uint32_t tgid, int processes)
{
	uint16_t *entry = &p->filter[tgid & (PROBES_FILTER_ENTRIES - 1)];

	WRITE_ONCE(*entry, (uint16_t)(*entry + processes));
}

/*
 * Have programs find contexts by numbers. The kernel waits after each such call until
 * no program can be at work with what was there before (RCU), some ten milliseconds,
 * however much the call has changed. So what is nobody's any more leads to a context
 * that shows nothing: the kernel deletes one at a time.
 */
static int lead_to(const struct bsp *p, const uint32_t *numbers,
		   const int *contexts, size_t count)
{
	uint32_t put = (uint32_t)count;

	if (!put || !bpf_map_update_batch(map_fd(p, "processes"), numbers,
					  contexts, &put, NULL))
		return 0;
	return -errno;
}

static int forget(struct bsp *p, const uint32_t *numbers, size_t count)
{
	int contexts[PROBES_PROCESSES_MAX];
	const uint32_t nobody = 0;

	for (size_t i = 0; i < count; i++) {
		bpf_map_update_elem(map_fd(p, "owners"), &numbers[i], &nobody,
				    BPF_ANY);
		p->processes[numbers[i]].used = false;
		contexts[i] = p->nobody;
	}
	if (count)
		forget_threads(p);
	return lead_to(p, numbers, contexts, count);
}

/* A number that nobody has. */
static int take_number(struct bsp *p)
{
	for (int number = 0; number < (int)PROBES_PROCESSES_MAX; number++) {
		if (!p->processes[number].used) {
			p->processes[number].used = true;
			return number;
		}
	}
	return -ENOSPC;
}

static int put_contexts(const struct bsp *p, const struct bsp_newcomer *some,
			size_t count)
{
	uint32_t numbers[BSP_NEWCOMERS_MAX];
	int contexts[BSP_NEWCOMERS_MAX];
	size_t put = 0;

	for (size_t i = 0; i < count; i++) {
		if (some[i].number < 0)
			continue;
		numbers[put] = (uint32_t)some[i].number;
		contexts[put++] = some[i].context;
	}
	return lead_to(p, numbers, contexts, put);
}

static int begin_to_watch(struct bsp *p, const struct bsp_newcomer *newcomer)
{
	const uint32_t owner = newcomer->client + 1;
	uint32_t number = (uint32_t)newcomer->number;
	struct process *process = &p->processes[number];
	uint32_t tgid;
	int err;

	if (bpf_map_update_elem(map_fd(p, "owners"), &number, &owner, BPF_ANY))
		return -errno;
	err = find_tgid(p, number, newcomer, &tgid);
	if (err)
		return err;
	/* From here on threads are noted as they begin, and forgotten as they end; then
	 * those that there are already. */
	add_to_filter(p, tgid, 1);
	err = note_threads(p, number, newcomer);
	if (err) {
		add_to_filter(p, tgid, -1);
		return err;
	}
	process->tgid = tgid;
	return 0;
}

void bsp_register(struct bsp *p, struct bsp_newcomer *some, size_t count)
{
	uint32_t failed[BSP_NEWCOMERS_MAX] = {};
	size_t n_failed = 0;
	int err;

	if (count > BSP_NEWCOMERS_MAX) {
		bsp_register(p, some, BSP_NEWCOMERS_MAX);
		bsp_register(p, some + BSP_NEWCOMERS_MAX,
			     count - BSP_NEWCOMERS_MAX);
		return;
	}
	for (size_t i = 0; i < count; i++)
		some[i].number = take_number(p);
	err = put_contexts(p, some, count);
	for (size_t i = 0; i < count; i++) {
		int number = some[i].number;

		if (number < 0)
			continue;
		if (!err)
			some[i].number = begin_to_watch(p, &some[i]);
		else
			some[i].number = err;
		if (some[i].number < 0)
			failed[n_failed++] = (uint32_t)number;
		else
			some[i].number = number;
	}
	forget(p, failed, n_failed);
}

int bsp_unregister(struct bsp *p, const uint32_t *numbers, size_t count)
{
	uint32_t ours[PROBES_PROCESSES_MAX] = {};
	size_t n_ours = 0;
	int err;

	for (size_t i = 0; i < count; i++) {
		uint32_t number = numbers[i];

		if (number >= PROBES_PROCESSES_MAX ||
		    !p->processes[number].used)
			continue;
		/* Here already, so that none is there twice. */
		p->processes[number].used = false;
		add_to_filter(p, p->processes[number].tgid, -1);
		ours[n_ours++] = number;
	}
	err = forget(p, ours, n_ours);
	if (!err && n_ours < count)
		err = -ENOENT;
	return err;
}
