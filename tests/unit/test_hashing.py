# SPDX-License-Identifier: Apache-2.0
"""The hashes against vectors that another program computed, and their use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.hashing import (
    RECORD_ALL,
    Domain,
    Shards,
    TraceHash,
    fmix64,
    fnv1a64,
    jump_consistent_hash,
    node_id,
    percentage_threshold,
)
from protocol.messages import TraceId


@pytest.fixture(scope="module")
def vectors(repository: Path) -> dict[str, list[dict[str, Any]]]:
    with (repository / "tests/data/hash_vectors.json").open(encoding="utf-8") as file:
        loaded: dict[str, list[dict[str, Any]]] = json.load(file)
    return loaded


def trace(text: str) -> TraceId:
    return TraceId(bytes.fromhex(text))


def numbered(n: int) -> TraceId:
    return TraceId(n.to_bytes(16, "big"))


def test_vectors(vectors: dict[str, list[dict[str, Any]]]) -> None:
    for v in vectors["fnv1a64"]:
        assert fnv1a64(v["text"].encode()) == int(v["hash"], 16), v
    for v in vectors["fmix64"]:
        assert fmix64(int(v["in"], 16)) == int(v["out"], 16), v
    for v in vectors["node_id"]:
        assert node_id(v["name"]) == int(v["id"], 16), v
    for v in vectors["trace_hash"]:
        domain = Domain(v["domain"].encode())
        assert TraceHash(domain, int(v["seed"], 16))(trace(v["trace"])) == int(v["hash"], 16), v
    for v in vectors["jump"]:
        assert jump_consistent_hash(int(v["key"], 16), v["buckets"]) == v["bucket"], v
    for v in vectors["shard"]:
        assert Shards(int(v["seed"], 16), v["shards"])(trace(v["trace"])) == v["shard"], v


def test_every_kind_of_vector_is_there(vectors: dict[str, list[dict[str, Any]]]) -> None:
    assert {v["domain"].encode() for v in vectors["trace_hash"]} == {d.value for d in Domain}
    assert all(vectors[kind] for kind in ("fnv1a64", "fmix64", "node_id", "jump", "shard"))


def test_what_is_recorded_is_no_matter_to_its_priority() -> None:
    """Of a tenth of all traces, a tenth is in the lowest tenth of priorities."""
    recorded, priority = TraceHash(Domain.PERCENTAGE, 7), TraceHash(Domain.PRIORITY, 7)
    tenth = percentage_threshold(10)
    kept = [numbered(n) for n in range(1, 20001) if recorded(numbered(n)) < tenth]
    low = sum(priority(t) < tenth for t in kept)
    assert 1800 < len(kept) < 2200
    assert 0.07 < low / len(kept) < 0.13


def test_a_shard_more_moves_only_its_share() -> None:
    ids = [numbered(n) for n in range(1, 4001)]
    before, after = ([Shards(1, n)(t) for t in ids] for n in (9, 10))
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {9}
    assert 0.07 < len(moved) / len(ids) < 0.13


@pytest.mark.parametrize(
    ("percent", "threshold"), [(0, 0), (50, 1 << 63), (100, RECORD_ALL), (25.0, 1 << 62)]
)
def test_percentage_threshold(percent: float, threshold: int) -> None:
    assert percentage_threshold(percent) == threshold


@pytest.mark.parametrize("percent", [-0.1, 100.1, float("nan")])
def test_a_percentage_out_of_range_is_named(percent: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentage_threshold(percent)


def test_no_bucket_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one bucket"):
        jump_consistent_hash(1, 0)
