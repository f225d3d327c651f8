# SPDX-License-Identifier: Apache-2.0
"""The coordinator's part of a snapshot."""

from __future__ import annotations

import dataclasses

from protocol.messages import SNAPSHOT_TRIGGER, Snapshot, SnapshotStatus
from tests.unit.coordinator_harness import Harness, S

ORDER = Snapshot(0x1234, SNAPSHOT_TRIGGER, 30 * S, "shop", 1001)


def orders(harness: Harness) -> dict[str, Snapshot]:
    return {name: m for name, m in harness.take_said() if isinstance(m, Snapshot)}


def test_each_node_that_is_connected_is_asked_for_its_share() -> None:
    harness = Harness()
    for name in ("a", "b", "gone"):
        harness.connect(name)
    harness.lose("gone")
    state = harness.core.snapshots.start(ORDER)
    harness.fetch()
    wanted = Snapshot(0x1234, "snapshot.00001234", 30 * S, "shop", 500)
    assert orders(harness) == {"a": wanted, "b": wanted}
    assert (state.done, state.ended) == (0, False)
    harness.say("a", SnapshotStatus(0x1234, 10, 4, 300, done=False))
    harness.say("a", SnapshotStatus(0x1234, 10, 7, 500, done=True))
    harness.say("b", SnapshotStatus(0x9999, 1, 1, 1, done=True))  # of no snapshot
    assert (state.done, state.ended) == (1, False)
    harness.say("b", SnapshotStatus(0x1234, 5, 5, 100, done=True))
    assert (state.done, state.ended) == (2, True)
    assert [state.total(name) for name in ("found", "fired", "bytes")] == [15, 12, 600]
    harness.fetch()
    assert not orders(harness)


def test_when_all_together_have_enough_the_others_end() -> None:
    harness = Harness()
    for name in ("a", "b", "c"):
        harness.connect(name)
    harness.core.snapshots.start(ORDER)
    harness.fetch()
    assert {name: order.bytes_max for name, order in orders(harness).items()} == {
        "a": 333, "b": 333, "c": 333,
    }  # fmt: skip
    harness.say("c", SnapshotStatus(0x1234, 9, 9, 10, done=True))
    harness.say("a", SnapshotStatus(0x1234, 9, 1, 100, done=False))
    harness.fetch()
    assert not orders(harness)
    # It holds what a triggered, too.
    harness.say("b", SnapshotStatus(0x1234, 9, 0, 900, done=False))
    harness.fetch()
    ended = Snapshot(0x1234, "snapshot.00001234", 30 * S, "shop", 0)
    assert orders(harness) == {"a": ended, "b": ended}


def test_one_that_nobody_remembers_has_ended() -> None:
    harness = Harness()
    harness.connect("a")
    states = [
        harness.core.snapshots.start(dataclasses.replace(ORDER, number=number))
        for number in range(17)
    ]
    assert [state.ended for state in states] == [True, *[False] * 16]
    assert list(states[0].lost.values()) == ["a"]


def test_a_node_that_leaves_is_named_until_it_is_back() -> None:
    harness = Harness()
    harness.connect("a")
    harness.connect("b")
    state = harness.core.snapshots.start(ORDER)
    harness.say("b", SnapshotStatus(0x1234, 5, 5, 100, done=True))
    harness.lose("a")
    harness.lose("b")
    assert list(state.lost.values()) == ["a"]
    assert state.ended
    harness.connect("a")
    harness.say("a", SnapshotStatus(0x1234, 5, 1, 10, done=False))
    assert not state.lost
    assert not state.ended


def test_nobody_is_connected() -> None:
    assert Harness().core.snapshots.start(ORDER).ended
