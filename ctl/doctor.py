# SPDX-License-Identifier: Apache-2.0
"""What of the kernel probes would work on this machine, as ``backsight-probes`` finds by trying."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.children import module_command, module_environment
from runtime.printable import printable
from runtime.schema import EXIT_CONFIG


class DoctorError(Exception):
    """The probes cannot be asked."""


class DoctorConfigError(DoctorError):
    """The configuration is wrong; the probes have said on standard error what is."""


def examine(config: Path | None) -> Iterator[dict[str, Any]]:
    """Each check as it is made; DoctorError says why there are none."""
    command = [*module_command("appliance.probes"), "--doctor"]
    if config is not None:
        command += ["--config", str(config)]
    with subprocess.Popen(
        command, env=module_environment(), stdout=subprocess.PIPE, text=True
    ) as probes:
        assert probes.stdout is not None
        for line in probes.stdout:
            check: dict[str, Any] = json.loads(line)
            yield check
    if probes.returncode == EXIT_CONFIG:
        raise DoctorConfigError
    if probes.returncode:
        message = (
            f"backsight-probes cannot tell (exit status {probes.returncode}); is it installed?"
        )
        raise DoctorError(message)


def in_words(check: dict[str, Any]) -> str:
    """A check for a person: a line, and two more where something is wrong."""
    check = {key: printable(str(text)) for key, text in check.items()} | {
        key: check[key] for key in ("ok", "is_needed")
    }
    state = "ok" if check["ok"] else "missing" if check["is_needed"] else "unused"
    line = f"{state:<8} {check['id']:<26} {check['found']}"
    if check["ok"]:
        return line
    return f"{line}\n{'':<9}without it: {check['costs']}\n{'':<9}what to do: {check['remedy']}"
