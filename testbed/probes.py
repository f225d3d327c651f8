# SPDX-License-Identifier: Apache-2.0
"""``backsight-probes`` beside a node daemon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from testbed.topology import Daemon, Host, Node

_DEADLINE_S = 30.0
_LOOK_EVERY_S = 0.02


class Probes(Daemon):
    """The probes of a node, with the node's own configuration; ready when entered."""

    def __init__(
        self, node: Node, host: Host | None = None, module: str = "appliance.probes"
    ) -> None:
        super().__init__(
            host or node.host,
            module,
            f"{node.name}-probes",
            node.directory,
            node.config,
        )
        self._node = node

    def open(self) -> None:
        super().open()
        self.await_node(lambda status: bool(status["probes_connected"]))

    def await_watched(self, processes: int) -> None:
        """Until so many processes are watched, and no more, and all have gone over to what is read."""
        self.await_node(
            lambda status: (status["probes_watched"], status["attach_moving"]) == (processes, 0)
        )

    def await_node(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Until that is so of the node's status; RuntimeError if it takes too long."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline_s:
            status = self._node.control.status()
            if holds(status):
                return status
            time.sleep(_LOOK_EVERY_S)
        raise RuntimeError(f"not in time; the probes said:\n{self.last_words()}")
