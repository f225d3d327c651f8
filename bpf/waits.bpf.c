// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Threads that do not run: on the run queue, for want of CPU quota, for a lock, for
 * a disk, in another system call.
 *
 *             sched_switch(prev)                        sched_switch(next)
 *   running ----------------------> off the CPU ------------------------> running
 *                 off_ns               |      preempted: since off_ns
 *                                      |      woken:     since waking_ns
 *                                      | sched_waking
 *                                      +-- waking_ns, and who did it
 *
 * These are several symptoms in one file, because each program on sched_switch costs
 * every context switch of the machine some 60 ns, whatever it does.
 *
 * A thread cannot begin or end a trace while it is off the CPU. So what it shows when
 * it comes back it has shown all the time.
 */
#include "cost.h"
#include "fire.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Who runs for shorter than this at a time is not noted as who ran instead. */
#define STINT_NS 200000ull

#define RUNNERS 4

/* What a disk was asked for longer ago it has done. */
#define ASKED_LATELY_NS 1000000000ull

enum off_why {
	OFF_BLOCKED = 0,
	OFF_PREEMPTED = 1,
	OFF_IO = 2,
};

/* Who ran on a CPU lately, for long. */
struct runner {
	__u64 ran_ns;
	__u64 until_ns;
	__u64 hi, lo;
	__u32 pid, zero;
	char comm[BS_KERNEL_COMM_BYTES];
};

struct runners {
	__u32 next;
	__u32 realtime_pid; /* who runs, if the scheduler does not tell for how long */
	__u64 realtime_since_ns;
	struct runner all[RUNNERS];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct runners);
} runners SEC(".maps");

/* ------------------------------------------------------------ who ran --- */

static __always_inline void note_runner(struct task_struct *task, bool ours,
					__u64 ran_ns, __u64 now)
{
	struct runners *all = only(&runners);
	struct runner *r;
	struct thread *t;
	struct shown shown = {};

	if (!all || !task->pid)
		return;
	r = &all->all[(all->next - 1) % RUNNERS];
	if (r->pid != (__u32)task->pid) {
		r = &all->all[all->next % RUNNERS];
		all->next++;
		r->pid = task->pid;
		r->ran_ns = 0;
		bpf_probe_read_kernel_str(r->comm, sizeof(r->comm), task->comm);
	}
	t = ours ? thread_of(task) : 0;
	if (t && look(t, now, &shown)) {
		r->hi = shown.hi;
		r->lo = shown.lo;
	} else {
		r->hi = r->lo = 0;
	}
	/* One that has not run since an older wait is not to blame for that. */
	if (now - r->until_ns > 100000000ull)
		r->ran_ns = 0;
	r->ran_ns += ran_ns;
	r->until_ns = now;
}

/* SCHED_NORMAL, SCHED_BATCH and SCHED_IDLE (linux/sched.h). */
static __always_inline bool is_fair(const struct task_struct *task)
{
	return (1u << (task->policy & 31)) & (1u << 0 | 1u << 3 | 1u << 5);
}

/* The scheduler counts it for threads that share the CPU fairly. For others we look at
 * the clock when they come. */
static __noinline __u64 stint_of(struct task_struct *prev,
				 struct task_struct *next, __u64 fair_ns)
{
	bool prev_is_fair = is_fair(prev), next_is_fair = is_fair(next);
	struct runners *all;
	__u64 stint_ns, now;

	if (prev_is_fair && next_is_fair)
		return fair_ns;
	all = only(&runners);
	if (!all)
		return 0;
	now = bpf_ktime_get_ns();
	stint_ns = fair_ns;
	if (!prev_is_fair)
		stint_ns = all->realtime_pid == (__u32)prev->pid
				   ? now - all->realtime_since_ns
				   : 0;
	all->realtime_pid = next_is_fair ? 0 : next->pid;
	all->realtime_since_ns = now;
	return stint_ns;
}

/* Those who ran since then: the one that ran longest by name, all by trace. */
static __always_inline void add_runners(__u32 own_pid, __u64 since_ns,
					const struct shown *own,
					struct bs_kernel_event *event,
					struct laterals *laterals)
{
	struct runners *all = only(&runners);

	if (!all)
		return;
	for (int i = 0; i < RUNNERS; i++) {
		struct runner *r = &all->all[i];

		if (!r->pid || r->pid == own_pid || r->until_ns <= since_ns)
			continue;
		if (r->ran_ns > event->other_ns) {
			event->other_ns = r->ran_ns;
			event->other_pid = r->pid;
			__builtin_memcpy(event->other_comm, r->comm,
					 sizeof(event->other_comm));
		}
		/* Of a stint that began before the wait, its part in the wait. */
		if (event->other_ns > event->duration_ns)
			event->other_ns = event->duration_ns;
		add_lateral(laterals, own, r->hi, r->lo);
	}
}

/* ------------------------------------------------------- who else asked --- */

