/* SPDX-License-Identifier: Apache-2.0 */
/* An execution in words: who did what, to which word, where in the sources. */
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "model.h"

#define NAMES_MAX 64

static struct {
	const char *name;
	const uint8_t *at;
	size_t bytes;
} names[NAMES_MAX];
static uint32_t n_names;

void weak_name(const char *name, const void *at, size_t bytes)
{
	CHECK(n_names < NAMES_MAX);
	names[n_names].name = name;
	names[n_names].at = at;
	names[n_names++].bytes = bytes;
}

void report_place(const void *at, char *text, size_t bytes)
{
	const uint8_t *byte = at;
	const char *region;
	size_t offset;

	for (uint32_t i = n_names; i-- > 0;) {
		if (byte < names[i].at || byte >= names[i].at + names[i].bytes)
			continue;
		offset = (size_t)(byte - names[i].at);
		if (offset)
			snprintf(text, bytes, "%s+%zu", names[i].name, offset);
		else
			snprintf(text, bytes, "%s", names[i].name);
		return;
	}
	region = region_of(at, &offset);
	if (region)
		snprintf(text, bytes, "%s+0x%zx", region, offset);
	else
		snprintf(text, bytes, "%p", at);
}

extern const char __executable_start; /* NOLINT: the linker's name */

/* By addr2line, where there is one that knows this program. */
static void find_site(const void *site, char *text, size_t bytes)
{
	uintptr_t from = (uintptr_t)&__executable_start;
	uintptr_t at = (uintptr_t)site - from - 1;
	char command[256], program[160] = "", line[200];
	FILE *told;

	snprintf(text, bytes, "program+0x%zx", (size_t)at);
	if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0)
		return;
	snprintf(command, sizeof(command),
		 "addr2line -s -e '%s' 0x%zx 2>/dev/null", program, (size_t)at);
	told = popen(command, "r"); /* NOLINT(cert-env33-c): a report */
	if (!told)
		return;
	if (fgets(line, sizeof(line), told) && line[0] != '?') {
		line[strcspn(line, " \n")] = '\0';
		snprintf(text, bytes, "%s", line);
	}
	pclose(told);
}

#define SITES 512

/* The same places come up again and again. */
void report_site(const void *site, char *text, size_t bytes)
{
	static struct {
		const void *site;
		char text[256];
	} known[SITES];
	uint32_t i = (uint32_t)((uintptr_t)site % SITES);

	if (known[i].site != site) {
		known[i].site = site;
		find_site(site, known[i].text, sizeof(known[i].text));
	}
	snprintf(text, bytes, "%s", known[i].text);
}

static const char *order_name(int order)
{
	switch (order) {
	case __ATOMIC_RELAXED:
		return "relaxed";
	case __ATOMIC_ACQUIRE:
	case __ATOMIC_CONSUME:
		return "acquire";
	case __ATOMIC_RELEASE:
		return "release";
	case __ATOMIC_ACQ_REL:
		return "acquire and release";
	default:
		return "sequentially consistent";
	}
}

static void print_stored(const struct deed *deed)
{
	fprintf(stderr, " 0x%jx", (uintmax_t)deed->is);
	if (deed->before)
		fprintf(stderr, ", before %u that others stored", deed->before);
}

static void print_seen(const struct deed *deed)
{
	fprintf(stderr, " 0x%jx", (uintmax_t)deed->was);
	if (deed->newer)
		fprintf(stderr, ", and not %u newer", deed->newer);
}

void report_event(uint32_t number, uint32_t party, const char *party_name,
		  const struct op *op, const struct deed *deed)
{
	char where[128] = "", place[128] = "";

	(void)party;
	if (op->site)
		report_site(op->site, where, sizeof(where));
	if (op->at)
		report_place(op->at, place, sizeof(place));
	fprintf(stderr, "%4u  %-10s %-18s ", number, party_name, where);
	if (deed->died) {
		fprintf(stderr, "dies\n");
		return;
	}
	switch (op->kind) {
	case OP_LOAD:
		fprintf(stderr, "%s: sees", place);
		print_seen(deed);
		fprintf(stderr, " (%s)", order_name(op->order));
		break;
	case OP_STORE:
		fprintf(stderr, "%s: stores", place);
		print_stored(deed);
		fprintf(stderr, " (%s)", order_name(op->order));
		break;
	case OP_CHANGE:
		fprintf(stderr, "%s: sees", place);
		print_seen(deed);
		fprintf(stderr, ", leaves");
		print_stored(deed);
		fprintf(stderr, " (%s)", order_name(op->order));
		break;
	case OP_FENCE:
		fprintf(stderr, "fence (%s)", order_name(op->order));
		break;
	case OP_LIGHT:
		fprintf(stderr, "fence, if another one makes membarrier()");
		break;
	case OP_HEAVY:
		fprintf(stderr, "membarrier()");
		break;
	case OP_LOCK:
		fprintf(stderr, "locks %s", place);
		break;
	case OP_TRYLOCK:
		fprintf(stderr, "tries to lock %s", place);
		break;
	case OP_SLEEP:
		fprintf(stderr,
			"%s: sees 0x%jx, and sleeps if that is as it was",
			place, (uintmax_t)deed->was);
		break;
	case OP_WAKE:
		fprintf(stderr, "%s: wakes who sleeps", place);
		break;
	case OP_WOKEN:
		fprintf(stderr, "was woken");
		break;
	case OP_PAUSE:
		fprintf(stderr, "goes on after a pause");
		break;
	case OP_JOIN:
		fprintf(stderr, "sees that another has ended");
		break;
	case OP_START:
		fprintf(stderr, "starts");
		break;
	}
	fprintf(stderr, "\n");
}
