# SPDX-License-Identifier: Apache-2.0
"""Write the C source of the extension backsight._native: ``build_native.py OUTPUT``.

cffi in API mode: the C compiler checks what stands here against backsight.h.
"""

from __future__ import annotations

import sys

import cffi

DECLARATIONS = """
#define BS_PAYLOAD_MAX ...
#define BS_SPAN_START_NAME_MAX ...
#define BS_LATERALS_MAX ...
#define BS_CONTEXT_MAX ...
#define BS_ATTRIBUTE_STRING ...
#define BS_ATTRIBUTE_INT ...
#define BS_ATTRIBUTE_DOUBLE ...
#define BS_ATTRIBUTE_BOOL ...
#define BS_ATTRIBUTE_BYTES ...
#define SPAN_END_BYTES ...
#define BS_RECORD_RESOURCE ...
#define BS_RECORD_SCOPE ...
#define BS_RECORD_UNANSWERED ...
#define BS_REACH_NONE ...
#define BS_REACH_UNKNOWN ...

struct bs_trace_id {
    uint64_t hi;
    uint64_t lo;
};

struct bs_trace { ...; };

struct bs_stats {
    uint64_t runs;
    uint64_t runs_lost;
    uint64_t records_lost;
    uint64_t payload_bytes_lost;
    uint64_t records_oversized;
    uint64_t contexts_malformed;
    uint64_t breadcrumbs_malformed;
    uint64_t attributes_malformed;
    uint64_t triggers_malformed;
    uint64_t triggers_unattached;
    uint64_t triggers_unrecorded;
    uint64_t triggers_lost;
    uint64_t attachments;
    bool attached;
};

int begin(uint64_t hi, uint64_t lo);
int bs_end(void);
int tracepoint(const void *payload, size_t payload_bytes);

int open_trace(struct bs_trace *trace, uint64_t hi, uint64_t lo);
int bs_close(struct bs_trace *trace);
int bs_show(struct bs_trace *trace);
int write_data(struct bs_trace *trace, const void *payload, size_t payload_bytes);

int bs_span_start(struct bs_trace *trace, uint64_t span_id, uint64_t parent_id,
                  uint64_t start_ns, uint8_t kind, const char *name);
int bs_span_end(struct bs_trace *trace, uint64_t span_id, uint64_t end_ns,
                uint16_t status, const char *name, const void *attributes,
                size_t attributes_bytes);

int bs_write(struct bs_trace *trace, uint8_t type, const void *payload,
             size_t payload_bytes);
int span_end_detailed(struct bs_trace *trace, uint64_t span_id, uint64_t end_ns,
                      uint16_t status, const char *name, uint32_t scope,
                      const void *detail, size_t detail_bytes);
bool bs_trusts_incoming(void);

const char *bs_node_ref(void);
int bs_breadcrumb(struct bs_trace *trace, const char *node);
int bs_serialize(struct bs_trace *trace, uint64_t span_id, char *value, size_t size);
int bs_deserialize(struct bs_trace *trace, uint64_t span_id, const char *value,
                   size_t value_bytes);

int trigger(uint64_t hi, uint64_t lo, const char *name, const char *why,
            const struct bs_trace_id *laterals, size_t n_laterals);

void bs_get_stats(struct bs_stats *stats);
int wait_attached(int timeout_ms);
"""

# What cffi generates releases the GIL around every call, which costs several
# times what the call does, and where another thread computes, up to a switch
# interval (5 ms) until the GIL is back. No function of libbacksight blocks, so
# they all keep it; and since all Python threads are thereby serialised, a close
# on one thread never meets a write on another inside the library. The one that
# waits releases it by hand.
SOURCE = r"""
#include <errno.h>
#include <backsight.h>

#undef Py_BEGIN_ALLOW_THREADS
#undef Py_END_ALLOW_THREADS
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }

#define SPAN_END_BYTES sizeof(struct bs_span_end)

static int begin(uint64_t hi, uint64_t lo)
{
    return bs_begin((struct bs_trace_id){hi, lo});
}

static int tracepoint(const void *payload, size_t payload_bytes)
{
    return bs_tracepoint(payload, payload_bytes);
}

static int open_trace(struct bs_trace *trace, uint64_t hi, uint64_t lo)
{
    return bs_open(trace, (struct bs_trace_id){hi, lo});
}

static int write_data(struct bs_trace *trace, const void *payload,
                      size_t payload_bytes)
{
    return bs_write(trace, BS_RECORD_DATA, payload, payload_bytes);
}

/* A detail in as many parts as it needs, and the end: one call for both, as each
 * costs as much as several records do. */
static int span_end_detailed(struct bs_trace *trace, uint64_t span_id,
                             uint64_t end_ns, uint16_t status,
                             const char *name, uint32_t scope,
                             const void *detail, size_t detail_bytes)
{
    enum { PART = BS_PAYLOAD_MAX - sizeof(struct bs_span_detail) };
    unsigned char payload[BS_PAYLOAD_MAX];
    size_t parts = (detail_bytes + PART - 1) / PART;

    if (parts > UINT16_MAX)
        return -EMSGSIZE;
    for (size_t part = 0; part < parts; part++) {
        struct bs_span_detail h = {span_id, scope, (uint16_t)part,
                                   (uint16_t)parts};
        size_t bytes = detail_bytes - part * PART;

        if (bytes > PART)
            bytes = PART;
        memcpy(payload, &h, sizeof(h));
        memcpy(payload + sizeof(h),
               (const unsigned char *)detail + part * PART, bytes);
        bs_write(trace, BS_RECORD_SPAN_DETAIL, payload, sizeof(h) + bytes);
    }
    return bs_span_end(trace, span_id, end_ns, status, name, NULL, 0);
}

static int trigger(uint64_t hi, uint64_t lo, const char *name, const char *why,
                   const struct bs_trace_id *laterals, size_t n_laterals)
{
    return bs_trigger((struct bs_trace_id){hi, lo}, name, why, laterals,
                      n_laterals);
}

static int wait_attached(int timeout_ms)
{
    PyThreadState *state = PyEval_SaveThread();
    int rc = bs_wait_attached(timeout_ms);

    PyEval_RestoreThread(state);
    return rc;
}
"""


def main() -> None:
    """Write it."""
    ffi = cffi.FFI()
    ffi.cdef(DECLARATIONS)
    ffi.set_source("backsight._native", SOURCE)
    ffi.emit_c_code(sys.argv[1])


if __name__ == "__main__":
    main()
