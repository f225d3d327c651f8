/* SPDX-License-Identifier: Apache-2.0 */
/* What a load may see, and which accesses race: weak.h says by which rules. */
#include <string.h>
#include <sys/mman.h>

#include "check.h"
#include "model.h"

#define REGIONS_MAX 24
#define LOCATIONS_MAX 2048
#define MESSAGES_MAX 8192
#define STORES_MAX 64 /* to one word, in one execution */
#define LOCKS_MAX 8

/* -------------------------------------------------------------- happened --- */

/* What happened before, in the sense of C11: so many accesses of each party. */
struct clock {
	uint16_t of[WEAK_PARTIES];
};

/* And the latest message of each location that was seen; 0: none. */
struct view {
	struct clock happened;
	uint16_t seen[LOCATIONS_MAX];
};

/* A value that was stored to a location. */
struct message {
	uint64_t value;
	struct view *view; /* that whoever acquires it takes over; NULL: none */
	struct steps steps;
	uint16_t place; /* in its location's order */
	bool is_change; /* nothing comes between it and the one before */
};

/* A word that was accessed atomically. */
struct location {
	uint8_t *at;
	uint32_t bytes;
	uint16_t order[STORES_MAX];
	uint16_t n;
	bool is_gone; /* a plain store made a fresh start */
};

static struct location locations[LOCATIONS_MAX];
static uint32_t n_locations;
static struct message messages[MESSAGES_MAX];
static uint32_t n_messages;

static struct party {
	struct view now;
	struct view acquired; /* by a fence, if one comes */
	struct view released; /* by a fence, the latest */
	bool has_acquired, has_released;
} parties[WEAK_PARTIES];

/* Of fences, only what was seen. */
static struct view fences, lights, heavies;
static struct steps fence_steps, light_steps, heavy_steps;

static struct lock {
	const void *mutex;
	struct view view;
	struct steps steps;
} locks[LOCKS_MAX];
static uint32_t n_locks;

static struct party *self(void)
{
	return &parties[turns_self()];
}

/* Only the child of one execution has them: nothing is given back. */
static struct view *view_new(void)
{
	static uint8_t *room;
	static size_t left;
	struct view *v;

	if (left < sizeof(*v)) {
		left = 16 << 20;
		room = mmap(NULL, left, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		CHECK(room != MAP_FAILED);
	}
	v = (struct view *)(void *)room;
	room += sizeof(*v);
	left -= sizeof(*v);
	return v;
}

static uint32_t place_of(uint16_t message)
{
	return message ? messages[message].place : 0;
}

static void seen_join(struct view *to, const struct view *from)
{
	for (uint32_t i = 0; i < n_locations; i++) {
		if (place_of(from->seen[i]) > place_of(to->seen[i]) ||
		    !to->seen[i])
			to->seen[i] = from->seen[i];
	}
}

static void view_join(struct view *to, const struct view *from)
{
	for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
		if (from->happened.of[p] > to->happened.of[p])
			to->happened.of[p] = from->happened.of[p];
	}
	seen_join(to, from);
}

static void view_copy(struct view *to, const struct view *from)
{
	to->happened = from->happened;
	memcpy(to->seen, from->seen, n_locations * sizeof(from->seen[0]));
}

/* --------------------------------------------------------------- regions --- */

enum access {
	PLAIN_READ,
	PLAIN_WRITE,
	ATOMIC_READ,
	ATOMIC_WRITE,
	ACCESSES
};

/* Of each byte: when each party last accessed it, by its own count. */
struct shadow {
	uint16_t last[ACCESSES][WEAK_PARTIES];
};

static struct region {
	const char *name;
	uint8_t *at;
	size_t bytes;
	struct shadow *shadow;
	uint16_t *location; /* of each byte, from 1; 0: none */
} regions[REGIONS_MAX];
static uint32_t n_regions;

static void *map_lazily(size_t bytes)
{
	void *got = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	CHECK(got != MAP_FAILED);
	return got;
}

void weak_share(const char *name, const void *at, size_t bytes)
{
	struct region *r = &regions[n_regions++];

	CHECK(n_regions <= REGIONS_MAX);
	r->name = name;
	r->at = (uint8_t *)at;
	r->bytes = bytes;
	r->shadow = map_lazily(bytes * sizeof(*r->shadow));
	r->location = map_lazily(bytes * sizeof(*r->location));
}

