// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which threads are those of attached processes. The loader names a process by its
 * pidfd and reads an iterator over its threads; those that come later are noted when
 * they are made. So pid namespaces make no difference, and nobody scans /proc.
 */
#include "cost.h"
#include "thread.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define CLONE_THREAD 0x00010000

/* As gettid() says inside. */
static __always_inline __u32 own_tid(struct task_struct *task)
{
	struct pid *pid = BPF_CORE_READ(task, thread_pid);
	unsigned int level = BPF_CORE_READ(pid, level);
	unsigned long at = bpf_core_field_offset(struct pid, numbers) +
			   level * bpf_core_type_size(struct upid) +
			   bpf_core_field_offset(struct upid, nr);
	int nr = 0;

	bpf_probe_read_kernel(&nr, sizeof(nr), (char *)pid + at);
	return nr;
}

static __always_inline bool note(struct task_struct *task, __u32 process,
				 __u32 client)
{
	struct thread *t = bpf_task_storage_get(&threads, task, 0,
						BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (!t)
		return false;
	t->process = process;
	t->client = client;
	t->tid = own_tid(task);
	/* It may have been one of ours before, and was not looked at since. */
	t->off_ns = 0;
	t->disk = 0;
	return true;
}

SEC("iter/task")
int register_threads(struct bpf_iter__task *ctx)
{
	struct probes_registration *r = only(&registration);
	struct task_struct *task = ctx->task;

	if (!task || !r)
		return 0;
	r->tgid = task->tgid;
	if (note(task, r->process, r->client))
		r->threads++;
	else
		r->failed++;
	return 0;
}

SEC("tp_btf/task_newtask")
int BPF_PROG(new_thread, struct task_struct *task, unsigned long clone_flags)
{
	struct task_struct *parent = bpf_get_current_task_btf();
	const __u16 *by_tgid = only(&filter);
	struct thread *of_parent;
	struct timed timed;

	if (!(clone_flags & CLONE_THREAD) || !by_tgid ||
	    !may_be_ours(by_tgid, task))
		return 0;
	timed = timed_begin(PROGRAM_new_thread);
	of_parent = thread_of(parent);
	if (of_parent)
		note(task, of_parent->process, of_parent->client);
	timed_end(&timed);
	return 0;
}
