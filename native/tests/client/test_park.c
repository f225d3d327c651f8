/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments of idle threads (park.c). The test has the library in itself, and makes
 * its ticks by hand; the attach thread makes none (TICK_MS).
 */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "fake_node.h"
#include "writer.h"

static struct fake_node node;

static void tick(void)
{
	pthread_mutex_lock(&bs_process.lock);
	bs_park_idle();
	pthread_mutex_unlock(&bs_process.lock);
}

/* All that wrote nothing meanwhile have no segment after this. */
static void park_all(void)
{
	tick();
	tick();
}

static void attach(uint32_t segments, uint32_t granted)
{
	uint64_t before;
	struct bs_stats stats;

	bs_get_stats(&stats);
	before = stats.attachments;
	fake_node_hang_up(&node);
	fake_node_attach(&node, segments, granted);
	while (stats.attachments == before) {
		sched_yield();
		bs_get_stats(&stats);
	}
}

/* Nobody but the threads of the test has the lock now and then: who meets it held
 * takes a grant, where there is one, and not what is parked. */
static void attach_alone(uint32_t segments, uint32_t granted)
{
	attach(segments, granted);
	bs_prefault_stop();
}

static struct bs_trace_id id_of(uint64_t thread, uint64_t number)
{
	return (struct bs_trace_id){thread + 1, number};
}

static uint32_t segment_of(uint32_t slot)
{
	return load_acquire(&node.areas[slot].segment);
}

static struct bs_segment_header *header_at(uint32_t segment)
{
	return (struct bs_segment_header *)(node.arena +
					    (size_t)segment * BS_SEGMENT_BYTES);
}

static uint32_t state_of(uint32_t segment)
{
	return bs_life_state(load_acquire(&header_at(segment)->life));
}

static uint64_t lost(void)
{
	struct bs_stats stats;

	bs_get_stats(&stats);
	return stats.runs_lost + stats.records_lost;
}

/* ------------------------------------------------------------- threads --- */

/* Threads that do a step each when they are told. */
#define THREADS_MAX BS_THREAD_SLOTS

struct worker {
	pthread_t thread;
	uint64_t number;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	void (*step)(struct worker *);
	uint64_t steps;
	uint32_t payload_bytes;
	bool is_over;
	struct bs_trace handle;
};

static struct worker workers[THREADS_MAX];

static void *work(void *arg)
{
	struct worker *w = arg;

	pthread_mutex_lock(&w->lock);
	while (!w->is_over) {
		if (w->step) {
			w->step(w);
			w->step = NULL;
			w->steps++;
			pthread_cond_broadcast(&w->changed);
		}
		pthread_cond_wait(&w->changed, &w->lock);
	}
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

static void begin_step(struct worker *w, void (*step)(struct worker *))
{
	pthread_mutex_lock(&w->lock);
	w->step = step;
	pthread_cond_broadcast(&w->changed);
	pthread_mutex_unlock(&w->lock);
}

static void end_step(struct worker *w)
{
	pthread_mutex_lock(&w->lock);
	while (w->step)
		pthread_cond_wait(&w->changed, &w->lock);
	pthread_mutex_unlock(&w->lock);
}

static void do_step(struct worker *w, void (*step)(struct worker *))
{
	begin_step(w, step);
	end_step(w);
}

static void start_workers(uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		struct worker *w = &workers[i];

		memset(w, 0, sizeof(*w));
		w->number = i;
		w->payload_bytes = 100;
		pthread_mutex_init(&w->lock, NULL);
		pthread_cond_init(&w->changed, NULL);
		CHECK_EQ(pthread_create(&w->thread, NULL, work, w), 0);
	}
}

static void stop_worker(struct worker *w)
{
	pthread_mutex_lock(&w->lock);
	w->is_over = true;
	pthread_cond_broadcast(&w->changed);
	pthread_mutex_unlock(&w->lock);
	pthread_join(w->thread, NULL);
}

static void stop_workers(uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		stop_worker(&workers[i]);
}

