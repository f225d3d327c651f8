# SPDX-License-Identifier: Apache-2.0
"""The tests without a patch, then with each: every mutant must be noticed."""

from __future__ import annotations

import contextlib
import enum
import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import Mutant
from tests.mutants.scratch import PatchDoesNotApply, Scratch
from tests.mutants.suites import BuildError, Results, Suites


class Outcome(enum.StrEnum):
    """``FOUND``: every test that must fail did. ``ERROR``: one could not be run."""

    FOUND = "found"
    SURVIVED = "SURVIVED"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one mutant, or of some that were in the copy together."""

    mutants: tuple[Mutant, ...]
    outcome: Outcome
    detail: str
    seconds: float

    @property
    def name(self) -> str:
        return " + ".join(mutant.name for mutant in self.mutants)

    @property
    def breaks(self) -> str:
        return " ".join(mutant.breaks for mutant in self.mutants)


class BaselineError(Exception):
    """The tests do not even pass without a patch."""


def run(
    mutants: Sequence[Mutant],
    copies: Sequence[Scratch],
    logs: Path,
    say: Callable[[str], None],
    *,
    together: bool = False,
) -> list[Verdict]:
    """Judge each mutant, and say so, a line each. BaselineError, BuildError before the first.

    As many at the same time as there are ``copies``, but those that tests of the machine must
    notice one after the other. ``together``: all of them as one, since a defect may hide another.
    """
    cases = [tuple(mutants)] if together else [(mutant,) for mutant in mutants]
    logs.mkdir(parents=True, exist_ok=True)
    free: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
    judged = itertools.count(1)

    def judge(case: tuple[Mutant, ...]) -> Verdict:
        log = logs / ("together.txt" if together else f"{case[0].name}.txt")
        with _taken(free) as scratch:
            verdict = _judge(case, scratch, log)
        say(
            f"[{next(judged)}/{len(cases)}] {verdict.name}: {verdict.outcome}, {verdict.detail}"
            f" ({verdict.seconds:.1f} s)"
        )
        return verdict

    def judge_in_turn(cases: Sequence[tuple[Mutant, ...]]) -> list[Verdict]:
        return [judge(case) for case in cases]

    with contextlib.ExitStack() as stack:
        for scratch in copies:
            stack.enter_context(scratch.lock())
            scratch.refresh()
            free.put(scratch)
        # What has begun ends by itself, and takes its patch out.
        pool = ThreadPoolExecutor(len(copies))
        stack.callback(pool.shutdown, cancel_futures=True)
        _check_baseline(mutants, copies, logs, pool, say)
        of_machine = [case for case in cases if any(_tests_machine(mutant) for mutant in case)]
        groups = [of_machine, *([case] for case in cases if case not in of_machine)]
        verdicts = itertools.chain.from_iterable(pool.map(judge_in_turn, groups))
        return sorted(verdicts, key=lambda verdict: verdict.name)


def _tests_machine(mutant: Mutant) -> bool:
    return any(test.is_of_machine for test in mutant.must_fail)


@contextlib.contextmanager
def _taken(free: queue.SimpleQueue[Scratch]) -> Iterator[Scratch]:
    scratch = free.get()
    try:
        yield scratch
    finally:
        free.put(scratch)


def _check_baseline(
    mutants: Sequence[Mutant],
    copies: Sequence[Scratch],
    logs: Path,
    pool: Executor,
    say: Callable[[str], None],
) -> None:
    """Each copy runs its share of the tests, and the first one all those of the machine."""
    tests = sorted({test for mutant in mutants for test in mutant.must_fail})
    others = [test for test in tests if not test.is_of_machine]
    shares = [others[number :: len(copies)] for number in range(len(copies))]
    shares[0] += [test for test in tests if test.is_of_machine]
    say(f"without a patch: building, and running {len(tests)} tests")
    began = time.monotonic()

    def problems(number: int) -> list[str]:
        log = logs / ("unpatched.txt" if number == 0 else f"unpatched-{number + 1}.txt")
        with log.open("w", encoding="utf-8") as output:
            try:
                results = Suites(copies[number], output).run(shares[number])
            except BuildError as error:
                raise BaselineError(f"without a patch: {error}; see {log}") from error
        found = [f"{test}: failed; see {log}" for test in sorted(results.failed)]
        return found + [
            f"{test}: {why}; see {log}" for test, why in sorted(results.not_run.items())
        ]

    found = list(itertools.chain.from_iterable(pool.map(problems, range(len(copies)))))
    if found:
        raise BaselineError("\n  ".join(["without a patch these do not pass", *found]))
    say(f"without a patch: {len(tests)} tests pass ({time.monotonic() - began:.1f} s)")


def _judge(mutants: tuple[Mutant, ...], scratch: Scratch, log: Path) -> Verdict:
    must_fail = sorted({test for mutant in mutants for test in mutant.must_fail})
    began = time.monotonic()

    def verdict(outcome: Outcome, detail: str) -> Verdict:
        return Verdict(mutants, outcome, detail, time.monotonic() - began)

    with log.open("w", encoding="utf-8") as output:
        try:
            with contextlib.ExitStack() as patches:
                for mutant in mutants:
                    patches.enter_context(scratch.patched(mutant))
                results = Suites(scratch, output).run(must_fail)
        except PatchDoesNotApply as error:
            return verdict(Outcome.ERROR, f"the patch does not apply: {error}")
        except BuildError as error:
            return verdict(Outcome.ERROR, f"it does not build: {error}; see {log}")
    return verdict(*_outcome(results, log))


def _outcome(results: Results, log: Path) -> tuple[Outcome, str]:
    if results.not_run:
        test, why = min(results.not_run.items())
        return Outcome.ERROR, f"{test}: {why}; see {log}"
    if results.passed:
        names = ", ".join(str(test) for test in sorted(results.passed))
        return Outcome.SURVIVED, f"these tests pass all the same: {names}; see {log}"
    count = len(results.failed)
    return Outcome.FOUND, f"{count} test{'s' if count > 1 else ''} failed"
