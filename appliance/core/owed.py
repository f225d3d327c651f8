# SPDX-License-Identifier: Apache-2.0
"""What one coordinator is owed over its Control stream, of the groups of its shard.

What it must hear of is repeated on each new stream: firings until they are
acknowledged, abandonments until it answers them with a Drop, and the status of
every trace that it did not release. Within a stream, each is said when it is due,
and a status only if it says something new. While there is none, nothing is due; and what
is let go before it was said is due no more: the coordinator may be away, or not listen,
for days.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView

from appliance.core.config import NodeConfig
from appliance.core.groups import HeldTrace, Share
from appliance.core.holdings import Gone, Holdings
from protocol.messages import (
    CLOCK_STEPPED,
    Abandoned,
    ClockReply,
    Group,
    NodeMessage,
    NodeReport,
    SliceFlags,
    SliceStatus,
    TraceId,
)


class Owed:
    """The messages of one node that wait for a Control stream, of what it holds for ``shard``."""

    def __init__(self, config: NodeConfig, holdings: Holdings, shard: int) -> None:
        self.is_open = False
        """Whether there is a stream, and the coordinator welcomed this node on it."""
        self._config = config
        self._holdings = holdings
        self._shard = shard
        # What the node had of a group that it gave up by itself, until the
        # coordinator says that it knows; None: it does.
        self._abandoned: OrderedDict[Group, tuple[SliceStatus, ...] | None] = OrderedDict()
        self._firings_due: dict[Group, None] = {}
        self._abandonments_due: dict[Group, None] = {}
        self._statuses_due: dict[TraceId, None] = {}
        self._statuses_later: dict[TraceId, int] = {}
        self._answers: list[SliceStatus] = []
        self._clock_replies: list[tuple[int, int]] = []
        self._clock_steps: list[ClockReply] = []
        self._report: NodeReport | None = None

    @property
    def abandoned_groups(self) -> KeysView[Group]:
        """The groups that were given up, here or elsewhere, as far as remembered."""
        return self._abandoned.keys()

    def reconfigure(self, config: NodeConfig) -> None:
        """Go on with other bounds and another interval of statuses."""
        self._config = config

    # ------------------------------------------------------- the stream

    def open(self) -> None:
        """A new stream is open: all that the other side may have missed is due."""
        self.is_open = True
        # Where the coordinator has no room for all of them, it is the last that it refuses.
        groups = [g for g in self._holdings.groups.values() if g.shard == self._shard]
        for group in sorted(groups, key=lambda group: group.order):
            group.unanswered = 0
            if not group.acknowledged:
                self._firings_due[group.group] = None
        for given_up, had in self._abandoned.items():
            if had is not None:
                self._abandonments_due[given_up] = None
        for held in self._holdings.traces.values():
            share = held.share(self._shard)
            if share is None:
                continue
            share.told = None
            if not share.released:
                self._statuses_due[held.trace] = None

    def close(self) -> None:
        """The stream is gone, and what was due on it."""
        self.is_open = False
        self._firings_due.clear()
        self._abandonments_due.clear()
        self._statuses_due.clear()
        self._statuses_later.clear()
        self._answers.clear()
        self._clock_replies.clear()
        self._clock_steps.clear()
        self._report = None

    # ------------------------------------------------------- what is due

    def firing(self, group: Group) -> None:
        """The group fired, or has more laterals than were told of."""
        if self.is_open:
            self._firings_due[group] = None

    def firing_acknowledged(self, group: Group) -> None:
        """The coordinator has one of the firings of a group."""
        held = self._holdings.groups.get(group)
        if held is None or held.acknowledged or held.unanswered == 0:
            return
        held.unanswered -= 1
        if held.unanswered == 0:
            held.acknowledged = True
            if held.release_deferred:
                held.release_deferred = False
                for trace in held.traces:
                    self.answer(trace)
            self._holdings.drop_if_empty(held)

    def abandonment(self, group: Group) -> None:
        """A group is given up; of what there was of it here the coordinator hears first."""
        held = self._holdings.groups.get(group)
        had: tuple[SliceStatus, ...] = ()
        if held is not None:
            had = tuple(
                trace.status()
                for trace in held.traces.values()
                if trace.is_lacked(held.share(trace)) and held.has_alone(trace)
            )
        self._remember_abandoned(group, had)
        if self.is_open:
            self._abandonments_due[group] = None

    def abandonment_known(self, group: Group) -> None:
        """The coordinator knows that the group was given up, here or by itself."""
        if group in self._abandoned:
            self._abandoned[group] = None
            self._abandonments_due.pop(group, None)
        else:
            self._remember_abandoned(group, None)

    def status(self, trace: TraceId) -> None:
        """The status of a held trace, if it is news."""
        if self.is_open:
            self._statuses_due[trace] = None

    def answer(self, trace: TraceId) -> None:
        """The status of a trace that is held for this coordinator, news or not."""
        share = self._holdings.share(trace, self._shard)
        assert share is not None
        share.told = None
        self.status(trace)

    def answer_all(self, traces: Iterable[TraceId], flags: SliceFlags) -> None:
        """The status of each, news or not; why it is not held for this coordinator say the flags."""
        for trace in traces:
            if self._holdings.share(trace, self._shard) is not None:
                self.answer(trace)
            else:
                self._answers.append(SliceStatus(trace, held=False, flags=flags))

    def forget(self, gone: Gone) -> None:
        """This is held no more, so nothing of it is due."""
        for held, share in gone.idle:
            if share.shard == self._shard:
                self._last_answer(held, share)
        for held, _ in (*gone.idle, *gone.abandoned):
            if self._holdings.share(held.trace, self._shard) is None:
                self._statuses_due.pop(held.trace, None)
                self._statuses_later.pop(held.trace, None)
        for group in gone.groups:
            if group not in self._holdings.groups:
                self._firings_due.pop(group, None)

    def clock_reply(self, number: int, received_ns: int) -> None:
        """A probe came, at this Unix time."""
        self._clock_replies.append((number, received_ns))

    def report(self, report: NodeReport) -> None:
        """How the node is; only the last one is of use to anybody."""
        if self.is_open:
            self._report = report

    def clock_stepped(self, before_ns: int, now_ns: int) -> None:
        """The clock was set to this Unix time, and would show that else."""
        if self.is_open:
            self._clock_steps.append(ClockReply(CLOCK_STEPPED, before_ns, now_ns))

    # ------------------------------------------------------------ output

    def take(self, now_ns: int, realtime_ns: int) -> list[NodeMessage]:
        """All that is due, in order; nothing while no stream is open."""
        messages: list[NodeMessage] = []
        if not self.is_open:
            return messages
        messages += self._clock_steps
        self._clock_steps.clear()
        messages += [ClockReply(n, received, realtime_ns) for n, received in self._clock_replies]
        self._clock_replies.clear()
        for group in self._firings_due:
            held = self._holdings.groups.get(group)
            if held is not None and held.fired is not None:
                held.unanswered += 1
                messages.append(held.fired)
        self._firings_due.clear()
        for group in self._abandonments_due:
            # Bytes that were never told of are what the coordinator now lacks.
            messages += self._abandoned.get(group) or ()
            messages.append(Abandoned(group))
        self._abandonments_due.clear()
        messages += self._answers
        self._answers.clear()
        messages += self._take_statuses(now_ns)
        if self._report is not None:
            messages.append(self._report)
            self._report = None
        return messages

    def next_due_ns(self, now_ns: int) -> int | None:
        """When take() may have something without a new fact; now, if that is now."""
        if not self.is_open:
            return None
        if (
            self._statuses_due
            or self._firings_due
            or self._answers
            or self._clock_replies
            or self._abandonments_due
            or self._clock_steps
            or self._report
        ):
            return now_ns
        return min(self._statuses_later.values(), default=None)

    # ------------------------------------------------------------ inside

    def _last_answer(self, held: HeldTrace, share: Share) -> None:
        """A trace was let go: who asked for it gets an answer, if nobody has answered yet."""
        is_due = held.trace in self._statuses_due and share.told is None
        if is_due and len(self._answers) < self._config.triggered_max:
            self._answers.append(held.status())

    def _remember_abandoned(self, group: Group, had: tuple[SliceStatus, ...] | None) -> None:
        self._abandoned[group] = had
        while len(self._abandoned) > self._config.triggered_max:
            forgotten, _ = self._abandoned.popitem(last=False)
            self._abandonments_due.pop(forgotten, None)
            self._holdings.counters.abandonments_forgotten += 1

    def _take_statuses(self, now_ns: int) -> list[SliceStatus]:
        """Statuses that say something new, lengths alone not too often."""
        for trace in [t for t, due_ns in self._statuses_later.items() if due_ns <= now_ns]:
            del self._statuses_later[trace]
            self._statuses_due[trace] = None
        statuses = []
        for trace in self._statuses_due:
            held = self._holdings.traces.get(trace)
            share = held.share(self._shard) if held is not None else None
            if held is None or share is None or held.searching:
                # The end of the search is an event, and makes it due again.
                continue
            status = held.status()
            if share.told is not None and not self._is_news(share, share.told, status, now_ns):
                continue
            share.told = status
            share.told_ns = now_ns
            self._statuses_later.pop(trace, None)
            statuses.append(status)
        self._statuses_due.clear()
        return statuses

    def _is_news(self, share: Share, told: SliceStatus, now: SliceStatus, now_ns: int) -> bool:
        if (told.flags, told.open_handles, told.crumbs) != (
            now.flags,
            now.open_handles,
            now.crumbs,
        ):
            return True
        # The length matters once the coordinator may think that it has all.
        if told.bytes == now.bytes or share.sent < told.bytes:
            return False
        due_ns = share.told_ns + self._config.status_interval_ns
        if now_ns >= due_ns:
            return True
        self._statuses_later[now.trace] = due_ns
        return False
