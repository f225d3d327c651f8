# SPDX-License-Identifier: Apache-2.0
"""The data plane in C (native/src/node.h), typed: ``appliance.core.dataplane.DataPlane`` and its life.

With ``appliance.ticks`` the only user of the extension ``backsight_node_native``. Every call
releases the GIL; calls from several threads are allowed but for close().
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from backsight_node_native import ffi, lib

from appliance.clients import ClientFds
from appliance.control import Peek
from appliance.core.dataplane import (
    ClientDrained,
    DataPlaneEvent,
    LocalTrigger,
    Slice,
    SliceChanged,
    StoreFull,
    StoreUsage,
    no_room,
)
from appliance.packets import NEWEST, Abi
from appliance.ticks import TickSource, read_clocks
from protocol.kernel_events import KernelEvent
from protocol.messages import (
    LATERALS_MAX,
    WHY_BYTES_MAX,
    Group,
    NodeId,
    SliceFlags,
    Source,
    TraceId,
    cut_utf8,
)
from runtime.settings.node import Settings

# In one call; more wait for the next.
EVENTS_AT_ONCE = 256
_SLICES_AT_ONCE = 256

_MESSAGE_BYTES = 256

# A clock pair is due when the last one is so old.
_PAIR_INTERVAL_NS = 1_000_000_000

# What is shown of a trace that was not collected: far above what one may be when
# it is (16 MiB by default), and nothing beside a node's memory.
_PEEK_BYTES_MAX = 256 << 20

_ALL_FLAGS = sum(SliceFlags)

_uncleared = ffi.new_allocator(should_clear_after_alloc=False)


class Polled(NamedTuple):
    """What there is after a poll: events that wait, and traces that are triggered."""

    has_events: bool
    has_slices: bool


class NativeDataPlane:
    """A node's pool and report store. Use as ``with``; see native/src/node.h.

    A subclass may have other clocks: ``now_ns``, ``read_clocks`` and ``THREAD_CPU_NS``.
    """

    THREAD_CPU_NS: ClassVar[Any] = ffi.addressof(lib, "bsn_thread_cpu_ns")

    def __init__(self, settings: Settings, ticks: TickSource) -> None:
        """ValueError, with the field, for what the library does not accept."""
        config = ffi.new("struct bsn_config *")
        config.node_name = settings.node.encode()
        config.pool_bytes = settings.pool_bytes
        config.arena_bytes = settings.arena_bytes_or_default
        config.store_bytes = settings.store_bytes
        config.trace_bytes_max = settings.trace_bytes_max
        config.cluster_seed = settings.cluster_seed
        config.percentage_threshold = settings.percentage_threshold
        config.reclaim_percent = settings.reclaim_percent
        config.clients_max = settings.clients_max
        config.tombstones = settings.tombstones
        config.trust_incoming = settings.trust_incoming
        config.clock_is_counter = ticks.is_counter
        config.ticks_per_s = ticks.per_s
        config.thread_cpu_ns = self.THREAD_CPU_NS
        node = ffi.new("struct bsn **")
        message = ffi.new("char[]", _MESSAGE_BYTES)
        result = lib.bsn_new(config, node, message, _MESSAGE_BYTES)
        if result:
            text = _text(ffi.string(message)) or os.strerror(-result)
            raise ValueError(f"the data plane refuses its configuration: {text}")
        self._node = node[0]
        self._ticks = ticks
        self._paired_ns = ffi.new("uint64_t *")
        self._slices_polled = ffi.new("uint64_t *")
        # Of these 180 KB only that takes memory which events were written to.
        self._events = _uncleared("struct bsn_event[]", EVENTS_AT_ONCE)
        self._peek_bytes_max = min(settings.trace_bytes_max, _PEEK_BYTES_MAX)
        self.clock_pair()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap everything. No other call may be under way."""
        if self._node is not None:
            lib.bsn_free(self._node)
            self._node = None

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    @property
    def ticks(self) -> TickSource:
        """What the ticks of records are: as was chosen, or as they were before a restart."""
        return self._ticks

    def read_clocks(self) -> tuple[int, int, int]:
        """Of one moment: ticks, CLOCK_MONOTONIC ns and Unix ns."""
        return read_clocks(self._ticks.is_counter)

    # ------------------------------------------------------- over a restart

    @property
    def store_fd(self) -> int:
        """Of the report store; the library closes it."""
        return int(lib.bsn_store_fd(self._node))

    @property
    def keep_fd(self) -> int:
        """Of the ledger, with the keep arena; the library closes it."""
        return int(lib.bsn_keep_fd(self._node))

    def adopt_store(self, fd: int) -> None:
        """Go on with an earlier report store; OSError if it is none. The caller closes fd."""
        _check(
            lib.bsn_adopt_store(self._node, self.now_ns(), fd),
            "the report store of before the restart",
        )

    def adopt_keep(self, fd: int) -> None:
        """Go on with an earlier ledger; OSError if it is none. The caller closes fd."""
        _check(
            lib.bsn_adopt_keep(self._node, self.now_ns(), fd),
            "the ledger of before the restart",
        )
        is_counter, per_s = ffi.new("bool *"), ffi.new("uint64_t *")
        lib.bsn_clock_source(self._node, is_counter, per_s)
        # Processes go on with the ticks that they have.
        self._ticks = TickSource(bool(is_counter[0]), int(per_s[0]))
        self.clock_pair()

    # --------------------------------------------------------------- clients

    def client_add(self, pid: int, service: str, abi: Abi = NEWEST) -> tuple[int, ClientFds]:
        """Make a client's shared memory: its number, and fds that the caller closes."""
        fds = ffi.new("struct bsn_client_fds *")
        number = _check(
            lib.bsn_client_add(self._node, pid, service.encode(), self.now_ns(), fds),
            "a new client",
        )
        made = ClientFds(fds.arena, fds.channel, fds.context)
        try:
            self._client_agreed(number, abi)
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        self.wake()
        return number, made

    def client_adopt(self, number: int, pid: int, service: str, abi: Abi, fds: ClientFds) -> None:
        """Go on with a client from before a restart, under its number. The caller closes the fds."""
        _check(
            lib.bsn_client_adopt(
                self._node,
                number,
                pid,
                service.encode(),
                self.now_ns(),
                ffi.new("struct bsn_client_fds *", tuple(fds)),
            ),
            f"the memory of process {pid} ({service})",
        )
        self._client_agreed(number, abi)
        self.wake()

    def _client_agreed(self, number: int, abi: Abi) -> None:
        result = lib.bsn_client_agreed(self._node, number, abi.version, abi.features)
        if result < 0:
            self.client_exited(number)
        _check(result, f"client {number} with ABI {abi.version}")

    def client_tenant(self, number: int, tenant: int) -> None:
        """Say whose memory it is (appliance.quotas), right after it was added or adopted."""
        _check(lib.bsn_client_tenant(self._node, number, tenant, self.now_ns()), f"client {number}")

    def client_lost(self, number: int) -> None:
        """Say that it wrote to memory before that is lost, right after it was added."""
        _check(lib.bsn_client_lost(self._node, number, self.now_ns()), f"client {number}")

    def set_quota(self, tenant: int, size: int) -> None:
        """Have nobody push a tenant out of so many bytes of the pool."""
        _check(lib.bsn_tenant_quota(self._node, tenant, size), "a quota")

    def tenant_bytes(self, tenant: int) -> int:
        """How much of the pool a tenant with a quota, or with processes, has."""
        size = ffi.new("uint64_t *")
        _check(lib.bsn_tenant_bytes(self._node, tenant, size), f"tenant {tenant}")
        return int(size[0])

    def client_records_lost(self, number: int) -> int:
        """Records that it has lost since it attached, by its own word, as of the last metrics().

        0 of one that is gone, whose ClientDrained may still be on its way.
        """
        return int(lib.bsn_client_records_lost(self._node, number))

    def client_exited(self, number: int) -> None:
        """Its process is gone."""
        _check(lib.bsn_client_exited(self._node, number, self.now_ns()), f"client {number}")
        self.wake()

    @property
    def context_bytes(self) -> int:
        """Of a context segment."""
        return int(lib.bsn_context_bytes())

    def client_context(self, number: int, fd: int) -> None:
        """Have a client fire in that context too, which is of zeros. The caller closes fd.

        OSError EBUSY until client_context_done() let go of the one before.
        """
        _check(
            lib.bsn_client_context(self._node, number, fd), f"another context of client {number}"
        )

    def client_context_done(self, number: int) -> bool:
        """Let go of a client's context before, which it has left; False until all is seen to.

        That is after the events that wait, or come at once, and events_done().
        """
        result = lib.bsn_client_context_done(self._node, number, self.now_ns())
        if result == -errno.EAGAIN:
            self.wake()
            return False
        # Forgotten by then, together with its client.
        if result != -errno.ENOENT:
            _check(result, f"the context before of client {number}")
        return True

    def client_adopt_context(self, number: int, fd: int) -> None:
        """Go on with a context that a client may not have left. The caller closes fd."""
        _check(
            lib.bsn_client_adopt_context(self._node, number, fd),
            f"the context before of client {number}",
        )

    @property
    def policy_fd(self) -> int:
        """Of the policy table, for all clients; the library closes it."""
        return int(lib.bsn_policy_fd(self._node))

    def set_sampling(self, percentage_threshold: int, *, trust_incoming: bool) -> None:
        """Record these traces, and honour triggers that come with a request, or do not.

        In processes that are attached, too.
        """
        lib.bsn_set_sampling(self._node, percentage_threshold, trust_incoming)

    def set_priority_seed(self, seed: int) -> None:
        """Order what recent() finds by priorities of this seed, instead of the cluster's."""
        lib.bsn_set_priority_seed(self._node, seed)

    # ------------------------------------------------------------------ work

    def clock_pair(self) -> None:
        """Store how the clocks stand."""
        ticks, monotonic_ns, realtime_ns = self.read_clocks()
        self._paired_ns[0] = monotonic_ns
        # -EINVAL: another thread stored a later one in between.
        lib.bsn_clock_pair(self._node, ticks, monotonic_ns, realtime_ns)

    def clock_pair_if_due(self, now_ns: int) -> None:
        """Store how the clocks stand, unless that was done within the last second."""
        if now_ns - self._paired_ns[0] >= _PAIR_INTERVAL_NS:
            self.clock_pair()

    def poll(self, now_ns: int) -> bool:
        """Take triggers, search, copy, grant, reclaim. Whether there are events."""
        self.clock_pair_if_due(now_ns)
        return _check(lib.bsn_poll(self._node, now_ns), "a poll") > 0

    def wait_and_poll(self, timeout_ns: int | None) -> Polled:
        """Sleep until there may be work, wake() or the timeout; then what poll() does.

        None: no timeout. Between the two no other thread of Python is waited for. For one thread.
        """
        found = lib.wait_and_poll(
            self._node,
            -1 if timeout_ns is None else timeout_ns,
            self._ticks.is_counter,
            _PAIR_INTERVAL_NS,
            self._paired_ns,
            self._slices_polled,
        )
        return Polled(_check(found, "a poll") > 0, self._slices_polled[0] > 0)

    def wake(self) -> None:
        """End a wait(), or the next one."""
        lib.bsn_wake(self._node)

    def events(self) -> list[DataPlaneEvent]:
        """Take some of the events that wait. For one thread at a time."""
        raw = self._events
        count = _check(lib.bsn_events(self._node, raw, EVENTS_AT_ONCE), "events")
        events = []
        for i in range(count):
            event = self._event(raw[i])
            if event is not None:
                events.append(event)
        return events

    def events_done(self) -> None:
        """All events that were taken are seen to; their triggers need not outlive this daemon."""
        lib.bsn_events_done(self._node)

    def _event(self, raw: Any) -> DataPlaneEvent | None:  # noqa: ANN401 - of cffi
        if raw.kind == lib.BSN_EVENT_CLIENT_DRAINED:
            return ClientDrained(raw.client)
        trace = _trace(raw.id)
        if raw.kind == lib.BSN_EVENT_SLICE_CHANGED:
            return SliceChanged(trace)
        if raw.kind == lib.BSN_EVENT_STORE_FULL:
            return StoreFull(trace)
        if raw.kind != lib.BSN_EVENT_TRIGGER:
            return None
        laterals = (_trace(raw.laterals[i]) for i in range(min(raw.n_laterals, LATERALS_MAX)))
        # The library has looked at the name, the source and the ids.
        return LocalTrigger(
            client=raw.client,
            fired_ns=raw.time_ns,
            trigger=_text(ffi.string(raw.trigger)),
            trace=trace,
            laterals=tuple(dict.fromkeys(t for t in laterals if any(t) and t != trace)),
            why=cut_utf8(_why(raw), WHY_BYTES_MAX),
            source=Source(raw.source),
        )

    # ---------------------------------------------------------------- slices

    def collect(self, trace: TraceId, group: Group, now_ns: int) -> Slice:
        """Copy out what is held of a trace and all that comes later; maybe after a search."""
        self.clock_pair_if_due(now_ns)
        found = ffi.new("struct bsn_slice *")
        result = lib.bsn_collect(
            self._node,
            _id(trace),
            _id(group.primary),
            group.trigger.encode(),
            now_ns,
            found,
        )
        if result == -errno.ENOSPC:
            return no_room(trace, group, now_ns)
        _check(result, f"collecting {trace.hex()}")
        return _slice(found)

    def slice(self, trace: TraceId) -> Slice | None:
        """The slice of a collected trace, None if it is not collected."""
        found = ffi.new("struct bsn_slice *")
        result = lib.bsn_slice_info(self._node, _id(trace), found)
        if result == -errno.ENOENT:
            return None
        _check(result, f"slice {trace.hex()}")
        return _slice(found)

    def read(self, trace: TraceId, offset: int, size: int) -> bytes:
        """Bytes of a slice; fewer than size only at its end."""
        buffer = ffi.new("char[]", size)
        read = lib.bsn_slice_read(self._node, _id(trace), offset, buffer, size)
        return bytes(ffi.buffer(buffer, _check(read, f"slice {trace.hex()} at {offset}")))

    def trim(self, trace: TraceId, offset: int) -> None:
        """Free what lies before offset; it is durable elsewhere."""
        _check(lib.bsn_slice_trim(self._node, _id(trace), offset), f"slice {trace.hex()}")

    def release(self, trace: TraceId, *, abandoned: bool, now_ns: int) -> None:
        """Forget a slice and its mark; abandoned leaves a tombstone."""
        result = lib.bsn_slice_release(self._node, _id(trace), abandoned, now_ns)
        if result != -errno.ENOENT:
            _check(result, f"slice {trace.hex()}")

    def slices(self) -> Iterator[Slice]:
        """All collected slices: after a restart, what the store still held."""
        cursor = ffi.new("uint64_t *")
        raw = ffi.new("struct bsn_slice[]", _SLICES_AT_ONCE)
        while count := _check(lib.bsn_slices(self._node, cursor, raw, _SLICES_AT_ONCE), "slices"):
            for i in range(count):
                yield _slice(raw[i])

    def store_usage(self) -> StoreUsage:
        """How full the report store is."""
        usage = self._usage()
        return StoreUsage(usage.store_used_bytes, usage.store_bytes)

    # --------------------------------------------------------------- looking

    def recent(self, age_ns: int, service: str, traces_max: int) -> tuple[int, list[TraceId]]:
        """How many traces were written to so lately, and those of the highest priority.

        ``service``: by a process of it; "": by any. It may take long: for a thread.
        """
        ids = ffi.new("struct bs_trace_id[]", traces_max)
        found = ffi.new("uint64_t *")
        count = _check(
            lib.bsn_recent(
                self._node, self.now_ns(), age_ns, service.encode(), ids, traces_max, found
            ),
            "the traces of the last seconds",
        )
        return int(found[0]), [_trace(ids[i]) for i in range(count)]

    def recent_of(self, age_ns: int, clients: Collection[int], traces_max: int) -> list[TraceId]:
        """Of these processes alone; else as ``recent``."""
        ids = ffi.new("struct bs_trace_id[]", traces_max)
        count = _check(
            lib.bsn_recent_of(
                self._node,
                self.now_ns(),
                age_ns,
                ffi.new("uint32_t[]", list(clients)),
                len(clients),
                ids,
                traces_max,
                ffi.new("uint64_t *"),
            ),
            "the traces of the last seconds",
        )
        return [_trace(ids[i]) for i in range(count)]

    def peek(self, trace: TraceId) -> Peek:
        """What the node holds of a trace at this moment; nothing is triggered.

        TRUNCATED says that more is there than is shown.
        """
        now_ns = self.now_ns()
        self.clock_pair_if_due(now_ns)
        size = min(1 << 20, self._peek_bytes_max)
        while True:
            buffer = ffi.new("char[]", size)
            found = ffi.new("struct bsn_slice *")
            got = _check(
                lib.bsn_peek(self._node, _id(trace), now_ns, buffer, size, found),
                f"trace {trace.hex()}",
            )
            # Cut at the buffer's end: perhaps there is more.
            if got < size or size == self._peek_bytes_max:
                flags = SliceFlags(found.flags & _ALL_FLAGS)
                if got == size:
                    flags |= SliceFlags.TRUNCATED
                trigger = ffi.string(found.trigger).decode("ascii", "replace")
                data = bytes(ffi.buffer(buffer, got))
                return Peek(flags, found.open_handles, data, trigger, found.trimmed_bytes)
            size = min(size * 8, self._peek_bytes_max)

    def _usage(self) -> Any:  # noqa: ANN401 - of cffi
        usage = ffi.new("struct bsn_usage *")
        lib.bsn_get_usage(self._node, usage)
        return usage

    def _metrics(self) -> Any:  # noqa: ANN401 - of cffi
        metrics = ffi.new("struct bsn_metrics *")
        lib.bsn_get_metrics(self._node, metrics)
        return metrics

    def metrics(self) -> dict[str, int]:
        """All figures of struct bsn_metrics, by name."""
        metrics = self._metrics()
        return {name: getattr(metrics, name) for name, _ in ffi.typeof("struct bsn_metrics").fields}


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return int(result)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _why(raw: Any) -> str:  # noqa: ANN401 - of cffi
    if raw.source != Source.KERNEL:
        return _text(ffi.string(raw.why))
    return KernelEvent.parse(bytes(ffi.buffer(raw.why))).sentence


def _id(trace: TraceId) -> Any:  # noqa: ANN401 - of cffi
    hi, lo = int.from_bytes(trace[:8], "big"), int.from_bytes(trace[8:], "big")
    return ffi.new("struct bs_trace_id *", {"hi": hi, "lo": lo})[0]


def _trace(raw: Any) -> TraceId:  # noqa: ANN401 - of cffi
    return TraceId(int(raw.hi).to_bytes(8, "big") + int(raw.lo).to_bytes(8, "big"))


def _slice(raw: Any) -> Slice:  # noqa: ANN401 - of cffi
    return Slice(
        trace=_trace(raw.id),
        group=Group(_text(ffi.string(raw.trigger)), _trace(raw.primary)),
        epoch=raw.epoch,
        bytes=raw.bytes,
        trimmed_bytes=raw.trimmed_bytes,
        collected_ns=raw.collected_ns,
        changed_ns=raw.changed_ns,
        open_handles=raw.open_handles,
        flags=SliceFlags(raw.flags & _ALL_FLAGS),
        crumbs=tuple(NodeId(raw.crumbs[i]) for i in range(raw.n_crumbs)),
        searching=bool(raw.flags & lib.BSN_SLICE_SEARCHING),
    )
