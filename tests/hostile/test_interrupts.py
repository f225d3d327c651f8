# SPDX-License-Identifier: Apache-2.0
"""tests/hostile/interrupts.py: Ctrl-C finds nothing half done, and is not forgotten."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.hostile.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """As for whoever is started in a terminal; in the background it may be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_comes_at_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("the block")
        done.append("what follows")
    assert done == ["the block"]


def test_afterwards_it_comes_at_once() -> None:
    with uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
