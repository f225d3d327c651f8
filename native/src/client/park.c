/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments of idle threads. At each tick the attach thread takes those of threads
 * that have written nothing since the last one, and parks them: whoever needs a
 * segment takes a parked one before it takes a grant, and goes on where it ends.
 *
 * The thread is asked for nothing, and its way to a run has no fence: that is the
 * attach thread's, on its behalf (membarrier).
 *
 *   thread (bs_run_announce)              attach thread, bs_lock held
 *   ------------------------              ---------------------------
 *   WRITE_ONCE(stands_at, NULL)           WRITE_ONCE(is_called, true), of all
 *   light_fence()                           that seem idle
 *   if load_acquire(is_called): ask,      membarrier()
 *     under bs_lock                       load_acquire(stands_at), of each:
 *   open the run; write; close it           NULL: is_called = false
 *   store_release(stands_at, cursor)        else the segment is parked
 *
 * Either the thread sees that it is called, and waits until it is decided; or the
 * attach thread sees that it stands nowhere. Until it has noticed, a thread whose segment
 * was taken stays called.
 *
 * A handle's run that is open is closed with that: the handle goes on with the next
 * one. Not so that of the thread's own trace: bs_record_at() is inlined in the
 * application, and writes to it without a word to anybody.
 */
#include <linux/membarrier.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "writer.h"

/* Less room than that is not worth going on: a request of a few records. */
#define ROOM_MIN 1024u

/* Linux before 4.14 has none, and a sandbox may forbid it: then threads keep what
 * they have. The attach thread's. */
static bool has_membarrier;

static bool membarrier(int command)
{
	return !syscall(SYS_membarrier, command, 0, 0);
}

void bs_park_start(void)
{
	has_membarrier = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
}

/* ------------------------------------------------------------ segments --- */

/* The node looks at the headers where this has moved. */
static void tell(struct bs_attachment *a)
{
	fetch_add_release(&a->grants->moves, 1);
}

static uint64_t life_with(uint64_t life, enum bs_segment_state state)
{
	return bs_life(bs_life_generation(life), state);
}

void bs_segment_seal(struct bs_attachment *a, struct bs_segment_header *segment)
{
	/* Nobody else writes to it while it is held. */
	store_release(&segment->life,
		      life_with(READ_ONCE(segment->life), BS_SEGMENT_SEALED));
	tell(a);
}

/* Its thread was not there to do it. */
static void close_last_run(struct bs_segment_header *segment, uint32_t runs)
{
	uint64_t *last = bs_directory(segment, runs - 1);
	uint64_t entry = READ_ONCE(*last);

	if (!(bs_entry_flags(entry) & BS_RUN_CLOSED))
		store_release(last, entry | BS_RUN_CLOSED);
}

static void forget_place(struct bs_attachment *a, uint32_t i)
{
	WRITE_ONCE(a->n_parked, a->n_parked - 1);
	memmove(&a->parked[i], &a->parked[i + 1],
		(a->n_parked - i) * sizeof(a->parked[0]));
}

/* No room for one more: the oldest is gone on in by nobody. */
static void seal_oldest(struct bs_attachment *a)
{
	struct bs_place place = a->parked[0];

	forget_place(a, 0);
	compare_and_swap(&bs_segment_at(a, place.segment)->life, &place.life,
			 life_with(place.life, BS_SEGMENT_SEALED));
}

void bs_segment_park(struct bs_attachment *a, struct bs_segment_header *segment,
		     const unsigned char *cursor)
{
	unsigned char *bytes = (unsigned char *)segment;
	uint32_t offset = (uint32_t)(cursor - bytes);
	uint32_t runs = READ_ONCE(segment->runs);
	uint64_t life;

	/* No node reads it any more. */
	if (a->is_retired)
		return;
	if (runs && runs <= BS_SEGMENT_RUNS_MAX)
		close_last_run(segment, runs);
	if (runs > BS_SEGMENT_RUNS_MAX ||
	    BS_SEGMENT_BYTES - 8 * runs < offset + ROOM_MIN) {
		bs_segment_seal(a, segment);
		return;
	}
	if (a->n_parked == BS_PARKED_MAX)
		seal_oldest(a);
	life = life_with(READ_ONCE(segment->life), BS_SEGMENT_PARKED);
	a->parked[a->n_parked] = (struct bs_place){
		.life = life,
		.segment = (uint32_t)((size_t)(bytes - a->arena) /
				      BS_SEGMENT_BYTES),
		.cursor = offset,
		.runs = runs,
	};
	WRITE_ONCE(a->n_parked, a->n_parked + 1);
	store_release(&segment->life, life);
	tell(a);
}

