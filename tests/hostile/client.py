# SPDX-License-Identifier: Apache-2.0
"""Honest processes: write traces as a service does, and fire for some of them.

    python3 -m tests.hostile.client serve NODE UID RUN PORT PEER AIM TRACES_PER_S TRIGGER_EVERY
    python3 -m tests.hostile.client visit NODE UID RUN FIRST COUNT

``serve`` begins traces when it reads a line, begins no more when it reads another, answers
the other's until it reads a third, and stays until its input ends. ``visit`` attaches, writes
COUNT traces that stay on its node, fires for each, and stays likewise. Both print lines of
JSON; see ``Said``.
"""

from __future__ import annotations

import collections
import json
import mmap
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import backsight
from tests.hostile.truth import (
    DATA_RECORDS,
    NODES,
    RECORDS,
    TRIGGER,
    Honest,
    honest,
    payload,
    span_id,
)

_ATTACH_TIMEOUT_S = 30.0
_SAY_EVERY_S = 0.5

# A trigger that comes when the request is over, as one by latency or by another service does.
_LATE_S = 0.3

# A machine that was busy for longer than this is not made up for.
_BEHIND_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Said:
    """A line that a client prints.

    ``fired``: lower halves of ids, those since the last line. ``ended``: it begins no more
    traces. ``final``: it writes nothing more at all.
    """

    pid: int
    attached: bool
    traces: int
    records: int
    records_lost: int
    triggers_lost: int
    fired: tuple[int, ...] = ()
    ended: bool = False
    final: bool = False


class Client:
    """What both kinds of processes do, and count."""

    def __init__(self, node: str, run: int) -> None:
        self.front = NODES.index(node)
        self.run = run
        self.traces = 0
        # Each thread counts its own.
        self.records: collections.Counter[int] = collections.Counter()
        self._fired: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._output = threading.Lock()

    def write_side(
        self, handle: backsight.Trace, trace: Honest, side: int, context: str = ""
    ) -> None:
        """All but the end of the span."""
        span = span_id(trace, side)
        if side:
            handle.deserialize(span_id(trace, 0), context)
        parent = span_id(trace, 0) if side else 0
        handle.span_start(span, parent, time.time_ns(), "request")
        for index in range(DATA_RECORDS):
            handle.write(payload(trace, side, index))

    def end_side(self, handle: backsight.Trace, trace: Honest, side: int) -> None:
        handle.span_end(span_id(trace, side), time.time_ns())
        self.records[side] += RECORDS

    def fire(self, trace: Honest) -> None:
        self._fired.put(trace.low)
        backsight.trigger(trace.trace_id, TRIGGER, "told to")

    def say(self, *, ended: bool = False, final: bool = False) -> None:
        fired = []
        while not self._fired.empty():
            fired.append(self._fired.get())
        stats = backsight.stats()
        triggers_lost = stats.triggers_lost + stats.triggers_unattached + stats.triggers_malformed
        said = Said(
            os.getpid(), stats.attached, self.traces, sum(self.records.values()),
            stats.records_lost, triggers_lost, tuple(fired), ended or final, final,
        )  # fmt: skip
        with self._output:
            print(json.dumps(asdict(said)), flush=True)


class Service(Client):
    """A front, which begins traces, and a back, which the other node's front calls."""

    def __init__(self, node: str, run: int, aim: Path, traces_per_s: float, every: int) -> None:
        super().__init__(node, run)
        with aim.open("r+b") as file:
            self._aim = mmap.mmap(file.fileno(), 0)
        self._interval_s = 1 / traces_per_s
        self._every = every
        self._ends = threading.Event()
        self._late: collections.deque[tuple[float, Honest]] = collections.deque()

    def answer(self, listener: socket.socket) -> None:
        """The back."""
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            for line in stream:
                trace_id, fires, context = line.rstrip("\n").split(" ", 2)
                trace = honest(bytes.fromhex(trace_id), self.run)
                assert trace is not None
                with backsight.Trace(trace.trace_id) as handle:
                    self.write_side(handle, trace, 1, context)
                    self.end_side(handle, trace, 1)
                    if int(fires):
                        # While the front is in the midst of it.
                        self.fire(trace)
                stream.write(backsight.node_ref() + "\n")
                stream.flush()

    def begin_traces(self, peer: IO[str]) -> None:
        """The front, at its rate."""
        next_s = time.monotonic()
        number = 0
        while not self._ends.is_set():
            now_s = time.monotonic()
            while self._late and self._late[0][0] <= now_s:
                self.fire(self._late.popleft()[1])
            if now_s < next_s:
                time.sleep(next_s - now_s)
                continue
            next_s = max(next_s + self._interval_s, now_s - _BEHIND_MAX_S)
            # By turns: here at the end, on the other node in the midst of it, here later.
            fires = -1 if number % self._every else number // self._every % 3
            self.request(Honest(self.run, number, self.front), peer, fires)
            number += 1
        while self._late:
            self.fire(self._late.popleft()[1])

    def request(self, trace: Honest, peer: IO[str], fires: int) -> None:
        with backsight.Trace(trace.trace_id) as handle:
            self.write_side(handle, trace, 0)
            context = handle.serialize(span_id(trace, 0))
            peer.write(f"{trace.trace_id.hex()} {int(fires == 1)} {context}\n")
            peer.flush()
            handle.breadcrumb(peer.readline().strip())
            self.end_side(handle, trace, 0)
        self.traces += 1
        struct.pack_into("=Q", self._aim, 8, trace.low)
        if fires == 0:
            self.fire(trace)
        elif fires == 2:
            self._late.append((time.monotonic() + _LATE_S, trace))

    def serve(self, port: int, peer: str) -> None:
        listener = socket.create_server(("", port))
        threading.Thread(target=self.answer, args=(listener,), daemon=True).start()
        self.say()
        sys.stdin.readline()
        with (
            socket.create_connection((peer, port)) as connection,
            connection.makefile("rw") as other,
        ):
            thread = threading.Thread(target=self.begin_traces, args=(other,))
            thread.start()
            ends = threading.Thread(target=self._wait_for_end, daemon=True)
            ends.start()
            while not self._ends.wait(_SAY_EVERY_S):
                self.say()
            thread.join()
            # The other's front may still call us.
            self.say(ended=True)
            sys.stdin.readline()

    def _wait_for_end(self) -> None:
        sys.stdin.readline()
        self._ends.set()


def visit(client: Client, first: int, count: int) -> None:
    """Traces of a process that came while the node is attacked."""
    for number in range(first, first + count):
        trace = Honest(client.run, number, client.front, alone=True)
        with backsight.Trace(trace.trace_id) as handle:
            client.write_side(handle, trace, 0)
            client.end_side(handle, trace, 0)
        client.traces += 1
        client.fire(trace)


def become(uid: int) -> None:
    """As that user. It dies with who started it still, who is told by the end of its input."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind, node, uid, run, *rest = sys.argv[1:]
    client: Client
    match kind, rest:
        case "serve", [port, peer, aim, traces_per_s, every]:
            service = Service(node, int(run, 16), Path(aim), float(traces_per_s), int(every))
            become(int(uid))
            backsight.wait_attached(_ATTACH_TIMEOUT_S)
            service.serve(int(port), peer)
            client = service
        case "visit", [first, count]:
            client = Client(node, int(run, 16))
            become(int(uid))
            if backsight.wait_attached(_ATTACH_TIMEOUT_S):
                visit(client, int(first), int(count))
        case _:
            raise SystemExit(__doc__)
    client.say(final=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
