/* SPDX-License-Identifier: Apache-2.0 */
/* Work that grows with the slices of a process, or with one slice, is done in pieces; and
 * nobody takes it for done before. */
#include "pieces.h"

static uint8_t payload[1024];

/* --------------------------------------------------------------- processes --- */

static uint32_t open_left(struct bsn *n)
{
	uint32_t open = 0;

	for (uint32_t i = 1; i < n->store.n_blocks; i++)
		open += n->store.slices[i] &&
			slice_open_handles(n->store.slices[i]) &&
			!(n->store.slices[i]->flags & BSN_SLICE_MAYBE_LOSSY);
	return open;
}

/* Slices of a process that has them all open. */
static struct bsn *many_slices(struct writer *w, struct wthread *t)
{
	struct bsn *n = new_node(8);
	struct bsn_slice s;

	writer_attach(w, n, START);
	*t = writer_thread(w, 0);
	CHECK(w_take_segment(t));
	for (uint32_t i = 0; i < 300; i++) {
		CHECK(w_begin(t, trace_id(i), 0x10000u + i, 0, BS_RUN_FIRST,
			      40));
		w_record(t, BS_RECORD_DATA, payload, 8, START);
		w_end(t, 0);
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	}
	bsn_poll(n, START);
	CHECK_EQ(open_left(n), 300);
	return n;
}

static void slices_are_closed_in_pieces(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct between b = {.n = n, .left = open_left};
	pthread_t thread;

	node_lock(n);
	thread = start_between(n, look_between, &b);
	first(n)->live = false;
	slices_close_gone(n, true);
	first(n)->live = true;
	end_between(n, thread);
	check_piece(&b, 300, 60);
	CHECK_EQ(open_left(n), 0);
	free_with_writer(n, &w);
}

static void slices_are_told_of_losses_in_pieces(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct between b = {.n = n, .left = open_left};
	pthread_t thread;

	node_lock(n);
	client_untied_loss(n, first(n));
	thread = start_between(n, look_between, &b);
	slices_untied_losses(n);
	end_between(n, thread);
	check_piece(&b, 300, 60);
	CHECK_EQ(open_left(n), 0);
	free_with_writer(n, &w);
}

/* Of many processes at once: not one after the other. */
struct told_of {
	struct bsn *n;
	uint32_t of[2]; /* slices that know, of each process */
};

static void *count_between(void *argument)
{
	struct told_of *t = argument;

	node_lock(t->n);
	for (uint32_t i = 1; i < t->n->store.n_blocks; i++) {
		const struct slice *s = t->n->store.slices[i];

		if (s && s->flags & BSN_SLICE_MAYBE_LOSSY)
			t->of[s->parts[0].client % 2]++;
	}
	node_unlock(t->n);
	return NULL;
}

static void slices_are_told_of_all_processes_at_once(void)
{
	struct bsn *n = new_node(8);
	struct told_of told = {.n = n};
	struct writer w[2];
	struct wthread t[2];
	struct bsn_slice s;
	pthread_t thread;

	for (uint32_t k = 0; k < 2; k++) {
		writer_attach(&w[k], n, START);
		t[k] = writer_thread(&w[k], 0);
	}
	for (uint32_t i = 0; i < 300; i++) {
		CHECK(w_trace(&t[i % 2], trace_id(i), 40, START));
		CHECK_EQ(bsn_collect(n, trace_id(i), trace_id(i), "test", START,
				     &s),
			 0);
	}
	bsn_poll(n, START);
	node_lock(n);
	client_untied_loss(n, first(n));
	client_untied_loss(n, second(n));
	thread = start_between(n, count_between, &told);
	slices_untied_losses(n);
	end_between(n, thread);
	CHECK(told.of[0] >= 20 && told.of[1] >= 20);
	CHECK(told.of[0] + told.of[1] <= 60);
	for (uint32_t i = 0; i < 300; i++)
		CHECK(slice_find(n, trace_id(i))->flags &
		      BSN_SLICE_MAYBE_LOSSY);
	free_with_writers(n, w, 2);
}

/* What a successor takes for told was told to all of them, whoever does it. */
static uint32_t who_tell(struct bsn *n)
{
	return n->telling;
}

static void nothing_is_told_before_all_slices_know(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct between b = {.n = n, .left = who_tell};
	pthread_t thread;

	node_lock(n);
	client_untied_loss(n, first(n));
	thread = start_between(n, look_between, &b);
	slices_untied_losses(n);
	end_between(n, thread);
	CHECK_EQ(b.seen, 1);
	CHECK_EQ(n->telling, 0);

	/* As if the poll came then. */
	n->telling = 1;
	bsn_poll(n, START + SECOND);
	CHECK_EQ(n->ledger.header->told_ns, START);
	n->telling = 0;
	bsn_poll(n, START + 2 * SECOND);
	CHECK_EQ(n->ledger.header->told_ns, START + 2 * SECOND);
	free_with_writer(n, &w);
}

