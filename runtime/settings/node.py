# SPDX-License-Identifier: Apache-2.0
"""The configuration file of ``backsight-node``: every key, its bounds, its default."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from protocol.hashing import percentage_threshold
from protocol.messages import ADDRESSES_MAX, CHUNK_BYTES_MAX, LATERALS_MAX
from runtime.endpoint import Endpoint, OptionalEndpoint, is_loopback
from runtime.endpoint import MetricsSettings as _MetricsSettings
from runtime.log import Format, FormatName, Level, LevelName
from runtime.schema import (
    AT_START,
    PATH,
    RELOADABLE,
    InvalidValue,
    Matching,
    Range,
    Size,
    format_size,
)
from runtime.settings.allow import AllowSettings, gid_of, uid_of
from runtime.settings.tls import TLS_AND_INSECURE, NodeTlsSettings

NODE_PROGRAM = "backsight-node"
PROBES_PROGRAM = "backsight-probes"

NodeName = Annotated[
    str, Matching(r"[A-Za-z0-9_.-]{1,63}", "1 to 63 characters of A-Z a-z 0-9 _ . -")
]
TriggerName = Annotated[str, Matching(r"[a-z0-9_.-]{1,31}", "1 to 31 characters of a-z 0-9 _ . -")]
Address = Annotated[str, Matching(r"[0-9A-Fa-f:.]{2,45}", "an IP address")]
Rate = Annotated[float, Range(0.001, 1e9)]

_SEGMENT_BYTES = 65536

# As the data plane has them (POOL_MAX and STORE_MAX in native/src/node/node.c).
_POOL_BYTES_MAX = 512 << 30
_STORE_BYTES_MAX = 2 << 40

# All names of stored fds must fit into one environment variable (runtime.service_manager).
_CLIENTS_MAX = 1024

# What the service manager keeps. Of each client a bundle, and a context and another bundle while
# it goes over to that (appliance.client_store); of the node the report store, the ledger and the
# policy (appliance.recovery), and when it started (appliance.starts).
_FDS_OF_A_CLIENT = 3
_FDS_OF_THE_NODE = 4

# sun_path, without the NUL and the ".ctl" or ".bpf" of the sockets beside it.
_SOCKET_PATH_BYTES_MAX = 103


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Where slices go. ``insecure``: also in clear text over a network."""

    endpoint: Endpoint
    insecure: bool = False
    tls: NodeTlsSettings | None = None

    def __post_init__(self) -> None:
        if self.tls is not None:
            if self.insecure:
                raise InvalidValue("insecure", TLS_AND_INSECURE)
        elif not self.insecure and not is_loopback(self.endpoint):
            raise InvalidValue(
                "endpoint",
                f"{self.endpoint} is not on this machine, and what is sent is not encrypted;"
                " allowed: a loopback address, a `tls` section, or `insecure: true` beside it",
            )


def stored_fds_max(clients_max: int = _CLIENTS_MAX) -> int:
    """As many file descriptors are kept of a node over its restarts; by default of any node."""
    return _FDS_OF_THE_NODE + _FDS_OF_A_CLIENT * clients_max


