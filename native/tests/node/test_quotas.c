/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shares of the pool: two users write, one of them more than there is room for.
 * What of the other's is held tells who was pushed out.
 */
#include <errno.h>

#include "node/internal.h"
#include "writer.h"

#define POOL (8ull << 20)
#define QUIET 1000u
#define NOISY 1001u

/* Traces of either. */
#define OF_QUIET 1u
#define OF_NOISY 1000000u

struct user {
	struct writer w;
	struct wthread t;
	uint64_t written; /* traces */
	uint64_t first;
};

static void attach(struct user *u, struct bsn *n, uint64_t tenant, uint64_t now)
{
	*u = (struct user){.first = tenant == QUIET ? OF_QUIET : OF_NOISY};
	writer_attach(&u->w, n, now);
	CHECK_EQ(bsn_client_tenant(n, u->w.number, tenant, now), 0);
	u->t = writer_thread(&u->w, 0);
}

/* Traces of 1 KiB, until so many bytes of segments are full. */
static void write_bytes(struct user *u, struct bsn *n, uint64_t bytes,
			uint64_t *now)
{
	for (uint64_t done = 0; done < bytes; done += 1100) {
		CHECK(w_trace(&u->t, trace_id(u->first + u->written++), 1024,
			      *now));
		if (u->written % 32 == 0)
			bsn_poll(n, *now += MS);
	}
	bsn_poll(n, *now += MS);
}

/* Of all that it wrote, so many of 100 are there as a whole. */
static uint32_t percent_held(const struct user *u, struct bsn *n, uint64_t now)
{
	uint64_t held = 0, looked_at = 0;

	for (uint64_t i = 0; i < u->written; i += u->written / 100 + 1) {
		held += !(flags_of(n, trace_id(u->first + i), now) &
			  BSN_SLICE_EVICTED);
		looked_at++;
	}
	CHECK(looked_at);
	return (uint32_t)(100 * held / looked_at);
}

static uint64_t bytes_of(struct bsn *n, uint64_t tenant)
{
	uint64_t bytes;

	CHECK_EQ(bsn_tenant_bytes(n, tenant, &bytes), 0);
	return bytes;
}

static struct bsn *new_node(void)
{
	struct bsn_config config = test_config(POOL);

	/* So that none is forgotten. */
	config.tombstones = 1u << 20;
	return test_node(&config);
}

