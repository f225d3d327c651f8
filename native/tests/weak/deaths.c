/* SPDX-License-Identifier: Apache-2.0 */
/* Where in the code parties could die, and where they did: so that, where not all
 * executions are tried, those at random have somebody die at each place. weak.h. */
#include <string.h>
#include <sys/mman.h>

#include "check.h"
#include "hash.h"
#include "model.h"

#define PLACES_MAX 1024

struct place {
	const void *site;
	uint32_t passes; /* the most in one execution */
	uint32_t aimed, died;
};

/* Shared with the processes of the executions. */
static struct deaths {
	uint32_t n;
	struct place places[PLACES_MAX];
} * deaths;

static uint32_t passed[PLACES_MAX]; /* in this execution */
static const void *aim;
static uint32_t aim_pass; /* the so many-th there, from 1 */

void deaths_new(void)
{
	deaths = mmap(NULL, sizeof(*deaths), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(deaths != MAP_FAILED);
}

void deaths_begin(void)
{
	deaths->n = 0;
}

/* Where a loop comes by often, at any of its rounds. */
void deaths_aim(uint64_t seed)
{
	struct place *least = &deaths->places[0];

	if (!deaths->n)
		return;
	for (uint32_t i = 1; i < deaths->n; i++) {
		if (deaths->places[i].aimed < least->aimed)
			least = &deaths->places[i];
	}
	least->aimed++;
	aim = least->site;
	aim_pass = 1 + (uint32_t)(bs_fmix64(seed) % least->passes);
}

static uint32_t place_at(const void *site)
{
	uint32_t i = 0;

	while (i < deaths->n && deaths->places[i].site != site)
		i++;
	if (i == deaths->n) {
		CHECK(i < PLACES_MAX);
		deaths->places[i] = (struct place){.site = site};
		deaths->n++;
	}
	return i;
}

bool deaths_pass(const void *site)
{
	uint32_t i = place_at(site);

	passed[i]++;
	if (passed[i] > deaths->places[i].passes)
		deaths->places[i].passes = passed[i];
	return site == aim && passed[i] == aim_pass;
}

void deaths_died(const void *site)
{
	deaths->places[place_at(site)].died++;
}

void deaths_count(uint32_t *places, uint32_t *died)
{
	*places = deaths->n;
	*died = 0;
	for (uint32_t i = 0; i < deaths->n; i++)
		*died += deaths->places[i].died > 0;
}
