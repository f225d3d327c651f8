# SPDX-License-Identifier: Apache-2.0
"""Threads that make something of traces once these are judged: the index, exports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from coordinator.store.reader import StoreReader


class Followed(Protocol):
    """A store, as its followers see it. ``id``: which one it is."""

    id: str

    def follow(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, in any thread, when there may be news of a trace that is judged, or closed."""

    def followed(self, who: str, number: int) -> None:
        """A follower needs no changes up to this number any more."""


@dataclass(frozen=True, slots=True)
class NewsWithin:
    """Work again when there are news, or after so many seconds, whatever comes first."""

    seconds: float


class Follower:
    """A thread that works as long as there is work, and sleeps until the store has news.

    ``work`` is called with a reader of its own. It returns in how many seconds it
    shall be called again: 0 at once, None when there are news; or NewsWithin. Runs while entered;
    ``ending`` is set when it shall end, and whoever works waits for nothing else then.
    """

    def __init__(
        self,
        name: str,
        store: Followed,
        path: Path,
        work: Callable[[StoreReader], float | NewsWithin | None],
    ) -> None:
        self.ending = threading.Event()
        self._news = threading.Event()
        self._woken = threading.Event()
        self._path = path
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name)
        store.follow(self._news.set)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ending.set()
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        """Call ``work`` now, whatever it waits for."""
        self._woken.set()
        self._news.set()

    def _run(self) -> None:
        with StoreReader(self._path) as reader:
            while True:
                # Before all that is looked at: what changes after that wakes again.
                self._news.clear()
                self._woken.clear()
                if self.ending.is_set():
                    return
                again_s = self._work(reader)
                if isinstance(again_s, NewsWithin):
                    self._news.wait(again_s.seconds)
                elif again_s is None:
                    self._news.wait()
                elif again_s > 0:
                    self._woken.wait(again_s)
