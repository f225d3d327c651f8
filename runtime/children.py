# SPDX-License-Identifier: Apache-2.0
"""Modules of ours that a program of ours runs in a process of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Where this tree lies, or what was installed of it.
_ROOT = Path(__file__).resolve().parent.parent


def module_command(name: str) -> list[str]:
    """What runs a module as a program; with ``module_environment``, it imports from where we do."""
    # -P: whatever lies in the current directory is no part of it.
    only_system = ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, "-P", *only_system, "-m", name]


def module_environment() -> dict[str, str]:
    """Our environment, for ``module_command``; nothing more of others is imported than here."""
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    paths = [str(_ROOT), *([given] if given else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
