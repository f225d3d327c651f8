# SPDX-License-Identifier: Apache-2.0
"""Evidence in Python, as it was before there was one in C: what that is compared with.

Slices of different nodes arrive interleaved, and one slice may hold the end of
a span before its start, so everything here is commutative: spans and parents,
starts and ends, hops out and in are matched whichever comes first.
"""

from __future__ import annotations

import ipaddress
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from coordinator.core.evidence import Crumbs, FindingKind
from formats.records import Breadcrumb, HopIn, HopOut, SpanEnd, SpanStart, Unanswered
from formats.slices import Record
from protocol.hashing import node_id
from protocol.messages import NodeId
from tests.decoding.slices import PythonDecoder


@dataclass(slots=True)
class SliceEvidence:
    """One node's slice. Spans are keyed by (client, span id).

    ``spans`` (span id, parent id) and ``hops`` (injecting node, span id, handle,
    hop, whether extracted), one after the other, are what it adds to the whole, so
    that the whole can be made without another. ``sent``: who injected what; ``unanswered``: what is
    said of what nobody answered, by the client, the handle and the span.
    """

    decoder: PythonDecoder = field(default_factory=PythonDecoder)
    open_spans: dict[tuple[int, int], list[SpanStart]] = field(default_factory=dict)
    early_ends: dict[tuple[int, int], int] = field(default_factory=dict)
    truncated_records: int = 0
    spans: array[int] = field(default_factory=lambda: array("Q"))
    hops: array[int] = field(default_factory=lambda: array("Q"))
    sent: set[tuple[int, HopKey]] = field(default_factory=set)
    unanswered: dict[tuple[int, int, int], list[Unanswered]] = field(default_factory=dict)
    start_ns: int | None = None
    end_ns: int | None = None
    items: int = 0


HopKey: TypeAlias = tuple[NodeId, int, int, int]
"""Injecting node, span id, handle, hop: a hop is counted in its handle, of which a span may have several."""


@dataclass(slots=True)
class Hop:
    """A context that travelled: how often it was injected and extracted.

    ``extracted_on`` is one node that extracted it.
    """

    injected: int = 0
    extracted: int = 0
    extracted_on: NodeId | None = None


