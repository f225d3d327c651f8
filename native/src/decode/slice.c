/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The incremental reader of a slice.
 *
 * It goes from piece to piece, and in a run from record to record. What is not whole
 * yet waits in `pending`: at most a record of the largest size.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "abi/arena.h"
#include "abi/slice.h"
#include "internal.h"

#define PIECE_BYTES ((uint32_t)sizeof(struct bs_piece_header))
#define RECORD_BYTES ((uint32_t)sizeof(struct bs_record_header))

/* What stands in the piece of a process whose records are as ABI 2 has them. */
#define RECORD_FORMAT 0u

/* Bytes to which one of the `items` comes. */
#define ITEM_BYTES 150u

struct run {
	uint32_t handle; /* which of the slice's handles */
	uint32_t seq;
	uint64_t end; /* up to which byte it is here */
};

void slice_init(struct bsd_slice *s)
{
	*s = (struct bsd_slice){
		.handles = TABLE_OF(struct bsd_handle, 2 * sizeof(uint32_t)),
		.runs = TABLE_OF(struct run, 2 * sizeof(uint32_t)),
		.clients = TABLE_OF(struct bsd_client, sizeof(uint32_t)),
		.pairs = TABLE_OF(struct bs_clock_pair, sizeof(uint64_t)),
		.by_ticks = ARRAY_OF(uint32_t),
		.needed = PIECE_BYTES,
	};
}

void slice_release(struct bsd_slice *s)
{
	table_free(&s->handles);
	table_free(&s->runs);
	table_free(&s->clients);
	table_free(&s->pairs);
	array_free(&s->by_ticks);
	free(s->pending);
}

int bsd_slice_new(struct bsd_slice **slice)
{
	struct bsd_slice *s = malloc(sizeof(*s));

	if (!s)
		return -ENOMEM;
	slice_init(s);
	*slice = s;
	return 0;
}

void bsd_slice_free(struct bsd_slice *slice)
{
	if (!slice)
		return;
	slice_release(slice);
	free(slice);
}

static struct bsd_client *client_of(struct bsd_slice *s, uint32_t client)
{
	return table_put(&s->clients, &client);
}

static bool is_foreign(const struct bsd_slice *s, uint32_t client)
{
	const struct bsd_client *c = bsd_slice_client(s, client);

	return c && c->foreign;
}

/* A flag of a newer writer may say what a reader must know. */
static void count_unknown(struct bsd_slice *s, uint32_t flags, uint32_t known)
{
	s->malformed += (flags & ~known) != 0;
}

/* -------------------------------------------------------------- pieces --- */

static struct run *find_run(const struct bsd_slice *s, const struct run_head *h)
{
	const struct bsd_handle *handle = table_find(&s->handles, h);
	uint32_t key[2];

	if (!handle)
		return NULL;
	key[0] = (uint32_t)(handle -
			    (struct bsd_handle *)s->handles.array.entries);
	key[1] = h->seq;
	return table_find(&s->runs, key);
}

static void begin_run(struct bsd_slice *s, const struct run_head *h)
{
	const struct run *known;

	s->run = *h;
	s->in_run = true;
	s->left = h->bytes;
	if (is_foreign(s, h->client)) {
		s->skip = h->bytes;
		return;
	}
	known = find_run(s, h);
	/* Copied twice, as by a node that was restarted in between. */
	if (known && known->end > h->from) {
		uint64_t twice = known->end - h->from;

		s->skip = twice < h->bytes ? (uint32_t)twice : h->bytes;
	}
}

