# SPDX-License-Identifier: Apache-2.0
"""Writes what a fleet of nodes says of its traces, for bench/control/fleet.c.

    plan.py PLAN NODES TRACES SEED OPEN

Run with the packages of the tree that is measured: versions, messages and slices are its own.

A trace is a request that goes from a first service over a second to a third, each on another
node, chosen by chance. Each has five spans as OpenTelemetry's instrumentations make them. It
is fired on the first node, where the response has named the second; the third is only named there.
OPEN 1: the third node says that the trace is still being written, for ever.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from protocol import wire
from protocol.hashing import node_id
from protocol.messages import (
    Group,
    Hello,
    NodeId,
    SliceChunk,
    SliceFlags,
    SliceStatus,
    Source,
    TraceId,
    TriggerFired,
)

NODES_A_TRACE = 3
SPANS_A_NODE = 5
TRIGGER = "bench.fleet"
SERVICES = ("frontend", "checkout", "stock")

# Of bench/control/fleet.c.
_HEAD = struct.Struct("<QQ")
_WHERE = struct.Struct("<QQ")
_PART = struct.Struct("<QQ")
_ID_BYTES = 16

# A TSC of 2.5 GHz; the plan is of one day, which the coordinator has no opinion on.
_TICKS_PER_S = 2_500_000_000
_BEGIN_NS = 1_800_000_000 * 1_000_000_000
_MS = 1_000_000

# Of the tree that is measured. At 181b7fb one module had all of it.
try:
    _encoding: Any = importlib.import_module("testbed.encoding")
    _records: Any = importlib.import_module("formats.records")
    _slices: Any = importlib.import_module("formats.slices")
except ModuleNotFoundError:
    _encoding = _records = _slices = importlib.import_module("protocol.slices")


def _hello(name: str, incarnation: int, addresses: tuple[str, ...]) -> Hello:
    """Bytes count as durable when they are acknowledged, so no acknowledgement may come late.

    Trees that know nothing of that have none.
    """
    hello = Hello(name, incarnation, addresses)
    versions: Any = getattr(hello, "versions", None)
    late: Any = getattr(type(versions.features), "LATE_ACKS", None) if versions else None
    if late is None:
        return hello
    prompt = dataclasses.replace(versions, features=versions.features & ~late)
    return dataclasses.replace(hello, versions=prompt)


@dataclass(slots=True)
class Written:
    """What one service writes: records in one handle, and the crumbs among them."""

    node: str
    service: str
    at_ns: int
    records: list[bytes] = field(default_factory=list)
    crumbs: list[NodeId] = field(default_factory=list)

    def add(self, body: object) -> None:
        """A record, some microseconds after the one before."""
        self.at_ns += 20_000
        self.records.append(_encoding.encode_record(body, self._ticks()))

    def _ticks(self) -> int:
        return (self.at_ns - _BEGIN_NS) * _TICKS_PER_S // 1_000_000_000 + _TICKS_PER_S

    def crumb(self, node: str) -> None:
        """The trace is on that node too."""
        self.crumbs.append(node_id(node))
        self.add(_records.Breadcrumb(node_id(node), node))

    def slice(self, pid: int) -> bytes:
        """All of it, as the node copies it out of the pool."""
        flags = _slices.RunFlags
        return b"".join(
            (
                _encoding.encode_process(1, _slices.Process(pid, self.service)),
                _encoding.encode_clock(_TICKS_PER_S, _BEGIN_NS, _TICKS_PER_S),
                _encoding.encode_piece(
                    _slices.PieceKind.RUN,
                    b"".join(self.records),
                    flags=flags.FIRST | flags.LAST | flags.CLOSED,
                    client=1,
                    handle=1,
                    seq=0,
                ),
            )
        )


@dataclass(frozen=True, slots=True)
class _Span:
    """One span as an instrumentation makes it. ``kind`` is OTLP's."""

    name: str
    kind: int
    scope: int
    attributes: dict[str, object]


