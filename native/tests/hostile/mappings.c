// SPDX-License-Identifier: Apache-2.0
/*
 * Attacks on what client and node share. Each call is a step: some lies, and
 * back, so that the caller paces them.
 */
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attacks.h"
#include "barrier.h"

#define PAGE 4096u

static void scribble_on(void *memory, uint64_t bytes, uint32_t places)
{
	uint64_t *words = memory;

	for (uint32_t i = 0; i < places; i++) {
		uint64_t at = random_u64() % (bytes / 8);
		uint64_t end = at + 1 + below(64);

		for (; at < end && at < bytes / 8; at++)
			WRITE_ONCE(words[at], random_u64());
	}
}

static void poke(void *at, uint32_t bytes)
{
	uint64_t value = lie();

	memcpy(at, &value, bytes);
}

void scribble(struct target *t)
{
	scribble_on(t->arena, t->arena_bytes, 32);
	scribble_on(t->channel, BS_CHANNEL_BYTES, 4);
	scribble_on(t->context, sizeof(*t->context), 2);
}

/* Only where the node reads at each poll, and so hard that it meets every value. */
void scribble_channel(struct target *t)
{
	scribble_on(t->channel, BS_CHANNEL_BYTES, 64);
	scribble_on(t->channel, BS_CHANNEL_GRANTS_OFFSET + PAGE, 16);
	scribble_on(target_area(t, 0), 8 * sizeof(struct bs_thread_area), 64);
	scribble_on(t->context, sizeof(*t->context), 64);
}

/* A segment as a thread takes it, or one at random. */
static uint8_t *take_segment(struct target *t, uint32_t slot)
{
	struct bs_grant_ring *ring = target_grants(t);
	uint32_t tail = READ_ONCE(ring->tail);
	struct bs_segment_header *header;
	struct bs_grant grant;

	if (tail == load_acquire(&ring->head) ||
	    !compare_and_swap(&ring->tail, &tail, tail + 1))
		return target_segment(t, random_u64());
	grant = ring->entries[tail % BS_GRANT_RING_ENTRIES];
	header = (void *)target_segment(t, grant.segment & ~BS_GRANT_FRESH);
	WRITE_ONCE(header->slot, slot);
	WRITE_ONCE(header->runs, 0);
	store_release(&header->life,
		      bs_life(grant.generation, BS_SEGMENT_HELD));
	store_release(&target_area(t, slot)->segment,
		      grant.segment & ~BS_GRANT_FRESH);
	return (uint8_t *)header;
}

/* A run of a trace of somebody else, which says that it is whole, that it is
 * not, or that it went to a node that is not there. */
static void forge_run(const struct target *t, uint8_t *segment, uint32_t entry,
		      uint32_t at)
{
	struct bs_run_header *run = (void *)(segment + at);
	struct bs_trace_id id = target_honest_trace(t);
	uint32_t bytes = 4 * below(32), flags = below(16);
	struct bs_record_header *record =
		(void *)((uint8_t *)run + bs_run_header_bytes(flags));
	uint32_t committed = below(4) ? (uint32_t)sizeof(*record) + bytes
				      : (uint32_t)lie();

	run->trace_hi[0] = (uint32_t)id.hi;
	run->trace_hi[1] = (uint32_t)(id.hi >> 32);
	run->handle = below(4) ? below(64) : (uint32_t)random_u64();
	if (!(flags & BS_RUN_FIRST))
		run->seq = below(4);
	record->payload_bytes = below(4) ? (uint16_t)bytes : (uint16_t)lie();
	record->type = (uint8_t)below(12);
	record->flags = (uint8_t)below(2);
	record->ticks = bs_clock_ticks();
	store_release(&run->word,
		      bs_word(bs_trace_mix(id.hi, id.lo), committed));
	store_release(bs_directory(segment, entry),
		      bs_entry(bs_fingerprint(id.hi, id.lo), at, flags));
}

void lie_in_directories(struct target *t)
{
	uint32_t slot = below(8), runs = 8 + below(256), at = 64;
	uint8_t *segment = take_segment(t, slot);
	struct bs_segment_header *header = (void *)segment;

	/* Offsets that ascend; that do not; that lie in the directory. */
	uint32_t kind = below(4);

	for (uint32_t i = 0; i < runs && at < BS_SEGMENT_BYTES - 256; i++) {
		forge_run(t, segment, i, at);
		if (kind == 0)
			at += 192;
		else if (kind == 1)
			at += 4;
		else
			at = 4 * below((BS_SEGMENT_BYTES - 256) / 4);
	}
	if (kind == 3)
		for (uint32_t i = 0; i < 16; i++)
			poke(bs_directory(segment, below(BS_SEGMENT_RUNS_MAX)),
			     8);
	store_release(&header->runs, below(4) ? runs : (uint32_t)lie());
	if (below(8) == 0)
		poke(&header->life, 8);
	/* Parked, sealed, taken back, whatever it is. */
	if (below(4) == 0)
		WRITE_ONCE(header->life,
			   bs_life(bs_life_generation(header->life), below(5)));
	if (below(8) == 0)
		poke(&header->slot, 4);
	fetch_add(&target_grants(t)->moves, below(2));
}

