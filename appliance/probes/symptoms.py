# SPDX-License-Identifier: Apache-2.0
"""What probes look for: the key of the configuration, the trigger, the programs that see it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.kernel_events import Kind


@dataclass(frozen=True, slots=True)
class Symptom:
    """``key`` in ``probes:`` of the node's configuration; ``object``: of bpf/<object>.bpf.c."""

    key: str
    kind: Kind
    object: str

    @property
    def trigger(self) -> str:
        """The name under which it fires."""
        return f"kernel.{self.key}"


SYMPTOMS = (
    Symptom("run_queue", Kind.RUN_QUEUE, "waits"),
    Symptom("cpu_throttled", Kind.CPU_THROTTLED, "waits"),
    Symptom("lock_wait", Kind.LOCK_WAIT, "waits"),
    Symptom("io_wait", Kind.IO_WAIT, "waits"),
    Symptom("blocked", Kind.BLOCKED, "waits"),
)
