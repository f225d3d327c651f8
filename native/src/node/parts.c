/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is kept of a run in parts can be met in any order, because parts are kept
 * again each in its time. A slice has them in theirs: all but the first wait for the
 * end of the pass.
 *
 * They wait in a leftist heap: below each comes what is later, and the way down to the
 * right is never longer than that to the left. So to put one in, or to take the first
 * out, takes as many steps as the logarithm of their number, however they are met.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* How many there are on the way down to the right. */
static uint32_t rank(const struct later *l)
{
	return l ? l->rank : 0;
}

static bool is_before(const struct later *a, const struct later *b)
{
	if (a->run.from != b->run.from)
		return a->run.from < b->run.from;
	return a->number < b->number;
}

static struct later *join(struct later *a, struct later *b)
{
	struct later *t;

	if (!a || !b)
		return a ? a : b;
	if (is_before(b, a)) {
		t = a;
		a = b;
		b = t;
	}
	a->right = join(a->right, b);
	if (rank(a->left) < rank(a->right)) {
		t = a->left;
		a->left = a->right;
		a->right = t;
	}
	a->rank = rank(a->right) + 1;
	return a;
}

static struct later *take_first(struct search *s)
{
	struct later *l = s->later;

	if (l)
		s->later = join(l->left, l->right);
	return l;
}

void parts_free(struct search *s)
{
	struct later *l;

	while ((l = take_first(s)))
		free(l);
}

void search_put_off(struct bsn *n, struct search *s, const struct run *run)
{
	struct later *l = NULL;

	s->later_bytes += run->bytes;
	if (s->later_bytes > n->config.trace_bytes_max) {
		s->to.slice->flags |= BSN_SLICE_TRUNCATED;
	} else {
		l = malloc(sizeof(*l) + run->bytes);
		s->failed |= !l;
	}
	if (!l) {
		search_meet(n, s, run, (struct ticks){0});
		return;
	}
	l->left = l->right = NULL;
	l->rank = 1;
	l->number = s->parts++;
	l->run = *run;
	l->frame = (struct frame){.bytes = l->records};
	memcpy(l->records, run->frame->bytes + run->records, run->bytes);
	l->run.frame = &l->frame;
	l->run.records = 0;
	s->later = join(s->later, l);
}

bool search_put_part(struct bsn *n, struct search *s, uint32_t *bytes)
{
	struct later *l = take_first(s);
	struct ticks ticks;

	if (!l)
		return false;
	*bytes = l->run.bytes;
	/* Else it was released meanwhile. */
	if (s->to.slice) {
		slice_copy_run(n, &s->to, &l->run, NONE, &ticks);
		search_meet(n, s, &l->run, ticks);
	}
	free(l);
	return true;
}
