/* SPDX-License-Identifier: Apache-2.0 */
/* What is missing of a trace, whichever of its slices comes first. */
#include <stdio.h>
#include <stdlib.h>

#include "writer.h"

#define FEW 4

static struct bytes slice, content;

static struct bsd_evidence *new_evidence(uint64_t limit)
{
	struct bsd_evidence *e;

	CHECK_EQ(bsd_evidence_new(limit, &e), 0);
	return e;
}

/* What is in `content`, as a node's slice, in chunks of so many bytes. */
static struct bsd_added add(struct bsd_evidence *e, uint64_t node,
			    uint32_t handle, size_t chunk)
{
	struct bs_piece_header head = {
		.client = 1, .handle = handle, .flags = WHOLE};
	struct bsd_added added = {0};

	slice.n = 0;
	put_run(&slice, head, &content);
	for (size_t at = 0; at < slice.n; at += chunk) {
		added = bsd_evidence_add(e, node, slice.at + at,
					 chunk < slice.n - at ? chunk
							      : slice.n - at);
		CHECK_EQ(added.error, 0);
	}
	return added;
}

static const struct bsd_finding *only(struct bsd_evidence *e)
{
	CHECK_EQ(bsd_evidence_judge(e, FEW), 1);
	return bsd_evidence_findings(e);
}

static void hops_are_matched_one_by_one(void)
{
	struct bsd_evidence *e = new_evidence(1000);
	const struct bsd_finding *f;

	content.n = 0;
	for (uint32_t hop = 0; hop < 3; hop++)
		put_hop(&content, BS_RECORD_HOP_OUT, 10, hop);
	add(e, 10, 1, 7);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 3);
	content.n = 0;
	put_hop(&content, BS_RECORD_HOP_IN, 10, 0);
	put_hop(&content, BS_RECORD_HOP_IN, 10, 2);
	CHECK_EQ(add(e, 20, 1, 1 << 20).n_crumbs, 1);
	f = only(e);
	CHECK_EQ(f->kind, BSD_FINDING_HOP_OUT_UNMET);
	CHECK_EQ(f->node, 10);
	CHECK_EQ(f->number, 1);
	/* It arrived twice, elsewhere: one more than was sent. */
	content.n = 0;
	put_hop(&content, BS_RECORD_HOP_IN, 10, 1);
	put_hop(&content, BS_RECORD_HOP_IN, 10, 1);
	add(e, 30, 1, 1 << 20);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 0);
	/* The sender begins anew. */
	bsd_evidence_restart(e, 10);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 3);
	f = bsd_evidence_findings(e);
	CHECK_EQ(f[1].kind, BSD_FINDING_HOP_IN_UNMET);
	CHECK_EQ(f[1].node, 10);
	CHECK_EQ(f[1].other, 30);
	bsd_evidence_free(e);
}

static void starts_and_ends_are_matched_in_any_order(void)
{
	struct bsd_evidence *e = new_evidence(1000);
	const struct bsd_finding *f;

	content.n = 0;
	put_end(&content, 1);
	put_end(&content, 2);
	put_start(&content, 3, 0, "third");
	add(e, 10, 1, 11);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 3);
	content.n = 0;
	put_start(&content, 1, 3, "first");
	put_start(&content, 4, 3, "fourth");
	put_end(&content, 3);
	add(e, 10, 2, 1 << 20);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 2);
	f = bsd_evidence_findings(e);
	CHECK_EQ(f[0].kind, BSD_FINDING_UNFINISHED);
	CHECK_EQ(f[0].span_id, 4);
	CHECK_EQ(f[0].name_bytes, 6);
	CHECK(!memcmp(f[0].name, "fourth", 6));
	CHECK_EQ(f[1].kind, BSD_FINDING_UNSTARTED);
	CHECK_EQ(f[1].span_id, 2);
	/* Of an id that comes twice, each wants its own. */
	content.n = 0;
	put_start(&content, 4, 3, "again");
	put_end(&content, 4);
	put_start(&content, 2, 3, "");
	add(e, 10, 3, 1 << 20);
	f = only(e);
	CHECK_EQ(f->span_id, 4);
	CHECK(!memcmp(f->name, "fourth", 6));
	bsd_evidence_free(e);
}