static void go_on_at(struct bs_thread *t, const struct bs_place *place)
{
	struct bs_segment_header *h =
		bs_segment_at(t->attachment, place->segment);

	WRITE_ONCE(t->member->segment, h);
	t->segment = h;
	t->runs = place->runs;
	t->cursor = (unsigned char *)h + place->cursor;
	t->floor = (unsigned char *)bs_directory(h, place->runs) +
		   sizeof(uint64_t);
	WRITE_ONCE(h->slot, t->slot_number);
	store_release(&t->area->segment, place->segment);
	tell(t->attachment);
}

/* The newest first, so that the others are left alone until they are reclaimed. */
static bool take_newest(struct bs_thread *t, size_t bytes)
{
	struct bs_attachment *a = t->attachment;

	for (uint32_t i = a->n_parked; i-- > 0;) {
		struct bs_place place = a->parked[i];
		uint64_t life = place.life;

		if (BS_SEGMENT_BYTES - 8 * place.runs - place.cursor <
		    bs_run_bytes(bytes))
			continue;
		forget_place(a, i);
		if (!compare_and_swap(&bs_segment_at(a, place.segment)->life,
				      &life, life_with(life, BS_SEGMENT_HELD)))
			continue; /* the node took it */
		go_on_at(t, &place);
		return true;
	}
	return false;
}

bool bs_parked_take(struct bs_thread *t, size_t bytes, bool may_wait)
{
	bool taken;

	if (likely(!READ_ONCE(t->attachment->n_parked)))
		return false;
	if (pthread_mutex_trylock(&bs_process.lock)) {
		if (!may_wait)
			return false;
		pthread_mutex_lock(&bs_process.lock);
	}
	taken = take_newest(t, bytes);
	pthread_mutex_unlock(&bs_process.lock);
	return taken;
}

/* ------------------------------------------------------------- threads --- */

void bs_thread_answer_locked(struct bs_thread *t)
{
	struct bs_member *m = t->member;

	/* If it were undecided, the attach thread had the lock. */
	if (!m->is_called)
		return;
	if (t->run_state == BS_RUN_OPEN)
		bs_run_was_closed(t);
	t->segment = NULL;
	t->cursor = NULL;
	t->floor = NULL;
	t->runs = 0;
	WRITE_ONCE(m->is_called, false);
}

void bs_thread_answer(struct bs_thread *t)
{
	pthread_mutex_lock(&bs_process.lock);
	bs_thread_answer_locked(t);
	bs_thread_stand(t, t->run_state == BS_RUN_OPEN ? t->writer.cursor
						       : t->cursor);
	pthread_mutex_unlock(&bs_process.lock);
}

/* Threads that are gone left a place for the next in their slot: nobody came. */
static void park_unowned(struct bs_attachment *a)
{
	for (uint32_t i = 0; i < a->slots_touched; i++) {
		struct bs_slot_state *s = &a->slots[i];
		struct bs_segment_header *segment;

		if (a->slots_used[i / 64] >> (i % 64) & 1 ||
		    s->segment == BS_SEGMENT_NONE)
			continue;
		segment = bs_segment_at(a, s->segment);
		bs_segment_park(a, segment,
				(unsigned char *)segment + s->cursor);
		s->segment = BS_SEGMENT_NONE;
	}
}

/* Which threads are idle: they are called. Returns how many. */
static uint32_t call_idle(const struct bs_attachment *a, bool *others_write)
{
	uint32_t called = 0;

	for (struct bs_member *m = bs_members; m; m = m->next) {
		const unsigned char *at = READ_ONCE(m->stands_at);

		if (m->attachment != a)
			continue;
		if (at != m->stood_at) {
			*others_write = true;
		} else if (at && READ_ONCE(m->segment)) {
			WRITE_ONCE(m->is_called, true);
			called++;
		}
		m->stood_at = at;
	}
	return called;
}

/* Those who are called and did not go on meanwhile lose their segments. */
static void relieve_called(struct bs_attachment *a, bool fenced)
{
	for (struct bs_member *m = bs_members; m; m = m->next) {
		const unsigned char *at = load_acquire(&m->stands_at);
		struct bs_segment_header *segment = READ_ONCE(m->segment);

		/* Without a segment it was relieved before. */
		if (m->attachment != a || !m->is_called || !segment)
			continue;
		if (!fenced || at != m->stood_at) {
			store_release(&m->is_called, false);
			continue;
		}
		bs_segment_park(a, segment, at);
		WRITE_ONCE(m->segment, NULL);
	}
}

bool bs_park_idle(void)
{
	struct bs_attachment *a = bs_process.current;
	bool threads_write = false;

	if (!a->channel)
		return false;
	park_unowned(a);
	if (has_membarrier && call_idle(a, &threads_write))
		relieve_called(a, membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED));
	return threads_write;
}
