/* SPDX-License-Identifier: Apache-2.0 */
/* What libbpf and the verifier say of what they do not take, as one line for a person. */
#ifndef PROBES_COMPLAINTS_H
#define PROBES_COMPLAINTS_H

#include <stddef.h>

void complaints_begin(void);
/* The reason, in our own words. */
void complaints_say(const char *format, ...)
	__attribute__((format(printf, 1, 2)));
/* What a verifier has written. */
void complaints_take(const char *log);
/* message: "what: why". */
void complaints_end(char *message, size_t bytes, const char *what, int err);

#endif
