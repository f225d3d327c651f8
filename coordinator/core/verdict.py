# SPDX-License-Identifier: Apache-2.0
"""The verdict on a trace: whether all of it is here, and if not, what is not.

A trace is *coherent* if and only if none of the reasons below holds. Otherwise
the worst kind among its reasons is the verdict's:

    provisional  something is still open; the others may not be final
    partial      a part is missing as a whole: a node, a hop, a parent, a run
    lossy        parts that did come have holes
    truncated    parts that did come end at a bound that somebody set

    reason            kind         the trace has
    ------            ----         -------------
    open              provisional  parts that wait for an answer, bytes, or the
                                   end of what is being written
    no_trigger        partial      no trigger: nobody can be asked
    unknown_node      partial      a crumb to a node that never connected
    not_connected     partial      a node that is not connected
    no_answer         partial      a node that did not answer in time
    never_seen        partial      a node that is said to have seen it, and says
                                   that it never did
    too_many_nodes    partial      crumbs to more nodes than are asked for one
    bytes_missing     partial      a slice that did not come whole
    restarted         partial      a node that lost its slice, or let go of it, and
                                   may have begun another
    evicted           partial      a node whose pool was overwritten
    abandoned         partial      been given up under overload
    hop_out_unmet     partial      a context that was sent, and never arrived; also if who sent it
                                   says that nobody answered, since somebody may have got it
    hop_in_unmet      partial      a context that arrived, and was never sent
    unanswered        (none)       a context that was to be sent to an address, where by the error no
                                   connection came about: nobody got it
    parent_missing    partial      a span whose parent nobody delivered
    span_unstarted    partial      a span that ended and never started
    unfinished        partial      a span that started and never ended
    still_written     partial      handles that were still open when it was closed
    run_missing       partial      a handle whose runs are not all there
    late              partial      what came when it was closed
    deleted           partial      been deleted by the store before it came up again
    lossy             lossy        records that were dropped when written
    maybe_lossy       lossy        a loss nearby, of whatever trace, or traces that
                                   look alike, of which not all were looked at
    store_full        lossy        a node that had no room to copy it
    corrupt           lossy        a log that contradicted itself
    malformed         lossy        bytes that make no sense
    truncated         truncated    a slice, or a record, longer than allowed
    too_large         truncated    more spans, hops and runs than are judged

Each reason has the node that it is about and words for a person.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.core.evidence import Finding, FindingKind
from coordinator.core.nodes import Nodes
from protocol.messages import NodeId, SliceFlags
from protocol.values import dataclass
from protocol.verdicts import VerdictKind

if TYPE_CHECKING:
    from coordinator.core.evidence import SliceEvidence
    from coordinator.core.trace import Part, Trace

FIRED = "the trigger"
STORED = "the store"
PEER = "a peer's address"
ITSELF = "itself"
NOT_A_CRUMB = (FIRED, STORED, PEER, ITSELF)
"""What names a node, in words, without saying that it saw the trace. A trigger may
name traces that its node never saw: laterals, or what an operator asks for. What
answers at an address may be a program that records nothing."""

REASONS_PER_KIND_AND_NODE = 4
"""Beyond these a reason is only counted: a thousand lost spans are one fact."""

REASONS_MAX = 256
"""In one verdict: what a person may still read, and a store still hold."""

UNJUDGED = 0
"""The version before the first."""

GIVEN_UP = "given up under overload"

DETAIL_MAX = 256
"""Characters of one reason's words; names in it may come from anybody."""


class ReasonKind(enum.StrEnum):
    OPEN = "open"
    NO_TRIGGER = "no_trigger"
    UNKNOWN_NODE = "unknown_node"
    NOT_CONNECTED = "not_connected"
    NO_ANSWER = "no_answer"
    NEVER_SEEN = "never_seen"
    TOO_MANY_NODES = "too_many_nodes"
    BYTES_MISSING = "bytes_missing"
    RESTARTED = "restarted"
    EVICTED = "evicted"
    ABANDONED = "abandoned"
    HOP_OUT_UNMET = "hop_out_unmet"
    HOP_IN_UNMET = "hop_in_unmet"
    UNANSWERED = "unanswered"
    PARENT_MISSING = "parent_missing"
    SPAN_UNSTARTED = "span_unstarted"
    UNFINISHED = "unfinished"
    STILL_WRITTEN = "still_written"
    RUN_MISSING = "run_missing"
    LATE = "late"
    DELETED = "deleted"
    LOSSY = "lossy"
    MAYBE_LOSSY = "maybe_lossy"
    STORE_FULL = "store_full"
    CORRUPT = "corrupt"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"
    TOO_LARGE = "too_large"


