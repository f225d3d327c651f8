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

#include "internal.h"

#define BASE "threads"

/* ---------------------------------------------------- what libbpf says --- */

/* The verifier's reason stands at the end of some hundred lines. */
static char complaints[8192];
static size_t complaints_bytes;

static int complain(enum libbpf_print_level level, const char *format,
		    va_list arguments)
{
	char text[8192];
	int length;

	if (level > LIBBPF_WARN)
		return 0;
	length = vsnprintf(text, sizeof(text), format, arguments);
	if (length < 0)
		return 0;
	if ((size_t)length >= sizeof(text))
		length = sizeof(text) - 1;
	if (complaints_bytes + (size_t)length >= sizeof(complaints)) {
		size_t kept = sizeof(complaints) / 2;

		if (complaints_bytes < kept)
			kept = complaints_bytes;
		if ((size_t)length > sizeof(complaints) / 2 - 1)
			length = sizeof(complaints) / 2 - 1;
		memmove(complaints, complaints + complaints_bytes - kept, kept);
		complaints_bytes = kept;
	}
	memcpy(complaints + complaints_bytes, text, (size_t)length);
	complaints_bytes += (size_t)length;
	complaints[complaints_bytes] = 0;
	return 0;
}

static void complaints_begin(void)
{
	complaints_bytes = 0;
	complaints[0] = 0;
	libbpf_set_print(complain);
}

/* The last line that the verifier wrote before it gave up. */
static const char *verifier_reason(void)
{
	char *end = strstr(complaints, "\nprocessed ");
	char *start;

	if (!end)
		return NULL;
	*end = 0;
	start = strrchr(complaints, '\n');
	return start ? start + 1 : complaints;
}

static void complaints_end(char *message, size_t bytes, const char *what,
			   int err)
{
	const char *reason = verifier_reason();

	if (err == -EPERM || err == -EACCES)
		snprintf(message, bytes,
			 "%s: %s: the process needs CAP_BPF and CAP_PERFMON",
			 what, strerror(-err));
	else if (reason && *reason)
		snprintf(message, bytes, "%s: %s: %s", what, strerror(-err),
			 reason);
	else
		snprintf(message, bytes, "%s: %s", what, strerror(-err));
}

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

static int use_shared_maps(const struct bsp *p, struct bpf_object *object)
{
	struct bpf_map *map;

	bpf_object__for_each_map(map, object)
	{
		struct bpf_map *shared = bpf_object__find_map_by_name(
			p->base.bpf, bpf_map__name(map));
		int err;

		/* Their constants (.rodata) are of each object alone. */
		if (!shared || bpf_map__is_internal(map))
			continue;
		err = bpf_map__reuse_fd(map, bpf_map__fd(shared));
		if (err)
			return err;
	}
	return 0;
}

/* ------------------------------------------------------------ objects --- */

static void object_close(struct object *o)
{
	while (o->n_links)
		bpf_link__destroy(o->links[--o->n_links]);
	bpf_object__close(o->bpf);
	memset(o, 0, sizeof(*o));
}

/* Iterators are attached when they are used. */
static bool is_iterator(const struct bpf_program *program)
{
	return !strncmp(bpf_program__section_name(program), "iter", 4);
}

