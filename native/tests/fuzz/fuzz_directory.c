/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client writes what it likes into its segments, its channel and its context,
 * and the node searches, watches, keeps, reclaims and adopts, beside an honest
 * client. The input is a list of steps: an opcode, and what it needs.
 *
 * What must hold at the end: nothing crashed, the budgets are kept, every slice
 * is of whole pieces and records, and no larger than what there was to copy, and
 * the honest client lost nothing.
 */
#include <errno.h>
#include <sys/mman.h>

#include "input.h"
#include "node/writer.h"

#define THREADS 3
#define TRACES 4
/* So that one input takes no longer than a few milliseconds. */
#define STEPS 120
#define RECLAIMS 3

#define HONEST 1000u /* traces of the honest one: from this number on */
#define HONEST_HANDLE 1u

struct bench {
	struct bsn_config config;
	struct bsn *n;
	uint64_t now;
	struct writer honest, liar;
	bool liar_lives;
	struct wthread writes, lies[THREADS];
	struct wthread *thread; /* of the liar, that the next steps are about */
	uint32_t written, open_runs, reclaims;
};

enum step {
	WRITE_BYTES,
	WRITE_ENTRY,
	WRITE_RUN,
	SET_RUNS,
	SET_HEADER,
	TAKE_SEGMENT,
	SELECT_THREAD,
	POLL,
	COLLECT,
	PEEK,
	RELEASE,
	TRIM,
	EXIT,
	RESTART,
	OPEN_HANDLE,
	WRITE_CHANNEL,
	WRITE_CONTEXT,
	LOSE,
	TRIGGER,
	WRITE_TRACE,
	HONEST_TRACE,
	RECLAIM,
	RECENT,
	STEP_KINDS
};

static struct decoded d;

/* ---------------------------------------------------------------- honest --- */

static void honest_open(struct bench *b)
{
	CHECK(w_begin(&b->writes, trace_id(HONEST), HONEST_HANDLE, b->open_runs,
		      b->open_runs ? 0 : BS_RUN_FIRST, 100));
	w_record(&b->writes, BS_RECORD_DATA, "open", 4, b->now);
	w_end(&b->writes, 0);
	b->open_runs++;
}

static void honest_write(struct bench *b, uint32_t bytes)
{
	b->written++;
	b->now += MS;
	CHECK(w_trace(&b->writes, trace_id(HONEST + b->written), bytes,
		      b->now));
}

static void honest_check(struct bench *b, uint64_t trace, uint32_t records)
{
	struct bsn_slice s;

	if (bsn_collect(b->n, trace_id(trace), trace_id(trace), "fuzz", b->now,
			&s) == -ENOSPC)
		return;
	bsn_poll(b->n, b->now);
	CHECK_EQ(bsn_slice_info(b->n, trace_id(trace), &s), 0);
	if (s.flags & BSN_SLICE_STORE_FULL)
		return;
	/* That somebody lost something near, a liar can say. */
	CHECK_EQ(s.flags & ~(uint32_t)BSN_SLICE_MAYBE_LOSSY, BSN_SLICE_HELD);
	decode_slice(b->n, trace_id(trace), &d);
	CHECK_EQ(d.records, records);
}

/* ----------------------------------------------------------------- liar --- */

static uint8_t *segment_of(const struct bench *b)
{
	return b->thread->segment == BS_SEGMENT_NONE ? b->liar.arena
						     : w_segment(b->thread);
}

static void attach_liar(struct bench *b)
{
	writer_attach(&b->liar, b->n, b->now);
	b->liar_lives = true;
	for (uint32_t i = 0; i < THREADS; i++)
		b->lies[i] = writer_thread(&b->liar, i);
	b->thread = &b->lies[0];
}

static void write_bytes(struct input *in, uint8_t *to, uint32_t room)
{
	uint32_t at = take16(in) % room;
	uint32_t bytes = take8(in) % 64;

	for (uint32_t i = 0; i < bytes && at + i < room; i++)
		to[at + i] = take8(in);
}

static void write_entry(struct bench *b, struct input *in)
{
	uint32_t i = take16(in) % BS_SEGMENT_RUNS_MAX;
	struct bs_trace_id id = trace_id(take8(in) % (TRACES + 2));

	store_release(bs_directory(segment_of(b), i),
		      bs_entry(bs_fingerprint(id.hi, id.lo),
			       (uint32_t)take16(in) * 4 % SEG, take8(in) % 16));
}

