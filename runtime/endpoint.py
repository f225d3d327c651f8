# SPDX-License-Identifier: Apache-2.0
"""Network endpoints in configurations."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated

from runtime.schema import InvalidValue

_ENDPOINT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")
_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class HostAndPort:
    """A text that names an endpoint."""

    def allowed(self) -> str:
        return f"HOST:PORT or [IPV6]:PORT, with a port up to {_PORT_MAX}"

    def admit(self, value: str) -> str:
        match = _ENDPOINT.fullmatch(value)
        if not (match and int(match[1]) <= _PORT_MAX):
            raise ValueError
        return value


Endpoint = Annotated[str, HostAndPort()]
OptionalEndpoint = Endpoint | None


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint can only be reached from its own machine."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listen(endpoint: str | None, *, insecure: bool, instead: str = "") -> None:
    """For the key ``listen`` of a section: InvalidValue if others can read what nobody agreed to show.

    ``instead``: what else would do, with a comma behind.
    """
    if endpoint and not insecure and not is_loopback(endpoint):
        raise InvalidValue(
            "listen",
            f"{endpoint} can be reached from other machines, and what is sent is not"
            f" encrypted; allowed: a loopback address, {instead}or `insecure: true` beside it",
        )


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where Prometheus finds ``/metrics``. ``insecure``: in clear text over a network too."""

    listen: OptionalEndpoint = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_listen(self.listen, insecure=self.insecure)
