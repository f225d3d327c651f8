# SPDX-License-Identifier: Apache-2.0
"""The report store: the slices of collected traces, what is copied into them, and what room they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.core.dataplane import Slice, SliceChanged, StoreFull, StoreUsage
from formats.slices import PieceKind, RunFlags
from protocol.messages import CRUMBS_MAX, Group, NodeId, SliceFlags, TraceId
from testbed.encoding import encode_clock, encode_piece, encode_process
from tests.simulation.pool.state import ClientModel, Loss, NodeState, Run

BLOCK_BYTES = 2048
BLOCK_CONTENT_BYTES = 2048 - 32
TICKS_PER_S = 1_000_000_000

_PIECE_BYTES = len(encode_piece(PieceKind.RUN))


@dataclass(slots=True, eq=False)
class SliceModel:
    """A collected trace in the report store.

    ``copied``: bytes of each run that are in it. ``open`` counts handles by client: those
    in ``opened``, and ``unlisted`` ones, of which a predecessor knew which they are. Of those
    in ``ended`` the end was met, and no beginning, and whether it was counted for an unlisted
    one. After a restart, and where an end with losses had no beginning (``ends_forgotten``),
    the process is asked which are open.
    ``searched_at_ns``: when the search is over; None: it is. ``losses``: those that were
    told while it was searched for.
    """

    trace: TraceId
    group: Group
    epoch: int
    collected_ns: int
    changed_ns: int
    data: bytearray = field(default_factory=bytearray)
    trimmed_bytes: int = 0
    base_bytes: int = 0
    blocks: int = 1
    flags: SliceFlags = SliceFlags.NONE
    crumbs: dict[NodeId, None] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    opened: set[tuple[int, int]] = field(default_factory=set)
    ended: dict[tuple[int, int], bool] = field(default_factory=dict)
    ends_forgotten: bool = False
    unlisted: dict[int, int] = field(default_factory=dict)
    copied: dict[Run, int] = field(default_factory=dict)
    introduced: set[int] = field(default_factory=set)
    clock: tuple[int, int] | None = None
    searched_at_ns: int | None = None
    losses: list[tuple[ClientModel, Loss]] = field(default_factory=list)
    is_peek: bool = False

    @property
    def bytes(self) -> int:
        return self.base_bytes + len(self.data)

    @property
    def open_handles(self) -> int:
        return sum(self.open.values())

    def begin_handle(self, client: ClientModel, handle: int) -> None:
        one = (client.number, handle)
        if one in self.ended:
            if self.ended.pop(one):
                self._count_unlisted(client.number, 1)
        elif one in self.opened:
            pass
        elif self.ends_forgotten and handle not in client.open:
            self.ended[one] = False
        else:
            self.opened.add(one)
            self.open[client.number] += 1

    def end_handle(self, client: int, handle: int) -> None:
        """It counts once, also if its beginning is met later, or is gone."""
        one = (client, handle)
        if one in self.ended:
            return
        if one in self.opened:
            self.opened.remove(one)
            self.open[client] -= 1
            return
        self.ended[one] = self.unlisted.get(client, 0) > 0
        if self.ended[one]:
            self._count_unlisted(client, -1)

    def end_is_lost(self, client: int, handle: int) -> None:
        """If it comes all the same, it counts no more."""
        one = (client, handle)
        if one in self.opened:
            self.end_handle(client, handle)
            self.ended[one] = False

    def _count_unlisted(self, client: int, count: int) -> None:
        self.unlisted[client] += count
        self.open[client] += count

    def close_all(self, client: int) -> None:
        self.opened = {one for one in self.opened if one[0] != client}
        self.ended = {one: took for one, took in self.ended.items() if one[0] != client}
        self.open[client] = self.unlisted[client] = 0

    def forget_handles(self) -> None:
        """A successor knows whose it is and how many are open, and not which."""
        self.opened.clear()
        self.ended.clear()
        self.ends_forgotten = self.searched_at_ns is None
        self.unlisted = {number: count for number, count in self.open.items() if count}

    def state(self) -> tuple[int, SliceFlags, int, int]:
        """What a change of is told."""
        return self.bytes, self.flags, len(self.crumbs), self.open_handles


class ReportStore:
    """All slices of a node."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.slices: dict[TraceId, SliceModel] = {}
        self.clock = (0, 0)
        # In the C library the first of a store is random; here no two are the same.
        self._next_epoch = 1
        self._blocks = 0
        self._changed: dict[TraceId, None] = {}
        self._full: dict[TraceId, None] = {}
        self.was_full_for: set[TraceId] = set()
        self.ever_collected: set[TraceId] = set()
        """Two for the simulator's oracle, which wants to know for ever."""

    # ------------------------------------------------------------ slices

    def new(self, trace: TraceId, group: Group) -> SliceModel | None:
        """One that is to be searched for; None: there is no room."""
        if self._blocks >= self._blocks_max:
            self.was_full_for.add(trace)
            return None
        now_ns = self._state.now_ns
        found = SliceModel(trace, group, self._next_epoch, now_ns, now_ns)
        found.searched_at_ns = now_ns + self._state.config.search_ns
        self._next_epoch += 1
        self.slices[trace] = found
        self.ever_collected.add(trace)
        self._blocks += 1
        self.touch(found)
        return found

    def drop(self, trace: TraceId) -> bool:
        """False: it is not there."""
        found = self.slices.pop(trace, None)
        if found is not None:
            self._blocks -= found.blocks
            self._full.pop(trace, None)
        return found is not None

    def view(self, found: SliceModel, size: int) -> Slice:
        """``size``: while it is searched for it says nothing."""
        searching = found.searched_at_ns is not None
        return Slice(
            found.trace,
            found.group,
            found.epoch,
            size,
            found.trimmed_bytes,
            found.collected_ns,
            found.changed_ns,
            0 if searching else found.open_handles,
            SliceFlags.NONE if searching else found.flags,
            () if searching else tuple(found.crumbs),
            searching,
        )

    def has_copied(self, trace: TraceId) -> bool:
        """Whether all that is there of it is in its slice."""
        found = self.slices.get(trace)
        return found is not None and found.searched_at_ns is None

    def read(self, trace: TraceId, offset: int, size: int) -> bytes:
        found = self._searched(trace)
        if offset < found.trimmed_bytes:
            raise ValueError(f"offset {offset} was trimmed at {found.trimmed_bytes}")
        begin = offset - found.base_bytes
        return bytes(found.data[begin : begin + size])

    def trim(self, trace: TraceId, offset: int) -> None:
        found = self._searched(trace)
        found.trimmed_bytes = max(found.trimmed_bytes, min(offset, found.bytes))
        whole = (found.trimmed_bytes - found.base_bytes) // BLOCK_CONTENT_BYTES
        del found.data[: whole * BLOCK_CONTENT_BYTES]
        found.base_bytes += whole * BLOCK_CONTENT_BYTES
        self._count_blocks(found)

    def usage(self) -> StoreUsage:
        # The C library's first block is the header, which counts.
        return StoreUsage(self._blocks * BLOCK_BYTES, self._blocks_max * BLOCK_BYTES)

    def changes(self) -> list[SliceChanged | StoreFull]:
        """Since the last call."""
        full = [StoreFull(trace) for trace in self._full]
        changed = [SliceChanged(trace) for trace in self._changed if trace in self.slices]
        self._full.clear()
        self._changed.clear()
        return [*full, *changed]

    def told(self, trace: TraceId) -> None:
        """All that changed in it until now somebody knows."""
        self._changed.pop(trace, None)

    def restart(self) -> None:
        """What a new daemon makes of them. What was not told it tells."""
        self._full.clear()
        self._changed.clear()
        for found in self.slices.values():
            found.introduced.clear()
            found.clock = None
            found.forget_handles()
            self._changed[found.trace] = None
            if found.searched_at_ns is not None:
                self._empty(found)
                found.searched_at_ns = self._state.now_ns + self._state.config.search_ns

    def lose_all(self) -> list[TraceId]:
        """All slices, and nobody hears of what changed in them."""
        lost = list(self.slices)
        self.slices.clear()
        self._blocks = 0
        self._full.clear()
        self._changed.clear()
        return lost

    # ----------------------------------------------------------- copying

    def doubt(self, is_left_out: Callable[[TraceId], bool]) -> None:
        """Of these, something may not have been recorded."""
        for found in self.slices.values():
            if SliceFlags.MAYBE_LOSSY not in found.flags and is_left_out(found.trace):
                found.flags |= SliceFlags.MAYBE_LOSSY
                self.touch(found)

    def touch(self, found: SliceModel) -> None:
        found.changed_ns = self._state.now_ns
        self._changed[found.trace] = None

    def watch(self) -> None:
        """Copy what collected traces wrote since."""
        for client in self._state.in_turn:
            for thread in client.in_order_of_taking():
                for run in thread.fresh:
                    self.serve(run)
                thread.fresh = [run for run in thread.fresh if RunFlags.CLOSED not in run.flags]

    def serve(self, run: Run) -> None:
        found = self.slices.get(run.trace)
        if found is None or found.searched_at_ns is not None:
            return
        before = found.state()
        untied_ns = run.client.untied_ns
        if run not in found.copied and untied_ns is not None and untied_ns[1] >= run.granted_ns:
            found.flags |= SliceFlags.MAYBE_LOSSY
        self.copy(found, run)
        if found.state() != before:
            self.touch(found)

    def copy(self, found: SliceModel, run: Run) -> None:
        """Append a run to its trace's slice, or what it grew by."""
        flags = run.flags & ~RunFlags.CLOSED
        copied = found.copied.get(run)
        is_new, begin = copied is None, copied or 0
        is_open = RunFlags.CLOSED not in run.flags and run.client.live
        if is_open and copied == len(run.data):
            return
        self.count(found, run.client, run.handle, flags, is_new=is_new)
        found.flags |= lossy(run.flags)
        fresh = bytes(run.data[begin:])
        found.copied[run] = len(run.data)
        if not fresh and not is_new and not flags & (RunFlags.LAST | RunFlags.LOSSY):
            return
        self.introduce(found, run.client)
        records = run.readable_from(begin)
        whole = sum(record.size for record in records)
        if whole < len(fresh):
            found.flags |= SliceFlags.CORRUPT
        for record in records:
            self._add_crumb(found, record.crumb)
        if (
            whole
            and found.clock != self.clock
            and self.append(found, encode_clock(*self.clock, TICKS_PER_S))
        ):
            found.clock = self.clock
        fits, room = whole, self._state.config.trace_bytes_max - found.bytes - _PIECE_BYTES
        if fits > room:
            found.flags |= SliceFlags.TRUNCATED
            fits = 0
            for record in records:
                if fits + record.size > room:
                    break
                fits += record.size
        if fits or not whole:
            piece = encode_piece(
                PieceKind.RUN,
                fresh[:fits],
                flags=flags,
                client=run.client.number,
                handle=run.handle,
                seq=run.seq,
                start=begin,
            )
            self.append(found, piece)

    def append(self, found: SliceModel, piece: bytes) -> bool:
        """Append a piece, or say why not; one that comes later may be smaller, or find more room."""
        if found.bytes + len(piece) > self._state.config.trace_bytes_max:
            found.flags |= SliceFlags.TRUNCATED
            return False
        if not found.is_peek:
            blocks = 1 + -(-(len(found.data) + len(piece)) // BLOCK_CONTENT_BYTES)
            if self._blocks + blocks - found.blocks > self._blocks_max:
                if SliceFlags.STORE_FULL not in found.flags:
                    self._full[found.trace] = None
                found.flags |= SliceFlags.STORE_FULL
                self.was_full_for.add(found.trace)
                return False
        found.data += piece
        found.flags |= SliceFlags.HELD
        if not found.is_peek:
            self._count_blocks(found)
        return True

    def introduce(self, found: SliceModel, client: ClientModel) -> None:
        if client.number not in found.introduced and self.append(
            found, encode_process(client.number, client.process)
        ):
            found.introduced.add(client.number)

    def count(
        self,
        found: SliceModel,
        client: ClientModel,
        handle: int,
        flags: RunFlags,
        *,
        is_new: bool,
    ) -> None:
        found.open.setdefault(client.number, 0)
        if client.live and is_new and RunFlags.FIRST in flags:
            found.begin_handle(client, handle)
        if client.live and RunFlags.LAST in flags:
            found.end_handle(client.number, handle)

    def close_gone(self) -> None:
        """What processes that are gone had open stays unfinished."""
        for found in self.slices.values():
            for number, count in found.open.items():
                client = self._state.clients.get(number)
                if count <= 0 or (client is not None and client.live):
                    continue
                found.close_all(number)
                self.append(found, encode_piece(PieceKind.EXIT, client=number))
                self.touch(found)

    # ------------------------------------------------------------ inside

    @property
    def _blocks_max(self) -> int:
        return self._state.config.store_bytes // BLOCK_BYTES

    def _searched(self, trace: TraceId) -> SliceModel:
        found = self.slices[trace]
        if found.searched_at_ns is not None:
            raise ValueError(f"{trace.hex()} is still searched for: nothing of it is known yet")
        return found

    @staticmethod
    def _add_crumb(found: SliceModel, crumb: NodeId | None) -> None:
        if crumb is None or crumb in found.crumbs:
            return
        if len(found.crumbs) < CRUMBS_MAX:
            found.crumbs[crumb] = None
        else:
            found.flags |= SliceFlags.CRUMBS_CUT

    def _count_blocks(self, found: SliceModel) -> None:
        # A slice that is trimmed in full keeps only its mark, not the block that it has begun.
        is_trimmed = found.trimmed_bytes == found.bytes
        blocks = 1 if is_trimmed else 1 + -(-len(found.data) // BLOCK_CONTENT_BYTES)
        self._blocks += blocks - found.blocks
        found.blocks = blocks

    def _empty(self, found: SliceModel) -> None:
        """Of a search that a predecessor did not end nothing is known."""
        found.data.clear()
        found.copied.clear()
        found.flags = SliceFlags.NONE
        found.crumbs.clear()
        found.open.clear()
        found.opened.clear()
        found.unlisted.clear()
        found.losses.clear()
        self._count_blocks(found)


def lossy(flags: RunFlags) -> SliceFlags:
    return SliceFlags.LOSSY if RunFlags.LOSSY in flags else SliceFlags.NONE
