# SPDX-License-Identifier: Apache-2.0
"""How much work each program is for the kernel's verifier, which gives up at a million instructions.

verified.json has it for each version of Linux, as measured; ``python3 -m tests.probes.test_verified``
measures it for this one. A program that takes a fifth more is looked at before it is kept.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from pathlib import Path

import pytest

from appliance.probes.native import NativeProbes
from appliance.probes.symptoms import SYMPTOMS

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(60)]

KEPT = Path(__file__).with_name("verified.json")

MORE_ALLOWED = 1.2


def version() -> str:
    return ".".join(platform.release().split(".")[:2])


def measured() -> dict[str, int]:
    """Of all programs that this kernel takes."""
    with contextlib.closing(NativeProbes()) as probes:
        for name in dict.fromkeys(name for one in SYMPTOMS for name in one.objects):
            probes.attach(name)
        return {one.name: one.cost.verified_instructions for one in probes.programs()}


def test_no_program_has_become_much_more_work() -> None:
    kept: dict[str, dict[str, int]] = json.loads(KEPT.read_text())
    if version() not in kept:
        pytest.skip(f"nothing is known of Linux {version()}: python3 -m tests.probes.test_verified")
    before, now = kept[version()], measured()
    assert set(now) == set(before)
    more = {
        name: f"{before[name]} -> {count}"
        for name, count in now.items()
        if count > MORE_ALLOWED * before[name]
    }
    assert more == {}


def main() -> int:
    """Measure, and keep it."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[version()] = dict(sorted(measured().items()))
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
