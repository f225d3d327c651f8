/* SPDX-License-Identifier: Apache-2.0 */
/* The parties of an execution, each on a stack of its own; what they wait for; and which
 * of their steps must be tried in another order: weak.h. */
#include <string.h>
#include <ucontext.h>

#include "check.h"
#include "model.h"

#define EVENTS_MAX 8000
#define STACK_BYTES (256 << 10)
#define PRIVATES_MAX 4
#define PRIVATE_BYTES 1024

static const struct weak_scenario *scenario;

static struct party {
	ucontext_t context;
	struct op next;	    /* what it is about to do */
	struct steps steps; /* that came before what it does */
	bool exists, ended, died;
	bool sleeps;	      /* until woken */
	const void *words[8]; /* on which */
	uint32_t n_words;
	uint32_t paused_at; /* events then */
	uint8_t privates[PRIVATES_MAX][PRIVATE_BYTES];
} parties[WEAK_PARTIES];

static struct {
	uint8_t *at;
	size_t bytes;
} privates[PRIVATES_MAX];
static uint32_t n_privates;

static uint8_t stacks[WEAK_PARTIES][STACK_BYTES] __attribute__((aligned(64)));
static ucontext_t main_context;

struct event {
	uint32_t party, index; /* the party's so many-th */
	uint32_t point;	       /* at which it was chosen */
	struct op op;
	struct deed deed;
};

static struct event events[EVENTS_MAX];
static uint32_t n_events;
static uint32_t current = NOBODY;
static uint8_t asleep; /* who need not have the next turn */
static bool running, starting, somebody_died;

static const void *locked[WEAK_PARTIES]; /* by whom: its mutex */

bool turns_are_running(void)
{
	return running;
}

uint32_t turns_self(void)
{
	return current;
}

uint32_t weak_self(void)
{
	return current;
}

struct steps *turns_steps(void)
{
	return &parties[current].steps;
}

struct deed *turns_deed(void)
{
	return &events[n_events - 1].deed;
}

void steps_join(struct steps *to, const struct steps *from)
{
	for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
		if (from->of[p] > to->of[p])
			to->of[p] = from->of[p];
	}
}

/* --------------------------------------------------------- private memory --- */

void weak_private(void *at, size_t bytes)
{
	CHECK(n_privates < PRIVATES_MAX && bytes <= PRIVATE_BYTES);
	privates[n_privates].at = at;
	privates[n_privates].bytes = bytes;
	for (uint32_t p = 0; p < WEAK_PARTIES; p++)
		memcpy(parties[p].privates[n_privates], at, bytes);
	n_privates++;
}

static void switch_privates(uint32_t from, uint32_t to)
{
	for (uint32_t i = 0; i < n_privates; i++) {
		if (from != NOBODY)
			memcpy(parties[from].privates[i], privates[i].at,
			       privates[i].bytes);
		if (to != NOBODY)
			memcpy(privates[i].at, parties[to].privates[i],
			       privates[i].bytes);
	}
}

void weak_as(uint32_t party, void (*run)(void))
{
	uint32_t before = current;

	switch_privates(before, party);
	current = party;
	run();
	switch_privates(party, before);
	current = before;
}

/* ----------------------------------------------------- what must be tried --- */

static bool overlap(const struct op *a, const struct op *b)
{
	const uint8_t *x = a->at, *y = b->at;

	return x && y && x < y + b->bytes && y < x + a->bytes;
}

static bool is_fence(const struct op *op)
{
	return (op->kind == OP_FENCE && op->order == __ATOMIC_SEQ_CST) ||
	       op->kind == OP_HEAVY || op->kind == OP_SLEEP ||
	       op->kind == OP_WAKE;
}

static bool is_lock(const struct op *op)
{
	return op->kind == OP_LOCK || op->kind == OP_TRYLOCK;
}

static bool reads_before(const struct op *first, const struct op *second)
{
	bool reads = first->kind == OP_LOAD || first->kind == OP_CHANGE ||
		     first->kind == OP_SLEEP;
	bool writes = second->kind == OP_STORE || second->kind == OP_CHANGE;

	if (!reads || !writes)
		return false;
	if (first->kind != OP_SLEEP)
		return overlap(first, second);
	for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
		for (uint32_t i = 0; i < parties[p].n_words; i++) {
			const struct op word = {.at = parties[p].words[i],
						.bytes = sizeof(uint32_t)};

			if (overlap(&word, second))
				return true;
		}
	}
	return false;
}