_LOSSY = {
    ReasonKind.LOSSY,
    ReasonKind.MAYBE_LOSSY,
    ReasonKind.STORE_FULL,
    ReasonKind.CORRUPT,
    ReasonKind.MALFORMED,
}
_TRUNCATED = {ReasonKind.TRUNCATED, ReasonKind.TOO_LARGE}
_SEVERITY = list(VerdictKind)

HEALABLE = frozenset(
    {
        ReasonKind.OPEN,
        ReasonKind.NO_TRIGGER,
        ReasonKind.UNKNOWN_NODE,
        ReasonKind.NOT_CONNECTED,
        ReasonKind.NO_ANSWER,
        ReasonKind.BYTES_MISSING,
        ReasonKind.STILL_WRITTEN,
    }
)
"""What may still turn out well when a node comes back."""

_STATES = HEALABLE | {ReasonKind.NEVER_SEEN, ReasonKind.RESTARTED}
"""How it is with a node's part: said anew, it stands for what was said before."""

ELSEWHERE = frozenset(
    {
        ReasonKind.HOP_OUT_UNMET,
        ReasonKind.HOP_IN_UNMET,
        ReasonKind.PARENT_MISSING,
        ReasonKind.SPAN_UNSTARTED,
        ReasonKind.UNFINISHED,
        ReasonKind.RUN_MISSING,
    }
)
"""What a node that is away may have, though it had delivered all that it knew of
before: a request may visit it twice."""

_FLAGS = {
    SliceFlags.EVICTED: (ReasonKind.EVICTED, "the pool was overwritten before the trigger came"),
    SliceFlags.ABANDONED: (ReasonKind.ABANDONED, GIVEN_UP),
    SliceFlags.LOSSY: (ReasonKind.LOSSY, "records were dropped when they were written"),
    SliceFlags.MAYBE_LOSSY: (
        ReasonKind.MAYBE_LOSSY,
        (
            "records of this or other traces were dropped, left out, or lost with a node's memory, or"
            " `percentage` had been changed in the minutes before"
        ),
    ),
    SliceFlags.STORE_FULL: (ReasonKind.STORE_FULL, "the report store had no room for all of it"),
    SliceFlags.CORRUPT: (ReasonKind.CORRUPT, "the log contradicted itself"),
    SliceFlags.TRUNCATED: (
        ReasonKind.TRUNCATED,
        "longer than a slice may be: trace_bytes_max of the node, slice_bytes_max of the coordinator",
    ),
}
"""CRUMBS_CUT is none of them: the slice itself has every crumb."""

_BY_FINGERPRINT = "; known by a fingerprint alone, which is another trace's once in millions"


@dataclass(frozen=True, slots=True)
class Reason:
    kind: ReasonKind
    node: str
    detail: str

    @property
    def verdict(self) -> VerdictKind:
        """The kind of verdict that this reason alone makes."""
        if self.kind is ReasonKind.OPEN:
            return VerdictKind.PROVISIONAL
        if self.kind is ReasonKind.UNANSWERED:
            return VerdictKind.COHERENT
        if self.kind in _LOSSY:
            return VerdictKind.LOSSY
        if self.kind in _TRUNCATED:
            return VerdictKind.TRUNCATED
        return VerdictKind.PARTIAL


@dataclass(frozen=True, slots=True)
class Verdict:
    """One version of the judgement, with what a list of traces shows.

    ``bytes`` are those judged, over all nodes. Times are the earliest and the
    latest of any span, Unix time by the nodes' own clocks; None without spans.
    """

    version: int
    kind: VerdictKind
    reasons: tuple[Reason, ...]
    nodes: tuple[str, ...]
    bytes: int
    span_count: int
    start_ns: int | None
    end_ns: int | None

    def same_as(self, other: Verdict | None) -> bool:
        """Whether only the versions differ."""
        return other is not None and self == replace(other, version=self.version)


_DELETED = Reason(
    ReasonKind.DELETED,
    "",
    "the store had deleted it when it came up again: by its limits (store.*), or as ordered",
)


