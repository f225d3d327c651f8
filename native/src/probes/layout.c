/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel's structures as C, laid out as the running kernel has them, for bcc: the
 * headers that it finds may be those of another kernel, and nothing would say so.
 *
 * Which fields are read stands in bpf/kernel.h: its structures are tagged, so they are
 * known by the BTF of our objects. Where the fields are stands in the kernel's BTF.
 * Each field is a member of a union, behind as many bytes as it has before it:
 *
 *	struct task_struct { union {
 *		struct { char at_pid[1432]; int pid; } __attribute__((packed));
 *		struct { char at_tgid[1436]; int tgid; } __attribute__((packed));
 *	}; };
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "bcc.h"

struct layout {
	FILE *to;
	const struct btf *ours, *kernel;
	struct btf_dump *declarations;
	bool *is_tagged, *is_written; /* by type of ours */
	const char *structure;	      /* which is being written */
	char *message;
	size_t message_bytes;
};

/* Of structures that a kernel may lack, or their fields: name___x (bpf_core_read.h). */
#define FLAVOR "___"

static const char *name_of(const struct btf *btf, uint32_t offset)
{
	const char *name = btf__name_by_offset(btf, offset);

	return name ? name : "";
}

/* What it is, whatever it is called. */
static uint32_t bare(const struct btf *btf, uint32_t id)
{
	const struct btf_type *type = btf__type_by_id(btf, id);

	while (type && (btf_is_mod(type) || btf_is_typedef(type))) {
		id = type->type;
		type = btf__type_by_id(btf, id);
	}
	return id;
}

/* Where a field is, in bits, and its type; of members without a name, theirs are ours. */
static int find_field(const struct btf *btf, uint32_t structure,
		      const char *name, uint32_t *bits, uint32_t *type_id)
{
	const struct btf_type *type = btf__type_by_id(btf, structure);

	if (!type || !btf_is_composite(type))
		return -ENOENT;
	for (uint32_t i = 0; i < btf_vlen(type); i++) {
		const struct btf_member *member = &btf_members(type)[i];
		const char *its_name = name_of(btf, member->name_off);
		uint32_t offset = btf_member_bit_offset(type, i);

		if (!strcmp(its_name, name)) {
			*bits = offset;
			*type_id = bare(btf, member->type);
			return 0;
		}
		if (!*its_name && !find_field(btf, bare(btf, member->type),
					      name, bits, type_id)) {
			*bits += offset;
			return 0;
		}
	}
	return -ENOENT;
}

static int write_structure(struct layout *l, uint32_t id);
static int write_fields(struct layout *l, uint32_t ours, uint32_t kernel);

/* A member of ours, without what is before it. */
static int write_declaration(struct layout *l, const struct btf_member *member,
			     bool is_bit, uint32_t kernel)
{
	LIBBPF_OPTS(btf_dump_emit_type_decl_opts, options,
		    .field_name = name_of(l->ours, member->name_off));
	const struct btf_type *type =
		btf__type_by_id(l->ours, bare(l->ours, member->type));
	int err = 0;

	if (is_bit) {
		fprintf(l->to, "unsigned char %s_byte", options.field_name);
	} else if (btf_is_composite(type) &&
		   !*name_of(l->ours, type->name_off)) {
		fputs("union {\n", l->to);
		err = write_fields(l, bare(l->ours, member->type), kernel);
		fprintf(l->to, "} %s", options.field_name);
	} else if (btf_is_composite(type) &&
		   !l->is_tagged[bare(l->ours, member->type)]) {
		fprintf(l->to, "unsigned char %s[%u]", options.field_name,
			type->size);
	} else {
		err = btf_dump__emit_type_decl(l->declarations, member->type,
					       &options);
	}
	return err;
}

/* More would be read than there is. Of a structure, its own fields are looked at. (An array
 * at the end of a structure may have as many elements as there is room for.) */
static bool is_wider(const struct layout *l, uint32_t ours, uint32_t kernel)
{
	const struct btf_type *type =
		btf__type_by_id(l->ours, bare(l->ours, ours));
	int64_t its = btf__resolve_size(l->kernel, kernel);

	return !btf_is_composite(type) && its > 0 &&
	       btf__resolve_size(l->ours, ours) > its;
}

static int write_field(struct layout *l, const struct btf_type *of,
		       uint32_t index, uint32_t kernel)
{
	const struct btf_member *member = &btf_members(of)[index];
	const char *name = name_of(l->ours, member->name_off);
	bool is_bit = btf_member_bitfield_size(of, index) == 1;
	uint32_t bits = 0, type = 0;
	int err = find_field(l->kernel, kernel, name, &bits, &type);

	if (err && !strstr(l->structure, FLAVOR)) {
		snprintf(l->message, l->message_bytes,
			 "this kernel's struct %s has no field %s",
			 l->structure, name);
		return err;
	}
	if (!err && is_wider(l, member->type, type)) {
		snprintf(l->message, l->message_bytes,
			 "this kernel's struct %s has a field %s that is "
			 "smaller than ours",
			 l->structure, name);
		return -EINVAL;
	}
	fprintf(l->to, "struct { char at_%s[%u]; ", name, bits / 8);
	err = write_declaration(l, member, is_bit, type);
	fputs("; } __attribute__((packed));\n", l->to);
	return err;
}