static void write_run_header(struct bench *b, struct input *in)
{
	uint32_t at = take16(in) % (SEG - 32) & ~3u;
	struct bs_trace_id id = trace_id(take8(in) % (TRACES + 2));
	uint32_t handle = take8(in), seq = take8(in) % 8;

	w_put_header((void *)(segment_of(b) + at), id, handle, seq, 0,
		     take16(in));
}

static void take_segment(struct bench *b)
{
	struct bs_grant grant;

	if (!w_grab(b->thread, &grant) ||
	    (grant.segment & ~BS_GRANT_FRESH) >= b->liar.arena_bytes / SEG)
		return;
	w_settle(b->thread, &grant);
}

static void write_trace(struct bench *b, struct input *in)
{
	const struct bs_grant *g =
		&w_grants(&b->liar)->entries[w_grants(&b->liar)->tail %
					     BS_GRANT_RING_ENTRIES];
	uint64_t trace = take8(in) % TRACES;
	uint32_t bytes = take16(in) % 4000;

	/* The next grant may be a lie of its own. */
	if ((g->segment & ~BS_GRANT_FRESH) >= b->liar.arena_bytes / SEG)
		return;
	if (take8(in) % 2) {
		w_trace(b->thread, trace_id(trace), bytes, b->now);
		return;
	}
	if (w_begin(b->thread, trace_id(trace), take8(in), take8(in) % 8,
		    take8(in) % 16, 16 + 24)) {
		w_record(b->thread, BS_RECORD_DATA, "0123456789abcdef", 16,
			 b->now);
		w_end(b->thread, take8(in) % 16);
	}
}

static void restart_all(struct bench *b)
{
	struct held held = hold(b->n);

	bsn_free(b->n);
	b->n = test_node(&b->config);
	CHECK_EQ(bsn_adopt_keep(b->n, b->now, held.keep), 0);
	CHECK_EQ(bsn_adopt_store(b->n, b->now, held.store), 0);
	CHECK_EQ(bsn_client_adopt(b->n, b->honest.number, 1, "tester", b->now,
				  &b->honest.fds),
		 b->honest.number);
	if (b->liar_lives && bsn_client_adopt(b->n, b->liar.number, 2, "liar",
					      b->now, &b->liar.fds) < 0) {
		/* Its header is spoilt. */
		writer_close(&b->liar);
		b->liar_lives = false;
	}
	close(held.store);
	close(held.keep);
	bsn_poll(b->n, b->now);
	if (!b->liar_lives)
		attach_liar(b);
}

static void look_recent(struct bench *b)
{
	struct bs_trace_id ids[8];
	uint64_t found;

	bsn_recent(b->n, b->now, SECOND, "", ids, 8, &found);
}

static void peek(struct bench *b, uint64_t trace)
{
	static uint8_t buffer[1 << 18];
	static struct decoded seen;
	struct bsn_slice s;

	seen.bytes = buffer;
	seen.n_bytes = bsn_peek(b->n, trace_id(trace), b->now, buffer,
				sizeof(buffer), &s);
	CHECK(seen.n_bytes >= 0);
	if (!s.trimmed_bytes)
		decode(&seen);
}