/* The payload tells whose it is. */
static void write_record(uint64_t thread, uint64_t number, uint32_t bytes,
			 struct bs_trace *handle)
{
	uint64_t payload[BS_PAYLOAD_MAX / 8];

	for (uint32_t i = 0; i < (bytes + 7) / 8; i++)
		payload[i] = thread << 32 | number;
	if (handle)
		bs_write(handle, BS_RECORD_DATA, payload, bytes);
	else
		bs_tracepoint(payload, bytes);
}

static void step_trace(struct worker *w)
{
	CHECK_EQ(bs_begin(id_of(w->number, w->steps)), 0);
	write_record(w->number, w->steps, w->payload_bytes, NULL);
	CHECK_EQ(bs_end(), 0);
}

static void step_begin(struct worker *w)
{
	CHECK_EQ(bs_begin(id_of(w->number, 0)), 0);
	write_record(w->number, 0, w->payload_bytes, NULL);
}

static void step_record(struct worker *w)
{
	write_record(w->number, 0, w->payload_bytes, NULL);
}

static void step_end(struct worker *w)
{
	(void)w;
	CHECK_EQ(bs_end(), 0);
}

static void step_open(struct worker *w)
{
	CHECK_EQ(bs_open(&w->handle, id_of(w->number, 1)), 0);
	write_record(w->number, 1, w->payload_bytes, &w->handle);
}

static void step_write(struct worker *w)
{
	write_record(w->number, 1, w->payload_bytes, &w->handle);
}

static void step_close(struct worker *w)
{
	CHECK_EQ(bs_close(&w->handle), 0);
}

/* ------------------------------------------------------------- reading --- */

struct found {
	uint64_t runs, records, segments;
};

/* All that stands in the segments that were taken: each run of one trace, one
 * behind the other, and each record as it was written. seen: how many of each
 * trace, by thread and number. */
static struct found read_all(uint16_t *seen, uint64_t numbers)
{
	struct found found = {0};

	for (uint32_t g = 0; g != load_acquire(&node.grants->tail); g++) {
		uint32_t segment = node.grants->entries[g].segment &
				   ~BS_GRANT_FRESH;
		struct bs_segment_header *h = header_at(segment);
		uint32_t end = sizeof(*h);

		found.segments++;
		for (uint32_t i = 0; i < load_acquire(&h->runs); i++) {
			uint64_t entry = load_acquire(bs_directory(h, i));
			uint32_t offset = bs_entry_offset(entry);
			const struct bs_run_header *header =
				(void *)((unsigned char *)h + offset);
			uint32_t header_bytes =
				bs_run_header_bytes(bs_entry_flags(entry));
			struct fake_run run = {
				.id = bs_run_trace_id(entry, header->trace_hi,
						      header->word),
				.word = &header->word,
				.records = (const unsigned char *)header +
					   header_bytes,
			};
			const struct bs_record_header *r;
			uint32_t at = 0;

			CHECK_EQ(offset, end);
			CHECK(bs_entry_flags(entry) & BS_RUN_CLOSED);
			while ((r = fake_run_record(&run, &at))) {
				uint64_t thread = run.id.hi - 1;
				uint64_t number = run.id.lo;

				for (uint32_t k = 0; k < r->payload_bytes / 8;
				     k++) {
					uint64_t word;

					memcpy(&word,
					       (const uint64_t *)(r + 1) + k,
					       sizeof(word));
					CHECK_EQ(word, thread << 32 | number);
				}
				CHECK(number < numbers);
				seen[thread * numbers + number]++;
				found.records++;
			}
			end = offset + header_bytes +
			      bs_word_committed(header->word);
			found.runs++;
		}
		CHECK(end <= BS_SEGMENT_BYTES - 8 * h->runs);
	}
	return found;
}

static uint32_t one_each(uint64_t number)
{
	(void)number;
	return 1;
}

