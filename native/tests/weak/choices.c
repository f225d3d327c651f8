/* SPDX-License-Identifier: Apache-2.0 */
/* Where executions could have gone on in several ways, and which of these are
 * left to be tried, or chosen at random: weak.h. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"
#include "hash.h"
#include "model.h"

#define POINTS_MAX 20000 /* of an execution, at which there is a choice */

struct point {
	bool is_turn; /* else which of n */
	uint8_t choice, n;
	/* Of a turn, bits of parties: who could; who is to be tried; who was;
	 * who need not be, because it was tried before a step that does not
	 * concern it. */
	uint8_t enabled, wanted, tried, asleep;
};

/* Shared with the processes of the executions. */
static struct tree {
	uint32_t prefix;   /* so many points are as they were */
	uint32_t n;	   /* so many there were */
	uint32_t earliest; /* of which another way was tried, from 1 */
	struct point points[POINTS_MAX];
} * tree;

static uint32_t points; /* so many were passed, in this execution */
static bool replays;	/* what was chosen is known, and nothing else */

/* Of an execution at random: on the average one turn in so many goes to another
 * party, and one choice in so many is unusual. */
static struct {
	bool thrown;
	uint64_t state;
	uint32_t turns, others;
} dice;

void choices_new(void)
{
	tree = mmap(NULL, sizeof(*tree), PROT_READ | PROT_WRITE,
		    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(tree != MAP_FAILED);
}

void choices_begin(void)
{
	tree->n = tree->prefix = 0;
	tree->earliest = UINT32_MAX;
}

void choices_read(const char *text)
{
	const char *at = text;
	char *end;

	replays = true;
	/* What could be chosen there is found out on the way. */
	for (tree->n = 0; *at; at = *end ? end + 1 : end) {
		CHECK(tree->n < POINTS_MAX);
		tree->points[tree->n++].choice = (uint8_t)strtoul(at, &end, 10);
	}
	tree->prefix = tree->n;
}

void choices_print(void)
{
	uint32_t n = points < POINTS_MAX ? points : POINTS_MAX;

	for (uint32_t i = 0; i < n; i++)
		fprintf(stderr, "%s%u", i ? "," : "", tree->points[i].choice);
}

/* As SplitMix64 does: seeds that are close give other numbers from the first on. */
static uint32_t dice_below(uint32_t n)
{
	dice.state += 0x9e3779b97f4a7c15ull;
	return (uint32_t)(bs_fmix64(dice.state) % n);
}

/*
 * Some faults want many turns or old values, others a single one at the right
 * place: with the same odds everywhere, the one kind or the other is hardly ever
 * met. So each execution has its own.
 */
static uint32_t dice_odds(void)
{
	static const uint32_t odds[] = {2, 6, 20, 60};

	return odds[dice_below(sizeof(odds) / sizeof(odds[0]))];
}

void choices_at_random(uint64_t seed)
{
	tree->n = tree->prefix = 0;
	dice.thrown = true;
	dice.state = seed;
	dice.turns = dice_odds();
	dice.others = dice_odds();
}

static uint32_t one_of(uint8_t bits, uint32_t which)
{
	while (which--)
		bits &= (uint8_t)(bits - 1);
	return (uint32_t)__builtin_ctz(bits);
}

static uint32_t dice_turn(uint8_t may, uint32_t party)
{
	if (party != NOBODY && may >> party & 1) {
		if (may == 1u << party || dice_below(dice.turns))
			return party;
		may &= (uint8_t) ~(1u << party);
	}
	return one_of(may, dice_below((uint32_t)__builtin_popcount(may)));
}

static struct point *point_new(void)
{
	struct point *p = &tree->points[points++];

	if (points >= POINTS_MAX)
		explore_fail("it goes on for ever");
	memset(p, 0, sizeof(*p));
	return p;
}

/* `usual`: what is chosen where nobody has said what. */
static uint32_t choose_else(uint32_t n, uint32_t usual)
{
	struct point *p;

	if (points < tree->prefix) {
		p = &tree->points[points++];
		if ((p->is_turn && !replays) || p->choice >= n)
			explore_fail("executions differ without a choice");
		p->n = (uint8_t)n;
		return p->choice;
	}
	p = point_new();
	p->n = (uint8_t)n;
	p->choice = (uint8_t)usual;
	return usual;
}

uint32_t choose(uint32_t n)
{
	if (n < 2)
		return 0;
	if (dice.thrown && !dice_below(dice.others))
		return choose_else(n, 1 + dice_below(n - 1));
	return choose_else(n, 0);
}

bool choose_death(const void *site)
{
	bool due = deaths_pass(site);

	if (!choose_else(2, dice.thrown && due))
		return false;
	deaths_died(site);
	return true;
}

uint32_t weak_choose(uint32_t n)
{
	return choose(n);
}

uint32_t choose_turn(uint8_t can, uint8_t asleep, uint32_t party,
		     uint32_t *point)
{
	struct point *p;
	uint8_t may;

	*point = points;
	if (points < tree->prefix) {
		p = &tree->points[points++];
		if (!replays && (!p->is_turn || p->enabled != can))
			explore_fail("executions differ without a choice");
		if (!(can >> p->choice & 1))
			explore_fail("whose turn it is cannot go on");
		p->asleep = asleep;
		return p->choice;
	}
	p = point_new();
	p->is_turn = true;
	p->enabled = can;
	p->asleep = asleep;
	may = (uint8_t)(can & ~asleep);
	if (!may)
		explore_leave();
	if (dice.thrown)
		p->choice = (uint8_t)dice_turn(may, party);
	else
		p->choice = (uint8_t)(party != NOBODY && may >> party & 1
					      ? party
					      : one_of(may, 0));
	p->wanted = (uint8_t)(1u << p->choice);
	return p->choice;
}

void choices_want(uint32_t point, uint32_t party)
{
	struct point *p = &tree->points[point];

	p->wanted |= p->enabled >> party & 1 ? (uint8_t)(1u << party)
					     : p->enabled;
}

uint8_t choices_asleep(uint32_t point)
{
	const struct point *p = &tree->points[point];

	return (uint8_t)(p->asleep | p->tried);
}

void choices_end(void)
{
	tree->n = points;
}

bool choices_go_on(void)
{
	while (tree->n) {
		struct point *p = &tree->points[tree->n - 1];
		uint8_t left;

		if (!p->is_turn) {
			if (++p->choice < p->n)
				break;
			tree->n--;
			continue;
		}
		p->tried |= (uint8_t)(1u << p->choice);
		left = (uint8_t)(p->wanted & ~p->tried & ~p->asleep);
		if (left) {
			p->choice = (uint8_t)one_of(left, 0);
			break;
		}
		tree->n--;
	}
	tree->prefix = tree->n;
	if (tree->n && tree->n < tree->earliest)
		tree->earliest = tree->n;
	return tree->n > 0;
}

uint32_t choices_earliest(void)
{
	return tree->earliest;
}
