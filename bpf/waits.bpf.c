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

LICENSE_IS("Dual BSD/GPL");

/* Who runs for shorter than this at a time is not noted as who ran instead. */
#define STINT_NS 200000ull

#define RUNNERS 4

/* Who has not run for so long is told of anew; of who runs on and on, no more than that. */
#define AWAY_NS 100000000ull
#define TOLD_NS 1000000000ull

/* Who runs for so long at once has a place at once: from so long a wait on it fires, by default. */
#define CREDIT_MAX_NS 20000000ull

enum off_why {
	OFF_BLOCKED = 0,
	OFF_PREEMPTED = 1,
	OFF_IO = 2,
	OFF_STOPPED = 3, /* by SIGSTOP, by a debugger, or frozen */
};

/* __TASK_STOPPED, __TASK_TRACED and TASK_FROZEN (linux/sched.h). */
#define STOPPED_STATES (0x4u | 0x8u | 0x8000u)

/* Frozen with its control group, in any state (linux/sched/jobctl.h). */
#define JOBCTL_TRAP_FREEZE (1ul << 23)

/* Who ran on a CPU lately, for long: how much of the time since when. */
struct runner {
	__u64 ran_ns;
	__u64 since_ns;
	__u64 until_ns;
	__u64 credit_ns; /* for so long others run before it is forgotten */
	__u64 hi, lo;
	__u32 pid, zero;
	char comm[BS_KERNEL_COMM_BYTES];
};

struct runners {
	__u32 zero;
	__u32 realtime_pid; /* who runs, if the scheduler does not tell for how long */
	__u64 realtime_since_ns;
	/* And one more: who ran last of those that have no place. */
	struct runner all[RUNNERS + 1];
};

#ifndef PROBES_BY_BCC
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct runners);
} runners SEC(".maps");
#endif

/* ------------------------------------------------------------ who ran --- */

static __always_inline struct runner *runner_of(struct runners *all, __u32 pid)
{
	for (int i = 0; i < RUNNERS; i++) {
		if (all->all[i].pid == pid)
			return &all->all[i];
	}
	return 0;
}

/* Whose place another one may have: who is away, else who has the least credit. */
static __always_inline struct runner *least_runner(struct runners *all,
						   __u64 now)
{
	struct runner *least = &all->all[0];
	__u64 least_ns = PROBES_NEVER;

	for (int i = 0; i < RUNNERS; i++) {
		struct runner *r = &all->all[i];

		if (now - r->until_ns > AWAY_NS)
			r->credit_ns = 0;
		if (r->credit_ns < least_ns) {
			least = r;
			least_ns = r->credit_ns;
		}
	}
	return least;
}

/* Who runs often is kept, however many others run in turn (Misra and Gries 1982). Of these
 * the last one is known too: perhaps somebody waits for it. */
static __always_inline struct runner *place_of(struct runners *all, __u32 pid,
					       __u64 ran_ns, __u64 now)
{
	struct runner *r = runner_of(all, pid);
	struct runner *last = &all->all[RUNNERS];

	if (r)
		return r;
	r = least_runner(all, now);
	if (r->credit_ns > ran_ns) {
		r->credit_ns -= ran_ns;
		if (last->pid != pid) {
			last->pid = pid;
			last->until_ns = 0;
		}
		return last;
	}
	if (last->pid == pid) {
		*r = *last;
		last->pid = 0;
	} else {
		r->pid = pid;
		r->until_ns = 0;
	}
	r->credit_ns = 0;
	return r;
}

