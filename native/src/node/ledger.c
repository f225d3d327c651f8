/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ledger: what the node must know of its pool after it was killed, in a
 * memfd that no client ever has.
 *
 *   | header | a process | a segment that is granted | gone.c | keep arena |
 *     4096    128 bytes    64 bytes each, by frame     64 bytes  64 KiB each
 *
 * It is the live table, not a copy of it: a record is what the node works
 * with. Of a record the state is written last, so a kill leaves the old state
 * or the new one. Sparse: what is not used costs nothing, so there is room for
 * a successor with a larger pool.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

#define LEDGER_MAGIC 0x52454744454c5342ull
#define LEDGER_VERSION 9u
#define HEADER_BYTES 4096u

static uint64_t up_to_segment(uint64_t bytes)
{
	return (bytes + SEGMENT - 1) / SEGMENT * SEGMENT;
}

static uint64_t records_bytes(uint32_t n_records)
{
	return (uint64_t)n_records * sizeof(struct grant_record);
}

static uint64_t gone_bytes(uint32_t n_buckets)
{
	return (uint64_t)(n_buckets + gone_loss_buckets(n_buckets)) *
	       BS_CACHE_LINE;
}

static uint64_t records_offset(uint32_t n_told)
{
	return HEADER_BYTES + (uint64_t)n_told * sizeof(struct told);
}

static uint64_t gone_offset(uint32_t n_told, uint32_t n_records)
{
	return records_offset(n_told) + records_bytes(n_records);
}

static uint64_t keep_offset(uint32_t n_told, uint32_t n_records,
			    uint32_t n_buckets)
{
	return up_to_segment(gone_offset(n_told, n_records) +
			     gone_bytes(n_buckets));
}

uint64_t ledger_bytes(uint32_t n_told, uint32_t n_records, uint32_t n_buckets,
		      uint32_t keep_segments)
{
	return keep_offset(n_told, n_records, n_buckets) +
	       (uint64_t)keep_segments * SEGMENT;
}

struct told *ledger_told(const struct ledger *l, uint32_t client)
{
	for (uint32_t i = 0; i < l->header->n_told; i++) {
		if (l->told[i].client == client)
			return &l->told[i];
	}
	return NULL;
}

static void ledger_point(struct ledger *l, int fd, void *map, uint64_t bytes)
{
	struct ledger_header *h = map;
	void *gone = (uint8_t *)map + gone_offset(h->n_told, h->n_records);

	l->fd = fd;
	l->map = map;
	l->bytes = bytes;
	l->header = h;
	l->told = (struct told *)(l->map + HEADER_BYTES);
	l->records =
		(struct grant_record *)(l->map + records_offset(h->n_told));
	gone_point(l, gone);
	l->keep = l->map + keep_offset(h->n_told, h->n_records, h->n_buckets);
	/* Look-ups are random: with small pages each would miss the TLB too. */
	(void)madvise(gone, gone_bytes(h->n_buckets), MADV_HUGEPAGE);
}

int ledger_init(struct bsn *n)
{
	uint64_t entries = n->config.tombstones;
	uint32_t budget = (uint32_t)(n->config.pool_bytes / SEGMENT);
	uint32_t n_told = n->config.clients_max;
	uint32_t n_records = ROOM_FACTOR * budget;
	uint32_t keep_segments = budget; /* a quarter of the room */
	uint32_t n_buckets;
	struct ledger_header *h;
	uint64_t bytes;
	int fd;

	/* When not configured: a third more traces of 100 bytes than the pool
	 * holds, in a sixteenth of its bytes. */
	if (!entries)
		entries = n->config.pool_bytes / 1024 * 10;
	n_buckets = gone_buckets(entries);
	bytes = ledger_bytes(n_told, n_records, n_buckets, keep_segments);
	fd = memfd_sealed("backsight-ledger", bytes);
	if (fd < 0)
		return fd;
	h = map_shared(fd, bytes);
	if (!h) {
		close(fd);
		return -ENOMEM;
	}
	h->version = LEDGER_VERSION;
	h->n_told = n_told;
	h->n_records = n_records;
	h->n_buckets = n_buckets;
	h->keep_segments = keep_segments;
	h->secret = n->secret;
	h->ticks_per_s = n->config.ticks_per_s;
	h->clock_is_counter = n->config.clock_is_counter;
	h->reclaiming = NONE;
	h->magic = LEDGER_MAGIC;
	ledger_point(&n->ledger, fd, h, bytes);
	return 0;
}

/* It is sealed now: all these times differ, and order the segments. */
void ledger_number_seal(struct bsn *n, uint32_t frame)
{
	struct ledger_header *h = n->ledger.header;

	h->sealed = n->now_ns > h->sealed ? n->now_ns : h->sealed + 1;
	n->ledger.records[frame].sealed = h->sealed;
}

void ledger_free(struct bsn *n)
{
	struct ledger *l = &n->ledger;

	if (l->map)
		munmap(l->map, l->bytes);
	if (l->fd >= 0)
		close(l->fd);
	memset(l, 0, sizeof(*l));
	l->fd = -1;
}

static bool is_valid(const struct ledger_header *h, uint64_t bytes)
{
	return bytes >= HEADER_BYTES && h->magic == LEDGER_MAGIC &&
	       h->version == LEDGER_VERSION && h->n_records &&
	       h->frames_fresh <= h->n_records &&
	       gone_buckets_are_valid(h->n_buckets) && h->secret & 1 &&
	       h->ticks_per_s &&
	       bytes == ledger_bytes(h->n_told, h->n_records, h->n_buckets,
				     h->keep_segments);
}

/* A predecessor's. Nothing else is in the pool yet. */
int ledger_adopt(struct bsn *n, int fd)
{
	struct ledger_header *h;
	uint64_t bytes;
	int err = memfd_check(fd, &bytes);

	if (err)
		return err;
	h = map_shared(fd, bytes ? bytes : 1);
	if (!h)
		return map_failure();
	if (!is_valid(h, bytes)) {
		munmap(h, bytes ? bytes : 1);
		return -EPROTO;
	}
	fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0) {
		err = -errno;
		munmap(h, bytes);
		return err;
	}
	ledger_free(n);
	ledger_point(&n->ledger, fd, h, bytes);
	n->ledger.adopted = true;
	return 0;
}
