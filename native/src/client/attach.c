/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The attach thread: connect, say who we are, get four mappings, then do what
 * the daemon says until it hangs up; from the beginning. It is the only thread
 * that makes system calls which may wait, and nothing waits for it.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "link.h"
#include "writer.h"

#define DEFAULT_SOCKET "/run/backsight/node.sock"

/* Short, so that a service that starts with its daemon misses little; at most
 * a second, so that a daemon that is back is found soon, at no cost. */
#define BACKOFF_MIN_MS 50
#define BACKOFF_MAX_MS 1000

/* A daemon answers in milliseconds, unless it is stopped. */
#define REPLY_TIMEOUT_MS 5000

/* How often to see whether everybody else has left (is_last_thread), and which
 * threads are idle (park.c): seldom, where none wrote lately. */
#ifndef TICK_MS
#define TICK_MS 1000
#endif
#define TICK_QUIET_MS (5 * TICK_MS)

/* All under bs_lock. */
static pthread_t thread;
static bool is_started;
static time_t failed_at; /* the last attempt to start it; 0: none failed */
static bool is_stopped;	 /* by bs_shutdown() or the environment: for good */
static bool is_ending;	 /* in bs_shutdown(), which gives up bs_lock */
static uint64_t n_attachments;
static struct sockaddr_un address;
static struct bs_attach_request request;
/* News of a context, to be answered on this connection; number 0: none. */
static struct bs_attach_news owed;
static bool is_debugging;

/* ---------------------------------------------------------- debugging --- */

/* Why attaching failed, once for each reason: a service that runs without a
 * daemon tries once a second. */
__attribute__((format(printf, 1, 2))) static void complain(const char *format,
							   ...)
{
	static uint64_t told[16];
	char text[256];
	uint64_t hash;
	va_list args;

	if (!is_debugging)
		return;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	hash = bs_fnv1a64(BS_FNV1A64_BASIS, text, strlen(text));
	for (size_t i = 0; i < sizeof(told) / sizeof(told[0]); i++) {
		if (told[i] == hash)
			return;
		if (told[i] == 0) {
			told[i] = hash;
			dprintf(STDERR_FILENO, "backsight: %s: %s\n",
				address.sun_path, text);
			return;
		}
	}
}

/* ------------------------------------------------------ configuration --- */

static bool is_set(const char *variable)
{
	const char *value = secure_getenv(variable);

	return value && value[0] && strcmp(value, "0") != 0;
}

static bool configure(void)
{
	const char *path = secure_getenv("BACKSIGHT_SOCKET");
	const char *service = secure_getenv("BACKSIGHT_SERVICE");

	is_debugging = is_set("BACKSIGHT_DEBUG");
	if (is_set("BACKSIGHT_DISABLE"))
		return false;
	if (!path || !path[0])
		path = DEFAULT_SOCKET;
	if (!service || !service[0])
		service = program_invocation_short_name;

	memset(&address, 0, sizeof(address));
	address.sun_family = AF_UNIX;
	if (strlen(path) >= sizeof(address.sun_path)) {
		complain("BACKSIGHT_SOCKET is longer than %zu bytes",
			 sizeof(address.sun_path) - 1);
		return false;
	}
	memcpy(address.sun_path, path, strlen(path));

	memset(&request, 0, sizeof(request));
	request.magic = BS_ABI_MAGIC;
	request.version = BS_ABI_VERSION;
	request.oldest = BS_ABI_OLDEST;
	request.features = BS_FEATURES;
	request.pid = getpid();
	memcpy(request.service, service,
	       bs_utf8_cut(service, strlen(service),
			   sizeof(request.service) - 1));
	return true;
}

/* ----------------------------------------------------------- exchange --- */

/* NULL if we speak it; else who is to be updated. */
static const char *who_is_too_old(uint32_t version)
{
	if (version < BS_ABI_OLDEST)
		return "the daemon";
	return version > BS_ABI_VERSION ? "this library" : NULL;
}

