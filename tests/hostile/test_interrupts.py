# SPDX-License-Identifier: Apache-2.0
"""tests/hostile/interrupts.py: Ctrl-C finds nothing half done, and is not forgotten."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.hostile.interrupts import uninterrupted


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """As in the program, which takes both alike; in the background Ctrl-C may be ignored."""
    ends = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in ends}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_comes_at_the_end_of_the_block(number: int) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(number)
            done.append("the block")
        done.append("what follows")
    assert done == ["the block"]


def test_afterwards_it_comes_at_once() -> None:
    with uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
