# SPDX-License-Identifier: Apache-2.0
"""What must hold, judged by what the schedule did and what stood in the pools.

Nothing here believes what a core says of itself. ``record`` is what happened in the world: who fired
what, which daemons were away, what pools had lost before a trace was collected. ``expected`` is what
follows from that for each trace that was fired; ``reasons`` whether what a verdict says is true;
``choices`` whether who gives way is the one of lowest priority; ``limits`` whether what is refused had to
be; ``snapshots`` what a snapshot takes; ``bounds`` what anything may hold.
"""

from tests.simulation.oracle.choices import watch_coordinator, watch_node
from tests.simulation.oracle.limits import watch_limits
from tests.simulation.oracle.oracle import Oracle, OracleError, Tally
from tests.simulation.oracle.record import Fired, World

__all__ = [
    "Fired",
    "Oracle",
    "OracleError",
    "Tally",
    "World",
    "watch_coordinator",
    "watch_limits",
    "watch_node",
]
