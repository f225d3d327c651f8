# SPDX-License-Identifier: Apache-2.0
"""What of the machine's counters can be read here: found by reading them, as the node does."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.core.machine import PRESSURES
from appliance.counters import Counters
from appliance.links import Links
from appliance.machine import limits_of
from appliance.probes.doctor import Check
from runtime.settings.node import MachineSettings


def examine(settings: MachineSettings) -> Iterator[Check]:
    """A check of each way by which the node reads them."""
    try:
        with Counters() as counters, Links() as links:
            devices = links.all()
            reading = counters.read([])
    except OSError as error:
        yield Check(
            "machine.netlink",
            ok=False,
            found=str(error.strerror or error),
            costs="all triggers of `machine`",
            remedy="let the process use AF_NETLINK (RestrictAddressFamilies= of its unit, seccomp)",
            is_needed=settings.wants_anything,
        )
        return
    yield Check(
        "machine.netlink",
        ok=True,
        found=f"tells of network devices ({len(devices)}) and queues ({len(reading.queues)})",
        is_needed=settings.wants_anything,
    )
    yield Check(
        "machine.listen_overflows",
        bool(reading.overflows),
        "counted" if reading.overflows else "/proc/net/netstat does not tell of them",
        "the trigger machine.listen_overflow",
        "set machine.listen_overflows to null, or mount the whole of /proc",
        settings.listen_overflows is not None,
    )
    unknown = [name for name in PRESSURES if name not in reading.stalled_us]
    wanted = limits_of(settings).pressures
    yield Check(
        "machine.pressure",
        not unknown,
        f"not told: {', '.join(unknown)}" if unknown else ", ".join(PRESSURES),
        "the triggers " + ", ".join(f"machine.{name}_pressure" for name in unknown or PRESSURES),
        "boot with psi=1, or set machine.*_pressure_percent to null",
        any(wanted[name] is not None for name in unknown),
    )
