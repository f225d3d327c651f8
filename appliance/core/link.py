# SPDX-License-Identifier: Apache-2.0
"""One coordinator, as a node's core knows it: its two streams, what it said, what it is owed.

All that concerns one coordinator is here, and nothing else is. Where trace ids are sharded over
several (protocol.hashing.shard), a node has one for each; there is one so far.
"""

from __future__ import annotations

from appliance.core.config import NodeConfig
from appliance.core.holdings import Holdings
from appliance.core.owed import Owed
from protocol.messages import (
    CLOCK_STEP_NS,
    ClockProbe,
    Hello,
    NodeMessage,
    SliceChunk,
    Welcome,
)
from protocol.versions import Agreed, Feature, Incompatible, Versions, check


class Link:
    """See the module. ``owed`` is what this coordinator must hear of."""

    def __init__(
        self, config: NodeConfig, holdings: Holdings, incarnation: int, versions: Versions
    ) -> None:
        self.owed = Owed(config, holdings)
        self.refused: str | None = None
        """Why the coordinator refused this node, or must not be heard, for the operator."""
        self.agreed: Agreed | None = None
        """What is spoken with the coordinator, since it welcomed this node."""
        self.connected = False
        """There is a Control stream."""
        self.slices_connected = False
        self.slices_number = 0
        """Of the last Slices stream."""
        self.credit_bytes = 0
        self._config = config
        self._incarnation = incarnation
        self._versions = versions
        self._hello_due: Hello | None = None
        # Unix time minus CLOCK_MONOTONIC, as far as the coordinator knows.
        self._told_offset_ns: int | None = None

    # --------------------------------------------------------------- control

    def connect(self, addresses: tuple[str, ...]) -> None:
        """A Control stream is there; the coordinator hears who this is, and by which addresses."""
        self._forget()
        self.connected = True
        config = self._config
        self._hello_due = Hello(
            config.node, self._incarnation, addresses, self._versions, config.software
        )

    def disconnect(self) -> None:
        """A Control stream ended, or could not be had."""
        if not self.connected:
            self.refused = None  # who said so is not there
        self._forget()

    def _forget(self) -> None:
        self.connected = False
        self.agreed = None
        self._hello_due = None
        self._told_offset_ns = None
        self.owed.close()

    def welcome(self, welcome: Welcome) -> bool:
        """Go on as was agreed; False if nothing was that this node can speak."""
        try:
            self.agreed = check(welcome.agreed, self._versions)
        except Incompatible as error:
            self.refused = str(error)
            return False
        self.refused = None
        return True

    def probe(self, probe: ClockProbe, now_ns: int, realtime_ns: int) -> None:
        """Tell what both clocks show."""
        self._told_offset_ns = realtime_ns - now_ns
        self.owed.clock_reply(probe.number, realtime_ns)

    def on_clock(self, now_ns: int, realtime_ns: int) -> None:
        """A coordinator that is not told of a step goes on with an offset that was."""
        told_ns, offset_ns = self._told_offset_ns, realtime_ns - now_ns
        if told_ns is not None and abs(offset_ns - told_ns) > CLOCK_STEP_NS:
            self._told_offset_ns = offset_ns
            self.owed.clock_stepped(told_ns + now_ns, realtime_ns)

    def take_control(self, now_ns: int, realtime_ns: int) -> list[NodeMessage]:
        """Messages for the Control stream, in order; none while it is down."""
        messages: list[NodeMessage] = []
        if not self.connected:
            return messages
        if self._hello_due is not None:
            messages.append(self._hello_due)
            self._hello_due = None
        if self.owed.is_open:
            messages += self.owed.take(now_ns, realtime_ns)
        return messages

    def next_control_ns(self, now_ns: int) -> int | None:
        """When take_control() may have something without a new fact."""
        return now_ns if self._hello_due is not None else self.owed.next_due_ns(now_ns)

    # ---------------------------------------------------------------- slices

    def connect_slices(self, number: int) -> None:
        """A Slices stream came, which gives credit."""
        self.slices_connected = True
        self.slices_number = number
        self.credit_bytes = 0

    def disconnect_slices(self) -> None:
        """It went, with its credit."""
        self.slices_connected = False
        self.credit_bytes = 0

    @property
    def may_send_on_control(self) -> bool:
        """Whether the coordinator takes small chunks now with what it is told of them."""
        known = self.agreed is not None and Feature.CONTROL_CHUNKS in self.agreed.features
        return known and self.may_send

    @property
    def may_send(self) -> bool:
        """Whether the coordinator takes bytes now."""
        return self.slices_connected and self.credit_bytes > 0

    def sent(self, chunk: SliceChunk) -> None:
        """Its bytes are on their way."""
        self.credit_bytes -= len(chunk.data)
