# SPDX-License-Identifier: Apache-2.0
"""``make mutants``: whether the tests notice what they are for.

As many at the same time as there are processors, each in a copy of its own.

Environment: ONLY (names of mutants, or patterns such as hash-*, with blanks between;
all without it), TOGETHER=1 (those that are chosen as one).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tests.mutants.campaign import BaselineError, Outcome, Verdict, run
from tests.mutants.catalogue import CatalogueError, read_all
from tests.mutants.scratch import Scratch, ScratchError

ROOT = Path(__file__).resolve().parent.parent.parent
PATCHES = ROOT / "tests" / "mutants" / "patches"
OUTPUT = ROOT / "build" / "mutants"


def _say(text: str) -> None:
    print(text, flush=True)


def _table(verdicts: Sequence[Verdict]) -> str:
    width = max(len(verdict.name) for verdict in verdicts)
    lines = [f"{v.name:{width}}  {v.outcome:8}  {v.seconds:6.1f} s  {v.breaks}" for v in verdicts]
    return "\n".join(lines)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    # Most tests wait as long as they work, or have one thread.
    jobs = len(os.sched_getaffinity(0))
    try:
        mutants = read_all(PATCHES, os.environ.get("ONLY", "").split())
        verdicts = run(
            mutants,
            [Scratch(ROOT, OUTPUT / f"tree-{number}") for number in range(1, jobs + 1)],
            OUTPUT / "logs",
            _say,
            together=os.environ.get("TOGETHER") == "1",
        )
    except CatalogueError as error:
        sys.stderr.write(f"mutants: {error}\n")
        return 2
    except (BaselineError, ScratchError) as error:
        sys.stderr.write(f"mutants: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nmutants: stopped\n")
        return 130
    found = sum(verdict.outcome is Outcome.FOUND for verdict in verdicts)
    _say(f"\n{_table(verdicts)}\n\n{found} of {len(verdicts)} mutants found")
    return 0 if found == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
