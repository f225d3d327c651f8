# SPDX-License-Identifier: Apache-2.0
"""Bytes to messages and back, with every bound of ``backsight.proto`` checked on the way.

What arrives is untrusted: a peer may be broken, of another version, or hostile.
Whatever is malformed raises WireError, which names the field and says what is
allowed; nothing else is raised, and nothing out of bounds reaches a core. The
same checks guard the way out, so that a node never sends what its coordinator
must refuse.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import backsight_pb2 as pb
import zstandard
from google.protobuf.message import DecodeError, Message

from protocol.messages import (
    ACKS_MAX,
    ADDRESSES_MAX,
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    COLLECT_TRACES_MAX,
    CRUMBS_MAX,
    LATERALS_MAX,
    NAME_OF_WHO_BYTES_MAX,
    NODE_NAME_BYTES_MAX,
    OPERATION_BYTES_MAX,
    POLICY_RULES_MAX,
    REPORT_BYTES_MAX,
    SERVICE_BYTES_MAX,
    SOFTWARE_BYTES_MAX,
    TRIGGER_NAME_BYTES_MAX,
    WHY_BYTES_MAX,
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
    NodeReport,
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
    StatusQuestion,
    TraceId,
    TriggerAck,
    TriggerFired,
    Unknown,
    Welcome,
)
from protocol.versions import BEFORE_WINDOWS, Agreed, Feature, Versions

BATCH_MESSAGES_MAX = 1024
"""Messages in one batch: of a node under 1 MiB, even if each is as large as it may be."""

ADDRESS_BYTES_MAX = 64
"""The longest textual IPv6 address with a zone fits."""

REASON_BYTES_MAX = 512

MESSAGE_BYTES_MAX = 4 << 20
"""What gRPC may receive at once (its own default); all bounds above stay below it."""

INTEGER_MAX = (1 << 63) - 1
"""Sizes, offsets and times: what a signed 64-bit column of the store holds."""

# A stray end-group tag is a warning to the C++ parser, which then stops. It is
# refused below like everything malformed; a peer shall not write to our stderr.
warnings.filterwarnings("ignore", message="Unexpected end-group tag", category=RuntimeWarning)

_UINT32_MAX = (1 << 32) - 1
_UINT64_MAX = (1 << 64) - 1
_TRACE_ID_BYTES = 16
_TRIGGER_NAME = re.compile(rf"[a-z0-9_.-]{{1,{TRIGGER_NAME_BYTES_MAX}}}")
_NODE_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{NODE_NAME_BYTES_MAX}}}")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_FLAGS_KNOWN = sum(SliceFlags)

# What a flag or a source means, decides what a verdict says: to ignore one is not safe.
_NEWER = "; if the other side is newer, update this one"

# zlib's own default: half the time of 9, all but a hundredth of its ratio.
_COMPRESSION_LEVEL = 6

# zstd's own default: a quarter of the time of zlib, and 3 % more bytes. Higher ones save one or two
# per cent.
_ZSTD_LEVEL = 3

# Each chunk of a list has some 50 bytes beside its data.
_SLICES_BYTES_MAX = CHUNK_BYTES_MAX + CHUNKS_MAX * 64


class WireError(ValueError):
    """A message that breaks a bound: which field, and what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Opening:
    """Who sends the chunks of a Slices stream; its first message, without a chunk."""

    node: str
    incarnation: int


# -------------------------------------------------------------- field checks


def _integer(field: str, value: int, maximum: int = INTEGER_MAX) -> int:
    if not 0 <= value <= maximum:
        raise WireError(field, f"{value}; allowed: 0 to {maximum}")
    return value


def _count(field: str, items: Sequence[object], maximum: int, minimum: int = 0) -> None:
    if not minimum <= len(items) <= maximum:
        raise WireError(field, f"{len(items)} of them; allowed: {minimum} to {maximum}")


def _text(field: str, value: str, maximum: int, minimum: int = 0) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise WireError(field, f"no valid Unicode: {error.reason}") from error
    if not minimum <= size <= maximum:
        raise WireError(field, f"{size} bytes; allowed: {minimum} to {maximum}")
    return value


