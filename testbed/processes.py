# SPDX-License-Identifier: Apache-2.0
"""Processes of live systems: databases, and services under ``opentelemetry-instrument``."""

from __future__ import annotations

import contextlib
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from testbed.topology import DaemonError, Host, Opened, await_ready, end

APPS = Path(__file__).parent / "apps"
"""Where services find their modules, and the requirements of their virtual environments stand."""

# Whoever is there on every Debian, and owns nothing.
_USER = "nobody"
_STOP_TIMEOUT_S = 10.0

POSTGRESQL_PORT = 5432
REDIS_PORT = 6379


class Process(Opened):
    """A program on a host, with a log; it ends when this is closed, and with this process.

    It gets the environment that is given, and nothing of ours. ``user``: whom it runs
    as (None: ours). ``notifies``: opening waits until it says READY=1, as systemd would.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        *,
        user: str | None = None,
        notifies: bool = False,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.host = host
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._command = command
        self._directory = directory
        self._environment = environment
        self._user = user
        self._notifies = notifies
        self._stop_signal = stop_signal
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        log = self._stack.enter_context(self.log_path.open("ab"))
        if not self._notifies:
            self._start(log, self._environment)
            return
        path = self._directory / f"{self.name}.notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.bind(str(path))
            self._stack.callback(path.unlink)
            path.chmod(0o666)
            process = self._start(log, {**self._environment, "NOTIFY_SOCKET": str(path)})
            await_ready(notify, process, self.name, self.last_words)

    def _start(self, log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Another user's process has forgotten our pdeathsig: set it anew.
        become = (
            []
            if self._user is None
            else [
                "setpriv", f"--reuid={self._user}", f"--regid={_group(self._user)}",
                "--clear-groups", "--pdeathsig", self._stop_signal.name.removeprefix("SIG"), "--",
            ]
        )  # fmt: skip
        self.process = self.host.popen(
            [
                "env", "--ignore-environment",
                *(f"{key}={value}" for key, value in environment.items()),
                *become, *self._command,
            ],
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )  # fmt: skip
        self._stack.callback(self._stop)
        return self.process

    def _stop(self) -> None:
        end(self.process, self._stop_signal, _STOP_TIMEOUT_S)

    def last_words(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])

    def close(self) -> None:
        self._stack.close()


def _group(user: str) -> int:
    return pwd.getpwnam(user).pw_gid


def _path(environment: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **environment}


class Postgresql(Process):
    """A cluster of its own in a directory, on a host's loopback address; database ``postgres``."""

    URL = f"postgresql://shop@127.0.0.1:{POSTGRESQL_PORT}/postgres"

    def __init__(self, host: Host, directory: Path) -> None:
        versions = sorted(
            Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name)
        )
        if not versions:
            raise DaemonError("postgresql is not installed: sudo make setup")
        self._programs = versions[-1]
        self._data = directory / "postgresql"
        super().__init__(
            host,
            "postgresql",
            [
                str(self._programs / "postgres"), "-D", str(self._data),
                "-c", "listen_addresses=127.0.0.1",
                "-c", f"port={POSTGRESQL_PORT}",
                "-c", "unix_socket_directories=",
                # The directory is removed at the end: nothing is worth a wait for the disk.
                "-c", "fsync=off",
                "-c", "synchronous_commit=off",
            ],
            directory,
            _path({}),
            user=_USER,
            notifies=True,
            stop_signal=signal.SIGINT,  # its fast shutdown
        )  # fmt: skip

    def open(self) -> None:
        self._data.mkdir(mode=0o700)
        shutil.chown(self._data, _USER, _group(_USER))
        command = [str(self._programs / "initdb"), "-D", str(self._data), "-U", "shop"]
        done = subprocess.run(
            [*command, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"],
            user=_USER,
            group=_group(_USER),
            extra_groups=[],
            env=_path({}),
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise DaemonError(f"initdb ended with status {done.returncode}:\n{done.stdout}")
        super().open()


class Redis(Process):
    """An instance of its own on a host's loopback address, which keeps nothing on disk."""

    URL = f"redis://127.0.0.1:{REDIS_PORT}"

    def __init__(self, host: Host, directory: Path) -> None:
        super().__init__(
            host,
            "redis",
            [
                "redis-server", "--bind", "127.0.0.1", "--port", str(REDIS_PORT),
                "--save", "", "--appendonly", "no", "--dir", "/", "--supervised", "systemd",
            ],
            directory,
            _path({}),
            user=_USER,
            notifies=True,
        )  # fmt: skip


def _witness_entry_point(directory: Path) -> Path:
    """Who has this in its PYTHONPATH calls witness.install() once it is instrumented."""
    package = directory / "witness-0.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: witness\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[opentelemetry_post_instrument]\nwitness = witness:install\n"
    )
    return directory


class Service(Process):
    """A service of the shop, instrumented from outside; ``access_log`` is what it says of itself.

    ``witnessed``: and ``witness`` is which spans it had (apps/witness.py).
    """

    def __init__(
        self,
        host: Host,
        name: str,
        python: Path,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        *,
        witnessed: bool = False,
    ) -> None:
        self.witness = directory / f"{name}.spans.jsonl"
        if witnessed:
            path = [str(APPS), str(_witness_entry_point(directory))]
            environment = {
                **environment,
                "PYTHONPATH": ":".join(path),
                "WITNESS": str(self.witness),
            }
        self.access_log = directory / f"{name}.access.jsonl"
        programs = python.parent
        super().__init__(
            host,
            name,
            [str(programs / "opentelemetry-instrument"), str(programs / command[0]), *command[1:]],
            directory,
            _path(
                {
                    "OTEL_SERVICE_NAME": name,
                    # Names of attributes as OpenTelemetry has them today.
                    "OTEL_SEMCONV_STABILITY_OPT_IN": "http,database",
                    "ACCESS_LOG": str(self.access_log),
                    **environment,
                }
            ),
        )
