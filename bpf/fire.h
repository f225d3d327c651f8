/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a probe does with what it saw of a trace: write it into the trace, and fire.
 *
 * Records go through a ring to the loader, which writes them into the pool as any
 * application writes its own. Triggers go into the queue of the process whose trace
 * it is. Each is limited: a trace fires once for the same within a time, and each
 * CPU so often for each trigger.
 */
#ifndef BPF_FIRE_H
#define BPF_FIRE_H

#include "abi/trigger_queue.h"
#include "thread.h"

/* Traces that go along: those that the kernel can name at once. */
#define LATERALS_MAX 4

/* More than there are CPUs that push into one queue at the same moment. */
#define CLAIM_ROUNDS 32

struct laterals {
	__u32 count;
	struct bs_cell_trace traces[LATERALS_MAX];
};

#define COUNT(kind, what)                                                      \
	do {                                                                   \
		__u32 kind_ = (kind);                                          \
		struct probes_counts *counts_ =                                \
			bpf_map_lookup_elem(MAP(counts), &kind_);              \
		if (counts_)                                                   \
			counts_->what++;                                       \
	} while (0)

/* Another trace than the own; of more than there is room for, the first. */
static __always_inline void add_lateral(struct laterals *laterals,
					const struct shown *own, __u64 hi,
					__u64 lo)
{
	if (!(hi | lo) || (hi == own->hi && lo == own->lo) ||
	    laterals->count >= LATERALS_MAX)
		return;
	laterals->traces[laterals->count].hi = hi;
	laterals->traces[laterals->count].lo = lo;
	laterals->count++;
}

struct used {
	__u32 namespace, device;
	__u16 port, is_crumb;
};

/* False: the ring is full. used: NULL, but with PROBES_USE. */
static __always_inline bool send_record(const struct shown *s,
					const struct bs_kernel_event *event,
					const struct used *used)
{
	struct probes_record *r =
		bpf_ringbuf_reserve(MAP(records), sizeof(*r), 0);

	if (!r)
		return false;
	r->trace_hi = s->hi;
	r->trace_lo = s->lo;
	r->event = *event;
	r->namespace = used ? used->namespace : 0;
	r->device = used ? used->device : 0;
	r->port = used ? used->port : 0;
	r->is_crumb = used ? used->is_crumb : 0;
	r->zero[0] = r->zero[1] = 0;
	/* Its reader comes by itself. */
	bpf_ringbuf_submit(r, BPF_RB_NO_WAKEUP);
	return true;
}

/* (A function that the verifier looks at by itself: inlined, its ends multiply with all
 * that comes after.) */
SUBPROGRAM(record)
int record(__u64 hi, __u64 lo, struct bs_kernel_event *event)
{
	const struct shown s = {.hi = hi, .lo = lo};

	if (!event)
		return 0;
	if (send_record(&s, event, 0))
		COUNT(event->kind, recorded);
	else
		COUNT(event->kind, record_lost);
	return 0;
}

/* Where it stands that something was done for a trace; table: recent, or one like it. */
static __always_inline struct recent *recent_of(void *table, __u64 what)
{
	__u32 place = (what >> 40) % PROBES_RECENT_ENTRIES;

	return bpf_map_lookup_elem(table, &place);
}

/* So that the kinds of a trace have places of their own. (The factors are those of
 * splitmix64.) */
static __always_inline __u64 mixed(__u64 trace, __u32 kind)
{
	return (trace + kind * 0xbf58476d1ce4e5b9ull) * 0x9e3779b97f4a7c15ull;
}

/* Another thread of the trace, or this one a moment ago, may have done the same. */
static __always_inline bool done_lately(void *table, __u64 what, __u64 now,
					__u64 within_ns)
{
	const struct recent *r = recent_of(table, what);

	return r && r->what == what && now - r->done_ns < within_ns;
}

static __always_inline void note_done(void *table, __u64 what, __u64 now)
{
	struct recent *r = recent_of(table, what);

	if (r) {
		r->what = what;
		r->done_ns = now;
	}
}

/* The generic cell rate algorithm (ITU-T I.371): one word says until when the rate
 * is used up. */
static __always_inline bool may_fire(const struct probes_threshold *limits,
				     __u32 kind, __u64 now)
{
	__u64 *until = bpf_map_lookup_elem(MAP(used_until), &kind);
	__u64 from;

	if (!until)
		return false;
	from = *until > now ? *until : now;
	if (from - now > limits->burst_ns)
		return false;
	*until = from + limits->interval_ns;
	return true;
}

static __always_inline void cell_fill(struct bs_trigger_cell *cell,
				      const struct shown *s, const char *name,
				      const struct bs_kernel_event *event)
{
	cell->source = BS_TRIGGER_KERNEL;
	cell->trace_hi = s->hi;
	cell->trace_lo = s->lo;
	cell->ticks = event->time_ns;
	__builtin_memcpy(cell->name, name, sizeof(cell->name));
	cell->event = *event;
}

/* Whether it counts: NULL, or a cell that the node has skipped, does not. */
static __always_inline bool cell_close(struct bs_context_segment *context,
				       struct bs_trigger_cell *cell,
				       __u32 position, __u32 kind)
{
	if (!cell || !bs_cell_commit(cell, position)) {
		__sync_fetch_and_add(&context->triggers_lost, 1);
		COUNT(kind, queue_full);
		return false;
	}
	COUNT(kind, fired);
	bpf_ringbuf_output(MAP(bell), &kind, sizeof(kind), 0);
	return true;
}

/* False: there was no room. */
static __always_inline bool push(const struct shown *s, const char *name,
				 const struct bs_kernel_event *event,
				 const struct laterals *laterals)
{
	struct bs_trigger_cell *cell;
	__u32 position = 0;

	cell = bs_cell_claim(s->context, CLAIM_ROUNDS, &position);
	if (cell) {
		cell_fill(cell, s, name, event);
		for (int i = 0; i < LATERALS_MAX; i++)
			cell->laterals[i] = laterals->traces[i];
		cell->n_laterals = laterals->count;
	}
	return cell_close(s->context, cell, position, event->kind);
}

static __always_inline void report(const struct probes_settings *settings,
				   const struct shown *s,
				   struct bs_kernel_event *event,
				   const struct laterals *laterals)
{
	__u32 kind = event->kind;
	const struct probes_threshold *limits;
	__u64 what, now;

	if (kind >= BS_KERNEL_KINDS)
		return;
	limits = &settings->kinds[kind];
	if (event->duration_ns >= limits->record_ns)
		CALL(record)(s->hi, s->lo, event);
	if (event->duration_ns < limits->fire_ns)
		return;
	/* The event may have been over for a while. */
	now = bpf_ktime_get_ns();
	what = mixed(s->hi ^ s->lo, kind);
	if (done_lately(MAP(recent), what, now, settings->coalesce_ns))
		COUNT(kind, coalesced);
	else if (!may_fire(limits, kind, now))
		COUNT(kind, limited);
	else if (push(s, limits->name, event, laterals))
		note_done(MAP(recent), what, now);
}

#endif