static void step(struct bench *b, struct input *in)
{
	struct bsn_event events[8];
	struct bsn_slice s;
	uint64_t trace;

	switch (take8(in) % STEP_KINDS) {
	case WRITE_BYTES:
		write_bytes(in, segment_of(b), SEG);
		break;
	case WRITE_ENTRY:
		write_entry(b, in);
		break;
	case WRITE_RUN:
		write_run_header(b, in);
		break;
	case SET_RUNS:
		store_release(
			&((struct bs_segment_header *)segment_of(b))->runs,
			take16(in));
		break;
	case SET_HEADER:
		write_bytes(in, segment_of(b), 16);
		break;
	case TAKE_SEGMENT:
		take_segment(b);
		break;
	case SELECT_THREAD:
		b->thread = &b->lies[take8(in) % THREADS];
		break;
	case POLL:
		b->now += take8(in) * MS;
		bsn_poll(b->n, b->now);
		bsn_events(b->n, events, 8);
		bsn_events_done(b->n);
		break;
	case COLLECT:
		trace = take8(in) % TRACES;
		bsn_collect(b->n, trace_id(trace), trace_id(trace), "fuzz",
			    b->now, &s);
		break;
	case PEEK:
		peek(b, take8(in) % TRACES);
		break;
	case RELEASE:
		trace = take8(in);
		bsn_slice_release(b->n, trace_id(trace % TRACES), trace > 127,
				  b->now);
		break;
	case TRIM:
		trace = take8(in) % TRACES;
		if (!bsn_slice_info(b->n, trace_id(trace), &s))
			bsn_slice_trim(b->n, trace_id(trace), s.bytes / 2);
		break;
	case EXIT:
		bsn_client_exited(b->n, b->liar.number, b->now);
		writer_close(&b->liar);
		attach_liar(b);
		break;
	case RESTART:
		restart_all(b);
		break;
	case OPEN_HANDLE:
		trace = take8(in);
		((uint32_t *)(b->liar.channel + BS_CHANNEL_HANDLES_OFFSET))
			[bs_handle_place((uint32_t)trace)] = (uint32_t)trace;
		w_show(b->thread, take8(in));
		break;
	case WRITE_CHANNEL:
		write_bytes(in,
			    b->liar.channel + (take8(in) % 2
						       ? BS_CHANNEL_AREAS_OFFSET
						       : 0),
			    8192);
		break;
	case WRITE_CONTEXT:
		write_bytes(in, (uint8_t *)b->liar.context,
			    sizeof(*b->liar.context));
		break;
	case LOSE:
		w_lose(b->thread, trace_id(take8(in) % TRACES), take8(in), 8);
		break;
	case TRIGGER:
		b->liar.context->trigger_head += take8(in) % 4;
		write_bytes(in, (uint8_t *)b->liar.context->cells, 4096);
		break;
	case WRITE_TRACE:
		write_trace(b, in);
		break;
	case HONEST_TRACE:
		honest_write(b, take8(in));
		if (take8(in) % 4 == 0)
			honest_open(b);
		break;
	case RECLAIM:
		if (b->reclaims++ == RECLAIMS)
			break;
		for (uint32_t i = 0; i < 40; i++) {
			honest_write(b, BS_PAYLOAD_MAX);
			bsn_poll(b->n, b->now);
		}
		break;
	default:
		look_recent(b);
	}
}

/* ------------------------------------------------------------------ whole --- */

static void check_slices(struct bench *b)
{
	struct bsn_slice s;
	struct bsn_metrics m;

	bsn_poll(b->n, b->now);
	check_invariants(b->n);
	for (uint64_t i = 0; i < TRACES; i++) {
		if (bsn_slice_info(b->n, trace_id(i), &s))
			continue;
		CHECK(s.bytes <= b->config.trace_bytes_max);
		if (!s.trimmed_bytes)
			decode_slice(b->n, trace_id(i), &d);
		bsn_slice_release(b->n, trace_id(i), false, b->now);
	}
	honest_check(b, HONEST + b->written, 1);
	honest_check(b, HONEST, b->open_runs);
	bsn_get_metrics(b->n, &m);
	CHECK(m.entries_searched <=
	      m.passes * (m.pool_bytes / SEG) * BS_SEGMENT_RUNS_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	struct input in = {bytes, bytes + size};
	struct bench b = {.now = START};

	b.config = test_config(4 << 20);
	b.config.store_bytes = 1 << 20;
	b.config.trace_bytes_max = 128 << 10;
	b.config.tombstones = 1024;
	b.n = test_node(&b.config);
	writer_attach(&b.honest, b.n, b.now);
	b.writes = writer_thread(&b.honest, 0);
	b.writes.handle = HONEST_HANDLE;
	attach_liar(&b);
	w_show(&b.writes, HONEST_HANDLE);
	honest_open(&b);
	honest_write(&b, 100);
	for (uint32_t i = 0; i < STEPS && !is_over(&in); i++)
		step(&b, &in);
	check_slices(&b);
	bsn_client_exited(b.n, b.liar.number, b.now);
	bsn_client_exited(b.n, b.honest.number, b.now);
	bsn_poll(b.n, b.now);
	check_invariants(b.n);
	writer_close(&b.honest);
	writer_close(&b.liar);
	bsn_free(b.n);
	return 0;
}
