# SPDX-License-Identifier: Apache-2.0
"""Boots a kernel with the probes in it, and reads what they say of themselves."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from appliance.probes.compiler import compiler
from appliance.probes.native import BASE
from appliance.probes.symptoms import SYMPTOMS
from tests.kernels.initramfs import with_program
from tests.kernels.packages import Kernel, KernelsError

# A software emulation boots in ten seconds, and verifies programs in some more.
_TIMEOUT_S = 300

# One CPU, so that threads have to wait for it.
_MACHINE = ("-machine", "q35,accel=tcg", "-cpu", "max", "-smp", "1", "-m", "512")

OBJECTS = tuple(dict.fromkeys(name for one in SYMPTOMS for name in one.objects))
CASES = ("run_queue", "tcp_retransmit")


@dataclass(slots=True)
class Found:
    """What a kernel takes.

    ``errors``: by object, "" if it is attached; ``instructions``: by program, those that its
    verifier went through; ``cases``: whether each came out right; ``source``: what bcc is to
    compile of the first object.
    """

    kernel: str = ""
    layout: str = ""
    errors: dict[str, str] = field(default_factory=dict)
    instructions: dict[str, int] = field(default_factory=dict)
    cases: dict[str, bool] = field(default_factory=dict)
    done: bool = False


def parse(output: str) -> Found:
    """What the guest said. KernelsError with its last words if it did not get to its end."""
    found = Found()
    for line in output.splitlines():
        # The kernel writes to the console too.
        if not line.startswith("{"):
            continue
        try:
            said = json.loads(line)
        except ValueError:
            # The kernel wrote in the midst of it: what it said is missing.
            continue
        match said:
            case {"failed": str(what), "error": str(error)}:
                raise KernelsError(f"{what}: {error}")
            case {"kernel": str(release)}:
                found.kernel = release
            case {"layout": str(text)}:
                found.layout = text
            case {"object": str(name), "error": str(error)}:
                found.errors[name] = error
            case {"program": str(name), "instructions": int(count)}:
                found.instructions[name] = count
            case {"case": str(name), "right": bool(right)}:
                found.cases[name] = right
            case {"done": True}:
                found.done = True
    if not found.done:
        raise KernelsError("it did not get to its end:\n" + "\n".join(output.splitlines()[-20:]))
    return found


def compiled(kernel: Kernel, build: Path) -> dict[str, bytes]:
    """What bcc makes of each object for a kernel, which says how its structures are laid out."""
    texts = {name: (build / f"bpf/{name}.bcc.c").read_text() for name in (BASE, *OBJECTS)}
    layout = boot(kernel, build / "tests/guest", "layout", {}).layout
    with compiler() as code:
        return {name: code(name, f"{layout}\n{text}".encode()) for name, text in texts.items()}


def boot(kernel: Kernel, guest: Path, what: str, code: Mapping[str, bytes]) -> Found:
    """Boot it, with the guest as its only program; ``what``: its first argument (guest.c)."""
    with tempfile.TemporaryDirectory() as directory:
        initramfs = Path(directory) / "initramfs"
        initramfs.write_bytes(
            with_program(guest, {f"code/{name}": data for name, data in code.items()})
        )
        command = [
            "qemu-system-x86_64", *_MACHINE, "-nodefaults", "-no-user-config", "-no-reboot",
            "-display", "none", "-serial", "stdio",
            "-kernel", str(kernel.image), "-initrd", str(initramfs),
            # A kernel that panics ends the machine.
            "-append", f"console=ttyS0 quiet panic=-1 -- {what} {' '.join(OBJECTS)}",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace",
                timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise KernelsError(f"{error.filename} is not installed: make test-kernels") from error
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode(errors="replace") if error.stdout else ""
            raise KernelsError(f"not within {_TIMEOUT_S} s:\n{said[-2000:]}") from error
        if done.returncode:
            raise KernelsError(f"qemu ended with {done.returncode}: {done.stderr.strip()}")
        return parse(done.stdout)
