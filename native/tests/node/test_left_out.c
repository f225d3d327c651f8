/* SPDX-License-Identifier: Apache-2.0 */
/* The percentage changes between two handles of a trace: one of them is recorded, and
 * the node must not take it for all. */
#include "hash.h"
#include "writer.h"

#define ALL UINT64_MAX
#define HALF (UINT64_MAX / 2)
#define TENTH (UINT64_MAX / 10)
#define MINUTES (300 * SECOND)

enum {
	HANDLE = 1000
};

/* The i-th trace that is recorded where so many are, and not where so few are. */
static struct bs_trace_id between(uint64_t low, uint64_t high, uint64_t i)
{
	const uint64_t state = bs_hash_prepare(
		BS_HASH_PERCENTAGE, sizeof(BS_HASH_PERCENTAGE) - 1, 1);

	for (uint64_t k = 1;; k++) {
		uint64_t hash = bs_hash_trace(state, trace_id(k));

		if (hash >= low && hash < high && !i--)
			return trace_id(k);
	}
}

static bool is_doubted(struct bsn *n, struct bs_trace_id id, uint64_t now)
{
	uint32_t flags = flags_of(n, id, now);

	CHECK_EQ(flags & ~(uint32_t)(BSN_SLICE_MAYBE_LOSSY | BSN_SLICE_HELD),
		 0);
	return flags & BSN_SLICE_MAYBE_LOSSY;
}

