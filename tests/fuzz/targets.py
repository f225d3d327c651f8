# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed: bytes go in, and nothing but the errors that are meant comes out."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlencode

import backsight_pb2 as pb

from appliance.core.config import NodeConfig
from appliance.core.node import NodeCore
from coordinator.calls import Call, Feed, Refused
from coordinator.core.config import CoordinatorConfig
from coordinator.index.file import index_path
from coordinator.queries import Queries
from coordinator.web.application import application
from protocol import wire
from protocol.messages import (
    Collect,
    Group,
    Hello,
    SliceChunk,
    SliceFlags,
    SliceReply,
    SliceStatus,
    TraceId,
    TriggerFired,
    Welcome,
)
from protocol.versions import OURS, Agreed
from tests.export.collected import BEGIN_NS, CART, FRONT, STOCK, TRACE
from tests.simulation.pool import PoolConfig, PoolModel
from tests.unit.coordinator_harness import Harness
from tests.unit.logs import logs_to
from tests.unit.test_query import bring_up_to_date, put_trace
from tests.unit.test_store import driver

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

_MS = 1_000_000
_NODES = ("n1", "n2", "n3")
_TRACES = tuple(TraceId(bytes([number]) * 16) for number in range(1, 5))
_GROUPS = tuple(Group("t", trace) for trace in _TRACES)


class Target(Protocol):
    """Takes inputs while it is entered."""

    def seeds(self) -> Iterator[bytes]:
        """What to begin with: what is said in earnest."""

    def __call__(self, data: bytes) -> None:
        """Take one input; whatever is raised is a finding."""


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """An input as steps: what to do, a length, bytes."""
    at = 0
    while at + 3 <= len(data):
        what, length = data[at], int.from_bytes(data[at + 1 : at + 3], "big")
        yield what, data[at + 3 : at + 3 + length]
        at += 3 + length


def _step(what: int, said: bytes = b"") -> bytes:
    return bytes([what]) + len(said).to_bytes(2, "big") + said


class CoordinatorTarget:
    """What three nodes say on their streams, in any order, while time goes on."""

    def __call__(self, data: bytes) -> None:
        harness = Harness(CoordinatorConfig(traces_max=64, evidence_max=1 << 18, closed_max=64))
        zstd = wire.Zstd()
        for node in _NODES:
            harness.connect(node)
            harness.open_slices(node)
        for what, said in itertools.islice(_pieces(data), 64):
            node = _NODES[what % len(_NODES)]
            try:
                match what // 64:
                    case 0 | 1:
                        for message in wire.decode_node_batch(said):
                            if not isinstance(message, Hello):
                                harness.core.on_node_message(
                                    harness.sessions[node],
                                    message,
                                    harness.now_ns,
                                    BEGIN_NS + harness.now_ns,
                                )
                    case 2:
                        chunks = wire.decode_slices_message(said, zstd)
                        for chunk in chunks if isinstance(chunks, list) else ():
                            harness.core.on_chunk(harness.streams[node], chunk, harness.now_ns)
                    case _:
                        harness.wait((1 + what) * 10 * _MS)
            except wire.WireError:
                continue
            harness.fetch()

    def seeds(self) -> Iterator[bytes]:
        fired = [TriggerFired(_GROUPS[0], _TRACES[1:3], "why")]
        held = [SliceStatus(trace, True, SliceFlags.HELD, 7, epoch=1) for trace in _TRACES]
        chunks = [SliceChunk(trace, 0, b"records", 1) for trace in _TRACES]
        said = [
            _step(0, wire.encode_node_batch(fired)),
            _step(1, wire.encode_node_batch(held)),
            _step(128, wire.encode_chunks(chunks[:1])),
            _step(129, wire.encode_chunks(chunks)),
            _step(0, wire.encode_node_batch([replace(chunk, stream=1) for chunk in chunks])),
            _step(255),
        ]
        yield from said
        yield b"".join(said)
        for trace, data in ((_TRACES[0], FRONT), (_TRACES[1], CART)):
            status = SliceStatus(trace, True, SliceFlags.HELD, len(data), epoch=1)
            yield b"".join(
                (
                    _step(0, wire.encode_node_batch([TriggerFired(Group("t", trace)), status])),
                    _step(128 + 1, wire.encode_chunks([SliceChunk(trace, 0, data, 1)])),
                    _step(255),
                )
            )


