/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The node against a model of it. Processes write, lose, end and come; their
 * threads leave segments to each other; traces
 * are collected and released; the daemon is restarted, or killed at any of its
 * stores (kill.h); all at random. The model knows what was written, in which
 * segment, and which handles are open; nothing of how the node works:
 *
 *   segments are reclaimed in the order of sealing, and only sealed ones
 *   a trace has all its runs of segments that are there, and of handles that
 *     were open when theirs was reclaimed; none of others; none twice
 *   if one is missing, it says EVICTED; if one was lost, LOSSY; else neither
 *   a slice has what was there when it was collected, and all that came since
 *
 * Each segment begins with a trace of its own, which tells whether it is there.
 *
 * test_node_model [episodes [seed]]
 */
#include <errno.h>
#include <sys/wait.h>

#include "kill.h"
#include "random.h"
#include "writer.h"

#define WRITERS 3
#define THREADS 2
#define TRACES 60u
#define HANDLES 30
#define RUNS_MAX 60000u
#define SEGMENTS_MAX 8000u
#define MARKERS (1ull << 32)
#define PARKED_MAX 8u
#define STEPS 1500
#define DEAD_MAX 200

/* A run is gone for good, may be kept, or is kept. */
enum fate {
	THERE, /* as its segment is */
	KEPT,
	MAYBE,
	GONE
};

struct mrun {
	uint32_t segment, trace;
	int handle; /* in model.handles, or -1: it is closed */
	enum fate fate;
	uint32_t next; /* of the trace */
	bool in_slice; /* of the trace's slice it must be */
};

struct mtrace {
	uint32_t runs; /* the latest; NONE */
	bool lost, collected, exact;
	bool was_collected; /* since the last look at all segments */
	uint32_t written, open;
};

#define NONE UINT32_MAX

struct msegment {
	uint64_t sealed; /* or parked, before the poll of that number; 0: not yet */
	bool gone;
	bool twice; /* its reclaim was begun by one that was killed */
};

struct mhandle {
	int writer, thread;
	uint32_t trace, number, seq;
	bool listed, lossy;
};

struct mwriter {
	struct writer w;
	struct wthread t[THREADS];
	uint32_t segment[THREADS]; /* in model.segments, or NONE */
	struct bs_grant grabbed[THREADS];
	bool has_grabbed[THREADS];
	struct wthread parked[PARKED_MAX];
	uint32_t parked_segment[PARKED_MAX]; /* in model.segments */
	uint32_t n_parked;
	uint32_t unsettled;
	uint32_t handles_drawn[THREADS];
	bool live, exits;
};

static struct {
	struct bsn_config config;
	struct bsn *n;
	uint64_t now, step, polls;
	struct mwriter w[WRITERS];
	struct writer dead[DEAD_MAX]; /* whose segments are there still */
	int n_dead;
	struct mtrace traces[TRACES];
	struct mhandle handles[HANDLES];
	int n_handles;
	struct mrun runs[RUNS_MAX];
	uint32_t n_runs;
	struct msegment segments[SEGMENTS_MAX];
	uint32_t n_segments;
	uint64_t kills_here; /* in this episode */
	uint64_t kills, restarts, checks, evicted, kept;
} model;

static struct decoded d;

/* ---------------------------------------------------------------- writing --- */

static struct bs_trace_id marker(uint32_t segment)
{
	return trace_id(MARKERS + segment);
}

static void took(struct mwriter *w, uint32_t thread)
{
	struct wthread *t = &w->t[thread];
	uint32_t old = w->segment[thread];
	uint32_t handle = t->slot << BS_HANDLE_COUNT_BITS |
			  BS_HANDLE_COUNT_MASK;

	CHECK(model.n_segments < SEGMENTS_MAX);
	if (old != NONE)
		model.segments[old].sealed = model.polls;
	w->segment[thread] = model.n_segments;
	memset(&model.segments[model.n_segments], 0, sizeof(*model.segments));
	CHECK(w_begin(t, marker(model.n_segments), handle, 0, BS_RUN_FIRST, 8));
	w_record(t, BS_RECORD_DATA, NULL, 0, model.now);
	w_end(t, BS_RUN_LAST);
	model.n_segments++;
}

