# SPDX-License-Identifier: Apache-2.0
"""Who may send how many bytes, so that what is not yet durable fits in memory.

    memory_bytes >= undurable bytes + credit that is out

Credit that is out cannot be called back while its stream lasts, so it is given for what
a node is known to have, and little of it in advance:

    target = the advance + the least of
             what the node says that it has and has not sent: its demand,
             the step, which begins small and doubles whenever it is used up,
             the window of one stream, and as much as is free for others beside it

The advance is for the first bytes of a slice, of which no status has told yet. All advances
together take a small part of the memory, however many streams are idle. No stream may have
more than is left free, as in shared buffers of switches (dynamic thresholds: Choudhury and
Hahne, IEEE/ACM Transactions on Networking 6 (2), 1998): the more are busy, the less each has,
and who comes new finds something. Where there is nothing, streams wait for each other, first
come, first served.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

QUANTUM_BYTES = 64 << 10
"""The least that is granted while there is more to want: a message for each
freed kilobyte would cost more than it helps. Also the first step."""

ADVANCE_BYTES = 32 << 10
"""Most slices are shorter, and wait for no credit at all; some, for no message with more."""

_SHORT_BYTES = 8 << 10
"""Who sent so much of its advance is told at once. Until then it holds what is durable already."""

_ADVANCES = 16
"""One part in so many of the memory is for advances; some five times that where the last of very
many streams get less than the first."""


@dataclass(slots=True)
class _Stream:
    """``out``: what it may send, of which it was not told of ``untold``.

    ``used``: what it sent of the step. ``patient``: what it is told may come late.
    """

    patient: bool
    out: int = 0
    untold: int = 0
    demand: int = 0
    step: int = QUANTUM_BYTES
    used: int = 0

    @property
    def told(self) -> int:
        """What it knows that it may send."""
        return self.out - self.untold

    @property
    def hurries(self) -> bool:
        """Whether it waits for what it is told."""
        return not self.patient or self.demand > min(self.told, _SHORT_BYTES)


class Credit:
    """The credit of all Slices streams."""

    def __init__(self, memory_bytes: int, window_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._window_bytes = window_bytes
        self._streams: dict[int, _Stream] = {}
        self._out_bytes = 0
        self._waiting: OrderedDict[int, None] = OrderedDict()
        # Streams with untold credit that is new, or wanted: whether that hurries.
        self._news: dict[int, bool] = {}
        self.undurable_bytes = 0

    def reconfigure(self, memory_bytes: int, window_bytes: int) -> None:
        """Go on with other bounds. What is out over them is not called back, and not renewed."""
        self._memory_bytes = memory_bytes
        self._window_bytes = window_bytes
        for stream in self._streams:
            self._want(stream)
        self._serve()

    @property
    def used_bytes(self) -> int:
        return self.undurable_bytes + self._out_bytes

    @property
    def waiting(self) -> int:
        """How many streams would get more if there were more."""
        return len(self._waiting)

    def open(self, stream: int, *, patient: bool = True) -> None:
        """A stream that may send. ``patient``: what it is told may come late."""
        self._streams[stream] = _Stream(patient)
        self.top_up(stream)

    def close(self, stream: int) -> None:
        """The stream is gone, and its credit with it."""
        known = self._streams.pop(stream, None)
        if known is not None:
            self._out_bytes -= known.out
        self._waiting.pop(stream, None)
        self._news.pop(stream, None)
        self._serve()

    def demand(self, stream: int, size: int) -> None:
        """So many bytes are to come on a stream, as far as it is known."""
        known = self._streams.get(stream)
        if known is None or known.demand == size:
            return
        known.demand = size
        if not size:
            known.step, known.used = QUANTUM_BYTES, 0
        self.top_up(stream)
        self._hurry_if_short(stream, known)

    def arrived(self, stream: int, size: int) -> bool:
        """Bytes came on a stream. False: more than it may, and no room for them."""
        known = self._streams.get(stream)
        if known is None:
            return False
        excess = max(0, size - known.out)
        if excess and self.used_bytes + excess > self._memory_bytes:
            return False
        self._out_bytes -= min(known.out, size)
        known.out = max(0, known.out - size)
        self.undurable_bytes += size
        known.used += size
        if known.used >= known.step:
            known.step, known.used = min(2 * known.step, self._window_bytes), 0
        self._hurry_if_short(stream, known)
        return True

    def free(self, size: int) -> None:
        """Bytes became durable, or were not kept."""
        self.undurable_bytes -= size
        self._serve()

    def top_up(self, stream: int) -> None:
        """Bring a stream back to its target when half of it is used."""
        if stream in self._streams:
            self._want(stream)
            self._serve()

    def take_news(self) -> dict[int, bool]:
        """Streams that are to be told of credit, and whether that hurries."""
        news, self._news = self._news, {}
        return news

    def take_grant(self, stream: int) -> int:
        """What a stream is told now that it may send more."""
        known = self._streams.get(stream)
        if known is None:
            return 0
        granted, known.untold = known.untold, 0
        return granted

    def hurries(self, stream: int) -> bool:
        """Whether what a stream is told hurries.

        A node that has much to send may have to give up some of it, and should know what it need
        not: what is durable.
        """
        known = self._streams.get(stream)
        return known is not None and known.hurries

    def _hurry_if_short(self, stream: int, known: _Stream) -> None:
        few = known.told < self._advance() - _SHORT_BYTES
        if known.untold and (few or known.hurries):
            self._news[stream] = True

    def _advance(self) -> int:
        return min(ADVANCE_BYTES, self._memory_bytes // (_ADVANCES * len(self._streams)))

    def _target(self, known: _Stream) -> int:
        advance = self._advance()
        if not known.demand:
            return advance
        free = max(QUANTUM_BYTES, self._memory_bytes - self.used_bytes)
        return advance + min(known.demand, known.step, self._window_bytes, free)

    def _want(self, stream: int) -> None:
        known = self._streams[stream]
        target = self._target(known)
        few = not known.demand and target - known.out >= _SHORT_BYTES
        if known.out < target and (few or known.out * 2 <= target):
            self._waiting.setdefault(stream)

    def _serve(self) -> None:
        while self._waiting:
            stream = next(iter(self._waiting))
            known = self._streams[stream]
            wanted = self._target(known) - known.out
            free = self._memory_bytes - self.used_bytes
            if wanted > 0:
                grant = min(wanted, free)
                if grant < min(wanted, QUANTUM_BYTES):
                    return
                known.out += grant
                self._out_bytes += grant
                known.untold += grant
                self._news.setdefault(stream, False)
                self._hurry_if_short(stream, known)
            del self._waiting[stream]
