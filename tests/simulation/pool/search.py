# SPDX-License-Identifier: Apache-2.0
"""The search for a trace in the pool, and the verdict whether all of it was found."""

from __future__ import annotations

from dataclasses import dataclass

from formats.slices import PieceKind, RunFlags
from protocol.messages import SliceFlags
from testbed.encoding import encode_piece
from tests.simulation.pool.losses import TRACE_NS, Losses
from tests.simulation.pool.segments import Gone, Segments
from tests.simulation.pool.state import ClientModel, NodeState, Run
from tests.simulation.pool.store import ReportStore, SliceModel


@dataclass(slots=True)
class Met:
    """What a search met of one handle."""

    client: ClientModel
    live: bool
    first: bool = False
    begun: bool = False
    last: bool = False
    lossy: bool = False
    cut: bool = False
    runs: int = 0
    seq_max: int = 0

    def has_gap(self) -> bool:
        """Whether runs are missing; of one that goes on they may be on their way."""
        if self.lossy or self.cut:
            return not self.lossy
        if self.live and not self.last:
            return False
        return not self.first or self.runs < self.seq_max + 1


class Search:
    """Through all segments, for one trace."""

    def __init__(
        self, state: NodeState, store: ReportStore, gone: Gone, segments: Segments, losses: Losses
    ) -> None:
        self._state = state
        self._store = store
        self._gone = gone
        self._segments = segments
        self._losses = losses

    def end_all(self) -> None:
        for found in self._store.slices.values():
            if found.searched_at_ns is not None and found.searched_at_ns <= self._state.now_ns:
                self.run(found)

    def run(self, found: SliceModel) -> None:
        """Copy all that is there, and judge whether it is all that was."""
        if not found.is_peek:
            self._store.watch()
        why = self._gone.why(found.trace)
        met: dict[tuple[int, int], Met] = {}
        untied_from_ns: int | None = None
        active_ns = 0
        for segment in self._segments.in_order():
            for run in segment.runs:
                if run.trace != found.trace:
                    continue
                self._store.copy(found, run)
                for record in run.readable_from(0):
                    active_ns = max(active_ns, record.ticks)
                untied_from_ns = self._untied_from(run, untied_from_ns)
                self._meet(met, run)
        for client, loss in found.losses:
            one = met.setdefault((client.number, loss.handle), Met(client, client.live))
            one.lossy = True
            one.begun |= RunFlags.FIRST in loss.flags
            one.last |= RunFlags.LAST in loss.flags
        found.losses.clear()
        found.searched_at_ns = None
        found.flags |= why & (SliceFlags.EVICTED | SliceFlags.ABANDONED | SliceFlags.LOSSY)
        if any(m.has_gap() for m in met.values()):
            found.flags |= SliceFlags.EVICTED
        elif SliceFlags.EVICTED in why:
            found.flags |= SliceFlags.BY_FINGERPRINT
        left_out = self._state.is_left_out(found.trace)
        if left_out or self._is_maybe_lossy(met, untied_from_ns, active_ns):
            found.flags |= SliceFlags.MAYBE_LOSSY
        lacks_runs = SliceFlags.LOSSY in found.flags or SliceFlags.EVICTED in why
        self._end_lost(found, met, lacks_runs=lacks_runs)
        if any(m.live and m.last and not m.begun for m in met.values()):
            found.ends_forgotten = True
        if not found.is_peek:
            self._store.touch(found)

    def copied_so_far(self, found: SliceModel) -> int:
        """While it is searched for, which says nothing: first nothing, then all."""
        assert found.searched_at_ns is not None
        if found.searched_at_ns - self._state.now_ns > self._state.config.search_ns // 2:
            return 0
        runs = (run for segment in self._segments.in_order() for run in segment.runs)
        return sum(len(run.data) for run in runs if run.trace == found.trace)

    def _meet(self, met: dict[tuple[int, int], Met], run: Run) -> None:
        one = met.setdefault((run.client.number, run.handle), Met(run.client, run.client.live))
        one.live = run.client.live
        one.first |= RunFlags.FIRST in run.flags
        one.begun |= one.first
        one.last |= RunFlags.LAST in run.flags
        one.lossy |= RunFlags.LOSSY in run.flags
        one.cut |= run.is_cut
        one.runs += 1
        one.seq_max = max(one.seq_max, run.seq)

    def _untied_from(self, run: Run, so_far_ns: int | None) -> int | None:
        client = self._state.clients.get(run.client.number)
        if client is None:
            is_concerned = self._losses.untied_to_ns + TRACE_NS >= run.granted_ns
            return 0 if is_concerned else so_far_ns
        if client.untied_ns is None or client.untied_ns[1] < run.granted_ns:
            return so_far_ns
        return min(client.untied_ns[0], client.untied_ns[0] if so_far_ns is None else so_far_ns)

    def _is_maybe_lossy(
        self, met: dict[tuple[int, int], Met], untied_from_ns: int | None, active_ns: int
    ) -> bool:
        """Whether a loss that could not be blamed on a trace was close to this one."""
        if not self._losses.untied_to_ns:
            return False
        if not met:
            return self._losses.untied_to_ns >= self._segments.gone_to_ns
        if any(not one.last for one in met.values()):
            active_ns = self._state.now_ns
        return untied_from_ns is not None and untied_from_ns <= active_ns

    def _end_lost(
        self, found: SliceModel, met: dict[tuple[int, int], Met], *, lacks_runs: bool
    ) -> None:
        """What ended without a last run: with its process, or since that run was lost, or is gone."""
        gone: dict[int, None] = {}
        for one in met.values():
            number = one.client.number
            if not one.first or one.last:
                continue
            if not one.live:
                gone[number] = None
        for number in gone:
            self._store.append(found, encode_piece(PieceKind.EXIT, client=number))
        if not lacks_runs:
            return
        for (number, handle), one in met.items():
            if one.begun and not one.last and one.live and handle not in one.client.open:
                found.end_is_lost(number, handle)
