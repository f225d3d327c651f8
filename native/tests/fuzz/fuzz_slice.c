/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes say what they like in their slices. The input is how they are cut into chunks,
 * and the slices.
 *
 * What must hold: nothing crashes or leaks; however a slice is cut, its records are the
 * same, and what is known of it; no more is remembered than came; what two nodes said
 * does not depend on whose bytes came first.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "decode.h"
#include "hash.h"
#include "input.h"

#define NODES 3
#define FEW 4
/* So that some inputs are over it. */
#define ITEMS_MAX 40

/* So that the compiler reads what is only read. */
static volatile uint64_t read_bytes;

static uint64_t mix(uint64_t hash, const void *bytes, size_t n)
{
	const uint8_t *b = bytes;

	for (size_t i = 0; i < n; i++)
		hash = (hash ^ b[i]) * 0x100000001b3ull;
	return hash;
}

static uint64_t mix_record(uint64_t hash, struct bsd_record r)
{
	const uint8_t *bytes = r.bytes;
	size_t n = (size_t)r.name_bytes + r.rest_bytes;

	r.bytes = NULL;
	return mix(mix(hash, &r, sizeof(r)), bytes, n);
}

struct read {
	uint64_t records; /* a hash of them */
	size_t count;
	struct bsd_slice_info info;
};

/* All bytes, in chunks of up to `most`. */
static struct read read_all(const uint8_t *bytes, size_t size, size_t most)
{
	struct read read = {0};
	struct bsd_records *records;
	struct bsd_slice *s;
	uint64_t ns;

	CHECK_EQ(bsd_slice_new(&s), 0);
	CHECK_EQ(bsd_records_new(&records), 0);
	for (size_t at = 0; at < size;) {
		size_t n = most < size - at ? most : size - at;
		const struct bsd_record *r;

		CHECK_EQ(bsd_slice_feed(s, bytes + at, n, records), 0);
		r = bsd_records_at(records);
		for (size_t i = 0; i < bsd_records_count(records); i++) {
			read.records = mix_record(read.records, r[i]);
			bsd_slice_time(s, r[i].ticks, &ns);
		}
		read.count += bsd_records_count(records);
		at += n;
	}
	read.info = bsd_slice_info(s);
	for (uint32_t i = 0; i < read.info.handles; i++)
		bsd_handle_problem(&bsd_slice_handles(s)[i]);
	for (uint32_t i = 0; i < read.info.clients; i++)
		CHECK(bsd_slice_client(s, bsd_slice_clients(s)[i].client) ==
		      &bsd_slice_clients(s)[i]);
	CHECK(read.info.handles * 24ull <= size);
	CHECK(read.info.items * 24 <= size + 24);
	CHECK(read.count * 12 <= size);
	bsd_records_free(records);
	bsd_slice_free(s);
	return read;
}

static void reads_the_same(const uint8_t *bytes, size_t size, size_t most)
{
	struct read whole = read_all(bytes, size, SIZE_MAX);
	struct read cut = read_all(bytes, size, most);

	CHECK_EQ(whole.count, cut.count);
	CHECK(whole.records == cut.records);
	CHECK_EQ(whole.info.malformed, cut.info.malformed);
	CHECK_EQ(whole.info.items, cut.info.items);
	CHECK_EQ(whole.info.least_bytes, cut.info.least_bytes);
	CHECK_EQ(whole.info.whole, cut.info.whole);
	CHECK_EQ(whole.info.broken, cut.info.broken);
	CHECK_EQ(whole.info.handles, cut.info.handles);
	CHECK_EQ(whole.info.clients, cut.info.clients);
	CHECK_EQ(whole.info.clock_pairs, cut.info.clock_pairs);
}

static uint64_t count_findings(struct bsd_evidence *e)
{
	int64_t n = bsd_evidence_judge(e, FEW);
	const struct bsd_finding *f = bsd_evidence_findings(e);
	uint64_t names = 0, all = 0;

	CHECK(n >= 0);
	for (int64_t i = 0; i < n; i++) {
		names = mix(names, f[i].name, f[i].name_bytes);
		all += 1 + f[i].more;
	}
	for (size_t i = 0; i < bsd_evidence_slices(e); i++) {
		CHECK(bsd_evidence_node(e, i) < NODES);
		CHECK(bsd_evidence_truncated(e, i) <= UINT32_MAX);
	}
	read_bytes = names;
	return all;
}

static void same(struct bsd_evidence *one, struct bsd_evidence *other)
{
	struct bsd_extent a = bsd_evidence_extent(one);
	struct bsd_extent b = bsd_evidence_extent(other);

	CHECK_EQ(a.span_count, b.span_count);
	CHECK_EQ(a.start_ns, b.start_ns);
	CHECK_EQ(a.end_ns, b.end_ns);
	CHECK_EQ(count_findings(one), count_findings(other));
}

/* A chunk to each node in turn; and all at once, from the last one to the first. */
static void trace(const uint8_t *bytes, size_t size, uint8_t most, bool limited)
{
	struct bsd_evidence *forth, *back;
	uint64_t limit = limited ? ITEMS_MAX : UINT64_MAX;
	size_t step = 1 + (size_t)most * 4;

	size /= NODES;
	CHECK_EQ(bsd_evidence_new(limit, &forth), 0);
	CHECK_EQ(bsd_evidence_new(limit, &back), 0);
	for (size_t at = 0; at < size; at += step) {
		size_t n = step < size - at ? step : size - at;

		for (uint64_t node = 0; node < NODES; node++) {
			struct bsd_added a = bsd_evidence_add(
				forth, node, bytes + node * size + at, n);
			uint64_t names = 0;

			CHECK_EQ(a.error, 0);
			CHECK(a.items <= limit);
			for (size_t i = 0; i < a.n_crumbs; i++)
				names = mix(names, a.crumbs[i].name,
					    a.crumbs[i].name_bytes);
			read_bytes = names;
		}
		count_findings(forth);
	}
	for (uint64_t node = NODES; node-- > 0;)
		bsd_evidence_add(back, node, bytes + node * size, size);
	if (!limited) {
		same(forth, back);
		CHECK_EQ(bsd_evidence_restart(forth, 1),
			 bsd_evidence_restart(back, 1));
		same(forth, back);
	}
	bsd_evidence_free(forth);
	bsd_evidence_free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	struct input in = {bytes, bytes + size};
	uint8_t most = take8(&in);
	uint8_t how = take8(&in);

	if (how % 2)
		trace(in.at, (size_t)(in.end - in.at), most, how & 2);
	else
		reads_the_same(in.at, (size_t)(in.end - in.at),
			       1 + (size_t)most);
	return 0;
}