/* The thread has room for so much, in a segment that the model knows. */
static bool has_room(struct mwriter *w, uint32_t thread, uint32_t bytes)
{
	struct wthread *t = &w->t[thread];

	if (w->has_grabbed[thread])
		return false;
	if (t->segment != BS_SEGMENT_NONE &&
	    t->cursor + 32 + bytes + 8 <= SEG - 8 * t->runs)
		return true;
	if (!w_take_segment(t))
		return false;
	took(w, thread);
	return true;
}

/* One run of one record, which says which it is. False: it was lost. */
static bool write_run(struct mwriter *w, uint32_t thread, uint32_t trace,
		      uint32_t handle, uint32_t seq, uint32_t flags,
		      uint32_t bytes, int open)
{
	static uint8_t payload[BS_PAYLOAD_MAX];
	struct wthread *t = &w->t[thread];
	struct mtrace *m = &model.traces[trace];
	struct mrun *r = &model.runs[model.n_runs];
	uint32_t serial = model.n_runs;

	if (!has_room(w, thread, bytes + 24)) {
		w_lose(t, trace_id(trace + 1), flags, bytes);
		m->lost = true;
		return false;
	}
	CHECK(model.n_runs < RUNS_MAX);
	CHECK(w_begin(t, trace_id(trace + 1), handle, seq,
		      flags & (BS_RUN_FIRST | BS_RUN_LOSSY), bytes + 24));
	memcpy(payload, &serial, sizeof(serial));
	w_record(t, BS_RECORD_DATA, payload, bytes, model.now);
	w_end(t, flags & BS_RUN_LAST);
	*r = (struct mrun){
		.segment = w->segment[thread],
		.trace = trace,
		.handle = open,
		.next = m->runs,
		.in_slice = m->collected,
	};
	m->runs = model.n_runs++;
	m->written++;
	return true;
}

static void write_whole(void)
{
	struct mwriter *w = &model.w[below(WRITERS)];
	uint32_t thread = below(THREADS);
	uint32_t handle;

	if (!w->live)
		return;
	handle = w->t[thread].slot << BS_HANDLE_COUNT_BITS |
		 ++w->handles_drawn[thread];
	write_run(w, thread, below(TRACES), handle, 0,
		  BS_RUN_FIRST | BS_RUN_LAST, 8 + below(9000), -1);
}

/* -------------------------------------------------------------- handles --- */

static uint32_t *place_of(const struct mhandle *h)
{
	return (uint32_t *)(model.w[h->writer].w.channel +
			    BS_CHANNEL_HANDLES_OFFSET) +
	       bs_handle_place(h->number);
}

static void show(const struct mhandle *h, bool open)
{
	if (h->listed)
		WRITE_ONCE(*place_of(h), open ? h->number : 0);
	else
		w_show(&model.w[h->writer].t[h->thread], open ? h->number : 0);
}

static void open_handle(void)
{
	struct mhandle *h = &model.handles[model.n_handles];
	struct mwriter *w;

	if (model.n_handles == HANDLES)
		return;
	h->writer = (int)below(WRITERS);
	h->thread = (int)below(THREADS);
	h->trace = below(TRACES);
	h->seq = 0;
	h->lossy = false;
	h->listed = below(2);
	w = &model.w[h->writer];
	if (!w->live)
		return;
	for (int i = 0; i < model.n_handles && !h->listed; i++)
		h->listed = model.handles[i].writer == h->writer &&
			    model.handles[i].thread == h->thread &&
			    !model.handles[i].listed;
	h->number = w->t[h->thread].slot << BS_HANDLE_COUNT_BITS |
		    ++w->handles_drawn[h->thread];
	show(h, true);
	if (!write_run(w, (uint32_t)h->thread, h->trace, h->number, h->seq++,
		       BS_RUN_FIRST, 8 + below(100), model.n_handles)) {
		show(h, false);
		return;
	}
	model.traces[h->trace].open++;
	model.n_handles++;
}

