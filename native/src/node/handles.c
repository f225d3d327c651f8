/* SPDX-License-Identifier: Apache-2.0 */
/* Which processes have a part in a slice, and how many handles they have open in it. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct part *slice_part(struct slice *s, uint32_t client)
{
	for (uint32_t i = 0; i < s->n_parts; i++) {
		if (s->parts[i].client == client)
			return &s->parts[i];
	}
	if (s->n_parts == s->parts_room) {
		uint32_t room = s->parts_room ? 2 * s->parts_room : 4;
		struct part *parts = realloc(s->parts, room * sizeof(*parts));

		if (!parts)
			return NULL;
		s->parts = parts;
		s->parts_room = room;
	}
	s->parts[s->n_parts] = (struct part){.client = client};
	return &s->parts[s->n_parts++];
}

uint32_t slice_open_handles(const struct slice *s)
{
	uint32_t open = 0;

	for (uint32_t i = 0; i < s->n_parts; i++)
		open += s->parts[i].open;
	return open;
}

/* ------------------------------------------------------------- the list --- */

/* What is read of the list in the time that an entry of a directory takes. */
#define HANDLES_AN_ENTRY 8u

/* NULL: it is not listed. */
static struct slice_handle *find_handle(struct bsn *n, const struct slice *s,
					uint32_t client, uint32_t handle)
{
	n->cost += s->n_handles / HANDLES_AN_ENTRY;
	for (uint32_t i = 0; i < s->n_handles; i++) {
		if (s->handles[i].client == client &&
		    s->handles[i].handle == handle)
			return &s->handles[i];
	}
	return NULL;
}

/* Those that are left are in order: first the oldest. */
static void drop_handle(struct slice *s, struct slice_handle *h)
{
	size_t behind = (size_t)(s->handles + s->n_handles - (h + 1));

	memmove(h, h + 1, behind * sizeof(*h));
	s->n_handles--;
}

static bool forget_end(struct slice *s)
{
	for (uint32_t i = 0; i < s->n_handles; i++) {
		if (!s->handles[i].ended)
			continue;
		drop_handle(s, &s->handles[i]);
		s->ends_forgotten = true;
		return true;
	}
	return false;
}

static bool has_room(struct slice *s)
{
	uint32_t room = s->handles_room ? 2 * s->handles_room : 4;
	struct slice_handle *handles;

	if (s->n_handles < s->handles_room)
		return true;
	if (room > SLICE_HANDLES_MAX)
		return false;
	handles = realloc(s->handles, room * sizeof(*handles));
	if (!handles)
		return false;
	s->handles = handles;
	s->handles_room = room;
	return true;
}

/* False: there is no room. */
static bool list_handle(struct slice *s, struct slice_handle h)
{
	if (!has_room(s) && !forget_end(s))
		return false;
	s->handles[s->n_handles++] = h;
	return true;
}

static void list_end(struct slice *s, const struct part *part, uint32_t handle,
		     bool took)
{
	const struct slice_handle h = {
		.client = part->client,
		.handle = handle,
		.ended = true,
		.took = took,
	};

	if (!list_handle(s, h))
		s->ends_forgotten = true;
}

/* -------------------------------------------------------------- counts --- */

/* Its end was met already. */
static void begin_ended(struct slice *s, struct part *part,
			struct slice_handle *h)
{
	if (h->took) {
		part->unlisted++;
		part->open++;
	}
	drop_handle(s, h);
}

static void open_handle(struct slice *s, struct part *part, uint32_t handle)
{
	const struct slice_handle open = {
		.client = part->client,
		.handle = handle,
	};

	part->open++;
	if (!list_handle(s, open))
		part->unlisted++;
}

/* One may be listed: a successor watches, before it takes up the search. */
void slice_open_handle(struct bsn *n, struct slice *s, struct part *part,
		       uint32_t handle)
{
	if (!find_handle(n, s, part->client, handle))
		open_handle(s, part, handle);
}

void slice_close_handle(struct bsn *n, struct slice *s, struct part *part,
			uint32_t handle)
{
	struct slice_handle *h = find_handle(n, s, part->client, handle);

	/* All of a process that is gone are closed already. */
	if (h ? h->ended : !part->unlisted)
		return;
	if (h)
		drop_handle(s, h);
	else
		part->unlisted--;
	part->open--;
}

static void begin_handle(struct bsn *n, struct slice *s, struct part *part,
			 uint32_t handle)
{
	struct slice_handle *h = find_handle(n, s, part->client, handle);
	const struct client *c;

	if (h && h->ended)
		begin_ended(s, part, h);
	if (h)
		return;
	if (s->ends_forgotten) {
		c = client_find(n, part->client);
		n->cost += 2 * LINE_ENTRIES;
		if (!c || !handle_is_open(c, handle)) {
			/* Its end may come yet. */
			list_end(s, part, handle, false);
			return;
		}
	}
	open_handle(s, part, handle);
}

static void end_handle(struct bsn *n, struct slice *s, struct part *part,
		       uint32_t handle)
{
	struct slice_handle *h = find_handle(n, s, part->client, handle);
	bool took = !h && part->unlisted;

	if (h && h->ended)
		return;
	if (h)
		drop_handle(s, h);
	else
		list_end(s, part, handle, took);
	if (took)
		part->unlisted--;
	if (h || took)
		part->open--;
}

void slice_count_flags(struct bsn *n, struct slice *s, uint32_t client,
		       uint32_t handle, uint32_t flags)
{
	struct part *part = slice_part(s, client);

	if (part && flags & BS_RUN_FIRST)
		begin_handle(n, s, part, handle);
	if (part && flags & BS_RUN_LAST)
		end_handle(n, s, part, handle);
}

void slice_count_run(struct bsn *n, struct slice *s, const struct run *run,
		     bool is_new)
{
	uint32_t flags = run->flags;

	if (!run->live)
		return;
	if (!is_new)
		flags &= ~BS_RUN_FIRST;
	if (!(flags & BS_RUN_CLOSED))
		flags &= ~BS_RUN_LAST;
	slice_count_flags(n, s, run->owner.number, run->handle, flags);
}

void slice_close_unlisted(struct part *part, uint32_t handles)
{
	if (handles > part->unlisted)
		handles = part->unlisted;
	part->unlisted -= handles;
	part->open -= handles;
}

void slice_close_all(struct slice *s, struct part *part)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < s->n_handles; i++) {
		if (s->handles[i].client != part->client)
			s->handles[kept++] = s->handles[i];
	}
	s->n_handles = kept;
	part->open = part->unlisted = 0;
}
