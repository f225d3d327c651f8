# SPDX-License-Identifier: Apache-2.0
"""Every valid message survives the wire; whatever else arrives is a WireError."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable
from typing import Any

import backsight_pb2 as pb
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protocol import wire
from protocol.messages import (
    ACKS_MAX,
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    CONTROL_CHUNK_BYTES_MAX,
    CRUMBS_MAX,
    LATERALS_MAX,
    NO_POLICY,
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
    Unknown,
    Welcome,
)
from protocol.versions import Agreed, Feature, Versions

# pytest undoes the filter of protocol.wire.
pytestmark = pytest.mark.filterwarnings("ignore:Unexpected end-group tag")


UINT32 = st.integers(0, (1 << 32) - 1)
UINT63 = st.integers(0, (1 << 63) - 1)
UINT64 = st.integers(0, (1 << 64) - 1)


def texts(bytes_max: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(blacklist_categories=["Cs"]), max_size=bytes_max).filter(
        lambda text: len(text.encode()) <= bytes_max
    )


trace_ids = st.binary(min_size=16, max_size=16).filter(any).map(TraceId)
groups = st.builds(Group, st.from_regex(r"[a-z0-9_.-]{1,31}", fullmatch=True), trace_ids)
node_names = st.from_regex(r"[A-Za-z0-9_.-]{1,63}", fullmatch=True)
crumbs = st.lists(UINT64.map(NodeId), max_size=CRUMBS_MAX).map(tuple)
flags = st.integers(0, sum(SliceFlags)).map(lambda bits: SliceFlags(bits & sum(SliceFlags)))

# Of peers that are newer, too.
features = UINT64.map(Feature)
windows = st.tuples(st.integers(1, (1 << 32) - 1), st.integers(1, (1 << 32) - 1), features).map(
    lambda said: Versions(min(said[:2]), max(said[:2]), said[2])
)

epochs = st.integers(1, (1 << 63) - 1)
node_messages: st.SearchStrategy[NodeMessage] = st.one_of(
    st.builds(
        Hello,
        node_names,
        UINT64,
        st.lists(st.ip_addresses().map(str), max_size=4).map(tuple),
        windows,
    ),
    st.builds(
        TriggerFired,
        groups,
        st.lists(trace_ids, max_size=LATERALS_MAX).map(tuple),
        texts(95),
        st.sampled_from(Source),
        UINT63,
        UINT63,
        UINT32,
    ),
    st.builds(SliceStatus, trace_ids, st.booleans(), flags, UINT63, UINT32, crumbs, epochs),
    st.builds(SliceStatus, trace_ids, st.just(False), flags),
    st.builds(Abandoned, groups),
    st.builds(ClockReply, UINT32, UINT63, UINT63),
    st.builds(SnapshotStatus, UINT32, UINT32, UINT32, st.booleans()),
    # Eight in a batch are within what one may have of them.
    st.builds(
        SliceChunk,
        trace_ids,
        st.integers(0, 1 << 62),
        st.binary(min_size=1, max_size=CONTROL_CHUNK_BYTES_MAX // 8),
        epochs,
        stream=UINT32,
    ),
)
coordinator_messages: st.SearchStrategy[CoordinatorMessage] = st.one_of(
    st.builds(Welcome, UINT64, st.builds(Agreed, st.integers(1, (1 << 32) - 1), features)),
    st.builds(Refused, texts(wire.REASON_BYTES_MAX)),
    st.builds(
        Collect, groups, st.lists(trace_ids, min_size=1, max_size=1 + LATERALS_MAX).map(tuple)
    ),
    st.builds(TriggerAck, groups),
    st.builds(Drop, groups),
    st.builds(Release, trace_ids),
    st.builds(ClockProbe, UINT32),
    st.just(NO_POLICY),
    st.builds(
        Policy,
        st.integers(1, (1 << 64) - 1),
        st.none() | UINT64,
        st.lists(st.builds(PolicyRule, texts(255).filter(bool), UINT64), max_size=4).map(tuple),
    ),
    st.builds(
        Snapshot,
        UINT32,
        st.from_regex(r"[a-z0-9_.-]{1,31}", fullmatch=True),
        UINT63,
        texts(63),
        UINT32,
    ),
)
# Long and repetitive, so that compression takes both of its ways.
chunk_data = st.builds(bytes.__mul__, st.binary(min_size=1, max_size=64), st.integers(1, 2000))
chunk_lists = st.lists(
    st.builds(SliceChunk, trace_ids, st.integers(0, 1 << 62), chunk_data, epochs),
    min_size=1,
    max_size=4,
)
slice_replies = st.builds(
    SliceReply,
    st.lists(st.builds(SliceAck, trace_ids, UINT63, epochs, st.booleans()), max_size=20).map(tuple),
    UINT63,
)

TRACE = TraceId(bytes(range(1, 17)))
GROUP = Group("latency", TRACE)


@given(st.lists(node_messages, max_size=8))
def test_node_batches_round_trip(messages: list[NodeMessage]) -> None:
    decoded = wire.decode_node_batch(wire.encode_node_batch(messages))
    # With fields that make no difference between two.
    assert list(map(repr, decoded)) == list(map(repr, messages))


@given(st.lists(coordinator_messages, max_size=8))
def test_coordinator_batches_round_trip(messages: list[CoordinatorMessage]) -> None:
    assert wire.decode_coordinator_batch(wire.encode_coordinator_batch(messages)) == messages


@given(chunk_lists)
def test_chunks_round_trip(chunks: list[SliceChunk]) -> None:
    assert wire.decode_slices_message(wire.encode_chunks(chunks)) == chunks


@given(chunk_lists)
def test_chunks_round_trip_in_frames_of_zstandard_which_are_told(chunks: list[SliceChunk]) -> None:
    zstd = wire.Zstd()
    decoded = wire.decode_slices_message(wire.encode_chunks(chunks, zstd), zstd)
    assert decoded == chunks
    assert isinstance(decoded, list)
    for chunk in decoded:
        assert not chunk.zstd or zstandard.decompress(chunk.zstd) == chunk.data
    # Without a decompressor of their own they are read, too.
    assert wire.decode_slices_message(wire.encode_chunks(chunks, zstd)) == chunks


def test_a_frame_of_zstandard_is_sent_where_it_is_smaller() -> None:
    chunks = [SliceChunk(TRACE, 0, b"x" * 1000, 1), SliceChunk(TRACE, 1000, b"y", 1)]
    decoded = wire.decode_slices_message(wire.encode_chunks(chunks, wire.Zstd()))
    assert isinstance(decoded, list)
    assert [len(chunk.zstd) for chunk in decoded] == [len(frame(chunks[0].data)), 0]
    deflated = wire.decode_slices_message(wire.encode_chunks(chunks))
    assert isinstance(deflated, list)
    assert not any(chunk.zstd for chunk in deflated)


@given(node_names, UINT64, UINT32)
def test_openings_round_trip(node: str, incarnation: int, number: int) -> None:
    opening = wire.Opening(node, incarnation, number)
    assert wire.decode_slices_message(wire.encode_opening(opening)) == opening


@given(slice_replies)
def test_slice_replies_round_trip(reply: SliceReply) -> None:
    assert wire.decode_slice_reply(wire.encode_slice_reply(reply)) == reply


DECODERS: dict[str, Callable[[bytes], object]] = {
    "node": wire.decode_node_batch,
    "coordinator": wire.decode_coordinator_batch,
    "chunks": wire.decode_slices_message,
    "reply": wire.decode_slice_reply,
}


@pytest.mark.parametrize("decoder", DECODERS)
@given(data=st.binary(max_size=512))
def test_random_bytes_are_a_message_or_a_wire_error(decoder: str, data: bytes) -> None:
    try:
        DECODERS[decoder](data)
    except wire.WireError as error:
        assert error.field
        assert error.problem


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_message_that_ends_early_is_refused(decoder: str) -> None:
    with pytest.raises(wire.WireError, match="no valid protobuf message"):
        DECODERS[decoder](b"\x0c\x01")  # a group's end without its start


@st.composite
def damaged(draw: st.DrawFn, encoded: st.SearchStrategy[bytes]) -> bytes:
    data = bytearray(draw(encoded))
    for _ in range(draw(st.integers(1, 8))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


@pytest.mark.parametrize(
    ("decoder", "encoded"),
    [
        ("node", st.lists(node_messages, max_size=3).map(wire.encode_node_batch)),
        (
            "coordinator",
            st.lists(coordinator_messages, max_size=3).map(wire.encode_coordinator_batch),
        ),
        ("chunks", chunk_lists.map(wire.encode_chunks)),
        ("reply", slice_replies.map(wire.encode_slice_reply)),
    ],
)
@given(data=st.data())
def test_damaged_messages_are_messages_or_wire_errors(
    decoder: str, encoded: st.SearchStrategy[bytes], data: st.DataObject
) -> None:
    try:
        decoded = DECODERS[decoder](data.draw(damaged(encoded)))
    except wire.WireError:
        return
    # What was let through is within bounds: it can be encoded again, but for a kind of message
    # that only a newer peer knows.
    match decoder:
        case "node":
            assert isinstance(decoded, list)
            wire.encode_node_batch([said for said in decoded if not isinstance(said, Unknown)])
        case "coordinator":
            assert isinstance(decoded, list)
            known = [said for said in decoded if not isinstance(said, Unknown)]
            wire.encode_coordinator_batch(known)
        case "chunks" if isinstance(decoded, list):
            wire.encode_chunks(decoded)
        case "reply":
            assert isinstance(decoded, SliceReply)
            wire.encode_slice_reply(decoded)


FIRED = TriggerFired(GROUP, (), "", Source.APPLICATION, 1, 0)
STATUS = SliceStatus(TRACE, True, epoch=1)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("hello.node", Hello("", 1)),
        ("hello.node", Hello("n" * 64, 1)),
        ("hello.node", Hello("a b", 1)),
        ("hello.node", Hello("node\n", 1)),
        ("hello.incarnation", Hello("n", 1 << 64)),
        ("hello.incarnation", Hello("n", -1)),
        ("hello.addresses", Hello("n", 1, ("10.0.0.1",) * 65)),
        ("hello.addresses", Hello("n", 1, ("",))),
        ("hello.addresses", Hello("n", 1, ("1" * 65,))),
        ("hello.addresses", Hello("n", 1, ("10.0.0.1\n",))),
        ("hello.protocol", Hello("n", 1, (), Versions(1, 1 << 32))),
        ("hello.protocol_oldest", Hello("n", 1, (), Versions(0, 4))),
        ("hello.protocol_oldest", Hello("n", 1, (), Versions(5, 4))),
        ("hello.features", Hello("n", 1, (), Versions(4, 4, Feature(1 << 64)))),
        ("trigger_fired.group.trigger", dataclasses.replace(FIRED, group=Group("", TRACE))),
        ("trigger_fired.group.trigger", dataclasses.replace(FIRED, group=Group("A", TRACE))),
        ("trigger_fired.group.trigger", dataclasses.replace(FIRED, group=Group("a" * 32, TRACE))),
        (
            "trigger_fired.group.primary",
            dataclasses.replace(FIRED, group=Group("a", TraceId(bytes(16)))),
        ),
        (
            "trigger_fired.group.primary",
            dataclasses.replace(FIRED, group=Group("a", TraceId(b"short"))),
        ),
        ("trigger_fired.laterals", dataclasses.replace(FIRED, laterals=(TRACE,) * 33)),
        ("trigger_fired.laterals", dataclasses.replace(FIRED, laterals=(TraceId(b"1" * 17),))),
        ("trigger_fired.why", dataclasses.replace(FIRED, why="x" * 96)),
        ("trigger_fired.why", dataclasses.replace(FIRED, why="ä" * 48)),
        ("trigger_fired.why", dataclasses.replace(FIRED, why="\ud800")),
        ("trigger_fired.fired_at_ns", dataclasses.replace(FIRED, fired_at_ns=1 << 63)),
        ("trigger_fired.suppressed", dataclasses.replace(FIRED, suppressed=-1)),
        ("trigger_fired.process", dataclasses.replace(FIRED, process=1 << 32)),
        ("slice_status.trace", SliceStatus(TraceId(bytes(16)), True)),
        ("slice_status.flags", dataclasses.replace(STATUS, flags=SliceFlags(1 << 20))),
        ("slice_status.bytes", dataclasses.replace(STATUS, bytes=1 << 63)),
        ("slice_status.open_handles", dataclasses.replace(STATUS, open_handles=1 << 32)),
        ("slice_status.crumbs", dataclasses.replace(STATUS, crumbs=(NodeId(1),) * 65)),
        ("slice_status.crumbs", dataclasses.replace(STATUS, crumbs=(NodeId(1 << 64),))),
        ("abandoned.group.trigger", Abandoned(Group("no spaces", TRACE))),
        ("clock_reply.number", ClockReply(1 << 32, 0, 0)),
        ("clock_reply.sent_ns", ClockReply(0, 0, 1 << 63)),
        ("snapshot_status.found", SnapshotStatus(1, 1 << 32, 0, done=False)),
        ("snapshot_status.fired", SnapshotStatus(1, 0, 1 << 32, done=False)),
    ],
)
def test_node_never_sends_what_breaks_a_bound(field: str, message: NodeMessage) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.encode_node_batch([message])
    assert caught.value.field == field


def node_batch(message: pb.NodeMessage) -> bytes:
    return pb.NodeBatch(messages=[message]).SerializeToString()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("message", pb.NodeMessage()),
        ("hello.protocol", pb.NodeMessage(hello=pb.Hello(node=b"n"))),
        (
            "hello.protocol_oldest",
            pb.NodeMessage(hello=pb.Hello(node=b"n", protocol=4, protocol_oldest=5)),
        ),
        ("hello.node", pb.NodeMessage(hello=pb.Hello(protocol=4))),
        ("hello.node", pb.NodeMessage(hello=pb.Hello(node=b"\xff", protocol=4))),
        ("hello.addresses", pb.NodeMessage(hello=pb.Hello(node=b"n", addresses=[b"\xc3"]))),
        ("hello.software", pb.NodeMessage(hello=pb.Hello(node=b"n", software=b"\xed\xa0\x80"))),
        ("trigger_fired.group.trigger", pb.NodeMessage(trigger_fired=pb.TriggerFired())),
        (
            "trigger_fired.source",
            pb.NodeMessage(
                trigger_fired=pb.TriggerFired(group=pb.Group(trigger=b"t", primary=TRACE))
            ),
        ),
        (
            "trigger_fired.laterals",
            pb.NodeMessage(
                trigger_fired=pb.TriggerFired(
                    group=pb.Group(trigger=b"t", primary=TRACE),
                    source=pb.SOURCE_KERNEL,
                    laterals=[TRACE] * 33,
                )
            ),
        ),
        ("slice_status.trace", pb.NodeMessage(slice_status=pb.SliceStatus())),
        (
            "slice_status.flags",
            pb.NodeMessage(slice_status=pb.SliceStatus(trace=TRACE, flags=1 << 31)),
        ),
        # BSN_SLICE_SEARCHING is the node's own business.
        (
            "slice_status.flags",
            pb.NodeMessage(slice_status=pb.SliceStatus(trace=TRACE, flags=0x200)),
        ),
        (
            "slice_status.bytes",
            pb.NodeMessage(slice_status=pb.SliceStatus(trace=TRACE, bytes=1 << 63)),
        ),
        (
            "slice_status.crumbs",
            pb.NodeMessage(slice_status=pb.SliceStatus(trace=TRACE, crumbs=range(10_000))),
        ),
        (
            "clock_reply.received_ns",
            pb.NodeMessage(clock_reply=pb.ClockReply(received_ns=1 << 63)),
        ),
    ],
)
def test_coordinator_refuses_what_breaks_a_bound(
    field: str, message: pb.NodeMessage, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode_node_batch(node_batch(message))
    assert caught.value.field == field
    # No peer writes to our log at will: not even libprotobuf says a word of it.
    assert capfd.readouterr() == ("", "")


def test_what_a_newer_peer_adds_is_ignored() -> None:
    # Field 1000 with a varint: nobody has it.
    more = b"\xc0\x3e\x01"

    def batch(message: bytes) -> bytes:
        return b"\x0a" + bytes([len(message)]) + message

    hello = pb.Hello(node=b"n", protocol=7, protocol_oldest=4, features=1 << 40)
    longer = hello.SerializeToString() + more
    told = batch(b"\x0a" + bytes([len(longer)]) + longer)
    assert wire.decode_node_batch(told + batch(more)) == [
        Hello("n", 0, (), Versions(4, 7, Feature(1 << 40))),
        Unknown(),
    ]
    assert wire.decode_coordinator_batch(batch(more) + more) == [Unknown()]


def test_a_policy_is_read_as_far_as_it_is_known() -> None:
    more = b"\xc0\x3e\x01"
    policy = pb.Policy(number=7, percentage_threshold=0).SerializeToString() + more
    message = b"\x4a" + bytes([len(policy)]) + policy
    batch = b"\x0a" + bytes([len(message)]) + message
    assert wire.decode_coordinator_batch(batch) == [Policy(7, 0)]


@pytest.mark.parametrize(
    ("field", "policy"),
    [
        ("policy.number", pb.Policy(percentage_threshold=0)),
        ("policy.number", pb.Policy(rules=[pb.PolicyRule(operation=b"a")])),
        ("policy.rules", pb.Policy(number=1, rules=[pb.PolicyRule(operation=b"a")] * 257)),
        ("policy.rules.operation", pb.Policy(number=1, rules=[pb.PolicyRule()])),
        (
            "policy.rules.operation",
            pb.Policy(number=1, rules=[pb.PolicyRule(operation=b"a" * 256)]),
        ),
    ],
)
def test_a_policy_out_of_bounds_is_refused(field: str, policy: pb.Policy) -> None:
    batch = pb.CoordinatorBatch(messages=[pb.CoordinatorMessage(policy=policy)])
    with pytest.raises(wire.WireError) as caught:
        wire.decode_coordinator_batch(batch.SerializeToString())
    assert caught.value.field == field


def test_who_says_no_window_has_the_one_version_that_it_says() -> None:
    old = pb.NodeMessage(hello=pb.Hello(node=b"n", protocol=4, incarnation=1))
    assert wire.decode_node_batch(node_batch(old)) == [Hello("n", 1, (), Versions(4, 4))]
    welcome = pb.CoordinatorMessage(welcome=pb.Welcome(incarnation=1))
    batch = pb.CoordinatorBatch(messages=[welcome]).SerializeToString()
    assert wire.decode_coordinator_batch(batch) == [Welcome(1, Agreed(4))]


def test_batches_are_bounded() -> None:
    most: list[NodeMessage] = [STATUS] * wire.BATCH_MESSAGES_MAX
    assert len(wire.decode_node_batch(wire.encode_node_batch(most))) == len(most)
    with pytest.raises(wire.WireError, match="messages"):
        wire.encode_node_batch([*most, STATUS])
    too_many = pb.NodeBatch(messages=[pb.NodeMessage()] * (wire.BATCH_MESSAGES_MAX + 1))
    with pytest.raises(wire.WireError, match="messages: 1025 of them; allowed: 0 to 1024"):
        wire.decode_node_batch(too_many.SerializeToString())


def test_largest_batch_fits_a_grpc_message() -> None:
    largest = TriggerFired(
        Group("t" * 31, TRACE), (TRACE,) * LATERALS_MAX, "w" * 95, Source.KERNEL, 1 << 62, 1 << 62
    )
    status = SliceStatus(
        TRACE, True, SliceFlags.HELD, 1 << 62, 1 << 31, (NodeId((1 << 64) - 1),) * CRUMBS_MAX, 1
    )
    for message in (largest, status):
        encoded = wire.encode_node_batch([message] * wire.BATCH_MESSAGES_MAX)
        assert len(encoded) < wire.MESSAGE_BYTES_MAX
    acks = SliceReply((SliceAck(TRACE, 1 << 62, 1),) * ACKS_MAX, 1 << 62)
    assert len(wire.encode_slice_reply(acks)) < wire.MESSAGE_BYTES_MAX


@pytest.mark.parametrize("size", [1, 100, CHUNK_BYTES_MAX - 1, CHUNK_BYTES_MAX])
@pytest.mark.parametrize("byte", [b"\0", None])
def test_chunks_up_to_the_bound_pass(size: int, byte: bytes | None) -> None:
    noise = zlib.compress(bytes(range(256)) * 64, 9)  # deflated once, it does not shrink again
    data = byte * size if byte else (noise * (size // len(noise) + 1))[:size]
    chunk = SliceChunk(TRACE, 7, data, 1)
    assert wire.decode_slices_message(wire.encode_chunks([chunk])) == [chunk]


def test_as_many_chunks_and_bytes_as_a_message_may_carry_pass_and_no_more() -> None:
    share = CHUNK_BYTES_MAX // CHUNKS_MAX
    most = [SliceChunk(TRACE, index, bytes(share), 1) for index in range(CHUNKS_MAX)]
    assert wire.decode_slices_message(wire.encode_chunks(most)) == most
    # As large as they get: nothing of it can be deflated.
    noise = random.Random(1).randbytes(CHUNK_BYTES_MAX)
    most = [
        SliceChunk(TRACE, (1 << 62) + index, noise[index * share :][:share], (1 << 63) - 1)
        for index in range(CHUNKS_MAX)
    ]
    assert wire.decode_slices_message(wire.encode_chunks(most)) == most
    with pytest.raises(wire.WireError, match="257 of them"):
        wire.encode_chunks([*most, most[0]])
    with pytest.raises(wire.WireError, match="0 of them"):
        wire.encode_chunks([])
    with pytest.raises(wire.WireError, match="1048577 bytes"):
        wire.encode_chunks([*most[:-1], SliceChunk(TRACE, 0, bytes(share + 1), 1)])


def part(
    data: bytes, *, compressed: bool = False, zstd: bool = False, offset: int = 0, epoch: int = 1
) -> pb.SliceChunk:
    return pb.SliceChunk(
        trace=TRACE, offset=offset, data=data, compressed=compressed, zstd=zstd, epoch=epoch
    )


def frame(data: bytes, *, is_sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=is_sized).compress(data)


def lying_frame(data: bytes, size: int) -> bytes:
    """A frame that says another size of its content; RFC 8878, 3.1.1.1: it stands before the blocks."""
    honest = frame(data)
    said = (len(data) - 256).to_bytes(2, "little")
    assert honest[5:7] == said
    return honest[:5] + (size - 256).to_bytes(2, "little") + honest[7:]


def list_bytes(first: pb.SliceChunk, *further: pb.SliceChunk) -> bytes:
    message = pb.SliceChunk()
    message.CopyFrom(first)
    message.further.extend(further)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("0 bytes", list_bytes(part(b""))),
        ("1048577 bytes", list_bytes(part(bytes(CHUNK_BYTES_MAX + 1)))),
        # A megabyte of nothing is a kilobyte deflated: it must not become memory.
        (
            "inflates to more than",
            list_bytes(part(zlib.compress(bytes(CHUNK_BYTES_MAX + 1)), compressed=True)),
        ),
        (
            "inflates to more than",
            list_bytes(part(zlib.compress(bytes(512 << 20)), compressed=True)),
        ),
        ("cut off", list_bytes(part(zlib.compress(b"abc" * 99)[:-1], compressed=True))),
        ("cut off", list_bytes(part(b"", compressed=True))),
        ("bytes follow", list_bytes(part(zlib.compress(b"abc") + b"x", compressed=True))),
        ("no valid zlib stream", list_bytes(part(b"abc", compressed=True))),
        ("0 bytes", list_bytes(part(zlib.compress(b""), compressed=True))),
        ("no valid zstd frame", list_bytes(part(b"abc", zstd=True))),
        ("no valid zstd frame", list_bytes(part(b"", zstd=True))),
        ("no valid zstd frame", list_bytes(part(frame(b"abc" * 99)[:-1], zstd=True))),
        ("says no size", list_bytes(part(frame(b"abc" * 99, is_sized=False), zstd=True))),
        ("holds 3$", list_bytes(part(frame(b"abc"), zstd=True))),
        ("holds 297$", list_bytes(part(frame(b"abc" * 99) + bytes(300), zstd=True))),
        ("holds 0$", list_bytes(part(frame(b""), zstd=True))),
        ("1048577 bytes", list_bytes(part(frame(bytes(CHUNK_BYTES_MAX + 1)), zstd=True))),
        ("1048577 bytes", list_bytes(part(b"x"), part(frame(bytes(CHUNK_BYTES_MAX)), zstd=True))),
        # A terabyte: nobody takes memory for that. RFC 8878, 3.1.1: one block of a byte.
        (
            "1099511627776 bytes",
            list_bytes(
                part(
                    b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x09\0\0x",
                    zstd=True,
                )
            ),
        ),
        # A frame says that it holds less, or more, than it does.
        ("no valid zstd frame", list_bytes(part(lying_frame(bytes(60_000), 300), zstd=True))),
        ("no valid zstd frame", list_bytes(part(lying_frame(bytes(300), 60_000), zstd=True))),
        ("allowed", list_bytes(part(b"x", offset=(1 << 63) - 1))),
        ("epoch: 0", list_bytes(part(b"x", epoch=0))),
        ("epoch", list_bytes(part(b"x", epoch=1 << 63))),
        (
            "without a chunk",
            pb.SliceChunk(node=b"n", trace=TRACE, data=b"x").SerializeToString(),
        ),
        (
            "without a chunk",
            pb.SliceChunk(node=b"n", further=[part(b"x")]).SerializeToString(),
        ),
        ("more than a chunk", list_bytes(part(b"x"), pb.SliceChunk(node=b"n"))),
        (
            "more than a chunk",
            list_bytes(
                part(b"x"), pb.SliceChunk(trace=TRACE, data=b"x", epoch=1, further=[part(b"x")])
            ),
        ),
        ("256 of them", list_bytes(*[part(b"x")] * (CHUNKS_MAX + 1))),
        ("0 bytes", list_bytes(part(b"x"), part(b""))),
        # Half a million chunks without anything are not parsed.
        ("slice_chunk: 1064962 bytes", b"\x42\x00" * (wire.slices._SLICES_BYTES_MAX // 2 + 1)),
        ("1048577 bytes", list_bytes(part(b"x"), part(bytes(CHUNK_BYTES_MAX)))),
        # Together too large, if inflated.
        (
            "1258290 bytes",
            list_bytes(*[part(zlib.compress(bytes(629145)), compressed=True)] * 2),
        ),
        (
            "1350000 bytes",
            list_bytes(*[part(zlib.compress(bytes(450_000)), compressed=True)] * 3),
        ),
        # Each is as large as one may be: a thousand of them in a message must not become memory.
        (
            r"10496\d\d bytes",
            list_bytes(*[part(zlib.compress(bytes(CHUNK_BYTES_MAX)), compressed=True)] * 99),
        ),
    ],
)
def test_bad_chunks_are_refused(problem: str, message: bytes) -> None:
    with pytest.raises(wire.WireError, match=problem):
        wire.decode_slices_message(message)


@pytest.mark.parametrize("zstd", [None, wire.Zstd()])
def test_chunks_among_what_a_node_says_have_room_for_as_much_as_is_allowed(
    zstd: wire.Zstd | None,
) -> None:
    half = SliceChunk(TRACE, 0, bytes(CONTROL_CHUNK_BYTES_MAX // 2), 1, stream=7)
    said: list[NodeMessage] = [half, Abandoned(GROUP), half]
    data = wire.encode_node_batch(said, zstd)
    assert len(data) < 300
    decoded = wire.decode_node_batch(data, zstd)
    assert decoded == said
    assert [(m.stream, bool(m.zstd)) for m in decoded if isinstance(m, SliceChunk)] == [
        (7, zstd is not None)
    ] * 2
    more = SliceChunk(TRACE, 0, b"x", 1)
    with pytest.raises(wire.WireError, match="8193 bytes; allowed: up to 8192"):
        wire.encode_node_batch([*said, more], zstd)
    # Batches one after the other are one.
    one, last = wire.encode_node_batch([half], zstd), wire.encode_node_batch([more], zstd)
    for batch in (one + one + last, one + one + one):
        with pytest.raises(
            wire.WireError, match=r"slice_chunk.data: \d+ bytes; allowed: up to 8192"
        ):
            wire.decode_node_batch(batch, zstd)


@pytest.mark.parametrize("more", [{"node": b"n"}, {"further": [pb.SliceChunk()]}])
def test_among_what_a_node_says_a_chunk_stands_alone(more: dict[str, Any]) -> None:
    chunk = pb.SliceChunk(trace=TRACE, data=b"x", epoch=1, **more)
    batch = pb.NodeBatch(messages=[pb.NodeMessage(slice_chunk=chunk)])
    with pytest.raises(wire.WireError, match="holds more than a chunk"):
        wire.decode_node_batch(batch.SerializeToString())


@pytest.mark.parametrize(
    "status",
    [
        SliceStatus(TRACE, held=True, bytes=5),
        SliceStatus(TRACE, held=False, bytes=5),
        SliceStatus(TRACE, held=True, epoch=1 << 63),
    ],
)
def test_a_slice_without_a_valid_epoch_is_refused(status: SliceStatus) -> None:
    with pytest.raises(wire.WireError, match=r"slice_status\.epoch"):
        wire.encode_node_batch([status])
    raw = pb.SliceStatus(trace=TRACE, held=status.held, bytes=status.bytes, epoch=status.epoch)
    batch = pb.NodeBatch(messages=[pb.NodeMessage(slice_status=raw)])
    with pytest.raises(wire.WireError, match=r"slice_status\.epoch"):
        wire.decode_node_batch(batch.SerializeToString())


@pytest.mark.parametrize("epoch", [0, 1 << 63])
def test_an_ack_without_a_valid_epoch_is_refused(epoch: int) -> None:
    reply = pb.SliceReply(acks=[pb.SliceAck(trace=TRACE, offset=1, epoch=epoch)])
    with pytest.raises(wire.WireError, match=r"acks\.epoch"):
        wire.decode_slice_reply(reply.SerializeToString())


def test_trace_ids_are_parsed_as_people_write_them() -> None:
    text = "0af7651916cd43dd8448eb211c80319c"
    assert wire.parse_trace_id(text).hex() == text
    assert wire.parse_trace_id(text.upper()).hex() == text
    for bad in ("", text[:-1], text + "0", "0" * 32, "0x" + text[2:], text[:-1] + "g", " " + text):
        with pytest.raises(wire.WireError, match="trace id"):
            wire.parse_trace_id(bad)
