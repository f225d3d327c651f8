# SPDX-License-Identifier: Apache-2.0
"""bpf/sockets.bpf.c: a callee is found by its address, where the application says nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.probes import Probes
from testbed.topology import Coordinator, Network, Node, started
from tests.probes.machine import Machine
from tests.probes.test_tcp import Pair

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]


def collected(
    tmp_path: Path, build: Path, probes: dict[str, Any], cause: str = "call", how: str = "records"
) -> dict[str, Any]:
    """A trace of two hosts that talk to each other, and of which the one that is watched fires."""
    with Network("crumbs") as network:
        hub, alpha, beta = (network.host(name) for name in ("hub", "alpha", "beta"))
        coordinator = Coordinator(hub, tmp_path)
        caller = Node(alpha, "alpha", tmp_path, coordinator, {"probes": probes})
        callee = Node(beta, "beta", tmp_path, coordinator)
        watching = Probes(caller)
        here = Machine(coordinator, caller, watching, build / "tests/suffer", tmp_path)
        pair = Pair(here, alpha, beta)
        with (
            started([coordinator, caller, callee]),
            watching,
            pair.talk(cause, how, callee.client_environment("callee")) as said,
        ):
            return here.shown(said["victim"])


def test_a_hop_that_nobody_tells_of_is_found(tmp_path: Path, build: Path, loader: str) -> None:
    shown = collected(tmp_path, build, {"loader": loader})
    assert shown["nodes"] == ["alpha", "beta"]
    assert shown["verdict"]["kind"] == "coherent"


def test_where_a_trace_comes_from_is_found_by_who_reads(
    tmp_path: Path, build: Path, loader: str
) -> None:
    shown = collected(tmp_path, build, {"loader": loader}, "only_reads", "tells")
    assert shown["nodes"] == ["alpha", "beta"]


def test_without_them_it_is_not(tmp_path: Path, build: Path) -> None:
    shown = collected(tmp_path, build, {"breadcrumbs": False})
    assert shown["nodes"] == ["alpha"]
