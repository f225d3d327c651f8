/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other way of loading (bpf/by_bcc.h): bcc compiles, in a process that then ends;
 * what it made is linked and loaded here.
 */
#ifndef PROBES_BCC_H
#define PROBES_BCC_H

#include <bpf/btf.h>
#include <linux/bpf.h>
#include <stdio.h>

#include "internal.h"

int layout_write(FILE *to, const struct btf *ours, const struct btf *kernel,
		 char *message, size_t message_bytes);

/* What bcc made of one source: functions, each as its name, how many instructions, and
 * these. */
struct compiled {
	const unsigned char *bytes;
	size_t size;
};

struct compiled_function {
	char name[32]; /* NUL-padded */
	uint32_t instructions;
	uint32_t zero;
};

/* Of all programs that were chosen of an object. */
int attach_compiled(struct object *o, const void *code, size_t bytes);

/* A function with all that it calls, as a program for a raw tracepoint; its fd. */
int link_program(const struct compiled *code, const struct bpf_object *maps,
		 const char *name);

#endif
