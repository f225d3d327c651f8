# SPDX-License-Identifier: Apache-2.0
"""What of BPF the kernel holds."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from typing import Any

_FREED_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.1


def held() -> Counter[str]:
    """Programs, maps and links, by kind and name; how many of each."""
    return Counter(
        f"{kind} {one.get('type')} {one.get('name', '')}"
        for kind in ("prog", "map", "link")
        for one in _listed(kind)
    )


def left_since(before: Counter[str]) -> Counter[str]:
    """What it holds more than then; what it frees it frees a moment later (RCU)."""
    deadline_s = time.monotonic() + _FREED_WITHIN_S
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)
    return left


def _listed(kind: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["bpftool", "--json", kind, "list"], capture_output=True, text=True, check=True
    )
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed
