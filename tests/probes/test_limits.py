# SPDX-License-Identifier: Apache-2.0
"""bpf/fire.h: a trace fires once for the same, each CPU so often, and into a queue that has room.

What does not fire is counted, and stands in the trace all the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.probes.machine import Machine, kernel_spans, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

# What is fired for is recorded too, so each event is counted twice.
LOCK_WAIT = {"fire_ms": 30, "record_ms": 30}

CPUS = os.cpu_count() or 1

TIMES = 5  # suffer.c

QUEUE_CELLS = 256  # BS_TRIGGER_CELLS of abi/context.h

# More than all that happens.
UNLIMITED = {"per_s": 1e6, "burst": 1e6}


@contextlib.contextmanager
def limited(tmp_path: Path, build: Path, loader: str, probes: dict[str, Any]) -> Iterator[Machine]:
    """A machine whose node takes all that is fired."""
    takes = {
        f"per_{what}_{limit}": 1e6
        for what in ("process", "trigger")
        for limit in ("per_s", "burst")
    }
    with machine(tmp_path, build, loader, probes, triggers=takes) as made:
        yield made


def test_a_trace_fires_once_for_the_same(tmp_path: Path, build: Path, loader: str) -> None:
    probes = {"lock_wait": LOCK_WAIT, "coalesce_s": 3600, **UNLIMITED}
    with limited(tmp_path, build, loader, probes) as here:
        with here.suffers("lock_wait_again") as it:
            shown = here.shown(it.victim)
            trigger_of(shown, "kernel.lock_wait")
        outcomes = here.outcomes("kernel.lock_wait")
        # On a busy machine one of the two may come late, and wait less or more than the other.
        waits = kernel_spans(shown, "lock_wait")
        assert 1 < len(waits) <= outcomes["recorded"]
        assert outcomes["coalesced"] >= len(waits) - 1
        assert 1 <= outcomes["fired"] <= 2
        here.await_own("kernel.lock_wait", outcomes["fired"])
        assert outcomes["fired"] + outcomes["coalesced"] == outcomes["recorded"]
        assert outcomes["record_lost"] == outcomes["limited"] == outcomes["queue_full"] == 0


def test_a_cpu_fires_no_more_than_it_may(tmp_path: Path, build: Path, loader: str) -> None:
    probes = {"lock_wait": LOCK_WAIT, "coalesce_s": 0, "per_s": 0.001, "burst": 1}
    with limited(tmp_path, build, loader, probes) as here:
        here.probes.await_watched(0)
        with here.sufferer("lock_wait") as program:
            here.probes.await_watched(1)
            suffered = [program.suffer() for _ in range(CPUS + TIMES)]
        outcomes = here.outcomes("kernel.lock_wait")
        assert 1 <= outcomes["fired"] <= CPUS
        here.await_own("kernel.lock_wait", outcomes["fired"])
        assert outcomes["fired"] + outcomes["limited"] == outcomes["recorded"] >= len(suffered)
        assert outcomes["record_lost"] == outcomes["coalesced"] == outcomes["queue_full"] == 0


def test_what_finds_no_room_is_counted_and_what_does_arrives(
    tmp_path: Path, build: Path, loader: str
) -> None:
    """The node, which empties the queue, is stopped meanwhile."""
    never = {"fire_ms": None, "record_ms": None}
    blocked = {"fire_ms": 1, "record_ms": 1}
    probes = {"blocked": blocked, "lock_wait": never, "run_queue": never, **UNLIMITED}
    with limited(tmp_path, build, loader, probes) as here:
        here.probes.await_watched(0)
        with here.sufferer("many") as program:
            here.probes.await_watched(1)
            os.kill(here.node.daemon_pid(), signal.SIGSTOP)
            try:
                program.suffer()
            finally:
                os.kill(here.node.daemon_pid(), signal.SIGCONT)
            outcomes = here.outcomes("kernel.blocked")
            assert outcomes["queue_full"] > 0
            assert outcomes["fired"] >= QUEUE_CELLS
            assert outcomes["fired"] + outcomes["queue_full"] == outcomes["recorded"]
            assert outcomes["record_lost"] == outcomes["coalesced"] == outcomes["limited"] == 0
            status = here.node.control.status()
            assert status["dataplane"]["triggers_lost"] == outcomes["queue_full"]
            here.await_own("kernel.blocked", outcomes["fired"])
