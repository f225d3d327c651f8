# SPDX-License-Identifier: Apache-2.0
"""How much is done: enough for figures, or a little of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """The results of a quick run mean nothing but that everything works."""

    pool_bytes: int
    repetitions: int
    written_bytes: int  # a repetition of what is counted in bytes
    operations: int  # a repetition of what is not
    bursts: tuple[tuple[int, int], ...]  # of how many traces, and how many a repetition
    sustained_s: float
    sustained_rates_per_s: tuple[int, ...]  # beside as fast as it goes
    rates_per_s: tuple[int, ...]
    starved_rates_per_s: tuple[int, ...]
    starved_windows: int
    starved_window_ms: int
    triggers: int
    idle_s: float
    idle_clients: int
    idle_clients_s: int
    collections: int
    chains: tuple[int, ...]
    search_steps: int  # halvings of the interval in which the highest rate is sought
    horizon_pool_bytes: int
    horizon_trace_bytes: tuple[int, ...]
    horizon_samples: int
    horizon_times: int
    lookup_pool_bytes: tuple[int, ...]
    lookup_trace_bytes: tuple[int, ...]
    lookup_times: int
    restart_pool_bytes: int
    restart_times: int
    triggers_pool_bytes: tuple[int, ...]
    triggers_rate_per_s: int
    triggers_s: int
    http_pool_bytes: int
    http_pairs: int
    http_window_s: int

    @classmethod
    def full(cls) -> Self:
        """About half an hour. The pool is as large as published benchmarks of such systems have it."""
        return cls(
            pool_bytes=1024 * _MIB,
            repetitions=5,
            written_bytes=2048 * _MIB,
            operations=10_000_000,
            # 600 are what a small ring or stock has room for; 100,000 are a flood.
            bursts=((600, 333), (100_000, 6)),
            sustained_s=60.0,
            sustained_rates_per_s=(10_000_000, 20_000_000),
            rates_per_s=(10_000, 100_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000),
            # From a busy service to a load generator; bursts of what a tenth of a second brings.
            starved_rates_per_s=(500, 1000, 2000, 5000, 10_000),
            starved_windows=6,
            starved_window_ms=5000,
            triggers=200,
            idle_s=10.0,
            idle_clients=1600,
            idle_clients_s=10,
            collections=20,
            chains=(2, 10),
            search_steps=7,  # to a hundredth
            horizon_pool_bytes=256 * _MIB,  # the default
            horizon_trace_bytes=(100, 256, 1024, 4096, 16384, 32768),
            horizon_samples=2000,
            horizon_times=3,
            lookup_pool_bytes=(64 * _MIB, 256 * _MIB, 1024 * _MIB, 4096 * _MIB),
            lookup_trace_bytes=(100, 1024, 32768),
            lookup_times=20,
            restart_pool_bytes=1024 * _MIB,
            restart_times=5,
            triggers_pool_bytes=(256 * _MIB, 1024 * _MIB, 4096 * _MIB),
            triggers_rate_per_s=10_000,
            triggers_s=5,  # each for a trace of its own, which the smallest pool must hold
            http_pool_bytes=64 * _MIB,  # soon written over: services meet their memory once
            http_pairs=24,
            http_window_s=2,
        )

    @classmethod
    def quick(cls) -> Self:
        """Seconds."""
        return cls(
            pool_bytes=16 * _MIB,
            repetitions=2,
            written_bytes=4 * _MIB,
            operations=20_000,
            bursts=((600, 3), (100_000, 1)),
            sustained_s=0.2,
            sustained_rates_per_s=(10_000,),
            rates_per_s=(10_000, 100_000),
            starved_rates_per_s=(500,),
            starved_windows=2,
            starved_window_ms=200,
            triggers=5,
            idle_s=0.2,
            idle_clients=200,
            idle_clients_s=1,
            collections=2,
            chains=(2,),
            search_steps=1,
            horizon_pool_bytes=8 * _MIB,
            horizon_trace_bytes=(100, 1024),
            horizon_samples=100,
            horizon_times=1,
            lookup_pool_bytes=(8 * _MIB,),
            lookup_trace_bytes=(100, 1024),
            lookup_times=2,
            restart_pool_bytes=8 * _MIB,
            restart_times=2,
            triggers_pool_bytes=(8 * _MIB,),
            triggers_rate_per_s=1000,
            triggers_s=1,
            http_pool_bytes=8 * _MIB,
            http_pairs=2,
            http_window_s=1,
        )

    def split(self, rounds: int) -> Self:
        """For as many rounds, which together are about as good as one of this scale.

        A minute without a pause stays a minute, and pairs, which are in turn anyway, are not split.
        """

        def part(times: int) -> int:
            return max(1, -(-times // rounds))

        return replace(
            self,
            repetitions=part(self.repetitions),
            starved_windows=part(self.starved_windows),
            triggers=part(self.triggers),
            idle_s=self.idle_s / rounds,
            collections=part(self.collections),
            horizon_times=part(self.horizon_times),
            lookup_times=part(self.lookup_times),
            restart_times=part(self.restart_times),
        )
