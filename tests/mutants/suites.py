# SPDX-License-Identifier: Apache-2.0
"""Builds the scratch copy, and runs named tests in it.

A test that fails, and one that could not be run, are told apart: for the first the
test's own result is asked, never the exit status of who ran it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tests.mutants.catalogue import NamedTest, Suite
from tests.mutants.scratch import Scratch

_PYTHON = "/usr/bin/python3"
_MESON = "/usr/bin/meson"

# As the Makefile's test-c runs them.
_BUILD_FOLDERS = {Suite.MESON: ".", Suite.ASAN: "asan", Suite.TSAN: "tsan"}
_TSAN_WRAPPER = ["setarch", "--addr-no-randomize"]
_TSAN_OPTIONS = "halt_on_error=1:second_deadlock_stack=1"

# For each test. One that a patch broke may leave a thread behind for which Python waits without end.
_PYTEST_MAX_S = 300
_KILLED = -9


class BuildError(Exception):
    """What is there cannot be built."""


@dataclass(slots=True)
class Results:
    """What became of each test that was named. ``not_run`` has the reason."""

    passed: set[NamedTest] = field(default_factory=set)
    failed: set[NamedTest] = field(default_factory=set)
    not_run: dict[NamedTest, str] = field(default_factory=dict)


class Suites:
    """The tests of one scratch copy. All that programs print goes to ``log``."""

    def __init__(self, scratch: Scratch, log: TextIO) -> None:
        self._scratch = scratch
        self._log = log

    def run(self, tests: Collection[NamedTest]) -> Results:
        """Build what these tests need, and run them. BuildError when it cannot be built."""
        results = Results()
        for suite, folder in _BUILD_FOLDERS.items():
            names = [test.name for test in tests if test.suite is suite]
            for_python = suite is Suite.MESON and any(t.suite is Suite.PYTEST for t in tests)
            if names or for_python:
                self._build(self._scratch.build / folder, names, for_python=for_python)
            if names:
                self._run_meson(suite, self._scratch.build / folder, names, results)
        node_ids = [test.name for test in tests if test.suite is Suite.PYTEST]
        if node_ids:
            self._run_pytest(node_ids, results)
        return results

    # ------------------------------------------------------------------ C

    def _build(self, build: Path, names: Sequence[str], *, for_python: bool) -> None:
        # The copy's own Makefile knows how each directory is configured.
        ninja_file = build / "build.ninja"
        if not ninja_file.is_file():
            self._must_build(["make", str(ninja_file.relative_to(self._scratch.root))])
        ninja = ["ninja", "-C", str(build)]
        # What a patch did to the build description shows in the targets.
        self._must_build([*ninja, "build.ninja"])
        self._must_build([*ninja, *_targets(build, names, for_python=for_python)])

    def _must_build(self, command: Sequence[str]) -> None:
        if self._run(command) != 0:
            raise BuildError(f"{' '.join(command[:1])} failed")

    def _run_meson(self, suite: Suite, build: Path, names: Sequence[str], results: Results) -> None:
        log = build / "meson-logs" / "mutants.json"
        log.unlink(missing_ok=True)
        command = [_MESON, "test", "-C", str(build), "--no-rebuild", "--logbase", log.stem, *names]
        if suite is Suite.TSAN:
            command = [*_TSAN_WRAPPER, *command]
        self._run(command, TSAN_OPTIONS=_TSAN_OPTIONS)
        found = {}
        if log.is_file():
            for line in log.read_text("utf-8").splitlines():
                entry = json.loads(line)
                # Meson puts project and suite before the name, and a slash.
                found[entry["name"].rpartition(" / ")[2]] = entry["result"]
        for name in names:
            test, result = NamedTest(suite, name), found.get(name)
            if result == "OK":
                results.passed.add(test)
            elif result in ("FAIL", "TIMEOUT"):
                results.failed.add(test)
            else:
                results.not_run[test] = f"Meson says {result}" if result else "Meson knows no such"

    # ------------------------------------------------------------- Python

    def _run_pytest(self, node_ids: Sequence[str], results: Results) -> None:
        report = self._scratch.build / "mutants-pytest.xml"
        report.unlink(missing_ok=True)
        # What chance found in an earlier run shall not be what finds it in this one.
        shutil.rmtree(self._scratch.build / ".hypothesis", ignore_errors=True)
        status = self._run(
            [_PYTHON, "-m", "pytest", "-q", "-o", "junit_family=xunit1"]
            + [f"--junitxml={report}", *node_ids],
            most_s=_PYTEST_MAX_S * len(node_ids),
        )
        # 0: all passed, 1: some failed; else not even all were collected. Of one that was
        # killed the report is there if all tests were over.
        if status not in (0, 1, _KILLED) or not report.is_file():
            why = f"pytest ended with {status}: not collected, or it crashed"
            results.not_run |= {NamedTest(Suite.PYTEST, node_id): why for node_id in node_ids}
            return
        cases = list(_cases(report))
        for node_id in node_ids:
            test = NamedTest(Suite.PYTEST, node_id)
            outcomes = {outcome for case, outcome in cases if _belongs(case, node_id)}
            if "failure" in outcomes:
                results.failed.add(test)
            elif outcomes == {"passed"}:
                results.passed.add(test)
            else:
                other = ", ".join(sorted(outcomes - {"passed"}))
                results.not_run[test] = f"outcome: {other}" if other else "pytest ran no such"

    def _run(self, command: Sequence[str], most_s: float | None = None, **environment: str) -> int:
        self._log.write(f"\n$ {' '.join(command)}\n")
        self._log.flush()
        inherited = {
            name: value
            for name, value in os.environ.items()
            # Of the make that started us, and its tree.
            if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONPATH")
        }
        try:
            return subprocess.run(
                command,
                cwd=self._scratch.root,
                env={
                    **inherited,
                    "PYTHONPYCACHEPREFIX": str(self._scratch.bytecode),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=most_s,
            ).returncode
        except subprocess.TimeoutExpired:
            return _KILLED


def _targets(build: Path, names: Iterable[str], *, for_python: bool) -> list[str]:
    """What Ninja must build for these C tests, and for Python: all but the programs of C tests."""
    targets = json.loads((build / "meson-info/intro-targets.json").read_text("utf-8"))
    programs = {
        test["name"]: test["depends"]
        for test in json.loads((build / "meson-info/intro-tests.json").read_text("utf-8"))
    }
    # A name that Meson does not know needs nothing; the test's result will say so.
    needed = {target for name in names for target in programs.get(name, ())}
    if for_python:
        of_tests = set().union(*programs.values())
        needed |= {t["id"] for t in targets if t["build_by_default"] and t["id"] not in of_tests}
    files = [file for target in targets if target["id"] in needed for file in target["filename"]]
    return [str(Path(file).relative_to(build)) for file in files]


def _cases(report: Path) -> Iterable[tuple[str, str]]:
    """Node id and outcome of each test in pytest's report."""
    for case in ElementTree.parse(report).iter("testcase"):
        file, name = case.get("file", ""), case.get("name", "")
        module = file.removesuffix(".py").replace("/", ".")
        classes = case.get("classname", "").removeprefix(module).strip(".")
        node_id = "::".join([file, *(classes.split(".") if classes else []), name])
        outcomes = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        yield node_id, outcomes[0] if outcomes else "passed"


def _belongs(case: str, node_id: str) -> bool:
    return case == node_id or case.startswith((f"{node_id}[", f"{node_id}::"))
