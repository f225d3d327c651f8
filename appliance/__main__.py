# SPDX-License-Identifier: Apache-2.0
"""``backsight-node``: keeps what the processes of this machine record, and reports what is triggered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence

from appliance import starts
from appliance.daemon import Daemon
from appliance.metrics import METRICS, PREFIX
from protocol.versions import OURS, Versions
from runtime.log import Log
from runtime.main import Configuration, die_with_any_thread, read_arguments, supervise
from runtime.metrics import serving
from runtime.service_manager import ServiceManager, StoredFd, take_stored_fds
from runtime.settings.node import NODE_PROGRAM, Settings


async def _serve(
    configuration: Configuration[Settings],
    manager: ServiceManager,
    stored: list[StoredFd],
    log: Log,
    versions: Versions,
) -> None:
    settings = configuration.settings
    async with contextlib.AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(
            Daemon(settings, secrets.randbits(64), manager, stored, log, versions)
        )
        stack.enter_context(serving(settings.metrics.listen, PREFIX, METRICS, daemon.status, log))
        log.info(f"node {settings.node} serves on {settings.socket}")
        await supervise(daemon, configuration, manager, log)


def main(argv: Sequence[str] | None = None, versions: Versions = OURS) -> int:
    """Run until told to end. Exit status 2 for a bad configuration, 1 for other failures."""
    # Until it is heeded: to be ended by it would be to end well, and to lose the pool.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    given = take_stored_fds(os.environ)
    with ServiceManager.from_environment(os.environ) as manager:
        stored = starts.take_turn(manager, given, Log.of(NODE_PROGRAM))
        configuration = read_arguments(NODE_PROGRAM, __doc__.splitlines()[0], Settings, argv)
        # For each client its connection, two pidfds and its arena, and what was stored at the start.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        die_with_any_thread()
        log = Log.of(NODE_PROGRAM, configuration.settings.level, node=configuration.settings.node)
        try:
            asyncio.run(_serve(configuration, manager, stored, log, versions))
        except (OSError, ValueError) as error:
            log.error(str(error))
            return 1
        starts.end_well(manager, log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
