# SPDX-License-Identifier: Apache-2.0
"""Where ``backsightctl`` asks the node on its own machine.

protocol.control says how. Only the daemon's own user and root may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from protocol.control import REQUEST_BYTES_MAX
from protocol.messages import SliceFlags, TraceId
from protocol.wire import WireError, parse_trace_id, trigger_name_is_valid
from runtime.settings.allow import trusted_uids
from runtime.unix_socket import make_way, uid_of

_REQUEST_TIMEOUT_S = 5.0

# A trace that was just triggered may be looked for a little later. A pass over 768 MiB of pool takes
# 6 ms, and the next one waits for four times that at most: so it is known in time in 64 GiB, too.
_KNOWN_TIMEOUT_S = 2.0

# Written at once; between them the event loop has its turn.
_WRITE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Peek:
    """What the node holds of a trace at this moment; asking triggers nothing.

    ``trigger``: under which it is collected; empty while it is not. ``reported_bytes``: what was
    reported of it since, and is held no more.
    """

    flags: SliceFlags
    open_handles: int
    data: bytes
    trigger: str = ""
    reported_bytes: int = 0


class ControlHost(Protocol):
    """Who answers (appliance.daemon)."""

    def status(self) -> dict[str, Any]:
        """Figures about the node, ready for JSON."""

    def peek(self, trace: TraceId) -> Peek:
        """What the node holds of a trace. Called in a thread, one at a time: it may be much."""

    async def known(self, trace: TraceId) -> None:
        """Wait while a triggered trace is still looked for: until then ``peek`` shows too little."""

    def trigger(self, name: str, trace: TraceId, why: str) -> None:
        """Fire a trigger as the operator."""


class ControlServer:
    """Serves the control socket on the running loop."""

    def __init__(self, path: Path, node: str, host: ControlHost) -> None:
        self._path = path
        self._node = node
        self._host = host
        self._server: asyncio.Server | None = None
        self._peeking = asyncio.Lock()

    async def __aenter__(self) -> Self:
        make_way(self._path)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._serve, str(self._path), limit=REQUEST_BYTES_MAX
        )
        self._path.chmod(0o600)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        # The host must stay until nobody looks at it; from here on nobody does.
        await self._peeking.acquire()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            data = b""
            try:
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    line = await reader.readline()
                if self._may_ask(writer):
                    reply, data = await self._answer(line)
                else:
                    reply = {"error": "not allowed"}
            except ValueError:
                # From readline: the line is longer than any request.
                reply = {"error": f"a request has at most {REQUEST_BYTES_MAX} bytes"}
            writer.write(json.dumps(reply).encode() + b"\n")
            for start in range(0, len(data), _WRITE_BYTES):
                writer.write(data[start : start + _WRITE_BYTES])
                await writer.drain()
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    @staticmethod
    def _may_ask(writer: asyncio.StreamWriter) -> bool:
        connection: socket.socket = writer.get_extra_info("socket")
        return uid_of(connection) in trusted_uids()

    async def _answer(self, line: bytes) -> tuple[dict[str, Any], bytes]:
        """The line to answer with, and what follows it."""
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                return {"error": "a request is a JSON object"}, b""
            match request.get("command"):
                case "status":
                    return {"status": self._host.status()}, b""
                case "peek":
                    return await self._peek(parse_trace_id(str(request.get("trace"))))
                case "trigger":
                    return await self._trigger(request), b""
                case command:
                    known = "status, peek, trigger"
                    return {"error": f"no command {command!r}; there is: {known}"}, b""
        except (WireError, UnicodeDecodeError, json.JSONDecodeError) as error:
            return {"error": str(error)}, b""
        except RecursionError:
            return {"error": "a request is a flat JSON object"}, b""

    async def _peek(self, trace: TraceId) -> tuple[dict[str, Any], bytes]:
        try:
            async with asyncio.timeout(_KNOWN_TIMEOUT_S):
                await self._host.known(trace)
            async with self._peeking:
                peek = await self._look(trace)
        except TimeoutError:
            return {"error": f"trace {trace.hex()} is still looked for; ask again"}, b""
        except OSError as error:
            return {"error": str(error)}, b""
        return {
            **self._found(peek),
            "open_handles": peek.open_handles,
            "trigger": peek.trigger,
        }, peek.data

    async def _look(self, trace: TraceId) -> Peek:
        return await asyncio.to_thread(self._host.peek, trace)

    def _found(self, peek: Peek) -> dict[str, Any]:
        return {"node": self._node, "flags": int(peek.flags), "bytes": len(peek.data)}

    async def _trigger(self, request: dict[str, Any]) -> dict[str, Any]:
        name, why = str(request.get("name")), str(request.get("why", ""))
        if not trigger_name_is_valid(name):
            return {"error": f"trigger {name[:64]!r}: want 1 to 31 of [a-z0-9_.-]"}
        trace = parse_trace_id(str(request.get("trace")))
        self._host.trigger(name, trace, why)
        # It is fired: that it is looked for, that somebody looks at another one, or that it cannot be
        # read holds up who fired it for so long at most.
        try:
            async with contextlib.AsyncExitStack() as looking:
                async with asyncio.timeout(_KNOWN_TIMEOUT_S):
                    await self._host.known(trace)
                    await looking.enter_async_context(self._peeking)
                peek = await self._look(trace)
        except OSError:
            return {}
        return {**self._found(peek), "reported_bytes": peek.reported_bytes}