def deleted(verdict: Verdict) -> Verdict:
    """What is left to say of a trace when the store has deleted all that this verdict speaks of.

    Of the same version, so that the next one replaces it. One that speaks of no bytes stays.
    """
    if not verdict.bytes:
        return verdict
    return _of_nothing(verdict.version, _DELETED)


def in_part_deleted(verdict: Verdict) -> Verdict:
    """The same, when the store has deleted some of what it speaks of."""
    reasons = (*verdict.reasons, _DELETED)
    kinds = (verdict.kind, VerdictKind.PARTIAL)
    return replace(verdict, kind=max(kinds, key=_SEVERITY.index), reasons=reasons)


def replaced(verdict: Verdict, node: str) -> Verdict:
    """The next one, when the store has another slice of a node than the one that it speaks of."""
    reason = Reason(
        ReasonKind.RESTARTED, node, "another slice took the place of one that was whole"
    )
    return replace(
        in_part_deleted(verdict), version=verdict.version + 1, reasons=(*verdict.reasons, reason)
    )


def given_up(node: str) -> Verdict:
    """What there is to say of a trace that is known by a group alone, which was given up.

    ``node``: who did; empty: the coordinator.

    Nobody has judged it, so any verdict replaces this.
    """
    return _of_nothing(UNJUDGED, _given_up_by(node))


def _given_up_by(node: str) -> Reason:
    words = GIVEN_UP if node else f"{GIVEN_UP}: the coordinator had no room for all that was fired"
    return Reason(ReasonKind.ABANDONED, node, words)


def _of_nothing(version: int, reason: Reason) -> Verdict:
    return Verdict(
        version,
        VerdictKind.PARTIAL,
        (reason,),
        nodes=(),
        bytes=0,
        span_count=0,
        start_ns=None,
        end_ns=None,
    )


def judge(trace: Trace, nodes: Nodes, *, final: bool) -> Verdict:
    """Judge what there is. ``final``: do not wait for what is still open.

    The version is one above the last if anything differs from it.
    """
    reasons = _limit(_reasons(trace, nodes, final=final))
    # What was missing of one that is given up may have come since, and who is blamed for it with it.
    if trace.late and trace.abandoned_by is None:
        reasons = _with_those_before(reasons, trace.reasons_before)
    reasons = _cut(reasons)
    kinds = {reason.verdict for reason in reasons}
    verdict = Verdict(
        trace.verdict.version if trace.verdict else UNJUDGED,
        max(kinds, key=_SEVERITY.index, default=VerdictKind.COHERENT),
        tuple(reasons),
        tuple(sorted(nodes.name_of(part.node) for part in trace.parts.values() if part.received)),
        trace.bytes,
        *trace.evidence.extent(),
    )
    if verdict.same_as(trace.verdict):
        return verdict
    return replace(verdict, version=verdict.version + 1)


@dataclass(frozen=True, slots=True)
class _More:
    """So many reasons of that kind and node that are only counted."""

    kind: ReasonKind
    node: str
    count: int


def _limit(reasons: Iterator[Reason | _More]) -> list[Reason]:
    """In order of node and kind, the first few of each, and how many more."""
    by_key: dict[tuple[str, ReasonKind], list[Reason]] = {}
    more: dict[tuple[str, ReasonKind], int] = {}
    for reason in reasons:
        key = (reason.node, reason.kind)
        if isinstance(reason, _More):
            more[key] = more.get(key, 0) + reason.count
            continue
        listed = by_key.setdefault(key, [])
        if len(listed) < REASONS_PER_KIND_AND_NODE:
            listed.append(replace(reason, detail=reason.detail[:DETAIL_MAX]))
        else:
            more[key] = more.get(key, 0) + 1
    limited = []
    # Of each kind something must remain, so the kinds go first round the nodes.
    for key in sorted(by_key, key=lambda key: (key[1], key[0])):
        limited += by_key[key]
        if key in more:
            limited.append(Reason(key[1], key[0], f"and {more[key]} more of this kind"))
    return limited


