#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""file_lists.py BUILD TAG...: what Meson installs by each tag, as rpm's `%files -f` reads it: TAG.files.

A folder of ours is of each package that has something in it: rpm 4.18 may remove one that others
depend on before these.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def installed(build: str, tag: str) -> tuple[list[Path], list[Path]]:
    """Folders of ours, and files and links, by their absolute paths; nothing that is compiled."""
    with tempfile.TemporaryDirectory() as directory:
        meson = ["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--tags", tag]
        subprocess.run([*meson, "--destdir", directory], check=True)
        folders, files = [], []
        for path in sorted(Path(directory).rglob("*")):
            place = "/" / path.relative_to(directory)
            if "__pycache__" in place.parts:
                continue
            if path.is_symlink() or path.is_file():
                files.append(place)
            elif any(part.startswith("backsight") for part in place.parts):
                folders.append(place)
        return folders, files


def line(path: Path) -> str:
    """How rpm compresses a manual page shows in its name."""
    return f"{path}*" if "man" in path.parts else str(path)


def main() -> None:
    """Write the lists into the current folder."""
    build, *tags = sys.argv[1:]
    for tag in tags:
        folders, files = installed(build, tag)
        compiled = {path.parent / "__pycache__" for path in files if path.suffix == ".py"}
        lines = [f"%dir {folder}" for folder in folders]
        lines += [line(path) for path in files]
        lines += sorted(map(str, compiled))
        Path(f"{tag}.files").write_text("\n".join(lines) + "\n")


main()
