# SPDX-License-Identifier: Apache-2.0
"""The node from its configuration to its end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence

from appliance.daemon import Daemon
from appliance.metrics import METRICS, PREFIX
from protocol.versions import Versions
from runtime.health import Health
from runtime.log import Log
from runtime.main import Configuration, die_with_any_thread, read_arguments, supervise
from runtime.metrics import serving
from runtime.open_files import raise_open_files_limit
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.node import NODE_PROGRAM, Settings
from runtime.side_service import side_service
from runtime.tls import leave_words_to_us


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
        health = Health(daemon.threads)
        await stack.enter_async_context(
            side_service(
                lambda: serving(
                    settings.metrics.listen, PREFIX, METRICS, daemon.status, health, log
                ),
                log,
            )
        )
        log.info(f"node {settings.node} serves on {settings.socket}")
        profile = settings.socket_path.with_suffix(".profile")
        await supervise(daemon, configuration, manager, log, profile)


def run(
    description: str,
    argv: Sequence[str] | None,
    manager: ServiceManager,
    stored: list[StoredFd],
    versions: Versions,
) -> bool:
    """Whether it ended because it was told to. SystemExit for a bad configuration."""
    configuration = read_arguments(NODE_PROGRAM, description, Settings, argv)
    coordinator = configuration.settings.coordinator
    if coordinator is not None and coordinator.tls is not None:
        leave_words_to_us()
    # For each client its connection, two pidfds and its arena, and what was stored at the start.
    raise_open_files_limit()
    die_with_any_thread()
    settings = configuration.settings
    log = Log.of(NODE_PROGRAM, settings.level, settings.form, node=settings.node)
    try:
        asyncio.run(_serve(configuration, manager, stored, log, versions))
    except (OSError, ValueError) as error:
        log.error(str(error))
        return False
    return True
