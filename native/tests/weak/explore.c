/* SPDX-License-Identifier: Apache-2.0 */
/* Whose turn it is, and which executions need not be tried: weak.h. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "check.h"
#include "mapping.h"
#include "model.h"

#define POINTS_MAX 20000 /* of an execution, at which there is a choice */
#define EVENTS_MAX 8000
#define STACK_BYTES (256 << 10)
#define PRIVATES_MAX 4
#define PRIVATE_BYTES 1024

/* How the process of an execution ends. */
enum end {
	END_WELL = 0,
	END_FAILED = 1,
	END_REDUNDANT = 2, /* another execution shows the same */
};

/* ------------------------------------------------------------ the choices --- */

/* Where an execution could go on in several ways. */
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
	uint32_t prefix; /* so many points are as they were */
	uint32_t n;	 /* so many there were */
	uint32_t met;	 /* outcomes */
	uint32_t deepest;
	struct point points[POINTS_MAX];
} * tree;

static const struct weak_scenario *scenario;

/* ------------------------------------------------------------ the parties --- */

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
	uint32_t point;	       /* NOBODY: there was no choice */
	struct op op;
	struct deed deed;
};

static struct event events[EVENTS_MAX];
static uint32_t n_events;
static uint32_t current = NOBODY;
static uint32_t points; /* so many were passed */
static uint8_t asleep;	/* see struct point */
static bool running, starting, somebody_died, replays;

static const void *locked[WEAK_PARTIES]; /* by whom: its mutex */

bool explore_is_running(void)
{
	return running;
}

uint32_t explore_self(void)
{
	return current;
}

uint32_t weak_self(void)
{
	return current;
}

struct steps *explore_steps(void)
{
	return &parties[current].steps;
}

struct deed *explore_deed(void)
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

/* ---------------------------------------------------------------- reports --- */

/* A signal is one that the program sends itself, by abort() or by a fault: so
 * anything may be called. */
/* NOLINTBEGIN(bugprone-signal-handler) */
static void print_execution(void)
{
	uint32_t n = points < POINTS_MAX ? points : POINTS_MAX;

	running = false;
	for (uint32_t i = 0; i < n_events; i++)
		report_event(i, events[i].party,
			     scenario->parties[events[i].party].name,
			     &events[i].op, &events[i].deed);
	fprintf(stderr, "%s: the same again: --only %s --replay ",
		scenario->name, scenario->name);
	for (uint32_t i = 0; i < n; i++)
		fprintf(stderr, "%s%u", i ? "," : "", tree->points[i].choice);
	fprintf(stderr, "\n");
}

void explore_fail(const char *format, ...)
{
	char what[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(what, sizeof(what), format, args);
	va_end(args);
	print_execution();
	fprintf(stderr, "%s: %s\n", scenario->name, what);
	fflush(stderr);
	_exit(END_FAILED);
}

/* A CHECK(), or a crash of what is checked. */
static void on_signal(int number)
{
	signal(number, SIG_DFL);
	explore_fail("%s", strsignal(number));
}
/* NOLINTEND(bugprone-signal-handler) */

/* --------------------------------------------------------------- choosing --- */

static struct point *point_new(void)
{
	struct point *p = &tree->points[points++];

	if (points >= POINTS_MAX)
		explore_fail("it goes on for ever");
	memset(p, 0, sizeof(*p));
	return p;
}

uint32_t explore_choose(uint32_t n)
{
	struct point *p;

	if (n < 2)
		return 0;
	if (points < tree->prefix) {
		p = &tree->points[points++];
		if ((p->is_turn && !replays) || p->choice >= n)
			explore_fail("executions differ without a choice");
		p->n = (uint8_t)n;
		return p->choice;
	}
	p = point_new();
	p->n = (uint8_t)n;
	return 0;
}

uint32_t weak_choose(uint32_t n)
{
	return explore_choose(n);
}

static bool overlap(const struct op *a, const struct op *b)
{
	const uint8_t *x = a->at, *y = b->at;

	return x && y && x < y + b->bytes && y < x + a->bytes;
}

static bool is_fence(const struct op *op)
{
	return (op->kind == OP_FENCE && op->order == __ATOMIC_SEQ_CST) ||
	       op->kind == OP_SLEEP || op->kind == OP_WAKE;
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
	if (first->kind == OP_LOCK && second->kind == OP_LOCK)
		return first->at == second->at;
	return reads_before(first, second);
}

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

/* Try that party's step before that event, too. */
static void want_before(const struct event *e, uint32_t party)
{
	struct point *p;

	if (e->point == NOBODY)
		return;
	p = &tree->points[e->point];
	p->wanted |= p->enabled >> party & 1 ? (uint8_t)(1u << party)
					     : p->enabled;
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
			want_before(e, party);
	}
}

static void compare_all_with(const struct event *e)
{
	for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
		if (p != e->party && parties[p].exists && !parties[p].ended &&
		    depends(&e->op, &parties[p].next))
			want_before(e, p);
	}
}

