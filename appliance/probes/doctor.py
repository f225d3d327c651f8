# SPDX-License-Identifier: Apache-2.0
"""What of the probes would work on this machine: found by trying, not by asking.

Kernels are configured, patched and locked down in ways that no version number tells. So each
probe is loaded and attached for a moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.probes.compiler import Code, choices, coder, load
from appliance.probes.native import Loader, NativeProbes
from appliance.probes.symptoms import BREADCRUMBS, SYMPTOMS
from runtime.settings.node import ProbesSettings

# What programs use by either loader; `core` needs 6.1, for iterators over a process's threads.
_LEAST_KERNEL = (5, 18)

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
    for check in (_kernel(), _btf(), _capabilities(), _lockdown(), _jit()):
        yield replace(check, is_needed=check.is_needed and settings.wants_anything)
    yield _bypass(settings)
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
        "run Linux 6.1 or later, or 5.18 with the loader bcc",
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
    try:
        status = _STATUS.read_text()
    except OSError as error:
        return Check(
            "capabilities",
            ok=False,
            found=f"{_STATUS}: {error.strerror}",
            costs="all probes",
            remedy="mount /proc",
        )
    for line in status.splitlines():
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


def _bypass(settings: ProbesSettings) -> Check:
    return Check(
        "probes",
        not settings.bypass,
        "all are out (probes.bypass: true)" if settings.bypass else "wanted (probes.bypass: false)",
        "all triggers of probes, and breadcrumbs of the kernel",
        "set probes.bypass to false",
        is_needed=False,
    )


def _loaders(settings: ProbesSettings) -> tuple[list[Check], tuple[Loader, NativeProbes] | None]:
    """A check of each loader; and of those that are configured the first that works."""
    wanted = choices(settings.loader)
    failed: dict[Loader, OSError] = {}
    chosen: tuple[Loader, NativeProbes] | None = None
    for loader in Loader:
        try:
            probes = load(loader)
        except OSError as error:
            failed[loader] = error
        else:
            if loader in wanted and chosen is None:
                chosen = loader, probes
            else:
                probes.close()
    checks = [
        Check(
            f"loader.{loader.key}",
            loader not in failed,
            str(failed[loader].strerror or failed[loader]) if loader in failed else "works",
            "probes by this loader",
            _remedy(loader, failed[loader]) if loader in failed else _REMEDIES[loader],
            # Of two that may be taken, one is enough.
            is_needed=chosen is None and loader in wanted and settings.wants_anything,
        )
        for loader in Loader
    ]
    return checks, chosen


def _remedy(loader: Loader, error: OSError) -> str:
    if not _BTF.exists():
        return "see btf above"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "see capabilities above"
    if loader is Loader.BCC and os.environ.get("BCC_KERNEL_SOURCE"):
        return "unset BCC_KERNEL_SOURCE, or have it name headers of Linux"
    return _REMEDIES[loader]


_REMEDIES = {
    Loader.CORE: "run a newer kernel, or set probes.loader to bcc",
    Loader.BCC: "set probes.loader to core, or install python3-bpfcc and linux-headers",
}


def _probes(settings: ProbesSettings) -> Iterator[Check]:
    checks, chosen = _loaders(settings)
    yield from checks
    configured = f"probes.loader: {settings.loader}"
    yield Check(
        "loader",
        ok=chosen is not None,
        found=f"{chosen[0].key} is taken ({configured})"
        if chosen
        else f"none works ({configured})",
        costs="all triggers of probes",
        remedy="see the checks above",
        is_needed=settings.wants_anything,
    )
    # What cannot be tried is not told of.
    if chosen is None:
        return
    loader, probes = chosen
    with contextlib.closing(probes), coder(loader) as code:
        refused = dict(_tried(probes, code))
    for symptom in SYMPTOMS:
        yield _trial(
            symptom.key,
            [refused[name] for name in symptom.objects if name in refused],
            f"the trigger {symptom.trigger}",
            f"set probes.{symptom.key}.fire_ms and .record_ms to null, or run a newer kernel",
            settings.wants(symptom.key),
        )
    yield _trial(
        "breadcrumbs",
        [refused[BREADCRUMBS]] if BREADCRUMBS in refused else [],
        "hops that no application tells of",
        "set probes.breadcrumbs to false, or run a newer kernel",
        settings.wants_breadcrumbs,
    )


def _trial(key: str, why: list[str], costs: str, remedy: str, is_needed: bool) -> Check:
    found = "; ".join(why) or "loads and attaches"
    return Check(f"probe.{key}", not why, found, costs, remedy, is_needed)


def _tried(probes: NativeProbes, code: Code) -> Iterator[tuple[str, str]]:
    """Those that the kernel does not take, and why."""
    for name in dict.fromkeys(name for symptom in SYMPTOMS for name in symptom.objects):
        try:
            probes.attach(name, code(name))
        except OSError as error:
            yield name, str(error.strerror or error)
        else:
            probes.detach(name)
