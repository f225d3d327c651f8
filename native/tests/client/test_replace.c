/* SPDX-License-Identifier: Apache-2.0 */
/* A context and a policy table that are replaced while threads use them. */
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "fake_node.h"

#define THREADS 4
#define REPLACEMENTS 25
/* At least so many triggers of each thread between two replacements. */
#define TRIGGERS 200

static struct fake_node node;
static uint64_t news_number;

static struct bs_trace_id trace(uint64_t number)
{
	return (struct bs_trace_id){9, number};
}

/* What the node does: drain the old queue until the answer comes, and what is
 * in it then. */
static void replace(void (*got)(const struct bs_trigger_cell *))
{
	struct bs_context_segment *old = node.context;
	uint32_t tail = node.trigger_tail;
	struct bs_context_segment *context;
	struct bs_trigger_cell cell;
	int fd;

	context = fake_node_make_context(&fd);
	fake_node_news(&node, BS_NEWS_CONTEXT, ++news_number, fd);
	while (!fake_node_answered(&node, news_number)) {
		while (fake_queue_trigger(old, &tail, &cell))
			got(&cell);
		sched_yield();
	}
	while (fake_queue_trigger(old, &tail, &cell))
		got(&cell);
	/* Nobody is inside any more. */
	CHECK_EQ(READ_ONCE(old->trigger_head), tail);
	munmap(old, sizeof(*old));
	fake_node_use_context(&node, context, fd);
}

static void none_is_expected(const struct bs_trigger_cell *cell)
{
	CHECK_EQ(cell->trace_lo, 0);
}

/* --------------------------------------------------------- one thread --- */

static int open_fds(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += dup2(fd, fd) >= 0;
	return n;
}

static void test_what_is_shown_moves(void)
{
	struct bs_trigger_cell cell;
	int before = open_fds();
	uint32_t tid;

	CHECK_EQ(bs_begin(trace(1)), 0);
	tid = node.context->slots[0].tid;
	CHECK(tid != 0);
	replace(none_is_expected);
	CHECK_EQ(open_fds(), before);
	CHECK_EQ(node.context->slots[0].tid, tid);
	CHECK_EQ(node.context->slots[0].trace_hi, trace(1).hi);
	CHECK_EQ(node.context->slots[0].trace_lo, 1);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(node.context->slots[0].trace_hi, 0);
	CHECK_EQ(node.context->slots[0].trace_lo, 0);
	CHECK_EQ(bs_trigger(trace(1), "t", NULL, NULL, 0), 0);
	CHECK(fake_node_trigger(&node, &cell));
	CHECK_EQ(cell.trace_lo, 1);
}

static int triggers_left;

static void count_left(const struct bs_trigger_cell *cell)
{
	CHECK_EQ(cell->trace_lo, 2);
	triggers_left++;
}

static void test_old_queue_is_drained(void)
{
	struct bs_trigger_cell cell;

	for (int i = 0; i < 10; i++)
		CHECK_EQ(bs_trigger(trace(2), "t", NULL, NULL, 0), 0);
	replace(count_left);
	CHECK_EQ(triggers_left, 10);
	CHECK(!fake_node_trigger(&node, &cell));
}

static void refuse(int fd)
{
	fake_node_news(&node, BS_NEWS_CONTEXT, ++news_number, fd);
	/* What is refused is not answered; the next one is. */
	replace(none_is_expected);
}

/* A daemon that came back does not know what its predecessor was told: it sends
 * the context again. That is answered, and nothing else. */
static void test_the_same_again_is_answered(void)
{
	uint32_t tid;

	CHECK_EQ(bs_begin(trace(5)), 0);
	replace(none_is_expected);
	tid = node.context->slots[0].tid;
	CHECK(tid != 0);
	fake_node_news(&node, BS_NEWS_CONTEXT, news_number,
		       node.fds[BS_FD_CONTEXT]);
	while (!fake_node_answered(&node, news_number))
		sched_yield();
	CHECK_EQ(node.context->slots[0].tid, tid);
	CHECK_EQ(node.context->slots[0].trace_hi, trace(5).hi);
	CHECK_EQ(node.context->slots[0].trace_lo, 5);
	CHECK_EQ(bs_end(), 0);
}

static void test_nonsense_is_refused(void)
{
	struct bs_context_segment *context;
	int fd;

	CHECK_EQ(bs_begin(trace(3)), 0);
	refuse(STDERR_FILENO);
	refuse(node.fds[BS_FD_ARENA]);
	context = fake_node_make_context(&fd);
	context->version = BS_ABI_VERSION + 1;
	refuse(fd);
	context->version = BS_ABI_VERSION;
	context->thread_slots--;
	refuse(fd);
	munmap(context, sizeof(*context));
	close(fd);
	fd = memfd_create("test", MFD_CLOEXEC); /* not sealed */
	CHECK_EQ(ftruncate(fd, sizeof(*context)), 0);
	refuse(fd);
	close(fd);
	CHECK_EQ(node.context->slots[0].trace_lo, 3);
	CHECK_EQ(bs_end(), 0);
}

