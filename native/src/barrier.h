/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) OR Apache-2.0 */
/*
 * The whole memory-ordering vocabulary of Backsight.
 *
 *   READ_ONCE, WRITE_ONCE    one access, no ordering: the compiler neither
 *                            tears, repeats nor drops it
 *   load_acquire             nothing after it moves before it
 *   store_release            nothing before it moves after it; pairs with
 *                            load_acquire of the same word
 *   full_fence               orders everything, stores before loads too; used
 *                            where each of two parties publishes a word and
 *                            then reads the other's (the doorbell)
 *   compare_and_swap         acquire + release on success; acquire on failure,
 *                            since the caller goes on with the value that it
 *                            was given, and with what stands behind it
 *   fetch_add, fetch_or      no ordering: for numbers that must only differ, and
 *                            for flags
 *   fetch_add_release        as store_release, of a counter of many threads
 *   light_fence              full_fence() against a thread of the same process
 *                            that makes the heavy half: membarrier(2) runs a
 *                            fence on each processor where one of its threads
 *                            runs, so here the compiler alone must not reorder
 *
 * BPF C has the first three and compare_and_swap alone. There a compare and swap
 * orders everything, and no load orders anything: BPF has none that does before
 * Linux 6.16. So what is read with load_acquire there must be followed by a
 * compare and swap before anything that depends on it.
 */
#ifndef BS_BARRIER_H
#define BS_BARRIER_H

#include <stdbool.h>

#ifdef __bpf__

#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile __typeof__(x) *)&(x) = (v))
#define load_acquire(p) READ_ONCE(*(p))
#ifdef PROBES_BY_BCC
/* bcc's compiler has it for 64 bits alone; the loader makes 32 of it (probes/link.c). */
#define swapped_word(p) ((uint64_t *)(p))
#else
#define swapped_word(p) (p)
#endif
#define compare_and_swap(p, expected, desired)                                 \
	({                                                                     \
		_Static_assert(sizeof(*(p)) == 4, "see swapped_word()");       \
		__typeof__(*(p)) found_ = __sync_val_compare_and_swap(         \
			swapped_word(p), *(expected), (desired));              \
		bool swapped_ = found_ == *(expected);                         \
		*(expected) = found_;                                          \
		swapped_;                                                      \
	})

#else

#include <stdint.h>

#define READ_ONCE(x) __atomic_load_n(&(x), __ATOMIC_RELAXED)
#define WRITE_ONCE(x, v) __atomic_store_n(&(x), (v), __ATOMIC_RELAXED)
#define load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define full_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define fetch_add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)
#define fetch_or(p, v) __atomic_fetch_or((p), (v), __ATOMIC_RELAXED)
#define fetch_add_release(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELEASE)
#define light_fence() __atomic_signal_fence(__ATOMIC_SEQ_CST)
#define compare_and_swap(p, expected, desired)                                 \
	__atomic_compare_exchange_n((p), (expected), (desired), false,         \
				    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

#endif

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

#endif
