# SPDX-License-Identifier: Apache-2.0
"""What the slices of one trace say, as far as the verdict needs it.

It is kept, and what is missing found, in C (``native/src/decode.h``); this is that, typed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backsight_decode_native import ffi, lib

from formats.records import text
from formats.slices import SliceInfo, check
from protocol.hashing import node_id
from protocol.messages import NodeId


class FindingKind(enum.IntEnum):
    """What of a finding is known besides stands in decode.h, ``enum bsd_finding_kind``."""

    LOSSY = 1
    RUN_MISSING = 2
    UNFINISHED = 3
    UNSTARTED = 4
    PARENT_MISSING = 5
    HOP_OUT_UNMET = 6
    HOP_IN_UNMET = 7
    HOP_UNANSWERED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is missing; ``more`` of the same kind and node are only counted.

    ``error``: of HOP_UNANSWERED, and of HOP_OUT_UNMET with a name: that is an address.
    """

    kind: FindingKind
    node: NodeId
    more: int
    span_id: int
    other: int
    client: int
    handle: int
    number: int
    name: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Crumbs:
    """What records name.

    nodes      where the trace was or will be, known or not
    addresses  IP addresses that it was sent to: whoever is there may be no node
    """

    nodes: list[NodeId]
    addresses: list[NodeId]


class SliceEvidence(SliceInfo):
    """One node's slice, for as long as nothing is added to the evidence."""

    __slots__ = ("_evidence", "node", "truncated_records")

    def __init__(self, evidence: Any, number: int) -> None:  # noqa: ANN401 - of cffi
        super().__init__(lib.bsd_evidence_slice(evidence, number))
        self._evidence = evidence  # whose memory it is
        self.node = NodeId(lib.bsd_evidence_node(evidence, number))
        self.truncated_records = int(lib.bsd_evidence_truncated(evidence, number))


class Evidence:
    """All slices of one trace. The caller only reads the attributes.

    names     what breadcrumbs say that a node is called
    addresses crumbs that carry an IP address, each with the nodes whose slices say so
    items     spans, hops, crumbs, runs and other pieces: what its memory is counted in
    overflow  there were more than ``limit``: only sizes are known
    """

    __slots__ = ("_before", "_native", "addresses", "items", "names", "overflow")

    def __init__(self, limit: int) -> None:
        slot = ffi.new("struct bsd_evidence **")
        check(lib.bsd_evidence_new(limit, slot))
        self._native = ffi.gc(slot[0], lib.bsd_evidence_free)
        self._before: tuple[int, int | None, int | None] | None = None
        self.names: dict[NodeId, str] = {}
        self.addresses: dict[NodeId, set[NodeId]] = {}
        self.items = 0
        self.overflow = False

    @property
    def has_bytes(self) -> bool:
        """Whether any slice is begun, or was before only the sizes were kept."""
        return self.overflow or lib.bsd_evidence_slices(self._native) > 0

    def add(self, node: NodeId, data: bytes) -> Crumbs:
        """Read the next bytes of a node's slice; return what they name."""
        added = lib.bsd_evidence_add(self._native, node, data, len(data))
        check(added.error)
        self.items = added.items
        nodes: dict[NodeId, None] = {}
        addresses: dict[NodeId, None] = {}
        crumbs = added.crumbs
        for i in range(added.n_crumbs):
            crumb = crumbs[i]
            name = text(ffi.buffer(crumb.name, crumb.name_bytes)[:]) if crumb.name_bytes else ""
            is_told = bool(name) and self.names.get(crumb.node) == name
            is_named = is_told or (bool(name) and node_id(name) == crumb.node)
            if crumb.address and is_named:
                addresses[crumb.node] = None
                self.addresses.setdefault(crumb.node, set()).add(node)
                continue
            nodes[crumb.node] = None
            if is_named and not name.startswith("@"):
                self.names[crumb.node] = name
        if added.gave_up:
            self._forget()
        return Crumbs(list(nodes), list(addresses))

    def restart(self, node: NodeId) -> None:
        """Forget what a node's slice said: it begins another one."""
        self.items = lib.bsd_evidence_restart(self._native, node)

    def give_up(self) -> None:
        """Forget all but the sizes, for good."""
        lib.bsd_evidence_give_up(self._native)
        self._forget()

    def take_up(self, span_count: int, start_ns: int | None, end_ns: int | None) -> None:
        """After it was given up: what was known of all spans once."""
        self._before = span_count, start_ns, end_ns

    def extent(self) -> tuple[int, int | None, int | None]:
        """How many spans began, and the earliest and the latest time of any start or end."""
        if self._before is not None:
            return self._before
        extent = lib.bsd_evidence_extent(self._native)
        if not extent.timed:
            return extent.span_count, None, None
        return extent.span_count, extent.start_ns, extent.end_ns

    def slices(self) -> Iterator[SliceEvidence]:
        """In the order in which they came up."""
        count = lib.bsd_evidence_slices(self._native)
        return (SliceEvidence(self._native, number) for number in range(count))

    def least_bytes(self, node: NodeId) -> int | None:
        """Of SliceInfo, of a node's slice; None if nothing of it is known."""
        number = lib.bsd_evidence_find(self._native, node)
        if number < 0:
            return None
        return int(lib.bsd_slice_info(lib.bsd_evidence_slice(self._native, number)).least_bytes)

    def findings(self, few: int) -> Iterator[Finding]:
        """What is missing: of each kind and node as many, the last with how many more there are."""
        count = check(lib.bsd_evidence_judge(self._native, few))
        first = lib.bsd_evidence_findings(self._native)
        return (_finding(first[i]) for i in range(count))

    def _forget(self) -> None:
        self.overflow = True
        self.items = 0
        self.names.clear()
        self.addresses.clear()


def _finding(raw: Any) -> Finding:  # noqa: ANN401 - of cffi
    name = text(ffi.buffer(raw.name, raw.name_bytes)[:]) if raw.name_bytes else ""
    error = ""
    if raw.kind in (FindingKind.HOP_UNANSWERED, FindingKind.HOP_OUT_UNMET) and raw.other:
        error = text(ffi.buffer(raw.name + raw.name_bytes, raw.other)[:])
    return Finding(
        FindingKind(raw.kind),
        NodeId(raw.node),
        raw.more,
        raw.span_id,
        raw.other,
        raw.client,
        raw.handle,
        raw.number,
        name,
        error,
    )
