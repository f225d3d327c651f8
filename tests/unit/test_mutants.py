# SPDX-License-Identifier: Apache-2.0
"""The mutants' runner on a tree of its own, and whether the patches of this one are still good."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.campaign import BaselineError, Outcome, run
from tests.mutants.catalogue import CatalogueError, Mutant, NamedTest, Suite, read_all
from tests.mutants.scratch import PatchDoesNotApply, Scratch, ScratchError

SOURCES = {
    ".gitignore": "/build/\n",
    "Makefile": "build/build.ninja:\n\t/usr/bin/meson setup $(@D)\n",
    "meson.build": "project('small', 'c')\ntest('sum', executable('test_sum', 'test_sum.c'))\n",
    "sum.h": "static inline int sum(int a, int b)\n{\n\treturn a + b;\n}\n",
    "test_sum.c": '#include "sum.h"\nint main(void)\n{\n\treturn sum(2, 3) != 5;\n}\n',
    "pytest.ini": "[pytest]\n",
    "product.py": "def product(a: int, b: int) -> int:\n    return a * b\n",
    "test_product.py": """\
import pytest
from product import product

@pytest.mark.parametrize("a", [0, 3])
def test_product(a):
    assert product(a, 2) == 2 * a

@pytest.fixture
def six():
    assert product(2, 3) == 6
    return 6

class TestOthers:
    def test_by_fixture(self, six):
        assert six == 6

    def test_anything(self):
        assert True
