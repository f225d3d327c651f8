/* SPDX-License-Identifier: Apache-2.0 */
/* What a test needs: a check that names what failed, and ends the program. */
#ifndef BS_CHECK_H
#define BS_CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define CHECK(condition)                                                       \
	do {                                                                   \
		if (!(condition)) {                                            \
			fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__,   \
				__LINE__, __func__, #condition);               \
			abort();                                               \
		}                                                              \
	} while (0)

/* Of integers; prints both. */
#define CHECK_EQ(got, expected)                                                    \
	do {                                                                       \
		intmax_t got_ = (intmax_t)(got);                                   \
		intmax_t expected_ = (intmax_t)(expected);                         \
                                                                                   \
		if (got_ != expected_) {                                           \
			fprintf(stderr,                                            \
				"%s:%d: %s: %s is %jd (0x%jx), not %jd (0x%jx)\n", \
				__FILE__, __LINE__, __func__, #got, got_,          \
				(uintmax_t)got_, expected_,                        \
				(uintmax_t)expected_);                             \
			abort();                                                   \
		}                                                                  \
	} while (0)

/* Run a test function, and say so: the last line names what hung or died. */
#define RUN(test)                                                              \
	do {                                                                   \
		printf("%s\n", #test);                                         \
		fflush(stdout);                                                \
		test();                                                        \
	} while (0)

/* Of this process. An emulator may have one more, of its own. */
static inline int count_threads(void)
{
	struct stat tasks;

	CHECK_EQ(stat("/proc/self/task", &tasks), 0);
	return (int)tasks.st_nlink - 2; /* two links of every folder */
}

/* A directory for sockets, in $TMPDIR if that is set (scripts/with-tmp). */
static inline void make_directory(char *path, size_t bytes)
{
	const char *base = getenv("TMPDIR");
	int n = snprintf(path, bytes, "%s/test-XXXXXX",
			 base && *base ? base : "/tmp");

	CHECK(n > 0 && (size_t)n < bytes);
	CHECK(mkdtemp(path));
}

#endif
