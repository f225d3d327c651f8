# SPDX-License-Identifier: Apache-2.0
"""Peers that hung up before gRPC could tell them how their call ended."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from runtime.log import PeerLog

# Of all peers together: the error does not say whose the call was.
_WHOSE = "gRPC"


def say_briefly(loop: asyncio.AbstractEventLoop, peer_log: PeerLog) -> None:
    """Say a line of each, as of other peers, and few of many.

    gRPC leaves the error in a task of its own, of which the event loop would write a traceback.
    """
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, grpc.aio.InternalError):
            peer_log.warning(
                _WHOSE, f"a peer hung up before it was told how its call ended: {error}"
            )
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
