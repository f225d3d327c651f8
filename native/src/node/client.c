/* SPDX-License-Identifier: Apache-2.0 */
/* One process: its memfds, its mappings, its end. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hash.h"
#include "internal.h"

struct client *client_find(const struct bsn *n, uint32_t number)
{
	for (uint32_t i = 0; i < n->n_clients; i++) {
		if (n->clients[i]->number == number)
			return n->clients[i];
	}
	return NULL;
}

void client_free(struct client *c)
{
	if (c->arena)
		munmap(c->arena, c->arena_bytes);
	if (c->channel)
		munmap(c->channel, BS_CHANNEL_BYTES);
	if (c->context)
		munmap(c->context, sizeof(*c->context));
	free(c->segments);
	free(c->progress);
	free(c);
}

/* A thread may sleep on its doorbell: unmapped once none does. */
static void client_retire(struct bsn *n, struct client *c)
{
	if (!n->waiting) {
		client_free(c);
		return;
	}
	c->retired = n->retired;
	n->retired = c;
}

void client_release_retired(struct bsn *n)
{
	while (n->retired) {
		struct client *c = n->retired;

		n->retired = c->retired;
		client_free(c);
	}
}

/* For BSN_EVENT_CLIENT_DRAINED. */
static void drained_push(struct bsn *n, uint32_t number)
{
	if (n->n_drained == n->drained_room) {
		uint32_t room = n->drained_room ? 2 * n->drained_room : 16;
		uint32_t *drained =
			realloc(n->drained, room * sizeof(*drained));

		if (!drained)
			return;
		n->drained = drained;
		n->drained_room = room;
	}
	n->drained[n->n_drained++] = number;
}

/* Forget a process that is gone once its last segment is. */
void client_check_drained(struct bsn *n, struct client *c)
{
	if (c->live || c->frames || c == &n->keep)
		return;
	for (uint32_t i = 0; i < n->n_clients; i++) {
		if (n->clients[i] != c)
			continue;
		n->clients[i] = n->clients[--n->n_clients];
		break;
	}
	drained_push(n, c->number);
	metrics_add_client(c, &n->counts);
	n->counts.triggers_lost += drain_triggers_left(c);
	if (c->untied_to_ns > n->tombs->gone_untied_ns)
		n->tombs->gone_untied_ns = c->untied_to_ns;
	client_retire(n, c);
}

static struct client *client_new(struct bsn *n, int pid, const char *service,
				 uint64_t arena_bytes)
{
	struct client *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->pid = pid;
	strncpy(c->service, service ? service : "", sizeof(c->service) - 1);
	c->arena_bytes = arena_bytes;
	c->n_segments = (uint32_t)(arena_bytes / SEGMENT);
	c->segments_free = NONE;
	c->rate_ns = c->drained_ns = n->now_ns;
	list_init(&c->backed);
	list_init(&c->unclaimed);
	list_init(&c->sealed);
	for (uint32_t i = 0; i < BS_THREAD_SLOTS; i++)
		c->threads[i].frame = NONE;
	c->segments = calloc(c->n_segments, sizeof(*c->segments));
	if (!c->segments) {
		free(c);
		return NULL;
	}
	return c;
}

static int client_map(struct client *c, const struct bsn_client_fds *fds)
{
	c->arena = map_shared(fds->arena, c->arena_bytes);
	c->channel = map_shared(fds->channel, BS_CHANNEL_BYTES);
	c->context = map_shared(fds->context, sizeof(*c->context));
	return c->arena && c->channel && c->context ? 0 : -ENOMEM;
}

/* Its threads read these whenever a trace begins, or comes in. */
static void fill_sampling(const struct bsn *n, const struct client *c)
{
	struct bs_channel_header *h = header_of(c);

	WRITE_ONCE(h->percentage_threshold, n->config.percentage_threshold);
	WRITE_ONCE(h->trust_incoming, n->config.trust_incoming);
}

static void fill_header(const struct bsn *n, const struct client *c)
{
	struct bs_channel_header *h = header_of(c);

	h->version = BS_ABI_VERSION;
	h->arena_bytes = c->arena_bytes;
	h->clock_is_counter = n->config.clock_is_counter;
	h->ticks_per_s = n->config.ticks_per_s;
	h->node_id = n->node_id;
	h->cluster_seed = n->config.cluster_seed;
	fill_sampling(n, c);
	h->client_number = c->number;
	memcpy(h->node_name, n->config.node_name, sizeof(h->node_name));
	h->magic = BS_ABI_MAGIC;
}

