# SPDX-License-Identifier: Apache-2.0
"""How much is measured, and of what: by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

LOADERS = ("core", "bcc")


@dataclass(frozen=True, slots=True)
class Parameters:
    """The results of a quick run mean nothing but that everything works."""

    loader: str
    pairs: int
    round_trips: int
    http_s: int
    events_divided_by: int  # those of programs.py
    firings: int
    processes: int
    starts: int
    only: tuple[str, ...]  # names of parts; empty: all

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """ValueError if there is something that cannot be."""
        loader = environment.get("LOADER", LOADERS[0])
        if loader not in LOADERS:
            raise ValueError(f"LOADER: there is no {loader}; allowed: {' '.join(LOADERS)}")
        only = tuple(environment.get("ONLY", "").split())
        quick = bool(environment.get("QUICK"))
        pairs = environment.get("PAIRS", "1" if quick else "25")
        if not pairs.isdecimal() or not int(pairs):
            raise ValueError(f"PAIRS: not a number of measurements: {pairs}")
        if quick:
            return cls(loader, int(pairs), 2_000, 1, 20, 50, 3, 1, only)
        return cls(
            loader=loader,
            pairs=int(pairs),
            round_trips=60_000,
            http_s=2,
            events_divided_by=1,
            firings=2_000,
            processes=200,
            starts=5,
            only=only,
        )
