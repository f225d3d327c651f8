# SPDX-License-Identifier: Apache-2.0
"""What probes may cost: what goes first, and what comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probes.budget import Budget, Step, Verdict

S = 1_000_000_000


class Costs:
    """Objects that cost some share of a CPU each, looked at every two seconds.

    Those that are not named are out of the kernel: nothing is said of them, and they come back
    with what they had cost.
    """

    def __init__(self, share_max: float = 0.01) -> None:
        self.budget = Budget(share_max)
        self.now_ns = 0
        self.run_ns: dict[str, int] = {}

    def look(self, **shares: float) -> Verdict:
        self.now_ns += 2 * S
        for name, share in shares.items():
            self.run_ns[name] = self.run_ns.get(name, 0) + int(share * 2 * S)
        return self.budget.look(self.now_ns, {name: self.run_ns[name] for name in shares})


def test_who_keeps_within_it_is_left_alone() -> None:
    costs = Costs()
    steps = [costs.look(waits=0.005, sockets=0.004).step for _ in range(50)]
    assert set(steps) == {None}
    assert costs.look(waits=0.005, sockets=0.004).share == pytest.approx(0.009)


def test_a_moment_over_it_is_nothing() -> None:
    costs = Costs()
    costs.look(waits=0)
    for _ in range(10):
        assert costs.look(waits=0.02).step is None
        assert costs.look(waits=0.002).step is None


def test_thresholds_go_first_and_then_the_costliest() -> None:
    costs = Costs()
    costs.look(waits=0.02, sockets=0.015)
    seen = [costs.look(waits=0.02, sockets=0.015) for _ in range(4)]
    assert [verdict.step for verdict in seen] == [None, Step.RAISE, None, Step.TAKE_OUT]
    assert seen[-1].object == "waits"
    # It costs nothing any more; the other is over the budget by itself.
    seen = [costs.look(sockets=0.015) for _ in range(2)]
    assert (seen[-1].step, seen[-1].object) == (Step.TAKE_OUT, "sockets")


def test_thresholds_come_back_when_it_has_been_quiet_for_a_minute() -> None:
    costs = Costs()
    costs.look(waits=0.02)
    while costs.look(waits=0.02).step is not Step.RAISE:
        pass
    # Just below the budget is not quiet.
    assert {costs.look(waits=0.008).step for _ in range(100)} == {None}
    began_ns = costs.now_ns
    while costs.look(waits=0.001).step is not Step.LOWER:
        pass
    assert 60 * S <= costs.now_ns - began_ns <= 64 * S
    assert costs.look(waits=0.001).step is None


def out_for_s(costs: Costs) -> float:
    """How long the costliest stays out that costs too much each time it is there."""
    while costs.look(waits=0.02).step is not Step.TAKE_OUT:
        pass
    began_ns = costs.now_ns
    while costs.look(sockets=0.001).step is not Step.PUT_BACK:
        pass
    return (costs.now_ns - began_ns) / S


def test_what_is_put_back_has_not_cost_at_once_what_it_had_cost() -> None:
    costs = Costs()
    costs.look(waits=0.02, sockets=0.001)
    while costs.look(waits=0.02, sockets=0.001).step is not Step.TAKE_OUT:
        pass
    while costs.look(sockets=0.001).step is not Step.PUT_BACK:
        pass
    # By bcc it may take a look more.
    seen = [costs.look(sockets=0.001)] + [costs.look(waits=0.001, sockets=0.001) for _ in range(50)]
    assert {verdict.step for verdict in seen} == {None}
    assert max(verdict.share for verdict in seen) == pytest.approx(0.002)


def test_when_all_was_well_for_as_long_it_is_tried_again_as_soon_as_at_first() -> None:
    costs = Costs()
    costs.look(waits=0.02)
    assert [out_for_s(costs) for _ in range(3)] == [600, 1200, 2400]
    began_ns = costs.now_ns
    while costs.now_ns - began_ns < 4800 * S - 8 * S:
        costs.look(waits=0.001)
    # Not as long as it would be taken out for.
    assert out_for_s(costs) == 4800
    began_ns = costs.now_ns
    while costs.now_ns - began_ns < 9600 * S + 8 * S:
        costs.look(waits=0.001)
    assert out_for_s(costs) == 600


def test_what_was_taken_out_is_tried_again_ever_later() -> None:
    costs = Costs()
    costs.look(waits=0.02)
    waited_s = [out_for_s(costs) for _ in range(7)]
    assert waited_s == [600, 1200, 2400, 4800, 9600, 9600, 9600]


def test_it_is_not_tried_again_before_the_others_keep_within_the_budget() -> None:
    costs = Costs()
    costs.look(waits=0.02)
    while costs.look(waits=0.02).step is not Step.TAKE_OUT:
        pass
    for _ in range(3):
        for _ in range(250):
            assert costs.look(sockets=0.001).step in (None, Step.LOWER)
        # Over it, but by raised thresholds it would be within.
        assert [costs.look(sockets=0.02).step for _ in range(2)] == [None, Step.RAISE]
    began_ns = costs.now_ns
    # A moment over it is not typical.
    while (step := costs.look(sockets=0.001).step) is not Step.PUT_BACK:
        assert step in (None, Step.LOWER)
        assert costs.look(sockets=0.02 if costs.now_ns % (20 * S) == 0 else 0.001).step in (
            None,
            Step.LOWER,
        )
    assert 580 * S <= costs.now_ns - began_ns <= 604 * S


@given(st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, 10 * S))))
def test_no_figures_break_it(looks: list[tuple[int, int]]) -> None:
    """Clocks that stand, and counts that begin anew, as of an object that was attached again."""
    budget = Budget(0.01)
    for now_ns, run_ns in looks:
        verdict = budget.look(now_ns, {"waits": run_ns})
        assert verdict.share >= 0
        assert (verdict.step is Step.TAKE_OUT) == (verdict.object == "waits")
