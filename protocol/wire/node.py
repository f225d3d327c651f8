# SPDX-License-Identifier: Apache-2.0
"""What a node says on its Control stream. Each message has one check, which both directions pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import backsight_pb2 as pb

from protocol.messages import (
    ADDRESSES_MAX,
    CONTROL_CHUNK_BYTES_MAX,
    CRUMBS_MAX,
    LATERALS_MAX,
    REPORT_BYTES_MAX,
    SOFTWARE_BYTES_MAX,
    WHY_BYTES_MAX,
    Abandoned,
    ClockReply,
    Hello,
    NodeId,
    NodeMessage,
    NodeReport,
    SliceChunk,
    SliceStatus,
    SnapshotStatus,
    TraceId,
    TriggerFired,
    Unknown,
)
from protocol.versions import Feature, Versions
from protocol.wire import check, slices


def _checked_hello(m: Hello) -> Hello:
    check.node_name("hello.node", m.node)
    check.integer("hello.incarnation", m.incarnation, check.UINT64_MAX)
    check.count("hello.addresses", m.addresses, ADDRESSES_MAX)
    for address in m.addresses:
        check.address("hello.addresses", address)
    check.protocol("hello.protocol", m.versions.newest)
    # Below 1, or the wrong way round, it would be no window.
    check.protocol("hello.protocol_oldest", m.versions.oldest, m.versions.newest)
    check.integer("hello.features", int(m.versions.features), check.UINT64_MAX)
    check.text("hello.software", m.software, SOFTWARE_BYTES_MAX)
    return m


def _checked_trigger_fired(m: TriggerFired) -> TriggerFired:
    check.count("trigger_fired.laterals", m.laterals, LATERALS_MAX)
    for lateral in m.laterals:
        check.trace("trigger_fired.laterals", lateral)
    check.text("trigger_fired.why", m.why, WHY_BYTES_MAX)
    check.integer("trigger_fired.fired_at_ns", m.fired_at_ns)
    check.integer("trigger_fired.suppressed", m.suppressed)
    check.integer("trigger_fired.process", m.process, check.UINT32_MAX)
    return m


def _checked_slice_status(m: SliceStatus) -> SliceStatus:
    check.trace("slice_status.trace", m.trace)
    check.flags("slice_status.flags", int(m.flags))
    check.integer("slice_status.bytes", m.bytes)
    check.integer("slice_status.open_handles", m.open_handles, check.UINT32_MAX)
    check.epoch("slice_status.epoch", m.epoch, minimum=1 if m.held or m.bytes else 0)
    check.count("slice_status.crumbs", m.crumbs, CRUMBS_MAX)
    for crumb in m.crumbs:
        check.integer("slice_status.crumbs", crumb, check.UINT64_MAX)
    return m


def _checked_clock_reply(m: ClockReply) -> ClockReply:
    check.integer("clock_reply.number", m.number, check.UINT32_MAX)
    check.integer("clock_reply.received_ns", m.received_ns)
    check.integer("clock_reply.sent_ns", m.sent_ns)
    return m


def _checked_report(m: NodeReport) -> NodeReport:
    check.integer("node_report.number", m.number, check.UINT32_MAX)
    check.text("node_report.json", m.json, REPORT_BYTES_MAX)
    return m


def _checked_snapshot_status(m: SnapshotStatus) -> SnapshotStatus:
    check.integer("snapshot_status.number", m.number, check.UINT32_MAX)
    # More than a pool can hold; and the sum over all nodes has 64 bits.
    check.integer("snapshot_status.found", m.found, check.UINT32_MAX)
    check.integer("snapshot_status.fired", m.fired, check.UINT32_MAX)
    return m


def _node_message_out(message: NodeMessage, zstd: slices.Zstd | None) -> pb.NodeMessage:
    match message:
        case Hello():
            _checked_hello(message)
            return pb.NodeMessage(
                hello=pb.Hello(
                    protocol=message.versions.newest,
                    protocol_oldest=message.versions.oldest,
                    features=int(message.versions.features),
                    node=message.node.encode(),
                    incarnation=message.incarnation,
                    addresses=map(str.encode, message.addresses),
                    software=message.software.encode(),
                )
            )
        case TriggerFired():
            _checked_trigger_fired(message)
            return pb.NodeMessage(
                trigger_fired=pb.TriggerFired(
                    group=check.group_out("trigger_fired.group", message.group),
                    laterals=message.laterals,
                    why=message.why.encode(),
                    # Not called: protobuf has it from 3.20 on.
                    source=cast(
                        "pb.Source.ValueType", check.source("trigger_fired.source", message.source)
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
                abandoned=pb.Abandoned(group=check.group_out("abandoned.group", message.group))
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
                node_report=pb.NodeReport(number=message.number, json=message.json.encode())
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
        case SliceChunk():
            return pb.NodeMessage(slice_chunk=slices.chunk_out(message, zstd))


def _node_message_in(
    message: pb.NodeMessage, zstd: slices.Zstd | None, chunk_bytes: int
) -> NodeMessage | Unknown:
    """``chunk_bytes``: in chunks before it."""
    match message.WhichOneof("message"):
        case "hello":
            hello = message.hello
            oldest = hello.protocol_oldest or hello.protocol
            versions = Versions(oldest, hello.protocol, Feature(hello.features))
            return _checked_hello(
                Hello(
                    check.utf8("hello.node", hello.node),
                    hello.incarnation,
                    tuple(check.utf8("hello.addresses", text) for text in hello.addresses),
                    versions,
                    check.utf8("hello.software", hello.software),
                )
            )
        case "trigger_fired":
            fired = message.trigger_fired
            return _checked_trigger_fired(
                TriggerFired(
                    check.group_in("trigger_fired.group", fired.group),
                    tuple(TraceId(lateral) for lateral in fired.laterals),
                    check.utf8("trigger_fired.why", fired.why),
                    check.source("trigger_fired.source", fired.source),
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
                    check.flags("slice_status.flags", status.flags),
                    status.bytes,
                    status.open_handles,
                    tuple(NodeId(crumb) for crumb in status.crumbs),
                    status.epoch,
                )
            )
        case "abandoned":
            return Abandoned(check.group_in("abandoned.group", message.abandoned.group))
        case "clock_reply":
            reply = message.clock_reply
            return _checked_clock_reply(ClockReply(reply.number, reply.received_ns, reply.sent_ns))
        case "snapshot_status":
            of = message.snapshot_status
            return _checked_snapshot_status(SnapshotStatus(of.number, of.found, of.fired, of.done))
        case "node_report":
            report = message.node_report
            json = check.utf8("node_report.json", report.json)
            return _checked_report(NodeReport(report.number, json))
        case "slice_chunk":
            chunk = message.slice_chunk
            if chunk.node or chunk.further:
                raise check.WireError("slice_chunk", "holds more than a chunk")
            return slices.chunk_in(chunk, zstd, chunk_bytes, CONTROL_CHUNK_BYTES_MAX)
        case _:
            return check.unknown(message, "node")


def encode_node_batch(messages: Sequence[NodeMessage], zstd: slices.Zstd | None = None) -> bytes:
    """Encode up to check.BATCH_MESSAGES_MAX messages of a node.

    Chunks only to who knows Feature.CONTROL_CHUNKS; with ``zstd`` only to who knows that.
    """
    check.count("messages", messages, check.BATCH_MESSAGES_MAX)
    slices.within_bytes(
        sum(len(message.data) for message in messages if isinstance(message, SliceChunk)),
        CONTROL_CHUNK_BYTES_MAX,
    )
    return pb.NodeBatch(
        messages=[_node_message_out(message, zstd) for message in messages]
    ).SerializeToString()


def decode_node_batch(data: bytes, zstd: slices.Zstd | None = None) -> list[NodeMessage | Unknown]:
    """Decode what a node sent on its Control stream; check.WireError if any of it is malformed."""
    batch = pb.NodeBatch()
    check.parse(batch, "node batch", data)
    check.count("messages", batch.messages, check.BATCH_MESSAGES_MAX)
    messages: list[NodeMessage | Unknown] = []
    chunk_bytes = 0
    for sent in batch.messages:
        message = _node_message_in(sent, zstd, chunk_bytes)
        if isinstance(message, SliceChunk):
            chunk_bytes += len(message.data)
        messages.append(message)
    return messages
