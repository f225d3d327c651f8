/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the slices of one trace say, as far as a verdict needs it.
 *
 * While bytes come, nothing is looked up: what concerns spans and hops is put down,
 * slice by slice, in less memory than it came in. It is matched when somebody asks
 * (judge.c), which is seldom, and a slice that is begun anew costs the others nothing.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backsight.h"
#include "internal.h"

int bsd_evidence_new(uint64_t limit, struct bsd_evidence **evidence)
{
	struct bsd_evidence *e = calloc(1, sizeof(*e));

	if (!e)
		return -ENOMEM;
	e->limit = limit;
	e->parts = ARRAY_OF(struct part *);
	e->findings = ARRAY_OF(struct bsd_finding);
	e->crumbs = ARRAY_OF(struct bsd_crumb);
	e->crumb_names = ARRAY_OF(uint8_t);
	*evidence = e;
	return 0;
}

static void free_part(struct part *p)
{
	slice_release(&p->slice);
	array_free(&p->spans);
	array_free(&p->starts);
	array_free(&p->ends);
	array_free(&p->hops_out);
	array_free(&p->hops_in);
	array_free(&p->names);
	array_free(&p->unanswered);
	array_free(&p->texts);
	free(p);
}

static void free_parts(struct bsd_evidence *e)
{
	for (uint32_t i = 0; i < e->parts.count; i++)
		free_part(part_at(e, i));
	array_free(&e->parts);
	array_free(&e->findings);
	e->judged = false;
}

void bsd_evidence_free(struct bsd_evidence *evidence)
{
	if (!evidence)
		return;
	free_parts(evidence);
	array_free(&evidence->crumbs);
	array_free(&evidence->crumb_names);
	free(evidence);
}

int64_t bsd_evidence_find(const struct bsd_evidence *evidence, uint64_t node)
{
	for (uint32_t i = 0; i < evidence->parts.count; i++) {
		if (part_at(evidence, i)->node == node)
			return i;
	}
	return -ENOENT;
}

static struct part *part_of(struct bsd_evidence *e, uint64_t node)
{
	int64_t known = bsd_evidence_find(e, node);
	struct part *p, **added;

	if (known >= 0)
		return part_at(e, (uint32_t)known);
	p = calloc(1, sizeof(*p));
	added = p ? array_add(&e->parts) : NULL;
	if (!added) {
		free(p);
		return NULL;
	}
	*added = p;
	p->node = node;
	slice_init(&p->slice);
	p->spans = ARRAY_OF(struct span);
	p->starts = ARRAY_OF(struct start);
	p->ends = ARRAY_OF(struct end);
	p->hops_out = ARRAY_OF(struct hop);
	p->hops_in = ARRAY_OF(struct hop);
	p->names = ARRAY_OF(uint8_t);
	p->unanswered = ARRAY_OF(struct unanswered);
	p->texts = ARRAY_OF(uint8_t);
	return p;
}

/* ---------------------------------------------------------- taking it --- */

struct taking {
	struct bsd_evidence *evidence;
	struct part *part;
};

static void extend(struct bsd_extent *x, uint64_t time_ns)
{
	if (!x->timed || time_ns < x->start_ns)
		x->start_ns = time_ns;
	if (!x->timed || time_ns > x->end_ns)
		x->end_ns = time_ns;
	x->timed = true;
}

static bool take_start(struct part *p, const struct bsd_record *r)
{
	struct span span = {r->span_id, r->parent_id};
	struct start start = {r->span_id, r->client, p->names.count};
	uint8_t length = (uint8_t)r->name_bytes;

	p->extent.span_count++;
	extend(&p->extent, r->time_ns);
	return array_append(&p->spans, &span, 1) &&
	       array_append(&p->starts, &start, 1) &&
	       array_append(&p->names, &length, 1) &&
	       array_append(&p->names, r->bytes, length);
}

