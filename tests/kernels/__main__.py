# SPDX-License-Identifier: Apache-2.0
"""``sudo make test-kernels``: the probes on Debian's cloud kernels, under qemu, by either loader.

KEEP=1: keep how many instructions their verifiers went through (tests/probes/verified.json).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from appliance.probes.native import Loader
from tests.kernels.matrix import CASES, OBJECTS, Found, boot, compiled
from tests.kernels.packages import KernelsError, kernels
from tests.probes.verified import keep, kept, much_more, series_of

BUILD = Path(__file__).resolve().parents[2] / "build"


# Before there was a tracepoint for what is written to a socket (sock_send_length).
_NO_SOCKETS_BY_BCC = (6, 3)


def impossible(found: Found, loader: Loader) -> tuple[set[str], set[str]]:
    """Objects that this loader cannot have on that kernel, and cases that need them."""
    version = tuple(int(part) for part in found.kernel.split(".")[:2])
    if loader is Loader.BCC and version < _NO_SOCKETS_BY_BCC:
        return {"sockets"}, {"tcp_retransmit"}
    return set(), set()


def mistakes(found: Found, loader: Loader) -> list[str]:
    """What is not as it should be."""
    no_objects, no_cases = impossible(found, loader)
    wrong = [
        f"{name} does not attach: {found.errors.get(name, 'nothing is said of it')}"
        for name in OBJECTS
        if found.errors.get(name) != "" and not (name in no_objects and name in found.errors)
    ]
    wrong += [
        f"{name} is not right"
        for name in CASES
        if found.cases.get(name) is not (name not in no_cases)
    ]
    before = kept(series_of(found.kernel, loader))
    if before is None:
        wrong.append("what its verifier goes through is not known: KEEP=1 keeps it")
    else:
        wrong += [
            f"{name} is more work for the verifier: {change}"
            for name, change in much_more(before, found.instructions).items()
        ]
    return wrong


def table(found: Found, loader: Loader) -> str:
    """What a kernel takes, for people."""
    attached = sum(not error for error in found.errors.values())
    lines = [
        f"{found.kernel}, loader {loader.key}: {attached} of {len(OBJECTS)} objects attached, verified instructions:"
    ]
    lines += [f"  {name:20}{count:8,}" for name, count in sorted(found.instructions.items())]
    _, no_cases = impossible(found, loader)
    for name, right in found.cases.items():
        said = "not to be had" if name in no_cases else "right" if right else "WRONG"
        lines.append(f"  case {name}: {said}")
    return "\n".join(lines)


def run(say: Callable[[str], None]) -> dict[str, list[str]]:
    """Boot each, with either loader; by kernel and loader, what is wrong."""
    say("asking apt for kernels, and fetching those that are not there")
    wrong = {}
    for kernel in kernels(BUILD / "kernels"):
        for loader in Loader:
            say(f"booting {kernel.package}, loader {loader.key}")
            code = compiled(kernel, BUILD) if loader is Loader.BCC else {}
            found = boot(kernel, BUILD / "tests/guest", loader.key, code)
            print(table(found, loader), flush=True)
            if os.environ.get("KEEP") == "1":
                keep(series_of(found.kernel, loader), found.instructions)
            wrong[f"{found.kernel}, loader {loader.key}"] = mistakes(found, loader)
    return wrong


def _say(step: str) -> None:
    sys.stderr.write(f"- {step}\n")


def main() -> int:
    """See above."""
    try:
        wrong = run(_say)
    except (KernelsError, PermissionError) as error:  # build/ may be root's
        sys.stderr.write(f"test-kernels: {error}\n")
        return 1
    for kernel, mistaken in wrong.items():
        for mistake in mistaken:
            print(f"{kernel}: {mistake}")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