/* Its runs are kept as long as it is open, and may be for a while after. */
static void forget_handle(int i)
{
	int last = --model.n_handles;

	for (uint32_t k = 0; k < model.n_runs; k++) {
		struct mrun *r = &model.runs[k];

		if (r->handle == i) {
			r->handle = -1;
			if (r->fate == KEPT || r->fate == THERE)
				r->fate = MAYBE;
		} else if (r->handle == last) {
			r->handle = i;
		}
	}
	model.traces[model.handles[i].trace].open--;
	model.handles[i] = model.handles[last];
}

static void use_handle(bool close)
{
	int i = model.n_handles ? (int)below((uint32_t)model.n_handles) : -1;
	struct mhandle *h = &model.handles[i < 0 ? 0 : i];

	if (i < 0)
		return;
	/* A last run that is lost would leave it open. */
	if (close && !has_room(&model.w[h->writer], (uint32_t)h->thread, 200))
		return;
	if (!close && h->seq > 30)
		return;
	h->lossy |= !write_run(&model.w[h->writer], (uint32_t)h->thread,
			       h->trace, h->number, h->seq++,
			       (close ? BS_RUN_LAST : 0) |
				       (h->lossy ? BS_RUN_LOSSY : 0),
			       8 + below(100), i);
	if (!close)
		return;
	show(h, false);
	forget_handle(i);
}

/* ------------------------------------------------------------- processes --- */

static void attach(struct mwriter *w)
{
	memset(w, 0, sizeof(*w));
	writer_attach(&w->w, model.n, model.now);
	for (uint32_t i = 0; i < THREADS; i++) {
		w->t[i] = writer_thread(&w->w, i);
		w->segment[i] = NONE;
	}
	w->live = true;
}

static void adopt(const struct writer *w)
{
	CHECK_EQ(bsn_client_adopt(model.n, w->number, 1234, "tester", model.now,
				  &w->fds),
		 w->number);
}

static void adopt_all(const struct held *held)
{
	model.n = test_node(&model.config);
	CHECK_EQ(bsn_adopt_keep(model.n, model.now, held->keep), 0);
	CHECK_EQ(bsn_adopt_store(model.n, model.now, held->store), 0);
	for (int i = 0; i < model.n_dead; i++) {
		adopt(&model.dead[i]);
		CHECK_EQ(bsn_client_exited(model.n, model.dead[i].number,
					   model.now),
			 0);
	}
	for (int i = 0; i < WRITERS; i++)
		adopt(&model.w[i].w);
}

/* What has nothing left in the pool is forgotten. */
static void take_events(void)
{
	struct bsn_event events[64];
	int got = bsn_events(model.n, events, 64);

	for (int i = 0; i < got; i++) {
		for (int k = 0; k < model.n_dead; k++) {
			if (events[i].kind != BSN_EVENT_CLIENT_DRAINED ||
			    (int)events[i].client != model.dead[k].number)
				continue;
			writer_close(&model.dead[k]);
			model.dead[k] = model.dead[--model.n_dead];
			break;
		}
	}
	bsn_events_done(model.n);
}

/* Its threads write no more. */
static void stop(int writer)
{
	struct mwriter *w = &model.w[writer];

	for (int i = model.n_handles; i-- > 0;) {
		if (model.handles[i].writer == writer)
			forget_handle(i);
	}
	for (uint32_t i = 0; i < THREADS; i++) {
		if (w->segment[i] != NONE)
			model.segments[w->segment[i]].sealed = model.polls;
		w->segment[i] = NONE;
		w->has_grabbed[i] = false;
	}
	w->live = false;
}

