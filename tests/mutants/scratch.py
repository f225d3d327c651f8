# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree for mutants: no mistake in it reaches the sources.

The copy stays, with its build directory, so that only what a patch changes is built
again. What it copies are the files as they lie in the repository, committed or not.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.catalogue import Mutant


class ScratchError(Exception):
    """The copy cannot be made, or is in use."""


class PatchDoesNotApply(Exception):
    """The sources have moved on; the patch must follow."""


class Scratch:
    """A copy of ``repository`` in ``root``; one user at a time, by ``with scratch.lock()``."""

    def __init__(self, repository: Path, root: Path) -> None:
        self._repository = repository
        self.root = root
        self.build = root / "build"
        self.bytecode = self.build / ".pycache"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second campaign away. ScratchError when there is one."""
        self.root.mkdir(parents=True, exist_ok=True)
        directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ScratchError(f"another run uses {self.root}; wait for its end") from None
            yield
        finally:
            os.close(directory)

    def refresh(self) -> None:
        """Make the copy equal to the repository. What is equal keeps its time, and is not built again."""
        wanted = self._sources()
        for path in wanted:
            source, copy = self._repository / path, self.root / path
            if not copy.is_file() or not filecmp.cmp(source, copy, shallow=False):
                copy.parent.mkdir(parents=True, exist_ok=True)
                self._write(path, source.read_bytes())
            shutil.copymode(source, copy)
        for copy in self._copies():
            if copy.relative_to(self.root) not in wanted:
                copy.unlink()

    @contextlib.contextmanager
    def patched(self, mutant: Mutant) -> Iterator[None]:
        """The copy with the defect in it. PatchDoesNotApply when it does not fit exactly."""
        self.check(mutant)
        before = {path: (self.root / path).read_bytes() for path in mutant.changed}
        try:
            self._git_apply(mutant)
            for path in mutant.changed:
                self._forget_bytecode(path)
            yield
        finally:
            for path, content in before.items():
                self._write(path, content)

    def check(self, mutant: Mutant) -> None:
        """PatchDoesNotApply when the patch does not fit exactly."""
        self._git_apply(mutant, "--check")

    def _copies(self) -> list[Path]:
        copies = []
        for folder, folders, files in os.walk(self.root):
            if Path(folder) == self.root and "build" in folders:
                folders.remove("build")
            copies += [Path(folder) / file for file in files]
        return copies

    def _sources(self) -> set[Path]:
        # As root under sudo the tree belongs to somebody else, which git would refuse.
        listing = subprocess.run(
            ["git", "-c", "safe.directory=*", "ls-files", "-z"]
            + ["--cached", "--others", "--exclude-standard"],
            cwd=self._repository,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        paths = {Path(name) for name in listing.split("\0") if name}
        return {path for path in paths if (self._repository / path).is_file()}

    def _write(self, path: Path, content: bytes) -> None:
        """Content that came back counts as new too, or the defect would stay in what was built."""
        (self.root / path).write_bytes(content)
        self._forget_bytecode(path)

    def _forget_bytecode(self, path: Path) -> None:
        """Python tells sources apart by their size and by whole seconds, which two mutants may share.

        Wherever it lies: some packages are links to their sources.
        """
        if path.suffix == ".py":
            for compiled in self.bytecode.rglob(f"{path.stem}.*.pyc"):
                compiled.unlink()

    def _git_apply(self, mutant: Mutant, *options: str) -> None:
        run = subprocess.run(
            ["git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn"]
            + [*options, str(mutant.patch.resolve())],
            cwd=self.root,
            # The copy is no repository, and lies in one that shall not be asked.
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(self.root.parent.resolve())},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            raise PatchDoesNotApply(run.stderr.strip())
