/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "client.h"

/*
 * Threads with a slot count in their area, where the node sees it; threads
 * without one, and what areas have no field for, in struct bs_member. When
 * either goes, what it counted moves to `folded`.
 */
static struct bs_counters folded; /* bs_lock */
struct bs_counters bs_strays;

static void add_areas(struct bs_counters *sum, const struct bs_attachment *a)
{
	for (uint32_t i = 0; i < a->slots_touched; i++) {
		const struct bs_thread_area *area = bs_attachment_area(a, i);

		sum->runs += READ_ONCE(area->runs);
		sum->runs_lost += READ_ONCE(area->runs_lost);
		sum->records_lost += READ_ONCE(area->records_lost);
		sum->payload_bytes_lost += READ_ONCE(area->payload_bytes_lost);
		sum->records_oversized += READ_ONCE(area->records_oversized);
	}
}

static void add(struct bs_counters *sum, const struct bs_counters *c)
{
	sum->runs_lost += READ_ONCE(c->runs_lost);
	sum->records_lost += READ_ONCE(c->records_lost);
	sum->payload_bytes_lost += READ_ONCE(c->payload_bytes_lost);
	sum->records_oversized += READ_ONCE(c->records_oversized);
	sum->contexts_malformed += READ_ONCE(c->contexts_malformed);
	sum->breadcrumbs_malformed += READ_ONCE(c->breadcrumbs_malformed);
	sum->attributes_malformed += READ_ONCE(c->attributes_malformed);
	sum->triggers_malformed += READ_ONCE(c->triggers_malformed);
	sum->triggers_unattached += READ_ONCE(c->triggers_unattached);
	sum->triggers_unrecorded += READ_ONCE(c->triggers_unrecorded);
	sum->triggers_lost += READ_ONCE(c->triggers_lost);
}

void bs_stats_fold_attachment(const struct bs_attachment *a)
{
	add_areas(&folded, a);
}

void bs_stats_fold_member(const struct bs_member *m)
{
	add(&folded, &m->counters);
}

void bs_stats_forget(void)
{
	memset(&folded, 0, sizeof(folded));
	memset(&bs_strays, 0, sizeof(bs_strays));
}

void bs_get_stats(struct bs_stats *stats)
{
	struct bs_counters sum;
	uint64_t attachments;
	bool attached;

	bs_process_check();
	pthread_mutex_lock(&bs_process.lock);
	sum = folded;
	for (const struct bs_attachment *a = bs_attachments; a; a = a->next)
		add_areas(&sum, a);
	for (const struct bs_member *m = bs_members; m; m = m->next)
		add(&sum, &m->counters);
	add(&sum, &bs_strays);
	attachments = bs_attach_count();
	attached = bs_process.current != &bs_nowhere;
	pthread_mutex_unlock(&bs_process.lock);

	*stats = (struct bs_stats){
		.runs = sum.runs,
		.runs_lost = sum.runs_lost,
		.records_lost = sum.records_lost,
		.payload_bytes_lost = sum.payload_bytes_lost,
		.records_oversized = sum.records_oversized,
		.contexts_malformed = sum.contexts_malformed,
		.breadcrumbs_malformed = sum.breadcrumbs_malformed,
		.attributes_malformed = sum.attributes_malformed,
		.triggers_malformed = sum.triggers_malformed,
		.triggers_unattached = sum.triggers_unattached,
		.triggers_unrecorded = sum.triggers_unrecorded,
		.triggers_lost = sum.triggers_lost,
		.attachments = attachments,
		.attached = attached,
	};
}
