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
	OP_LOCK,
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

/* --------------------------------------------------------------- explore --- */

/* Before each access: others may have their turn first. Returns when it is ours
 * again. */
void explore_step(const struct op *op);
/* 0 is what happens where nothing is unusual. */
uint32_t explore_choose(uint32_t n);
/* Where the party may die without anybody else having a turn. */
void explore_mortal(void);
bool explore_is_running(void);
uint32_t explore_self(void);
/* futex_wait: look at words; then sleep on them, unless they have changed. */
void explore_look(const void *const *words, uint32_t n, const void *site);
void explore_sleep(void);
void explore_wake(const void *word);
void explore_lock(const void *mutex, const void *site);
void explore_unlock(const void *mutex);
/* Until somebody else has done something. */
void explore_pause(const void *site);
/* The order in which things depend on each other, for partial-order reduction:
 * how many steps of each party came before. */
struct steps {
	uint32_t of[WEAK_PARTIES];
};
struct steps *explore_steps(void);
struct deed *explore_deed(void);
void steps_join(struct steps *to, const struct steps *from);
__attribute__((format(printf, 1, 2), noreturn)) void
explore_fail(const char *format, ...);

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