static uint32_t lowest(uint8_t bits)
{
	return (uint32_t)__builtin_ctz(bits);
}

/* Whose turn it is; NOBODY can go on. *point: at which it was chosen. */
static uint32_t choose_turn(uint32_t *point)
{
	uint8_t can = who_can();
	struct point *p;
	uint8_t may;

	*point = NOBODY;
	if (!can)
		return NOBODY;
	if (points < tree->prefix) {
		p = &tree->points[points];
		if (!replays && (!p->is_turn || p->enabled != can))
			explore_fail("executions differ without a choice");
		if (!(can >> p->choice & 1))
			explore_fail("whose turn it is cannot go on");
		p->asleep = asleep;
	} else {
		p = point_new();
		points--;
		p->is_turn = true;
		p->enabled = can;
		p->asleep = asleep;
		may = (uint8_t)(can & ~asleep);
		if (!may)
			_exit(END_REDUNDANT);
		p->choice = (uint8_t)(current != NOBODY && may >> current & 1
					      ? current
					      : lowest(may));
		p->wanted = (uint8_t)(1u << p->choice);
	}
	*point = points++;
	return p->choice;
}

/* That event wakes those that it concerns. */
static void let_sleep(const struct event *e, const struct point *p)
{
	uint8_t before = (uint8_t)(p->asleep | p->tried);

	asleep = 0;
	for (uint32_t q = 0; q < WEAK_PARTIES; q++) {
		if (q != e->party && before >> q & 1 &&
		    !depends(&parties[q].next, &e->op))
			asleep |= (uint8_t)(1u << q);
	}
}

/* ------------------------------------------------------------------ turns --- */

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
	let_sleep(e, &tree->points[point]);
}

static void die(void)
{
	parties[current].died = parties[current].ended = true;
	somebody_died = true;
	explore_deed()->died = true;
}

static void next_turn(void)
{
	ucontext_t *from = current == NOBODY ? &main_context
					     : &parties[current].context;
	uint32_t point, next;

	next = choose_turn(&point);
	if (next != NOBODY)
		event_new(next, point);
	switch_to(from, next);
}

void explore_mortal(void)
{
	if (!scenario->parties[current].mortal || somebody_died)
		return;
	if (explore_choose(2)) {
		die();
		next_turn();
	}
}

void explore_step(const struct op *op)
{
	struct party *p = &parties[current];

	p->next = *op;
	if (starting) {
		switch_to(&p->context, NOBODY);
	} else {
		compare_with_all(current);
		next_turn();
	}
	explore_mortal();
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

/* ----------------------------------------------------------- other waits --- */

void explore_look(const void *const *words, uint32_t n, const void *site)
{
	struct party *p = &parties[current];
	struct op op = {.kind = OP_SLEEP, .at = words[n - 1], .site = site};

	CHECK(n <= sizeof(p->words) / sizeof(p->words[0]));
	for (uint32_t i = 0; i < n; i++)
		p->words[i] = words[i];
	p->n_words = n;
	explore_step(&op);
}

void explore_sleep(void)
{
	struct party *p = &parties[current];
	struct op woken = {.kind = OP_WOKEN, .site = p->next.site};

	p->sleeps = true;
	explore_step(&woken);
}

void explore_wake(const void *word)
{
	for (uint32_t q = 0; q < WEAK_PARTIES; q++) {
		struct party *p = &parties[q];

		for (uint32_t i = 0; p->sleeps && i < p->n_words; i++) {
			if (p->words[i] != word)
				continue;
			p->sleeps = false;
			steps_join(&p->steps, explore_steps());
		}
	}
}

void weak_join(uint32_t party)
{
	struct op op = {.kind = OP_JOIN,
			.target = party,
			.site = __builtin_return_address(0)};

	explore_step(&op);
	steps_join(explore_steps(), &parties[party].steps);
	memory_join(party);
}

bool weak_died(uint32_t party)
{
	return parties[party].died;
}

void explore_lock(const void *mutex, const void *site)
{
	struct op op = {.kind = OP_LOCK, .at = mutex, .site = site};

	explore_step(&op);
	locked[current] = mutex;
	memory_lock(mutex);
}

void explore_unlock(const void *mutex)
{
	memory_unlock(mutex);
	CHECK(locked[current] == mutex);
	locked[current] = NULL;
}

void explore_pause(const void *site)
{
	struct op op = {.kind = OP_PAUSE, .site = site};

	parties[current].paused_at = n_events;
	explore_step(&op);
	memory_settle();
}

/* -------------------------------------------------------------- execution --- */

void weak_private(void *at, size_t bytes)
{
	CHECK(n_privates < PRIVATES_MAX && bytes <= PRIVATE_BYTES);
	privates[n_privates].at = at;
	privates[n_privates].bytes = bytes;
	for (uint32_t p = 0; p < WEAK_PARTIES; p++)
		memcpy(parties[p].privates[n_privates], at, bytes);
	n_privates++;
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

void weak_met(uint32_t outcome)
{
	__atomic_fetch_or(&tree->met, 1u << outcome, __ATOMIC_RELAXED);
}

static uint32_t expected;

void weak_expect(uint32_t outcomes)
{
	expected = outcomes;
}

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

__attribute__((noreturn)) static void execute(void)
{
	signal(SIGABRT, on_signal);
	signal(SIGSEGV, on_signal);
	signal(SIGBUS, on_signal);
	memory_begin();
	for (uint32_t i = 0; i < WEAK_PARTIES && scenario->parties[i].run;
	     i++) {
		struct party *p = &parties[i];

		p->exists = true;
		getcontext(&p->context);
		p->context.uc_stack.ss_sp = stacks[i];
		p->context.uc_stack.ss_size = STACK_BYTES;
		makecontext(&p->context, run_party, 0);
	}
	running = starting = true;
	for (uint32_t i = 0; i < WEAK_PARTIES && scenario->parties[i].run; i++)
		switch_to(&main_context, i);
	starting = false;
	next_turn();
	check_ends();
	running = false;
	if (scenario->check)
		scenario->check();
	tree->n = points;
	if (n_events > tree->deepest)
		tree->deepest = n_events;
	_exit(END_WELL);
}

/* ------------------------------------------------------------ exploration --- */

/* To the next execution. False: all were tried. */
static bool go_on(void)
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
			p->choice = (uint8_t)lowest(left);
			break;
		}
		tree->n--;
	}
	tree->prefix = tree->n;
	return tree->n > 0;
}

