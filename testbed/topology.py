# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces on a bridge, real daemons in them.

    with Network("two") as network:
        hub = network.host("coordinator")
        with Coordinator(hub, directory) as coordinator:
            with Node(network.host("alpha"), "alpha", directory, coordinator) as node:
                with node.host.popen(["./writer"], env=node.client_environment()) as writer: ...

Everything is private to the run: the bridge has a namespace of its own, the
addresses (10.77.0.0/16) are routed nowhere else, the names carry the pid of
the run. What a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import abc
import contextlib
import ipaddress
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import yaml

from ctl.node import NodeClient

PYTHON = sys.executable
COORDINATOR_PORT = 4770

_SUBNET = ipaddress.ip_network("10.77.0.0/16")
_PREFIX = "backsight"
_READY_TIMEOUT_S = 120.0  # 75 Python processes start on two cores
_STOP_TIMEOUT_S = 20.0
_SETTLE_TIMEOUT_S = 60.0

# By a program and not by preexec_fn, for which Popen would fork: grpcio 1.80 and
# later start their poller again in a forked child, where it finds its epoll fd
# closed and aborts before exec, if this process has a channel (grpc issue 43055).
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def remove_stale_namespaces() -> None:
    """Delete the namespaces of runs whose process is gone."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        name = line.split()[0]
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not _is_alive(int(pid)):
            with contextlib.suppress(RuntimeError):
                _ip("netns", "delete", name)


class Opened(abc.ABC):
    """What a with block opens and closes; closed too if opening fails half-way."""

    __slots__ = ()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abc.abstractmethod
    def open(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address."""

    name: str
    namespace: str
    address: str

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a program on this host; it ends with this process at the latest."""
        return subprocess.Popen(
            [*DIES_WITH_PARENT, *self._inside(command)],
            env={**os.environ, **(env or {})},
            **options,
        )

    def run(self, *command: str, said: str = "") -> str:
        """What a program prints on this host; CalledProcessError if it fails. ``said``: its input."""
        return subprocess.run(
            self._inside(command), input=said, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]


@dataclass(slots=True)
class Network(Opened):
    """A bridge in a namespace of its own, and hosts on it."""

    name: str
    _namespaces: list[str] = field(default_factory=list)
    _hosts: list[Host] = field(default_factory=list)

    @property
    def _hub(self) -> str:
        return f"{_PREFIX}-{os.getpid()}-{self.name}-hub"

    def open(self) -> None:
        remove_stale_namespaces()
        self._add_namespace(self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")

    def _add_namespace(self, namespace: str) -> None:
        self._namespaces.append(namespace)
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def host(self, name: str) -> Host:
        """A new host on the bridge."""
        number = len(self._hosts) + 1
        namespace = f"{_PREFIX}-{os.getpid()}-{self.name}-{number}"
        address = str(_SUBNET[number])
        self._add_namespace(namespace)
        port = f"port{number}"
        _ip(
            "-n", namespace, "link", "add", "eth0", "type", "veth",
            "peer", "name", port, "netns", self._hub,
        )  # fmt: skip
        _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{address}/{_SUBNET.prefixlen}", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        host = Host(name, namespace, address)
        self._hosts.append(host)
        return host

    @contextlib.contextmanager
    def unplugged(self, host: Host) -> Iterator[None]:
        """A host's cable is out, at the end of the bridge."""
        port = f"port{self._hosts.index(host) + 1}"
        _ip("-n", self._hub, "link", "set", port, "down")
        try:
            yield
        finally:
            _ip("-n", self._hub, "link", "set", port, "up")

    def close(self) -> None:
        for namespace in reversed(self._namespaces):
            with contextlib.suppress(RuntimeError):
                _ip("netns", "delete", namespace)
        self._namespaces.clear()


class DaemonError(RuntimeError):
    """A daemon did not start, or did not stop; the message holds its last words."""


def await_ready(
    notify: socket.socket,
    process: subprocess.Popen[bytes],
    name: str,
    last_words: Callable[[], str],
) -> None:
    """Until a process says READY=1 on its NOTIFY_SOCKET. DaemonError if it ends or takes too long."""
    pidfd = os.pidfd_open(process.pid)
    try:
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while True:
            left_s = deadline_s - time.monotonic()
            ready = notify.fileno()
            readable, _, _ = select.select([ready, pidfd], [], [], max(0.0, left_s))
            if ready in readable:
                if b"READY=1" in notify.recv(4096).split(b"\n"):
                    return
            elif pidfd in readable:
                raise DaemonError(f"{name} ended at its start:\n{last_words()}")
            elif left_s <= 0:
                raise DaemonError(f"{name} is not ready in time:\n{last_words()}")
    finally:
        os.close(pidfd)