static bool reply_is_a_yes(const struct bs_attach_reply *reply)
{
	const char *old = who_is_too_old(reply->version);

	if (reply->magic != BS_ABI_MAGIC) {
		complain("this is not a Backsight daemon");
		return false;
	}
	/* A daemon that refuses us says why; one from before it knew of us may
	 * not know what to advise. */
	if (reply->status && reply->version >= BS_ABI_OLDEST) {
		complain("refused: %.*s",
			 (int)strnlen(reply->message, sizeof(reply->message)),
			 reply->message);
		return false;
	}
	if (old) {
		complain(
			"the daemon speaks version %u of the shared memory, "
			"this library %u to %u: update %s",
			reply->version, BS_ABI_OLDEST, BS_ABI_VERSION, old);
		return false;
	}
	if (reply->features & ~request.features) {
		complain("the daemon uses features that nobody offered");
		return false;
	}
	return true;
}

/* The daemon that we were attached to is gone. Where there is no room for
 * another's segments, what it left makes room before the next attempt. */
static void drop_attachment(void)
{
	if (bs_process.current == &bs_nowhere)
		return;
	memset(request.token, 0, sizeof(request.token));
	bs_attachment_unmap(bs_attachment_publish(&bs_nowhere));
}

static bool take_reply(const struct bs_attach_reply *reply, int n_fds,
		       const int fds[BS_LINK_FDS_MAX])
{
	struct bs_attachment *a;
	const char *reason;

	if (!reply_is_a_yes(reply))
		return false;
	if (reply->resumed) {
		if (n_fds || bs_process.current == &bs_nowhere ||
		    memcmp(reply->token, bs_process.current->token,
			   sizeof(reply->token)) != 0) {
			complain("the daemon resumed what never was");
			return false;
		}
		reason = bs_attachment_resume(bs_process.current);
		if (!reason)
			return true;
		complain("the daemon resumed, but %s", reason);
		drop_attachment();
		return false;
	}
	if (n_fds < 0) {
		complain(
			"not all of its file descriptors came: is the limit of "
			"open files (ulimit -n) too low?");
		return false;
	}
	if (n_fds != BS_FDS) {
		complain("the daemon sent %d file descriptors, not %d", n_fds,
			 BS_FDS);
		return false;
	}
	a = bs_attachment_map(reply, fds, &reason);
	if (!a) {
		complain("%s", reason);
		if (reason == bs_no_room || reason == bs_no_lock)
			drop_attachment();
		return false;
	}
	memcpy(request.token, a->token, sizeof(request.token));
	bs_attachment_unmap(bs_attachment_publish(a));
	return true;
}

/* Attached or not. What is received is mapped or closed before bs_lock is
 * given up, so that no fork() copies it. */
static bool exchange(void)
{
	struct bs_attach_reply reply;
	struct bs_packet packet;
	int ret = bs_link_open(&address);
	bool ok = false;

	owed.number = 0;
	if (!ret)
		ret = bs_link_send(&request, sizeof(request));
	/* Who may not attach is told so, and left, before it has asked. */
	if (ret && ret != -EPIPE) {
		complain("connect: %s", strerrordesc_np(-ret));
		return false;
	}
	if (bs_link_wait(REPLY_TIMEOUT_MS) <= 0 || !bs_link_receive(&packet)) {
		if (!is_stopped)
			complain("no answer");
		return false;
	}
	/* What an older daemon does not say counts as 0. */
	memcpy(&reply, packet.content, sizeof(reply));
	if (packet.bytes >= offsetof(struct bs_attach_reply, features))
		ok = take_reply(&reply, packet.n_fds, packet.fds);
	else
		complain("the answer is too short");
	bs_packet_close_fds(&packet);
	/* Gives up bs_lock, so not before. */
	bs_attachment_retire_old();
	return ok;
}

/* ------------------------------------------------------------- thread --- */

/*
 * A process whose main thread left by pthread_exit() ends with its last thread,
 * and must not live on because of this one. Nothing tells us when the others
 * have left, so this is asked now and then, once no thread uses the library.
 */
