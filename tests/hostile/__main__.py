# SPDX-License-Identifier: Apache-2.0
"""``sudo make hostile``: hostile processes beside honest ones on two nodes, for ten minutes.

Environment: DURATION (600: seconds of attack), SEED (of what attackers do; printed), ONLY
(names of attacks, with commas: no others).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from ctl.progress import progress_bar
from testbed.topology import DaemonError
from tests.hostile.attacks import ALL
from tests.hostile.campaign import ROOT, Campaign, HostileError, Progress
from tests.hostile.judge import table

OUTPUT = ROOT / "build" / "hostile"

_SECONDS_MIN, _SECONDS_MAX = 10, 86400


def _say(step: str) -> None:
    sys.stderr.write(f"- {step}\n")


def _number(name: str, default: int, low: int, high: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not low <= int(text) <= high:
        raise HostileError(f"{name}={text}: want a whole number, {low} to {high}")
    return int(text)


def _only(text: str) -> list[str]:
    known = {attack.label for attack in ALL}
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - known:
        raise HostileError(
            f"ONLY={text}: no attack {min(unknown)}; there is: {', '.join(sorted(known))}"
        )
    return names


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    if os.geteuid() != 0:
        sys.stderr.write(
            "this makes network namespaces and has other users' processes,"
            " which needs root: sudo make hostile\n"
        )
        return 2
    try:
        duration_s = _number("DURATION", 600, _SECONDS_MIN, _SECONDS_MAX)
        seed = _number("SEED", time.time_ns() // 1_000_000_000, 1, (1 << 63) - 1)
        only = _only(os.environ.get("ONLY") or "")
        with progress_bar() as draw:

            def on_progress(progress: Progress) -> None:
                draw(
                    min(1.0, progress.elapsed_s / progress.duration_s),
                    f"{progress.fired:,} honest triggers, {progress.whole:,} whole,"
                    f" {progress.lost} records lost",
                )

            with Campaign(duration_s, seed, only, on_progress, _say) as campaign:
                campaign.run()
                result = campaign.judge()
        result.write(OUTPUT / "result.json")
        print(f"\n{table(result)}\n\nfigures: {OUTPUT / 'result.json'}")
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; everything was removed\n")
        return 130
    except (DaemonError, HostileError) as error:
        sys.stderr.write(f"hostile: {error}\n")
        return 1
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
