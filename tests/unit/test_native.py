# SPDX-License-Identifier: Apache-2.0
"""The typed data plane over the C library: a real process writes, the wrapper tells what it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import mmap
import os
import threading
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backsight_node_native import lib

from appliance import native
from appliance.core.dataplane import LocalTrigger, Slice, SliceChanged, no_room
from appliance.native import NativeDataPlane
from appliance.ticks import TickSource, choose_tick_source, counter_is_steady, read_clocks
from protocol.messages import Group, SliceFlags, Source, TraceId
from runtime.settings.node import Settings

MONOTONIC = TickSource(False, 1_000_000_000)
SMALL = Settings(node="here", pool_bytes=8 << 20, arena_bytes=4 << 20, store_bytes=1 << 20)
TRACE = TraceId(bytes(range(1, 17)))
OTHER = TraceId(bytes(range(2, 18)))
GROUP = Group("slow", TRACE)


@contextlib.contextmanager
def dataplane(settings: Settings = SMALL) -> Iterator[NativeDataPlane]:
    with NativeDataPlane(settings, MONOTONIC) as here:
        yield here


def test_clocks_are_read_together() -> None:
    ticks = choose_tick_source()
    assert ticks.is_counter == counter_is_steady()
    first, second = read_clocks(ticks.is_counter), read_clocks(ticks.is_counter)
    assert all(b > a for a, b in zip(first, second, strict=True))
    assert abs(first[2] - time.time_ns()) < 60 * 1_000_000_000
    assert abs(first[1] - time.monotonic_ns()) < 60 * 1_000_000_000
    # Rate and readings agree: an interval is as long by ticks as by the clock.
    start = read_clocks(ticks.is_counter)
    while (end := read_clocks(ticks.is_counter))[1] - start[1] < 20_000_000:
        pass
    by_ticks = (end[0] - start[0]) * 1_000_000_000 / ticks.per_s
    assert by_ticks / (end[1] - start[1]) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(("machine", "steady"), [("aarch64", True), ("riscv64", False)])
def test_the_counter_is_the_clock_where_the_architecture_promises_it(
    machine: str, steady: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    assert counter_is_steady() == steady


def test_memory_is_counted_to_whom_it_is_said_to_be_of() -> None:
    with dataplane() as here:
        here.set_quota(77, 1 << 20)
        assert here.tenant_bytes(77) == 0
        number, fds = here.client_add(os.getpid(), "shop")
        here.client_tenant(number, 77)
        for fd in fds:
            os.close(fd)
        # What it has in hand.
        assert here.tenant_bytes(77) == here.metrics()["stock_bytes"] > 0
        with pytest.raises(OSError, match=f"client {number}"):
            here.client_tenant(number, 78)
        with pytest.raises(OSError, match="tenant 78"):
            here.tenant_bytes(78)


def test_nobody_has_lost_what_was_not_written() -> None:
    with dataplane() as here:
        number, fds = here.client_add(os.getpid(), "shop")
        for fd in fds:
            os.close(fd)
        assert here.client_records_lost(number) == 0
        # One that is gone: its ClientDrained may not have been taken yet.
        assert here.client_records_lost(number + 1) == 0


def test_what_the_library_refuses_is_named() -> None:
    with pytest.raises(ValueError, match="ticks_per_s"):
        NativeDataPlane(SMALL, TickSource(False, 0))


@pytest.mark.parametrize(
    "key", ["pool_bytes", "store_bytes", "trace_bytes_max", "reclaim_percent", "tombstones"]
)
def test_a_configuration_is_allowed_exactly_what_the_library_takes(key: str) -> None:
    _, bound, *_ = typing.get_args(typing.get_type_hints(Settings, include_extras=True)[key])
    most = int(bound.maximum)
    change: dict[str, Any] = {key: most + 1}
    with pytest.raises(ValueError, match=f"{key} is {most + 1}; .* at most {most}$"):
        NativeDataPlane(dataclasses.replace(SMALL, **change), MONOTONIC)


def test_a_trace_never_seen_is_collected_as_not_held() -> None:
    with dataplane() as here:
        assert here.slice(TRACE) is None
        assert not list(here.slices())
        now_ns = time.monotonic_ns()
        found = here.collect(TRACE, GROUP, now_ns)
        assert (found.trace, found.group) == (TRACE, GROUP)
        assert SliceFlags.HELD not in found.flags
        assert (found.bytes, found.crumbs, found.open_handles) == (0, (), 0)
        assert here.slice(TRACE) == found
        assert list(here.slices()) == [found]
        assert list(here.slices())
        assert here.read(TRACE, 0, 100) == b""
        here.release(TRACE, abandoned=False, now_ns=now_ns)
        here.release(TRACE, abandoned=False, now_ns=now_ns)
        assert here.slice(TRACE) is None


def test_many_slices_are_all_listed() -> None:
    with dataplane() as here:
        # More than are fetched at once.
        traces = {TraceId(number.to_bytes(16, "big")) for number in range(1, 301)}
        for trace in traces:
            here.collect(trace, Group("slow", trace), time.monotonic_ns())
        listed: list[Slice] = list(here.slices())
        assert len(listed) == 300
        assert {found.trace for found in listed} == traces


def test_a_trace_that_the_store_has_no_room_to_mark_is_answered_all_the_same() -> None:
    with dataplane() as here:
        now_ns = time.monotonic_ns()
        traces = (TraceId(number.to_bytes(16, "big")) for number in itertools.count(1))
        answers = (here.collect(trace, Group("slow", trace), now_ns) for trace in traces)
        full = next(found for found in answers if SliceFlags.STORE_FULL in found.flags)
        assert full == no_room(full.trace, Group("slow", full.trace), now_ns)
        assert here.slice(full.trace) is None


def test_what_the_store_holds_is_asked_without_a_look_at_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every turn; metrics would look at each thread of each of them."""

    class WithoutMetrics:
        def __getattr__(self, name: str) -> Any:
            assert name != "bsn_get_metrics"
            return getattr(lib, name)

    with dataplane() as here:
        here.collect(TRACE, GROUP, time.monotonic_ns())
        here.collect(OTHER, GROUP, time.monotonic_ns())
        figures = here.metrics()
        monkeypatch.setattr(native, "lib", WithoutMetrics())
        usage = here.store_usage()
        assert (usage.capacity_bytes, usage.used_bytes) == (
            figures["store_bytes"],
            figures["store_used_bytes"],
        )
        assert usage.capacity_bytes == SMALL.store_bytes
        assert 0 < usage.used_bytes < usage.capacity_bytes
        assert list(here.slices())


