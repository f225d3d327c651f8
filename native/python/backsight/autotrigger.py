# SPDX-License-Identifier: Apache-2.0
"""Rules that decide, where the request runs, that its trace is worth collecting."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field

_log = logging.getLogger("backsight")


@dataclass(slots=True)
class _Window:
    """The latest durations, in the order of their arrival and in that of their size."""

    arrived: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)


class LatencyTrigger:
    """Says which durations stand out from the latest ones of the same operation.

    The streaming latency rule of tests/checker/README.md, to the bit: with at
    least ``warmup`` durations in the operation's window, one fires if and only
    if ``duration_ns * 1000 > factor_permille * quantile``, where the quantile
    is the nearest-rank one of the window; then it enters the window, which
    keeps the latest ``window`` durations. Integers all through, so that
    anyone who recomputes the rule comes to the same traces.

        slow = LatencyTrigger(quantile_permille=990, warmup=50, window=500, factor_permille=2000)
        ...
        if slow.observe(end_ns - start_ns, "GET /cart"):
            trace.trigger("latency", f"{end_ns - start_ns} ns")

    An observation costs O(log window) comparisons and the shift of a list of
    ``window`` pointers: about a microsecond up to a window of 1000. Threads
    may share one object; their observations take effect one after the other.
    One in the middle of another in the same thread (a signal handler's, a
    finalizer's) is left out, and does not fire.
    A process that was forked starts with empty windows.

    Parameters: ``quantile_permille`` 1..1000; ``warmup`` 1..``window``;
    ``window`` and ``factor_permille`` 1 or more; ``operations_max``, how many
    operations are told apart: one more takes the place of the one that was
    seen last the longest ago, so that names made up from requests can neither
    eat the memory nor blind the rule. Those forgotten are counted in
    ``operations_forgotten``, and the first is told in the log: where they go on,
    names have values in them, and each new one has to warm up. ValueError for other values.
    """

    def __init__(
        self,
        *,
        quantile_permille: int,
        warmup: int,
        window: int,
        factor_permille: int,
        operations_max: int = 1024,  # a service has tens; 1024 windows of 500 take 25 MB
    ) -> None:
        for name, value, high in (
            ("quantile_permille", quantile_permille, 1000),
            ("window", window, None),
            ("warmup", warmup, window),
            ("factor_permille", factor_permille, None),
            ("operations_max", operations_max, None),
        ):
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, not {value!r}")
            if value < 1 or (high is not None and value > high):
                allowed = "1 or more" if high is None else f"1 to {high}"
                raise ValueError(f"{name} is {value}, want {allowed}")
        self._quantile_permille = quantile_permille
        self._warmup = warmup
        self._window = window
        self._factor_permille = factor_permille
        self._operations_max = operations_max
        self._reset()
        # A lock that another thread held at the fork would stay held for ever.
        own = weakref.ref(self)

        def reset_in_child() -> None:
            if (trigger := own()) is not None:
                trigger._reset()

        os.register_at_fork(after_in_child=reset_in_child)

    def _reset(self) -> None:
        # Finalizers and signal handlers may observe while their own thread holds it.
        self._lock = threading.RLock()
        self._at_work = False
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self.operations_forgotten = 0

    def observe(self, duration_ns: int, operation: str = "") -> bool:
        """Whether this duration fires; takes it into the operation's window."""
        forgotten: str | None = None
        with self._lock:
            if self._at_work:
                return False
            self._at_work = True
            try:
                window = self._windows.get(operation)
                if window is None:
                    if len(self._windows) >= self._operations_max:
                        forgotten, _ = self._windows.popitem(last=False)
                        self.operations_forgotten += 1
                        if self.operations_forgotten > 1:
                            forgotten = None
                    window = self._windows[operation] = _Window()
                else:
                    self._windows.move_to_end(operation)
                ordered = window.ordered
                count = len(ordered)
                fires = False
                if count >= self._warmup:
                    rank = -(-self._quantile_permille * count // 1000)
                    fires = duration_ns * 1000 > self._factor_permille * ordered[rank - 1]
                window.arrived.append(duration_ns)
                insort(ordered, duration_ns)
                if count == self._window:
                    del ordered[bisect_left(ordered, window.arrived.popleft())]
            finally:
                self._at_work = False
        if forgotten is not None:
            # Without the lock: a handler may wait for a thread that observes.
            _log.warning(
                "latency: more than %d operations, %.80r was not seen for the longest time and is"
                " forgotten; such names may have values in them (said once)",
                self._operations_max,
                forgotten,
            )
        return fires
