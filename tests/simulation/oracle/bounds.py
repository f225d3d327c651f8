# SPDX-License-Identifier: Apache-2.0
"""What anything may hold: at every step, and when all is over."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.core.config import NodeConfig
from appliance.core.node import NodeCore
from coordinator.core.coordinator import CoordinatorCore


def check_node(core: NodeCore) -> None:
    """Within the bounds that its configuration states."""
    config, holdings = core._config, core._holdings
    most = config.triggered_max
    # One that fires or is asked for may be one too many until the next look.
    assert len(holdings.groups) <= most, f"{len(holdings.groups)} groups"
    for owed in (link.owed for link in core.links):
        for kept in (owed._abandoned, owed._firings_due, owed._abandonments_due, owed._answers):
            assert len(kept) <= most, f"{len(kept)} things are owed"
        assert len(owed._statuses_due) <= len(holdings.traces)
        assert len(owed._statuses_later) <= len(holdings.traces)
    assert len(core.queues) <= config.trigger_names_max + 1
    assert len(core.counters.triggers) <= config.trigger_names_max + 1
    for trace in holdings.traces.values():
        assert 0 < len(trace.groups) <= config.groups_per_trace_max
        assert {share.shard for share in trace.shares} == {g.shard for g in trace.groups}
        for share in trace.shares:
            assert 0 <= trace.trimmed <= share.acked <= share.sent <= trace.bytes


def check_coordinator(core: CoordinatorCore) -> None:
    """Within the bounds that its configuration states."""
    config, memory = core._config, core._memory
    assert core.memory_bytes <= config.memory_bytes, f"{core.memory_bytes} bytes"
    assert memory.stored_bytes <= config.assembly_bytes_max, f"{memory.stored_bytes} bytes"
    assert len(core._traces) <= config.traces_max, f"{len(core._traces)} traces"
    assert len(core._lifecycle.closed) <= 2 * config.closed_max
    assert len(core._traversal.abandoned) <= config.closed_max
    assert len(core._nodes.by_id) <= config.nodes_max


@dataclass(slots=True)
class Rate:
    """A leaky bucket: what flows in beyond the rate stands in it."""

    per_s: float
    level: float = 0.0
    at_ns: int = 0

    def add(self, size: int, now_ns: int) -> float:
        """So much more; what stands in it now."""
        self.level = max(0.0, self.level - (now_ns - self.at_ns) * self.per_s / 1e9) + size
        self.at_ns = now_ns
        return self.level


class ReportRates:
    """What a node sends: in all, and of each trigger that has a limit of its own."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._all = Rate(config.report_bytes_per_s or 0)
        self._by_trigger = {
            name: Rate(policy.report_bytes_per_s)
            for name, policy in config.policies.items()
            if policy.report_bytes_per_s is not None
        }

    def add(self, trigger: str, size: int, now_ns: int) -> None:
        """So many bytes are sent: no more than the rate, a burst, and what began when it might."""
        rates = [] if self._config.report_bytes_per_s is None else [self._all]
        if trigger in self._by_trigger:
            rates.append(self._by_trigger[trigger])
        most = self._config.report_burst_bytes + self._config.chunk_bytes
        for rate in rates:
            over = rate.add(size, now_ns) - most
            assert over <= 1, f"{over} bytes of {trigger} more than {rate.per_s} a second"


_BUILT_IN = (dict, OrderedDict, list, set, deque, Counter)
_OURS = ("appliance.core", "coordinator.core", "counting")


def containers(core: object) -> Iterator[tuple[str, int]]:
    """Everything in a core that can grow, by where it stands, and how much is in it."""
    met: set[int] = set()
    look: list[tuple[str, object]] = [("", core)]
    while look:
        path, thing = look.pop()
        if id(thing) in met:
            continue
        met.add(id(thing))
        if isinstance(thing, tuple):
            look += [(f"{path}[]", value) for value in thing]
        elif isinstance(thing, _BUILT_IN):
            yield path, len(thing)
            values = thing.values() if isinstance(thing, dict) else thing
            look += [(f"{path}[]", value) for value in values]
        elif type(thing).__module__.startswith(_OURS) and not isinstance(thing, enum.Enum):
            names = [*getattr(thing, "__dict__", ())]
            for each in type(thing).__mro__:
                slots = each.__dict__.get("__slots__", ())
                names += [slots] if isinstance(slots, str) else slots
            look += [
                (f"{path}.{name}", getattr(thing, name, None)) for name in dict.fromkeys(names)
            ]


REMEMBERED = (
    # Of the coordinator: what closed traces and groups were, and who there is.
    "_firings._lifecycle.closed",
    "_firings._lifecycle._traversal.abandoned",
    "_firings._traversal.abandoned",
    "_firings._snapshots.",
    "_probe_timers",
    # Of a node: what was given up, and who fires.
    "links[].owed._abandoned",
    "_firings._holdings._names",
    "_firings._holdings.reporter._queues",
    "_firings._holdings.reporter._clocks",
    "_firings._admission",
    # Of both: what they count, by bounded names.
    "_firings._counters",
    "_firings._lifecycle.traversal_s",
    "_firings._lifecycle.verdict_s",
    "_firings._memory._total",
    "_firings._names",
    "_firings._holdings.counters",
)
"""What a core may still hold when nothing is under way."""

REMEMBERED_ITSELF = ("links[].snapshots._runs",)
"""The same; but not what is in it."""


def held_at_rest(core: object) -> Counter[str]:
    """What is in a core of all that it must let go of when nothing is under way."""
    found: Counter[str] = Counter()
    for path, size in containers(core):
        where = path.removeprefix(".")
        if where.startswith(REMEMBERED) or where in REMEMBERED_ITSELF or "._config." in path:
            continue
        found[path] += size
    return +found
