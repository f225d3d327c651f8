/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a search met of its trace: handles, in a hash table. One that becomes large is
 * divided into pages by the first bits of the hash, each a table of its own: so
 * nothing is done to more of it under one hold of the lock than to a page.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "internal.h"

/* Handles of one trace that are told apart: in 3 MiB at most, while a pass lasts. Of
 * a trace with more it is not known whether all of it was there. */
#define MET_MAX 32768u

#define ROOM_MIN 8u

/* A table of more places is divided: it is in a core's cache, and read in 20 us. */
#define ROOM_OF_ONE 4096u

/* So many that none is larger when there are MET_MAX handles. */
#define PAGE_BITS 5u
#define PAGES (1u << PAGE_BITS)
#define ROOM_OF_PAGE (2 * ROOM_OF_ONE / PAGES)

/* An entry here takes as much memory as a run without records in the pool. So of
 * tables that are larger than this all together have a 32nd of the pool's bytes, beside
 * it. */
#define ROOM_SMALL 128u
#define MET_SHARE 32u

static uint64_t shared_bytes(uint32_t room)
{
	return room > ROOM_SMALL ? room * sizeof(struct met) : 0;
}

static int page_init(struct met_page *page, uint32_t room)
{
	page->met = malloc(room * sizeof(*page->met));
	if (!page->met)
		return -ENOMEM;
	memset(page->met, 0xff, room * sizeof(*page->met));
	page->room = room;
	page->n = 0;
	return 0;
}

int met_init(struct met_table *t)
{
	memset(t, 0, sizeof(*t));
	t->room = ROOM_MIN;
	return page_init(&t->one, ROOM_MIN);
}

void met_free(struct bsn *n, struct met_table *t)
{
	n->met_bytes -= shared_bytes(t->room);
	for (uint32_t i = 0; i < met_pages(t); i++)
		free(met_page(t, i)->met);
	free(t->pages);
	memset(t, 0, sizeof(*t));
}

uint32_t met_pages(const struct met_table *t)
{
	return t->pages ? PAGES : 1;
}

struct met_page *met_page(struct met_table *t, uint32_t i)
{
	return t->pages ? &t->pages[i] : &t->one;
}

/* By a secret: a process chooses what handles it writes. */
static uint64_t hash_of(const struct bsn *n, uint32_t client, uint32_t handle)
{
	return bs_fmix64(((uint64_t)client << 32 | handle) ^ n->secret);
}

static struct met_page *page_by(struct met_table *t, uint64_t hash)
{
	return met_page(t, t->pages ? (uint32_t)(hash >> (64 - PAGE_BITS)) : 0);
}

static struct met *place(struct met_page *page, uint64_t hash, uint32_t client,
			 uint32_t handle)
{
	for (uint64_t i = hash;; i++) {
		struct met *m = &page->met[i % page->room];

		if (m->client == NONE ||
		    (m->client == client && m->handle == handle))
			return m;
	}
}

struct met *met_find(const struct bsn *n, struct met_table *t, uint32_t client,
		     uint32_t handle)
{
	uint64_t hash = hash_of(n, client, handle);
	struct met *m = place(page_by(t, hash), hash, client, handle);

	return m->client == NONE ? NULL : m;
}

/* Into a table that has room for all. */
static void move_all(const struct bsn *n, struct met_table *to,
		     const struct met_page *from)
{
	for (uint32_t i = 0; i < from->room; i++) {
		const struct met *m = &from->met[i];
		struct met_page *page;
		uint64_t hash;

		if (m->client == NONE)
			continue;
		hash = hash_of(n, m->client, m->handle);
		page = page_by(to, hash);
		*place(page, hash, m->client, m->handle) = *m;
		page->n++;
	}
}

static int grow_page(const struct bsn *n, struct met_table *t,
		     struct met_page *page)
{
	struct met_page before = *page;
	int err = page_init(page, 2 * before.room);

	if (err) {
		*page = before;
		return err;
	}
	move_all(n, t, &before);
	free(before.met);
	return 0;
}

static int divide(const struct bsn *n, struct met_table *t)
{
	struct met_table pages = {.pages = calloc(PAGES, sizeof(*t->pages))};

	if (!pages.pages)
		return -ENOMEM;
	for (uint32_t i = 0; i < PAGES; i++) {
		if (!page_init(&pages.pages[i], ROOM_OF_PAGE))
			continue;
		while (i-- > 0)
			free(pages.pages[i].met);
		free(pages.pages);
		return -ENOMEM;
	}
	move_all(n, &pages, &t->one);
	free(t->one.met);
	memset(&t->one, 0, sizeof(t->one));
	t->pages = pages.pages;
	return 0;
}

/* Negative errno: there is no room for more. */
static int grow(struct bsn *n, struct met_table *t, struct met_page *page)
{
	bool is_divided = !t->pages && page->room == ROOM_OF_ONE;
	uint32_t more = is_divided ? PAGES * ROOM_OF_PAGE - page->room
				   : page->room;
	uint64_t bytes = n->met_bytes - shared_bytes(t->room) +
			 shared_bytes(t->room + more);
	int err;

	if (t->room + more > ROOM_SMALL &&
	    bytes > n->config.pool_bytes / MET_SHARE)
		return -ENOSPC;
	err = is_divided ? divide(n, t) : grow_page(n, t, page);
	if (err)
		return err;
	t->room += more;
	n->met_bytes = bytes;
	return 0;
}

struct met *met_get(struct bsn *n, struct met_table *t, uint32_t client,
		    uint32_t handle)
{
	uint64_t hash = hash_of(n, client, handle);
	struct met_page *page = page_by(t, hash);
	struct met *m = place(page, hash, client, handle);

	if (m->client != NONE)
		return m;
	if (t->n >= MET_MAX)
		return NULL;
	if (page->n * 2 >= page->room) {
		if (grow(n, t, page))
			return NULL;
		page = page_by(t, hash);
		m = place(page, hash, client, handle);
	}
	*m = (struct met){.client = client, .handle = handle};
	page->n++;
	t->n++;
	return m;
}
