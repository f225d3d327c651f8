/* SPDX-License-Identifier: Apache-2.0 */
/* Objects: loaded from our own bytes, with the maps of the first, and attached. */
#include <bpf/btf.h>
#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bcc.h"
#include "complaints.h"
#include "internal.h"

#define BASE "threads"

/* --------------------------------------------------------------- maps --- */

int map_fd(const struct bsp *p, const char *name)
{
	return bpf_object__find_map_fd_by_name(p->base.bpf, name);
}

/* The value of a map of one, in our memory too; NULL with errno. */
static void *map_value(const struct bsp *p, const char *name, size_t bytes)
{
	void *value = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
			   map_fd(p, name), 0);

	return value == MAP_FAILED ? NULL : value;
}

/* Only one of the loaders can use these. */
static const struct {
	const char *map;
	enum bsp_loader loader;
} maps_of_one[] = {
	{"threads", BSP_CORE},	     {"sockets", BSP_CORE},
	{"threads_by_pid", BSP_BCC}, {"sockets_by_address", BSP_BCC},
	{"blank_socket", BSP_BCC},
};

static bool is_of_other(const struct bsp *p, const char *map)
{
	for (size_t i = 0; i < sizeof(maps_of_one) / sizeof(maps_of_one[0]);
	     i++) {
		if (!strcmp(maps_of_one[i].map, map))
			return maps_of_one[i].loader != p->loader;
	}
	return false;
}

static int choose_maps(const struct bsp *p, struct bpf_object *object)
{
	struct bpf_map *map;
	int err = 0;

	bpf_object__for_each_map(map, object)
	{
		struct bpf_map *shared =
			object == p->base.bpf
				? NULL
				: bpf_object__find_map_by_name(
					  p->base.bpf, bpf_map__name(map));

		if (is_of_other(p, bpf_map__name(map)))
			err = bpf_map__set_autocreate(map, false);
		/* Their constants (.rodata) are of each object alone. */
		else if (shared && !bpf_map__is_internal(map))
			err = bpf_map__reuse_fd(map, bpf_map__fd(shared));
		if (err)
			return err;
	}
	return 0;
}

/* ----------------------------------------------------------- programs --- */

#define TRACEPOINT "tp_btf/"
#define RAW_TRACEPOINT "raw_tp/" /* for bcc alone (bpf/by_core.h) */

const char *tracepoint_of(const struct bpf_program *program)
{
	const char *section = bpf_program__section_name(program);

	if (!strncmp(section, TRACEPOINT, strlen(TRACEPOINT)))
		return section + strlen(TRACEPOINT);
	if (!strncmp(section, RAW_TRACEPOINT, strlen(RAW_TRACEPOINT)))
		return section + strlen(RAW_TRACEPOINT);
	return NULL;
}

/* Iterators are attached when they are used. */
static bool is_iterator(const struct bpf_program *program)
{
	return !strncmp(bpf_program__section_name(program), "iter", 4);
}

static bool has_hook(const struct bpf_program *program)
{
	const char *event = tracepoint_of(program);

	return !event ||
	       libbpf_find_vmlinux_btf_id(event, BPF_TRACE_RAW_TP) > 0;
}

/* What stands in for a program where the kernel has not its hook. */
static const struct {
	const char *program, *instead;
} fallbacks[] = {
	{"on_send", "on_sent"},	   /* tcp_sendmsg_locked: Linux 6.16 */
	{"on_sent", "on_sendmsg"}, /* sock_send_length: Linux 6.3 */
};

static const char *fallback_of(const char *program)
{
	for (size_t i = 0; i < sizeof(fallbacks) / sizeof(fallbacks[0]); i++) {
		if (!strcmp(fallbacks[i].program, program))
			return fallbacks[i].instead;
	}
	return NULL;
}

static void choose_by_hook(struct bpf_object *object)
{
	struct bpf_program *program;

	/* In the order of the file: what stands in comes after. */
	bpf_object__for_each_program(program, object)
	{
		const char *instead = fallback_of(bpf_program__name(program));

		if (!instead || !bpf_program__autoload(program) ||
		    has_hook(program))
			continue;
		bpf_program__set_autoload(program, false);
		bpf_program__set_autoload(
			bpf_object__find_program_by_name(object, instead),
			true);
	}
}