def _trace(field: str, value: bytes) -> TraceId:
    if len(value) != _TRACE_ID_BYTES:
        raise WireError(field, f"{len(value)} bytes; a trace id has {_TRACE_ID_BYTES}")
    if not any(value):
        raise WireError(field, "all zero, which means no trace")
    return TraceId(value)


def _trigger_name(field: str, value: str) -> str:
    if not _TRIGGER_NAME.fullmatch(value):
        raise WireError(
            field, f"{value[:64]!r}; allowed: 1 to {TRIGGER_NAME_BYTES_MAX} of a-z 0-9 _ . -"
        )
    return value


def _epoch(field: str, value: int, minimum: int = 1) -> int:
    if not minimum <= value <= INTEGER_MAX:
        raise WireError(field, f"{value}; allowed: {minimum} to {INTEGER_MAX}")
    return value


def _protocol(field: str, value: int, maximum: int = _UINT32_MAX) -> int:
    if not 1 <= value <= maximum:
        raise WireError(field, f"{value}; allowed: 1 to {maximum}")
    return value


def _node_name(field: str, value: str) -> str:
    if not _NODE_NAME.fullmatch(value):
        raise WireError(
            field, f"{value[:64]!r}; allowed: 1 to {NODE_NAME_BYTES_MAX} of A-Z a-z 0-9 _ . -"
        )
    return value


def _address(field: str, value: str) -> str:
    _text(field, value, ADDRESS_BYTES_MAX, minimum=1)
    if _CONTROL_CHARACTER.search(value):
        raise WireError(field, f"{value!r} has control characters")
    return value


def _flags(field: str, value: int) -> SliceFlags:
    if value & ~_FLAGS_KNOWN or value < 0:
        raise WireError(field, f"{value:#x}; known flags: {_FLAGS_KNOWN:#x}{_NEWER}")
    return SliceFlags(value)


def _source(field: str, value: int) -> Source:
    try:
        return Source(value)
    except ValueError:
        raise WireError(field, f"{value}; allowed: {[int(s) for s in Source]}{_NEWER}") from None


def _group(field: str, trigger: str, primary: bytes) -> Group:
    return Group(_trigger_name(f"{field}.trigger", trigger), _trace(f"{field}.primary", primary))


def _group_in(field: str, group: pb.Group) -> Group:
    return _group(field, group.trigger, group.primary)


def _group_out(field: str, group: Group) -> pb.Group:
    _group(field, group.trigger, group.primary)
    return pb.Group(trigger=group.trigger, primary=group.primary)


def _put_group(field: str, group: Group, out: pb.Group) -> None:
    _group(field, group.trigger, group.primary)
    out.trigger, out.primary = group


def trigger_name_is_valid(name: str) -> bool:
    """Whether a trigger may be called so: 1 to 31 characters of a-z 0-9 _ . -."""
    return _TRIGGER_NAME.fullmatch(name) is not None


def parse_trace_id(text: str) -> TraceId:
    """Parse the 32 hex digits in which people and W3C headers write a trace id."""
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise WireError("trace id", f"{text[:64]!r}; want 32 hex digits")
    return _trace("trace id", bytes.fromhex(text))


# ------------------------------------------------------------------ messages
#
# Each message has one check, which both directions pass through.


def _checked_hello(m: Hello) -> Hello:
    _node_name("hello.node", m.node)
    _integer("hello.incarnation", m.incarnation, _UINT64_MAX)
    _count("hello.addresses", m.addresses, ADDRESSES_MAX)
    for address in m.addresses:
        _address("hello.addresses", address)
    _protocol("hello.protocol", m.versions.newest)
    # Below 1, or the wrong way round, it would be no window.
    _protocol("hello.protocol_oldest", m.versions.oldest, m.versions.newest)
    _integer("hello.features", int(m.versions.features), _UINT64_MAX)
    _text("hello.software", m.software, SOFTWARE_BYTES_MAX)
    return m