static void come_again(int writer)
{
	struct mwriter *w = &model.w[writer];

	CHECK_EQ(bsn_client_exited(model.n, w->w.number, model.now), 0);
	CHECK(model.n_dead < DEAD_MAX);
	model.dead[model.n_dead++] = w->w;
	attach(w);
}

static void grab(void)
{
	struct mwriter *w = &model.w[below(WRITERS)];
	uint32_t i = below(THREADS);

	if (!w->live || w->has_grabbed[i])
		return;
	w->has_grabbed[i] = w_grab(&w->t[i], &w->grabbed[i]);
}

static void settle(void)
{
	struct mwriter *w = &model.w[below(WRITERS)];
	uint32_t i = below(THREADS);

	if (!w->has_grabbed[i])
		return;
	w->has_grabbed[i] = false;
	w_settle(&w->t[i], &w->grabbed[i]);
	took(w, i);
}

/* It is as old as that from here on, and may be reclaimed. */
static void park(void)
{
	struct mwriter *w = &model.w[below(WRITERS)];
	uint32_t i = below(THREADS), at = w->n_parked;

	if (!w->live || w->segment[i] == NONE || at == PARKED_MAX)
		return;
	model.segments[w->segment[i]].sealed = model.polls;
	w->parked_segment[at] = w->segment[i];
	w->segment[i] = NONE;
	w_park(&w->t[i], &w->parked[at]);
	w->n_parked++;
}

/* Any thread does, in any that is parked, and writes there. */
static void go_on(void)
{
	struct mwriter *w = &model.w[below(WRITERS)];
	uint32_t i = below(THREADS), at, segment;
	struct wthread place;

	if (!w->live || !w->n_parked || w->has_grabbed[i])
		return;
	at = below(w->n_parked);
	segment = w->parked_segment[at];
	place = w->parked[at];
	if (place.cursor + 200 > SEG - 8 * place.runs)
		return;
	w->n_parked--;
	w->parked[at] = w->parked[w->n_parked];
	w->parked_segment[at] = w->parked_segment[w->n_parked];
	if (!w_go_on(&w->t[i], &place))
		return;
	CHECK(!model.segments[segment].gone);
	if (w->segment[i] != NONE)
		model.segments[w->segment[i]].sealed = model.polls;
	model.segments[segment].sealed = 0;
	w->segment[i] = segment;
	write_run(w, i, below(TRACES),
		  w->t[i].slot << BS_HANDLE_COUNT_BITS | ++w->handles_drawn[i],
		  0, BS_RUN_FIRST | BS_RUN_LAST, 8, -1);
}

static void poll_node(void)
{
	bsn_poll(model.n, model.now);
	model.polls++;
}

/* --------------------------------------------------------------- checking --- */

static void look(struct bs_trace_id id, struct bsn_slice *s)
{
	static uint8_t buffer[1 << 20];
	static struct decoded peeked;

	peeked.bytes = buffer;
	peeked.n_bytes =
		bsn_peek(model.n, id, model.now, buffer, sizeof(buffer), s);
	CHECK(peeked.n_bytes < (int64_t)sizeof(buffer) / 2);
	decode(&peeked);
	d.n_pieces = peeked.n_pieces;
	memcpy(d.pieces, peeked.pieces, sizeof(d.pieces));
	memcpy(d.content, peeked.content, sizeof(d.content));
}

