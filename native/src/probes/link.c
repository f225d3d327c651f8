/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bcc compiles functions, each by itself, and leaves what they refer to as numbers
 * (bpf/by_bcc.h). Here they become a program: the function, then each that it calls, and
 * those that these call, once.
 */
#include <bpf/btf.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bcc.h"
#include "complaints.h"

/* As many as the kernel takes from who may load any; ours have some thousand. */
#define INSTRUCTIONS_MAX 65536u
#define PARTS_MAX (PROBES_FUNCTIONS + 1)

/* A function in the program. */
struct part {
	char name[32];
	uint32_t begin; /* its first instruction */
};

struct program {
	const struct compiled *code;
	const struct bpf_object *maps;
	struct bpf_insn *insns; /* INSTRUCTIONS_MAX */
	uint32_t n_insns;
	struct part parts[PARTS_MAX];
	uint32_t n_parts;
};

static const char *const map_names[] = {
#define MAP_NAME(name) [MAP_##name] = #name,
	PROBES_MAP_LIST(MAP_NAME)
#undef MAP_NAME
};

static const char *const function_names[] = {
#define FUNCTION_NAME(name) [FUNCTION_##name] = #name,
	PROBES_FUNCTION_LIST(FUNCTION_NAME)
#undef FUNCTION_NAME
};

/* Its instructions, and how many; NULL: it is not there. */
static const unsigned char *find_function(const struct compiled *code,
					  const char *name, uint32_t *count)
{
	size_t at = 0;

	while (code->size - at >= sizeof(struct compiled_function)) {
		struct compiled_function function;
		size_t bytes;

		memcpy(&function, code->bytes + at, sizeof(function));
		at += sizeof(function);
		bytes = function.instructions * sizeof(struct bpf_insn);
		if (bytes > code->size - at)
			break;
		if (!strncmp(function.name, name, sizeof(function.name))) {
			*count = function.instructions;
			return code->bytes + at;
		}
		at += bytes;
	}
	return NULL;
}

/* Where the function begins in the program, of which it becomes a part. */
static int64_t part_of(struct program *p, const char *name)
{
	const unsigned char *insns;
	struct part *part;
	uint32_t count;

	for (uint32_t i = 0; i < p->n_parts; i++) {
		if (!strcmp(p->parts[i].name, name))
			return p->parts[i].begin;
	}
	insns = find_function(p->code, name, &count);
	if (!insns)
		return -ENOENT;
	if (p->n_parts == PARTS_MAX || count > INSTRUCTIONS_MAX - p->n_insns)
		return -E2BIG;
	memcpy(&p->insns[p->n_insns], insns, count * sizeof(*p->insns));
	part = &p->parts[p->n_parts++];
	strncpy(part->name, name, sizeof(part->name) - 1);
	part->begin = p->n_insns;
	p->n_insns += count;
	return part->begin;
}

static int refer_to_map(struct program *p, struct bpf_insn *insn)
{
	uint32_t number = (uint32_t)insn->imm;
	int fd;

	if (number >= PROBES_MAPS)
		return -EINVAL;
	fd = bpf_object__find_map_fd_by_name(p->maps, map_names[number]);
	insn->imm = fd;
	return fd < 0 ? -ENOENT : 0;
}

static int refer_to_function(struct program *p, uint32_t at, uint32_t function,
			     uint8_t kind)
{
	int64_t begin;

	if (function >= PROBES_FUNCTIONS)
		return -EINVAL;
	begin = part_of(p, function_names[function]);
	if (begin < 0)
		return (int)begin;
	p->insns[at].src_reg = kind & 0xf;
	/* As far as it is from the instruction after. */
	p->insns[at].imm = (int32_t)(begin - at - 1);
	return 0;
}

#define LOAD_64 (BPF_LD | BPF_IMM | BPF_DW)
#define CALL (BPF_JMP | BPF_CALL)
#define ATOMIC_64 (BPF_STX | BPF_ATOMIC | BPF_DW)
#define ATOMIC_32 (BPF_STX | BPF_ATOMIC | BPF_W)

