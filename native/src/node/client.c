/* SPDX-License-Identifier: Apache-2.0 */
/* One process: its memfds, its mappings, its end. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hash.h"
#include "internal.h"

static struct client **bucket_of(const struct bsn *n, uint32_t number)
{
	return (struct client **)&n->clients.numbered[number % CLIENT_BUCKETS];
}

struct client *client_find(const struct bsn *n, uint32_t number)
{
	struct client *c = *bucket_of(n, number);

	while (c && c->number != number)
		c = c->next_numbered;
	return c;
}

/* It is one of the node's from here on. */
void client_enter(struct bsn *n, struct client *c, uint32_t number)
{
	struct client **bucket = bucket_of(n, number);

	c->number = number;
	c->live = true;
	c->next_numbered = *bucket;
	*bucket = c;
	n->clients.all[n->clients.count++] = c;
	metrics_enter(n, c);
	tenant_enter(n, c);
	wait_join(n, c);
}

static void client_leave(struct bsn *n, struct client *c)
{
	struct client **link = bucket_of(n, c->number);

	while (*link != c)
		link = &(*link)->next_numbered;
	*link = c->next_numbered;
	for (uint32_t i = 0; i < n->clients.count; i++) {
		if (n->clients.all[i] != c)
			continue;
		n->clients.all[i] = n->clients.all[--n->clients.count];
		break;
	}
	tenant_leave(n, c);
}

void client_free(struct client *c)
{
	if (c->arena)
		munmap(c->arena, c->arena_bytes);
	if (c->channel)
		munmap(c->channel, BS_CHANNEL_BYTES);
	if (c->queue.context)
		munmap(c->queue.context, sizeof(*c->queue.context));
	if (c->queue_before.context)
		munmap(c->queue_before.context,
		       sizeof(*c->queue_before.context));
	if (c->arena_fd >= 0)
		close(c->arena_fd);
	free(c->segments);
	free(c->granted);
	free(c);
}

/* For BSN_EVENT_CLIENT_DRAINED: a place for each process that is there, so that there is
 * one when it is gone. And for one more. False: there is no memory. */
static bool reserve_told(struct bsn *n)
{
	struct clients *all = &n->clients;
	uint32_t need = all->n_drained + all->count + 1, room;
	uint32_t *drained;

	if (need <= all->drained_room)
		return true;
	room = need > 8 ? 2 * need : 16;
	drained = realloc(all->drained, room * sizeof(*drained));
	if (!drained)
		return false;
	all->drained = drained;
	all->drained_room = room;
	return true;
}

/* Forget a process that is gone once its last segment is. */
void client_check_drained(struct bsn *n, struct client *c)
{
	if (c->live || c->frames || c == &n->keep.arena)
		return;
	client_leave(n, c);
	n->clients.drained[n->clients.n_drained++] = c->number;
	metrics_read_client(n, c);
	n->counts.triggers_lost += triggers_left(c);
	metrics_leave(c);
	client_free(c);
}

static uint64_t before_ns(uint64_t ns)
{
	return ns > TRACE_NS ? ns - TRACE_NS : 0;
}

static void set_untied_to(const struct bsn *n, struct client *c, uint64_t to_ns)
{
	c->untied_frames = c->held;
	c->untied_granted_ns = n->ledger.header->granted_ns + TRACE_NS;
	c->untied_to_ns = c->believed.untied_to_ns = to_ns;
	if (c->told)
		store_release(&c->told->untied_to_ns, to_ns);
}

/* Not all that puts it in doubt is in its counters. Since when is not known. */
void client_adopt_doubt(const struct bsn *n, struct client *c)
{
	if (c->believed.untied_to_ns)
		set_untied_to(n, c, c->believed.untied_to_ns);
}

/* Traces of which it wrote something at about the time since the last look may lack
 * something: a handle that was lost as a whole, before what is there of them or after. */
