# SPDX-License-Identifier: Apache-2.0
"""What of BPF the kernel holds."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from testbed.descriptors import fdinfo

_BPFFS = Path("/sys/fs/bpf")

_FREED_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.1
_ATTEMPTS = 20


def held() -> Counter[str]:
    """Programs, maps and links, by kind and name, and what is pinned; how many of each."""
    found = Counter(
        f"{kind} {one.get('type')} {one.get('name', '')}"
        for kind in ("prog", "map", "link")
        for one in bpftool(kind, "list")
    )
    found.update(f"pinned {path}" for path in _BPFFS.rglob("*"))
    return found


def ids_of(pid: int, kind: str) -> set[int]:
    """Of what a process holds of a kind, "prog" or "map"; no number is given twice."""
    return {
        int(line.split()[1])
        for text in fdinfo(pid)
        for line in text.splitlines()
        if line.startswith(f"{kind}_id:")
    }


def left_since(before: Counter[str]) -> Counter[str]:
    """What it holds more than then; what it frees it frees a moment later (RCU)."""
    deadline_s = time.monotonic() + _FREED_WITHIN_S
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)
    return left


def bpftool(*words: str) -> list[dict[str, Any]]:
    """What it answers; asked again where something went away while it looked."""
    said = ""
    for _ in range(_ATTEMPTS):
        done = subprocess.run(
            ["bpftool", "--json", *words], capture_output=True, text=True, check=False
        )
        if not done.returncode:
            listed: list[dict[str, Any]] = json.loads(done.stdout)
            return listed
        said = done.stdout + done.stderr
    raise RuntimeError(f"bpftool {' '.join(words)}: {said}")