static bool take_end(struct part *p, const struct bsd_record *r)
{
	struct end end = {.span_id = r->span_id, .client = r->client};

	extend(&p->extent, r->time_ns);
	return array_append(&p->ends, &end, 1);
}

static bool take_hop(struct array *hops, const struct bsd_record *r)
{
	struct hop hop = {r->node_id, r->span_id, r->injector, r->hop,
			  r->client};

	return array_append(hops, &hop, 1);
}

/* A text of either is no longer than a person reads. */
#define TEXT_MAX 127

static bool take_unanswered(struct part *p, const struct bsd_record *r)
{
	struct unanswered said = {
		.span_id = r->span_id,
		.client = r->client,
		.handle = r->handle,
		.text_at = p->texts.count,
		.address_bytes = (uint8_t)(r->name_bytes < TEXT_MAX
						   ? r->name_bytes
						   : TEXT_MAX),
		.error_bytes = (uint8_t)(r->rest_bytes < TEXT_MAX
						 ? r->rest_bytes
						 : TEXT_MAX),
		.excused = r->unsent && r->name_bytes,
	};

	return array_append(&p->unanswered, &said, 1) &&
	       array_append(&p->texts, r->bytes, said.address_bytes) &&
	       array_append(&p->texts, r->bytes + r->name_bytes,
			    said.error_bytes);
}

/* Those of one node come one after the other. */
static bool is_again(const struct bsd_evidence *e, const struct bsd_record *r)
{
	const struct bsd_crumb *last;

	if (!e->crumbs.count)
		return false;
	last = array_at(&e->crumbs, e->crumbs.count - 1);
	return last->node == r->node_id && last->name_bytes == r->name_bytes &&
	       (!r->name_bytes ||
		!memcmp(array_at(&e->crumb_names,
				 e->crumb_names.count - r->name_bytes),
			r->bytes, r->name_bytes));
}

/* Nothing else, for to any hash there is a text. */
static bool is_address(const uint8_t *name, uint32_t bytes)
{
	char text[INET6_ADDRSTRLEN];
	struct in6_addr parsed;

	if (!bytes || name[0] != '@' || bytes > sizeof(text) ||
	    memchr(name, '\0', bytes))
		return false;
	memcpy(text, name + 1, bytes - 1);
	text[bytes - 1] = '\0';
	return inet_pton(AF_INET, text, &parsed) == 1 ||
	       inet_pton(AF_INET6, text, &parsed) == 1;
}

static bool take_crumb(struct bsd_evidence *e, const struct bsd_record *r)
{
	struct bsd_crumb crumb = {
		.node = r->node_id,
		.name_bytes = r->name_bytes,
		.address = is_address(r->bytes, r->name_bytes),
	};

	return is_again(e, r) ||
	       (array_append(&e->crumbs, &crumb, 1) &&
		array_append(&e->crumb_names, r->bytes, r->name_bytes));
}

static int take(void *arg, const struct bsd_record *r)
{
	const struct taking *t = arg;
	struct part *p = t->part;
	bool fits;

	p->truncated += r->truncated;
	switch (r->type) {
	case BS_RECORD_SPAN_START:
		fits = take_start(p, r);
		break;
	case BS_RECORD_SPAN_END:
		fits = take_end(p, r);
		break;
	case BS_RECORD_HOP_OUT:
		fits = take_hop(&p->hops_out, r);
		break;
	case BS_RECORD_HOP_IN:
		fits = take_hop(&p->hops_in, r) && take_crumb(t->evidence, r);
		break;
	case BS_RECORD_BREADCRUMB:
		fits = take_crumb(t->evidence, r);
		break;
	case BS_RECORD_UNANSWERED:
		fits = take_unanswered(p, r);
		break;
	default:
		return 0;
	}
	p->items++;
	return fits ? 0 : -ENOMEM;
}

