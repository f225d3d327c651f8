# SPDX-License-Identifier: Apache-2.0
"""What an operator asks the journal by: the trigger, the trace, the node and the reason of an entry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from appliance.core.dataplane import NO_CLIENT, LocalTrigger
from appliance.daemon import Daemon
from coordinator.server import CoordinatorServer
from protocol.messages import Source, TraceId
from runtime.log import Entry, Level, Log, MessageId
from runtime.service_manager import ServiceManager
from runtime.settings.coordinator import Settings, StoreSettings
from runtime.settings.node import CoordinatorSettings, MetricsSettings
from runtime.settings.node import Settings as NodeSettings
from testbed.ports import free_port

TRACE = TraceId(bytes(range(16)))
WHY = "1.9 s, p99 is 0.4 s"


class Journal:
    """All that was said, with its fields."""

    def __init__(self, **fields: str) -> None:
        self._said: asyncio.Queue[Entry] = asyncio.Queue()
        self.log = Log(self._said.put_nowait, Level.DEBUG, **fields)

    async def fields_of(self, text: str) -> Mapping[str, str]:
        """Of the next entry that has this text in it."""
        while text not in (entry := await self._said.get()).message:
            pass
        return entry.fields


def test_a_trigger_is_found_by_its_name_its_trace_its_node_and_its_reason(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    node_settings = NodeSettings(
        "alpha",
        str(tmp_path / "node.sock"),
        CoordinatorSettings(endpoint),
        pool_bytes=4 << 20,
        metrics=MetricsSettings(None),
    )
    settings = Settings(endpoint, store=StoreSettings(str(tmp_path / "t.sqlite")))

    async def run() -> None:
        of_node, of_coordinator = Journal(node="alpha"), Journal()
        with ServiceManager(None) as manager:
            async with Daemon(node_settings, 1, manager, (), of_node.log) as node:
                running = asyncio.ensure_future(node.run())
                missing = await of_node.fields_of("no coordinator at")
                async with CoordinatorServer(settings, 1, of_coordinator.log):
                    assert await of_coordinator.fields_of("node alpha connected") == {
                        "NODE": "alpha",
                        "MESSAGE_ID": MessageId.CONNECTED,
                    }
                    node.fire(
                        LocalTrigger(
                            NO_CLIENT, time.monotonic_ns(), "slow", TRACE, (), WHY, Source.NODE
                        )
                    )
                    assert await of_node.fields_of("trigger slow fired") == {
                        "NODE": "alpha",
                        "TRIGGER": "slow",
                        "TRACE_ID": TRACE.hex(),
                        "REASON": WHY,
                    }
                    verdict = await of_coordinator.fields_of(f"trace {TRACE.hex()} is ")
                    assert verdict["TRACE_ID"] == TRACE.hex()
                    assert verdict["VERDICT"] == "partial"
                    assert verdict["REASON"].startswith("never_seen alpha: ")
                gone = await of_node.fields_of("no coordinator at")
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        for fields in missing, gone:
            assert fields["NODE"] == "alpha"
            assert fields["MESSAGE_ID"] == MessageId.DISCONNECTED
            assert fields["REASON"]

    asyncio.run(run())
