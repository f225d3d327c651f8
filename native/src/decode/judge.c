/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is missing, in the slices of a trace and between them.
 *
 * Everything is matched by sorting it: whoever writes a trace can choose the keys, and
 * no choice makes that slow. Names and handles that findings point to stay where they
 * are until more comes.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

#define COMPARE(a, b) (((a) > (b)) - ((a) < (b)))

struct telling {
	struct bsd_evidence *evidence;
	struct bsd_finding *last; /* of the same kind and node, if any */
	uint32_t told;		  /* of that */
};

/* Those of one kind and node come one after the other. */
static int tell(struct telling *t, const struct bsd_finding *finding)
{
	struct bsd_finding *added;

	if (!t->last || t->last->kind != finding->kind ||
	    t->last->node != finding->node)
		t->told = 0;
	if (t->last && t->told >= t->evidence->few) {
		t->last->more++;
		return 0;
	}
	added = array_add(&t->evidence->findings);
	if (!added)
		return -ENOMEM;
	*added = *finding;
	t->last = added;
	t->told++;
	return 0;
}

/* -------------------------------------------------------- in one slice --- */

static int compare_u32(const void *one, const void *other)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;

	return COMPARE(a, b);
}

static int gather_lossy(const struct part *p, struct array *clients)
{
	const struct bsd_client *c = bsd_slice_clients(&p->slice);
	const struct bsd_handle *h = bsd_slice_handles(&p->slice);

	for (uint32_t i = 0; i < p->slice.clients.array.count; i++) {
		if (c[i].lossy && !array_append(clients, &c[i].client, 1))
			return -ENOMEM;
	}
	for (uint32_t i = 0; i < p->slice.handles.array.count; i++) {
		if (h[i].lossy && !array_append(clients, &h[i].client, 1))
			return -ENOMEM;
	}
	if (clients->count)
		qsort(clients->entries, clients->count, sizeof(uint32_t),
		      compare_u32);
	return 0;
}

static int tell_lossy(struct telling *t, const struct part *p)
{
	struct bsd_finding f = {.kind = BSD_FINDING_LOSSY, .node = p->node};
	struct array clients = ARRAY_OF(uint32_t);
	int error = gather_lossy(p, &clients);

	for (uint32_t i = 0; !error && i < clients.count; i++) {
		uint32_t client = *(uint32_t *)array_at(&clients, i);

		if (i && client == f.client)
			continue;
		f.client = client;
		error = tell(t, &f);
	}
	array_free(&clients);
	return error;
}

static int tell_runs(struct telling *t, const struct part *p)
{
	const struct bsd_handle *h = bsd_slice_handles(&p->slice);
	int error = 0;

	for (uint32_t i = 0; !error && i < p->slice.handles.array.count; i++) {
		struct bsd_finding f = {
			.kind = BSD_FINDING_RUN_MISSING,
			.node = p->node,
			.client = h[i].client,
			.handle = h[i].handle,
			.number = i,
		};

		if (bsd_handle_problem(&h[i]))
			error = tell(t, &f);
	}
	return error;
}

static int compare_keys(uint32_t client_a, uint64_t span_a, uint32_t client_b,
			uint64_t span_b)
{
	return client_a != client_b ? COMPARE(client_a, client_b)
				    : COMPARE(span_a, span_b);
}

static int compare_starts(const void *one, const void *other)
{
	const struct start *a = one, *b = other;
	int order = compare_keys(a->client, a->span_id, b->client, b->span_id);

	return order ? order : COMPARE(a->name_at, b->name_at);
}

static int compare_ends(const void *one, const void *other)
{
	const struct end *a = one, *b = other;

	return compare_keys(a->client, a->span_id, b->client, b->span_id);
}

/* Leave out starts and ends that are each other's. Of several of one id the first
 * starts stay. */
