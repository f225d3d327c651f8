/* SPDX-License-Identifier: Apache-2.0 */
/* How many segments a process has in hand, and what becomes of them. */
#include "writer.h"

/* Ten seconds of the recent peak, beside the eighth of it that is used when the node
 * is told; and what a quiet process has. */
#define STOCK_S 10
#define STOCK_OF(per_s) ((per_s)*STOCK_S * 8 / 7)
#define STOCK_MIN 4
#define STOCK_FIRST (STOCK_MIN + STOCK_OF(22))

static uint32_t stock_of(const struct writer *w)
{
	return w_grants(w)->head - w_grants(w)->tail;
}

/* Write full segments at a rate, a poll each 100 ms. */
static uint64_t write_at(struct bsn *n, struct wthread *t,
			 uint32_t segments_per_s, uint32_t seconds,
			 uint64_t now)
{
	for (uint32_t tick = 0; tick < 10 * seconds; tick++) {
		uint32_t due = segments_per_s * (tick % 10 + 1) / 10 -
			       segments_per_s * (tick % 10) / 10;

		while (due--)
			CHECK(w_take_segment(t));
		now += 100 * MS;
		bsn_poll(n, now);
	}
	return now;
}

/* While the node is away a thread fills its stock. All is found, and the segments
 * come back into use. */
