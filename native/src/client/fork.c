/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mappings are MADV_DONTFORK: in the child there is nothing where they
 * were, and the attach thread does not exist. The child starts from nowhere,
 * and attaches by itself when it first begins a trace. Its epochs go on from
 * the parent's, so that a handle which it inherited is known as such.
 */
#include <stdlib.h>
#include <string.h>

#include "client.h"

static void before_fork(void)
{
	pthread_mutex_lock(&bs_lock);
}

static void after_fork_in_parent(void)
{
	pthread_mutex_unlock(&bs_lock);
}

static void after_fork_in_child(void)
{
	memset(&bs_writer, 0, sizeof(bs_writer));
	memset(&bs_thread, 0, sizeof(bs_thread));
	while (bs_members) {
		struct bs_member *m = bs_members;

		bs_members = m->next;
		free(m);
	}
	while (bs_attachments) {
		struct bs_attachment *a = bs_attachments;

		bs_attachments = a->next;
		free(a);
	}
	bs_fork_epoch = bs_epoch;
	bs_nowhere.epoch = ++bs_epoch;
	bs_nowhere.refs = 2;
	bs_current = &bs_nowhere;
	bs_stats_forget();
	bs_attach_forget();
	bs_prefault_forget();
	bs_fired_forget();
	/* Who waited on it was another thread. */
	pthread_cond_init(&bs_changed, NULL);
	pthread_mutex_unlock(&bs_lock);
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}