def test_a_search_that_is_not_over_is_no_flag_of_the_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Searching:
        """The library, as it answers where there is much to look through."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def bsn_collect(self, *arguments: Any) -> int:
            result: int = lib.bsn_collect(*arguments)
            arguments[-1].flags |= lib.BSN_SLICE_SEARCHING
            return result

    with dataplane() as here:
        found = here.collect(TRACE, GROUP, time.monotonic_ns())
        assert not found.searching
        here.release(TRACE, abandoned=False, now_ns=time.monotonic_ns())
        monkeypatch.setattr(native, "lib", Searching())
        found = here.collect(TRACE, GROUP, time.monotonic_ns())
        assert found.searching
        assert found.flags == SliceFlags.NONE


def test_peek_triggers_nothing() -> None:
    with dataplane() as here:
        assert here.peek(TRACE).data == b""
        assert not list(here.slices())


def test_peek_shows_so_much_and_says_that_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        """The library, with a trace that fills any buffer."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def bsn_peek(self, *arguments: Any) -> int:
            size: int = arguments[4]
            return size

    monkeypatch.setattr(native, "_PEEK_BYTES_MAX", 3 << 20)
    monkeypatch.setattr(native, "lib", Endless())
    with dataplane() as here:
        peeked = here.peek(TRACE)
    assert (len(peeked.data), peeked.flags) == (3 << 20, SliceFlags.TRUNCATED)


