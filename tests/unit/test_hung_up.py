# SPDX-License-Identifier: Apache-2.0
"""A peer that hangs up leaves a line in the log, and no traceback."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import grpc.aio

from coordinator.rpc.hung_up import say_briefly


async def _fails(error: Exception) -> None:
    raise error


def test_of_who_hung_up_a_line_is_said_and_all_else_as_before() -> None:
    peer_log, before = Mock(), Mock()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(before)
        say_briefly(loop, peer_log)
        for error in (
            grpc.aio.InternalError("Failed grpc_call_start_batch: 8"),
            ValueError("ours"),
        ):
            task = loop.create_task(_fails(error))
            await asyncio.wait({task})
            del task  # nobody asks how it ended

    asyncio.run(run())
    ((_, said),) = [call.args for call in peer_log.warning.call_args_list]
    assert "hung up" in said
    assert "Failed grpc_call_start_batch: 8" in said
    ((_, context),) = [call.args for call in before.call_args_list]
    assert str(context["exception"]) == "ours"
