# SPDX-License-Identifier: Apache-2.0
"""What the coordinator says and writes, until the shell fetches it.

What must not be said before a write is durable waits here with the write's
token, as an *effect*.

What nobody waits for (acknowledgements, releases, credit beside what a node still has) waits for
what else its node is told, and for ``patience_ns`` at the longest: a message of its own costs both
sides more than it says. Messages of one session stay in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import field
from typing import TypeAlias

from coordinator.core.credit import Credit
from coordinator.core.records import Record, Write
from protocol.messages import (
    ACKS_MAX,
    COLLECT_TRACES_MAX,
    Collect,
    CoordinatorMessage,
    Drop,
    Group,
    NodeId,
    SliceAck,
    SliceReply,
    TraceId,
    TriggerAck,
)
from protocol.values import dataclass

WAITING_MAX = 256
"""So much for one node waits no longer."""


@dataclass(frozen=True, slots=True)
class Say:
    """A message, if the session is still there. ``late``: it may wait, if the node knows that."""

    session: int
    message: TriggerAck | Drop
    late: bool = False


@dataclass(frozen=True, slots=True)
class BytesDurable:
    """A node may forget a slice up to ``end``, unless that is wanted by now.

    ``durable``: of this very slice that much is in the store; less than ``end`` where nobody wanted
    what came. ``size`` bytes need no more memory.
    """

    trace: TraceId
    node: NodeId
    epoch: int
    end: int
    durable: int
    size: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A trace is closed for the ``number``-th time: its nodes may forget it.

    ``of_no_use``: of which nodes there are chunks that fit nowhere, with epoch and end.
    """

    trace: TraceId
    number: int
    of_no_use: tuple[tuple[NodeId, int, int], ...] = ()


Effect: TypeAlias = Say | BytesDurable | Closed


@dataclass(slots=True)
class _Asking:
    """A Collect that takes on further traces until it is fetched."""

    group: Group
    traces: dict[TraceId, None] = field(default_factory=dict)


class _Due:
    """Who is told something: at once, or by a time."""

    def __init__(self, patience_ns: int) -> None:
        self.patience_ns = patience_ns
        self._now: dict[int, None] = {}
        self._new: dict[int, None] = {}
        self._later: dict[int, int] = {}  # who waits longest first

    def add(self, number: int, *, hurried: bool) -> None:
        """There is something for a session or stream."""
        if hurried:
            self.forget(number)
            self._now[number] = None
        elif number not in self._now and number not in self._later:
            self._new[number] = None

    def forget(self, number: int) -> None:
        self._now.pop(number, None)
        self._new.pop(number, None)
        self._later.pop(number, None)

    def take(self, now_ns: int) -> list[int]:
        """Whose time has come."""
        for number in self._new:
            self._later[number] = now_ns + self.patience_ns
        self._new.clear()
        taken = list(self._now)
        self._now.clear()
        while self._later:
            number, due_ns = next(iter(self._later.items()))
            if due_ns > now_ns:
                break
            del self._later[number]
            taken.append(number)
        return taken

    def next_ns(self) -> int | None:
        """When the next one's time comes, of those that take() has seen."""
        return next(iter(self._later.values()), None)


