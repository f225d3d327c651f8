# SPDX-License-Identifier: Apache-2.0
"""PoolModel: an executable model of a node's data plane.

It says in some 1,500 lines what native/src/node.h and abi.h promise, with no shared
memory and no rings: processes append runs to segments, the node observes, copies, grants
and reclaims. The simulator runs the cores on it; tests/simulation/test_differential.py
gives it and the C library the same calls and compares all answers, so neither can change
alone.

Modelled to the letter: what a run is and what it says, what a segment's reclaim does to
each run in it, what is remembered, what a slice is made of byte by byte, its flags, open
handles and crumbs, marks and blocks of the report store. Not modelled: how many segments
a process is given in advance (the C library looks at its rate), whose memory they had, how
kept runs share their arena, fingerprints that two traces have in common, more losses than
half of what is remembered, more than 256 handles of a slice that are open or ended first, malice
beyond records that make no sense.

Its parts, each to be read by itself: ``state`` (processes, and what they have written),
``writing``, ``segments`` (what is granted, reclaimed, kept and remembered), ``store`` (the
slices), ``losses``, ``search`` (and its verdict), and ``model``, which puts them together.
"""

from tests.simulation.pool.model import PoolModel
from tests.simulation.pool.segments import Segments
from tests.simulation.pool.state import ClientModel, Handle, PoolConfig, ThreadModel
from tests.simulation.pool.store import BLOCK_BYTES
from tests.simulation.pool.writing import Writing

__all__ = [
    "BLOCK_BYTES",
    "ClientModel",
    "Handle",
    "PoolConfig",
    "PoolModel",
    "Segments",
    "ThreadModel",
    "Writing",
]
