/* SPDX-License-Identifier: Apache-2.0 */
/* Triggers on their way from a process, also while their queue is replaced; and
 * what a process is told in turn: the policy. */
#include <errno.h>
#include <fcntl.h>

#include "writer.h"

static void triggers_arrive(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_event e[4];
	struct bsn_metrics m;
	struct writer w;

	writer_attach(&w, n, START);
	w_trigger(&w, trace_id(3), "slow", START + 5);
	w_trigger(&w, trace_id(4), "Not a name", START + 5);
	CHECK_EQ(bsn_wait(n, -1), 1);
	CHECK_EQ(bsn_poll(n, START + MS), 1);
	CHECK_EQ(bsn_events(n, e, 4), 1);
	CHECK_EQ(e[0].kind, BSN_EVENT_TRIGGER);
	CHECK_EQ(e[0].client, w.number);
	CHECK_EQ(e[0].time_ns, START + 5);
	CHECK_EQ(e[0].id.lo, trace_id(3).lo);
	CHECK(!strcmp(e[0].trigger, "slow"));
	CHECK(!strcmp(e[0].why, "because"));
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 1);
	CHECK_EQ(m.triggers, 1);

	/* Claimed and never committed: skipped after 100 ms, not before. */
	w.context->trigger_head++;
	w_trigger(&w, trace_id(5), "slow", START + MS);
	CHECK_EQ(bsn_poll(n, START + 2 * MS), 0);
	CHECK_EQ(bsn_poll(n, START + 101 * MS), 0);
	CHECK_EQ(bsn_poll(n, START + 102 * MS), 1);
	CHECK_EQ(bsn_events(n, e, 4), 1);
	CHECK_EQ(e[0].id.lo, trace_id(5).lo);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.cells_skipped, 1);
	/* Its late commit fails, and where it is none of ours and a store, it does
	 * not stop the queue. */
	CHECK(!compare_and_swap(&w.context->cells[2].seq, &(uint32_t){2}, 3));
	store_release(&w.context->cells[2].seq, 3);
	for (uint32_t i = 0; i < 3 * BS_TRIGGER_CELLS; i++) {
		uint32_t p = w.context->trigger_head;

		bsn_poll(n, START + 103 * MS);
		if (load_acquire(&w.context->cells[p % BS_TRIGGER_CELLS].seq) ==
		    p)
			w_trigger(&w, trace_id(6), "slow", START);
		bsn_poll(n, START + 103 * MS);
		while (bsn_events(n, e, 4))
			;
		bsn_events_done(n);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers, 2 + 3 * BS_TRIGGER_CELLS);
	free_with_writer(n, &w);
}

/* While the control plane has its hands full, the node sleeps; and it wakes for
 * a cell that nobody commits. */
static void waits_for_what_it_can_do(void)
{
	enum {
		MANY = 6
	};
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	static struct bsn_event e[MANY * BS_TRIGGER_CELLS];
	struct writer w[MANY];
	int taken = 0, got;

	for (int i = 0; i < MANY; i++) {
		writer_attach(&w[i], n, START);
		for (uint32_t k = 0; k < BS_TRIGGER_CELLS - 1; k++)
			w_trigger(&w[i], trace_id(k + 1), "many", START);
	}
	bsn_wait(n, 0);
	bsn_poll(n, START);
	CHECK_EQ(bsn_wait(n, MS), 0);
	while ((got = bsn_events(n, e, MANY * BS_TRIGGER_CELLS))) {
		taken += got;
		CHECK_EQ(bsn_wait(n, taken < 1200 ? -1 : 0), taken < 1200);
		bsn_events_done(n);
		bsn_poll(n, START);
	}
	CHECK_EQ(taken, MANY * (BS_TRIGGER_CELLS - 1));
	for (int i = 0; i < MANY; i++)
		writer_close(&w[i]);
	bsn_free(n);

	n = test_node(&config);
	writer_attach(&w[0], n, START);
	w[0].context->trigger_head++;
	w_trigger(&w[0], trace_id(2), "crash", START);
	bsn_wait(n, 0);
	CHECK_EQ(bsn_poll(n, START), 0);
	CHECK_EQ(bsn_wait(n, -1), 0);
	CHECK_EQ(bsn_poll(n, START + SECOND), 1);
	writer_close(&w[0]);
	bsn_free(n);
}

