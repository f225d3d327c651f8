/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_node.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"

/* No test waits that long for anything; one that hangs ends with a message. */
#define PATIENCE_MS 60000

static void wait_readable(int fd)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};

	CHECK_EQ(poll(&p, 1, PATIENCE_MS), 1);
}

void fake_node_open(struct fake_node *n)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	memset(n, 0, sizeof(*n));
	n->connection = -1;
	for (int i = 0; i < BS_FDS; i++)
		n->fds[i] = -1;
	make_directory(n->directory, sizeof(n->directory));
	snprintf(n->path, sizeof(n->path), "%s/node.sock", n->directory);
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", n->path);
	n->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(n->listener >= 0);
	CHECK_EQ(bind(n->listener, (struct sockaddr *)&address,
		      sizeof(address)),
		 0);
	CHECK_EQ(listen(n->listener, 8), 0);
	CHECK_EQ(setenv("BACKSIGHT_SOCKET", n->path, 1), 0);
}

static void drop_attachment(struct fake_node *n)
{
	if (n->fds[0] < 0)
		return;
	munmap(n->arena, (size_t)n->segments * BS_SEGMENT_BYTES);
	munmap(n->channel, BS_CHANNEL_BYTES);
	munmap(n->context, sizeof(*n->context));
	munmap(n->policy, BS_POLICY_BYTES);
	for (int i = 0; i < BS_FDS; i++) {
		close(n->fds[i]);
		n->fds[i] = -1;
	}
}

void fake_node_close(struct fake_node *n)
{
	fake_node_hang_up(n);
	drop_attachment(n);
	close(n->listener);
	unlink(n->path);
	rmdir(n->directory);
}

static void *make_fd(const char *name, int *fd, size_t bytes)
{
	void *p;

	*fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK(*fd >= 0);
	CHECK_EQ(ftruncate(*fd, (off_t)bytes), 0);
	CHECK_EQ(fcntl(*fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK), 0);
	p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	CHECK(p != MAP_FAILED);
	return p;
}

struct bs_context_segment *fake_node_make_context(int *fd)
{
	struct bs_context_segment *c = make_fd("test-context", fd, sizeof(*c));

	c->magic = BS_ABI_MAGIC;
	c->version = BS_ABI_VERSION;
	c->thread_slots = BS_THREAD_SLOTS;
	c->trigger_cells = BS_TRIGGER_CELLS;
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		c->cells[i].seq = i;
	return c;
}

void fake_node_make(struct fake_node *n, uint32_t segments)
{
	unsigned char *channel;

	drop_attachment(n);
	n->segments = segments;
	n->generation = 0;
	n->trigger_tail = 0;
	memset(n->read, 0, sizeof(n->read));
	n->token++;
	n->arena = make_fd("test-arena", &n->fds[BS_FD_ARENA],
			   (size_t)segments * BS_SEGMENT_BYTES);
	channel = make_fd("test-channel", &n->fds[BS_FD_CHANNEL],
			  BS_CHANNEL_BYTES);
	n->context = fake_node_make_context(&n->fds[BS_FD_CONTEXT]);
	n->policy =
		make_fd("test-policy", &n->fds[BS_FD_POLICY], BS_POLICY_BYTES);
	/* Others attach to it too. */
	CHECK_EQ(fcntl(n->fds[BS_FD_POLICY], F_ADD_SEALS, F_SEAL_FUTURE_WRITE),
		 0);
	n->channel = (struct bs_channel_header *)channel;
	n->grants =
		(struct bs_grant_ring *)(channel + BS_CHANNEL_GRANTS_OFFSET);
	n->open_handles = (uint32_t *)(channel + BS_CHANNEL_HANDLES_OFFSET);
	n->areas = (struct bs_thread_area *)(channel + BS_CHANNEL_AREAS_OFFSET);

	n->channel->magic = BS_ABI_MAGIC;
	n->channel->version = BS_ABI_VERSION;
	n->channel->arena_bytes = (uint64_t)segments * BS_SEGMENT_BYTES;
	n->channel->clock = n->clock;
	n->channel->ticks_per_s = 1000000000;
	n->channel->node_id = bs_node_id(FAKE_NODE_NAME);
	snprintf(n->channel->node_name, sizeof(n->channel->node_name),
		 FAKE_NODE_NAME);

	n->policy->magic = BS_ABI_MAGIC;
	n->policy->version = BS_ABI_VERSION;
	n->policy->bytes = BS_POLICY_BYTES;
	n->policy->number = 1;
	n->policy->percentage_threshold = BS_PERCENTAGE_ALL;
}