static void match(struct part *p)
{
	struct start *starts = (struct start *)p->starts.entries;
	struct end *ends = (struct end *)p->ends.entries;
	uint32_t n_starts = 0, n_ends = 0;
	uint32_t i = 0, k = 0;

	while (i < p->starts.count || k < p->ends.count) {
		uint32_t same_starts = 0, same_ends = 0, met;
		int order = i == p->starts.count ? 1
			    : k == p->ends.count
				    ? -1
				    : compare_keys(starts[i].client,
						   starts[i].span_id,
						   ends[k].client,
						   ends[k].span_id);

		if (order <= 0) {
			do
				same_starts++;
			while (i + same_starts < p->starts.count &&
			       starts[i].client ==
				       starts[i + same_starts].client &&
			       starts[i].span_id ==
				       starts[i + same_starts].span_id);
		}
		if (order >= 0) {
			do
				same_ends++;
			while (k + same_ends < p->ends.count &&
			       !compare_ends(&ends[k], &ends[k + same_ends]));
		}
		met = same_starts < same_ends ? same_starts : same_ends;
		memmove(&starts[n_starts], &starts[i],
			(same_starts - met) * sizeof(*starts));
		memmove(&ends[n_ends], &ends[k],
			(same_ends - met) * sizeof(*ends));
		n_starts += same_starts - met;
		n_ends += same_ends - met;
		i += same_starts;
		k += same_ends;
	}
	p->starts.count = n_starts;
	p->ends.count = n_ends;
}

/* Only of starts that wait. */
static int keep_names(struct part *p)
{
	struct array names = ARRAY_OF(uint8_t);

	for (uint32_t i = 0; i < p->starts.count; i++) {
		struct start *start = array_at(&p->starts, i);
		const uint8_t *name = array_at(&p->names, start->name_at);

		start->name_at = names.count;
		if (!array_append(&names, name, 1 + (size_t)name[0])) {
			array_free(&names);
			return -ENOMEM;
		}
	}
	array_free(&p->names);
	p->names = names;
	return 0;
}

static int settle(struct part *p)
{
	if (p->starts.count)
		qsort(p->starts.entries, p->starts.count, sizeof(struct start),
		      compare_starts);
	if (p->ends.count)
		qsort(p->ends.entries, p->ends.count, sizeof(struct end),
		      compare_ends);
	if (p->starts.count && p->ends.count) {
		int error;

		match(p);
		error = keep_names(p);
		if (error)
			return error;
	}
	/* Most are met at once, and thousands of traces wait for their end. */
	if (!p->starts.count)
		array_free(&p->starts);
	if (!p->ends.count)
		array_free(&p->ends);
	return 0;
}

static int tell_unfinished(struct telling *t, const struct part *p)
{
	int error = 0;

	for (uint32_t i = 0; !error && i < p->starts.count; i++) {
		const struct start *start = array_at(&p->starts, i);
		const uint8_t *name = array_at(&p->names, start->name_at);
		struct bsd_finding f = {
			.kind = BSD_FINDING_UNFINISHED,
			.node = p->node,
			.client = start->client,
			.span_id = start->span_id,
			.name = name + 1,
			.name_bytes = name[0],
		};

		error = tell(t, &f);
	}
	return error;
}

static int tell_unstarted(struct telling *t, const struct part *p)
{
	int error = 0;

	for (uint32_t i = 0; !error && i < p->ends.count; i++) {
		const struct end *end = array_at(&p->ends, i);
		struct bsd_finding f = {
			.kind = BSD_FINDING_UNSTARTED,
			.node = p->node,
			.client = end->client,
			.span_id = end->span_id,
		};

		if (!i || compare_ends(end - 1, end))
			error = tell(t, &f);
	}
	return error;
}

static int judge_part(struct telling *t, struct part *p)
{
	int error = settle(p);

	if (!error)
		error = tell_lossy(t, p);
	if (!error)
		error = tell_runs(t, p);
	if (!error)
		error = tell_unfinished(t, p);
	if (!error)
		error = tell_unstarted(t, p);
	return error;
}

/* ------------------------------------------------------ between slices --- */

struct orphan {
	uint64_t parent_id;
	uint64_t span_id;
	uint32_t part;
	uint32_t number; /* of the span in its part */
};

static int compare_u64(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return COMPARE(a, b);
}

static int compare_orphans(const void *one, const void *other)
{
	const struct orphan *a = one, *b = other;

	if (a->parent_id != b->parent_id)
		return COMPARE(a->parent_id, b->parent_id);
	if (a->part != b->part)
		return COMPARE(a->part, b->part);
	return COMPARE(a->number, b->number);
}

static int compare_by_part(const void *one, const void *other)
{
	const struct orphan *a = one, *b = other;

	if (a->part != b->part)
		return COMPARE(a->part, b->part);
	return COMPARE(a->parent_id, b->parent_id);
}