/* A trigger for each trace from `first` on, as long as there is room. */
static uint64_t fire(struct writer *w, uint64_t first, uint64_t count)
{
	uint64_t i = 0;

	for (; i < count; i++) {
		uint32_t p = w->context->trigger_head % BS_TRIGGER_CELLS;

		if (load_acquire(&w->context->cells[p].seq) !=
		    w->context->trigger_head)
			break;
		w_trigger(w, trace_id(first + i), "fired", START);
	}
	return i;
}

/* All triggers that wait: they must be of the traces from `next` on. */
static uint64_t take_all(struct bsn *n, uint64_t next)
{
	struct bsn_event e[64];
	int got;

	bsn_poll(n, START);
	while ((got = bsn_events(n, e, 64))) {
		for (int i = 0; i < got; i++) {
			CHECK_EQ(e[i].kind, BSN_EVENT_TRIGGER);
			CHECK_EQ(e[i].id.lo, trace_id(next).lo);
			next++;
		}
	}
	return next;
}

/* The process goes on in the new segment; others of its threads still fire into
 * the old one. Nothing is lost, or there twice. */
static void a_queue_is_replaced(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bs_context_segment *old;
	struct bsn_metrics m;
	struct writer w;
	uint64_t next = 0;
	int fd;

	writer_attach(&w, n, START);
	CHECK_EQ(bsn_client_context_done(n, w.number, START), -ENOENT);
	/* Taken and not seen to; not taken; fired when the new one is there. */
	CHECK_EQ(fire(&w, 0, 10), 10);
	next = take_all(n, next);
	CHECK_EQ(next, 10);
	CHECK_EQ(fire(&w, 10, 10), 10);
	fd = bsn_client_context(n, w.number, -1);
	CHECK(fd >= 0);
	CHECK_EQ(bsn_client_context(n, w.number, -1), -EBUSY);
	CHECK_EQ(fire(&w, 20, 10), 10);
	old = w.context;
	w.context = w_map_context(fd);
	CHECK_EQ(w.context->magic, BS_ABI_MAGIC);
	CHECK_EQ(w.context->version, BS_ABI_VERSION);
	CHECK_EQ(fire(&w, 30, 10), 10);

	/* Not all of the old one's are seen to: it must stay. */
	CHECK_EQ(bsn_client_context_done(n, w.number, START), -EAGAIN);
	next = take_all(n, next);
	CHECK_EQ(next, 40);
	CHECK_EQ(bsn_client_context_done(n, w.number, START), -EAGAIN);
	bsn_events_done(n);
	CHECK_EQ(bsn_client_context_done(n, w.number, START), 0);
	CHECK_EQ(bsn_client_context_done(n, w.number, START), -ENOENT);
	/* The node has let go of it. */
	old->trigger_head = 0;
	munmap(old, sizeof(*old));

	/* As good as the first: it fills, and is emptied. */
	CHECK_EQ(take_all(n, next), next);
	for (uint32_t round = 0; round < 3; round++) {
		uint64_t fired = fire(&w, next, 1000);

		CHECK_EQ(fired, BS_TRIGGER_CELLS);
		CHECK_EQ(take_all(n, next), next + fired);
		next += fired;
		bsn_events_done(n);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers, next);
	CHECK_EQ(m.triggers_lost, 0);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(bsn_client_context(n, 1000, -1), -ENOENT);
	close(fd);
	free_with_writer(n, &w);
}

/* Also where each process has a share only of what room there is. */
static void the_old_queue_is_drained_first(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct writer others[5], w;
	struct bs_context_segment *old;
	struct bsn_event e[64];
	uint64_t next = 1;
	int fd, got;

	for (int i = 0; i < 5; i++)
		writer_attach(&others[i], n, START);
	writer_attach(&w, n, START);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(fire(&others[i], 10000, 250), 250);
	/* They leave room for 24, which two share. */
	bsn_poll(n, START);
	CHECK_EQ(fire(&others[4], 10000, 20), 20);
	CHECK_EQ(fire(&w, next, 100), 100);
	fd = bsn_client_context(n, w.number, -1);
	CHECK(fd >= 0);
	old = w.context;
	w.context = w_map_context(fd);
	CHECK_EQ(fire(&w, 101, 100), 100);
	do {
		bsn_poll(n, START);
		got = bsn_events(n, e, 64);
		for (int i = 0; i < got; i++) {
			if (e[i].client == (uint32_t)w.number)
				CHECK_EQ(e[i].id.lo, trace_id(next++).lo);
		}
	} while (got);
	CHECK_EQ(next, 201);
	munmap(old, sizeof(*old));
	close(fd);
	for (int i = 0; i < 5; i++)
		writer_close(&others[i]);
	free_with_writer(n, &w);
}