_SCOPES = (
    ["opentelemetry.instrumentation.flask", "0.48b0", "https://opentelemetry.io/schemas/1.11.0"],
    ["opentelemetry.instrumentation.psycopg2", "0.48b0", "https://opentelemetry.io/schemas/1.11.0"],
    ["shop.cart", "2.4.1"],
)


def _spans(dice: random.Random, service: str, host: str) -> list[_Span]:
    """A server's span, two of its own, one of a query and one of a call."""
    user, order = dice.randrange(10**6), dice.randbytes(6).hex()
    return [
        _Span("POST /orders/<order>", 2, 1, {
            "http.request.method": "POST", "http.route": "/orders/<order>",
            "url.path": f"/orders/{order}", "url.scheme": "http",
            "http.response.status_code": 200, "server.address": host, "server.port": 8080,
            "client.address": f"10.1.{dice.randrange(256)}.{dice.randrange(256)}",
            "network.protocol.version": "1.1", "user_agent.original": "python-requests/2.32.3",
            "thread.name": f"worker-{dice.randrange(32)}",
        }),
        _Span("validate", 1, 3, {
            "order.id": order, "order.items": dice.randrange(1, 30), "order.currency": "EUR",
            "code.function.name": "shop.orders.Order.validate",
        }),
        _Span("SELECT shop", 3, 2, {
            "db.system": "postgresql", "db.name": "shop", "db.user": service,
            "db.statement": "SELECT item, count, price FROM orders JOIN items USING (item)"
            " WHERE orders.id = %s",
            "net.peer.name": "db.shop.internal", "net.peer.port": 5432,
        }),
        _Span("price", 1, 3, {
            "user.id": user, "price.total": round(dice.uniform(1, 900), 2),
            "code.function.name": "shop.pricing.total_of", "feature_flag.key": "new-discounts",
        }),
        _Span("POST", 3, 1, {
            "http.request.method": "POST", "url.full": f"http://{service}.shop.internal/{order}",
            "server.address": f"{service}.shop.internal", "http.response.status_code": 200,
        }),
    ]  # fmt: skip


def _packed(*items: object) -> bytes:
    packed: bytes = msgpack.packb(items)
    return packed


def visits(dice: random.Random, nodes: Sequence[str], begin_ns: int) -> list[Written]:
    """What the three services of a request write on these nodes."""
    written: list[Written] = []
    parent, hop, at_ns = 0, None, begin_ns
    for number, (node, service) in enumerate(zip(nodes, SERVICES, strict=True)):
        visit = Written(node, service, at_ns)
        written.append(visit)
        visit.add(_records.ResourceRecord(_packed({
            "service.name": service, "service.version": "2.4.1", "host.name": node,
            "service.instance.id": dice.randbytes(8).hex(), "telemetry.sdk.language": "python",
            "telemetry.sdk.name": "opentelemetry", "telemetry.sdk.version": "1.27.0",
            "deployment.environment": "production",
        }, "")))  # fmt: skip
        for of, scope in enumerate(_SCOPES, 1):
            visit.add(_records.ScopeRecord(of, _packed(*scope)))
        if hop is not None:
            visit.add(_records.HopIn(hop.node_id, hop.span_id, hop.hop, hop.handle))
            for name in reversed(nodes[:number]):
                visit.crumb(name)
        root = 0
        for span in _spans(dice, service, node):
            span_id = dice.getrandbits(63) + 1
            start_ns = visit.at_ns
            visit.add(_records.SpanStart(span_id, root or parent, start_ns, span.kind, span.name))
            if not root:
                root = span_id
            is_call = span.kind == 3 and span.scope == 1
            if is_call and number + 1 < NODES_A_TRACE:
                hop = _records.HopOut(node_id(node), span_id, 0, 1)
                visit.add(hop)
                parent, at_ns = span_id, visit.at_ns + _MS // 2
                visit.crumb(nodes[number + 1])
            visit.add(_records.SpanDetail(span_id, span.scope, 0, 1, _packed(span.attributes)))
            visit.at_ns += dice.randrange(_MS)
            visit.add(_records.SpanEnd(span_id, visit.at_ns, 0, "", b""))
    return written


