/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attaches programs of an object, each to its hook, and says "ready"; they stay until its
 * input ends: empty OBJECT PROGRAM...
 */
#include <bpf/libbpf.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *what)
{
	fprintf(stderr, "empty: %s: %s\n", what, strerror(errno));
	return 1;
}

int main(int argc, char **argv)
{
	struct bpf_program *program;
	struct bpf_object *object;

	if (argc < 3) {
		fputs("usage: empty OBJECT PROGRAM...\n", stderr);
		return 2;
	}
	object = bpf_object__open(argv[1]);
	if (!object)
		return fail(argv[1]);
	for (int i = 2; i < argc; i++) {
		program = bpf_object__find_program_by_name(object, argv[i]);
		if (!program || bpf_program__set_autoload(program, true))
			return fail(argv[i]);
	}
	if (bpf_object__load(object))
		return fail(argv[1]);
	for (int i = 2; i < argc; i++) {
		program = bpf_object__find_program_by_name(object, argv[i]);
		if (!bpf_program__attach(program))
			return fail(argv[i]);
	}
	puts("ready");
	fflush(stdout);
	while (getchar() != EOF)
		;
	bpf_object__close(object);
	return 0;
}
