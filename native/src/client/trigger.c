/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "abi/trigger_queue.h"
#include "client.h"

bool bs_trigger_name_is_valid(const char *name, size_t bytes)
{
	if (bytes == 0 || bytes > BS_TRIGGER_NAME_MAX)
		return false;
	for (size_t i = 0; i < bytes; i++) {
		char c = name[i];

		if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
		      c == '_' || c == '.' || c == '-'))
			return false;
	}
	return true;
}

/* -------------------------------------------------------------- fired --- */

/*
 * Which triggers fired for a trace, so that the contexts which it sends from
 * here carry them on. bs_trigger() has only the trace's id, and a trace may be
 * open on several handles, so this is kept by trace and not by handle: a table
 * in which a newer trace takes the place of an older one. What is forgotten
 * here costs time, not traces: the coordinator asks the nodes anyway.
 *
 * An entry is read and written word by word between two looks at its version,
 * which is odd while somebody writes.
 */
#define FIRED_ENTRIES 64
#define FIRED_WORDS (sizeof(struct bs_fired) / sizeof(uint64_t))

struct fired_entry {
	uint32_t version;
	uint64_t hi, lo;
	uint64_t words[FIRED_WORDS];
};

static struct fired_entry fired_table[FIRED_ENTRIES];
static bool fired_any;

static struct fired_entry *fired_entry(struct bs_trace_id id)
{
	return &fired_table[bs_fmix64(id.hi ^ id.lo) % FIRED_ENTRIES];
}

bool bs_fired_get(struct bs_trace_id id, struct bs_fired *fired)
{
	struct fired_entry *e = fired_entry(id);
	uint64_t words[FIRED_WORDS];
	uint32_t version;

	if (!READ_ONCE(fired_any))
		return false;
	version = load_acquire(&e->version);
	if (version & 1 || load_acquire(&e->hi) != id.hi ||
	    load_acquire(&e->lo) != id.lo)
		return false;
	for (size_t i = 0; i < FIRED_WORDS; i++)
		words[i] = load_acquire(&e->words[i]);
	if (READ_ONCE(e->version) != version)
		return false;
	memcpy(fired, words, sizeof(words));
	return true;
}

/* In a child after fork(): a thread that is not there any more may have been in
 * the middle of an entry, which nobody would ever finish. */
void bs_fired_forget(void)
{
	if (fired_any)
		memset(fired_table, 0, sizeof(fired_table));
	fired_any = false;
}

static void fired_add(struct bs_trace_id id, const char *name, size_t bytes)
{
	struct fired_entry *e = fired_entry(id);
	uint32_t version = load_acquire(&e->version);
	uint64_t words[FIRED_WORDS];
	struct bs_fired fired;

	/* Somebody else is at it: theirs stays. */
	if (version & 1 ||
	    !compare_and_swap(&e->version, &version, version + 1))
		return;
	WRITE_ONCE(fired_any, true);
	memset(&fired, 0, sizeof(fired));
	if (e->hi == id.hi && e->lo == id.lo)
		memcpy(&fired, e->words, sizeof(fired));
	for (int i = 0; i < BS_FIRED_NAMES; i++) {
		if (strlen(fired.names[i]) == bytes &&
		    memcmp(fired.names[i], name, bytes) == 0)
			goto out;
	}
	/* The newest last; the first names say why it began, so when all
	 * places are taken the last one gives way. */
	for (int i = 0; i < BS_FIRED_NAMES; i++) {
		if (fired.names[i][0] && i < BS_FIRED_NAMES - 1)
			continue;
		memset(fired.names[i], 0, sizeof(fired.names[i]));
		memcpy(fired.names[i], name, bytes);
		break;
	}
	memcpy(words, &fired, sizeof(words));
	store_release(&e->hi, id.hi);
	store_release(&e->lo, id.lo);
	for (size_t i = 0; i < FIRED_WORDS; i++)
		store_release(&e->words[i], words[i]);
out:
	store_release(&e->version, version + 2);
}

/* -------------------------------------------------------------- queue --- */

/* More than threads and processors that fire at once. */
#define CLAIM_ROUNDS 10000

