/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Doorbells. The protocol, and why no ring is lost, stand in abi/channel.h.
 *
 * One call of the kernel's sleeps on 128 words at most. So clients are in
 * groups of 127, of which each has a word of its own as well, that changes when
 * somebody comes or goes.
 *
 *   one group   bsn_wait() sleeps on the node's word and on the group's bells
 *   more        so does a thread for each group (its listener), without a
 *               time-out, and calls bsn_wake() when one of its bells rang;
 *               bsn_wait() sleeps on the node's word alone
 *
 *             arm: bells read, `sleeping` set, fence, no work found
 *     IDLE ------------------------------------------------> ARMED
 *      ^ ^        somebody comes or goes: the word changes     | |
 *      | +-----------------------------------------------------+ |
 *      |    `sleeping` cleared                  a bell rang      |
 *      +---------------------------- RANG <----------------------+
 *
 * Where nothing rang a group stays armed, and its listener asleep, while
 * others ring: to wait costs what has happened, not how many there are. A group
 * that is armed needs no second look, however often bsn_wait() comes back: all
 * that its clients published since the one look is rung for. What a look passes
 * over because events have no more room is looked at when they have: see
 * bsn_events().
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

/* One waiter of a call is the group's or the node's own word. */
#define GROUP_CLIENTS (FUTEX_WAITV_MAX - 1u)

/* Where there is no futex_waitv, or no thread can be had: below the 5 ms of a
 * pick-up. */
#define PACE_NS (4 * NS_PER_MS)

enum group_state {
	GROUP_IDLE,
	GROUP_ARMED,
	GROUP_RANG,
};

/* Who rings without end and wants nothing would keep the node awake for ever. After so
 * many rings in vain, one after the other, the node does not listen to bells for PACE_NS;
 * then again after each further one, until one was not in vain. Honest processes ring
 * when there is work. */
#define IN_VAIN_MAX 16u

/* A client's memory is unmapped by who holds the node's lock, after it has left
 * its group. So the bells may be read with either lock. */
struct group {
	struct bsn *node;
	/* Taken after the node's. All that follows changes with both, but that the
	 * listener, which has not the node's, says that a bell rang. */
	pthread_mutex_t lock;
	pthread_cond_t armed;
	enum group_state state;
	bool stopping;
	uint32_t word; /* futex; counts arming, coming and going */
	uint32_t count;
	struct client *clients[GROUP_CLIENTS];
	/* What to sleep on besides a word, which is the first: the bells, as of
	 * arming. */
	struct futex_waitv waiters[FUTEX_WAITV_MAX];
	pthread_t listener;
	bool has_listener;
};

/* ------------------------------------------------------------- sleeping --- */

static void count_wake_up(struct bsn *n)
{
	fetch_add(&n->waiting.wake_ups, 1);
}

static struct timespec timespec_of(int64_t ns)
{
	return (struct timespec){
		.tv_sec = ns / (int64_t)NS_PER_S,
		.tv_nsec = ns % (int64_t)NS_PER_S,
	};
}

static int sleep_on_any(struct bsn *n, const struct futex_waitv *waiters,
			uint32_t count, int64_t timeout_ns)
{
	struct timespec until;
	int err = 0;

	if (timeout_ns >= 0) {
		struct timespec left = timespec_of(timeout_ns);

		clock_gettime(CLOCK_MONOTONIC, &until);
		until.tv_sec += left.tv_sec;
		until.tv_nsec += left.tv_nsec;
		if (until.tv_nsec >= (long)NS_PER_S) {
			until.tv_sec++;
			until.tv_nsec -= (long)NS_PER_S;
		}
	}
	if (syscall(SYS_futex_waitv, waiters, count, 0,
		    timeout_ns < 0 ? NULL : &until, CLOCK_MONOTONIC) < 0)
		err = -errno;
	count_wake_up(n);
	return err;
}

