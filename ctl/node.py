# SPDX-License-Identifier: Apache-2.0
"""Questions to the node on this machine (protocol.control)."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctl.coordinator import AskError, NotFound
from ctl.trace import NodeSlice, TraceView
from formats.spans import read_slice
from protocol.control import control_path
from protocol.messages import SliceFlags, TraceId

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a node holds of a trace, beside what it has reported; ``flags`` say why it is not all."""

    node: str
    flags: SliceFlags
    bytes: int
    reported_bytes: int


@dataclass(frozen=True, slots=True)
class NodeClient:
    """``backsight-node``, by the path of the socket where applications attach."""

    socket_path: str

    def status(self) -> dict[str, Any]:
        reply, _ = self._ask({"command": "status"})
        status: dict[str, Any] = reply["status"]
        return status

    def trigger(self, name: str, trace: TraceId, why: str) -> Held | None:
        """Fire it. What the node holds of the trace; None if it cannot tell."""
        request = {"command": "trigger", "name": name, "trace": trace.hex(), "why": why}
        reply, _ = self._ask(request)
        # Neither an older node says it nor one that looks for it still, or at another trace.
        if "bytes" not in reply:
            return None
        flags = SliceFlags(reply["flags"])
        return Held(reply["node"], flags, reply["bytes"], reply["reported_bytes"])

    def peek(self, trace: TraceId) -> TraceView:
        """What the node holds of a trace; nothing is triggered. NotFound if it holds nothing."""
        reply, data = self._ask({"command": "peek", "trace": trace.hex()})
        if len(data) != reply["bytes"]:
            raise AskError(
                f"node {reply['node']} broke off after {len(data)} of {reply['bytes']} bytes of"
                f" trace {trace.hex()}"
            )
        flags = SliceFlags(reply["flags"])
        if not data and not flags:
            raise NotFound(f"node {reply['node']} holds nothing of trace {trace.hex()}")
        content = read_slice([data])
        part = NodeSlice(
            reply["node"],
            len(data),
            flags,
            reply["open_handles"],
            content,
            trigger=reply["trigger"],
        )
        return TraceView(
            {
                "trace_id": trace.hex(),
                "triggers": [],
                "triggers_omitted": 0,
                "pinned": False,
                # One node cannot judge a trace.
                "verdict": {"kind": "unjudged", "version": 0, "reasons": []},
                "nodes": [reply["node"]],
                "span_count": len(content.spans),
                "bytes": len(data),
            },
            (part,),
        )

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The answer, and the bytes that follow it."""
        path = control_path(Path(self.socket_path))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(str(path))
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as stream:
                    line = stream.readline()
                    data = stream.read()
        except OSError as error:
            raise AskError(
                f"no node answers at {path} ({error.strerror or error}); give --node SOCKET, the "
                "path where applications attach, and ask as root or as the daemon's user"
            ) from error
        if not line:
            raise AskError(f"the node at {path} closed the connection without an answer")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise AskError(f"the node at {path}: {reply['error']}")
        return reply, data
