# SPDX-License-Identifier: Apache-2.0
"""Peers as gRPC writes them, and who is one of them."""

from __future__ import annotations

import re
from urllib.parse import unquote

_AT_AN_ADDRESS = re.compile(r"ipv[46]:\[?([^]]*)\]?:[0-9]+")


def local_name(uid: int, secret: str) -> str:
    """The abstract name of a user's connection to gRPC. ``secret``: so that nobody takes it before."""
    return f"backsight/{uid}:{secret}"


_AT_A_LOCAL_NAME = re.compile(r"unix-abstract:backsight/([0-9]+):[^:]*")


def address_of(peer: str) -> str:
    """What all connections of one peer have in common: its IP address, or its user."""
    peer = unquote(peer)  # gRPC writes the brackets of IPv6 so
    if (found := _AT_AN_ADDRESS.fullmatch(peer)) is not None:
        return found[1]
    if (found := _AT_A_LOCAL_NAME.fullmatch(peer)) is not None:
        return address_of_user(int(found[1]))
    return peer


def address_of_user(uid: int) -> str:
    """The same of a user of this machine."""
    return f"uid {uid}"