/* 0: the time-out. 1: anything else. */
static int sleep_on_one(struct bsn *n, const uint32_t *word, uint32_t value,
			int64_t timeout_ns)
{
	struct timespec timeout = timespec_of(timeout_ns < 0 ? 0 : timeout_ns);
	bool timed_out = syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value,
				 timeout_ns < 0 ? NULL : &timeout, NULL, 0) &&
			 errno == ETIMEDOUT;

	count_wake_up(n);
	return !timed_out;
}

static void waiter_set(struct futex_waitv *w, const uint32_t *word,
		       uint32_t value, bool private)
{
	memset(w, 0, sizeof(*w));
	w->uaddr = (uintptr_t)word;
	w->val = value;
	w->flags = FUTEX_32 | (private ? FUTEX_PRIVATE_FLAG : 0);
}

static void word_change(uint32_t *word)
{
	fetch_add_release(word, 1);
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void bsn_wake(struct bsn *n)
{
	word_change(&n->waiting.wake_word);
}

/* ---------------------------------------------------------------- bells --- */

static struct bs_doorbell *bell_of(const struct client *c)
{
	return &header_of(c)->doorbell;
}

/* Whether somebody rang, came or went since it was armed. */
static bool has_changed(struct group *g, uint32_t as_armed)
{
	bool changed;

	pthread_mutex_lock(&g->lock);
	changed = g->word != as_armed;
	for (uint32_t i = 0; i < g->count && !changed; i++)
		changed = load_acquire(&bell_of(g->clients[i])->rung) !=
			  g->waiters[i + 1].val;
	pthread_mutex_unlock(&g->lock);
	return changed;
}

/* The same without futex_waitv, which Linux before 5.16, some sandboxes and
 * emulators do not have: sleep on the own word, and look at the bells at the
 * pace that a pick-up needs. */
static int look_at(struct group *g, uint32_t as_armed, const uint32_t *word,
		   uint32_t value, int64_t timeout_ns)
{
	int64_t left = timeout_ns;

	for (;;) {
		int64_t slice = left >= 0 && left < (int64_t)PACE_NS
					? left
					: (int64_t)PACE_NS;

		/* It was woken, its word had changed already, or a signal came. */
		if (sleep_on_one(g->node, word, value, slice) ||
		    has_changed(g, as_armed))
			return 1;
		if (left >= 0) {
			left -= slice;
			if (left == 0)
				return 0;
		}
	}
}

/* Until a bell of the group rings, or the word is not that value any more; all
 * but the first of the waiters are as armed. 0: the time-out. */
static int sleep_on_bells(struct group *g, uint32_t as_armed,
			  const uint32_t *word, uint32_t value,
			  struct futex_waitv *waiters, uint32_t count,
			  int64_t timeout_ns)
{
	int err;

	waiter_set(&waiters[0], word, value, true);
	err = sleep_on_any(g->node, waiters, count, timeout_ns);
	switch (err) {
	case -ETIMEDOUT:
		return 0;
	case 0:
	case -EAGAIN: /* A word had changed already. */
	case -EINTR:
	case -EFAULT: /* A client has gone. */
		return 1;
	default: /* No such call, or no memory for it. */
		return look_at(g, as_armed, word, value, timeout_ns);
	}
}

/* Listen to it from here on, unless there is work already. */
static bool group_arm(struct bsn *n, struct group *g)
{
	bool work = false;

	pthread_mutex_lock(&g->lock);
	for (uint32_t i = 0; i < g->count; i++) {
		struct bs_doorbell *bell = bell_of(g->clients[i]);

		waiter_set(&g->waiters[i + 1], &bell->rung,
			   load_acquire(&bell->rung), false);
		WRITE_ONCE(bell->sleeping, 1);
	}
	full_fence();
	for (uint32_t i = 0; i < g->count && !work; i++)
		work = client_has_work(n, g->clients[i]);
	store_release(&g->word, g->word + 1);
	g->state = work ? GROUP_IDLE : GROUP_ARMED;
	pthread_cond_signal(&g->armed);
	pthread_mutex_unlock(&g->lock);
	return !work;
}

static bool is_armed(struct group *g)
{
	bool armed;

	pthread_mutex_lock(&g->lock);
	armed = g->state == GROUP_ARMED;
	pthread_mutex_unlock(&g->lock);
	return armed;
}

static bool has_rung(struct group *g)
{
	bool rang;

	pthread_mutex_lock(&g->lock);
	rang = g->state == GROUP_RANG;
	pthread_mutex_unlock(&g->lock);
	return rang;
}

/* Whether somebody of it has rung with reason. Nothing was done for it yet. */
static bool group_has_work(const struct bsn *n, const struct group *g)
{
	for (uint32_t i = 0; i < g->count; i++) {
		if (client_has_work(n, g->clients[i]))
			return true;
	}
	return false;
}

/* Nobody needs to ring: the node is awake. */
static void group_disarm(struct group *g)
{
	pthread_mutex_lock(&g->lock);
	for (uint32_t i = 0; i < g->count; i++)
		WRITE_ONCE(bell_of(g->clients[i])->sleeping, 0);
	g->state = GROUP_IDLE;
	pthread_mutex_unlock(&g->lock);
}

/* ------------------------------------------------------------ listeners --- */

static void *listen(void *argument)
{
	struct group *g = argument;
	struct futex_waitv waiters[FUTEX_WAITV_MAX];

	pthread_mutex_lock(&g->lock);
	while (!g->stopping) {
		uint32_t as_armed = g->word;
		uint32_t count = g->count + 1;

		if (g->state != GROUP_ARMED) {
			pthread_cond_wait(&g->armed, &g->lock);
			continue;
		}
		memcpy(waiters, g->waiters, count * sizeof(*waiters));
		pthread_mutex_unlock(&g->lock);
		sleep_on_bells(g, as_armed, &g->word, as_armed, waiters, count,
			       -1);
		pthread_mutex_lock(&g->lock);
		/* Else that was for those who were there before. */
		if (g->word == as_armed) {
			g->state = GROUP_RANG;
			pthread_mutex_unlock(&g->lock);
			bsn_wake(g->node);
			pthread_mutex_lock(&g->lock);
		}
	}
	pthread_mutex_unlock(&g->lock);
	return NULL;
}

/* False: no thread can be had now. */
static bool group_has_listener(struct group *g)
{
	sigset_t all, before;

	if (g->has_listener)
		return true;
	/* Signals are the program's affair, and for its own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	g->has_listener = !pthread_create(&g->listener, NULL, listen, g);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return g->has_listener;
}

/* --------------------------------------------------------------- groups --- */

static uint32_t groups_most(const struct bsn *n)
{
	return (n->config.clients_max + GROUP_CLIENTS - 1) / GROUP_CLIENTS;
}

int wait_init(struct bsn *n)
{
	n->waiting.groups = calloc(groups_most(n), sizeof(struct group));
	return n->waiting.groups ? 0 : -ENOMEM;
}

void wait_free(struct bsn *n)
{
	for (uint32_t i = 0; i < n->waiting.n_groups; i++) {
		struct group *g = &n->waiting.groups[i];

		pthread_mutex_lock(&g->lock);
		g->stopping = true;
		word_change(&g->word);
		pthread_cond_signal(&g->armed);
		pthread_mutex_unlock(&g->lock);
		if (g->has_listener)
			pthread_join(g->listener, NULL);
		pthread_cond_destroy(&g->armed);
		pthread_mutex_destroy(&g->lock);
	}
	free(n->waiting.groups);
}

/* Whoever listens does it to others from here on. */
static void group_changed(struct group *g)
{
	g->state = GROUP_IDLE;
	word_change(&g->word);
}

static struct group *group_with_room(struct bsn *n)
{
	struct waiting *w = &n->waiting;
	struct group *g = w->groups;

	for (; g < w->groups + w->n_groups; g++) {
		if (g->count < GROUP_CLIENTS)
			return g;
	}
	/* There are groups for as many clients as there may be. */
	w->n_groups++;
	g->node = n;
	pthread_mutex_init(&g->lock, NULL);
	pthread_cond_init(&g->armed, NULL);
	return g;
}

/* The caller wakes the node when the client can be listened to, and when it
 * must not be any more: it may sleep on the bells itself. */
void wait_join(struct bsn *n, struct client *c)
{
	struct group *g = group_with_room(n);

	pthread_mutex_lock(&g->lock);
	c->group = g;
	g->clients[g->count++] = c;
	group_changed(g);
	pthread_mutex_unlock(&g->lock);
}

void wait_leave(struct client *c)
{
	struct group *g = c->group;
	uint32_t i = 0;

	pthread_mutex_lock(&g->lock);
	while (g->clients[i] != c)
		i++;
	g->clients[i] = g->clients[--g->count];
	c->group = NULL;
	group_changed(g);
	pthread_mutex_unlock(&g->lock);
}

/* ----------------------------------------------------------------- wait --- */

/* Arm what is not. False: there is work. *heard: somebody listens to each. */
static bool arm_all(struct bsn *n, bool *heard)
{
	struct waiting *w = &n->waiting;

	for (uint32_t i = 0; i < w->n_groups; i++) {
		struct group *g = &w->groups[i];

		if (w->n_groups > 1 && !group_has_listener(g))
			*heard = false;
		if (is_armed(g))
			continue;
		if (!group_arm(n, g))
			return false;
		/* Whoever comes meanwhile wakes the node. */
		node_give_way(n);
	}
	return true;
}

static int64_t shorter_ns(int64_t timeout_ns, uint64_t most_ns)
{
	return timeout_ns < 0 || timeout_ns > (int64_t)most_ns
		       ? (int64_t)most_ns
		       : timeout_ns;
}

/* The caller looks itself, with the poll that follows. */
static int sleep_without_bells(struct bsn *n, uint32_t woken,
			       int64_t timeout_ns)
{
	sleep_on_one(n, &n->waiting.wake_word, woken,
		     shorter_ns(timeout_ns, PACE_NS));
	return 1;
}

int bsn_wait(struct bsn *n, int64_t timeout_ns)
{
	struct futex_waitv waiters[FUTEX_WAITV_MAX];
	struct waiting *w = &n->waiting;
	uint32_t woken, as_armed = 0, count = 0;
	bool alone, heard, work, rang, in_vain = true;
	int result;

	node_lock(n);
	woken = w->wakes_seen;
	/* A cell that stays claimed is passed over in time. */
	if (w->cell_is_stuck)
		timeout_ns = shorter_ns(timeout_ns, CELL_STUCK_NS);
	if (n->searches)
		timeout_ns = shorter_ns(timeout_ns, search_due_in_ns(n));
	heard = w->in_vain < IN_VAIN_MAX;
	work = heard && !arm_all(n, &heard);
	alone = heard && w->n_groups == 1;
	if (alone) {
		as_armed = w->groups->word;
		count = w->groups->count + 1;
		memcpy(waiters, w->groups->waiters, count * sizeof(*waiters));
	}
	node_unlock(n);

	if (work)
		result = 1;
	else if (alone)
		result = sleep_on_bells(w->groups, as_armed, &w->wake_word,
					woken, waiters, count, timeout_ns);
	else if (heard)
		result = sleep_on_one(n, &w->wake_word, woken, timeout_ns);
	else
		result = sleep_without_bells(n, woken, timeout_ns);

	node_lock(n);
	rang = alone && result && !work && load_acquire(&w->wake_word) == woken;
	if (load_acquire(&w->wake_word) != woken)
		result = 1;
	w->wakes_seen = load_acquire(&w->wake_word);
	for (uint32_t i = 0; i < w->n_groups; i++) {
		struct group *g = &w->groups[i];
		bool did = has_rung(g) || (rang && i == 0);

		rang |= did;
		if (did && group_has_work(n, g))
			in_vain = false;
		/* On the first this thread slept itself, if it was alone. */
		if ((alone && i == 0) || !is_armed(g))
			group_disarm(g);
	}
	if (work || (rang && !in_vain))
		w->in_vain = 0;
	else if (rang && w->in_vain < IN_VAIN_MAX)
		w->in_vain++;
	else if (!rang && w->in_vain == IN_VAIN_MAX)
		w->in_vain--;
	node_unlock(n);
	return result;
}
