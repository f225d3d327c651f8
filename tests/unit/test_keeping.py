# SPDX-License-Identifier: Apache-2.0
"""For how long each trace is kept: by its trigger, its verdict, or as all others; and which goes first."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.records import AppendSlice, PutReleased, PutTrigger, PutVerdict, Record
from coordinator.counters import Deleted
from coordinator.settings import store_limits
from coordinator.store.keeping import Keep
from coordinator.store.reader import StoreReader, Wanted
from coordinator.store.retention import StoreLimits
from coordinator.store.schema import SCHEMA_VERSION
from coordinator.store.writer import Store
from protocol.messages import Group, TraceId
from protocol.verdicts import VerdictKind
from runtime.schema import ConfigError, loads
from runtime.settings.coordinator import Settings
from tests.unit.logs import SILENT
from tests.unit.test_store import FIRED, VERDICT, Clock, Driver, driver, passed, trace_id

HOUR = 3600.0
RULES = Keep(
    10 * HOUR,
    {"payment": 100 * HOUR, "snapshot.*": 2 * HOUR, "snapshot.7": 50 * HOUR},
    {VerdictKind.PARTIAL: 1 * HOUR, VerdictKind.LOSSY: 200 * HOUR},
)


def roomy(keep: Keep) -> StoreLimits:
    return StoreLimits(1 << 40, keep)


def closed(
    number: int,
    triggers: Iterable[str],
    kind: VerdictKind = VerdictKind.COHERENT,
    laterals: tuple[TraceId, ...] = (),
    size: int = 10,
) -> list[Record]:
    """What is written of a trace from its first firing to its end."""
    trace = trace_id(number)
    fired = [replace(FIRED, group=Group(name, trace), laterals=laterals) for name in triggers]
    return [
        *(PutTrigger("a", one) for one in fired),
        AppendSlice(trace, "a", 1, 0, os.urandom(size)),
        PutVerdict(trace, replace(VERDICT, kind=kind, bytes=size)),
        PutReleased(trace),
    ]


def kept(path: Path) -> set[int]:
    with StoreReader(path) as reader:
        return {int.from_bytes(trace, "big") for trace in reader.list_traces(Wanted())}


def hours(path: Path) -> dict[int, float]:
    """For how many hours each trace is kept, by the rows."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT id, keep_s FROM traces WHERE released = 1").fetchall()
    return {int.from_bytes(trace, "big"): keep_s / HOUR for trace, keep_s in rows}


def await_taken_up(here: Driver) -> None:
    """All rows go by the rules that are in force."""
    retention = here.store.retention
    while retention._keeping.keep != retention.limits.keep or retention._keeping.is_behind:
        passed(here.store)
    # After that transaction.
    here.store.order(lambda: None).result()


@pytest.mark.parametrize(
    ("triggers", "kind", "wanted"),
    [
        (["other"], VerdictKind.COHERENT, 10),
        (["other"], VerdictKind.TRUNCATED, 10),
        (["other"], VerdictKind.PARTIAL, 1),
        (["other"], VerdictKind.LOSSY, 200),
        # The trigger goes before the verdict, be it shorter or longer.
        (["payment"], VerdictKind.PARTIAL, 100),
        (["payment"], VerdictKind.LOSSY, 100),
        # Of several the longest, whichever is more exact; without a rule, as the verdict says.
        (["snapshot.1"], VerdictKind.COHERENT, 2),
        (["snapshot.7"], VerdictKind.COHERENT, 50),
        (["snapshot.1", "payment", "other"], VerdictKind.COHERENT, 100),
        (["snapshot.1", "other"], VerdictKind.COHERENT, 10),
        (["snapshot.1", "other"], VerdictKind.PARTIAL, 2),
        (["payment", "other"], VerdictKind.LOSSY, 200),
        (["snapshot"], VerdictKind.COHERENT, 10),
        # A name is a name: neither its beginning nor its end.
        (["payments"], VerdictKind.COHERENT, 10),
        ([], VerdictKind.PARTIAL, 1),
    ],
)
def test_trigger_goes_before_verdict_and_that_before_all_else(
    tmp_path: Path, triggers: list[str], kind: VerdictKind, wanted: float
) -> None:
    path = tmp_path / "t.db"
    with driver(path, roomy(RULES)) as here:
        here.write(*closed(1, triggers, kind))
        assert hours(path) == {1: wanted}


def test_a_group_is_kept_as_one(tmp_path: Path) -> None:
    """Laterals have the rules of the trigger that took them along."""
    path = tmp_path / "t.db"
    with driver(path, roomy(RULES)) as here:
        here.write(*closed(1, ["payment"], laterals=(trace_id(2), trace_id(3))))
        here.write(*closed(2, []), *closed(3, ["snapshot.1"]), *closed(4, []))
        assert hours(path) == {1: 100, 2: 100, 3: 100, 4: 10}


