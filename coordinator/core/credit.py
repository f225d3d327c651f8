# SPDX-License-Identifier: Apache-2.0
"""Who may send how many bytes, so that what is not yet durable fits in memory.

    memory_bytes >= undurable bytes + credit that is out

Each Slices stream is kept at a target of credit: the window, or a fair part of
the memory where streams are many. Credit that is out cannot be called back
while its stream lasts, so a stream without news should be closed; what it
held goes to those that wait, first come, first served.
"""

from __future__ import annotations

from collections import OrderedDict

QUANTUM_BYTES = 64 << 10
"""The least that is granted while there is more to want: a message for each
freed kilobyte would cost more than it helps."""


class Credit:
    """The credit of all Slices streams."""

    def __init__(self, memory_bytes: int, window_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._window_bytes = window_bytes
        self._out: dict[int, int] = {}
        self._out_bytes = 0
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._granted: dict[int, int] = {}
        self.undurable_bytes = 0

    def reconfigure(self, memory_bytes: int, window_bytes: int) -> None:
        """Go on with other bounds. What is out over them is not called back, and not renewed."""
        self._memory_bytes = memory_bytes
        self._window_bytes = window_bytes
        for stream in self._out:
            self._want(stream)
        self._serve()

    @property
    def used_bytes(self) -> int:
        return self.undurable_bytes + self._out_bytes

    def open(self, stream: int) -> None:
        """A stream that may send."""
        self._out[stream] = 0
        self.top_up(stream)

    def close(self, stream: int) -> None:
        """The stream is gone, and its credit with it."""
        self._out_bytes -= self._out.pop(stream, 0)
        self._waiting.pop(stream, None)
        self._granted.pop(stream, None)
        self._serve()

    def arrived(self, stream: int, size: int) -> bool:
        """Bytes came on a stream. False: more than it may, and no room for them."""
        out = self._out.get(stream)
        if out is None:
            return False
        excess = max(0, size - out)
        if excess and self.used_bytes + excess > self._memory_bytes:
            return False
        self._out[stream] = max(0, out - size)
        self._out_bytes -= min(out, size)
        self.undurable_bytes += size
        return True

    def free(self, size: int) -> None:
        """Bytes became durable, or were not kept."""
        self.undurable_bytes -= size
        self._serve()

    def top_up(self, stream: int) -> None:
        """Bring a stream back to its target when half of it is used."""
        if stream in self._out:
            self._want(stream)
            self._serve()

    def take_grants(self) -> dict[int, int]:
        """What was granted since the last time, by stream."""
        granted, self._granted = self._granted, {}
        return granted

    def _target(self) -> int:
        fair = self._memory_bytes // (2 * len(self._out))
        return min(self._window_bytes, max(fair, QUANTUM_BYTES))

    def _want(self, stream: int) -> None:
        if self._out[stream] * 2 <= self._target():
            self._waiting.setdefault(stream)

    def _serve(self) -> None:
        while self._waiting:
            stream = next(iter(self._waiting))
            wanted = self._target() - self._out[stream]
            free = self._memory_bytes - self.used_bytes
            if wanted > 0:
                grant = min(wanted, free)
                if grant < min(wanted, QUANTUM_BYTES):
                    return
                self._out[stream] += grant
                self._out_bytes += grant
                self._granted[stream] = self._granted.get(stream, 0) + grant
            del self._waiting[stream]
