# SPDX-License-Identifier: Apache-2.0
"""What breaks on a machine, for real, and is mended at the end of the block."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.cgroups import Group, group
from testbed.topology import Host

_DISK_BYTES = 16 << 20


Dropped = Callable[[], int]
"""How many packets that were up to now."""


def dropping(
    host: Host, port: int, rule: str, device: str = "eth0"
) -> contextlib.AbstractContextManager[Dropped]:
    """What comes to a port of a host and meets the rule (nft(8)) is lost, as on a bad cable."""
    return _filtering(host, "netdev", f"ingress device {device}", f"dport {port} {rule}")


def dropping_here(
    host: Host, port: int, rule: str, *, incoming: bool = False
) -> contextlib.AbstractContextManager[Dropped]:
    """What a host sends to a port, or gets from there, and meets the rule, it throws away itself."""
    hook, end = ("input", "sport") if incoming else ("output", "dport")
    return _filtering(host, "inet", hook, f"{end} {port} {rule}")


@contextlib.contextmanager
def _filtering(host: Host, family: str, hook: str, rule: str) -> Iterator[Dropped]:
    table = f"{family} lossy"
    said = f"""table {table} {{
  chain lossy {{
    type filter hook {hook} priority 0
    tcp {rule} counter drop
  }}
}}
"""

    def lost() -> int:
        listed = json.loads(host.run("nft", "--json", "list", "table", *table.split()))["nftables"]
        (rules,) = [one["rule"]["expr"] for one in listed if "rule" in one]
        return sum(int(one["counter"]["packets"]) for one in rules if "counter" in one)

    host.run("nft", "-f", "-", said=said)
    try:
        yield lost
    finally:
        host.run("nft", "delete", "table", *table.split())


@contextlib.contextmanager
def slow_device(
    host: Host, rate: str, burst: str, limit: str = "512kb", device: str = "eth0"
) -> Iterator[None]:
    """A device sends no faster than that: what is more waits in its queue (tc-tbf(8))."""
    host.run("tc", "qdisc", "add", "dev", device, "root", "tbf",
             "rate", rate, "burst", burst, "limit", limit)  # fmt: skip
    try:
        yield
    finally:
        host.run("tc", "qdisc", "del", "dev", device, "root")


@dataclass(frozen=True, slots=True)
class SlowDisk:
    """A loop device; who is taken into the group writes slowly to it."""

    device: Path
    group: Group


@contextlib.contextmanager
def slow_disk(directory: Path, bytes_per_s: int) -> Iterator[SlowDisk]:
    """A disk of 16 MiB in a file of that directory."""
    image = directory / "disk.img"
    image.write_bytes(bytes(_DISK_BYTES))
    name = subprocess.run(
        ["losetup", "--show", "--find", str(image)], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        with group("io") as slow:
            number = Path(f"/sys/class/block/{Path(name).name}/dev").read_text().strip()
            slow.limit_writes(number, bytes_per_s)
            yield SlowDisk(Path(name), slow)
    finally:
        subprocess.run(["losetup", "--detach", name], check=True)