/* As the probes' daemon makes it. Where the test may not, there is nothing to
 * see: the library is not told which of both it has. */
static void test_bpf_map(void)
{
	union bpf_attr attr = {
		.map_type = BPF_MAP_TYPE_ARRAY,
		.key_size = sizeof(uint32_t),
		.value_size = sizeof(struct bs_context_segment),
		.max_entries = 1,
		.map_flags = BPF_F_MMAPABLE,
	};
	int fd = (int)syscall(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof(attr));
	struct bs_context_segment *context, *old = node.context;

	if (fd < 0 && (errno == EPERM || errno == ENOSYS) &&
	    !getenv("BACKSIGHT_REQUIRE_EBPF")) {
		puts("  no BPF map: this needs CAP_BPF");
		return;
	}
	CHECK(fd >= 0);
	context = mmap(NULL, sizeof(*context), PROT_READ | PROT_WRITE,
		       MAP_SHARED, fd, 0);
	CHECK(context != MAP_FAILED);
	memcpy(context, old, sizeof(*context));
	context->trigger_head = 0;
	for (uint32_t i = 0; i < BS_TRIGGER_CELLS; i++)
		context->cells[i].seq = i;
	CHECK_EQ(bs_begin(trace(4)), 0);
	fake_node_news(&node, BS_NEWS_CONTEXT, ++news_number, fd);
	while (!fake_node_answered(&node, news_number))
		sched_yield();
	munmap(old, sizeof(*old));
	fake_node_use_context(&node, context, fd);
	CHECK_EQ(context->slots[0].trace_lo, 4);
	CHECK_EQ(bs_end(), 0);
	CHECK_EQ(context->slots[0].trace_lo, 0);
	CHECK_EQ(bs_trigger(trace(4), "t", NULL, NULL, 0), 0);
	triggers_left = 0;
	CHECK_EQ(context->trigger_head, 1);
	CHECK_EQ(context->cells[0].trace_lo, 4);
	node.trigger_tail = 1;
	/* And back. */
	replace(none_is_expected);
}

/* --------------------------------------------- begin while it happens --- */

#define CHANGES 200

static uint32_t round_begun, round_done;

static void spin(uint32_t n)
{
	for (volatile uint32_t i = 0; i < n; i++)
		;
}

static void *begin_once_a_round(void *argument)
{
	uint32_t random = 1;

	(void)argument;
	for (uint32_t round = 1; round <= CHANGES; round++) {
		while (load_acquire(&round_begun) != round)
			sched_yield();
		random = random * 1664525 + 1013904223;
		spin(random >> 15);
		/* Both words differ from those of the last round. */
		bs_begin((struct bs_trace_id){round, round});
		store_release(&round_done, round);
	}
	while (load_acquire(&round_begun) == CHANGES)
		sched_yield();
	bs_end();
	return NULL;
}

/* Whatever the thread wrote last stands there, whichever of both contexts it was
 * written to. */
static void test_begin_meanwhile(void)
{
	const struct bs_thread_slot *slot;
	pthread_t thread;

	CHECK_EQ(pthread_create(&thread, NULL, begin_once_a_round, NULL), 0);
	for (uint32_t round = 1; round <= CHANGES; round++) {
		store_release(&round_begun, round);
		replace(none_is_expected);
		while (load_acquire(&round_done) != round)
			sched_yield();
		slot = &node.context->slots[1];
		CHECK_EQ(slot->trace_hi, round);
		CHECK_EQ(slot->trace_lo, round);
	}
	store_release(&round_begun, CHANGES + 1);
	pthread_join(thread, NULL);
}

/* -------------------------------------------------------------- policy --- */

static bool is_recorded(uint64_t number)
{
	struct fake_run run;

	CHECK_EQ(bs_begin(trace(number)), 0);
	CHECK_EQ(bs_tracepoint("", 0), 0);
	CHECK_EQ(bs_end(), 0);
	return fake_node_run(&node, 0, &run);
}

static struct bs_policy *make_policy(int *fd, uint64_t threshold)
{
	const int seals = F_SEAL_GROW | F_SEAL_SHRINK;
	struct bs_policy *policy;

	*fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK_EQ(ftruncate(*fd, BS_POLICY_BYTES), 0);
	policy = mmap(NULL, BS_POLICY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		      *fd, 0);
	CHECK(policy != MAP_FAILED);
	*policy = *node.policy;
	policy->number++;
	policy->percentage_threshold = threshold;
	CHECK_EQ(fcntl(*fd, F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE), 0);
	return policy;
}

/* What a thread shows of a trace that it works on. */
static uint64_t shown_hi_of(uint64_t number)
{
	uint64_t hi;

	CHECK_EQ(bs_begin(trace(number)), 0);
	hi = READ_ONCE(node.context->slots[0].trace_hi);
	CHECK_EQ(bs_end(), 0);
	return hi;
}

static void test_policy(void)
{
	struct bs_policy *policy;
	int fd;

	CHECK(is_recorded(10));
	policy = make_policy(&fd, 0);
	fake_node_news(&node, BS_NEWS_POLICY, ++news_number, fd);
	/* Not answered; but it comes before what is. */
	replace(none_is_expected);
	CHECK(!is_recorded(11));
	CHECK_EQ(shown_hi_of(11), 0);
	/* The old one says nothing any more, the new one does. */
	WRITE_ONCE(node.policy->trust_incoming, 1);
	CHECK(!bs_trusts_incoming());
	WRITE_ONCE(policy->trust_incoming, 1);
	CHECK(bs_trusts_incoming());
	WRITE_ONCE(policy->percentage_threshold, BS_PERCENTAGE_ALL);
	CHECK(is_recorded(12));
	CHECK_EQ(shown_hi_of(12), trace(12).hi);

	/* Nonsense changes nothing. */
	policy->magic++;
	policy->percentage_threshold = 0;
	policy->trust_incoming = 0;
	fake_node_news(&node, BS_NEWS_POLICY, ++news_number, STDERR_FILENO);
	replace(none_is_expected);
	policy->percentage_threshold = BS_PERCENTAGE_ALL;
	CHECK(is_recorded(13));
	munmap(policy, BS_POLICY_BYTES);
	close(fd);
}

/* ---------------------------------------------------------- under load --- */

static bool stop;
static uint64_t fired[THREADS]; /* that were taken */
static uint64_t numbers[THREADS] = {0, 1, 2, 3};
static pthread_barrier_t shown, seen;

static void *fire(void *argument)
{
	uint64_t thread = *(uint64_t *)argument;
	uint64_t number = 0;

	while (!READ_ONCE(stop)) {
		/* As wide as it gets: nothing of one trace in another. */
		bs_begin((struct bs_trace_id){~number, number});
		if (!bs_trigger((struct bs_trace_id){100 + thread, number}, "t",
				"why", NULL, 0)) {
			number++;
			WRITE_ONCE(fired[thread], number);
		} else {
			sched_yield();
		}
		bs_end();
	}
	bs_begin(trace(100 + thread));
	pthread_barrier_wait(&shown);
	pthread_barrier_wait(&seen);
	bs_end();
	return NULL;
}

static uint64_t taken[THREADS];

/* Of each thread in the order in which it fired: none twice, none left out. */
static void take(const struct bs_trigger_cell *cell)
{
	uint64_t thread = cell->trace_hi - 100;

	CHECK(thread < THREADS);
	CHECK_EQ(cell->trace_lo, taken[thread]);
	CHECK(!strcmp(cell->why, "why"));
	taken[thread]++;
}

static void take_all(void)
{
	struct bs_trigger_cell cell;

	while (fake_node_trigger(&node, &cell))
		take(&cell);
}

static void test_under_load(void)
{
	pthread_t threads[THREADS];
	uint32_t found = 0;

	pthread_barrier_init(&shown, NULL, THREADS + 1);
	pthread_barrier_init(&seen, NULL, THREADS + 1);
	for (int i = 0; i < THREADS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, fire, &numbers[i]),
			 0);
	for (int round = 1; round <= REPLACEMENTS; round++) {
		for (int i = 0; i < THREADS; i++) {
			while (READ_ONCE(fired[i]) < (uint64_t)round * TRIGGERS)
				take_all();
		}
		/* Let there be something in the old one. */
		replace(take);
	}
	WRITE_ONCE(stop, true);
	pthread_barrier_wait(&shown);
	replace(take);
	take_all();
	for (int i = 0; i < THREADS; i++)
		CHECK_EQ(taken[i], fired[i]);
	for (uint32_t i = 0; i < BS_THREAD_SLOTS; i++) {
		const struct bs_thread_slot *slot = &node.context->slots[i];

		if (!slot->trace_hi && !slot->trace_lo)
			continue;
		CHECK_EQ(slot->trace_hi, trace(0).hi);
		CHECK(slot->trace_lo >= 100 && slot->trace_lo < 100 + THREADS);
		CHECK(!(found & 1u << (slot->trace_lo - 100)));
		found |= 1u << (slot->trace_lo - 100);
	}
	CHECK_EQ(found, (1u << THREADS) - 1);
	pthread_barrier_wait(&seen);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	pthread_barrier_destroy(&shown);
	pthread_barrier_destroy(&seen);
}

int main(void)
{
	fake_node_open(&node);
	fake_node_attach(&node, 64, 64);
	RUN(test_what_is_shown_moves);
	RUN(test_old_queue_is_drained);
	RUN(test_the_same_again_is_answered);
	RUN(test_nonsense_is_refused);
	RUN(test_bpf_map);
	RUN(test_begin_meanwhile);
	RUN(test_policy);
	RUN(test_under_load);
	bs_shutdown();
	fake_node_close(&node);
	return 0;
}