static __always_inline void note_runner(struct task_struct *task, bool ours,
					__u64 ran_ns, __u64 now)
{
	struct runners *all = only(MAP(runners));
	struct runner *r;
	struct probes_thread *t;
	struct shown shown = {};

	if (!all || !FIELD(task, pid))
		return;
	r = place_of(all, FIELD(task, pid), ran_ns, now);
	/* It is another one after execve(2). */
	bpf_probe_read_kernel_str(r->comm, sizeof(r->comm), task->comm);
	t = ours ? thread_of(task) : 0;
	if (t && look(t, now, &shown)) {
		r->hi = shown.hi;
		r->lo = shown.lo;
	} else {
		r->hi = r->lo = 0;
	}
	if (now - r->until_ns > AWAY_NS) {
		r->ran_ns = r->credit_ns = 0;
		r->since_ns = now - ran_ns;
	} else if (now - r->since_ns > TOLD_NS) {
		/* Of the later half, as if it had run evenly. */
		r->since_ns += (now - r->since_ns) / 2;
		r->ran_ns /= 2;
	}
	r->ran_ns += ran_ns;
	r->credit_ns += ran_ns;
	if (r->credit_ns > CREDIT_MAX_NS)
		r->credit_ns = CREDIT_MAX_NS;
	r->until_ns = now;
}

/* SCHED_NORMAL, SCHED_BATCH and SCHED_IDLE (linux/sched.h). */
static __always_inline bool is_fair(const struct task_struct *task)
{
	return (1u << (FIELD(task, policy) & 31)) &
	       (1u << 0 | 1u << 3 | 1u << 5);
}

/* The scheduler counts it for threads that share the CPU fairly. For others we look at
 * the clock when they come. */
SUBPROGRAM(stint_of)
__u64 stint_of(struct task_struct *prev, struct task_struct *next,
	       __u64 fair_ns)
{
	bool prev_is_fair = is_fair(prev), next_is_fair = is_fair(next);
	struct runners *all;
	__u64 stint_ns, now;

	if (prev_is_fair && next_is_fair)
		return fair_ns;
	all = only(MAP(runners));
	if (!all)
		return 0;
	now = bpf_ktime_get_ns();
	stint_ns = fair_ns;
	if (!prev_is_fair)
		stint_ns = all->realtime_pid == (__u32)FIELD(prev, pid)
				   ? now - all->realtime_since_ns
				   : 0;
	all->realtime_pid = next_is_fair ? 0 : FIELD(next, pid);
	all->realtime_since_ns = now;
	return stint_ns;
}

/* In microseconds, nearly: the product of nanoseconds has no room in 64 bits. */
static __always_inline __u64 part_of(__u64 all_ns, __u64 part_ns,
				     __u64 whole_ns)
{
	return ((all_ns >> 10) * (part_ns >> 10) / ((whole_ns >> 10) + 1))
	       << 10;
}

/* Those who ran since then, which who waits did not: the one that ran longest by name,
 * all by trace. */
static __always_inline void add_runners(__u64 since_ns, const struct shown *own,
					struct bs_kernel_event *event,
					struct laterals *laterals)
{
	struct runners *all = only(MAP(runners));

	if (!all)
		return;
	for (int i = 0; i <= RUNNERS; i++) {
		struct runner *r = &all->all[i];
		__u64 ran_ns = r->ran_ns;

		if (!r->pid || r->until_ns <= since_ns)
			continue;
		/* Of what it did since before the wait, the part of it in the wait. */
		if (r->since_ns < since_ns)
			ran_ns = part_of(ran_ns, r->until_ns - since_ns,
					 r->until_ns - r->since_ns);
		if (ran_ns > event->other_ns) {
			event->other_ns = ran_ns;
			event->other_pid = r->pid;
			__builtin_memcpy(event->other_comm, r->comm,
					 sizeof(event->other_comm));
		}
		add_lateral(laterals, own, r->hi, r->lo);
	}
}

/* ------------------------------------------------------- who else asked --- */

/* Of a wait for a disk: for which one, for how much, and who else asked it. Who asked none
 * waits for what another thread has asked for; nobody knows whom. */
static __always_inline void add_disk(struct probes_thread *t,
				     const struct shown *own,
				     struct bs_kernel_event *event,
				     struct laterals *laterals)
{
	__u32 number = t->disk;
	const struct disk *disk;

