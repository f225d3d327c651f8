/* SPDX-License-Identifier: Apache-2.0 */
/*
 * To kill a node at any of its stores to shared memory. The node is compiled
 * with -fsanitize=thread for this, and linked with kill.c instead of TSan: so
 * each store calls us before it is made (tsan_calls.h); and mmap, munmap and
 * madvise are ours (--wrap). The node lives in a forked process, which ends at the
 * store that was asked for, as a kill would end it; what it has done by then stands
 * in the memfds.
 */
#ifndef BS_TEST_KILL_H
#define BS_TEST_KILL_H

#include <stdbool.h>
#include <stdint.h>

#define KILL_NEVER UINT64_MAX

/* The exit status of a process that was killed so. */
#define KILLED 77

/* From here on, die before the store of that number, from 0. */
void kill_arm(uint64_t store);
uint64_t kill_stores(void);

/* What memfds hold, to be put back. */
struct image {
	int fd;
	uint64_t size;
	uint32_t n_parts;
	struct {
		uint64_t at, bytes;
		uint8_t *content;
	} parts[256];
};
void image_save(struct image *image, int fd);
void image_restore(const struct image *image);
void image_free(struct image *image);

#endif
