/* SPDX-License-Identifier: Apache-2.0 */
/*
 * writer.h for tests in Python (tests/simulation/native.py): a process whose
 * threads write records by handles, as the client library does, one call at a
 * time. Whoever calls has the node in the same process.
 */
#include <stdlib.h>

#include "writer.h"

#define EXPORT __attribute__((visibility("default")))
#define THREADS_MAX 4u

enum run_state {
	RUN_NONE,
	RUN_OPEN,
	RUN_LOST
};

struct driven_handle {
	struct bs_trace_id id;
	uint32_t number, runs;
	bool lossy;
};

struct driven_thread {
	struct wthread t;
	enum run_state state;
	const struct driven_handle *of; /* whose run it is */
	struct bs_trace_id id;
	uint32_t number, seq, flags, lost_bytes;
	uint32_t last; /* record, in the segment */
};

struct driven {
	struct writer w;
	struct driven_thread threads[THREADS_MAX];
	uint32_t handles;
};

EXPORT struct driven *driven_attach(int number, int arena, int channel,
				    int context);
EXPORT void driven_detach(struct driven *d);
EXPORT uint32_t driven_stock(const struct driven *d);
EXPORT uint32_t driven_segments_taken(const struct driven *d);
EXPORT struct driven_handle *driven_open(struct driven *d, uint64_t hi,
					 uint64_t lo);
EXPORT uint32_t driven_number(const struct driven_handle *h);
EXPORT bool driven_write(struct driven *d, uint32_t slot,
			 struct driven_handle *h, uint8_t type,
			 const void *payload, uint32_t bytes, uint64_t ticks);
EXPORT bool driven_close(struct driven *d, uint32_t slot,
			 struct driven_handle *h);
EXPORT void driven_break_last(struct driven *d, uint32_t slot);
EXPORT void driven_trigger(struct driven *d, uint64_t hi, uint64_t lo,
			   const char *name, uint64_t ticks);

struct driven *driven_attach(int number, int arena, int channel, int context)
{
	struct driven *d = calloc(1, sizeof(*d));

	CHECK(d);
	d->w.number = number;
	d->w.fds = (struct bsn_client_fds){arena, channel, context};
	writer_map(&d->w);
	for (uint32_t i = 0; i < THREADS_MAX; i++)
		d->threads[i].t = writer_thread(&d->w, i);
	return d;
}

/* The fds are the caller's. */
void driven_detach(struct driven *d)
{
	munmap(d->w.arena, d->w.arena_bytes);
	munmap(d->w.channel, BS_CHANNEL_BYTES);
	munmap(d->w.context, sizeof(*d->w.context));
	free(d);
}

uint32_t driven_stock(const struct driven *d)
{
	const struct bs_grant_ring *ring = w_grants(&d->w);

	return ring->head - ring->tail;
}

uint32_t driven_segments_taken(const struct driven *d)
{
	return w_grants(&d->w)->tail;
}

struct driven_handle *driven_open(struct driven *d, uint64_t hi, uint64_t lo)
{
	struct driven_handle *h = calloc(1, sizeof(*h));

	CHECK(h);
	h->id = (struct bs_trace_id){hi, lo};
	h->number = ++d->handles;
	CHECK(h->number <= BS_HANDLE_COUNT_MASK);
	w_list(&d->w, h->number, true);
	return h;
}

uint32_t driven_number(const struct driven_handle *h)
{
	return h->number;
}

static uint32_t record_size(uint32_t bytes)
{
	uint32_t size = (uint32_t)sizeof(struct bs_record_header) + bytes;

	return (size + BS_RECORD_ALIGN - 1) / BS_RECORD_ALIGN * BS_RECORD_ALIGN;
}

static uint32_t room(const struct wthread *t)
{
	uint32_t floor = SEG - (uint32_t)sizeof(uint64_t) * t->runs;

	if (t->segment == BS_SEGMENT_NONE || t->cursor > floor)
		return 0;
	return floor - t->cursor;
}

