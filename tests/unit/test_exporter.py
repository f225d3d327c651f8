# SPDX-License-Identifier: Apache-2.0
"""Closed traces reach an OTLP receiver, by gRPC and HTTP, whatever it answers, once it is there."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from coordinator.core.records import AppendSlice, PutReleased, PutVerdict
from coordinator.core.verdict import Verdict
from coordinator.counters import Deleted
from coordinator.follower import NewsWithin
from coordinator.otlp_export import exporter
from coordinator.otlp_export.exporter import _UNTIL_WOKEN_S, Exporter, requests_of
from coordinator.otlp_export.queue import Exported
from coordinator.otlp_export.transports import (
    BACKOFF_MAX_S,
    Accepted,
    HttpTransport,
    Outcome,
    TryAgain,
)
from coordinator.store.reader import StoreReader
from formats import stamped as names
from formats.stamped import stamped
from protocol.messages import TraceId
from protocol.verdicts import VerdictKind
from runtime.schema import ConfigError, loads
from runtime.settings.coordinator import ExportSettings, Settings
from testbed.ports import free_port
from tests.export.collected import BEGIN_NS, CART, FRONT, MS, SPANS, STOCK, TRACE, detail
from tests.export.receivers import (
    BUSY,
    OK,
    Answer,
    Certificate,
    GrpcReceiver,
    HttpReceiver,
    Receiver,
)
from tests.unit.logs import logs_to
from tests.unit.old_stores import old_store
from tests.unit.test_query import put_trace
from tests.unit.test_store import ROOMY, Clock, Driver

T = TypeVar("T")
EXPORTED = frozenset({VerdictKind.COHERENT})
ALL = {"edge": FRONT, "back": CART + STOCK}


@pytest.fixture(params=[GrpcReceiver, HttpReceiver])
def receiver(request: pytest.FixtureRequest) -> Receiver:
    made: Receiver = request.param(free_port())
    return made


@pytest.fixture(autouse=True)
def _writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces come one by one, thousands of them, and each is waited for."""
    monkeypatch.setattr("coordinator.store.writer._GATHER_S", 0.0)


class Here:
    """A store that exports, and its exporter, worked by hand or by its own thread."""

    def __init__(self, path: Path, receiver: Receiver, **settings: Any) -> None:
        self.path = path
        self.settings = ExportSettings(receiver.url, receiver.protocol, **settings)
        self.driver = Driver(path, ROOMY, Clock())
        self.now_s = 1e9
        self.exporter = self.new_exporter(lambda: 0.5)

    def new_exporter(self, chance: Callable[[], float] = random.random) -> Exporter:
        log = logs_to(self.driver.log)
        return Exporter(
            self.settings, self.driver.store, self.path, log, chance, lambda: self.now_s
        )

    @property
    def put_off(self) -> int:
        """How many wait alone."""
        queue = self.exporter._queue.connection
        (count,) = queue.execute("SELECT count(*) FROM waiting WHERE attempts > 0").fetchone()
        return int(count)

    def __enter__(self) -> Here:
        self.driver.store.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.exporter.close()
        self.driver.store.__exit__(None, None, None)

    def close_trace(self, trace: TraceId, slices: dict[str, bytes], version: int = 1) -> None:
        put_trace(self.driver, trace, slices, version, epoch=version)
        self.driver.write(PutReleased(trace))

    def was_exported(self, note: Exported) -> None:
        with StoreReader(self.path) as reader:
            self.exporter._queue.done(reader, [note], self.settings.exported_verdicts)

    def work(self) -> list[float]:
        """Work until there is no more to do, without waiting; how long it would have waited."""
        pauses = []
        with StoreReader(self.path) as reader:
            while (pause_s := self.exporter.work(reader)) is not None:
                if pause_s == _UNTIL_WOKEN_S:
                    break
                if isinstance(pause_s, NewsWithin):
                    pause_s = pause_s.seconds
                if pause_s:
                    pauses.append(pause_s)
                    self.now_s += pause_s
        return pauses


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "t.sqlite"


def ids(number: int) -> list[TraceId]:
    return [TraceId(n.to_bytes(16, "big")) for n in range(1, number + 1)]