void client_in_doubt(struct bsn *n, struct client *c)
{
	uint64_t latest_ns = n->ledger.header->granted_ns;
	uint64_t from_ns = before_ns(c->losses_read_ns);
	uint64_t since_ns = n->ledger.header->told_ns;

	/* One interval: an old one is dropped when all that it could concern is
	 * gone from the pool, else both are joined. */
	if ((!c->untied_frames && !c->kept_bytes) ||
	    from_ns < c->untied_from_ns)
		c->untied_from_ns = from_ns;
	/* Not before any segment that it may concern, of which those granted in
	 * this instant have numbers behind it. */
	set_untied_to(n, c,
		      TRACE_NS +
			      (latest_ns > n->now_ns ? latest_ns : n->now_ns));
	/* All slices are looked at: by the next poll, and not at each loss. Since
	 * when a process lost that was adopted is not known, nor whether it did so
	 * again; but of what its predecessor saw of that he told them. */
	if (since_ns < c->losses_read_ns)
		since_ns = c->losses_read_ns;
	if (c->losses_read_ns)
		since_ns = before_ns(since_ns);
	if (!c->untied_news || since_ns < c->untied_news_ns)
		c->untied_news_ns = since_ns;
	c->untied_news = true;
	n->untied_news = true;
}

/* It lost something of nobody knows which traces, since the last look. One that was
 * never seen may be among them. */
void client_untied_loss(struct bsn *n, struct client *c)
{
	client_in_doubt(n, c);
	n->ledger.header->untied_to_ns = c->untied_to_ns - TRACE_NS;
}

int bsn_client_lost(struct bsn *n, int client, uint64_t now_ns)
{
	struct client *c;

	node_lock(n);
	node_set_time(n, now_ns);
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (c)
		client_untied_loss(n, c);
	node_unlock(n);
	return c ? 0 : -ENOENT;
}

/* What it wrote until then is gone. */
void client_evicted(struct client *c, uint64_t until_ns)
{
	if (until_ns <= c->believed.evicted_ns)
		return;
	c->believed.evicted_ns = until_ns;
	if (c->told)
		store_release(&c->told->evicted_ns, until_ns);
}

bool client_may_lack(const struct bsn *n, const struct client *c,
		     uint64_t granted_ns)
{
	return c->untied_to_ns >= granted_ns || client_is_forgotten(n, c);
}

/* Not as an untied loss: what was evicted was written before what its traces have left in
 * the pool, as far as that is in the order of sealing. */
void client_forget(struct bsn *n, struct client *c)
{
	const struct ledger_header *h = n->ledger.header;
	uint64_t now_ns = h->sealed > n->now_ns ? h->sealed : n->now_ns;

	c->believed.forgotten_ns = now_ns + 1;
	if (c->told)
		store_release(&c->told->forgotten_ns, now_ns + 1);
}

bool client_is_forgotten(const struct bsn *n, const struct client *c)
{
	return c->believed.forgotten_ns &&
	       pool_may_hold(n, c->believed.forgotten_ns);
}

struct client *client_new(struct bsn *n, int pid, const char *service,
			  uint64_t arena_bytes)
{
	struct client *c;

	if (!reserve_told(n))
		return NULL;
	c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	c->pid = pid;
	c->arena_fd = -1;
	c->take_back = NONE;
	strncpy(c->service, service ? service : "", sizeof(c->service) - 1);
	c->arena_bytes = arena_bytes;
	c->n_segments = (uint32_t)(arena_bytes / SEGMENT);
	c->segments_free = NONE;
	c->losses_read_ns = n->now_ns;
	c->wrote_ns = n->now_ns;
	list_init(&c->backed);
	list_init(&c->unclaimed);
	list_init(&c->active);
	list_init(&c->parked);
	list_init(&c->sealed);
	c->segments = calloc(c->n_segments, sizeof(*c->segments));
	c->granted = calloc(BS_GRANT_RING_ENTRIES, sizeof(*c->granted));
	if (!c->segments || !c->granted) {
		client_free(c);
		return NULL;
	}
	return c;
}

int client_map(struct client *c, const struct bsn_client_fds *fds)
{
	c->arena_fd = fcntl(fds->arena, F_DUPFD_CLOEXEC, 0);
	if (c->arena_fd < 0)
		return -errno;
	c->arena = map_shared(fds->arena, c->arena_bytes);
	c->channel = map_shared(fds->channel, BS_CHANNEL_BYTES);
	c->queue.context =
		map_shared(fds->context, sizeof(struct bs_context_segment));
	return c->arena && c->channel && c->queue.context ? 0 : -ENOMEM;
}