class NodeTarget:
    """What a coordinator says to a node that holds some traces."""

    def __call__(self, data: bytes) -> None:
        now_ns = 1_000_000_000
        pool = PoolModel(PoolConfig(pool_bytes=1 << 20, arena_bytes=1 << 20), "n")
        pool.clock_pair(now_ns, BEGIN_NS)
        core = NodeCore(NodeConfig("n"), pool, 7, now_ns, BEGIN_NS - now_ns)
        for group in _GROUPS[:2]:
            core.on_operator_trigger(group, (), "", now_ns)
        core.on_control_connected(now_ns, ())
        core.on_control(Welcome(1, Agreed(OURS.newest, OURS.features)), now_ns, BEGIN_NS)
        core.on_slices_connected(now_ns, 1)
        for what, said in itertools.islice(_pieces(data), 64):
            try:
                match what % 3:
                    case 0:
                        for message in wire.decode_coordinator_batch(said):
                            core.on_control(message, now_ns, BEGIN_NS + now_ns)
                    case 1:
                        core.on_slice_reply(wire.decode_slice_reply(said), now_ns)
                    case _:
                        now_ns += (1 + what) * 10 * _MS
                        core.on_tick(now_ns)
            except wire.WireError:
                continue
            told = core.take_control(now_ns, BEGIN_NS + now_ns)
            if told:
                wire.encode_node_batch(told[: wire.BATCH_MESSAGES_MAX])
            core.take_chunks(now_ns)

    def seeds(self) -> Iterator[bytes]:
        orders = [Collect(group, _TRACES) for group in _GROUPS]
        yield _step(0, wire.encode_coordinator_batch(orders))
        yield _step(1, wire.encode_slice_reply(SliceReply((), 1 << 20)))
        yield _step(0, wire.encode_coordinator_batch([Welcome(1, Agreed(5))])) + _step(2)


class StoredTarget:
    """A store with one trace, behind what is asked of it."""

    def __init__(self) -> None:
        self._open = ExitStack()
        directory = self._open.enter_context(tempfile.TemporaryDirectory(prefix="backsight-fuzz-"))
        self.path = Path(directory) / "t.sqlite"
        here = self._open.enter_context(driver(self.path))
        put_trace(here, TRACE, {"edge": FRONT, "back": CART + STOCK})
        bring_up_to_date(here.store, self.path)
        assert index_path(self.path).exists()


class QuestionsTarget(StoredTarget):
    """What backsightctl asks."""

    _METHODS = ("ListTraces", "GetTrace", "Judged")

    def __init__(self) -> None:
        super().__init__()
        self._queries = Queries(self.path)

    def __call__(self, data: bytes) -> None:
        call = Call(self._METHODS[data[0] % len(self._METHODS)] if data else "GetTrace", data[1:])
        answers = self._queries.answers(call, Feed())

        async def ask() -> None:
            try:
                async for _ in answers:
                    pass
            except (Refused, UnicodeDecodeError):
                pass

        asyncio.run(ask())

    def seeds(self) -> Iterator[bytes]:
        yield b"\x00" + pb.ListTracesRequest(trigger="error", service="front").SerializeToString()
        yield b"\x00" + pb.ListTracesRequest(since_ns=1, until_ns=1 << 62).SerializeToString()
        yield b"\x01" + pb.GetTraceRequest(trace=TRACE).SerializeToString()
        yield b"\x02" + b"error"


class HttpTarget(StoredTarget):
    """Paths and parameters of Jaeger's API: an answer in JSON, and never that it failed."""

    def __init__(self) -> None:
        super().__init__()
        self._log: list[str] = []
        self._serve = application(self.path, logs_to(self._log), lambda: BEGIN_NS)

    def __call__(self, data: bytes) -> None:
        path, _, query = data.partition(b"?")
        statuses: list[str] = []

        def start(status: str, headers: object, info: object = None) -> Callable[[bytes], object]:
            statuses.append(status)
            return lambda _: None

        environ: WSGIEnvironment = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": path.decode("latin-1"),
            "QUERY_STRING": query.decode("latin-1"),
        }
        body = self._serve(environ, start)
        json.loads(b"".join(body))
        assert statuses[0][:3] in ("200", "400", "404", "413", "503"), statuses
        close = getattr(body, "close", None)
        if close is not None:
            close()

    def seeds(self) -> Iterator[bytes]:
        times = {"start": BEGIN_NS // 1000 - 10**6, "end": BEGIN_NS // 1000 + 10**6}
        legacy = {
            "service": "front",
            "operation": "GET /",
            "tags": '{"error":"true"}',
            "tag": "a:b",
            "minDuration": "1.5ms",
            "maxDuration": "2h",
            "limit": 20,
            "lookback": "1h",
            "raw": "true",
            **times,
        }
        v3 = {
            "query.serviceName": "front",
            "query.startTimeMin": "2026-09-21T14:13:00.5Z",
            "query.startTimeMax": "2026-09-21T15:13:00+02:00",
            "query.attributes": '{"a":"b"}',
            "query.durationMin": "1ms",
            "query.searchDepth": 5,
            "query.rawTraces": "true",
        }
        asked = (
            f"/api/traces?{urlencode(legacy)}",
            f"/api/traces?traceID={TRACE.hex()}&traceID=1",
            f"/api/traces/{TRACE.hex()}?raw=1",
            "/api/services",
            "/api/services/front/operations",
            "/api/operations?service=front&spanKind=server",
            "/api/dependencies?endTs=1790000000000&lookback=1000",
            f"/api/v3/traces?{urlencode(v3)}",
            f"/api/v3/traces/{TRACE.hex()}?startTime=2026-09-21T14:13:00Z",
            f"/api/v3/trace-summaries?{urlencode(v3)}",
            "/api/v3/services",
            "/api/v3/operations?service=front&span_kind=client",
        )
        yield from (one.encode() for one in asked)


TARGETS: dict[str, Callable[[], Target]] = {
    "coordinator": CoordinatorTarget,
    "node": NodeTarget,
    "questions": QuestionsTarget,
    "http": HttpTarget,
}
