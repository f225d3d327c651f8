# SPDX-License-Identifier: Apache-2.0
"""What is remembered of closed traces, and for how long: the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ValuesView
from dataclasses import dataclass

from coordinator.core.config import CoordinatorConfig
from coordinator.core.verdict import HEALABLE, UNJUDGED, ReasonKind, Verdict, deleted
from protocol.messages import NodeId, TraceId


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is remembered of a closed trace: its slices' epochs and lengths, and the verdict.

    ``stored_bytes`` as in Trace.
    """

    slices: dict[NodeId, tuple[int, int]]
    verdict: Verdict | None
    stored_bytes: int

    @property
    def items(self) -> int:
        """What it takes of the memory, in pieces of some 150 bytes."""
        reasons = len(self.verdict.reasons) if self.verdict is not None else 0
        return 2 + len(self.slices) + 2 * reasons

    @property
    def is_empty(self) -> bool:
        """Nobody had anything: whoever has it after all begins it anew."""
        if any(length for _, length in self.slices.values()):
            return False
        return (
            self.verdict is None
            or self.verdict.version == UNJUDGED
            or all(
                reason.kind in HEALABLE or reason.kind is ReasonKind.NEVER_SEEN
                for reason in self.verdict.reasons
            )
        )

    @property
    def verdict_if_deleted(self) -> Verdict | None:
        """What is true of the trace if the store has nothing of it any more."""
        if self.verdict is None or not self.verdict.bytes:
            return self.verdict  # it speaks of no bytes
        return deleted(self.verdict)

    def slice_of(self, node: NodeId) -> tuple[int, int]:
        """Epoch and length of what it had from that node; zeros without any."""
        return self.slices.get(node, (0, 0))


class ClosedTraces:
    """Outcomes by trace, bounded by ``closed_max`` and, for what is in them, ``evidence_max``."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._outcomes: OrderedDict[TraceId, Outcome] = OrderedDict()
        self._items = 0

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other bounds, from the next trace on."""
        self._config = config

    def __len__(self) -> int:
        return len(self._outcomes)

    def __contains__(self, trace: TraceId) -> bool:
        return trace in self._outcomes

    def get(self, trace: TraceId) -> Outcome | None:
        return self._outcomes.get(trace)

    def values(self) -> ValuesView[Outcome]:
        return self._outcomes.values()

    def remember(self, trace: TraceId, outcome: Outcome) -> None:
        """A trace is closed; others may be forgotten for it."""
        config = self._config
        self._outcomes[trace] = outcome
        self._items += outcome.items
        while len(self._outcomes) > config.closed_max or self._items > config.evidence_max:
            _, forgotten = self._outcomes.popitem(last=False)
            self._items -= forgotten.items

    def take(self, trace: TraceId) -> Outcome | None:
        """What was remembered of a trace that is not closed any more."""
        outcome = self._outcomes.pop(trace, None)
        if outcome is not None:
            self._items -= outcome.items
        return outcome