def _checked_welcome(m: Welcome) -> Welcome:
    _integer("welcome.incarnation", m.incarnation, _UINT64_MAX)
    _protocol("welcome.protocol", m.agreed.protocol)
    _integer("welcome.features", int(m.agreed.features), _UINT64_MAX)
    _integer("welcome.priority_seed", m.priority_seed, _UINT64_MAX)
    return m


def _checked_trigger_fired(m: TriggerFired) -> TriggerFired:
    _count("trigger_fired.laterals", m.laterals, LATERALS_MAX)
    for lateral in m.laterals:
        _trace("trigger_fired.laterals", lateral)
    _text("trigger_fired.why", m.why, WHY_BYTES_MAX)
    _integer("trigger_fired.fired_at_ns", m.fired_at_ns)
    _integer("trigger_fired.suppressed", m.suppressed)
    _integer("trigger_fired.process", m.process, _UINT32_MAX)
    return m


def _checked_slice_status(m: SliceStatus) -> SliceStatus:
    _trace("slice_status.trace", m.trace)
    _flags("slice_status.flags", int(m.flags))
    _integer("slice_status.bytes", m.bytes)
    _integer("slice_status.open_handles", m.open_handles, _UINT32_MAX)
    _epoch("slice_status.epoch", m.epoch, minimum=1 if m.held or m.bytes else 0)
    _count("slice_status.crumbs", m.crumbs, CRUMBS_MAX)
    for crumb in m.crumbs:
        _integer("slice_status.crumbs", crumb, _UINT64_MAX)
    return m


def _checked_clock_reply(m: ClockReply) -> ClockReply:
    _integer("clock_reply.number", m.number, _UINT32_MAX)
    _integer("clock_reply.received_ns", m.received_ns)
    _integer("clock_reply.sent_ns", m.sent_ns)
    return m


def _checked_report(m: NodeReport) -> NodeReport:
    _integer("node_report.number", m.number, _UINT32_MAX)
    _text("node_report.json", m.json, REPORT_BYTES_MAX)
    return m


def _checked_snapshot_status(m: SnapshotStatus) -> SnapshotStatus:
    _integer("snapshot_status.number", m.number, _UINT32_MAX)
    # More than a pool can hold; and the sum over all nodes has 64 bits.
    _integer("snapshot_status.found", m.found, _UINT32_MAX)
    _integer("snapshot_status.fired", m.fired, _UINT32_MAX)
    return m


def _checked_snapshot(m: Snapshot) -> Snapshot:
    _integer("snapshot.number", m.number, _UINT32_MAX)
    _trigger_name("snapshot.trigger", m.trigger)
    _integer("snapshot.age_ns", m.age_ns)
    _text("snapshot.service", m.service, SERVICE_BYTES_MAX)
    _integer("snapshot.traces", m.traces, _UINT32_MAX)
    _text("snapshot.by", m.by, NAME_OF_WHO_BYTES_MAX)
    return m


def _checked_policy(m: Policy) -> Policy:
    _integer("policy.number", m.number, _UINT64_MAX)
    if m.percentage_threshold is not None:
        _integer("policy.percentage_threshold", m.percentage_threshold, _UINT64_MAX)
    _count("policy.rules", m.rules, POLICY_RULES_MAX)
    for rule in m.rules:
        _text("policy.rules.operation", rule.operation, OPERATION_BYTES_MAX, minimum=1)
        _integer("policy.rules.threshold", rule.threshold, _UINT64_MAX)
    if m.number == 0 and (m.percentage_threshold is not None or m.rules):
        raise WireError("policy.number", "0, which means no policy, and yet something is said")
    return m


def _checked_collect(m: Collect) -> Collect:
    _count("collect.traces", m.traces, COLLECT_TRACES_MAX, minimum=1)
    for trace in m.traces:
        _trace("collect.traces", trace)
    return m