void client_fill_header(const struct bsn *n, const struct client *c)
{
	struct bs_channel_header *h = header_of(c);

	h->arena_bytes = c->arena_bytes;
	h->clock = n->config.clock_is_counter ? BS_CLOCK_COUNTER
					      : BS_CLOCK_MONOTONIC;
	h->ticks_per_s = n->config.ticks_per_s;
	h->node_id = n->node_id;
	h->cluster_seed = n->config.cluster_seed;
	h->client_number = c->number;
	memcpy(h->node_name, n->config.node_name, sizeof(h->node_name));
	h->magic = BS_ABI_MAGIC;
}

static void fill_context(struct bs_context_segment *x, uint32_t version)
{
	x->version = version;
	x->thread_slots = BS_THREAD_SLOTS;
	x->trigger_cells = BS_TRIGGER_CELLS;
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		x->cells[i].seq = i;
	x->magic = BS_ABI_MAGIC;
}

/* Of two that are gone, the one that goes first: of whose tenant there are more,
 * so that many short programs of one do not push out what others left. */
static bool goes_before(const struct client *a, const struct client *b)
{
	if (a->tenant->clients != b->tenant->clients)
		return a->tenant->clients > b->tenant->clients;
	return a->exited_ns < b->exited_ns;
}

/* Room for one more: of those that are gone, the one that goes_before() all
 * others gives up what is left of it. */
