/* SPDX-License-Identifier: Apache-2.0 */
#include "complaints.h"

#include <bpf/libbpf.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* The verifier's reason stands at the end of some hundred lines. */
static char complaints[8192];
static size_t complaints_bytes;

static char said[256];

/* Of what is too long, the end is kept. */
static void add(const char *text, size_t length)
{
	size_t kept;

	if (length >= sizeof(complaints)) {
		text += length - (sizeof(complaints) - 1);
		length = sizeof(complaints) - 1;
	}
	kept = sizeof(complaints) - 1 - length;
	if (complaints_bytes > kept) {
		memmove(complaints, complaints + complaints_bytes - kept, kept);
		complaints_bytes = kept;
	}
	memcpy(complaints + complaints_bytes, text, length);
	complaints_bytes += length;
	complaints[complaints_bytes] = 0;
}

static int complain(enum libbpf_print_level level, const char *format,
		    va_list arguments)
{
	char text[8192];
	int length;

	if (level > LIBBPF_WARN)
		return 0;
	length = vsnprintf(text, sizeof(text), format, arguments);
	if (length > 0)
		add(text, (size_t)length < sizeof(text) ? (size_t)length
							: sizeof(text) - 1);
	return 0;
}

void complaints_say(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(said, sizeof(said), format, arguments);
	va_end(arguments);
}

void complaints_take(const char *log)
{
	add(log, strlen(log));
}

void complaints_begin(void)
{
	complaints_bytes = 0;
	complaints[0] = said[0] = 0;
	libbpf_set_print(complain);
}

/* The last line that the verifier wrote before it gave up. */
static const char *verifier_reason(void)
{
	char *end = strstr(complaints, "\nprocessed ");
	char *start;

	if (!end)
		return NULL;
	*end = 0;
	start = strrchr(complaints, '\n');
	return start ? start + 1 : complaints;
}

void complaints_end(char *message, size_t bytes, const char *what, int err)
{
	const char *reason = verifier_reason();

	/* The verifier refuses by the same numbers as the kernel does for want of
	 * capabilities, but says why. */
	if (*said)
		snprintf(message, bytes, "%s: %s", what, said);
	else if (reason && *reason)
		snprintf(message, bytes, "%s: %s: %s", what, strerror(-err),
			 reason);
	else if (err == -EPERM || err == -EACCES)
		snprintf(message, bytes,
			 "%s: %s: the process needs CAP_BPF and CAP_PERFMON",
			 what, strerror(-err));
	else
		snprintf(message, bytes, "%s: %s", what, strerror(-err));
}