static struct region *region_at(const void *at)
{
	const uint8_t *byte = at;

	for (uint32_t i = 0; i < n_regions; i++) {
		if (byte >= regions[i].at &&
		    byte < regions[i].at + regions[i].bytes)
			return &regions[i];
	}
	return NULL;
}

bool memory_is_shared(const void *at)
{
	return region_at(at) != NULL;
}

const char *region_of(const void *at, size_t *offset)
{
	const struct region *r = region_at(at);

	if (!r)
		return NULL;
	*offset = (size_t)((const uint8_t *)at - r->at);
	return r->name;
}

/* ----------------------------------------------------------------- races --- */

static const char *const access_names[ACCESSES] = {
	"a plain load",
	"a plain store",
	"an atomic load",
	"an atomic store",
};

/* Which earlier accesses of others must have happened before. */
static const bool conflicts[ACCESSES][ACCESSES] = {
	[PLAIN_READ] = {[PLAIN_WRITE] = true, [ATOMIC_WRITE] = true},
	[PLAIN_WRITE] = {true, true, true, true},
	[ATOMIC_READ] = {[PLAIN_WRITE] = true},
	[ATOMIC_WRITE] = {[PLAIN_READ] = true, [PLAIN_WRITE] = true},
};

static void race(const uint8_t *at, enum access access, enum access earlier,
		 const void *site)
{
	char place[128], where[256] = "";

	report_place(at, place, sizeof(place));
	if (site)
		report_site(site, where, sizeof(where));
	explore_fail(
		"a race: %s of %s%s%s, and %s before, of another party, "
		"in no order",
		access_names[access], place, *where ? " at " : "", where,
		access_names[earlier]);
}

static void byte_accessed(struct region *r, size_t offset, enum access access,
			  const void *site)
{
	struct shadow *s = &r->shadow[offset];
	const struct clock *mine = &self()->now.happened;
	uint32_t me = turns_self();

	for (uint32_t a = 0; a < ACCESSES; a++) {
		for (uint32_t p = 0; p < WEAK_PARTIES; p++) {
			if (p != me && conflicts[access][a] &&
			    s->last[a][p] > mine->of[p])
				race(r->at + offset, access, (enum access)a,
				     site);
		}
	}
	s->last[access][me] = mine->of[me];
}

static void accessed(const void *at, size_t bytes, enum access access,
		     const void *site)
{
	struct region *r = region_at(at);
	size_t offset = (size_t)((const uint8_t *)at - r->at);

	self()->now.happened.of[turns_self()]++;
	for (size_t i = 0; i < bytes && offset + i < r->bytes; i++)
		byte_accessed(r, offset + i, access, site);
}

/* ------------------------------------------------------------- locations --- */

static uint64_t value_at(const void *at, uint32_t bytes)
{
	uint64_t value = 0;

	memcpy(&value, at, bytes);
	return value;
}

/* It comes into being, at that place. */
static uint16_t message_add(struct location *l, uint32_t place, uint64_t value)
{
	uint16_t number = (uint16_t)++n_messages;
	struct message *m = &messages[number];

	CHECK(n_messages < MESSAGES_MAX && l->n < STORES_MAX);
	memmove(&l->order[place + 1], &l->order[place],
		(l->n - place) * sizeof(l->order[0]));
	l->order[place] = number;
	l->n++;
	for (uint32_t i = place; i < l->n; i++)
		messages[l->order[i]].place = (uint16_t)i;
	m->value = value;
	m->view = NULL;
	m->steps = (struct steps){{0}};
	m->is_change = false;
	/* Plain loads see what is last, once it is ordered that it is. */
	memcpy(l->at, &messages[l->order[l->n - 1]].value, l->bytes);
	return number;
}

static uint32_t location_of(const void *at, uint32_t bytes)
{
	struct region *r = region_at(at);
	size_t offset = (size_t)((const uint8_t *)at - r->at);
	uint32_t found = r->location[offset];
	struct location *l;

	if (found) {
		l = &locations[found - 1];
		if (l->at == at && l->bytes == bytes)
			return found - 1;
	}
	for (uint32_t i = 0; i < bytes; i++) {
		if (r->location[offset + i])
			explore_fail(
				"%s is accessed atomically with different "
				"sizes",
				r->name);
		r->location[offset + i] = (uint16_t)(n_locations + 1);
	}
	CHECK(n_locations < LOCATIONS_MAX);
	l = &locations[n_locations++];
	l->at = r->at + offset;
	l->bytes = bytes;
	l->n = 0;
	message_add(l, 0, value_at(at, bytes));
	return n_locations - 1;
}