static bool run_fits(const struct wthread *t, uint32_t bytes)
{
	return room(t) >=
	       sizeof(struct bs_run_header) + sizeof(uint64_t) + bytes;
}

/* The ring's last place is kept for the end of a handle. */
static void run_tell_lost(struct driven_thread *t, uint32_t flags)
{
	if (w_loss_room(&t->t) > !(flags & BS_RUN_LAST))
		w_lose_run(&t->t, t->id, t->number, flags, t->lost_bytes);
	else
		w_lose_untold(&t->t);
}

static void run_open(struct driven_thread *t, struct driven_handle *h,
		     uint32_t bytes)
{
	t->of = h;
	t->id = h->id;
	t->number = h->number;
	t->seq = h->runs++;
	t->flags = (t->seq ? 0 : BS_RUN_FIRST) | (h->lossy ? BS_RUN_LOSSY : 0);
	t->lost_bytes = 0;
	if (!run_fits(&t->t, bytes) && !w_take_segment(&t->t)) {
		t->state = RUN_LOST;
		t->flags |= BS_RUN_LOSSY;
		h->lossy = true;
		/* At once: the process may be killed before it is closed. */
		run_tell_lost(t, t->flags & BS_RUN_FIRST);
		return;
	}
	CHECK(w_begin(&t->t, t->id, t->number, t->seq, t->flags, bytes));
	t->state = RUN_OPEN;
}

static void run_close(struct driven_thread *t, uint32_t flags)
{
	if (t->state == RUN_OPEN)
		w_end(&t->t, t->flags | flags);
	else if (t->state == RUN_LOST && flags & BS_RUN_LAST)
		run_tell_lost(t, flags);
	t->state = RUN_NONE;
	t->of = NULL;
}

bool driven_write(struct driven *d, uint32_t slot, struct driven_handle *h,
		  uint8_t type, const void *payload, uint32_t bytes,
		  uint64_t ticks)
{
	struct driven_thread *t = &d->threads[slot];
	uint32_t need = record_size(bytes);

	for (;;) {
		if (t->of != h) {
			run_close(t, 0);
			run_open(t, h, need);
		}
		if (t->state == RUN_LOST) {
			if (!run_fits(&t->t, need) && !w_take_segment(&t->t)) {
				t->lost_bytes += bytes;
				return false;
			}
		} else if (room(&t->t) >= need) {
			t->last = t->t.cursor;
			w_record(&t->t, type, payload, bytes, ticks);
			return true;
		}
		run_close(t, 0);
	}
}

/* False: the run that was to say so was lost. */
bool driven_close(struct driven *d, uint32_t slot, struct driven_handle *h)
{
	struct driven_thread *t = &d->threads[slot];
	bool told;

	/* The last must be the one with the highest number. */
	if (t->of == h && t->state == RUN_OPEN && t->seq + 1 != h->runs)
		run_close(t, 0);
	if (t->of != h && h->runs) {
		run_close(t, 0);
		run_open(t, h, 0);
	}
	told = t->state != RUN_LOST;
	if (t->of == h)
		run_close(t, BS_RUN_LAST);
	/* Another thread's run is over once it writes again: not of this. */
	for (uint32_t i = 0; i < THREADS_MAX; i++) {
		if (d->threads[i].of == h)
			run_close(&d->threads[i], 0);
	}
	w_list(&d->w, h->number, false);
	free(h);
	return told;
}

/* It says that it is longer than any may be. */
void driven_break_last(struct driven *d, uint32_t slot)
{
	struct driven_thread *t = &d->threads[slot];
	struct bs_record_header *h =
		(struct bs_record_header *)(w_segment(&t->t) + t->last);

	CHECK_EQ(t->state, RUN_OPEN);
	WRITE_ONCE(h->payload_bytes, UINT16_MAX);
}

void driven_trigger(struct driven *d, uint64_t hi, uint64_t lo,
		    const char *name, uint64_t ticks)
{
	w_trigger(&d->w, (struct bs_trace_id){hi, lo}, name, ticks);
}
