/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The dialect of programs that clang compiles ahead, and libbpf loads: it puts in the
 * offsets that the running kernel has (CO-RE), and the verifier knows what the arguments
 * of tracepoints point to. by_bcc.h is the other one.
 *
 *   TRACEPOINT(event, name, arguments...)  a program; _ELSE: loaded only where what it
 *                                          stands in for cannot be; _RAW: with all
 *                                          arguments as words; _BCC: by bcc alone
 *   SUBPROGRAM, CALL(name)(...)            a function with a stack of its own
 *   LOOP_BODY, LOOP(n, name, context)      bpf_loop()
 *   MAP(name)                              the address of a map
 *   FIELD(p, field)                        of an argument, or of what one points to
 *   READ(p, field, field...)               of anything, by a call; "a.b" is a field too
 *   READ_BIT(p, field)                     of a field of one bit
 *   HAS_FIELD(structure, field)            of a structure that may be missing (name___x)
 *   SIZE_OF(structure)                     of the kernel's own
 *   regs_of(task)                          as they were at the entry of its system call
 */
#ifndef BPF_BY_CORE_H
#define BPF_BY_CORE_H

#include <linux/bpf.h>
#include <linux/in6.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define TRACEPOINT(event, name, arguments...)                                  \
	SEC("tp_btf/" #event) int BPF_PROG(name, arguments)
#define TRACEPOINT_ELSE(event, name, arguments...)                             \
	SEC("?tp_btf/" #event) int BPF_PROG(name, arguments)
#define TRACEPOINT_BCC(event, name, arguments...)                              \
	SEC("?raw_tp/" #event) int BPF_PROG(name, arguments)
#define TRACEPOINT_RAW(event, name)                                            \
	SEC("tp_btf/" #event) int name(const __u64 *arguments)

#define SUBPROGRAM(name) static __noinline
#define CALL(name) name

#define LOOP_BODY(name) static
#define LOOP(n, name, context) bpf_loop(n, name, context, 0)

#define MAP(name) (&(name))

#define FIELD(p, field) ((p)->field)
#define READ BPF_CORE_READ
#define READ_BIT(p, field) BPF_CORE_READ_BITFIELD(p, field)
#define HAS_FIELD(structure, field)                                            \
	bpf_core_field_exists(((struct structure *)0)->field)
#define SIZE_OF(structure) bpf_core_type_size(struct structure)

#define regs_of(task) ((void *)bpf_task_pt_regs(task))

extern int LINUX_KERNEL_VERSION __kconfig;

#define LICENSE_IS(text) char LICENSE[] SEC("license") = text

#endif
