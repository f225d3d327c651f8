/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mappings are MADV_DONTFORK: in the child there is nothing where they
 * were, and the attach thread does not exist. The child starts from nowhere,
 * and attaches by itself when it first begins a trace. Its epochs go on from
 * the parent's, so that a handle which it inherited is known as such.
 *
 * fork() tells us. A raw clone() does not: then bs_process is found to be zero,
 * by whatever the child calls first. That is in time but for one thing, which
 * the header inlines: a record at a time of the caller's own (bs_record_at())
 * in a run that was open.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client.h"

struct bs_process bs_process __attribute__((aligned(BS_PAGE_BYTES_MAX)));
const bool *const bs_clock_is_counter = &bs_process.clock_is_counter;

/* As in a process that has not attached yet. */
static void begin_process(void)
{
	pthread_mutex_init(&bs_process.lock, NULL);
	pthread_cond_init(&bs_process.changed, NULL);
	/* Until a daemon says otherwise, since what is stamped before is
	 * dropped anyway. */
	WRITE_ONCE(bs_process.clock_is_counter, BS_HAS_CPU_COUNTER);
	store_release(&bs_process.current, &bs_nowhere);
}

void bs_process_renew(void)
{
	memset(&bs_writer, 0, sizeof(bs_writer));
	memset(&bs_thread, 0, sizeof(bs_thread));
	bs_members_forget();
	bs_attachments = NULL;
	bs_fork_epoch = bs_epoch;
	bs_nowhere.epoch = ++bs_epoch;
	bs_nowhere.refs = 2;
	bs_stats_forget();
	bs_attach_forget();
	bs_prefault_forget();
	bs_fired_forget();
	begin_process();
}

static void before_fork(void)
{
	pthread_mutex_lock(&bs_process.lock);
}

static void after_fork_in_parent(void)
{
	pthread_mutex_unlock(&bs_process.lock);
}

/* Here, unlike after a raw clone(), the heap can be used. */
static void after_fork_in_child(void)
{
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
	bs_process_renew();
}

__attribute__((constructor)) static void watch_forks(void)
{
	/* Linux before 4.14 does not: then only fork() is noticed. */
	madvise(&bs_process, sizeof(bs_process), MADV_WIPEONFORK);
	if (bs_process_is_new())
		begin_process();
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}
