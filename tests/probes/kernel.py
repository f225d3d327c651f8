# SPDX-License-Identifier: Apache-2.0
"""What of BPF the kernel holds."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from typing import Any


def held() -> Counter[str]:
    """Programs, maps and links, by kind and name; how many of each."""
    return Counter(
        f"{kind} {one.get('type')} {one.get('name', '')}"
        for kind in ("prog", "map", "link")
        for one in _listed(kind)
    )


def _listed(kind: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["bpftool", "--json", kind, "list"], capture_output=True, text=True, check=True
    )
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed
