# SPDX-License-Identifier: Apache-2.0
"""Machines with an init system: a tree of Debian that systemd-nspawn boots.

Each has its own files, processes, users and network, and the kernel of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from testbed import cgroups
from testbed.topology import DIES_WITH_PARENT, Host, Opened, await_ready, end

_REPOSITORY = Path(__file__).resolve().parent.parent

# What a plain Debian has of it, and what is asked in it.
_PACKAGES = ("systemd", "systemd-sysv", "dbus", "libnss-systemd", "iproute2", "procps", "curl")

_STOP_TIMEOUT_S = 60.0

# nspawn takes these away by default. A machine of one's own has them.
_CAPABILITIES = ("CAP_BPF", "CAP_PERFMON")

_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


def plain_tree(suite: str) -> Path:
    """A plain Debian, made at the first call and kept in build/; not to be booted itself."""
    tree = _REPOSITORY / "build" / "trees" / f"{suite}-plain"
    make = [str(_REPOSITORY / "packaging/make-tree"), str(tree), suite, "apt", *_PACKAGES]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return tree


def tree_with(
    packages: Sequence[Path], suite: str, directory: Path, others: Sequence[str] = ()
) -> Path:
    """A plain Debian with packages in its /dist, which apt can install there without a network.

    ``others``: packages of Debian that it can install as well.
    """
    tree = directory / f"{suite}.tree"
    subprocess.run(["cp", "--archive", "--reflink=auto", plain_tree(suite), tree], check=True)
    dist = tree / "dist"
    dist.mkdir()
    for package in packages:
        shutil.copy(package, dist)
    download = "apt-get install --yes --download-only"
    for script in ("apt-get update", f"{download} /dist/*.deb {' '.join(others)}"):
        # With the network of this machine.
        subprocess.run(
            ["chroot", tree, "env", "-i", *_assignments(), "sh", "-c", script],
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return tree


class Machine(Opened):
    """A machine that runs when entered: all of its units have started, or failed."""

    def __init__(self, name: str, tree: Path, directory: Path, host: Host | None = None) -> None:
        """``tree`` is copied to ``directory``, and removed with it. ``host``: where its network is.

        Without one it has a network with nobody else.
        """
        self.name = name
        self._network = (
            "--private-network"
            if host is None
            else f"--network-namespace-path=/run/netns/{host.namespace}"
        )
        self.root = directory / f"{name}.tree"
        self._tree = tree
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._groups: list[Path] = []
        self._log_path = directory / f"{name}.log"
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def open(self) -> None:
        # Else nspawn puts all machines into the same ones, and each has those of the others.
        self._groups = self._stack.enter_context(cgroups.subtree(self.name))
        subprocess.run(["cp", "--archive", "--reflink=auto", self._tree, self.root], check=True)
        (self.root / "etc/hostname").write_text(f"{self.name}\n")
        # As Debian's installer has it.
        (self.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        self.boot()

    def boot(self) -> None:
        """Start it, and wait until its units have started."""
        notify_path = self._directory / f"{self.name}.notify"
        notify_path.unlink(missing_ok=True)
        self._log = self._log_path.open("ab")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(notify_path))
            self._process = subprocess.Popen(
                [
                    *DIES_WITH_PARENT,
                    *cgroups.within(*self._groups),
                    "systemd-nspawn",
                    "--directory",
                    self.root,
                    "--machine",
                    self.name,
                    "--register=no",
                    "--keep-unit",
                    "--boot",
                    "--notify-ready=yes",
                    self._network,
                    # Packages write these files themselves.
                    "--timezone=off",
                    "--resolv-conf=off",
                    f"--capability={','.join(_CAPABILITIES)}",
                    "--system-call-filter=bpf",
                    "--console=pipe",
                ],
                env={**os.environ, "NOTIFY_SOCKET": str(notify_path)},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
            await_ready(notify, self._process, self.name, self.last_words)
        nspawn = self._process.pid
        (leader,) = Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split()
        self._leader = int(leader)

    def halt(self) -> None:
        """Shut it down, as by its power button."""
        if self._process is not None:
            end(self._process, signal.SIGTERM, _STOP_TIMEOUT_S)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def cut_power(self) -> None:
        """All of its processes are gone at once."""
        assert self._process is not None
        os.kill(self._leader, signal.SIGKILL)
        self._process.wait(_STOP_TIMEOUT_S)
        self.halt()

    def close(self) -> None:
        self.halt()
        shutil.rmtree(self.root, ignore_errors=True)
        self._stack.close()

    def run(self, *command: str, check: bool = True) -> str:
        """What a program prints there; RuntimeError, with that, if it fails."""
        # In a session of its own: `kill 0` there means its process group, which is not to be ours.
        done = subprocess.run(
            [*self.enter_command(), *command],
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        if check and done.returncode:
            said = done.stdout + done.stderr
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.returncode}\n{said}")
        return done.stdout

    def sh(self, script: str) -> str:
        """What a script prints, which ends at the first command that fails."""
        return self.run("sh", "-euc", script)

    def popen(self, *command: str) -> subprocess.Popen[str]:
        """Start a program there, and read what it prints."""
        return subprocess.Popen(
            [*DIES_WITH_PARENT, *self.enter_command(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def last_words(self) -> str:
        """The end of what its console shows."""
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-20:])

    def enter_command(self) -> list[str]:
        """By which a program is run there."""
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        return ["nsenter", f"--target={self._leader}", *namespaces, "env", "-i", *_assignments()]


def _assignments() -> list[str]:
    return [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