void fake_node_accept(struct fake_node *n)
{
	ssize_t got;

	for (;;) {
		wait_readable(n->listener);
		n->connection = accept4(n->listener, NULL, NULL, SOCK_CLOEXEC);
		CHECK(n->connection >= 0);
		wait_readable(n->connection);
		got = recv(n->connection, &n->request, sizeof(n->request), 0);
		if (got > 0)
			break;
		fake_node_hang_up(n);
	}
	CHECK_EQ(got, sizeof(n->request));
	CHECK_EQ(n->request.magic, BS_ABI_MAGIC);
}

void fake_node_fill_reply(const struct fake_node *n,
			  struct bs_attach_reply *reply)
{
	*reply = (struct bs_attach_reply){
		.magic = BS_ABI_MAGIC,
		.version = BS_ABI_VERSION,
		.token = {1, n->token},
		.arena_bytes = (uint64_t)n->segments * BS_SEGMENT_BYTES,
	};
}

void fake_node_send(struct fake_node *n, const void *bytes, size_t size,
		    const int *fds, int n_fds)
{
	union {
		char bytes[CMSG_SPACE(16 * sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	struct iovec iov = {(void *)bytes, size};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (n_fds) {
		struct cmsghdr *c = &control.align;

		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
	}
	CHECK_EQ(sendmsg(n->connection, &msg, MSG_NOSIGNAL), size);
}

void fake_node_wait_hangup(struct fake_node *n)
{
	char byte;

	wait_readable(n->connection);
	CHECK(recv(n->connection, &byte, 1, 0) <= 0);
	fake_node_hang_up(n);
}

void fake_node_hang_up(struct fake_node *n)
{
	if (n->connection >= 0)
		close(n->connection);
	n->connection = -1;
}

void fake_node_attach(struct fake_node *n, uint32_t segments, uint32_t granted)
{
	struct bs_attach_reply reply;

	fake_node_make(n, segments);
	for (uint32_t i = 0; i < granted; i++)
		fake_node_grant(n, i, true);
	/* The attach thread starts with the first use. */
	bs_wait_attached(0);
	fake_node_accept(n);
	fake_node_fill_reply(n, &reply);
	fake_node_send(n, &reply, sizeof(reply), n->fds, BS_FDS);
	CHECK_EQ(bs_wait_attached(PATIENCE_MS), 0);
}

static struct bs_segment_header *segment_at(const struct fake_node *n,
					    uint32_t segment)
{
	CHECK(segment < n->segments);
	return (struct bs_segment_header *)(n->arena +
					    (size_t)segment * BS_SEGMENT_BYTES);
}

void fake_node_grant(struct fake_node *n, uint32_t segment, bool fresh)
{
	struct bs_grant *g =
		&n->grants->entries[n->grants->head % BS_GRANT_RING_ENTRIES];

	g->segment = segment | (fresh ? BS_GRANT_FRESH : 0);
	g->generation = ++n->generation;
	store_release(&n->grants->head, n->grants->head + 1);
}

static bool is_closed(struct bs_segment_header *h, uint32_t run)
{
	return bs_entry_flags(load_acquire(bs_directory(h, run))) &
	       BS_RUN_CLOSED;
}

/* The segment that a slot reads next from, if it has a run there. */
static struct bs_segment_header *next_segment(struct fake_node *n,
					      uint32_t slot)
{
	struct fake_place *place = &n->read[slot];
	struct bs_segment_header *h;

	while (place->grant != load_acquire(&n->grants->tail)) {
		const struct bs_grant *g =
			&n->grants->entries[place->grant %
					    BS_GRANT_RING_ENTRIES];
		uint32_t segment = g->segment & ~BS_GRANT_FRESH;
		uint32_t owner;

		h = segment_at(n, segment);
		if (bs_life_generation(load_acquire(&h->life)) != g->generation)
			return NULL; /* just being taken */
		owner = READ_ONCE(h->slot);
		if (owner == slot) {
			bool left = load_acquire(&n->areas[slot].segment) !=
				    segment;

			/* A thread that was killed closes nothing. */
			while (left && place->run < load_acquire(&h->runs) &&
			       !is_closed(h, place->run))
				place->run++;
			if (place->run < load_acquire(&h->runs))
				return h;
			if (!left)
				return NULL;
		}
		place->grant++;
		place->run = 0;
		place->end = sizeof(*h);
	}
	return NULL;
}

static bool look_at_run(struct fake_node *n, uint32_t slot, bool closed,
			struct fake_run *run)
{
	struct bs_segment_header *h = next_segment(n, slot);
	struct fake_place *place = &n->read[slot];
	const struct bs_run_header *header;
	uint64_t entry;

	if (!h)
		return false;
	entry = load_acquire(bs_directory(h, place->run));
	run->flags = bs_entry_flags(entry);
	if (!(run->flags & BS_RUN_CLOSED) == closed)
		return false;
	run->segment =
		(uint32_t)(((unsigned char *)h - n->arena) / BS_SEGMENT_BYTES);
	run->offset = bs_entry_offset(entry);
	header = (const struct bs_run_header *)((unsigned char *)h +
						run->offset);
	run->id = bs_run_trace_id(entry, header->trace_hi,
				  load_acquire(&header->word));
	run->handle = header->handle;
	run->seq = run->flags & BS_RUN_FIRST ? 0 : header->seq;
	run->word = &header->word;
	run->records =
		(const unsigned char *)header + bs_run_header_bytes(run->flags);
	run->flags &= ~BS_RUN_CLOSED;

	/* Side by side, and below the directory. */
	CHECK_EQ(run->offset, place->end ? place->end : sizeof(*h));
	CHECK(run->records + fake_run_committed(run) <=
	      (unsigned char *)bs_directory(h, h->runs - 1));
	return true;
}

bool fake_node_run(struct fake_node *n, uint32_t slot, struct fake_run *run)
{
	struct fake_place *place = &n->read[slot];

	if (!look_at_run(n, slot, true, run))
		return false;
	place->run++;
	place->end = run->offset + bs_run_header_bytes(run->flags) +
		     fake_run_committed(run);
	return true;
}

bool fake_node_open_run(struct fake_node *n, uint32_t slot,
			struct fake_run *run)
{
	return look_at_run(n, slot, false, run);
}

bool fake_node_loss(struct fake_node *n, uint32_t slot, struct bs_loss *loss)
{
	struct bs_thread_area *area = &n->areas[slot];
	uint32_t tail = area->loss_tail;

	if (load_acquire(&area->loss_head) == tail)
		return false;
	*loss = area->losses[tail % BS_LOSS_RING_ENTRIES];
	store_release(&area->loss_tail, tail + 1);
	return true;
}

const struct bs_record_header *fake_run_record(const struct fake_run *run,
					       uint32_t *offset)
{
	uint32_t committed = fake_run_committed(run);
	const struct bs_record_header *h;
	size_t bytes;

	if (*offset == committed)
		return NULL;
	h = (const struct bs_record_header *)(run->records + *offset);
	bytes = (sizeof(*h) + h->payload_bytes + 3) & ~(size_t)3;
	*offset += (uint32_t)bytes;
	CHECK(*offset <= committed);
	return h;
}

uint32_t fake_run_committed(const struct fake_run *run)
{
	return bs_word_committed(load_acquire(run->word));
}

int fake_run_count(const struct fake_run *run)
{
	uint32_t offset = 0;
	int count = 0;

	while (fake_run_record(run, &offset))
		count++;
	return count;
}

void fake_node_news(struct fake_node *n, enum bs_news_kind kind,
		    uint64_t number, int fd)
{
	const struct bs_attach_news news = {
		.magic = BS_ABI_MAGIC,
		.kind = kind,
		.number = number,
	};

	fake_node_send(n, &news, sizeof(news), &fd, 1);
}

bool fake_node_answered(struct fake_node *n, uint64_t number)
{
	struct bs_attach_news answer;
	ssize_t got =
		recv(n->connection, &answer, sizeof(answer), MSG_DONTWAIT);

	if (got < 0)
		return false;
	CHECK_EQ(got, sizeof(answer));
	CHECK_EQ(answer.magic, BS_ABI_MAGIC);
	CHECK_EQ(answer.kind, BS_NEWS_CONTEXT);
	CHECK_EQ(answer.number, number);
	return true;
}

void fake_node_use_context(struct fake_node *n,
			   struct bs_context_segment *context, int fd)
{
	close(n->fds[BS_FD_CONTEXT]);
	n->fds[BS_FD_CONTEXT] = fd;
	n->context = context;
	n->trigger_tail = 0;
}

bool fake_queue_trigger(struct bs_context_segment *queue, uint32_t *tail,
			struct bs_trigger_cell *cell)
{
	struct bs_trigger_cell *from = &queue->cells[*tail % BS_TRIGGER_CELLS];

	if (load_acquire(&from->seq) != *tail + 1)
		return false;
	*cell = *from;
	store_release(&from->seq, *tail + BS_TRIGGER_CELLS);
	++*tail;
	return true;
}

bool fake_node_trigger(struct fake_node *n, struct bs_trigger_cell *cell)
{
	return fake_queue_trigger(n->context, &n->trigger_tail, cell);
}

uint32_t fake_node_open_handles(const struct fake_node *n)
{
	uint32_t open = 0;

	for (uint32_t i = 0; i < BS_OPEN_HANDLES; i++)
		open += load_acquire(&n->open_handles[i]) != 0;
	return open;
}

int fake_node_owned_slots(const struct fake_node *n)
{
	int owned = 0;

	for (uint32_t i = 0; i < BS_THREAD_SLOTS; i++)
		owned += load_acquire(&n->areas[i].owner_tid) != 0;
	return owned;
}