QuotaBytes = Annotated[int, Size(_SEGMENT_BYTES, _POOL_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class QuotaSettings:
    """Parts of the pool that nobody else can push out, of users and groups: names or numbers."""

    users: Mapping[str | int, QuotaBytes] = field(default_factory=dict)
    groups: Mapping[str | int, QuotaBytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.resolve()

    def resolve(self) -> tuple[dict[int, tuple[str, int]], dict[int, tuple[str, int]]]:
        """By uid and by gid, each with the name that was given. InvalidValue names what is wrong."""
        return (
            _by_number("users", self.users, uid_of),
            _by_number("groups", self.groups, gid_of),
        )

    @property
    def total_bytes(self) -> int:
        return sum(self.users.values()) + sum(self.groups.values())


def _by_number(
    key: str, quotas: Mapping[str | int, int], number_of: Callable[[str | int], int]
) -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    for name, size in quotas.items():
        number = number_of(name)
        if number in found:
            raise InvalidValue(key, f"{found[number][0]} and {name} are the same; allowed: one")
        found[number] = (str(name), size)
    return found


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """A trigger name's part of the report bandwidth and of the report store."""

    weight: Annotated[float, Range(0.001, 1e6)] = 1.0
    report_bytes_per_s: Annotated[int, Size(1, 1 << 40)] | None = None


@dataclass(frozen=True, slots=True)
class TriggerSettings:
    """How often local triggers may fire, and how they share what is reported."""

    per_process_per_s: Rate = 100.0
    per_process_burst: Rate = 100.0
    per_trigger_per_s: Rate = 100.0
    per_trigger_burst: Rate = 100.0
    laterals_max: Annotated[int, Range(0, LATERALS_MAX)] = LATERALS_MAX
    default_policy: PolicySettings = field(default_factory=PolicySettings)
    policies: Mapping[TriggerName, PolicySettings] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """How fast slices leave the node."""

    bytes_per_s: Annotated[int, Size(1, 1 << 40)] | None = None
    burst_bytes: Annotated[int, Size(1, 1 << 40)] = 1 << 20
    chunk_bytes: Annotated[int, Size(1024, CHUNK_BYTES_MAX)] = 64 << 10
    abandon_threshold: Annotated[float, Range(0.01, 1)] = 0.75


@dataclass(frozen=True, slots=True)
class MetricsSettings(_MetricsSettings):
    """Where Prometheus finds the node's figures."""

    listen: OptionalEndpoint = "127.0.0.1:4771"


_Milliseconds = Annotated[float, Range(0, 3_600_000)]


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """From when on an event fires, from when on it is written into its trace; null: never."""

    fire_ms: _Milliseconds | None = None
    record_ms: _Milliseconds | None = None


@dataclass(frozen=True, slots=True)
class ProbesSettings:
    """What ``backsight-probes`` looks for, and how often it may fire."""

    loader: Annotated[str, Matching("auto|core|bcc", "auto, core or bcc"), AT_START] = "auto"
    bypass: bool = False
    per_s: Rate = 10.0
    burst: Annotated[float, Range(1, 1e6)] = 10.0
    coalesce_s: Annotated[float, Range(0, 3600)] = 1.0
    cpu_percent: Annotated[float, Range(0.001, 100_000)] = 2.0
    breadcrumbs: bool = True
    run_queue: ProbeSettings = ProbeSettings(20.0, 1.0)
    cpu_throttled: ProbeSettings = ProbeSettings(20.0, 1.0)
    lock_wait: ProbeSettings = ProbeSettings(100.0, 5.0)
    io_wait: ProbeSettings = ProbeSettings(100.0, 5.0)
    # A service that calls another one waits in recvfrom(2), say, as long as that takes.
    blocked: ProbeSettings = ProbeSettings(None, 10.0)
    crash: ProbeSettings = ProbeSettings(0.0, 0.0)
    tcp_retransmit: ProbeSettings = ProbeSettings(0.0, 0.0)
    tcp_syn_retransmit: ProbeSettings = ProbeSettings(0.0, 0.0)
    # Usual where the other side waits for something to send along with its confirmation.
    tcp_loss_probe: ProbeSettings = ProbeSettings(None, 0.0)
    # Who closes a socket before it has read all sends one, as many programs do.
    tcp_reset_sent: ProbeSettings = ProbeSettings(None, 0.0)
    tcp_reset_received: ProbeSettings = ProbeSettings(0.0, 0.0)
    tcp_zero_window: ProbeSettings = ProbeSettings(0.0, 0.0)
    tcp_rtt: ProbeSettings = ProbeSettings(200.0, 50.0)
    tcp_read_delay: ProbeSettings = ProbeSettings(500.0, 50.0)
    packet_drop: ProbeSettings = ProbeSettings(0.0, 0.0)
    qdisc_delay: ProbeSettings = ProbeSettings(50.0, 5.0)

    def wants(self, key: str) -> bool:
        """Whether a probe has anything to do."""
        probe: ProbeSettings = getattr(self, key)
        return not self.bypass and (probe.fire_ms is not None or probe.record_ms is not None)

    @property
    def wants_breadcrumbs(self) -> bool:
        """Whether hops that no application tells of are looked for."""
        return self.breadcrumbs and not self.bypass

    @property
    def wants_anything(self) -> bool:
        """Whether any of them has."""
        keys = (
            one.name for one in fields(self) if isinstance(getattr(self, one.name), ProbeSettings)
        )
        return any(self.wants(key) for key in keys) or self.wants_breadcrumbs


_Percent = Annotated[float, Range(0.1, 100)]
_Count = Annotated[int, Range(1, 1 << 30)]


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Symptoms of the machine that its counters tell, without probes; null: never."""

    look_every_s: Annotated[float, Range(0.1, 3600)] = 1.0
    window_s: Annotated[float, Range(0.1, 3600)] = 2.0
    quiet_s: Annotated[float, Range(0, 86_400)] = 10.0
    links: bool = True
    # Some drops are how TCP finds out what a link carries.
    qdisc_drops: _Count | None = 100
    qdisc_backlog: _Count | None = None
    listen_overflows: _Count | None = 1
    # Work that waits for a CPU is usual on a machine that is used well.
    cpu_pressure_percent: _Percent | None = None
    io_pressure_percent: _Percent | None = 80.0
    memory_pressure_percent: _Percent | None = 20.0

    @property
    def wants_anything(self) -> bool:
        """Whether there is anything to look for."""
        return self.links or any(
            limit is not None
            for limit in (
                self.qdisc_drops,
                self.qdisc_backlog,
                self.listen_overflows,
                self.cpu_pressure_percent,
                self.io_pressure_percent,
                self.memory_pressure_percent,
            )
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """All of it. Sizes are bytes; ``percentage`` of all traces are recorded."""

    node: NodeName = field(default_factory=socket.gethostname)
    socket: Annotated[str, PATH] = "/run/backsight/node.sock"
    coordinator: CoordinatorSettings | None = None
    addresses: tuple[Address, ...] = ()
    allow: Annotated[AllowSettings, RELOADABLE] = field(default_factory=AllowSettings)

    pool_bytes: Annotated[int, Size(4 << 20, _POOL_BYTES_MAX)] = 256 << 20
    arena_bytes: Annotated[int, Size(_SEGMENT_BYTES, _POOL_BYTES_MAX)] | None = None
    store_bytes: Annotated[int, Size(1 << 20, _STORE_BYTES_MAX)] = 64 << 20
    trace_bytes_max: Annotated[int, Size(64 << 10, _STORE_BYTES_MAX)] = 16 << 20
    reclaim_percent: Annotated[int, Range(10, 100)] = 98
    clients_max: Annotated[int, Range(1, _CLIENTS_MAX)] = 256
    clients_per_user_max: Annotated[int, Range(1, _CLIENTS_MAX)] | None = None
    quotas: QuotaSettings = field(default_factory=QuotaSettings)
    tombstones: Annotated[int, Range(0, 1 << 30)] = 0

    cluster_seed: Annotated[int, Range(0, (1 << 64) - 1)] = 0
    percentage: Annotated[float, Range(0, 100), RELOADABLE] = 100.0
    trust_incoming: Annotated[bool, RELOADABLE] = False

    triggers: Annotated[TriggerSettings, RELOADABLE] = field(default_factory=TriggerSettings)
    report: Annotated[ReportSettings, RELOADABLE] = field(default_factory=ReportSettings)
    machine: Annotated[MachineSettings, RELOADABLE] = field(default_factory=MachineSettings)
    probes: Annotated[ProbesSettings, RELOADABLE] = field(default_factory=ProbesSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    log_level: Annotated[LevelName, RELOADABLE] = "info"
    log_format: FormatName = "text"

    def __post_init__(self) -> None:
        if self.arena_bytes is not None:
            if self.arena_bytes > self.pool_bytes:
                raise InvalidValue(
                    "arena_bytes",
                    f"{format_size(self.arena_bytes)}; allowed: at most pool_bytes, which is"
                    f" {format_size(self.pool_bytes)}",
                )
            if self.arena_bytes % _SEGMENT_BYTES:
                raise InvalidValue(
                    "arena_bytes", f"{self.arena_bytes}; allowed: multiples of {_SEGMENT_BYTES}"
                )
        if self.clients_per_user_max is not None and self.clients_per_user_max > self.clients_max:
            raise InvalidValue(
                "clients_per_user_max",
                f"{self.clients_per_user_max}; allowed: at most clients_max, which is"
                f" {self.clients_max}",
            )
        usable_bytes = self.pool_bytes * self.reclaim_percent // 100
        if self.quotas.total_bytes > usable_bytes:
            raise InvalidValue(
                "quotas",
                f"{format_size(self.quotas.total_bytes)} together; allowed: at most what of pool_bytes is"
                f" filled (reclaim_percent), which is {format_size(usable_bytes)}",
            )
        if len(self.addresses) > ADDRESSES_MAX:
            raise InvalidValue("addresses", f"{len(self.addresses)}; allowed: {ADDRESSES_MAX}")
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES_MAX:
            raise InvalidValue(
                "socket", f"{self.socket}; allowed: paths of at most {_SOCKET_PATH_BYTES_MAX} bytes"
            )

    @property
    def level(self) -> Level:
        return Level[self.log_level.upper()]

    @property
    def form(self) -> Format:
        return Format(self.log_format)

    @staticmethod
    def readers_of(key: str) -> tuple[str, ...]:
        """The programs that go by a key, which is given as ``section.key``."""
        match key.partition(".")[0]:
            case "probes":
                return (PROBES_PROGRAM,)
            case "node" | "socket" | "machine" | "log_level" | "log_format":
                return (NODE_PROGRAM, PROBES_PROGRAM)
            case _:
                return (NODE_PROGRAM,)

    @property
    def socket_path(self) -> Path:
        return Path(self.socket)

    @property
    def arena_bytes_or_default(self) -> int:
        """As configured; else one process may fill the pool alone."""
        if self.arena_bytes is not None:
            return self.arena_bytes
        return self.pool_bytes // _SEGMENT_BYTES * _SEGMENT_BYTES

    @property
    def clients_per_user_max_or_default(self) -> int:
        """As configured; else a quarter of the places is left to all others."""
        if self.clients_per_user_max is not None:
            return self.clients_per_user_max
        return self.clients_max - self.clients_max // 4

    @property
    def stored_fds_max(self) -> int:
        """As many file descriptors the service manager is to keep for this node."""
        return stored_fds_max(self.clients_max)

    @property
    def percentage_threshold(self) -> int:
        """A trace is recorded whose hash is below; all-ones: every one (native/src/abi/policy.h)."""
        return percentage_threshold(self.percentage)
