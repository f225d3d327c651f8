# SPDX-License-Identifier: Apache-2.0
"""``backsight-probes``: kernel probes that fire triggers into the trigger queues of attached processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from itertools import chain

from appliance.probes.daemon import Daemon
from appliance.probes.doctor import examine
from appliance.probes_packets import SERVICE
from runtime.log import Log
from runtime.main import Configuration, die_with_any_thread, read_arguments, supervise
from runtime.service_manager import ServiceManager
from runtime.settings.node import PROBES_PROGRAM, Settings


async def _serve(configuration: Configuration[Settings], manager: ServiceManager, log: Log) -> None:
    async with Daemon(configuration.settings, log) as daemon:
        profile = configuration.settings.socket_path.with_name("probes.profile")
        await supervise(daemon, configuration, manager, log, profile)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end. Exit status 2 for a bad configuration, 1 for other failures.

    With --doctor as the first argument: print what would work, an object of JSON a line, and end.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--doctor"]:
        configuration = read_arguments(
            PROBES_PROGRAM, __doc__.splitlines()[0], Settings, arguments[1:]
        )
        # Here, since the probes themselves have no need of what it imports: 12 MiB.
        from appliance.probes import machine_doctor

        settings = configuration.settings
        for check in chain(examine(settings.probes), machine_doctor.examine(settings.machine)):
            try:
                print(json.dumps(dataclasses.asdict(check)), flush=True)
            except BrokenPipeError:
                # Whoever reads it has read enough. Python would write the rest at the end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                break
        return 0
    configuration = read_arguments(PROBES_PROGRAM, __doc__.splitlines()[0], Settings, argv)
    # Before the library of applications is loaded, by which records are written.
    os.environ["BACKSIGHT_SOCKET"] = configuration.settings.socket
    os.environ["BACKSIGHT_SERVICE"] = SERVICE
    die_with_any_thread()
    settings = configuration.settings
    log = Log.of(PROBES_PROGRAM, settings.level, settings.form, node=settings.node)
    with ServiceManager.from_environment(os.environ) as manager:
        try:
            asyncio.run(_serve(configuration, manager, log))
        except KeyboardInterrupt:
            # While it starts: later it ends as it does by SIGTERM.
            return 128 + signal.SIGINT
        except OSError as error:
            log.error(str(error))
            return 1
    return 0
