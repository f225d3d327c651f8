# SPDX-License-Identifier: Apache-2.0
"""What the main functions of both daemons share: arguments, and how they live and end."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from runtime import VERSION
from runtime.log import Level, Log, MessageId, stderr_is_journal
from runtime.profile import Profiler
from runtime.reload import Merged, merge
from runtime.schema import EXIT_CONFIG, ConfigError, InvalidValue, load, loads
from runtime.service_manager import ServiceManager
from runtime.watchdog import Ask, report, watch

P = ParamSpec("P")


class DaemonSettings(Protocol):
    """Settings of any daemon."""

    @property
    def level(self) -> Level:
        """How much it says."""

    @staticmethod
    def readers_of(key: str) -> tuple[str, ...]:
        """The programs that go by a key, which is given as ``section.key``."""


S = TypeVar("S", bound=DaemonSettings)
S_contra = TypeVar("S_contra", contravariant=True)


@dataclass(slots=True)
class Configuration(Generic[S]):
    """A daemon's settings, and the file that they are from; None: all defaults.

    ``asked_early``: a reload was asked for before the daemon served.
    """

    program: str
    settings: S
    path: Path | None
    asked_early: threading.Event = field(default_factory=threading.Event)

    def reload(self, take_up: Callable[[S], None]) -> Merged[S]:
        """Read the file again, and have what can be ``take_up``; ConfigError leaves all as it was."""
        if self.path is None:
            raise ConfigError(["nothing to reload: the daemon was started without --config"])
        wanted = load(self.path, type(self.settings))
        try:
            merged = merge(
                self.settings, wanted, lambda key: self.program in wanted.readers_of(key)
            )
        except InvalidValue as error:
            raise ConfigError(
                [f"{self.path}: {error}: with the keys that wait for a restart; restart the daemon"]
            ) from error
        try:
            take_up(merged.settings)
        except ConfigError as error:
            raise ConfigError([f"{self.path}: {problem}" for problem in error.problems]) from error
        except InvalidValue as error:  # it was valid a moment ago: a user, say, is gone
            raise ConfigError([f"{self.path}: {error}"]) from error
        self.settings = merged.settings
        return merged


def argument_parser(program: str, description: str) -> argparse.ArgumentParser:
    """What the command line of each daemon is."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML; without it, all defaults"
    )
    parser.add_argument("--check", action="store_true", help="check the configuration, and end")
    parser.add_argument("--version", action="version", version=f"{program} {VERSION}")
    return parser


def read_arguments(
    program: str, description: str, schema: type[S], argv: Sequence[str] | None
) -> Configuration[S]:
    """Parse the command line and read the configuration; exits with EXIT_CONFIG if it is bad.

    A SIGHUP from here on is one that supervise() heeds, and a SIGUSR2 is none that ends the process, nor
    those that it forks.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    asked_early = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: asked_early.set())
    arguments = argument_parser(program, description).parse_args(argv)
    try:
        if arguments.config is None:
            settings = loads("", schema, "defaults")
        else:
            settings = load(arguments.config, schema)
    except ConfigError as error:
        if stderr_is_journal():
            for problem in error.problems:
                Log.of(program).error(problem)
        else:
            # Whoever starts it by hand wants FILE:LINE first, as of a compiler.
            sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_CONFIG)
    if arguments.check:
        print(f"{arguments.config or 'defaults'}: valid for {program}")
        sys.exit(0)
    return Configuration(program, settings, arguments.config, asked_early)


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


class Supervised(Protocol[S_contra]):
    """A daemon that serves, as supervise() sees it."""

    @property
    def threads(self) -> Mapping[str, Ask]:
        """Those that must move so that the daemon does, by name."""

    @property
    def news(self) -> asyncio.Event:
        """It sets it when status_text() has changed in what somebody may wait for."""

    def status_text(self) -> str:
        """How it is, in a line."""

    def reconfigure(self, settings: S_contra) -> None:
        """Go on with other settings, of which those that cannot be changed are the same.

        ConfigError leaves all as it was.
        """

    async def run(self) -> None:
        """Do what it does beside answering; may end early."""


async def supervise(
    daemon: Supervised[S],
    configuration: Configuration[S],
    manager: ServiceManager,
    log: Log,
    profile: Path,
) -> None:
    """Run a daemon that serves until SIGTERM or SIGINT; SIGHUP reloads its configuration.

    SIGUSR2 has it write a ``profile`` (runtime.profile).

    The service manager hears when it is ready, how it is, that it lives, when it reloads and ends.
    """
    loop = asyncio.get_running_loop()
    told = loop.create_future()

    @die_if_it_fails
    def end_by(number: signal.Signals) -> None:
        if not told.done():
            log.info(f"told to end by {number.name}")
            told.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end_by, number)

    @die_if_it_fails
    def hang_up() -> None:
        manager.reloading()
        reload(daemon, configuration, log)
        manager.ready()

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    profiler = Profiler(profile, log)
    loop.add_signal_handler(signal.SIGUSR2, profiler.begin)
    manager.ready()
    if configuration.asked_early.is_set():
        hang_up()
    tasks: set[asyncio.Future[Any]] = {
        told,
        asyncio.ensure_future(daemon.run()),
        asyncio.ensure_future(watch(manager, daemon.threads, log)),
        asyncio.ensure_future(report(manager, daemon.status_text, daemon.news)),
    }
    try:
        while not told.done():
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        manager.stopping()
    finally:
        # Python would have it end the process.
        loop.remove_signal_handler(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        profiler.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def reload(daemon: Supervised[S], configuration: Configuration[S], log: Log) -> None:
    """Read the configuration again. A bad one changes nothing, and each of its problems is logged."""
    try:
        merged = configuration.reload(daemon.reconfigure)
    except ConfigError as error:
        for problem in error.problems:
            log.error(problem, message_id=MessageId.RELOAD_REFUSED)
        log.error("the configuration is kept as it was", message_id=MessageId.RELOAD_REFUSED)
        return
    log.level = merged.settings.level
    log.info(
        f"{configuration.path}: reloaded; {', '.join(merged.taken) or 'nothing'} taken up",
        message_id=MessageId.RELOADED,
    )
    if merged.waiting:
        log.warning(
            f"{configuration.path}: these changes wait for a restart: {', '.join(merged.waiting)}"
        )
    others: dict[str, list[str]] = {}
    for key in merged.taken + merged.waiting + merged.others:
        for reader in merged.settings.readers_of(key):
            if reader != configuration.program:
                others.setdefault(reader, []).append(key)
    for reader, keys in others.items():
        log.info(
            f"{configuration.path}: changed for {reader}, which has a reload of its own:"
            f" {', '.join(keys)}"
        )
