/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of handles, and the table of those that bs_open() opened: see
 * abi/channel.h. */
#include "client.h"

uint32_t bs_handle_draw(struct bs_thread *t)
{
	struct bs_attachment *a = t->attachment;

	if (unlikely(t->area == NULL))
		return BS_HANDLE_SHARED | (fetch_add(&a->shared_handles, 1) &
					   BS_HANDLE_COUNT_MASK);
	return bs_thread_draw_own_handle(t);
}

uint32_t bs_handle_draw_listed(struct bs_thread *t)
{
	uint32_t *table = t->attachment->open_handles;
	uint32_t handle = bs_handle_draw(t);

	if (!table)
		return handle;
	for (uint32_t probe = 1;; probe++) {
		uint32_t *place = &table[bs_handle_place(handle)];
		uint32_t nobody = 0;

		if (!READ_ONCE(*place) &&
		    compare_and_swap(place, &nobody, handle))
			return handle;
		if (probe == BS_OPEN_PROBES)
			break;
		handle = bs_handle_draw(t);
	}
	if (t->area)
		BS_COUNT(t->area->handles_unlisted, 1);
	return handle;
}

void bs_handle_unlist(const struct bs_attachment *a, uint32_t handle)
{
	uint32_t *place;

	if (!a->open_handles)
		return;
	place = &a->open_handles[bs_handle_place(handle)];
	if (READ_ONCE(*place) == handle)
		store_release(place, 0);
}