/* Of each trace of each thread as many records as were written. */
static struct found read_each(uint64_t threads, uint64_t numbers,
			      uint32_t (*written)(uint64_t number))
{
	uint16_t *seen = calloc(threads * numbers, sizeof(*seen));
	struct found found = read_all(seen, numbers);

	for (uint64_t i = 0; i < threads * numbers; i++)
		CHECK_EQ(seen[i], written(i % numbers));
	free(seen);
	return found;
}

/* --------------------------------------------------------------- tests --- */

/* Each thread took a segment; afterwards one is enough for all of them, as they
 * write one after the other. */
static void threads_that_are_idle_share(void)
{
	enum {
		THREADS = 32,
		ROUNDS = 4
	};
	uint64_t before = lost();
	uint32_t first = BS_SEGMENT_NONE;

	attach_alone(THREADS + 8, THREADS + 8);
	start_workers(THREADS);
	for (uint32_t i = 0; i < THREADS; i++)
		do_step(&workers[i], step_trace);
	CHECK_EQ(load_acquire(&node.grants->tail), THREADS);
	for (uint32_t round = 1; round < ROUNDS; round++) {
		for (uint32_t i = 0; i < THREADS; i++) {
			park_all();
			do_step(&workers[i], step_trace);
			if (first == BS_SEGMENT_NONE)
				first = segment_of(i);
			CHECK_EQ(segment_of(i), first);
			CHECK_EQ(state_of(first), BS_SEGMENT_HELD);
			CHECK_EQ(header_at(first)->slot, i);
		}
	}
	CHECK_EQ(load_acquire(&node.grants->tail), THREADS);
	park_all();
	for (uint32_t i = 0; i < THREADS; i++)
		CHECK_EQ(state_of(i), BS_SEGMENT_PARKED);
	read_each(THREADS, ROUNDS, one_each);
	CHECK_EQ(lost(), before);
	stop_workers(THREADS);
}

/* One that writes between two ticks keeps its segment; so does one in the middle
 * of a trace of its own, however long. */
static void who_writes_keeps_its_segment(void)
{
	attach_alone(16, 16);
	start_workers(3);
	do_step(&workers[1], step_begin);
	do_step(&workers[2], step_open);
	for (uint32_t i = 0; i < 8; i++) {
		uint32_t moves = load_acquire(&node.grants->moves);

		do_step(&workers[0], step_trace);
		do_step(&workers[2], step_write);
		tick();
		CHECK_EQ(load_acquire(&node.grants->moves), moves);
		if (i % 4 == 3)
			do_step(&workers[1], step_record);
	}
	CHECK_EQ(load_acquire(&node.grants->tail), 3);
	do_step(&workers[1], step_end);
	do_step(&workers[2], step_close);
	park_all();
	for (uint32_t i = 0; i < 3; i++)
		CHECK_EQ(state_of(i), BS_SEGMENT_PARKED);
	stop_workers(3);
}

/* A handle that is left open leaves its run, closed, and goes on in the next. */
static void handles_go_on_elsewhere(void)
{
	const uint32_t flags[] = {BS_RUN_FIRST, 0, 0, BS_RUN_LAST};
	struct bs_stats before, after;
	uint32_t handle = 0;

	attach_alone(16, 16);
	bs_get_stats(&before);
	start_workers(2);
	for (uint32_t i = 0; i < 4; i++) {
		do_step(&workers[0], i == 0   ? step_open
				     : i == 3 ? step_close
					      : step_write);
		park_all();
		CHECK_EQ(state_of(0), BS_SEGMENT_PARKED);
		do_step(&workers[1], step_trace);
		park_all();
	}
	CHECK_EQ(load_acquire(&node.grants->tail), 1);
	for (uint32_t i = 0; i < 8; i++) {
		uint64_t entry = load_acquire(bs_directory(header_at(0), i));
		const struct bs_run_header *run =
			(const void *)((unsigned char *)header_at(0) +
				       bs_entry_offset(entry));

		if (i % 2)
			continue;
		if (i == 0)
			handle = run->handle;
		CHECK_EQ(bs_entry_flags(entry), flags[i / 2] | BS_RUN_CLOSED);
		CHECK_EQ(run->handle, handle);
		if (i)
			CHECK_EQ(run->seq, i / 2);
	}
	/* What was closed for it is counted as if it had done it. */
	bs_get_stats(&after);
	CHECK_EQ(after.runs, before.runs + 8);
	stop_workers(2);
}

