# SPDX-License-Identifier: Apache-2.0
"""One pod of the recording, replayed by one process: ``python3 -m tests.replay.worker PLAN``.

It does what the service did, at the recorded times: starts and ends spans in
the request's handle, passes contexts to the pods that it called, fires the
latency trigger on spans that it ends. Talks to the parent over its standard
streams, a line each: it says ``ready`` when attached, ``progress EVENTS
SPANS TRIGGERS`` while it runs and ``closed TRACE`` of requests that began
here, and is told ``go START_NS`` and ``dead POD``. At the end of its events it
writes down what it wrote, says ``done`` and stays until its standard input is
closed, as a service would stay.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import backsight
from backsight.autotrigger import LatencyTrigger
from tests.replay.mailbox import Key, Kind, Mailbox
from tests.replay.schedule import (
    CloseTrace,
    EndSpan,
    Event,
    ReceiveResponse,
    SendContext,
    Span,
    StartSpan,
)

_PROGRESS_INTERVAL_NS = 200_000_000  # five times a second looks alive
_ATTACH_TIMEOUT_S = 60.0  # 75 Python processes start on two cores


@dataclass(frozen=True, slots=True)
class LatencyRule:
    """tests/checker/README.md."""

    quantile_permille: int
    warmup: int
    window: int
    factor_permille: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one worker does.

    ``fire_on`` names spans (trace and span id) at whose end it fires, rule or not: the trigger's name
    and why. ``die_on`` names a span after whose start the process kills itself, as ``kill -9`` would.
    ``written``: where it writes down what it wrote (JSON, a WrittenPart a line).
    """

    pod: str
    address: str
    peers: dict[str, str]
    events: tuple[Event, ...]
    first_ns: int
    speed: float
    rule: LatencyRule | None
    fire_on: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    die_on: tuple[str, str] | None = None
    written: Path | None = None


@dataclass(slots=True)
class WrittenPart:
    """What this pod wrote of a trace: when (Unix ns), and which spans from start to end."""

    trace_id: str
    first_ns: int
    last_ns: int
    span_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Counters:
    events: int = 0
    spans: int = 0
    triggers: int = 0


