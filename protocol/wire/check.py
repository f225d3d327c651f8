# SPDX-License-Identifier: Apache-2.0
"""What fields may hold, for both directions: each check gives back what it was given, or raises."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import backsight_pb2 as pb
from google.protobuf.message import DecodeError, Message

from protocol.messages import (
    NODE_NAME_BYTES_MAX,
    TRIGGER_NAME_BYTES_MAX,
    Group,
    SliceFlags,
    Source,
    TraceId,
    Unknown,
)

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

UINT32_MAX = (1 << 32) - 1
UINT64_MAX = (1 << 64) - 1
_TRACE_ID_BYTES = 16
_NO_TRACE = bytes(_TRACE_ID_BYTES)
_TRIGGER_NAME = re.compile(rf"[a-z0-9_.-]{{1,{TRIGGER_NAME_BYTES_MAX}}}")
_NODE_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{NODE_NAME_BYTES_MAX}}}")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_FLAGS_KNOWN = sum(SliceFlags)

# What a flag or a source means, decides what a verdict says: to ignore one is not safe.
_NEWER = "; if the other side is newer, update this one"


class WireError(ValueError):
    """A message that breaks a bound: which field, and what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def integer(field: str, value: int, maximum: int = INTEGER_MAX) -> int:
    """A number from 0 on."""
    if not 0 <= value <= maximum:
        raise WireError(field, f"{value}; allowed: 0 to {maximum}")
    return value


def count(field: str, items: Sequence[object], maximum: int, minimum: int = 0) -> None:
    """So many items."""
    if not minimum <= len(items) <= maximum:
        raise WireError(field, f"{len(items)} of them; allowed: {minimum} to {maximum}")


def text(field: str, value: str, maximum: int, minimum: int = 0) -> str:
    """So many bytes of UTF-8."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise WireError(field, f"no valid Unicode: {error.reason}") from error
    if not minimum <= size <= maximum:
        raise WireError(field, f"{size} bytes; allowed: {minimum} to {maximum}")
    return value


def utf8(field: str, value: bytes) -> str:
    """Text that arrived."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise WireError(field, f"no valid UTF-8: {error.reason}") from error


def trace(field: str, value: bytes) -> TraceId:
    """16 bytes, not all of them zero."""
    if len(value) != _TRACE_ID_BYTES:
        raise WireError(field, f"{len(value)} bytes; a trace id has {_TRACE_ID_BYTES}")
    if value == _NO_TRACE:
        raise WireError(field, "all zero, which means no trace")
    return TraceId(value)


def trigger_name(field: str, value: str) -> str:
    """What a trigger may be called."""
    if not _TRIGGER_NAME.fullmatch(value):
        raise WireError(
            field, f"{value[:64]!r}; allowed: 1 to {TRIGGER_NAME_BYTES_MAX} of a-z 0-9 _ . -"
        )
    return value


def epoch(field: str, value: int, minimum: int = 1) -> int:
    """0 stands for no slice, where that is allowed."""
    if not minimum <= value <= INTEGER_MAX:
        raise WireError(field, f"{value}; allowed: {minimum} to {INTEGER_MAX}")
    return value


def protocol(field: str, value: int, maximum: int = UINT32_MAX) -> int:
    """A version of the protocol."""
    if not 1 <= value <= maximum:
        raise WireError(field, f"{value}; allowed: 1 to {maximum}")
    return value


def node_name(field: str, value: str) -> str:
    """What a node may be called."""
    if not _NODE_NAME.fullmatch(value):
        raise WireError(
            field, f"{value[:64]!r}; allowed: 1 to {NODE_NAME_BYTES_MAX} of A-Z a-z 0-9 _ . -"
        )
    return value


def address(field: str, value: str) -> str:
    """Of IPv4 or IPv6, as text."""
    text(field, value, ADDRESS_BYTES_MAX, minimum=1)
    if _CONTROL_CHARACTER.search(value):
        raise WireError(field, f"{value!r} has control characters")
    return value


def flags(field: str, value: int) -> SliceFlags:
    """Known flags only."""
    if value & ~_FLAGS_KNOWN or value < 0:
        raise WireError(field, f"{value:#x}; known flags: {_FLAGS_KNOWN:#x}{_NEWER}")
    return SliceFlags(value)


def source(field: str, value: int) -> Source:
    """Known sources only."""
    try:
        return Source(value)
    except ValueError:
        raise WireError(field, f"{value}; allowed: {[int(s) for s in Source]}{_NEWER}") from None


def group(field: str, trigger: str, primary: bytes) -> Group:
    """The group of these two."""
    return Group(trigger_name(f"{field}.trigger", trigger), trace(f"{field}.primary", primary))


def group_in(field: str, message: pb.Group) -> Group:
    """A group that arrived."""
    return group(field, utf8(f"{field}.trigger", message.trigger), message.primary)


def group_out(field: str, of: Group) -> pb.Group:
    """A group that is sent."""
    group(field, of.trigger, of.primary)
    return pb.Group(trigger=of.trigger.encode(), primary=of.primary)


def put_group(field: str, of: Group, out: pb.Group) -> None:
    """A group that is sent, written to where it belongs."""
    group(field, of.trigger, of.primary)
    out.trigger, out.primary = of.trigger.encode(), of.primary


def trigger_name_is_valid(name: str) -> bool:
    """Whether a trigger may be called so: 1 to 31 characters of a-z 0-9 _ . -."""
    return _TRIGGER_NAME.fullmatch(name) is not None


def parse_trace_id(text: str) -> TraceId:
    """Parse the 32 hex digits in which people and W3C headers write a trace id."""
    if not re.fullmatch(r"[0-9a-fA-F]{32}", text):
        raise WireError("trace id", f"{text[:64]!r}; want 32 hex digits")
    return trace("trace id", bytes.fromhex(text))


def unknown(message: pb.NodeMessage | pb.CoordinatorMessage, whose: str) -> Unknown:
    """What has something in it, and nothing that is known."""
    if not message.ByteSize():
        raise WireError("message", f"empty; want one of those that a {whose} sends")
    return Unknown()


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