static void either_handle_is_left_out(void)
{
	const struct bs_trace_id id = between(TENTH, ALL, 0);
	struct bsn_config config = test_config(4 << 20);
	uint64_t now = START;

	for (uint32_t raised = 0; raised < 2; raised++) {
		struct bsn_slice s;
		struct wthread t;
		struct writer w;
		struct bsn *n;

		config.percentage_threshold = raised ? TENTH : ALL;
		n = node_with_writer(&config, &w, &t);
		bsn_poll(n, now);
		/* The first is recorded before, or the second after. */
		if (!raised)
			CHECK(w_trace(&t, id, 100, now));
		CHECK(!is_doubted(n, id, now));
		bsn_set_sampling(n, raised ? ALL : TENTH, false);
		if (raised)
			CHECK(w_trace(&t, id, 100, now));
		CHECK(is_doubted(n, id, now += SECOND));
		collect(n, id, now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
		free_with_writer(n, &w);
	}
}

static void what_is_always_recorded_is_not_doubted(void)
{
	const struct bs_trace_id id = between(0, TENTH, 0);
	const struct bs_trace_id never = between(HALF, ALL, 0);
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n;

	config.percentage_threshold = TENTH;
	n = test_node(&config);
	/* By this nobody recorded anything. */
	bsn_set_sampling(n, ALL, false);
	bsn_set_sampling(n, TENTH, false);
	writer_attach(&w, n, START);
	t = writer_thread(&w, 0);
	bsn_poll(n, START);
	CHECK(w_trace(&t, id, 100, START));
	collect(n, id, START, &s);
	/* Less does not change, nor what arrivals may ask. */
	bsn_set_sampling(n, TENTH, true);
	CHECK(!is_doubted(n, never, START));
	bsn_set_sampling(n, HALF, true);
	bsn_set_sampling(n, TENTH, true);
	CHECK(w_trace(&t, id, 100, START));
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, id, &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	CHECK(!is_doubted(n, id, START));
	CHECK(!is_doubted(n, never, START));
	CHECK(is_doubted(n, between(TENTH, HALF, 0), START));
	free_with_writer(n, &w);
}

static void what_is_collected_is_doubted_from_then_on(void)
{
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	bsn_poll(n, START);
	for (uint64_t i = 0; i < 200; i++) {
		CHECK(w_trace(&t, between(HALF, ALL, i), 100, START));
		collect(n, between(HALF, ALL, i), START, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
	}
	CHECK(w_trace(&t, between(0, HALF, 0), 100, START));
	collect(n, between(0, HALF, 0), START, &s);
	bsn_set_sampling(n, HALF, false);
	for (uint64_t i = 0; i < 200; i++) {
		CHECK_EQ(bsn_slice_info(n, between(HALF, ALL, i), &s), 0);
		CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	}
	CHECK_EQ(bsn_slice_info(n, between(0, HALF, 0), &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	free_with_writer(n, &w);
}

static void a_restart_changes_it(void)
{
	const struct bs_trace_id held = between(HALF, ALL, 0);
	const struct bs_trace_id found = between(HALF, ALL, 1);
	struct bsn_config config = test_config(4 << 20);
	struct bsn_slice s;
	struct wthread t;
	struct writer w;
	struct bsn *n = node_with_writer(&config, &w, &t);

	bsn_poll(n, START);
	CHECK(w_trace(&t, held, 100, START));
	CHECK(w_trace(&t, found, 100, START));
	collect(n, held, START, &s);
	CHECK_EQ(s.flags, BSN_SLICE_HELD);
	config.percentage_threshold = HALF;
	n = restart(n, &config, &w, 1, START);
	bsn_poll(n, START);
	CHECK_EQ(bsn_slice_info(n, held, &s), 0);
	CHECK_EQ(s.flags, BSN_SLICE_HELD | BSN_SLICE_MAYBE_LOSSY);
	n = restart(n, &config, &w, 1, START + MINUTES);
	CHECK(is_doubted(n, found, START + MINUTES));
	free_with_writer(n, &w);
}

/* Write until all is reclaimed that was there. */
static uint64_t turn(struct bsn *n, struct wthread *t, uint64_t now)
{
	for (uint64_t i = 0; i < 200; i++) {
		now += MS;
		CHECK(w_trace(t, between(0, TENTH, i), 30000, now));
		bsn_poll(n, now);
	}
	return now;
}

static void as_long_as_the_pool_holds_what_is_older(void)
{
	const struct bs_trace_id id = between(HALF, ALL, 0);
	const struct bs_trace_id kept = between(HALF, ALL, 1);
	const struct bs_trace_id fresh = between(HALF, ALL, 2);
	const struct bs_trace_id later = between(HALF, ALL, 3);
	struct bsn_config config = test_config(4 << 20);
	uint64_t now = START;
	struct wthread t;
	struct writer w;
	struct bsn *n;

	config.percentage_threshold = HALF;
	n = node_with_writer(&config, &w, &t);
	bsn_poll(n, now);
	bsn_set_sampling(n, ALL, false);
	CHECK(w_begin(&t, kept, HANDLE, 0, BS_RUN_FIRST, 100));
	w_record(&t, BS_RECORD_DATA, "kept", 4, now);
	w_end(&t, 0);
	w_list(&w, HANDLE, true);
	/* However fast the pool turns, for some minutes. */
	now = turn(n, &t, now);
	CHECK(is_doubted(n, id, now));
	CHECK(w_trace(&t, fresh, 100, now));
	CHECK(is_doubted(n, fresh, now));
	/* Then where something is as old, however the pool has turned. */
	now = START + 10 * MINUTES;
	bsn_poll(n, now);
	CHECK(!is_doubted(n, id, now));
	CHECK(is_doubted(n, fresh, now));
	now = turn(n, &t, now);
	CHECK(w_trace(&t, later, 100, now));
	CHECK(!is_doubted(n, later, now));
	CHECK(is_doubted(n, kept, now));
	free_with_writer(n, &w);
}

/* More than are remembered one by one: what they have in common is. */
static void many_change_it(bool lower)
{
	struct bsn_config config = test_config(4 << 20);
	const uint64_t step = UINT64_MAX / 16;
	uint64_t now = START;
	struct wthread t;
	struct writer w;
	struct bsn *n;

	config.percentage_threshold = lower ? 15 * step : step;
	n = node_with_writer(&config, &w, &t);
	bsn_poll(n, now);
	for (uint64_t k = 2; k < 14; k++) {
		uint64_t to = lower ? 16 - k : k;
		uint64_t from = lower ? to : 1;

		config.percentage_threshold = to * step;
		bsn_poll(n, now += SECOND);
		bsn_set_sampling(n, to * step, false);
		n = restart(n, &config, &w, 1, now);
		for (uint64_t i = 0; i < 16; i++) {
			struct bs_trace_id id =
				between(i * step, (i + 1) * step, 0);

			CHECK_EQ(is_doubted(n, id, now),
				 i >= from && i < from + k - 1);
		}
	}
	free_with_writer(n, &w);
}

static void many_changes(void)
{
	many_change_it(false);
	many_change_it(true);
}

int main(void)
{
	RUN(either_handle_is_left_out);
	RUN(what_is_always_recorded_is_not_doubted);
	RUN(what_is_collected_is_doubted_from_then_on);
	RUN(a_restart_changes_it);
	RUN(as_long_as_the_pool_holds_what_is_older);
	RUN(many_changes);
	return 0;
}
