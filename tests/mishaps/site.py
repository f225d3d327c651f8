# SPDX-License-Identifier: Apache-2.0
"""The shop with probes on each node, and a client that knows its traces."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctl.coordinator import NotFound
from protocol.messages import TraceId
from testbed.faults import SlowDisk, slow_disk
from testbed.probes import Probes
from testbed.topology import PYTHON, Node, Opened, await_settled
from tests.demo.shop import PORTS, DemoError, Shop
from tests.mishaps.judge import Firing, Seen
from tests.mishaps.orders import Asked

# What a well node never does, on two cores that all of this shares.
NODE_CONFIG = {
    "machine": {"look_every_s": 0.5},
    "probes": {
        "run_queue": {"fire_ms": 60, "record_ms": 5},
        "lock_wait": {"fire_ms": 300, "record_ms": 20},
        "io_wait": {"fire_ms": 100, "record_ms": 5},
        "cpu_percent": 50,
    },
}

# Enough for the client's own connections.
_BACKLOG = 8

_DISK_BYTES_PER_S = 2 << 20
_DEADLINE_S = 30.0
# No daemon tells when it has what is waited for; to be asked so often costs it little.
_LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class Site(Opened):
    """All of it. Entering it starts everything, with the client at work."""

    on_step: Callable[[str], None] = lambda _: None
    shop: Shop = field(init=False)
    disk: SlowDisk = field(init=False)
    asked: list[Asked] = field(default_factory=list, init=False)
    untouched: list[Asked] = field(default_factory=list, init=False)
    """Requests of the bystanders, which nothing strikes."""
    hog_cpu: int = field(default_factory=lambda: min(os.sched_getaffinity(0)), init=False)
    probes: dict[str, Probes] = field(default_factory=dict, init=False)
    _client: subprocess.Popen[bytes] = field(init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def close(self) -> None:
        self._stack.close()

    def open(self) -> None:
        directory = Path(self._stack.enter_context(_temporary()))
        self.disk = self._stack.enter_context(slow_disk(directory, _DISK_BYTES_PER_S))
        self.shop = Shop(
            {"BACKSIGHT_TRIGGERS": "none", "RECEIPTS": str(self.disk.device)},
            node_config=NODE_CONFIG,
            backlog=_BACKLOG,
            on_step=self.on_step,
        )
        self._stack.enter_context(self.shop)
        self.on_step("starting backsight-probes beside each node")
        for name, node in self.shop.nodes.items():
            self.probes[name] = self._stack.enter_context(Probes(node))
            self._stack.enter_context(self._bystander(node))
            self.await_watched(name)
        self._stack.enter_context(self._at_work())

    def await_watched(self, service: str) -> None:
        """Until the probes of that node watch all of its processes."""
        self.probes[service].await_node(
            # One of those that are attached is the probes' own.
            lambda status: status["probes_watched"] >= 1 and status["attach_moving"] == 0
        )

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        shop = self.shop
        front = shop.nodes["front"].host.address
        node = Node(shop.client, "node-0", shop.directory, shop.coordinator)
        with (
            node,
            shop.client.popen(
                [PYTHON, "-m", "tests.mishaps.orders", front, str(PORTS["front"])],
                env=node.client_environment("client"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as self._client,
            _reading(self._client, self.asked),
        ):
            yield

    @contextlib.contextmanager
    def _bystander(self, node: Node) -> Iterator[None]:
        """Requests on that node that nothing strikes; the first of them is over."""
        there = len(self.untouched)
        with (
            node.host.popen(
                [PYTHON, "-m", "tests.mishaps.bystander", str(self.hog_cpu)],
                env=node.client_environment("bystander"),
                stdout=subprocess.PIPE,
            ) as process,
            _reading(process, self.untouched),
        ):
            # Those of the nodes before this one go on: theirs may be more than a few, by then.
            self.await_that(lambda: len(self.untouched) > there, f"a bystander on {node.name}")
            yield

    # ------------------------------------------------------------------ client

    def _tell(self, said: dict[str, Any]) -> None:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(said).encode() + b"\n")
        self._client.stdin.flush()

    def order(self, order: int) -> str:
        """Ask for an order beside the others; its trace."""
        trace = secrets.token_hex(16)
        self._tell({"order": order, "trace": trace})
        return trace

    def burst(self, connections: int) -> None:
        """So many connections to the front end, at once."""
        self._tell({"burst": connections})

    def await_orders(self, count: int) -> None:
        """Until so many more are over."""
        there = len(self.asked)
        self.await_that(lambda: len(self.asked) >= there + count, f"{count} orders")

    def await_over(self, traces: Set[str]) -> None:
        """Until these orders are."""
        self.await_that(
            lambda: traces <= {one.trace for one in self.asked}, f"{len(traces)} orders"
        )

    def await_on_node(self, trace: str, service: str) -> None:
        """Until a node has something of a trace: its request has come there."""

        def is_there() -> bool:
            try:
                self.shop.nodes[service].control.peek(TraceId(bytes.fromhex(trace)))
            except NotFound:
                return False
            return True

        self.await_that(is_there, f"trace {trace} on the node of {service}")

    def await_that(self, holds: Callable[[], bool], what: str) -> None:
        """Until it is so. DemoError if it takes too long."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while not holds():
            if time.monotonic() > deadline_s:
                raise DemoError(f"{what}: not within {_DEADLINE_S:g} s")
            time.sleep(_LOOK_EVERY_S)

    # ------------------------------------------------------------------- nodes

    def settle(self) -> None:
        """Until all that fired is collected, as far as it will be."""
        if not await_settled(self.shop.coordinator, self.shop.nodes.values()):
            self.on_step("not all is at rest; going on with what is there")

    def fired(self, service: str, trigger: str) -> int:
        """How often that node fired it, whatever came of it."""
        counted = self.shop.nodes[service].control.status()["triggers"].get(trigger)
        return int(counted["fired"]) if counted is not None else 0

    def fired_for(self, node: str, trigger: str, since_ns: int) -> frozenset[str]:
        """For which traces it did since then, as far as the coordinator knows."""
        return frozenset(
            one.primary
            for one in self.seen().firings
            if (one.node, one.name) == (node, trigger) and one.fired_at_ns >= since_ns
        )

    def seen(self) -> Seen:
        """Everything that fired so far, and what was collected, as the coordinator knows it."""
        found: dict[tuple[str, str, str], Firing] = {}
        traces = self.shop.coordinator.ctl_json("traces", "--limit", "10000")
        for trace in traces:
            for trigger in trace["triggers"]:
                firing = Firing(
                    trigger["name"],
                    trigger["node"],
                    trigger["primary"],
                    frozenset(trigger["laterals"]),
                    trigger["why"],
                    trigger["fired_at_ns"],
                )
                found[firing.name, firing.node, firing.primary] = firing
        return Seen(
            tuple(found.values()),
            frozenset(trace["trace_id"] for trace in traces if trace["bytes"]),
        )

    def threads_of(self, service: str) -> list[int]:
        """Of a service's process."""
        pid = self.shop.services[service].process.pid
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]


@contextlib.contextmanager
def _reading(process: subprocess.Popen[bytes], into: list[Asked]) -> Iterator[None]:
    """What a client says of its requests. It is ended afterwards."""
    said = process.stdout
    assert said is not None

    def read() -> None:
        into.extend(Asked(**json.loads(line)) for line in said)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        reader.join()


@contextlib.contextmanager
def _temporary() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix=f"backsight-{os.getpid()}-") as directory:
        yield directory
