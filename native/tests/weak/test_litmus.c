/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checker itself: small programs of which it is known what C11 allows
 * (but for load buffering), and what it must therefore find and must not find.
 * An outcome is a bit: of two loads, what the first saw, plus twice what the
 * second one saw.
 */
#include <linux/membarrier.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "barrier.h"
#include "check.h"
#include "weak.h"

static struct {
	uint32_t x, y, z;
	uint8_t pad[64];
	uint32_t plain;
	pthread_mutex_t lock;
} m;
static uint32_t seen[4];

#define OUTCOME(a, b) (1u << ((a) | (b) << 1))

static void setup(uint32_t outcomes)
{
	weak_share("m", &m, sizeof(m));
	weak_name("x", &m.x, sizeof(m.x));
	weak_name("y", &m.y, sizeof(m.y));
	weak_name("z", &m.z, sizeof(m.z));
	weak_expect(outcomes);
}

/* Exactly these. */
static uint32_t allowed;

static void check(void)
{
	CHECK(allowed & OUTCOME(seen[0], seen[1]));
	weak_met(seen[0] | seen[1] << 1);
}

/* ------------------------------------------------------ store buffering --- */

static bool fence_a, fence_b, light_a, light_b, heavy_b;

static void sb_a(void)
{
	WRITE_ONCE(m.x, 1);
	if (fence_a)
		full_fence();
	if (light_a)
		light_fence();
	seen[0] = READ_ONCE(m.y);
}

static void sb_b(void)
{
	WRITE_ONCE(m.y, 1);
	if (fence_b)
		full_fence();
	if (light_b)
		light_fence();
	if (heavy_b)
		syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
	seen[1] = READ_ONCE(m.x);
}

static void sb_setup(void)
{
	allowed = 0xf;
	setup(allowed);
}

static void sb_half_setup(void)
{
	fence_a = true;
	sb_setup();
}

static void sb_fences_setup(void)
{
	fence_a = fence_b = true;
	allowed = 0xf & ~OUTCOME(0, 0);
	setup(allowed);
}

static void sb_light_setup(void)
{
	light_a = light_b = true;
	sb_setup();
}

static void sb_light_and_full_setup(void)
{
	light_a = fence_b = true;
	sb_setup();
}

static void sb_light_and_heavy_setup(void)
{
	light_a = heavy_b = true;
	allowed = 0xf & ~OUTCOME(0, 0);
	setup(allowed);
}

/* ------------------------------------------------------ message passing --- */

static bool by_release, by_acquire;

static void mp_a(void)
{
	WRITE_ONCE(m.x, 1);
	if (by_release)
		store_release(&m.y, 1);
	else
		WRITE_ONCE(m.y, 1);
}

static void mp_b(void)
{
	seen[0] = by_acquire ? load_acquire(&m.y) : READ_ONCE(m.y);
	seen[1] = READ_ONCE(m.x);
}

static void mp_setup(void)
{
	allowed = 0xf;
	setup(allowed);
}

static void mp_release_setup(void)
{
	by_release = true;
	mp_setup();
}

static void mp_acquire_setup(void)
{
	by_acquire = true;
	mp_setup();
}

static void mp_both_setup(void)
{
	by_release = by_acquire = true;
	allowed = 0xf & ~OUTCOME(1, 0);
	setup(allowed);
}

/* A release reaches through a change by somebody else. */
static void mp_chain_c(void)
{
	fetch_add(&m.y, 1);
}

static void mp_chain_b(void)
{
	seen[0] = load_acquire(&m.y) == 2;
	seen[1] = READ_ONCE(m.x);
}

static void mp_plain_a(void)
{
	m.plain = 1;
	store_release(&m.y, 1);
}

static void mp_plain_b(void)
{
	seen[0] = load_acquire(&m.y);
	seen[1] = seen[0] ? m.plain : 0;
}

static void mp_plain_setup(void)
{
	allowed = OUTCOME(0, 0) | OUTCOME(1, 1);
	setup(allowed);
}

/* ------------------------------------------------------ order of stores --- */

static void stores_a(void)
{
	WRITE_ONCE(m.x, 1);
	WRITE_ONCE(m.y, 2);
}

static void stores_b(void)
{
	WRITE_ONCE(m.y, 1);
	WRITE_ONCE(m.x, 2);
}

