/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) OR Apache-2.0 */
/*
 * Types of fixed width, for C and for BPF C, which has no libc.
 */
#ifndef BS_ABI_TYPES_H
#define BS_ABI_TYPES_H

#ifdef __bpf__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

/* "BSGT" read as a little-endian integer; both sides run on one machine. */
#define BS_ABI_MAGIC 0x54475342u

/*
 * Which of these files a peer speaks. Client and node each say the newest and
 * the oldest that they can; the older of the two newest is spoken (attach.h).
 *
 *   1  before directories; not spoken any more
 *   2  directories, policy table, replaceable context
 */
#define BS_ABI_VERSION 2u
#define BS_ABI_OLDEST 2u

#define BS_CACHE_LINE 64u

#endif