static enum end execute_apart(void)
{
	pid_t child;
	int status;

	fflush(stdout);
	/* Not fork(): what is checked has handlers for that. */
	child = _Fork();
	CHECK(child >= 0);
	if (!child)
		execute();
	while (waitpid(child, &status, 0) < 0)
		CHECK(errno == EINTR);
	if (!WIFEXITED(status)) {
		fprintf(stderr, "%s: an execution ended by signal %d\n",
			scenario->name, WTERMSIG(status));
		return END_FAILED;
	}
	return (enum end)WEXITSTATUS(status);
}

/* In a process of its own, so that scenarios share nothing. */
static int explore(uint64_t most)
{
	uint64_t executions = 0, redundant = 0;
	bool all = false;

	tree->n = tree->prefix = tree->met = tree->deepest = 0;
	mapping_is_private = true;
	scenario->setup();
	for (;;) {
		enum end end = execute_apart();

		if (end == END_FAILED) {
			fprintf(stderr, "%s: failed after %ju executions\n",
				scenario->name, (uintmax_t)executions);
			return 1;
		}
		executions += end == END_WELL;
		redundant += end == END_REDUNDANT;
		all = !go_on();
		if (all || (most && executions + redundant >= most))
			break;
	}
	printf("%s: %ju executions%s, and %ju cut short; up to %u steps\n",
	       scenario->name, (uintmax_t)executions,
	       all ? ", which are all" : " of more", (uintmax_t)redundant,
	       tree->deepest);
	if ((tree->met & expected) != expected) {
		fprintf(stderr, "%s: outcomes 0x%x were met, not 0x%x\n",
			scenario->name, tree->met, expected);
		return 1;
	}
	return 0;
}

static int replay(const char *choices)
{
	const char *at = choices;
	char *end;

	mapping_is_private = replays = true;
	scenario->setup();
	/* What could be chosen there is found out on the way. */
	for (tree->n = 0; *at; at = *end ? end + 1 : end) {
		CHECK(tree->n < POINTS_MAX);
		tree->points[tree->n++].choice = (uint8_t)strtoul(at, &end, 10);
	}
	tree->prefix = tree->n;
	return execute_apart() == END_FAILED;
}

static const char *option(int argc, char **argv, const char *name)
{
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], name))
			return i + 1 < argc ? argv[i + 1] : "";
	}
	return NULL;
}

int weak_main(int argc, char **argv, const struct weak_scenario *scenarios,
	      size_t n)
{
	const char *only = option(argc, argv, "--only");
	const char *choices = option(argc, argv, "--replay");
	const char *most = option(argc, argv, "--most");
	bool all = option(argc, argv, "--all");
	int failed = 0;

	tree = mmap(NULL, sizeof(*tree), PROT_READ | PROT_WRITE,
		    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(tree != MAP_FAILED);
	for (size_t i = 0; i < n; i++) {
		uint64_t limit = scenarios[i].most;
		int status;
		pid_t child;

		scenario = &scenarios[i];
		if (only && strcmp(only, scenario->name) != 0)
			continue;
		if (most || all)
			limit = most ? strtoull(most, NULL, 10) : 0;
		fflush(stdout);
		child = _Fork();
		CHECK(child >= 0);
		if (!child) {
			status = choices ? replay(choices) : explore(limit);
			fflush(stdout);
			_exit(status);
		}
		CHECK_EQ(waitpid(child, &status, 0), child);
		failed |= status;
	}
	return failed != 0;
}
