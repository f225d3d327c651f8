/* SPDX-License-Identifier: Apache-2.0 */
/* What programs read while they run. */
#include <errno.h>
#include <string.h>

#include "internal.h"

void begin_anew(struct bsp *p)
{
	WRITE_ONCE(p->settings->valid_since_ns, monotonic_ns());
}

/* The least threshold of these kinds. */
static uint64_t least_of(const struct probes_settings *settings, uint32_t first,
			 uint32_t last)
{
	uint64_t least = PROBES_NEVER;

	for (uint32_t kind = first; kind <= last; kind++) {
		const struct probes_threshold *t = &settings->kinds[kind];

		if (t->fire_ns < least)
			least = t->fire_ns;
		if (t->record_ns < least)
			least = t->record_ns;
	}
	return least;
}

int bsp_set_kind(struct bsp *p, uint32_t kind, const char *trigger,
		 uint64_t fire_ns, uint64_t record_ns, uint64_t interval_ns,
		 uint64_t burst_ns)
{
	struct probes_threshold *t;

	if (kind >= BS_KERNEL_KINDS || strlen(trigger) >= sizeof(t->name))
		return -EINVAL;
	t = &p->settings->kinds[kind];
	/* Nothing fires by a name of which half is another's. */
	WRITE_ONCE(t->fire_ns, PROBES_NEVER);
	memset(t->name, 0, sizeof(t->name));
	memcpy(t->name, trigger, strlen(trigger));
	WRITE_ONCE(t->record_ns, record_ns);
	WRITE_ONCE(t->interval_ns, interval_ns);
	WRITE_ONCE(t->burst_ns, burst_ns);
	store_release(&t->fire_ns, fire_ns);
	WRITE_ONCE(p->settings->least_unrun_ns,
		   least_of(p->settings, BS_KERNEL_RUN_QUEUE,
			    BS_KERNEL_CPU_THROTTLED));
	WRITE_ONCE(p->settings->least_blocked_ns,
		   least_of(p->settings, BS_KERNEL_LOCK_WAIT,
			    BS_KERNEL_BLOCKED));
	return 0;
}

void bsp_set_coalescing(struct bsp *p, uint64_t ns)
{
	WRITE_ONCE(p->settings->coalesce_ns, ns);
}

void bsp_set_bypass(struct bsp *p, bool bypass)
{
	if (!bypass)
		begin_anew(p);
	WRITE_ONCE(p->settings->bypass, bypass);
}

void bsp_set_uses(struct bsp *p, bool uses, bool breadcrumbs)
{
	WRITE_ONCE(p->settings->uses, uses);
	WRITE_ONCE(p->settings->breadcrumbs, breadcrumbs);
}