static int make_context(uint64_t bytes, int seals)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	CHECK(fd >= 0);
	CHECK_EQ(ftruncate(fd, (off_t)bytes), 0);
	CHECK_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

/* A segment that somebody else made: of the right size for good, and new. */
static void a_queue_comes_from_outside(void)
{
	const int seals = F_SEAL_GROW | F_SEAL_SHRINK;
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	uint64_t bytes = bsn_context_bytes();
	struct writer w, other;
	int bad[] = {
		make_context(bytes - 4096, seals),
		make_context(bytes, F_SEAL_GROW),
		-1,
	};
	int fd = make_context(bytes, seals);

	writer_attach(&w, n, START);
	writer_attach(&other, n, START);
	bad[2] = dup(other.fds.context); /* in use by another */
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(bsn_client_context(n, w.number, bad[i]), -EINVAL);
		close(bad[i]);
	}
	CHECK_EQ(fire(&other, 0, 1), 1);
	CHECK_EQ(take_all(n, 0), 1);
	CHECK_EQ(bsn_client_context(n, w.number, fd), fd);
	munmap(w.context, sizeof(*w.context));
	w.context = w_map_context(fd);
	CHECK_EQ(fire(&w, 1, 10), 10);
	CHECK_EQ(take_all(n, 1), 11);
	CHECK_EQ(bsn_client_context_done(n, w.number, START), 0);
	close(fd);
	writer_close(&other);
	free_with_writer(n, &w);
}

/* Its word is counted once, whichever of both it stands in. */
static void what_a_queue_counted_stays_counted(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bs_context_segment *old;
	struct bsn_metrics m;
	struct writer w;
	struct wthread t;
	int fd;
	struct bsn *n = node_with_writer(&config, &w, &t);

	CHECK(w_trace(&t, trace_id(1), 100, START));
	old = w.context;
	old->triggers_lost = 100;
	old->records_unattributed = 1000;
	fd = bsn_client_context(n, w.number, -1);
	CHECK(fd >= 0);
	w.context = w_map_context(fd);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers_lost, 100);
	CHECK_EQ(m.records_lost, 1000);
	/* Some threads are in the old one still. */
	w.context->triggers_lost = 10;
	w.context->records_unattributed = 30;
	old->triggers_lost = 101;
	old->records_unattributed = 1002;
	CHECK_EQ(bsn_client_context_done(n, w.number, START), 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers_lost, 111);
	CHECK_EQ(m.records_lost, 1032);
	w.context->triggers_lost++;
	w.context->records_unattributed++;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers_lost, 112);
	CHECK_EQ(m.records_lost, 1033);
	CHECK_EQ(m.corrupt, 0);
	/* A successor sees the new one alone. */
	CHECK_EQ(w.context->records_unattributed, 1033);
	munmap(old, sizeof(*old));
	close(fd);
	free_with_writer(n, &w);
}

/* Records of threads without a slot: which traces', nobody knows. Also when they
 * are counted in the queue that is on its way out. */
static void losses_are_seen_in_both_queues(void)
{
	for (uint32_t in_old = 0; in_old < 2; in_old++) {
		struct bsn_config config = test_config(8 << 20);
		struct bsn *n = test_node(&config);
		struct bs_context_segment *old;
		struct writer w;
		struct wthread t;
		int fd;

		writer_attach(&w, n, START);
		t = writer_thread(&w, 0);
		CHECK(w_trace(&t, trace_id(1), 100, START));
		old = w.context;
		old->records_unattributed = 7;
		bsn_poll(n, START + SECOND);
		fd = bsn_client_context(n, w.number, -1);
		CHECK(fd >= 0);
		w.context = w_map_context(fd);
		bsn_poll(n, START + 2 * SECOND);
		bsn_poll(n, START + 3 * SECOND);
		/* The new one begins at 0: that is no loss, and what is written
		 * into segments that were granted minutes later is whole. */
		while (w_take_segment(&t))
			;
		bsn_poll(n, START + 400 * SECOND);
		CHECK(w_take_segment(&t));
		CHECK(w_trace(&t, trace_id(2), 100, START + 400 * SECOND));
		bsn_poll(n, START + 400 * SECOND);
		CHECK_EQ(flags_of(n, trace_id(2), START + 400 * SECOND), 0);
		if (in_old)
			old->records_unattributed++;
		else
			w.context->records_unattributed++;
		CHECK_EQ(flags_of(n, trace_id(2), START + 401 * SECOND),
			 BSN_SLICE_MAYBE_LOSSY);
		munmap(old, sizeof(*old));
		close(fd);
		writer_close(&w);
		bsn_free(n);
	}
}

