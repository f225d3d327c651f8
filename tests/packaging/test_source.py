# SPDX-License-Identifier: Apache-2.0
"""What packages are built of: packaging/source-tar."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest


@pytest.fixture
def tree(repository: Path, tmp_path: Path) -> Path:
    """Of a few files, which git has, in a commit."""
    tree = tmp_path / "tree"
    (tree / "packaging").mkdir(parents=True)
    shutil.copy(repository / "packaging/source-tar", tree / "packaging")
    shutil.copy(repository / "meson.build", tree)
    (tree / ".gitignore").write_text("/build/\n")
    (tree / "gone.c").write_text("int gone;\n")
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@backsight.example")
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    return tree


def packed(tree: Path, into: Path, umask: int = 0o022, **environment: str) -> Path:
    subprocess.run(
        [tree / "packaging/source-tar", into],
        env={**os.environ, **environment},
        umask=umask,
        check=True,
    )
    (tar,) = into.iterdir()
    return tar


def names(tar: Path) -> list[str]:
    """Without the folder that all are in."""
    with tarfile.open(tar) as opened:
        return [name.partition("/")[2] for name in opened.getnames()]


def test_it_has_what_git_knows_and_is_there(tree: Path, tmp_path: Path) -> None:
    (tree / "gone.c").unlink()
    (tree / "new.c").write_text("int new;\n")
    (tree / "build").mkdir()
    (tree / "build/new.o").write_text("")
    tar = packed(tree, tmp_path / "into")
    assert names(tar) == [".gitignore", "meson.build", "new.c", "packaging/source-tar"]


def test_it_has_the_same_bytes_whoever_makes_it(tree: Path, tmp_path: Path) -> None:
    one = packed(tree, tmp_path / "one", TZ="UTC", LC_ALL="C.UTF-8")
    for path in (tree / "meson.build", tree / "gone.c"):
        path.chmod(0o600)
        os.utime(path, (1, 1))
    other = packed(tree, tmp_path / "other", umask=0o077, TZ="Asia/Tokyo", LC_ALL="en_US.UTF-8")
    assert one.read_bytes() == other.read_bytes()