static int end_run(struct bsd_slice *s)
{
	const struct run_head *h = &s->run;
	struct bsd_handle *handle = table_put(&s->handles, h);
	uint64_t end = (uint64_t)h->from + h->bytes;
	uint32_t key[2], runs = s->runs.array.count;
	struct run *run;

	s->in_run = false;
	if (!handle)
		return -ENOMEM;
	key[0] = (uint32_t)(handle -
			    (struct bsd_handle *)s->handles.array.entries);
	key[1] = h->seq;
	run = table_put(&s->runs, key);
	if (!run)
		return -ENOMEM;
	if (s->runs.array.count != runs) {
		handle->runs++;
		if (h->seq > handle->seq_max)
			handle->seq_max = h->seq;
	}
	if (h->from > run->end)
		handle->hole = true;
	if (end > run->end) {
		s->run_bytes += end - run->end;
		run->end = end;
	}
	if (h->flags & BS_RUN_FIRST && h->seq == 0)
		handle->first = true;
	if (h->flags & BS_RUN_LAST) {
		handle->closed = true;
		handle->last_seq = h->seq;
	}
	if (h->flags & BS_RUN_LOSSY)
		handle->lossy = true;
	return 0;
}

static int read_clock(struct bsd_slice *s, const uint8_t *content)
{
	struct bs_clock_pair pair = {
		.ticks = get64(content),
		.realtime_ns = get64(content + 8),
		.ticks_per_s = get64(content + 16),
	};
	struct bs_clock_pair *known;

	if (!pair.ticks_per_s) {
		s->malformed++;
		return 0;
	}
	known = table_put(&s->pairs, &pair.ticks);
	if (!known)
		return -ENOMEM;
	/* Of two that contradict each other the later holds. */
	*known = pair;
	return 0;
}

static void read_process(struct bsd_slice *s, struct bsd_client *c,
			 const uint8_t *content)
{
	const size_t service = offsetof(struct bs_piece_process, service);

	if (get32(content + offsetof(struct bs_piece_process, zero)) !=
	    RECORD_FORMAT) {
		s->malformed++;
		s->foreign += !c->foreign;
		c->foreign = true;
	}
	s->processes += !c->named;
	c->named = true;
	c->pid = get32(content);
	memcpy(c->service, content + service, sizeof(c->service));
}

/* One that is not of a run. */
static int read_small(struct bsd_slice *s, uint16_t kind, uint32_t client,
		      const uint8_t *content)
{
	struct bsd_client *c;

	if (kind == BS_PIECE_CLOCK)
		return read_clock(s, content);
	c = client_of(s, client);
	if (!c)
		return -ENOMEM;
	if (kind == BS_PIECE_PROCESS) {
		read_process(s, c, content);
	} else if (kind == BS_PIECE_LOSS) {
		s->lossy += !c->lossy;
		c->lossy = true;
	} else {
		s->exited += !c->exited;
		c->exited = true;
	}
	return 0;
}

/* Of pieces that are no runs; UINT32_MAX of a kind that is not known. */
static uint32_t content_bytes(uint16_t kind)
{
	switch (kind) {
	case BS_PIECE_CLOCK:
		return sizeof(struct bs_clock_pair);
	case BS_PIECE_PROCESS:
		return sizeof(struct bs_piece_process);
	case BS_PIECE_LOSS:
	case BS_PIECE_EXIT:
		return 0;
	default:
		return UINT32_MAX;
	}
}

/* Begin a piece, or read a small one: how many bytes of it; 0 if more are needed. */
static int64_t read_piece(struct bsd_slice *s, const uint8_t *b, size_t n)
{
	const uint32_t known = BS_RUN_FIRST | BS_RUN_LAST | BS_RUN_LOSSY |
			       BS_RUN_CLOSED;
	uint32_t bytes;
	uint16_t kind, flags;
	int error;

	s->needed = PIECE_BYTES;
	if (n < PIECE_BYTES)
		return 0;
	bytes = get32(b + offsetof(struct bs_piece_header, bytes));
	kind = get16(b + offsetof(struct bs_piece_header, kind));
	flags = get16(b + offsetof(struct bs_piece_header, flags));
	/* A run lies in one segment. */
	if (bytes > BS_SEGMENT_BYTES || bytes % BS_RECORD_ALIGN) {
		s->malformed++;
		s->broken = true;
		return PIECE_BYTES;
	}
	if (kind == BS_PIECE_RUN) {
		struct run_head head = {
			.client = get32(
				b + offsetof(struct bs_piece_header, client)),
			.handle = get32(
				b + offsetof(struct bs_piece_header, handle)),
			.seq = get32(b + offsetof(struct bs_piece_header, seq)),
			.from = get32(b +
				      offsetof(struct bs_piece_header, from)),
			.bytes = bytes,
			.flags = flags,
		};

		count_unknown(s, flags, known);
		begin_run(s, &head);
		return PIECE_BYTES;
	}
	if (bytes != content_bytes(kind)) {
		s->malformed++;
		s->left = s->skip = bytes;
		return PIECE_BYTES;
	}
	s->needed = PIECE_BYTES + bytes;
	if (n < s->needed)
		return 0;
	count_unknown(s, flags, known);
	error = read_small(s, kind,
			   get32(b + offsetof(struct bs_piece_header, client)),
			   b + PIECE_BYTES);
	return error ? (int64_t)error : (int64_t)s->needed;
}

