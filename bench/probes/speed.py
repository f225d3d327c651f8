# SPDX-License-Identifier: Apache-2.0
"""How much slower it gets: pairs, with and without in turn."""

from __future__ import annotations

from collections.abc import Callable

from bench.http_pair import Pair
from bench.probes.lines import ratios, tell_kept, tell_times
from bench.probes.rig import BUILD, BYPASS, ON, PING_PONGS, Rig, Settings, Took, empty_programs

# Of http_pair.py: a service that does a quarter of a millisecond of work a request.
_HTTP_ITEMS = 1000
_HTTP_RECORD_BYTES = 1024


def _in_turn(
    pairs: int, first: Callable[[], float], second: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """What both measure, each first in half of the pairs."""
    measured: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 else (1, 0):
            measured[which].append((first, second)[which]())
    return measured


def _wall_ns(measure: Callable[[], Took]) -> Callable[[], float]:
    return lambda: measure().wall_ns


def _off_and_on(rig: Rig, measure: Callable[[], float]) -> tuple[list[float], list[float]]:
    """With the bypass and with all probes."""

    def having(settings: Settings) -> Callable[[], float]:
        def configured() -> float:
            rig.configure(settings)
            return measure()

        return configured

    return _in_turn(rig.parameters.pairs, having(BYPASS), having(ON))


def switches(rig: Rig) -> None:
    """Context switches and messages with probes and with the bypass."""
    for what, arguments in PING_PONGS.items():
        with rig.probes, rig.ping_pong(*arguments) as measure:
            rig.probes.await_watched(arguments.count("attached"))
            off, on = _off_and_on(rig, _wall_ns(measure))
        tell_times(what, off, on)


def nothing(rig: Rig) -> None:
    """With two empty programs and with none: no probe of context switches can cost less."""
    with rig.ping_pong() as measure:

        def beside_empty_programs() -> float:
            with empty_programs(("sched_switch", "sched_waking")):
                return measure().wall_ns

        none, some = _in_turn(rig.parameters.pairs, _wall_ns(measure), beside_empty_programs)
    tell_times("not attached, by pipes", none, some)


def bypass(rig: Rig) -> None:
    """With the bypass and without any probes."""
    with rig.ping_pong() as measure:

        def bypassed() -> float:
            with rig.probes:
                rig.configure(BYPASS)
                # Its start is over, and what it moved out of the caches is back.
                measure()
                return measure().wall_ns

        def without() -> float:
            measure()
            return measure().wall_ns

        none, some = _in_turn(rig.parameters.pairs, without, bypassed)
    tell_times("not attached, by pipes", none, some)


def http(rig: Rig) -> None:
    """The two services of bench-native, which record, with probes and with the bypass."""
    program, directory = BUILD / "bench/http_service", rig.node.directory
    with (
        rig.probes,
        Pair(program, directory, rig.node, _HTTP_ITEMS, _HTTP_RECORD_BYTES) as services,
    ):
        rig.probes.await_watched(2)
        off, on = _off_and_on(
            rig, lambda: services.load(traced=True, seconds=rig.parameters.http_s).per_s
        )
    tell_kept("requests a second", off, on, ratios(on, off), "/s")
