# SPDX-License-Identifier: Apache-2.0
"""How processes write: handles, the runs of a thread, what is lost where nothing has room."""

from __future__ import annotations

from dataclasses import replace

from formats.records import Body, Breadcrumb, HopIn
from formats.slices import RunFlags
from protocol.messages import TraceId
from testbed.encoding import encode_record
from tests.simulation.pool.state import (
    RUN_BYTES,
    ClientModel,
    Handle,
    Loss,
    NodeState,
    Record,
    Run,
    ThreadModel,
)

TOO_LONG = b"\xff\xff"  # as the size of a payload
LOSSES_MAX = 64  # of a thread, that the node was not told yet


class Writing:
    """What the client library does in all processes."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def open(self, client: ClientModel, trace: TraceId) -> Handle:
        handle = Handle(trace, client, client.next_handle)
        client.next_handle += 1
        client.open.add(handle.number)
        return handle

    def write(self, handle: Handle, thread: int, body: Body, ticks: int) -> bool:
        """Write one record; False when it was lost."""
        encoded = encode_record(body, ticks)
        self._state.counters.payload_bytes += len(encoded)
        writer = handle.client.threads.setdefault(thread, ThreadModel())
        run = self._run_with_room(writer, handle, len(encoded))
        if run is None:
            self._state.counters.records_lost += 1
            return False
        run.data += encoded
        assert run.segment is not None
        run.segment.used_bytes += len(encoded)
        is_crumb = isinstance(body, Breadcrumb | HopIn) and body.node_id != self._state.node_id
        crumb = body.node_id if is_crumb else None  # type: ignore[union-attr]
        run.records.append(Record(len(encoded), ticks, crumb))
        return True

    @staticmethod
    def break_last(handle: Handle, thread: int) -> None:
        """The record that it wrote last says that it is longer than any may be."""
        run = handle.client.threads[thread].run
        assert run is not None
        last = run.records[-1]
        run.records[-1] = replace(last, is_broken=True)
        at = len(run.data) - last.size
        run.data[at : at + len(TOO_LONG)] = TOO_LONG

    def close(self, handle: Handle, thread: int) -> None:
        """Close the handle: its last run says so."""
        handle.closed = True
        handle.client.open.discard(handle.number)
        writer = handle.client.threads.setdefault(thread, ThreadModel())
        run = writer.run if self._is_of(writer.run, handle) else None
        # The last must be the one with the highest number.
        if run is not None and run.segment is not None and run.seq + 1 != handle.next_seq:
            self._end_run(writer)
        if not self._is_of(writer.run, handle) and handle.next_seq:
            self._end_run(writer)
            self._begin_run(writer, handle, 0)
        if self._is_of(writer.run, handle):
            self._end_run(writer, RunFlags.LAST)
        for other in handle.client.threads.values():
            if self._is_of(other.run, handle):
                self._end_run(other)

    @staticmethod
    def _is_of(run: Run | None, handle: Handle) -> bool:
        return run is not None and run.client is handle.client and run.handle == handle.number

    def _fits(self, writer: ThreadModel, size: int) -> bool:
        """Whether so much has room in the thread's segment."""
        if writer.segment is None:
            return False
        return self._state.config.segment_bytes - writer.segment.used_bytes >= size

    def _take_segment(self, writer: ThreadModel, client: ClientModel) -> bool:
        if not client.stock:
            return False
        if writer.segment is not None:
            writer.left.append(writer.segment)
        writer.segment = client.stock.popleft()
        return True

    def _begin_run(self, writer: ThreadModel, handle: Handle, size: int) -> None:
        flags = RunFlags.LOSSY if handle.lossy else RunFlags.NONE
        if handle.next_seq == 0:
            flags |= RunFlags.FIRST
        segment = None
        if self._fits(writer, RUN_BYTES + size) or self._take_segment(writer, handle.client):
            segment = writer.segment
        run = Run(handle.trace, handle.client, handle.number, handle.next_seq, flags, segment)
        handle.next_seq += 1
        writer.run = run
        if segment is None:
            handle.lossy = True
            run.flags |= RunFlags.LOSSY
            # At once: the process may be killed before the run is closed.
            self._tell(writer, run, run.flags & RunFlags.FIRST)
        else:
            segment.used_bytes += RUN_BYTES
            segment.runs.append(run)
            run.granted_ns = segment.granted_ns
            writer.fresh.append(run)

    def _end_run(self, writer: ThreadModel, flags: RunFlags = RunFlags.NONE) -> None:
        run = writer.run
        if run is None:
            return
        writer.run = None
        if run.segment is not None:
            run.flags |= flags | RunFlags.CLOSED
        elif RunFlags.LAST in flags:
            self._tell(writer, run, flags)

    @staticmethod
    def _tell(writer: ThreadModel, run: Run, flags: RunFlags) -> None:
        """Tell of a run that was lost. The last place is kept for the end of a handle."""
        if len(writer.losses) < LOSSES_MAX - (RunFlags.LAST not in flags):
            writer.losses.append(Loss(run.trace, run.handle, flags))
        else:
            writer.untold += 1

    def _run_with_room(self, writer: ThreadModel, handle: Handle, size: int) -> Run | None:
        while True:
            if not self._is_of(writer.run, handle):
                self._end_run(writer)
                self._begin_run(writer, handle, size)
            run = writer.run
            assert run is not None
            if run.segment is None:
                if not self._fits(writer, RUN_BYTES + size) and not self._take_segment(
                    writer, handle.client
                ):
                    return None
            elif self._fits(writer, size):
                return run
            self._end_run(writer)
