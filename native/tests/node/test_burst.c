/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libbacksight itself, and a node that is not scheduled: threads of a process that has
 * just attached begin all at once, and lose nothing.
 */
#include "serve.h"

#define THREADS 64u

/* 160 KiB each, so that every thread takes a second and a third segment. */
#define TRACES 20u
#define RECORD_BYTES 8192u

static pthread_barrier_t start;

static void *begin_with_the_others(void *argument)
{
	static const uint8_t payload[RECORD_BYTES];
	uint64_t first = *(const uint64_t *)argument;

	pthread_barrier_wait(&start);
	for (uint64_t i = 0; i < TRACES; i++) {
		CHECK_EQ(bs_begin((struct bs_trace_id){7, first + i}), 0);
		CHECK_EQ(bs_tracepoint(payload, sizeof(payload)), 0);
		CHECK_EQ(bs_end(), 0);
	}
	return NULL;
}

static void write_from_all_threads(void)
{
	uint64_t first[THREADS];
	pthread_t threads[THREADS];

	CHECK_EQ(pthread_barrier_init(&start, NULL, THREADS), 0);
	for (uint32_t i = 0; i < THREADS; i++) {
		first[i] = 1 + i * TRACES;
		CHECK_EQ(pthread_create(&threads[i], NULL,
					begin_with_the_others, &first[i]),
			 0);
	}
	for (uint32_t i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	pthread_barrier_destroy(&start);
}

int main(void)
{
	struct bsn_config config = test_config(256 << 20);
	struct server server = {0};
	struct bsn *n;
	struct bsn_metrics m;
	struct bs_stats stats;
	struct bsn_slice s;

	config.store_bytes = 64 << 20;
	n = test_node(&config);
	server_open(&server, n);
	CHECK_EQ(bs_begin((struct bs_trace_id){1, 1}), 0); /* attaches */
	bs_end();
	CHECK_EQ(bs_wait_attached(60000), 0);
	/* Nobody polls. */
	write_from_all_threads();
	bs_get_stats(&stats);
	CHECK_EQ(stats.runs, THREADS * TRACES);
	CHECK_EQ(stats.runs_lost, 0);
	CHECK_EQ(stats.records_lost, 0);

	bsn_poll(n, now_ns());
	for (uint64_t i = 0; i < THREADS * TRACES; i++) {
		collect(n, (struct bs_trace_id){7, 1 + i}, now_ns(), &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		CHECK(s.bytes > RECORD_BYTES);
	}
	bsn_get_metrics(n, &m);
	CHECK_EQ(m.corrupt, 0);
	CHECK_EQ(m.records_lost, 0);
	bs_shutdown();
	server_close(&server);
	bsn_free(n);
	return 0;
}
