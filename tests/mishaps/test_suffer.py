# SPDX-License-Identifier: Apache-2.0
"""How long ``make demo-probes`` leaves a thing broken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.mishaps.__main__ import suffer
from tests.mishaps.judge import Firing, Seen
from tests.mishaps.mishaps import Mishap, Struck
from tests.mishaps.orders import Asked
from tests.mishaps.site import Site

TRIGGER = "kernel.run_queue"
NODE = "node-3"


class Fires(Site):
    """A site where it fires for one trace after the other, each time somebody looks."""

    def __init__(self, *traces: str) -> None:
        super().__init__()
        self.left = list(traces)
        self.began_ns = 100
        self.firings = [self.firing("an order of before", self.began_ns - 1)]
        self.is_broken = False

    def firing(self, trace: str, at_ns: int) -> Firing:
        return Firing(TRIGGER, NODE, trace, frozenset(), "waited", at_ns)

    def fired(self, _service: str, _trigger: str) -> int:
        if self.is_broken and self.left:
            trace = self.left.pop(0)
            self.firings.append(self.firing(trace, self.began_ns + 1))
            self.asked.append(Asked(1, trace, self.began_ns, self.began_ns + 2, 200))
        return len(self.firings)

    def seen(self) -> Seen:
        return Seen(tuple(self.firings), frozenset(one.primary for one in self.firings))

    def settle(self) -> None:
        """It is at rest."""

    def await_orders(self, _count: int) -> None:
        """They are over."""

    @contextlib.contextmanager
    def breaks(self, others: frozenset[str]) -> Iterator[Struck]:
        self.is_broken = True
        yield Struck(self.began_ns, others=others)
        self.is_broken = False


def whom_it_took(site: Fires, others: frozenset[str]) -> list[str]:
    mishap = Mishap("hog", "hogs", TRIGGER, "stock", lambda _: site.breaks(others))
    assert mishap.node == NODE
    suffer(site, mishap)
    return [one.trace for one in site.asked]


def test_a_thing_is_broken_until_it_fires() -> None:
    assert whom_it_took(Fires("an order", "another"), frozenset()) == ["an order"]


def test_who_does_harm_is_not_all_that_is_harmed() -> None:
    hogs = frozenset({"hog", "other hog"})
    site = Fires("hog", "other hog", "an order", "another")
    assert whom_it_took(site, hogs) == ["hog", "other hog", "an order"]
