# SPDX-License-Identifier: Apache-2.0
"""The hashes on which nodes and coordinators agree without talking.

The same as ``native/src/hash.h``, which says why there are three domains;
``tests/data/hash_vectors.json`` holds both to the same values.
"""

from __future__ import annotations

import enum

from protocol.messages import NodeId, TraceId

_MASK = (1 << 64) - 1
_FNV_BASIS = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3

RECORD_ALL = _MASK
"""The percentage threshold that means: no trace is left out."""


class Domain(enum.Enum):
    """What a hash of a trace id is for; independent of the other two."""

    PERCENTAGE = b"percentage"
    PRIORITY = b"priority"
    SHARD = b"shard"


def fnv1a64(data: bytes, state: int = _FNV_BASIS) -> int:
    """FNV-1a, 64 bits, going on from a state."""
    for byte in data:
        state = (state ^ byte) * _FNV_PRIME & _MASK
    return state


def fmix64(k: int) -> int:
    """The finaliser of MurmurHash3."""
    k = (k ^ k >> 33) * 0xFF51AFD7ED558CCD & _MASK
    k = (k ^ k >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return k ^ k >> 33


class TraceHash:
    """One of the three hashes of trace ids, in a cluster."""

    def __init__(self, domain: Domain, cluster_seed: int) -> None:
        self._prepared = fnv1a64(cluster_seed.to_bytes(8, "little"), fnv1a64(domain.value))

    def __call__(self, trace: TraceId) -> int:
        """64 bits, uniform over trace ids however they were made."""
        first, second = int.from_bytes(trace[:8], "big"), int.from_bytes(trace[8:], "big")
        return fmix64(fmix64(self._prepared ^ first) ^ second)


def node_id(name: str) -> NodeId:
    """The id of a node, as breadcrumbs carry it."""
    return NodeId(fnv1a64(name.encode()))


def address_id(address: str) -> NodeId:
    """What a breadcrumb to a node's IP address carries: no node's id, since no name has an ``@``."""
    return NodeId(fnv1a64(b"@" + address.encode()))


def percentage_threshold(percent: float) -> int:
    """The threshold below which a trace's percentage hash means: record it.

    ValueError outside 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"trace percentage {percent} is not between 0 and 100")
    return RECORD_ALL if percent == 100 else int(percent / 100 * (1 << 64))


def percentage_of(threshold: int) -> float:
    """The percentage that a threshold stands for, for people."""
    return 100.0 if threshold == RECORD_ALL else threshold / (1 << 64) * 100


def jump_consistent_hash(key: int, buckets: int) -> int:
    """A bucket in 0..buckets-1, of which few change with their number.

    Lamping and Veach, "A fast, minimal memory, consistent hash algorithm"
    (2014). The quotient is of doubles, as in their C++, so that every
    implementation rounds alike.
    """
    if buckets < 1:
        raise ValueError(f"jump_consistent_hash needs at least one bucket, not {buckets}")
    bucket, candidate = -1, 0
    while candidate < buckets:
        bucket = candidate
        key = (key * 2862933555777941757 + 1) & _MASK
        candidate = int((bucket + 1) * (float(1 << 31) / float((key >> 33) + 1)))
    return bucket


class Shards:
    """The coordinator, of so many, to which a trace goes."""

    def __init__(self, cluster_seed: int, count: int) -> None:
        self._hash = TraceHash(Domain.SHARD, cluster_seed)
        self._count = count

    def __call__(self, trace: TraceId) -> int:
        # With one, as clusters have it, nothing is to be paid for that.
        return jump_consistent_hash(self._hash(trace), self._count) if self._count > 1 else 0