""",
}


@dataclass(frozen=True)
class Project:
    """A tree with one test in C and some in Python."""

    root: Path
    patches: Path
    logs: Path

    def mutant(
        self, name: str, file: str, old: str, new: str, *tests: str, breaks: str = "It breaks."
    ) -> None:
        before = (self.root / file).read_text("utf-8")
        diff = difflib.unified_diff(
            before.splitlines(keepends=True),
            before.replace(old, new).splitlines(keepends=True),
            f"a/{file}",
            f"b/{file}",
        )
        must_fail = "".join(f"Must fail: {test}\n" for test in tests)
        text = f"{breaks}\n\n{must_fail}\n{''.join(diff)}"
        (self.patches / f"{name}.patch").write_text(text, "utf-8")

    def scratch(self) -> Scratch:
        return Scratch(self.root, self.root / "build" / "tree")

    def outcomes(self, *copies: Scratch) -> dict[str, tuple[Outcome, str]]:
        scratches = copies or (self.scratch(),)
        verdicts = run(read_all(self.patches), scratches, self.logs, lambda _: None)
        return {verdict.name: (verdict.outcome, verdict.detail) for verdict in verdicts}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root, patches = tmp_path / "small", tmp_path / "patches"
    root.mkdir()
    patches.mkdir()
    for name, text in SOURCES.items():
        (root / name).write_text(text, "utf-8")
    subprocess.run(["git", "init", "--quiet", root], check=True)
    return Project(root, patches, tmp_path / "logs")


@pytest.mark.slow
def test_what_is_noticed_what_is_not_and_what_was_never_tried(project: Project) -> None:
    project.mutant("c-found", "sum.h", "a + b", "a - b", "meson sum")
    project.mutant("c-survives", "sum.h", "a + b", "b + a", "meson sum")
    project.mutant("c-without-end", "sum.h", "a + b;", "a + b", "meson sum")
    project.mutant("found", "product.py", "a * b", "a + b", "pytest test_product.py::test_product")
    project.mutant("broken", "product.py", "return", "retrun", "pytest test_product.py")
    project.mutant(
        "by-fixture",
        "product.py",
        "a * b",
        "a",
        "pytest test_product.py::TestOthers::test_by_fixture",
    )
    project.mutant(
        "one-of-two",
        "product.py",
        "a * b",
        "2 * a",
        "pytest test_product.py::TestOthers::test_anything",
        "meson sum",
    )
    project.mutant("stale", "product.py", "a * b", "a + b", "pytest test_product.py")
    stale = project.patches / "stale.patch"
    stale.write_text(stale.read_text("utf-8").replace("-    return a", "-    return A"), "utf-8")

    outcomes = project.outcomes()
    assert {name: outcome for name, (outcome, _) in outcomes.items()} == {
        "c-found": Outcome.FOUND,
        "c-survives": Outcome.SURVIVED,
        "c-without-end": Outcome.ERROR,
        "found": Outcome.FOUND,
        "broken": Outcome.ERROR,
        "by-fixture": Outcome.ERROR,
        "one-of-two": Outcome.SURVIVED,
        "stale": Outcome.ERROR,
    }
    assert "does not build" in outcomes["c-without-end"][1]
    assert "not collected" in outcomes["broken"][1]
    assert "outcome: error" in outcomes["by-fixture"][1]
    assert "does not apply" in outcomes["stale"][1]
    # Nothing of them remains: the tests pass again without a patch.
    for path in project.patches.glob("*.patch"):
        if path.stem not in ("c-survives", "found"):
            path.unlink()
    assert {name: outcome for name, (outcome, _) in project.outcomes().items()} == {
        "c-survives": Outcome.SURVIVED,
        "found": Outcome.FOUND,
    }
    assert (project.scratch().root / "sum.h").read_text("utf-8") == SOURCES["sum.h"]


@pytest.mark.slow
def test_some_are_put_in_together_and_each_test_must_fail_all_the_same(project: Project) -> None:
    def outcome() -> list[tuple[str, Outcome]]:
        mutants = read_all(project.patches)
        verdicts = run(mutants, [project.scratch()], project.logs, lambda _: None, together=True)
        return [(verdict.name, verdict.outcome) for verdict in verdicts]

    project.mutant("a", "sum.h", "a + b", "a - b", "meson sum")
    project.mutant("b", "product.py", "a * b", "a + b", "pytest test_product.py::test_product")
    assert outcome() == [("a + b", Outcome.FOUND)]
    # One undoes the other.
    project.mutant("c", "test_sum.c", "!= 5", "!= -1", "meson sum")
    assert outcome() == [("a + b + c", Outcome.SURVIVED)]
    for name in ("sum.h", "test_sum.c", "product.py"):
        assert (project.scratch().root / name).read_text("utf-8") == SOURCES[name]


@pytest.mark.slow
def test_what_is_built_stays_built_and_no_defect_with_it(project: Project) -> None:
    def compiles() -> bool:
        project.outcomes()
        return "Compiling C object" in (project.logs / "unpatched.txt").read_text("utf-8")

    project.mutant("c-found", "sum.h", "a + b", "a - b", "meson sum")
    assert compiles()
    # The defect was built last; its source came back since.
    assert compiles()
    (project.patches / "c-found.patch").unlink()
    project.mutant("found", "product.py", "a * b", "a + b", "pytest test_product.py", "meson sum")
    assert compiles()
    assert not compiles()


def test_several_copies_have_a_mutant_each_at_the_same_time(project: Project) -> None:
    """Each test waits for the other one's beginning: alone, neither would end."""
    here, there = str(project.root / "here"), str(project.root / "there")
    os.mkfifo(here)
    os.mkfifo(there)
    meet = {
        "first": f"open({here!r}, 'w'), open({there!r})",
        "second": f"open({here!r}), open({there!r}, 'w')",
    }
    for name, opened in meet.items():
        file = f"test_{name}.py"
        test = f"def test_meets():\n    assert not MUTANT or not ({opened})\n"
        (project.root / file).write_text(f"MUTANT = False\n\n{test}", "utf-8")
        project.mutant(name, file, "MUTANT = False", "MUTANT = True", f"pytest {file}")
    copies = [Scratch(project.root, project.root / "build" / name) for name in ("one", "two")]
    assert [outcome for outcome, _ in project.outcomes(*copies).values()] == [Outcome.FOUND] * 2


