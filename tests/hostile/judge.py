# SPDX-License-Identifier: Apache-2.0
"""What became of honest processes under attack: figures, and whether they are as promised."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.hostile.memory import Sample

TRIGGERS_COLLECTED_MIN = 0.99

# A daemon that has all its time taken answers in seconds, on any machine, and does everything
# else as late; one that is asked in the midst of a restart, or on a busy machine, does so now
# and then.
_ANSWER_MAX_S, _ANSWERS_LATE_MAX = 1.0, 0.1

_MIB = 1 << 20

# A node looks once a second for memory that it did not grant; until it has given it back,
# who touched it holds it. What stays for longer than this is the node's.
_SETTLED_S = 3.0

# Growth that is none: noise of allocators, and what a phase of the attack takes for itself.
_GROWTH_SHARE, _GROWTH_BYTES = 0.05, 8 * _MIB

# Reasons why a part of a trace is not there although it was recorded. What is missing for
# another reason, or for none, was lost.
_KNOWN_GONE = frozenset({"evicted", "abandoned", "truncated", "store_full"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """An honest trace as the coordinator has it, at one of its verdicts ("none": not at all)."""

    low: int
    verdict: str
    wanted: int
    missing: int
    wrong: int
    reasons: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.wanted > 0 and not self.missing and not self.wrong


@dataclass(frozen=True, slots=True)
class Written:
    """What honest processes wrote, by their own count and by the library's."""

    traces: int
    records: int
    records_lost: int
    triggers_lost: int
    fired: frozenset[int]


@dataclass(frozen=True, slots=True)
class Visitors:
    """Honest processes that came during the attack, and how many of them were attached."""

    came: int
    attached: int