/* ------------------------------------------------------------- records --- */

/* Read one record of the run: how many bytes; 0 if more are needed, or to be skipped. */
static int64_t read_record(struct bsd_slice *s, const uint8_t *b, size_t n,
			   take_record take, void *arg)
{
	struct bsd_record r = {
		.client = s->run.client,
		.handle = s->run.handle,
	};
	uint32_t payload_bytes, bytes;
	uint8_t flags;
	int error;

	s->needed = RECORD_BYTES;
	if (s->left < RECORD_BYTES)
		goto malformed;
	if (n < RECORD_BYTES)
		return 0;
	payload_bytes =
		get16(b + offsetof(struct bs_record_header, payload_bytes));
	r.type = b[offsetof(struct bs_record_header, type)];
	flags = b[offsetof(struct bs_record_header, flags)];
	r.ticks = get64(b + offsetof(struct bs_record_header, ticks));
	bytes = (uint32_t)bs_record_bytes(payload_bytes);
	if (payload_bytes > BS_PAYLOAD_MAX || bytes > s->left)
		goto malformed;
	s->needed = bytes;
	if (n < bytes)
		return 0;
	s->left -= bytes;
	if (!record_decode(&r, b + RECORD_BYTES, payload_bytes)) {
		s->malformed++;
		return bytes;
	}
	count_unknown(s, flags, BS_RECORD_TRUNCATED);
	r.truncated = flags & BS_RECORD_TRUNCATED;
	error = take ? take(arg, &r) : 0;
	return error < 0 ? (int64_t)error : (int64_t)bytes;
malformed:
	/* What follows in the run cannot be told apart. */
	s->malformed++;
	s->skip = s->left;
	return 0;
}

/* Read all that is whole: how many bytes. Of the rest there are fewer than needed. */
static int64_t read_all(struct bsd_slice *s, const uint8_t *b, size_t n,
			take_record take, void *arg)
{
	size_t at = 0;
	int64_t step;

	while (!s->broken) {
		if (s->skip) {
			uint32_t skipped =
				s->skip < n - at ? s->skip : (uint32_t)(n - at);

			s->skip -= skipped;
			s->left -= skipped;
			at += skipped;
			s->needed = 1;
			if (s->skip)
				break;
		}
		if (s->in_run && !s->left) {
			int error = end_run(s);

			if (error)
				return error;
		}
		step = s->in_run ? read_record(s, b + at, n - at, take, arg)
				 : read_piece(s, b + at, n - at);
		if (step < 0)
			return step;
		if (!step && !s->skip)
			break;
		at += (size_t)step;
	}
	return (int64_t)at;
}

/* -------------------------------------------------------------- chunks --- */

static int keep(struct bsd_slice *s, const uint8_t *bytes, size_t n)
{
	size_t sum = s->pending_bytes + n;

	if (!n)
		return 0;
	if (sum > s->pending_room) {
		/* All that it can come to, as soon as it waits for a large one. */
		size_t room = sum > s->needed ? sum : s->needed;
		uint8_t *pending = realloc(s->pending, room);

		if (!pending)
			return -ENOMEM;
		s->pending = pending;
		s->pending_room = (uint32_t)room;
	}
	memcpy(s->pending + s->pending_bytes, bytes, n);
	s->pending_bytes = (uint32_t)sum;
	return 0;
}

