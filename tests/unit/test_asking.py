# SPDX-License-Identifier: Apache-2.0
"""What many threads ask for at a time is made once."""

from __future__ import annotations

import threading

from runtime.asking import Shared


def test_it_is_made_anew_once_it_is_old() -> None:
    now_s = 100.0
    made: list[float] = []

    def make() -> int:
        made.append(now_s)
        return len(made)

    shared = Shared(make, 1.0, lambda: now_s)
    assert [shared.get(), shared.get()] == [1, 1]
    now_s = 100.9
    assert shared.get() == 1
    now_s = 101.0
    assert [shared.get(), shared.get()] == [2, 2]


def test_who_comes_meanwhile_waits_for_it_and_it_counts_from_its_end() -> None:
    now_s = 100.0
    making, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> int:
        made.append(1)
        assert shared._lock.locked()
        making.set()
        assert go_on.wait(60)
        return len(made)

    shared = Shared(make, 1.0, lambda: now_s)
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(shared.get())) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert making.wait(60)
    now_s = 105.0  # it took that long
    go_on.set()
    for thread in threads:
        thread.join()
    assert got == [1] * 5
    assert len(made) == 1