/* Of a wait for a disk: for which one, for how much, and who else asked it. */
static __always_inline void add_disk(struct thread *t, const struct shown *own,
				     struct bs_kernel_event *event,
				     struct laterals *laterals)
{
	__u32 number = t->disk;
	const struct disk *disk;

	if (!number)
		return;
	event->bytes = t->disk_bytes;
	__builtin_memcpy(event->device, t->disk_name, sizeof(event->device));
	disk = bpf_map_lookup_elem(&disks, &number);
	if (!disk)
		return;
	for (int i = 0; i < DISK_USERS; i++) {
		/* Before the wait, and not long before: what it then waits behind. */
		if (disk->users[i].asked_ns + ASKED_LATELY_NS >= t->off_ns)
			add_lateral(laterals, own, disk->users[i].hi,
				    disk->users[i].lo);
	}
}

/* ---------------------------------------------------------- going off --- */

/* Read as they stand: the verifier knows what these are, so there is no call. */
static __always_inline __u32 syscall_of(struct task_struct *task)
{
	void *regs = (void *)bpf_task_pt_regs(task);
	struct pt_regs___x86 *x86 = regs;
	struct pt_regs___arm64 *arm64 = regs;

	if (bpf_core_field_exists(x86->orig_ax))
		return x86->orig_ax;
	return arm64->syscallno;
}

static __always_inline __u32 throttled_count(const struct task_struct *task)
{
	const struct task_group *group = task->sched_task_group;
	__u32 count;

	if (!group)
		return 0;
	count = group->cfs_bandwidth.nr_throttled;
	group = group->parent;
	return group ? count + group->cfs_bandwidth.nr_throttled : count;
}

static __always_inline void goes_off(struct task_struct *task, __u64 now,
				     bool runnable)
{
	struct thread *t = thread_of(task);

	if (!t)
		return;
	t->off_ns = now;
	if (runnable) {
		t->off_why = OFF_PREEMPTED;
		t->nr_throttled = throttled_count(task);
		return;
	}
	t->off_why = BPF_CORE_READ_BITFIELD(task, in_iowait) ? OFF_IO
							     : OFF_BLOCKED;
	t->syscall = syscall_of(task);
	t->waker_pid = 0;
	t->waker_hi = t->waker_lo = 0;
}

/* ------------------------------------------------------------ waking --- */

/* Only who is in futex(2) itself, or exits, has let go of what was waited for;
 * a timer goes off in whoever runs just then. */
static __always_inline void note_waker(struct thread *woken, __u64 now,
				       const __u16 *by_tgid)
{
	struct task_struct *waker = bpf_get_current_task_btf();
	__u32 number = syscall_of(waker);
	struct probes_syscall *call = bpf_map_lookup_elem(&syscalls, &number);
	struct thread *t;
	struct shown shown = {};

	if (!call ||
	    (call->class != SYSCALL_FUTEX && call->class != SYSCALL_EXITS))
		return;
	woken->waker_pid = waker->pid;
	bpf_probe_read_kernel_str(woken->waker_comm, sizeof(woken->waker_comm),
				  waker->comm);
	t = may_be_ours(by_tgid, waker) ? thread_of(waker) : 0;
	if (t && look(t, now, &shown)) {
		woken->waker_hi = shown.hi;
		woken->waker_lo = shown.lo;
	}
}

static __noinline int woken(struct task_struct *task)
{
	const struct probes_settings *s = only(&settings);
	const __u16 *by_tgid = only(&filter);
	struct probes_syscall *call;
	struct timed timed;
	struct thread *t;
	__u32 number;

	if (!by_tgid || !s || s->bypass)
		return 0;
	timed = timed_begin(PROGRAM_on_waking);
	t = thread_of(task);
	if (t) {
		t->waking_ns = bpf_ktime_get_ns();
		number = t->syscall;
		call = bpf_map_lookup_elem(&syscalls, &number);
		if (call && call->class == SYSCALL_FUTEX)
			note_waker(t, t->waking_ns, by_tgid);
	}
	timed_end(&timed);
	return 0;
}

SEC("tp_btf/sched_waking")
int BPF_PROG(on_waking, struct task_struct *task)
{
	const __u16 *by_tgid = only(&filter);

	if (!by_tgid || !may_be_ours(by_tgid, task))
		return 0;
	return woken(task);
}

/* -------------------------------------------------------- coming back --- */

static __always_inline void was_not_run(const struct probes_settings *s,
					const struct shown *shown,
					struct bs_kernel_event *event,
					__u32 own_pid, __u64 since_ns)
{
	struct laterals laterals = {};

	if (event->duration_ns <
		    s->kinds[event->kind % BS_KERNEL_KINDS].record_ns &&
	    event->duration_ns <
		    s->kinds[event->kind % BS_KERNEL_KINDS].fire_ns)
		return;
	if (event->kind == BS_KERNEL_RUN_QUEUE)
		add_runners(own_pid, since_ns, shown, event, &laterals);
	report(s, shown, event, &laterals);
}