/* Without quotas: what is younger than a minute, up to half of the pool. */
static void a_flood_pushes_out_nothing_of_the_last_minute(void)
{
	struct bsn *n = new_node();
	uint64_t now = START;
	struct user quiet, noisy;

	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	write_bytes(&quiet, n, POOL / 8, &now);
	write_bytes(&noisy, n, 10 * POOL, &now);
	CHECK(now < START + 55 * SECOND);
	CHECK_EQ(percent_held(&quiet, n, now), 100);
	CHECK(percent_held(&noisy, n, now) < 10);
	/* After it the oldest go first, whoever wrote them. */
	now = START + 70 * SECOND;
	write_bytes(&noisy, n, POOL, &now);
	CHECK(percent_held(&quiet, n, now) < 20);
	check_invariants(n);
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

/* However long they waited in its stock before. */
static void segments_are_as_young_as_what_was_written_there(void)
{
	struct bsn *n = new_node();
	uint64_t now = START;
	struct user quiet, noisy;

	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	now += 300 * SECOND;
	for (uint32_t i = 0; i < 8; i++)
		CHECK(w_trace(&quiet.t, trace_id(quiet.first + quiet.written++),
			      30000, now));
	bsn_poll(n, now);
	write_bytes(&noisy, n, 10 * POOL, &now);
	CHECK(now < START + 350 * SECOND);
	CHECK_EQ(percent_held(&quiet, n, now), 100);
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

/* Who uses more than his part has no advantage of being first. */
static void who_is_over_his_share_competes_by_age(void)
{
	struct bsn *n = new_node();
	uint64_t now = START;
	struct user quiet, noisy;

	attach(&quiet, n, QUIET, now);
	write_bytes(&quiet, n, POOL * 7 / 8, &now);
	attach(&noisy, n, NOISY, now);
	write_bytes(&noisy, n, 4 * POOL, &now);
	/* Half of the pool, less what may be free: half of what it wrote. */
	CHECK(bytes_of(n, QUIET) > POOL * 3 / 8);
	CHECK(bytes_of(n, QUIET) <= POOL / 2);
	CHECK(percent_held(&quiet, n, now) > 35);
	CHECK(percent_held(&quiet, n, now) < 60);
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

/* A quota holds for ever. */
static void a_quota_outlasts_a_minute(void)
{
	struct bsn *n = new_node();
	uint64_t now = START;
	struct user quiet, noisy;

	CHECK_EQ(bsn_tenant_quota(n, QUIET, 3 << 20), 0);
	CHECK_EQ(bytes_of(n, QUIET), 0);
	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	/* Beside what it has in hand. */
	write_bytes(&quiet, n, 1 << 20, &now);
	now += 600 * SECOND;
	write_bytes(&noisy, n, 4 * POOL, &now);
	CHECK_EQ(percent_held(&quiet, n, now), 100);
	/* What is over it is as good as another's. */
	write_bytes(&quiet, n, 4 << 20, &now);
	now += 600 * SECOND;
	write_bytes(&noisy, n, 4 * POOL, &now);
	CHECK(bytes_of(n, QUIET) <= 3 << 20);
	CHECK(bytes_of(n, QUIET) > 2 << 20);
	check_invariants(n);
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

/* What it has in hand counts, and cannot be taken from it: so it gets no more,
 * instead of another's. */
static void segments_that_are_written_to_push_out_nobody(void)
{
	struct bsn *n = new_node();
	uint64_t now = START;
	struct wthread threads[BS_THREAD_SLOTS];
	struct user quiet, noisy;
	uint32_t taken = 0;

	CHECK_EQ(bsn_tenant_quota(n, QUIET, 6 << 20), 0);
	attach(&quiet, n, QUIET, now);
	write_bytes(&quiet, n, 4 << 20, &now);
	attach(&noisy, n, NOISY, now);
	for (uint32_t i = 0; i < BS_THREAD_SLOTS; i++) {
		threads[i] = writer_thread(&noisy.w, i);
		taken += w_take_segment(&threads[i]);
		bsn_poll(n, now += MS);
	}
	/* The rest of the pool, and what is kept free for what is kept. */
	CHECK(taken > 8);
	CHECK(taken < 64);
	CHECK_EQ(percent_held(&quiet, n, now), 100);
	/* It goes on itself. */
	write_bytes(&quiet, n, 4 << 20, &now);
	check_invariants(n);
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

static void shares_outlast_the_daemon(void)
{
	struct bsn *n = new_node();
	struct bsn_config config = test_config(POOL);
	uint64_t now = START;
	struct user quiet, noisy;
	struct held held;

	CHECK_EQ(bsn_tenant_quota(n, QUIET, 3 << 20), 0);
	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	write_bytes(&quiet, n, 1 << 20, &now);
	write_bytes(&noisy, n, POOL, &now);
	held = hold(n);
	bsn_free(n);
	config.tombstones = 1u << 20;
	n = test_node(&config);
	CHECK_EQ(bsn_tenant_quota(n, QUIET, 3 << 20), 0);
	CHECK_EQ(bsn_adopt_store(n, now, held.store), 0);
	CHECK_EQ(bsn_adopt_keep(n, now, held.keep), 0);
	CHECK_EQ(bsn_client_adopt(n, quiet.w.number, 1, "quiet", now,
				  &quiet.w.fds),
		 quiet.w.number);
	CHECK_EQ(bsn_client_tenant(n, quiet.w.number, QUIET, now), 0);
	CHECK_EQ(bsn_client_tenant(n, quiet.w.number, NOISY, now), -EBUSY);
	CHECK_EQ(bsn_client_adopt(n, noisy.w.number, 1, "noisy", now,
				  &noisy.w.fds),
		 noisy.w.number);
	CHECK_EQ(bsn_client_tenant(n, noisy.w.number, NOISY, now), 0);
	close(held.store);
	close(held.keep);
	bsn_poll(n, now);
	CHECK(bytes_of(n, QUIET) > 1 << 20);
	write_bytes(&noisy, n, 4 * POOL, &now);
	CHECK_EQ(percent_held(&quiet, n, now), 100);
	CHECK(percent_held(&noisy, n, now) < 30);
	check_invariants(n);
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

/* Many short programs of one user: what another's left stays. */
static void short_programs_take_the_places_of_their_own(void)
{
	struct bsn_config config = test_config(POOL);
	struct bsn *n;
	uint64_t now = START;
	struct user quiet, noisy;

	config.clients_max = 8;
	config.tombstones = 1u << 20;
	n = test_node(&config);
	attach(&quiet, n, QUIET, now);
	write_bytes(&quiet, n, 1 << 20, &now);
	CHECK_EQ(bsn_client_exited(n, quiet.w.number, now), 0);
	for (uint32_t i = 0; i < 50; i++) {
		attach(&noisy, n, NOISY, now += MS);
		write_bytes(&noisy, n, 1 << 17, &now);
		CHECK_EQ(bsn_client_exited(n, noisy.w.number, now), 0);
		writer_close(&noisy.w);
	}
	CHECK_EQ(percent_held(&quiet, n, now), 100);
	CHECK(bytes_of(n, QUIET) >= 1 << 20);
	writer_close(&quiet.w);
	bsn_free(n);
}

/* Traces of so many bytes, until so many segments are full. */
static void fill_segments(struct user *u, struct bsn *n, uint32_t segments,
			  uint32_t bytes, uint64_t *now)
{
	while (segments) {
		uint32_t before = u->t.segment;

		if (!w_trace(&u->t, trace_id(u->first + u->written), bytes,
			     *now)) {
			bsn_poll(n, *now += MS);
			continue;
		}
		u->written++;
		segments -= u->t.segment != before;
	}
	bsn_poll(n, *now += MS);
}

#define SEGMENTS ((uint32_t)(POOL / SEG))
/* None of those. */
#define OTHER(i) trace_id((1u << 30) + (i))

/* The trace is evicted, and then goes on. */
static uint32_t flags_of_the_rest(struct user *u, struct bsn *n,
				  struct bs_trace_id id, uint64_t now)
{
	CHECK(w_trace(&u->t, id, 100, now));
	bsn_poll(n, now);
	return flags_of(n, id, now);
}

/* Evictions are remembered while the pool turns once, whatever others write. Who
 * writes more of them than are remembered is doubted himself, over a restart too. */
static void short_runs_make_others_forget_nothing(void)
{
	const struct bs_trace_id early = OTHER(0), late = OTHER(1);
	struct bsn_config config = test_config(POOL);
	struct user quiet, noisy;
	struct writer w[2];
	uint64_t now = START;
	struct bsn *n;

	config.tombstones = 0;
	n = test_node(&config);
	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	/* However long it has saved what it did not need. */
	fill_segments(&noisy, n, 8 * SEGMENTS, 30000, &now);
	CHECK(w_trace(&noisy.t, early, 100, now));
	fill_segments(&noisy, n, SEGMENTS, 0, &now);
	CHECK(w_trace(&quiet.t, late, 100, now));
	fill_segments(&quiet, n, SEGMENTS, 30000, &now);
	CHECK_EQ(flags_of(n, late, now), EVICTED_BY_FINGERPRINT);
	now += 61 * SECOND;
	fill_segments(&noisy, n, SEGMENTS, 0, &now);
	CHECK_EQ(flags_of(n, late, now), EVICTED_BY_FINGERPRINT);
	CHECK_EQ(flags_of_the_rest(&quiet, n, late, now),
		 EVICTED_BY_FINGERPRINT);
	CHECK_EQ(flags_of_the_rest(&quiet, n, OTHER(78), now), 0);
	/* Of its last traces some are forgotten. */
	CHECK(flags_of_the_rest(&noisy, n, early, now) & BSN_SLICE_MAYBE_LOSSY);
	w[0] = quiet.w;
	w[1] = noisy.w;
	n = restart(n, &config, w, 2, now);
	CHECK_EQ(bsn_client_tenant(n, quiet.w.number, QUIET, now), 0);
	CHECK_EQ(bsn_client_tenant(n, noisy.w.number, NOISY, now), 0);
	bsn_poll(n, now);
	CHECK(flags_of(n, early, now) & BSN_SLICE_MAYBE_LOSSY);
	CHECK_EQ(flags_of_the_rest(&quiet, n, OTHER(79), now), 0);
	/* Until they would be gone from memory anyway. */
	now += 61 * SECOND;
	fill_segments(&noisy, n, 2 * SEGMENTS, 1024, &now);
	CHECK_EQ(flags_of_the_rest(&noisy, n, OTHER(80), now), 0);
	free_with_writers(n, w, 2);
}

/* Segments with fewer runs make up for those with more; and alone with the pool a tenant
 * makes nobody else forget. */
static void short_runs_cost_who_is_alone_nothing(void)
{
	struct bsn_config config = test_config(POOL);
	struct user quiet, noisy;
	uint64_t now = START;
	struct bsn *n;

	config.tombstones = 0;
	n = test_node(&config);
	attach(&noisy, n, NOISY, now);
	fill_segments(&noisy, n, 2 * SEGMENTS, 0, &now);
	CHECK_EQ(flags_of_the_rest(&noisy, n, OTHER(77), now), 0);
	attach(&quiet, n, QUIET, now);
	fill_segments(&noisy, n, 2 * SEGMENTS, 30000, &now);
	for (uint32_t i = 0; i < SEGMENTS; i++) {
		fill_segments(&noisy, n, 1, 0, &now);
		fill_segments(&noisy, n, 4, 30000, &now);
		CHECK_EQ(flags_of_the_rest(&noisy, n, OTHER(100 + i), now), 0);
	}
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

/* However many processes of one user tell of losses, another's are known by name. */
static void losses_leave_others_room(void)
{
	struct bsn_config config = test_config(POOL);
	struct user quiet, noisy[8];
	const uint64_t first = 1000000;
	uint64_t now = START;
	struct bsn *n = test_node(&config);

	attach(&quiet, n, QUIET, now);
	CHECK(w_trace(&quiet.t, OTHER(1), 100, now));
	for (uint64_t i = 0; i < 8; i++) {
		attach(&noisy[i], n, NOISY, now);
		/* Together twice what is remembered. */
		for (uint64_t k = 0; k < config.tombstones / 4; k++) {
			if (k % BS_LOSS_RING_ENTRIES == 0)
				bsn_poll(n, now += MS);
			w_lose(&noisy[i].t, trace_id(first * (i + 1) + k),
			       BS_RUN_FIRST | BS_RUN_LAST, 100);
		}
	}
	bsn_poll(n, now += MS);
	CHECK_EQ(flags_of(n, trace_id(first * 8), now) & BSN_SLICE_LOSSY, 0);
	w_lose(&quiet.t, OTHER(2), BS_RUN_FIRST | BS_RUN_LAST, 100);
	bsn_poll(n, now += MS);
	CHECK_EQ(flags_of(n, OTHER(1), now), 0);
	CHECK_EQ(flags_of(n, OTHER(2), now) & BSN_SLICE_LOSSY, BSN_SLICE_LOSSY);
	for (int i = 0; i < 8; i++)
		writer_close(&noisy[i].w);
	writer_close(&quiet.w);
	bsn_free(n);
}

/* A tenant is there as long as a process of it, or a quota. */
static void tenants_come_and_go(void)
{
	struct bsn *n = new_node();
	uint64_t now = START, bytes;
	struct user user;

	for (uint64_t i = 0; i < 10; i++) {
		attach(&user, n, i, now);
		CHECK_EQ(bsn_client_tenant(n, user.w.number, i, now), -EBUSY);
		CHECK(bytes_of(n, i) > 0);
		CHECK_EQ(bsn_client_exited(n, user.w.number, now), 0);
		CHECK_EQ(bsn_tenant_bytes(n, i, &bytes), -ENOENT);
		CHECK_EQ(bytes, 0);
		writer_close(&user.w);
	}
	CHECK_EQ(bsn_client_tenant(n, 12345, 1, now), -ENOENT);
	CHECK(!n->tenants.first);
	CHECK_EQ(n->tenants.live, 0);
	bsn_free(n);
}

/* Who is over his share loses his own youngest memory before another's old one. What
 * was never seen may be what was lost as long as that is there. */
static void nobody_ends_the_doubt_of_another_s_loss(void)
{
	const struct bs_trace_id never = {1, 1};
	struct bsn *n = new_node();
	struct user quiet, noisy;
	uint64_t now = START;

	attach(&quiet, n, QUIET, now);
	attach(&noisy, n, NOISY, now);
	write_bytes(&noisy, n, 2 * POOL, &now);
	write_bytes(&quiet, n, POOL / 8, &now);
	WRITE_ONCE(quiet.w.context->records_unattributed, 1);
	bsn_poll(n, now += MS);
	CHECK(flags_of(n, never, now) & BSN_SLICE_MAYBE_LOSSY);
	write_bytes(&noisy, n, 2 * POOL, &now);
	CHECK_EQ(percent_held(&quiet, n, now), 100);
	CHECK(flags_of(n, never, now) & BSN_SLICE_MAYBE_LOSSY);
	/* When all of it is old, it goes in its turn. */
	bsn_poll(n, now += 120 * SECOND);
	write_bytes(&noisy, n, 2 * POOL, &now);
	CHECK(percent_held(&quiet, n, now) < 100);
	CHECK(!(flags_of(n, never, now) & BSN_SLICE_MAYBE_LOSSY));
	writer_close(&quiet.w);
	writer_close(&noisy.w);
	bsn_free(n);
}

int main(void)
{
	RUN(a_flood_pushes_out_nothing_of_the_last_minute);
	RUN(segments_are_as_young_as_what_was_written_there);
	RUN(who_is_over_his_share_competes_by_age);
	RUN(a_quota_outlasts_a_minute);
	RUN(segments_that_are_written_to_push_out_nobody);
	RUN(shares_outlast_the_daemon);
	RUN(short_programs_take_the_places_of_their_own);
	RUN(short_runs_make_others_forget_nothing);
	RUN(short_runs_cost_who_is_alone_nothing);
	RUN(nobody_ends_the_doubt_of_another_s_loss);
	RUN(losses_leave_others_room);
	RUN(tenants_come_and_go);
	return 0;
}
