# SPDX-License-Identifier: Apache-2.0
"""Containers of OCI images, as a runtime of Kubernetes starts them: systemd-nspawn runs the bundles.

An image is unpacked to a bundle (``umoci unpack``); what a pod would say of it stands in a ``Container``.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from testbed.cgroups import Group, group, within
from testbed.topology import DIES_WITH_PARENT, Host, Opened, end

# As many ids as a pod with a user namespace gets from the kubelet.
IDS = 65536

_STOP_TIMEOUT_S = 30.0

# Of containerd's and CRI-O's defaults: enough for whatever one opens.
_FILES_MAX = 1 << 20


def bytes_of(quantity: str) -> int:
    """What Kubernetes' ``64Mi`` or ``1Gi`` is."""
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]


def unpacked(image: str, directory: Path, first_id: int = 0) -> Path:
    """The files of ``LAYOUT:TAG``, as a bundle in a new directory; root's are ``first_id``'s there."""
    mapping = f"0:{first_id}:{IDS}"
    subprocess.run(
        ["umoci", "unpack", "--uid-map", mapping, "--gid-map", mapping]
        + ["--image", image, directory],
        check=True,
    )
    return directory


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory of this machine (``hostPath``), or a file (of a ``ConfigMap``), in a container."""

    source: Path
    path: str
    is_read_only: bool = True

    def __str__(self) -> str:
        return f"--bind{'-ro' if self.is_read_only else ''}={self.source}:{self.path}"


@dataclass(slots=True)
class Container(Opened):
    """One container of a pod. It runs when entered; whether it is ready, its probes would tell.

    name, bundle: of its files, in which no other runs at the same time.
    host: whose network it has; None: one of its own, with nobody else.
    arguments, command: instead of the image's.
    user, group: instead of the image's (``runAsUser``, ``runAsGroup``); ``groups``: besides
    (``supplementalGroups``).
    capabilities: all that it has.
    sees_all: the machine's processes (``hostPID``).
    first_id: it has a user namespace, whose root is that one (``hostUsers: false``).
    memory_bytes: all that it may take, with what starts it (``limits.memory``); None: no limit.
    is_asked: its outputs are heard, by ``hear()`` and ``ask()``, and not in its log.
    """

    name: str
    bundle: Path
    host: Host | None = None
    binds: Sequence[Bind] = ()
    arguments: Sequence[str] | None = None
    command: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    user: int | None = None
    group: int | None = None
    groups: Sequence[int] = ()
    capabilities: Sequence[str] = ()
    sees_all: bool = False
    first_id: int | None = None
    memory_bytes: int | None = None
    is_asked: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None
    _memory: Group | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def log_path(self) -> Path:
        """What it says, since it was opened."""
        return self.bundle.parent / f"{self.name}.log"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """nspawn, which ends as the container does."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """Of its first process, here."""
        nspawn = self.process.pid
        (first,) = Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split()
        return int(first)

    @property
    def memory(self) -> Group:
        """The control group that it is in while it is open."""
        assert self._memory is not None
        return self._memory

    def open(self) -> None:
        own = self.bundle.parent / f"{self.name}.bundle"
        own.mkdir()
        config = self._config(json.loads((self.bundle / "config.json").read_text()))
        (own / "config.json").write_text(json.dumps(config))
        self._log = self.log_path.open("wb")
        self._memory = self._stack.enter_context(group("memory", self.name))
        if self.memory_bytes is not None:
            self._memory.limit_memory(self.memory_bytes)
        self._process = subprocess.Popen(
            [
                *DIES_WITH_PARENT,
                *within(self._memory.path),
                "systemd-nspawn",
                f"--oci-bundle={own}",
                f"--machine={self.name}",
                "--register=no",
                "--keep-unit",
                "--no-new-privileges=yes",
                # Else it would kill what is inside; this is what the images ask for.
                "--kill-signal=SIGTERM",
                "--console=pipe",
                # nspawn knows no "ro" among the mounts of a bundle.
                *map(str, self.binds),
                # To who has the capabilities, as containerd's default profile. CRI-O's does not.
                "--system-call-filter=bpf",
            ],
            stdin=subprocess.PIPE if self.is_asked else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.is_asked else self._log,
            stderr=self._log,
        )

    def ask(self, line: str = "") -> str:
        """Say a line to its first process, and hear the next one that it says; empty at its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().rstrip("\n")

    def close(self) -> None:
        if self._process is not None:
            # Who is asked ends when it is asked no more: a first process ignores SIGTERM by default.
            if self._process.stdin is not None:
                self._process.stdin.close()
            end(self._process, signal.SIGTERM, _STOP_TIMEOUT_S)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
        self._stack.close()
        if self._log is not None:
            self._log.close()
            self._log = None
        shutil.rmtree(self.bundle.parent / f"{self.name}.bundle", ignore_errors=True)

    def log(self) -> str:
        """What it has said that nobody heard."""
        return self.log_path.read_text(errors="replace")

    def await_said(self, pattern: str) -> None:
        """Until its log has a line with that. RuntimeError if it ends before."""
        follow = ["tail", "--lines=+1", "--follow", f"--pid={self.process.pid}"]
        with subprocess.Popen([*follow, self.log_path], stdout=subprocess.PIPE, text=True) as tail:
            try:
                assert tail.stdout is not None
                if not any(re.search(pattern, line) for line in tail.stdout):
                    raise RuntimeError(f"{self.name} has not said {pattern!r}, but:\n{self.log()}")
            finally:
                tail.terminate()

    def _config(self, image: dict[str, Any]) -> dict[str, Any]:
        """config.json of OCI's runtime-spec."""
        process = image["process"]
        arguments = process["args"]
        if self.command is not None:
            arguments = [*self.command]
        if self.arguments is not None:
            # The image's own command ends with its configuration.
            kept = arguments if self.command is not None else arguments[:-1]
            arguments = [*kept, *self.arguments]
        user = process["user"]
        uid = user["uid"] if self.user is None else self.user
        gid = user["gid"] if self.group is None else self.group
        capabilities = list(self.capabilities)
        sets = ("bounding", "effective", "permitted")
        config: dict[str, Any] = {
            "ociVersion": "1.0.0",
            "process": {
                # nspawn names one that only root may use; runtimes name none.
                "args": ["/usr/bin/env", "--unset=NOTIFY_SOCKET", *arguments],
                "cwd": "/",
                "env": [*process["env"], *(f"{k}={v}" for k, v in self.environment.items())],
                "user": {"uid": uid, "gid": gid, "additionalGids": list(self.groups)},
                "capabilities": dict.fromkeys(sets, capabilities),
                "noNewPrivileges": True,
                "rlimits": [{"type": "RLIMIT_NOFILE", "soft": _FILES_MAX, "hard": _FILES_MAX}],
            },
            "root": {"path": str((self.bundle / "rootfs").resolve()), "readonly": True},
            "hostname": self.name,
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            ],
            "linux": {
                "namespaces": [
                    *({"type": name} for name in ("mount", "ipc", "uts", "cgroup")),
                    {"type": "network", **self._network()},
                ],
            },
        }
        if not self.sees_all:
            config["linux"]["namespaces"].append({"type": "pid"})
        if self.first_id is not None:
            mapping = [{"containerID": 0, "hostID": self.first_id, "size": IDS}]
            config["linux"]["namespaces"].append({"type": "user"})
            config["linux"] |= {"uidMappings": mapping, "gidMappings": mapping}
        return config

    def _network(self) -> dict[str, str]:
        return {"path": f"/run/netns/{self.host.namespace}"} if self.host is not None else {}