static void fill_context(const struct client *c)
{
	struct bs_context_segment *x = c->context;

	x->version = BS_ABI_VERSION;
	x->thread_slots = BS_THREAD_SLOTS;
	x->trigger_cells = BS_TRIGGER_CELLS;
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		x->cells[i].seq = i;
	x->magic = BS_ABI_MAGIC;
}

/* Room for one more: the process that has been gone longest gives up what is
 * left of it. */
static bool make_room(struct bsn *n)
{
	struct client *oldest = NULL;
	uint32_t before = n->n_clients;

	if (n->n_clients < n->config.clients_max)
		return true;
	for (uint32_t i = 0; i < n->n_clients; i++) {
		struct client *c = n->clients[i];

		if (!c->live && (!oldest || c->exited_ns < oldest->exited_ns))
			oldest = c;
	}
	if (!oldest)
		return false;
	pool_drop_client(n, oldest);
	return n->n_clients < before;
}

static void close_fds(struct bsn_client_fds *fds)
{
	if (fds->arena >= 0)
		close(fds->arena);
	if (fds->channel >= 0)
		close(fds->channel);
	if (fds->context >= 0)
		close(fds->context);
	fds->arena = fds->channel = fds->context = -1;
}

int bsn_client_add(struct bsn *n, int pid, const char *service, uint64_t now_ns,
		   struct bsn_client_fds *fds)
{
	struct bsn_client_fds made = {-1, -1, -1};
	struct client *c = NULL;
	int result;

	pthread_mutex_lock(&n->lock);
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	if (!make_room(n)) {
		result = -ENOSPC;
		goto fail;
	}
	c = client_new(n, pid, service, n->config.arena_bytes);
	if (!c) {
		result = -ENOMEM;
		goto fail;
	}
	made.arena = result = memfd_sealed("backsight-arena", c->arena_bytes);
	if (result < 0)
		goto fail;
	made.channel = result =
		memfd_sealed("backsight-channel", BS_CHANNEL_BYTES);
	if (result < 0)
		goto fail;
	made.context = result =
		memfd_sealed("backsight-context", sizeof(*c->context));
	if (result < 0)
		goto fail;
	result = client_map(c, &made);
	if (result)
		goto fail;
	c->number = store_next_client(n);
	c->live = true;
	fill_header(n, c);
	fill_context(c);
	n->clients[n->n_clients++] = c;
	pool_grant_first(n, c);
	*fds = made;
	result = (int)c->number;
	pthread_mutex_unlock(&n->lock);
	bsn_wake(n); /* a thread that sleeps does not listen to it yet */
	return result;
fail:
	close_fds(&made);
	if (c)
		client_free(c);
	pthread_mutex_unlock(&n->lock);
	return result;
}

void bsn_set_sampling(struct bsn *n, uint64_t percentage_threshold,
		      bool trust_incoming)
{
	pthread_mutex_lock(&n->lock);
	n->config.percentage_threshold = percentage_threshold;
	n->config.trust_incoming = trust_incoming;
	for (uint32_t i = 0; i < n->n_clients; i++)
		fill_sampling(n, n->clients[i]);
	pthread_mutex_unlock(&n->lock);
}

/* ------------------------------------------------------------ adoption --- */

static int adopt_check(struct client *c, const struct bsn_client_fds *fds)
{
	uint64_t arena, channel, context;
	int err;

	if (memfd_check(fds->arena, &arena) ||
	    memfd_check(fds->channel, &channel) ||
	    memfd_check(fds->context, &context))
		return -EPROTO;
	if (arena != c->arena_bytes || channel != BS_CHANNEL_BYTES ||
	    context != sizeof(*c->context))
		return -EPROTO;
	err = client_map(c, fds);
	if (err)
		return err;
	if (READ_ONCE(header_of(c)->magic) != BS_ABI_MAGIC ||
	    READ_ONCE(header_of(c)->version) != BS_ABI_VERSION ||
	    READ_ONCE(header_of(c)->arena_bytes) != c->arena_bytes ||
	    READ_ONCE(c->context->magic) != BS_ABI_MAGIC ||
	    READ_ONCE(c->context->version) != BS_ABI_VERSION)
		return -EPROTO;
	return 0;
}

