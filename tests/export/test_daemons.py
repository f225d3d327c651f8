# SPDX-License-Identifier: Apache-2.0
"""What an application wrote arrives elsewhere: real daemons, on this machine."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import perfetto_pb2 as pf
import pytest
import yaml

from formats import stamped as names
from testbed.ports import free_port
from testbed.topology import Coordinator, Host, Node, started
from tests.export.receivers import GrpcReceiver

pytestmark = pytest.mark.timeout(180)


class ThisMachine(Host):
    """No namespace: one node needs no rights."""

    def _inside(self, command: Sequence[str]) -> list[str]:
        return [*command]


@dataclass(frozen=True, slots=True)
class Here:
    """A coordinator, and an application on a node of it."""

    coordinator: Coordinator
    receiver: GrpcReceiver
    query: str
    application: subprocess.Popen[bytes]

    def do(self, *words: str) -> str:
        assert self.application.stdin is not None
        assert self.application.stdout is not None
        self.application.stdin.write(" ".join(words).encode() + b"\n")
        self.application.stdin.flush()
        return self.application.stdout.readline().decode().strip()

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.query}{path}") as response:
            return json.load(response)


@pytest.fixture
def exports() -> bool:
    """Whether the coordinator exports from the beginning."""
    return True


@pytest.fixture
def here(build: Path, tmp_path: Path, exports: bool) -> Iterator[Here]:
    machine = ThisMachine("localhost", "", "127.0.0.1")
    query = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        receiver = stack.enter_context(GrpcReceiver(free_port()))
        config = {
            "listen": f"127.0.0.1:{free_port()}",
            "linger_s": 0.5,
            "metrics": {"listen": None},
            "query": {"listen": query},
            "export": {"endpoint": receiver.url} if exports else {},
        }
        coordinator = Coordinator(machine, tmp_path, config)
        coordinator.endpoint = str(config["listen"])
        node = Node(machine, "alpha", tmp_path, coordinator, {"metrics": {"listen": None}})
        stack.enter_context(started([coordinator, node]))
        application = machine.popen(
            [sys.executable, "-m", "tests.cluster.service", str(free_port())],
            env=node.client_environment("shop"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.enter_context(application)
        stack.callback(application.kill)
        yield Here(coordinator, receiver, f"http://{query}", application)


def counters(here: Here) -> dict[str, int]:
    return {name: n for one in here.coordinator.ctl_json("counters") for name, n in one.items()}


def test_a_triggered_trace_is_exported_and_found_and_written_to_files(
    here: Here, tmp_path: Path
) -> None:
    assert here.do("attach") == "attached"
    trace = secrets.token_hex(16)
    assert here.do("fire", trace) == "done"

    # OTLP: it comes when the trace is closed, and by then it was judged.
    (span,) = here.receiver.heard.get(timeout=60).spans
    assert span.trace_id.hex() == trace
    assert span.name == "GET /"
    said = {item.key: item.value.string_value for item in span.attributes}
    assert (said[names.TRIGGER], said[names.TRIGGER_WHY]) == ("front", "told to")
    assert (said[names.VERDICT], said[names.NODE]) == ("coherent", "alpha")

    # Jaeger: the index follows the verdict, beside the export.
    while not (found := here.ask("/api/services")["data"]):
        pass
    assert found == ["shop"]
    search = "/api/traces?service=shop&tags=backsight.trigger%3Dfront"
    (jaeger,) = here.ask(f"{search}&raw=true")["data"]
    assert jaeger["traceID"] == trace
    assert jaeger["spans"][0]["startTime"] == span.start_time_unix_nano // 1000

    # Files
    output = tmp_path / "out"
    here.coordinator.ctl("export", "--trigger", "front", "--output", str(output))
    (resource,) = json.loads(output.read_text())["resourceSpans"]
    assert resource["scopeSpans"][0]["spans"][0]["traceId"] == trace
    here.coordinator.ctl("export", trace, "--format", "perfetto", "--output", str(output))
    packets = pf.Trace.FromString(output.read_bytes()).packet
    begun = [packet.track_event.name for packet in packets if packet.track_event.type == 1]
    assert begun == ["GET /"]

    while (counted := counters(here))["export.traces"] < 1:  # it counts what was answered
        pass
    assert counted["export.traces"] == counted["export.spans"] == 1
    assert counted["index.traces_failed"] == 0


def reload(coordinator: Coordinator, export: dict[str, Any]) -> None:
    """Have a coordinator export in another way, and wait until it does."""
    config = yaml.safe_load(coordinator.config_path.read_text())
    coordinator.config_path.write_text(yaml.safe_dump(config | {"export": export}))
    os.kill(coordinator.daemon_pid(), signal.SIGHUP)
    coordinator.wait_ready()


def await_exported(here: Here, traces: int) -> None:
    """Until so many were answered, and no more: one that was not goes to the next receiver, too."""
    while (exported := counters(here)["export.traces"]) < traces:
        pass
    assert exported == traces


def reading_process(coordinator: Coordinator) -> int:
    """Its pid: the coordinator's only child."""
    pid = coordinator.daemon_pid()
    children = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    (pid,) = map(int, " ".join(children).split())
    return pid


