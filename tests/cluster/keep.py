# SPDX-License-Identifier: Apache-2.0
"""A cluster that stays up, for who wants to look around."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.cluster.topology import Coordinator, Node


def keep_up(coordinator: Coordinator, node: Node, directory: Path, more: str = "") -> None:
    """Say how to look around, ``more`` lines of it included, and wait for a signal."""
    python = f"env PYTHONPATH={os.environ['PYTHONPATH']} /usr/bin/python3"
    inside = f"ip netns exec {coordinator.host.namespace}"
    ctl = f"{inside} {python} -m ctl --coordinator {coordinator.endpoint}"
    print(
        f"""
Everything stays up. To look around, as root:

  {ctl} traces
  {ctl} show TRACE
  {ctl} nodes
  one node's own view:   {python} -m ctl --node {node.socket_path} status
{more}  a shell on a node:     ip netns exec {node.host.namespace} bash
  logs, configurations:  {directory}

Ctrl-C here (or kill {os.getpid()}) stops and removes it all."""
    )
    signal.pause()
