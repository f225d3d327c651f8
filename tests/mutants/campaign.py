# SPDX-License-Identifier: Apache-2.0
"""The tests without a patch, then with each: every mutant must be noticed."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Sequence
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
    scratch: Scratch,
    logs: Path,
    say: Callable[[str], None],
    *,
    together: bool = False,
) -> list[Verdict]:
    """Judge each mutant, and say so, a line each. BaselineError, BuildError before the first.

    ``together``: all of them as one, since a defect may hide another.
    """
    cases = [tuple(mutants)] if together else [(mutant,) for mutant in mutants]
    logs.mkdir(parents=True, exist_ok=True)
    with scratch.lock():
        scratch.refresh()
        _check_baseline(mutants, scratch, logs / "unpatched.txt", say)
        verdicts = []
        for number, case in enumerate(cases, 1):
            log = logs / ("together.txt" if together else f"{case[0].name}.txt")
            verdict = _judge(case, scratch, log)
            verdicts.append(verdict)
            say(
                f"[{number}/{len(cases)}] {verdict.name}: {verdict.outcome}, {verdict.detail}"
                f" ({verdict.seconds:.1f} s)"
            )
    return verdicts


def _check_baseline(
    mutants: Sequence[Mutant], scratch: Scratch, log: Path, say: Callable[[str], None]
) -> None:
    tests = sorted({test for mutant in mutants for test in mutant.must_fail})
    say(f"without a patch: building, and running {len(tests)} tests")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        try:
            results = Suites(scratch, output).run(tests)
        except BuildError as error:
            raise BaselineError(f"without a patch: {error}; see {log}") from error
    problems = [f"{test}: failed" for test in sorted(results.failed)]
    problems += [f"{test}: {why}" for test, why in sorted(results.not_run.items())]
    if problems:
        listed = "\n  ".join(problems)
        raise BaselineError(f"without a patch these do not pass; see {log}\n  {listed}")
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
