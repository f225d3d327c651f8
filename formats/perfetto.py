# SPDX-License-Identifier: Apache-2.0
"""Traces as Perfetto's native TrackEvent: a process a service and node, a slice a span.

A track can only show slices that lie within each other, so the spans of a process
are laid out in lanes. Where a span's parent is in another process, a flow leads
from the one to the other. Events of spans are instants.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import perfetto_pb2 as pf

from formats.otlp import UNFINISHED
from formats.records import Attributes, AttributeValue
from formats.spans import Event, Span
from formats.stamped import ShownTrace, service_of
from formats.tags import KINDS, text_of

SPAN, EVENT = "span", "event"
"""The categories of slices and of instants."""

# All packets are ours, in their order.
_SEQUENCE = 1

_STATUS = {1: "ok", 2: "error"}


@dataclass(slots=True, eq=False)
class _Placed:
    """A span on the clock of the picture; one without an end has no ``end_ns``."""

    span: Span
    process: _Process
    start_ns: int
    end_ns: int | None
    clock_offset_ns: int
    flows: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Lane:
    """A track, and the slices that are open on it."""

    number: int
    uuid: int
    open: list[_Placed] = field(default_factory=list)


@dataclass(slots=True)
class _Lanes:
    """Of one process. Which of them a span can stand on is known without a look at all.

    Lanes are named by their place in ``all``.
    """

    all: list[_Lane] = field(default_factory=list)
    free: list[int] = field(default_factory=list)  # heap
    by_top: dict[int, int] = field(default_factory=dict)  # the id of the innermost open span
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap: when a span ends, on which

    def take(self, placed: _Placed) -> _Lane | None:
        """In its parent, if that is the innermost, or else on the first where nothing is open."""
        while self.ends and self.ends[0][0] <= placed.start_ns:
            self._end(self.all[heapq.heappop(self.ends)[1]], placed.start_ns)
        number = self.by_top.get(placed.span.parent_id)
        if number is not None and _fits(placed, self.all[number].open[-1]):
            return self.all[number]
        return self.all[heapq.heappop(self.free)] if self.free else None

    def open(self, lane: _Lane, placed: _Placed) -> None:
        self._forget_top(lane)
        lane.open.append(placed)
        self.by_top[placed.span.span_id] = lane.number
        if placed.end_ns is not None:
            heapq.heappush(self.ends, (placed.end_ns, lane.number))

    def end_all(self) -> None:
        """The next trace's spans are no children of those that ended."""
        while self.ends:
            end_ns, number = heapq.heappop(self.ends)
            self._end(self.all[number], end_ns)

    def _end(self, lane: _Lane, now_ns: int) -> None:
        if not lane.open or not _is_over(lane.open[-1], now_ns):
            return  # with another of the same time
        self._forget_top(lane)
        while lane.open and _is_over(lane.open[-1], now_ns):
            lane.open.pop()
        if lane.open:
            self.by_top[lane.open[-1].span.span_id] = lane.number
        else:
            heapq.heappush(self.free, lane.number)

    def _forget_top(self, lane: _Lane) -> None:
        # Ids are random: only who lies has one twice, and then the last counts.
        if lane.open and self.by_top.get(lane.open[-1].span.span_id) == lane.number:
            del self.by_top[lane.open[-1].span.span_id]


def _fits(placed: _Placed, parent: _Placed) -> bool:
    return parent.end_ns is None or (placed.end_ns is not None and placed.end_ns <= parent.end_ns)


def _is_over(placed: _Placed, now_ns: int) -> bool:
    return placed.end_ns is not None and placed.end_ns <= now_ns


@dataclass(slots=True, eq=False)
class _Process:
    """A service on a node."""

    uuid: int
    number: int
    name: str
    lanes: _Lanes = field(default_factory=_Lanes)


