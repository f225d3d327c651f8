/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory ABI between libbacksight (the writer) and the node daemon.
 *
 * Each process that attaches gets file descriptors of its own over the
 * daemon's Unix socket; no process ever maps what another one can write.
 *
 *   abi/arena.h    segments, runs, directories: the records themselves
 *   abi/channel.h  grants, open handles, losses, the doorbell
 *   abi/context.h  thread slots and the trigger queue; BPF C includes it too
 *   abi/policy.h   what the node wants of all clients; read-only to them
 *   abi/attach.h   the packets on the socket; versions
 *   abi/slice.h    what leaves the node
 *
 * The daemon creates, sizes and seals the memfds (F_SEAL_GROW |
 * F_SEAL_SHRINK), so neither side can make the other fault by truncation. The
 * client maps them MADV_DONTDUMP, MADV_DONTFORK.
 *
 * The node believes nothing that it reads from memory that a client can
 * write: indexes, offsets and lengths are read once and checked against its
 * own tables before use, and a client that lies loses only its own data.
 */
#ifndef BS_ABI_H
#define BS_ABI_H

#include "abi/arena.h"
#include "abi/attach.h"
#include "abi/channel.h"
#include "abi/context.h"
#include "abi/policy.h"
#include "abi/slice.h"
#include "abi/types.h"
#include "backsight.h"

_Static_assert(BS_CONTEXT_SLOTS == BS_THREAD_SLOTS, "a slot a thread area");
_Static_assert(BS_CELL_NAME_BYTES == BS_TRIGGER_NAME_MAX + 1, "ABI");
_Static_assert(BS_CELL_WHY_BYTES == BS_TRIGGER_WHY_MAX + 1, "ABI");
_Static_assert(BS_CELL_LATERALS == BS_LATERALS_MAX, "ABI");
_Static_assert(sizeof(struct bs_span_start) == 32, "ABI");
_Static_assert(sizeof(struct bs_span_end) == 24, "ABI");
_Static_assert(sizeof(struct bs_hop) == 24, "ABI");
_Static_assert(sizeof(struct bs_attribute_header) == 4, "ABI");

#endif
