# SPDX-License-Identifier: Apache-2.0
"""What of the probes would work on this machine: found by trying, not by asking.

Kernels are configured, patched and locked down in ways that no version number tells. So each
probe is loaded and attached for a moment.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.probes.native import NativeProbes
from appliance.probes.symptoms import SYMPTOMS
from runtime.settings.node import ProbesSettings

# Iterators over the threads of a process, and what else the programs use.
_LEAST_KERNEL = (6, 1)

_BTF = Path("/sys/kernel/btf/vmlinux")
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
_JIT = Path("/proc/sys/net/core/bpf_jit_enable")
_STATUS = Path("/proc/self/status")

# linux/capability.h
_CAPABILITIES = {"CAP_BPF": 39, "CAP_PERFMON": 38}
_CAP_SYS_ADMIN = 21


@dataclass(frozen=True, slots=True)
class Check:
    """``id`` stays the same for good. ``costs``: what there is not without it; ``remedy``: what to do."""

    id: str
    ok: bool
    found: str
    costs: str = ""
    remedy: str = ""
    is_needed: bool = True
    """Something that is configured depends on it."""


def examine(settings: ProbesSettings) -> Iterator[Check]:
    """All checks, the general ones first."""
    yield _kernel()
    yield _btf()
    yield _capabilities()
    yield _lockdown()
    yield _jit()
    yield from _probes(settings)


def _kernel() -> Check:
    release = platform.release()
    digits = release.split("-")[0].split(".")
    version = tuple(int(part) for part in digits[:2] if part.isdigit())
    return Check(
        "kernel",
        version >= _LEAST_KERNEL,
        f"Linux {release}",
        "all probes",
        f"run Linux {_LEAST_KERNEL[0]}.{_LEAST_KERNEL[1]} or later",
    )


def _btf() -> Check:
    return Check(
        "btf",
        _BTF.exists(),
        f"{_BTF} is {'there' if _BTF.exists() else 'not there'}",
        "all probes: the kernel does not say how its structures are laid out",
        "run a kernel that is built with CONFIG_DEBUG_INFO_BTF, as those of distributions are",
    )


def _capabilities() -> Check:
    effective = 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    has_all = bool(effective >> _CAP_SYS_ADMIN & 1)
    missing = [
        name
        for name, number in _CAPABILITIES.items()
        if not has_all and not effective >> number & 1
    ]
    return Check(
        "capabilities",
        not missing,
        f"missing: {', '.join(missing)}" if missing else ", ".join(_CAPABILITIES),
        "all probes",
        "run this as root, or give the process CAP_BPF and CAP_PERFMON",
    )


def _lockdown() -> Check:
    try:
        state = _LOCKDOWN.read_text()
    except OSError:
        state = "[none]"
    mode = state[state.find("[") + 1 : state.find("]")]
    return Check(
        "lockdown",
        mode != "confidentiality",
        f"kernel lockdown: {mode}",
        "all probes: programs may not read the kernel's memory",
        "boot with lockdown=integrity or without it",
    )


def _jit() -> Check:
    try:
        enabled = _JIT.read_text().strip() != "0"
    except OSError:  # not to be read by everybody, or always on
        enabled = True
    return Check(
        "jit",
        enabled,
        "BPF programs are compiled" if enabled else "BPF programs are interpreted",
        "speed: programs take several times as long",
        "set net.core.bpf_jit_enable=1 (sysctl)",
        is_needed=False,
    )


def _probes(settings: ProbesSettings) -> Iterator[Check]:
    try:
        probes = NativeProbes()
    except OSError as error:
        for symptom in SYMPTOMS:
            yield Check(
                f"probe.{symptom.key}",
                ok=False,
                found=str(error.strerror),
                costs=f"the trigger {symptom.trigger}",
                remedy="see the checks above",
                is_needed=settings.wants(symptom.key),
            )
        return
    with contextlib.closing(probes):
        refused = dict(_tried(probes))
    for symptom in SYMPTOMS:
        why = [refused[name] for name in symptom.objects if name in refused]
        yield Check(
            f"probe.{symptom.key}",
            not why,
            "; ".join(why) or "loads and attaches",
            f"the trigger {symptom.trigger}",
            f"set probes.{symptom.key}.fire_ms and .record_ms to null, or run a newer kernel",
            settings.wants(symptom.key),
        )


def _tried(probes: NativeProbes) -> Iterator[tuple[str, str]]:
    """Those that the kernel does not take, and why."""
    for name in dict.fromkeys(name for symptom in SYMPTOMS for name in symptom.objects):
        try:
            probes.attach(name)
        except OSError as error:
            yield name, str(error.strerror)
        else:
            probes.detach(name)
