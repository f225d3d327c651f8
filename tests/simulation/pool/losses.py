# SPDX-License-Identifier: Apache-2.0
"""What processes lost: of which trace, as far as they can tell, and which slices are suspect."""

from __future__ import annotations

from formats.slices import PieceKind
from protocol.messages import SliceFlags
from testbed.encoding import encode_piece
from tests.simulation.pool.segments import Gone, Segments
from tests.simulation.pool.state import ClientModel, Loss, NodeState
from tests.simulation.pool.store import ReportStore, SliceModel

TRACE_NS = 300_000_000_000
"""As in native/src/node/internal.h: what is written so long before or after is of another trace."""


class Losses:
    """What the node has heard of losses.

    Those that nobody can tell the trace of are *untied*: of them it is known between which
    two looks at a process they were.
    """

    def __init__(
        self, state: NodeState, store: ReportStore, gone: Gone, segments: Segments
    ) -> None:
        self._state = state
        self._store = store
        self._gone = gone
        self._segments = segments
        self.untied_to_ns = 0
        self.told_ns = 0

    def read(self, client: ClientModel) -> None:
        untied = False
        for thread in client.in_turn():
            for loss in thread.losses:
                self._gone.remember(loss.trace, SliceFlags.LOSSY)
                found = self._store.slices.get(loss.trace)
                if found is not None:
                    self._tell(found, client, loss)
            thread.losses.clear()
            untied |= thread.untold != thread.untold_seen
            thread.untold_seen = thread.untold
        if untied:
            self._lose_untied(client)
        client.losses_read_ns = self._state.now_ns

    def suspect(self) -> None:
        """Slices of which something may have been lost so, as far as nobody has looked yet."""
        for client in self._state.in_turn:
            since_ns, client.untied_news_ns = client.untied_news_ns, None
            if since_ns is not None:
                self._suspect_since(client, since_ns)

    def restart(self) -> None:
        """When a new daemon's predecessor looked at processes is not known."""
        for client in self._state.in_turn:
            client.untied_ns = None
            client.losses_read_ns = 0
            for thread in client.in_turn():
                thread.untold_seen = 0

    def _tell(self, found: SliceModel, client: ClientModel, loss: Loss) -> None:
        self._store.count(found, client, loss.handle, loss.flags, is_new=True)
        found.flags |= SliceFlags.LOSSY
        if found.searched_at_ns is not None:
            found.losses.append((client, loss))
        self._store.introduce(found, client)
        piece = encode_piece(PieceKind.LOSS, flags=loss.flags, client=client.number)
        self._store.append(found, piece)
        self._store.touch(found)

    def _lose_untied(self, client: ClientModel) -> None:
        """It lost something of nobody knows which traces, since the last look."""
        before, since_ns = client.untied_ns, max(0, client.losses_read_ns - TRACE_NS)
        begin_ns = since_ns
        is_left = any(
            s.granted_ns <= client.untied_granted_ns for s in self._segments.in_use(client)
        ) or self._segments.has_kept(client)
        if before is not None and since_ns >= before[0] and is_left:
            begin_ns = before[0]
        client.untied_granted_ns = self._segments.granted_ns + TRACE_NS
        self.untied_to_ns = max(self._segments.granted_ns, self._state.now_ns)
        client.untied_ns = (begin_ns, self.untied_to_ns + TRACE_NS)
        news_ns = max(client.losses_read_ns, self.told_ns)
        if client.losses_read_ns:
            news_ns = max(0, news_ns - TRACE_NS)
        if client.untied_news_ns is None or news_ns < client.untied_news_ns:
            client.untied_news_ns = news_ns

    def _suspect_since(self, client: ClientModel, since_ns: int) -> None:
        for found in self._store.slices.values():
            if SliceFlags.MAYBE_LOSSY in found.flags:
                continue
            is_since = found.changed_ns >= since_ns
            has_part = client.number in found.open
            if has_part and (found.open[client.number] > 0 or is_since):
                found.flags |= SliceFlags.MAYBE_LOSSY
                self._store.touch(found)
