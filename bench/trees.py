# SPDX-License-Identifier: Apache-2.0
"""The tree that is measured: this one, or another commit beside it.

Of another commit everything is its own but what measures it: the programs in C
are compiled from this folder's sources with its headers and libraries, so
that the same is measured twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent

# Where a tree's Python packages are (the Makefile's PYTHONPATH). Not every commit has them all.
_PACKAGES = ("build/protocol", "build/formats", "build/appliance", "build/native/python")

_CLIENT = "build/native/src/client/libbacksight.so"
_NODE = "build/native/src/node/libbacksight-node.a"


@dataclass(frozen=True, slots=True)
class _Program:
    """As meson.build has it: the libraries, as Meson builds them; its sources beside that of its name."""

    libraries: tuple[str, ...]
    more_sources: tuple[str, ...] = ()


_FULL_POOL = _Program((_NODE, _CLIENT), ("full_pool.c",))

_PROGRAMS: Mapping[str, _Program] = {
    "writer": _Program((_CLIENT,)),
    "clients": _Program((_NODE,)),
    "http_service": _Program((_CLIENT,)),
    "pickup": _Program((_CLIENT,)),
    "starved": _Program((_CLIENT,)),
    "pool_horizon": _FULL_POOL,
    "pool_lookup": _FULL_POOL,
    "pool_restart": _FULL_POOL,
    "pool_triggers": _FULL_POOL,
}

# As meson.build has it, but for the warnings, which are the other commit's own affair.
_CFLAGS = ("-std=gnu11", "-O2", "-g", "-D_GNU_SOURCE")


@dataclass(frozen=True, slots=True)
class Tree:
    """A commit that is built, and the programs that measure it."""

    commit: str
    root: Path
    programs: Path

    def python_path(self) -> list[str]:
        return [str(self.root), *(str(self.root / package) for package in _PACKAGES)]

    def program(self, name: str) -> Path:
        """SystemExit where it was not built."""
        path = self.programs / name
        if not path.exists():
            sys.exit(f"{path} is missing; run: make build")
        return path

    @contextlib.contextmanager
    def daemons(self) -> Iterator[None]:
        """Whatever starts in Python meanwhile is of this tree, wherever it is started."""
        mine = {"PYTHONPATH": os.pathsep.join(self.python_path()), "PYTHONSAFEPATH": "1"}
        before = {name: os.environ.get(name) for name in mine}
        os.environ.update(mine)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def started_root() -> Path:
    """Of the tree whose daemons are started now."""
    return Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])


def _git(*arguments: str) -> str:
    # As root under sudo the tree belongs to somebody else, which git would refuse.
    return subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def this_tree() -> Tree:
    """The tree that this file is in, as `make build` has left it."""
    try:
        commit = _git("describe", "--always", "--dirty").strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"  # not a clone
    return Tree(commit, _ROOT, _ROOT / "build/bench")


def base_tree(revision: str) -> Tree:
    """Build another commit in build/base, unless it is there. SystemExit says what failed."""
    try:
        commit = _git("rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        sys.exit(f"BASE={revision}: no commit of this repository")
    base = _ROOT / "build/base"
    tree = Tree(commit, base / "tree", base / "programs")
    built = base / "commit"
    if not built.exists() or built.read_text() != commit:
        shutil.rmtree(base, ignore_errors=True)
        tree.root.mkdir(parents=True)
        _build(tree)
        built.write_text(commit)
    # What measures may have changed since.
    _compile(tree)
    return tree


def _build(tree: Tree) -> None:
    archive = subprocess.Popen(
        ["git", "-c", "safe.directory=*", "archive", tree.commit], cwd=_ROOT, stdout=subprocess.PIPE
    )
    with archive:
        subprocess.run(["tar", "-x"], cwd=tree.root, stdin=archive.stdout, check=True)
    if archive.returncode:
        sys.exit(f"git archive {tree.commit} failed; its reason stands above")
    log = tree.root.parent / "build.log"
    with log.open("wb") as output:
        for command in (["meson", "setup", "build"], ["ninja", "-C", "build"]):
            done = subprocess.run(
                command, cwd=tree.root, stdout=output, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode:
                sys.exit(f"{tree.commit} cannot be built ({' '.join(command)}); see {log}")


def _compile(tree: Tree) -> None:
    tree.programs.mkdir(exist_ok=True)
    includes = [f"-I{tree.root / folder}" for folder in ("native/include", "native/src")]
    for name, program in _PROGRAMS.items():
        sources = [str(_HERE / source) for source in (f"{name}.c", *program.more_sources)]
        linked = [str(tree.root / library) for library in program.libraries]
        found = [f"-Wl,-rpath,{(tree.root / library).parent}" for library in program.libraries]
        done = subprocess.run(
            ["cc", *_CFLAGS, *includes, *sources, *linked, *found, "-lpthread",
             "-o", str(tree.programs / name)],
            check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"bench/{name}.c does not compile with the headers of {tree.commit}")