static bool has_id(const struct array *ids, uint64_t id)
{
	return ids->count &&
	       bsearch(&id, ids->entries, ids->count, sizeof(id), compare_u64);
}

static int gather_ids(const struct bsd_evidence *e, struct array *ids)
{
	for (uint32_t i = 0; i < e->parts.count; i++) {
		const struct array *spans = &part_at(e, i)->spans;

		for (uint32_t k = 0; k < spans->count; k++) {
			const struct span *span = array_at(spans, k);

			if (!array_append(ids, &span->span_id, 1))
				return -ENOMEM;
		}
	}
	if (ids->count)
		qsort(ids->entries, ids->count, sizeof(uint64_t), compare_u64);
	return 0;
}

static int gather_orphans(const struct bsd_evidence *e, const struct array *ids,
			  struct array *orphans)
{
	for (uint32_t i = 0; i < e->parts.count; i++) {
		const struct array *spans = &part_at(e, i)->spans;

		for (uint32_t k = 0; k < spans->count; k++) {
			const struct span *span = array_at(spans, k);
			struct orphan orphan = {span->parent_id, span->span_id,
						i, k};

			if (span->parent_id && !has_id(ids, span->parent_id) &&
			    !array_append(orphans, &orphan, 1))
				return -ENOMEM;
		}
	}
	return 0;
}

/* Of the children of one parent the first. */
static void keep_first(struct array *orphans)
{
	struct orphan *o = (struct orphan *)orphans->entries;
	uint32_t kept = 0;

	qsort(o, orphans->count, sizeof(*o), compare_orphans);
	for (uint32_t i = 0; i < orphans->count; i++) {
		if (!kept || o[kept - 1].parent_id != o[i].parent_id)
			o[kept++] = o[i];
	}
	orphans->count = kept;
	qsort(o, kept, sizeof(*o), compare_by_part);
}

static int judge_parents(struct telling *t)
{
	const struct bsd_evidence *e = t->evidence;
	struct array ids = ARRAY_OF(uint64_t);
	struct array orphans = ARRAY_OF(struct orphan);
	int error = gather_ids(e, &ids);

	if (!error)
		error = gather_orphans(e, &ids, &orphans);
	if (!error && orphans.count)
		keep_first(&orphans);
	for (uint32_t i = 0; !error && i < orphans.count; i++) {
		const struct orphan *orphan = array_at(&orphans, i);
		struct bsd_finding f = {
			.kind = BSD_FINDING_PARENT_MISSING,
			.node = part_at(e, orphan->part)->node,
			.span_id = orphan->span_id,
			.other = orphan->parent_id,
		};

		error = tell(t, &f);
	}
	array_free(&ids);
	array_free(&orphans);
	return error;
}

/* One end of a hop. */
struct met {
	struct hop hop;
	uint32_t part; /* that delivered it */
	bool extracted;
};

static int compare_hops(const struct hop *a, const struct hop *b)
{
	if (a->node != b->node)
		return COMPARE(a->node, b->node);
	if (a->span_id != b->span_id)
		return COMPARE(a->span_id, b->span_id);
	if (a->handle != b->handle)
		return COMPARE(a->handle, b->handle);
	return COMPARE(a->hop, b->hop);
}

static int compare_met(const void *one, const void *other)
{
	const struct met *a = one, *b = other;
	int order = compare_hops(&a->hop, &b->hop);

	if (order)
		return order;
	if (a->extracted != b->extracted)
		return COMPARE(a->extracted, b->extracted);
	return COMPARE(a->part, b->part);
}

static int gather_hops(const struct array *hops, uint32_t part, bool extracted,
		       struct array *all)
{
	for (uint32_t i = 0; i < hops->count; i++) {
		struct met met = {
			.hop = *(const struct hop *)array_at(hops, i),
			.part = part,
			.extracted = extracted,
		};

		if (!array_append(all, &met, 1))
			return -ENOMEM;
	}
	return 0;
}

static int compare_senders(const struct unanswered *a,
			   const struct unanswered *b)
{
	int order = compare_keys(a->client, a->span_id, b->client, b->span_id);

	return order ? order : COMPARE(a->handle, b->handle);
}

/* Of one sender those come first that excuse nothing: by these something is missing. */
static int compare_unanswered(const void *one, const void *other)
{
	const struct unanswered *a = one, *b = other;
	int order = compare_senders(a, b);

	if (order)
		return order;
	if (a->excused != b->excused)
		return COMPARE(a->excused, b->excused);
	return COMPARE(a->text_at, b->text_at);
}

