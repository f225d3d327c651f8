/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What many processes that do nothing cost a node.
 *
 *   clients CLIENTS THREADS SECONDS TRIGGERS_PER_S
 *
 * The data plane (node.h) is in this process, without a daemon around it, and
 * a thread works for it as the daemon's does (appliance/pump.py): it sleeps,
 * polls, collects what was triggered, and looks again for a while. CLIENTS are
 * attached, each with THREADS threads that wrote one trace of 100 bytes once;
 * they are memory here, and no processes. One of them triggers TRIGGERS_PER_S
 * times a second.
 *
 * Prints one line of JSON: the CPU time of all threads of this process in
 * SECONDS, how often it polled, and what nine of ten polls took at most.
 */
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "backsight.h"
#include "barrier.h"
#include "node.h"

#define NS_PER_S 1000000000ull
#define NS_PER_MS 1000000ull

/* Of the daemon's worker: how long it looks often after a trigger, how often
 * that is, and how often it looks while slices are held at all. */
#define LIVELY_NS NS_PER_S
#define LIVELY_WAIT_NS (20 * NS_PER_MS)
#define HELD_WAIT_NS (250 * NS_PER_MS)
#define IDLE_WAIT_NS (5 * NS_PER_S)

/* Until a slice is reported and forgotten: a coordinator's judgement. */
#define HELD_NS (500 * NS_PER_MS)

/* Room for what all threads have in hand and for as much again. */
#define SEGMENTS_A_CLIENT_MIN 16u
#define ARENA_SEGMENTS 256u

#define TRACE_BYTES 100u
#define POLLS_MAX 1000000u

struct client {
	struct bsn_client_fds fds;
	uint8_t *channel;
	struct bs_context_segment *context;
};

struct bench {
	struct bsn *node;
	struct client *clients;
	uint32_t n_clients;
	uint32_t is_done;
	uint64_t polls;
	uint64_t taken; /* triggers */
	uint64_t *poll_ns;
};

