# SPDX-License-Identifier: Apache-2.0
"""Network endpoints in configurations."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from config.schema import Matching

Endpoint = Annotated[
    str, Matching(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}", "HOST:PORT or [IPV6]:PORT")
]


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint can only be reached from its own machine."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
