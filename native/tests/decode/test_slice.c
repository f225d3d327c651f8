/* SPDX-License-Identifier: Apache-2.0 */
/* The reader of slices: bytes in any chunks, and what they may not make it do. What it
 * says of them is compared with another reader in tests/unit/test_decoding.py. */
#include <errno.h>

#include "writer.h"

static struct bytes slice, content;

static struct bsd_slice *new_slice(void)
{
	struct bsd_slice *s;

	CHECK_EQ(bsd_slice_new(&s), 0);
	return s;
}

static struct bsd_records *new_records(void)
{
	struct bsd_records *r;

	CHECK_EQ(bsd_records_new(&r), 0);
	return r;
}

/* Two runs of a handle, with a span each, and all other pieces. */
static void make_slice(void)
{
	struct bs_clock_pair pair = {1000, 5000, 1000000000};
	struct bs_piece_process process = {.pid = 42, .service = "shop"};
	struct bs_piece_header head = {
		.client = 1, .handle = 2, .flags = BS_RUN_FIRST};

	slice.n = 0;
	put_piece(&slice, BS_PIECE_PROCESS, 1, &process, sizeof(process));
	put_piece(&slice, BS_PIECE_CLOCK, 0, &pair, sizeof(pair));
	for (uint64_t i = 1; i < 3; i++) {
		content.n = 0;
		put_start(&content, i, 0, "GET /");
		put_end(&content, i);
		put_run(&slice, head, &content);
		head.seq = 1;
		head.flags = BS_RUN_LAST;
	}
	put_piece(&slice, BS_PIECE_EXIT, 1, "", 0);
}

static void any_chunks_read_the_same(void)
{
	struct bsd_records *records = new_records();

	make_slice();
	for (size_t size = 1; size <= slice.n; size++) {
		struct bsd_slice *s = new_slice();
		struct bsd_slice_info info;
		size_t count = 0;

		for (size_t at = 0; at < slice.n; at += size) {
			size_t n = size < slice.n - at ? size : slice.n - at;
			const struct bsd_record *r;

			CHECK_EQ(bsd_slice_feed(s, slice.at + at, n, records),
				 0);
			r = bsd_records_at(records);
			for (size_t i = 0; i < bsd_records_count(records);
			     i++, count++) {
				CHECK_EQ(r[i].span_id, 1 + count / 2);
				CHECK_EQ(r[i].type,
					 count % 2 ? BS_RECORD_SPAN_END
						   : BS_RECORD_SPAN_START);
				CHECK_EQ(r[i].name_bytes, count % 2 ? 0 : 5);
				CHECK(!memcmp(r[i].bytes ? r[i].bytes
							 : (const void *)"",
					      "GET /", r[i].name_bytes));
			}
		}
		CHECK_EQ(count, 4);
		info = bsd_slice_info(s);
		CHECK(info.whole);
		CHECK_EQ(info.malformed, 0);
		/* Two runs, a process, a client that is gone, a pair. */
		CHECK_EQ(info.items, 5);
		CHECK_EQ(info.least_bytes, slice.n);
		CHECK_EQ(bsd_handle_problem(bsd_slice_handles(s)),
			 BSD_HANDLE_WHOLE);
		bsd_slice_free(s);
	}
	bsd_records_free(records);
}

static void a_cut_slice_is_not_whole(void)
{
	size_t whole = 0;

	make_slice();
	for (size_t n = 0; n <= slice.n; n++) {
		struct bsd_slice *s = new_slice();

		CHECK_EQ(bsd_slice_feed(s, slice.at, n, NULL), 0);
		whole += bsd_slice_info(s).whole;
		CHECK_EQ(bsd_slice_info(s).malformed, 0);
		bsd_slice_free(s);
	}
	/* Of five pieces, and of none. */
	CHECK_EQ(whole, 6);
}

static void a_time_is_that_of_the_nearest_pair(void)
{
	struct bs_clock_pair late = {3000, 9000, 1};
	struct bsd_slice *s = new_slice();
	uint64_t ns = 0;

	CHECK_EQ(bsd_slice_time(s, 1, &ns), -ENODATA);
	make_slice();
	put_piece(&slice, BS_PIECE_CLOCK, 0, &late, sizeof(late));
	CHECK_EQ(bsd_slice_feed(s, slice.at, slice.n, NULL), 0);
	CHECK_EQ(bsd_slice_time(s, 0, &ns), -ENODATA);
	CHECK_EQ(bsd_slice_time(s, 2000, &ns), 0);
	CHECK_EQ(ns, 6000);
	CHECK_EQ(bsd_slice_time(s, 3000, &ns), 0);
	CHECK_EQ(ns, 9000);
	/* Before there was a clock, and after it ends. */
	CHECK_EQ(bsd_slice_time(s, 2001, &ns), -ENODATA);
	CHECK_EQ(bsd_slice_time(s, UINT64_MAX, &ns), -ENODATA);
	bsd_slice_free(s);
}

static void many_of_each_are_found_again(void)
{
	struct bs_piece_header head = {.flags = WHOLE};
	struct bsd_slice *s = new_slice();
	struct bsd_slice_info info;

	content.n = 0;
	put_start(&content, 1, 0, "x");
	slice.n = 0;
	for (uint32_t round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < 3000; i++) {
			head.client = i / 3;
			head.handle = i;
			put_run(&slice, head, &content);
			if (i % 3 == 0)
				put_piece(&slice, BS_PIECE_LOSS, i, "", 0);
		}
	}
	CHECK_EQ(bsd_slice_feed(s, slice.at, slice.n, NULL), 0);
	info = bsd_slice_info(s);
	CHECK_EQ(info.handles, 3000);
	CHECK_EQ(info.clients, 1000);
	CHECK_EQ(info.items, 4000);
	for (uint32_t i = 0; i < 3000; i++) {
		CHECK_EQ(bsd_slice_handles(s)[i].handle, i);
		CHECK_EQ(bsd_slice_client(s, i) != NULL, i % 3 == 0);
	}
	bsd_slice_free(s);
}

/* A record of the largest size, of which all but the last byte waits. */
static void what_waits_takes_no_more_than_it_is(void)
{
	static uint8_t payload[BS_PAYLOAD_MAX];
	struct bs_record_header head = {.payload_bytes = BS_PAYLOAD_MAX,
					.type = BS_RECORD_DATA};
	struct bs_piece_header run = {.client = 1};
	struct bsd_records *records = new_records();
	struct bsd_slice *s = new_slice();

	content.n = slice.n = 0;
	put(&content, &head, sizeof(head));
	put(&content, payload, sizeof(payload));
	put_run(&slice, run, &content);
	for (size_t at = 0; at < slice.n; at++) {
		CHECK_EQ(bsd_slice_feed(s, slice.at + at, 1, records), 0);
		CHECK_EQ(bsd_records_count(records), at == slice.n - 1);
		if (at > sizeof(run) && at < slice.n - 1)
			CHECK_EQ(bsd_slice_info(s).items,
				 (at + 1 - sizeof(run)) / 150);
	}
	CHECK_EQ(bsd_slice_info(s).items, 1);
	bsd_slice_free(s);
	bsd_records_free(records);
}

int main(void)
{
	RUN(any_chunks_read_the_same);
	RUN(a_cut_slice_is_not_whole);
	RUN(a_time_is_that_of_the_nearest_pair);
	RUN(many_of_each_are_found_again);
	RUN(what_waits_takes_no_more_than_it_is);
	return 0;
}