/* What who sent says of a hop that nobody met: only a process of that node can, in the
 * handle that sent. NULL if it does not; the first if it does more than once. */
static const struct unanswered *said_of(const struct part *p,
					const struct hop *hop)
{
	const struct unanswered *said =
		(const struct unanswered *)p->unanswered.entries;
	const struct unanswered key = {
		.span_id = hop->span_id,
		.client = hop->client,
		.handle = hop->handle,
	};
	uint32_t low = 0, high = p->unanswered.count;

	if (p->node != hop->node)
		return NULL;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (compare_senders(&said[middle], &key) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == p->unanswered.count || compare_senders(&said[low], &key))
		return NULL;
	return &said[low];
}

/* Fill in what is said of a hop that was sent more often than it arrived; its ends are so
 * many. False: nothing is missing, since by their word none of them was sent. */
static bool is_unmet(const struct bsd_evidence *e, const struct met *met,
		     uint32_t count, struct bsd_finding *f)
{
	bool unmet = false;

	for (uint32_t i = 0; i < count; i++) {
		const struct part *p = part_at(e, met[i].part);
		const struct unanswered *said =
			met[i].extracted ? NULL : said_of(p, &met[i].hop);
		bool misses = !said || !said->excused;

		if (said && (misses || !f->name)) {
			f->name = array_at(&p->texts, said->text_at);
			f->name_bytes = said->address_bytes;
			f->other = said->error_bytes;
		}
		unmet |= misses;
	}
	return unmet;
}

static int tell_hops(struct telling *t, const struct array *all,
		     enum bsd_finding_kind kind)
{
	const struct met *met = (const struct met *)all->entries;
	uint32_t next;
	int error = 0;

	for (uint32_t i = 0; !error && i < all->count; i = next) {
		const struct hop *hop = &met[i].hop;
		struct bsd_finding f = {
			.kind = kind,
			.node = hop->node,
			.span_id = hop->span_id,
			.handle = hop->handle,
			.number = hop->hop,
		};
		uint32_t injected = 0, extracted = 0;

		for (next = i;
		     next < all->count && !compare_hops(hop, &met[next].hop);
		     next++) {
			injected += !met[next].extracted;
			extracted += met[next].extracted;
		}
		if (kind != BSD_FINDING_HOP_IN_UNMET) {
			if (extracted >= injected)
				continue;
			if (is_unmet(t->evidence, &met[i], next - i, &f) ==
			    (kind == BSD_FINDING_HOP_OUT_UNMET))
				error = tell(t, &f);
		} else if (!injected) {
			f.other =
				part_at(t->evidence, met[next - 1].part)->node;
			error = tell(t, &f);
		}
	}
	return error;
}

static void sort_unanswered(const struct bsd_evidence *e)
{
	for (uint32_t i = 0; i < e->parts.count; i++) {
		struct array *said = &part_at(e, i)->unanswered;

		if (said->count)
			qsort(said->entries, said->count,
			      sizeof(struct unanswered), compare_unanswered);
	}
}

static int judge_hops(struct telling *t)
{
	const struct bsd_evidence *e = t->evidence;
	struct array all = ARRAY_OF(struct met);
	int error = 0;

	for (uint32_t i = 0; !error && i < e->parts.count; i++) {
		error = gather_hops(&part_at(e, i)->hops_out, i, false, &all);
		if (!error)
			error = gather_hops(&part_at(e, i)->hops_in, i, true,
					    &all);
	}
	if (!error && all.count) {
		qsort(all.entries, all.count, sizeof(struct met), compare_met);
		sort_unanswered(e);
		error = tell_hops(t, &all, BSD_FINDING_HOP_OUT_UNMET);
		if (!error)
			error = tell_hops(t, &all, BSD_FINDING_HOP_UNANSWERED);
		if (!error)
			error = tell_hops(t, &all, BSD_FINDING_HOP_IN_UNMET);
	}
	array_free(&all);
	return error;
}

int judge(struct bsd_evidence *e)
{
	struct telling t = {.evidence = e};
	int error = 0;

	for (uint32_t i = 0; !error && i < e->parts.count; i++)
		error = judge_part(&t, part_at(e, i));
	if (!error)
		error = judge_parents(&t);
	if (!error)
		error = judge_hops(&t);
	return error;
}
