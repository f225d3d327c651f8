# SPDX-License-Identifier: Apache-2.0
"""Which version of the protocol a node and its coordinator speak, and with which features.

The policy, and when which of both changes: ARCHITECTURE.md, "Versions".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Feature(enum.IntFlag):
    """What one side may use only if the other one knows it too. Bits of newer peers stay as they are."""

    NONE = 0
    POLICY = 1
    """The coordinator says what nodes record: Policy."""
    POLICY_RULES = 2
    """And which operations: Policy.rules, said only with it. No node makes anything of them yet."""
    CHUNK_LISTS = 4
    """A message of a Slices stream may carry several chunks: SliceChunk.further."""
    ZSTD = 8
    """Chunks may be compressed by Zstandard, and are stored so: SliceChunk.zstd."""
    STATUS = 16
    """The coordinator may ask how the node is: StatusQuestion."""
    LATE_ACKS = 32
    """TriggerAck may wait for seconds, and SliceReply while the node has little to send."""
    CONTROL_CHUNKS = 64
    """Small chunks may come on the Control stream, with what is said of them: NodeMessage.slice_chunk."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What one side can speak: these versions, and the one or the other feature."""

    oldest: int
    newest: int
    features: Feature = Feature.NONE

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


@dataclass(frozen=True, slots=True)
class Agreed:
    """What both sides speak on one connection."""

    protocol: int
    features: Feature = Feature.NONE


class Incompatible(ValueError):
    """The two sides have no version in common. The message says which one is to be updated."""


OURS = Versions(
    oldest=5,
    newest=5,
    features=Feature.POLICY
    | Feature.CHUNK_LISTS
    | Feature.ZSTD
    | Feature.STATUS
    | Feature.LATE_ACKS
    | Feature.CONTROL_CHUNKS,
)

BEFORE_WINDOWS = 4
"""The version of peers that say no window, but only this number. Nobody speaks it any more."""


def agree(node: Versions, coordinator: Versions) -> Agreed:
    """What both speak: the older of both newest versions, and the features of both."""
    protocol = min(node.newest, coordinator.newest)
    if protocol < max(node.oldest, coordinator.oldest):
        older = "node" if node.newest < coordinator.newest else "coordinator"
        raise Incompatible(
            f"the node speaks protocol {node}, the coordinator {coordinator}: update the {older}"
        )
    return Agreed(protocol, node.features & coordinator.features)


def check(agreed: Agreed, node: Versions) -> Agreed:
    """What a coordinator names as agreed, with no feature that its node does not know.

    Incompatible if the node cannot speak that.
    """
    if not node.oldest <= agreed.protocol <= node.newest:
        older = "node" if agreed.protocol > node.newest else "coordinator"
        raise Incompatible(
            f"the coordinator speaks protocol {agreed.protocol}, this node {node}:"
            f" update the {older}"
        )
    return Agreed(agreed.protocol, agreed.features & node.features)