	if (!number || t->disk_asked_ns + ASKED_LATELY_NS < t->off_ns ||
	    t->disk_hi != own->hi || t->disk_lo != own->lo)
		return;
	event->bytes = t->disk_bytes;
	__builtin_memcpy(event->device, t->disk_name, sizeof(event->device));
	disk = bpf_map_lookup_elem(MAP(disks), &number);
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

/* Of the task that runs. */
static __always_inline __u32 syscall_of(struct task_struct *task)
{
	void *regs = regs_of(task);
	struct pt_regs___x86 *x86 = regs;
	struct pt_regs___arm64 *arm64 = regs;

	if (HAS_FIELD(pt_regs___x86, orig_ax))
		return FIELD(x86, orig_ax);
	return FIELD(arm64, syscallno);
}

static __always_inline __u32 throttled_count(const struct task_struct *task)
{
	const struct task_group *group = FIELD(task, sched_task_group);
	__u32 count;

	if (!group)
		return 0;
	count = FIELD(group, cfs_bandwidth.nr_throttled);
	group = FIELD(group, parent);
	return group ? count + FIELD(group, cfs_bandwidth.nr_throttled) : count;
}

static __always_inline void goes_off(struct task_struct *task, __u64 now,
				     __u32 why)
{
	struct probes_thread *t = thread_of(task);

	if (!t)
		return;
	t->off_ns = now;
	t->off_why = why;
	if (why == OFF_PREEMPTED) {
		t->nr_throttled = throttled_count(task);
		return;
	}
	if (why == OFF_BLOCKED) {
		if (READ_BIT(task, in_iowait))
			t->off_why = OFF_IO;
		else if (FIELD(task, jobctl) & JOBCTL_TRAP_FREEZE)
			t->off_why = OFF_STOPPED;
	}
	t->syscall = syscall_of(task);
	t->waker_pid = 0;
	t->waker_hi = t->waker_lo = 0;
}

/* ------------------------------------------------------------ waking --- */

/* Only who is in futex(2) itself, or exits, has let go of what was waited for;
 * a timer goes off in whoever runs just then. */
static __always_inline void note_waker(struct probes_thread *woken, __u64 now,
				       const __u16 *by_tgid)
{
	struct task_struct *waker = bpf_get_current_task_btf();
	__u32 number = syscall_of(waker);
	struct probes_syscall *call =
		bpf_map_lookup_elem(MAP(syscalls), &number);
	struct probes_thread *t;
	struct shown shown = {};

	if (!call ||
	    (call->class != SYSCALL_FUTEX && call->class != SYSCALL_EXITS))
		return;
	woken->waker_pid = FIELD(waker, pid);
	bpf_probe_read_kernel_str(woken->waker_comm, sizeof(woken->waker_comm),
				  waker->comm);
	t = may_be_ours(by_tgid, waker) ? thread_of(waker) : 0;
	if (t && look(t, now, &shown)) {
		woken->waker_hi = shown.hi;
		woken->waker_lo = shown.lo;
	}
}

SUBPROGRAM(woken)
int woken(struct task_struct *task)
{
	const struct probes_settings *s = only(MAP(settings));
	const __u16 *by_tgid = only(MAP(filter));
	struct probes_syscall *call;
	struct timed timed;
	struct probes_thread *t;
	__u32 number;

	if (!by_tgid || !s || s->bypass)
		return 0;
	timed = timed_begin(PROGRAM_on_waking);
	t = thread_of(task);
	if (t) {
		t->waking_ns = bpf_ktime_get_ns();
		t->nr_throttled = throttled_count(task);
		number = t->syscall;
		call = bpf_map_lookup_elem(MAP(syscalls), &number);
		if (call && call->class == SYSCALL_FUTEX)
			note_waker(t, t->waking_ns, by_tgid);
	}
	timed_end(&timed);
	return 0;
}

TRACEPOINT(sched_waking, on_waking, struct task_struct *task)
{
	const __u16 *by_tgid = only(MAP(filter));

	if (!by_tgid || !may_be_ours(by_tgid, task))
		return 0;
	return CALL(woken)(task);
}

/* -------------------------------------------------------- coming back --- */

static __always_inline void was_not_run(const struct probes_settings *s,
					const struct shown *shown,
					struct bs_kernel_event *event,
					__u64 since_ns)
{
	struct laterals laterals = {};
	const struct probes_threshold *limits;
	__u32 kind = event->kind;

	if (kind >= BS_KERNEL_KINDS)
		return;
	limits = &s->kinds[kind];
	if (event->duration_ns < limits->record_ns &&
	    event->duration_ns < limits->fire_ns)
		return;
	if (event->kind == BS_KERNEL_RUN_QUEUE)
		add_runners(since_ns, shown, event, &laterals);
	report(s, shown, event, &laterals);
}

static __always_inline void was_blocked(const struct probes_settings *s,
					const struct shown *shown,
					struct probes_thread *t,
					struct bs_kernel_event *event)
{
	struct laterals laterals = {};
	__u32 number = t->syscall;
	const struct probes_syscall *call =
		bpf_map_lookup_elem(MAP(syscalls), &number);