/* What is no longer needed; most slices end with a piece. */
static void drop_pending(struct bsd_slice *s, size_t n)
{
	s->pending_bytes -= (uint32_t)n;
	if (s->pending_bytes) {
		memmove(s->pending, s->pending + n, s->pending_bytes);
		return;
	}
	free(s->pending);
	s->pending = NULL;
	s->pending_room = 0;
}

int slice_feed(struct bsd_slice *s, const uint8_t *bytes, size_t n,
	       take_record take, void *arg)
{
	int64_t used;
	int error;

	while (n && !s->broken) {
		if (s->pending_bytes) {
			/* Not zero: fewer are pending than needed. */
			size_t step = s->needed - s->pending_bytes;

			if (step > n)
				step = n;
			error = keep(s, bytes, step);
			if (error)
				return error;
			bytes += step;
			n -= step;
			if (s->pending_bytes < s->needed)
				break;
			used = read_all(s, s->pending, s->pending_bytes, take,
					arg);
			if (used < 0)
				return (int)used;
			drop_pending(s, (size_t)used);
			continue;
		}
		used = read_all(s, bytes, n, take, arg);
		if (used < 0)
			return (int)used;
		bytes += used;
		n -= (size_t)used;
		if (!s->broken) {
			error = keep(s, bytes, n);
			if (error)
				return error;
		}
		break;
	}
	if (s->broken && s->pending)
		drop_pending(s, s->pending_bytes);
	return 0;
}

/* ------------------------------------------------------------- asking --- */

uint64_t slice_items(const struct bsd_slice *s)
{
	return (uint64_t)s->runs.array.count + s->processes + s->exited +
	       s->lossy + s->foreign + s->pairs.array.count +
	       s->pending_bytes / ITEM_BYTES;
}

static uint64_t least_bytes(const struct bsd_slice *s)
{
	uint64_t heads = (uint64_t)s->runs.array.count + s->exited;

	return s->run_bytes + heads * PIECE_BYTES +
	       s->processes * (PIECE_BYTES + sizeof(struct bs_piece_process)) +
	       (s->pairs.array.count
			? PIECE_BYTES + sizeof(struct bs_clock_pair)
			: 0);
}

struct bsd_slice_info bsd_slice_info(const struct bsd_slice *slice)
{
	return (struct bsd_slice_info){
		.malformed = slice->malformed,
		.items = slice_items(slice),
		.least_bytes = least_bytes(slice),
		.handles = slice->handles.array.count,
		.clients = slice->clients.array.count,
		.clock_pairs = slice->pairs.array.count,
		.whole = !slice->broken && !slice->in_run && !slice->skip &&
			 !slice->pending_bytes,
		.broken = slice->broken,
	};
}

const struct bsd_handle *bsd_slice_handles(const struct bsd_slice *slice)
{
	return (const struct bsd_handle *)slice->handles.array.entries;
}

const struct bsd_client *bsd_slice_clients(const struct bsd_slice *slice)
{
	return (const struct bsd_client *)slice->clients.array.entries;
}

const struct bsd_client *bsd_slice_client(const struct bsd_slice *slice,
					  uint32_t client)
{
	return table_find(&slice->clients, &client);
}

enum bsd_handle_problem bsd_handle_problem(const struct bsd_handle *handle)
{
	if (!handle->first)
		return BSD_HANDLE_NO_FIRST;
	if (handle->hole)
		return BSD_HANDLE_HOLE;
	if (!handle->closed)
		return BSD_HANDLE_OPEN;
	if (handle->seq_max > handle->last_seq)
		return BSD_HANDLE_BEYOND;
	if (handle->runs != (uint64_t)handle->last_seq + 1)
		return BSD_HANDLE_MISSING;
	return BSD_HANDLE_WHOLE;
}
