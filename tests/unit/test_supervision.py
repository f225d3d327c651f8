# SPDX-License-Identifier: Apache-2.0
"""What a daemon tells its service manager: that it serves, lives, how it is, that it is told something new."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from appliance.daemon import Daemon
from appliance.native import NativeDataPlane
from coordinator.core.records import Write
from coordinator.server import CoordinatorServer
from coordinator.settings import store_limits
from coordinator.store.writer import Store
from ctl.node import NodeClient
from protocol.messages import TraceId
from runtime.log import Log
from runtime.main import Configuration, reload
from runtime.service_manager import ServiceManager
from runtime.settings.coordinator import Settings, StoreSettings
from runtime.settings.node import NODE_PROGRAM, MetricsSettings
from runtime.settings.node import Settings as NodeSettings
from runtime.watchdog import report, watch
from tests.unit.logs import SILENT, logs_to

# Short, since the tests wait for what comes twice in it; long for a thread that only waits for a core.
WATCHDOG_S = 1.0

READY_TIMEOUT_S = 60.0


@dataclass
class Manager:
    """A service manager's socket, and what daemons said to it."""

    path: Path
    said: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(READY_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def hear(self) -> str:
        """The next message."""
        self.said.append(self._socket.recv(4096).decode())
        return self.said[-1]

    def hear_until(self, pattern: str) -> list[str]:
        """All messages up to the first one that matches, with it."""
        heard = [self.hear()]
        while not re.fullmatch(pattern, heard[-1]):
            heard.append(self.hear())
        return heard

    def connect(self, watchdog_s: float | None = WATCHDOG_S) -> ServiceManager:
        return ServiceManager(str(self.path), watchdog_s)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(tmp_path / "notify") as manager:
        yield manager


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_the_one_that_is_meant_for_this_process(
    manager: Manager, environment: dict[str, str], watchdog_s: float | None
) -> None:
    environment = {**environment, "NOTIFY_SOCKET": str(manager.path), "OTHER": "x"}
    with ServiceManager.from_environment(environment) as connected:
        assert connected.watchdog_s == watchdog_s
    assert environment == {"OTHER": "x"}  # children shall not speak for us


def test_without_a_service_manager_there_is_no_watchdog() -> None:
    with ServiceManager.from_environment({"WATCHDOG_USEC": "1"}) as nobody:
        assert nobody.watchdog_s is None
        asyncio.run(watch(nobody, {}, SILENT))
        asyncio.run(report(nobody, lambda: "never asked", asyncio.Event()))


def test_how_it_is_is_told_when_it_is_news(manager: Manager) -> None:
    texts = ["a", "a", "b\nREADY=1", "b\nREADY=1", "c"]
    left = iter(texts)

    async def run() -> None:
        with manager.connect() as connected, contextlib.suppress(RuntimeError):
            await report(connected, lambda: next(left), asyncio.Event(), interval_s=0)

    asyncio.run(run())
    assert manager.hear_until("STATUS=c") == ["STATUS=a", "STATUS=b?READY=1", "STATUS=c"]


def test_news_are_told_at_once(manager: Manager) -> None:
    text = "a"

    async def run() -> None:
        nonlocal text
        news = asyncio.Event()
        with manager.connect() as connected:
            # The next time by itself would be in a day.
            reporting = asyncio.ensure_future(
                report(connected, lambda: text, news, interval_s=86400.0, settle_s=0.0)
            )
            assert await asyncio.to_thread(manager.hear) == "STATUS=a"
            text = "b"
            news.set()
            assert await asyncio.to_thread(manager.hear) == "STATUS=b"
            reporting.cancel()

    asyncio.run(run())


def test_a_manager_that_is_gone_ends_nothing_but_keeps_nothing(tmp_path: Path) -> None:
    with Manager(tmp_path / "notify") as manager:
        connected = manager.connect()
    with connected:
        for tell in (connected.ready, connected.reloading, connected.alive, connected.stopping):
            tell()
        connected.status("alone")
        with pytest.raises(OSError, match=r"not connected|refused"):
            connected.store("name", 0)


def test_a_manager_that_does_not_listen_is_not_waited_for(manager: Manager) -> None:
    with manager.connect() as connected:
        # Far more than its socket takes.
        for number in range(10_000):
            connected.status(str(number))
            connected.alive()
        heard = [manager.hear() for _ in range(4)]
    assert heard == ["STATUS=0", "WATCHDOG=1", "STATUS=1", "WATCHDOG=1"]


class Signs:
    """A thread that gives its sign at once, unless it is stuck."""

    def __init__(self) -> None:
        self.stuck = False
        self._waiting: list[Callable[[], None]] = []

    def ask(self, sign: Callable[[], None]) -> None:
        if self.stuck:
            self._waiting.append(sign)
        else:
            sign()

    def go_on(self) -> None:
        self.stuck = False
        for sign in self._waiting:
            sign()


@contextlib.asynccontextmanager
async def watched(manager: ServiceManager, threads: dict[str, Any], log: Log) -> Any:
    watching = asyncio.ensure_future(watch(manager, threads, log))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_a_daemon_without_threads_lives_while_its_loop_does(manager: Manager) -> None:
    async def run() -> None:
        with manager.connect(0.02) as connected:
            async with watched(connected, {}, SILENT):
                for _ in range(3):
                    assert await asyncio.to_thread(manager.hear) == "WATCHDOG=1"

    asyncio.run(run())


def test_signs_of_life_end_with_any_thread_and_come_back_with_it(manager: Manager) -> None:
    one, other = Signs(), Signs()
    log: asyncio.Queue[str] = asyncio.Queue()

    async def run() -> None:
        loop_log = Log(lambda entry: log.put_nowait(entry.message))
        with manager.connect() as connected:
            async with watched(connected, {"one": one.ask, "other": other.ask}, loop_log):
                for _ in range(3):
                    assert await asyncio.to_thread(manager.hear) == "WATCHDOG=1"
                other.stuck = True
                assert "the other thread did not move for 0.5 s" in await log.get()
                connected.status("freed")
                other.go_on()
                heard = await asyncio.to_thread(manager.hear_until, "STATUS=freed")
                # What was on its way when it got stuck, at the most.
                assert heard in (["STATUS=freed"], ["WATCHDOG=1", "STATUS=freed"])
                for _ in range(2):
                    assert await asyncio.to_thread(manager.hear) == "WATCHDOG=1"
        assert log.empty()

    asyncio.run(run())


def stuck(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> threading.Event:
    """Have a method wait for the event, whenever it is cleared."""
    go_on = threading.Event()
    go_on.set()
    method = getattr(kind, name)

    def wait(self: Any, *arguments: Any) -> Any:
        assert go_on.wait(READY_TIMEOUT_S)
        return method(self, *arguments)

    monkeypatch.setattr(kind, name, wait)
    return go_on


async def check_a_stuck_thread(
    manager: Manager, daemon: Daemon | CoordinatorServer, name: str, go_on: threading.Event
) -> None:
    messages: asyncio.Queue[str] = asyncio.Queue()
    log = Log(lambda entry: messages.put_nowait(entry.message))
    with manager.connect() as connected:
        async with watched(connected, dict(daemon.threads), log):
            for _ in range(3):
                assert await asyncio.to_thread(manager.hear) == "WATCHDOG=1"
            assert messages.empty()
            go_on.clear()
            assert (await messages.get()).startswith(f"the {name} thread did not move for")
            connected.status("freed")
            go_on.set()
            heard = await asyncio.to_thread(manager.hear_until, "STATUS=freed")
            assert len(heard) <= 2
            assert await asyncio.to_thread(manager.hear) == "WATCHDOG=1"


def node_settings(directory: Path) -> NodeSettings:
    return NodeSettings(
        "alpha",
        str(directory / "node.sock"),
        pool_bytes=4 << 20,
        metrics=MetricsSettings(None),
    )


def test_a_node_whose_data_plane_is_stuck_gives_no_sign(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = stuck(monkeypatch, NativeDataPlane, "wait_and_poll")

    async def run() -> None:
        with ServiceManager(None) as nobody:
            async with Daemon(node_settings(tmp_path), 1, nobody, (), SILENT) as node:
                assert "no coordinator configured; 0 clients" in node.status_text()
                await check_a_stuck_thread(manager, node, "data plane", go_on)

    asyncio.run(run())


def test_a_coordinator_whose_store_is_stuck_gives_no_sign(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = stuck(monkeypatch, Store, "_give_signs")

    async def run() -> None:
        store = StoreSettings(str(tmp_path / "t.sqlite"))
        async with CoordinatorServer(Settings("127.0.0.1:0", store=store), 1, SILENT) as server:
            assert server.status_text().startswith("0 of 0 nodes connected; 0 traces open")
            await check_a_stuck_thread(manager, server, "store", go_on)

    asyncio.run(run())


def test_a_full_disk_is_no_stuck_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "_commit", lambda _store, _batch: False)
    signs: threading.Semaphore = threading.Semaphore(0)
    settings = StoreSettings(str(tmp_path / "t.sqlite"))
    store = Store(tmp_path / "t.sqlite", store_limits(settings), lambda _: None, SILENT)
    with store:
        store.submit([Write(1, None)])  # type: ignore[arg-type] # it is never looked at
        for _ in range(3):
            store.give_sign(signs.release)
            assert signs.acquire(timeout=READY_TIMEOUT_S)


# ------------------------------------------------------------- whole daemons


@dataclass
class Started:
    """A daemon of its own, told where its service manager is."""

    process: subprocess.Popen[str]
    config: Path

    def ends(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        _, stderr = self.process.communicate()
        return self.process.returncode, stderr


def write_config(directory: Path, module: str, more: str = "") -> Path:
    path = directory / f"{module}.yaml"
    path.write_text(
        f"node: alpha\nsocket: {directory}/node.sock\npool_bytes: 4MiB\nmetrics: {{listen: null}}\n{more}"
        if module == "appliance"
        else f"listen: 127.0.0.1:0\nstore: {{path: {directory}/t.sqlite}}\n"
        f"metrics: {{listen: null}}\nquery: {{listen: null}}\naccess: {{socket: null}}\n{more}"
    )
    return path


@contextlib.contextmanager
def started(
    manager: Manager, command: Sequence[str], config: Path, **environment: str
) -> Iterator[Started]:
    with subprocess.Popen(
        [sys.executable, "-m", *command, "--config", str(config)],
        env={**os.environ, "NOTIFY_SOCKET": str(manager.path), **environment},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Started(process, config)
        finally:
            process.kill()


@pytest.mark.parametrize("module", ["appliance", "coordinator"])
def test_a_daemon_says_all_that_a_service_manager_may_hear(
    module: str, manager: Manager, tmp_path: Path
) -> None:
    config = write_config(tmp_path, module)
    with started(manager, [module], config, WATCHDOG_USEC="100000") as daemon:
        heard = manager.hear_until("READY=1")
        assert all(text.startswith("FDSTORE=1") for text in heard[:-1])
        heard = [manager.hear() for _ in range(4)]
        assert sorted({text.partition("=")[0] for text in heard}) == ["STATUS", "WATCHDOG"]
        daemon.process.send_signal(signal.SIGHUP)
        reloading = manager.hear_until(r"RELOADING=1\nMONOTONIC_USEC=\d+")[-1]
        assert int(reloading.rpartition("=")[2]) > 0
        # Nothing comes between, so that no sign is taken for the end of it.
        assert manager.hear() == "READY=1"
        code, stderr = daemon.ends(signal.SIGTERM)
        assert manager.hear_until("STOPPING=1")
        assert code == 0
        assert f"{config}: reloaded; nothing taken up" in stderr


@pytest.mark.parametrize("module", ["appliance", "coordinator"])
def test_a_daemon_that_does_not_move_is_started_again(
    module: str, manager: Manager, tmp_path: Path
) -> None:
    config = write_config(tmp_path, module)
    holder = ["appliance.holder", "--watchdog-s", "3", "--", sys.executable, "-m", module]
    with started(manager, holder, config) as held:
        assert manager.hear() == "READY=1"
        children = Path(f"/proc/{held.process.pid}/task/{held.process.pid}/children")
        (stopped,) = children.read_text().split()
        os.kill(int(stopped), signal.SIGSTOP)
        assert manager.hear() == "READY=1"
        (again,) = children.read_text().split()
        assert again != stopped
        code, stderr = held.ends(signal.SIGTERM)
        assert code == 0
        assert "no sign of life" in stderr and "ended by signal 9; again in" in stderr


# -------------------------------------------------------------------- SIGHUP


def reloaded(
    manager: Manager, tmp_path: Path, module: str, before: str, after: str
) -> tuple[int, str]:
    """Start with one configuration, reload another: exit status and what it said."""
    config = write_config(tmp_path, module, before)
    with started(manager, [module], config) as daemon:
        manager.hear_until("READY=1")
        write_config(tmp_path, module, after)
        daemon.process.send_signal(signal.SIGHUP)
        manager.hear_until("RELOADING=1\n.*")
        manager.hear_until("READY=1")
        return daemon.ends(signal.SIGTERM)


@pytest.mark.parametrize("module", ["appliance", "coordinator"])
def test_sighup_before_the_daemon_serves_reloads_when_it_does(
    manager: Manager, tmp_path: Path, module: str
) -> None:
    """It waits for its configuration, which comes through a pipe, when it gets the signal."""
    config = write_config(tmp_path, module)
    text = config.read_text()
    config.unlink()
    os.mkfifo(config)
    with started(manager, [module], config) as daemon:
        with config.open("w") as pipe:
            daemon.process.send_signal(signal.SIGHUP)
            pipe.write(text)
        manager.hear_until("READY=1")
        manager.hear_until("RELOADING=1\n.*")
        config.write_text(text + "log_level: debug\n")
        manager.hear_until("READY=1")
        code, stderr = daemon.ends(signal.SIGTERM)
    assert code == 0
    assert "reloaded; log_level taken up\n" in stderr


@pytest.mark.parametrize(
    ("module", "before", "after", "taken"),
    [
        ("appliance", "", "triggers: {laterals_max: 3}\n", "triggers.laterals_max"),
        ("appliance", "allow: {users: [root]}\n", "", "allow.users"),
        ("appliance", "log_level: debug\n", "", "log_level"),
        (
            "appliance",
            "",
            "percentage: 10\ntrust_incoming: true\n",
            "percentage, trust_incoming",
        ),
        ("coordinator", "", "quiet_s: 0.5\nmemory_bytes: 64MiB\n", "quiet_s, memory_bytes"),
        ("coordinator", "export: {endpoint: 'http://[::1]:1'}\n", "", "export.endpoint"),
        ("coordinator", "", "policy: {percentage: 1}\n", "policy"),
        (
            "coordinator",
            "policy: {percentage: 1}\n",
            "policy: {percentage: 2}\n",
            "policy.percentage",
        ),
        ("coordinator", "policy: {percentage: 1}\n", "policy:\n", "policy"),
    ],
)
def test_sighup_takes_up_what_can_be(
    manager: Manager, tmp_path: Path, module: str, before: str, after: str, taken: str
) -> None:
    code, stderr = reloaded(manager, tmp_path, module, before, after)
    assert code == 0
    assert f"reloaded; {taken} taken up\n" in stderr
    assert "restart" not in stderr


WRITER = """
import sys, backsight
assert backsight.wait_attached(60)
for line in sys.stdin:
    for number in range(int(line), int(line) + 1000):
        with backsight.Trace(f"{number:032x}") as trace:
            trace.write(b"x")
    print("written", flush=True)
"""


def test_a_process_that_is_attached_follows_the_percentage(
    manager: Manager, tmp_path: Path
) -> None:
    config = write_config(tmp_path, "appliance")
    socket_path = f"{tmp_path}/node.sock"

    def indexed() -> int:
        """Runs in the pool: a search for a trace reads an entry of each."""
        node = NodeClient(socket_path)
        before = int(node.status()["dataplane"]["entries_searched"])
        node.peek(TraceId((1).to_bytes(16, "big")))
        return int(node.status()["dataplane"]["entries_searched"]) - before

    with started(manager, ["appliance"], config) as daemon:
        manager.hear_until("READY=1")
        with subprocess.Popen(
            [sys.executable, "-c", WRITER],
            env={**os.environ, "BACKSIGHT_SOCKET": socket_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdin is not None and writer.stdout is not None
            found = [0]
            for number, more in enumerate(("", "percentage: 0", "percentage: 10", "")):
                if number:
                    write_config(tmp_path, "appliance", more)
                    daemon.process.send_signal(signal.SIGHUP)
                    manager.hear_until("RELOADING=1\n.*")
                    manager.hear_until("READY=1")
                writer.stdin.write(f"{number * 1000 + 1}\n")
                writer.stdin.flush()
                assert writer.stdout.readline() == "written\n"
                found.append(indexed())
            writer.stdin.close()
    all_of_them, none, some, all_again = (
        after - before for before, after in itertools.pairwise(found)
    )
    assert (all_of_them, none, all_again) == (1000, 0, 1000)
    assert 50 < some < 200


@pytest.mark.parametrize(
    ("module", "after", "waiting"),
    [
        ("appliance", "tombstones: 7\nclients_max: 5\n", "clients_max, tombstones"),
        ("coordinator", "insecure: true\n", "insecure"),
    ],
)
def test_keys_that_need_a_restart_are_named(
    manager: Manager, tmp_path: Path, module: str, after: str, waiting: str
) -> None:
    code, stderr = reloaded(manager, tmp_path, module, "", after)
    assert code == 0
    assert "reloaded; nothing taken up\n" in stderr
    waits = f"{tmp_path}/{module}.yaml: these changes wait for a restart: {waiting}\n"
    assert f"warning: {waits}" in stderr


def test_keys_that_another_daemon_heeds_are_named(manager: Manager, tmp_path: Path) -> None:
    probes = "probes: {loader: bcc, bypass: true}\n"
    own = "percentage: 5\nmachine: {links: false}\n"
    code, stderr = reloaded(manager, tmp_path, "appliance", "", f"{probes}{own}")
    assert code == 0
    path = tmp_path / "appliance.yaml"
    assert f": {path}: reloaded; percentage, machine.links taken up\n" in stderr
    others = "changed for backsight-probes, which has a reload of its own"
    keys = "machine.links, probes.loader, probes.bypass\n"
    assert f": {path}: {others}: {keys}" in stderr
    assert "restart" not in stderr
    assert stderr.endswith(": told to end by SIGTERM\n")


@pytest.mark.parametrize("module", ["appliance", "coordinator"])
def test_a_bad_configuration_is_not_taken_up(manager: Manager, tmp_path: Path, module: str) -> None:
    code, stderr = reloaded(manager, tmp_path, module, "", "log_level: loud\nnope: 1\n")
    assert code == 0
    lines = [line.partition(": error: ")[2] for line in stderr.splitlines() if ": error: " in line]
    assert [line.partition(": ")[2].partition(":")[0] for line in lines[:2]] == [
        "log_level",
        "nope",
    ]
    assert lines[2:] == ["the configuration is kept as it was"]


def test_without_a_file_there_is_nothing_to_reload(tmp_path: Path) -> None:
    messages: list[str] = []

    async def run() -> None:
        settings = node_settings(tmp_path)
        with ServiceManager(None) as nobody:
            async with Daemon(settings, 1, nobody, (), SILENT) as node:
                reload(node, Configuration(NODE_PROGRAM, settings, None), logs_to(messages))

    asyncio.run(run())
    assert messages == [
        "nothing to reload: the daemon was started without --config",
        "the configuration is kept as it was",
    ]