def _node_message_out(message: NodeMessage) -> pb.NodeMessage:
    match message:
        case Hello():
            _checked_hello(message)
            return pb.NodeMessage(
                hello=pb.Hello(
                    protocol=message.versions.newest,
                    protocol_oldest=message.versions.oldest,
                    features=int(message.versions.features),
                    node=message.node,
                    incarnation=message.incarnation,
                    addresses=message.addresses,
                    software=message.software,
                )
            )
        case TriggerFired():
            _checked_trigger_fired(message)
            return pb.NodeMessage(
                trigger_fired=pb.TriggerFired(
                    group=_group_out("trigger_fired.group", message.group),
                    laterals=message.laterals,
                    why=message.why,
                    # Not called: protobuf has it from 3.20 on.
                    source=cast(
                        "pb.Source.ValueType", _source("trigger_fired.source", message.source)
                    ),
                    fired_at_ns=message.fired_at_ns,
                    suppressed=message.suppressed,
                    process=message.process,
                )
            )
        case SliceStatus():
            _checked_slice_status(message)
            return pb.NodeMessage(
                slice_status=pb.SliceStatus(
                    trace=message.trace,
                    held=message.held,
                    flags=int(message.flags),
                    bytes=message.bytes,
                    open_handles=message.open_handles,
                    crumbs=message.crumbs,
                    epoch=message.epoch,
                )
            )
        case Abandoned():
            return pb.NodeMessage(
                abandoned=pb.Abandoned(group=_group_out("abandoned.group", message.group))
            )
        case ClockReply():
            _checked_clock_reply(message)
            return pb.NodeMessage(
                clock_reply=pb.ClockReply(
                    number=message.number,
                    received_ns=message.received_ns,
                    sent_ns=message.sent_ns,
                )
            )
        case NodeReport():
            _checked_report(message)
            return pb.NodeMessage(
                node_report=pb.NodeReport(number=message.number, json=message.json)
            )
        case SnapshotStatus():
            _checked_snapshot_status(message)
            return pb.NodeMessage(
                snapshot_status=pb.SnapshotStatus(
                    number=message.number,
                    found=message.found,
                    fired=message.fired,
                    done=message.done,
                )
            )


def _unknown(message: pb.NodeMessage | pb.CoordinatorMessage, whose: str) -> Unknown:
    """What has something in it, and nothing that is known."""
    if not message.ByteSize():
        raise WireError("message", f"empty; want one of those that a {whose} sends")
    return Unknown()


def _node_message_in(message: pb.NodeMessage) -> NodeMessage | Unknown:
    match message.WhichOneof("message"):
        case "hello":
            hello = message.hello
            oldest = hello.protocol_oldest or hello.protocol
            versions = Versions(oldest, hello.protocol, Feature(hello.features))
            return _checked_hello(
                Hello(
                    hello.node,
                    hello.incarnation,
                    tuple(hello.addresses),
                    versions,
                    hello.software,
                )
            )
        case "trigger_fired":
            fired = message.trigger_fired
            return _checked_trigger_fired(
                TriggerFired(
                    _group_in("trigger_fired.group", fired.group),
                    tuple(TraceId(lateral) for lateral in fired.laterals),
                    fired.why,
                    _source("trigger_fired.source", fired.source),
                    fired.fired_at_ns,
                    fired.suppressed,
                    fired.process,
                )
            )
        case "slice_status":
            status = message.slice_status
            return _checked_slice_status(
                SliceStatus(
                    TraceId(status.trace),
                    status.held,
                    _flags("slice_status.flags", status.flags),
                    status.bytes,
                    status.open_handles,
                    tuple(NodeId(crumb) for crumb in status.crumbs),
                    status.epoch,
                )
            )
        case "abandoned":
            return Abandoned(_group_in("abandoned.group", message.abandoned.group))
        case "clock_reply":
            reply = message.clock_reply
            return _checked_clock_reply(ClockReply(reply.number, reply.received_ns, reply.sent_ns))
        case "snapshot_status":
            of = message.snapshot_status
            return _checked_snapshot_status(SnapshotStatus(of.number, of.found, of.fired, of.done))
        case "node_report":
            return _checked_report(NodeReport(message.node_report.number, message.node_report.json))
        case _:
            return _unknown(message, "node")


