/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that changes what it says each time that the node lends its lock: how many
 * grants it took, what its threads left, what stands in its segments. Whatever the node
 * read before it lent the lock is another by then. Beside it an honest one, which loses
 * nothing.
 *
 * test_node_lies_between [polls [seed]]
 */
#include "between.h"
#include "random.h"
#include "writer.h"

#define HONEST 1000u
#define LIARS_TRACES 4u

/* That is all that it says, so the test ends. */
#define LIES_A_POLL 200u

struct liar {
	struct bsn *n;
	struct writer w;
	uint64_t state;
	uint32_t stopping;
	uint32_t working; /* the node is */
	uint64_t left;	  /* lies */
	uint64_t between; /* that it told while the node worked */
};

/* Of its own: the main thread's numbers must not depend on it. */
static uint32_t next_below(struct liar *l, uint32_t limit)
{
	l->state ^= l->state << 13;
	l->state ^= l->state >> 7;
	l->state ^= l->state << 17;
	return (uint32_t)((l->state * 0x2545f4914f6cdd1dull >> 32) % limit);
}

/* One of those that it was granted first, or of all. */
static uint8_t *segment_of(struct liar *l)
{
	uint64_t count = l->w.arena_bytes / SEG;
	uint32_t i = next_below(l, next_below(l, 2) ? 64 : (uint32_t)count);

	return l->w.arena + (uint64_t)i * SEG;
}

static void say_runs(struct liar *l, uint8_t *segment)
{
	struct bs_trace_id id = trace_id(next_below(l, LIARS_TRACES));
	uint32_t first = next_below(l, 2000);

	for (uint32_t i = first; i < first + 64; i++) {
		uint32_t at =
			(uint32_t)sizeof(struct bs_segment_header) + 16 * i;

		w_put_header((struct bs_run_header *)(segment + at), id,
			     next_below(l, 4), i, 0, 0);
		WRITE_ONCE(*bs_directory(segment, i),
			   bs_entry(bs_fingerprint(id.hi, id.lo), at,
				    next_below(l, 16)));
	}
	WRITE_ONCE(((struct bs_segment_header *)segment)->runs,
		   next_below(l, 2700));
}

static void say_life(struct liar *l, uint8_t *segment)
{
	struct bs_segment_header *h = (struct bs_segment_header *)segment;
	uint32_t generation = bs_life_generation(READ_ONCE(h->life));

	if (next_below(l, 8) == 0)
		generation = next_below(l, 4);
	WRITE_ONCE(h->slot, next_below(l, 2 * BS_THREAD_SLOTS));
	store_release(&h->life, bs_life(generation, next_below(l, 5)));
}

/* As threads that take each a segment. */
static void take(struct liar *l)
{
	struct wthread t = {.w = &l->w, .segment = BS_SEGMENT_NONE};

	for (uint32_t i = next_below(l, 100); i > 0; i--) {
		t.segment = BS_SEGMENT_NONE;
		if (!w_take_segment(&t))
			break;
	}
}

static void lie(struct liar *l)
{
	struct bs_grant_ring *ring = w_grants(&l->w);
	struct bs_thread_area *a = w_area(&l->w, next_below(l, 8));

	switch (next_below(l, 16)) {
	case 0:
		fetch_add(&ring->tail, next_below(l, 400));
		break;
	case 1:
		WRITE_ONCE(ring->tail,
			   READ_ONCE(ring->tail) - next_below(l, 400));
		break;
	case 2:
		WRITE_ONCE(ring->tail, READ_ONCE(ring->head));
		break;
	case 3:
		fetch_add(&a->loss_head, next_below(l, 100));
		fetch_add(&ring->losses, 1);
		break;
	case 4:
	case 5:
		take(l);
		break;
	case 6:
	case 7:
	case 8:
	case 9:
		say_runs(l, segment_of(l));
		break;
	default:
		say_life(l, segment_of(l));
	}
	fetch_add(&ring->moves, next_below(l, 2));
}

/* With the lock, so each time that it is lent. */
static void *lies(void *argument)
{
	struct liar *l = argument;

	while (!load_acquire(&l->stopping)) {
		node_lock(l->n);
		if (l->left) {
			l->left--;
			l->between += l->working;
			lie(l);
		}
		node_unlock(l->n);
		sched_yield();
	}
	return NULL;
}

