/* SPDX-License-Identifier: Apache-2.0 */
/* A scenario's executions, each in a process of its own, until all were tried: weak.h. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "hash.h"
#include "mapping.h"
#include "model.h"

/* How the process of an execution ends. */
enum end {
	END_WELL = 0,
	END_FAILED = 1,
	END_REDUNDANT = 2, /* another execution shows the same */
};

static const struct weak_scenario *scenario;
static uint32_t expected; /* outcomes */
static uint64_t seed = 1;

/* Of all executions: shared with their processes. */
static struct found {
	uint32_t met; /* outcomes */
	uint32_t deepest;
} * found;

void weak_met(uint32_t outcome)
{
	__atomic_fetch_or(&found->met, 1u << outcome, __ATOMIC_RELAXED);
}

void weak_expect(uint32_t outcomes)
{
	expected = outcomes;
}

/* -------------------------------------------------------------- execution --- */

/* A signal is one that the program sends itself, by abort() or by a fault: so
 * anything may be called. */
/* NOLINTBEGIN(bugprone-signal-handler) */
void explore_fail(const char *format, ...)
{
	char what[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(what, sizeof(what), format, args);
	va_end(args);
	turns_print();
	fprintf(stderr, "%s: the same again: --only %s --replay ",
		scenario->name, scenario->name);
	choices_print();
	fprintf(stderr, "\n");
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

void explore_leave(void)
{
	/* What was seen on the way here could have been something else. */
	choices_end();
	_exit(END_REDUNDANT);
}

__attribute__((noreturn)) static void execute(void)
{
	uint32_t steps;

	signal(SIGABRT, on_signal);
	signal(SIGSEGV, on_signal);
	signal(SIGBUS, on_signal);
	memory_begin();
	steps = turns_run(scenario);
	if (scenario->check)
		scenario->check();
	choices_end();
	if (steps > found->deepest)
		found->deepest = steps;
	_exit(END_WELL);
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

/* ------------------------------------------------------------ exploration --- */

/* How many executions there were. */
static struct {
	uint64_t well, redundant, random;
	bool all;
} tried;

static bool execute_well(void)
{
	enum end end = execute_apart();

	tried.well += end == END_WELL;
	tried.redundant += end == END_REDUNDANT;
	if (end != END_FAILED)
		return true;
	fprintf(stderr, "%s: failed after %ju executions\n", scenario->name,
		(uintmax_t)(tried.well + tried.redundant));
	return false;
}

/* The latest choice first: so few executions vary only how it ends. */
static bool explore_in_order(uint64_t most)
{
	choices_begin();
	while (!tried.all) {
		if (!execute_well())
			return false;
		tried.all = !choices_go_on();
		if (most && tried.well + tried.redundant >= most)
			break;
	}
	return true;
}

static bool explore_at_random(uint64_t most)
{
	for (uint64_t i = 0; i < most; i++) {
		/* As if each were the only one of its seed. */
		uint64_t own_seed = bs_fmix64(seed) + i;

		choices_at_random(own_seed);
		deaths_aim(own_seed);
		if (!execute_well()) {
			fprintf(stderr, "%s: at random, seed %ju\n",
				scenario->name, (uintmax_t)seed);
			return false;
		}
		tried.random++;
	}
	return true;
}

static void print_tried(uint32_t places, uint32_t died)
{
	printf("%s: %ju executions", scenario->name,
	       (uintmax_t)(tried.well - tried.random));
	if (tried.all)
		printf(", which are all");
	else
		printf(" of more, from choice %u on, and %ju at random, seed %ju",
		       choices_earliest(), (uintmax_t)tried.random,
		       (uintmax_t)seed);
	printf("; %ju cut short; up to %u steps", (uintmax_t)tried.redundant,
	       found->deepest);
	if (places)
		printf("; killed at %u of %u places", died, places);
	printf("\n");
}

/* In a process of its own, so that scenarios share nothing. */
static int explore(uint64_t most)
{
	uint32_t places, died;

	deaths_begin();
	*found = (struct found){0};
	mapping_is_private = true;
	scenario->setup();
	if (!explore_in_order(most - most / 2))
		return 1;
	if (!tried.all && !explore_at_random(most / 2))
		return 1;
	deaths_count(&places, &died);
	print_tried(places, died);
	/* Some are hardly ever come to. */
	if (died < places - places / 4) {
		fprintf(stderr, "%s: too few places at which to be killed\n",
			scenario->name);
		return 1;
	}
	if ((found->met & expected) != expected) {
		fprintf(stderr, "%s: outcomes 0x%x were met, not 0x%x\n",
			scenario->name, found->met, expected);
		return 1;
	}
	return 0;
}

static int replay(const char *choices)
{
	mapping_is_private = true;
	scenario->setup();
	choices_read(choices);
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
	const char *given_seed = option(argc, argv, "--seed");
	bool all = option(argc, argv, "--all");
	int failed = 0;

	if (given_seed)
		seed = strtoull(given_seed, NULL, 0);
	choices_new();
	deaths_new();
	found = mmap(NULL, sizeof(*found), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(found != MAP_FAILED);
	for (size_t i = 0; i < n; i++) {
		uint64_t limit = scenarios[i].most;
		int status;
		pid_t child;

		scenario = &scenarios[i];
		if (only && strcmp(only, scenario->name) != 0)
			continue;
		if (limit && (most || all))
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
