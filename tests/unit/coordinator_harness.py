# SPDX-License-Identifier: Apache-2.0
"""Drives a coordinator's core by hand, and checks after each step what always holds.

- Nothing is acknowledged that the store has not made durable.
- Versions of a verdict rise by one, and each differs from the one before.
- The bytes in the store are contiguous, and what is in memory fits: bytes that
  were not kept, or are durable, take none.
- A node is asked for a trace and group once on each session, until its release.
- What is said fits the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import zstandard

from coordinator.core.coordinator import CoordinatorConfig, CoordinatorCore
from coordinator.core.lifecycle import NOBODY
from coordinator.core.outbox import Closed
from coordinator.core.records import AppendSlice, PutReleased, PutVerdict, Write
from coordinator.core.verdict import ReasonKind, Verdict
from formats.records import Body, Breadcrumb, HopIn, HopOut, SpanEnd, SpanStart
from formats.slices import PieceKind, Process, RunFlags
from protocol.hashing import node_id
from protocol.messages import (
    Collect,
    CoordinatorMessage,
    Group,
    Hello,
    NodeId,
    NodeMessage,
    Refused,
    Release,
    SliceChunk,
    SliceFlags,
    SliceReply,
    SliceStatus,
    TraceId,
    TriggerAck,
    TriggerFired,
)
from protocol.versions import OURS, Versions
from protocol.wire import encode_coordinator_batch, encode_slice_reply
from testbed.encoding import encode_clock, encode_piece, encode_process, encode_record
from tests.simulation.store import KeptSlice, MemoryStore

S = 1_000_000_000
MS = 1_000_000
REAL_NS = 1_700_000_000 * S


def trace_id(name: str) -> TraceId:
    return TraceId(name.encode().rjust(16, b"_"))


def trace_name(trace: TraceId) -> str:
    return trace.lstrip(b"_").decode()


class Harness:
    """A core, a store, and nodes that say what they are told to say."""

    def __init__(self, config: CoordinatorConfig | None = None, patience_ns: int = 0) -> None:
        self.config = replace(config or CoordinatorConfig(), patience_ns=patience_ns)
        self.now_ns = 1000 * S
        self.store = MemoryStore(lambda trace, verdict: None)
        self.incarnation = 0
        self.verdicts: dict[TraceId, list[Verdict]] = {}
        self.sessions: dict[str, int] = {}
        self.streams: dict[str, int] = {}
        self.credit: dict[str, int] = {}
        self.said: list[tuple[str, CoordinatorMessage]] = []
        self.replied: list[tuple[str, SliceReply]] = []
        self.written: list[Write] = []
        self.sent: dict[tuple[str, TraceId, int], int] = {}
        self.autosave = True
        self._names: dict[int, str] = {}
        self._refused: set[int] = set()
        self._asked: set[tuple[int, Group, TraceId]] = set()
        self._of_no_use: dict[tuple[NodeId, TraceId, int], int] = {}
        self._numbers = 0
        self.core = self._start()

    # --------------------------------------------------------- driving it

    def _start(self) -> CoordinatorCore:
        self.incarnation += 1
        traces, nodes = self.store.recovered()
        core = CoordinatorCore(
            self.config, self.incarnation, traces, nodes, self.now_ns, stored=self.store.recalled
        )
        while core.recovering:
            core.recover(self.now_ns)
        on_closed = core._lifecycle.on_closed

        def remember(closed: Closed) -> None:
            for node, epoch, end in closed.of_no_use:
                # It may be closed once more before the first time is durable, and then be told of both.
                key = (node, closed.trace, epoch)
                self._of_no_use[key] = max(end, self._of_no_use.get(key, 0))
            on_closed(closed)

        core._lifecycle.on_closed = remember  # type: ignore[method-assign]
        return core

    def restart(self) -> None:
        """The coordinator is killed, and another one starts on the same store."""
        self.store.crash()
        self.sessions.clear()
        self.streams.clear()
        self.written.clear()
        for trace in list(self.verdicts):
            kept = self.store.traces.get(trace)
            verdict = kept.verdict if kept is not None else None
            # What was not durable never was.
            self.verdicts[trace] = [verdict] if verdict is not None else []
        self.core = self._start()
        self.fetch()

    def connect(self, name: str, incarnation: int = 1, versions: Versions = OURS) -> int:
        self._numbers += 1
        session = self._numbers
        self._names[session] = name
        self.core.on_node_connected(
            session,
            Hello(name, incarnation, (f"10.0.0.{session}",), versions),
            f"peer{session}",
            self.now_ns,
        )
        self.fetch()
        if session not in self._refused:
            self.sessions[name] = session
        return session

    def lose(self, name: str) -> None:
        self.core.on_node_lost(self.sessions.pop(name), self.now_ns)
        self.fetch()

    def open_slices(self, name: str, incarnation: int = 1, number: int = 1) -> int:
        self._numbers += 1
        self.streams[name] = self._numbers
        self._names[self._numbers] = name
        self.credit[name] = 0
        self.core.on_slices_connected(self._numbers, name, incarnation, self.now_ns, number)
        self.fetch()
        return self._numbers

    def lose_slices(self, name: str) -> None:
        self.core.on_slices_lost(self.streams.pop(name), self.now_ns)
        self.fetch()

    def say(self, name: str, message: NodeMessage) -> None:
        self.core.on_node_message(self.sessions[name], message, self.now_ns, REAL_NS + self.now_ns)
        self.fetch()

    def send(self, name: str, trace: TraceId, offset: int, data: bytes, epoch: int = 1) -> None:
        chunk = SliceChunk(trace, offset, data, epoch, zstandard.compress(data))
        key = (name, trace, epoch)
        self.sent[key] = max(self.sent.get(key, 0), offset + len(data))
        self.core.on_chunk(self.streams[name], chunk, self.now_ns)
        self.credit[name] -= len(data)
        self.fetch()

    def save(self, token: int | None = None) -> None:
        """Make what was written durable, up to a token or all of it."""
        if token is None:
            if not self.written:
                return
            token = self.written[-1].token
        self.store.make_durable(token, self.now_ns)
        self.written = [write for write in self.written if write.token > token]
        self.core.on_durable(token, self.now_ns)
        self.fetch()

    def wait(self, duration_ns: int) -> None:
        """Let time pass, waking the core when it wants to be woken, and not else."""
        end_ns = self.now_ns + duration_ns
        while True:
            wakeup_ns = self.core.next_wakeup_ns(self.now_ns)
            if wakeup_ns is None or wakeup_ns > end_ns:
                break
            assert wakeup_ns >= self.now_ns
            self.now_ns = wakeup_ns
            self.core.on_tick(self.now_ns)
            self.fetch()
            again_ns = self.core.next_wakeup_ns(self.now_ns)
            assert again_ns is None or again_ns > self.now_ns, "it would be woken for ever"
        self.now_ns = end_ns

    # -------------------------------------------------------- what it does

    def fetch(self) -> None:
        """Take the outputs, and check what always holds."""
        for write in self.core.take_writes():
            self._check_write(write)
            self.written.append(write)
            self.store.write(write, self.now_ns)
        for session, messages in self.core.take_control(self.now_ns):
            for message in messages:
                self._check_message(session, message)
                self.said.append((self._names[session], message))
        for stream, reply in self.core.take_slice_replies(self.now_ns):
            name = self._names[stream]
            encode_slice_reply(reply)
            for ack in reply.acks:
                kept = self._kept(ack.trace, name)
                # Of another slice, where the one that is kept is whole: that is not needed.
                declined = kept is not None and kept.data and ack.epoch != kept.epoch
                durable = self._durable_bytes(ack.trace, name, ack.epoch)
                # What lies beyond the largest slice never will be.
                cut = durable >= self.config.slice_bytes_max
                stored = self.store.traces.get(ack.trace)
                verdict = stored.verdict if stored is not None else None
                reasons = verdict.reasons if verdict is not None else ()
                given_up = [reason.kind for reason in reasons] == [ReasonKind.ABANDONED]
                given_up = given_up and not ack.again
                # What came of it fitted nowhere, and nothing else will come.
                over = ack.offset <= self._of_no_use.get((node_id(name), ack.trace, ack.epoch), 0)
                assert declined or cut or given_up or over or ack.offset <= durable, (
                    "acknowledged before durable"
                )
            if self.streams.get(name) == stream:
                self.credit[name] += reply.credit_bytes
            self.replied.append((name, reply))
        assert self.core.memory_bytes <= self.config.memory_bytes
        undurable = sum(
            len(write.record.data)
            for write in self.written
            if isinstance(write.record, AppendSlice)
        )
        assert undurable == self.core.figures().undurable_bytes <= self.core.memory_bytes
        if self.autosave and self.written:
            self.save()

    def _check_write(self, write: Write) -> None:
        record = write.record
        if isinstance(record, AppendSlice):
            assert record.data
            # The frame that came is of all of it, or is not passed on.
            assert not record.zstd or zstandard.decompress(record.zstd) == record.data
            found = self._kept(record.trace, record.node)
            epoch, length = (found.epoch, len(found.data)) if found is not None else (0, 0)
            for other in (*(write.record for write in self.written), record):
                if not isinstance(other, AppendSlice):
                    continue
                if (other.trace, other.node) != (record.trace, record.node):
                    continue
                if other.epoch != epoch:
                    epoch, length = other.epoch, 0
                if other is not record:
                    length += len(other.data)
            assert record.offset == length, "a slice in the store would have a hole or an overlap"
        if isinstance(record, PutReleased):
            self._asked = {key for key in self._asked if key[2] != record.trace}
        if isinstance(record, PutVerdict):
            before = self.verdicts.setdefault(record.trace, [])
            if before:
                assert record.verdict.version == before[-1].version + 1
                assert not record.verdict.same_as(before[-1])
            before.append(record.verdict)

    def _kept(self, trace: TraceId, name: str) -> KeptSlice | None:
        kept = self.store.traces.get(trace)
        return kept.slices.get(name) if kept is not None else None

    def _durable_bytes(self, trace: TraceId, name: str, epoch: int) -> int:
        found = self._kept(trace, name)
        return len(found.data) if found is not None and found.epoch == epoch else 0

    def _check_message(self, session: int, message: CoordinatorMessage) -> None:
        encode_coordinator_batch([message])  # or it could not be said
        name = self._names[session]
        if isinstance(message, TriggerAck):
            # What is over a limit is not stored.
            refused = self.core._traversal.abandoned.get(message.group) == NOBODY
            is_durable = (message.group, name) in self.store.triggers
            if self.core.counters.firings_left_out:
                # What is left out adds to what is durable, of this group or of its closed primary.
                kept = self.store.traces.get(message.group.primary)
                is_durable = is_durable or (kept is not None and kept.released)
                is_durable = is_durable or any(g == message.group for g, _ in self.store.triggers)
            assert is_durable or refused, "acknowledged too early"
        elif isinstance(message, Refused):
            self._refused.add(session)
        elif isinstance(message, Collect):
            for trace in message.traces:
                key = (session, message.group, trace)
                assert key not in self._asked, "asked twice on one session"
                self._asked.add(key)
        elif isinstance(message, Release):
            kept = self.store.traces.get(message.trace)
            assert not self.closings(message.trace) or (kept is not None and kept.released), (
                "released before that was durable"
            )

    def closings(self, trace: TraceId) -> list[int]:
        """The tokens of those that are not durable."""
        return [
            write.token
            for write in self.written
            if isinstance(write.record, PutReleased)
            and write.record.trace == trace
            and write.record.released
        ]

    def take_said(self) -> list[tuple[str, CoordinatorMessage]]:
        said, self.said = self.said, []
        return said

    def asked(self) -> dict[str, list[TraceId]]:
        """Which traces each node was asked for, since the last time."""
        asked: dict[str, list[TraceId]] = {}
        for name, message in self.take_said():
            if isinstance(message, Collect):
                asked.setdefault(name, []).extend(message.traces)
        return asked

    def verdict(self, trace: TraceId) -> Verdict | None:
        return self.verdicts.get(trace, [None])[-1]

    # ------------------------------------------------------------ shortcuts

    def fire(
        self,
        name: str,
        trace: TraceId,
        trigger: str = "lat",
        laterals: tuple[TraceId, ...] = (),
    ) -> Group:
        group = Group(trigger, trace)
        self.say(name, TriggerFired(group, laterals, "slow"))
        return group

    def status(
        self,
        name: str,
        trace: TraceId,
        size: int = 0,
        crumbs: Iterable[str | int] = (),
        flags: SliceFlags = SliceFlags.NONE,
        open_handles: int = 0,
        *,
        held: bool | None = None,
        epoch: int = 1,
    ) -> None:
        ids = tuple(NodeId(c) if isinstance(c, int) else node_id(c) for c in crumbs)
        is_held = size > 0 if held is None else held
        if is_held:
            flags |= SliceFlags.HELD
        self.say(name, SliceStatus(trace, is_held, flags, size, open_handles, ids, epoch))

    def deliver(self, trace: TraceId, slices: Mapping[str, bytes], epoch: int = 1) -> None:
        """Each node says what it holds, and sends it."""
        for name, data in slices.items():
            self.status(name, trace, len(data), held=True, epoch=epoch)
            self.send(name, trace, 0, data, epoch)

    def cluster(self, *names: str) -> None:
        """Nodes that are connected on both streams."""
        for name in names:
            self.connect(name)
            self.open_slices(name)
        self.take_said()


# ------------------------------------------------------------------- slices


def run(
    *bodies: Body,
    client: int = 1,
    handle: int = 1,
    seq: int = 0,
    flags: RunFlags = RunFlags.FIRST | RunFlags.LAST,
) -> bytes:
    content = b"".join(encode_record(body, 0) for body in bodies)
    return encode_piece(PieceKind.RUN, content, flags=flags, client=client, handle=handle, seq=seq)


def preamble(client: int = 1) -> bytes:
    return encode_clock(1, REAL_NS, S) + encode_process(client, Process(100 + client, "svc"))


def span(span_id: int, parent_id: int = 0, *, ended: bool = True) -> tuple[Body, ...]:
    start = SpanStart(span_id, parent_id, REAL_NS + span_id, 2, f"op{span_id}")
    return (start, SpanEnd(span_id, REAL_NS + span_id + 10, 1, "", b"")) if ended else (start,)


def hop_out(node: str, span_id: int, hop: int = 0, handle: int = 1) -> HopOut:
    return HopOut(node_id(node), span_id, hop, handle)


def hop_in(node: str, span_id: int, hop: int = 0, handle: int = 1) -> HopIn:
    return HopIn(node_id(node), span_id, hop, handle)


def crumb(node: str) -> Breadcrumb:
    return Breadcrumb(node_id(node), node)


def two_nodes() -> dict[str, bytes]:
    """A whole trace: n1 called n2."""
    return {
        "n1": preamble() + run(*span(1), hop_out("n1", 1), crumb("n2")),
        "n2": preamble() + run(hop_in("n1", 1), crumb("n1"), *span(2, 1)),
    }
