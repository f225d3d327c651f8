# SPDX-License-Identifier: Apache-2.0
"""Bytes to messages and back, with every bound of ``backsight.proto`` checked on the way.

What arrives is untrusted: a peer may be broken, of another version, or hostile.
Whatever is malformed raises WireError, which names the field and says what is
allowed; nothing else is raised, and nothing out of bounds reaches a core. The
same checks guard the way out, so that a node never sends what its coordinator
must refuse.
"""

from __future__ import annotations

from protocol.wire.check import (
    ADDRESS_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    INTEGER_MAX,
    MESSAGE_BYTES_MAX,
    REASON_BYTES_MAX,
    WireError,
    parse,
    parse_trace_id,
    trigger_name_is_valid,
)
from protocol.wire.coordinator import decode_coordinator_batch, encode_coordinator_batch
from protocol.wire.node import decode_node_batch, encode_node_batch
from protocol.wire.slices import (
    Opening,
    Zstd,
    decode_slice_reply,
    decode_slices_message,
    encode_chunks,
    encode_opening,
    encode_slice_reply,
)

__all__ = [
    "ADDRESS_BYTES_MAX",
    "BATCH_MESSAGES_MAX",
    "INTEGER_MAX",
    "MESSAGE_BYTES_MAX",
    "REASON_BYTES_MAX",
    "Opening",
    "WireError",
    "Zstd",
    "decode_coordinator_batch",
    "decode_node_batch",
    "decode_slice_reply",
    "decode_slices_message",
    "encode_chunks",
    "encode_coordinator_batch",
    "encode_node_batch",
    "encode_opening",
    "encode_slice_reply",
    "parse",
    "parse_trace_id",
    "trigger_name_is_valid",
]
