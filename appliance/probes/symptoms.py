# SPDX-License-Identifier: Apache-2.0
"""What probes look for: the key of the configuration, the trigger, the programs that see it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.kernel_events import Kind


@dataclass(frozen=True, slots=True)
class Symptom:
    """``key`` in ``probes:`` of the node's configuration; the ``objects`` (bpf/<name>.bpf.c) that it needs."""

    key: str
    kind: Kind
    objects: tuple[str, ...]

    @property
    def trigger(self) -> str:
        """The name under which it fires."""
        return f"kernel.{self.key}"


def _of(objects: tuple[str, ...], *kinds: Kind) -> tuple[Symptom, ...]:
    return tuple(Symptom(kind.name.lower(), kind, objects) for kind in kinds)


def keys_of(name: str) -> list[str]:
    """The keys of the configuration that need an object: people know these, and not its name."""
    keys = [one.key for one in SYMPTOMS if name in one.objects]
    return [*keys, "breadcrumbs"] if name == BREADCRUMBS else keys


BREADCRUMBS = "sockets"
"""The object that tells of peers too."""

SYMPTOMS = (
    *_of(("waits",), Kind.RUN_QUEUE, Kind.CPU_THROTTLED, Kind.LOCK_WAIT, Kind.BLOCKED),
    *_of(("waits", "disks"), Kind.IO_WAIT),
    *_of(
        ("sockets", "tcp_retransmit"),
        Kind.TCP_RETRANSMIT,
        Kind.TCP_SYN_RETRANSMIT,
        Kind.TCP_LOSS_PROBE,
    ),
    *_of(("sockets", "tcp_reset"), Kind.TCP_RESET_SENT, Kind.TCP_RESET_RECEIVED),
    *_of(("crash",), Kind.CRASH),
    *_of(("sockets", "drops"), Kind.PACKET_DROP),
    *_of(("sockets", "qdisc"), Kind.QDISC_DELAY),
    *_of(("sockets", "tcp_receive"), Kind.TCP_ZERO_WINDOW, Kind.TCP_RTT, Kind.TCP_READ_DELAY),
)
