/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BS_HOSTILE_ATTACKS_H
#define BS_HOSTILE_ATTACKS_H

#include "target.h"

/* Of what is mapped: mappings.c. */
void scribble(struct target *t);
void scribble_channel(struct target *t);
void lie_in_directories(struct target *t);
void lie_of_grants(struct target *t);
void lie_of_handles(struct target *t);
void lie_of_losses(struct target *t);
void lie_in_context(struct target *t);
void fire_wrong_triggers(struct target *t);
void touch_arena(struct target *t);

/* On the socket: door.c. */
void stay_silent(struct target *t);
void say_garbage(struct target *t);
void say_garbage_attached(struct target *t);
void storm(struct target *t);
void attach_and_leave(struct target *t);

/* Through the library, or by many processes: processes.c. */
void leave_leftovers(struct target *t);
void open_handles(struct target *t);
void wash_pool(struct target *t);
void fire_by_honest_name(struct target *t);
void fire_for_bulk(struct target *t);
void fire_for_neighbours(struct target *t);

#endif
