# SPDX-License-Identifier: Apache-2.0
"""What a coordinator's core counts of its memory, reckoned anew."""

from __future__ import annotations

from collections import Counter

from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.groups import GroupState


def check_charges(core: CoordinatorCore) -> None:
    """All that is in memory is charged to somebody, once, and within the bounds."""
    memory, config = core._memory, core._config
    states: dict[int, GroupState] = {}
    for trace in core._traces.values():
        state = trace.charged_to
        assert state is not None, "a trace that nobody pays for"
        assert trace.charged_items == trace.items, "a trace has grown unnoticed"
        assert not trace.groups or state is trace.groups[state.group]
        states[id(state)] = state
        for group, joined in trace.groups.items():
            assert core._traversal.groups[group] is joined
            assert joined.traces[trace.id] is trace
            states[id(joined)] = joined
    total, nodes, processes = [0, 0, 0], Counter[object](), Counter[object]()
    for state in states.values():
        charged = [trace for trace in state.traces.values() if trace.charged_to is state]
        cost = [
            len(charged),
            sum(trace.items for trace in charged),
            sum(trace.stored_bytes for trace in charged),
        ]
        assert (state.charged, state.cost) == (len(charged), cost)
        assert state.unsettled == sum(not trace.is_settled for trace in state.traces.values())
        assert state.pending == sum(
            not (trace.is_released or (trace.is_settled and not trace.may_heal))
            for trace in state.traces.values()
        )
        for measure, value in enumerate(cost):
            total[measure] += value
            nodes[state.owner.node, measure] += value
            processes[state.owner, measure] += value
        process = (
            memory._nodes[state.owner.node].processes[state.owner.process] if charged else None
        )
        if process is not None:
            assert (state in list(process.settled.backwards())) == (state.unsettled == 0)
            assert (state in list(process.unsettled.backwards())) == (state.unsettled > 0)
    assert memory._total == total
    for node_id, node in memory._nodes.items():
        assert node.cost == [nodes[node_id, measure] for measure in range(3)]
        for number, known in node.processes.items():
            assert known.cost == [processes[(node_id, number), measure] for measure in range(3)]
    assert len(core._traversal.groups) == len({id(s) for s in states.values() if s.group.trigger})
    bounds = [config.traces_max, config.evidence_max, config.assembly_bytes_max]
    assert all(value <= bound for value, bound in zip(total, bounds, strict=True))