/* It is ordered behind all that was, or a race was told: what was before is of
 * no interest. */
static void forget(const void *at, size_t bytes)
{
	struct region *r = region_at(at);
	size_t offset = (size_t)((const uint8_t *)at - r->at);

	for (size_t i = 0; i < bytes && offset + i < r->bytes; i++) {
		uint32_t found = r->location[offset + i];
		const struct location *l = &locations[found - 1];

		if (found)
			memset(&r->location[l->at - r->at], 0,
			       l->bytes * sizeof(r->location[0]));
	}
}

/* ---------------------------------------------------------------- atomic --- */

static bool acquires(int order)
{
	return order == __ATOMIC_ACQUIRE || order == __ATOMIC_ACQ_REL ||
	       order == __ATOMIC_SEQ_CST || order == __ATOMIC_CONSUME;
}

static bool releases(int order)
{
	return order == __ATOMIC_RELEASE || order == __ATOMIC_ACQ_REL ||
	       order == __ATOMIC_SEQ_CST;
}

static void see(uint32_t location, uint16_t message, int order)
{
	const struct message *m = &messages[message];
	struct party *p = self();

	p->now.seen[location] = message;
	steps_join(turns_steps(), &m->steps);
	turns_deed()->newer = (uint32_t)locations[location].n - 1 - m->place;
	if (!m->view)
		return;
	if (acquires(order)) {
		view_join(&p->now, m->view);
	} else {
		view_join(&p->acquired, m->view);
		p->has_acquired = true;
	}
}

/* What whoever acquires the message takes over. `after`: of a change, what it
 * changed, since a release reaches through it. */
static void put(uint32_t location, uint16_t message, int order,
		const struct message *after)
{
	struct message *m = &messages[message];
	struct party *p = self();

	p->now.seen[location] = message;
	m->steps = *turns_steps();
	if (releases(order)) {
		m->view = view_new();
		view_copy(m->view, &p->now);
	} else if (p->has_released) {
		m->view = view_new();
		view_copy(m->view, &p->released);
		m->view->seen[location] = message;
	}
	if (after && after->view) {
		if (!m->view)
			m->view = view_new();
		view_join(m->view, after->view);
		m->view->seen[location] = message;
	}
}

uint64_t memory_load(const void *at, uint32_t bytes, int order)
{
	uint32_t l = location_of(at, bytes);
	const struct location *location = &locations[l];
	uint32_t oldest = place_of(self()->now.seen[l]);
	uint32_t back;

	accessed(at, bytes, ATOMIC_READ, NULL);
	back = choose(location->n - oldest);
	see(l, location->order[location->n - 1 - back], order);
	turns_deed()->was = messages[self()->now.seen[l]].value;
	return turns_deed()->was;
}

void memory_store(void *at, uint32_t bytes, uint64_t value, int order)
{
	uint32_t l = location_of(at, bytes);
	struct location *location = &locations[l];
	uint32_t oldest = place_of(self()->now.seen[l]) + 1;
	uint32_t places[STORES_MAX], n = 0;
	uint32_t place;

	accessed(at, bytes, ATOMIC_WRITE, NULL);
	for (uint32_t i = location->n; i >= oldest; i--) {
		if (i == location->n || !messages[location->order[i]].is_change)
			places[n++] = i;
	}
	place = places[choose(n)];
	turns_deed()->is = value;
	turns_deed()->before = location->n - place;
	put(l, message_add(location, place, value), order, NULL);
}

static bool may_change(const struct location *l, uint32_t place)
{
	return place + 1u == l->n || !messages[l->order[place + 1]].is_change;
}

static void changed(uint32_t l, uint16_t old, uint64_t value, int order)
{
	struct location *location = &locations[l];
	uint32_t place = messages[old].place + 1u;
	uint16_t message;

	turns_deed()->is = value;
	turns_deed()->before = location->n - place;
	message = message_add(location, place, value);
	messages[message].is_change = true;
	put(l, message, order, &messages[old]);
}

