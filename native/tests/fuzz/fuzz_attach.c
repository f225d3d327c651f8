/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon says what it likes: answers, news, descriptors of anything, and
 * channels, contexts and policies with anything in them; and the application
 * traces meanwhile. The input is a list of packets and of what the application
 * does. What must hold: nothing crashes, and nothing leaks.
 *
 * The attach thread is not started: this calls what it would call, and takes the
 * place of link.c.
 */
#include <sys/mman.h>

#include "check.h"
#include "input.h"
/* For what is static there. NOLINTNEXTLINE(bugprone-suspicious-include) */
#include "client/attach.c"

#define ARENA_BYTES (16ull * BS_SEGMENT_BYTES)
#define TRACES 3

/* Of all numbers this one alone, so that inputs that were kept mean what they did. */
#define TICK 255

static struct input in;
static struct bs_packet next;

/* ------------------------------------------------------------------ link --- */

int bs_link_open(const struct sockaddr_un *address)
{
	return address ? 0 : -EINVAL;
}

void bs_link_close(void)
{
}

void bs_link_shut(void)
{
}

int bs_link_send(const void *packet, size_t bytes)
{
	CHECK(packet && bytes <= BS_LINK_PACKET_MAX);
	return 0;
}

int bs_link_wait(int timeout_ms)
{
	(void)timeout_ms;
	return 1;
}

bool bs_link_receive(struct bs_packet *packet)
{
	*packet = next;
	next.n_fds = 0;
	return true;
}

void bs_packet_close_fds(struct bs_packet *packet)
{
	for (int i = 0; i < packet->n_fds; i++)
		close(packet->fds[i]);
	packet->n_fds = 0;
}

/* ------------------------------------------------------------ descriptors --- */

enum thing {
	ARENA,
	CHANNEL,
	CONTEXT,
	POLICY,
	SMALL,
	UNSEALED,
	NULL_DEVICE,
	PIPE,
	THINGS
};

/* Some bytes, anywhere. */
static void patch(unsigned char *bytes, size_t size)
{
	for (uint32_t i = take8(&in) % 8; i; i--) {
		size_t at = take16(&in) % size;

		bytes[at] = take8(&in);
	}
}

static void fill_channel(unsigned char *bytes)
{
	struct bs_channel_header *h = (struct bs_channel_header *)bytes;
	struct bs_grant_ring *ring =
		(struct bs_grant_ring *)(bytes + BS_CHANNEL_GRANTS_OFFSET);

	h->magic = BS_ABI_MAGIC;
	h->version = BS_ABI_VERSION;
	h->arena_bytes = ARENA_BYTES;
	h->ticks_per_s = 1000000000;
	memcpy(h->node_name, "node-a", 6);
	h->node_id = bs_fnv1a64(BS_FNV1A64_BASIS, "node-a", 6);
	ring->head = take8(&in) % 8;
	for (uint32_t i = 0; i < ring->head; i++) {
		ring->entries[i].segment = i | (i % 2 ? BS_GRANT_FRESH : 0);
		ring->entries[i].generation = 1;
	}
	patch((unsigned char *)h, sizeof(*h));
	patch((unsigned char *)ring, 256);
	patch(bytes + BS_CHANNEL_AREAS_OFFSET, 512);
}

static void fill_context(unsigned char *bytes)
{
	struct bs_context_segment *x = (struct bs_context_segment *)bytes;

	x->magic = BS_ABI_MAGIC;
	x->version = BS_ABI_VERSION;
	x->thread_slots = BS_CONTEXT_SLOTS;
	x->trigger_cells = BS_TRIGGER_CELLS;
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		x->cells[i].seq = i;
	patch(bytes, 256);
}

static void fill_policy(unsigned char *bytes)
{
	struct bs_policy *p = (struct bs_policy *)bytes;

	p->magic = BS_ABI_MAGIC;
	p->version = BS_ABI_VERSION;
	p->bytes = BS_POLICY_BYTES;
	p->percentage_threshold = BS_PERCENTAGE_ALL;
	patch(bytes, sizeof(*p));
}

static int make_memfd(uint64_t bytes, void (*fill)(unsigned char *bytes),
		      bool sealed)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	unsigned char *p;

	CHECK(fd >= 0);
	CHECK_EQ(ftruncate(fd, (off_t)bytes), 0);
	if (fill) {
		p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
			 0);
		CHECK(p != MAP_FAILED);
		fill(p);
		CHECK_EQ(munmap(p, bytes), 0);
	}
	if (sealed)
		CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK),
			 0);
	return fd;
}

static int make_fd(enum thing thing)
{
	int ends[2];

	switch (thing) {
	case ARENA:
		return make_memfd(ARENA_BYTES, NULL, true);
	case CHANNEL:
		return make_memfd(BS_CHANNEL_BYTES, fill_channel, true);
	case CONTEXT:
		return make_memfd(sizeof(struct bs_context_segment),
				  fill_context, true);
	case POLICY:
		return make_memfd(BS_POLICY_BYTES, fill_policy, true);
	case SMALL:
		return make_memfd(take16(&in), NULL, true);
	case UNSEALED:
		return make_memfd(ARENA_BYTES, NULL, false);
	case NULL_DEVICE:
		return open("/dev/null", O_RDWR | O_CLOEXEC);
	default:
		CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
		close(ends[1]);
		return ends[0];
	}
}

