# SPDX-License-Identifier: Apache-2.0
"""For how long each trace is kept, and which goes first.

By the trigger that it was collected under, as primary or lateral: a group is kept as one. A trigger
without a rule keeps it by its verdict; else as all others. Of several the longest holds, so nothing
is kept for less because another trigger fired for it too.

That is worked out when a trace is closed, and stands in its row. When the rules change, all rows
are gone over, in short transactions beside what is written; until then those that were not reached
go by the rules of before.

Where there is not enough room, that one goes first which has had the largest part of its time: so
all that is kept gets shorter by the same factor, whatever the rules, and nothing that is to be kept
for long takes the place of what was just collected. With one time for all that is the oldest.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.verdicts import VerdictKind

# In one transaction, while the rules have changed.
_GO_OVER_S = 0.01
_KEYS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Keep:
    """For how many seconds what is kept: by patterns of trigger names, by verdicts, and all else.

    A pattern is a name, or the beginning of names with a star behind.
    """

    otherwise_s: float
    by_trigger: dict[str, float] = field(default_factory=dict)
    by_verdict: dict[VerdictKind, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """In a form in which equal rules are equal."""
        return "; ".join((self._of_triggers(), self._of_verdicts(), _whole(self.otherwise_s)))

    def expression(self) -> str:
        """In SQL, of a row of ``traces``: for how many seconds it is kept."""
        verdict = self._of_verdicts()
        rest = _whole(self.otherwise_s)
        if verdict:
            rest = f"CASE traces.verdict {verdict} ELSE {rest} END"
        triggers = self._of_triggers()
        if not triggers:
            return rest
        return (
            f"coalesce((SELECT max(CASE {triggers} ELSE {rest} END) FROM"
            " (SELECT trigger FROM groups WHERE primary_trace = traces.key UNION ALL"
            " SELECT trigger FROM members JOIN groups ON groups.key = group_key"
            " WHERE members.trace = traces.key)"
            f" JOIN trigger_names ON trigger_names.key = trigger), {rest})"
        )

    def _of_triggers(self) -> str:
        """The longest first, so that the first that matches is the longest that does."""
        rules = sorted(self.by_trigger.items(), key=lambda rule: (-rule[1], rule[0]))
        return " ".join(
            f"WHEN name GLOB '{pattern}' THEN {_whole(keep_s)}" for pattern, keep_s in rules
        )

    def _of_verdicts(self) -> str:
        rules = sorted(self.by_verdict.items())
        return " ".join(f"WHEN '{kind}' THEN {_whole(keep_s)}" for kind, keep_s in rules)


def _whole(seconds: float) -> str:
    return str(max(1, int(seconds)))


class Keeping:
    """The rules in force for one store, by its writing connection."""

    def __init__(self, connection: sqlite3.Connection, keep: Keep) -> None:
        self._connection = connection
        self.take_up(keep)

    def take_up(self, keep: Keep) -> None:
        """These are the rules from now on."""
        self.keep = keep
        self.expression = keep.expression()
        before, self._end = self._connection.execute(
            "SELECT kept_by, (SELECT coalesce(max(key), 0) FROM traces) FROM about"
        ).fetchone()
        self._next = 1
        self.is_behind = before != str(keep)
        """Whether there are rows that may go by the rules of before."""

    def go_over(self) -> None:
        """Go over some rows, for a moment; within the caller's transaction. If that fails, begin anew."""
        until_s = time.monotonic() + _GO_OVER_S
        while self._next <= self._end:
            self._connection.execute(
                f"UPDATE traces SET keep_s = {self.expression}"
                f" WHERE key BETWEEN ? AND ? AND released = 1 AND keep_s != {self.expression}",
                (self._next, self._next + _KEYS_AT_ONCE - 1),
            )
            self._next += _KEYS_AT_ONCE
            if time.monotonic() >= until_s:
                return
        # So that who opens the store next need not go over them.
        self._connection.execute("UPDATE about SET kept_by = ?", (str(self.keep),))
        self.is_behind = False

    def too_old(self, now_s: float) -> int | None:
        """The key of a trace whose time is over."""
        for keep_s, key, born_s in self._oldest():
            if now_s - born_s > keep_s:
                return key
        return None

    def first(self, now_s: float) -> int | None:
        """The key of the trace that has had the largest part of its time; None if none may go."""
        ranked = (((now_s - born_s) / keep_s, -key) for keep_s, key, born_s in self._oldest())
        part = max(ranked, default=None)
        return None if part is None else -part[1]

    def _oldest(self) -> Iterator[tuple[float, int, int]]:
        """Of those that are kept for the same time the oldest: that time, its key, when it was born."""
        keep_s = -1
        while True:
            row = self._connection.execute(
                "SELECT keep_s, key, born_s FROM traces INDEXED BY traces_that_may_go"
                " WHERE released = 1 AND pinned = 0 AND keep_s > ?"
                " ORDER BY keep_s, key LIMIT 1",
                (keep_s,),
            ).fetchone()
            if row is None:
                return
            keep_s, key, born_s = row
            # A store of before has no times in its rows yet.
            yield keep_s or self.keep.otherwise_s, key, born_s
