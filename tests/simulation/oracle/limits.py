# SPDX-License-Identifier: Apache-2.0
"""Whether the firings that a node refuses are those that its limits are for.

What each process and each trigger name has used up stands in a leaky bucket, which is filled by what
is admitted. A firing that finds no room must be refused, and any other must not; but who asks for more
than half of a name's rate may be left with less than all where others fire by that name too.
"""

from __future__ import annotations

from collections import defaultdict

from appliance.core.config import TriggerLimits
from appliance.core.dataplane import NO_CLIENT, LocalTrigger
from appliance.core.limits import Refusal
from appliance.core.node import NodeCore
from tests.simulation.oracle.record import World

OTHERS = 0.75
"""Of a name's burst, at most, what is kept for other processes and other users (limits.py)."""

WAITED_MAX_NS = 10_000_000_000
"""For so long, at most, firings are taken to have waited for a daemon."""

_ROUNDING = 1e-3


class _Used:
    """Tokens that were taken, and come back at a rate."""

    def __init__(self, per_s: float, since_ns: int) -> None:
        self._per_s = per_s
        self._at_ns = since_ns
        self.level = 0.0

    def now(self, now_ns: int, waited_ns: int) -> float:
        """How many are taken now. Of the time in which nobody could, more than all come back."""
        ns = now_ns - self._at_ns
        if ns > 0:
            spared = self._per_s * waited_ns / 1e9
            self.level = max(-spared, self.level - self._per_s * ns / 1e9)
            self._at_ns = now_ns
        return self.level


class Limits:
    """Of one daemon's life."""

    def __init__(self, limits: TriggerLimits) -> None:
        self._limits = limits
        self._processes: dict[int, _Used] = {}
        self._names: dict[str, _Used] = {}
        self._askers: dict[str, set[int]] = defaultdict(set)

    def decided(
        self, fired: LocalTrigger, refusal: Refusal | None, now_ns: int, waited_ns: int
    ) -> None:
        """A node has admitted a firing, or not."""
        limits = self._limits
        waited_ns = min(waited_ns, WAITED_MAX_NS)
        since_ns = now_ns - waited_ns
        tokens = 1 + min(len({*fired.laterals} - {fired.trace}), limits.laterals_max)
        what = f"{fired.trigger} by process {fired.client}, for {tokens} traces, is {refusal}"
        name = self._names.setdefault(fired.trigger, _Used(limits.per_trigger_per_s, since_ns))
        process: _Used | None = None
        if fired.client != NO_CLIENT:
            process = self._processes.setdefault(
                fired.client, _Used(limits.per_process_per_s, since_ns)
            )
            left = limits.per_process_burst - process.now(now_ns, waited_ns)
            if abs(left - 1) > _ROUNDING:
                assert (left < 1) == (refusal is Refusal.PROCESS), f"{what}; it has {left} tokens"
            if refusal is Refusal.PROCESS:
                return
            process.level += 1
        self._askers[fired.trigger].add(fired.client)
        left = limits.per_trigger_burst - name.now(now_ns, waited_ns)
        kept = OTHERS * limits.per_trigger_burst if len(self._askers[fired.trigger]) > 1 else 0
        if left < 1 - _ROUNDING:
            assert refusal is Refusal.TRIGGER, f"{what}; {left} tokens are left"
        elif left > 1 + kept + _ROUNDING:
            assert refusal is None, f"{what}; {left} tokens are left"
        if refusal is None:
            name.level += tokens
            if process is not None:
                process.level += tokens - 1


def watch_limits(world: World, node: str, core: NodeCore) -> None:
    """Look at each firing that a node admits or refuses; what is refused nobody has fired."""
    seen = Limits(core._config.limits)
    firings = core._firings
    admit, on_fired = firings._admission.admit, firings.on_local_trigger
    under_way: list[LocalTrigger] = []

    def on_local_trigger(event: LocalTrigger, now_ns: int, waited_ns: int) -> None:
        under_way.append(event)
        on_fired(event, now_ns, waited_ns)
        under_way.remove(event)

    def admitted(
        client: int, trigger: str, now_ns: int, waited_ns: int = 0, laterals: int = 0
    ) -> Refusal | None:
        refusal = admit(client, trigger, now_ns, waited_ns, laterals)
        (event,) = under_way
        seen.decided(event, refusal, now_ns, waited_ns)
        if refusal is not None:
            world.refused(node, event)
        return refusal

    firings._admission.admit = admitted  # type: ignore[method-assign]
    firings.on_local_trigger = on_local_trigger  # type: ignore[method-assign]