/* What the node took is not gone on in, and is missed by nobody. */
static void the_node_takes_what_is_parked(void)
{
	uint64_t before = lost();
	uint64_t life;

	attach_alone(16, 16);
	start_workers(2);
	do_step(&workers[0], step_trace);
	do_step(&workers[1], step_trace);
	park_all();
	/* The one that was parked last is the next to be gone on in. */
	for (uint32_t i = 0; i < 2; i++) {
		CHECK_EQ(state_of(i), BS_SEGMENT_PARKED);
		life = header_at(i)->life;
		CHECK(compare_and_swap(&header_at(i)->life, &life,
				       bs_life(bs_life_generation(life),
					       BS_SEGMENT_TAKEN_BACK)));
	}
	do_step(&workers[0], step_trace);
	do_step(&workers[1], step_trace);
	CHECK_EQ(load_acquire(&node.grants->tail), 4);
	CHECK_EQ(state_of(0), BS_SEGMENT_TAKEN_BACK);
	CHECK_EQ(state_of(1), BS_SEGMENT_TAKEN_BACK);
	CHECK(segment_of(0) >= 2 && segment_of(1) >= 2);
	read_each(2, 2, one_each);
	CHECK_EQ(lost(), before);
	stop_workers(2);
}

/* As long as there is room in what is parked, nothing is lost without grants. */
static void what_is_parked_is_a_stock(void)
{
	uint64_t before = lost();

	attach_alone(16, 3);
	start_workers(4);
	for (uint32_t i = 0; i < 3; i++)
		do_step(&workers[i], step_trace);
	park_all();
	for (uint32_t i = 0; i < 3; i++)
		do_step(&workers[3 - i], step_trace);
	CHECK_EQ(lost(), before);
	/* The three have them. */
	do_step(&workers[0], step_trace);
	CHECK(lost() > before);
	stop_workers(4);
}

/* A record goes where it fits, and leaves alone what has room for others. */
static void a_large_record_finds_room(void)
{
	uint64_t before = lost();

	attach_alone(16, 16);
	start_workers(3);
	/* Less than half of a segment is left. */
	workers[0].payload_bytes = BS_PAYLOAD_MAX;
	do_step(&workers[0], step_trace);
	do_step(&workers[1], step_trace);
	park_all();
	/* Parked last, and too full; the one before has room. */
	do_step(&workers[0], step_trace);
	CHECK_EQ(segment_of(0), 1);
	CHECK_EQ(state_of(0), BS_SEGMENT_PARKED);
	do_step(&workers[1], step_trace);
	CHECK_EQ(segment_of(1), 0);
	workers[2].payload_bytes = BS_PAYLOAD_MAX;
	do_step(&workers[2], step_trace);
	park_all();
	do_step(&workers[0], step_trace);
	CHECK_EQ(load_acquire(&node.grants->tail), 4);
	CHECK_EQ(lost(), before);
	stop_workers(3);
}

/* Places of slots whose threads are gone. */
static void threads_that_are_gone(void)
{
	attach_alone(16, 16);
	start_workers(4);
	for (uint32_t i = 0; i < 4; i++)
		do_step(&workers[i], step_trace);
	for (uint32_t i = 1; i < 4; i++)
		stop_worker(&workers[i]);
	tick();
	for (uint32_t i = 1; i < 4; i++)
		CHECK_EQ(state_of(i), BS_SEGMENT_PARKED);
	tick();
	do_step(&workers[0], step_trace);
	CHECK_EQ(load_acquire(&node.grants->tail), 4);
	stop_worker(&workers[0]);
	/* One that is parked and ends leaves nothing behind. */
	start_workers(1);
	do_step(&workers[0], step_trace);
	park_all();
	stop_worker(&workers[0]);
	tick();
	start_workers(1);
	do_step(&workers[0], step_trace);
	CHECK_EQ(load_acquire(&node.grants->tail), 4);
	stop_worker(&workers[0]);
}