struct bsd_added bsd_evidence_add(struct bsd_evidence *evidence, uint64_t node,
				  const uint8_t *bytes, size_t n)
{
	struct bsd_added added = {0};
	struct taking taking = {.evidence = evidence};
	const uint8_t *names;
	uint64_t before;

	evidence->crumbs.count = evidence->crumb_names.count = 0;
	if (evidence->gave_up || !n) {
		added.gave_up = evidence->gave_up;
		added.items = evidence->items;
		return added;
	}
	taking.part = part_of(evidence, node);
	if (!taking.part) {
		added.error = -ENOMEM;
		return added;
	}
	evidence->judged = false;
	before = taking.part->items + slice_items(&taking.part->slice);
	added.error = slice_feed(&taking.part->slice, bytes, n, take, &taking);
	evidence->items +=
		taking.part->items + slice_items(&taking.part->slice) - before;
	/* Only now they stay where they are. */
	names = evidence->crumb_names.entries;
	for (uint32_t i = 0; i < evidence->crumbs.count; i++) {
		struct bsd_crumb *crumb = array_at(&evidence->crumbs, i);

		if (crumb->name_bytes) {
			crumb->name = names;
			names += crumb->name_bytes;
		}
	}
	if (evidence->items > evidence->limit)
		bsd_evidence_give_up(evidence);
	added.gave_up = evidence->gave_up;
	added.items = evidence->items;
	added.n_crumbs = evidence->crumbs.count;
	added.crumbs = (const struct bsd_crumb *)evidence->crumbs.entries;
	return added;
}

uint64_t bsd_evidence_restart(struct bsd_evidence *evidence, uint64_t node)
{
	int64_t number = bsd_evidence_find(evidence, node);
	uint32_t i = (uint32_t)number;
	struct part *p;

	if (number < 0)
		return evidence->items;
	p = part_at(evidence, i);
	evidence->items -= p->items + slice_items(&p->slice);
	evidence->judged = false;
	free_part(p);
	evidence->parts.count--;
	memmove(array_at(&evidence->parts, i),
		array_at(&evidence->parts, i + 1),
		(evidence->parts.count - i) * sizeof(struct part *));
	return evidence->items;
}

void bsd_evidence_give_up(struct bsd_evidence *evidence)
{
	if (!evidence->gave_up)
		evidence->given_up = bsd_evidence_extent(evidence);
	evidence->gave_up = true;
	evidence->items = 0;
	free_parts(evidence);
}

/* ------------------------------------------------------------- asking --- */

struct bsd_extent bsd_evidence_extent(const struct bsd_evidence *evidence)
{
	struct bsd_extent sum = {0};

	if (evidence->gave_up)
		return evidence->given_up;
	for (uint32_t i = 0; i < evidence->parts.count; i++) {
		const struct bsd_extent *x = &part_at(evidence, i)->extent;

		sum.span_count += x->span_count;
		if (x->timed) {
			extend(&sum, x->start_ns);
			extend(&sum, x->end_ns);
		}
	}
	return sum;
}

size_t bsd_evidence_slices(const struct bsd_evidence *evidence)
{
	return evidence->parts.count;
}

uint64_t bsd_evidence_node(const struct bsd_evidence *evidence, size_t i)
{
	return part_at(evidence, (uint32_t)i)->node;
}

const struct bsd_slice *bsd_evidence_slice(const struct bsd_evidence *evidence,
					   size_t i)
{
	return &part_at(evidence, (uint32_t)i)->slice;
}

uint64_t bsd_evidence_truncated(const struct bsd_evidence *evidence, size_t i)
{
	return part_at(evidence, (uint32_t)i)->truncated;
}

int64_t bsd_evidence_judge(struct bsd_evidence *evidence, uint32_t few)
{
	int error;

	if (evidence->judged && evidence->few == few)
		return evidence->findings.count;
	evidence->findings.count = 0;
	evidence->few = few;
	error = judge(evidence);
	if (error)
		return error;
	evidence->judged = true;
	return evidence->findings.count;
}

const struct bsd_finding *
bsd_evidence_findings(const struct bsd_evidence *evidence)
{
	return (const struct bsd_finding *)evidence->findings.entries;
}
