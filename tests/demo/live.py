# SPDX-License-Identifier: Apache-2.0
"""The shop on three nodes under load, and what became of its trouble."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.processes import APPS, Process
from testbed.shop import SERVICES
from testbed.topology import COORDINATOR_PORT, PYTHON, Opened, await_settled
from testbed.traffic import count_sent_to, payload_bytes_sent
from tests.demo.report import Result
from tests.demo.shop import DemoError, Shop
from tests.recall.judge import Written, judge, read_collected
from tests.recall.late import Late, Trigger
from tests.recall.report import Recall

_HERE = Path(__file__).parent

# 16 connections with a pause of 150 ms on average: about 100 requests a second, which
# leaves two cores room for the daemons, so that what is slow is slow for its own reason.
_CONNECTIONS = 16
_PAUSE_MS = 140

_ASKED_FOR_LATE = 6  # one in so many orders: well below what a node may report

_PROGRESS_INTERVAL_S = 0.5
_SILENT_S = 2.0  # a request may wait for a row's lock for one


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the load is."""

    elapsed_s: float
    duration_s: float
    requests: int


@dataclass(slots=True)
class Live(Opened):
    """The shop on its nodes, with a coordinator beside them.

    Entering it starts everything; ``run`` puts it under load; leaving it stops and
    removes what it started. ``captured``: where what was collected is written down. ``late``:
    while the pools are gone round, one in some orders is asked for some time after it.
    """

    captured: Path
    duration_s: int = 30
    late: Late | None = None
    on_progress: Callable[[Progress], None] = lambda _: None
    on_step: Callable[[str], None] = lambda _: None
    shop: Shop = field(init=False)
    _trigger: Trigger | None = field(default=None, init=False)
    _front_spans: int = field(default=0, init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    # -------------------------------------------------------------- start

    def close(self) -> None:
        self._stack.close()

    def open(self) -> None:
        late = self.late
        self.shop = Shop(
            {"BACKSIGHT_TRIGGERS_FILE": str(_HERE / "triggers.yaml")},
            late.coordinator_config() if late is not None else {},
            late.node_config() if late is not None else {},
            witnessed=True,
            prepare=lambda host: count_sent_to(host, COORDINATOR_PORT),
            on_step=self.on_step,
        )
        self._stack.enter_context(self.shop)
        if late is not None:
            self.on_step(f"filling {late}")
            nodes = {node.name: node for node in self.shop.nodes.values()}
            self._trigger = self._stack.enter_context(
                Trigger(late, self.duration_s, self.shop.coordinator, nodes)
            )
            # Not those of before.
            self._front_spans = len(self._witnessed("front"))

    # ---------------------------------------------------------------- run

    def run(self) -> None:
        """Load for as long as wanted, and wait until every verdict stands."""
        self.on_step(f"{self.duration_s} s of orders by wrk, {_CONNECTIONS} connections")
        load = Process(
            self.shop.client,
            "wrk",
            [
                "wrk", "--threads", "1", "--connections", str(_CONNECTIONS),
                "--duration", f"{self.duration_s}s", "--timeout", "20s",
                "--script", str(APPS / "load.lua"), self.shop.url, "--", str(_PAUSE_MS),
            ],
            self.shop.directory,
            {"PATH": os.environ["PATH"]},
        )  # fmt: skip
        begin_s = time.monotonic()
        with load:
            while load.process.poll() is None:
                self._progress(begin_s)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    load.process.wait(_PROGRESS_INTERVAL_S)
            self._progress(begin_s)
            if load.process.returncode:
                raise DemoError(f"wrk ended with {load.process.returncode}:\n{load.last_words()}")
        if self._trigger is not None:
            self.on_step("waiting for the last triggers")
            self._trigger.wait()
        self.on_step("waiting for the last verdicts")
        if not await_settled(
            self.shop.coordinator,
            self.shop.nodes.values(),
            lambda: [len(self._logged(service)) for service in SERVICES],
            silent_s=_SILENT_S,
        ):
            self.on_step("not all is at rest; going on with what is there")

    def _progress(self, begin_s: float) -> None:
        elapsed_s = min(time.monotonic() - begin_s, self.duration_s)
        self.on_progress(Progress(elapsed_s, self.duration_s, len(self._logged("front"))))
        if self._trigger is not None:
            spans = self._witnessed("front")
            roots = [
                span["trace_id"] for span in spans[self._front_spans :] if not span["parent_id"]
            ]
            self._front_spans = len(spans)
            for trace_id in roots[::_ASKED_FOR_LATE]:
                self._trigger.finished(trace_id, SERVICES["front"])

    def _logged(self, service: str) -> list[str]:
        log = self.shop.services[service].access_log
        return log.read_text().splitlines() if log.exists() else []

    def _witnessed(self, service: str) -> list[dict[str, Any]]:
        path = self.shop.services[service].witness
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    # ------------------------------------------------------------ looking

    def traces(self) -> list[dict[str, Any]]:
        """What ``backsightctl traces --json`` prints."""
        return self.shop.coordinator.ctl_json("traces")

    def _capture(self) -> None:
        """Write down what was collected."""
        shutil.rmtree(self.captured, ignore_errors=True)
        self.captured.mkdir(parents=True)
        self.shop.coordinator.host.run(
            PYTHON, "-m", "tests.cluster.fetch", self.shop.coordinator.endpoint, str(self.captured)
        )

    def recall(self) -> Recall:
        """What became of orders that were asked for late."""
        assert self.late is not None
        assert self._trigger is not None
        asked = self._trigger.settled()
        self._capture()
        written: dict[str, list[Written]] = {}
        for service, node in SERVICES.items():
            by_trace: dict[str, list[dict[str, Any]]] = {}
            for span in self._witnessed(service):
                by_trace.setdefault(span["trace_id"], []).append(span)
            for trace_id, spans in by_trace.items():
                written.setdefault(trace_id, []).append(
                    Written(
                        trace_id,
                        node,
                        min(span["start_ns"] for span in spans),
                        max(span["end_ns"] for span in spans),
                        frozenset(span["span_id"] for span in spans),
                    )
                )
        return Recall(
            f"live shop, {self.duration_s} s",
            self.late,
            self._trigger.filled_bytes,
            self._trigger.lost_bytes,
            judge(asked, written, read_collected(self.captured), self._trigger.horizons),
        )

    def judge(self) -> Result:
        """Write down what was collected, and let the independent check judge it."""
        self.on_step("asking the independent check")
        bytes_left = sum(payload_bytes_sent(node.host) for node in self.shop.nodes.values())
        planes = [node.control.status()["dataplane"] for node in self.shop.nodes.values()]
        self._capture()
        for service in self.shop.services.values():
            shutil.copy(service.access_log, self.captured)
            shutil.copy(service.witness, self.captured)
        checked = check(self.captured)
        listing = [
            json.loads(line) for line in (self.captured / "traces.jsonl").read_text().splitlines()
        ]
        return Result.of(
            checked,
            listing,
            nodes=len(self.shop.nodes),
            bytes_generated=sum(plane["payload_bytes"] for plane in planes),
            bytes_left=bytes_left,
            duration_s=self.duration_s,
        )


def check(captured: Path) -> dict[str, Any]:
    """What the independent check says, as a program of its own."""
    done = subprocess.run(
        [
            PYTHON, "-m", "tests.demo.check", str(captured), "--json",
            *(f"--service={service}={node}" for service, node in SERVICES.items()),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise DemoError(f"the check could not read what was captured (status {done.returncode})")
    judged: dict[str, Any] = json.loads(done.stdout)
    return judged