__attribute__((noreturn)) static void die(const char *what)
{
	fprintf(stderr, "clients: %s\n", what);
	exit(1);
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	if (clock_gettime(clock, &t))
		die("a clock cannot be read");
	return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static uint64_t now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

static void *map(int fd, size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (at == MAP_FAILED)
		die("a client's memory cannot be mapped");
	return at;
}

/* -------------------------------------------------------------- clients --- */

#if __has_include("abi/arena.h")

/* One closed run of one record. */
static void write_trace(uint8_t *segment, uint64_t number)
{
	const uint32_t flags = BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_CLOSED;
	uint32_t bytes = ((uint32_t)sizeof(struct bs_record_header) +
			  TRACE_BYTES + BS_RECORD_ALIGN - 1) /
			 BS_RECORD_ALIGN * BS_RECORD_ALIGN;
	uint32_t offset = sizeof(struct bs_segment_header);
	uint8_t *at = segment + offset;
	struct bs_run_header *run = (void *)at;
	struct bs_record_header *record =
		(void *)(at + bs_run_header_bytes(flags));

	run->trace_hi[0] = (uint32_t)number;
	run->trace_hi[1] = (uint32_t)(number >> 32);
	run->word = bs_word(bs_trace_mix(number, number), bytes);
	run->handle = 0;
	*record = (struct bs_record_header){
		.payload_bytes = TRACE_BYTES,
		.type = BS_RECORD_DATA,
		.ticks = now_ns(),
	};
	*bs_directory(segment, 0) =
		bs_entry(bs_fingerprint(number, number), offset, flags);
	store_release(&((struct bs_segment_header *)segment)->runs, 1);
}

/* A thread takes a segment, writes a trace, and goes to sleep. */
static void begin_thread(struct client *c, uint32_t slot, uint64_t number)
{
	struct bs_grant_ring *ring =
		(void *)(c->channel + BS_CHANNEL_GRANTS_OFFSET);
	struct bs_grant *grant =
		&ring->entries[ring->tail % BS_GRANT_RING_ENTRIES];
	struct bs_segment_header *header;
	uint8_t *segment;
	long offset =
		(long)(grant->segment & ~BS_GRANT_FRESH) * BS_SEGMENT_BYTES;

	if (ring->tail == load_acquire(&ring->head))
		die("a thread was granted nothing");
	store_release(&ring->tail, ring->tail + 1);
	segment = mmap(NULL, BS_SEGMENT_BYTES, PROT_READ | PROT_WRITE,
		       MAP_SHARED, c->fds.arena, offset);
	if (segment == MAP_FAILED)
		die("a segment cannot be mapped");
	header = (void *)segment;
	header->runs = 0;
	header->slot = slot;
#ifdef BS_PARKED_MAX
	store_release(&header->life,
		      bs_life(grant->generation, BS_SEGMENT_HELD));
#else
	/* Of before segments could be parked. */
	store_release(&header->generation, grant->generation);
#endif
	write_trace(segment, number);
	munmap(segment, BS_SEGMENT_BYTES);
}

#else

/* Another layout, of before this was measured. */
static void begin_thread(struct client *c, uint32_t slot, uint64_t number)
{
	(void)c;
	(void)slot;
	(void)number;
	fprintf(stderr, "clients: left out: this commit has other segments\n");
	exit(0);
}

#endif

static void close_fds(const struct client *c)
{
	close(c->fds.arena);
	close(c->fds.channel);
	close(c->fds.context);
}

/* All but the first, which triggers, are left to the node. */
static void attach_all(struct bench *b, uint32_t threads)
{
	uint64_t number = 0;

	for (uint32_t i = 0; i < b->n_clients; i++) {
		struct client *c = &b->clients[i];

		if (bsn_client_add(b->node, 1, "bench", now_ns(), &c->fds) < 0)
			die("a client was refused");
		c->channel = map(c->fds.channel, BS_CHANNEL_BYTES);
		c->context = map(c->fds.context, sizeof(*c->context));
		for (uint32_t t = 0; t < threads; t++) {
			begin_thread(c, t, ++number);
			/* For the grant of the next one. */
			bsn_poll(b->node, now_ns());
		}
		close_fds(c);
		if (!i)
			continue;
		munmap(c->channel, BS_CHANNEL_BYTES);
		munmap(c->context, sizeof(*c->context));
	}
}

static void trigger(struct client *c, uint64_t number)
{
	struct bs_context_segment *x = c->context;
	uint32_t at = x->trigger_head++;
	struct bs_trigger_cell *cell = &x->cells[at % BS_TRIGGER_CELLS];
	struct bs_doorbell *bell =
		&((struct bs_channel_header *)c->channel)->doorbell;

	if (load_acquire(&cell->seq) != at)
		die("triggers are not taken");
	memset(cell->name, 0, sizeof(cell->name));
	memset(cell->why, 0, sizeof(cell->why));
	memcpy(cell->name, "bench", 5);
	cell->trace_hi = cell->trace_lo = number;
	cell->ticks = now_ns();
	cell->source = BS_TRIGGER_APPLICATION;
	cell->n_laterals = 0;
	store_release(&cell->seq, at + 1);
	full_fence();
	if (!READ_ONCE(bell->sleeping))
		return;
	fetch_add(&bell->rung, 1);
	syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* ----------------------------------------------------------------- node --- */

static struct bsn *new_node(uint32_t clients, uint32_t threads)
{
	uint64_t segments = SEGMENTS_A_CLIENT_MIN + 2ull * threads;
	struct bsn_config config = {
		.node_name = "bench",
		.arena_bytes = (uint64_t)ARENA_SEGMENTS * BS_SEGMENT_BYTES,
		/* Stocks together have a quarter of it. */
		.pool_bytes = 4 * clients * segments * BS_SEGMENT_BYTES,
		.store_bytes = 64 << 20,
		.trace_bytes_max = 16 << 20,
		.percentage_threshold = UINT64_MAX,
		.reclaim_percent = 98,
		.clients_max = clients,
		.tombstones = 1 << 20,
		.ticks_per_s = NS_PER_S,
	};
	char message[256] = "";
	struct bsn *node;

	if (config.pool_bytes < config.arena_bytes)
		config.pool_bytes = config.arena_bytes;
	if (bsn_new(&config, &node, message, sizeof(message)))
		die(message);
	return node;
}

static void take_events(struct bench *b, struct bs_trace_id *held,
			uint64_t *lively_ns)
{
	struct bsn_event events[64];
	struct bsn_slice slice;
	int count;

	while ((count = bsn_events(b->node, events, 64)) > 0) {
		for (int i = 0; i < count; i++) {
			if (events[i].kind != BSN_EVENT_TRIGGER)
				continue;
			*lively_ns = now_ns();
			if (held->hi)
				bsn_slice_release(b->node, *held, false,
						  *lively_ns);
			*held = events[i].id;
			bsn_collect(b->node, *held, *held, "bench", *lively_ns,
				    &slice);
			b->taken++;
		}
	}
	bsn_events_done(b->node);
}

static void *work(void *argument)
{
	struct bench *b = argument;
	struct bs_trace_id held = {0, 0};
	uint64_t lively_ns = 0;

	while (!load_acquire(&b->is_done)) {
		uint64_t now = now_ns(), begun;
		int64_t timeout_ns = IDLE_WAIT_NS;

		if (now - lively_ns < LIVELY_NS)
			timeout_ns = LIVELY_WAIT_NS;
		else if (held.hi)
			timeout_ns = HELD_WAIT_NS;
		bsn_wait(b->node, timeout_ns);
		now = now_ns();
		bsn_clock_pair(b->node, now, now, now);
		begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
		bsn_poll(b->node, now);
		if (b->polls < POLLS_MAX)
			b->poll_ns[b->polls++] =
				clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun;
		if (held.hi && now - lively_ns > HELD_NS) {
			bsn_slice_release(b->node, held, false, now);
			held.hi = 0;
		}
		take_events(b, &held, &lively_ns);
	}
	return NULL;
}

/* ----------------------------------------------------------------- main --- */

static int by_value(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

static void sleep_until(uint64_t at_ns)
{
	struct timespec until = {
		.tv_sec = (time_t)(at_ns / NS_PER_S),
		.tv_nsec = (long)(at_ns % NS_PER_S),
	};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL))
		;
}

int main(int argc, char **argv)
{
	struct bench b = {0};
	uint64_t begun_ns, begun_cpu_ns, cpu_ns, elapsed_ns, polls, triggers;
	uint32_t threads, seconds, per_s;
	pthread_t worker;

	if (argc != 5)
		die("clients CLIENTS THREADS SECONDS TRIGGERS_PER_S");
	b.n_clients = (uint32_t)strtoul(argv[1], NULL, 10);
	threads = (uint32_t)strtoul(argv[2], NULL, 10);
	seconds = (uint32_t)strtoul(argv[3], NULL, 10);
	per_s = (uint32_t)strtoul(argv[4], NULL, 10);
	if (!b.n_clients || !seconds || threads > BS_THREAD_SLOTS)
		die("there must be a client and a second, and no more threads than slots");
	b.clients = calloc(b.n_clients, sizeof(*b.clients));
	b.poll_ns = calloc(POLLS_MAX, sizeof(*b.poll_ns));
	if (!b.clients || !b.poll_ns)
		die("no memory");
	b.node = new_node(b.n_clients, threads);
	attach_all(&b, threads);
	bsn_poll(b.node, now_ns());
	if (pthread_create(&worker, NULL, work, &b))
		die("no thread can be had");
	/* For those that came it polls once more. */
	sleep_until(now_ns() + NS_PER_S / 2);

	polls = READ_ONCE(b.polls);
	begun_cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	begun_ns = now_ns();
	triggers = (uint64_t)seconds * per_s;
	for (uint64_t i = 0; i < triggers; i++) {
		trigger(&b.clients[0], i + 1);
		sleep_until(begun_ns + (i + 1) * NS_PER_S / per_s);
	}
	sleep_until(begun_ns + seconds * NS_PER_S);
	cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - begun_cpu_ns;
	elapsed_ns = now_ns() - begun_ns;

	store_release(&b.is_done, 1);
	bsn_wake(b.node);
	pthread_join(worker, NULL);
	if (b.taken != triggers)
		die("a trigger was lost");
	qsort(b.poll_ns + polls, b.polls - polls, sizeof(*b.poll_ns), by_value);
	printf("{\"cpu_ns\": %" PRIu64 ", \"elapsed_ns\": %" PRIu64
	       ", \"polls\": %" PRIu64 ", \"poll_ns\": %" PRIu64 "}\n",
	       cpu_ns, elapsed_ns, b.polls - polls,
	       b.poll_ns[polls + (b.polls - polls) * 9 / 10]);
	bsn_free(b.node);
	free(b.clients);
	free(b.poll_ns);
	return 0;
}