/* Which segments are gone; in the order of sealing. */
static void look_at_segments(void)
{
	uint64_t oldest = UINT64_MAX, youngest_gone = 0;
	uint32_t twice = 0;

	for (uint32_t i = 0; i < model.n_segments; i++) {
		struct msegment *g = &model.segments[i];
		struct bsn_slice s;

		if (g->gone)
			continue;
		look(marker(i), &s);
		g->twice = s.flags == (BSN_SLICE_HELD | EVICTED_BY_FINGERPRINT);
		twice += g->twice;
		g->gone = s.flags == EVICTED_BY_FINGERPRINT;
		if (!g->gone && !g->twice)
			CHECK_EQ(s.flags, BSN_SLICE_HELD);
		if (g->gone) {
			CHECK(g->sealed);
			if (g->sealed > youngest_gone)
				youngest_gone = g->sealed;
			model.evicted++;
		} else if (g->sealed && g->sealed < oldest) {
			oldest = g->sealed;
		}
	}
	/* Between two polls, the node sees them in another order. */
	CHECK(youngest_gone <= oldest);
	CHECK(twice <= model.kills);
	for (uint32_t k = 0; k < model.n_runs; k++) {
		struct mrun *r = &model.runs[k];

		if (!model.segments[r->segment].gone)
			continue;
		if (r->fate == THERE)
			r->fate = r->handle >= 0 ? KEPT : GONE;
		/* What a slice has is not kept. */
		if (r->fate == KEPT && model.traces[r->trace].was_collected)
			r->fate = MAYBE;
	}
	for (uint32_t i = 0; i < TRACES; i++)
		model.traces[i].was_collected = model.traces[i].collected;
}

/* Which runs of the trace are there, by d; each once. */
static uint32_t find_runs(uint32_t trace, bool *found)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < d.n_pieces; i++) {
		for (uint32_t at = 0; d.pieces[i].kind == BS_PIECE_RUN &&
				      at < d.pieces[i].bytes;) {
			struct bs_record_header h;
			uint32_t serial, k;

			memcpy(&h, d.content[i] + at, sizeof(h));
			memcpy(&serial, d.content[i] + at + sizeof(h),
			       sizeof(serial));
			CHECK(serial < model.n_runs);
			for (k = model.traces[trace].runs; k != serial;
			     k = model.runs[k].next)
				CHECK(k != NONE);
			CHECK(!found[serial]);
			found[serial] = true;
			count++;
			at += ((uint32_t)sizeof(h) + h.payload_bytes + 3) / 4 *
			      4;
		}
	}
	return count;
}

static void check_flags(const struct mtrace *m, uint32_t flags,
			uint32_t missing, bool may_say)
{
	CHECK_EQ(flags & ~(uint32_t)(BSN_SLICE_HELD | EVICTED_BY_FINGERPRINT |
				     BSN_SLICE_LOSSY),
		 0);
	CHECK_EQ(!!(flags & BSN_SLICE_LOSSY), m->lost);
	if (missing)
		CHECK(flags & BSN_SLICE_EVICTED);
	else if (!may_say)
		CHECK(!(flags & BSN_SLICE_EVICTED));
}

static bool found[RUNS_MAX];

/* Of a trace that is not collected. */
static void check_trace(uint32_t trace)
{
	const struct mtrace *m = &model.traces[trace];
	struct bsn_slice s;
	uint32_t missing = 0;
	bool twice = false;

	look(trace_id(trace + 1), &s);
	find_runs(trace, found);
	for (uint32_t k = m->runs; k != NONE; k = model.runs[k].next) {
		const struct mrun *r = &model.runs[k];

		if (r->fate == THERE || r->fate == KEPT ||
		    (r->fate == MAYBE && !model.segments[r->segment].gone))
			CHECK(found[k]);
		CHECK(!(found[k] && r->fate == GONE));
		missing += !found[k];
		/* Or that of the copy's, in the keep arena. */
		twice |= model.segments[r->segment].twice || r->fate == MAYBE;
		model.kept += r->fate == KEPT;
		found[k] = false;
	}
	check_flags(m, s.flags, missing, twice);
}

