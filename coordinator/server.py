# SPDX-License-Identifier: Apache-2.0
"""The coordinator's shell: gRPC on one side, the store on the other, the core between.

All of the core runs on the event loop. Facts arrive in callbacks; after the
turn in which they came, one pass fetches what the core has to say, so that
many facts make one batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from coordinator.access import warning_of_strangers
from coordinator.beside import journal_bytes
from coordinator.core.closed import UnreadableError
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.records import PutReleased, PutVerdict, StoredTrace, Write
from coordinator.counters import ServerCounters
from coordinator.operations import Operations
from coordinator.questions import Questions
from coordinator.reading import NO_STATUS, Reading
from coordinator.rpc import listener
from coordinator.rpc.admission import Admission, Who
from coordinator.rpc.budget import Budget
from coordinator.rpc.connections import Connection, connections, listening, shut_all
from coordinator.rpc.guard import Guard
from coordinator.rpc.health import SERVICE as _HEALTH_SERVICE
from coordinator.rpc.health import HealthService
from coordinator.rpc.hung_up import say_briefly
from coordinator.rpc.identity import Role
from coordinator.rpc.local import LocalDoor
from coordinator.rpc.nodes import NodeStreams
from coordinator.rpc.source_filter import keep_out
from coordinator.seed import priority_seed
from coordinator.settings import core_config, policy, store_limits
from coordinator.store.reader import StoreReader
from coordinator.store.schema import in_words
from coordinator.store.writer import Store
from counting.histogram import Histogram
from protocol.messages import TraceId
from protocol.versions import OURS, Versions
from runtime import VERSION
from runtime.health import Health
from runtime.log import Level, Log, MessageId, PeerLog
from runtime.loop_lag import LAG_BOUNDS_S, watch_loop
from runtime.main import die_if_it_fails
from runtime.schema import ConfigError
from runtime.settings.coordinator import NOBODY, Settings
from runtime.tls import LOOK_EVERY_S
from runtime.watchdog import Ask

_SERVICE = "backsight.v1.Coordinator"

# Writes, and replies, that wait for a disk which is slow, or full. Beyond, nodes
# are not listened to, and keep what they have to say; the bytes of slices are
# bounded by credit.
_UNDURABLE_WRITES_MAX = 65536

# What is due by time (verdicts, releases) waits for what is due soon after, so that it is one
# transaction: a verdict is later by half of it. A trace is judged after 200 ms of quiet.
_TICK_NS = 50_000_000

# Of what is stored, in one turn of the loop: what a node's probe of its clock may be off by then.
_RECOVERED_AT_ONCE_NS = 5_000_000

# When no read of the store has failed for so long, the next that fails is logged again. Until it can be
# read one fails more often: nodes say again what was not heard, a minute later or when they are back.
# That one works does not end it, since another page may be bad.
_READABLE_AGAIN_S = 300.0

# So many reasons are logged until then: SQLite has few, but some name what is broken.
_UNREADABLE_REASONS_MAX = 8

# At the end, for what is being sent.
_STOP_GRACE_S = 0.5


class CoordinatorServer:
    """One coordinator. Use as ``async with``; serves while it is entered."""

    def __init__(
        self,
        settings: Settings,
        incarnation: int,
        log: Log,
        versions: Versions = OURS,
        reading: Reading | None = None,
    ) -> None:
        """``reading`` follows the store; without it nothing is read, searched for, nor exported."""
        self.counters = ServerCounters()
        self._settings = settings
        self._log = log
        self.news = asyncio.Event()
        self._port = 0
        peer_log = PeerLog(log)
        self._guard = Guard(settings.tls, lambda: shut_all(self._port), log)
        self._budget = Budget(self.counters, peer_log)
        self._admission = Admission(
            self._guard.caller, self._anonymous, self._budget, self.counters, peer_log
        )
        self._door: LocalDoor | None = None
        self._loop = asyncio.get_running_loop()
        say_briefly(self._loop, peer_log)
        self._store = Store(
            settings.store_path,
            store_limits(settings.store),
            lambda token: _call_soon(self._loop, self._on_durable, token),
            log,
        )
        self._priority_seed = priority_seed(settings)
        config = core_config(settings, self._priority_seed)
        self._closed = StoreReader(settings.store_path)
        self._stored = self._closed.recover_traces(config.closed_max)
        self._core = CoordinatorCore(
            config,
            incarnation,
            self._stored,
            self._store.recover_nodes(),
            time.monotonic_ns(),
            versions,
            policy(settings.policy),
            self._closed_trace,
        )
        self._nodes = NodeStreams(
            self._core,
            self.counters,
            self._admission.caller,
            self._budget,
            self._changed,
            self.news,
            log,
            peer_log,
        )
        self._questions = Questions(
            reading,
            self._core,
            self.counters,
            self._changed,
            self._last_written,
            self.counted,
            self._described,
            log,
        )
        self._operations = Operations(self._core, self._store, self._last_written, log)
        self._reading = reading
        if reading is not None:
            reading.begin(settings, self._store, self._loop)
        self._loop_lag = Histogram(LAG_BOUNDS_S)
        self.health = Health(self.threads, self._why_not_ready)
        self._submitted = self._durable = 0  # the last tokens
        self._flush_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._recovering: asyncio.Handle | None = None
        self._said_unreadable: set[str] = set()
        self._unreadable_at_s = 0.0  # the last time
        self._server = grpc.aio.server(
            options=listener.options(identified=settings.tls is not None)
        )
        for service, handlers in self._services().items():
            guarded = self._admission.handlers(handlers)
            handler = grpc.method_handlers_generic_handler(service, guarded)
            self._server.add_generic_rpc_handlers((handler,))

    def _services(self) -> dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
        return {
            _SERVICE: {**self._nodes.handlers(), **self._asked(self._admission.caller)},
            _HEALTH_SERVICE: HealthService(self.health, (_SERVICE,)).handlers(),
        }

    def _asked(self, who: Who) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """What people call."""
        return {**self._questions.handlers(who), **self._operations.handlers(who)}

    def _anonymous(self) -> Role | None:
        """What callers are whom nobody asks who they are, beside nodes."""
        given = self._settings.access.anonymous
        return None if given == NOBODY else Role(given)

    def local_door(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Who answers on this machine; to be entered within this."""
        path = self._settings.access.socket
        if path is None:
            return contextlib.nullcontext()
        self._door = LocalDoor(
            Path(path),
            self._settings.access,
            _SERVICE,
            self._asked,
            self._budget,
            self.counters,
            self._log,
        )
        return self._door

    def _connections(self) -> Iterator[Connection]:
        """All that gRPC has taken."""
        yield from connections(self._port)
        if self._door is not None:
            yield from self._door.connections()

    async def __aenter__(self) -> Self:
        self._store.__enter__()
        try:
            credentials = self._guard.server_credentials()
            self._port = listener.add_port(self._server, self._settings.listen, credentials)
            await self._server.start()
            self._recover()
        except BaseException:
            self._closed.__exit__(None, None, None)
            self._store.__exit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._server.stop(_STOP_GRACE_S)
        for handle in (self._timer, self._recovering):
            if handle is not None:
                handle.cancel()
        self._closed.__exit__(None, None, None)
        if self._reading is not None:
            self._reading.end(self._loop)
            await asyncio.to_thread(self._reading.wait)
        # In a thread: it waits for the disk, but not for one that is full.
        await asyncio.to_thread(self._store.__exit__, None, None, None)

    # ----------------------------------------------------------------- core

    def _closed_trace(self, trace: TraceId) -> StoredTrace | None:
        """What the store has of a closed trace: some rows by their keys."""
        try:
            return self._closed.closed(trace)
        except sqlite3.Error as error:
            path = self._settings.store_path
            # Whoever speaks of it says that again and again.
            why, now_s = in_words(path, error), time.monotonic()
            said = self._said_unreadable
            if now_s - self._unreadable_at_s >= _READABLE_AGAIN_S:
                said.clear()
            self._unreadable_at_s = now_s
            if why not in said and len(said) < _UNREADABLE_REASONS_MAX:
                said.add(why)
                self._log.error(
                    f"{path}: cannot read closed traces: {why}. What nodes say of these is not heard,"
                    " and said again a minute later; it is counted, as server.not_heard in"
                    " `backsightctl counters`",
                    message_id=MessageId.STORE_FAILED,
                    reason=why,
                )
            raise UnreadableError from error

    @die_if_it_fails
    def _recover(self) -> None:
        """Take up what is stored, a piece in each turn of the loop. Until then nodes wait."""
        until_ns = time.monotonic_ns() + _RECOVERED_AT_ONCE_NS
        while self._core.recovering and time.monotonic_ns() < until_ns:
            self._core.recover(time.monotonic_ns())
        if self._core.recovering:
            self._recovering = self._loop.call_soon(self._recover)
        else:
            self._recovering = None
            self._changed()

    def _changed(self) -> None:
        """Facts came in: fetch what the core makes of them, once a turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush_if_due)

    def _last_written(self) -> int:
        """The last token of all that the core has to say until now, which is written from here on."""
        self._flush()
        self._store.hurry()
        return self._submitted

    @die_if_it_fails
    def _on_durable(self, token: int) -> None:
        self._durable = token
        self._questions.on_durable(token)
        self._operations.on_durable(token)
        self._core.on_durable(token, time.monotonic_ns())
        # Not in the next turn of the loop: each costs as much as this, where there is little to do.
        self._flush()

    @die_if_it_fails
    def _on_timer(self) -> None:
        self._timer = None
        self._core.on_tick(time.monotonic_ns())
        self._flush()

    @die_if_it_fails
    def _flush_if_due(self) -> None:
        if self._flush_due:
            self._flush()

    @die_if_it_fails
    def _flush(self) -> None:
        self._flush_due = False
        self._say_moves()
        writes = self._core.take_writes()
        if writes:
            self._say_verdicts(writes)
            # Until then nodes keep what they may forget.
            are_releases = all(isinstance(write.record, PutReleased) for write in writes)
            self._store.submit(writes, may_wait=are_releases)
            self._questions.on_written(writes)
            self._submitted = writes[-1].token
        waiting = max(self._submitted - self._durable, self._core.waiting_effects)
        if waiting <= _UNDURABLE_WRITES_MAX and not self._core.recovering:
            self._nodes.keeps_up.set()
        else:
            self._nodes.keeps_up.clear()
        now_ns = time.monotonic_ns()
        for session, messages in self._core.take_control(now_ns):
            self._nodes.say(session, messages)
        self._questions.on_reports(self._core.take_reports())
        for stream, reply in self._core.take_slice_replies(now_ns):
            self._nodes.reply(stream, reply)
        self._set_timer(self._core.next_wakeup_ns(now_ns))

    def _set_timer(self, wakeup_ns: int | None) -> None:
        due_s = None if wakeup_ns is None else -(-wakeup_ns // _TICK_NS) * _TICK_NS / 1e9
        if self._timer is not None:
            if self._timer.when() == due_s:
                return
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = self._loop.call_at(due_s, self._on_timer)

    def _say_moves(self) -> None:
        for trace, before, after in self._core.take_moves(wanted=self._log.says(Level.DEBUG)):
            self._log.debug(
                f"trace {trace.hex()}: {before.value} to {after.value}", trace_id=trace.hex()
            )

    def _say_verdicts(self, writes: Sequence[Write]) -> None:
        if not self._log.says(Level.DEBUG):
            return
        for write in writes:
            record = write.record
            if isinstance(record, PutVerdict):
                verdict = record.verdict
                reasons = "; ".join(f"{r.kind} {r.node}: {r.detail}" for r in verdict.reasons)
                reasons = reasons or "all is here"
                self._log.debug(
                    f"trace {record.trace.hex()} is {verdict.kind}: {reasons}",
                    trace_id=record.trace.hex(),
                    verdict=verdict.kind,
                    reason=reasons,
                )

    @property
    def threads(self) -> dict[str, Ask]:
        """What must move so that the coordinator does."""
        return {"store": self._store.give_sign}

    def _why_not_ready(self) -> dict[str, str]:
        reasons = {}
        if self._core.recovering:
            reasons["recovery"] = self._recovery_text()
        if self._store.failed:
            reasons["store"] = f"cannot be written: {self._store.failed}"
        return reasons

    def _recovery_text(self) -> str:
        taken, share = self._stored.taken, self._stored.share
        return f"takes up what is stored: {taken} traces, {share:.0%} of all, so far; nodes wait"

    def status_text(self) -> str:
        """How the coordinator is, in a line."""
        now = self._core.figures()
        if self._core.recovering:
            return self._recovery_text()
        return (
            f"{now.nodes_connected} of {now.nodes_known} nodes connected;"
            f" {now.traces_open} traces open, {now.traces_settled} settled;"
            f" store {self._store.stored_bytes >> 20} of {self._store.retention.limits.bytes_max >> 20} MiB"
        )

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other settings, of which those that cannot be changed are the same."""
        try:
            # All that may fail, before anything is taken up.
            if self._reading is not None:
                self._reading.check(settings)
            self._guard.reconfigure(settings.tls)
        except OSError as error:
            raise ConfigError([str(error)]) from error
        if self._reading is not None:
            self._reading.reconfigure(settings)
        warning = warning_of_strangers(settings)
        if warning is not None and warning != warning_of_strangers(self._settings):
            self._log.warning(warning)
        before, self._settings = self._settings, settings
        self._end_strangers(before)
        if self._door is not None:
            self._door.reconfigure(settings.access)
        self._store.retention.limits = store_limits(settings.store)
        self._core.reconfigure(core_config(settings, self._priority_seed))
        self._core.set_policy(policy(settings.policy))
        self._changed()

    def _end_strangers(self, before: Settings) -> None:
        """What they opened as somebody else must not go on; nodes come again."""
        strangers_are = self._settings.access.anonymous
        if self._guard.files is None and strangers_are != before.access.anonymous:
            self._log.info(
                f"access.anonymous: whoever comes without a name is {strangers_are} now, so all"
                " connections over the network begin anew"
            )
            shut_all(self._port)

    async def run(self) -> None:
        """Look at connections and the loop, and take certificates up when they change; the rest is callbacks."""
        async with asyncio.TaskGroup() as tasks:
            # Nodes that are slow have no more under way than they have memory for.
            tasks.create_task(
                self._budget.watch(
                    self._connections,
                    lambda: self._settings.memory_bytes,
                    lambda addresses: keep_out(listening(self._port), addresses),
                )
            )
            tasks.create_task(watch_loop(self._loop_lag.observe))
            while self._guard.files is not None:
                await asyncio.sleep(LOOK_EVERY_S)  # nothing tells
                self._guard.look()

    def counted(self) -> dict[str, Any]:
        """All that was counted, by part and name."""
        return {
            "core": dataclasses.asdict(self._core.counters),
            "server": dataclasses.asdict(self.counters),
            "store": dataclasses.asdict(self._store.counters),
            "index": self._read_status["index"],
            "export": self._read_status["export"],
        }

    @property
    def _read_status(self) -> dict[str, Any]:
        return NO_STATUS if self._reading is None else self._reading.status

    def status(self) -> dict[str, Any]:
        """All that was counted, and how things stand. On the event loop only."""
        return {
            **self.counted(),
            "now": dataclasses.asdict(self._core.figures()),
            "queues": {
                **self._read_status["waiting"],
                "writes": self._submitted - self._durable,
                "messages_bytes": self._nodes.waiting_bytes,
            },
            "stored_bytes": self._store.stored_bytes,
            "pinned": dataclasses.asdict(self._store.orders.pinned),
            "store_has_reserve": int(self._store.retention.has_reserve),
            "reading": self._read_status["process"],
            "certificate_expires_s": {
                "listen": self._guard.expires_at_s,
                "query": self._read_status["certificate_expires_s"],
            },
            "limits": {
                "memory_bytes": self._settings.memory_bytes,
                "store_bytes": self._settings.store.bytes_max,
                "pinned_bytes": self._settings.store.pinned_bytes_max_or_default,
            },
            "traversal": dataclasses.asdict(self._core.traversal_s),
            "verdict": dataclasses.asdict(self._core.verdict_s),
            "commit": dataclasses.asdict(self._store.commit_s),
            "journal_bytes": journal_bytes(self._settings.store_path),
            "loop_lag": dataclasses.asdict(self._loop_lag),
        }

    async def _described(self) -> dict[str, Any]:
        """How the coordinator is, for people."""
        reasons = await self.health.why_not_ready()
        ready = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return {
            "version": VERSION,
            "listen": self._settings.listen,
            "ready": not reasons,
            "not_ready": ready,
            **self.status(),
        }


def _call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[[int], None], token: int
) -> None:
    # At the end the loop is closed before the store has written its last.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, token)
