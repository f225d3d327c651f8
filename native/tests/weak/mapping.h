/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One mapping for each memfd, however often it is mapped: so client and node
 * have the same addresses for what they share, and whoever watches accesses
 * (TSan, weak.h) knows them for the same memory. To be linked with
 * --wrap=mmap64, munmap and madvise.
 */
#ifndef BS_TEST_MAPPING_H
#define BS_TEST_MAPPING_H

#include <stdbool.h>
#include <stddef.h>

/* A forked process has what was there when it was forked, and nobody sees what
 * it writes. */
extern bool mapping_is_private;

/* Told of all that is unmapped, if there is somebody to tell. */
extern void (*mapping_ends)(void *at, size_t bytes);

#endif
