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

/* In a process of its own, so that scenarios share nothing. */
static int explore(uint64_t most)
{
	uint64_t executions = 0, redundant = 0;
	bool all = false;

	choices_begin();
	*found = (struct found){0};
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
		all = !choices_go_on();
		if (all || (most && executions + redundant >= most))
			break;
	}
	printf("%s: %ju executions%s, and %ju cut short; up to %u steps\n",
	       scenario->name, (uintmax_t)executions,
	       all ? ", which are all" : " of more", (uintmax_t)redundant,
	       found->deepest);
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
	bool all = option(argc, argv, "--all");
	int failed = 0;

	choices_new();
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
