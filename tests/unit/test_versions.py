# SPDX-License-Identifier: Apache-2.0
"""Two sides find the version that both speak, or say which of them is too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.coordinator import CoordinatorConfig, CoordinatorCore
from protocol.messages import Hello, Refused, Unknown, Welcome
from protocol.versions import (
    BEFORE_WINDOWS,
    OURS,
    Agreed,
    Feature,
    Incompatible,
    Versions,
    agree,
    check,
)

windows = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 15)).map(
    lambda said: Versions(min(said[:2]), max(said[:2]), Feature(said[2]))
)


@given(windows, windows)
def test_the_newest_is_spoken_that_both_know_and_else_the_older_side_is_named(
    node: Versions, coordinator: Versions
) -> None:
    common = {
        version
        for version in range(node.oldest, node.newest + 1)
        if coordinator.oldest <= version <= coordinator.newest
    }
    if common:
        agreed = agree(node, coordinator)
        assert agreed.protocol == max(common) == min(node.newest, coordinator.newest)
        assert agreed.features == node.features & coordinator.features
        assert check(agreed, node) == agreed
        # What only the coordinator claims is not used.
        assert check(Agreed(agreed.protocol, Feature(31)), node).features == node.features
        return
    older = "node" if node.newest < coordinator.oldest else "coordinator"
    with pytest.raises(Incompatible, match=f"update the {older}$"):
        agree(node, coordinator)
    with pytest.raises(Incompatible, match=f"update the {older}$"):
        check(Agreed(coordinator.newest), node)


def test_ours_is_a_window() -> None:
    assert 1 <= OURS.oldest <= OURS.newest


def test_what_was_spoken_before_there_were_windows_is_refused_on_both_sides() -> None:
    """Hashes and the format of records were others, under the number of 4."""
    old = Versions(BEFORE_WINDOWS, BEFORE_WINDOWS)
    with pytest.raises(Incompatible, match=f"protocol 4, the coordinator {OURS}: update the node"):
        agree(old, OURS)
    with pytest.raises(Incompatible, match=r"protocol 4, this node .*: update the coordinator"):
        check(Agreed(BEFORE_WINDOWS), OURS)


def core(versions: Versions) -> CoordinatorCore:
    return CoordinatorCore(CoordinatorConfig(), 7, (), (), 0, versions)


@pytest.mark.parametrize(
    ("said", "protocol"),
    [(Versions(4, 4), 4), (Versions(4, 5), 5), (Versions(5, 9), 6), (Versions(1, 4), 4)],
)
def test_a_coordinator_tells_what_is_spoken(said: Versions, protocol: int) -> None:
    here = core(Versions(4, 6, Feature(6)))
    said = Versions(said.oldest, said.newest, Feature(3))
    assert here.on_node_connected(1, Hello("n", 1, (), said), "10.0.0.7:1", 0) is None
    agreed = Agreed(protocol, Feature(2))
    ((session, said_first),) = here.take_control(0)
    assert (session, said_first[0]) == (1, Welcome(7, agreed))
    (view,) = here.nodes(0)
    assert view.agreed == agreed
    here.on_node_message(1, Unknown(), 0, 0)
    assert here.counters.messages_unknown == 1
    here.on_node_lost(1, 0)
    (view,) = here.nodes(0)
    assert view.agreed is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            Versions(1, 3),
            "the node speaks protocol 1 to 3, the coordinator 4 to 6: update the node",
        ),
        (Versions(3, 3), "the node speaks protocol 3, the coordinator 4 to 6: update the node"),
        (
            Versions(7, 8),
            "the node speaks protocol 7 to 8, the coordinator 4 to 6: update the coordinator",
        ),
    ],
)
def test_a_node_with_no_version_in_common_is_refused_and_leaves_no_trace(
    said: Versions, why: str
) -> None:
    here = core(Versions(4, 6))
    refused = Refused(f"node 'n' at 10.0.0.7 is refused: {why}")
    assert here.on_node_connected(1, Hello("n", 1, (), said), "10.0.0.7:1", 0) == refused
    assert here.take_control(0) == [(1, [refused])]
    assert here.counters.hellos_refused == 1
    assert here.nodes(0) == []