/* A process that dies half-way: what stands in both is taken. */
static void both_queues_of_the_dead_are_taken(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bs_context_segment *old;
	struct bsn_event e[8];
	struct bsn_metrics m;
	struct writer w;
	int fd;

	writer_attach(&w, n, START);
	CHECK_EQ(fire(&w, 0, 2), 2);
	old = w.context;
	old->trigger_head++; /* killed between claim and commit */
	fd = bsn_client_context(n, w.number, -1);
	CHECK(fd >= 0);
	w.context = w_map_context(fd);
	CHECK_EQ(fire(&w, 2, 1), 1);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	CHECK_EQ(bsn_events(n, e, 8), 4);
	for (uint64_t i = 0; i < 3; i++)
		CHECK_EQ(e[i].id.lo, trace_id(i).lo);
	CHECK_EQ(e[3].kind, BSN_EVENT_CLIENT_DRAINED);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.cells_skipped, 1);
	CHECK_EQ(m.triggers_lost, 0);
	CHECK_EQ(bsn_client_context(n, w.number, -1), -ENOENT);
	munmap(old, sizeof(*old));
	close(fd);
	free_with_writer(n, &w);
}

/* The daemon dies before the process has said that it has moved: its successor
 * goes on with both, and counts nothing again. */
static void a_successor_has_both_queues(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct bs_context_segment *old;
	struct bsn_metrics m;
	struct writer w;
	int fd, old_fd;

	writer_attach(&w, n, START);
	CHECK_EQ(fire(&w, 0, 5), 5);
	CHECK_EQ(take_all(n, 0), 5); /* and not seen to */
	old = w.context;
	old_fd = w.fds.context;
	old->triggers_lost = 7;
	old->records_unattributed = 9;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers_lost, 7);
	fd = bsn_client_context(n, w.number, -1);
	CHECK(fd >= 0);
	CHECK_EQ(fire(&w, 5, 5), 5);
	w.context = w_map_context(fd);
	CHECK_EQ(fire(&w, 10, 5), 5);

	w.fds.context = fd;
	n = restart(n, &config, &w, 1, START);
	CHECK_EQ(bsn_client_adopt_context(n, w.number + 1, old_fd), -ENOENT);
	CHECK_EQ(bsn_client_adopt_context(n, w.number, w.fds.channel), -EPROTO);
	CHECK_EQ(bsn_client_adopt_context(n, w.number, old_fd), 0);
	CHECK_EQ(bsn_client_adopt_context(n, w.number, old_fd), -EBUSY);
	CHECK_EQ(bsn_client_context(n, w.number, -1), -EBUSY);
	CHECK_EQ(take_all(n, 0), 15);
	bsn_events_done(n);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers_lost, 0);
	CHECK_EQ(m.records_lost, 0);
	old->triggers_lost++;
	old->records_unattributed++;
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.triggers_lost, 1);
	CHECK_EQ(m.records_lost, 1);
	CHECK_EQ(bsn_client_context_done(n, w.number, START), 0);
	CHECK_EQ(fire(&w, 15, 5), 5);
	CHECK_EQ(take_all(n, 15), 20);
	CHECK_EQ(m.corrupt, 0);
	munmap(old, sizeof(*old));
	close(old_fd);
	free_with_writer(n, &w);
}

/* ---------------------------------------------------------------- policy --- */

static void check_sampling(struct bsn *n, uint64_t threshold, uint32_t trusts)
{
	const struct bs_policy *p = mmap(NULL, BS_POLICY_BYTES, PROT_READ,
					 MAP_SHARED, bsn_policy_fd(n), 0);

	CHECK((void *)p != MAP_FAILED);
	CHECK_EQ(p->magic, BS_ABI_MAGIC);
	CHECK_EQ(p->version, BS_ABI_OLDEST);
	CHECK_EQ(p->bytes, BS_POLICY_BYTES);
	CHECK_EQ(READ_ONCE(p->percentage_threshold), threshold);
	CHECK_EQ(READ_ONCE(p->trust_incoming), trusts);
	munmap((void *)p, BS_POLICY_BYTES);
}

/* For those that are attached and those to come, and after a restart as it is
 * configured then. */