/* Of what is too much, the oldest is gone on in by nobody. */
static void more_than_can_be_parked(void)
{
	enum {
		MORE = 8,
		ALL = BS_PARKED_MAX + MORE
	};

	attach_alone(ALL, ALL);
	store_release(&node.grants->tail, ALL);
	pthread_mutex_lock(&bs_process.lock);
	for (uint32_t i = 0; i < ALL; i++) {
		struct bs_segment_header *h =
			bs_segment_at(bs_process.current, i);

		h->life = bs_life(i + 1, BS_SEGMENT_HELD);
		bs_segment_park(bs_process.current, h,
				(unsigned char *)(h + 1));
	}
	pthread_mutex_unlock(&bs_process.lock);
	for (uint32_t i = 0; i < ALL; i++)
		CHECK_EQ(state_of(i),
			 i < MORE ? BS_SEGMENT_SEALED : BS_SEGMENT_PARKED);
	CHECK_EQ(bs_process.current->n_parked, BS_PARKED_MAX);
}

/* -------------------------------------------------------------- hammer --- */

/* Threads that write in bursts, with pauses as long as one tick or two, by both
 * forms of the API, while their segments are taken from them again and again, and
 * the node takes some of those. What they wrote is there, each record once. */
#define HAMMER_THREADS 3
#define HAMMER_TRACES 5000u
#define HAMMER_SEGMENTS 2048u
#define HAMMER_TAKEN_MAX 1024u

static uint32_t hammers_left;
static uint32_t ticks;

/* A thread goes on in the middle of the next one. */
static void wait_for_ticks(uint32_t count)
{
	uint32_t from = load_acquire(&ticks);

	while (load_acquire(&ticks) - from < count)
		sched_yield();
}

/* Two by a handle, one in a trace of the thread. */
static uint32_t hammer_writes(uint64_t number)
{
	return number % 4 ? 1 : 2;
}

