# SPDX-License-Identifier: Apache-2.0
"""A trace as three nodes collect it: a request through a web, a cart and a stock service.

By the layouts of ``native/src/abi/slice.h`` and ``native/include/backsight.h``, with what OpenTelemetry's
instrumentations write.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from protocol.hashing import node_id

_RUN, _CLOCK, _PROCESS = 1, 2, 3
_FIRST, _LAST, _CLOSED = 1, 2, 8
_START, _END, _OUT, _IN, _CRUMB, _RESOURCE, _SCOPE, _DETAIL = 2, 3, 4, 5, 6, 7, 8, 9

_PIECE = struct.Struct("<IHHIIII")
_BEGIN_NS = 1_790_000_000_000_000_000
_NODES = ("web", "cart", "stock")
_SPANS = 5  # of each node: what it was asked, and four that it does or asks


def _piece(kind: int, content: bytes, flags: int = 0, client: int = 0, handle: int = 0) -> bytes:
    return _PIECE.pack(len(content), kind, flags, client, handle, 0, 0) + content


def _record(kind: int, payload: bytes, ticks: int) -> bytes:
    head = struct.pack("<HBBQ", len(payload), kind, 0, ticks)
    return head + payload + bytes(-len(payload) % 4)


def _span(number: int, parent: int, node: str, at: int, attributes: dict[str, Any]) -> bytes:
    name = f"{'POST' if at else 'GET'} /{node}/{{id}}".encode()[:32]
    kind = 2 if at == 0 else 3
    start_ns = _BEGIN_NS + at * 1_000_000
    start = struct.pack("<QQQBB6x", number, parent, start_ns, kind, len(name)) + name
    detail = struct.pack("<QIHH", number, 1, 0, 1) + msgpack.packb([attributes])
    end = struct.pack("<QQHHI", number, start_ns + 900_000, 0, 0, 0)
    return (
        _record(_START, start, start_ns)
        + _record(_DETAIL, detail, start_ns)
        + _record(_END, end, start_ns + 900_000)
    )


def slices(number: int) -> dict[str, bytes]:
    """By node. Ids differ from trace to trace."""
    made = {}
    for place, node in enumerate(_NODES):
        first = number << 16 | (place * _SPANS + 1)
        handle = number
        resource = {
            "service.name": node,
            "service.version": "1.4.2",
            "process.pid": 100 + place,
            "host.name": f"{node}-1",
            "telemetry.sdk.language": "python",
        }
        records = _record(_RESOURCE, msgpack.packb([resource]), _BEGIN_NS)
        scope = msgpack.packb([f"opentelemetry.instrumentation.{node}", "0.41b0"])
        records += _record(_SCOPE, struct.pack("<I", 1) + scope, _BEGIN_NS)
        if place:
            hop = struct.pack("<QQII", node_id(_NODES[place - 1]), first - 1, 0, number)
            records += _record(_IN, hop, _BEGIN_NS)
            crumb = struct.pack("<Q", node_id(_NODES[place - 1])) + _NODES[place - 1].encode()
            records += _record(_CRUMB, crumb, _BEGIN_NS)
        for at in range(_SPANS):
            attributes = {
                "http.request.method": "GET",
                "http.route": f"/{node}/{{id}}",
                "url.path": f"/{node}/{number}",
                "url.scheme": "http",
                "server.address": f"{node}.shop.internal",
                "server.port": 8080,
                "network.protocol.version": "1.1",
                "http.response.status_code": 200,
                "user_agent.original": "python-requests/2.28",
                "shop.discount": 0.25,
            }
            parent = first if at else (first - 1 if place else 0)
            records += _span(first + at, parent, node, at, attributes)
        if place < len(_NODES) - 1:
            hop = struct.pack("<QQII", node_id(node), first + _SPANS - 1, 0, number)
            records += _record(_OUT, hop, _BEGIN_NS)
        made[node] = (
            _piece(_PROCESS, struct.pack("<II64s", 100 + place, 0, node.encode()), client=1)
            + _piece(_CLOCK, struct.pack("<QQQ", _BEGIN_NS, _BEGIN_NS, 1_000_000_000))
            + _piece(_RUN, records, _FIRST | _LAST | _CLOSED, 1, handle)
        )
    return made