static void sampling_can_change(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct writer w;

	writer_attach(&w, n, START);
	check_sampling(n, UINT64_MAX, 0);
	bsn_set_sampling(n, 12345, true);
	check_sampling(n, 12345, 1);
	n = restart(n, &config, &w, 1, START + MS);
	check_sampling(n, UINT64_MAX, 0);
	bsn_set_sampling(n, 0, true);
	check_sampling(n, 0, 1);
	free_with_writer(n, &w);
}

static uint64_t earlier(struct bsn *n)
{
	const struct bs_policy *p = mmap(NULL, BS_POLICY_BYTES, PROT_READ,
					 MAP_SHARED, bsn_policy_fd(n), 0);
	uint64_t threshold;

	CHECK((void *)p != MAP_FAILED);
	threshold = READ_ONCE(p->earlier_threshold);
	munmap((void *)p, BS_POLICY_BYTES);
	return threshold;
}

static void sample_at(struct bsn *n, uint64_t threshold, uint64_t now)
{
	CHECK_EQ(bsn_poll(n, now), 0);
	bsn_set_sampling(n, threshold, false);
}

/* What was recorded before the percentage was lowered is told for a while, over a
 * restart too. */
static void what_was_sampled_can_be_triggered(void)
{
	const uint64_t minutes = 300 * SECOND;
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct writer w;

	/* By this nobody recorded anything. */
	sample_at(n, 500, START);
	CHECK_EQ(earlier(n), 0);
	writer_attach(&w, n, START);
	CHECK_EQ(bsn_poll(n, START), 0);
	sample_at(n, 600, START);
	CHECK_EQ(earlier(n), 0);
	sample_at(n, 100, START);
	CHECK_EQ(earlier(n), 600);
	check_sampling(n, 100, 0);
	/* More than before, and still less than it was. */
	sample_at(n, 200, START + SECOND);
	CHECK_EQ(earlier(n), 600);
	sample_at(n, 150, START + 2 * SECOND);
	CHECK_EQ(earlier(n), 600);
	/* Who has just read 150 reads this next. */
	sample_at(n, 700, START + 3 * SECOND);
	CHECK_EQ(earlier(n), 600);
	sample_at(n, 150, START + 4 * SECOND);
	CHECK_EQ(earlier(n), 700);
	bsn_poll(n, START + 4 * SECOND + minutes - 1);
	CHECK_EQ(earlier(n), 700);
	bsn_poll(n, START + 4 * SECOND + minutes);
	CHECK_EQ(earlier(n), 0);

	sample_at(n, 100, START + 2 * minutes);
	CHECK_EQ(earlier(n), 150);
	config.percentage_threshold = 50;
	n = restart(n, &config, &w, 1, START + 2 * minutes + SECOND);
	CHECK_EQ(earlier(n), 150);
	bsn_poll(n, START + 4 * minutes);
	CHECK_EQ(earlier(n), 0);
	/* One that was lowered by the restart. */
	config.percentage_threshold = 20;
	n = restart(n, &config, &w, 1, START + 4 * minutes);
	CHECK_EQ(earlier(n), 50);
	check_sampling(n, 20, 0);
	free_with_writer(n, &w);
}

/* One table for all: a client that could write it would speak for the node. */
static void nobody_else_writes_the_policy(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	int fd = bsn_policy_fd(n);

	CHECK(mmap(NULL, BS_POLICY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		   fd, 0) == MAP_FAILED);
	CHECK_EQ(errno, EPERM);
	CHECK_EQ(pwrite(fd, "x", 1, 0), -1);
	CHECK_EQ(errno, EPERM);
	CHECK_EQ(ftruncate(fd, 0), -1);
	CHECK_EQ(errno, EPERM);
	bsn_set_sampling(n, 5, false);
	check_sampling(n, 5, 0);
	bsn_free(n);
}

int main(void)
{
	RUN(triggers_arrive);
	RUN(waits_for_what_it_can_do);
	RUN(a_queue_is_replaced);
	RUN(the_old_queue_is_drained_first);
	RUN(a_queue_comes_from_outside);
	RUN(what_a_queue_counted_stays_counted);
	RUN(losses_are_seen_in_both_queues);
	RUN(both_queues_of_the_dead_are_taken);
	RUN(a_successor_has_both_queues);
	RUN(sampling_can_change);
	RUN(what_was_sampled_can_be_triggered);
	RUN(nobody_else_writes_the_policy);
	return 0;
}