static void *hammer(void *arg)
{
	struct worker *w = arg;
	uint64_t random = w->number + 1;

	for (uint64_t i = 0; i < HAMMER_TRACES; i++) {
		struct bs_trace handle;
		uint32_t bytes;

		random = random * 6364136223846793005ull +
			 1442695040888963407ull;
		bytes = 8 + (uint32_t)(random >> 40) % 64 * 8;
		if (hammer_writes(i) == 2) {
			CHECK_EQ(bs_open(&handle, id_of(w->number, i)), 0);
			write_record(w->number, i, bytes, &handle);
			if ((random >> 50 & 3) == 0)
				wait_for_ticks(1 + (random >> 43 & 1));
			write_record(w->number, i, bytes, &handle);
			CHECK_EQ(bs_close(&handle), 0);
		} else {
			CHECK_EQ(bs_begin(id_of(w->number, i)), 0);
			write_record(w->number, i, bytes, NULL);
			CHECK_EQ(bs_end(), 0);
		}
		if (random >> 40 & 7)
			continue;
		wait_for_ticks(1 + (random >> 43 & 1));
	}
	__atomic_fetch_sub(&hammers_left, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void segments_move_under_load(void)
{
	uint32_t moved = 0, taken = 0, random = 1;
	uint64_t before = lost();
	struct found found;

	attach(HAMMER_SEGMENTS, HAMMER_SEGMENTS);
	hammers_left = HAMMER_THREADS;
	for (uint32_t i = 0; i < HAMMER_THREADS; i++) {
		workers[i].number = i;
		CHECK_EQ(pthread_create(&workers[i].thread, NULL, hammer,
					&workers[i]),
			 0);
	}
	while (load_acquire(&hammers_left)) {
		tick();
		__atomic_fetch_add(&ticks, 1, __ATOMIC_RELEASE);
		/* The last of what is parked, and not all of it. */
		random = random * 1664525 + 1013904223;
		pthread_mutex_lock(&bs_process.lock);
		if (bs_process.current->n_parked && random >> 28 == 0 &&
		    taken < HAMMER_TAKEN_MAX) {
			struct bs_attachment *a = bs_process.current;
			struct bs_place *p = &a->parked[a->n_parked - 1];
			uint64_t life = p->life;

			moved++;
			taken += compare_and_swap(
				&bs_segment_at(a, p->segment)->life, &life,
				bs_life(bs_life_generation(life),
					BS_SEGMENT_TAKEN_BACK));
		}
		pthread_mutex_unlock(&bs_process.lock);
	}
	for (uint32_t i = 0; i < HAMMER_THREADS; i++)
		pthread_join(workers[i].thread, NULL);
	CHECK_EQ(lost(), before);
	found = read_each(HAMMER_THREADS, HAMMER_TRACES, hammer_writes);
	CHECK(found.runs >= HAMMER_THREADS * HAMMER_TRACES);
	CHECK(load_acquire(&node.grants->moves) > HAMMER_THREADS);
	fprintf(stderr, "%u moves, %u of %u taken by the node, %u segments\n",
		node.grants->moves, taken, moved, node.grants->tail);
}

static uint32_t count_members(void)
{
	uint32_t count = 0;

	for (const struct bs_member *m = bs_members; m; m = m->next)
		count++;
	return count;
}

#define DEAD 150
#define NO_TID (1 << 30)

static void add_dead_members(void)
{
	for (int i = 0; i < DEAD; i++) {
		struct bs_member *m = aligned_alloc(BS_CACHE_LINE, sizeof(*m));

		CHECK(m);
		memset(m, 0, sizeof(*m));
		m->tid = NO_TID;
		m->slot_number = BS_THREAD_SLOTS;
		m->next = bs_members;
		m->link = &bs_members;
		if (m->next)
			m->next->link = &m->next;
		bs_members = m;
	}
}

static void reap(uint32_t left)
{
	pthread_mutex_lock(&bs_process.lock);
	bs_thread_reap();
	CHECK_EQ(count_members(), left);
	pthread_mutex_unlock(&bs_process.lock);
}

/* However many threads there are, the lock is held for a bounded number of them; and
 * all are looked at in their turn, whoever leaves meanwhile. */
static void the_dead_are_found_in_pieces(void)
{
	uint32_t alive;

	start_workers(100);
	for (uint32_t i = 0; i < 100; i++)
		do_step(&workers[i], step_trace);
	pthread_mutex_lock(&bs_process.lock);
	alive = count_members();
	/* Begin with the first. */
	for (uint32_t i = 0; i < alive; i += 64)
		bs_thread_reap();
	add_dead_members();
	pthread_mutex_unlock(&bs_process.lock);
	CHECK(alive > 100 && alive < 128);
	reap(alive + DEAD - 64);
	reap(alive + DEAD - 2 * 64);
	reap(alive);
	/* The next is one of those that live, and now leave. */
	stop_workers(100);
	alive -= 100;
	pthread_mutex_lock(&bs_process.lock);
	add_dead_members();
	pthread_mutex_unlock(&bs_process.lock);
	for (int i = 0; i < 4; i++) {
		pthread_mutex_lock(&bs_process.lock);
		bs_thread_reap();
		pthread_mutex_unlock(&bs_process.lock);
	}
	reap(alive);
	/* The lock may be given up. */
	pthread_mutex_lock(&bs_process.lock);
	add_dead_members();
	bs_thread_reap_all();
	CHECK_EQ(count_members(), alive);
	pthread_mutex_unlock(&bs_process.lock);
}

int main(void)
{
	fake_node_open(&node);
	RUN(threads_that_are_idle_share);
	RUN(who_writes_keeps_its_segment);
	RUN(handles_go_on_elsewhere);
	RUN(the_node_takes_what_is_parked);
	RUN(what_is_parked_is_a_stock);
	RUN(a_large_record_finds_room);
	RUN(threads_that_are_gone);
	RUN(more_than_can_be_parked);
	RUN(segments_move_under_load);
	RUN(the_dead_are_found_in_pieces);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