/* As members of a union. */
static int write_fields(struct layout *l, uint32_t ours, uint32_t kernel)
{
	const struct btf_type *type = btf__type_by_id(l->ours, ours);
	int err = 0;

	for (uint32_t i = 0; i < btf_vlen(type) && !err; i++)
		err = write_field(l, type, i, kernel);
	return err;
}

/* Those that stand within it, and not behind a pointer, come first. */
static int write_inner(struct layout *l, const struct btf_type *type)
{
	int err = 0;

	for (uint32_t i = 0; i < btf_vlen(type) && !err; i++) {
		uint32_t id = bare(l->ours, btf_members(type)[i].type);
		const struct btf_type *inner = btf__type_by_id(l->ours, id);

		if (btf_is_array(inner))
			id = bare(l->ours, btf_array(inner)->type);
		if (l->is_tagged[id])
			err = write_structure(l, id);
	}
	return err;
}

static void write_constants(const struct layout *l, const struct btf_type *type,
			    uint32_t kernel)
{
	const struct btf_type *its = btf__type_by_id(l->kernel, kernel);

	fprintf(l->to, "enum { SIZE_OF_%s = %u };\n", l->structure,
		its ? its->size : 0);
	for (uint32_t i = 0; i < btf_vlen(type); i++) {
		const char *name =
			name_of(l->ours, btf_members(type)[i].name_off);
		uint32_t bits = 0, field;
		int err = find_field(l->kernel, kernel, name, &bits, &field);

		fprintf(l->to, "enum { HAS_%s_%s = %d };\n", l->structure, name,
			!err);
		if (btf_member_bitfield_size(type, i))
			fprintf(l->to, "enum { %s_shift = %u };\n", name,
				bits % 8);
	}
}

static int write_structure(struct layout *l, uint32_t id)
{
	const struct btf_type *type = btf__type_by_id(l->ours, id);
	const char *name = name_of(l->ours, type->name_off);
	const char *flavor = strstr(name, FLAVOR);
	char base[64];
	int kernel, err;

	/* Without a name: a field of another one, and written with that. */
	if (l->is_written[id] || !*name)
		return 0;
	l->is_written[id] = true;
	err = write_inner(l, type);
	if (err)
		return err;
	l->structure = name;
	snprintf(base, sizeof(base), "%.*s",
		 flavor ? (int)(flavor - name) : (int)strlen(name), name);
	kernel = btf__find_by_name_kind(l->kernel, base, BTF_KIND_STRUCT);
	fprintf(l->to, "struct %s { union {\n", name);
	err = write_fields(l, id, kernel < 0 ? 0 : (uint32_t)kernel);
	fputs("}; };\n", l->to);
	write_constants(l, type, kernel < 0 ? 0 : (uint32_t)kernel);
	return err;
}

static void write_text(void *to, const char *format, va_list arguments)
{
	vfprintf(to, format, arguments);
}

static void write_version(FILE *to)
{
	unsigned int major = 0, minor = 0;
	struct utsname name;

	if (!uname(&name) && sscanf(name.release, "%u.%u", &major, &minor) != 2)
		major = minor = 0;
	fprintf(to, "enum { LINUX_KERNEL_VERSION = %u };\n",
		(major << 16) + (minor << 8));
}

static void find_tagged(struct layout *l, uint32_t types)
{
	for (uint32_t id = 1; id < types; id++) {
		const struct btf_type *type = btf__type_by_id(l->ours, id);

		if (btf_is_decl_tag(type) &&
		    !strcmp(name_of(l->ours, type->name_off), "kernel"))
			l->is_tagged[type->type] = true;
	}
}

static int write_all(struct layout *l)
{
	uint32_t types = btf__type_cnt(l->ours);
	int err = 0;

	l->is_tagged = calloc(types, sizeof(bool));
	l->is_written = calloc(types, sizeof(bool));
	if (!l->is_tagged || !l->is_written)
		return -ENOMEM;
	find_tagged(l, types);
	write_version(l->to);
	for (uint32_t id = 1; id < types && !err; id++) {
		if (l->is_tagged[id])
			err = write_structure(l, id);
	}
	return err;
}

int layout_write(FILE *to, const struct btf *ours, const struct btf *kernel,
		 char *message, size_t message_bytes)
{
	struct layout l = {
		.to = to,
		.ours = ours,
		.kernel = kernel,
		.message = message,
		.message_bytes = message_bytes,
		.declarations = btf_dump__new(ours, write_text, to, NULL),
	};
	int err = l.declarations ? write_all(&l) : -errno;

	btf_dump__free(l.declarations);
	free(l.is_tagged);
	free(l.is_written);
	return err;
}
