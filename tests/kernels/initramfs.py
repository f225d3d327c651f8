# SPDX-License-Identifier: Apache-2.0
"""A file system in memory with one program in it.

cpio's newc format: the kernel's Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import gzip
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_DIRECTORY, _FILE, _DEVICE = 0o040755, 0o100755, 0o020600

# The console, which the kernel opens for its first program: character device 5, 1.
_CONSOLE = (5, 1)

_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)


def _entry(
    number: int, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)
) -> bytes:
    encoded = name.encode() + b"\0"
    fields = (
        number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0,
    )  # fmt: skip
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    head = header + encoded
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def archive(files: Mapping[str, bytes]) -> bytes:
    """An archive of executable files by their paths, with a console."""
    directories = {"dev": None}
    for name in files:
        for parent in reversed(Path(name).parents[:-1]):
            directories[str(parent)] = None
    entries = [(name, _DIRECTORY, b"", (0, 0)) for name in sorted(directories)]
    entries.append(("dev/console", _DEVICE, b"", _CONSOLE))
    entries += [(name, _FILE, data, (0, 0)) for name, data in files.items()]
    packed = b"".join(_entry(number, *entry) for number, entry in enumerate(entries, start=1))
    return gzip.compress(packed + _entry(0, "TRAILER!!!", 0), compresslevel=1)


def libraries(program: Path) -> list[Path]:
    """What it is linked to, the loader too, where it looks for them."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    return [Path(path) for path in _LIBRARY.findall(listed.stdout)]


def with_program(program: Path, others: Mapping[str, bytes]) -> bytes:
    """An archive whose first program is this one, with other files."""
    files = {"init": program.read_bytes(), **others}
    for library in libraries(program):
        # The loader stands where the program says, all others where the loader looks.
        is_loader = library.name.startswith("ld-")
        place = str(library).lstrip("/") if is_loader else f"lib/{library.name}"
        files[place] = library.read_bytes()
    return archive(files)
