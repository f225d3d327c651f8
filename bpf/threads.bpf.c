// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which threads are those of attached processes. The loader names a process by its
 * pidfd and reads an iterator over its threads; those that come later are noted when
 * they are made. So pid namespaces make no difference, and nobody scans /proc.
 */
#include "cost.h"
#include "thread.h"

LICENSE_IS("Dual BSD/GPL");

#define CLONE_THREAD 0x00010000

/* As gettid() says inside. */
static __always_inline __u32 own_tid(struct task_struct *task)
{
	struct pid *pid = READ(task, thread_pid);
	unsigned int level = READ(pid, level);
	/* An array of as many as there are levels. */
	struct upid *own = (void *)pid->numbers + level * SIZE_OF(upid);

	return READ(own, nr);
}

static __always_inline bool note(struct task_struct *task, __u32 process,
				 __u32 client)
{
	struct probes_thread *t = thread_make(task);

	if (!t)
		return false;
	/* It may have been one of ours before: nothing of that is left. */
	*t = (struct probes_thread){
		.process = process,
		.client = client,
		.tid = own_tid(task),
	};
	return true;
}

/* bcc has no such programs. */
#ifndef PROBES_BY_BCC
SEC("iter/task")
int register_threads(struct bpf_iter__task *ctx)
{
	struct probes_registration *r = only(MAP(registration));
	struct task_struct *task = ctx->task;

	if (!task || !r)
		return 0;
	r->tgid = FIELD(task, tgid);
	if (note(task, r->process, r->client))
		r->threads++;
	else
		r->failed++;
	return 0;
}

#endif

TRACEPOINT(task_newtask, new_thread, struct task_struct *task,
	   unsigned long clone_flags)
{
	struct task_struct *parent = bpf_get_current_task_btf();
	const __u16 *by_tgid = only(MAP(filter));
	struct probes_thread *of_parent;
	struct timed timed;

	if (!(clone_flags & CLONE_THREAD) || !by_tgid ||
	    !may_be_ours(by_tgid, task))
		return 0;
	timed = timed_begin(PROGRAM_new_thread);
	of_parent = thread_of(parent);
	if (of_parent && !note(task, of_parent->process, of_parent->client))
		count_map_error(&timed);
	timed_end(&timed);
	return 0;
}

/*
 * Another program begins there, which shows no traces in the memory of the one before. All
 * other threads are gone; the one that is left has the number of the first.
 */
TRACEPOINT(sched_process_exec, on_exec, struct task_struct *task, int old_pid)
{
	const __u16 *by_tgid = only(MAP(filter));
	struct timed timed;

	if (!by_tgid || !may_be_ours(by_tgid, task))
		return 0;
	timed = timed_begin(PROGRAM_on_exec);
	thread_forget(task, old_pid);
	timed_end(&timed);
	return 0;
}

/* For who has no storage that goes with the thread. */
TRACEPOINT_BCC(sched_process_exit, on_exit, struct task_struct *task)
{
	const __u16 *by_tgid = only(MAP(filter));
	struct timed timed;

	if (!by_tgid || !may_be_ours(by_tgid, task))
		return 0;
	timed = timed_begin(PROGRAM_on_exit);
	thread_forget(task, FIELD(task, pid));
	timed_end(&timed);
	return 0;
}
