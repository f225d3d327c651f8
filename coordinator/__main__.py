# SPDX-License-Identifier: Apache-2.0
"""``backsight-coordinator``: gathers the slices of triggered traces, and judges them."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import sys
from collections.abc import Sequence

from coordinator.access import warning_of_strangers
from coordinator.metrics import METRICS, PREFIX
from coordinator.reading import ReadingProcess
from coordinator.server import CoordinatorServer
from coordinator.store.schema import StoreError
from protocol.versions import OURS, Versions
from runtime.log import Log
from runtime.main import Configuration, die_with_any_thread, read_arguments, supervise
from runtime.metrics import serving
from runtime.open_files import raise_open_files_limit
from runtime.service_manager import ServiceManager
from runtime.settings.coordinator import COORDINATOR_PROGRAM, Settings
from runtime.side_service import side_service
from runtime.tls import leave_words_to_us

# The store and listings compute beside the event loop. By default each turn of the loop
# would wait for them for 5 ms, and to follow a trace over its nodes takes some turns.
_SWITCH_INTERVAL_S = 0.0005

# What the core forgets is freed at once, since it makes no cycles of objects. Python's collector
# looks for cycles all the same, by default whenever some hundred objects were made, and at
# all that there are whenever their number rose by a quarter: with 1,000 nodes that was a quarter
# of the loop's time, in pauses of 230 ms. Cycles are made where a stream ends, or a query.
_COLLECTOR_THRESHOLDS = (50_000, 20, 100)


async def _serve(
    configuration: Configuration[Settings],
    manager: ServiceManager,
    log: Log,
    versions: Versions,
    reading: ReadingProcess,
) -> None:
    settings = configuration.settings
    async with (
        CoordinatorServer(settings, secrets.randbits(64), log, versions, reading) as server,
        side_service(server.local_door, log),
        side_service(
            lambda: serving(
                settings.metrics.listen, PREFIX, METRICS, server.status, server.health, log
            ),
            log,
        ),
    ):
        log.info(f"serves on {settings.listen}")
        warning = warning_of_strangers(settings)
        if warning is not None:
            log.warning(warning)
        profile = settings.store_path.with_suffix(".profile")
        await supervise(server, configuration, manager, log, profile)


def main(argv: Sequence[str] | None = None, versions: Versions = OURS) -> int:
    """Run until told to end. Exit status 2 for a bad configuration, 1 for other failures."""
    configuration = read_arguments(COORDINATOR_PROGRAM, __doc__.splitlines()[0], Settings, argv)
    if configuration.settings.tls is not None:
        leave_words_to_us()
    # For each node its connections.
    raise_open_files_limit()
    die_with_any_thread()
    log = Log.of(COORDINATOR_PROGRAM, configuration.settings.level, configuration.settings.form)
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    reading = ReadingProcess(configuration.settings.form, log)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with ServiceManager.from_environment(os.environ) as manager:
            asyncio.run(_serve(configuration, manager, log, versions, reading))
    except (StoreError, OSError) as error:
        log.error(str(error))
        return 1
    finally:
        reading.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
