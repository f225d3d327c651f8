/* SPDX-License-Identifier: Apache-2.0 */
/* Doorbells. The protocol, and why no ring is lost, stand in abi.h. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

/* One waiter of a call is the node's own word. */
#define CLIENTS_A_CALL (FUTEX_WAITV_MAX - 1u)

/* With more clients than one call takes, calls take turns; a ring waits for
 * all other turns at most, which must stay below the 5 ms of a pick-up. */
#define ROUND_NS (4 * NS_PER_MS)

static int futex_wait_any(struct futex_waitv *waiters, uint32_t count,
			  int64_t timeout_ns)
{
	struct timespec until;

	if (timeout_ns >= 0) {
		clock_gettime(CLOCK_MONOTONIC, &until);
		until.tv_sec += timeout_ns / (int64_t)NS_PER_S;
		until.tv_nsec += timeout_ns % (int64_t)NS_PER_S;
		if (until.tv_nsec >= (long)NS_PER_S) {
			until.tv_sec++;
			until.tv_nsec -= (long)NS_PER_S;
		}
	}
	if (syscall(SYS_futex_waitv, waiters, count, 0,
		    timeout_ns < 0 ? NULL : &until, CLOCK_MONOTONIC) >= 0)
		return 0;
	return -errno;
}

static void waiter_set(struct futex_waitv *w, uint32_t *word, uint32_t value,
		       bool private)
{
	memset(w, 0, sizeof(*w));
	w->uaddr = (uintptr_t)word;
	w->val = value;
	w->flags = FUTEX_32 | (private ? FUTEX_PRIVATE_FLAG : 0);
}

void bsn_wake(struct bsn *n)
{
	__atomic_fetch_add(&n->waiting.wake_word, 1, __ATOMIC_RELEASE);
	syscall(SYS_futex, &n->waiting.wake_word, FUTEX_WAKE_PRIVATE, INT_MAX,
		NULL, NULL, 0);
}

static uint32_t *bell(struct client *c)
{
	return &header_of(c)->doorbell.rung;
}

/* The same without futex_waitv, which Linux before 5.16, some sandboxes and
 * emulators do not have: sleep on the node's own word, and look at the bells at
 * the pace that a pick-up needs. */
static int look_at(struct bsn *n, struct client **clients, const uint32_t *rung,
		   uint32_t count, uint32_t woken, int64_t timeout_ns)
{
	int64_t left = timeout_ns;

	for (;;) {
		int64_t slice = left >= 0 && left < (int64_t)ROUND_NS
					? left
					: (int64_t)ROUND_NS;
		const struct timespec pace = {.tv_nsec = slice};

		/* It was woken, its word had changed already, or a signal came. */
		if (!syscall(SYS_futex, &n->waiting.wake_word,
			     FUTEX_WAIT_PRIVATE, woken, &pace, NULL, 0) ||
		    errno != ETIMEDOUT)
			return 1;
		for (uint32_t i = 0; i < count; i++) {
			if (load_acquire(bell(clients[i])) != rung[i])
				return 1;
		}
		if (left >= 0) {
			left -= slice;
			if (left == 0)
				return 0;
		}
	}
}

/* Sleep on all of them. 1: something rang. */
static int sleep_on(struct bsn *n, struct client **clients, uint32_t *rung,
		    uint32_t count, uint32_t woken, int64_t timeout_ns)
{
	struct futex_waitv waiters[FUTEX_WAITV_MAX];
	uint32_t turns = (count + CLIENTS_A_CALL - 1) / CLIENTS_A_CALL;
	uint32_t turn = 0;
	int64_t left = timeout_ns;

	for (;;) {
		uint32_t first = turn * CLIENTS_A_CALL;
		uint32_t some = count - first;
		int64_t slice = left;
		int err;

		if (some > CLIENTS_A_CALL)
			some = CLIENTS_A_CALL;
		if (turns > 1) {
			int64_t share = (int64_t)(ROUND_NS / turns);

			if (left < 0 || share < left)
				slice = share;
		}
		waiter_set(&waiters[0], &n->waiting.wake_word, woken, true);
		for (uint32_t i = 0; i < some; i++)
			waiter_set(&waiters[i + 1], bell(clients[first + i]),
				   rung[first + i], false);
		err = futex_wait_any(waiters, some + 1, slice);
		/* -EAGAIN: a word had changed already. */
		if (!err || err == -EAGAIN)
			return 1;
		/* No such call, or no memory for it. */
		if (err != -ETIMEDOUT && err != -EINTR)
			return look_at(n, clients, rung, count, woken, left);
		if (left >= 0) {
			left -= slice;
			if (err == -ETIMEDOUT && left <= 0)
				return 0;
			if (err == -EINTR)
				return 1;
		}
		turn = turns ? (turn + 1) % turns : 0;
	}
}

int bsn_wait(struct bsn *n, int64_t timeout_ns)
{
	struct client **clients;
	uint32_t *rung;
	uint32_t count = 0;
	uint32_t woken;
	bool work = false;
	int result;

	node_lock(n);
	woken = n->waiting.wakes_seen;
	clients = calloc(n->clients.count + 1u, sizeof(struct client *));
	rung = calloc(n->clients.count + 1u, sizeof(*rung));
	if (!clients || !rung) {
		/* Without a list the caller polls. */
		node_unlock(n);
		free(clients);
		free(rung);
		return 1;
	}
	for (uint32_t i = 0; i < n->clients.count; i++) {
		struct client *c = n->clients.all[i];

		if (!c->live)
			continue;
		/* A cell that stays claimed is passed over in time. */
		if ((c->queue.stuck_ns || c->queue_before.stuck_ns) &&
		    (timeout_ns < 0 || timeout_ns > (int64_t)CELL_STUCK_NS))
			timeout_ns = (int64_t)CELL_STUCK_NS;
		clients[count] = c;
		rung[count++] = load_acquire(bell(c));
		WRITE_ONCE(header_of(c)->doorbell.sleeping, 1);
	}
	full_fence();
	for (uint32_t i = 0; i < count && !work; i++)
		work = client_has_work(n, clients[i]);
	n->waiting.threads++;
	node_unlock(n);

	result = work ? 1
		      : sleep_on(n, clients, rung, count, woken, timeout_ns);

	node_lock(n);
	if (load_acquire(&n->waiting.wake_word) != woken)
		result = 1;
	n->waiting.wakes_seen = load_acquire(&n->waiting.wake_word);
	for (uint32_t i = 0; i < count; i++)
		WRITE_ONCE(header_of(clients[i])->doorbell.sleeping, 0);
	if (!--n->waiting.threads)
		client_release_retired(n);
	node_unlock(n);
	free(clients);
	free(rung);
	return result;
}