def test_a_closed_trace_is_sent_once_with_its_stamps(store_path: Path, receiver: Receiver) -> None:
    settings = {"headers": {"X-Scope-OrgID": "shop"}, "compression": "gzip"}
    with receiver, Here(store_path, receiver, **settings) as here:
        put_trace(here.driver, TRACE, ALL)
        assert here.work() == []
        heard = receiver.heard.get_nowait()
        assert receiver.heard.empty()
        assert heard.headers["x-scope-orgid"] == "shop"
        assert heard.headers["user-agent"].startswith("Backsight-Coordinator/")
        assert heard.compressed == (receiver.protocol != "grpc")  # gRPC unpacks by itself
        assert len(heard.spans) == SPANS
        (stock,) = (span for span in heard.spans if span.name == "stock.Stock/Reserve")
        assert stock.start_time_unix_nano == BEGIN_NS + 45 * MS  # as its node wrote it
        said = {item.key: item.value.string_value for item in stock.attributes}
        assert (said[names.TRIGGER], said[names.VERDICT]) == ("error", "coherent")
        assert here.work() == []
        here.driver.write(PutReleased(TRACE))  # closed, and nothing more
        assert here.work() == []
        assert receiver.heard.empty()
        counters = here.exporter.counters
        assert (counters.traces, counters.spans, counters.requests) == (1, SPANS, 1)
        assert here.driver.log == []


def test_what_is_not_coherent_is_sent_when_it_is_closed(
    store_path: Path, receiver: Receiver
) -> None:
    """It may still become coherent, and whoever has it twice has its spans twice."""
    lossy = Verdict(2, VerdictKind.LOSSY, (), ("edge",), len(FRONT), 2, None, None)
    with receiver, Here(store_path, receiver) as here:
        put_trace(here.driver, TRACE, {"edge": FRONT}, judged=lossy)
        assert here.work() == []
        assert receiver.heard.empty()
        here.driver.write(PutReleased(TRACE))
        assert here.work() == []
        assert len(receiver.heard.get_nowait().spans) == 2


def test_a_trace_that_grows_before_it_is_closed_is_sent_once_more(
    store_path: Path, receiver: Receiver
) -> None:
    with receiver, Here(store_path, receiver) as here:
        for version, slices in enumerate(({"edge": FRONT}, {"edge": FRONT, "back": CART}, ALL), 1):
            put_trace(here.driver, TRACE, slices, version, epoch=version)
            here.work()
        here.driver.write(PutReleased(TRACE))
        here.work()
        sizes = [len(receiver.heard.get_nowait().spans) for _ in range(2)]
        assert sizes == [2, SPANS]
        assert receiver.heard.empty()


def test_a_trace_that_grew_is_sent_again(store_path: Path, receiver: Receiver) -> None:
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, {"edge": FRONT})
        here.work()
        here.driver.write(PutReleased(TRACE, released=False))
        here.close_trace(TRACE, ALL, version=2)
        here.work()
        sizes = [len(receiver.heard.get_nowait().spans) for _ in range(2)]
        assert sizes == [2, SPANS]


def test_a_trace_that_grows_while_it_is_sent_is_sent_again(
    store_path: Path, receiver: Receiver
) -> None:
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        before = Exported(TRACE, len(FRONT), VerdictKind.COHERENT)
        here.was_exported(before)
        assert here.work() == []
        assert len(receiver.heard.get_nowait().spans) == SPANS


def judged_anew(here: Here, kind: VerdictKind, version: int) -> None:
    """TRACE is reopened, and closed again with another verdict on the same bytes."""
    size = sum(map(len, ALL.values()))
    verdict = Verdict(version, kind, (), tuple(ALL), size, SPANS, None, None)
    here.driver.write(
        PutReleased(TRACE, released=False), PutVerdict(TRACE, verdict), PutReleased(TRACE)
    )


def test_a_trace_that_turns_out_otherwise_is_sent_again(
    store_path: Path, receiver: Receiver
) -> None:
    with receiver, Here(store_path, receiver, verdicts=("coherent",)) as here:
        # Whatever becomes of it: the receiver was told that it is coherent.
        here.close_trace(TRACE, ALL)
        here.work()
        kinds = []
        for version, kind in enumerate((VerdictKind.LOSSY, VerdictKind.LOSSY), 2):
            judged_anew(here, kind, version)
            here.work()
        while not receiver.heard.empty():
            spans = receiver.heard.get_nowait().spans
            assert len(spans) == SPANS
            attributes = [attribute for span in spans for attribute in span.attributes]
            kinds.append({a.value.string_value for a in attributes if a.key == names.VERDICT})
        assert kinds == [{"coherent"}, {"lossy"}]
        here.exporter.reconfigure(ExportSettings())  # no receiver
        judged_anew(here, VerdictKind.PARTIAL, 4)
        here.work()
        here.exporter.reconfigure(here.settings)
        here.work()
        assert receiver.heard.empty()