class Outbox:
    """Outputs in the order in which they were decided."""

    def __init__(self, patience_ns: int = 0) -> None:
        self._control: dict[int, list[CoordinatorMessage | _Asking]] = {}
        self._control_due = _Due(patience_ns)
        self._asking: dict[tuple[int, Group], _Asking] = {}
        self._acks: dict[int, dict[tuple[TraceId, int], SliceAck]] = {}
        self._replies_due = _Due(patience_ns)
        self._writes: list[Write] = []
        self._effects: deque[tuple[int, Effect]] = deque()
        self._token = 0
        self._durable = 0

    def reconfigure(self, patience_ns: int) -> None:
        """Have what comes from now on wait so long."""
        self._control_due.patience_ns = self._replies_due.patience_ns = patience_ns

    def say(self, session: int, message: CoordinatorMessage, *, hurried: bool = True) -> None:
        """A message for a session."""
        if isinstance(message, Drop):
            # A later Collect for the group must not slip in before it.
            self._asking.pop((session, message.group), None)
        self._say(session, message, hurried=hurried)

    def _say(self, session: int, message: CoordinatorMessage | _Asking, *, hurried: bool) -> None:
        said = self._control.setdefault(session, [])
        said.append(message)
        self._control_due.add(session, hurried=hurried or len(said) >= WAITING_MAX)

    def collect(self, session: int, group: Group, trace: TraceId) -> None:
        """Ask a session for a trace, together with what else it is asked for the group."""
        asking = self._asking.get((session, group))
        # Nodes that fire one trigger may each name other laterals.
        if asking is None or len(asking.traces) == COLLECT_TRACES_MAX:
            asking = self._asking[session, group] = _Asking(group)
            self._say(session, asking, hurried=True)
        asking.traces[trace] = None

    def ack(
        self,
        stream: int,
        trace: TraceId,
        epoch: int,
        offset: int,
        *,
        hurried: bool = False,
        again: bool = False,
    ) -> None:
        """Tell a Slices stream how far a slice is durable.

        ``hurried``: its node waits for that. ``again``: it is to send what is beyond again.
        """
        acks = self._acks.setdefault(stream, {})
        before = acks.get((trace, epoch))
        if before is not None:
            # Both hold.
            offset, again = max(offset, before.offset), again or before.again
        acks[trace, epoch] = SliceAck(trace, offset, epoch, again)
        hurried = hurried or again
        self._replies_due.add(stream, hurried=hurried or len(acks) >= WAITING_MAX)

    def forget_session(self, session: int) -> None:
        """It is gone: nothing more for it."""
        self._control.pop(session, None)
        self._control_due.forget(session)
        self._asking = {key: a for key, a in self._asking.items() if key[0] != session}

    def forget_stream(self, stream: int) -> None:
        self._acks.pop(stream, None)
        self._replies_due.forget(stream)

    def write(self, record: Record, effect: Effect | None = None) -> None:
        """Write a record; the effect follows when it is durable."""
        self._token += 1
        self._writes.append(Write(self._token, record))
        if effect is not None:
            self._effects.append((self._token, effect))

    def after_writes(self, effect: Effect) -> None:
        """The effect follows when all that was written so far is durable."""
        self._effects.append((self._token, effect))

    @property
    def waiting_effects(self) -> int:
        return len(self._effects)

    @property
    def has_settled(self) -> bool:
        """Whether settle() has anything to give."""
        return bool(self._effects) and self._effects[0][0] <= self._durable

    def settle(self) -> Iterator[Effect]:
        """The effects of what is durable, in order."""
        while self._effects and self._effects[0][0] <= self._durable:
            yield self._effects.popleft()[1]

    def durable(self, token: int) -> None:
        """All up to the token is durable. ValueError for one never written."""
        if token > self._token:
            raise ValueError(f"token {token} was never written; the last one is {self._token}")
        self._durable = max(self._durable, token)

    def take_control(self, now_ns: int) -> list[tuple[int, list[CoordinatorMessage]]]:
        """What sessions are told now."""
        # Whoever is asked for something is told so at once.
        self._asking.clear()
        return [
            (
                session,
                [
                    Collect(said.group, tuple(said.traces)) if isinstance(said, _Asking) else said
                    for said in self._control.pop(session)
                ],
            )
            for session in self._control_due.take(now_ns)
        ]

    def take_replies(self, credit: Credit, now_ns: int) -> list[tuple[int, SliceReply]]:
        """Acks and credit: one reply a stream, or more where one cannot hold all acks."""
        for stream, hurried in credit.take_news().items():
            self._replies_due.add(stream, hurried=hurried)
        replies: list[tuple[int, SliceReply]] = []
        for stream in self._replies_due.take(now_ns):
            left = [*self._acks.pop(stream, {}).values()]
            while len(left) > ACKS_MAX:
                replies.append((stream, SliceReply(tuple(left[:ACKS_MAX]))))
                del left[:ACKS_MAX]
            replies.append((stream, SliceReply(tuple(left), credit.take_grant(stream))))
        return replies

    def next_ns(self) -> int | None:
        """When something is due that waits."""
        times = (self._control_due.next_ns(), self._replies_due.next_ns())
        return min((time for time in times if time is not None), default=None)

    def take_writes(self) -> list[Write]:
        taken, self._writes = self._writes, []
        return taken
