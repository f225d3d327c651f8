# SPDX-License-Identifier: Apache-2.0
"""Attacks on a real coordinator: its memory stays within bounds, and an honest node gets in beside them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from ctl.pki import Authority
from protocol import wire
from protocol.messages import Hello, Welcome
from testbed.ports import free_port
from testbed.topology import await_ready
from tests.hostile_peers.attacks import CROWD_FROM

# Of the coordinator's whole process. One peer may hold 8 MiB of an unfinished message on a
# connection, and some more until that is seen.
_MAY_GROW_BYTES = 96 << 20

# Whom nobody named, and a viewer. Nobody's numbers, on all machines.
_STRANGER, _VIEWER = 65534, 65533


@dataclass
class Attacked:
    """A coordinator, and files of whoever comes."""

    process: subprocess.Popen[bytes]
    endpoint: str
    pki: Path
    socket: Path
    log: Path

    def memory_bytes(self, name: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        raise AssertionError(f"no {name}")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def attack(self, name: str, *files: Path) -> dict[str, int]:
        return _attack(name, self.endpoint, *files)

    def attack_at_the_socket(self, name: str, uid: int) -> dict[str, int]:
        return _attack(name, f"unix:{self.socket}", uid)

    def welcomes(self, node: Path, name: str) -> bool:
        """Whether an honest node gets in now."""

        async def ask() -> bool:
            read = [(node / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt")]
            async with grpc.aio.secure_channel(
                self.endpoint, grpc.ssl_channel_credentials(*read)
            ) as channel:
                call = channel.stream_stream("/backsight.v1.Coordinator/Control", None, None)(
                    None, timeout=60
                )
                await call.write(wire.encode_node_batch([Hello(name, 1)]))
                data = await call.read()
                call.cancel()
                return isinstance(data, bytes) and isinstance(
                    wire.decode_coordinator_batch(data)[0], Welcome
                )

        return asyncio.run(ask())


def _attack(name: str, endpoint: str, *given: object) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.hostile_peers.attacks", name, endpoint]
    done = subprocess.run(
        [*command, *map(str, given)], stdout=subprocess.PIPE, check=True, timeout=100
    )
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    directory = tmp_path_factory.mktemp("attacked")
    authority = Authority.create(directory / "pki", "d")
    own = authority.issue("coordinator", is_server=True, addresses=["127.0.0.1"]).directory
    endpoint = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        # Which others may enter.
        entered = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="backsight-")))
        entered.chmod(0o755)
        path = entered / "c.sock"
        yield _serving(stack, directory, endpoint, own, path)


def _serving(
    stack: contextlib.ExitStack, directory: Path, endpoint: str, own: Path | None, path: Path
) -> Attacked:
    """``own``: where its certificate is; None: in clear text."""
    config: dict[str, Any] = {
        "listen": endpoint,
        "store": {"path": str(directory / "t.sqlite")},
        "metrics": {"listen": None},
        "query": {"listen": None},
        "access": {"socket": str(path), "viewers": {"users": [_VIEWER]}},
    }
    if own is not None:
        config["tls"] = {
            "ca": str(own / "ca.crt"),
            "certificate": str(own / "tls.crt"),
            "key": str(own / "tls.key"),
        }
    (directory / "c.yaml").write_text(yaml.safe_dump(config))
    log = directory / "log"
    notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    notify.bind(str(directory / "notify"))
    written = stack.enter_context(log.open("wb"))
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "coordinator", "--config", str(directory / "c.yaml")],
            env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify")},
            stderr=written,
        )
    )
    stack.callback(process.terminate)
    await_ready(notify, process, "coordinator", log.read_text)
    return Attacked(process, endpoint, directory / "pki", path, log)


def issued(attacked: Attacked, name: str, role: str = "node") -> Path:
    directory = attacked.pki / f"{role}-{name}"
    if not directory.exists():
        Authority(attacked.pki).issue(f"{role}/{name}", is_server=False)
    return directory


@pytest.mark.parametrize(
    "attack", ["unfinished", "endless", "question", "bomb", "calls", "crowd", "silent"]
)
def test_a_peer_with_a_certificate_takes_its_part_and_no_more(
    attacked: Attacked, attack: str
) -> None:
    role = "viewer" if attack == "question" else "node"
    bad, good = issued(attacked, "bad", role), issued(attacked, "good")
    attacked.forget_peak()
    before = attacked.memory_bytes("VmRSS")
    result = attacked.attack(attack, attacked.pki / "ca.crt", bad)
    assert result["connections"] >= 1
    assert attacked.memory_bytes("VmHWM") - before < _MAY_GROW_BYTES
    if attack in ("endless", "question", "crowd"):
        assert result["ended"] == result["connections"]
    if attack in ("endless", "question"):
        assert "of a message that is not whole yet" in attacked.log.read_text()
    if attack == "calls":
        assert result["refused"] == 100 - 8
    if attack == "crowd":
        said = attacked.log.read_text()
        assert f"{CROWD_FROM}: for 30 s no more connections are taken from there" in said
        with socket.socket() as back:
            back.bind((CROWD_FROM, 0))
            back.setblocking(False)
            host, port = attacked.endpoint.split(":")
            # On one machine a connection is there, or not, when that comes back.
            assert back.connect_ex((host, int(port))) == errno.EINPROGRESS
            assert not select.select([], [back], [], 0)[1]
    assert attacked.welcomes(good, "good")
    assert attacked.process.poll() is None


@pytest.mark.parametrize(("role", "may_have_bytes"), [("node", 0), ("viewer", 64 << 20)])
def test_many_questions_of_one_certificate_take_its_part_and_no_more(
    attacked: Attacked, role: str, may_have_bytes: int
) -> None:
    """A node may ask none of them; a viewer may, as many at once as all of his may have."""
    bad, good = issued(attacked, "bad", role), issued(attacked, "good")
    attacked.forget_peak()
    before = attacked.memory_bytes("VmRSS")
    result = attacked.attack("questions", attacked.pki / "ca.crt", bad)
    assert result["connections"] > 100
    assert attacked.memory_bytes("VmHWM") - before < may_have_bytes + _MAY_GROW_BYTES
    assert attacked.welcomes(good, "good")
    assert attacked.process.poll() is None


def test_without_tls_an_address_has_no_more_calls_by_more_connections(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        endpoint = f"127.0.0.1:{free_port()}"
        attacked = _serving(stack, tmp_path, endpoint, None, tmp_path / "c.sock")
        result = attacked.attack("unread")
        assert result["connections"] == 60
        # All but what 450 calls are, and those that came after them without 8 MiB more.
        assert result["ended"] > 40
        assert attacked.process.poll() is None


@pytest.mark.root
@pytest.mark.parametrize("attack", ["question", "gibibytes", "crowd"])
def test_a_user_takes_his_part_at_the_socket_and_no_more(attacked: Attacked, attack: str) -> None:
    attacked.forget_peak()
    before = attacked.memory_bytes("VmRSS")
    result = attacked.attack_at_the_socket(attack, _VIEWER)
    assert result["ended"] == result["connections"]
    assert attacked.memory_bytes("VmHWM") - before < _MAY_GROW_BYTES
    assert attacked.welcomes(issued(attacked, "good"), "good")


@pytest.mark.root
def test_a_user_without_a_role_takes_nothing_at_the_socket(attacked: Attacked) -> None:
    result = attacked.attack_at_the_socket("gibibytes", _STRANGER)
    assert result["connections"] > 0
    assert result["sent_bytes"] < 1 << 20
    assert f"(uid {_STRANGER}) is neither operator nor viewer" in attacked.log.read_text()


def test_noise_does_not_fill_the_log(attacked: Attacked) -> None:
    before = len(attacked.log.read_text().splitlines())
    result = attacked.attack("noise", attacked.pki / "ca.crt", issued(attacked, "bad"))
    assert result["refused"] > 20
    said = attacked.log.read_text().splitlines()[before:]
    assert len([line for line in said if "malformed message refused" in line]) <= 10


def test_a_stranger_gets_no_call(attacked: Attacked) -> None:
    for files in ((), (attacked.pki / "ca.crt",)):
        attacked.forget_peak()
        before = attacked.memory_bytes("VmRSS")
        attacked.attack("endless", *files)
        assert attacked.memory_bytes("VmHWM") - before < _MAY_GROW_BYTES
    assert attacked.welcomes(issued(attacked, "good"), "good")
    # gRPC would say a line for each.
    assert "Handshake failed" not in attacked.log.read_text()