	if (t->off_why == OFF_STOPPED)
		return;
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
SUBPROGRAM(was_off)
int was_off(const struct probes_settings *s, struct task_struct *task,
	    __u64 since_ns, __u64 now)
{
	struct probes_thread *t = thread_of(task);
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
	if (t->nr_throttled != throttled_count(task))
		event.kind = BS_KERNEL_CPU_THROTTLED;
	was_not_run(s, &shown, &event, since_ns);
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
	struct probes_thread *t = thread_of(task);
	__u64 since_ns;

	if (!t || !t->off_ns || t->off_ns < s->valid_since_ns)
		return;
	since_ns = t->off_ns;
	/* Woken while it was still going off the CPU: it waits since it is off. */
	if (t->off_why != OFF_PREEMPTED && t->waking_ns > since_ns)
		since_ns = t->waking_ns;
	if (now - since_ns >= s->least_unrun_ns ||
	    since_ns - t->off_ns >= s->least_blocked_ns)
		CALL(was_off)(s, task, since_ns, now);
	if (t->off_why == OFF_IO)
		t->disk_bytes = 0;
}

SUBPROGRAM(switched)
int switched(struct task_struct *prev, struct task_struct *next, __u64 stint_ns,
	     __u32 why)
{
	const struct probes_settings *s = only(MAP(settings));
	const __u16 *by_tgid = only(MAP(filter));
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
		goes_off(prev, now, why);
	if (may_be_ours(by_tgid, next))
		comes_back(s, next, now);
	timed_end(&timed);
	return 0;
}

/* What each context switch of the machine costs stands here, so it is little; what is
 * only for threads of ours is in a function of its own, with its own stack. */
TRACEPOINT(sched_switch, on_switch, bool preempt, struct task_struct *prev,
	   struct task_struct *next, unsigned int prev_state)
{
	const __u16 *by_tgid = only(MAP(filter));
	__u32 why = OFF_BLOCKED;
	__u64 stint_ns;

	if (!by_tgid)
		return 0;
	stint_ns = FIELD(prev, se.sum_exec_runtime) -
		   FIELD(prev, se.prev_sum_exec_runtime);
	if (FIELD(prev, policy) | FIELD(next, policy))
		stint_ns = CALL(stint_of)(prev, next, stint_ns);
	if (stint_ns < STINT_NS && !may_be_ours(by_tgid, prev) &&
	    !may_be_ours(by_tgid, next))
		return 0;
	if (preempt || !prev_state)
		why = OFF_PREEMPTED;
	else if (prev_state & STOPPED_STATES)
		why = OFF_STOPPED;
	return CALL(switched)(prev, next, stint_ns, why);
}
