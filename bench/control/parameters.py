# SPDX-License-Identifier: Apache-2.0
"""How much is measured, and of what: by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from bench.environment import given

PARTS = ("saturation", "rate", "restart")

# A trace is on so many.
_NODES_MIN = 3


@dataclass(frozen=True, slots=True)
class Parameters:
    """The results of a quick run mean nothing but that everything works.

    nodes         how many are connected, in turn
    rate_per_s    traces that are fired a second, for latencies
    in_flight     traces that are not durable at any time, for throughput
    warm_up_s     before a window; Python imports, SQLite grows, pages come
    window_s      in which traces a second, latencies and shares are taken
    linger_s      of the coordinator's configuration: 30 by default, of which a window would see
                  nothing but the beginning
    traces_max    of which a plan is made: more than any coordinator takes in a run
    open_traces   that are open when the coordinator is killed, for ``restart``; it is configured to
                  keep as many
    rounds        of everything, in turn with the other commit
    """

    nodes: tuple[int, ...] = (30, 300, 1000)
    rate_per_s: int = 300
    in_flight: int = 200
    warm_up_s: float = 5.0
    window_s: float = 15.0
    linger_s: float = 2.0
    traces_max: int = 30_000
    open_traces: int = 16_000
    rounds: int = 3
    only: tuple[str, ...] = PARTS
    base: str = ""

    @classmethod
    def quick(cls) -> Self:
        """Some seconds."""
        return cls(
            nodes=(5,),
            rate_per_s=50,
            in_flight=10,
            warm_up_s=0.2,
            window_s=1.0,
            linger_s=0.5,
            traces_max=2000,
            open_traces=30,
            rounds=1,
        )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Each is a variable of its name in capitals. ValueError if there is something that cannot be."""
        return given(cls.quick() if environment.get("QUICK") else cls(), environment, _value)


def _value(name: str, text: str, before: object) -> object:
    """Of the type of what it was before."""
    if name == "ONLY":
        if not set(text.split()) <= set(PARTS):
            raise ValueError(f"ONLY={text}: want some of {' '.join(PARTS)}")
        return tuple(text.split())
    if isinstance(before, tuple):
        return tuple(_number(name, word, _NODES_MIN) for word in text.split())
    if isinstance(before, int):
        return _number(name, text)
    if isinstance(before, float):
        return float(_number(name, text))
    return text


def _number(name: str, text: str, minimum: int = 1) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise ValueError(f"{name}={text}: want a whole number from {minimum} on")
    return int(text)