static bool may_be_recorded(const struct bs_thread *t, struct bs_trace_id id)
{
	const struct bs_policy *policy = t->attachment->policy;
	uint64_t threshold = load_acquire(&policy->percentage_threshold);
	uint64_t earlier = READ_ONCE(policy->earlier_threshold);

	/* Its own trace the thread recorded itself. If it did not, another process
	 * that began earlier may have. */
	if (t->own_open && bs_trace_id_equal(t->own.id, id) &&
	    READ_ONCE(t->own.attachment) == t->epoch &&
	    !(t->own.flags & BS_TRACE_UNRECORDED))
		return true;
	if (earlier > threshold)
		threshold = earlier;
	return threshold == BS_PERCENTAGE_ALL ||
	       bs_hash_percentage(t->attachment, id) < threshold;
}

/* What nobody recorded would be collected as a trace of which all is missing. */
static bool any_recorded(const struct bs_thread *t, struct bs_trace_id id,
			 const struct bs_trace_id *laterals, size_t n_laterals)
{
	if (may_be_recorded(t, id))
		return true;
	for (size_t i = 0; i < n_laterals && i < BS_LATERALS_MAX; i++) {
		if (may_be_recorded(t, laterals[i]))
			return true;
	}
	return false;
}

static void cell_fill(struct bs_trigger_cell *cell, struct bs_trace_id id,
		      enum bs_trigger_source source, const char *name,
		      size_t name_bytes, const char *why,
		      const struct bs_trace_id *laterals, size_t n_laterals)
{
	if (n_laterals > BS_LATERALS_MAX)
		n_laterals = BS_LATERALS_MAX;
	cell->n_laterals = (uint16_t)n_laterals;
	cell->source = (uint8_t)source;
	cell->trace_hi = id.hi;
	cell->trace_lo = id.lo;
	cell->ticks = bs_clock_ticks();
	memset(cell->name, 0, sizeof(cell->name));
	memcpy(cell->name, name, name_bytes);
	memset(cell->why, 0, sizeof(cell->why));
	if (why)
		memcpy(cell->why, why,
		       bs_utf8_cut(why, strnlen(why, BS_TRIGGER_WHY_MAX + 1),
				   BS_TRIGGER_WHY_MAX));
	if (n_laterals)
		memcpy(cell->laterals, laterals,
		       n_laterals * sizeof(laterals[0]));
}

int bs_trigger_push(struct bs_trace_id id, enum bs_trigger_source source,
		    const char *name, size_t name_bytes, const char *why,
		    const struct bs_trace_id *laterals, size_t n_laterals)
{
	struct bs_thread *t = &bs_thread;
	struct bs_context_segment *queue;
	struct bs_trigger_cell *cell;
	uint32_t position;
	bool pushed = false;

	bs_thread_enter(t);
	if (!any_recorded(t, id, laterals, n_laterals)) {
		BS_COUNT_THREAD(t, triggers_unrecorded, 1);
		return -ENODATA;
	}
	queue = bs_queue_enter(t);
	if (!queue) {
		BS_COUNT_THREAD(t, triggers_unattached, 1);
		return -ENOTCONN;
	}
	cell = bs_cell_claim(queue, CLAIM_ROUNDS, &position);
	if (cell) {
		cell_fill(cell, id, source, name, name_bytes, why, laterals,
			  n_laterals);
		pushed = bs_cell_commit(cell, position);
	}
	if (!pushed)
		fetch_add(&queue->triggers_lost, 1);
	bs_queue_leave(t);
	if (!pushed) {
		BS_COUNT_THREAD(t, triggers_lost, 1);
		return -EAGAIN;
	}
	bs_doorbell_ring(t->attachment);
	fired_add(id, name, name_bytes);
	return 0;
}

int bs_trigger(struct bs_trace_id id, const char *trigger, const char *why,
	       const struct bs_trace_id *laterals, size_t n_laterals)
{
	size_t bytes = strnlen(trigger, BS_TRIGGER_NAME_MAX + 1);
	struct bs_thread *t = &bs_thread;

	if (bs_trace_id_is_zero(id) ||
	    !bs_trigger_name_is_valid(trigger, bytes)) {
		bs_thread_enter(t);
		BS_COUNT_THREAD(t, triggers_malformed, 1);
		return -EINVAL;
	}
	return bs_trigger_push(id, BS_TRIGGER_APPLICATION, trigger, bytes, why,
			       laterals, n_laterals);
}