static int link_instruction(struct program *p, uint32_t at)
{
	struct bpf_insn *insn = &p->insns[at];

	if (insn->code == LOAD_64 && insn->src_reg == BPF_PSEUDO_MAP_FD)
		return refer_to_map(p, insn);
	if (insn->code == LOAD_64 && insn->src_reg == BPF_PSEUDO_FUNC)
		return refer_to_function(p, at, (uint32_t)insn->imm,
					 BPF_PSEUDO_FUNC);
	if (insn->code == CALL && insn->imm >= PROBES_CALLS)
		return refer_to_function(p, at,
					 (uint32_t)insn->imm - PROBES_CALLS,
					 BPF_PSEUDO_CALL);
	/* It did not inline something: where that is, it does not say. */
	if (insn->code == CALL && insn->imm < 0) {
		complaints_say("bcc has left a call between functions in %s",
			       p->parts[0].name);
		return -ENOEXEC;
	}
	/* The compiler in bcc compares and swaps 64 bits and no fewer, and all of our
	 * words are of 32 (by_bcc.h). The registers are the same. */
	if (insn->code == ATOMIC_64 && insn->imm == BPF_CMPXCHG)
		insn->code = ATOMIC_32;
	return 0;
}

static int link_all(struct program *p, const char *name)
{
	int64_t begin = part_of(p, name);
	int err = begin < 0 ? (int)begin : 0;

	for (uint32_t at = 0; at < p->n_insns && !err; at++) {
		err = link_instruction(p, at);
		/* It takes two places. */
		if (p->insns[at].code == LOAD_64)
			at++;
	}
	return err;
}

/* The names of parts, which the kernel wants for a function that bpf_loop() calls. That it
 * is static is all that it looks at. */
static struct btf *name_parts(const struct program *p,
			      struct bpf_func_info *infos)
{
	struct btf *btf = btf__new_empty();
	int number, prototype;

	if (!btf)
		return NULL;
	number = btf__add_int(btf, "long", 8, BTF_INT_SIGNED);
	prototype = number < 0 ? number : btf__add_func_proto(btf, number);
	for (uint32_t i = 0; i < p->n_parts; i++) {
		int id = prototype < 0
				 ? prototype
				 : btf__add_func(btf, p->parts[i].name,
						 BTF_FUNC_STATIC, prototype);

		if (id < 0) {
			btf__free(btf);
			return NULL;
		}
		infos[i].insn_off = p->parts[i].begin;
		infos[i].type_id = (uint32_t)id;
	}
	return btf;
}

/* What the verifier says of a program that it refuses: some thousand lines. */
#define LOG_BYTES (16u << 20)

static int load(const struct program *p, const char *name)
{
	struct bpf_func_info infos[PARTS_MAX];
	struct btf *btf = name_parts(p, infos);
	LIBBPF_OPTS(bpf_prog_load_opts, options, .func_info = infos,
		    .func_info_cnt = p->n_parts,
		    .func_info_rec_size = sizeof(infos[0]));
	char *log;
	int fd, again;

	if (!btf)
		return -ENOMEM;
	fd = btf__load_into_kernel(btf);
	if (!fd) {
		options.prog_btf_fd = (uint32_t)btf__fd(btf);
		fd = bpf_prog_load(BPF_PROG_TYPE_RAW_TRACEPOINT, name,
				   "Dual BSD/GPL", p->insns, p->n_insns,
				   &options);
	}
	log = fd < 0 && options.prog_btf_fd ? malloc(LOG_BYTES) : NULL;
	if (log) {
		log[0] = 0;
		options.log_buf = log;
		options.log_size = LOG_BYTES;
		options.log_level = 1;
		again = bpf_prog_load(BPF_PROG_TYPE_RAW_TRACEPOINT, name,
				      "Dual BSD/GPL", p->insns, p->n_insns,
				      &options);
		/* What is wrong the first one has said; this one may want of room. */
		if (again >= 0)
			fd = again;
		complaints_take(log);
		free(log);
	}
	btf__free(btf);
	return fd;
}

int link_program(const struct compiled *code, const struct bpf_object *maps,
		 const char *name)
{
	struct bpf_insn *insns = calloc(INSTRUCTIONS_MAX, sizeof(*insns));
	struct program p = {.code = code, .maps = maps, .insns = insns};
	int err;

	if (!insns)
		return -ENOMEM;
	err = link_all(&p, name);
	if (!err)
		err = load(&p, name);
	free(insns);
	return err;
}