def _put_coordinator_message(message: CoordinatorMessage, out: pb.CoordinatorMessage) -> None:
    # Those that there are many of are written where they belong: to copy one costs more.
    match message:
        case Release():
            out.release.trace = _trace("release.trace", message.trace)
        case Collect():
            _checked_collect(message)
            _put_group("collect.group", message.group, out.collect.group)
            out.collect.traces.extend(message.traces)
        case TriggerAck():
            _put_group("trigger_ack.group", message.group, out.trigger_ack.group)
        case Drop():
            _put_group("drop.group", message.group, out.drop.group)
        case Welcome():
            _checked_welcome(message)
            out.welcome.CopyFrom(
                pb.Welcome(
                    incarnation=message.incarnation,
                    protocol=message.agreed.protocol,
                    features=int(message.agreed.features),
                    priority_seed=message.priority_seed,
                )
            )
        case Refused():
            _text("refused.reason", message.reason, REASON_BYTES_MAX)
            out.refused.CopyFrom(pb.Refused(reason=message.reason))
        case ClockProbe():
            _integer("clock_probe.number", message.number, _UINT32_MAX)
            out.clock_probe.CopyFrom(pb.ClockProbe(number=message.number))
        case Snapshot():
            _checked_snapshot(message)
            out.snapshot.CopyFrom(
                pb.Snapshot(
                    number=message.number,
                    trigger=message.trigger,
                    age_ns=message.age_ns,
                    service=message.service,
                    traces=message.traces,
                    by=message.by,
                )
            )
        case StatusQuestion():
            _integer("status_question.number", message.number, _UINT32_MAX)
            out.status_question.CopyFrom(pb.StatusQuestion(number=message.number))
        case Policy():
            _checked_policy(message)
            out.policy.CopyFrom(
                pb.Policy(
                    number=message.number,
                    percentage_threshold=message.percentage_threshold,
                    rules=(
                        pb.PolicyRule(operation=rule.operation, threshold=rule.threshold)
                        for rule in message.rules
                    ),
                )
            )


def _coordinator_message_in(message: pb.CoordinatorMessage) -> CoordinatorMessage | Unknown:
    match message.WhichOneof("message"):
        case "welcome":
            welcome = message.welcome
            agreed = Agreed(welcome.protocol or BEFORE_WINDOWS, Feature(welcome.features))
            return _checked_welcome(Welcome(welcome.incarnation, agreed, welcome.priority_seed))
        case "refused":
            return Refused(_text("refused.reason", message.refused.reason, REASON_BYTES_MAX))
        case "collect":
            return _checked_collect(
                Collect(
                    _group_in("collect.group", message.collect.group),
                    tuple(TraceId(trace) for trace in message.collect.traces),
                )
            )
        case "trigger_ack":
            return TriggerAck(_group_in("trigger_ack.group", message.trigger_ack.group))
        case "drop":
            return Drop(_group_in("drop.group", message.drop.group))
        case "release":
            return Release(_trace("release.trace", message.release.trace))
        case "clock_probe":
            return ClockProbe(message.clock_probe.number)
        case "status_question":
            return StatusQuestion(message.status_question.number)
        case "snapshot":
            of = message.snapshot
            return _checked_snapshot(
                Snapshot(of.number, of.trigger, of.age_ns, of.service, of.traces, of.by)
            )
        case "policy":
            said = message.policy
            is_said = said.HasField("percentage_threshold")
            return _checked_policy(
                Policy(
                    said.number,
                    said.percentage_threshold if is_said else None,
                    tuple(PolicyRule(rule.operation, rule.threshold) for rule in said.rules),
                )
            )
        case _:
            return _unknown(message, "coordinator")


# ------------------------------------------------------------------- batches


