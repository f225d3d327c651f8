/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The dialect of programs that bcc compiles where they run (by_core.h says what is in it).
 * What bcc is given has gone through the preprocessor already, and includes nothing: the
 * loader writes before it the structures of kernel.h, laid out as the running kernel has
 * them (native/src/probes/layout.c), for the headers on a machine may be those of another
 * kernel.
 *
 * bcc compiles each function by itself, and resolves no references between them. So
 * references are numbers here, and the loader links (native/src/probes/link.c):
 *
 *   maps         the number in PROBES_MAP_LIST stands where its fd is to be
 *   functions    that in PROBES_FUNCTION_LIST, where its place is to be
 *   helpers      their numbers are fixed
 *
 * Programs are attached as raw tracepoints. The verifier knows nothing of what their
 * arguments point to, so each field is read by a call.
 */
#ifndef BPF_BY_BCC_H
#define BPF_BY_BCC_H

#include "interface.h"

/*
 * bcc gives out functions that are not static, and no others. Of these it takes all
 * parameters but the first for registers of a kprobe. So ours are static, each in the
 * section of one that is not, and that does nothing, and right behind it;
 * appliance/probes/bcc_compiler.py takes it from there.
 */
#define OWN_SECTION(name)                                                      \
	int place_##name(void *unused)                                         \
	{                                                                      \
		return 0;                                                      \
	}                                                                      \
	static __attribute__((used, section(".bpf.fn.place_" #name)))

#define TRACEPOINT(event, name, arguments...)                                  \
	static __always_inline int name##_body(arguments);                     \
	OWN_SECTION(name) int name(const __u64 *words)                         \
	{                                                                      \
		return name##_body(ARGUMENTS(arguments));                      \
	}                                                                      \
	static __always_inline int name##_body(arguments)
#define TRACEPOINT_ELSE TRACEPOINT
#define TRACEPOINT_BCC TRACEPOINT
#define TRACEPOINT_RAW(event, name)                                            \
	OWN_SECTION(name) int name(const __u64 *arguments)

#define COUNT_OF(arguments...) COUNT_OF_(arguments, 4, 3, 2, 1)
#define COUNT_OF_(a, b, c, d, count, rest...) count
#define ARGUMENTS(arguments...) ARGUMENTS_(COUNT_OF(arguments))
#define ARGUMENTS_(count) ARGUMENTS__(count)
#define ARGUMENTS__(count) ARGUMENTS_##count
#define ARGUMENTS_1 (void *)words[0]
#define ARGUMENTS_2 ARGUMENTS_1, (void *)words[1]
#define ARGUMENTS_3 ARGUMENTS_2, (void *)words[2]
#define ARGUMENTS_4 ARGUMENTS_3, (void *)words[3]

#define SUBPROGRAM(name) OWN_SECTION(name)
#define CALL(name) ((__typeof__(&name))(PROBES_CALLS + FUNCTION_##name))

#define LOOP_BODY(name) SUBPROGRAM(name)
#define LOOP(n, name, context)                                                 \
	HELPER(181, long, __u32, void *, void *, __u64)                        \
	(n, (void *)bpf_pseudo_fd(4, FUNCTION_##name), context, 0)

#define MAP(name) ((void *)bpf_pseudo_fd(1, MAP_##name))

#define FIELD(p, field)                                                        \
	({                                                                     \
		__typeof__((p)->field) value_;                                 \
		bpf_probe_read_kernel((void *)&value_, sizeof(value_),         \
				      &(p)->field);                            \
		value_;                                                        \
	})
#define READ(p, fields...) READ_(COUNT_OF(fields), p, fields)
#define READ_(count, p, fields...) READ__(count, p, fields)
#define READ__(count, p, fields...) READ_##count(p, fields)
#define READ_1(p, a) FIELD(p, a)
#define READ_2(p, a, b) FIELD(FIELD(p, a), b)
#define READ_3(p, a, b, c) FIELD(READ_2(p, a, b), c)
#define READ_BIT(p, field) (FIELD(p, field##_byte) >> field##_shift & 1)
#define HAS_FIELD(structure, field) HAS_##structure##_##field
#define SIZE_OF(structure) SIZE_OF_##structure

/* The verifier must know the task; it is the one that runs wherever this is asked. */
#define regs_of(task) HELPER(175, void *, void *)(bpf_get_current_task_btf())

/* By their numbers (linux/bpf.h): bcc declares those that were there in its time. */
#define HELPER(number, result, arguments...) ((result(*)(arguments))(number))
#define bpf_map_lookup_elem HELPER(1, void *, void *, const void *)
#define bpf_map_update_elem                                                    \
	HELPER(2, long, void *, const void *, const void *, __u64)
#define bpf_map_delete_elem HELPER(3, long, void *, const void *)
#define bpf_ktime_get_ns HELPER(5, __u64, void)
#define bpf_get_smp_processor_id HELPER(8, __u32, void)
#define bpf_probe_read_kernel HELPER(113, long, void *, __u32, const void *)
#define bpf_probe_read_kernel_str HELPER(115, long, void *, __u32, const void *)
#define bpf_ringbuf_output HELPER(130, long, void *, void *, __u64, __u64)
#define bpf_ringbuf_reserve HELPER(131, void *, void *, __u64, __u64)
#define bpf_ringbuf_submit HELPER(132, void, void *, __u64)
#define bpf_get_current_task_btf HELPER(158, void *, void)

#define BPF_ANY 0
#define BPF_NOEXIST 1
#define BPF_RB_NO_WAKEUP 1

#define bpf_ntohs __builtin_bswap16
#define bpf_ntohl __builtin_bswap32

#define LICENSE_IS(text)

#endif
