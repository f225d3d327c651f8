# SPDX-License-Identifier: Apache-2.0
"""Under what conditions a schedule runs, beside its plan: each with dice of its own.

A schedule has some of them, most have none or one. What is drawn here changes nothing of the plan,
so a seed that failed fails also when there is another condition for others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.core.config import TriggerLimits, TriggerPolicy
from coordinator.core.config import CoordinatorConfig
from coordinator.core.policy import policy_of
from protocol.hashing import RECORD_ALL
from protocol.messages import NO_POLICY
from tests.simulation.network import MS, NOBODYS, S
from tests.simulation.oracle.snapshots import ALL_BYTES

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

PROBABLE = 0.12
SCARCE = 0.04
"""How probable each condition is, by itself: and those under which less can be foretold."""

REFUSED = 0.2
"""Of calls, where any are refused, or get no answer."""

WEIGHTS = {
    "ta": TriggerPolicy(weight=4.0),
    "tb": TriggerPolicy(weight=0.5, report_bytes_per_s=50_000),
    "tc": TriggerPolicy(weight=1.0),
}


def drawn(seed: int, config: CoordinatorConfig) -> tuple[Conditions, CoordinatorConfig]:
    """Those of one seed, and how the coordinator is configured by them."""
    conditions = Conditions(random.Random(f"conditions {seed}"), seed)
    return conditions, conditions.configured(config)


class Conditions:
    """See the module."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        self._rng = rng
        names = [
            name
            for name in _ALL
            if rng.random() < (SCARCE if name.startswith("little ") else PROBABLE)
        ]
        self._calls = random.Random(rng.getrandbits(64))
        # Those that came later, each with dice of its own, so that others stay as they were.
        self._later = {name: random.Random(f"{name} {seed}") for name in _LATER}
        names += [name for name, dice in self._later.items() if dice.random() < PROBABLE]
        self.names = frozenset(names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def configured(self, config: CoordinatorConfig) -> CoordinatorConfig:
        rng = self._rng
        config = replace(config, priority_seed=rng.choice((0, rng.getrandbits(64) or 1)))
        if "small credit" in self:
            window_bytes = rng.choice((4 << 10, 32 << 10))
            config = replace(config, memory_bytes=1 << 20, credit_window_bytes=window_bytes)
        if "little memory" in self:
            config = replace(config, traces_max=rng.randint(3, 12))
        if "little evidence" in self:
            config = replace(config, evidence_max=rng.randint(150, 1000))
        if "few closed" in self:
            # What is not durable is remembered for twice as many; a schedule has 25 traces or so.
            config = replace(config, closed_max=rng.randint(10, 15))
        return config

    @property
    def limits(self) -> TriggerLimits:
        """How often triggers may fire: without limits, oftener than they do."""
        if "limits" not in self:
            return TriggerLimits(1000, 1000, 1000, 1000)
        dice = self._later["limits"]
        process, trigger = dice.choice(((1, 0), (0, 1), (1, 1)))
        return TriggerLimits(
            per_process_per_s=dice.choice((0.3, 1)) if process else 1000,
            per_process_burst=dice.choice((1, 3)) if process else 1000,
            per_trigger_per_s=dice.choice((0.5, 2)) if trigger else 1000,
            per_trigger_burst=dice.choice((1, 2.5, 6)) if trigger else 1000,
        )

    def refused_at(self, sim: Simulator) -> str:
        """The address of a call that is refused; empty: it is not."""
        if "refusals" not in self or self._calls.random() > REFUSED:
            return ""
        addresses = [address for node in sim.nodes.values() for address in node.addresses]
        return self._calls.choice([*addresses, NOBODYS])

    def unheard_at(self, sim: Simulator) -> tuple[str, bool]:
        """The address of a call that gets no answer, and whether somebody gets it; empty: there is one."""
        dice = self._later["timeouts"]
        if "timeouts" not in self or dice.random() > REFUSED:
            return "", False
        addresses = [address for node in sim.nodes.values() for address in node.addresses]
        address = dice.choice([*addresses, NOBODYS])
        return address, address == NOBODYS and dice.random() < 0.5

    def apply(self, sim: Simulator, busy_s: float) -> None:
        """To a world whose nodes are there."""
        for name in sorted(self.names - set(_LATER)):
            _ALL[name](sim, self._rng, busy_s)
        for name in sorted(self.names & set(_LATER)):
            _LATER[name](sim, self._later[name], busy_s)


def _any_time(sim: Simulator, rng: random.Random, busy_s: float, act: Callable[[], None]) -> None:
    sim.scheduler.after(int(rng.uniform(0, busy_s) * S), act)


def _duplicates(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    for node in sim.nodes.values():
        node.duplicate = rng.random() < 0.7


def _overtaking(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    for node in sim.nodes.values():
        node.link.stream_delay_ns[rng.choice(("control", "slices"))] = rng.choice(
            (20 * MS, 300 * MS)
        )


def _pauses(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    for _ in range(rng.randint(1, 3)):
        for_ns = rng.choice((50 * MS, 700 * MS, 3 * S))
        node = rng.choice([*sim.nodes.values(), None])
        if node is None:
            _any_time(sim, rng, busy_s, lambda ns=for_ns: sim.coordinator.pause(ns))  # type: ignore[misc]
        else:
            _any_time(sim, rng, busy_s, lambda n=node, ns=for_ns: n.pause(ns))  # type: ignore[misc]


def _drift(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    for node in sim.nodes.values():
        node.drift_ppm = rng.randint(-200, 200)


def _busy_coordinator(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    sim.coordinator.message_ns = rng.choice((MS // 50, MS // 5, MS))
    sim.coordinator.kib_ns = rng.choice((0, MS // 100, MS // 10))


def _bad_disk(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    for _ in range(rng.randint(1, 2)):
        for_ns = rng.choice((300 * MS, 2 * S, 5 * S))
        _any_time(sim, rng, busy_s, lambda ns=for_ns: sim.coordinator.stop_disk(ns))  # type: ignore[misc]


def _configured(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    """By how its daemons are configured."""


_ALL: dict[str, Callable[[Simulator, random.Random, float], None]] = {
    "duplicates": _duplicates,
    "overtaking": _overtaking,
    "pauses": _pauses,
    "drift": _drift,
    "busy coordinator": _busy_coordinator,
    "bad disk": _bad_disk,
    "small credit": _configured,
    "little memory": _configured,
    "little evidence": _configured,
    "few closed": _configured,
    "weights": _configured,
    "refusals": _configured,
}


def _snapshots(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    for number in range(rng.randint(1, 2)):
        bytes_max = rng.choice((1, 20_000, ALL_BYTES))
        _any_time(
            sim,
            rng,
            busy_s,
            lambda n=number, most=bytes_max: sim.coordinator.take_snapshot(n, most),  # type: ignore[misc]
        )


def _percentage(sim: Simulator, rng: random.Random, busy_s: float) -> None:
    threshold = rng.choice((1 << 63, 3 << 62, RECORD_ALL))
    for node in sim.nodes.values():
        node.percentage_threshold, node.obeys = threshold, True
        # As it was when the first process came.
        node.pool.state.percentage_threshold = threshold
    for _ in range(rng.randint(1, 3)):
        said = rng.choice((None, 1 << 62, 3 << 62, RECORD_ALL))
        policy = NO_POLICY if said is None else policy_of(said)
        _any_time(sim, rng, busy_s, lambda p=policy: sim.coordinator.set_policy(p))  # type: ignore[misc]


_LATER: dict[str, Callable[[Simulator, random.Random, float], None]] = {
    "limits": _configured,
    "snapshots": _snapshots,
    "percentage": _percentage,
    "timeouts": _configured,
}
