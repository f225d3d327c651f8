# SPDX-License-Identifier: Apache-2.0
"""Replays a recording on as many nodes as it has pods, and judges what was collected."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from formats import records
from protocol.messages import NodeId
from testbed import encoding
from testbed.topology import (
    COORDINATOR_PORT,
    PYTHON,
    Coordinator,
    Host,
    Network,
    Node,
    Opened,
    await_settled,
    started,
)
from testbed.traffic import count_sent_to, payload_bytes_sent
from tests.recall.judge import Written, judge, read_collected
from tests.recall.late import Late, Trigger
from tests.recall.report import Recall
from tests.replay.report import Result, verdict_counts
from tests.replay.schedule import (
    EndSpan,
    ReceiveResponse,
    Schedule,
    SendContext,
    Span,
    StartSpan,
    build_schedule,
    read_spans,
)
from tests.replay.worker import LatencyRule, Plan, WrittenPart

_START_DELAY_NS = 500_000_000  # for `go` to reach every worker before the first event


class ReplayError(RuntimeError):
    """The replay did not come to its end; the message says where it stopped."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording and the rule that its requests are judged by."""

    path: Path
    schedule: Schedule
    rule: LatencyRule | None

    @classmethod
    def read(cls, path: Path, rules: Path) -> Self:
        """Read a recording; the rule's parameters stand in ``rules`` (tests/data/nezha/rules.json)."""
        parameters = json.loads(rules.read_text())
        name = path.name.removesuffix(".xz").removesuffix(".csv")
        factors = parameters["factor_permille"]
        if name not in factors:
            raise ReplayError(
                f"{rules}: no factor_permille for {name}; there is: {', '.join(factors)}"
            )
        return cls(
            path,
            build_schedule(read_spans(path)),
            LatencyRule(
                parameters["quantile_permille"],
                parameters["warmup"],
                parameters["window"],
                factors[name],
            ),
        )

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".xz").removesuffix(".csv")


