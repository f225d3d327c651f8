# SPDX-License-Identifier: Apache-2.0
"""``backsight-node``: keeps what the processes of this machine record, and reports what is triggered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import sys
from collections.abc import Sequence

from appliance.daemon import Daemon
from appliance.metrics import METRICS, PREFIX
from appliance.settings import Settings
from daemon.log import Log
from daemon.main import die_with_any_thread, read_arguments, told_to_end
from daemon.metrics import serving
from daemon.service_manager import ServiceManager, StoredFd, take_stored_fds

_PROGRAM = "backsight-node"


async def _serve(
    settings: Settings, manager: ServiceManager, stored: list[StoredFd], log: Log
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(
            Daemon(settings, secrets.randbits(64), manager, stored, log)
        )
        stack.enter_context(serving(settings.metrics.listen, PREFIX, METRICS, daemon.status, log))
        log.info(f"node {settings.node} serves on {settings.socket}")
        manager.ready()
        running, told = asyncio.ensure_future(daemon.run()), asyncio.ensure_future(told_to_end())
        try:
            # Without a coordinator run() ends at once, and there is just the node.
            await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await told
            manager.stopping()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end. Exit status 2 for a bad configuration, 1 for other failures."""
    stored = take_stored_fds(os.environ)
    settings = read_arguments(_PROGRAM, __doc__.splitlines()[0], Settings, argv)
    # A connection and a pidfd for each client.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    die_with_any_thread()
    log = Log.of(_PROGRAM, settings.level, node=settings.node)
    with ServiceManager.from_environment(os.environ) as manager:
        try:
            asyncio.run(_serve(settings, manager, stored, log))
        except (OSError, ValueError) as error:
            log.error(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
