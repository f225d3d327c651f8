# SPDX-License-Identifier: Apache-2.0
"""Mutants as the files in ``patches/`` describe them."""

from __future__ import annotations

import difflib
import enum
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MUST_FAIL = "Must fail:"
_DIFF_STARTS = re.compile(r"^--- ", re.MULTILINE)
_CHANGED = re.compile(r"^--- (.*)$", re.MULTILINE)
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

# Their tests see all BPF programs there are, what the machine as a whole waits for, and who has a CPU.
_OF_MACHINE = (
    "tests/kernels/",
    "tests/machine/",
    "tests/mishaps/",
    "tests/packaging/",
    "tests/probes/",
)


class CatalogueError(Exception):
    """A patch that cannot be used, or a name that stands for none."""


class Suite(enum.StrEnum):
    """Where a test belongs: to a Meson build, of whatever kind, or to pytest."""

    MESON = "meson"
    ASAN = "asan"
    TSAN = "tsan"
    PYTEST = "pytest"


@dataclass(frozen=True, slots=True, order=True)
class NamedTest:
    """A test as a patch names it: in Meson's list, or a node id of pytest.

    A node id of a file, class or function with parameters stands for all that it holds.
    """

    suite: Suite
    name: str

    @property
    def is_of_machine(self) -> bool:
        """Whether it looks at all of the machine, where it would see another one of its kind."""
        return self.suite is Suite.PYTEST and self.name.startswith(_OF_MACHINE)

    def __str__(self) -> str:
        return f"{self.suite} {self.name}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect: what it breaks, who must notice, and which files the patch changes."""

    name: str
    breaks: str
    must_fail: tuple[NamedTest, ...]
    patch: Path
    changed: tuple[Path, ...]

    @classmethod
    def read(cls, patch: Path) -> Self:
        """CatalogueError when the file is no patch with the header that README.md asks for."""
        text = patch.read_text("utf-8")
        diff = _DIFF_STARTS.search(text)
        if diff is None:
            raise CatalogueError(f"{patch}: no line starts with '--- ': want a unified diff")
        if not _NAME.fullmatch(patch.stem):
            raise CatalogueError(f"{patch}: allowed in a name: a-z, 0-9, single '-' between them")
        words: list[str] = []
        must_fail: list[NamedTest] = []
        for line in text[: diff.start()].splitlines():
            if line.startswith(_MUST_FAIL):
                must_fail.append(_named_test(patch, line.removeprefix(_MUST_FAIL)))
            elif line and must_fail:
                raise CatalogueError(f"{patch}: {line!r} follows '{_MUST_FAIL}'; want it before")
            else:
                words += line.split()
        if not words:
            raise CatalogueError(f"{patch}: does not say what it breaks, in a sentence on top")
        if not must_fail:
            raise CatalogueError(f"{patch}: no '{_MUST_FAIL} SUITE TEST' says who must notice")
        return cls(
            patch.stem,
            " ".join(words),
            tuple(must_fail),
            patch,
            tuple(_changed_file(patch, name) for name in _CHANGED.findall(text)),
        )


def _named_test(patch: Path, text: str) -> NamedTest:
    suite, _, name = text.strip().partition(" ")
    if suite not in list(Suite) or not name:
        raise CatalogueError(
            f"{patch}: '{_MUST_FAIL}{text}'; want one of {', '.join(Suite)}, and a test of it"
        )
    return NamedTest(Suite(suite), name)


def _changed_file(patch: Path, name: str) -> Path:
    if not name.startswith("a/"):
        raise CatalogueError(
            f"{patch}: '--- {name}'; want '--- a/FILE', a file that is there already"
        )
    return Path(name.removeprefix("a/"))


def read_all(patches: Path, only: Sequence[str] = ()) -> list[Mutant]:
    """All mutants by name, or those whose names match one of the patterns (``hash-*``)."""
    files = sorted(patches.glob("*.patch"))
    if not files:
        raise CatalogueError(f"{patches}: no patch is there")
    names = [file.stem for file in files]
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            near = ", ".join(difflib.get_close_matches(pattern, names)) or "none"
            raise CatalogueError(
                f"no mutant is called {pattern!r}; like it: {near}; all are in {patches}"
            )
    return [
        Mutant.read(file)
        for file in files
        if not only or any(fnmatch.fnmatchcase(file.stem, pattern) for pattern in only)
    ]
