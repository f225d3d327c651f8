# SPDX-License-Identifier: Apache-2.0
"""What the coordinator says and writes, until the shell fetches it.

What must not be said before a write is durable waits here with the write's
token, as an *effect*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import field
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True)
class Say:
    """A message, if the session is still there."""

    session: int
    message: TriggerAck | Drop


@dataclass(frozen=True, slots=True)
class BytesDurable:
    """A slice is durable up to ``end``, and ``size`` bytes need no more memory."""

    trace: TraceId
    node: NodeId
    epoch: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A trace is closed for the ``number``-th time: its nodes may forget it.

    ``of_no_use``: of which nodes there are chunks that fit nowhere, with epoch and end.
    """

    trace: TraceId
    nodes: tuple[NodeId, ...]
    number: int
    of_no_use: tuple[tuple[NodeId, int, int], ...] = ()


Effect: TypeAlias = Say | BytesDurable | Closed


@dataclass(slots=True)
class _Asking:
    """A Collect that takes on further traces until it is fetched."""

    group: Group
    traces: dict[TraceId, None] = field(default_factory=dict)


class Outbox:
    """Outputs in the order in which they were decided."""

    def __init__(self) -> None:
        self._control: list[tuple[int, CoordinatorMessage | _Asking]] = []
        self._asking: dict[tuple[int, Group], _Asking] = {}
        self._acks: dict[int, dict[tuple[TraceId, int], int]] = {}
        self._writes: list[Write] = []
        self._effects: deque[tuple[int, Effect]] = deque()
        self._token = 0
        self._durable = 0

    def say(self, session: int, message: CoordinatorMessage) -> None:
        """A message for a session."""
        if isinstance(message, Drop):
            # A later Collect for the group must not slip in before it.
            self._asking.pop((session, message.group), None)
        self._control.append((session, message))

    def collect(self, session: int, group: Group, trace: TraceId) -> None:
        """Ask a session for a trace, together with what else it is asked for the group."""
        asking = self._asking.get((session, group))
        # Nodes that fire one trigger may each name other laterals.
        if asking is None or len(asking.traces) == COLLECT_TRACES_MAX:
            asking = self._asking[session, group] = _Asking(group)
            self._control.append((session, asking))
        asking.traces[trace] = None

    def ack(self, stream: int, trace: TraceId, epoch: int, offset: int) -> None:
        """Tell a Slices stream how far a slice is durable."""
        self._acks.setdefault(stream, {})[trace, epoch] = offset

    def forget_session(self, session: int) -> None:
        """It is gone: nothing more for it."""
        self._control = [said for said in self._control if said[0] != session]
        self._asking = {key: a for key, a in self._asking.items() if key[0] != session}

    def forget_stream(self, stream: int) -> None:
        self._acks.pop(stream, None)

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

    def take_control(self) -> list[tuple[int, CoordinatorMessage]]:
        taken = [
            (
                session,
                Collect(said.group, tuple(said.traces)) if isinstance(said, _Asking) else said,
            )
            for session, said in self._control
        ]
        self._control = []
        self._asking.clear()
        return taken

    def take_replies(self, grants: dict[int, int]) -> list[tuple[int, SliceReply]]:
        """Acks and credit: one reply a stream, or more where one cannot hold all acks."""
        acks, self._acks = self._acks, {}
        replies: list[tuple[int, SliceReply]] = []
        for stream in sorted({*acks, *grants}):
            left = [
                SliceAck(trace, offset, epoch)
                for (trace, epoch), offset in acks.get(stream, {}).items()
            ]
            while len(left) > ACKS_MAX:
                replies.append((stream, SliceReply(tuple(left[:ACKS_MAX]))))
                del left[:ACKS_MAX]
            replies.append((stream, SliceReply(tuple(left), grants.get(stream, 0))))
        return replies

    def take_writes(self) -> list[Write]:
        taken, self._writes = self._writes, []
        return taken