static bool is_last_thread(void)
{
	char path[64], text[256];
	const char *end;
	struct stat st;
	ssize_t n;
	int fd;

	/* Two links, the thread that has left, and ours. */
	const nlink_t links = 4 + bs_prefault_runs();

	bs_thread_reap();
	if (bs_members || stat("/proc/self/task", &st) || st.st_nlink != links)
		return false;
	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", getpid());
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = '\0';
	end = strrchr(text, ')');
	return end && end[1] == ' ' && end[2] == 'Z';
}

static struct timespec deadline_after(int ms)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	t.tv_sec += ms / 1000;
	t.tv_nsec += (long)(ms % 1000) * 1000000;
	if (t.tv_nsec >= 1000000000) {
		t.tv_sec++;
		t.tv_nsec -= 1000000000;
	}
	return t;
}

/*
 * Tell the daemon that the old queue is left, once it is. Until then it goes on
 * with both: a debugger may have stopped a thread in there, for as long as it
 * likes.
 */
static void answer_context(void)
{
	struct bs_attachment *a = bs_process.current;
	bool is_left = true;

	if (!owed.number)
		return;
	if (a->queue_before) {
		a->refs++;
		is_left = bs_queue_unmap(a->queue_before);
		if (is_left)
			a->queue_before = NULL;
		bs_attachment_unmap(bs_attachment_put(a));
	}
	if (!is_left) {
		complain("a thread stays in the queue of the old context");
		return;
	}
	/* If it cannot be sent now: at the next tick, or when a daemon that came
	 * back says it again. */
	if (!bs_link_send(&owed, sizeof(owed)))
		owed.number = 0;
}

static void take_context(const struct bs_attach_news *news,
			 struct bs_packet *packet)
{
	struct bs_attachment *a = bs_process.current;
	const char *reason = NULL;

	/* A daemon that came back does not know whether we took it, and sends
	 * it again. */
	if (news->number != a->context_number) {
		if (a->queue_before)
			reason = "a thread is in the queue of an earlier one";
		else
			reason = bs_context_replace(a, packet->fds[0],
						    &a->queue_before);
	}
	if (reason) {
		complain("a new context was not taken: %s", reason);
		return;
	}
	bs_packet_close_fds(packet);
	a->context_number = news->number;
	owed = *news;
}

/* What the daemon says while we are attached. */
static void take_news(struct bs_packet *packet)
{
	struct bs_attach_news news;
	const char *reason;

	memcpy(&news, packet->content, sizeof(news));
	if (news.magic != BS_ABI_MAGIC || packet->n_fds != 1)
		return;
	if (news.kind == BS_NEWS_CONTEXT)
		take_context(&news, packet);
	if (news.kind == BS_NEWS_POLICY) {
		reason = bs_policy_replace(bs_process.current, packet->fds[0]);
		if (reason)
			complain("a new policy was not taken: %s", reason);
	}
}

/* Until the daemon hangs up. */
static void wait_for_news(void)
{
	struct bs_packet packet;
	bool threads_write = true;
	int ret;

	while (!is_stopped && !is_last_thread()) {
		ret = bs_link_wait(threads_write ? TICK_MS : TICK_QUIET_MS);
		if (ret < 0 || (ret > 0 && !bs_link_receive(&packet)))
			return;
		if (ret == 0) {
			bs_thread_reap_all();
			threads_write = bs_park_idle();
			/* For which there was no room when they were left. */
			bs_attachment_retire_old();
		} else {
			take_news(&packet);
			bs_packet_close_fds(&packet);
		}
		answer_context();
	}
}

static void *attach_thread(void *arg)
{
	int backoff_ms = BACKOFF_MIN_MS;
	struct timespec deadline;

	(void)arg;
	/* By the thread itself: another names it through /proc, and a child that
	 * ends soon after has its parent wait for what the kernel keeps of that. */
	prctl(PR_SET_NAME, "backsight");
	bs_park_start();
	pthread_mutex_lock(&bs_process.lock);
	while (!is_stopped && !is_last_thread()) {
		if (exchange()) {
			n_attachments++;
			pthread_cond_broadcast(&bs_process.changed);
			bs_prefault_start();
			wait_for_news();
			backoff_ms = BACKOFF_MIN_MS;
			bs_link_close();
			continue;
		}
		bs_link_close();
		deadline = deadline_after(backoff_ms);
		while (!is_stopped &&
		       !pthread_cond_clockwait(&bs_process.changed,
					       &bs_process.lock,
					       CLOCK_MONOTONIC, &deadline))
			;
		backoff_ms *= 2;
		if (backoff_ms > BACKOFF_MAX_MS)
			backoff_ms = BACKOFF_MAX_MS;
	}
	pthread_mutex_unlock(&bs_process.lock);
	bs_prefault_stop();
	return NULL;
}

