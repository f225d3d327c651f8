/* SPDX-License-Identifier: Apache-2.0 */
/* The checker itself: a fault that only executions at random come to is told with
 * the seed, and with choices by which it is seen again. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "barrier.h"
#include "check.h"
#include "weak.h"

#define FAULT "the message came before what it is about"

static uint32_t message, content, sum;
static bool out_of_order;
static char told[1 << 16];

/* In more orders than are tried; the fault is in the first steps. */
static void add_often(void)
{
	for (uint32_t i = 0; i < 10; i++)
		fetch_add(&sum, 1);
}

static void read_message(void)
{
	bool came = READ_ONCE(message);

	out_of_order = came && !READ_ONCE(content);
	add_often();
}

static void write_message(void)
{
	WRITE_ONCE(content, 1);
	WRITE_ONCE(message, 1);
	add_often();
}

static void check(void)
{
	if (out_of_order) {
		fprintf(stderr, FAULT "\n");
		abort();
	}
}

static void setup(void)
{
	weak_share("message", &message, sizeof(message));
	weak_share("content", &content, sizeof(content));
	weak_share("sum", &sum, sizeof(sum));
}

static const struct weak_scenario scenario = {
	.name = "faulty",
	.setup = setup,
	.parties = {{.name = "a", .run = read_message},
		    {.name = "b", .run = write_message}},
	.check = check,
	.most = 200,
};

/* What it returns; what it says on stderr is told. */
static int run(int argc, const char **argv)
{
	FILE *file = tmpfile();
	int before = dup(STDERR_FILENO);
	size_t bytes;
	int failed;

	CHECK(file && before >= 0);
	fflush(stderr);
	CHECK(dup2(fileno(file), STDERR_FILENO) >= 0);
	failed = weak_main(argc, (char **)argv, &scenario, 1);
	fflush(stderr);
	CHECK(dup2(before, STDERR_FILENO) >= 0);
	close(before);
	rewind(file);
	bytes = fread(told, 1, sizeof(told) - 1, file);
	told[bytes] = '\0';
	fclose(file);
	return failed;
}

static void test_found_at_random_and_replayed(void)
{
	const char *find[] = {"", "--seed", "7"};
	const char *again[] = {"", "--only", "faulty", "--replay", NULL};
	static char choices[4096];
	const char *at;

	CHECK(run(3, find));
	CHECK(strstr(told, FAULT));
	CHECK(strstr(told, "at random, seed 7"));
	at = strstr(told, "--replay ");
	CHECK(at);
	CHECK_EQ(sscanf(at, "--replay %4095[0-9,]", choices), 1);

	again[4] = choices;
	CHECK(run(5, again));
	CHECK(strstr(told, FAULT));
	CHECK(strstr(told, choices));
}

int main(void)
{
	test_found_at_random_and_replayed();
	return 0;
}