static bool is_for_bcc(const struct bpf_program *program)
{
	return !strncmp(bpf_program__section_name(program), RAW_TRACEPOINT,
			strlen(RAW_TRACEPOINT));
}

/* It can have no iterators, and no storage that goes with a thread or socket. */
static void choose_for_bcc(struct bpf_object *object)
{
	struct bpf_program *program;

	bpf_object__for_each_program(program, object)
	{
		if (is_iterator(program))
			bpf_program__set_autoload(program, false);
		if (is_for_bcc(program))
			bpf_program__set_autoload(program, true);
	}
}

static int choose_programs(const struct bsp *p, struct object *o)
{
	struct bpf_program *program;

	choose_by_hook(o->bpf);
	if (p->loader == BSP_BCC)
		choose_for_bcc(o->bpf);
	bpf_object__for_each_program(program, o->bpf)
	{
		if (!bpf_program__autoload(program))
			continue;
		if (o->n_programs == PROGRAMS_MAX)
			return -E2BIG;
		o->programs[o->n_programs++] = (struct loaded){
			.program = program, .fd = -1, .link_fd = -1};
		/* It loads what stands for them. */
		if (p->loader == BSP_BCC)
			bpf_program__set_autoload(program, false);
	}
	return 0;
}

static int attach_programs(struct object *o)
{
	for (uint32_t i = 0; i < o->n_programs; i++) {
		struct loaded *loaded = &o->programs[i];

		loaded->fd = bpf_program__fd(loaded->program);
		if (is_iterator(loaded->program))
			continue;
		loaded->link = bpf_program__attach(loaded->program);
		if (!loaded->link)
			return -errno;
	}
	return 0;
}

/* ------------------------------------------------------------ objects --- */

static void object_close(struct object *o)
{
	while (o->n_programs) {
		struct loaded *loaded = &o->programs[--o->n_programs];

		bpf_link__destroy(loaded->link);
		if (loaded->link_fd >= 0)
			close(loaded->link_fd);
		/* Others are libbpf's. */
		if (loaded->fd >= 0 &&
		    loaded->fd != bpf_program__fd(loaded->program))
			close(loaded->fd);
	}
	bpf_object__close(o->bpf);
	memset(o, 0, sizeof(*o));
}

static int object_open(struct bsp *p, struct object *o,
		       const struct embedded *of)
{
	LIBBPF_OPTS(bpf_object_open_opts, options, .object_name = of->name);
	int err;

	o->of = of;
	o->bpf = bpf_object__open_mem(of->bytes, of->size, &options);
	if (!o->bpf)
		return -errno;
	err = choose_maps(p, o->bpf);
	if (!err)
		err = choose_programs(p, o);
	if (!err)
		err = bpf_object__load(o->bpf);
	return err;
}

const struct embedded *embedded_find(const char *name)
{
	for (size_t i = 0; i < embedded_count; i++) {
		if (!strcmp(embedded_objects[i].name, name))
			return &embedded_objects[i];
	}
	return NULL;
}

static struct object *object_find(struct bsp *p, const char *name)
{
	for (int i = 0; i < OBJECTS_MAX; i++) {
		if (p->others[i].of && !strcmp(p->others[i].of->name, name))
			return &p->others[i];
	}
	return NULL;
}

static struct object *object_free(struct bsp *p)
{
	for (int i = 0; i < OBJECTS_MAX; i++) {
		if (!p->others[i].of)
			return &p->others[i];
	}
	return NULL;
}

static int attach(struct bsp *p, struct object *o, const void *code,
		  size_t code_bytes)
{
	return p->loader == BSP_BCC ? attach_compiled(o, code, code_bytes)
				    : attach_programs(o);
}

#define SOCKETS "sockets"