class Worker:
    """Carries out a plan's events in order, in one thread."""

    def __init__(self, plan: Plan, mailbox: Mailbox, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._mailbox = mailbox
        self._say = say
        self._start_ns = 0
        self._progress_due_ns = 0
        self._traces: dict[str, backsight.Trace] = {}
        self._started: set[tuple[str, str]] = set()
        self._written: dict[str, WrittenPart] = {}
        self._begun_here: set[str] = set()
        self._latency = (
            None
            if (rule := plan.rule) is None
            else LatencyTrigger(
                quantile_permille=rule.quantile_permille,
                warmup=rule.warmup,
                window=rule.window,
                factor_permille=rule.factor_permille,
            )
        )
        self._counters = _Counters()
        self._input = b""

    # ------------------------------------------------------------ control

    def wait_for_start(self) -> None:
        """Wait until the parent gives the common start."""
        while not self._start_ns:
            if self._mailbox.wait(None):
                self._read_control()

    def _read_control(self) -> None:
        data = os.read(0, 65536)
        if not data:
            raise EOFError("the replay went away")
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            word, value = line.decode().split(" ", 1)
            if word == "go":
                self._start_ns = int(value)
            elif word == "dead":
                self._mailbox.mark_dead(value)

    def _progress(self, *, now_ns: int) -> None:
        if now_ns >= self._progress_due_ns:
            c = self._counters
            self._say(f"progress {c.events} {c.spans} {c.triggers}")
            self._progress_due_ns = now_ns + _PROGRESS_INTERVAL_NS

    # ------------------------------------------------------------- events

    def run(self) -> None:
        for event in self._plan.events:
            self._wait_until(event.key.time_ns)
            match event:
                case StartSpan():
                    self._start(event)
                case SendContext():
                    self._send_context(event)
                case EndSpan():
                    self._end(event)
                case ReceiveResponse():
                    self._receive_response(event)
                case CloseTrace():
                    self._close(event.trace_id)
            self._counters.events += 1
        self._progress_due_ns = 0
        self._progress(now_ns=0)
        if self._plan.written is not None:
            lines = (json.dumps(asdict(part)) + "\n" for part in self._written.values())
            self._plan.written.write_text("".join(lines))

    def _wait_until(self, recorded_ns: int) -> None:
        due_ns = self._start_ns + int((recorded_ns - self._plan.first_ns) / self._plan.speed)
        while True:
            now_ns = time.monotonic_ns()
            self._progress(now_ns=now_ns)
            if self._mailbox.wait(
                min(due_ns, self._progress_due_ns) if now_ns < due_ns else now_ns
            ):
                self._read_control()
            if now_ns >= due_ns:
                return

    def _await_letter(self, sender: str, key: Key) -> str | None:
        """The letter, or None if it will never come."""
        cancelled = Key(Kind.CANCELLED, key.trace_id, key.span_id)
        while True:
            if (value := self._mailbox.take(key)) is not None:
                return value
            if self._mailbox.take(cancelled) is not None or self._mailbox.is_dead(sender):
                return None
            if self._mailbox.wait(None):
                self._read_control()

    def _start(self, event: StartSpan) -> None:
        span = event.span
        context: str | None = None
        if event.receive_from is not None:
            context = self._await_letter(
                event.receive_from, Key(Kind.CONTEXT, span.trace_id, span.span_id)
            )
            if context is None:
                return
        elif span.parent_id and (span.trace_id, span.parent_id) not in self._started:
            return
        trace = self._traces.get(span.trace_id)
        if trace is None:
            now_ns = time.time_ns()
            self._written[span.trace_id] = WrittenPart(span.trace_id, now_ns, now_ns)
            trace = self._traces[span.trace_id] = backsight.Trace(span.trace_id)
        if context:
            trace.deserialize(int(span.parent_id, 16), context)
        trace.span_start(
            int(span.span_id, 16), int(span.parent_id or "0", 16), span.start_ns, span.operation
        )
        self._started.add((span.trace_id, span.span_id))
        if not span.parent_id:
            self._begun_here.add(span.trace_id)
        if self._plan.die_on == (span.trace_id, span.span_id):
            os.kill(os.getpid(), signal.SIGKILL)

    def _send_context(self, event: SendContext) -> None:
        span = event.span
        if (span.trace_id, span.parent_id) not in self._started:
            self._mailbox.send(event.to, Key(Kind.CANCELLED, span.trace_id, span.span_id))
            return
        trace = self._traces[span.trace_id]
        # What a client span knows of its peer; the callee itself is named by its response, if any.
        trace.breadcrumb(f"@{self._plan.peers[event.to]}")
        value = trace.serialize(int(span.parent_id, 16))
        self._mailbox.send(event.to, Key(Kind.CONTEXT, span.trace_id, span.span_id), value)

    def _end(self, event: EndSpan) -> None:
        span = event.span
        started = (span.trace_id, span.span_id) in self._started
        if started:
            trace = self._traces[span.trace_id]
            trace.span_end(
                int(span.span_id, 16),
                span.end_ns,
                attributes={"pod": span.pod, "duration_us": span.duration_us},
            )
            self._counters.spans += 1
            self._written[span.trace_id].span_ids.append(span.span_id)
            self._fire(span, trace)
        if event.respond_to is not None:
            kind = Kind.RESPONSE if started else Kind.CANCELLED
            self._mailbox.send(
                event.respond_to, Key(kind, span.trace_id, span.span_id), backsight.node_ref()
            )

    def _fire(self, span: Span, trace: backsight.Trace) -> None:
        fired = self._plan.fire_on.get((span.trace_id, span.span_id))
        if self._latency is not None:
            duration_ns = span.end_ns - span.start_ns
            if self._latency.observe(duration_ns, span.operation):
                fired = ("latency", f"{duration_ns / 1e6:.1f} ms in {span.operation}")
        if fired is not None:
            trace.trigger(*fired)
            self._counters.triggers += 1

    def _receive_response(self, event: ReceiveResponse) -> None:
        span = event.span
        node_ref = self._await_letter(event.sender, Key(Kind.RESPONSE, span.trace_id, span.span_id))
        trace = self._traces.get(span.trace_id)
        if node_ref and trace is not None:
            trace.breadcrumb(node_ref)

    def _close(self, trace_id: str) -> None:
        if (trace := self._traces.pop(trace_id, None)) is None:
            return
        trace.close()
        self._written[trace_id].last_ns = time.time_ns()
        if trace_id in self._begun_here:
            self._say(f"closed {trace_id}")


def main() -> int:
    plan: Plan = pickle.loads(Path(sys.argv[1]).read_bytes())

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    with Mailbox(plan.address, plan.peers) as mailbox:
        mailbox.watch(0)
        if not backsight.wait_attached(_ATTACH_TIMEOUT_S):
            sys.stderr.write(f"{plan.pod}: no backsight-node to attach to\n")
            return 1
        say("ready")
        worker = Worker(plan, mailbox, say)
        try:
            worker.wait_for_start()
            worker.run()
            say("done")
            while os.read(0, 65536):
                pass
        except (EOFError, KeyboardInterrupt):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
