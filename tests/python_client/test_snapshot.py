# SPDX-License-Identifier: Apache-2.0
"""Which traces a node takes into a snapshot, and in what order."""

from __future__ import annotations

from protocol.hashing import Domain, TraceHash
from protocol.messages import TraceId
from tests.python_client.conftest import CLUSTER_SEED, Node
from tests.python_client.programs import MANY, trace_id


def test_a_snapshot_takes_the_traces_of_the_highest_priority(node: Node) -> None:
    """In the order of the cluster's hash, so that all nodes take the same ones.

    Python computes the hash again; the shared vectors hold it to the truth.
    """
    result = node.run("many_traces")
    assert result["records_lost"] == 0
    priority = TraceHash(Domain.PRIORITY, CLUSTER_SEED)
    traces = [TraceId(bytes.fromhex(trace_id(number))) for number in range(1, MANY + 1)]
    in_order = sorted(traces, key=priority, reverse=True)
    assert node.recent(MANY + 1) == (MANY, in_order)
    found, highest = node.recent(50)
    assert highest == in_order[:50]
    # Of more than are asked for the number is an estimate: of 50 it is right to 1 in 7.
    assert MANY / 2 < found < MANY * 2
    assert node.recent(1)[1] == in_order[:1]
    # And by the coordinator's seed, as soon as that is known.
    node.rank_by(CLUSTER_SEED + 1)
    again = sorted(traces, key=TraceHash(Domain.PRIORITY, CLUSTER_SEED + 1), reverse=True)
    assert node.recent(MANY + 1) == (MANY, again)
