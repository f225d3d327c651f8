# SPDX-License-Identifier: Apache-2.0
"""What was spoken when protocol 5 was frozen is what is spoken under that number today.

``tests/data/frozen/protocol-5.json`` holds bytes, as written that day, and is never made anew: whoever
has to change it has changed the protocol, and needs another version or a feature (ARCHITECTURE.md, "Versions").
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from formats.records import (
    Breadcrumb,
    Data,
    HopIn,
    HopOut,
    ResourceRecord,
    ScopeRecord,
    SpanDetail,
    SpanEnd,
    SpanStart,
)
from formats.slices import PieceKind, Process, Record, RunFlags, SliceDecoder
from protocol import wire
from protocol.messages import (
    Abandoned,
    ClockProbe,
    ClockReply,
    Collect,
    CoordinatorMessage,
    Drop,
    Group,
    Hello,
    NodeId,
    NodeMessage,
    Policy,
    PolicyRule,
    Refused,
    Release,
    SliceAck,
    SliceChunk,
    SliceFlags,
    SliceReply,
    SliceStatus,
    Snapshot,
    SnapshotStatus,
    Source,
    TraceId,
    TriggerAck,
    TriggerFired,
    Welcome,
)
from protocol.versions import Agreed, Feature, Versions

TRACE, OTHER = TraceId(bytes(range(16))), TraceId(bytes(range(16, 32)))
GROUP = Group("latency", TRACE)

NODE: dict[str, NodeMessage] = {
    "hello": Hello("web-1", 1 << 60, ("10.0.0.7", "fe80::1"), Versions(5, 6, Feature(3))),
    "trigger_fired": TriggerFired(GROUP, (OTHER,), "p99", Source.OPERATOR, 1 << 60, 7),
    "slice_status": SliceStatus(
        TRACE, True, SliceFlags(0x5FF), 4096, 2, (NodeId(1), NodeId((1 << 64) - 1)), 1 << 61
    ),
    "abandoned": Abandoned(GROUP),
    "clock_reply": ClockReply(3, 1 << 60, (1 << 60) + 1),
    "snapshot_status": SnapshotStatus(4, 100, 10, True),
}

COORDINATOR: dict[str, CoordinatorMessage] = {
    "welcome": Welcome(1 << 61, Agreed(5, Feature.POLICY)),
    "refused": Refused("update the node"),
    "collect": Collect(GROUP, (TRACE, OTHER)),
    "trigger_ack": TriggerAck(GROUP),
    "drop": Drop(GROUP),
    "release": Release(TRACE),
    "clock_probe": ClockProbe(9),
    "snapshot": Snapshot(5, "snapshot.5", 30 * 10**9, "shop", 12),
    "policy": Policy(8, 1 << 63, (PolicyRule("GET /*", 1 << 62),)),
}

# Too short to become smaller: what zlib makes of more may differ from one of its versions to the next.
CHUNK = SliceChunk(TRACE, 65536, b"records", 1 << 61)
REPLY = SliceReply((SliceAck(TRACE, 65543, 1 << 61),), 1 << 20)
OPENING = wire.Opening("web-1", 1 << 60)

RECORDS = [
    Record(3, 4, 1001, False, Data(1, b"bytes")),
    Record(3, 4, 1002, True, SpanStart(11, 10, 10**18, 2, "GET /")),
    Record(3, 4, 1003, False, HopOut(NodeId(5), 11, 0, 4)),
    Record(3, 4, 1004, False, HopIn(NodeId(6), 12, 1, 9)),
    Record(3, 4, 1005, False, Breadcrumb(NodeId(7), "web-2")),
    Record(3, 4, 1006, False, ResourceRecord(b"\x81\xa1a\x01")),
    Record(3, 4, 1007, False, ScopeRecord(1, b"\x91\xa1s")),
    Record(3, 4, 1008, False, SpanDetail(11, 1, 0, 1, b"\x80")),
    Record(3, 4, 1009, False, SpanEnd(11, 10**18 + 5, 2, "GET /cart", b"\x01\x01\x01\x00kv")),
]


@pytest.fixture(scope="module")
def frozen(repository: Path) -> dict[str, bytes]:
    with (repository / "tests/data/frozen/protocol-5.json").open(encoding="utf-8") as file:
        return {name: bytes.fromhex(written) for name, written in json.load(file).items()}


@pytest.mark.parametrize("kind", NODE)
def test_what_nodes_say(kind: str, frozen: dict[str, bytes]) -> None:
    assert wire.encode_node_batch([NODE[kind]]) == frozen[kind]
    assert wire.decode_node_batch(frozen[kind]) == [NODE[kind]]


@pytest.mark.parametrize("kind", COORDINATOR)
def test_what_coordinators_say(kind: str, frozen: dict[str, bytes]) -> None:
    assert wire.encode_coordinator_batch([COORDINATOR[kind]]) == frozen[kind]
    assert wire.decode_coordinator_batch(frozen[kind]) == [COORDINATOR[kind]]


def test_what_carries_slices(frozen: dict[str, bytes]) -> None:
    assert wire.encode_opening(OPENING) == frozen["opening"]
    assert wire.decode_slices_message(frozen["opening"]) == OPENING
    assert wire.encode_chunks([CHUNK]) == frozen["chunk"]
    assert wire.decode_slices_message(frozen["chunk"]) == [CHUNK]
    assert wire.encode_slice_reply(REPLY) == frozen["slice_reply"]
    assert wire.decode_slice_reply(frozen["slice_reply"]) == REPLY


def test_what_a_slice_says(frozen: dict[str, bytes]) -> None:
    decoder = SliceDecoder()
    assert decoder.feed(frozen["slice"]) == RECORDS
    assert decoder.whole
    assert decoder.malformed == 0
    assert decoder.processes == {3: Process(42, "shop")}
    assert decoder.clock.time_ns(1005) == 10**18 + 5
    assert (decoder.lossy, decoder.exited) == ({8}, {9})
    handle = decoder.handles[3, 4]
    assert handle.problem() is None
    assert handle.lossy


def test_a_value_more_needs_a_feature() -> None:
    """What peers of version 5 refuse. Each that comes is said only with its feature, and named here with that."""
    assert sum(SliceFlags) == 0x5FF
    assert [source.value for source in Source] == [1, 2, 3, 4, 5]
    assert sum(RunFlags) == 0xF
    assert [kind.value for kind in PieceKind] == [1, 2, 3, 4, 5]


def test_all_kinds_are_frozen(frozen: dict[str, bytes]) -> None:
    assert set(frozen) == {*NODE, *COORDINATOR, "opening", "chunk", "slice_reply", "slice"}
