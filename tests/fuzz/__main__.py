# SPDX-License-Identifier: Apache-2.0
"""``make fuzz-python``: libFuzzer on what Python reads, by atheris, in a venv of its own.

``python3 -m tests.fuzz TARGET [OPTION OF LIBFUZZER...] DIRECTORY``; ``seeds TARGET DIRECTORY`` writes
what to begin with, ``cover TARGET DIRECTORY`` tells how much of the code the inputs there reach.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _write_seeds(target: str, directory: Path) -> None:
    from tests.fuzz.targets import TARGETS

    directory.mkdir(parents=True, exist_ok=True)
    for seed in TARGETS[target]().seeds():
        name = hashlib.sha1(seed, usedforsecurity=False).hexdigest()
        (directory / name).write_bytes(seed)


def _cover(target: str, directory: Path) -> None:
    coverage: Any = importlib.import_module("coverage")
    found = coverage.Coverage(branch=True, source=["protocol", "coordinator", "appliance.core"])
    found.start()
    from tests.fuzz.targets import TARGETS

    take = TARGETS[target]()
    for path in sorted(directory.iterdir()):
        take(path.read_bytes())
    found.stop()
    found.report(skip_empty=True, omit=["*_pb2*"], sort="Cover")


def _fuzz(target: str, options: Sequence[str]) -> None:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["protocol", "coordinator", "appliance", "formats"]):
        targets = importlib.import_module("tests.fuzz.targets")
    take = targets.TARGETS[target]()
    atheris.Setup([sys.argv[0], *options], take)
    atheris.Fuzz()


def main(arguments: list[str]) -> int:
    """Do what the command says; return the exit status."""
    match arguments:
        case ["seeds", target, directory]:
            _write_seeds(target, Path(directory))
        case ["cover", target, directory]:
            _cover(target, Path(directory))
        case [target, *options] if options:
            _fuzz(target, options)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