/* Whether it makes a difference that `second` comes after `first`, and not
 * before. */
static bool depends(const struct op *first, const struct op *second)
{
	if (is_fence(first) && is_fence(second))
		return true;
	if (first->kind == OP_LIGHT || second->kind == OP_LIGHT)
		return first->kind == OP_HEAVY || second->kind == OP_HEAVY;
	if (is_lock(first) && is_lock(second))
		return first->at == second->at;
	return reads_before(first, second);
}

/* What the party is about to do could have come before what others did. */
static void compare_with_all(uint32_t party)
{
	const struct party *q = &parties[party];

	if (q->next.kind == OP_LOAD)
		return; /* it sees what was there before anyway */
	for (uint32_t i = n_events; i-- > 0;) {
		const struct event *e = &events[i];

		if (e->party != party && e->index > q->steps.of[e->party] &&
		    depends(&e->op, &q->next))
			choices_want(e->point, party);
	}
}

static void compare_all_with(const struct event *e)
{
	for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
		if (p != e->party && parties[p].exists && !parties[p].ended &&
		    depends(&e->op, &parties[p].next))
			choices_want(e->point, p);
	}
}

/* That event wakes those that it concerns. */
static void let_sleep(const struct event *e)
{
	uint8_t before = choices_asleep(e->point);

	asleep = 0;
	for (uint32_t q = 0; q < WEAK_PARTIES; q++) {
		if (q != e->party && before >> q & 1 &&
		    !depends(&parties[q].next, &e->op))
			asleep |= (uint8_t)(1u << q);
	}
}

/* ------------------------------------------------------------------ turns --- */

static bool is_locked(const void *mutex)
{
	for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
		if (locked[p] == mutex)
			return true;
	}
	return false;
}

static bool can_go_on(uint32_t p)
{
	const struct party *q = &parties[p];

	if (!q->exists || q->ended || q->sleeps)
		return false;
	switch (q->next.kind) {
	case OP_LOCK:
		return !is_locked(q->next.at);
	case OP_JOIN:
		return parties[q->next.target].ended;
	case OP_PAUSE:
		return q->paused_at != n_events || memory_has_news(p);
	default:
		return true;
	}
}

static uint8_t who_can(void)
{
	uint8_t can = 0;

	for (uint32_t p = 0; p < WEAK_PARTIES; p++)
		can |= (uint8_t)(can_go_on(p) << p);
	return can;
}

static void switch_to(ucontext_t *from, uint32_t next)
{
	uint32_t before = current;

	if (next == before)
		return;
	switch_privates(before, next);
	current = next;
	swapcontext(from,
		    next == NOBODY ? &main_context : &parties[next].context);
}

/* It is chosen: what it is about to do is an event now. */
static void event_new(uint32_t party, uint32_t point)
{
	struct event *e = &events[n_events++];
	struct party *p = &parties[party];

	if (n_events == EVENTS_MAX)
		explore_fail("it goes on for ever");
	e->party = party;
	e->index = ++p->steps.of[party];
	e->point = point;
	e->op = p->next;
	e->deed = (struct deed){0};
	compare_all_with(e);
	let_sleep(e);
}

static void die(void)
{
	parties[current].died = parties[current].ended = true;
	somebody_died = true;
	turns_deed()->died = true;
}

static void next_turn(void)
{
	ucontext_t *from = current == NOBODY ? &main_context
					     : &parties[current].context;
	uint32_t point, next = NOBODY;
	uint8_t can = who_can();

	if (can) {
		next = choose_turn(can, asleep, current, &point);
		event_new(next, point);
	}
	switch_to(from, next);
}

void turns_mortal(const void *site)
{
	if (!scenario->parties[current].mortal || somebody_died)
		return;
	if (choose_death(site)) {
		die();
		next_turn();
	}
}