def test_a_search_that_kills_its_process_costs_no_footage(here: Here) -> None:
    """What reads the store is begun again, and goes on where it was."""
    pid = here.coordinator.daemon_pid()
    assert here.do("attach") == "attached"
    traces = []
    for _ in range(3):
        os.kill(reading_process(here.coordinator), signal.SIGKILL)
        trace = secrets.token_hex(16)
        assert here.do("fire", trace) == "done"
        traces.append(trace)
        # What was under way may come twice.
        heard: set[str] = set()
        while trace not in heard:
            heard = {span.trace_id.hex() for span in here.receiver.heard.get(timeout=60).spans}
    found: set[str] = set()
    while found < set(traces):
        found = {one["traceID"] for one in here.ask("/api/traces?service=shop")["data"]}
    assert found == set(traces)
    assert here.coordinator.daemon_pid() == pid
    assert "the reading process ended by signal 9; again in" in here.coordinator.last_words()


def test_the_reading_process_goes_with_a_coordinator_that_is_killed(here: Here) -> None:
    pidfd = os.pidfd_open(reading_process(here.coordinator))
    try:
        here.coordinator.kill_daemon()
        assert select.select([pidfd], [], [], 60)[0]
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("exports", [False])
def test_where_traces_are_exported_can_change(here: Here) -> None:
    pid = here.coordinator.daemon_pid()
    assert here.do("attach") == "attached"
    with GrpcReceiver(free_port()) as other:
        for number, receiver in enumerate((here.receiver, other), 1):
            reload(here.coordinator, {"endpoint": receiver.url})
            trace = secrets.token_hex(16)
            assert here.do("fire", trace) == "done"
            (span,) = receiver.heard.get(timeout=60).spans
            assert span.trace_id.hex() == trace
            await_exported(here, number)
        reload(here.coordinator, {"endpoint": here.receiver.url, "ca_file": "/no.pem"})
        # In clear text nothing is read of it.
        assert "reloaded; export.endpoint, export.ca_file taken up" in here.coordinator.last_words()
        reload(here.coordinator, {"endpoint": "https://127.0.0.1:1", "ca_file": "/no.pem"})
        words = here.coordinator.last_words()
        assert f"{here.coordinator.config_path}: export.ca_file: /no.pem: No such file" in words
        assert words.endswith("the configuration is kept as it was")
        assert here.do("fire", trace := secrets.token_hex(16)) == "done"
        (span,) = here.receiver.heard.get(timeout=60).spans
        assert span.trace_id.hex() == trace
        assert other.heard.empty()
    assert here.coordinator.daemon_pid() == pid
    await_exported(here, 3)
