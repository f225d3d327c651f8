# SPDX-License-Identifier: Apache-2.0
"""What the main functions of both daemons share."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from config.schema import ConfigError, load, loads

EXIT_CONFIG = 2

T = TypeVar("T")
P = ParamSpec("P")


def read_arguments(
    program: str, description: str, schema: type[T], argv: Sequence[str] | None
) -> T:
    """Parse the command line and read the configuration; exits with EXIT_CONFIG if it is bad."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML; without it, all defaults"
    )
    parser.add_argument("--check", action="store_true", help="check the configuration, and end")
    arguments = parser.parse_args(argv)
    try:
        if arguments.config is None:
            settings = loads("", schema, "defaults")
        else:
            settings = load(arguments.config, schema)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_CONFIG)
    if arguments.check:
        sys.exit(0)
    return settings


def die_with_any_thread() -> None:
    """End the process when one of its threads fails.

    A daemon without its data plane or its store would look alive and do
    nothing; a dead one is started again, and recovers.
    """

    def end(failed: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(failed)
        os._exit(1)

    threading.excepthook = end


def die_if_it_fails(callback: Callable[P, None]) -> Callable[P, None]:
    """A callback of the event loop; a failure of it ends the process.

    The loop would write the error down and go on, as if nothing was lost: what
    was fetched from a core and not passed on, a timer that was not set again.
    """

    @functools.wraps(callback)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, the process ends
            traceback.print_exc()
            os._exit(1)

    return call


async def told_to_end() -> None:
    """Wait for SIGTERM or SIGINT."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    await told.wait()
