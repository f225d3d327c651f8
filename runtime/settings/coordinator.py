# SPDX-License-Identifier: Apache-2.0
"""The configuration file of ``backsight-coordinator``: every key, its bounds, its default."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from protocol.messages import CHUNK_BYTES_MAX
from protocol.verdicts import VerdictKind
from runtime.endpoint import Endpoint, OptionalEndpoint, check_listen, is_loopback
from runtime.endpoint import MetricsSettings as _MetricsSettings
from runtime.log import Format, FormatName, Level, LevelName
from runtime.printable import without_secrets
from runtime.schema import (
    PATH,
    RELOADABLE,
    Count,
    InvalidValue,
    Matching,
    Range,
    Secret,
    SecretInUrl,
    Size,
    format_size,
)
from runtime.settings.allow import AllowSettings
from runtime.settings.tls import HOST_NAME, TLS_AND_INSECURE, CoordinatorTlsSettings

COORDINATOR_PROGRAM = "backsight-coordinator"

# What these take in memory, at most, as tests/unit/test_limits.py measures them.
TRACE_BYTES = 5000
"""An open trace on three nodes, without its evidence."""
EVIDENCE_BYTES = 150
CLOSED_BYTES = 1500
NODE_BYTES = 2500

Seconds = Annotated[float, Range(0.001, 86400), RELOADABLE]


_VERDICTS = ("coherent", "partial", "lossy", "truncated")
_Verdict = Annotated[str, Matching("|".join(_VERDICTS), ", ".join(_VERDICTS))]

PINNED_PART = 4
"""Of ``bytes_max`` one in so many bytes may be pinned, at most."""

_Age = Annotated[float, Range(60, 1e10)]
_TriggerPattern = Annotated[
    str,
    Matching(
        r"[a-z0-9_.-]{1,31}|[a-z0-9_.-]{0,30}\*",
        "the name of a trigger, or the beginning of names with a * behind",
    ),
]


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """For how many seconds traces are kept for which ``age_max_s`` is not right: trigger goes before verdict."""

    per_trigger: Mapping[_TriggerPattern, _Age] = field(default_factory=dict)
    per_verdict: Mapping[_Verdict, _Age] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where traces are kept, how many bytes of them, for how long."""

    path: Annotated[str, PATH] = "/var/lib/backsight/traces.sqlite"
    bytes_max: Annotated[int, Size(16 << 20, 1 << 50), RELOADABLE] = 10 << 30
    age_max_s: Annotated[_Age, RELOADABLE] = 7 * 86400.0
    retention: Annotated[RetentionSettings, RELOADABLE] = field(default_factory=RetentionSettings)
    pinned_bytes_max: Annotated[int | None, Size(0, 1 << 50), RELOADABLE] = None

    def __post_init__(self) -> None:
        if self.pinned_bytes_max_or_default * PINNED_PART > self.bytes_max:
            raise InvalidValue(
                "pinned_bytes_max",
                f"{format_size(self.pinned_bytes_max_or_default)}; allowed: up to a quarter of"
                f" `bytes_max`, {format_size(self.bytes_max // PINNED_PART)}: half of that is for traces that"
                " are being collected, and something must be left for those that come",
            )

    @property
    def pinned_bytes_max_or_default(self) -> int:
        """A tenth of all, where it is not given."""
        return self.bytes_max // 10 if self.pinned_bytes_max is None else self.pinned_bytes_max


@dataclass(frozen=True, slots=True)
class MetricsSettings(_MetricsSettings):
    """Where Prometheus finds the coordinator's figures."""

    listen: OptionalEndpoint = "127.0.0.1:4772"


# sun_path, without the NUL and the ".grpc" of the socket beside it.
_SOCKET_PATH_BYTES_MAX = 102

