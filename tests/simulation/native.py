# SPDX-License-Identifier: Apache-2.0
"""The data plane in C with processes that write into it, all under virtual time.

As PoolModel, which is held to it: the same calls, the same answers. The processes are
native/tests/node/driven.c, in this one.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import backsight_node_native
from cffi import FFI

from appliance.clients import ClientFds
from appliance.control import Peek
from appliance.core.dataplane import ClientDrained, DataPlaneEvent
from appliance.native import NativeDataPlane
from appliance.packets import NEWEST
from appliance.ticks import TickSource
from formats.records import Body
from protocol.messages import TraceId
from runtime.settings.node import Settings
from testbed.encoding import encode_body

_LIBRARY = Path(__file__).parents[2] / "build/native/tests/node/libbacksight-driven.so"
_EVENTS_AT_ONCE = 256  # of NativeDataPlane.events()

_ffi = FFI()
_ffi.cdef(
    """
    struct driven; struct driven_handle;
    struct driven *driven_attach(int number, int arena, int channel, int context);
    void driven_detach(struct driven *d);
    uint32_t driven_stock(const struct driven *d);
    uint32_t driven_segments_taken(const struct driven *d);
    struct driven_handle *driven_open(struct driven *d, uint64_t hi, uint64_t lo);
    uint32_t driven_number(const struct driven_handle *h);
    bool driven_write(struct driven *d, uint32_t slot, struct driven_handle *h, uint8_t type,
        const void *payload, uint32_t bytes, uint64_t ticks);
    bool driven_close(struct driven *d, uint32_t slot, struct driven_handle *h);
    void driven_break_last(struct driven *d, uint32_t slot);
    void driven_trigger(struct driven *d, uint64_t hi, uint64_t lo, const char *name,
        uint64_t ticks);
    """
)


class _VirtualPlane(NativeDataPlane):
    """Without a clock of its own: its time is what it was told last."""

    THREAD_CPU_NS: ClassVar[Any] = backsight_node_native.ffi.NULL

    def __init__(self, settings: Settings, now_ns: int) -> None:
        self._now_ns = now_ns
        super().__init__(settings, TickSource(False, 1_000_000_000))

    def at(self, now_ns: int) -> None:
        self._now_ns = max(now_ns, self._now_ns)

    def now_ns(self) -> int:
        return self._now_ns

    def read_clocks(self) -> tuple[int, int, int]:
        return self._now_ns, self._now_ns, self._now_ns

    def clock_pair_if_due(self, now_ns: int) -> None:
        """Who drives it says when."""


@dataclass(slots=True, eq=False)
class NativeClient:
    """An attached process."""

    number: int
    pid: int
    service: str
    fds: ClientFds
    driven: Any
    live: bool = True

    @property
    def stock(self) -> int:
        """Segments that wait for it."""
        return int(_lib().driven_stock(self.driven))

    @property
    def taken(self) -> int:
        """Segments that it ever took."""
        return int(_lib().driven_segments_taken(self.driven))


@dataclass(slots=True, eq=False)
class NativeHandle:
    client: NativeClient
    number: int
    raw: Any


_loaded: list[Any] = []


def _lib() -> Any:
    if not _loaded:
        _loaded.append(_ffi.dlopen(str(_LIBRARY)))
    return _loaded[0]


def _words(trace: TraceId) -> tuple[int, int]:
    return int.from_bytes(trace[:8], "big"), int.from_bytes(trace[8:], "big")


@dataclass(slots=True)
class NativePool:
    """A node and its processes. Use as ``with``."""

    settings: Settings
    now_ns: int
    plane: _VirtualPlane = field(init=False)
    clients: dict[int, NativeClient] = field(default_factory=dict)

    def __enter__(self) -> NativePool:
        self.plane = _VirtualPlane(self.settings, self.now_ns)
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            self._let_go(client)
        self.plane.close()

    # ------------------------------------------------------------ writers

    def add_client(self, pid: int, service: str, now_ns: int) -> NativeClient:
        self.plane.at(now_ns)
        number, fds = self.plane.client_add(pid, service)
        driven = _lib().driven_attach(number, *fds)
        client = self.clients[number] = NativeClient(number, pid, service, fds, driven)
        return client

    def exit_client(self, client: NativeClient, now_ns: int) -> None:
        self.plane.at(now_ns)
        client.live = False
        self.plane.client_exited(client.number)

    @staticmethod
    def _let_go(client: NativeClient) -> None:
        _lib().driven_detach(client.driven)
        for fd in client.fds:
            os.close(fd)

    @staticmethod
    def open(client: NativeClient, trace: TraceId) -> NativeHandle:
        raw = _lib().driven_open(client.driven, *_words(trace))
        return NativeHandle(client, _lib().driven_number(raw), raw)

    @staticmethod
    def write(handle: NativeHandle, thread: int, body: Body, ticks: int) -> bool:
        kind, payload = encode_body(body)
        return bool(
            _lib().driven_write(
                handle.client.driven, thread, handle.raw, kind, payload, len(payload), ticks
            )
        )

    @staticmethod
    def close(handle: NativeHandle, thread: int) -> bool:
        """False: the run that was to say so was lost."""
        return bool(_lib().driven_close(handle.client.driven, thread, handle.raw))

    @staticmethod
    def break_last(handle: NativeHandle, thread: int) -> None:
        """The record that it wrote last says that it is longer than any may be."""
        _lib().driven_break_last(handle.client.driven, thread)

    @staticmethod
    def trigger(client: NativeClient, trace: TraceId, name: str, now_ns: int) -> None:
        _lib().driven_trigger(client.driven, *_words(trace), name.encode(), now_ns)

    # --------------------------------------------------------------- node

    def poll(self, now_ns: int) -> list[DataPlaneEvent]:
        """What happened; of clients that are drained nothing is left here either."""
        self.plane.at(now_ns)
        self.plane.poll(now_ns)
        events: list[DataPlaneEvent] = []
        while some := self.plane.events():
            events += some
            if len(some) < _EVENTS_AT_ONCE:
                break
        self.plane.events_done()
        for event in events:
            if isinstance(event, ClientDrained):
                self._let_go(self.clients.pop(event.client))
        return events

    def restart(self) -> None:
        """Kill the daemon; another one finds what the memfds hold."""
        before, now_ns = self.plane, self.plane.now_ns()
        # It writes nothing at its end: as good as a kill.
        with _dup(before.store_fd) as store, _dup(before.keep_fd) as keep:
            before.close()
            self.plane = _VirtualPlane(self.settings, now_ns)
            self.plane.adopt_keep(keep)
            self.plane.adopt_store(store)
        for client in self.clients.values():
            self.plane.client_adopt(client.number, client.pid, client.service, NEWEST, client.fds)
            if not client.live:
                self.plane.client_exited(client.number)

    def peek(self, trace: TraceId) -> Peek:
        return self.plane.peek(trace)


@contextlib.contextmanager
def _dup(fd: int) -> Any:
    copy = os.dup(fd)
    try:
        yield copy
    finally:
        os.close(copy)