static void an_end_that_comes_twice_is_told_once(void)
{
	struct bsd_evidence *e = new_evidence(1000);

	content.n = 0;
	put_end(&content, 1);
	put_end(&content, 2);
	put_end(&content, 1);
	add(e, 10, 1, 1 << 20);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 2);
	bsd_evidence_free(e);
}

static void a_parent_may_be_on_any_node(void)
{
	struct bsd_evidence *e = new_evidence(1000);
	const struct bsd_finding *f;

	content.n = 0;
	put_start(&content, 2, 1, "");
	put_start(&content, 3, 1, "");
	put_end(&content, 2);
	put_end(&content, 3);
	add(e, 10, 1, 1 << 20);
	f = only(e);
	CHECK_EQ(f->kind, BSD_FINDING_PARENT_MISSING);
	CHECK_EQ(f->other, 1);
	CHECK_EQ(f->span_id, 2);
	content.n = 0;
	put_start(&content, 1, 0, "");
	put_end(&content, 1);
	add(e, 20, 1, 1 << 20);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 0);
	CHECK_EQ(bsd_evidence_extent(e).span_count, 3);
	CHECK_EQ(bsd_evidence_extent(e).start_ns, 101);
	CHECK_EQ(bsd_evidence_extent(e).end_ns, 1003);
	bsd_evidence_restart(e, 20);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 1);
	CHECK_EQ(bsd_evidence_extent(e).start_ns, 102);
	bsd_evidence_free(e);
}

static void of_many_a_few_are_told_and_the_others_counted(void)
{
	struct bsd_evidence *e = new_evidence(1 << 20);
	const struct bsd_finding *f;

	content.n = 0;
	for (uint64_t i = 1; i <= 1000; i++)
		put_start(&content, i, 5000 + i, "");
	for (uint32_t node = 1; node <= 2; node++)
		add(e, node, 1, 1000);
	/* Of each node four that did not end; of the first, orphans. */
	CHECK_EQ(bsd_evidence_judge(e, FEW), 3 * FEW);
	f = bsd_evidence_findings(e);
	for (int i = 0; i < 3 * FEW; i++)
		CHECK_EQ(f[i].more, i % FEW == FEW - 1 ? 1000 - FEW : 0);
	CHECK_EQ(f[2 * FEW].kind, BSD_FINDING_PARENT_MISSING);
	CHECK_EQ(f[2 * FEW].node, 1);
	bsd_evidence_free(e);
}

static void above_the_limit_only_the_extent_is_known(void)
{
	struct bsd_evidence *e = new_evidence(4);
	struct bsd_added added;

	content.n = 0;
	put_start(&content, 1, 0, "");
	put_end(&content, 1);
	added = add(e, 10, 1, 1 << 20);
	CHECK_EQ(added.items, 3);
	CHECK(!added.gave_up);
	added = add(e, 20, 1, 1 << 20);
	CHECK(added.gave_up);
	CHECK_EQ(added.items, 0);
	CHECK_EQ(bsd_evidence_slices(e), 0);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 0);
	CHECK_EQ(bsd_evidence_extent(e).span_count, 2);
	CHECK(add(e, 30, 1, 1 << 20).gave_up);
	CHECK_EQ(bsd_evidence_extent(e).span_count, 2);
	bsd_evidence_free(e);
}

static void crumbs_are_told_as_they_come(void)
{
	struct bsd_evidence *e = new_evidence(1000);
	uint64_t nodes[] = {5, 5, 6, 6};
	const char *names[] = {"five", "five", "six", ""};
	struct bsd_added added;

	content.n = 0;
	for (int i = 0; i < 4; i++)
		put_record(&content, BS_RECORD_BREADCRUMB, &nodes[i],
			   sizeof(nodes[i]), names[i]);
	added = add(e, 10, 1, 1 << 20);
	CHECK_EQ(added.n_crumbs, 3);
	CHECK_EQ(added.crumbs[1].node, 6);
	CHECK_EQ(added.crumbs[1].name_bytes, 3);
	CHECK(!memcmp(added.crumbs[1].name, "six", 3));
	CHECK_EQ(added.items, 5);
	bsd_evidence_free(e);
}