class PerfettoWriter:
    """Writes traces into one file: all that ``write`` returns, one after the other."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, str], _Process] = {}
        self._last_uuid = 0
        self._last_flow = 0
        self._begun = False

    def write(self, trace: ShownTrace) -> bytes:
        """The bytes of one trace."""
        packets: list[pf.TracePacket] = []
        placed = sorted(
            self._place(trace, packets), key=lambda p: (p.start_ns, -_length_ns(p), p.span.span_id)
        )
        if not placed:
            return b""
        if not self._begun:
            self._begun = True
            packets.insert(0, _clocks(placed[0].start_ns))
        self._connect(placed)
        marks: list[tuple[int, pf.TracePacket]] = []
        for lane, members in self._lay_out(placed, packets):
            marks += _drawn(lane, members)
        # Stable: what happens at one time on one track stays in its order.
        marks.sort(key=lambda mark: mark[0])
        packets += (packet for _, packet in marks)
        for packet in packets:
            packet.trusted_packet_sequence_id = _SEQUENCE
        return pf.Trace(packet=packets).SerializeToString()

    def _uuid(self) -> int:
        self._last_uuid += 1
        return self._last_uuid

    def _place(self, trace: ShownTrace, packets: list[pf.TracePacket]) -> Iterator[_Placed]:
        for part in trace.parts:
            for span in part.spans:
                process = self._process(service_of(span), part.node, packets)
                start_ns = max(span.start_ns - part.clock_offset_ns, 0)
                end_ns = None
                if span.end_ns is not None:
                    end_ns = max(span.end_ns - part.clock_offset_ns, start_ns)
                yield _Placed(span, process, start_ns, end_ns, part.clock_offset_ns)

    def _process(self, service: str, node: str, packets: list[pf.TracePacket]) -> _Process:
        process = self._processes.get((service, node))
        if process is None:
            # Process ids of two nodes may be equal, and Perfetto knows processes by them.
            number = len(self._processes) + 1
            process = _Process(self._uuid(), number, f"{service} on {node}")
            self._processes[service, node] = process
            packet = pf.TracePacket()
            packet.track_descriptor.uuid = process.uuid
            packet.track_descriptor.process.pid = number
            packet.track_descriptor.process.process_name = process.name
            packets.append(packet)
        return process

    def _connect(self, spans: list[_Placed]) -> None:
        by_id = {placed.span.span_id: placed for placed in reversed(spans)}
        for placed in spans:
            parent = by_id.get(placed.span.parent_id)
            if parent is not None and parent.process is not placed.process:
                self._last_flow += 1
                parent.flows.append(self._last_flow)
                placed.flows.append(self._last_flow)

    def _lay_out(
        self, spans: list[_Placed], packets: list[pf.TracePacket]
    ) -> Iterable[tuple[_Lane, list[_Placed]]]:
        members: dict[int, tuple[_Lane, list[_Placed]]] = {}
        for placed in spans:
            lanes = placed.process.lanes
            lane = lanes.take(placed) or self._new_lane(placed.process, packets)
            lanes.open(lane, placed)
            members.setdefault(lane.uuid, (lane, []))[1].append(placed)
        for process in {placed.process.number: placed.process for placed in spans}.values():
            process.lanes.end_all()
        return members.values()

    def _new_lane(self, process: _Process, packets: list[pf.TracePacket]) -> _Lane:
        lanes = process.lanes.all
        lane = _Lane(len(lanes), self._uuid())
        lanes.append(lane)
        packet = pf.TracePacket()
        packet.track_descriptor.uuid = lane.uuid
        packet.track_descriptor.parent_uuid = process.uuid
        packet.track_descriptor.name = f"lane {len(lanes)}"
        packets.append(packet)
        return lane


def _length_ns(placed: _Placed) -> float:
    return math.inf if placed.end_ns is None else placed.end_ns - placed.start_ns


def _clocks(now_ns: int) -> pf.TracePacket:
    """Says that all times are Unix time: Perfetto's own clock and the wall's are read as one."""
    packet = pf.TracePacket(
        timestamp=now_ns, sequence_flags=pf.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    )
    for clock in (pf.BUILTIN_CLOCK_BOOTTIME, pf.BUILTIN_CLOCK_REALTIME):
        packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=now_ns)
    return packet


def _drawn(lane: _Lane, members: list[_Placed]) -> Iterator[tuple[int, pf.TracePacket]]:
    """Begins and ends in the order in which slices nest."""
    waiting: list[_Placed] = []
    for placed in members:
        while waiting and (end_ns := waiting[-1].end_ns) is not None and end_ns <= placed.start_ns:
            yield _end(lane, waiting.pop())
        yield placed.start_ns, _begin(lane, placed)
        for event in placed.span.events:
            packet = _instant(lane, placed, event)
            yield packet.timestamp, packet
        waiting.append(placed)
    while waiting:
        placed = waiting.pop()
        if placed.end_ns is not None:
            yield _end(lane, placed)


def _begin(lane: _Lane, placed: _Placed) -> pf.TracePacket:
    span = placed.span
    packet = pf.TracePacket(timestamp=placed.start_ns)
    event = packet.track_event
    event.type = pf.TrackEvent.TYPE_SLICE_BEGIN
    event.track_uuid = lane.uuid
    event.name = span.name
    event.categories.append(SPAN)
    event.flow_ids.extend(placed.flows)
    about: dict[str, AttributeValue] = {"span_id": f"{span.span_id:016x}"}
    if span.parent_id:
        about["parent_id"] = f"{span.parent_id:016x}"
    if span.process is not None:
        about["pid"] = span.process.pid
    if span.kind in KINDS:
        about["kind"] = KINDS[span.kind]
    if span.status in _STATUS:
        about["status"] = _STATUS[span.status]
    if span.status_message:
        about["status_message"] = span.status_message
    if span.unfinished:
        about[UNFINISHED] = True
    _annotate(event, {**about, **span.attributes})
    return packet


def _end(lane: _Lane, placed: _Placed) -> tuple[int, pf.TracePacket]:
    assert placed.end_ns is not None
    packet = pf.TracePacket(timestamp=placed.end_ns)
    packet.track_event.type = pf.TrackEvent.TYPE_SLICE_END
    packet.track_event.track_uuid = lane.uuid
    return placed.end_ns, packet


def _instant(lane: _Lane, placed: _Placed, event: Event) -> pf.TracePacket:
    packet = pf.TracePacket(timestamp=max(event.time_ns - placed.clock_offset_ns, 0))
    packet.track_event.type = pf.TrackEvent.TYPE_INSTANT
    packet.track_event.track_uuid = lane.uuid
    packet.track_event.name = event.name
    packet.track_event.categories.append(EVENT)
    _annotate(packet.track_event, event.attributes)
    return packet


def _annotate(event: pf.TrackEvent, attributes: Attributes) -> None:
    for key, value in attributes.items():
        annotation = event.debug_annotations.add(name=key)
        match value:
            case bool():
                annotation.bool_value = value
            case int() if -(1 << 63) <= value < 1 << 63:
                annotation.int_value = value
            case float():
                annotation.double_value = value
            case str():
                annotation.string_value = value
            case _:
                annotation.string_value = text_of(value)