class PythonEvidence:
    """All slices of one trace. The caller only reads the attributes.

    When a slice is begun anew, what was taken together is, too, but not before somebody
    wants to see it (``whole``): a node may begin one again and again.

    slices    by node
    spans     ids of the spans whose start was delivered
    orphans   parent id -> (node, span id) of a child, while it is not in spans
    hops      how each went
    names     what breadcrumbs say that a node is called
    addresses crumbs that carry an IP address, each with the nodes whose slices say so
    items     spans, hops, crumbs, runs and other pieces: what its memory is counted in
    overflow  there were more than ``limit``: only sizes are known
    """

    def __init__(self, limit: int) -> None:
        self.slices: dict[NodeId, SliceEvidence] = {}
        self.spans: set[int] = set()
        self.orphans: dict[int, tuple[NodeId, int]] = {}
        self.hops: dict[HopKey, Hop] = {}
        self.names: dict[NodeId, str] = {}
        self.addresses: dict[NodeId, set[NodeId]] = {}
        self.span_count = 0
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self.overflow = False
        self._limit = limit
        self._is_stale = False  # spans, orphans, hops, and what is said of all spans
        self.items = 0

    @property
    def has_bytes(self) -> bool:
        """Whether any slice is begun, or was before only the sizes were kept."""
        return bool(self.slices) or self.overflow

    def add(self, node: NodeId, data: bytes) -> Crumbs:
        """Read the next bytes of a node's slice; return what they name."""
        named = Crumbs([], [])
        if self.overflow or not data:
            return named
        known = self.slices.get(node)
        if known is None:
            known = self.slices[node] = SliceEvidence()
        kept = known.decoder.items
        items = 0
        for record in known.decoder.feed(data):
            items += self._take(node, known, record, named)
        items += known.decoder.items - kept
        known.items += items
        self.items += items
        if self.items > self._limit:
            self.give_up()
        return Crumbs(list(dict.fromkeys(named.nodes)), list(dict.fromkeys(named.addresses)))

    def is_unanswered(self, key: HopKey) -> bool:
        """Whether all who sent it say, in the handle that did, that they could not."""
        if self.hops[key].extracted:
            return False
        at, span_id, handle, _ = key
        for node, known in self.slices.items():
            for client, sent in known.sent:
                if sent != key:
                    continue
                said = known.unanswered.get((client, handle, span_id), ())
                if node != at or not said or not all(s.unsent and s.address for s in said):
                    return False
        return True

    def restart(self, node: NodeId) -> None:
        """Forget what a node's slice said: it begins another one."""
        gone = self.slices.pop(node, None)
        if gone is None:
            return
        self.items -= gone.items
        self._is_stale = True

    def whole(self) -> None:
        """Take together what the slices say, if that was not done as they came."""
        if not self._is_stale:
            return
        self._is_stale = False
        self.spans.clear()
        self.orphans.clear()
        self.hops.clear()
        for known in self.slices.values():
            self.spans.update(known.spans[::2])
        for node, known in self.slices.items():
            for span_id, parent_id in zip(known.spans[::2], known.spans[1::2], strict=True):
                if parent_id and parent_id not in self.spans:
                    self.orphans.setdefault(parent_id, (node, span_id))
            hops = (known.hops[i::5] for i in range(5))
            for at, span_id, handle, number, extracted in zip(*hops, strict=True):
                key = (NodeId(at), span_id, handle, number)
                self._meet(node, key, extracted=bool(extracted))
        slices = self.slices.values()
        self.span_count = sum(len(known.spans) // 2 for known in slices)
        self.start_ns = min((k.start_ns for k in slices if k.start_ns is not None), default=None)
        self.end_ns = max((k.end_ns for k in slices if k.end_ns is not None), default=None)

    def give_up(self) -> None:
        """Forget all but the sizes, for good."""
        self.whole()
        self.overflow = True
        for kept in (self.slices, self.orphans, self.hops, self.names):
            kept.clear()
        self.spans.clear()
        self.addresses.clear()
        self.items = 0

    def _take(self, node: NodeId, known: SliceEvidence, record: Record, named: Crumbs) -> int:
        """Take one record; return how many items it adds."""
        body = record.body
        known.truncated_records += record.truncated
        if isinstance(body, SpanStart):
            self._start(node, known, record.client, body)
        elif isinstance(body, SpanEnd):
            self._end(known, record.client, body)
        elif isinstance(body, HopOut):
            self._hop(node, known, body, extracted=False)
            key = (body.node_id, body.span_id, body.handle, body.hop)
            known.sent.add((record.client, key))
        elif isinstance(body, Unanswered):
            sender = (record.client, record.handle, body.span_id)
            known.unanswered.setdefault(sender, []).append(body)
        elif isinstance(body, HopIn):
            self._hop(node, known, body, extracted=True)
            named.nodes.append(body.node_id)
        elif isinstance(body, Breadcrumb):
            is_named = bool(body.name) and node_id(body.name) == body.node_id
            if is_named and _is_address(body.name):
                named.addresses.append(body.node_id)
                self.addresses.setdefault(body.node_id, set()).add(node)
            else:
                named.nodes.append(body.node_id)
                if is_named and not body.name.startswith("@"):
                    self.names[body.node_id] = body.name
        else:
            return 0
        return 1

    def _start(self, node: NodeId, known: SliceEvidence, client: int, start: SpanStart) -> None:
        self.span_count += 1
        self._extend(known, start.start_ns)
        known.spans.extend((start.span_id, start.parent_id))
        if not self._is_stale:
            self.spans.add(start.span_id)
            self.orphans.pop(start.span_id, None)
            if start.parent_id and start.parent_id not in self.spans:
                self.orphans.setdefault(start.parent_id, (node, start.span_id))
        key = (client, start.span_id)
        if key not in known.early_ends:
            known.open_spans.setdefault(key, []).append(start)
        elif known.early_ends[key] == 1:
            del known.early_ends[key]
        else:
            known.early_ends[key] -= 1

    def _end(self, known: SliceEvidence, client: int, end: SpanEnd) -> None:
        self._extend(known, end.end_ns)
        key = (client, end.span_id)
        waiting = known.open_spans.get(key)
        if waiting is None:
            known.early_ends[key] = known.early_ends.get(key, 0) + 1
        elif len(waiting) == 1:
            del known.open_spans[key]
        else:
            waiting.pop()

    def _hop(
        self, node: NodeId, known: SliceEvidence, body: HopOut | HopIn, *, extracted: bool
    ) -> None:
        key = (body.node_id, body.span_id, body.handle, body.hop)
        known.hops.extend((*key, extracted))
        if not self._is_stale:
            self._meet(node, key, extracted=extracted)

    def _meet(self, node: NodeId, key: HopKey, *, extracted: bool) -> None:
        """One end of a hop was delivered by that node."""
        hop = self.hops.get(key)
        if hop is None:
            hop = self.hops[key] = Hop()
        if extracted:
            hop.extracted += 1
            hop.extracted_on = node
        else:
            hop.injected += 1

    def _extend(self, known: SliceEvidence, time_ns: int) -> None:
        if known.start_ns is None or time_ns < known.start_ns:
            known.start_ns = time_ns
            if self.start_ns is None or time_ns < self.start_ns:
                self.start_ns = time_ns
        if known.end_ns is None or time_ns > known.end_ns:
            known.end_ns = time_ns
            if self.end_ns is None or time_ns > self.end_ns:
                self.end_ns = time_ns


def _is_address(name: str) -> bool:
    """Whether it is "@" and an IP address, without a zone."""
    try:
        return name.startswith("@") and "%" not in name and bool(ipaddress.ip_address(name[1:]))
    except ValueError:
        return False


Missing = tuple[FindingKind, NodeId, object]


def missing(evidence: PythonEvidence) -> Iterator[Missing]:
    """All that a verdict found, when it looked for itself."""
    # Else the sizes would be made anew of what was forgotten.
    evidence._is_stale = not evidence.overflow
    evidence.whole()
    for node, known in evidence.slices.items():
        handles = known.decoder.handles
        lossy = {client for (client, _), runs in handles.items() if runs.lossy}
        for client in lossy | known.decoder.lossy:
            yield FindingKind.LOSSY, node, client
        for key, runs in handles.items():
            if problem := runs.problem():
                yield FindingKind.RUN_MISSING, node, (*key, problem)
        for (client, _), starts in known.open_spans.items():
            for start in starts:
                yield FindingKind.UNFINISHED, node, (client, start.span_id)
        for key in known.early_ends:
            yield FindingKind.UNSTARTED, node, key
    for parent, (node, child) in evidence.orphans.items():
        yield FindingKind.PARENT_MISSING, node, (parent, child)
    for hop_key, hop in evidence.hops.items():
        if hop.extracted < hop.injected:
            unanswered = evidence.is_unanswered(hop_key)
            kind = FindingKind.HOP_UNANSWERED if unanswered else FindingKind.HOP_OUT_UNMET
            yield kind, hop_key[0], hop_key[1:]
        if not hop.injected:
            yield FindingKind.HOP_IN_UNMET, hop_key[0], (*hop_key[1:], hop.extracted_on)