static void stores_check(void)
{
	seen[0] = m.x == 1;
	seen[1] = m.y == 1;
	check();
}

/* A word's values are seen in one order. */
static void coherence_a(void)
{
	WRITE_ONCE(m.x, 1);
	WRITE_ONCE(m.x, 2);
}

static void coherence_b(void)
{
	uint32_t first = READ_ONCE(m.x);

	seen[0] = READ_ONCE(m.x) < first;
}

static void coherence_setup(void)
{
	allowed = OUTCOME(0, 0);
	setup(allowed);
}

/* --------------------------------------- independent reads of two writes --- */

static void iriw_x(void)
{
	WRITE_ONCE(m.x, 1);
}

static void iriw_y(void)
{
	WRITE_ONCE(m.y, 1);
}

static void iriw_a(void)
{
	bool first = load_acquire(&m.x);

	if (fence_a)
		full_fence();
	seen[0] = first && !load_acquire(&m.y);
}

static void iriw_b(void)
{
	bool first = load_acquire(&m.y);

	if (fence_a)
		full_fence();
	seen[1] = first && !load_acquire(&m.x);
}

static void iriw_fences_setup(void)
{
	fence_a = true;
	allowed = 0xf & ~OUTCOME(1, 1);
	setup(allowed);
}

/* --------------------------------------------------------------- changes --- */

static void add_twice(void)
{
	fetch_add(&m.x, 1);
	fetch_add(&m.x, 1);
}

static void add_check(void)
{
	CHECK_EQ(m.x, 6);
	weak_met(0);
}

static void swap(void)
{
	uint32_t was = 0;

	if (compare_and_swap(&m.x, &was, 1))
		seen[0]++;
}

static void swap_check(void)
{
	CHECK_EQ(seen[0], 1);
	weak_met(0);
}

static void one_setup(void)
{
	setup(1);
}

static void lock_add(void)
{
	pthread_mutex_lock(&m.lock);
	m.plain++;
	pthread_mutex_unlock(&m.lock);
}

static void lock_check(void)
{
	CHECK_EQ(m.plain, 3);
	weak_met(0);
}

/* ----------------------------------------------------------------- death --- */

static void mortal(void)
{
	WRITE_ONCE(m.x, 1);
	m.plain = 1;
	store_release(&m.y, 1);
}

static void heir(void)
{
	weak_join(0);
	seen[0] = m.y;
	seen[1] = m.plain;
	CHECK(!m.y || m.x);
}

static void death_setup(void)
{
	allowed = 0xf & ~OUTCOME(1, 0);
	setup(allowed);
}

/* ------------------------------------------------- a part of executions --- */

/* In more orders than are tried. */
static void add_often(void)
{
	for (uint32_t i = 0; i < 8; i++)
		fetch_add(&m.z, 1);
}

static void early_a(void)
{
	WRITE_ONCE(m.x, 1);
	add_often();
}

static void early_b(void)
{
	seen[0] = READ_ONCE(m.x);
	add_often();
}

static void early_c(void)
{
	WRITE_ONCE(m.y, 1);
	add_often();
}

static void early_check(void)
{
	seen[1] = m.y;
	check();
}

/* What b saw. */
static void early_setup(void)
{
	allowed = OUTCOME(0, 0) | OUTCOME(1, 0);
	setup(allowed);
}

/* Whether c died before its first store. */
static void early_death_setup(void)
{
	allowed = 0xf;
	setup(allowed);
}

