# SPDX-License-Identifier: Apache-2.0
"""Thirty honest nodes in one process: the node's own core and uplink over a model of its pool.

Requests visit three of them, and each is triggered by the last. What they wrote is kept, to
be compared with what the coordinator says of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from appliance.core.config import NodeConfig
from appliance.core.node import NodeCore
from appliance.uplink import Uplink
from coordinator.store.reader import StoreReader
from formats.records import Body, Breadcrumb, Data, HopIn, HopOut, SpanEnd, SpanStart
from protocol import wire
from protocol.hashing import node_id
from protocol.messages import Group, TraceId
from protocol.verdicts import VerdictKind
from runtime.log import Log
from runtime.settings.tls import NodeTlsSettings, TlsFiles
from tests.simulation.pool import PoolConfig, PoolModel

TRIGGER = "honest"

_VISITED = 3

# Of the model's pool, which has nothing that would tell of itself.
_POLL_S = 0.05

# So that what is stored can be told from what was made up.
_MARK_BYTES = 200


@dataclass(frozen=True, slots=True)
class Written:
    """A request: which nodes it visited, and what each wrote that nobody else knows."""

    trace: TraceId
    fired_s: float
    marks: dict[str, bytes]


class HonestNode:
    """One of them. Runs while it is entered."""

    def __init__(self, name: str, endpoint: str, files: Path, log: Log) -> None:
        self.name = name
        self.is_welcome = asyncio.Event()
        now_ns = time.monotonic_ns()
        pool = PoolConfig(pool_bytes=4 << 20, arena_bytes=4 << 20, store_bytes=4 << 20)
        self._pool = PoolModel(pool, name)
        self._pool.clock_pair(now_ns, time.time_ns())
        self._client = self._pool.add_client(100, f"service-{name}", now_ns)
        self._core = NodeCore(NodeConfig(name), self._pool, 7, now_ns, time.time_ns() - now_ns)
        shown = TlsFiles.of_directory(files)
        self.uplink = Uplink(
            endpoint,
            wire.Opening(name, 7),
            self._core,
            self._no_addresses,
            self._on_fact,
            log,
            random.Random(name),
            30.0,
            NodeTlsSettings(shown.ca, shown.certificate, shown.key),
        )

    @staticmethod
    async def _no_addresses() -> tuple[str, ...]:
        return ()

    def _on_fact(self) -> None:
        if self.uplink.welcomed:
            self.is_welcome.set()
        self.uplink.poke()

    def visit(
        self, trace: TraceId, parent: HopOut | None, span: int, callee: str | None
    ) -> tuple[bytes, HopOut | None]:
        """What a service writes of a request; its mark, and the hop to its callee."""
        handle = self._pool.open(self._client, trace)
        mark = random.randbytes(_MARK_BYTES)
        bodies: list[Body] = []
        if parent is not None:
            bodies.append(HopIn(parent.node_id, parent.span_id, parent.hop, parent.handle))
        above = parent.span_id if parent is not None else 0
        bodies += [SpanStart(span, above, time.time_ns(), 2, self.name), Data(1, mark)]
        hop = None
        if callee is not None:
            hop = HopOut(node_id(self.name), span, handle.next_hop, handle.number)
            handle.next_hop += 1
            bodies += [hop, Breadcrumb(node_id(callee), callee)]
        bodies.append(SpanEnd(span, time.time_ns(), 1, "", b""))
        for body in bodies:
            assert self._pool.write(handle, 0, body, time.monotonic_ns())
        self._pool.close(handle, 0)
        return mark, hop

    def fire(self, trace: TraceId) -> None:
        now_ns = time.monotonic_ns()
        self._core.on_operator_trigger(Group(TRIGGER, trace), (), "a symptom", now_ns)
        self._on_fact()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.ensure_future(self.uplink.run()),
            asyncio.ensure_future(self._look()),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            now_ns = time.monotonic_ns()
            self._core.on_clock(now_ns, time.time_ns())
            events = self._pool.poll(now_ns)
            if events:
                self._core.on_dataplane(events, now_ns)
            self._core.on_tick(now_ns)
            self._on_fact()
            await asyncio.sleep(_POLL_S)


class Fleet:
    """All of them, and the requests that they served."""

    def __init__(self, nodes: list[HonestNode], seed: int) -> None:
        self._nodes = nodes
        self._rng = random.Random(seed)
        self._spans = 0
        self.written: list[Written] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(
        cls, names: list[str], endpoint: str, files: dict[str, Path], log: Log
    ) -> AsyncIterator[Fleet]:
        """Once each of them is welcome."""
        async with contextlib.AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(HonestNode(name, endpoint, files[name], log))
                for name in names
            ]
            for node in nodes:
                await node.is_welcome.wait()
            yield cls(nodes, 1)

    def request(self) -> Written:
        """One more, which ends with a symptom."""
        visited = self._rng.sample(self._nodes, _VISITED)
        trace = TraceId(self._rng.randbytes(16))
        marks: dict[str, bytes] = {}
        hop = None
        for node, callee in zip(visited, [*visited[1:], None], strict=True):
            self._spans += 1
            name = callee.name if callee is not None else None
            marks[node.name], hop = node.visit(trace, hop, self._spans, name)
        visited[-1].fire(trace)
        self.written.append(Written(trace, time.monotonic(), marks))
        return self.written[-1]


@dataclass(slots=True)
class Judged:
    """What the coordinator says of requests, compared with what was written."""

    requests: int = 0
    coherent: int = 0
    falsely_coherent: int = 0
    reasons: dict[str, int] | None = None

    @property
    def share(self) -> float:
        return self.coherent / max(1, self.requests)


def judge(store: Path, written: list[Written]) -> Judged:
    """By the store itself: a coherent trace must have each mark at the node that wrote it."""
    judged = Judged(len(written), reasons={})
    assert judged.reasons is not None
    with StoreReader(store) as reader:
        for one in written:
            verdict = reader.verdict(one.trace)
            if verdict is None or verdict.kind is not VerdictKind.COHERENT:
                for reason in _reasons(reader, one.trace):
                    judged.reasons[reason] = judged.reasons.get(reason, 0) + 1
                continue
            judged.coherent += 1
            with reader.moment():
                data = {
                    part.node: reader.data(part, part.bytes) for part in reader.slices(one.trace)
                }
            if not all(mark in data.get(node, b"") for node, mark in one.marks.items()):
                judged.falsely_coherent += 1
    return judged


def _reasons(reader: StoreReader, trace: TraceId) -> Iterator[str]:
    verdict = reader.verdict(trace)
    if verdict is None:
        yield "no verdict"
        return
    for reason in verdict.reasons:
        yield f"{reason.kind} {reason.node}"