void turns_step(const struct op *op)
{
	struct party *p = &parties[current];

	p->next = *op;
	if (starting) {
		switch_to(&p->context, NOBODY);
	} else {
		compare_with_all(current);
		next_turn();
	}
	turns_mortal(op->site);
}

static void ended(void)
{
	parties[current].ended = true;
	next_turn();
}

static void run_party(void)
{
	scenario->parties[current].run();
	if (starting) {
		parties[current].ended = true;
		switch_to(&parties[current].context, NOBODY);
	}
	ended();
}

/* ------------------------------------------------------------------ waits --- */

void turns_look(const void *const *words, uint32_t n, const void *site)
{
	struct party *p = &parties[current];
	struct op op = {.kind = OP_SLEEP, .at = words[n - 1], .site = site};

	CHECK(n <= sizeof(p->words) / sizeof(p->words[0]));
	for (uint32_t i = 0; i < n; i++)
		p->words[i] = words[i];
	p->n_words = n;
	turns_step(&op);
}

void turns_sleep(void)
{
	struct party *p = &parties[current];
	struct op woken = {.kind = OP_WOKEN, .site = p->next.site};

	p->sleeps = true;
	turns_step(&woken);
}

void turns_wake(const void *word)
{
	for (uint32_t q = 0; q < WEAK_PARTIES; q++) {
		struct party *p = &parties[q];

		for (uint32_t i = 0; p->sleeps && i < p->n_words; i++) {
			if (p->words[i] != word)
				continue;
			p->sleeps = false;
			steps_join(&p->steps, turns_steps());
		}
	}
}

void weak_join(uint32_t party)
{
	struct op op = {.kind = OP_JOIN,
			.target = party,
			.site = __builtin_return_address(0)};

	turns_step(&op);
	steps_join(turns_steps(), &parties[party].steps);
	memory_join(party);
}

bool weak_died(uint32_t party)
{
	return parties[party].died;
}

void turns_lock(const void *mutex, const void *site)
{
	struct op op = {.kind = OP_LOCK, .at = mutex, .site = site};

	turns_step(&op);
	locked[current] = mutex;
	memory_lock(mutex);
}

bool turns_trylock(const void *mutex, const void *site)
{
	struct op op = {.kind = OP_TRYLOCK, .at = mutex, .site = site};

	turns_step(&op);
	/* An unlock is no step, so nobody's turn is between a lock and it for that
	 * alone. */
	if (is_locked(mutex) || choose(2))
		return false;
	locked[current] = mutex;
	memory_lock(mutex);
	return true;
}

void turns_unlock(const void *mutex)
{
	memory_unlock(mutex);
	CHECK(locked[current] == mutex);
	locked[current] = NULL;
}

void turns_pause(const void *site)
{
	struct op op = {.kind = OP_PAUSE, .site = site};

	parties[current].paused_at = n_events;
	turns_step(&op);
	memory_settle();
}

/* -------------------------------------------------------------- execution --- */

static void check_ends(void)
{
	for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
		if (!parties[p].exists || parties[p].ended ||
		    (scenario->may_sleep && parties[p].sleeps))
			continue;
		explore_fail("%s %s for ever", scenario->parties[p].name,
			     parties[p].sleeps ? "sleeps" : "waits");
	}
}

/* getcontext() may return twice, so no variable that changes is beside it. */
static void start_party(uint32_t i)
{
	struct party *p = &parties[i];

	p->exists = true;
	getcontext(&p->context);
	p->context.uc_stack.ss_sp = stacks[i];
	p->context.uc_stack.ss_size = STACK_BYTES;
	makecontext(&p->context, run_party, 0);
	switch_to(&main_context, i);
}

static void start_parties(void)
{
	running = starting = true;
	for (uint32_t i = 0; i < WEAK_PARTIES && scenario->parties[i].run; i++)
		start_party(i);
	starting = false;
}

uint32_t turns_run(const struct weak_scenario *s)
{
	scenario = s;
	start_parties();
	next_turn();
	check_ends();
	running = false;
	return n_events;
}

void turns_print(void)
{
	running = false;
	for (uint32_t i = 0; i < n_events; i++)
		report_event(i, events[i].party,
			     scenario->parties[events[i].party].name,
			     &events[i].op, &events[i].deed);
}
