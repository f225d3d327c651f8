# SPDX-License-Identifier: Apache-2.0
"""Sends traces that are closed to an OTLP receiver.

What waits stands in the store, so nothing is lost when the coordinator is started
again, and no more is sent twice than what was under way: a trace is marked once
all of it was taken, or refused for good. In memory is one batch. It is sent as
OTLP's specification says: what may be tried again is, with growing pauses, for as
long as the store has the trace; a part that was rejected is not.

What is put off again and again goes behind what else waits, and from then on
trace by trace, each from its beginning and after a longer time: one of them may be at
fault, and not the receiver. Others wait for none of it. It is as new once a receiver
works again that took nothing else either.

One thread does it all, so that a slow receiver holds up nothing else.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from coordinator.answers import trace_detail
from coordinator.follower import Followed, Follower, NewsWithin
from coordinator.otlp_export.queue import Exported, ExportQueue
from coordinator.otlp_export.transports import (
    BACKOFF_MAX_S,
    Accepted,
    Refused,
    Transport,
    TryAgain,
    transport_of,
)
from coordinator.store.reader import StoreReader
from formats.stamped import stamped
from protocol.messages import TraceId
from protocol.verdicts import VerdictKind
from runtime.log import Log
from runtime.settings.coordinator import ExportSettings

# Receivers by gRPC take 4 MiB where nobody configured more.
_REQUEST_BYTES_MAX = 3 << 20

# Traces that go together: one request for a few hundred small ones a second.
_TRACES_AT_ONCE = 64
_BATCH_BYTES = 1 << 20

# Of one slice, which is in memory as a whole, and as spans some times as large. Nodes
# have slices of 16 MiB at most unless they are configured otherwise.
_SLICE_BYTES_MAX = 32 << 20

FOLLOWER = "export"

# Without a receiver: how far it has followed, and for how long no news wake it.
_NEEDS_NONE = (1 << 63) - 1
_UNTIL_WOKEN_S = 86_400.0

# The first pause, and by how much it grows, as with the OpenTelemetry Collector.
_BACKOFF_FIRST_S = 5.0
_BACKOFF_FACTOR = 1.5

# A receiver may ask for a longer one, but not for ever.
_RETRY_AFTER_MAX_S = 3600.0

# So often in a row a request is put off before others have their turn.
_TRIES = 3

# A trace that is put off alone is tried again after so long, and twice as long each time.
_AGAIN_FIRST_S = 30.0
_AGAIN_MAX_S = 3600.0

# ------------------------------------------------------------------ requests


def requests_of(slices: Iterable[tuple[bytes, int]], bytes_max: int) -> Iterator[tuple[bytes, int]]:
    """ExportTraceServiceRequests of about so many bytes, and how many spans are in each.

    ``slices``: a TracesData of each, encoded, and its spans. Several of them, one behind the other,
    are a request; only what is too long for one is read, and cut up.
    """
    packed: list[bytes] = []
    size = count = 0
    for data, spans in slices:
        if count and size + len(data) > bytes_max:
            yield b"".join(packed), count
            packed, size, count = [], 0, 0
        if len(data) > bytes_max:
            yield from _cut_up(TracesData.FromString(data), bytes_max)
        elif spans:
            packed.append(data)
            size += len(data)
            count += spans
    if count:
        yield b"".join(packed), count


def _cut_up(data: TracesData, bytes_max: int) -> Iterator[tuple[bytes, int]]:
    """A span that is larger goes alone."""
    packed, size, count = TracesData(), 0, 0
    for resource_spans in data.resource_spans:
        of_resource = None
        for scope_spans in resource_spans.scope_spans:
            of_scope = None
            for span in scope_spans.spans:
                span_bytes = span.ByteSize()
                if count and size + span_bytes > bytes_max:
                    yield packed.SerializeToString(), count
                    packed, size, count = TracesData(), 0, 0
                    of_resource = of_scope = None
                if of_resource is None:
                    of_resource = packed.resource_spans.add(
                        resource=resource_spans.resource, schema_url=resource_spans.schema_url
                    )
                    size += of_resource.ByteSize()
                if of_scope is None:
                    of_scope = of_resource.scope_spans.add(
                        scope=scope_spans.scope if scope_spans.HasField("scope") else None,
                        schema_url=scope_spans.schema_url,
                    )
                    size += of_scope.ByteSize()
                of_scope.spans.append(span)
                size += span_bytes
                count += 1
    if count:
        yield packed.SerializeToString(), count


# ------------------------------------------------------------------ exporter


@dataclass(slots=True)
class ExportCounters:
    """Since its start. They only rise."""

    traces: int = 0  # all of which was taken, but for rejected spans
    traces_refused: int = 0  # of which something was refused for good
    slices_cut: int = 0  # longer than may be sent
    slices_unreadable: int = 0
    requests: int = 0
    requests_retried: int = 0
    request_bytes: int = 0  # before compression
    spans: int = 0
    spans_rejected: int = 0
    spans_refused: int = 0


@dataclass(slots=True)
class _Batch:
    """Traces on their way; ``request`` is the one that is due, None if all were sent.

    ``behind``: it is a trace that was put off before.
    """

    notes: list[Exported]
    requests: Iterator[tuple[bytes, int]]
    behind: bool
    request: tuple[bytes, int] | None = None
    refused: bool = False
    failures: int = 0  # of this request, in a row

    def go_on(self) -> None:
        self.request = next(self.requests, None)
        self.failures = 0


class _Receiver:
    """Where it goes, and what the exporter knows of it. One without an endpoint takes nothing."""

    def __init__(self, settings: ExportSettings) -> None:
        self.settings = settings
        self.transport = transport_of(settings) if settings.endpoint else None
        self.failures = 0  # in a row
        self.batches_failed = 0  # since it last took something; new ones
        self.is_said_to_fail = False
        self.last_message = ""

    @property
    def endpoint(self) -> str:
        """As it is named to people."""
        return self.settings.shown_endpoint

    def interrupt(self) -> None:
        if self.transport is not None:
            self.transport.interrupt()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class Exporter:
    """Exports while it is entered. ``waiting`` is how many traces wait, as last seen.

    OSError if the settings name a file that cannot be read.
    """

    def __init__(
        self,
        settings: ExportSettings,
        store: Followed,
        path: Path,
        log: Log,
        chance: Callable[[], float] = random.random,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.counters = ExportCounters()
        self.waiting = 0
        self._store = store
        self._log = log
        self._receiver = self._wanted = _Receiver(settings)
        self._chance = chance
        self._clock_s = clock_s
        self._queue = ExportQueue(path, store.id, log)
        self._batch: _Batch | None = None
        self._was_behind = False  # the last batch
        self._follower = Follower("exporter", store, path, self.work)

    def __enter__(self) -> Self:
        self._follower.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._follower.ending.set()
        self._wanted.interrupt()
        self._follower.__exit__(kind, error, traceback)
        self.close()

    def close(self) -> None:
        """Of one that is not entered, or no more."""
        self._receiver.close()
        self._queue.close()

    def reconfigure(self, settings: ExportSettings) -> None:
        """Send to another receiver, or in another way, or no more; OSError leaves all as it was.

        For another thread than that which works. What is under way is interrupted, and begins
        anew there: what waits stands in the store, and is only marked once it was taken.
        """
        before = self._wanted
        if settings == before.settings and settings.ca_file is None:
            return  # else the file may have changed
        self._wanted = _Receiver(settings)
        before.interrupt()
        self._follower.wake()

    def work(self, reader: StoreReader) -> float | NewsWithin | None:
        """Send one request, if there is one; in how many seconds to go on, None when there are news."""
        wanted = self._wanted
        if self._receiver is not wanted:
            self._receiver.close()
            self._receiver, self._batch = wanted, None
            self._queue.hurry()
        if wanted.transport is None:
            self.waiting = 0
            self._queue.pause()
            self._store.followed(FOLLOWER, _NEEDS_NONE)
            return _UNTIL_WOKEN_S
        self._store.followed(FOLLOWER, self._queue.follow(reader, self._verdicts))
        if self._batch is not None and not self._is_due_again(reader, self._batch):
            self._batch = None
        if self._batch is None:
            self._batch = self._next_batch(reader)
            if self._batch is None:
                again = self._queue.again()
                return None if again is None else NewsWithin(max(again[1] - self._clock_s(), 0.0))
        if self._batch.request is not None:
            pause_s = self._send(wanted.transport, self._batch, *self._batch.request)
            if pause_s or self._batch is None:
                return pause_s
        if self._batch.request is None:
            self._queue.done(reader, self._batch.notes, self._verdicts)
            if self._batch.refused:
                self.counters.traces_refused += len(self._batch.notes)
            else:
                self.counters.traces += len(self._batch.notes)
            self._batch = None
        return 0

    @property
    def _verdicts(self) -> frozenset[VerdictKind]:
        return self._receiver.settings.exported_verdicts

    def _next_batch(self, reader: StoreReader) -> _Batch | None:
        self.waiting = self._queue.count()
        notes: list[Exported] = []
        slices: list[tuple[TraceId, str]] = []
        size = 0
        gone: list[TraceId] = []
        traces, behind = self._next_traces()
        for trace in traces:
            found = trace_detail(reader, trace, 0)
            if found is None:
                gone.append(trace)  # the store deleted it, of which the queue has not heard yet
                continue
            verdict = VerdictKind(found.summary.verdict.kind)
            notes.append(Exported(trace, found.summary.bytes, verdict))
            slices += ((trace, part.node) for part in found.slices)
            size += sum(part.bytes for part in found.slices)
            if size >= _BATCH_BYTES:
                break
        if gone:
            self._queue.drop(gone)
        if not notes:
            return self._next_batch(reader) if gone else None
        batch = _Batch(notes, requests_of(self._read(reader, slices), _REQUEST_BYTES_MAX), behind)
        batch.go_on()
        return batch

    def _next_traces(self) -> tuple[list[TraceId], bool]:
        """What goes together next, and whether it is one that was put off, of which every other may be."""
        again = self._queue.again()
        is_due = again is not None and again[1] <= self._clock_s()
        # Not while nothing is taken: then it is not its fault, and costs a pause.
        self._was_behind = is_due and not self._was_behind and not self._receiver.batches_failed
        new = [] if self._was_behind else self._queue.new(_TRACES_AT_ONCE)
        if new or not is_due:
            return new, False
        assert again is not None
        return [again[0]], True

    def _is_due_again(self, reader: StoreReader, batch: _Batch) -> bool:
        """Whether what failed is next, and not deleted in part, or behind all else that waits."""
        if not batch.failures:
            return True
        mine = [note.trace for note in batch.notes]
        if not all(map(self._queue.waits, mine)) or batch.behind:
            return False
        if batch.failures < _TRIES or self._queue.count() == len(mine):
            return True
        self._queue.put_off(mine, self._clock_s())
        return False

    def _read(
        self, reader: StoreReader, slices: Iterable[tuple[TraceId, str]]
    ) -> Iterator[tuple[bytes, int]]:
        """The spans of slices, one slice after the other, each when it is its turn, and how many they are."""
        for trace, node in slices:
            found = trace_detail(reader, trace, _SLICE_BYTES_MAX, node)
            if found is None or not found.slices:
                continue  # deleted since
            (part,) = found.slices
            where = {"trace_id": trace.hex(), "node": node}
            if len(part.data) < part.bytes:
                self.counters.slices_cut += 1
                self._log.warning(
                    f"slice {trace.hex()} of {node}: only its first {len(part.data)} of"
                    f" {part.bytes} bytes are exported",
                    **where,
                )
            try:
                made = stamped(found, one_clock=False)
                encoded = made.otlp_bytes(), made.span_count
            except Exception as error:  # noqa: BLE001 - what applications wrote must not stop the others
                self.counters.slices_unreadable += 1
                self._log.warning(
                    f"slice {trace.hex()} of {node}: cannot be exported: {error!r}", **where
                )
            else:
                yield encoded

    def _send(self, transport: Transport, batch: _Batch, request: bytes, spans: int) -> float:
        """Send what is due; how long to wait before it is tried again, 0 if it need not be."""
        self.counters.requests += 1
        self.counters.request_bytes += len(request)
        try:
            outcome = transport.send(request)
        except Exception as error:  # noqa: BLE001 - it must not end the thread, and the coordinator
            outcome = TryAgain(f"{type(error).__name__}: {error}")
        match outcome:
            case TryAgain():
                return self._put_off(batch, outcome)
            case Accepted():
                self.counters.spans += max(spans - outcome.rejected_spans, 0)
                self.counters.spans_rejected += min(outcome.rejected_spans, spans)
                if outcome.message or outcome.rejected_spans:
                    self._complain(
                        f"rejected {outcome.rejected_spans} of {spans} spans", outcome.message
                    )
            case Refused():
                self.counters.spans_refused += spans
                batch.refused = True
                self._complain(f"refused {spans} spans for good", outcome.why)
        self._receiver.failures = 0
        if self._receiver.batches_failed > 1:
            self._queue.pardon()
        self._receiver.batches_failed = 0
        if self._receiver.is_said_to_fail:
            self._receiver.is_said_to_fail = False
            self._log.info(f"export to {self._receiver.endpoint} works again")
        batch.go_on()
        return 0.0

    def _put_off(self, batch: _Batch, outcome: TryAgain) -> float:
        if self._follower.ending.is_set() or self._receiver is not self._wanted:
            return _BACKOFF_FIRST_S  # interrupted, and woken: it is sent by who comes next
        receiver = self._receiver
        self.counters.requests_retried += 1
        self._say_put_off(batch, outcome.why)
        # Jitter: half to one and a half, so that many coordinators do not come together.
        jitter = 0.5 + self._chance()
        backoff_s = _BACKOFF_FIRST_S * _BACKOFF_FACTOR ** min(receiver.failures, 64)
        backoff_s = min(backoff_s, BACKOFF_MAX_S) * jitter
        receiver.failures += 1
        asked_s = outcome.after_s or 0.0
        asked_s = min(asked_s, _RETRY_AFTER_MAX_S) if math.isfinite(asked_s) else 0.0
        if batch.behind:
            (mine,) = batch.notes
            doublings = min(
                self._queue.attempts(mine.trace) - 1, 16
            )  # by then it is over the bound
            pause_s = min(_AGAIN_FIRST_S * (1 << doublings), _AGAIN_MAX_S) * jitter
            self._queue.put_off([mine.trace], self._clock_s() + max(pause_s, asked_s))
            self._batch = None
            # Others wait for it only if they may be put off too.
            return backoff_s if receiver.failures > 1 else 0.0
        if not batch.failures:
            receiver.batches_failed += 1
        batch.failures += 1
        return max(backoff_s, asked_s)

    def _say_put_off(self, batch: _Batch, why: str) -> None:
        """Once, until it works again; of a trace while others are taken, once."""
        endpoint = self._receiver.endpoint
        if self._receiver.is_said_to_fail:
            return
        if not batch.behind:
            self._receiver.is_said_to_fail = True
            self._log.warning(
                f"export to {endpoint} fails, and will be tried again: {why}."
                " What is to be exported waits in the store.",
                reason=why,
            )
            return
        (mine,) = batch.notes
        if self._queue.attempts(mine.trace) == 1:
            self._log.warning(
                f"trace {mine.trace.hex()}: {endpoint} puts it off again and again, and takes others:"
                f" {why}. It is tried again, but more rarely than others.",
                trace_id=mine.trace.hex(),
                reason=why,
            )

    def _complain(self, what: str, message: str) -> None:
        """Once, until it says something else: it may say so with each request."""
        if message != self._receiver.last_message:
            self._receiver.last_message = message
            self._log.warning(
                f"export: {self._receiver.endpoint} {what}: {message}", reason=message
            )
