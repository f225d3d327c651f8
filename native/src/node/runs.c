/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One run of one segment. A directory is its client's word: that offsets
 * ascend, stay inside and leave room for what a header claims is checked here,
 * for each run that is looked at. So all runs of a segment together have no more
 * bytes than it has, whatever stands there. Whose trace a run is of cannot be
 * checked: any entry makes an id of any header (abi/arena.h).
 */
#include <string.h>

#include "internal.h"

/* Entries that can be read. What an earlier life of the segment left is none. */
uint32_t runs_count(const struct frame *f, uint32_t generation)
{
	const struct bs_segment_header *h = (const void *)f->bytes;
	uint32_t runs;

	if (bs_life_generation(load_acquire(&h->life)) != generation)
		return 0;
	runs = load_acquire(&h->runs);
	return runs < BS_SEGMENT_RUNS_MAX ? runs : BS_SEGMENT_RUNS_MAX;
}

struct walk walk_of(const struct frame *f, uint32_t generation)
{
	struct walk walk = {runs_count(f, generation), FIRST_RUN};

	return walk;
}

static struct bs_trace_id id_of(const struct bsn *n, const struct frame *f,
				const struct bs_run_header *h, uint64_t entry,
				uint32_t word)
{
	const uint32_t trace_hi[2] = {READ_ONCE(h->trace_hi[0]),
				      READ_ONCE(h->trace_hi[1])};
	uint64_t hi = (uint64_t)trace_hi[1] << 32 | trace_hi[0];

	if (f->client == &n->keep.arena)
		entry ^= keep_disguise(n, hi, word)
			 << BS_ENTRY_FINGERPRINT_SHIFT;
	return bs_run_trace_id(entry, trace_hi, word);
}

struct bs_trace_id run_id(const struct bsn *n, const struct frame *f,
			  uint64_t entry)
{
	uint32_t offset = bs_entry_offset(entry);
	const struct bs_run_header *h = (const void *)(f->bytes + offset);
	struct bs_trace_id none = {0, 0};

	if (offset < FIRST_RUN ||
	    offset > SEGMENT - bs_run_header_bytes(bs_entry_flags(entry)))
		return none;
	return id_of(n, f, h, entry, READ_ONCE(h->word));
}

static bool own(struct bsn *n, struct run *run)
{
	const struct frame *f = run->frame;
	const struct client *c = f->client;
	struct kept_run kept;

	if (c != &n->keep.arena) {
		run->owner.number = c->number;
		run->owner.pid = (uint32_t)c->pid;
		memcpy(run->owner.service, c->service,
		       sizeof(run->owner.service));
		run->live = c->live;
		run->granted_ns = record_of(n, f)->granted_ns;
		run->from = 0;
		run->has_more = false;
		return true;
	}
	if (run->bytes < sizeof(kept))
		return false;
	memcpy(&kept, f->bytes + run->records, sizeof(kept));
	if (!keep_owner_of(f, kept.owner, &run->owner))
		return false;
	c = client_find(n, run->owner.number);
	run->live = c && c->live;
	run->granted_ns = kept.granted_ns;
	run->from = kept.from;
	run->has_more = kept.has_more;
	run->records += (uint32_t)sizeof(kept);
	run->bytes -= (uint32_t)sizeof(kept);
	return true;
}

/* The directory may be rewritten while it is read: what was judged of one entry
 * says nothing of the next. But the runs of one walk begin each behind the one
 * before, so that together they have no more bytes than a segment. */
bool run_open(struct bsn *n, struct frame *f, uint32_t index, uint64_t entry,
	      struct walk *walk, struct run *run)
{
	uint32_t offset = bs_entry_offset(entry);
	uint32_t floor = SEGMENT - 8 * walk->runs;
	uint32_t end = floor, word;
	uint32_t header_bytes = bs_run_header_bytes(bs_entry_flags(entry));
	const struct bs_run_header *h;

	if (index + 1 < walk->runs)
		end = bs_entry_offset(
			READ_ONCE(*bs_directory(f->bytes, index + 1)));
	if (offset < walk->end || end > floor || end < offset + header_bytes)
		return false;
	if (index && bs_entry_offset(READ_ONCE(
			     *bs_directory(f->bytes, index - 1))) >= offset)
		return false;
	h = (const void *)(f->bytes + offset);
	run->frame = f;
	run->index = index;
	run->offset = offset;
	run->flags = bs_entry_flags(entry);
	run->end = end;
	word = load_acquire(&h->word);
	run->bytes = bs_word_committed(word);
	run->id = id_of(n, f, h, entry, word);
	run->handle = READ_ONCE(h->handle);
	run->seq = run->flags & BS_RUN_FIRST ? 0 : READ_ONCE(h->seq);
	run->records = offset + header_bytes;
	if (run->bytes > end - run->records)
		return false;
	walk->end = run->records + run->bytes;
	return own(n, run);
}
