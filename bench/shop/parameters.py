# SPDX-License-Identifier: Apache-2.0
"""How much is measured: by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from bench.environment import given


@dataclass(frozen=True, slots=True)
class Parameters:
    """The results of a quick run mean nothing but that everything works.

    rounds            in each, either has the load once
    load_s            for how long. Its daemons are watched for twice that: what they do later (a trace
                      is decided after ``decision_wait_s``, and closed 30 s after its verdict) counts too
    idle_windows      how often it is measured what they take without load
    idle_s            for how long
    settle_s          after a load, before anything is called idle
    latency_rounds    further ones, in which it is watched when each trace is there; this costs
                      Backsight's coordinator CPU time, so they are apart
    connections       of wrk
    pause_ms          of a connection before each request, on average
    decision_wait_s   of tail sampling
    slow_ms           from which on tail sampling keeps a trace
    """

    rounds: int = 6
    load_s: int = 30
    idle_windows: int = 3
    idle_s: int = 20
    settle_s: int = 45
    latency_rounds: int = 2
    connections: int = 16
    pause_ms: int = 140
    decision_wait_s: int = 10
    slow_ms: int = 500

    @classmethod
    def quick(cls) -> Self:
        """A minute."""
        return cls(
            rounds=1,
            load_s=5,
            idle_windows=1,
            idle_s=2,
            settle_s=15,
            latency_rounds=1,
            decision_wait_s=2,
        )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Each is a variable of its name in capitals. ValueError if there is something that cannot be."""
        return given(cls.quick() if environment.get("QUICK") else cls(), environment, _number)


def _number(name: str, text: str, _: object) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MAX:
        raise ValueError(f"{name}={text}: want a whole number from 1 to {_MAX}")
    return int(text)


_MAX = 10_000
