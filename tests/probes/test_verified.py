# SPDX-License-Identifier: Apache-2.0
"""No program becomes much more work for the verifier of this kernel (verified.py).

``python3 -m tests.probes.test_verified`` measures it, and keeps it.
"""

from __future__ import annotations

import contextlib
import platform
import sys

import pytest

from appliance.probes.compiler import coder, load
from appliance.probes.native import Loader
from appliance.probes.symptoms import SYMPTOMS
from tests.probes.verified import keep, kept, much_more, series_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(60)]

RELEASE = platform.release()


def measured(loader: Loader) -> dict[str, int]:
    """Of all programs that this kernel takes."""
    with contextlib.closing(load(loader)) as probes, coder(loader) as code:
        for name in dict.fromkeys(name for one in SYMPTOMS for name in one.objects):
            probes.attach(name, code(name))
        return {one.name: one.cost.verified_instructions for one in probes.programs()}


def test_no_program_has_become_much_more_work(either_loader: str) -> None:
    loader = Loader[either_loader.upper()]
    before = kept(series_of(RELEASE, loader))
    if before is None:
        pytest.skip(f"nothing is known of Linux {RELEASE}: python3 -m tests.probes.test_verified")
    assert much_more(before, measured(loader)) == {}


def test_what_is_much_more_is_seen() -> None:
    before = {"same": 100, "a little": 100, "much": 100, "gone": 100}
    now = {"same": 100, "a little": 120, "much": 121, "new": 1}
    assert much_more(before, now) == {
        "much": "100 -> 121",
        "gone": "100 -> none",
        "new": "none -> 1",
    }


def main() -> int:
    """Measure, and keep it."""
    for loader in Loader:
        keep(series_of(RELEASE, loader), measured(loader))
    return 0


if __name__ == "__main__":
    sys.exit(main())