def _with_those_before(reasons: list[Reason], before: tuple[Reason, ...]) -> list[Reason]:
    """Of a trace that came up again, with the reasons of its last verdict, which are few.

    A node may repeat what it said, or say how it is now: that stands once.
    """
    now = frozenset(reasons)
    said = {(reason.node, reason.kind) for reason in reasons if reason.kind in _STATES}
    others = [
        reason for reason in before if reason not in now and (reason.node, reason.kind) not in said
    ]
    return sorted([*others, *reasons], key=lambda reason: (reason.kind, reason.node))


def _cut(limited: list[Reason]) -> list[Reason]:
    """As many as a verdict has room for, of each kind at least one."""
    if len(limited) <= REASONS_MAX:
        return limited
    first_of_kind: dict[ReasonKind, Reason] = {}
    for reason in limited:
        first_of_kind.setdefault(reason.kind, reason)
    kept = list(first_of_kind.values())
    kept += [r for r in limited if r is not first_of_kind[r.kind]][: REASONS_MAX - len(kept)]
    return sorted(kept, key=lambda reason: (reason.kind, reason.node))


def _reasons(trace: Trace, nodes: Nodes, *, final: bool) -> Iterator[Reason | _More]:
    if trace.abandoned_by is not None:
        # Whatever else is missing is missing because of that.
        yield _given_up_by(trace.abandoned_by)
        return
    if not trace.groups and not trace.late:
        yield Reason(ReasonKind.NO_TRIGGER, "", "no trigger is known that asks for this trace")
    if trace.nodes_cut:
        detail = f"crumbs to {trace.nodes_cut} more nodes than are asked for one trace"
        yield Reason(ReasonKind.TOO_MANY_NODES, "", detail)
    if not final and not trace.is_awaited:
        yield Reason(ReasonKind.OPEN, "", "news keep coming")
    for part in trace.parts.values():
        if not final and part.is_open:
            yield Reason(ReasonKind.OPEN, nodes.name_of(part.node), _waits_for(part))
        else:
            yield from _part_reasons(trace, part, nodes)
    if trace.late:
        yield Reason(ReasonKind.LATE, "", "what came after it was closed is stored, not judged")
        return
    if trace.evidence.overflow:
        yield Reason(ReasonKind.TOO_LARGE, "", "more spans, hops and runs than are judged")
        return
    slices = {said.node: said for said in trace.evidence.slices()}
    for said in slices.values():
        yield from _slice_reasons(trace.parts[said.node], said, nodes)
    for finding in trace.evidence.findings(REASONS_PER_KIND_AND_NODE):
        kind, words = _found(finding, slices.get(finding.node), nodes)
        name = nodes.name_of(finding.node)
        yield Reason(kind, name, words)
        if finding.more:
            yield _More(kind, name, finding.more)


def _waits_for(part: Part) -> str:
    if part.deadline_ns is not None:
        return f"no answer yet; named by {part.named_by}"
    if part.missing_bytes:
        return f"{part.received} of {part.received + part.missing_bytes} bytes are here"
    return f"{part.open_handles} handles are open"


def _part_reasons(trace: Trace, part: Part, nodes: Nodes) -> Iterator[Reason]:
    """What the node said, or failed to say."""
    name = nodes.name_of(part.node)
    connected = nodes.is_connected(part.node)
    if part.lost:
        yield Reason(
            ReasonKind.RESTARTED, name, "the node was restarted, and no longer has the slice"
        )
    elif part.restarted:
        detail = "the node lost its slice, or let go of it, and began another"
        yield Reason(ReasonKind.RESTARTED, name, detail)
    if part.status is None:
        if part.received:
            detail = f"{part.received} bytes came, but no word on how many there are"
            yield Reason(ReasonKind.BYTES_MISSING, name, detail)
        elif connected and part.is_unasked and (trace.late or not trace.groups):
            return  # by which trigger it could be asked, nobody knows: that is said of the trace
        elif connected:
            groups = [trace.groups[group] for group in part.told if group in trace.groups]
            gave_up = groups and all(group.given_up_by == name for group in groups)
            why = "gave up the group before it answered" if gave_up else "did not answer"
            yield Reason(ReasonKind.NO_ANSWER, name, f"named by {part.named_by}; {why}")
        elif not nodes.is_known(part.node):
            called = trace.evidence.names.get(part.node)
            who = f"no node called {called!r}" if called else "no node of that id"
            detail = f"named by {part.named_by}; {who} ever connected"
            yield Reason(ReasonKind.UNKNOWN_NODE, name, detail)
        else:
            detail = f"named by {part.named_by}; not connected"
            yield Reason(ReasonKind.NOT_CONNECTED, name, detail)
        return
    status = part.status
    for flag, (kind, words) in _FLAGS.items():
        if flag in status.flags:
            by = flag is SliceFlags.EVICTED and SliceFlags.BY_FINGERPRINT in status.flags
            yield Reason(kind, name, words + _BY_FINGERPRINT if by else words)
    if part.missing_bytes and not part.lost:
        where = "" if connected else "; the node is not connected"
        detail = f"{part.received} of {status.bytes} bytes came{where}"
        yield Reason(ReasonKind.BYTES_MISSING, name, detail)
    if part.open_handles and not part.lost:
        detail = f"{part.open_handles} handles were never closed"
        yield Reason(ReasonKind.STILL_WRITTEN, name, detail)
    by_crumb = part.named_by not in NOT_A_CRUMB or trace.bytes == 0
    if not part.received and not status.held and not status.flags and by_crumb:
        detail = f"named by {part.named_by}; the node never saw the trace"
        yield Reason(ReasonKind.NEVER_SEEN, name, detail)


