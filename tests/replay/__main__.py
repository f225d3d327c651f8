# SPDX-License-Identifier: Apache-2.0
"""``sudo make replay``: a recorded minute of a real system, on nodes of your own.

Environment: SPEED (1: as recorded; 10: ten times as fast), FILE (a recording;
tests/data/nezha), KEEP (1: leave everything up at the end, to look around). LATE (a
number): requests are asked for up to so many rounds of the pools late, instead of by the
rule; POOL (4MiB): of each node then.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from ctl.progress import progress_bar
from testbed.topology import DaemonError
from tests.cluster.keep import keep_up
from tests.recall.late import Late, LateError
from tests.replay.replay import Progress, Recording, Replay, ReplayError
from tests.replay.report import table
from tests.replay.schedule import ScheduleError

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data" / "nezha"
OUTPUT = ROOT / "build" / "replay"
DEFAULT_FILE = DATA / "onlineboutique-cartservice-cpu-contention.csv.xz"


def _say(step: str) -> None:
    sys.stderr.write(f"- {step}\n")


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1000:
        raise ReplayError(f"SPEED={text}: want a number above 0, up to 1000 (1 is as recorded)")
    return speed


def _file(text: str) -> Path:
    for path in (Path(text), DATA / text, DATA / f"{text}.csv.xz"):
        if path.is_file():
            return path
    there = ", ".join(sorted(path.name.removesuffix(".csv.xz") for path in DATA.glob("*.csv.xz")))
    raise ReplayError(f"FILE={text}: no such recording; there is: {there}, or the path of a file")


def _show(replay: Replay) -> bool:
    """Print and write down what came out; whether it is as it should be."""
    if replay.late is not None:
        recall = replay.recall()
        recall.write(OUTPUT)
        print(
            f"\n{recall.table()}\n\nfigures: {OUTPUT / 'recall.json'}; make bench-plots draws them"
        )
        return not recall.failures
    result = replay.judge()
    result.write(OUTPUT / "result.json")
    print(f"\n{table(result)}\n")
    shown = max(replay.traces(), key=lambda trace: len(trace["nodes"]), default=None)
    if shown is not None:
        print(replay.coordinator.ctl("show", shown["trace_id"]))
    print(f"figures: {OUTPUT / 'result.json'}   what was collected: {replay.captured}")
    return result.checker_ok


def _keep(replay: Replay) -> None:
    node = next(iter(replay.nodes.values()))
    keep_up(replay.coordinator, node, node.directory)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    if os.geteuid() != 0:
        sys.stderr.write(
            "the replay makes network namespaces, which needs root: sudo make replay\n"
        )
        return 2
    try:
        speed = _speed(os.environ.get("SPEED") or "1")
        late = Late.from_environment(os.environ)
        recording = Recording.read(
            _file(os.environ.get("FILE") or str(DEFAULT_FILE)), DATA / "rules.json"
        )
        with progress_bar() as draw:

            def on_progress(progress: Progress) -> None:
                draw(
                    progress.events / max(progress.events_total, 1),
                    f"{progress.spans:,} spans, {progress.triggers} triggers",
                )

            with Replay(
                recording,
                captured=OUTPUT / "captured",
                speed=speed,
                late=late,
                on_progress=on_progress,
                on_step=_say,
            ) as replay:
                replay.run()
                ok = _show(replay)
                if os.environ.get("KEEP") == "1":
                    _keep(replay)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; everything was removed\n")
        return 130
    except (DaemonError, LateError, ReplayError, ScheduleError) as error:
        sys.stderr.write(f"replay: {error}\n")
        return 1
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