static time_t now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return now.tv_sec;
}

/* Where there is no room for one thread more, whoever traces comes by again, as if
 * there were a free slot, and it is tried again at most once a second. */
static void start_thread(void)
{
	sigset_t all, before;

	if (failed_at == now_s())
		return;
	/* The application's signals are for the application's threads. */
	sigfillset(&all);
	if (pthread_sigmask(SIG_SETMASK, &all, &before))
		return;
	is_started = !pthread_create(&thread, NULL, attach_thread, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	failed_at = is_started ? 0 : now_s();
	WRITE_ONCE(bs_nowhere.slots_free, !is_started);
}

void bs_attach_start(void)
{
	int cancel_state;

	if (is_started || is_stopped) {
		WRITE_ONCE(bs_nowhere.slots_free, 0);
		return;
	}
	/* It may write to standard error, where a thread can be cancelled. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
	is_stopped = !configure();
	pthread_setcancelstate(cancel_state, NULL);
	if (!is_stopped)
		start_thread();
}

void bs_attach_forget(void)
{
	/* The connection is the parent's; the daemon would take us for it. */
	bs_link_close();
	is_started = false;
	is_ending = false;
	failed_at = 0;
	n_attachments = 0;
}

uint64_t bs_attach_count(void)
{
	return n_attachments;
}

static void unlock(void *lock)
{
	pthread_mutex_unlock(lock);
}

int bs_wait_attached(int timeout_ms)
{
	struct timespec deadline = deadline_after(timeout_ms);
	int ret = 0;

	bs_thread_enter(&bs_thread);
	pthread_mutex_lock(&bs_process.lock);
	/* Whoever cancels the thread cancels it here. */
	pthread_cleanup_push(unlock, &bs_process.lock);
	while (bs_process.current == &bs_nowhere && !ret) {
		if (!is_started || is_stopped)
			ret = ETIMEDOUT;
		else if (timeout_ms < 0)
			ret = pthread_cond_wait(&bs_process.changed,
						&bs_process.lock);
		else
			ret = pthread_cond_clockwait(&bs_process.changed,
						     &bs_process.lock,
						     CLOCK_MONOTONIC,
						     &deadline);
	}
	pthread_cleanup_pop(true);
	return ret ? -ETIMEDOUT : 0;
}

void bs_shutdown(void)
{
	struct bs_attachment *a = NULL;
	pthread_t joined = {0};
	int cancel_state;
	bool join;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
	bs_process_check();
	bs_thread_leave(&bs_thread);
	pthread_mutex_lock(&bs_process.lock);
	is_stopped = true;
	/* One after the other: what the first still uses the second would unmap. */
	while (is_ending)
		pthread_cond_wait(&bs_process.changed, &bs_process.lock);
	is_ending = true;
	join = is_started;
	is_started = false;
	if (join) {
		joined = thread;
		bs_link_shut();
	}
	pthread_cond_broadcast(&bs_process.changed);
	pthread_mutex_unlock(&bs_process.lock);
	if (join)
		pthread_join(joined, NULL);

	pthread_mutex_lock(&bs_process.lock);
	if (bs_process.current != &bs_nowhere)
		a = bs_attachment_publish(&bs_nowhere);
	bs_attachment_retire_old();
	is_ending = false;
	pthread_cond_broadcast(&bs_process.changed);
	pthread_mutex_unlock(&bs_process.lock);
	bs_attachment_unmap(a);
	pthread_setcancelstate(cancel_state, NULL);
}
