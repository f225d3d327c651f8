/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One mapping for each memfd, however often it is mapped: so client and node
 * have the same addresses for what they share, and whoever watches accesses
 * (TSan, weak.h) knows them for the same memory. To be linked with --wrap=mmap64,
 * munmap, madvise and mremap.
 */
#ifndef BS_TEST_MAPPING_H
#define BS_TEST_MAPPING_H

#include <stdbool.h>

/* A forked process has what was there when it was forked, and nobody sees what
 * it writes. */
extern bool mapping_is_private;

#endif
