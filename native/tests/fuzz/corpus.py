# SPDX-License-Identifier: Apache-2.0
"""A fuzzer's corpus as one file of text, an input a line in hexadecimal digits.

python3 native/tests/fuzz/corpus.py unpack FILE DIRECTORY
python3 native/tests/fuzz/corpus.py pack DIRECTORY FILE
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def unpack(file: Path, directory: Path) -> None:
    """Add the inputs to those that are there, under the names that libFuzzer gives."""
    directory.mkdir(parents=True, exist_ok=True)
    for line in file.read_text("ascii").split():
        content = bytes.fromhex(line)
        name = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        (directory / name).write_bytes(content)


def pack(directory: Path, file: Path) -> None:
    """Write all inputs, the shortest first."""
    inputs = {path.read_bytes() for path in directory.iterdir()}
    ordered = sorted(inputs, key=lambda content: (len(content), content))
    file.write_text("".join(f"{content.hex()}\n" for content in ordered if content), "ascii")


def main(arguments: list[str]) -> int:
    """Do what the command says; return the exit status."""
    match arguments:
        case ["unpack", file, directory]:
            unpack(Path(file), Path(directory))
        case ["pack", directory, file]:
            pack(Path(directory), Path(file))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
