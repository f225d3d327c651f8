# SPDX-License-Identifier: Apache-2.0
"""The thread that works for the data plane: sleeps on the doorbells, polls, hands on events.

Hardly anything is polled while nothing was triggered: plain runs do not ring, and are
looked for when somebody asks. But what a triggered trace
writes after its trigger does not ring either, so while there are slices the
thread looks by itself: the less soon, the longer nothing came.

Clock pairs are taken when the thread wakes and before a copy, at most once a
second, and by no timer of their own: a record is converted by the pair nearest
to it, and so at worst by half the time that the node slept.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from appliance.core.dataplane import DataPlaneEvent
from appliance.native import EVENTS_AT_ONCE, NativeDataPlane
from runtime.main import die_if_it_fails

# A trace's last spans come within its own duration of the trigger, mostly. So the longer nothing came,
# the less soon something will: a quarter of that time, within bounds. To wake for a poll costs 170 us. The
# first is for a trace that a process has open; where none has, somebody would have to begin anew with
# one: in time for a coordinator, which judges after 200 ms of silence.
_OPEN_WAIT_NS = 20_000_000
_CLOSED_WAIT_NS = 150_000_000
_HELD_WAIT_NS = 1_000_000_000

# A process that touches memory which it was not granted rings no bell either. Some
# milliseconds of work where there are a thousand processes.
_IDLE_WAIT_NS = 5_000_000_000


class Pump:
    """Runs the thread while it is entered; ``on_events`` is called on the event loop.

    So is ``on_done``, when the data plane knows that they are seen to.
    """

    def __init__(
        self,
        dataplane: NativeDataPlane,
        on_events: Callable[[list[DataPlaneEvent]], None],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._dataplane = dataplane
        self._on_events = on_events
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="data plane")
        self._stopping = False
        self._lively_since_ns = -4 * _HELD_WAIT_NS
        self.has_open = True
        """Whether a process has a trace open of which there is a slice."""
        self._held = False
        # Handed to the loop, which has not taken them yet. One after the other
        # they pass through here, so that none is lost or taken twice at the end.
        self._handed: list[DataPlaneEvent] = []
        self._has_more = False
        self._asked: deque[Callable[[], None]] = deque()
        self.polls = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping = True
        self._dataplane.wake()
        self._thread.join()
        # A trigger that has left its process's queue is nowhere else. Collected, it
        # is in the report store, from where the next daemon goes on.
        self._take()
        while events := self._dataplane.events():
            self._on_events(events)
        self._dataplane.events_done()

    @property
    def events_waiting(self) -> int:
        """Events that the event loop was handed and has not seen to."""
        return len(self._handed)

    def give_sign(self, sign: Callable[[], None]) -> None:
        """Have the thread call ``sign`` when it has polled, which it does now if it was asleep."""
        self._asked.append(sign)
        self._dataplane.wake()

    def lively(self, now_ns: int) -> None:
        """Something was triggered, or a slice grew: more may follow soon."""
        waits_ns = self._timeout_ns(now_ns)
        self._lively_since_ns = now_ns
        if waits_ns > _CLOSED_WAIT_NS:
            self._dataplane.wake()

    def _timeout_ns(self, now_ns: int) -> int:
        if not self._held:
            return _IDLE_WAIT_NS
        first_ns = _OPEN_WAIT_NS if self.has_open else _CLOSED_WAIT_NS
        return min(max((now_ns - self._lively_since_ns) // 4, first_ns), _HELD_WAIT_NS)

    def _run(self) -> None:
        while not self._stopping:
            timeout_ns = self._timeout_ns(time.monotonic_ns())
            has_events, self._held = self._dataplane.wait_and_poll(timeout_ns)
            self.polls += 1
            while self._asked:
                self._asked.popleft()()
            # Events wait in the data plane while the loop is behind; what
            # processes want is seen to all the same.
            if not has_events:
                continue
            # Said before the look, so that the loop, which says so before its own, misses none.
            self._has_more = True
            if not self._handed and not self._stopping:
                self._handed = self._dataplane.events()
                self._has_more = len(self._handed) >= EVENTS_AT_ONCE
                # The loop may be closed already when we are told to stop.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._deliver)

    @die_if_it_fails
    def _deliver(self) -> None:
        if self._stopping:
            return
        self._take()
        # They did not find the loop ready.
        if self._has_more:
            self._dataplane.wake()

    def _take(self) -> None:
        if self._handed:
            self._on_events(self._handed)
            self._dataplane.events_done()
            self._handed = []
            self._on_done()
