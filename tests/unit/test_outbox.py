# SPDX-License-Identifier: Apache-2.0
"""The order in which the coordinator says what it decided."""

from __future__ import annotations

from coordinator.core.outbox import Outbox
from protocol.messages import Collect, Drop, Group, TraceId

FIRST, SECOND = TraceId(bytes(16)), TraceId(bytes(15) + b"\x01")
GROUP = Group("edge", FIRST)


def test_what_is_asked_for_after_a_drop_is_said_after_it() -> None:
    outbox = Outbox()
    outbox.collect(1, GROUP, FIRST)
    outbox.say(1, Drop(GROUP))
    outbox.collect(1, GROUP, SECOND)
    assert outbox.take_control() == [
        (1, Collect(GROUP, (FIRST,))),
        (1, Drop(GROUP)),
        (1, Collect(GROUP, (SECOND,))),
    ]
