// SPDX-License-Identifier: Apache-2.0
/*
 * A hostile process: does one kind of harm to a node until it is killed.
 *
 *	attacker ATTACK UID SOCKET AIM SEED
 *
 * tests/hostile runs it. It becomes that user first; AIM is a file (struct aim)
 * that says which traces honest clients write. Paced, so that what it shows is
 * what a daemon makes of lies, and not that a machine has only so many cores.
 */
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "attacks.h"

/* Not attached: the node is full of others, or its user has too many. */
#define RETRY_US 50000

static const struct attack {
	const char *name;
	void (*step)(struct target *t);
	bool attaches;
	uint32_t pause_us; /* between steps */
} attacks[] = {
	{"scribble", scribble, true, 2000},
	{"scribble-channel", scribble_channel, true, 2000},
	{"directories", lie_in_directories, true, 10000},
	{"grants", lie_of_grants, true, 5000},
	{"handles", lie_of_handles, true, 5000},
	{"losses", lie_of_losses, true, 5000},
	{"context", lie_in_context, true, 5000},
	{"triggers", fire_wrong_triggers, true, 5000},
	{"touch", touch_arena, true, 3000000},
	{"silent", stay_silent, false, 20000},
	{"garbage", say_garbage, false, 5000},
	{"chatter", say_garbage_attached, true, 20000},
	{"storm", storm, false, 10000},
	{"attach", attach_and_leave, false, 50000},
	{"leftovers", leave_leftovers, false, 200000},
	{"open-handles", open_handles, false, 5000},
	{"wash", wash_pool, false, 5000},
	{"namesake", fire_by_honest_name, false, 5000},
	{"bulk", fire_for_bulk, false, 500000},
	{"laterals", fire_for_neighbours, false, 5000},
};

static const struct attack *attack_of(const char *name)
{
	for (size_t i = 0; i < sizeof(attacks) / sizeof(attacks[0]); i++)
		if (strcmp(attacks[i].name, name) == 0)
			return &attacks[i];
	return NULL;
}

static bool become(uint32_t uid)
{
	return setgroups(0, NULL) == 0 && setresgid(uid, uid, uid) == 0 &&
	       setresuid(uid, uid, uid) == 0;
}

static const struct aim *aim_of(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	void *at = mmap(NULL, sizeof(struct aim), PROT_READ, MAP_SHARED, fd, 0);

	close(fd);
	return at == MAP_FAILED ? NULL : at;
}

static void pause_for(uint32_t us)
{
	nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000L}, NULL);
}

_Noreturn static void run(const struct attack *attack, struct target *t)
{
	for (;;) {
		if (attack->attaches && t->connection >= 0 && target_is_gone(t))
			target_detach(t);
		if (attack->attaches && t->connection < 0 &&
		    !target_attach(t)) {
			pause_for(RETRY_US);
			continue;
		}
		attack->step(t);
		t->steps++;
		pause_for(attack->pause_us);
	}
}

int main(int argc, char **argv)
{
	struct target t = {.address.sun_family = AF_UNIX, .connection = -1};
	const struct attack *attack = argc == 6 ? attack_of(argv[1]) : NULL;

	if (!attack) {
		fprintf(stderr,
			"usage: attacker ATTACK UID SOCKET AIM SEED; "
			"ATTACK is one of");
		for (size_t i = 0; i < sizeof(attacks) / sizeof(attacks[0]);
		     i++)
			fprintf(stderr, " %s", attacks[i].name);
		fputc('\n', stderr);
		return 2;
	}
	if (strlen(argv[3]) >= sizeof(t.address.sun_path)) {
		fprintf(stderr, "attacker: %s: longer than %zu bytes\n",
			argv[3], sizeof(t.address.sun_path) - 1);
		return 2;
	}
	memcpy(t.address.sun_path, argv[3], strlen(argv[3]) + 1);
	t.aim = aim_of(argv[4]);
	if (!t.aim) {
		perror(argv[4]);
		return 1;
	}
	setenv("BACKSIGHT_SOCKET", argv[3], true);
	random_seed(strtoull(argv[5], NULL, 0));
	signal(SIGPIPE, SIG_IGN);
	if (!become((uint32_t)strtoul(argv[2], NULL, 0))) {
		perror("attacker: cannot become that user");
		return 1;
	}
	/* Another user has forgotten whom he dies with. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	run(attack, &t);
}