static __always_inline void was_blocked(const struct probes_settings *s,
					const struct shown *shown,
					struct thread *t,
					struct bs_kernel_event *event)
{
	struct laterals laterals = {};
	__u32 number = t->syscall;
	const struct probes_syscall *call =
		bpf_map_lookup_elem(&syscalls, &number);

	if (call) {
		event->number = number;
		__builtin_memcpy(event->name, call->name, sizeof(call->name));
	}
	if (t->off_why == OFF_IO)
		event->kind = BS_KERNEL_IO_WAIT;
	else if (call && call->class == SYSCALL_FUTEX)
		event->kind = BS_KERNEL_LOCK_WAIT;
	else if (call && call->class == SYSCALL_BLOCKS)
		event->kind = BS_KERNEL_BLOCKED;
	else
		return;
	if (event->kind == BS_KERNEL_IO_WAIT)
		add_disk(t, shown, event, &laterals);
	if (event->kind == BS_KERNEL_LOCK_WAIT && t->waker_pid) {
		event->other_pid = t->waker_pid;
		__builtin_memcpy(event->other_comm, t->waker_comm,
				 sizeof(event->other_comm));
		add_lateral(&laterals, shown, t->waker_hi, t->waker_lo);
	}
	report(s, shown, event, &laterals);
}

/* It was off the CPU for long enough to be told of. */
static __noinline int was_off(const struct probes_settings *s,
			      struct task_struct *task, __u64 since_ns,
			      __u64 now)
{
	struct thread *t = thread_of(task);
	struct bs_kernel_event event = {};
	struct shown shown = {};

	if (!t || !look(t, now, &shown))
		return 0;
	event.time_ns = now;
	event.client = t->client;
	event.tid = t->tid;
	event.cpu = bpf_get_smp_processor_id();
	event.number = BS_KERNEL_NO_NUMBER;
	event.kind = BS_KERNEL_RUN_QUEUE;
	event.duration_ns = now - since_ns;
	if (t->off_why == OFF_PREEMPTED &&
	    t->nr_throttled != throttled_count(task))
		event.kind = BS_KERNEL_CPU_THROTTLED;
	was_not_run(s, &shown, &event, task->pid, since_ns);
	if (t->off_why == OFF_PREEMPTED)
		return 0;
	event.time_ns = since_ns;
	event.duration_ns = since_ns - t->off_ns;
	event.other_pid = 0;
	event.other_ns = 0;
	__builtin_memset(event.other_comm, 0, sizeof(event.other_comm));
	was_blocked(s, &shown, t, &event);
	return 0;
}

static __always_inline void comes_back(const struct probes_settings *s,
				       struct task_struct *task, __u64 now)
{
	struct thread *t = thread_of(task);
	__u64 since_ns;

	if (!t || !t->off_ns || t->off_ns < s->valid_since_ns)
		return;
	since_ns = t->off_ns;
	/* Woken while it was still going off the CPU: it waits since it is off. */
	if (t->off_why != OFF_PREEMPTED && t->waking_ns > since_ns)
		since_ns = t->waking_ns;
	if (now - since_ns >= s->least_unrun_ns ||
	    since_ns - t->off_ns >= s->least_blocked_ns)
		was_off(s, task, since_ns, now);
	if (t->off_why == OFF_IO)
		t->disk_bytes = 0;
}

static __noinline int switched(struct task_struct *prev,
			       struct task_struct *next, __u64 stint_ns,
			       bool is_runnable)
{
	const struct probes_settings *s = only(&settings);
	const __u16 *by_tgid = only(&filter);
	struct timed timed;
	__u64 now;
	bool off;

	if (!s || !by_tgid || s->bypass)
		return 0;
	timed = timed_begin(PROGRAM_on_switch);
	now = bpf_ktime_get_ns();
	off = may_be_ours(by_tgid, prev);
	if (stint_ns >= STINT_NS)
		note_runner(prev, off, stint_ns, now);
	if (off)
		goes_off(prev, now, is_runnable);
	if (may_be_ours(by_tgid, next))
		comes_back(s, next, now);
	timed_end(&timed);
	return 0;
}

/* What each context switch of the machine costs stands here, so it is little; what is
 * only for threads of ours is in a function of its own, with its own stack. */
SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch, bool preempt, struct task_struct *prev,
	     struct task_struct *next, unsigned int prev_state)
{
	const __u16 *by_tgid = only(&filter);
	__u64 stint_ns;

	if (!by_tgid)
		return 0;
	stint_ns = prev->se.sum_exec_runtime - prev->se.prev_sum_exec_runtime;
	if (prev->policy | next->policy)
		stint_ns = stint_of(prev, next, stint_ns);
	if (stint_ns < STINT_NS && !may_be_ours(by_tgid, prev) &&
	    !may_be_ours(by_tgid, next))
		return 0;
	return switched(prev, next, stint_ns, preempt || !prev_state);
}
