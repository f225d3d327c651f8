# SPDX-License-Identifier: Apache-2.0
"""pyroute2's codecs of netlink messages, without the rest of it.

Whoever imports one of its modules imports the package before, and that loads all that it has:
nftables, a database, a DHCP client. In the node that was 12 MiB, a fifth of its memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

_PACKAGE = "pyroute2"


@contextlib.contextmanager
def _without_the_package() -> Iterator[None]:
    """Its modules can be imported, and the package is empty meanwhile."""
    spec = importlib.util.find_spec(_PACKAGE)
    if _PACKAGE in sys.modules or spec is None:
        yield
        return
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        # Whoever else imports it has it whole.
        del sys.modules[_PACKAGE]


with _without_the_package():
    # Without it, what the codecs warn of goes to standard error.
    import pyroute2.config.log  # noqa: F401
    from pyroute2.netlink.diag import SOCK_DIAG_BY_FAMILY, inet_diag_req
    from pyroute2.netlink.exceptions import NetlinkDecodeError
    from pyroute2.netlink.rtnl import (
        RTM_DELLINK,
        RTM_GETLINK,
        RTM_GETQDISC,
        RTM_NEWLINK,
        RTMGRP_LINK,
    )
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
    from pyroute2.netlink.rtnl.tcmsg import tcmsg

__all__ = [
    "RTMGRP_LINK",
    "RTM_DELLINK",
    "RTM_GETLINK",
    "RTM_GETQDISC",
    "RTM_NEWLINK",
    "SOCK_DIAG_BY_FAMILY",
    "NetlinkDecodeError",
    "ifinfmsg",
    "inet_diag_req",
    "tcmsg",
]