int bsp_attach(struct bsp *p, const char *name, const void *code,
	       size_t code_bytes, char *message, size_t message_bytes)
{
	const struct embedded *of = embedded_find(name);
	struct object *o = object_free(p);
	int err;

	if (!of || !of->source || !o)
		return of && of->source ? -E2BIG : -ENOENT;
	if (object_find(p, name))
		return -EALREADY;
	complaints_begin();
	/* What sockets know of before may be of the last time that it was attached. */
	if (!strcmp(name, SOCKETS))
		WRITE_ONCE(p->settings->sockets_since_ns, monotonic_ns());
	err = object_open(p, o, of);
	if (!err)
		err = attach(p, o, code, code_bytes);
	if (err) {
		complaints_end(message, message_bytes, name, err);
		object_close(o);
	} else {
		begin_anew(p);
	}
	/* To load one takes megabytes: the types of all the kernel. */
	malloc_trim(0);
	return err;
}

static void empty_map(int fd)
{
	uint64_t key;

	while (!bpf_map_get_next_key(fd, NULL, &key) &&
	       !bpf_map_delete_elem(fd, &key))
		;
}

int bsp_detach(struct bsp *p, const char *name)
{
	struct object *o = object_find(p, name);

	if (!o)
		return -ENOENT;
	object_close(o);
	/* Nobody sees any more which of them are gone. */
	if (p->loader == BSP_BCC && !strcmp(name, SOCKETS))
		empty_map(map_fd(p, "sockets_by_address"));
	return 0;
}

/* ------------------------------------------------------------- set-up --- */

static int name_reasons(const struct bsp *p)
{
	struct btf *kernel = btf__load_vmlinux_btf();
	int err = kernel ? fill_reasons(p, kernel) : -errno;

	btf__free(kernel);
	return err;
}

static int set_up(struct bsp *p, const void *code, size_t code_bytes)
{
	int err = object_open(p, &p->base, embedded_find(BASE));

	if (!err)
		err = try_to_note_threads(p);
	if (err)
		return err;
	p->cpus = libbpf_num_possible_cpus();
	if (p->cpus < 0)
		return p->cpus;
	p->settings = map_value(p, "settings", sizeof(*p->settings));
	p->registration =
		map_value(p, "registration", sizeof(*p->registration));
	p->filter = map_value(p, "filter",
			      PROBES_FILTER_ENTRIES * sizeof(*p->filter));
	if (!p->settings || !p->registration || !p->filter)
		return -errno;
	p->nobody = bsp_context();
	if (p->nobody < 0)
		return p->nobody;
	for (uint32_t kind = 0; kind < BS_KERNEL_KINDS; kind++) {
		p->settings->kinds[kind].fire_ns = PROBES_NEVER;
		p->settings->kinds[kind].record_ns = PROBES_NEVER;
	}
	err = fill_syscalls(p);
	if (!err)
		err = name_reasons(p);
	if (!err)
		err = records_open(p);
	if (!err)
		err = attach(p, &p->base, code, code_bytes);
	return err;
}

int bsp_new(struct bsp **made, enum bsp_loader loader, const void *code,
	    size_t code_bytes, char *message, size_t message_bytes)
{
	struct bsp *p = calloc(1, sizeof(*p));
	int err;

	if (!p)
		return -ENOMEM;
	p->loader = loader;
	p->bell = p->stop = p->nobody = -1;
	pthread_mutex_init(&p->lock, NULL);
	complaints_begin();
	err = set_up(p, code, code_bytes);
	if (err) {
		complaints_end(message, message_bytes, BASE, err);
		bsp_free(p);
		return err;
	}
	*made = p;
	return 0;
}

void bsp_free(struct bsp *p)
{
	for (int i = 0; i < OBJECTS_MAX; i++)
		object_close(&p->others[i]);
	records_close(p);
	if (p->nobody >= 0)
		close(p->nobody);
	if (p->settings)
		munmap(p->settings, sizeof(*p->settings));
	if (p->registration)
		munmap(p->registration, sizeof(*p->registration));
	if (p->filter)
		munmap(p->filter, PROBES_FILTER_ENTRIES * sizeof(*p->filter));
	object_close(&p->base);
	pthread_mutex_destroy(&p->lock);
	free(p);
}