/* Frames for the segments that have memory; *found: their numbers. */
static uint32_t adopt_segments(struct bsn *n, struct client *c, int fd,
			       uint32_t *found)
{
	uint32_t count = 0;

	c->segments_fresh = c->n_segments;
	for (uint32_t i = 0; i < c->n_segments; i++) {
		const struct bs_segment_header *h =
			(const void *)(c->arena + (uint64_t)i * SEGMENT);
		struct segment *s = &c->segments[i];
		struct frame *f = NULL;
		uint64_t granted;
		uint32_t slot;

		s->touched = 1;
		if (segment_has_memory(fd, (uint64_t)i * SEGMENT)) {
			s->generation = READ_ONCE(h->generation);
			/* Also over a budget that has shrunk: somebody may write
			 * there. It is reclaimed as all else is. */
			if (READ_ONCE(h->magic) == BS_ABI_MAGIC &&
			    READ_ONCE(h->segment) == i && s->generation &&
			    !frames_reserve(n, 1))
				f = frame_new(n, c, i, FRAME_ACTIVE);
			if (!f)
				(void)madvise(c->arena + (uint64_t)i * SEGMENT,
					      SEGMENT, MADV_REMOVE);
		}
		if (!f) {
			s->frame = c->segments_free;
			c->segments_free = i;
			continue;
		}
		granted = READ_ONCE(h->granted_ns);
		slot = READ_ONCE(h->slot);
		f->granted_ns = granted < n->now_ns ? granted : n->now_ns;
		f->slot = slot < BS_THREAD_SLOTS ? (uint16_t)slot
						 : SLOT_UNKNOWN;
		f->open_copied = NONE;
		found[count++] = frame_number(n, f);
	}
	return count;
}

/* Those that wait in the ring. */
static void adopt_stock(struct bsn *n, struct client *c)
{
	struct bs_grant_ring *ring = grants_of(c);
	uint32_t tail = load_acquire(&ring->tail);
	uint32_t head = READ_ONCE(ring->head);

	if (head - tail > BS_GRANT_RING_ENTRIES) {
		n->counts.corrupt++;
		head = tail;
	}
	c->grant_head = c->grant_tail = tail;
	for (; c->grant_head != head; c->grant_head++) {
		uint32_t at = c->grant_head % BS_GRANT_RING_ENTRIES;
		uint32_t segment = READ_ONCE(ring->entries[at].segment);
		uint16_t generation = READ_ONCE(ring->entries[at].generation);
		uint32_t i = segment < c->n_segments
				     ? c->segments[segment].frame
				     : NONE;

		if (i >= n->frames_room || n->frames[i].client != c ||
		    n->frames[i].segment != segment ||
		    n->frames[i].generation != generation ||
		    n->frames[i].state != FRAME_ACTIVE) {
			/* What follows cannot be told: take it back. */
			n->counts.corrupt++;
			WRITE_ONCE(ring->head, c->grant_head);
			break;
		}
		frame_set_state(n, &n->frames[i], FRAME_STOCK);
		c->granted[at] = i;
	}
	c->stock_granted = pool_stock(c);
}

/* Which segments are full: those that a thread left for a newer one. One that
 * was just taken, and where no thread has put its number yet, is in use. */
static uint32_t adopt_full(struct bsn *n, struct client *c,
			   const uint32_t *sorted, uint32_t count,
			   uint32_t *full)
{
	uint32_t newest[BS_THREAD_SLOTS];
	uint32_t n_full = 0;

	memset(newest, 0xff, sizeof(newest));
	for (uint32_t k = 0; k < count; k++) {
		const struct frame *f = &n->frames[sorted[k]];

		if (f->state == FRAME_ACTIVE && f->slot < BS_THREAD_SLOTS)
			newest[f->slot] = sorted[k];
	}
	for (uint32_t k = 0; k < count; k++) {
		struct frame *f = &n->frames[sorted[k]];

		if (f->state != FRAME_ACTIVE || f->slot >= BS_THREAD_SLOTS ||
		    newest[f->slot] == sorted[k] ||
		    READ_ONCE(area_of(c, f->slot)->segment) == f->segment)
			continue;
		f->to_seal = true;
		full[n_full++] = sorted[k];
	}
	return n_full;
}

/* It lost something of nobody knows which traces, until now. */
void client_note_untied(struct bsn *n, struct client *c)
{
	/* Not before any segment that it may concern, of which those granted in
	 * this instant have numbers behind it. */
	c->untied_to_ns = n->granted_ns > n->now_ns ? n->granted_ns : n->now_ns;
	n->untied_to_ns = c->untied_to_ns;
	WRITE_ONCE(header_of(c)->untied_to_ns, c->untied_to_ns);
}

