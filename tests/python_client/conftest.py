# SPDX-License-Identifier: Apache-2.0
"""A node to attach to, in the test's own process, and programs that attach to it.

The data plane is the real one, and so is the attach server. What is missing of
a daemon is its core, so nothing is collected but what a test asks for.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import pytest

from appliance.attach import AttachServer, Link, Peer
from appliance.core.dataplane import LocalTrigger, Slice
from appliance.native import NativeDataPlane
from appliance.packets import Attachment, Request
from appliance.settings import allowed
from appliance.ticks import TickSource
from formats.spans import SliceContent, read_slice
from protocol.hashing import node_id
from protocol.messages import Group, TraceId
from runtime.settings.node import Settings
from runtime.unix_socket import listen
from tests.python_client.programs import trace_id
from tests.unit.logs import logs_to

NODE_NAME = "test-node"

# Not 0, which a hash that leaves the seed out would take for it.
CLUSTER_SEED = 0x0123456789ABCDEF

# Records are timed by CLOCK_MONOTONIC: the rate of the CPU's counter needs not be measured.
TICKS = TickSource(is_counter=False, per_s=1_000_000_000)

Result: TypeAlias = dict[str, Any]
RunProgram: TypeAlias = Callable[[str, Mapping[str, str]], Result]


class _Host:
    """What the attach server asks of the data plane.

    A client that hangs up is dead: no program here closes what is not its own.
    """

    def __init__(self, plane: NativeDataPlane, settings: Settings) -> None:
        self._plane = plane
        self._settings = settings

    def attach(self, peer: Peer, request: Request, _: Link) -> Attachment:
        number, fds = self._plane.client_add(peer.pid, request.service, request.abi)
        arena_bytes = self._settings.arena_bytes_or_default
        return Attachment(
            number.to_bytes(16),
            request.abi,
            arena_bytes,
            self._plane.policy_fd,
            (fds.arena, fds.channel, fds.context),
        )

    def attached(self, token: bytes) -> None:
        pass

    def moved(self, _token: bytes, _number: int) -> bool:
        return False

    def hung_up(self, token: bytes) -> None:
        self._plane.client_exited(int.from_bytes(token))


class Node:
    """A node. ``run`` and ``start`` run a program of programs.py that attaches to it."""

    def __init__(self, directory: Path) -> None:
        self.id = node_id(NODE_NAME)
        self.messages: list[str] = []
        self._settings = Settings(
            node=NODE_NAME, socket=str(directory / "node.sock"), cluster_seed=CLUSTER_SEED
        )
        self._plane = NativeDataPlane(self._settings, TICKS)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_serving = threading.Event()
        self._stopped = False
        self._threads = [threading.Thread(target=self._serve), threading.Thread(target=self._work)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self._is_serving.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._loop.call_soon_threadsafe(self._stop.set)
        self._plane.wake()
        for thread in self._threads:
            thread.join()
        self._loop.close()
        self._plane.close()

    def _serve(self) -> None:
        async def until_stopped() -> None:
            with AttachServer(
                listen(self._settings.socket_path, socket.SOCK_SEQPACKET),
                allowed(self._settings),
                _Host(self._plane, self._settings),
                logs_to(self.messages),
            ):
                self._is_serving.set()
                await self._stop.wait()

        try:
            self._loop.run_until_complete(until_stopped())
        finally:
            self._is_serving.set()

    def _work(self) -> None:
        while not self._stopped:
            self._plane.wait_and_poll(None)

    # ------------------------------------------------------------ programs

    def run(self, program: str) -> Result:
        """Run a program to its end, and return what it says."""
        result = run_to_the_end(program, {"BACKSIGHT_SOCKET": self._settings.socket})
        self.notice_exits()
        return result

    @contextmanager
    def start(self, program: str) -> Iterator[subprocess.Popen[str]]:
        """Start a program, for a test that deals with it while it runs."""
        with subprocess.Popen(
            [sys.executable, "-m", "tests.python_client.programs", program],
            env={**os.environ, "BACKSIGHT_SOCKET": self._settings.socket},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            yield process

    def notice_exits(self) -> None:
        """Return when the node knows of every process that has exited."""

        async def two_rounds() -> None:
            # What was readable when this was called has been seen after one
            # round of the event loop, and handled after two.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(two_rounds(), self._loop).result()

    # ---------------------------------------------------- what the node has

    def collect(self, number: int) -> Slice:
        """Trigger trace ``number``."""
        trace = TraceId(bytes.fromhex(trace_id(number)))
        about = self._plane.collect(trace, Group("test", trace), time.monotonic_ns())
        # One that comes right behind another waits for a pass, which this thread's poll or
        # the other's begins when it is due, and may be in the middle of.
        while about.searching:
            self._plane.poll(time.monotonic_ns())
            found = self._plane.slice(trace)
            assert found is not None
            about = found
        return about

    def slice(self, number: int) -> SliceContent:
        """What the node holds of trace ``number``; empty if that is nothing."""
        about = self.collect(number)
        content = self._plane.read(about.trace, 0, about.bytes)
        assert len(content) == about.bytes
        return read_slice([content])

    def recent(self, traces_max: int) -> tuple[int, list[TraceId]]:
        """How many traces there are of any age, and those that a snapshot takes first."""
        return self._plane.recent(time.monotonic_ns(), "", traces_max)

    def rank_by(self, seed: int) -> None:
        """Take another seed for priorities."""
        self._plane.set_priority_seed(seed)

    def triggers(self) -> list[LocalTrigger]:
        """The triggers that programs have fired since this was asked last."""
        self._plane.poll(time.monotonic_ns())
        return [event for event in self._plane.events() if isinstance(event, LocalTrigger)]


def run_to_the_end(program: str, environment: Mapping[str, str]) -> Result:
    """Run a program, which must end well and silently, and return what it says."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.python_client.programs", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads(ended.stdout)
    return result if isinstance(result, dict) else {}


@pytest.fixture
def run_program() -> RunProgram:
    """Run a program without a node."""
    return run_to_the_end


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as node:
        yield node
        assert node.messages == []
