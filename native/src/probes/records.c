/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What probes saw of a trace goes into the pool as any application's records do:
 * through libbacksight. So it is found when the trace is triggered, whoever does it,
 * and goes with its segment when the pool is full.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "backsight.h"
#include "internal.h"

/* Records ring no bell: they are for triggers that come later, or follow their own
 * within this time, well before a coordinator's 200 ms of silence. */
#define LOOK_EVERY_MS 50

/* A moment shortly before now, by the counter that records are stamped by. */
static uint64_t ticks_at(const struct bsp *p, uint64_t time_ns)
{
	uint64_t now_ns = monotonic_ns(), now_ticks = bs_clock_ticks();
	double ticks_per_ns = 1;

	if (now_ns > p->paired_ns)
		ticks_per_ns = (double)(now_ticks - p->paired_ticks) /
			       (double)(now_ns - p->paired_ns);
	if (time_ns >= now_ns)
		return now_ticks;
	return now_ticks -
	       (uint64_t)((double)(now_ns - time_ns) * ticks_per_ns);
}

/* "@" and the address, which the coordinator looks for among those of its nodes. 0: of
 * this machine. */
static int crumb_of(const uint8_t *peer, char *text, size_t bytes)
{
	struct in6_addr address;

	memcpy(&address, peer, sizeof(address));
	text[0] = '@';
	if (IN6_IS_ADDR_V4MAPPED(&address)) {
		if (peer[12] == IN_LOOPBACKNET)
			return 0;
		return inet_ntop(AF_INET, &peer[12], text + 1,
				 (socklen_t)(bytes - 1)) != NULL;
	}
	if (IN6_IS_ADDR_LOOPBACK(&address))
		return 0;
	return inet_ntop(AF_INET6, &address, text + 1,
			 (socklen_t)(bytes - 1)) != NULL;
}

static void write_crumb(struct bsp *p, const struct probes_record *r)
{
	char crumb[1 + INET6_ADDRSTRLEN];

	if (!crumb_of(r->event.peer, crumb, sizeof(crumb)))
		return;
	if (bs_breadcrumb(NULL, crumb))
		fetch_add(&p->written.refused, 1);
	else
		fetch_add(&p->written.breadcrumbs, 1);
}

static int on_record(void *context, void *data, size_t bytes)
{
	const struct probes_record *r = data;
	struct bsp *p = context;
	const struct bs_trace_id id = {r->trace_hi, r->trace_lo};
	int err;

	if (bytes < sizeof(*r))
		return 0;
	if (r->event.kind == PROBES_USE) {
		users_add(p, r);
		if (!r->is_crumb)
			return 0;
	}
	if (bs_begin(id))
		return 0;
	if (r->event.kind == PROBES_USE) {
		write_crumb(p, r);
		bs_end();
		return 0;
	}
	err = bs_record_at(BS_RECORD_KERNEL, &r->event, sizeof(r->event),
			   ticks_at(p, r->event.time_ns));
	bs_end();
	if (err)
		fetch_add(&p->written.refused, 1);
	else
		fetch_add(&p->written.records, 1);
	return 0;
}

static int on_bell(void *context, void *data, size_t bytes)
{
	const uint64_t one = 1;
	struct bsp *p = context;
	ssize_t rung;

	(void)data;
	(void)bytes;
	pthread_mutex_lock(&p->lock);
	rung = p->bell < 0 ? 0 : write(p->bell, &one, sizeof(one));
	pthread_mutex_unlock(&p->lock);
	/* It fails after 2^64 rings that nobody heard. */
	(void)rung;
	return 0;
}

int records_open(struct bsp *p)
{
	p->bells = ring_buffer__new(map_fd(p, "bell"), on_bell, p, NULL);
	if (!p->bells)
		return -errno;
	p->records = ring_buffer__new(map_fd(p, "records"), on_record, p, NULL);
	if (!p->records)
		return -errno;
	p->stop = eventfd(0, EFD_CLOEXEC);
	return p->stop < 0 ? -errno : 0;
}

void records_close(struct bsp *p)
{
	ring_buffer__free(p->bells);
	ring_buffer__free(p->records);
	if (p->stop >= 0)
		close(p->stop);
	if (p->bell >= 0)
		close(p->bell);
}

int bsp_set_bell(struct bsp *p, int bell)
{
	int mine = bell < 0 ? -1 : dup(bell);

	if (bell >= 0 && mine < 0)
		return -errno;
	pthread_mutex_lock(&p->lock);
	if (p->bell >= 0)
		close(p->bell);
	p->bell = mine;
	pthread_mutex_unlock(&p->lock);
	return 0;
}

/* If not, ask for it: the library attaches who begins a trace. */
static bool is_attached(void)
{
	struct bs_stats stats;

	bs_get_stats(&stats);
	if (!stats.attached) {
		bs_begin((struct bs_trace_id){1, 1});
		bs_end();
	}
	return stats.attached;
}

int bsp_run(struct bsp *p)
{
	struct pollfd fds[2] = {
		{.fd = ring_buffer__epoll_fd(p->bells), .events = POLLIN},
		{.fd = p->stop, .events = POLLIN},
	};

	p->paired_ns = monotonic_ns();
	p->paired_ticks = bs_clock_ticks();
	while (!READ_ONCE(p->stopping)) {
		int got = poll(fds, 2, LOOK_EVERY_MS);

		if (got < 0 && errno != EINTR)
			return -errno;
		got = ring_buffer__consume(p->bells);
		/* While there is no node, what is there stays in the ring. */
		if (got >= 0 && is_attached())
			got = ring_buffer__consume(p->records);
		if (got < 0)
			return got;
	}
	return 0;
}

void bsp_stop(struct bsp *p)
{
	const uint64_t one = 1;

	WRITE_ONCE(p->stopping, true);
	if (write(p->stop, &one, sizeof(one)) < 0)
		return; /* it looks by itself */
}

void bsp_get_written(struct bsp *p, struct bsp_written *written)
{
	written->records = READ_ONCE(p->written.records);
	written->breadcrumbs = READ_ONCE(p->written.breadcrumbs);
	written->refused = READ_ONCE(p->written.refused);
}
