/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The only program of a virtual machine: it loads the probes into a kernel that this
 * machine does not run, has two things happen to itself, and says what became of it, a
 * line of JSON each. Its arguments are a loader, "core" or "bcc", and the probes,
 * bpf/<name>.bpf.c. What bcc made of them is in /code; or "layout", and it says how this
 * kernel's structures are laid out.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/filter.h>
#include <net/if.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "abi/context.h"
#include "barrier.h"
#include "probes.h"

#define MS 1000000ull
#define CLIENT 7u
#define MESSAGE_BYTES 512
#define PROGRAMS_MAX 64
#define CODE_BYTES (1u << 20)
#define BASE "threads"
#define HOGS 2

/* A segment that nobody confirms is sent again after 200 ms, by a kernel that runs
 * some fifty times slower than usual. */
#define PATIENCE_NS (20000 * MS)

static struct bs_context_segment *context;
static uint32_t taken; /* cells of the trigger queue */
static bool over;

/* Texts of the kernel's verifier may have anything in them. */
static void print_text(const char *text)
{
	for (; *text; text++)
		putchar(*text == '"' || *text == '\\' || *text < ' ' ? ' '
								     : *text);
}

static void require(bool holds, const char *what)
{
	if (holds)
		return;
	printf("{\"failed\": \"");
	print_text(what);
	printf("\", \"error\": \"%s\"}\n", strerror(errno));
	fflush(stdout);
	reboot(RB_POWER_OFF);
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void set_up_machine(void)
{
	struct ifreq loopback = {.ifr_name = "lo",
				 .ifr_flags = IFF_UP | IFF_RUNNING};
	int fd;

	mkdir("/proc", 0755);
	mkdir("/sys", 0755);
	require(!mount("proc", "/proc", "proc", 0, NULL), "mount /proc");
	require(!mount("sysfs", "/sys", "sysfs", 0, NULL), "mount /sys");
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	require(fd >= 0 && !ioctl(fd, SIOCSIFFLAGS, &loopback), "loopback");
	close(fd);
}

/* ------------------------------------------------------------- probes --- */

/* What bcc made of a probe, if it was asked. */
static size_t read_code(const char *name, void *code)
{
	char path[64];
	size_t bytes;
	FILE *file;

	snprintf(path, sizeof(path), "/code/%s", name);
	file = fopen(path, "re");
	if (!file)
		return 0;
	bytes = fread(code, 1, CODE_BYTES, file);
	fclose(file);
	return bytes;
}

static void attach(struct bsp *p, const char *name)
{
	static unsigned char code[CODE_BYTES];
	char message[MESSAGE_BYTES] = "";
	int err = bsp_attach(p, name, code, read_code(name, code), message,
			     sizeof(message));

	printf("{\"object\": \"%s\", \"error\": \"", name);
	print_text(err ? message : "");
	printf("\"}\n");
}

static void tell_programs(struct bsp *p)
{
	static struct bsp_program programs[PROGRAMS_MAX];
	int count = bsp_get_programs(p, programs, PROGRAMS_MAX);

	for (int i = 0; i < count; i++)
		printf("{\"program\": \"%s\", \"instructions\": %llu}\n",
		       programs[i].name,
		       (unsigned long long)programs[i].verified_instructions);
}

/* As a node would, and its library. */
static void join(struct bsp *p)
{
	struct bsp_newcomer myself = {.client = CLIENT};
	int fd = bsp_context();
	int self = (int)syscall(SYS_pidfd_open, getpid(), 0);

	require(fd >= 0 && self >= 0, "context");
	context = mmap(NULL, sizeof(*context), PROT_READ | PROT_WRITE,
		       MAP_SHARED, fd, 0);
	require(context != MAP_FAILED, "map the context");
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		context->cells[i].seq = i;
	myself.pidfd = self;
	myself.context = fd;
	bsp_register(p, &myself, 1);
	require(myself.number >= 0, "register");
}

static void show(uint32_t slot, uint64_t trace)
{
	struct bs_thread_slot *s = &context->slots[slot];

	WRITE_ONCE(s->trace_hi, trace);
	WRITE_ONCE(s->trace_lo, trace);
	WRITE_ONCE(s->tid, (uint32_t)syscall(SYS_gettid));
	context->slots_taken++;
}

static const struct bs_trigger_cell *next_trigger(void)
{
	struct bs_trigger_cell *cell =
		&context->cells[taken % BS_TRIGGER_CELLS];

	if (load_acquire(&cell->seq) != taken + 1)
		return NULL;
	taken++;
	return cell;
}

/* Whether that trigger fires for that trace, and names this other one (0: none). */
static bool fires(const char *name, uint64_t trace, uint64_t lateral)
{
	const struct bs_trigger_cell *cell = next_trigger();

	if (!cell || strcmp(cell->name, name) != 0 || cell->trace_hi != trace ||
	    cell->trace_lo != trace || cell->event.client != CLIENT)
		return false;
	if (!lateral)
		return true;
	for (uint32_t i = 0; i < cell->n_laterals; i++) {
		if (cell->laterals[i].hi == lateral)
			return true;
	}
	return false;
}

static void tell_case(const char *name, bool right)
{
	printf("{\"case\": \"%s\", \"right\": %s}\n", name,
	       right ? "true" : "false");
	fflush(stdout);
}

/* ---------------------------------------------------------- run queue --- */

static void *compute(void *slot)
{
	show(*(uint32_t *)slot, 100 + *(uint32_t *)slot);
	while (!READ_ONCE(over))
		;
	return NULL;
}

/* Three threads share the one CPU. */
static void starve(struct bsp *p)
{
	static uint32_t slots[HOGS] = {1, 2};
	uint64_t start = now_ns();
	pthread_t hogs[HOGS];
	bool right = false;

	require(!bsp_set_kind(p, 1, "kernel.run_queue", 2 * MS, MS, 0, 0),
		"thresholds");
	show(0, 1);
	for (int i = 0; i < HOGS; i++)
		require(!pthread_create(&hogs[i], NULL, compute, &slots[i]),
			"thread");
	while (!right && now_ns() - start < PATIENCE_NS)
		right = fires("kernel.run_queue", 1, 101);
	WRITE_ONCE(over, true);
	for (int i = 0; i < HOGS; i++)
		pthread_join(hogs[i], NULL);
	bsp_set_kind(p, 1, "kernel.run_queue", UINT64_MAX, UINT64_MAX, 0, 0);
	while (next_trigger())
		;
	tell_case("run_queue", right);
}

/* --------------------------------------------------------- retransmit --- */

/* What comes in is thrown away, before TCP sees it. */
static void stop_reading(int fd)
{
	struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
	struct sock_fprog program = {.len = 1, .filter = &nothing};

	require(!setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program,
			    sizeof(program)),
		"filter");
}