def test_what_comes_later_counts_when_it_is_closed_again(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with driver(path, roomy(RULES)) as here:
        here.write(*closed(1, ["other"]))
        assert hours(path) == {1: 10}
        fired = replace(FIRED, group=Group("payment", trace_id(1)), laterals=())
        here.write(PutReleased(trace_id(1), released=False), PutTrigger("a", fired))
        assert hours(path) == {}
        here.write(PutReleased(trace_id(1)))
        assert hours(path) == {1: 100}


def test_each_goes_when_its_own_time_is_over(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", Clock()
    with driver(path, roomy(RULES), clock) as here:
        here.write(
            *closed(1, ["payment"]),
            *closed(2, ["other"]),
            *closed(3, ["other"], VerdictKind.PARTIAL),
            *closed(4, ["snapshot.1"]),
        )
        for hour, wanted in ((0.5, {1, 2, 3, 4}), (1.5, {1, 2, 4}), (3, {1, 2}), (11, {1})):
            clock.now_s = 1_000_000.0 + hour * HOUR
            while kept(path) != wanted:
                passed(here.store)
        assert here.store.counters.deleted == dict.fromkeys(map(str, Deleted), 0) | {"age": 3}
        clock.now_s += 90 * HOUR
        while kept(path):
            passed(here.store)


def test_rules_that_change_hold_for_what_is_stored_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.keeping._KEYS_AT_ONCE", 3)
    monkeypatch.setattr("coordinator.store.keeping._GO_OVER_S", 0.0)
    path = tmp_path / "t.db"
    with driver(path, roomy(Keep(5 * HOUR))) as here:
        for number in range(1, 20):
            here.write(*closed(number, ["payment" if number % 2 else "other"]))
        assert set(hours(path).values()) == {5}
        here.store.retention.limits = roomy(RULES)
        await_taken_up(here)
        assert hours(path) == {n: 100 if n % 2 else 10 for n in range(1, 20)}
    # Another coordinator begins with others, one more with the same.
    with driver(path, roomy(Keep(7 * HOUR))) as here:
        await_taken_up(here)
        assert set(hours(path).values()) == {7}
    with driver(path, roomy(Keep(7 * HOUR))) as here:
        assert not here.store.retention._keeping.is_behind


def test_to_go_over_what_is_stored_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece between two commits, where something is to be written all the time."""
    monkeypatch.setattr("coordinator.store.keeping._KEYS_AT_ONCE", 1)
    monkeypatch.setattr("coordinator.store.keeping._GO_OVER_S", 0.0)
    path = tmp_path / "t.db"
    with driver(path, roomy(Keep(5 * HOUR))) as here:
        for number in range(1, 21):
            here.write(*closed(number, []))
        await_taken_up(here)
    # Not entered: nobody else works on it.
    retention = Driver(path, roomy(Keep(6 * HOUR)), Clock()).store.retention
    monkeypatch.setattr(retention, "_others_wait", lambda: True)
    for done in range(1, 21):
        retention.enforce()
        assert sum(keep == 6 for keep in hours(path).values()) == done
    retention.enforce()
    assert not retention._keeping.is_behind
    retention.limits = roomy(Keep(7 * HOUR))
    monkeypatch.setattr(retention, "_others_wait", lambda: False)
    retention.enforce()
    assert set(hours(path).values()) == {7}


def test_what_fails_halfway_is_gone_over_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.db"
    with driver(path, roomy(Keep(5 * HOUR))) as here:
        here.write(*closed(1, []), *closed(2, []))
        await_taken_up(here)

        def executed(statement: str) -> None:
            """By the thread whose connection it is, in no transaction of others."""
            here.store.order(lambda: here.store._connection.execute(statement)).result()

        executed(
            "CREATE TRIGGER no BEFORE UPDATE OF kept_by ON about BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        here.store.retention.limits = roomy(RULES)
        while not here.log:
            passed(here.store)
        assert "cannot delete old traces: no" in here.log[0]
        assert set(hours(path).values()) == {5}
        executed("DROP TRIGGER no")
        await_taken_up(here)
        assert set(hours(path).values()) == {10}
        here.log.clear()


def test_where_there_is_not_enough_room_all_times_get_shorter_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That goes first which has had the largest part of its time; of two alike the older one."""
    monkeypatch.setattr("coordinator.store.retention._DELETE_S", 0.0)  # one at once
    path, clock = tmp_path / "t.db", Clock()
    keep = Keep(10 * HOUR, {"payment": 100 * HOUR}, {VerdictKind.PARTIAL: 3 * HOUR})
    names = {0: ["other"], 1: ["payment"], 2: []}
    part: dict[int, float] = {}
    with driver(path, roomy(keep), clock) as here:
        for number in range(1, 61):
            kind = VerdictKind.PARTIAL if number % 3 == 2 else VerdictKind.COHERENT
            here.write(*closed(number, names[number % 3], kind))
            part[number] = (61 - number) / (10, 100, 3)[number % 3]
            clock.now_s += 60
    # Not entered: nobody else works on it.
    retention = Driver(path, roomy(keep), clock).store.retention
    gone: list[int] = []
    while left := kept(path):
        assert retention.delete_first(Deleted.BYTES)
        gone += left - kept(path)
    assert gone == sorted(part, key=lambda number: (-part[number], number))
    assert not retention.delete_first(Deleted.BYTES)


AS_SCHEMA_8 = """
CREATE TABLE about_8 (store_id TEXT NOT NULL, age_s REAL NOT NULL, unix_s REAL NOT NULL);
INSERT INTO about_8 SELECT store_id, age_s, unix_s FROM about;
DROP TABLE about;
ALTER TABLE about_8 RENAME TO about;
CREATE TABLE traces_8 (
    key INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE,
    stored_ns INTEGER NOT NULL,
    born_s INTEGER NOT NULL,
    released INTEGER NOT NULL DEFAULT 0,
    verdict TEXT,
    verdict_version INTEGER,
    verdict_rest TEXT
);
INSERT INTO traces_8 SELECT key, id, stored_ns, born_s, released, verdict, verdict_version, verdict_rest
    FROM traces;
DROP TABLE traces;
ALTER TABLE traces_8 RENAME TO traces;
CREATE INDEX traces_released ON traces (released) WHERE released = 1;
PRAGMA user_version = 8;
"""


def test_a_store_of_schema_8_is_taken_over_and_its_traces_get_their_times(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", Clock()
    with driver(path, roomy(Keep(HOUR)), clock) as here:
        here.write(*closed(1, ["payment"]), *closed(2, ["other"]), *closed(3, ["other"]))
        here.write(PutReleased(trace_id(3), released=False))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(AS_SCHEMA_8)
    with driver(path, roomy(RULES), clock) as here:
        await_taken_up(here)
        assert hours(path) == {1: 100, 2: 10}
        (version,) = here.store._connection.execute("PRAGMA user_version").fetchone()
        assert version == SCHEMA_VERSION
        clock.now_s += 11 * HOUR
        while kept(path) != {1, 3}:
            passed(here.store)


def test_before_times_are_known_traces_are_kept_as_all_others(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", Clock()
    with driver(path, roomy(RULES), clock) as here:
        here.write(*closed(1, ["payment"]))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE traces SET keep_s = 0")
        connection.commit()
    store = Driver(path, roomy(RULES), clock).store
    keeping = store.retention._keeping
    assert keeping.too_old(9 * HOUR) is None
    assert keeping.too_old(1_000_000.0 + 11 * HOUR) is not None
    assert keeping.first(1_000_000.0) is not None


def test_the_rules_of_the_configuration_reach_the_store() -> None:
    text = """
store:
  age_max_s: 3600
  retention:
    per_trigger: {payment: 7200, snapshot.*: 60}
    per_verdict: {partial: 120}
"""
    limits = store_limits(loads(text, Settings, "f").store)
    assert limits.keep == Keep(
        3600, {"payment": 7200, "snapshot.*": 60}, {VerdictKind.PARTIAL: 120}
    )
    assert store_limits(Settings().store).keep == Keep(7 * 86400.0)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ("per_trigger: {Payment: 60}", "the name of a trigger, or the beginning of names with a *"),
        ('per_trigger: {"a*b": 60}', "the name of a trigger, or the beginning of names with a *"),
        ("per_trigger: {payment: 59}", "payment: 59; allowed: a number from 60 to 10000000000"),
        ("per_verdict: {provisional: 60}", "allowed: coherent, partial, lossy, truncated"),
        ("per_name: {}", "unknown key; allowed: per_trigger, per_verdict"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(f"store: {{retention: {{{rules}}}}}", Settings, "f")
    assert problem in str(caught.value)


def test_equal_rules_are_the_same_whatever_their_order() -> None:
    one = Keep(1, {"a": 2, "b": 2}, {VerdictKind.LOSSY: 3, VerdictKind.PARTIAL: 4})
    same = Keep(1, {"b": 2, "a": 2}, {VerdictKind.PARTIAL: 4, VerdictKind.LOSSY: 3})
    others: list[Any] = [
        Keep(2, one.by_trigger, one.by_verdict),
        Keep(1, {"a": 2}, one.by_verdict),
        Keep(1, one.by_trigger, {VerdictKind.LOSSY: 3}),
    ]
    assert str(one) == str(same)
    assert len({str(one), *map(str, others)}) == 4


def test_a_store_that_is_not_entered_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with driver(path, roomy(RULES)):
        pass
    before = path.read_bytes()
    store = Store(path, roomy(Keep(1)), lambda _: None, SILENT)
    store.__exit__(None, None, None)
    assert path.read_bytes() == before