def test_a_trace_that_turns_out_otherwise_while_it_is_sent_is_sent_again(
    store_path: Path, receiver: Receiver
) -> None:
    size = sum(map(len, ALL.values()))
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        judged_anew(here, VerdictKind.LOSSY, 2)
        here.was_exported(Exported(TRACE, size, VerdictKind.COHERENT))  # what it was
        here.work()
        assert len(receiver.heard.get_nowait().spans) == SPANS
        assert here.work() == []
        assert receiver.heard.empty()


def test_a_slice_that_cannot_be_read_stops_no_other(
    store_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(found: Any, **options: Any) -> Any:
        if found.slices[0].node == "back":
            raise OverflowError
        return stamped(found, **options)

    monkeypatch.setattr(exporter, "stamped", read)
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        here.close_trace(ids(1)[0], {"edge": FRONT})
        here.work()
        assert len(receiver.heard.get_nowait().spans) == 2 + 2
        assert here.work() == []
        counters = here.exporter.counters
        assert (counters.traces, counters.slices_unreadable, here.exporter.waiting) == (2, 1, 0)
        (message,) = here.driver.log
        assert message == f"slice {TRACE.hex()} of back: cannot be exported: OverflowError()"


def test_a_slice_that_is_too_long_is_cut_and_that_is_told(
    store_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_SLICE_BYTES_MAX", len(CART))
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        here.work()
        sent = {span.name: span for span in receiver.heard.get_nowait().spans}
        assert {"GET /buy", "POST cart"} < set(sent)
        assert "stock.Stock/Reserve" not in sent
        left_out = {
            name: item.value.int_value
            for name, span in sent.items()
            for item in span.attributes
            if item.key == names.BYTES_LEFT_OUT
        }
        assert left_out == {"POST /cart": len(STOCK)}
        assert here.exporter.counters.slices_cut == 1
        (message,) = here.driver.log
        assert f"only its first {len(CART)} of {len(CART + STOCK)} bytes" in message


def test_only_the_verdicts_that_are_wanted_go(store_path: Path, receiver: Receiver) -> None:
    with receiver, Here(store_path, receiver, verdicts=("lossy",)) as here:
        here.close_trace(TRACE, ALL)
        assert here.work() == []
        assert receiver.heard.empty()


def test_many_small_traces_go_together(store_path: Path, receiver: Receiver) -> None:
    with receiver, Here(store_path, receiver) as here:
        for trace in ids(100):
            here.close_trace(trace, {"edge": FRONT})
        here.work()
        heard = [receiver.heard.get_nowait() for _ in range(2)]
        assert receiver.heard.empty()
        order = [span.trace_id for one in heard for span in one.spans if span.span_id[-1] == 1]
        assert order == ids(100)


RETRIED = [
    Answer(grpc.StatusCode.UNAVAILABLE, 503),
    Answer(grpc.StatusCode.DEADLINE_EXCEEDED, 502),
    Answer(grpc.StatusCode.ABORTED, 504),
    Answer(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, retry_after_s=1),
]


def test_what_may_be_tried_again_is_with_growing_pauses(
    store_path: Path, receiver: Receiver
) -> None:
    receiver.answers = [*RETRIED]
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        pauses = here.work()
        # Without jitter (chance 0.5): 5 s, half as much again each time.
        assert pauses == pytest.approx([5.0, 7.5, 11.25, 16.875])
        requests = [receiver.heard.get_nowait().request for _ in range(5)]
        assert receiver.heard.empty()
        assert all(request == requests[0] for request in requests)
        counters = here.exporter.counters
        assert (counters.requests_retried, counters.traces, counters.spans) == (4, 1, SPANS)
        # Said once, and once that it is over.
        assert len(here.driver.log) == 2
        assert "will be tried again" in here.driver.log[0]
        assert "works again" in here.driver.log[1]


class Picky:
    """A transport to a receiver that takes all but what has one of certain traces."""

    def __init__(self, *disliked: TraceId) -> None:
        self.disliked = set(disliked)
        self.sent: list[list[TraceId]] = []
        self.taken: list[TraceId] = []

    def send(self, request: bytes) -> Outcome:
        resources = TracesData.FromString(request).resource_spans
        spans = [span for resource in resources for span in resource.scope_spans[0].spans]
        traces = list(dict.fromkeys(TraceId(span.trace_id) for span in spans))
        self.sent.append(traces)
        if self.disliked & set(traces):
            return TryAgain("HTTP 503 of this one")
        self.taken += traces
        return Accepted()

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def test_a_trace_that_is_always_put_off_holds_up_no_other(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_TRACES_AT_ONCE", 4)
    traces = ids(12)
    picky = Picky(traces[1])
    with Here(store_path, HttpReceiver(1)) as here, StoreReader(store_path) as reader:
        here.exporter._receiver.transport = picky
        for trace in traces[:10]:
            here.close_trace(trace, {"edge": FRONT})
        pauses = [here.exporter.work(reader) for _ in range(10)]
        # Four together; when three tries failed, others go, and then the four one by one, each
        # after others if there are any.
        assert picky.sent == [
            *([traces[:4]] * 3),
            traces[4:8],
            [traces[0]],
            traces[8:10],
            *([trace] for trace in traces[1:4]),
        ]
        # Each failure has its pause, but that of one alone, for which nobody waits.
        assert pauses == [5.0, 7.5, 11.25, 0, 0, 0, 0, 0, 0, NewsWithin(30.0)]
        # What comes meanwhile goes at once.
        for trace in traces[10:]:
            here.close_trace(trace, {"edge": FRONT})
            assert here.exporter.work(reader) == 0
            assert here.exporter.work(reader) == NewsWithin(30.0)
        here.now_s += 30
        assert here.exporter.work(reader) == 0
        assert here.exporter.work(reader) == NewsWithin(60.0)
        assert set(picky.taken) == {*traces} - {traces[1]}
        assert len(picky.taken) == 11
        assert [message.split(":")[0] for message in here.driver.log] == [
            "export to http",
            "export to http",
            f"trace {traces[1].hex()}",
        ]
        assert "works again" in here.driver.log[1]
        assert "puts it off again and again" in here.driver.log[2]
        # Another exporter knows of it too.
        here.exporter.close()
        here.exporter = here.new_exporter(lambda: 0.5)
        here.exporter._receiver.transport = picky
        assert here.exporter.work(reader) == NewsWithin(60.0)
        picky.disliked.clear()
        here.now_s += 60
        assert here.exporter.work(reader) == 0
        assert here.exporter.work(reader) is None
        assert (len(picky.taken), here.exporter.waiting, here.put_off) == (12, 0, 0)


class Load:
    """New traces for ever, one a second, and each time the exporter works."""

    def __init__(self, here: Here, reader: StoreReader) -> None:
        self.here = here
        self.reader = reader
        self.number = 1 << 64

    def work(self, times: int) -> None:
        for _ in range(times):
            self.number += 1
            trace = TraceId(self.number.to_bytes(16, "big"))
            self.here.close_trace(trace, {"edge": FRONT})
            self.here.exporter.work(self.reader)
            self.here.now_s += 1


class Down(Picky):
    """One that puts off all while it is down."""

    is_down = True

    def send(self, request: bytes) -> Outcome:
        return TryAgain("HTTP 503") if self.is_down else super().send(request)


def test_after_an_outage_all_is_taken_although_there_is_always_more(store_path: Path) -> None:
    down = Down()
    with Here(store_path, HttpReceiver(1)) as here, StoreReader(store_path) as reader:
        load = Load(here, reader)
        here.exporter._receiver.transport = down
        for trace in ids(300):
            here.close_trace(trace, {"edge": FRONT})
        load.work(7)
        assert here.put_off == 128
        down.is_down = False
        load.work(8)
        assert set(ids(300)) <= set(down.taken)
        assert here.put_off == 0


def test_what_is_behind_has_its_turn_although_there_is_always_more(store_path: Path) -> None:
    traces = ids(8)
    picky = Picky(traces[1])
    with Here(store_path, HttpReceiver(1)) as here, StoreReader(store_path) as reader:
        load = Load(here, reader)
        here.exporter._receiver.transport = picky
        for trace in traces:
            here.close_trace(trace, {"edge": FRONT})
        load.work(60)
        assert set(traces) - set(picky.taken) == {traces[1]}
        # Three times with others, and then more and more rarely: 0, 30, 90, 210 s later.
        load.work(340)
        assert sum(traces[1] in sent for sent in picky.sent) == 3 + 4
        picky.disliked.clear()
        load.work(240)
        assert traces[1] in picky.taken


def test_several_that_are_always_put_off_hold_up_the_others_twice_at_most(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_TRACES_AT_ONCE", 1)
    traces = ids(3)
    picky = Picky(*traces[:2])
    with Here(store_path, HttpReceiver(1)) as here, StoreReader(store_path) as reader:
        load = Load(here, reader)
        here.exporter._receiver.transport = picky
        for trace in traces:
            here.close_trace(trace, {"edge": FRONT})
        load.work(100)
        put_off = sum(bool(picky.disliked & set(sent)) for sent in picky.sent)
        assert 2 * 2 * exporter._TRIES <= put_off < 2 * 2 * exporter._TRIES + 10
        assert len(picky.taken) == 100 - put_off


def test_a_receiver_that_is_down_is_not_asked_for_each_trace_in_turn(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_TRACES_AT_ONCE", 2)
    traces = ids(10)
    picky = Picky(*traces)
    with Here(store_path, HttpReceiver(1)) as here, StoreReader(store_path) as reader:
        here.exporter._receiver.transport = picky
        for trace in traces:
            here.close_trace(trace, {"edge": FRONT})
        for _ in range(40):
            pause_s = here.exporter.work(reader)
            if isinstance(pause_s, NewsWithin):
                pause_s = pause_s.seconds
            assert pause_s is not None
            assert pause_s > 0
            here.now_s += pause_s
        assert len(here.driver.log) == 1
        picky.disliked.clear()
        here.work()
        assert sorted(picky.taken) == traces


def test_what_the_store_deleted_is_not_tried_again(store_path: Path) -> None:
    first, second = ids(2)
    picky = Picky(first)
    with Here(store_path, HttpReceiver(1)) as here, StoreReader(store_path) as reader:
        here.exporter._receiver.transport = picky
        here.close_trace(first, {"edge": FRONT})
        assert here.exporter.work(reader) == 5.0
        here.close_trace(second, {"edge": FRONT})
        here.driver.store.retention.delete_first(Deleted.BYTES, enough_bytes=1 << 60)
        assert here.exporter.work(reader) == 0
        assert picky.sent == [[first], [second]]
        assert here.exporter.work(reader) is None


def test_pauses_end_growing_and_differ(
    store_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers = [BUSY] * 20
    chances = iter([0.0, 0.999] * 10)
    with receiver, Here(store_path, receiver) as here:
        here.exporter._chance = lambda: next(chances)
        here.close_trace(TRACE, ALL)
        pauses = here.work()
    assert max(pauses) <= 1.5 * BACKOFF_MAX_S
    assert min(pauses[10:]) >= 0.5 * BACKOFF_MAX_S
    assert pauses[-1] > 2 * pauses[-2]


def test_the_receiver_says_when_to_come_again(store_path: Path, receiver: Receiver) -> None:
    receiver.answers = [
        Answer(grpc.StatusCode.UNAVAILABLE, 503, retry_after_s=120),
        Answer(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, retry_after_s=10**7),
    ]
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        assert here.work() == [120, exporter._RETRY_AFTER_MAX_S]


REFUSED = [
    Answer(grpc.StatusCode.INVALID_ARGUMENT, 400, message="bad data"),
    Answer(grpc.StatusCode.RESOURCE_EXHAUSTED, 413, message="too large"),  # without RetryInfo
    Answer(grpc.StatusCode.UNAUTHENTICATED, 401, message="who are you"),
    Answer(grpc.StatusCode.INTERNAL, 500, message="a fault"),
]


@pytest.mark.parametrize("answer", REFUSED, ids=lambda answer: answer.code.name)
def test_what_is_refused_for_good_is_not_tried_again(
    store_path: Path, receiver: Receiver, answer: Answer
) -> None:
    receiver.answers = [answer]
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        assert here.work() == []
        assert here.work() == []
        assert receiver.heard.qsize() == 1
        (message,) = here.driver.log
        assert f"refused {SPANS} spans for good" in message
        assert answer.message in message
        here.close_trace(ids(1)[0], {"edge": FRONT})  # the next one is sent all the same
        here.work()
        counters = here.exporter.counters
        assert (counters.traces_refused, counters.spans_refused) == (1, SPANS)
        assert (counters.traces, counters.spans) == (1, 2)


def test_what_is_rejected_in_part_is_told_and_not_sent_again(
    store_path: Path, receiver: Receiver
) -> None:
    partial = Answer(rejected=3, message="3 spans are too old")
    receiver.answers = [partial, partial, Answer(message="a warning")]
    with receiver, Here(store_path, receiver) as here:
        for trace in ids(3):
            here.close_trace(trace, ALL)
            assert here.work() == []
        assert receiver.heard.qsize() == 3
        # The same words once.
        assert [message.rpartition(": ")[2] for message in here.driver.log] == [
            "3 spans are too old",
            "a warning",
        ]
        counters = here.exporter.counters
        assert (counters.spans, counters.spans_rejected) == (3 * SPANS - 6, 6)
        assert (counters.traces, counters.traces_refused) == (3, 0)


def test_a_receiver_that_is_down_gets_all_when_it_is_up(
    store_path: Path, receiver: Receiver
) -> None:
    with Here(store_path, receiver) as here:
        for trace in ids(3):
            here.close_trace(trace, {"edge": FRONT})
        with StoreReader(store_path) as reader:
            assert [here.exporter.work(reader) for _ in range(2)] == [5.0, 7.5]
            assert here.exporter.waiting == 3
        with receiver:
            deadline = 100  # gRPC has pauses of its own between connections
            while here.work() and (deadline := deadline - 1):
                pass
            sent = [span.trace_id for span in receiver.heard.get_nowait().spans]
            assert sorted(set(sent)) == ids(3)
            assert here.exporter.counters.traces == 3


def test_what_waits_is_sent_after_a_restart_and_what_was_sent_is_not(
    store_path: Path, receiver: Receiver
) -> None:
    with receiver:
        with Here(store_path, receiver) as here:
            here.close_trace(ids(1)[0], {"edge": FRONT})
            here.work()
            here.close_trace(ids(2)[1], {"edge": FRONT})
        with Here(store_path, receiver) as here:
            here.work()
        heard = [receiver.heard.get_nowait() for _ in range(2)]
        assert receiver.heard.empty()
        assert [one.spans[0].trace_id for one in heard] == ids(2)


def test_the_exporter_works_by_itself_and_ends_at_once(
    store_path: Path, receiver: Receiver
) -> None:
    with Here(store_path, receiver, timeout_s=600) as here:
        with receiver:
            with here.new_exporter() as running:
                here.close_trace(TRACE, ALL)
                assert len(receiver.heard.get().spans) == SPANS
            assert running.counters.requests_retried == 0
        # One that takes the connection and says nothing: the end does not wait for it.
        with contextlib.ExitStack() as connections:
            silent = connections.enter_context(socket.create_server(("127.0.0.1", receiver.port)))
            with here.new_exporter() as running:
                here.close_trace(ids(1)[0], {"edge": FRONT})
                connections.enter_context(silent.accept()[0]).recv(1)
            assert (running.counters.requests, running.counters.traces) == (1, 0)


def test_another_receiver_gets_what_the_first_puts_off(
    store_path: Path, receiver: Receiver
) -> None:
    for_hours = Answer(grpc.StatusCode.UNAVAILABLE, 503, retry_after_s=3600)
    with receiver, GrpcReceiver(free_port(), answers=[for_hours]) as first:
        with Here(store_path, first) as here, here.new_exporter() as running:
            here.close_trace(TRACE, ALL)
            assert len(first.heard.get().spans) == SPANS
            while not running.counters.requests_retried:
                pass
            running.reconfigure(ExportSettings(receiver.url, receiver.protocol))
            assert len(receiver.heard.get().spans) == SPANS
            while not running.counters.traces:
                pass
        assert first.heard.empty()
        assert here.driver.log == [here.driver.log[0]]
        assert f"export to {first.url} fails" in here.driver.log[0]


def test_another_receiver_gets_the_whole_of_what_was_under_way(
    store_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_REQUEST_BYTES_MAX", 600)
    with (
        receiver,
        Here(store_path, receiver, timeout_s=600) as here,
        contextlib.ExitStack() as connections,
    ):
        other = type(receiver)(free_port())  # type: ignore[call-arg] # of either kind
        silent = connections.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = silent.getsockname()[1]
        here.settings = ExportSettings(f"http://127.0.0.1:{port}", receiver.protocol, timeout_s=600)
        with here.new_exporter() as running, other:
            here.close_trace(TRACE, ALL)
            connections.enter_context(silent.accept()[0]).recv(1)
            running.reconfigure(ExportSettings(other.url, other.protocol))
            heard = 0
            while heard < SPANS:
                heard += len(other.heard.get().spans)
            assert heard == SPANS
            while not running.counters.traces:
                pass
        assert running.counters.requests_retried == 0
        assert here.driver.log == []


def test_without_a_receiver_what_waits_does_so_for_the_next_one(
    store_path: Path, receiver: Receiver
) -> None:
    receiver.answers = [BUSY]
    with receiver, Here(store_path, receiver) as here, StoreReader(store_path) as reader:
        here.close_trace(TRACE, ALL)
        assert here.exporter.work(reader)
        receiver.heard.get_nowait()
        here.exporter.reconfigure(ExportSettings())
        here.close_trace(ids(1)[0], {"edge": FRONT})  # nobody is to have it
        assert here.work() == []
        assert (receiver.heard.qsize(), here.exporter.waiting) == (0, 0)
        here.exporter.reconfigure(here.settings)
        assert here.work() == []
        assert len(receiver.heard.get_nowait().spans) == SPANS
        assert receiver.heard.empty()


def test_what_an_older_store_exported_is_not_sent_again_and_what_waited_is(
    store_path: Path, receiver: Receiver
) -> None:
    done, waits, never = ids(3)
    size = len(FRONT)
    verdict = Verdict(1, VerdictKind.COHERENT, (), ("edge",), size, 2, None, None)
    with old_store(store_path) as old:
        for trace in (done, waits, never):
            old.write(
                AppendSlice(trace, "edge", 1, 0, FRONT),
                PutVerdict(trace, verdict),
                PutReleased(trace),
            )
        old.connection.execute("INSERT INTO exported VALUES (?, ?, 'coherent')", (done, size))
        old.connection.execute("INSERT INTO to_export (trace) VALUES (?)", (waits,))
    with receiver, Here(store_path, receiver) as here:
        here.work()
        assert {span.trace_id for span in receiver.heard.get_nowait().spans} == {waits}
        for trace in (done, never):
            here.driver.write(PutReleased(trace, released=False), PutReleased(trace))
        here.work()
        assert {span.trace_id for span in receiver.heard.get_nowait().spans} == {never}
        assert receiver.heard.empty()


def test_a_receiver_that_cannot_be_is_not_taken_up(store_path: Path, receiver: Receiver) -> None:
    with receiver, Here(store_path, receiver) as here:
        with pytest.raises(OSError, match=r"export\.ca_file"):
            here.exporter.reconfigure(ExportSettings("https://127.0.0.1:1", ca_file="/no.pem"))
        here.close_trace(TRACE, ALL)
        assert here.work() == []
        assert len(receiver.heard.get_nowait().spans) == SPANS


def test_whatever_goes_wrong_in_sending_is_a_try_that_failed(
    store_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bytes) -> Outcome:
        raise UnicodeError("no such name")

    with receiver, Here(store_path, receiver) as here, StoreReader(store_path) as reader:
        here.close_trace(TRACE, ALL)
        transport = here.exporter._receiver.transport
        with monkeypatch.context() as patched:
            patched.setattr(transport, "send", fail)
            assert here.exporter.work(reader) == 5.0
        assert "UnicodeError: no such name" in here.driver.log[0]
        assert here.work() == []
        assert len(receiver.heard.get_nowait().spans) == SPANS


@pytest.mark.parametrize("kind", [GrpcReceiver, HttpReceiver])
def test_a_receiver_is_only_trusted_by_its_certificate(
    store_path: Path, tmp_path: Path, kind: type[GrpcReceiver | HttpReceiver]
) -> None:
    certificate = Certificate.new(tmp_path)
    receiver = kind(free_port(), tls=certificate)
    with receiver:
        with Here(store_path, receiver) as here, StoreReader(store_path) as reader:
            here.close_trace(TRACE, ALL)
            assert here.exporter.work(reader) == 5.0  # it waits for a better one
            assert receiver.heard.empty()
        with Here(store_path, receiver, ca_file=str(certificate.certificate)) as here:
            here.work()
            assert len(receiver.heard.get_nowait().spans) == SPANS


def test_a_file_of_certificates_that_was_replaced_is_read_again(
    store_path: Path, tmp_path: Path
) -> None:
    of_the_receiver, of_another = (tmp_path / name for name in ("receiver", "another"))
    of_the_receiver.mkdir()
    of_another.mkdir()
    certificate = Certificate.new(of_the_receiver)
    trusted = Certificate.new(of_another).certificate
    receiver = HttpReceiver(free_port(), tls=certificate)
    with receiver, Here(store_path, receiver, ca_file=str(trusted)) as here:
        here.close_trace(TRACE, ALL)
        with StoreReader(store_path) as reader:
            assert here.exporter.work(reader) == 5.0
            certificate.certificate.replace(trusted)
            here.exporter.reconfigure(here.settings)
            assert here.exporter.work(reader) == 0
        assert len(receiver.heard.get_nowait().spans) == SPANS


# ------------------------------------------------------------------ requests


def test_a_large_trace_goes_in_several_requests() -> None:
    made = stamped(detail(), one_clock=False)
    data = made.otlp_bytes(), made.span_count
    assert list(requests_of([data], 1 << 30)) == [data]
    parts = list(requests_of([data, data], 600))
    assert sum(spans for _, spans in parts) == 2 * SPANS
    assert len(parts) > 4
    for encoded, spans in parts:
        assert len(encoded) < 600 + 300 or spans == 1
        for resource in TracesData.FromString(encoded).resource_spans:
            assert resource.resource.attributes
            assert resource.scope_spans[0].scope.name == "shop.instrumentation"


def test_small_slices_go_together_up_to_the_size_of_a_request() -> None:
    made = stamped(detail(), one_clock=False)
    data, spans = made.otlp_bytes(), made.span_count
    requests = list(requests_of([(data, spans)] * 5 + [(b"", 0)], 2 * len(data)))
    assert requests == [(2 * data, 2 * spans)] * 2 + [(data, spans)]
    assert len(TracesData.FromString(2 * data).resource_spans) == 2 * len(
        TracesData.FromString(data).resource_spans
    )


def test_each_request_of_a_trace_is_tried_by_itself(
    store_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_REQUEST_BYTES_MAX", 600)
    receiver.answers = [OK, BUSY]
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        assert len(here.work()) == 1
        heard = [receiver.heard.get_nowait() for _ in range(receiver.heard.qsize())]
        assert heard[1].request == heard[2].request
        del heard[2]
        sent = [span.span_id for one in heard for span in one.spans]
        assert len(sent) == len(set(sent)) == SPANS


def test_any_success_of_http_is_one(store_path: Path) -> None:
    receiver = HttpReceiver(free_port(), answers=[Answer(status=202)])
    with receiver, Here(store_path, receiver) as here:
        here.close_trace(TRACE, ALL)
        assert here.work() == []
        assert (here.exporter.counters.traces, here.driver.log) == (1, [])


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("yaml", "problem"),
    [
        ("endpoint: collector:4317", "allowed: a URL"),
        ("endpoint: http://collector:4317", "in clear text"),
        ("endpoint: https://collector:4317/v1/traces", "has a path"),
        ("endpoint: https://collector:99999", "a port from 1 to 65535"),
        ("endpoint: https://[:::::1]:4317", "an IP address"),
        ("endpoint: https://[::1", "allowed: a URL"),
        ("endpoint: https://[1.2.3.4]", "an IP address"),
        ("endpoint: https://otel..collector", "labels of 1 to 63 characters"),
        (f"endpoint: https://{'a' * 64}.example", "labels of 1 to 63 characters"),
        (f"endpoint: https://{'a.' * 130}example", "labels of 1 to 63 characters"),
        ("endpoint: https://c\n  headers: {X-Bin: a}", "does not end with -bin"),
        ("endpoint: https://c\n  headers: {grpc-tags: a}", "does not begin with grpc-"),
        ("endpoint: https://c\n  headers: {Content-Length: a}", "any but connection"),
        ("protocol: http/json", "grpc or http/protobuf"),
        ("compression: zstd", "none or gzip"),
        ("verdicts: [provisional]", "coherent, partial, lossy, truncated"),
        ('headers: {"a b": c}', "letters, digits"),
        ('headers: {a: "b\\nc: d"}', "printable ASCII"),
    ],
)
def test_a_wrong_setting_is_refused(yaml: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loads("export:\n  " + yaml, Settings, "c.yaml")
    line = 2 + yaml.count("\n")
    assert refused.value.problems[0].startswith(f"c.yaml:{line}: export.")
    assert problem in refused.value.problems[0]


def test_good_settings_are_taken() -> None:
    text = """
export:
  endpoint: http://collector.internal:4318/otlp/v1/traces
  protocol: http/protobuf
  insecure: true
  headers: {Authorization: "Bearer x"}
  compression: none
  timeout_s: 5
  verdicts: [coherent, partial]
"""
    export = loads(text, Settings, "c.yaml").export
    assert export.headers == {"Authorization": "Bearer x"}
    assert export.exported_verdicts == {VerdictKind.COHERENT, VerdictKind.PARTIAL}
    assert HttpTransport(export)._path == "/otlp/v1/traces"
    assert loads("", Settings, "c.yaml").export.exported_verdicts == frozenset()
