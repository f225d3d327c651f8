/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads and BPF programs push into one trigger queue at the same time: nothing is
 * lost, nothing is mixed up, and what each pushes comes in order.
 */
#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>

#include "../node/writer.h"
#include "abi/trigger_queue.h"
#include "push.h"

#define PRODUCERS 4u /* half of them threads, half of them programs */
#define EACH 100000u
#define SKIPPED 77

static struct bs_context_segment *context;
static int program;

static void fill(struct bs_trigger_cell *cell, uint64_t producer,
		 uint64_t number)
{
	const struct bs_kernel_event event = {
		.time_ns = number,
		.duration_ns = ~number,
		.kind = BS_KERNEL_RUN_QUEUE,
	};

	cell->n_laterals = 1;
	cell->source = BS_TRIGGER_KERNEL;
	cell->trace_hi = producer;
	cell->trace_lo = number;
	cell->ticks = number;
	memset(cell->name, 0, sizeof(cell->name));
	memcpy(cell->name, "kernel.test", sizeof("kernel.test"));
	cell->event = event;
	cell->laterals[0] = (struct bs_cell_trace){producer, ~number};
}

static void *push_from_c(void *argument)
{
	uint64_t producer = *(uint64_t *)argument, number = 1;

	while (number <= EACH) {
		uint32_t position;
		struct bs_trigger_cell *cell =
			bs_cell_claim(context, 10000, &position);

		if (!cell) {
			sched_yield();
			continue;
		}
		fill(cell, producer, number++);
		CHECK(bs_cell_commit(cell, position));
	}
	return NULL;
}

static void *push_from_bpf(void *argument)
{
	struct push order = {*(uint64_t *)argument, 1};
	LIBBPF_OPTS(bpf_test_run_opts, options, .ctx_in = &order,
		    .ctx_size_in = sizeof(order));

	while (order.next <= EACH) {
		uint64_t before = order.next;

		CHECK_EQ(bpf_prog_test_run_opts(program, &options), 0);
		if (order.next == before)
			sched_yield();
	}
	return NULL;
}

static void check_event(const struct bsn_event *e, uint64_t *last)
{
	const struct bs_kernel_event *event = (const void *)e->why;

	CHECK_EQ(e->kind, BSN_EVENT_TRIGGER);
	CHECK(e->id.hi >= 1 && e->id.hi <= PRODUCERS);
	CHECK_EQ(e->id.lo, ++last[e->id.hi]);
	CHECK_EQ(e->source, BS_TRIGGER_KERNEL);
	CHECK(!strcmp(e->trigger, "kernel.test"));
	CHECK_EQ(event->time_ns, e->id.lo);
	CHECK_EQ(event->duration_ns, ~e->id.lo);
	CHECK_EQ(e->n_laterals, 1);
	CHECK_EQ(e->laterals[0].hi, e->id.hi);
	CHECK_EQ(e->laterals[0].lo, ~e->id.lo);
}

/* Programs push so many at once, and may go beyond. */
static bool all_came(const uint64_t *last)
{
	for (uint32_t i = 1; i <= PRODUCERS; i++) {
		if (last[i] < EACH)
			return false;
	}
	return true;
}

static void both_push(struct bsn *n)
{
	static uint64_t names[PRODUCERS + 1], last[PRODUCERS + 1];
	static struct bsn_event e[BS_TRIGGER_CELLS];
	pthread_t threads[PRODUCERS + 1];

	for (uint32_t i = 1; i <= PRODUCERS; i++) {
		names[i] = i;
		CHECK_EQ(pthread_create(&threads[i], NULL,
					i % 2 ? push_from_c : push_from_bpf,
					&names[i]),
			 0);
	}
	/* The clock stands still: no cell is skipped for a thread that has to wait. */
	while (!all_came(last)) {
		int got;

		bsn_poll(n, START);
		while ((got = bsn_events(n, e, BS_TRIGGER_CELLS))) {
			for (int i = 0; i < got; i++)
				check_event(&e[i], last);
		}
		bsn_events_done(n);
	}
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		pthread_join(threads[i], NULL);
}

/* A context that is a BPF map, in which a program finds it too. */
static int make_context(const struct bpf_object *object)
{
	LIBBPF_OPTS(bpf_map_create_opts, options, .map_flags = BPF_F_MMAPABLE);
	int fd = bpf_map_create(BPF_MAP_TYPE_ARRAY, "bs_context", 4,
				sizeof(*context), 1, &options);
	uint32_t process = 0;

	CHECK(fd >= 0);
	CHECK_EQ(bpf_map_update_elem(
			 bpf_object__find_map_fd_by_name(object, "processes"),
			 &process, &fd, BPF_ANY),
		 0);
	return fd;
}

int main(int argc, char **argv)
{
	struct bsn_config config = test_config(8 << 20);
	struct bpf_object *object;
	struct bsn_metrics m;
	struct writer w;
	struct bsn *n;
	int fd;

	CHECK_EQ(argc, 2);
	object = bpf_object__open(argv[1]);
	CHECK(object);
	if (bpf_object__load(object)) {
		perror("no BPF here");
		return errno == EPERM ? SKIPPED : 1;
	}
	program = bpf_program__fd(
		bpf_object__find_program_by_name(object, "push_some"));
	n = test_node(&config);
	writer_attach(&w, n, START);
	fd = make_context(object);
	CHECK(bsn_client_context(n, w.number, fd) >= 0);
	bsn_poll(n, START);
	CHECK(bsn_client_context_done(n, w.number, START) >= 0);
	context = w_map_context(fd);
	both_push(n);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.cells_skipped, 0);
	/* Programs count those for which no cell was free; threads here try again. */
	printf("%" PRIu64
	       " triggers, %u times there was no room for a program's\n",
	       m.triggers, context->triggers_lost);
	writer_close(&w);
	bsn_free(n);
	bpf_object__close(object);
	return 0;
}