static const struct weak_scenario scenarios[] = {
	{.name = "store buffering",
	 .setup = sb_setup,
	 .parties = {{.name = "a", .run = sb_a}, {.name = "b", .run = sb_b}},
	 .check = check},
	{.name = "store buffering, one fence",
	 .setup = sb_half_setup,
	 .parties = {{.name = "a", .run = sb_a}, {.name = "b", .run = sb_b}},
	 .check = check},
	{.name = "store buffering, two fences",
	 .setup = sb_fences_setup,
	 .parties = {{.name = "a", .run = sb_a}, {.name = "b", .run = sb_b}},
	 .check = check},
	{.name = "store buffering, two light fences",
	 .setup = sb_light_setup,
	 .parties = {{.name = "a", .run = sb_a}, {.name = "b", .run = sb_b}},
	 .check = check},
	{.name = "store buffering, a light fence and a full one",
	 .setup = sb_light_and_full_setup,
	 .parties = {{.name = "a", .run = sb_a}, {.name = "b", .run = sb_b}},
	 .check = check},
	{.name = "store buffering, a light fence and a heavy one",
	 .setup = sb_light_and_heavy_setup,
	 .parties = {{.name = "a", .run = sb_a}, {.name = "b", .run = sb_b}},
	 .check = check},
	{.name = "message",
	 .setup = mp_setup,
	 .parties = {{.name = "a", .run = mp_a}, {.name = "b", .run = mp_b}},
	 .check = check},
	{.name = "message, release",
	 .setup = mp_release_setup,
	 .parties = {{.name = "a", .run = mp_a}, {.name = "b", .run = mp_b}},
	 .check = check},
	{.name = "message, acquire",
	 .setup = mp_acquire_setup,
	 .parties = {{.name = "a", .run = mp_a}, {.name = "b", .run = mp_b}},
	 .check = check},
	{.name = "message, both",
	 .setup = mp_both_setup,
	 .parties = {{.name = "a", .run = mp_a}, {.name = "b", .run = mp_b}},
	 .check = check},
	{.name = "message, through a change",
	 .setup = mp_both_setup,
	 .parties = {{.name = "a", .run = mp_a},
		     {.name = "b", .run = mp_chain_b},
		     {.name = "c", .run = mp_chain_c}},
	 .check = check},
	{.name = "message, plain",
	 .setup = mp_plain_setup,
	 .parties = {{.name = "a", .run = mp_plain_a},
		     {.name = "b", .run = mp_plain_b}},
	 .check = check},
	{.name = "order of stores",
	 .setup = mp_setup,
	 .parties = {{.name = "a", .run = stores_a},
		     {.name = "b", .run = stores_b}},
	 .check = stores_check},
	{.name = "coherence",
	 .setup = coherence_setup,
	 .parties = {{.name = "a", .run = coherence_a},
		     {.name = "b", .run = coherence_b}},
	 .check = check},
	{.name = "independent reads",
	 .setup = mp_setup,
	 .parties = {{.name = "x", .run = iriw_x},
		     {.name = "y", .run = iriw_y},
		     {.name = "a", .run = iriw_a},
		     {.name = "b", .run = iriw_b}},
	 .check = check},
	{.name = "independent reads, fences",
	 .setup = iriw_fences_setup,
	 .parties = {{.name = "x", .run = iriw_x},
		     {.name = "y", .run = iriw_y},
		     {.name = "a", .run = iriw_a},
		     {.name = "b", .run = iriw_b}},
	 .check = check},
	{.name = "changes",
	 .setup = one_setup,
	 .parties = {{.name = "a", .run = add_twice},
		     {.name = "b", .run = add_twice},
		     {.name = "c", .run = add_twice}},
	 .check = add_check},
	{.name = "swaps",
	 .setup = one_setup,
	 .parties = {{.name = "a", .run = swap},
		     {.name = "b", .run = swap},
		     {.name = "c", .run = swap}},
	 .check = swap_check},
	{.name = "lock",
	 .setup = one_setup,
	 .parties = {{.name = "a", .run = lock_add},
		     {.name = "b", .run = lock_add},
		     {.name = "c", .run = lock_add}},
	 .check = lock_check},
	{.name = "death",
	 .setup = death_setup,
	 .parties = {{.name = "a", .run = mortal, .mortal = true},
		     {.name = "b", .run = heir}},
	 .check = check},
	{.name = "an early load",
	 .setup = early_setup,
	 .parties = {{.name = "b", .run = early_b},
		     {.name = "a", .run = early_a}},
	 .check = early_check,
	 .most = 200},
	{.name = "an early death",
	 .setup = early_death_setup,
	 .parties = {{.name = "a", .run = early_a},
		     {.name = "b", .run = early_b},
		     {.name = "c", .run = early_c, .mortal = true}},
	 .check = early_check,
	 .most = 200},
};

int main(int argc, char **argv)
{
	return weak_main(argc, argv, scenarios,
			 sizeof(scenarios) / sizeof(scenarios[0]));
}
