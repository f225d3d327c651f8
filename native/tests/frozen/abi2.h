/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ABI 2 as it was when it was frozen: what a client and a node of that day know
 * of each other. Written down once more, in numbers, and not to be changed with
 * native/src/abi: who changes that must go on understanding this.
 */
#ifndef FROZEN_ABI2_H
#define FROZEN_ABI2_H

#include <stddef.h>
#include <stdint.h>

#define ABI2_MAGIC 0x54475342u
#define ABI2_VERSION 2u

/* --------------------------------------------------------------- attach --- */

struct abi2_request {
	uint32_t magic;
	uint32_t version;
	uint32_t oldest;
	int32_t pid;
	uint64_t features;
	uint64_t token[2];
	char service[64];
};

struct abi2_reply {
	uint32_t magic;
	uint32_t version;
	int32_t status;
	uint32_t resumed;
	uint64_t token[2];
	uint64_t arena_bytes;
	char message[128];
	uint64_t features;
};

/* Arena, channel, context, policy. */
#define ABI2_FDS 4

#define ABI2_NEWS_CONTEXT 1u
#define ABI2_NEWS_POLICY 2u

/* With one descriptor; answered by the same, with none, if it is of a context. */
struct abi2_news {
	uint32_t magic;
	uint32_t kind;
	uint64_t number;
};

/* ---------------------------------------------------------------- arena --- */

#define ABI2_SEGMENT_BYTES 65536u
#define ABI2_SEGMENT_NONE 0xffffffffu
#define ABI2_FIRST_RUN 64u

enum abi2_segment_state {
	ABI2_HELD = 0,
	ABI2_PARKED = 1,
	ABI2_SEALED = 2,
	ABI2_TAKEN_BACK = 3,
};

struct abi2_segment {
	uint64_t life; /* state << 32 | generation */
	uint32_t slot;
	uint32_t runs;
};

/* An entry: 46 bits of the mix, offset / 4 in 14, flags in 4. */
#define ABI2_FIRST 1u
#define ABI2_LAST 2u
#define ABI2_LOSSY 4u
#define ABI2_CLOSED 8u

struct abi2_run {
	uint32_t trace_hi[2];
	uint32_t word; /* committed bytes / 4 in 14 bits, 18 bits of the mix */
	uint32_t handle;
	uint32_t seq; /* not there in a first run */
};

struct __attribute__((packed, aligned(4))) abi2_record {
	uint16_t payload_bytes;
	uint8_t type;
	uint8_t flags;
	uint64_t ticks;
};

#define ABI2_RECORD_DATA 1

static inline uint64_t abi2_mix(uint64_t hi, uint64_t lo)
{
	uint64_t x = __builtin_bswap64(hi * 0x9e3779b97f4a7c15ull) ^ lo;

	x = (x ^ x >> 32) * 0xff51afd7ed558ccdull;
	return x ^ x >> 29;
}

static inline uint64_t abi2_entry(uint64_t mix, uint32_t offset, uint32_t flags)
{
	return mix >> 18 << 18 | (uint64_t)(offset / 4) << 4 | flags;
}

/* -------------------------------------------------------------- channel --- */

struct abi2_channel {
	uint32_t magic;
	uint32_t version;
	uint64_t arena_bytes;
	uint32_t clock; /* 0: CLOCK_MONOTONIC, ns; 1: the processor's counter */
	uint32_t client_number;
	uint64_t ticks_per_s;
	uint64_t node_id;
	uint64_t cluster_seed;
	uint8_t pad[16];
	char node_name[64];
	uint32_t rung; /* futex */
	uint32_t sleeping;
};

#define ABI2_GRANTS_OFFSET 4096u
#define ABI2_GRANTS 8192u
#define ABI2_GRANT_FRESH 0x80000000u

struct abi2_grants {
	uint32_t head;
	uint32_t pad0[15];
	uint32_t tail;
	uint32_t losses;
	uint32_t moves;
	uint32_t pad1[13];
	struct {
		uint32_t segment;
		uint32_t generation;
	} entries[ABI2_GRANTS];
};

#define ABI2_AREAS_OFFSET (73728u + 65536u * 4u)
#define ABI2_SLOTS 256u
#define ABI2_LOSSES 64u

struct abi2_area {
	uint32_t owner_tid;
	uint32_t segment;
	uint32_t own_handle;
	uint32_t loss_head;
	uint32_t losses_untold;
	uint32_t zero;
	uint64_t counters[7];
	uint8_t pad0[128 - 4 * 6 - 8 * 7];
	uint32_t loss_tail;
	uint32_t loss_tail_seen;
	uint64_t loss_commit;
	uint32_t pad1[12];
	struct {
		uint64_t trace_hi;
		uint64_t trace_lo;
		uint32_t handle;
		uint32_t flags;
		uint64_t payload_bytes;
	} losses[ABI2_LOSSES];
};

#define ABI2_CHANNEL_BYTES                                                     \
	(ABI2_AREAS_OFFSET + ABI2_SLOTS * sizeof(struct abi2_area))

/* -------------------------------------------------------------- context --- */

#define ABI2_CELLS 256u
#define ABI2_TRIGGER_APPLICATION 1

struct abi2_context {
	uint32_t magic;
	uint32_t version;
	uint32_t thread_slots;
	uint32_t trigger_cells;
	uint8_t pad0[48];
	uint32_t trigger_head;
	uint32_t triggers_lost;
	uint64_t records_unattributed;
	uint8_t pad1[48];
	struct {
		uint32_t tid;
		uint32_t flags;
		uint64_t trace_hi;
		uint64_t trace_lo;
		uint64_t span_id;
		uint64_t reserved[4];
	} slots[ABI2_SLOTS];
	struct abi2_cell {
		uint32_t seq;
		uint16_t n_laterals;
		uint8_t source;
		uint8_t zero;
		uint64_t trace_hi;
		uint64_t trace_lo;
		uint64_t ticks;
		char name[32];
		char why[96];
		uint64_t laterals[64];
		uint8_t pad[32];
	} cells[ABI2_CELLS];
};

/* --------------------------------------------------------------- policy --- */

#define ABI2_POLICY_BYTES 4096u
#define ABI2_PERCENTAGE_ALL UINT64_MAX

struct abi2_policy {
	uint32_t magic;
	uint32_t version;
	uint32_t bytes;
	uint32_t trust_incoming;
	uint64_t number;
	uint64_t percentage_threshold;
	uint32_t rules_offset;
	uint32_t rules;
	uint32_t rule_bytes;
	uint32_t zero;
	uint64_t reserved[2];
};

_Static_assert(sizeof(struct abi2_request) == 104, "frozen");
_Static_assert(sizeof(struct abi2_reply) == 176, "frozen");
_Static_assert(sizeof(struct abi2_news) == 16, "frozen");
_Static_assert(sizeof(struct abi2_run) == 20, "frozen");
_Static_assert(sizeof(struct abi2_record) == 12, "frozen");
_Static_assert(offsetof(struct abi2_channel, rung) == 128, "frozen");
_Static_assert(offsetof(struct abi2_grants, entries) == 128, "frozen");
_Static_assert(offsetof(struct abi2_area, losses) == 192, "frozen");
_Static_assert(sizeof(struct abi2_area) == 2240, "frozen");
_Static_assert(sizeof(struct abi2_cell) == 704, "frozen");
_Static_assert(sizeof(struct abi2_context) == 128 + 256 * 64 + 256 * 704,
	       "frozen");

#endif
