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
		to->map_errors = cost.map_errors;
		if (cost.timed_runs)
			to->run_ns = (uint64_t)((double)cost.timed_ns /
						(double)cost.timed_runs *
						(double)cost.runs);
	}
}

/* As the kernel counts what a program or a map takes (fdinfo of proc(5)). */
static uint64_t locked_bytes(int fd)
{
	unsigned long long bytes = 0;
	char path[64], line[128];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	file = fopen(path, "re");
	if (!file)
		return 0;
	while (fgets(line, sizeof(line), file)) {
		if (sscanf(line, "memlock: %llu", &bytes) == 1)
			break;
	}
	fclose(file);
	return bytes;
}

static void fill_program(const struct bsp *p, const struct object *o,
			 const struct loaded *loaded, struct bsp_program *to)
{
	struct bpf_prog_info info = {0};
	uint32_t bytes = sizeof(info);

	memset(to, 0, sizeof(*to));
	snprintf(to->name, sizeof(to->name), "%s",
		 bpf_program__name(loaded->program));
	snprintf(to->object, sizeof(to->object), "%s", o->of->name);
	if (!bpf_obj_get_info_by_fd(loaded->fd, &info, &bytes)) {
		to->recursion_misses = info.recursion_misses;
		to->verified_instructions = info.verified_insns;
	}
	to->bytes = locked_bytes(loaded->fd);
	fill_cost(p, to);
}

static size_t programs_of(const struct bsp *p, const struct object *o,
			  struct bsp_program *programs, size_t most)
{
	size_t count = 0;

	while (count < o->n_programs && count < most) {
		fill_program(p, o, &o->programs[count], &programs[count]);
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

static void add_memory(const struct bsp *p, const struct object *o,
		       struct bsp_memory *memory)
{
	struct bpf_map *map;

	if (!o->bpf)
		return;
	for (uint32_t i = 0; i < o->n_programs; i++)
		memory->programs_bytes += locked_bytes(o->programs[i].fd);
	bpf_object__for_each_map(map, o->bpf)
	{
		/* The others are those of the base. */
		if (o == &p->base || map_fd(p, bpf_map__name(map)) < 0)
			memory->maps_bytes += locked_bytes(bpf_map__fd(map));
	}
}

void bsp_get_memory(struct bsp *p, struct bsp_memory *memory)
{
	memset(memory, 0, sizeof(*memory));
	add_memory(p, &p->base, memory);
	for (int i = 0; i < OBJECTS_MAX; i++)
		add_memory(p, &p->others[i], memory);
	for (uint32_t i = 0; i < PROBES_PROCESSES_MAX; i++) {
		if (p->processes[i].used)
			memory->contexts_bytes += bsp_context_bytes();
	}
}
