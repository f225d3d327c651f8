# SPDX-License-Identifier: Apache-2.0
"""What a program that starts clusters leaves behind when it ends: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from testbed.topology import PYTHON


def namespaces_of(pid: int) -> list[str]:
    """Network namespaces that a process made."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = (line.split()[0] for line in listing.stdout.splitlines())
    return [name for name in names if name.startswith(f"backsight-{pid}-")]


def processes_in(directory: str) -> list[str]:
    """Command lines that name the directory, by pid."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if directory in command:
                found.append(f"{entry.parent.name}: {command}")
    return found


def interrupt_and_look(module: str, begun: str) -> None:
    """Press Ctrl-C once a program of ten minutes has said that; it must leave nothing."""
    # Not pytest's own directory, into which other users may not look.
    with tempfile.TemporaryDirectory(prefix="backsight-") as directory:
        Path(directory).chmod(0o755)
        process = subprocess.Popen(
            # It is ignored in what was started in the background, and in what that starts.
            ["env", "--default-signal=INT", PYTHON, "-m", module],
            env={**os.environ, "DURATION": "600", "TMPDIR": directory},
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if begun in line:
                    break
            assert namespaces_of(process.pid), said
            assert processes_in(directory)
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
        assert process.returncode == 130, (said, rest)
        assert rest.endswith("stopped; everything was removed\n"), rest
        assert namespaces_of(process.pid) == []
        assert processes_in(directory) == []
        assert list(Path(directory).iterdir()) == []
