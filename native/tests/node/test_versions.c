/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node of ABI 3, which speaks ABI 2 still (newer.h), and a client of ABI 2:
 * a library refuses whatever has a number that it does not know.
 */
#include <errno.h>

#include "writer.h"

#define OLD 2u

static struct bsn_config config;

static uint32_t policy_version(struct bsn *n)
{
	const struct bs_policy *p = mmap(NULL, BS_POLICY_BYTES, PROT_READ,
					 MAP_SHARED, bsn_policy_fd(n), 0);
	uint32_t version;

	CHECK((void *)p != MAP_FAILED);
	version = p->version;
	munmap((void *)p, BS_POLICY_BYTES);
	return version;
}

/* Of the context that takes the place of the one that it has. */
static uint32_t next_context_version(struct bsn *n, const struct writer *w)
{
	struct bs_context_segment *x;
	uint32_t version;
	int fd = bsn_client_context(n, w->number, -1);

	CHECK(fd >= 0);
	x = w_map_context(fd);
	version = x->version;
	munmap(x, sizeof(*x));
	close(fd);
	return version;
}

static void all_is_of_the_version_agreed_on(void)
{
	struct bsn *n = test_node(&config);
	struct writer w[2];

	CHECK_EQ(BS_ABI_VERSION, 3);
	for (int i = 0; i < 2; i++)
		writer_attach(&w[i], n, START);
	CHECK_EQ(bsn_client_agreed(n, w[0].number, OLD, 0), 0);
	for (uint32_t i = 0; i < 2; i++) {
		CHECK_EQ(w_header(&w[i])->version, OLD + i);
		CHECK_EQ(w[i].context->version, OLD + i);
		CHECK_EQ(next_context_version(n, &w[i]), OLD + i);
		writer_close(&w[i]);
	}
	CHECK_EQ(policy_version(n), OLD);
	bsn_free(n);
}

/* An older node can come after this one, and takes up what it speaks. */
static void adoption_leaves_the_version_as_it_is(void)
{
	struct bsn *n = test_node(&config);
	struct writer w;

	writer_attach(&w, n, START);
	CHECK_EQ(bsn_client_agreed(n, w.number, OLD, 0), 0);
	n = restart(n, &config, &w, 1, START);
	CHECK_EQ(w_header(&w)->version, OLD);
	CHECK_EQ(w.context->version, OLD);
	CHECK_EQ(next_context_version(n, &w), OLD);
	bsn_free(n);
	writer_close(&w);
}

/* The client writes to its header; who keeps what was agreed is the caller. */
static void the_callers_word_goes(void)
{
	struct bsn *n = test_node(&config);
	struct writer w;

	writer_attach(&w, n, START);
	CHECK_EQ(bsn_client_agreed(n, w.number, OLD, 0), 0);
	w_header(&w)->version = BS_ABI_VERSION;
	n = restart(n, &config, &w, 1, START);
	CHECK_EQ(bsn_client_agreed(n, w.number, OLD, 0), 0);
	CHECK_EQ(w_header(&w)->version, OLD);
	CHECK_EQ(next_context_version(n, &w), OLD);
	bsn_free(n);
	writer_close(&w);
}

static void refuses_what_it_does_not_speak(void)
{
	struct bsn *n = test_node(&config);
	struct writer w;

	writer_attach(&w, n, START);
	CHECK_EQ(bsn_client_agreed(n, w.number, BS_ABI_VERSION + 1, 0),
		 -EPROTO);
	CHECK_EQ(bsn_client_agreed(n, w.number, BS_ABI_OLDEST - 1, 0), -EPROTO);
	CHECK_EQ(bsn_client_agreed(n, w.number, OLD, BS_FEATURES + 1), -EPROTO);
	CHECK_EQ(w_header(&w)->version, BS_ABI_VERSION);
	CHECK_EQ(bsn_client_agreed(n, w.number + 1, OLD, 0), -ENOENT);
	CHECK_EQ(bsn_client_agreed(n, -1, OLD, 0), -ENOENT);
	bsn_free(n);
	writer_close(&w);
}

int main(void)
{
	config = test_config(8 << 20);
	RUN(all_is_of_the_version_agreed_on);
	RUN(adoption_leaves_the_version_as_it_is);
	RUN(the_callers_word_goes);
	RUN(refuses_what_it_does_not_speak);
	return 0;
}