/* --------------------------------------------------------------- packets --- */

/* The descriptors that belong there, or others. */
static void add_fds(const enum thing *usual, int count)
{
	uint8_t choice = take8(&in);
	int n = choice < 192 ? count : choice % (BS_LINK_FDS_MAX + 1);

	next.n_fds = 0;
	for (int i = 0; i < n; i++) {
		enum thing thing = i < count ? usual[i] : ARENA;

		if (choice >= 128)
			thing = (enum thing)(take8(&in) % THINGS);
		next.fds[next.n_fds++] = make_fd(thing);
	}
}

static void fill_packet(const void *content, size_t bytes)
{
	uint8_t choice = take8(&in);

	memset(&next, 0, sizeof(next));
	memcpy(next.content, content, bytes);
	patch(next.content, bytes);
	next.bytes = choice < 192 ? bytes : choice * 4u % BS_LINK_PACKET_MAX;
	if (next.bytes < BS_LINK_PACKET_MAX)
		memset(next.content + next.bytes, 0,
		       BS_LINK_PACKET_MAX - next.bytes);
}

static void answer(void)
{
	static const enum thing usual[] = {ARENA, CHANNEL, CONTEXT, POLICY};
	struct bs_attach_reply reply = {
		.magic = BS_ABI_MAGIC,
		.version = BS_ABI_VERSION,
		.token = {take8(&in), 1},
		.arena_bytes = ARENA_BYTES,
	};

	fill_packet(&reply, sizeof(reply));
	add_fds(usual, 4);
	pthread_mutex_lock(&bs_process.lock);
	exchange();
	pthread_mutex_unlock(&bs_process.lock);
	bs_packet_close_fds(&next);
}

static void tell_news(void)
{
	struct bs_attach_news news = {
		.magic = BS_ABI_MAGIC,
		.kind = take8(&in) % 3,
		.number = take8(&in),
	};
	enum thing usual = news.kind == BS_NEWS_CONTEXT ? CONTEXT : POLICY;

	fill_packet(&news, sizeof(news));
	add_fds(&usual, 1);
	pthread_mutex_lock(&bs_process.lock);
	/* It hears news while it is attached. */
	if (bs_process.current != &bs_nowhere) {
		take_news(&next);
		answer_context();
	}
	pthread_mutex_unlock(&bs_process.lock);
	bs_packet_close_fds(&next);
}

/* Nothing came for a while: see wait_for_news(). */
static void tick(void)
{
	pthread_mutex_lock(&bs_process.lock);
	if (bs_process.current != &bs_nowhere) {
		bs_park_idle();
		bs_attachment_retire_old();
		answer_context();
	}
	pthread_mutex_unlock(&bs_process.lock);
}

/* ------------------------------------------------------------ application --- */

static struct bs_trace traces[TRACES];
static bool is_open[TRACES];

static struct bs_trace_id some_id(void)
{
	struct bs_trace_id id = {1, take8(&in)};

	return id;
}

static void trace_some(void)
{
	static const unsigned char payload[BS_PAYLOAD_MAX];
	uint32_t i = take8(&in) % TRACES;
	struct bs_stats stats;

	switch (take8(&in) % 8) {
	case 0:
		bs_begin(some_id());
		break;
	case 1:
		bs_end();
		break;
	case 2:
		bs_write(NULL, BS_RECORD_DATA, payload, take16(&in) / 2);
		break;
	case 3:
		if (!is_open[i])
			is_open[i] = !bs_open(&traces[i], some_id());
		break;
	case 4:
		if (is_open[i])
			bs_write(&traces[i], BS_RECORD_DATA, payload,
				 take16(&in) / 2);
		break;
	case 5:
		if (is_open[i])
			bs_close(&traces[i]);
		is_open[i] = false;
		break;
	case 6:
		bs_trigger(some_id(), "fuzz", "because", NULL, 0);
		break;
	default:
		bs_get_stats(&stats);
	}
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc;
	(void)argv;
	/* It would answer itself, beside us. */
	is_started = true;
	bs_park_start();
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	in = (struct input){bytes, bytes + size};
	memset(request.token, 0, sizeof(request.token));
	while (!is_over(&in)) {
		uint8_t next_op = take8(&in);

		if (next_op == TICK) {
			tick();
			continue;
		}
		switch (next_op % 4) {
		case 0:
			answer();
			break;
		case 1:
			tell_news();
			break;
		default:
			trace_some();
		}
	}
	bs_end();
	for (uint32_t i = 0; i < TRACES; i++) {
		if (is_open[i])
			bs_close(&traces[i]);
		is_open[i] = false;
	}
	pthread_mutex_lock(&bs_process.lock);
	drop_attachment();
	bs_attachment_retire_old();
	pthread_mutex_unlock(&bs_process.lock);
	return 0;
}
