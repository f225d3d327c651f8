# SPDX-License-Identifier: Apache-2.0
"""Kinds of hostile processes, and which of them attack when."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ATTACKER = (
    Path(__file__).resolve().parents[2] / "build" / "native" / "tests" / "hostile" / "attacker"
)

# Users that no file belongs to. Strangers may not attach.
HONEST, HOSTILE, STRANGER = 64801, 64802, 64803


@dataclass(frozen=True, slots=True)
class Attack:
    """A kind of hostile process (native/tests/hostile/attacker.c), and whose it is."""

    name: str
    uid: int = HOSTILE

    @property
    def label(self) -> str:
        return self.name if self.uid == HOSTILE else f"{self.name}-of-strangers"


GROUPS: Mapping[str, Sequence[Attack]] = {
    "scribbling over all mappings": (Attack("scribble"), Attack("scribble-channel")),
    "lies in directories and headers": (Attack("directories"), Attack("directories")),
    "lies of grants, handles, losses, counters": (
        Attack("grants"),
        Attack("handles"),
        Attack("losses"),
        Attack("context"),
    ),
    "floods of wrong triggers": (
        Attack("triggers"),
        Attack("triggers"),
        Attack("namesake"),
        Attack("bulk"),
        Attack("laterals"),
    ),
    "memory beyond the grants, leftovers of the dead": (
        Attack("touch"),
        Attack("leftovers"),
        Attack("attach"),
    ),
    "attach floods": (
        *(
            Attack(name, uid)
            for name in ("silent", "garbage", "storm")
            for uid in (HOSTILE, STRANGER)
        ),
        Attack("chatter"),
    ),
    "thousands of open handles, a pool washed": (Attack("open-handles"), Attack("wash")),
}
ALL = tuple(dict.fromkeys(attack for group in GROUPS.values() for attack in group))

# Attacks at once on each node, where kinds are mixed.
_MIXED = 6


@dataclass(frozen=True, slots=True)
class Phase:
    """Some attacks on both nodes, for some time."""

    what: str
    attacks: Sequence[Attack]
    seconds: float


def phases(duration_s: float, chance: random.Random, only: Sequence[str] = ()) -> Iterator[Phase]:
    """Each group by itself, then mixtures, then all at once. ``only``: these attacks all the time."""
    if only:
        chosen = [attack for attack in ALL if attack.label in only]
        yield Phase(", ".join(only), chosen, duration_s)
        return
    count = max(len(GROUPS) + 2, round(duration_s / 15))
    seconds = duration_s / count
    for what, group in GROUPS.items():
        yield Phase(what, group, seconds)
    for _ in range(count - len(GROUPS) - 1):
        mixed = chance.sample(ALL, _MIXED)
        yield Phase(", ".join(attack.label for attack in mixed), mixed, seconds)
    yield Phase("all at once", ALL, seconds)
