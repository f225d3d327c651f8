# SPDX-License-Identifier: Apache-2.0
"""``backsight-probes``: kernel probes that fire triggers into the trigger queues of attached processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from appliance.probes.daemon import Daemon
from runtime.log import Log
from runtime.main import Configuration, die_with_any_thread, read_arguments, supervise
from runtime.service_manager import ServiceManager
from runtime.settings.node import Settings

_PROGRAM = "backsight-probes"


async def _serve(configuration: Configuration[Settings], manager: ServiceManager, log: Log) -> None:
    async with Daemon(configuration.settings, log) as daemon:
        await supervise(daemon, configuration, manager, log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end. Exit status 2 for a bad configuration, 1 for other failures."""
    configuration = read_arguments(_PROGRAM, __doc__.splitlines()[0], Settings, argv)
    # Before the library of applications is loaded, by which records are written.
    os.environ["BACKSIGHT_SOCKET"] = configuration.settings.socket
    os.environ["BACKSIGHT_SERVICE"] = "kernel"
    die_with_any_thread()
    log = Log.of(_PROGRAM, configuration.settings.level, node=configuration.settings.node)
    with ServiceManager.from_environment(os.environ) as manager:
        try:
            asyncio.run(_serve(configuration, manager, log))
        except OSError as error:
            log.error(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