static int attach_programs(struct object *o)
{
	struct bpf_program *program;

	bpf_object__for_each_program(program, o->bpf)
	{
		if (is_iterator(program) || !bpf_program__autoload(program))
			continue;
		if (o->n_links == LINKS_MAX)
			return -E2BIG;
		o->links[o->n_links] = bpf_program__attach(program);
		if (!o->links[o->n_links])
			return -errno;
		o->n_links++;
	}
	return 0;
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

#define TRACEPOINT "tp_btf/"

static bool has_hook(const struct bpf_program *program)
{
	const char *section = bpf_program__section_name(program);

	/* A mark of libbpf's: not loaded unless it is asked for. */
	if (*section == '?')
		section++;
	return strncmp(section, TRACEPOINT, strlen(TRACEPOINT)) != 0 ||
	       libbpf_find_vmlinux_btf_id(section + strlen(TRACEPOINT),
					  BPF_TRACE_RAW_TP) > 0;
}

static void choose_programs(struct bpf_object *object)
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

static int object_open(struct bsp *p, struct object *o,
		       const struct embedded *of)
{
	LIBBPF_OPTS(bpf_object_open_opts, options, .object_name = of->name);
	int err;

	o->of = of;
	o->bpf = bpf_object__open_mem(of->bytes, of->size, &options);
	if (!o->bpf)
		return -errno;
	if (o != &p->base) {
		err = use_shared_maps(p, o->bpf);
		if (err)
			return err;
	}
	choose_programs(o->bpf);
	return bpf_object__load(o->bpf);
}

static const struct embedded *embedded_find(const char *name)
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

/* What began before was not seen by who begins to look now. */
static void begin_anew(struct bsp *p)
{
	WRITE_ONCE(p->settings->valid_since_ns, monotonic_ns());
}

int bsp_attach(struct bsp *p, const char *name, char *message,
	       size_t message_bytes)
{
	const struct embedded *of = embedded_find(name);
	struct object *o = object_free(p);
	int err;

	if (!of || !o)
		return of ? -E2BIG : -ENOENT;
	if (object_find(p, name))
		return -EALREADY;
	complaints_begin();
	err = object_open(p, o, of);
	if (!err)
		err = attach_programs(o);
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

int bsp_detach(struct bsp *p, const char *name)
{
	struct object *o = object_find(p, name);

	if (!o)
		return -ENOENT;
	object_close(o);
	return 0;
}

/* ------------------------------------------------------------- set-up --- */

static int fill_syscalls(const struct bsp *p)
{
	int fd = map_fd(p, "syscalls");

	for (uint32_t i = 0; i < PROBES_SYSCALLS; i++) {
		int err =
			bpf_map_update_elem(fd, &i, &syscall_table[i], BPF_ANY);

		if (err)
			return err;
	}
	return 0;
}

#define REASON_PREFIX "SKB_DROP_REASON_"

/* By name: the numbers are others in each version of Linux. */
static int fill_reasons(const struct bsp *p)
{
	struct btf *kernel = btf__load_vmlinux_btf();
	const struct btf_type *type;
	int fd = map_fd(p, "reasons");
	int id, err = 0;

	if (!kernel)
		return -errno;
	id = btf__find_by_name_kind(kernel, "skb_drop_reason", BTF_KIND_ENUM);
	type = id < 0 ? NULL : btf__type_by_id(kernel, (uint32_t)id);
	for (uint32_t i = 0; type && i < btf_vlen(type) && !err; i++) {
		const struct btf_enum *one = &btf_enum(type)[i];
		const char *name = btf__name_by_offset(kernel, one->name_off);
		char reason[BS_KERNEL_NAME_BYTES] = "";
		uint32_t number = (uint32_t)one->val;

		if (!name ||
		    strncmp(name, REASON_PREFIX, strlen(REASON_PREFIX)) != 0)
			continue;
		name += strlen(REASON_PREFIX);
		/* Said where nobody knows better, and not of losses alone. */
		if (!strcmp(name, "NOT_SPECIFIED") || number >= PROBES_REASONS)
			continue;
		snprintf(reason, sizeof(reason), "%s", name);
		err = bpf_map_update_elem(fd, &number, reason, BPF_ANY);
	}
	btf__free(kernel);
	return err;
}

static int set_up(struct bsp *p)
{
	int err = object_open(p, &p->base, embedded_find(BASE));

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
	for (uint32_t kind = 0; kind < BS_KERNEL_KINDS; kind++) {
		p->settings->kinds[kind].fire_ns = PROBES_NEVER;
		p->settings->kinds[kind].record_ns = PROBES_NEVER;
	}
	err = fill_syscalls(p);
	if (!err)
		err = fill_reasons(p);
	if (!err)
		err = records_open(p);
	if (!err)
		err = attach_programs(&p->base);
	return err;
}

int bsp_new(struct bsp **made, char *message, size_t message_bytes)
{
	struct bsp *p = calloc(1, sizeof(*p));
	int err;

	if (!p)
		return -ENOMEM;
	p->bell = p->stop = -1;
	pthread_mutex_init(&p->lock, NULL);
	complaints_begin();
	err = set_up(p);
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

/* ----------------------------------------------------------- settings --- */

/* The least threshold of these kinds. */
static uint64_t least_of(const struct probes_settings *settings, uint32_t first,
			 uint32_t last)
{
	uint64_t least = PROBES_NEVER;

	for (uint32_t kind = first; kind <= last; kind++) {
		const struct probes_threshold *t = &settings->kinds[kind];

		if (t->fire_ns < least)
			least = t->fire_ns;
		if (t->record_ns < least)
			least = t->record_ns;
	}
	return least;
}

int bsp_set_kind(struct bsp *p, uint32_t kind, const char *trigger,
		 uint64_t fire_ns, uint64_t record_ns, uint64_t interval_ns,
		 uint64_t burst_ns)
{
	struct probes_threshold *t;

	if (kind >= BS_KERNEL_KINDS || strlen(trigger) >= sizeof(t->name))
		return -EINVAL;
	t = &p->settings->kinds[kind];
	/* Nothing fires by a name of which half is another's. */
	WRITE_ONCE(t->fire_ns, PROBES_NEVER);
	memset(t->name, 0, sizeof(t->name));
	memcpy(t->name, trigger, strlen(trigger));
	WRITE_ONCE(t->record_ns, record_ns);
	WRITE_ONCE(t->interval_ns, interval_ns);
	WRITE_ONCE(t->burst_ns, burst_ns);
	store_release(&t->fire_ns, fire_ns);
	WRITE_ONCE(p->settings->least_unrun_ns,
		   least_of(p->settings, BS_KERNEL_RUN_QUEUE,
			    BS_KERNEL_CPU_THROTTLED));
	WRITE_ONCE(p->settings->least_blocked_ns,
		   least_of(p->settings, BS_KERNEL_LOCK_WAIT,
			    BS_KERNEL_BLOCKED));
	return 0;
}

void bsp_set_coalescing(struct bsp *p, uint64_t ns)
{
	WRITE_ONCE(p->settings->coalesce_ns, ns);
}

void bsp_set_bypass(struct bsp *p, bool bypass)
{
	if (!bypass)
		begin_anew(p);
	WRITE_ONCE(p->settings->bypass, bypass);
}

void bsp_set_breadcrumbs(struct bsp *p, bool breadcrumbs)
{
	WRITE_ONCE(p->settings->breadcrumbs, breadcrumbs);
}
