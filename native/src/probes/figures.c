/* SPDX-License-Identifier: Apache-2.0 */
/* What probes count: each CPU for itself. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Which cost is which program's (enum probes_program). */
static const char *const program_names[PROBES_PROGRAMS] = {
#define PROGRAM_NAME(name) [PROGRAM_##name] = #name,
	PROBES_PROGRAM_LIST(PROGRAM_NAME)
#undef PROGRAM_NAME
};

/* The sum over all CPUs of a value of 64-bit words. */
static int sum_words(const struct bsp *p, const char *map, uint32_t key,
		     uint64_t *sum, size_t words)
{
	uint64_t *each = calloc((size_t)p->cpus, words * sizeof(*each));
	int err = 0;

	if (!each)
		return -ENOMEM;
	if (bpf_map_lookup_elem(map_fd(p, map), &key, each))
		err = -errno;
	memset(sum, 0, words * sizeof(*sum));
	for (size_t i = 0; i < (size_t)p->cpus * words && !err; i++)
		sum[i % words] += each[i];
	free(each);
	return err;
}

int bsp_get_counts(struct bsp *p, uint32_t kind, struct bsp_counts *counts)
{
	_Static_assert(sizeof(*counts) == sizeof(struct probes_counts),
		       "the same words in the same order");

	if (kind >= BS_KERNEL_KINDS)
		return -EINVAL;
	return sum_words(p, "counts", kind, (uint64_t *)counts,
			 sizeof(*counts) / sizeof(uint64_t));
}

static void fill_cost(const struct bsp *p, struct bsp_program *to)
{
	struct probes_cost cost;

	for (uint32_t i = 0; i < PROBES_PROGRAMS; i++) {
		if (strcmp(program_names[i], to->name) != 0 ||
		    sum_words(p, "costs", i, (uint64_t *)&cost,
			      sizeof(cost) / sizeof(uint64_t)))
			continue;
		to->runs = cost.runs;
		if (cost.timed_runs)
			to->run_ns = (uint64_t)((double)cost.timed_ns /
						(double)cost.timed_runs *
						(double)cost.runs);
	}
}

static size_t programs_of(const struct bsp *p, const struct object *o,
			  struct bsp_program *programs, size_t most)
{
	struct bpf_program *program;
	size_t count = 0;

	if (!o->bpf)
		return 0;
	bpf_object__for_each_program(program, o->bpf)
	{
		struct bpf_prog_info info = {0};
		uint32_t bytes = sizeof(info);
		struct bsp_program *to = &programs[count];

		if (count == most)
			break;
		if (!bpf_program__autoload(program))
			continue;
		memset(to, 0, sizeof(*to));
		snprintf(to->name, sizeof(to->name), "%s",
			 bpf_program__name(program));
		snprintf(to->object, sizeof(to->object), "%s", o->of->name);
		if (!bpf_obj_get_info_by_fd(bpf_program__fd(program), &info,
					    &bytes)) {
			to->recursion_misses = info.recursion_misses;
			to->verified_instructions = info.verified_insns;
		}
		fill_cost(p, to);
		count++;
	}
	return count;
}

int bsp_get_programs(struct bsp *p, struct bsp_program *programs, size_t most)
{
	size_t count = programs_of(p, &p->base, programs, most);

	for (int i = 0; i < OBJECTS_MAX; i++)
		count += programs_of(p, &p->others[i], programs + count,
				     most - count);
	return (int)count;
}
