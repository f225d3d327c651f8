/* SPDX-License-Identifier: Apache-2.0 */
/* What the payload of a record says, by its type (backsight.h). */
#include "abi/kernel_event.h"
#include "backsight.h"
#include "internal.h"

static bool decode_start(struct bsd_record *r, const uint8_t *p, uint32_t bytes)
{
	if (bytes < sizeof(struct bs_span_start))
		return false;
	r->span_id = get64(p + offsetof(struct bs_span_start, span_id));
	r->parent_id = get64(p + offsetof(struct bs_span_start, parent_id));
	r->time_ns = get64(p + offsetof(struct bs_span_start, start_ns));
	r->kind = p[offsetof(struct bs_span_start, kind)];
	r->name_bytes = p[offsetof(struct bs_span_start, name_bytes)];
	r->bytes = p + sizeof(struct bs_span_start);
	return r->name_bytes <= bytes - sizeof(struct bs_span_start);
}

static bool decode_end(struct bsd_record *r, const uint8_t *p, uint32_t bytes)
{
	if (bytes < sizeof(struct bs_span_end))
		return false;
	r->span_id = get64(p + offsetof(struct bs_span_end, span_id));
	r->time_ns = get64(p + offsetof(struct bs_span_end, end_ns));
	r->name_bytes = get16(p + offsetof(struct bs_span_end, name_bytes));
	r->status = get16(p + offsetof(struct bs_span_end, status));
	r->rest_bytes =
		get32(p + offsetof(struct bs_span_end, attributes_bytes));
	r->bytes = p + sizeof(struct bs_span_end);
	bytes -= sizeof(struct bs_span_end);
	return r->name_bytes <= bytes && r->rest_bytes <= bytes - r->name_bytes;
}

static bool decode_hop(struct bsd_record *r, const uint8_t *p, uint32_t bytes)
{
	if (bytes < sizeof(struct bs_hop))
		return false;
	r->node_id = get64(p + offsetof(struct bs_hop, node_id));
	r->span_id = get64(p + offsetof(struct bs_hop, span_id));
	r->hop = get32(p + offsetof(struct bs_hop, hop));
	r->injector = get32(p + offsetof(struct bs_hop, handle));
	return true;
}

static bool decode_crumb(struct bsd_record *r, const uint8_t *p, uint32_t bytes)
{
	if (bytes < sizeof(uint64_t) ||
	    bytes > sizeof(uint64_t) + BS_NODE_NAME_MAX)
		return false;
	r->node_id = get64(p);
	r->name_bytes = bytes - sizeof(uint64_t);
	r->bytes = p + sizeof(uint64_t);
	return true;
}

static bool decode_scope(struct bsd_record *r, const uint8_t *p, uint32_t bytes)
{
	if (bytes < sizeof(uint32_t))
		return false;
	r->scope = get32(p);
	r->rest_bytes = bytes - sizeof(uint32_t);
	r->bytes = p + sizeof(uint32_t);
	return true;
}

static bool decode_detail(struct bsd_record *r, const uint8_t *p,
			  uint32_t bytes)
{
	if (bytes < sizeof(struct bs_span_detail))
		return false;
	r->span_id = get64(p + offsetof(struct bs_span_detail, span_id));
	r->scope = get32(p + offsetof(struct bs_span_detail, scope));
	r->part = get16(p + offsetof(struct bs_span_detail, part));
	r->parts = get16(p + offsetof(struct bs_span_detail, parts));
	r->rest_bytes = bytes - sizeof(struct bs_span_detail);
	r->bytes = p + sizeof(struct bs_span_detail);
	return r->part < r->parts;
}

static bool decode_unanswered(struct bsd_record *r, const uint8_t *p,
			      uint32_t bytes)
{
	if (bytes < sizeof(struct bs_unanswered))
		return false;
	r->span_id = get64(p + offsetof(struct bs_unanswered, span_id));
	r->name_bytes =
		get32(p + offsetof(struct bs_unanswered, address_bytes));
	r->unsent = get32(p + offsetof(struct bs_unanswered, reach)) ==
		    BS_REACH_NONE;
	bytes -= sizeof(struct bs_unanswered);
	r->rest_bytes = bytes - r->name_bytes;
	r->bytes = p + sizeof(struct bs_unanswered);
	return r->name_bytes <= bytes;
}

bool record_decode(struct bsd_record *r, const uint8_t *payload, uint32_t bytes)
{
	switch (r->type) {
	case BS_RECORD_SPAN_START:
		return decode_start(r, payload, bytes);
	case BS_RECORD_SPAN_END:
		return decode_end(r, payload, bytes);
	case BS_RECORD_HOP_OUT:
	case BS_RECORD_HOP_IN:
		return decode_hop(r, payload, bytes);
	case BS_RECORD_BREADCRUMB:
		return decode_crumb(r, payload, bytes);
	case BS_RECORD_SCOPE:
		return decode_scope(r, payload, bytes);
	case BS_RECORD_SPAN_DETAIL:
		return decode_detail(r, payload, bytes);
	case BS_RECORD_UNANSWERED:
		return decode_unanswered(r, payload, bytes);
	case BS_RECORD_KERNEL:
		if (bytes < sizeof(struct bs_kernel_event))
			return false;
		break;
	default:
		break;
	}
	r->bytes = payload;
	r->rest_bytes = bytes;
	return true;
}
