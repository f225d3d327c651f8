/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that processes touch and were not granted. */
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "old_kernel.h"
#include "writer.h"

static uint64_t memory_of(const struct writer *w)
{
	struct stat st;

	CHECK_EQ(fstat(w->fds.arena, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

/* What nobody was granted. */
static void touch(const struct writer *w, uint64_t from)
{
	for (uint64_t at = from; at < w->arena_bytes; at += 4096)
		w->arena[at] = 1;
}

/* Short processes touch all of their arenas, and end. What was theirs is gone;
 * what they had been granted, and wrote, is there until it is reclaimed. */
static void short_processes_leave_nothing(void)
{
	enum {
		PROCESSES = 30
	};
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w[PROCESSES];
	uint64_t now = START, sum = 0, all = 0;
	struct wthread t;

	for (uint32_t i = 0; i < PROCESSES; i++) {
		now += MS;
		writer_attach(&w[i], n, now);
		t = writer_thread(&w[i], 0);
		CHECK(w_trace(&t, trace_id(i), 100, now));
		touch(&w[i], SEG * (t.segment + 1));
		CHECK_EQ(bsn_client_exited(n, w[i].number, now), 0);
		bsn_poll(n, now);
	}
	for (uint32_t i = 0; i < 100; i++)
		bsn_poll(n, now);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		sum += memory_of(&w[i]);
		all += w[i].arena_bytes;
	}
	bsn_get_metrics(n, &m);
	printf("%d processes touched %ju MiB; of it %ju KiB stayed\n",
	       PROCESSES, (uintmax_t)all >> 20, (uintmax_t)sum >> 10);
	CHECK(sum <= m.pool_used_bytes);
	CHECK(sum <= PROCESSES * SEG);
	CHECK(m.taken_back_bytes >= all / 2);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		collect(n, trace_id(i), now, &s);
		CHECK_EQ(s.flags, BSN_SLICE_HELD);
		writer_close(&w[i]);
	}
	bsn_free(n);
}

/* One that lives does so again and again. */
static void a_process_that_touches_all(void)
{
	struct bsn_config config = test_config(64 << 20);
	struct bsn *n = test_node(&config);
	struct bsn_metrics m;
	struct bsn_slice s;
	struct writer w[2];
	struct wthread t[2];
	uint64_t now = START, taken = 0;

	for (int i = 0; i < 2; i++) {
		writer_attach(&w[i], n, now);
		t[i] = writer_thread(&w[i], 0);
	}
	for (uint32_t round = 0; round < 5; round++) {
		uint64_t before = taken;

		/* An honest one goes unnoticed, whatever its arena has. */
		for (uint32_t i = 0; i < 20; i++) {
			CHECK(w_trace(&t[0], trace_id(round * 100 + i), 30000,
				      now));
			CHECK(w_trace(&t[1], trace_id(1000 + round * 100 + i),
				      30000, now));
			bsn_poll(n, now);
		}
		now += 2 * SECOND;
		bsn_poll(n, now);
		bsn_get_metrics(n, &m);
		CHECK_EQ(m.taken_back_bytes, before);
		touch(&w[1], w[1].arena_bytes / 2);
		for (uint32_t i = 0; i < 8; i++) {
			now += 500 * MS;
			bsn_poll(n, now);
		}
		bsn_get_metrics(n, &m);
		taken = m.taken_back_bytes;
		CHECK(taken > before);
		CHECK(memory_of(&w[1]) <= m.pool_used_bytes + (1 << 20));
		CHECK(memory_of(&w[0]) + memory_of(&w[1]) <= m.pool_bytes);
		if (round == 2) {
			n = restart(n, &config, w, 2, now);
			taken = 0;
		}
	}
	for (uint32_t round = 0; round < 5; round++) {
		for (uint32_t i = 0; i < 20; i++) {
			collect(n, trace_id(round * 100 + i), now, &s);
			CHECK_EQ(s.flags, BSN_SLICE_HELD);
		}
	}
	for (int i = 0; i < 2; i++)
		writer_close(&w[i]);
	bsn_free(n);
}

/* qemu says that it gave memory back, and does nothing (linux-user, MADV_REMOVE). */
static bool memory_can_be_given_back(void)
{
	int fd = memfd_create("test", MFD_CLOEXEC);
	uint8_t *bytes;
	bool given;

	CHECK(fd >= 0);
	CHECK_EQ(ftruncate(fd, SEG), 0);
	bytes = mmap(NULL, SEG, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(bytes != MAP_FAILED);
	bytes[0] = 1;
	CHECK_EQ(madvise(bytes, SEG, MADV_REMOVE), 0);
	given = bytes[0] == 0;
	munmap(bytes, SEG);
	close(fd);
	return given;
}

/* Of a kernel since Linux 6.3 (MFD_NOEXEC_SEAL). */
#define NOEXEC_SEAL 0x0008u

static bool can_be_run(int fd)
{
	struct stat st;

	CHECK_EQ(fstat(fd, &st), 0);
	return st.st_mode & 0111;
}

static void make_node(bool can_run)
{
	struct bsn_config config = test_config(8 << 20);
	struct bsn *n = test_node(&config);
	struct writer w;

	writer_attach(&w, n, START);
	CHECK_EQ(can_be_run(bsn_store_fd(n)), can_run);
	CHECK_EQ(can_be_run(bsn_keep_fd(n)), can_run);
	CHECK_EQ(can_be_run(bsn_policy_fd(n)), can_run);
	CHECK_EQ(can_be_run(w.fds.arena), can_run);
	CHECK_EQ(can_be_run(w.fds.channel), can_run);
	CHECK_EQ(can_be_run(w.fds.context), can_run);
	free_with_writer(n, &w);
}

static bool kernel_knows_noexec(void)
{
	int fd = memfd_create("test", MFD_CLOEXEC | NOEXEC_SEAL);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static void nobody_can_run_what_is_shared(void)
{
	make_node(!kernel_knows_noexec());
	forget_memfd_flag(NOEXEC_SEAL);
	make_node(!kernel_knows_noexec());
}

int main(void)
{
	if (!memory_can_be_given_back()) {
		puts("emulated: memory cannot be given back");
		return 77; /* skipped, for Meson */
	}
	RUN(short_processes_leave_nothing);
	RUN(a_process_that_touches_all);
	/* The last: it takes something from the kernel. */
	RUN(nobody_can_run_what_is_shared);
	return 0;
}