@dataclass(frozen=True, slots=True)
class Turn:
    """An attack, and what honest processes did and lost meanwhile, by the library's word."""

    what: str
    killed: str
    records_lost: int
    fired: frozenset[int]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A turn, when all is judged.

    ``killed``: the node whose daemon was, if any; ``missed``: how many of the triggers did not
    bring their traces whole, by verdict.
    """

    what: str
    killed: str
    records_lost: int
    triggers: int
    missed: Mapping[str, int]


@dataclass(slots=True)
class Judged:
    """The outcomes of all honest traces, as they come."""

    last: dict[int, Outcome] = field(default_factory=dict)
    false_coherent: set[int] = field(default_factory=set)

    def add(self, outcome: Outcome) -> None:
        if outcome.verdict == "coherent" and not outcome.whole:
            self.false_coherent.add(outcome.low)
        self.last[outcome.low] = outcome


@dataclass(frozen=True, slots=True)
class Result:
    """Of one campaign. Shares are between 0 and 1, sizes MiB.

    ``honest_records_lost``: by the library's word, and those that lack in what was collected and
    that nothing says to be gone (``honest_records_evicted``: something does).
    ``node_rss_max_mib``: resident, of one daemon at most. ``node_memory_max_mib``: the daemon's own
    and all memory that it shares with applications, also what they touched without a grant;
    ``node_memory_settled_max_mib``: the same without what is given back within seconds.
    ``node_arenas_end_mib``: of the memory for records, when the attack is over.
    ``node_answers_late``: the share of questions how it is that a daemon took a second to answer.
    """

    duration_s: float
    seed: int
    attacks: Mapping[str, int]
    honest_traces: int
    honest_records: int
    honest_records_lost: int
    honest_records_evicted: int
    honest_records_wrong: int
    honest_triggers: int
    honest_triggers_lost: int
    honest_triggers_collected: float
    honest_triggers_coherent: float
    honest_visitors: int
    honest_visitors_attached: int
    false_coherent: int
    verdicts: Mapping[str, int]
    reasons: Mapping[str, int]
    restarts: int
    node_rss_max_mib: float
    node_memory_max_mib: float
    node_memory_settled_max_mib: float
    node_memory_budget_mib: float
    node_memory_growth_mib: float
    node_arenas_end_mib: float
    node_files_max: int
    node_answers_late: float
    nodes: Mapping[str, Mapping[str, float]]
    turns: Sequence[TurnResult] = ()
    failures: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return not self.failures

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def settled(
    samples: Sequence[Sample], size: Callable[[Sample], int] = lambda one: one.bytes
) -> list[tuple[float, int]]:
    """Of each moment the least that was held in the seconds before it: what stayed."""
    found = []
    first = 0
    for index, now in enumerate(samples):
        while samples[first].at_s < now.at_s - _SETTLED_S:
            first += 1
        if now.at_s - samples[0].at_s >= _SETTLED_S:
            found.append((now.at_s, min(map(size, samples[first : index + 1]))))
    return found


def growth(samples: Sequence[Sample]) -> tuple[int, int]:
    """How much more of its own a daemon had in the last third, and how much is allowed.

    Of what it shares, the pool fills by and by, as it should; that has the budget.
    """
    stayed = settled(samples, lambda one: one.private_bytes)
    if not stayed:
        return 0, _GROWTH_BYTES
    begin, end = samples[0].at_s, samples[-1].at_s
    third = (end - begin) / 3
    middle = [size for at, size in stayed if begin + third <= at < end - third]
    last = [size for at, size in stayed if at >= end - third]
    if not middle or not last:
        return 0, _GROWTH_BYTES
    return max(last) - max(middle), int(_GROWTH_SHARE * max(middle)) + _GROWTH_BYTES


def _mib(size: float) -> float:
    return round(size / _MIB, 1)


def _turn_result(turn: Turn, judged: Judged) -> TurnResult:
    verdicts: Counter[str] = Counter()
    for low in turn.fired:
        outcome = judged.last.get(low)
        if outcome is None or not outcome.whole:
            verdicts[outcome.verdict if outcome is not None else "none"] += 1
    return TurnResult(
        turn.what, turn.killed, turn.records_lost, len(turn.fired), dict(verdicts.most_common())
    )


def judge(
    *,
    duration_s: float,
    seed: int,
    attacks: Mapping[str, int],
    written: Iterable[Written],
    visitors: Visitors,
    judged: Judged,
    samples: Iterable[Sample],
    answers_s: Sequence[float],
    budget_bytes: int,
    pool_bytes: int,
    files_max: int,
    deaths: Sequence[str],
    restarts: int = 0,
    nodes: Mapping[str, Mapping[str, float]] | None = None,
    turns: Sequence[Turn] = (),
) -> Result:
    """Put it all together. ``deaths``: daemons and honest processes that ended by themselves."""
    clients = list(written)
    fired = frozenset().union(*(client.fired for client in clients))
    records = sum(client.records for client in clients)
    lost = sum(client.records_lost for client in clients)
    evicted = wrong = collected = coherent = 0
    for outcome in judged.last.values():
        if outcome.low not in fired:
            continue
        if _KNOWN_GONE & set(outcome.reasons):
            evicted += outcome.missing
        else:
            lost += outcome.missing
        wrong += outcome.wrong
        if outcome.whole:
            collected += 1
            coherent += outcome.verdict == "coherent"

    by_node: dict[str, list[Sample]] = defaultdict(list)
    for one in samples:
        by_node[one.node].append(one)
    everything = [one for series in by_node.values() for one in series]
    stayed = max((size for series in by_node.values() for _, size in settled(series)), default=0)
    grown, allowed = max((growth(series) for series in by_node.values()), default=(0, 0))
    files = max((one.files for one in everything), default=0)
    rss = max((one.rss_bytes for one in everything), default=0)

    share = collected / len(fired) if fired else 0.0
    failures = list(deaths)
    if not records or not fired:
        failures.append("honest processes wrote nothing, or fired nothing: nothing was shown")
    if lost:
        when = "; ".join(f"{one.records_lost} in: {one.what}" for one in turns if one.records_lost)
        failures.append(
            f"{lost} of {records} honest records were lost" + (f" ({when})" if when else "")
        )
    if wrong:
        failures.append(f"{wrong} records of honest processes are there that they did not write")
    if share < TRIGGERS_COLLECTED_MIN:
        failures.append(
            f"{share:.2%} of {len(fired)} honest triggers were collected whole,"
            f" want {TRIGGERS_COLLECTED_MIN:.0%}"
        )
    if judged.false_coherent:
        failures.append(
            f"{len(judged.false_coherent)} traces are called coherent and are not whole,"
            f" as {min(judged.false_coherent):x}"
        )
    if visitors.attached < visitors.came:
        failures.append(
            f"{visitors.came - visitors.attached} of {visitors.came} honest processes that came"
            " during the attack could not attach"
        )
    if not everything:
        failures.append("no node's memory was looked at")
    for what, size in (("memory", stayed), ("resident memory", rss)):
        if size > budget_bytes:
            failures.append(
                f"a node's {what} is {_mib(size)} MiB, within its budget are {_mib(budget_bytes)}"
            )
    left = max((series[-1].arenas_bytes for series in by_node.values()), default=0)
    if left > pool_bytes:
        failures.append(
            f"when the attack is over, a node's arenas have {_mib(left)} MiB, its pool"
            f" {_mib(pool_bytes)}"
        )
    if grown > allowed:
        failures.append(
            f"a daemon's own memory grew by {_mib(grown)} MiB from the second third to the last,"
            f" {_mib(allowed)} are no growth"
        )
    if files > files_max:
        failures.append(f"a node had {files} open files, want {files_max} at most")
    late = sum(answer_s > _ANSWER_MAX_S for answer_s in answers_s) / max(1, len(answers_s))
    if late > _ANSWERS_LATE_MAX:
        failures.append(
            f"{late:.0%} of {len(answers_s)} times a node took more than {_ANSWER_MAX_S:g} s to"
            f" say how it is, {max(answers_s):.1f} s once; want {_ANSWERS_LATE_MAX:.0%} at most"
        )

    last = judged.last.values()
    return Result(
        duration_s=round(duration_s, 1),
        seed=seed,
        attacks=dict(attacks),
        honest_traces=sum(client.traces for client in clients),
        honest_records=records,
        honest_records_lost=lost,
        honest_records_evicted=evicted,
        honest_records_wrong=wrong,
        honest_triggers=len(fired),
        honest_triggers_lost=sum(client.triggers_lost for client in clients),
        honest_triggers_collected=share,
        honest_triggers_coherent=coherent / len(fired) if fired else 0.0,
        honest_visitors=visitors.came,
        honest_visitors_attached=visitors.attached,
        false_coherent=len(judged.false_coherent),
        verdicts=dict(Counter(one.verdict for one in last if one.low in fired).most_common()),
        reasons=dict(
            Counter(
                reason for one in last if one.low in fired for reason in one.reasons
            ).most_common()
        ),
        restarts=restarts,
        node_rss_max_mib=_mib(rss),
        node_memory_max_mib=_mib(max((one.bytes for one in everything), default=0)),
        node_memory_settled_max_mib=_mib(stayed),
        node_memory_budget_mib=_mib(budget_bytes),
        node_memory_growth_mib=_mib(grown),
        node_arenas_end_mib=_mib(left),
        node_files_max=files,
        node_answers_late=round(late, 4),
        nodes=nodes or {},
        turns=tuple(_turn_result(turn, judged) for turn in turns),
        failures=tuple(failures),
    )


def table(result: Result) -> str:
    """The figures, one a line."""
    rows = [
        ("attack", f"{result.duration_s:g} s, seed {result.seed}"),
        ("hostile processes", ", ".join(f"{name} {n}" for name, n in result.attacks.items())),
        ("honest traces over both nodes", f"{result.honest_traces:,}"),
        ("honest records", f"{result.honest_records:,}"),
        ("  lost", f"{result.honest_records_lost:,}"),
        ("  said to be evicted or abandoned", f"{result.honest_records_evicted:,}"),
        ("  other than they were written", f"{result.honest_records_wrong:,}"),
        ("honest triggers", f"{result.honest_triggers:,}"),
        ("  lost by the library's word", f"{result.honest_triggers_lost:,}"),
        ("  collected whole", f"{result.honest_triggers_collected:.2%}"),
        ("  and called coherent", f"{result.honest_triggers_coherent:.2%}"),
        ("falsely called coherent", f"{result.false_coherent:,}"),
        ("verdicts", ", ".join(f"{name} {n}" for name, n in result.verdicts.items()) or "none"),
        ("reasons", ", ".join(f"{name} {n}" for name, n in result.reasons.items()) or "none"),
        (
            "honest newcomers",
            f"{result.honest_visitors}, of which {result.honest_visitors_attached} were attached",
        ),
        ("daemons killed and started again", f"{result.restarts}"),
        (
            "memory of a node",
            (
                f"{result.node_memory_settled_max_mib} MiB of {result.node_memory_budget_mib},"
                f" {result.node_memory_max_mib} for seconds; resident {result.node_rss_max_mib};"
                f" growth {result.node_memory_growth_mib};"
                f" arenas at the end {result.node_arenas_end_mib}"
            ),
        ),
        ("files open in a node", f"{result.node_files_max}"),
        ("late answers of a node", f"{result.node_answers_late:.1%}"),
        *(
            (f"what {node} counted", ", ".join(f"{key} {n:g}" for key, n in counted.items()))
            for node, counted in result.nodes.items()
        ),
        ("judged", "as promised" if result.ok else "FAILED: " + "; ".join(result.failures)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
