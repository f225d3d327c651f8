/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model checker for the C code itself. What is checked is compiled as always,
 * but with -fsanitize=thread, and linked with calls.c instead of TSan: so each
 * of its loads, stores and fences is a call to us. The parties of a scenario
 * run in turns in one thread, and we say whose turn it is and what each load
 * sees. All that can happen is tried, one execution after the other, each in a
 * forked process of its own.
 *
 *   calls.c     what is done at each access (tsan_calls.h); what libc and the kernel do
 *   memory.c    what a load may see; which accesses race
 *   turns.c     whose turn it is; which steps must be tried in another order
 *   choices.c   what was chosen, and which choices are left, or go at random
 *   deaths.c    where in the code a party died, and where it is yet to
 *   explore.c   all executions of a scenario, each in a process of its own
 *   report.c    an execution that failed, in words
 *   mapping.c   one mapping for each memfd, for both of its sides
 *   process.c   a client process and its node, without the socket in between
 *
 * The memory
 * ----------
 *
 * Each word that is accessed atomically has a list of all values that were
 * stored to it, in an order that all parties agree on. Each party has a view:
 * how far in each list it must have seen. A load sees any value that is not
 * older than that. A release store carries its party's view along, and an
 * acquire load that sees it takes it over; fences as in C11. A store may be put
 * before others that its party has not seen yet. So loads and stores to
 * different words happen in any order that release, acquire and fences do not
 * forbid: what x86 and ARMv8 do, and more; all that C11 allows but one thing: a load
 * never sees a store that its own thread, in the order of the program, depends
 * on making later (load buffering). Where code relies on that being forbidden, this
 * does not tell.
 *
 * Accesses that are not atomic see what was stored last, and must be ordered with
 * all that conflicts: a race is an error, as TSan would say if both sides
 * shared a mapping.
 *
 * Who dies, dies at any of its atomic accesses, and before any of its plain
 * stores.
 *
 * The executions
 * --------------
 *
 * Dynamic partial-order reduction (Flanagan and Godefroid, 2005) with sleep
 * sets: two accesses are tried in both orders only if the first reads what the
 * second one writes, or if both are fences or take the same lock. That a load
 * comes before a store needs no turn of its own where the store came first: the
 * load may see what was there before.
 *
 * Where all would take too long, a part is tried. It is the latest choices that
 * are varied first, so that part has one beginning and all ends. Therefore half
 * of the executions go at random from the first step on, without any reduction: how often the
 * turn changes, and how often a load sees something old, is another in each;
 * and who may die does so at each place of the code in turn. Their numbers come
 * from a seed, which is 1 if none is given.
 *
 * A failure is printed as a list of who did what, and of choices, with which the
 * same program shows it again, whether they were made in order or at random:
 *
 *   test_weak_NAME [--all] [--most EXECUTIONS] [--seed SEED]
 *                  [--only SCENARIO [--replay CHOICES]]
 */
#ifndef BS_TEST_WEAK_H
#define BS_TEST_WEAK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WEAK_PARTIES 4

struct weak_party {
	const char *name;
	void (*run)(void);
	bool mortal; /* may die anywhere; one of them, once */
};

struct weak_scenario {
	const char *name;
	/* Once, before anybody runs. Each execution begins where it ends. */
	void (*setup)(void);
	struct weak_party parties[WEAK_PARTIES];
	/* When nobody can go on: CHECK(). Whoever has not ended then sleeps for
	 * ever, which is an error unless may_sleep. */
	void (*check)(void);
	bool may_sleep;
	/* So many executions at most, where all are too many for every day: half
	 * of them at random. --all lifts it. 0: all of them, always. */
	uint64_t most;
};

/* Runs them all; what main() returns. */
int weak_main(int argc, char **argv, const struct weak_scenario *scenarios,
	      size_t n);

/* For setup ------------------------------------------------------------- */

/* Memory that parties share. All other memory is nobody else's business. */
void weak_share(const char *name, const void *at, size_t bytes);
/* What stands there, for reports. */
void weak_name(const char *name, const void *at, size_t bytes);
/* Thread-local memory: each party has its own. */
void weak_private(void *at, size_t bytes);
/* As that party would. */
void weak_as(uint32_t party, void (*run)(void));

/* For parties ------------------------------------------------------------ */

uint32_t weak_self(void);
/* Wait until it has ended, or died; what it did has happened before. */
void weak_join(uint32_t party);
bool weak_died(uint32_t party);
/* Something is now one way, now another: 0 to n - 1. */
uint32_t weak_choose(uint32_t n);

/* For check -------------------------------------------------------------- */

/* An outcome that some execution must have, or the scenario shows nothing: a
 * bit each. weak_main() fails if not all of `expected` were met in the end. */
void weak_met(uint32_t outcome);
void weak_expect(uint32_t outcomes);

#endif