NOBODY = "nobody"
"""What nobody may be of whom nobody asks who he is, but a node."""
_ANONYMOUS = (NOBODY, "viewer", "operator")
_ANONYMOUS_READER = (NOBODY, "viewer")


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may ask, beside those who show a certificate.

    At the Unix socket users and groups of this machine. ``anonymous``: what those are of whom nobody
    asks who they are, on a network without TLS, and at Jaeger's API without a token, if that does
    not say it itself.
    """

    socket: Annotated[str | None, PATH] = "/run/backsight-coordinator/coordinator.sock"
    operators: Annotated[AllowSettings, RELOADABLE] = field(default_factory=AllowSettings)
    viewers: Annotated[AllowSettings, RELOADABLE] = field(default_factory=AllowSettings)
    anonymous: Annotated[
        str, Matching("|".join(_ANONYMOUS), "nobody, viewer or operator"), RELOADABLE
    ] = NOBODY

    def __post_init__(self) -> None:
        if self.socket is not None and len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES_MAX:
            raise InvalidValue(
                "socket", f"{self.socket}; allowed: paths of at most {_SOCKET_PATH_BYTES_MAX} bytes"
            )


@dataclass(frozen=True, slots=True)
class QuerySettings:
    """Where Jaeger UI and Grafana ask.

    ``insecure``: in clear text over a network too; ``tls``: by the files of the section ``tls``.
    ``tokens``: a file (protocol.tokens). ``anonymous``: what those are who show none; None: what
    ``access`` says. ``hosts``: by which names it is asked for, if by any.
    """

    listen: OptionalEndpoint = "127.0.0.1:16686"
    insecure: bool = False
    tls: bool = False
    socket: Annotated[str | None, PATH] = None
    tokens: Annotated[str | None, PATH, RELOADABLE] = None
    anonymous: Annotated[
        str | None, Matching("|".join(_ANONYMOUS_READER), "nobody or viewer"), RELOADABLE
    ] = None
    hosts: Annotated[tuple[Annotated[str, HOST_NAME], ...], RELOADABLE] = ()

    def __post_init__(self) -> None:
        if self.tls and self.insecure:
            raise InvalidValue("insecure", TLS_AND_INSECURE)
        check_listen(self.listen, insecure=self.insecure or self.tls, instead="`tls: true`, ")


# A secret as long as it is none: of `NAME=VALUE` too, as OpenTelemetry's variables have it.
_HEADER_NAME = Secret(Matching("[A-Za-z0-9_.-]{1,128}", "letters, digits and _.-"))
# Of HTTP and of gRPC; a line break would begin another header.
_HEADER_VALUE = Secret(Matching("[ -~]{0,4096}", "printable ASCII"))

# They say how a request is sent, which only who sends it knows.
_OWN_HEADERS = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OWN_HEADERS_TEXT = ", ".join(sorted(_OWN_HEADERS))

# RFC 1035: of one part of a name, and of all of it.
_LABEL_MAX = 63
_NAME_MAX = 253


def _host(name: str) -> str:
    """A host as it stands in HOST:PORT; ValueError if nothing can have that name."""
    if ":" in name:
        return f"[{ipaddress.IPv6Address(name)}]"
    labels = name.removesuffix(".").split(".")
    if len(name) > _NAME_MAX or not all(1 <= len(label) <= _LABEL_MAX for label in labels):
        raise ValueError(name)
    return name


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Where closed traces are sent by OTLP. ``insecure``: in clear text over a network too."""

    endpoint: (
        Annotated[
            str,
            SecretInUrl(
                Matching(
                    r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?(/[!-~]*)?",
                    "a URL, as https://HOST:PORT",
                )
            ),
        ]
        | None
    ) = None
    protocol: Annotated[str, Matching("grpc|http/protobuf", "grpc or http/protobuf")] = "grpc"
    insecure: bool = False
    ca_file: Annotated[str | None, PATH] = None
    headers: Mapping[Annotated[str, _HEADER_NAME], Annotated[str, _HEADER_VALUE]] = field(
        default_factory=dict
    )
    compression: Annotated[str, Matching("none|gzip", "none or gzip")] = "gzip"
    timeout_s: Annotated[float, Range(0.1, 600)] = 10.0
    verdicts: tuple[_Verdict, ...] = _VERDICTS

    @property
    def shown_endpoint(self) -> str:
        """For a person, and for logs."""
        return without_secrets(self.endpoint or "")

    @property
    def exported_verdicts(self) -> frozenset[VerdictKind]:
        """Those of which a trace must have one; none without an endpoint."""
        return frozenset(map(VerdictKind, self.verdicts)) if self.endpoint else frozenset()

    def __post_init__(self) -> None:
        if self.endpoint is None:
            return
        try:
            url = urlsplit(self.endpoint)
            host = _host(url.hostname or "")
        except ValueError:
            raise InvalidValue(
                "endpoint",
                f"{self.shown_endpoint}; allowed: a URL with an IP address, or with a host name of labels"
                f" of 1 to {_LABEL_MAX} characters between dots",
            ) from None
        if url.scheme == "http" and not self.insecure and not is_loopback(f"{host}:0"):
            raise InvalidValue(
                "endpoint",
                f"{self.shown_endpoint} is in clear text, and on another machine; allowed: https, a"
                " loopback address, or `insecure: true` beside it",
            )
        try:
            port_is_valid = url.port != 0
        except ValueError:
            port_is_valid = False
        if not port_is_valid:
            raise InvalidValue(
                "endpoint", f"{self.shown_endpoint}; allowed: a port from 1 to 65535"
            )
        if self.protocol == "grpc" and url.path not in ("", "/"):
            raise InvalidValue(
                "endpoint",
                f"{self.shown_endpoint} has a path, which gRPC has no use for; allowed: a URL without"
                " one, or `protocol: http/protobuf`",
            )
        for name in self.headers:
            said = name.lower()
            if said in _OWN_HEADERS:
                raise InvalidValue(
                    "headers", f"{name} is the exporter's own; allowed: any but {_OWN_HEADERS_TEXT}"
                )
            if self.protocol == "grpc" and (said.startswith("grpc-") or said.endswith("-bin")):
                raise InvalidValue(
                    "headers",
                    f"{name} is binary, or gRPC's own; allowed: a name that does not begin with grpc-"
                    " and does not end with -bin, or `protocol: http/protobuf`",
                )


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What all nodes record, whatever their own configuration says."""

    percentage: Annotated[float, Range(0, 100)]


@dataclass(frozen=True, slots=True)
class Settings:
    """All of it. ``insecure``: serve in clear text over a network too."""

    listen: Endpoint = "127.0.0.1:4770"
    insecure: bool = False
    tls: CoordinatorTlsSettings | None = None
    store: StoreSettings = field(default_factory=StoreSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    query: QuerySettings = field(default_factory=QuerySettings)
    export: Annotated[ExportSettings, RELOADABLE] = field(default_factory=ExportSettings)
    policy: Annotated[PolicySettings | None, RELOADABLE] = None
    priority_seed: Annotated[int, Secret(Range(1, (1 << 64) - 1))] | None = None
    log_level: Annotated[LevelName, RELOADABLE] = "info"
    log_format: FormatName = "text"
    cluster_seed: Annotated[int, Range(0, (1 << 64) - 1)] = 0

    answer_timeout_s: Seconds = 1.0
    quiet_s: Seconds = 0.2
    provisional_s: Seconds = 10.0
    linger_s: Seconds = 30.0
    missing_linger_s: Seconds = 300.0
    # Of a node that is away for a minute only, nobody wants to hear as of a new one.
    node_expiry_s: Annotated[float, Range(120, 1e9), RELOADABLE] = 7 * 86400.0
    memory_bytes: Annotated[int, Size(CHUNK_BYTES_MAX, 1 << 40), RELOADABLE] = 256 << 20
    credit_window_bytes: Annotated[int, Size(64 << 10, 1 << 30), RELOADABLE] = 4 << 20
    slice_bytes_max: Annotated[int, Size(64 << 10, 1 << 40), RELOADABLE] = 256 << 20
    traces_max: Annotated[int, Count(64, 1 << 20, TRACE_BYTES), RELOADABLE] = 16384
    # At least what one trace may have.
    evidence_max: Annotated[int, Count(1 << 18, 1 << 28, EVIDENCE_BYTES), RELOADABLE] = 1 << 21
    closed_max: Annotated[int, Count(64, 1 << 23, CLOSED_BYTES), RELOADABLE] = 8192
    nodes_max: Annotated[int, Count(1, 1 << 20, NODE_BYTES), RELOADABLE] = 16384

    def __post_init__(self) -> None:
        if self.tls is None:
            check_listen(self.listen, insecure=self.insecure, instead="a `tls` section, ")
        elif self.insecure:
            raise InvalidValue("insecure", TLS_AND_INSECURE)
        if self.query.tls and self.tls is None:
            raise InvalidValue(
                "query", "tls: true goes by the files of the section `tls`, which is not there"
            )

    @property
    def everybody_queries(self) -> bool:
        """Whether Jaeger's API answers over a network without a token."""
        own = self.query.anonymous
        return (self.access.anonymous if own is None else own) != NOBODY

    @property
    def level(self) -> Level:
        return Level[self.log_level.upper()]

    @property
    def form(self) -> Format:
        return Format(self.log_format)

    @staticmethod
    def readers_of(key: str) -> tuple[str, ...]:
        """The programs that go by a key: one for all."""
        return (COORDINATOR_PROGRAM,)

    @property
    def store_path(self) -> Path:
        return Path(self.store.path)
