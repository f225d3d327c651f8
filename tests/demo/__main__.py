# SPDX-License-Identifier: Apache-2.0
"""``sudo make demo``: a shop of live services on three nodes, and what became of its trouble.

Environment: DURATION (30: seconds of load), KEEP (1: leave everything up at the
end, to look around). LATE (a number): besides, orders are asked for up to so many
rounds of the pools late; POOL (4MiB): of each node then.
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
from tests.demo.live import Live, Progress
from tests.demo.report import table
from tests.demo.shop import DemoError
from tests.recall.late import Late, LateError

ROOT = Path(__file__).resolve().parent.parent.parent
OUTPUT = ROOT / "build" / "demo"

_SECONDS_MAX = 3600


def _say(step: str) -> None:
    sys.stderr.write(f"- {step}\n")


def _seconds(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _SECONDS_MAX:
        raise DemoError(f"DURATION={text}: want whole seconds, 1 to {_SECONDS_MAX}")
    return int(text)


def _show(live: Live) -> bool:
    """Print and write down what came out; whether it is as it should be."""
    if live.late is not None:
        recall = live.recall()
        recall.write(OUTPUT)
        print(f"\n{recall.table()}\n\nfigures: {OUTPUT / 'recall.json'}")
        return not recall.failures
    result = live.judge()
    result.write(OUTPUT / "result.json")
    print(f"\n{table(result)}\n")
    # One of those that failed on the last node: the whole story, with its stack.
    if "a" in result.shown:
        print(live.shop.coordinator.ctl("show", result.shown["a"]))
    print(f"figures: {OUTPUT / 'result.json'}   what was collected: {live.captured}")
    return result.checker_ok


def _keep(live: Live) -> None:
    more = f"""\
  order one more, where the last service fails, and its caller falls back:
                         ip netns exec {live.shop.coordinator.host.namespace} \\
                           /usr/bin/python3 -c 'import urllib.request as r; \\
                           print(r.urlopen("{live.shop.url}/orders/100199").read())'
"""
    keep_up(live.shop.coordinator, live.shop.nodes["stock"], live.shop.directory, more)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    if os.geteuid() != 0:
        sys.stderr.write("the demo makes network namespaces, which needs root: sudo make demo\n")
        return 2
    try:
        with progress_bar() as draw:

            def on_progress(progress: Progress) -> None:
                draw(progress.elapsed_s / progress.duration_s, f"{progress.requests:,} orders")

            with Live(
                OUTPUT / "captured",
                duration_s=_seconds(os.environ.get("DURATION") or "30"),
                late=Late.from_environment(os.environ),
                on_progress=on_progress,
                on_step=_say,
            ) as live:
                live.run()
                ok = _show(live)
                if os.environ.get("KEEP") == "1":
                    _keep(live)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; everything was removed\n")
        return 130
    except (DaemonError, DemoError, LateError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