static void only_an_ip_address_is_one(void)
{
	struct bsd_evidence *e = new_evidence(1000);
	const struct {
		const char *name;
		bool address;
	} crumbs[] = {
		{"@10.0.0.9", true},
		{"@fe80::1", true},
		{"@::ffff:255.255.255.255", true},
		{"10.0.0.9", false},
		{"@", false},
		{"", false},
		{"@10.0.0.9%x", false},
		{"@10.0.0.9 ", false},
		{"@10.0.9", false},
		{"@10.0.0.09", false},
		{"@fe80::1%eth0", false},
		{"@localhost", false},
		{"@0000:0000:0000:0000:0000:0000:255.255.255.255000", false},
	};
	const size_t n = sizeof(crumbs) / sizeof(crumbs[0]);
	const uint64_t cut = n;
	struct bsd_added added;

	content.n = 0;
	for (uint64_t i = 0; i < n; i++)
		put_record(&content, BS_RECORD_BREADCRUMB, &i, sizeof(i),
			   crumbs[i].name);
	/* A text that ends before its bytes do. */
	struct {
		uint64_t node;
		char name[16];
	} hidden = {cut, "@10.0.0.9\0x"};

	put_record(&content, BS_RECORD_BREADCRUMB, &hidden, sizeof(hidden), "");
	added = add(e, 10, 1, 1 << 20);
	CHECK_EQ(added.n_crumbs, n + 1);
	for (size_t i = 0; i < n; i++)
		CHECK_EQ(added.crumbs[i].address, crumbs[i].address);
	CHECK_EQ(added.crumbs[n].name_bytes, sizeof(hidden.name));
	CHECK(!added.crumbs[n].address);
	bsd_evidence_free(e);
}

static void put_unanswered_as(struct bytes *b, uint64_t span, uint32_t reach,
			      const char *address, const char *error)
{
	struct bs_unanswered said = {
		.span_id = span,
		.address_bytes = (uint32_t)strlen(address),
		.reach = reach,
	};
	char text[1000];

	snprintf(text, sizeof(text), "%s%s", address, error);
	put_record(b, BS_RECORD_UNANSWERED, &said, sizeof(said), text);
}

static void put_unanswered(struct bytes *b, uint64_t span, const char *address,
			   const char *error)
{
	put_unanswered_as(b, span, BS_REACH_NONE, address, error);
}

static void a_call_is_unanswered_by_the_word_of_its_sender(void)
{
	struct bsd_evidence *e = new_evidence(1000);
	struct bs_piece_header other = {
		.client = 2, .handle = 0, .flags = WHOLE};
	const struct bsd_finding *f;

	content.n = 0;
	put_hop(&content, BS_RECORD_HOP_OUT, 10, 0);
	add(e, 10, 0, 1 << 20);
	/* Another handle, another process, another node. */
	content.n = 0;
	put_unanswered(&content, 7, "10.0.0.1", "refused");
	add(e, 10, 1, 1 << 20);
	slice.n = 0;
	put_run(&slice, other, &content);
	bsd_evidence_add(e, 10, slice.at, slice.n);
	add(e, 20, 0, 1 << 20);
	CHECK_EQ(only(e)->kind, BSD_FINDING_HOP_OUT_UNMET);
	/* Of another span. Of a handle each run comes once. */
	bsd_evidence_restart(e, 10);
	content.n = 0;
	put_hop(&content, BS_RECORD_HOP_OUT, 10, 0);
	put_unanswered(&content, 8, "10.0.0.1", "refused");
	add(e, 10, 0, 1 << 20);
	CHECK_EQ(only(e)->kind, BSD_FINDING_HOP_OUT_UNMET);
	bsd_evidence_restart(e, 10);
	put_unanswered(&content, 7, "10.0.0.2", "timed out");
	add(e, 10, 0, 5);
	f = only(e);
	CHECK_EQ(f->kind, BSD_FINDING_HOP_UNANSWERED);
	CHECK_EQ(f->name_bytes, 8);
	CHECK_EQ(f->other, 9);
	CHECK(!memcmp(f->name, "10.0.0.2timed out", 17));
	/* It arrived after all. */
	content.n = 0;
	put_hop(&content, BS_RECORD_HOP_IN, 10, 0);
	add(e, 20, 3, 1 << 20);
	CHECK_EQ(bsd_evidence_judge(e, FEW), 0);
	bsd_evidence_free(e);
}

static enum bsd_finding_kind kind_of(uint32_t reach, const char *address)
{
	struct bsd_evidence *e = new_evidence(1000);
	enum bsd_finding_kind kind;
	const struct bsd_finding *f;

	content.n = 0;
	put_hop(&content, BS_RECORD_HOP_OUT, 10, 0);
	put_unanswered_as(&content, 7, reach, address, "no answer");
	add(e, 10, 0, 1 << 20);
	f = only(e);
	kind = f->kind;
	/* Whichever it is, address and error are told. */
	CHECK_EQ(f->name_bytes, strlen(address));
	CHECK_EQ(f->other, 9);
	bsd_evidence_free(e);
	return kind;
}

static void whatever_may_have_been_sent_is_missing(void)
{
	const enum bsd_finding_kind unmet = BSD_FINDING_HOP_OUT_UNMET,
				    unanswered = BSD_FINDING_HOP_UNANSWERED;

	CHECK_EQ(kind_of(BS_REACH_NONE, "10.0.0.2"), unanswered);
	CHECK_EQ(kind_of(BS_REACH_NONE, ""), unmet);
	CHECK_EQ(kind_of(BS_REACH_UNKNOWN, "10.0.0.1"), unmet);
	/* A value that is not known says nothing. */
	CHECK_EQ(kind_of(2, "10.0.0.2"), unmet);
	CHECK_EQ(kind_of(BS_REACH_NONE | 1u << 31, "10.0.0.2"), unmet);
	CHECK_EQ(kind_of(UINT32_MAX, "10.0.0.2"), unmet);
}

/* Three words about a call, of which one that excuses nothing is at each place. */
static void the_worst_counts(uint32_t reach, const char *address)
{
	struct bsd_evidence *e = new_evidence(1000);

	for (uint32_t worst = 0; worst < 3; worst++) {
		bsd_evidence_restart(e, 10);
		content.n = 0;
		put_hop(&content, BS_RECORD_HOP_OUT, 10, 0);
		for (uint32_t i = 0; i < 3; i++)
			put_unanswered_as(&content, 7,
					  i == worst ? reach : BS_REACH_NONE,
					  i == worst ? address : "10.0.0.1",
					  "refused");
		add(e, 10, 0, 1 << 20);
		CHECK_EQ(only(e)->kind, BSD_FINDING_HOP_OUT_UNMET);
	}
	bsd_evidence_free(e);
}

static void of_all_that_is_said_of_a_call_the_worst_counts(void)
{
	the_worst_counts(BS_REACH_UNKNOWN, "10.0.0.1");
	the_worst_counts(BS_REACH_NONE, "");
}

int main(void)
{
	RUN(hops_are_matched_one_by_one);
	RUN(starts_and_ends_are_matched_in_any_order);
	RUN(an_end_that_comes_twice_is_told_once);
	RUN(a_parent_may_be_on_any_node);
	RUN(of_many_a_few_are_told_and_the_others_counted);
	RUN(above_the_limit_only_the_extent_is_known);
	RUN(crumbs_are_told_as_they_come);
	RUN(only_an_ip_address_is_one);
	RUN(a_call_is_unanswered_by_the_word_of_its_sender);
	RUN(whatever_may_have_been_sent_is_missing);
	RUN(of_all_that_is_said_of_a_call_the_worst_counts);
	return 0;
}