def parse(message: Message, name: str, data: bytes) -> None:
    """Fill a protobuf message from bytes; WireError, under the name, if they are none."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise WireError(name, f"{len(data)} bytes; allowed: up to {MESSAGE_BYTES_MAX}")
    try:
        consumed = message.ParseFromString(data)
    except DecodeError as error:
        raise WireError(name, f"no valid protobuf message: {error}") from error
    if consumed != len(data):
        raise WireError(name, f"no valid protobuf message: it ends after {consumed} bytes")


def encode_node_batch(messages: Sequence[NodeMessage]) -> bytes:
    """Encode up to BATCH_MESSAGES_MAX messages of a node."""
    _count("messages", messages, BATCH_MESSAGES_MAX)
    return pb.NodeBatch(messages=map(_node_message_out, messages)).SerializeToString()


def decode_node_batch(data: bytes) -> list[NodeMessage | Unknown]:
    """Decode what a node sent on its Control stream; WireError if any of it is malformed."""
    batch = pb.NodeBatch()
    parse(batch, "node batch", data)
    _count("messages", batch.messages, BATCH_MESSAGES_MAX)
    return [_node_message_in(message) for message in batch.messages]


def encode_coordinator_batch(messages: Sequence[CoordinatorMessage]) -> bytes:
    """Encode up to BATCH_MESSAGES_MAX messages of a coordinator."""
    _count("messages", messages, BATCH_MESSAGES_MAX)
    batch = pb.CoordinatorBatch()
    for message in messages:
        _put_coordinator_message(message, batch.messages.add())
    return batch.SerializeToString()


def decode_coordinator_batch(data: bytes) -> list[CoordinatorMessage | Unknown]:
    """Decode what a coordinator sent on a Control stream; WireError if any of it is malformed."""
    batch = pb.CoordinatorBatch()
    parse(batch, "coordinator batch", data)
    _count("messages", batch.messages, BATCH_MESSAGES_MAX)
    return [_coordinator_message_in(message) for message in batch.messages]


# -------------------------------------------------------------------- slices


def _checked_chunk(chunk: SliceChunk) -> SliceChunk:
    _trace("slice_chunk.trace", chunk.trace)
    _integer("slice_chunk.offset", chunk.offset, INTEGER_MAX - CHUNK_BYTES_MAX)
    _epoch("slice_chunk.epoch", chunk.epoch)
    if not chunk.data:
        raise WireError("slice_chunk.data", f"0 bytes; allowed: 1 to {CHUNK_BYTES_MAX}")
    return chunk


def _within_bytes(size: int) -> None:
    if size > CHUNK_BYTES_MAX:
        raise WireError("slice_chunk.data", f"{size} bytes; allowed: up to {CHUNK_BYTES_MAX}")


def _decompressed(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, CHUNK_BYTES_MAX)
    except zlib.error as error:
        raise WireError("slice_chunk.data", f"no valid zlib stream: {error}") from error
    # The end of the stream follows the last byte, and may not have been read
    # when the output was full.
    if not inflater.eof and inflater.unconsumed_tail:
        try:
            more = inflater.decompress(inflater.unconsumed_tail, 1)
        except zlib.error as error:
            raise WireError("slice_chunk.data", f"no valid zlib stream: {error}") from error
        if more:
            raise WireError("slice_chunk.data", f"inflates to more than {CHUNK_BYTES_MAX} bytes")
    if not inflater.eof:
        raise WireError("slice_chunk.data", "the zlib stream is cut off")
    if inflater.unused_data:
        raise WireError("slice_chunk.data", "bytes follow the zlib stream")
    return plain


class Zstd:
    """Zstandard, for one thread. To make one costs more than a chunk."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def compressed(self, data: bytes) -> bytes:
        return self._compressor.compress(data)

    def plain(self, frame: bytes, before: int) -> bytes:
        """What is in a frame of untrusted bytes, of a message with so many bytes before it."""
        try:
            size = zstandard.frame_content_size(frame)
            if size < 0:
                raise WireError("slice_chunk.data", "a zstd frame that says no size of its content")
            _within_bytes(before + size)
            if len(frame) > size:
                raise WireError(
                    "slice_chunk.data", f"a zstd frame of {len(frame)} bytes holds {size}"
                )
            # It gets room for what it says, and no more.
            return self._decompressor.decompress(frame)
        except zstandard.ZstdError as error:
            raise WireError("slice_chunk.data", f"no valid zstd frame: {error}") from error


def encode_opening(opening: Opening) -> bytes:
    """Encode the first message of a Slices stream."""
    _node_name("slice_chunk.node", opening.node)
    _integer("slice_chunk.incarnation", opening.incarnation, _UINT64_MAX)
    return pb.SliceChunk(node=opening.node, incarnation=opening.incarnation).SerializeToString()


def encode_chunks(chunks: Sequence[SliceChunk], zstd: Zstd | None = None) -> bytes:
    """Encode 1 to CHUNKS_MAX chunks, each compressed where that makes it smaller.

    More than one only to who knows Feature.CHUNK_LISTS; with ``zstd`` only to who knows that.
    """
    _count("slice_chunk.further", chunks, CHUNKS_MAX, 1)
    _within_bytes(sum(len(chunk.data) for chunk in chunks))
    first, *further = (_chunk_out(chunk, zstd) for chunk in chunks)
    first.further.extend(further)
    return first.SerializeToString()


def _chunk_out(chunk: SliceChunk, zstd: Zstd | None) -> pb.SliceChunk:
    _checked_chunk(chunk)
    if zstd is None:
        compressed = zlib.compress(chunk.data, _COMPRESSION_LEVEL)
    else:
        compressed = zstd.compressed(chunk.data)
    is_smaller = len(compressed) < len(chunk.data)
    return pb.SliceChunk(
        trace=chunk.trace,
        offset=chunk.offset,
        data=compressed if is_smaller else chunk.data,
        compressed=is_smaller and zstd is None,
        zstd=is_smaller and zstd is not None,
        epoch=chunk.epoch,
    )


def decode_slices_message(data: bytes, zstd: Zstd | None = None) -> Opening | list[SliceChunk]:
    """Decode what a node sent on a Slices stream; WireError if it is malformed."""
    if len(data) > _SLICES_BYTES_MAX:
        # Of chunks without anything, which cost memory and time only once they are parsed.
        raise WireError("slice_chunk", f"{len(data)} bytes; allowed: up to {_SLICES_BYTES_MAX}")
    message = pb.SliceChunk()
    parse(message, "slice chunk", data)
    if message.node:
        if message.trace or message.data or message.further:
            raise WireError("slice_chunk.node", "stands in a message of its own, without a chunk")
        return Opening(_node_name("slice_chunk.node", message.node), message.incarnation)
    _count("slice_chunk.further", message.further, CHUNKS_MAX - 1)
    chunks: list[SliceChunk] = []
    size = 0
    for part in (message, *message.further):
        if part is not message and (part.node or part.further):
            raise WireError("slice_chunk.further", "holds more than a chunk")
        sent = part.data
        _within_bytes(size + len(sent))
        if part.zstd:
            zstd = zstd or Zstd()
            plain, frame = zstd.plain(sent, size), sent
        else:
            plain, frame = _decompressed(sent) if part.compressed else sent, b""
        size += len(plain)
        _within_bytes(size)
        chunks.append(
            _checked_chunk(SliceChunk(TraceId(part.trace), part.offset, plain, part.epoch, frame))
        )
    return chunks


def encode_slice_reply(reply: SliceReply) -> bytes:
    """Encode acks and credit."""
    _count("slice_reply.acks", reply.acks, ACKS_MAX)
    message = pb.SliceReply(credit_bytes=_integer("slice_reply.credit_bytes", reply.credit_bytes))
    for ack in reply.acks:
        message.acks.add(
            trace=_trace("slice_reply.acks.trace", ack.trace),
            offset=_integer("slice_reply.acks.offset", ack.offset),
            epoch=_epoch("slice_reply.acks.epoch", ack.epoch),
        )
    return message.SerializeToString()


def decode_slice_reply(data: bytes) -> SliceReply:
    """Decode what a coordinator sent on a Slices stream; WireError if it is malformed."""
    message = pb.SliceReply()
    parse(message, "slice reply", data)
    _count("slice_reply.acks", message.acks, ACKS_MAX)
    return SliceReply(
        tuple(
            SliceAck(
                _trace("slice_reply.acks.trace", ack.trace),
                _integer("slice_reply.acks.offset", ack.offset),
                _epoch("slice_reply.acks.epoch", ack.epoch),
            )
            for ack in message.acks
        ),
        _integer("slice_reply.credit_bytes", message.credit_bytes),
    )