@dataclass(slots=True)
class _Worker:
    """A pod's writer process, seen from the parent."""

    pod: str
    process: subprocess.Popen[bytes]
    events: int = 0
    spans: int = 0
    triggers: int = 0
    ready: bool = False
    done: bool = False
    dead: bool = False
    rest: bytes = b""

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def read(self, on_closed: Callable[[str, str], None]) -> bool:
        """Take in what it said; False at its end. ``on_closed``: told of trace and pod."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            word, *values = line.decode().split()
            if word == "ready":
                self.ready = True
            elif word == "done":
                self.done = True
            elif word == "progress":
                self.events, self.spans, self.triggers = map(int, values)
            elif word == "closed":
                on_closed(values[0], self.pod)
        return bool(data)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay is."""

    events: int
    events_total: int
    spans: int
    triggers: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens once so many events of the replay are done."""

    after_share: float
    act: Callable[[Replay], None]


@dataclass(slots=True)
class Replay(Opened):
    """A cluster that replays one recording.

    Entering it starts the network, the coordinator and a node for each pod;
    ``run`` replays; leaving it stops everything that it started. ``fire_on``
    and ``die_on`` are as in a worker's Plan; ``faults`` act while it runs. ``late``: not the
    rule fires, but somebody some time after each request, while the pools are gone round.
    """

    recording: Recording
    captured: Path
    speed: float = 1.0
    node_config: Mapping[str, Any] = field(default_factory=dict)
    coordinator_config: Mapping[str, Any] = field(default_factory=dict)
    fire_on: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    die_on: tuple[str, str] | None = None
    faults: tuple[Fault, ...] = ()
    late: Late | None = None
    on_progress: Callable[[Progress], None] = lambda _: None
    on_step: Callable[[str], None] = lambda _: None
    coordinator: Coordinator = field(init=False)
    nodes: dict[str, Node] = field(default_factory=dict, init=False)
    workers: dict[str, _Worker] = field(default_factory=dict, init=False)
    _directory: Path = field(init=False)
    _trigger: Trigger | None = field(default=None, init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    # -------------------------------------------------------------- start

    def close(self) -> None:
        self._stack.close()

    def open(self) -> None:
        pods = list(self.recording.schedule.pods)
        self.on_step(
            f"starting a coordinator and {len(pods)} nodes, each in its own network namespace"
        )
        # Short, because a Unix socket's path has at most 107 bytes.
        directory = self._directory = Path(tempfile.mkdtemp(prefix="backsight-"))
        self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
        network = self._stack.enter_context(Network("replay"))
        late = self.late
        self.coordinator = Coordinator(
            network.host("coordinator"),
            directory,
            {**self.coordinator_config, **(late.coordinator_config() if late is not None else {})},
        )
        self._stack.enter_context(self.coordinator)
        hosts = {pod: network.host(pod) for pod in pods}
        for host in hosts.values():
            count_sent_to(host, COORDINATOR_PORT)
        self.nodes = {
            pod: Node(
                host,
                pod,
                directory,
                self.coordinator,
                {**self.node_config, **(late.node_config() if late is not None else {})},
            )
            for pod, host in hosts.items()
        }
        self._stack.enter_context(started(list(self.nodes.values())))
        self.on_step(f"starting {len(pods)} writer processes")
        for pod, host in hosts.items():
            self._start_worker(pod, host, hosts, directory)
        self._listen(lambda: all(worker.ready for worker in self.workers.values()))
        if late is not None:
            self.on_step(f"filling {late}")
            self._trigger = self._stack.enter_context(
                Trigger(late, self._duration_s, self.coordinator, self.nodes)
            )

    @property
    def _duration_s(self) -> float:
        schedule = self.recording.schedule
        return (schedule.last_ns - schedule.first_ns) / 1e9 / self.speed

    def _start_worker(
        self, pod: str, host: Host, hosts: Mapping[str, Host], directory: Path
    ) -> None:
        schedule = self.recording.schedule
        plan = Plan(
            pod=pod,
            address=host.address,
            peers={peer: other.address for peer, other in hosts.items()},
            events=schedule.pods[pod],
            first_ns=schedule.first_ns,
            speed=self.speed,
            rule=self.recording.rule if self.late is None else None,
            fire_on=self.fire_on,
            die_on=self.die_on,
            written=self._written(pod),
        )
        path = directory / f"{pod}.plan"
        path.write_bytes(pickle.dumps(plan))
        process = host.popen(
            [PYTHON, "-m", "tests.replay.worker", str(path)],
            env=self.nodes[pod].client_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._stack.callback(self._stop_worker, process)
        self.workers[pod] = _Worker(pod, process)

    @staticmethod
    def _stop_worker(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()

    # ---------------------------------------------------------------- run

    def run(self) -> None:
        """Replay to the end, and wait until every verdict stands."""
        total = sum(len(events) for events in self.recording.schedule.pods.values())
        self.on_step(f"replaying {self.recording.name} at speed {self.speed:g}")
        start_ns = time.monotonic_ns() + _START_DELAY_NS
        for worker in self.workers.values():
            worker.say(f"go {start_ns}")
        faults = sorted(self.faults, key=lambda fault: fault.after_share)

        def finished() -> bool:
            progress = self._progress(total)
            self.on_progress(progress)
            while faults and progress.events >= faults[0].after_share * total:
                faults.pop(0).act(self)
            return all(worker.done or worker.dead for worker in self.workers.values())

        self._listen(finished)
        if self._trigger is not None:
            self.on_step("waiting for the last triggers")
            self._trigger.wait()
        self.on_step("waiting for the last verdicts")
        if not await_settled(self.coordinator, self.nodes.values()):
            self.on_step("not all is at rest; going on with what is there")

    def _progress(self, total: int) -> Progress:
        workers = self.workers.values()
        return Progress(
            sum(worker.events for worker in workers),
            total,
            sum(worker.spans for worker in workers),
            sum(worker.triggers for worker in workers),
        )

    def _listen(self, finished: Callable[[], bool]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self.workers.values():
                if not worker.dead:
                    assert worker.process.stdout is not None
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            while not finished():
                for entry, _ in selector.select():
                    worker = entry.data
                    if not worker.read(self._closed):
                        selector.unregister(entry.fileobj)
                        self._lost(worker)

    def _closed(self, trace_id: str, pod: str) -> None:
        if self._trigger is not None:
            self._trigger.finished(trace_id, pod)

    def _written(self, pod: str) -> Path:
        return self._directory / f"{pod}.written.jsonl"

    # ------------------------------------------------------------- faults

    def _lost(self, worker: _Worker) -> None:
        """A writer ended: as planned by `die_on`, or for a reason that ends the replay."""
        status = worker.process.wait()
        if status != -signal.SIGKILL or self.die_on is None:
            raise ReplayError(f"the writer of {worker.pod} ended with status {status}")
        worker.dead = True
        for other in self.workers.values():
            if not other.dead:
                other.say(f"dead {worker.pod}")

    # ------------------------------------------------------------ looking

    def traces(self) -> list[dict[str, Any]]:
        """What ``backsightctl traces --json`` prints."""
        return self.coordinator.ctl_json("traces")

    def node_status(self, pod: str) -> dict[str, Any]:
        """What ``backsightctl --node SOCKET status --json`` prints."""
        return self.nodes[pod].control.status()

    def bytes_left(self) -> int:
        return sum(payload_bytes_sent(node.host) for node in self.nodes.values())

    def _capture(self) -> list[dict[str, Any]]:
        """Write down what was collected. Returns the listing."""
        shutil.rmtree(self.captured, ignore_errors=True)
        self.captured.mkdir(parents=True)
        self.coordinator.host.run(
            PYTHON, "-m", "tests.cluster.fetch", self.coordinator.endpoint, str(self.captured)
        )
        lines = (self.captured / "traces.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def recall(self) -> Recall:
        """What became of traces whose trigger came late."""
        assert self.late is not None
        assert self._trigger is not None
        asked = self._trigger.settled()
        self._capture()
        written: dict[str, list[Written]] = {}
        for pod in self.workers:
            for line in self._written(pod).read_text().splitlines():
                part = WrittenPart(**json.loads(line))
                written.setdefault(part.trace_id, []).append(
                    Written(
                        part.trace_id, pod, part.first_ns, part.last_ns, frozenset(part.span_ids)
                    )
                )
        return Recall(
            f"replay of {self.recording.name}, speed {self.speed:g}",
            self.late,
            self._trigger.filled_bytes,
            self._trigger.lost_bytes,
            judge(asked, written, read_collected(self.captured), self._trigger.horizons),
        )

    def judge(self) -> Result:
        """Write down what was collected, and let the independent checker judge it."""
        self.on_step("asking the independent checker")
        bytes_left = self.bytes_left()
        bytes_generated = payload_bytes(self.recording.schedule)
        listing = self._capture()
        checked = check(self.recording.path, self.captured)
        verdicts, reasons = verdict_counts(listing)
        triggers: dict[str, int] = {}
        for trace in listing:
            for trigger in trace["triggers"]:
                triggers[trigger["name"]] = triggers.get(trigger["name"], 0) + 1
        return Result(
            file=self.recording.name,
            nodes=len(self.nodes),
            speed=self.speed,
            requests=checked["requests"],
            spans=checked["spans"],
            bytes_generated=bytes_generated,
            bytes_left=bytes_left,
            triggers=triggers,
            collected=checked["collected"],
            verdicts=verdicts,
            reasons=reasons,
            selected=checked["selected"],
            selected_share=checked["selected_share"],
            recall=checked["recall"],
            coherent_by_checker=checked["coherent_by_checker"],
            false_coherent=checked["false_coherent"],
            checker_ok=checked["ok"],
            checker_failures=checked["failures"],
        )


def payload_bytes(schedule: Schedule) -> int:
    """The payload that a whole replay writes to the pools, without headers and padding.

    A lower bound: of the up to three breadcrumbs that a context brings, one is counted.
    """
    hop = records.HopOut(NodeId(0), 0, 0, 0)
    crumb = records.Breadcrumb(NodeId(0), "")

    def size(body: records.Body) -> int:
        _, payload = encoding.encode_body(body)
        return len(payload)

    total = 0
    for events in schedule.pods.values():
        for event in events:
            if isinstance(event, StartSpan):
                total += size(records.SpanStart(0, 0, 0, 0, event.span.operation))
                if event.receive_from is not None:
                    total += size(hop) + size(crumb)
            elif isinstance(event, EndSpan):
                total += size(_span_end(event.span))
            elif isinstance(event, SendContext):
                total += size(hop)
            elif isinstance(event, ReceiveResponse):
                total += size(crumb)
    return total


def _span_end(span: Span) -> records.SpanEnd:
    is_cut = len(span.operation) > records.SPAN_START_NAME_BYTES_MAX
    attributes = encoding.encode_attributes({"pod": span.pod, "duration_us": span.duration_us})
    return records.SpanEnd(0, 0, 0, span.operation if is_cut else "", attributes)


def check(recording: Path, captured: Path, *options: str) -> dict[str, Any]:
    """What the independent checker says, as a program of its own."""
    done = subprocess.run(
        [
            PYTHON, "-m", "tests.checker",
            "--file", str(recording), "--captured", str(captured), "--json", *options,
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise ReplayError(
            f"the checker could not read what was captured (status {done.returncode})"
        )
    judged: dict[str, Any] = json.loads(done.stdout)
    return judged