def end(process: subprocess.Popen[Any], number: signal.Signals, timeout_s: float) -> None:
    """Tell a process to end, if it has not; kill it if it takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(number)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Daemon(Opened):
    """A daemon under the holder, in a host's namespace; ready when entered."""

    def __init__(
        self, host: Host, module: str, name: str, directory: Path, config: Mapping[str, Any]
    ) -> None:
        self.host = host
        self.name = name
        self.directory = directory
        self.config_path = directory / f"{name}.yaml"
        self.log_path = directory / f"{name}.log"
        self.program: Sequence[str | Path] = (PYTHON, "-m", module)
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def open(self) -> None:
        self.start()
        self.wait_ready()

    def command(self) -> list[str]:
        """What the holder runs."""
        return [*map(str, self.program), "--config", str(self.config_path)]

    def start(self) -> None:
        """Start it without waiting; `wait_ready` waits."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config_path.write_text(yaml.safe_dump(dict(self.config), sort_keys=False))
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify_path = self.directory / f"{self.name}.notify"
        self._notify_path.unlink(missing_ok=True)
        self._notify.bind(str(self._notify_path))
        # The daemon may be another user's.
        self._notify_path.chmod(0o777)
        self._log = self.log_path.open("ab")
        self._process = self.host.popen(
            [PYTHON, "-m", "appliance.holder", "--", *self.command()],
            env={"NOTIFY_SOCKET": str(self._notify_path)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def wait_ready(self) -> None:
        """Until the daemon says READY=1. Raises DaemonError if it ends or takes too long."""
        assert self._process is not None
        await_ready(self._notify, self._process, self.name, self.last_words)

    def holder_pid(self) -> int:
        """The pid of the holder, which keeps the daemon's file descriptors."""
        assert self._process is not None
        return self._process.pid

    def daemon_pid(self) -> int:
        """The pid of the daemon itself, below the holder."""
        holder = self.holder_pid()
        children = Path(f"/proc/{holder}/task/{holder}/children")
        pids = children.read_text().split()
        if len(pids) != 1:
            raise DaemonError(f"{self.name}: the holder has {len(pids)} children, want 1")
        return int(pids[0])

    def kill_daemon(self) -> int:
        """``kill -9`` the daemon and wait until the holder's new one is ready. Returns the old pid."""
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        self.wait_ready()
        return pid

    def reload(self, **changes: object) -> None:
        """Change its configuration, and wait until it says that it has read it."""
        config = yaml.safe_load(self.config_path.read_text())
        self.config_path.write_text(yaml.safe_dump(config | changes))
        os.kill(self.daemon_pid(), signal.SIGHUP)
        self.wait_ready()

    def last_words(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])

    def close(self) -> None:
        if self._process is not None:
            end(self._process, signal.SIGTERM, _STOP_TIMEOUT_S)
            self._process = None
            self._notify.close()
            self._notify_path.unlink(missing_ok=True)
        if self._log is not None:
            self._log.close()
            self._log = None


class Coordinator(Daemon):
    """``backsight-coordinator`` on a host."""

    def __init__(
        self, host: Host, directory: Path, config: Mapping[str, Any] | None = None
    ) -> None:
        self.endpoint = f"{host.address}:{COORDINATOR_PORT}"
        self.shown: Path | None = None
        """Where the certificate is that ``backsightctl`` shows."""
        super().__init__(
            host,
            "coordinator",
            "coordinator",
            directory,
            {
                "listen": self.endpoint,
                "insecure": True,
                # Who is on another host asks too; and a test's directory has too long a name.
                "access": {"socket": None, "anonymous": "operator"},
                "store": {"path": str(directory / "traces.sqlite")},
                **(config or {}),
            },
        )

    def ctl(self, *arguments: str) -> str:
        """What ``backsightctl`` prints, asked from the coordinator's own host."""
        tls = ["--tls", str(self.shown)] if self.shown is not None else []
        return self.host.run(PYTHON, "-m", "ctl", "--coordinator", self.endpoint, *tls, *arguments)

    def ctl_json(self, *arguments: str) -> list[dict[str, Any]]:
        """The same with ``--json``: an object a line."""
        return [json.loads(line) for line in self.ctl(*arguments, "--json").splitlines()]


class Node(Daemon):
    """``backsight-node`` on a host."""

    def __init__(
        self,
        host: Host,
        name: str,
        directory: Path,
        coordinator: Coordinator | None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.socket_path = directory / f"{name}.sock"
        super().__init__(
            host,
            "appliance",
            name,
            directory,
            {
                "node": name,
                "socket": str(self.socket_path),
                **(
                    {"coordinator": {"endpoint": coordinator.endpoint, "insecure": True}}
                    if coordinator is not None
                    else {}
                ),
                "addresses": [host.address],
                **(config or {}),
            },
        )

    @property
    def control(self) -> NodeClient:
        """What ``backsightctl --node`` asks."""
        return NodeClient(str(self.socket_path))

    def client_environment(self, service: str | None = None) -> dict[str, str]:
        """What a program needs to find this node."""
        return {
            "BACKSIGHT_SOCKET": str(self.socket_path),
            "BACKSIGHT_SERVICE": service or self.name,
        }


@contextlib.contextmanager
def started(daemons: Sequence[Daemon]) -> Iterator[None]:
    """All of them, started side by side."""
    with contextlib.ExitStack() as stack:
        for daemon in daemons:
            stack.callback(daemon.close)
            daemon.start()
        for daemon in daemons:
            daemon.wait_ready()
        yield
        stack.close()


def await_settled(
    coordinator: Coordinator,
    nodes: Collection[Node],
    written: Callable[[], object] = lambda: None,
    *,
    silent_s: float = 0,
) -> bool:
    """Until each trace that any of the nodes triggered has its last verdict. False: not in time.

    ``written``: how far those are who write still. They are at rest when it did not change for
    ``silent_s``.
    """
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    before: object = None
    since_s = 0.0
    while (now_s := time.monotonic()) < deadline_s:
        # The nodes first: what they have handed over by now is in the listing.
        unreported = sum(node.control.status()["triggers_unreported"] for node in nodes)
        verdicts = {trace["trace_id"]: trace["verdict"] for trace in coordinator.ctl_json("traces")}
        is_open = any(verdict["kind"] == "provisional" for verdict in verdicts.values())
        now = (written(), verdicts)
        if now != before:
            before, since_s = now, now_s
        elif not unreported and not is_open and now_s - since_s >= silent_s:
            return True
    return False


def main() -> int:
    """``python3 -m testbed.topology``: remove what killed runs left behind."""
    remove_stale_namespaces()
    return 0


if __name__ == "__main__":
    sys.exit(main())