bool client_make_room(struct bsn *n)
{
	struct client *oldest = NULL;

	if (n->clients.count < n->config.clients_max)
		return true;
	/* Nothing is reclaimed before all are adopted. */
	if (!n->recovered && n->ledger.adopted)
		return false;
	for (uint32_t i = 0; i < n->clients.count; i++) {
		struct client *c = n->clients.all[i];

		if (!c->live && (!oldest || goes_before(c, oldest)))
			oldest = c;
	}
	if (!oldest)
		return false;
	pool_drop_client(n, oldest);
	return n->clients.count < n->config.clients_max;
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

	node_lock(n);
	node_set_time(n, now_ns);
	if (!client_make_room(n)) {
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
	made.context = result = memfd_sealed("backsight-context",
					     sizeof(struct bs_context_segment));
	if (result < 0)
		goto fail;
	result = client_map(c, &made);
	if (result)
		goto fail;
	client_enter(n, c, store_next_client(n));
	c->version = BS_ABI_VERSION;
	header_of(c)->version = c->version;
	client_fill_header(n, c);
	fill_context(c->queue.context, c->version);
	grants_first(n, c);
	*fds = made;
	result = (int)c->number;
	node_unlock(n);
	bsn_wake(n); /* a thread that sleeps does not listen to it yet */
	return result;
fail:
	close_fds(&made);
	if (c)
		client_free(c);
	node_unlock(n);
	return result;
}

int bsn_client_agreed(struct bsn *n, int client, uint32_t version,
		      uint64_t features)
{
	struct client *c;
	int result = -ENOENT;

	node_lock(n);
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (!c || !c->live)
		goto out;
	result = -EPROTO;
	if (!bs_version_is_spoken(version) || features & ~BS_FEATURES)
		goto out;
	result = 0;
	c->version = version;
	WRITE_ONCE(header_of(c)->version, version);
	WRITE_ONCE(c->queue.context->version, version);
out:
	node_unlock(n);
	return result;
}

uint64_t bsn_context_bytes(void)
{
	return sizeof(struct bs_context_segment);
}

/* A memfd that is shorter than its mapping is a SIGBUS; a BPF map is no file,
 * and the kernel maps no more of it than there is. */
bool context_fits(int fd)
{
	struct stat st;
	uint64_t bytes;

	if (fstat(fd, &st))
		return false;
	return !S_ISREG(st.st_mode) ||
	       (!memfd_check(fd, &bytes) &&
		bytes == sizeof(struct bs_context_segment));
}

/* Of a process it has been, and may be still. */
static bool was_used(const struct bs_context_segment *x)
{
	return READ_ONCE(x->magic) || READ_ONCE(x->trigger_head);
}

int bsn_client_context(struct bsn *n, int client, int fd)
{
	struct bs_context_segment *x;
	struct client *c;
	int made = -1;
	int result;

	node_lock(n);
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	result = !c || !c->live ? -ENOENT : 0;
	if (!result && c->queue_before.context)
		result = -EBUSY;
	if (!result && fd < 0) {
		made = fd = memfd_sealed("backsight-context", sizeof(*x));
		result = fd < 0 ? fd : 0;
	}
	if (!result && !context_fits(fd))
		result = -EINVAL;
	if (result)
		goto out;
	x = map_shared(fd, sizeof(*x));
	if (!x) {
		result = -ENOMEM;
		if (made >= 0)
			close(made);
		goto out;
	}
	if (was_used(x)) {
		munmap(x, sizeof(*x));
		result = -EINVAL;
		goto out;
	}
	fill_context(x, c->version);
	c->queue_before = c->queue;
	c->queue = (struct queue){.context = x};
	metrics_save(c);
	result = fd;
out:
	node_unlock(n);
	return result;
}

/* A successor has the new one alone: what was lost is told there too. */
static void queue_end(struct client *c)
{
	struct queue *before = &c->queue_before, *q = &c->queue;

	fetch_add(&q->context->records_unattributed, before->unattributed);
	q->unattributed += before->unattributed;
	q->records_told += before->unattributed;
	munmap(before->context, sizeof(*before->context));
	*before = (struct queue){0};
	metrics_save(c);
}

int bsn_client_context_done(struct bsn *n, int client, uint64_t now_ns)
{
	struct client *c;
	int result = 0;

	node_lock(n);
	node_set_time(n, now_ns);
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (!c || !c->queue_before.context) {
		result = -ENOENT;
		goto out;
	}
	/* Nobody pushes there any more: what is there is all. Triggers that wait
	 * for room, or for the control plane, are there still. */
	triggers_take(n, c);
	if (c->queue_before.kept !=
	    READ_ONCE(c->queue_before.context->trigger_head)) {
		result = -EAGAIN;
		goto out;
	}
	losses_read_unattributed(n, c);
	metrics_read_client(n, c);
	queue_end(c);
out:
	node_unlock(n);
	return result;
}

/* Something of what rings the doorbell: see abi/channel.h. */
bool client_has_work(const struct bsn *n, const struct client *c)
{
	uint64_t left;

	if (triggers_wait(n, c))
		return true;
	left = c->grant_head - READ_ONCE(grants_of(c)->tail);
	return c->stock_granted &&
	       left * BS_STOCK_TOLD <=
		       c->stock_granted * (BS_STOCK_TOLD - 1ull);
}

/* ----------------------------------------------------------------- end --- */

int bsn_client_exited(struct bsn *n, int client, uint64_t now_ns)
{
	struct client *c;
	uint64_t end;

	node_lock(n);
	node_set_time(n, now_ns);
	end = n->cost + PIECE_ENTRIES;
	c = client > 0 ? client_find(n, (uint32_t)client) : NULL;
	if (c && c->live)
		c = threads_observe(n, c, &end);
	if (c && c->live)
		c = losses_read(n, c, &end);
	/* What is left of that is the end of each segment. */
	c = watch_in_pieces(n, c, &end);
	if (!c || !c->live) {
		node_unlock(n);
		return -ENOENT;
	}
	/* It may be forgotten at the end of this. */
	slices_untied_losses(n);
	threads_finish(n, c);
	c->live = false;
	tenant_exit(n, c);
	wait_leave(c);
	c->exited_ns = n->now_ns;
	store_publish(n);
	triggers_take(n, c); /* also behind a cell that stays claimed */
	pool_drop_unused(n, c);
	/* Before all are adopted, who lives is not known yet. */
	if (n->recovered) {
		slices_close_gone(n, true);
		store_publish(n);
	}
	node_unlock(n);
	bsn_wake(n);
	return 0;
}