def test_peek_knows_what_was_reported_already(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trimmed:
        """The library, with a slice of which all was reported."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def bsn_peek(self, *arguments: Any) -> int:
            arguments[-1].bytes = arguments[-1].trimmed_bytes = 678
            return 0

    monkeypatch.setattr(native, "lib", Trimmed())
    with dataplane() as here:
        peeked = here.peek(TRACE)
    assert (peeked.data, peeked.reported_bytes) == (b"", 678)


def test_wait_ends_by_wake_also_when_it_came_before() -> None:
    with dataplane() as here:
        here.wake()
        here.wait_and_poll(None)
        waiter = threading.Thread(target=here.wait_and_poll, args=(None,))
        waiter.start()
        here.wake()
        waiter.join()


def test_a_client_has_sealed_memory_of_its_own() -> None:
    with dataplane() as here:
        number, fds = here.client_add(os.getpid(), "shop")
        assert number > 0
        assert os.fstat(fds.arena).st_size == SMALL.arena_bytes
        for fd in fds:
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(fd, 0)
        again, others = here.client_add(os.getpid(), "shop")
        assert again != number
        assert here.metrics()["clients"] == 2
        here.client_exited(number)
        with pytest.raises(OSError, match="client 77"):
            here.client_exited(77)
        for fd in (*fds, *others):
            os.close(fd)


def test_over_clients_max_is_enospc() -> None:
    with dataplane(Settings(node="n", pool_bytes=8 << 20, clients_max=1)) as here:
        _, fds = here.client_add(os.getpid(), "one")
        with pytest.raises(OSError, match="new client") as caught:
            here.client_add(os.getpid(), "two")
        assert caught.value.errno == errno.ENOSPC
        for fd in fds:
            os.close(fd)


# struct bs_context_segment and bs_trigger_cell of native/src/abi.h.
_HEAD_AT = 64
_CELLS_AT = 64 + 64 + 256 * 64
_NAME_AT = 32


def fire(context: int, name: bytes, why: bytes, laterals: list[bytes]) -> None:
    """Push a trigger as a client that writes what it likes would."""
    with mmap.mmap(context, 0) as memory:
        cell = _CELLS_AT
        memory[cell + 4 : cell + 6] = len(laterals).to_bytes(2, "little")
        memory[cell + 6] = Source.APPLICATION
        for at, half in ((8, TRACE[:8]), (16, TRACE[8:])):
            memory[cell + at : cell + at + 8] = half[::-1]
        memory[cell + _NAME_AT : cell + _NAME_AT + 32] = name.ljust(32, b"\0")
        memory[cell + _NAME_AT + 32 : cell + _NAME_AT + 128] = why.ljust(96, b"\0")
        for i, lateral in enumerate(laterals):
            at = cell + _NAME_AT + 128 + 16 * i
            memory[at : at + 16] = lateral[:8][::-1] + lateral[8:][::-1]
        memory[_HEAD_AT : _HEAD_AT + 4] = (1).to_bytes(4, "little")
        memory[cell : cell + 4] = (1).to_bytes(4, "little")


def trigger_waits(context: int) -> bool:
    """Whether the node has not freed the place of what was fired."""
    return os.pread(context, 4, _CELLS_AT) == (1).to_bytes(4, "little")


def fired(name: bytes, why: bytes, laterals: list[bytes]) -> list[LocalTrigger]:
    with dataplane() as here:
        number, fds = here.client_add(os.getpid(), "liar")
        fire(fds.context, name, why, laterals)
        here.poll(time.monotonic_ns())
        triggers = [event for event in here.events() if isinstance(event, LocalTrigger)]
        assert all(event.client == number for event in triggers)
        for fd in fds:
            os.close(fd)
        return triggers


def test_a_trigger_arrives_as_it_was_fired() -> None:
    (event,) = fired(b"slow", "größer".encode(), [OTHER, OTHER, TRACE, bytes(16)])
    assert (event.trigger, event.trace, event.why) == ("slow", TRACE, "größer")
    # Each once, none that is the primary, none that is none.
    assert event.laterals == (OTHER,)
    assert event.source is Source.APPLICATION


@pytest.mark.parametrize(
    "why", [b"\xff" * 95, b"x" * 94 + b"\xc3", "ü".encode() * 47, b"\xff" * 96]
)
def test_whatever_a_client_writes_fits_the_wire(why: bytes) -> None:
    (event,) = fired(b"slow", why, [])
    assert 0 < len(event.why.encode()) <= 95


@pytest.mark.parametrize("name", [b"Not A Name", b"\xff\xfe", b"a\nb", b""])
def test_a_name_that_is_none_never_reaches_the_core(name: bytes) -> None:
    assert fired(name, b"", []) == []


def test_store_and_keep_outlive_the_data_plane() -> None:
    with contextlib.ExitStack() as stack:
        with dataplane() as before:
            before.collect(TRACE, GROUP, time.monotonic_ns())
            store, keep = os.dup(before.store_fd), os.dup(before.keep_fd)
            stack.callback(os.close, store)
            stack.callback(os.close, keep)
        with dataplane() as after:
            after.adopt_store(store)
            after.adopt_keep(keep)
            (found,) = after.slices()
            assert (found.trace, found.group) == (TRACE, GROUP)


def test_a_successor_goes_on_with_the_clock_that_processes_have() -> None:
    with NativeDataPlane(SMALL, TickSource(True, 3_000_000_000)) as before, dataplane() as after:
        assert after.read_clocks()[0] == pytest.approx(after.read_clocks()[1], abs=60e9)
        after.adopt_keep(before.keep_fd)
        earlier, ticks, later = read_clocks(True)[0], after.read_clocks()[0], read_clocks(True)[0]
        assert earlier < ticks < later
        assert after.ticks == TickSource(True, 3_000_000_000)


def test_foreign_memory_is_not_adopted(tmp_path: Path) -> None:
    fd = os.memfd_create("foreign")
    os.truncate(fd, 1 << 20)
    with dataplane() as here:
        with pytest.raises(OSError, match="the report store of before the restart"):
            here.adopt_store(fd)
        with pytest.raises(OSError, match="the ledger of before the restart"):
            here.adopt_keep(fd)
    os.close(fd)


def test_events_say_what_changed() -> None:
    with dataplane() as here:
        here.collect(TRACE, GROUP, time.monotonic_ns())
        here.poll(time.monotonic_ns())
        events = here.events()
        assert [event for event in events if isinstance(event, SliceChanged)] in (
            [],
            [SliceChanged(TRACE)],
        )
        assert here.events() == []