/* Losses of before, whose traces nobody knows any more. */
static void adopt_untied_loss(struct bsn *n, struct client *c)
{
	uint64_t untied = READ_ONCE(header_of(c)->untied_to_ns);

	/* Which traces lost something stood there. */
	if (!n->keep_adopted || !n->store_adopted)
		untied = n->now_ns;
	/* Flags of some traces may not have fitted in the tombstone ring. */
	if (untied < n->tombs->overrun_ns)
		untied = n->tombs->overrun_ns;
	if (untied > n->now_ns)
		untied = n->now_ns;
	c->untied_to_ns = untied;
	if (untied > n->untied_to_ns)
		n->untied_to_ns = untied;
}

/* Where the queue stands: the first cell that was not given back. */
static void adopt_triggers(struct client *c)
{
	const struct bs_context_segment *x = c->context;
	uint32_t head = READ_ONCE(x->trigger_head);

	c->trigger_tail = head - BS_TRIGGER_CELLS;
	while (c->trigger_tail != head &&
	       load_acquire(
		       &x->cells[c->trigger_tail % BS_TRIGGER_CELLS].seq) ==
		       c->trigger_tail + BS_TRIGGER_CELLS)
		c->trigger_tail++;
	c->trigger_kept = c->trigger_tail;
}

int bsn_client_adopt(struct bsn *n, int number, int pid, const char *service,
		     uint64_t now_ns, const struct bsn_client_fds *fds)
{
	struct client *c = NULL;
	uint32_t *found = NULL, *full = NULL;
	uint32_t count, n_full;
	uint64_t arena_bytes;
	int result;

	pthread_mutex_lock(&n->lock);
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	result = -EINVAL;
	if (number < 1 || number == INT32_MAX ||
	    client_find(n, (uint32_t)number))
		goto out;
	result = -ENOSPC;
	if (!make_room(n))
		goto out;
	result = -EPROTO;
	if (memfd_check(fds->arena, &arena_bytes) || !arena_bytes ||
	    arena_bytes % SEGMENT || arena_bytes / SEGMENT > INT32_MAX)
		goto out;
	result = -ENOMEM;
	c = client_new(n, pid, service, arena_bytes);
	if (!c)
		goto out;
	found = malloc(c->n_segments * sizeof(*found));
	full = malloc(c->n_segments * sizeof(*full));
	if (!found || !full)
		goto out;
	result = adopt_check(c, fds);
	if (result)
		goto out;
	store_reserve_client(n, (uint32_t)number);
	c->number = (uint32_t)number;
	c->drained_ns = 0;
	c->live = true;
	n->clients[n->n_clients++] = c;
	fill_header(n, c);
	count = adopt_segments(n, c, fds->arena, found);
	frames_sort(n, found, count);
	adopt_stock(n, c);
	adopt_triggers(c);
	adopt_untied_loss(n, c);
	n_full = adopt_full(n, c, found, count, full);
	result = drain_adopted(n, c, full, n_full);
	for (uint32_t i = 0; i < n_full; i++)
		n->frames[full[i]].to_seal = false;
	frames_merge_sealed(n, full, n_full);
	if (result) {
		c->live = false;
		pool_drop_client(n, c);
	} else {
		drain_client(n, c);
		pool_take_back(n, c);
		pool_grant(n, c);
		result = number;
	}
	c = NULL;
out:
	free(found);
	free(full);
	if (c)
		client_free(c);
	pthread_mutex_unlock(&n->lock);
	bsn_wake(n);
	return result;
}

/* ----------------------------------------------------------------- end --- */

int bsn_client_exited(struct bsn *n, int client, uint64_t now_ns)
{
	struct client *c;

	pthread_mutex_lock(&n->lock);
	if (now_ns > n->now_ns)
		n->now_ns = now_ns;
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (!c || !c->live) {
		pthread_mutex_unlock(&n->lock);
		return -ENOENT;
	}
	drain_client(n, c);
	drain_rest(n, c);
	/* Its stock is the node's again, where a successor must not look for it. */
	WRITE_ONCE(grants_of(c)->head, load_acquire(&grants_of(c)->tail));
	c->live = false;
	c->exited_ns = n->now_ns;
	/* Before all are adopted, who lives is not known yet. */
	if (n->recovered)
		slice_close_gone(n);
	drain_publish(n);
	drain_triggers(n, c); /* also behind a cell that stays claimed */
	pool_drop_backed(n, c);
	client_check_drained(n, c);
	pthread_mutex_unlock(&n->lock);
	bsn_wake(n);
	return 0;
}
