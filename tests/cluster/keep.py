# SPDX-License-Identifier: Apache-2.0
"""A cluster that stays up, for who wants to look around."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from testbed.topology import Coordinator, Node


def keep_up(coordinator: Coordinator, node: Node, directory: Path, more: str = "") -> None:
    """Say how to look around, ``more`` lines of it included, and wait for a signal."""
    inside = f"ip netns exec {coordinator.host.namespace}"
    print(
        f"""
Everything stays up. To look around, as root in another terminal, say first

  export PYTHONPATH={os.environ["PYTHONPATH"]}
  alias backsightctl='{inside} /usr/bin/python3 -m ctl --coordinator {coordinator.endpoint}'

  backsightctl traces
  backsightctl show TRACE
  backsightctl nodes
  one node's own view:   /usr/bin/python3 -m ctl --node {node.socket_path} status
{more}  a shell on {node.name}:     ip netns exec {node.host.namespace} bash
  Jaeger's API:          {inside} curl http://127.0.0.1:16686/api/services
  metrics:               {inside} curl http://127.0.0.1:4772/metrics
                         ip netns exec {node.host.namespace} curl http://127.0.0.1:4771/metrics
  logs, configurations:  {directory}

Ctrl-C here (or kill {os.getpid()}) stops and removes it all."""
    )
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    print("\nstopping")