/* Of a process that has nothing in the pool, and is forgotten as it ends. */
static void the_last_loss_of_a_process_is_told(void)
{
	struct writer w;
	struct wthread t;
	struct bsn *n = many_slices(&w, &t);
	struct bsn_slice s;

	fetch_add(&w.context->records_unattributed, 1);
	CHECK_EQ(bsn_client_exited(n, w.number, START), 0);
	for (uint32_t i = 0; i < 300; i++) {
		CHECK_EQ(bsn_slice_info(n, trace_id(i), &s), 0);
		CHECK(s.flags & BSN_SLICE_MAYBE_LOSSY);
		CHECK_EQ(s.open_handles, 0);
	}
	free_with_writer(n, &w);
}

/* --------------------------------------------------------------- one slice --- */

static uint32_t used_left(struct bsn *n)
{
	return n->store.used;
}

/* A slice of so many blocks, and the header. */
static struct bsn *large_slice(uint32_t blocks)
{
	struct bsn_config config = test_config(64 << 20);
	struct slice *slice;
	struct bsn *n;

	config.store_bytes = config.trace_bytes_max = 16 << 20;
	n = test_node(&config);
	bsn_poll(n, START);
	node_lock(n);
	slice = slice_new(n, trace_id(1), trace_id(1), "test");
	CHECK(slice);
	while (slice->n_blocks < blocks)
		CHECK(slice_append(n, slice, payload, sizeof(payload), NULL,
				   0));
	node_unlock(n);
	CHECK_EQ(used_left(n), blocks + 2);
	return n;
}

static void a_large_slice_goes_in_pieces(void)
{
	const uint32_t piece = PIECE_ENTRIES / LINE_ENTRIES;
	struct bsn *n = large_slice(4000);
	struct between b = {.n = n, .left = used_left};
	pthread_t thread;

	CHECK_EQ(bsn_slice_trim(n, trace_id(1), 1000ull * BLOCK_CONTENT), 0);
	CHECK_EQ(used_left(n), 3002);
	node_lock(n);
	CHECK(slice_trim(n, slice_find(n, trace_id(1)),
			 2000ull * BLOCK_CONTENT));
	CHECK_EQ(used_left(n), 3002 - piece);
	thread = start_between(n, look_between, &b);
	slice_free(n, slice_find(n, trace_id(1)));
	end_between(n, thread);
	check_piece(&b, 3002 - piece, piece);
	CHECK_EQ(used_left(n), 1);
	bsn_free(n);
}

static uint32_t filtered(const struct filter *f)
{
	uint32_t bits = 0;

	for (uint32_t i = 0; i < FILTER_BITS / 64; i++)
		bits += (uint32_t)__builtin_popcountll(f->words[i]);
	return bits;
}

enum {
	SLICES = 2000,
	LEFT = 900
};

/* One piece with each slice that goes, until it knows those alone that are left. */
static void what_slices_are_told_by_is_renewed_in_pieces(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	uint32_t bits, pieces = 0;

	bsn_poll(n, START);
	node_lock(n);
	for (uint32_t i = 0; i < SLICES; i++)
		CHECK(slice_new(n, trace_id(i), trace_id(i), "test"));
	for (uint32_t i = 0; i < SLICES - LEFT; i++) {
		bits = n->store.renewed == NONE ? 0 : filtered(&n->store.next);
		slice_free(n, slice_find(n, trace_id(i)));
		if (n->store.renewed == NONE)
			continue;
		CHECK(filtered(&n->store.next) - bits <=
		      PIECE_ENTRIES / LINE_ENTRIES);
		pieces++;
	}
	CHECK(pieces >= 2);
	CHECK_EQ(n->store.renewed, NONE);
	CHECK(filtered(&n->store.filter) <= SLICES / 2);
	for (uint32_t i = SLICES - LEFT; i < SLICES; i++)
		CHECK(filter_has(&n->store.filter,
				 slice_find(n, trace_id(i))->fingerprint));
	node_unlock(n);
	bsn_free(n);
}

int main(void)
{
	RUN(slices_are_closed_in_pieces);
	RUN(slices_are_told_of_losses_in_pieces);
	RUN(slices_are_told_of_all_processes_at_once);
	RUN(nothing_is_told_before_all_slices_know);
	RUN(the_last_loss_of_a_process_is_told);
	RUN(a_large_slice_goes_in_pieces);
	RUN(what_slices_are_told_by_is_renewed_in_pieces);
	return 0;
}
