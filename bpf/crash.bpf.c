// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * A process is about to end by a signal that it does not handle: one trigger, with all
 * traces that are open on its threads. The pool keeps what it wrote.
 */
#include "cost.h"
#include "fire.h"

LICENSE_IS("Dual BSD/GPL");

#define BIT(signal) (1ull << (signal))

/* By SIGHUP, SIGINT, SIGPIPE and SIGTERM processes end as they are meant to (signal(7);
 * the same on x86 and arm64). */
#define MEANT (BIT(1) | BIT(2) | BIT(13) | BIT(15))

/* SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG and SIGWINCH end nobody. */
#define HARMLESS                                                               \
	(BIT(17) | BIT(18) | BIT(19) | BIT(20) | BIT(21) | BIT(22) | BIT(23) | \
	 BIT(28))

#define SIGKILL 9
#define SIGRTMAX 64

/* linux/sched/signal.h: the first process of a pid namespace, which the kernel lets go on.
 * Where the kernel itself wants its end, this bit is gone by then. */
#define SIGNAL_UNKILLABLE 0x40

/*
 * By which signal the process ends. The kernel ends threads by a SIGKILL of its own
 * where another one has said so: exit_group(2), execve(2), a signal that is fatal. Of
 * which it is then stands with the process.
 */
static __always_inline __u32 ends_by(struct task_struct *task, int signal)
{
	if (signal != SIGKILL)
		return signal;
	if (READ(task, signal, group_exec_task))
		return 0;
	return READ(task, signal, group_exit_code) & 0x7f;
}

static __always_inline bool is_fatal(struct task_struct *task, __u32 signal,
				     struct k_sigaction *action)
{
	/* The last one, SIGRTMAX, has no bit of its own here. */
	if (!signal || signal > SIGRTMAX ||
	    (signal < SIGRTMAX && (MEANT | HARMLESS) & BIT(signal)) ||
	    READ(action, sa.sa_handler))
		return false;
	return signal == SIGKILL ||
	       !(READ(task, signal, flags) & SIGNAL_UNKILLABLE);
}

/* All its threads come by. */
static __always_inline bool is_first(__u32 process, __u32 tgid)
{
	__u32 *of = bpf_map_lookup_elem(MAP(crashed), &process);
	__u32 before;

	if (!of)
		return false;
	before = READ_ONCE(*of);
	return before != tgid && compare_and_swap(of, &before, tgid);
}

/* The traces that are open on threads of a process, but one: as many as a group may have. */
struct open_traces {
	struct bs_context_segment *context;
	struct bs_trigger_cell *cell;
	__u64 hi, lo; /* that one */
	__u32 count;
};

/* By bpf_loop(): the verifier would go through all ways of 256 rounds. */
LOOP_BODY(add_open)
long add_open(__u32 i, struct open_traces *open)
{
	const struct bs_thread_slot *slot =
		&open->context->slots[i % BS_CONTEXT_SLOTS];
	__u64 hi = READ_ONCE(slot->trace_hi), lo = READ_ONCE(slot->trace_lo);
	__u32 count = open->count;

	if (!(hi | lo) || !READ_ONCE(slot->tid) ||
	    (hi == open->hi && lo == open->lo))
		return 0;
	if (count >= BS_CELL_LATERALS)
		return 1;
	open->cell->laterals[count].hi = hi;
	open->cell->laterals[count].lo = lo;
	open->count = count + 1;
	return 0;
}

/* Whose trace it is, where the thread that crashes has none: any that is open. */
LOOP_BODY(find_open)
long find_open(__u32 i, struct shown *s)
{
	const struct bs_thread_slot *slot =
		&s->context->slots[i % BS_CONTEXT_SLOTS];

	s->hi = READ_ONCE(slot->trace_hi);
	s->lo = READ_ONCE(slot->trace_lo);
	return (s->hi | s->lo) && READ_ONCE(slot->tid);
}

static __always_inline void crashes(const struct probes_settings *settings_now,
				    struct task_struct *task,
				    struct probes_thread *t, __u32 signal)
{
	const struct probes_threshold *limits =
		&settings_now->kinds[BS_KERNEL_CRASH];
	struct bs_kernel_event event = {
		.time_ns = bpf_ktime_get_ns(),
		.kind = BS_KERNEL_CRASH,
		.number = signal,
		.client = t->client,
		.tid = t->tid,
		.cpu = bpf_get_smp_processor_id(),
	};
	struct open_traces open = {};
	struct bs_trigger_cell *cell;
	struct shown shown = {};
	__u32 position = 0;

	if (!look(t, event.time_ns, &shown)) {
		if (!shown.context)
			return;
		LOOP(BS_CONTEXT_SLOTS, find_open, &shown);
		if (!(shown.hi | shown.lo))
			return;
	}
	if (READ(task, signal, oom_mm))
		__builtin_memcpy(event.name, "out of memory",
				 sizeof("out of memory"));
	if (limits->record_ns != PROBES_NEVER)
		CALL(record)(shown.hi, shown.lo, &event);
	if (limits->fire_ns == PROBES_NEVER)
		return;
	cell = bs_cell_claim(shown.context, CLAIM_ROUNDS, &position);
	if (cell) {
		cell_fill(cell, &shown, limits->name, &event);
		open.context = shown.context;
		open.cell = cell;
		open.hi = shown.hi;
		open.lo = shown.lo;
		LOOP(BS_CONTEXT_SLOTS, add_open, &open);
		cell->n_laterals = open.count;
	}
	cell_close(shown.context, cell, position, event.kind);
}

TRACEPOINT(signal_deliver, on_signal, int signal, void *info,
	   struct k_sigaction *action)
{
	const struct probes_settings *settings_now = only(MAP(settings));
	struct task_struct *task = bpf_get_current_task_btf();
	const __u16 *by_tgid = only(MAP(filter));
	struct timed timed;
	struct probes_thread *t;
	__u32 fatal;

	if (!settings_now || settings_now->bypass || !by_tgid ||
	    !may_be_ours(by_tgid, task))
		return 0;
	fatal = ends_by(task, signal);
	if (!is_fatal(task, fatal, action))
		return 0;
	timed = timed_begin(PROGRAM_on_signal);
	t = thread_of(task);
	if (t && is_first(t->process, FIELD(task, tgid)))
		crashes(settings_now, task, t, fatal);
	timed_end(&timed);
	return 0;
}