static void connect_pair(int *client, int *server)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t bytes = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	*client = socket(AF_INET, SOCK_STREAM, 0);
	require(!bind(listener, (struct sockaddr *)&address, bytes) &&
			!listen(listener, 1) &&
			!getsockname(listener, (struct sockaddr *)&address,
				     &bytes) &&
			!connect(*client, (struct sockaddr *)&address, bytes),
		"connection");
	*server = accept(listener, NULL, NULL);
	require(*server >= 0, "accept");
	close(listener);
}

static void lose(struct bsp *p)
{
	uint64_t start = now_ns();
	bool right = false;
	int client, server;

	require(!bsp_set_kind(p, 6, "kernel.tcp_retransmit", 0, 0, 0, 0),
		"thresholds");
	connect_pair(&client, &server);
	stop_reading(server);
	show(0, 2);
	require(write(client, "first", 5) == 5, "write");
	show(0, 3);
	require(write(client, "second", 6) == 6, "write");
	while (!right && now_ns() - start < PATIENCE_NS)
		right = fires("kernel.tcp_retransmit", 2, 3);
	close(client);
	close(server);
	tell_case("tcp_retransmit", right);
}

static void tell_layout(void)
{
	char message[MESSAGE_BYTES] = "", *text;
	int err = bsp_layout(&text, message, sizeof(message));

	errno = -err;
	require(!err, message);
	printf("{\"layout\": \"");
	print_text(text);
	printf("\"}\n");
	bsp_layout_free(text);
}

static void load(enum bsp_loader loader, char **names, int count)
{
	static unsigned char code[CODE_BYTES];
	char message[MESSAGE_BYTES] = "";
	struct bsp *p;
	int err;

	err = bsp_new(&p, loader, code, read_code(BASE, code), message,
		      sizeof(message));
	errno = -err;
	require(!err, message);
	for (int i = 0; i < count; i++)
		attach(p, names[i]);
	tell_programs(p);
	fflush(stdout);
	join(p);
	starve(p);
	lose(p);
	bsp_free(p);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "core";
	struct utsname kernel;

	if (getpid() == 1)
		set_up_machine();
	uname(&kernel);
	printf("\n{\"kernel\": \"%s\"}\n", kernel.release);
	if (!strcmp(what, "layout"))
		tell_layout();
	else
		load(strcmp(what, "bcc") ? BSP_CORE : BSP_BCC, argv + 2,
		     argc - 2);
	printf("{\"done\": true}\n");
	fflush(stdout);
	if (getpid() == 1)
		reboot(RB_POWER_OFF);
	return 0;
}
