/* SPDX-License-Identifier: Apache-2.0 */
/* What bcc is given, and what becomes of what it made. */
#include "bcc.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "complaints.h"

/* Not loaded: its BTF has all structures of bpf/kernel.h. */
#define LAYOUT "layout"

static int write_layout(FILE *to, char *message, size_t message_bytes)
{
	LIBBPF_OPTS(bpf_object_open_opts, options, .object_name = LAYOUT);
	const struct embedded *layout = embedded_find(LAYOUT);
	struct bpf_object *object =
		bpf_object__open_mem(layout->bytes, layout->size, &options);
	struct btf *kernel = object ? btf__load_vmlinux_btf() : NULL;
	int err;

	if (kernel)
		err = layout_write(to, bpf_object__btf(object), kernel, message,
				   message_bytes);
	else
		err = errno ? -errno : -EIO;
	btf__free(kernel);
	bpf_object__close(object);
	return err;
}

int bsp_layout(char **text, char *message, size_t message_bytes)
{
	size_t bytes;
	FILE *to;
	int err;

	*text = NULL;
	*message = 0;
	to = open_memstream(text, &bytes);
	if (!to)
		return -errno;
	complaints_begin();
	err = write_layout(to, message, message_bytes);
	if (fclose(to) && !err)
		err = -errno;
	if (err) {
		if (!*message)
			complaints_end(message, message_bytes, LAYOUT, err);
		free(*text);
		*text = NULL;
	}
	/* The types of all the kernel are megabytes. */
	malloc_trim(0);
	return err;
}

void bsp_layout_free(char *text)
{
	free(text);
}

const char *bsp_source(const char *name)
{
	const struct embedded *of = embedded_find(name);

	return of ? of->source : NULL;
}

static int attach(struct object *o, struct loaded *loaded,
		  const struct compiled *code)
{
	const char *name = bpf_program__name(loaded->program);
	const char *event = tracepoint_of(loaded->program);

	if (!event) {
		complaints_say(
			"%s is for no tracepoint, and bcc can have "
			"nothing else here; take the loader `core`",
			name);
		return -EOPNOTSUPP;
	}
	loaded->fd = link_program(code, o->bpf, name);
	if (loaded->fd < 0)
		return loaded->fd;
	loaded->link_fd = bpf_raw_tracepoint_open(event, loaded->fd);
	return loaded->link_fd < 0 ? loaded->link_fd : 0;
}

int attach_compiled(struct object *o, const void *code, size_t bytes)
{
	const struct compiled compiled = {.bytes = code, .size = bytes};
	int err = 0;

	for (uint32_t i = 0; i < o->n_programs && !err; i++)
		err = attach(o, &o->programs[i], &compiled);
	return err;
}