class _Plan:
    """The file, written from both ends of its sizes: tables first, then what they point to."""

    def __init__(self, file: BinaryIO, nodes: int, traces: int) -> None:
        part = _PART.size + 2 * _WHERE.size
        trace = _ID_BYTES + _WHERE.size + NODES_A_TRACE * part
        self._offset = _HEAD.size + nodes * 2 * _WHERE.size + traces * trace
        self._tables = bytearray(_HEAD.pack(nodes, traces))
        self._bodies: list[bytes] = []
        self._file = file

    def add(self, raw: bytes) -> None:
        """To the tables."""
        self._tables += raw

    def point(self, body: bytes) -> None:
        """To the tables, where that is."""
        self._tables += _WHERE.pack(self._offset, len(body))
        self._offset += len(body)
        self._bodies.append(body)

    def close(self) -> None:
        """Write it all."""
        self._file.write(self._tables)
        self._file.writelines(self._bodies)


def _node_name(number: int) -> str:
    return f"node-{number:04d}"


def _traces(dice: random.Random, nodes: int, traces: int) -> Iterator[tuple[TraceId, list[int]]]:
    for number in range(1, traces + 1):
        identity = dice.randbytes(_ID_BYTES - 8) + number.to_bytes(8, "big")
        yield TraceId(identity), dice.sample(range(nodes), NODES_A_TRACE)


def write(file: BinaryIO, nodes: int, traces: int, seed: int, *, is_open: bool) -> None:
    """Write a plan: the same for the same arguments, and the same tree."""
    dice = random.Random(seed)
    plan = _Plan(file, nodes, traces)
    encode_chunk = _chunk_encoder()
    for number in range(nodes):
        name, incarnation = _node_name(number), dice.getrandbits(64)
        addresses = (f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",)
        plan.point(wire.encode_node_batch([_hello(name, incarnation, addresses)]))
        plan.point(wire.encode_opening(wire.Opening(name, incarnation)))
    for identity, chosen in _traces(dice, nodes, traces):
        begin_ns = _BEGIN_NS + dice.randrange(3600 * 1000) * _MS
        written = visits(dice, [_node_name(number) for number in chosen], begin_ns)
        fired = TriggerFired(
            Group(TRIGGER, identity),
            why="http.response.status_code is 500",
            source=Source.APPLICATION,
            fired_at_ns=written[0].at_ns,
        )
        plan.add(identity)
        plan.point(wire.encode_node_batch([fired]))
        for place, (number, visit) in enumerate(zip(chosen, written, strict=True)):
            data = visit.slice(1000 + place)
            epoch = dice.getrandbits(62) + 1
            status = SliceStatus(
                identity,
                held=True,
                flags=SliceFlags.HELD,
                bytes=len(data),
                open_handles=int(is_open and place == NODES_A_TRACE - 1),
                crumbs=tuple(visit.crumbs),
                epoch=epoch,
            )
            plan.add(_PART.pack(number, len(data)))
            plan.point(wire.encode_node_batch([status]))
            plan.point(encode_chunk(SliceChunk(identity, 0, data, epoch)))
    plan.close()


def _chunk_encoder() -> Callable[[SliceChunk], bytes]:
    # Before chunks came in lists, and then before they came as frames of Zstandard.
    one, zstd = getattr(wire, "encode_chunk", None), getattr(wire, "Zstd", None)
    if one is not None:
        encode: Callable[[SliceChunk], bytes] = one
        return encode
    more = () if zstd is None else (zstd(),)
    return lambda chunk: wire.encode_chunks([chunk], *more)


def main() -> None:
    """Do as the command line says."""
    path, *numbers = sys.argv[1:]
    nodes, traces, seed, is_open = map(int, numbers)
    with Path(path).open("wb") as file:
        write(file, nodes, traces, seed, is_open=bool(is_open))


if __name__ == "__main__":
    main()