static void check_slice(uint32_t trace)
{
	const struct mtrace *m = &model.traces[trace];
	struct bsn_slice s;
	uint32_t missing = 0;

	CHECK_EQ(bsn_slice_info(model.n, trace_id(trace + 1), &s), 0);
	decode_slice(model.n, trace_id(trace + 1), &d);
	find_runs(trace, found);
	for (uint32_t k = m->runs; k != NONE; k = model.runs[k].next) {
		CHECK(found[k] || !model.runs[k].in_slice);
		missing += !found[k];
		found[k] = false;
	}
	/* What it said when it was collected, it says for ever. */
	check_flags(m, s.flags, missing, true);
	if (m->exact) {
		CHECK_EQ(missing, 0);
		CHECK(!(s.flags & BSN_SLICE_EVICTED));
		if (!m->lost)
			CHECK_EQ(s.open_handles, m->open);
	}
}

static void check_everything(void)
{
	struct bsn_metrics m;
	uint32_t active = 0;

	poll_node();
	check_invariants(model.n);
	look_at_segments();
	for (uint32_t i = 0; i < TRACES; i++) {
		if (model.traces[i].collected)
			check_slice(i);
		else
			check_trace(i);
	}
	for (int i = 0; i < WRITERS; i++) {
		for (uint32_t k = 0; k < THREADS; k++)
			active += (model.w[i].segment[k] != NONE) +
				  model.w[i].has_grabbed[k];
	}
	bsn_get_metrics(model.n, &m);
	CHECK_EQ(m.corrupt, 0);
	/* One that was killed between taking a grant back and noting it leaves
	 * it to nobody, until the process ends. */
	CHECK(m.active_bytes >= active * SEG);
	CHECK(m.active_bytes <= (active + model.kills_here) * SEG);
	CHECK_EQ(m.clients, WRITERS);
	model.checks++;
}

/* ------------------------------------------------------------------ steps --- */

static void note_collected(uint32_t trace)
{
	struct mtrace *m = &model.traces[trace];
	struct bsn_slice s;

	poll_node();
	CHECK_EQ(bsn_slice_info(model.n, trace_id(trace + 1), &s), 0);
	m->collected = m->was_collected = true;
	m->exact = !(s.flags & BSN_SLICE_EVICTED);
	decode_slice(model.n, trace_id(trace + 1), &d);
	find_runs(trace, found);
	for (uint32_t k = m->runs; k != NONE; k = model.runs[k].next) {
		model.runs[k].in_slice = found[k];
		found[k] = false;
	}
}

static void collect_one(uint32_t trace)
{
	struct bsn_slice s;

	collect(model.n, trace_id(trace + 1), model.now, &s);
}

static void release_one(uint32_t trace)
{
	bsn_slice_release(model.n, trace_id(trace + 1), false, model.now);
}

static void restart_node(void)
{
	struct held held = hold(model.n);

	bsn_free(model.n);
	if (below(4) == 0)
		model.config.reclaim_percent = 60 + below(31);
	adopt_all(&held);
	close(held.store);
	close(held.keep);
	model.restarts++;
}

enum act {
	POLL,
	COLLECT,
	RELEASE,
	EXIT,
	ATTACH,
	ADOPT,
	ACTS
};

static void act(enum act what, uint32_t trace, int writer,
		const struct held *held)
{
	struct bsn_client_fds fds;

	switch (what) {
	case COLLECT:
		collect_one(trace);
		break;
	case RELEASE:
		release_one(trace);
		break;
	case EXIT:
		bsn_client_exited(model.n, model.w[writer].w.number, model.now);
		break;
	case ATTACH:
		bsn_client_add(model.n, 1, "short", model.now, &fds);
		break;
	case ADOPT:
		adopt_all(held);
		break;
	default:
		break;
	}
	bsn_poll(model.n, model.now);
}

