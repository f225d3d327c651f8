# SPDX-License-Identifier: Apache-2.0
"""Timers against the obvious implementation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.timers import Timers

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("set", "earlier", "cancel", "pop")),
        st.integers(0, 5),
        st.integers(0, 100),
    ),
    max_size=300,
)


@given(STEPS)
def test_timers_are_a_table_of_due_times(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    table: dict[int, int] = {}
    for step, key, time_ns in steps:
        match step:
            case "set":
                timers.set(key, time_ns)
                table[key] = time_ns
            case "earlier":
                timers.set_earlier(key, time_ns)
                table[key] = min(time_ns, table.get(key, time_ns))
            case "cancel":
                timers.cancel(key)
                table.pop(key, None)
            case _:
                popped = timers.pop(time_ns)
                first_ns = min(table.values(), default=time_ns + 1)
                if first_ns > time_ns:
                    assert popped is None
                else:
                    assert popped is not None
                    assert table.pop(popped) == first_ns
        assert timers.next_ns() == min(table.values(), default=None)


def test_equal_times_come_in_the_order_in_which_they_were_set() -> None:
    timers: Timers[str] = Timers()
    for key in "cab":
        timers.set(key, 1)
    assert [timers.pop(1) for _ in range(4)] == ["c", "a", "b", None]


def test_superseded_times_do_not_pile_up() -> None:
    timers: Timers[int] = Timers()
    for time_ns in range(10_000):
        timers.set(1, time_ns)
    assert len(timers._heap) < 100
    assert timers.pop(10_000) == 1
