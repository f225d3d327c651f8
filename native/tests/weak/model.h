/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the checker share. weak.h says how it works. */
#ifndef BS_TEST_WEAK_MODEL_H
#define BS_TEST_WEAK_MODEL_H

#include "weak.h"

#define NOBODY UINT32_MAX

/* ------------------------------------------------------------ operations --- */

enum op_kind {
	OP_START,
	OP_LOAD,
	OP_STORE,
	OP_CHANGE, /* read, modify, write */
	OP_FENCE,
	OP_LIGHT, /* light_fence() */
	OP_HEAVY, /* membarrier() */
	OP_LOCK,
	OP_TRYLOCK,
	OP_SLEEP, /* futex_wait: a fence, and loads of its words */
	OP_WAKE,  /* futex_wake: a fence */
	OP_WOKEN,
	OP_PAUSE,
	OP_JOIN,
};

/* What a party is about to do. */
struct op {
	enum op_kind kind;
	const void *at;
	uint32_t bytes;
	int order; /* __ATOMIC_* */
	uint32_t target;
	const void *site; /* the return address of the call */
};

/* What it did, for the report. */
struct deed {
	uint64_t was, is; /* what it saw, what it stored */
	uint32_t newer;	  /* stores to that word that it did not see */
	uint32_t before;  /* stores that its own was put before */
	bool died;
};

/* --------------------------------------------------------------- choices --- */

/* 0 is what happens where nothing is unusual. */
uint32_t choose(uint32_t n);
/* Whether the party dies, where it is about to do something. */
bool choose_death(const void *site);
/* Whose turn it is, of parties (bits) that can go on; `party` is that of the step
 * before. *point: at which it was chosen. */
uint32_t choose_turn(uint8_t can, uint8_t asleep, uint32_t party,
		     uint32_t *point);
/* Try that party's step at that point, too. */
void choices_want(uint32_t point, uint32_t party);
/* Whose step need not be tried after that point, unless what was done there
 * concerns it. */
uint8_t choices_asleep(uint32_t point);
/* Once, before there are processes. */
void choices_new(void);
/* None were made. */
void choices_begin(void);
/* These, as choices_print() says them, and no others. */
void choices_read(const char *text);
/* The execution has ended. */
void choices_end(void);
/* To the next execution. False: all were tried. */
bool choices_go_on(void);
/* The earliest choice, from 1, of which another way was tried. */
uint32_t choices_earliest(void);
/* The next execution goes any way, whatever was tried. */
void choices_at_random(uint64_t seed);
void choices_print(void);

/* ---------------------------------------------------------------- deaths --- */

/* Once, before there are processes. */
void deaths_new(void);
/* Nobody died yet. */
void deaths_begin(void);
/* In the next execution at random somebody dies where few did, if it comes there. */
void deaths_aim(uint64_t seed);
/* Who may die came to this place. True: aimed at. */
bool deaths_pass(const void *site);
void deaths_died(const void *site);
/* The places where somebody could die, and those where somebody did. */
void deaths_count(uint32_t *places, uint32_t *died);

/* ----------------------------------------------------------------- turns --- */

/* An execution, until nobody can go on. Returns how many steps it had. */
uint32_t turns_run(const struct weak_scenario *scenario);
bool turns_are_running(void);
uint32_t turns_self(void);
/* Before each access: others may have their turn first. Returns when it is ours
 * again. */
void turns_step(const struct op *op);
/* Where the party may die without anybody else having a turn. */
void turns_mortal(const void *site);
/* futex_wait: look at words; then sleep on them, unless they have changed. */
void turns_look(const void *const *words, uint32_t n, const void *site);
void turns_sleep(void);
void turns_wake(const void *word);
void turns_lock(const void *mutex, const void *site);
/* False: somebody has it, or as if somebody had. */
bool turns_trylock(const void *mutex, const void *site);
void turns_unlock(const void *mutex);
/* Until somebody else has done something. */
void turns_pause(const void *site);
/* The order in which things depend on each other, for partial-order reduction:
 * how many steps of each party came before. */
struct steps {
	uint32_t of[WEAK_PARTIES];
};
struct steps *turns_steps(void);
void steps_join(struct steps *to, const struct steps *from);
struct deed *turns_deed(void);
/* All steps so far; nobody goes on after that. */
void turns_print(void);

/* --------------------------------------------------------------- explore --- */

/* Both end the process of the execution. */
__attribute__((format(printf, 1, 2), noreturn)) void
explore_fail(const char *format, ...);
/* Another execution shows the same. */
__attribute__((noreturn)) void explore_leave(void);

/* ---------------------------------------------------------------- memory --- */

bool memory_is_shared(const void *at);
void memory_begin(void);

uint64_t memory_load(const void *at, uint32_t bytes, int order);
void memory_store(void *at, uint32_t bytes, uint64_t value, int order);
uint64_t memory_change(void *at, uint32_t bytes,
		       uint64_t (*change)(uint64_t was, uint64_t operand),
		       uint64_t operand, int order);
/* Returns what was there. */
uint64_t memory_swap(void *at, uint32_t bytes, uint64_t expected,
		     uint64_t desired, int success, int failure);
void memory_fence(int order);
void memory_light_fence(void);
void memory_heavy_fence(void);
/* Not atomic. */
void memory_read(const void *at, size_t bytes, const void *site);
void memory_write(const void *at, size_t bytes, const void *site);
/* All that the other one did has happened before. */
void memory_join(uint32_t party);
/* All that was stored has arrived. */
void memory_settle(void);
/* Something has not. */
bool memory_has_news(uint32_t party);
/* What is handed over by locks. */
void memory_lock(const void *mutex);
void memory_unlock(const void *mutex);

/* ---------------------------------------------------------------- report --- */

void report_event(uint32_t number, uint32_t party, const char *party_name,
		  const struct op *op, const struct deed *deed);
void report_site(const void *site, char *text, size_t bytes);
void report_place(const void *at, char *text, size_t bytes);
const char *region_of(const void *at, size_t *offset);

#endif