static void finds_what_was_written_while_it_was_away(void)
{
	struct bsn_config config = test_config(8 << 20);
	struct writer w;
	struct wthread t;
	struct bsn_slice s;
	struct bsn_metrics m;
	uint64_t written = 0;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (int round = 0; round < 60; round++) {
		uint64_t first = written;
		uint32_t segments = 0;
		uint32_t segment = t.segment;

		while (w_trace(&t, trace_id(written), 8, now)) {
			written++;
			segments += t.segment != segment;
			segment = t.segment;
		}
		CHECK_EQ(segments, 32);
		now += MS;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK_EQ(m.corrupt, 0);
		CHECK(m.active_bytes <= SEG);
		/* In the oldest of its segments, in the one that is open. */
		collect(n, trace_id(first + 1), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		collect(n, trace_id(written - 1), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		bsn_slice_release(n, trace_id(first + 1), false, now);
		bsn_slice_release(n, trace_id(written - 1), false, now);
	}
	CHECK(m.reclaims > 1500);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* More than it can have threads, between two polls: it is a fast writer, and no
 * liar. */
static void many_segments_in_one_poll_are_no_lie(void)
{
	struct bsn_config config = test_config(256 << 20);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	now = write_at(n, &t, 40, 2, now);
	CHECK(stock_of(&w) >= 400);
	for (uint32_t i = 0; i < 400; i++) {
		CHECK(w_take_segment(&t));
		CHECK(w_trace(&t, trace_id(i), 100, now));
	}
	bsn_poll(n, now + MS);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.active_bytes, SEG);
	CHECK_EQ(m.sealed_bytes, (80 + 399) * SEG);
	for (uint32_t i = 0; i < 400; i += 57) {
		collect(n, trace_id(i), now + MS, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	check_invariants(n);
	free_with_writer(n, &w);
}

/* So a daemon may be away for that long. */
static void ten_seconds_of_the_peak_are_in_hand(void)
{
	struct bsn_config config = test_config(256 << 20);
	struct bsn *n = test_node(&config);
	struct writer w;
	struct wthread t;
	uint64_t now = START;

	writer_attach(&w, n, now);
	CHECK_EQ(stock_of(&w), STOCK_FIRST);
	t = writer_thread(&w, 0);
	now = write_at(n, &t, 40, 4, now);
	CHECK(stock_of(&w) >= STOCK_OF(40));
	CHECK(stock_of(&w) <= STOCK_OF(45));
	/* Faster. */
	now = write_at(n, &t, 80, 4, now);
	CHECK(stock_of(&w) >= STOCK_OF(80));
	CHECK(stock_of(&w) <= STOCK_OF(90));
	/* A burst is remembered when it is over: half of it for half a
	 * minute, and so on. */
	now = write_at(n, &t, 0, 20, now);
	CHECK(stock_of(&w) >= STOCK_OF(80));
	for (uint32_t i = 0; i < 300; i++)
		bsn_poll(n, now += SECOND);
	CHECK(stock_of(&w) >= STOCK_MIN);
	CHECK(stock_of(&w) <= 2 * STOCK_MIN);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* However often, and however shortly it is there: a second shows a rate, and none of these lives
 * has one. */
static void successors_go_on_with_the_stock(void)
{
	struct bsn_config config = test_config(256 << 20);
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	now = write_at(n, &t, 40, 4, now);
	CHECK(stock_of(&w) >= STOCK_OF(40));
	for (uint32_t life = 0; life < 30; life++) {
		for (uint32_t i = 0; i < 5 * 40; i++)
			CHECK(w_take_segment(&t));
		now += 5 * SECOND;
		n = restart(n, &config, &w, 1, now);
		for (uint32_t i = 0; i < 3; i++) {
			for (uint32_t k = 0; k < 4; k++)
				CHECK(w_take_segment(&t));
			now += 100 * MS;
			bsn_poll(n, now);
		}
		CHECK(stock_of(&w) >= 10 * 36);
		CHECK(stock_of(&w) <= STOCK_OF(48));
	}
	/* What is known of it is forgotten as ever. */
	for (uint32_t i = 0; i < 300; i++)
		bsn_poll(n, now += SECOND);
	CHECK(stock_of(&w) <= 2 * STOCK_MIN);
	check_invariants(n);
	free_with_writer(n, &w);
}

/* A process that outruns what it has in hand gets twice as much, before a second
 * is over. */
static void a_stock_grows_as_it_is_used_up(void)
{
	struct bsn_config config = test_config(256 << 20);
	struct writer w;
	struct wthread t;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t i = 0; i < STOCK_FIRST; i++)
		CHECK(w_take_segment(&t));
	bsn_poll(n, START + MS);
	CHECK(stock_of(&w) >= 2 * STOCK_FIRST);
	free_with_writer(n, &w);
}

/* Also where it writes all it can. */
static void stocks_are_a_quarter_of_the_pool(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn_metrics m;
	struct writer w;
	struct wthread t;
	uint64_t now = START;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint32_t i = 0; i < 50; i++) {
		while (w_take_segment(&t))
			;
		bsn_poll(n, now += 100 * MS);
		bsn_get_metrics(n, &m);
		CHECK_EQ(m.stock_bytes, 4 << 20);
		check_invariants(n);
	}
	free_with_writer(n, &w);

	/* And of its own arena. */
	config.arena_bytes = 4 << 20;
	n = test_node(&config);
	writer_attach(&w, n, now);
	CHECK_EQ(stock_of(&w), 16);
	free_with_writer(n, &w);
}

/* Its threads may all begin at once; if they do not, others have the memory. */
static void a_new_process_has_a_large_stock(void)
{
	struct bsn_config config = test_config(256 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct wthread t[STOCK_FIRST];
	struct writer w[2];

	for (uint32_t k = 0; k < 2; k++) {
		writer_attach(&w[k], n, START);
		CHECK_EQ(stock_of(&w[k]), STOCK_FIRST);
	}
	for (uint32_t i = 0; i < STOCK_FIRST; i++) {
		t[i] = writer_thread(&w[0], i);
		CHECK(w_trace(&t[i], trace_id(i), 100, START));
	}
	for (uint64_t s = 1; s <= 300; s++)
		bsn_poll(n, START + s * SECOND);
	bsn_get_metrics(n, &m);
	CHECK(m.stock_bytes <= 2 * 2 * STOCK_MIN * SEG);
	CHECK(m.stock_bytes >= 2 * STOCK_MIN * SEG);
	check_invariants(n);
	free_with_writers(n, w, 2);
}

/* Also of a process that takes one now and then, and is looked at often. */
static void a_first_stock_is_not_for_ever(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	for (uint64_t ms = 0; ms <= 300000; ms += 50) {
		if (ms % 20000 == 0)
			CHECK(w_take_segment(&t));
		bsn_poll(n, START + ms * MS);
	}
	/* One in a second is the highest rate that it ever had. */
	CHECK(stock_of(&w) <= 2 * (STOCK_MIN + STOCK_OF(1)));
	free_with_writer(n, &w);
}

/* However many come at once, or one after the other: what the first had more than
 * the last may have is taken back. */
static void stocks_leave_the_pool(bool polls_between)
{
	struct bsn_config config = test_config(64 << 20);
	static struct writer w[128];
	uint64_t now = START;
	struct bsn_metrics m;
	struct bsn *n;

	config.clients_max = 128;
	n = test_node(&config);
	for (int i = 0; i < 128; i++) {
		writer_attach(&w[i], n, now);
		CHECK(stock_of(&w[i]) >= 1);
		now += MS;
		if (!polls_between)
			continue;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK(m.stock_bytes <= (16 << 20));
	}
	bsn_poll(n, now);
	bsn_get_metrics(n, &m);
	CHECK(m.stock_bytes <= (16 << 20));
	for (int i = 0; i < 128; i++)
		CHECK_EQ(stock_of(&w[i]), 2);
	check_invariants(n);
	/* Fewer again: so there is more for each. */
	for (int i = 0; i < 127; i++)
		CHECK_EQ(bsn_client_exited(n, w[i].number, now), 0);
	bsn_poll(n, now);
	CHECK_EQ(stock_of(&w[127]), STOCK_FIRST);
	for (int i = 0; i < 128; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

static void stocks_are_shared(void)
{
	stocks_leave_the_pool(false);
	stocks_leave_the_pool(true);
}

/* What processes wrote that are gone is still there, but they need no stock. */
static void the_dead_have_no_share(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct writer w[17];
	uint64_t now = START;

	for (int i = 0; i < 17; i++)
		writer_attach(&w[i], n, now);
	for (int i = 0; i < 16; i++) {
		struct wthread t = writer_thread(&w[i], 0);

		CHECK(w_trace(&t, trace_id((uint64_t)i), 100, now));
	}
	bsn_poll(n, now);
	CHECK_EQ(stock_of(&w[16]), 256 / 17);
	for (int i = 0; i < 16; i++)
		CHECK_EQ(bsn_client_exited(n, w[i].number, now), 0);
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.sealed_bytes, 16 * SEG);
	/* In the second that follows. */
	bsn_poll(n, now += SECOND);
	CHECK_EQ(stock_of(&w[16]), STOCK_FIRST);
	/* So it is with those of one that comes after them. */
	writer_close(&w[0]);
	writer_attach(&w[0], n, now);
	CHECK_EQ(stock_of(&w[0]), 256 / 2);
	for (int i = 0; i < 17; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* What was taken back, the process never touched: it must populate it. */
static void segments_come_back_fresh(void)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	bool seen[256] = {false};
	uint64_t now = START;
	uint32_t fresh = 0;
	struct wthread t;
	struct writer w;

	writer_attach(&w, n, now);
	for (int i = 0; i < 300; i++)
		bsn_poll(n, now += SECOND);
	CHECK(stock_of(&w) <= 2 * STOCK_MIN);
	t = writer_thread(&w, 0);
	for (int i = 0; i < 400; i++) {
		const struct bs_grant_ring *ring = w_grants(&w);
		struct bs_grant g =
			ring->entries[ring->tail % BS_GRANT_RING_ENTRIES];
		uint32_t segment = g.segment & ~BS_GRANT_FRESH;

		CHECK(w_take_segment(&t));
		CHECK_EQ(t.segment, segment);
		CHECK_EQ(!(g.segment & BS_GRANT_FRESH), seen[segment]);
		fresh += !seen[segment];
		seen[segment] = true;
		bsn_poll(n, now += 10 * MS);
	}
	/* And no other is populated twice. */
	CHECK(fresh > STOCK_MIN && fresh < 256);
	free_with_writer(n, &w);
}

/* Whether its process must meet it anew. */
static bool take_is_fresh(struct wthread *t)
{
	struct bs_grant grant;

	CHECK(w_grab(t, &grant));
	w_settle(t, &grant);
	return grant.segment & BS_GRANT_FRESH;
}

#define TAKES_MAX 26u

/* How many of a thousand segments two processes must meet anew that take so many each,
 * in turn, between two polls. */
static uint32_t fresh_of_a_thousand(const uint32_t takes[][2], uint32_t rounds)
{
	struct bsn_config config = test_config(16 << 20);
	struct bsn *n = test_node(&config);
	uint32_t taken = 0, fresh = 0, met = 0;
	uint64_t now = START;
	struct wthread t[2];
	struct writer w[2];

	for (uint32_t k = 0; k < 2; k++) {
		writer_attach(&w[k], n, now);
		t[k] = writer_thread(&w[k], 0);
	}
	for (uint32_t i = 0; taken < 3000; i++) {
		/* The pool has gone round some times. */
		if (taken < 2000)
			met = fresh;
		for (uint32_t j = 0; j < 2 * TAKES_MAX; j++) {
			if (j / 2 >= takes[i % rounds][j % 2])
				continue;
			fresh += take_is_fresh(&t[j % 2]);
			taken++;
		}
		bsn_poll(n, now += 10 * MS);
		check_invariants(n);
	}
	free_with_writers(n, w, 2);
	return fresh - met;
}

/* Segments go in the order in which they were sealed, whosever they are; memory stays
 * with who writes. */
static void processes_that_write_get_their_own_memory_again(void)
{
	/* A little between two polls, now one more, now the other. */
	static const uint32_t little[][2] = {{5, 3}, {2, 2}, {3, 5},
					     {6, 2}, {0, 4}, {4, 4}};
	uint32_t fresh = 0, runs = 0;

	CHECK(fresh_of_a_thousand(little, 6) <= 50);
	/* Up to most of a stock. How many that is decides whose the oldest are when the
	 * first gets his. */
	for (uint32_t many = TAKES_MAX; many >= 8; many -= 3) {
		const uint32_t both[][2] = {{many, many}};

		fresh += fresh_of_a_thousand(both, 1);
		runs++;
	}
	CHECK(fresh <= 50 * runs);
}

/* Its thread has not rung yet, or a kill kept it from that. */
static void a_stock_of_which_an_eighth_is_used_is_work(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);
	uint32_t stock;

	CHECK_EQ(bsn_wait(n, 0), 1); /* for who came */
	bsn_poll(n, START);
	stock = stock_of(&w);
	CHECK(stock >= 80);
	while (stock_of(&w) > stock - stock / 8 + 1) {
		CHECK(w_take_segment(&t));
		CHECK_EQ(bsn_wait(n, 0), 0);
	}
	CHECK(w_take_segment(&t));
	CHECK(w_take_segment(&t));
	CHECK_EQ(bsn_wait(n, 0), 1);
	bsn_poll(n, START + MS);
	CHECK_EQ(bsn_wait(n, 0), 0);
	free_with_writer(n, &w);
}

int main(void)
{
	RUN(finds_what_was_written_while_it_was_away);
	RUN(many_segments_in_one_poll_are_no_lie);
	RUN(ten_seconds_of_the_peak_are_in_hand);
	RUN(successors_go_on_with_the_stock);
	RUN(a_stock_grows_as_it_is_used_up);
	RUN(stocks_are_a_quarter_of_the_pool);
	RUN(a_new_process_has_a_large_stock);
	RUN(a_first_stock_is_not_for_ever);
	RUN(stocks_are_shared);
	RUN(a_stock_of_which_an_eighth_is_used_is_work);
	RUN(the_dead_have_no_share);
	RUN(segments_come_back_fresh);
	RUN(processes_that_write_get_their_own_memory_again);
	return 0;
}
