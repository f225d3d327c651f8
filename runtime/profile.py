# SPDX-License-Identifier: Apache-2.0
"""Where a daemon's event loop spends its time, on demand: SIGUSR2.

A thread looks a hundred times a second at what the loop's thread is in the middle of, for ten
seconds, and writes that down as collapsed stacks: a line for each, its functions from the
outermost on with semicolons between, and how often it was met. Flame graphs are made of that
(flamegraph.pl, speedscope, Perfetto). Where the loop waits is in it, as a call of the
selector. What C code does while it holds the interpreter is met when that lets go: it counts
for the Python function that called it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from runtime.log import Log

_SAMPLES = 1000

# On average: each wait is another one, so that nothing that happens at regular times is met always,
# or never.
_EVERY_S = 0.01

# What recurses deeper is cut at its outer end; what takes more ways than this is counted as one.
_FRAMES_MAX = 128
_STACKS_MAX = 10_000
_OTHERS = "(others)"


def _stack_of(frame: FrameType | None) -> str:
    """The functions of a stack, outermost first."""
    names: list[str] = []
    while frame is not None and len(names) < _FRAMES_MAX:
        names.append(f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return ";".join(reversed(names))


class Profiler:
    """Takes profiles of the thread that made it, one at a time, into one file: the last one."""

    def __init__(
        self, path: Path, log: Log, samples: int = _SAMPLES, every_s: float = _EVERY_S
    ) -> None:
        """A file of a name like ``path``'s is there while it is written."""
        self._path = path
        self._log = log
        self._samples = samples
        self._every_s = every_s
        self._of = threading.get_ident()
        self._running: threading.Thread | None = None
        self._is_taken = False
        self._ending = threading.Event()

    def begin(self) -> None:
        """Take one from now on, unless one is taken already."""
        if self._is_taken:
            self._log.warning("SIGUSR2: a profile is being taken already; asked for in vain")
            return
        self._log.info(
            f"SIGUSR2: takes a profile of the event loop, for {self._samples * self._every_s:g} s"
        )
        self._is_taken = True
        self._running = threading.Thread(target=self._run, name="profile", daemon=True)
        self._running.start()

    def end(self) -> None:
        """Give up one that is being taken; waits for its thread, which looks at once."""
        self._ending.set()
        if self._running is not None:
            self._running.join()

    def _run(self) -> None:
        # An error of a thread ends a daemon, which this is not worth.
        try:
            stacks = self._sampled()
            if self._ending.is_set():
                return
            self._write(stacks)
        except Exception as error:  # noqa: BLE001 - whatever it is, the daemon goes on
            self._is_taken = False
            self._log.error(f"{self._path}: the profile cannot be written: {error}")
        else:
            self._is_taken = False  # before anybody hears that it is there
            self._log.info(f"the profile is in {self._path}: collapsed stacks, for a flame graph")

    def _sampled(self) -> Counter[str]:
        stacks: Counter[str] = Counter()
        for _ in range(self._samples):
            if self._ending.wait(random.uniform(0, 2 * self._every_s)):
                break
            stack = _stack_of(sys._current_frames().get(self._of))
            if stack not in stacks and len(stacks) >= _STACKS_MAX:
                stack = _OTHERS
            stacks[stack] += 1
        return stacks

    def _write(self, stacks: Counter[str]) -> None:
        """For the daemon's user only: names of functions tell what runs."""
        new = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.writelines(f"{stack} {count}\n" for stack, count in stacks.most_common())
        new.replace(self._path)