static void look_at_lies(struct bsn *n, const struct bsn_config *config,
			 uint64_t now)
{
	struct bs_trace_id id = trace_id(below(LIARS_TRACES));
	struct bsn_slice s;

	if (bsn_collect(n, id, id, "test", now, &s))
		return;
	CHECK(s.bytes <= config->trace_bytes_max);
	if (below(2))
		bsn_slice_release(n, id, false, now);
}

static void check_honest(struct bsn *n, uint64_t trace, uint64_t now)
{
	struct bs_trace_id id = trace_id(HONEST + trace);
	struct bsn_slice s;

	if (bsn_collect(n, id, id, "test", now, &s))
		return; /* the liar's slices have all of the store */
	bsn_poll(n, now);
	CHECK_EQ(bsn_slice_info(n, id, &s), 0);
	/* That something near was lost, a liar can say. */
	if (!(s.flags & BSN_SLICE_STORE_FULL))
		CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_MAYBE_LOSSY,
			 BSN_SLICE_HELD);
	bsn_slice_release(n, id, false, now);
}

/* A user of its own, so that it has a stock of its own. */
#define LIARS_TENANT 7u

static void begin(struct liar *l, struct bsn *n, uint64_t now)
{
	writer_attach(&l->w, n, now);
	CHECK_EQ(bsn_client_tenant(n, l->w.number, LIARS_TENANT, now), 0);
	l->n = n;
	l->state = random_u64() | 1;
}

/* As in a poll, but that the liar waits for the lock when it begins. */
static void work_in_pieces(struct bsn *n, struct liar *l, uint64_t now)
{
	node_lock(n);
	l->working = 1;
	l->left = LIES_A_POLL;
	while (!pthread_mutex_trylock(&n->gate)) {
		pthread_mutex_unlock(&n->gate);
		sched_yield();
	}
	node_catch_up(n, now);
	watch_all(n);
	search_waiting(n, n->searches_made);
	slices_untied_losses(n);
	l->working = 0;
	node_unlock(n);
}

/* Processes that do nothing: the lock is lent after some of them. */
#define OTHERS 24u

static void lied_to(uint64_t polls)
{
	struct bsn_config config = test_config(128 << 20);
	struct liar l = {0};
	struct writer honest, others[OTHERS];
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &honest, &t);
	uint64_t now = START, written = 0;
	pthread_t thread;

	for (uint32_t i = 0; i < OTHERS; i++)
		writer_attach(&others[i], n, now);
	begin(&l, n, now);
	CHECK_EQ(pthread_create(&thread, NULL, lies, &l), 0);
	for (uint64_t poll = 0; poll < polls; poll++) {
		now += 5 * MS;
		CHECK(w_trace(&t, trace_id(HONEST + written++), below(3000),
			      now));
		work_in_pieces(n, &l, now);
		bsn_poll(n, now);
		if (poll % 4 == 0)
			check_honest(n, written - 1, now);
		if (poll % 4 == 2)
			look_at_lies(n, &config, now);
		if (poll % 64 == 0)
			check_invariants(n);
		if (poll % 100 == 50) {
			store_release(&l.stopping, 1);
			pthread_join(thread, NULL);
			CHECK_EQ(bsn_client_exited(n, l.w.number, now), 0);
			writer_close(&l.w);
			l.stopping = 0;
			begin(&l, n, now);
			CHECK_EQ(pthread_create(&thread, NULL, lies, &l), 0);
		}
	}
	store_release(&l.stopping, 1);
	pthread_join(thread, NULL);
	CHECK_EQ(w_area(&honest, 0)->loss_head, 0);
	check_invariants(n);
	printf("%ju polls, %ju lies between pieces of them\n", (uintmax_t)polls,
	       (uintmax_t)l.between);
	/* It was what it is meant to be. */
	CHECK(l.between >= polls);
	CHECK(n->counts.corrupt > 0);
	for (uint32_t i = 0; i < OTHERS; i++)
		writer_close(&others[i]);
	writer_close(&l.w);
	free_with_writer(n, &honest);
}

int main(int argc, char **argv)
{
	struct amount a = amount_of(argc, argv, 600);

	lied_to(a.much);
	return 0;
}
