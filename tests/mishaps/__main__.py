# SPDX-License-Identifier: Apache-2.0
"""``sudo make demo-probes``: break things below the shop, and see which trigger fires for whom.

Environment: ONLY (names of symptoms, separated by blanks: no others), KEEP (1: leave
everything up at the end, to look around), QUIET (10: seconds in which nothing is broken; 0:
that is left out).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from testbed.topology import DaemonError
from tests.cluster.keep import keep_up
from tests.demo.shop import DemoError
from tests.mishaps.judge import QUIET, Happened, Row, judge, judge_quiet
from tests.mishaps.mishaps import MISHAPS, Mishap
from tests.mishaps.site import Site

OUTPUT = Path(__file__).resolve().parents[2] / "build" / "demo-probes"

_QUIET_S = 10.0
_SECONDS_MAX = 3600

# Which is broken long enough for this many more orders, or until it has fired.
_ORDERS_MAX = 120

# A trace fires once a second for the same: the next thing begins after that.
_PAUSE_ORDERS = 40

_SHOWN = "held_lock"
_PRINTED_MAX = 5


def _say(step: str) -> None:
    sys.stderr.write(f"- {step}\n")


def _chosen(text: str) -> Sequence[Mishap]:
    names = text.split()
    known = {mishap.symptom: mishap for mishap in MISHAPS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DemoError(f"ONLY={text}: there is no {unknown[0]}; allowed: {' '.join(known)}")
    return [known[name] for name in names] or MISHAPS


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _SECONDS_MAX:
        raise DemoError(f"QUIET={text}: want seconds, 0 to {_SECONDS_MAX}")
    return seconds


def quiet(site: Site, seconds: float) -> Row:
    """Nothing is broken: nothing may fire."""
    begin_ns = time.time_ns()
    site.await_that(
        lambda: time.time_ns() >= begin_ns + seconds * 1e9, f"a quiet time of {seconds:g} s"
    )
    site.settle()
    return judge_quiet(f"nothing is broken for {seconds:g} s", site.seen().firings)


def suffer(site: Site, mishap: Mishap) -> Row:
    """Break it until it is seen, and mend it; what came of it."""
    set_up_ns = time.time_ns()
    fired_before = site.fired(mishap.service, mishap.trigger)
    with mishap.cause(site) as struck:
        orders = len(site.asked)

        def is_seen() -> bool:
            if len(site.asked) - orders > _ORDERS_MAX:
                return True
            if site.fired(mishap.service, mishap.trigger) == fired_before:
                return False
            if not struck.others:
                return True
            # Those who do harm may harm each other first.
            fired_for = site.fired_for(mishap.node, mishap.trigger, struck.at_ns)
            return bool(fired_for - struck.others)

        site.await_that(is_seen, mishap.what)
    end_ns = time.time_ns()
    site.await_orders(_PAUSE_ORDERS)
    site.settle()
    happened = Happened(
        mishap.symptom,
        mishap.what,
        mishap.trigger,
        mishap.node,
        set_up_ns,
        struck.at_ns,
        # What is mended is over for a request when that is.
        end_ns,
        struck.victims,
        struck.laterals,
        struck.others,
        untouched=tuple(site.untouched),
        order_lateral=mishap.order_lateral,
    )
    return judge(happened, site.asked, site.seen())


def _print(row: Row) -> None:
    print(f"\n{row.symptom}: {row.what}")
    if row.fired:
        print(f"  {row.fired} on {row.node} after {row.latency_ms:g} ms: {row.value}")
        print(f"  trace {row.victim}, {'which it struck' if row.victim_right else 'NOT STRUCK'}")
        if row.laterals:
            shown = ", ".join(row.laterals[:3]) + (", ..." if len(row.laterals) > 3 else "")
            count = len(row.laterals)
            print(
                f"  with {count} lateral{'s' if count > 1 else ''}, collected"
                f" {row.laterals_collected} of {count}: {shown}"
            )
        if row.lateral_right is not None:
            print(f"  whom it had to name is {'among them' if row.lateral_right else 'MISSING'}")
        print(f"  beside {row.untouched} requests that it could not strike")
    elif row.symptom != QUIET:
        print("  DID NOT FIRE")
    if row.innocent:
        count = row.innocent_triggered
        print(f"  fired {count} time{'s' if count > 1 else ''} for, or with, who was not struck:")
        _print_some(row.innocent)
    if row.others:
        print(f"  besides, {len(row.others)} of other triggers:")
        _print_some(row.others)
    print("  right" if row.is_right else "  WRONG")


def _print_some(firings: Sequence[str]) -> None:
    for one in firings[:_PRINTED_MAX]:
        print(f"    {one}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    if os.geteuid() != 0:
        sys.stderr.write("the demo needs root, for namespaces and probes: sudo make demo-probes\n")
        return 2
    rows: list[Row] = []
    try:
        chosen = _chosen(os.environ.get("ONLY") or "")
        quiet_s = _seconds(os.environ.get("QUIET") or str(_QUIET_S))
        with Site(on_step=_say) as site:
            if quiet_s:
                _say(f"{quiet_s:g} s in which nothing is broken")
                rows.append(quiet(site, quiet_s))
                _print(rows[-1])
            for mishap in chosen:
                _say(mishap.what)
                rows.append(suffer(site, mishap))
                _print(rows[-1])
            shown = next((row for row in rows if row.symptom == _SHOWN), rows[-1])
            if shown.victim:
                print(f"\n{shown.symptom}, as backsightctl show tells it:\n")
                print(site.shop.coordinator.ctl("show", shown.victim))
            _write(rows)
            if os.environ.get("KEEP") == "1":
                keep_up(site.shop.coordinator, site.shop.nodes["stock"], site.shop.directory)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; everything was removed\n")
        return 130
    except (DaemonError, DemoError) as error:
        sys.stderr.write(f"demo-probes: {error}\n")
        return 1
    wrong = [row.symptom for row in rows if not row.is_right]
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} right"
        + (f"   WRONG: {', '.join(wrong)}" if wrong else "")
        + f"   figures: {OUTPUT / 'result.json'}"
    )
    return 1 if wrong else 0


def _write(rows: Sequence[Row]) -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    (OUTPUT / "result.json").write_text(json.dumps([row.json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