void lie_of_grants(struct target *t)
{
	struct bs_grant_ring *ring = target_grants(t);
	uint32_t head = READ_ONCE(ring->head);

	switch (below(6)) {
	case 0: /* all were taken */
		WRITE_ONCE(ring->tail, head);
		break;
	case 1: /* more than there are */
		WRITE_ONCE(ring->tail, head + 1 + below(1 << 16));
		break;
	case 2: /* none were */
		WRITE_ONCE(ring->tail, head - below(2 * BS_GRANT_RING_ENTRIES));
		break;
	case 3: /* what the node wrote */
		poke(&ring->head, 4);
		break;
	case 4:
		poke(&ring->entries[below(BS_GRANT_RING_ENTRIES)],
		     sizeof(struct bs_grant));
		break;
	default: /* a thread is in a segment that it was not given */
		WRITE_ONCE(target_area(t, below(BS_THREAD_SLOTS))->segment,
			   (uint32_t)lie());
	}
	fetch_add(&ring->losses, 1);
}

void lie_of_handles(struct target *t)
{
	uint32_t *handles = target_handles(t);

	for (uint32_t i = 0; i < 1024; i++)
		WRITE_ONCE(handles[below(BS_OPEN_HANDLES)], (uint32_t)lie());
	for (uint32_t i = 0; i < 16; i++)
		WRITE_ONCE(target_area(t, below(BS_THREAD_SLOTS))->own_handle,
			   (uint32_t)lie());
}

void lie_of_losses(struct target *t)
{
	for (uint32_t i = 0; i < 64; i++) {
		struct bs_thread_area *a = target_area(t, below(16));
		struct bs_trace_id id = target_honest_trace(t);
		struct bs_loss *loss =
			&a->losses[a->loss_head % BS_LOSS_RING_ENTRIES];

		*loss = (struct bs_loss){id.hi, id.lo, below(64), below(16),
					 lie()};
		store_release(&a->loss_head, a->loss_head + 1);
		switch (below(8)) {
		case 0:
			poke(&a->loss_head, 4);
			break;
		case 1:
			poke(&a->losses_untold, 4);
			break;
		case 2: /* counters */
			poke((uint8_t *)a + below(120), 8);
			break;
		case 3: /* the node's own line */
			poke((uint8_t *)a +
				     offsetof(struct bs_thread_area,
					      loss_tail) +
				     below(56),
			     8);
			break;
		default:
			break;
		}
	}
	fetch_add(&target_grants(t)->losses, 1);
}

void lie_in_context(struct target *t)
{
	for (uint32_t i = 0; i < 64; i++) {
		struct bs_thread_slot *s =
			&t->context->slots[below(BS_CONTEXT_SLOTS)];
		struct bs_trace_id id = target_honest_trace(t);

		*s = (struct bs_thread_slot){.tid = (uint32_t)lie(),
					     .trace_hi = id.hi,
					     .trace_lo = id.lo,
					     .span_id = lie()};
		poke(&t->context->cells[below(BS_TRIGGER_CELLS)], 8);
	}
	poke(&t->context->triggers_lost, 4);
	poke(&t->context->records_unattributed, 8);
}

static void ring_doorbell(struct target *t)
{
	struct bs_channel_header *header = (void *)t->channel;

	fetch_add(&header->doorbell.rung, 1);
	syscall(SYS_futex, &header->doorbell.rung, FUTEX_WAKE, 1, NULL, NULL,
		0);
}

static void name_trigger(struct bs_trigger_cell *cell)
{
	static const char *const names[] = {"honest", "flood", "", "NOT A NAME",
					    "\xff\xfe"};

	memset(cell->name, 0, sizeof(cell->name));
	if (below(8) == 0) /* of a million names */
		for (uint32_t i = 0; i < 8; i++)
			cell->name[i] = (char)('a' + below(26));
	else if (below(8) == 0) /* without an end */
		memset(cell->name, 'x', sizeof(cell->name));
	else
		snprintf(cell->name, sizeof(cell->name), "%s", names[below(5)]);
}

/* What libbacksight does, with ids of no trace, of honest ones, of all zeros; as
 * fast as the queue takes them. */
void fire_wrong_triggers(struct target *t)
{
	struct bs_context_segment *x = t->context;

	for (uint32_t i = 0; i < 64; i++) {
		uint32_t position = READ_ONCE(x->trigger_head);
		struct bs_trace_id id;
		struct bs_trigger_cell *cell =
			&x->cells[position % BS_TRIGGER_CELLS];

		if (load_acquire(&cell->seq) != position && below(4))
			break;
		WRITE_ONCE(x->trigger_head, position + 1);
		id = below(4) ? (struct bs_trace_id){random_u64(), random_u64()}
			      : target_finished_trace(t);
		cell->trace_hi = id.hi;
		cell->trace_lo = id.lo;
		if (below(8) == 0)
			cell->trace_hi = cell->trace_lo = 0;
		cell->source = (uint8_t)below(6);
		cell->n_laterals = (uint16_t)(below(4) ? below(33) : lie());
		cell->ticks = below(2) ? bs_clock_ticks() : lie();
		name_trigger(cell);
		memset(cell->why, 'y', sizeof(cell->why));
		for (uint32_t k = 0; k < BS_CELL_LATERALS; k++)
			cell->laterals[k] = (struct bs_cell_trace){
				random_u64(), random_u64()};
		store_release(&cell->seq, position + 1);
	}
	if (below(64) == 0)
		poke(&x->trigger_head, 4);
	ring_doorbell(t);
}

/* Memory beyond what was granted: all of the arena, a page after the other. */
void touch_arena(struct target *t)
{
	for (uint64_t at = 0; at < t->arena_bytes; at += PAGE)
		WRITE_ONCE(t->arena[at], (uint8_t)random_u64());
}