uint64_t memory_change(void *at, uint32_t bytes,
		       uint64_t (*change)(uint64_t was, uint64_t operand),
		       uint64_t operand, int order)
{
	uint32_t l = location_of(at, bytes);
	const struct location *location = &locations[l];
	uint32_t oldest = place_of(self()->now.seen[l]);
	uint16_t may[STORES_MAX], old;
	uint32_t n = 0;

	accessed(at, bytes, ATOMIC_WRITE, NULL);
	for (uint32_t i = location->n; i-- > oldest;) {
		if (may_change(location, i))
			may[n++] = location->order[i];
	}
	old = may[choose(n)];
	see(l, old, order);
	turns_deed()->was = messages[old].value;
	changed(l, old, change(messages[old].value, operand), order);
	return messages[old].value;
}

uint64_t memory_swap(void *at, uint32_t bytes, uint64_t expected,
		     uint64_t desired, int success, int failure)
{
	uint32_t l = location_of(at, bytes);
	const struct location *location = &locations[l];
	uint32_t oldest = place_of(self()->now.seen[l]);
	uint16_t may[STORES_MAX], old;
	uint32_t n = 0;

	for (uint32_t i = location->n; i-- > oldest;) {
		if (messages[location->order[i]].value != expected ||
		    may_change(location, i))
			may[n++] = location->order[i];
	}
	old = may[choose(n)];
	turns_deed()->was = turns_deed()->is = messages[old].value;
	if (messages[old].value != expected) {
		accessed(at, bytes, ATOMIC_READ, NULL);
		see(l, old, failure);
		return messages[old].value;
	}
	accessed(at, bytes, ATOMIC_WRITE, NULL);
	see(l, old, success);
	changed(l, old, desired, success);
	return expected;
}

void memory_fence(int order)
{
	struct party *p = self();

	if (acquires(order) && p->has_acquired) {
		view_join(&p->now, &p->acquired);
		p->has_acquired = false;
	}
	if (order == __ATOMIC_SEQ_CST) {
		steps_join(turns_steps(), &fence_steps);
		fence_steps = *turns_steps();
		seen_join(&p->now, &fences);
		seen_join(&fences, &p->now);
	}
	if (releases(order)) {
		view_copy(&p->released, &p->now);
		p->has_released = true;
	}
}

/* As asymmetric fences are in the proposal for C++ (P1202): a light one and a heavy
 * one are in an order, and two light ones are not. */
void memory_light_fence(void)
{
	struct party *p = self();

	steps_join(turns_steps(), &heavy_steps);
	steps_join(&light_steps, turns_steps());
	seen_join(&p->now, &heavies);
	seen_join(&lights, &p->now);
}

void memory_heavy_fence(void)
{
	struct party *p = self();

	steps_join(turns_steps(), &light_steps);
	seen_join(&p->now, &lights);
	memory_fence(__ATOMIC_SEQ_CST);
	steps_join(&heavy_steps, turns_steps());
	seen_join(&heavies, &p->now);
}

/* ---------------------------------------------------------------- others --- */

void memory_read(const void *at, size_t bytes, const void *site)
{
	accessed(at, bytes, PLAIN_READ, site);
}

void memory_write(const void *at, size_t bytes, const void *site)
{
	accessed(at, bytes, PLAIN_WRITE, site);
	forget(at, bytes);
}

void memory_join(uint32_t party)
{
	view_join(&self()->now, &parties[party].now);
}

void memory_settle(void)
{
	for (uint32_t i = 0; i < n_locations; i++)
		self()->now.seen[i] = locations[i].order[locations[i].n - 1];
}

bool memory_has_news(uint32_t party)
{
	for (uint32_t i = 0; i < n_locations; i++) {
		if (place_of(parties[party].now.seen[i]) + 1u < locations[i].n)
			return true;
	}
	return false;
}

static struct lock *lock_of(const void *mutex)
{
	for (uint32_t i = 0; i < n_locks; i++) {
		if (locks[i].mutex == mutex)
			return &locks[i];
	}
	CHECK(n_locks < LOCKS_MAX);
	locks[n_locks].mutex = mutex;
	return &locks[n_locks++];
}

void memory_lock(const void *mutex)
{
	struct lock *l = lock_of(mutex);

	view_join(&self()->now, &l->view);
	steps_join(turns_steps(), &l->steps);
}

void memory_unlock(const void *mutex)
{
	struct lock *l = lock_of(mutex);

	self()->now.happened.of[turns_self()]++;
	view_join(&l->view, &self()->now);
	l->steps = *turns_steps();
}

/* What setup did has happened before all. */
void memory_begin(void)
{
	n_locations = n_messages = n_locks = 0;
}