def test_those_that_look_at_the_machine_do_so_one_after_the_other(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for another one that does not: both at the same time would wait for ever."""
    monkeypatch.setattr("tests.mutants.suites._PYTEST_MAX_S", 20)
    (project.root / "tests/probes").mkdir(parents=True)
    for number, (one, beside) in enumerate((("a", "c"), ("b", "d"))):
        meets = str(project.root / f"meets-{number}")
        os.mkfifo(meets)
        for name, file, mode in (
            (one, f"tests/probes/test_{one}.py", "r"),
            (beside, f"test_{beside}.py", "w"),
        ):
            test = f"def test_meets():\n    assert not MUTANT or not open({meets!r}, {mode!r})\n"
            (project.root / file).write_text(f"MUTANT = False\n\n{test}", "utf-8")
            project.mutant(name, file, "MUTANT = False", "MUTANT = True", f"pytest {file}")
    copies = [Scratch(project.root, project.root / "build" / name) for name in ("one", "two")]
    outcomes = project.outcomes(*copies)
    assert [(name, outcome) for name, (outcome, _) in outcomes.items()] == [
        (name, Outcome.FOUND) for name in "abcd"
    ]


def test_a_test_that_fails_and_never_ends_is_found(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutants.suites._PYTEST_MAX_S", 10)
    waits = "threading.Thread(target=threading.Event().wait).start()"
    test = (
        f"import threading\n\nMUTANT = False\n\ndef test_it():\n    if MUTANT:\n        {waits}\n"
    )
    (project.root / "test_it.py").write_text(f"{test}        assert False\n", "utf-8")
    project.mutant("it", "test_it.py", "MUTANT = False", "MUTANT = True", "pytest test_it.py")
    assert [outcome for outcome, _ in project.outcomes().values()] == [Outcome.FOUND]


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("meson sun", "Meson knows no such"),
        ("pytest test_product.py::test_prodigy", "not collected"),
        ("pytest test_produce.py", "not collected"),
    ],
)
def test_a_test_that_is_not_there_is_an_error_before_any_patch(
    project: Project, test: str, why: str
) -> None:
    project.mutant("found", "product.py", "a * b", "a + b", test)
    with pytest.raises(BaselineError, match=why):
        project.outcomes()


def test_a_test_that_fails_without_a_patch_shows_nothing(project: Project) -> None:
    project.mutant("found", "product.py", "a * b", "a + b", "pytest test_product.py")
    (project.root / "product.py").write_text(
        SOURCES["product.py"].replace("a * b", "a // b"), "utf-8"
    )
    with pytest.raises(BaselineError, match=r"pytest test_product\.py: failed"):
        project.outcomes()


def test_a_test_that_is_skipped_shows_nothing(project: Project) -> None:
    project.mutant("found", "product.py", "a * b", "a + b", "pytest test_skipped.py")
    (project.root / "test_skipped.py").write_text(
        "import pytest\n\ndef test_skipped():\n    pytest.skip('no root')\n", "utf-8"
    )
    with pytest.raises(BaselineError, match="outcome: skipped"):
        project.outcomes()


# -------------------------------------------------------------- the copy


def test_the_copy_has_what_lies_in_the_tree_and_no_more(project: Project) -> None:
    scratch = project.scratch()
    with scratch.lock():
        scratch.refresh()
        kept = (scratch.root / "sum.h").stat().st_mtime_ns
        (scratch.root / "sum.h").with_name("left_over.h").write_text("", "utf-8")
        (scratch.root / "test_sum.c").write_text("spoiled", "utf-8")
        (scratch.build / "built").parent.mkdir()
        (scratch.build / "built").write_text("", "utf-8")
        (project.root / "product.py").unlink()
        (project.root / "script").write_text("#!/bin/sh\n", "utf-8")
        (project.root / "script").chmod(0o755)
        (project.root / "build").mkdir(exist_ok=True)
        (project.root / "build" / "ignored").write_text("", "utf-8")
        scratch.refresh()
    files = {
        path.relative_to(scratch.root).as_posix()
        for path in scratch.root.rglob("*")
        if path.is_file()
    }
    assert files == {*SOURCES, "script", "build/built"} - {"product.py"}
    assert (scratch.root / "script").stat().st_mode & 0o111
    assert (scratch.root / "test_sum.c").read_text("utf-8") == SOURCES["test_sum.c"]
    assert (scratch.root / "sum.h").stat().st_mtime_ns == kept


def test_only_one_campaign_uses_a_copy(project: Project) -> None:
    first, second = project.scratch(), project.scratch()
    refused = pytest.raises(ScratchError, match="another run")
    with first.lock(), refused, second.lock():
        pass
    with second.lock():
        pass


def test_bytecode_of_what_is_patched_is_forgotten(project: Project) -> None:
    """A mutant may have the size of what it replaces, and come within the same second."""
    project.mutant("found", "product.py", "a * b", "a + b", "pytest test_product.py")
    (mutant,) = read_all(project.patches)
    scratch = project.scratch()
    with scratch.lock():
        scratch.refresh()
        compiled = [
            scratch.bytecode / "some/folder" / f"{name}.cpython-311.pyc"
            for name in ("product", "test_product")
        ]
        for path in compiled:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", "utf-8")
        with scratch.patched(mutant):
            assert [path.exists() for path in compiled] == [False, True]
            assert "a + b" in (scratch.root / "product.py").read_text("utf-8")
            compiled[0].write_text("", "utf-8")
        assert [path.exists() for path in compiled] == [False, True]
    assert "a * b" in (scratch.root / "product.py").read_text("utf-8")


# ----------------------------------------------------------- the patches

HEADER = "It breaks\nin a way.\n\nMust fail: meson sum\nMust fail: pytest a.py::test_b[c d]\n\n"
DIFF = (
    "--- a/sum.h\n+++ b/sum.h\n@@ -1 +1 @@\n-a\n+b\n--- a/x/y.c\n+++ b/x/y.c\n@@ -1 +1 @@\n-a\n+b\n"
)


def test_a_patch_says_what_it_breaks_and_who_notices(tmp_path: Path) -> None:
    patch = tmp_path / "sum-2.patch"
    patch.write_text(HEADER + DIFF, "utf-8")
    assert Mutant.read(patch) == Mutant(
        "sum-2",
        "It breaks in a way.",
        (NamedTest(Suite.MESON, "sum"), NamedTest(Suite.PYTEST, "a.py::test_b[c d]")),
        patch,
        (Path("sum.h"), Path("x/y.c")),
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a", HEADER, "want a unified diff"),
        ("a_b", HEADER + DIFF, "allowed in a name"),
        ("a", DIFF, "does not say what it breaks"),
        ("a", "It breaks.\n" + DIFF, "who must notice"),
        ("a", "It breaks.\nMust fail: sum\n" + DIFF, "want one of meson, asan, tsan, pytest"),
        ("a", "It breaks.\nMust fail: meson\n" + DIFF, "and a test of it"),
        ("a", HEADER + "By the way\n" + DIFF, "'By the way' follows"),
        ("a", HEADER + DIFF.replace("a/x/y.c", "/dev/null"), "a file that is there already"),
    ],
)
def test_what_a_patch_lacks_is_named(tmp_path: Path, name: str, text: str, problem: str) -> None:
    patch = tmp_path / f"{name}.patch"
    patch.write_text(text, "utf-8")
    with pytest.raises(CatalogueError, match=problem) as caught:
        Mutant.read(patch)
    assert str(caught.value).startswith(f"{patch}: ")


def test_some_are_chosen_by_name_or_pattern(tmp_path: Path) -> None:
    for name in ("hash-a", "hash-b", "wire"):
        (tmp_path / f"{name}.patch").write_text(HEADER + DIFF, "utf-8")
    assert [mutant.name for mutant in read_all(tmp_path)] == ["hash-a", "hash-b", "wire"]
    assert [mutant.name for mutant in read_all(tmp_path, ["hash-*"])] == ["hash-a", "hash-b"]
    assert [mutant.name for mutant in read_all(tmp_path, ["wire", "*-a"])] == ["hash-a", "wire"]
    with pytest.raises(
        CatalogueError, match="no mutant is called 'hashb'; like it: hash-b"
    ) as caught:
        read_all(tmp_path, ["wire", "hashb"])
    assert str(caught.value).endswith(f"all are in {tmp_path}")


def ours() -> list[Mutant]:
    return read_all(Path(__file__).resolve().parent.parent / "mutants" / "patches")


@pytest.mark.parametrize("mutant", ours(), ids=lambda mutant: mutant.name)
def test_each_patch_applies_and_names_c_tests_that_are_there(
    mutant: Mutant, repository: Path, build: Path
) -> None:
    """Whoever moves what a mutant is about learns it here, and need not wait for `make mutants`."""
    try:
        Scratch(repository, repository).check(mutant)
    except PatchDoesNotApply as error:
        pytest.fail(f"{mutant.patch}: renew it, what it breaks has changed: {error}")
    in_c = json.loads((build / "meson-info/intro-tests.json").read_text("utf-8"))
    for test in mutant.must_fail:
        if test.suite is not Suite.PYTEST:
            assert test.name in [known["name"] for known in in_c]


def test_each_test_that_a_patch_names_is_collected(repository: Path) -> None:
    """With its parameters: of one that is not there, pytest runs none of the others either."""
    tests = {
        test.name for mutant in ours() for test in mutant.must_fail if test.suite is Suite.PYTEST
    }
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted(tests)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr
