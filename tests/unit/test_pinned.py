# SPDX-License-Identifier: Apache-2.0
"""Operators have a trace stay, or go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import backsight_pb2 as pb
import grpc
import pytest

from coordinator.beside import path_beside
from coordinator.core.records import AppendSlice, PutReleased
from coordinator.counters import Deleted
from coordinator.otlp_export.queue import ExportQueue
from coordinator.settings import store_limits
from coordinator.store.keeping import Keep
from coordinator.store.orders import NotStored, Pinned, Refused
from coordinator.store.reader import StoreReader, Wanted
from coordinator.store.retention import StoreLimits
from ctl.__main__ import main
from protocol.messages import TraceId
from protocol.verdicts import VerdictKind
from runtime.schema import ConfigError, loads
from runtime.settings.coordinator import Settings
from tests.unit.logs import SILENT
from tests.unit.test_keeping import HOUR, closed, kept
from tests.unit.test_server import Client
from tests.unit.test_store import Clock, Driver, driver, passed, trace_id

PINNABLE = StoreLimits(1 << 40, Keep(HOUR), pinned_bytes_max=100_000)


def did(here: Driver, act: Callable[[TraceId], None], number: int) -> None:
    """As an operator has it done."""
    here.store.order(lambda: act(trace_id(number))).result()


def test_a_pinned_trace_outlives_its_time_until_it_is_unpinned(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", Clock()
    with driver(path, PINNABLE, clock) as here:
        orders = here.store.orders
        here.write(*closed(1, ["t"]), *closed(2, ["t"]))
        did(here, orders.pin, 1)
        did(here, orders.pin, 1)
        clock.now_s += 2 * HOUR
        while kept(path) != {1}:
            passed(here.store)
        with StoreReader(path) as reader:
            assert reader.list_traces(Wanted(pinned=True)) == [trace_id(1)]
            row = reader.trace(trace_id(1))
            assert row is not None and row.pinned
    # Also under another coordinator.
    with driver(path, PINNABLE, clock) as here:
        assert here.store.orders.pinned.traces == 1
        clock.now_s += 100
        passed(here.store)
        passed(here.store)
        assert kept(path) == {1}
        did(here, here.store.orders.unpin, 1)
        assert here.store.orders.pinned == Pinned(0, 0)
        clock.now_s += 100
        while kept(path):
            passed(here.store)


def test_a_pinned_trace_stays_where_there_is_no_room(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", Clock()
    limits = StoreLimits(1_000_000, Keep(1e9), pinned_bytes_max=250_000)
    with driver(path, limits, clock) as here:
        here.write(*closed(1, ["t"], size=100_000))
        did(here, here.store.orders.pin, 1)
        for number in range(2, 40):
            clock.now_s += 1
            here.write(*closed(number, ["t"], size=100_000))
        here.write(*closed(40, ["t"], size=1))
        left = kept(path)
        assert {1, 39, 40} <= left
        assert 2 not in left
        assert here.store.counters.deleted[Deleted.BYTES] == 40 - len(left)


def test_what_may_be_pinned_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with driver(path, PINNABLE) as here:
        orders = here.store.orders
        for number in (1, 2, 3):
            here.write(*closed(number, ["t"], size=40_000))
        did(here, orders.pin, 1)
        did(here, orders.pin, 2)
        assert orders.pinned.traces == 2
        assert 80_000 < orders.pinned.bytes < 81_000
        before = orders.pinned
        with pytest.raises(Refused) as caught:
            did(here, orders.pin, 3)
        assert f"2 traces with {before.bytes} are pinned already; allowed: 100000" in str(
            caught.value
        )
        assert orders.pinned == before
        did(here, orders.unpin, 1)
        did(here, orders.pin, 3)
        assert orders.pinned.traces == 2
        # None that is pinned is let go by a lower bound, which is for those to come.
        here.store.retention.limits = StoreLimits(1 << 40, Keep(HOUR), pinned_bytes_max=0)
        did(here, orders.pin, 3)
        with pytest.raises(Refused):
            did(here, orders.pin, 1)


def test_a_trace_may_be_pinned_while_it_is_collected_and_counts_as_it_is_in_the_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.db"
    with driver(path, PINNABLE) as here:
        orders = here.store.orders
        here.write(*closed(1, ["t"], size=10)[:-1])
        did(here, orders.pin, 1)
        small = orders.pinned.bytes
        more = bytes(range(256)) * 10
        here.write(AppendSlice(trace_id(1), "a", 1, 10, more), PutReleased(trace_id(1)))
        here.store.order(orders.look).result()
        assert orders.pinned.traces == 1
        assert orders.pinned.bytes > small + 200
        # One of which nothing has come yet takes nothing, and is pinned all the same.
        here.write(PutReleased(trace_id(2), released=False))
        did(here, orders.pin, 2)
        assert orders.pinned.traces == 2


def test_of_a_deleted_trace_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    mark = b"somebody's secret"
    with driver(path, PINNABLE) as here:
        for number in (1, 2):
            here.write(*closed(number, ["t"])[:-1])
            here.write(
                AppendSlice(trace_id(number), "b", 1, 0, mark), PutReleased(trace_id(number))
            )
        passed(here.store)  # what was written is told
        followed: list[None] = []
        here.store.follow(lambda: followed.append(None))
        did(here, here.store.orders.delete, 1)
        passed(here.store)
        assert followed
        assert here.store.counters.deleted[Deleted.OPERATOR] == 1
        with StoreReader(path) as reader:
            assert reader.changes(0, 99)[-1].trace is None
    assert kept(path) == {2}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for table in ("traces", "groups", "firings"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)
        assert connection.execute("SELECT count(DISTINCT id >> 24) FROM chunks").fetchone() == (1,)
    # Not even in parts of the file that are free: it was there twice.
    assert path.read_bytes().count(mark) == 1


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Driver]:
    with driver(tmp_path / "t.db", PINNABLE) as started:
        yield started


def test_what_is_pinned_or_still_collected_is_not_deleted(here: Driver) -> None:
    orders = here.store.orders
    here.write(*closed(1, ["t"]), *closed(2, ["t"])[:-1])
    did(here, orders.pin, 1)
    with pytest.raises(Refused, match=r"is pinned: unpin it first"):
        did(here, orders.delete, 1)
    with pytest.raises(Refused, match=r"still being collected.*`linger_s` after its last news"):
        did(here, orders.delete, 2)
    did(here, orders.unpin, 1)
    did(here, orders.delete, 1)
    with StoreReader(here.store._path) as reader:
        assert reader.list_traces(Wanted()) == [trace_id(2)]


def test_nothing_is_done_to_a_trace_that_is_not_stored(here: Driver) -> None:
    orders = here.store.orders
    for act in (orders.pin, orders.unpin, orders.delete):
        with pytest.raises(NotStored):
            did(here, act, 7)


def test_an_order_that_cannot_be_written_says_so_and_the_store_goes_on(here: Driver) -> None:
    here.write(*closed(1, ["t"]))
    here.store.order(
        lambda: here.store._connection.execute(
            "CREATE TRIGGER no BEFORE UPDATE OF pinned ON traces BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
    ).result()
    with pytest.raises(sqlite3.Error, match="no"):
        did(here, here.store.orders.pin, 1)
    here.store.order(lambda: here.store._connection.execute("DROP TRIGGER no")).result()
    here.write(*closed(2, ["t"]))
    did(here, here.store.orders.pin, 1)


def test_orders_of_before_the_end_are_done_and_later_ones_are_cancelled(tmp_path: Path) -> None:
    store = Driver(tmp_path / "t.db", PINNABLE, Clock()).store
    done: list[Future[int]] = []
    with store:
        done += [store.order(partial(int, number)) for number in range(100)]
    assert [future.result() for future in done] == list(range(100))
    assert store.order(lambda: 1).cancelled()


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", 1 << 30),
        ("bytes_max: 100GiB", 10 << 30),
        ("bytes_max: 100GiB, pinned_bytes_max: 25GiB", 25 << 30),
        ("pinned_bytes_max: 0", 0),
    ],
)
def test_how_much_may_be_pinned_is_configured(text: str, limit: int) -> None:
    found = store_limits(loads(f"store: {{{text}}}", Settings, "f").store).pinned_bytes_max
    assert found in (limit, (10 << 30) // 10)
    assert found == limit or text == ""


def test_no_more_may_be_pinned_than_leaves_room_for_others() -> None:
    with pytest.raises(ConfigError) as caught:
        loads("store: {bytes_max: 1GiB, pinned_bytes_max: 257MiB}", Settings, "f")
    assert "store.pinned_bytes_max: 257MiB; allowed: up to a quarter of `bytes_max`, 256MiB" in str(
        caught.value
    )


def test_a_deleted_trace_waits_for_no_export(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with driver(path, PINNABLE) as here:
        exports = ExportQueue(path, here.store.id, SILENT)
        here.write(*closed(1, ["t"]), *closed(2, ["t"]))
        verdicts = frozenset({VerdictKind.COHERENT})

        def waiting() -> list[bytes]:
            with StoreReader(path) as reader:
                while exports.follow(reader, verdicts) < reader.last_change():
                    pass
            rows = exports.connection.execute("SELECT trace FROM waiting ORDER BY number")
            return [trace for (trace,) in rows]

        assert waiting() == [trace_id(1), trace_id(2)]
        did(here, here.store.orders.delete, 1)
        assert waiting() == [trace_id(2)]
        exports.close()


def test_operators_pin_and_delete_by_backsightctl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    clock.now_s = time.time()  # else they would be too old for a coordinator of today
    with driver(tmp_path / "t.sqlite", clock=clock) as earlier:
        for number in (1, 2):
            earlier.write(*closed(number, ["t"]))
    one, two = trace_id(1).hex(), trace_id(2).hex()

    async def run() -> None:
        async with Client(tmp_path) as client:

            async def ctl(*command: str) -> tuple[int, str, str]:
                ask = ["--coordinator", client.endpoint, *command]
                status = await asyncio.to_thread(main, ask)
                said = capsys.readouterr()
                return status, said.out, said.err

            async def listed(*more: str) -> dict[str, Any]:
                _, out, _ = await ctl("traces", "--json", *more)
                return {line["trace_id"]: line for line in map(json.loads, out.splitlines())}

            assert await ctl("pin", one) == (0, "", "")
            await client.logged(f"trace {one} is pinned by ")
            assert (await listed("--pinned")).keys() == {one}
            assert (await listed())[two]["pinned"] is False
            _, out, _ = await ctl("show", one)
            assert ", pinned" in out.splitlines()[0]
            _, out, _ = await ctl("traces")
            assert [line.endswith("(pinned)") for line in out.splitlines()] == [False, True]

            status, _, err = await ctl("delete", one, "--yes")
            assert (status, "is pinned: unpin it first" in err) == (1, True)
            assert (await ctl("unpin", one, "--json"))[1] == (
                json.dumps({"trace_id": one, "pinned": False}) + "\n"
            )
            monkeypatch.setattr("sys.stdin.isatty", lambda: True)
            monkeypatch.setattr("builtins.input", lambda _: "n")
            status, out, err = await ctl("delete", one)
            assert status == 1
            assert out.startswith(one)
            assert err == "backsightctl: nothing was deleted\n"
            monkeypatch.setattr("builtins.input", lambda _: "y")
            assert (await ctl("delete", one))[0] == 0
            await client.logged(f"trace {one} is deleted by ")
            assert (await ctl("delete", two, "--yes", "--json"))[1] == (
                json.dumps({"trace_id": two, "deleted": True}) + "\n"
            )
            assert await listed() == {}
            status, _, err = await ctl("pin", one)
            assert (status, f"no trace {one} is stored" in err) == (1, True)

    asyncio.run(run())


def test_who_hangs_up_is_logged_with_what_he_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also whose certificate ends meanwhile; what is under way is done all the same."""
    clock = Clock()
    clock.now_s = time.time()
    with driver(tmp_path / "t.sqlite", clock=clock) as earlier:
        earlier.write(*closed(1, ["t"]))
    begun, hung_up = threading.Event(), threading.Event()

    async def run() -> None:
        async with Client(tmp_path) as client:
            store = client.server._store
            delete = store.orders.delete

            def slowly(trace: TraceId) -> None:
                begun.set()
                hung_up.wait(30)
                delete(trace)

            monkeypatch.setattr(store.orders, "delete", slowly)
            call = client._channel.unary_unary("/backsight.v1.Coordinator/DeleteTrace", None, None)
            asked = call(pb.DeleteTraceRequest(trace=trace_id(1)).SerializeToString())
            await asyncio.to_thread(begun.wait, 30)
            asked.cancel()
            while client.server._budget._peers:  # noqa: ASYNC110 # nobody tells
                await asyncio.sleep(0)
            hung_up.set()
            await asyncio.to_thread(store.order(lambda: None).result)
            assert store.counters.deleted[Deleted.OPERATOR] == 1
            said = [client.log.get_nowait() for _ in range(client.log.qsize())]
            assert any(f"trace {trace_id(1).hex()} is deleted by " in text for text in said)

    asyncio.run(run())


def test_nobody_deletes_without_being_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(SystemExit) as usage:
        main(["delete", trace_id(1).hex()])
    assert usage.value.code == 2
    assert "delete: nobody is there to be asked; give --yes" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["PinTrace", "DeleteTrace"])
def test_what_is_no_trace_id_is_refused(tmp_path: Path, method: str) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            call = client._channel.unary_unary(f"/backsight.v1.Coordinator/{method}", None, None)
            for data in (b"\xff", pb.PinTraceRequest(trace=b"short").SerializeToString()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(data)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_the_exports_file_is_where_it_is_looked_for(tmp_path: Path) -> None:
    assert path_beside(tmp_path / "t.sqlite", "exports").name == "t.exports.sqlite"