def _slice_reasons(part: Part, said: SliceEvidence, nodes: Nodes) -> Iterator[Reason]:
    """What is wrong with one slice as a whole."""
    name = nodes.name_of(part.node)
    # Where a slice ends before its time, so may what stands there: at a bound, or where its node
    # lost or dropped the rest, or has it yet. For each of these there is a reason.
    status = part.status
    is_cut = part.missing_bytes or part.restarted
    is_cut = is_cut or status is None or SliceFlags.TRUNCATED in status.flags
    # Its bytes come by another stream, so a node may be gone before its word on the last of them.
    is_untold = status is not None and part.received > status.bytes
    if is_untold and not said.whole and not part.lost:
        assert status is not None
        detail = (
            f"{part.received} bytes came, more than the {status.bytes} it told of, and not the last"
        )
        yield Reason(ReasonKind.BYTES_MISSING, name, detail)
    if said.malformed or not (said.whole or is_cut or is_untold):
        count = said.malformed or 1
        yield Reason(ReasonKind.MALFORMED, name, f"{count} places make no sense")
    if said.truncated_records:
        detail = f"{said.truncated_records} records were cut when they were written"
        yield Reason(ReasonKind.TRUNCATED, name, detail)


def _found(finding: Finding, said: SliceEvidence | None, nodes: Nodes) -> tuple[ReasonKind, str]:
    """What is missing, in words; ``said``: the slice of the node that it is about, if there is one."""
    who = said.words(finding.client) if said is not None else ""
    span = f"span {finding.span_id:016x}"
    hop = f"request {finding.number} of {span} in handle {finding.handle}"
    match finding.kind:
        case FindingKind.LOSSY:
            return ReasonKind.LOSSY, f"records were dropped in {who}"
        case FindingKind.RUN_MISSING:
            problem = said.handle(finding.number).problem() if said is not None else None
            return ReasonKind.RUN_MISSING, f"handle {finding.handle} of {who}: {problem}"
        case FindingKind.UNFINISHED:
            return ReasonKind.UNFINISHED, f"{span} {finding.name!r} of {who} never ended"
        case FindingKind.UNSTARTED:
            words = f"{span} of {who} ended, but its start is not here"
            return ReasonKind.SPAN_UNSTARTED, words
        case FindingKind.PARENT_MISSING:
            words = f"nobody delivered span {finding.other:016x}, the parent of"
            return ReasonKind.PARENT_MISSING, f"{words} {finding.span_id:016x}"
        case FindingKind.HOP_OUT_UNMET:
            to, heard = (f" to {finding.name}", f": {finding.error}") if finding.name else ("", "")
            words = f"{hop} was sent{to}, and nobody delivered that it arrived{heard}"
            return ReasonKind.HOP_OUT_UNMET, words
        case FindingKind.HOP_UNANSWERED:
            words = (
                f"{hop} was not sent: no connection to {finding.name} came about: {finding.error}"
            )
            return ReasonKind.UNANSWERED, words
        case FindingKind.HOP_IN_UNMET:
            where = nodes.name_of(NodeId(finding.other))
            words = f"{hop} arrived on {where}, and nobody delivered that it was sent"
            return ReasonKind.HOP_IN_UNMET, words
