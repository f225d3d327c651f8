# SPDX-License-Identifier: Apache-2.0
"""Whether what fired is what was broken. It knows when what was broken, and nothing of how it is seen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.mishaps.orders import Asked

# What a mishap did to a request it may have done to one that had just ended, by this clock: its
# packets were on their way still, and machine.* fire for those of the last two seconds. So long
# ago may also have ended who wrote last into a connection on which a packet is lost then.
_BEFORE_NS = 2_000_000_000

QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Firing:
    """A trigger that fired, with whom it named."""

    name: str
    node: str
    primary: str
    laterals: frozenset[str]
    why: str
    fired_at_ns: int

    def __str__(self) -> str:
        return f"{self.name} on {self.node} for {self.primary}: {self.why}"


@dataclass(frozen=True, slots=True)
class Seen:
    """What fired, and of which traces something was collected."""

    firings: tuple[Firing, ...]
    collected: frozenset[str]


@dataclass(frozen=True, slots=True)
class Happened:
    """Something was broken from ``begin_ns`` till ``end_ns``; its set-up began at ``set_up_ns``.

    ``victims``: whom it struck; None: whichever order was in flight. ``laterals``: of whom at
    least one is to be named; None: none is looked for, but with ``order_lateral`` another order
    that was in flight. ``others``: traces of ours that are no orders. ``untouched``: requests
    that it could not strike.
    """

    symptom: str
    what: str
    trigger: str
    node: str
    set_up_ns: int
    begin_ns: int
    end_ns: int
    victims: frozenset[str] | None = None
    laterals: frozenset[str] | None = None
    others: frozenset[str] = frozenset()
    untouched: Sequence[Asked] = ()
    order_lateral: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """What came of it. ``fired``: the trigger, or "" if it did not; ``latency_ms``: after how long."""

    symptom: str
    what: str
    fired: str = ""
    node: str = ""
    value: str = ""
    victim: str = ""
    victim_right: bool = False
    lateral_right: bool | None = None
    innocent_triggered: int = 0
    untouched: int = 0
    """Requests that were under way then, and that it could not strike."""
    latency_ms: float | None = None
    laterals: list[str] = field(default_factory=list)
    laterals_collected: int = 0
    """Of how many of them something was collected."""
    innocent: list[str] = field(default_factory=list)
    """Firings of this trigger for traces that it did not strike, or with one of those that it
    could not; when all is quiet, all firings."""
    others: list[str] = field(default_factory=list)
    """Firings of other triggers in the same time, which are not judged."""

    @property
    def is_right(self) -> bool:
        """It fired for whom it struck, named whom it had to name, and fired for no other.

        Of the others there were some.
        """
        if self.symptom == QUIET:
            return not self.innocent_triggered
        return (
            bool(self.fired)
            and self.victim_right
            and self.lateral_right is not False
            and not self.innocent_triggered
            and self.untouched > 0
        )

    def json(self) -> dict[str, Any]:
        return asdict(self)


def in_flight(asked: Iterable[Asked], begin_ns: int, end_ns: int) -> frozenset[str]:
    """Traces of the orders that were under way at any moment of that time, or just before."""
    return frozenset(
        one.trace for one in asked if one.start_ns <= end_ns and one.end_ns >= begin_ns - _BEFORE_NS
    )


def judge_quiet(what: str, firings: Collection[Firing]) -> Row:
    """Nothing was broken: nothing may have fired."""
    return Row(
        QUIET,
        what,
        # Nobody was struck, and nobody is missing.
        victim_right=True,
        innocent_triggered=len(firings),
        innocent=[str(one) for one in firings],
    )


def judge(happened: Happened, asked: Collection[Asked], seen: Seen) -> Row:
    """Compare. ``seen``: until the next thing is broken."""
    of_then = in_flight(asked, happened.begin_ns, happened.end_ns)
    victims = of_then if happened.victims is None else happened.victims
    untouched = frozenset(one.trace for one in happened.untouched)
    since = [one for one in seen.firings if one.fired_at_ns >= happened.set_up_ns]
    # What else fires may be what comes of it, or what happens on a busy machine: it is told of.
    others = [one for one in since if one.name != happened.trigger]
    expected = [one for one in since if one.name == happened.trigger]
    innocent = [
        one
        for one in expected
        if one.primary not in victims | happened.others or one.laterals & untouched
    ]
    there = sorted(
        (
            one
            for one in expected
            if one.node == happened.node and one.fired_at_ns >= happened.begin_ns
        ),
        key=lambda one: one.fired_at_ns,
    )
    row = Row(
        happened.symptom,
        happened.what,
        innocent_triggered=len(innocent),
        untouched=sum(
            one.start_ns <= happened.end_ns and one.end_ns >= happened.begin_ns
            for one in happened.untouched
        ),
        innocent=[str(one) for one in innocent],
        others=[str(one) for one in others],
    )
    if not there:
        return row
    first = next((one for one in there if one.primary in victims), there[0])
    wanted = of_then if happened.order_lateral else happened.laterals
    named = frozenset().union(
        *(one.laterals - {one.primary} for one in there if one.primary in victims)
    )
    return replace(
        row,
        fired=first.name,
        node=first.node,
        value=first.why,
        victim=first.primary,
        victim_right=first.primary in victims & seen.collected,
        lateral_right=None if wanted is None else _are_collected(named & wanted, seen),
        latency_ms=round((first.fired_at_ns - happened.begin_ns) / 1e6, 1),
        laterals=sorted(first.laterals),
        laterals_collected=len(first.laterals & seen.collected),
    )


def _are_collected(right: frozenset[str], seen: Seen) -> bool:
    """There are some, and there is something of each."""
    return bool(right) and right <= seen.collected
