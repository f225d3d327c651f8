// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which disk a thread asks for what: noted when it does, for when it waits for it
 * (waits.bpf.c). What is written back later, by threads of the kernel, is nobody's.
 */
#include "cost.h"
#include "thread.h"

LICENSE_IS("Dual BSD/GPL");

/* As the kernel numbers devices (MKDEV). */
static __always_inline __u32 disk_of(const struct gendisk *disk)
{
	return (__u32)READ(disk, major) << 20 | (__u32)READ(disk, first_minor);
}

static __always_inline void note_user(__u32 number, const struct shown *s,
				      __u64 now, const struct timed *timed)
{
	const struct disk nobody = {};
	struct disk *disk = bpf_map_lookup_elem(MAP(disks), &number);
	__u32 place;

	if (!disk) {
		bpf_map_update_elem(MAP(disks), &number, &nobody, BPF_NOEXIST);
		disk = bpf_map_lookup_elem(MAP(disks), &number);
		if (!disk) {
			count_map_error(timed);
			return;
		}
	}
	place = (disk->next - 1) % DISK_USERS;
	if (disk->users[place].hi != s->hi || disk->users[place].lo != s->lo) {
		place = disk->next % DISK_USERS;
		disk->next++;
	}
	disk->users[place].hi = s->hi;
	disk->users[place].lo = s->lo;
	disk->users[place].asked_ns = now;
}

/* A disk that is made of others (LVM, MD) asks them in the same thread, within the request to
 * itself (current->bio_list). That says which disk does the work; its bytes are counted already. */
static __always_inline void note_asked(struct probes_thread *t,
				       const struct shown *s, __u32 number,
				       __u32 bytes, bool is_within, __u64 now)
{
	/* It does not wait for what it asked before that. */
	if (t->disk_hi != s->hi || t->disk_lo != s->lo ||
	    t->disk_asked_ns + ASKED_LATELY_NS < now ||
	    (t->disk_asked != number && !is_within))
		t->disk_bytes = 0;
	if (!is_within) {
		t->disk_asked = number;
		t->disk_bytes += bytes;
	}
	t->disk = number;
	t->disk_asked_ns = now;
	t->disk_hi = s->hi;
	t->disk_lo = s->lo;
}

TRACEPOINT(block_bio_queue, on_bio, struct bio *bio)
{
	const struct probes_settings *settings_now = only(MAP(settings));
	struct shown shown = {};
	struct gendisk *disk;
	struct timed timed;
	struct task_struct *task;
	struct probes_thread *t;
	__u64 now;

	if (!settings_now || settings_now->bypass || !current_may_be_ours())
		return 0;
	timed = timed_begin(PROGRAM_on_bio);
	now = bpf_ktime_get_ns();
	task = bpf_get_current_task_btf();
	t = thread_of(task);
	if (t && look(t, now, &shown)) {
		/* By calls: each look at a field takes the verifier 20 us. */
		disk = READ(bio, bi_bdev, bd_disk);
		note_asked(t, &shown, disk_of(disk), READ(bio, bi_iter.bi_size),
			   FIELD(task, bio_list) != 0, now);
		bpf_probe_read_kernel_str(t->disk_name, sizeof(t->disk_name),
					  disk->disk_name);
		note_user(t->disk, &shown, now, &timed);
	}
	timed_end(&timed);
	return 0;
}
