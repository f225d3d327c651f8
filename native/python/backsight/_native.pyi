# SPDX-License-Identifier: Apache-2.0
# What build_native.py declares, as the package uses it.

from typing import NewType, Protocol, type_check_only

CData = NewType("CData", object)
CType = NewType("CType", object)

@type_check_only
class _Stats(Protocol):
    runs: int
    runs_lost: int
    records_lost: int
    payload_bytes_lost: int
    records_oversized: int
    contexts_malformed: int
    breadcrumbs_malformed: int
    attributes_malformed: int
    triggers_malformed: int
    triggers_unattached: int
    triggers_unrecorded: int
    triggers_lost: int
    attachments: int
    attached: bool

@type_check_only
class _Ffi:
    NULL: CData
    def new(self, cdecl: str | CType, init: object = ..., /) -> CData: ...
    def typeof(self, cdecl: str, /) -> CType: ...
    def string(self, cdata: CData, /) -> bytes: ...

@type_check_only
class _Lib:
    BS_PAYLOAD_MAX: int
    BS_SPAN_START_NAME_MAX: int
    BS_LATERALS_MAX: int
    BS_CONTEXT_MAX: int
    BS_ATTRIBUTE_STRING: int
    BS_ATTRIBUTE_INT: int
    BS_ATTRIBUTE_DOUBLE: int
    BS_ATTRIBUTE_BOOL: int
    BS_ATTRIBUTE_BYTES: int
    SPAN_END_BYTES: int
    BS_RECORD_RESOURCE: int
    BS_RECORD_SCOPE: int
    BS_RECORD_UNANSWERED: int
    BS_REACH_NONE: int
    BS_REACH_UNKNOWN: int
    def begin(self, hi: int, lo: int, /) -> int: ...
    def bs_end(self) -> int: ...
    def tracepoint(self, payload: bytes, payload_bytes: int, /) -> int: ...
    def open_trace(self, trace: CData, hi: int, lo: int, /) -> int: ...
    def bs_close(self, trace: CData, /) -> int: ...
    def bs_show(self, trace: CData, /) -> int: ...
    def write_data(self, trace: CData, payload: bytes, payload_bytes: int, /) -> int: ...
    def bs_write(self, trace: CData, kind: int, payload: bytes, payload_bytes: int, /) -> int: ...
    def span_end_detailed(
        self,
        trace: CData,
        span_id: int,
        end_ns: int,
        status: int,
        name: bytes | CData,
        scope: int,
        detail: bytes,
        detail_bytes: int,
        /,
    ) -> int: ...
    def bs_trusts_incoming(self) -> bool: ...
    def bs_span_start(
        self,
        trace: CData,
        span_id: int,
        parent_id: int,
        start_ns: int,
        kind: int,
        name: bytes,
        /,
    ) -> int: ...
    def bs_span_end(
        self,
        trace: CData,
        span_id: int,
        end_ns: int,
        status: int,
        name: bytes | CData,
        attributes: bytes,
        attributes_bytes: int,
        /,
    ) -> int: ...
    def bs_node_ref(self) -> CData: ...
    def bs_breadcrumb(self, trace: CData, node: bytes, /) -> int: ...
    def bs_serialize(self, trace: CData, span_id: int, value: CData, size: int, /) -> int: ...
    def bs_deserialize(
        self, trace: CData, span_id: int, value: bytes, value_bytes: int, /
    ) -> int: ...
    def trigger(
        self,
        hi: int,
        lo: int,
        name: bytes,
        why: bytes | CData,
        laterals: list[tuple[int, int]],
        n_laterals: int,
        /,
    ) -> int: ...
    def bs_get_stats(self, stats: CData, /) -> None: ...
    def wait_attached(self, timeout_ms: int, /) -> int: ...

ffi: _Ffi
lib: _Lib
