# SPDX-License-Identifier: Apache-2.0
"""The doorbell of native/src/abi.h, explored completely.

The protocol is written down as two little programs over a memory in which each
party has a store buffer (total store order, as on x86; what C11 calls a release
store may be delayed in it, a fence or a read-modify-write empties it). Every
interleaving of every step, and every moment at which a buffer may drain, is
visited. A wake-up is lost when the node sleeps for ever while work is published
and the client has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest

# Steps: (operation, variable, value). `load` puts what it sees into a register
# named like the variable, `skip_if` jumps over the next n steps.
Step = tuple[str, str, int]

CLIENT: tuple[Step, ...] = (
    ("store", "work", 1),
    ("fence", "", 0),
    ("load", "sleeping", 0),
    ("skip_unless", "sleeping", 2),
    ("add", "rung", 1),
    ("wake", "", 0),
)

NODE: tuple[Step, ...] = (
    ("load", "rung", 0),
    ("store", "sleeping", 1),
    ("fence", "", 0),
    ("load", "work", 0),
    ("skip_if", "work", 1),
    ("futex_wait", "rung", 0),
    ("store", "sleeping", 0),
    ("load", "work", 0),
)

T = TypeVar("T")

VARIABLES = ("work", "sleeping", "rung")


@dataclass(frozen=True)
class State:
    memory: tuple[int, ...] = (0, 0, 0)
    pc: tuple[int, int] = (0, 0)
    buffers: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]] = ((), ())
    registers: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 0, 0), (0, 0, 0))
    asleep: bool = False


def _put(values: tuple[int, ...], name: str, value: int) -> tuple[int, ...]:
    at = VARIABLES.index(name)
    return values[:at] + (value,) + values[at + 1 :]


def _pair(pair: tuple[T, T], party: int, value: T) -> tuple[T, T]:
    return (value, pair[1]) if party == 0 else (pair[0], value)


def _successors(
    state: State, programs: tuple[tuple[Step, ...], tuple[Step, ...]]
) -> Iterator[State]:
    for party in (0, 1):
        buffer = state.buffers[party]
        if buffer:
            (name, value), *rest = buffer
            yield replace(
                state,
                memory=_put(state.memory, name, value),
                buffers=_pair(state.buffers, party, tuple(rest)),
            )
        if party == 1 and state.asleep:
            continue
        pc = state.pc[party]
        if pc == len(programs[party]):
            continue
        operation, name, value = programs[party][pc]
        after = replace(state, pc=_pair(state.pc, party, pc + 1))
        seen = 0
        if name:
            pending = [v for n, v in buffer if n == name]
            seen = pending[-1] if pending else state.memory[VARIABLES.index(name)]
        register = state.registers[party][VARIABLES.index(name)] if name else 0
        if operation == "store":
            yield replace(after, buffers=_pair(state.buffers, party, (*buffer, (name, value))))
        elif operation == "load":
            yield replace(
                after,
                registers=_pair(state.registers, party, _put(state.registers[party], name, seen)),
            )
        elif operation == "fence":
            if not buffer:
                yield after
        elif operation == "add":
            if not buffer:
                yield replace(after, memory=_put(state.memory, name, seen + value))
        elif operation == "wake":
            yield replace(after, asleep=False)
        elif operation == "futex_wait":
            # The kernel compares and sleeps in one step; entering it empties the buffer.
            if not buffer:
                yield replace(after, asleep=seen == register)
        elif operation in ("skip_if", "skip_unless"):
            jump = value if bool(register) == (operation == "skip_if") else 0
            yield replace(state, pc=_pair(state.pc, party, pc + 1 + jump))
        else:
            raise AssertionError(operation)


def _final_states(client: tuple[Step, ...], node: tuple[Step, ...]) -> set[State]:
    seen = {State()}
    todo = [State()]
    final = set()
    while todo:
        state = todo.pop()
        successors = list(_successors(state, (client, node)))
        if not successors:
            final.add(state)
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                todo.append(successor)
    return final


def _lost(final: set[State]) -> list[State]:
    return [state for state in final if state.asleep]


def test_no_wake_up_is_lost() -> None:
    final = _final_states(CLIENT, NODE)
    assert len(final) > 1
    assert _lost(final) == []


def test_the_node_can_sleep_at_all() -> None:
    assert _lost(_final_states((), NODE))


@pytest.mark.parametrize(
    ("client", "node"),
    [
        pytest.param(tuple(s for s in CLIENT if s[0] != "fence"), NODE, id="client without fence"),
        pytest.param(CLIENT, tuple(s for s in NODE if s[0] != "fence"), id="node without fence"),
        pytest.param(CLIENT, (*NODE[:3], *NODE[5:]), id="node does not look once more"),
        pytest.param(CLIENT, (*NODE[1:5], NODE[0], *NODE[5:]), id="node reads rung too late"),
    ],
)
def test_each_step_is_needed(client: tuple[Step, ...], node: tuple[Step, ...]) -> None:
    assert _lost(_final_states(client, node))