/* The daemon is killed at a store of what it does; its successor goes on. */
static void kill_node(void)
{
	enum act what = (enum act)below(ACTS);
	uint32_t trace = below(TRACES);
	int writer = (int)below(WRITERS), status;
	uint64_t store = below(below(2) ? 50 : 600);
	struct held held = hold(model.n);
	struct bsn_slice s;
	pid_t child;

	if (what == EXIT)
		stop(writer);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		kill_arm(store);
		act(what, trace, writer, &held);
		_exit(0);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status) &&
	      (!WEXITSTATUS(status) || WEXITSTATUS(status) == KILLED));
	bsn_free(model.n);
	adopt_all(&held);
	close(held.store);
	close(held.keep);
	model.kills++;
	model.kills_here++;
	/* What it was about to do may be done, or not. */
	if (what == EXIT)
		come_again(writer);
	poll_node();
	if (what == COLLECT && !model.traces[trace].collected &&
	    !bsn_slice_info(model.n, trace_id(trace + 1), &s))
		note_collected(trace);
	if (what == RELEASE &&
	    bsn_slice_info(model.n, trace_id(trace + 1), &s) == -ENOENT)
		model.traces[trace].collected = false;
}

static void step(void)
{
	uint32_t trace = below(TRACES);
	int writer = (int)below(WRITERS);

	model.now += below(3) * MS;
	model.step++;
	switch (below(43)) {
	case 0:
	case 1:
		open_handle();
		break;
	case 2:
	case 3:
	case 4:
		use_handle(false);
		break;
	case 5:
		use_handle(true);
		break;
	case 6:
		grab();
		break;
	case 7:
	case 8:
		settle();
		break;
	case 9:
		if (model.traces[trace].collected)
			break;
		collect_one(trace);
		note_collected(trace);
		break;
	case 10:
		release_one(trace);
		model.traces[trace].collected = false;
		break;
	case 11:
		if (below(8))
			break;
		stop(writer);
		come_again(writer);
		break;
	case 12:
		if (below(3) == 0)
			restart_node();
		break;
	case 13:
		kill_node();
		break;
	case 40:
		park();
		break;
	case 41:
	case 42:
		go_on();
		break;
	case 14:
	case 15:
	case 16:
	case 17:
		poll_node();
		take_events();
		break;
	default:
		for (uint32_t i = below(6); i; i--)
			write_whole();
	}
	if (model.step % 50 == 0)
		check_everything();
}

static void episode(uint64_t seed)
{
	uint64_t kills = model.kills, restarts = model.restarts;
	uint64_t checks = model.checks, evicted = model.evicted;
	uint64_t kept = model.kept;

	random_seed(seed);
	memset(&model, 0, sizeof(model));
	model.kills = kills;
	model.restarts = restarts;
	model.checks = checks;
	model.evicted = evicted;
	model.kept = kept;
	model.config = test_config(6 << 20);
	model.config.tombstones = 65536;
	model.config.clients_max = 1000;
	model.now = START;
	model.polls = 1;
	model.n = test_node(&model.config);
	for (uint32_t i = 0; i < TRACES; i++)
		model.traces[i].runs = NONE;
	for (int i = 0; i < WRITERS; i++)
		attach(&model.w[i]);
	for (uint32_t i = 0; i < STEPS; i++)
		step();
	for (int i = 0; i < WRITERS; i++)
		writer_close(&model.w[i].w);
	while (model.n_dead)
		writer_close(&model.dead[--model.n_dead]);
	bsn_free(model.n);
}

int main(int argc, char **argv)
{
	struct amount a = amount_of(argc, argv, 8);

	for (uint64_t i = 0; i < a.much; i++) {
		printf("episode of seed %ju\n", (uintmax_t)(a.seed + i));
		fflush(stdout);
		episode(a.seed + i);
	}
	printf("%ju kills, %ju restarts, %ju checks, %ju segments reclaimed, "
	       "%ju looks at kept runs\n",
	       (uintmax_t)model.kills, (uintmax_t)model.restarts,
	       (uintmax_t)model.checks, (uintmax_t)model.evicted,
	       (uintmax_t)model.kept);
	free(d.bytes);
	return 0;
}
