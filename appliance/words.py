# SPDX-License-Identifier: Apache-2.0
"""What the coordinator said last that holds until it says otherwise, kept over restarts of the daemon.

What nodes shall record, and by which seed they rank traces: in a sealed memfd with the service
manager, beside the report store, and not on a disk. The daemon needs no folder that it may write
to, and after a reboot nothing is recorded yet, so that its own configuration serves until the
coordinator has been heard.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass

from protocol import wire
from protocol.messages import NO_POLICY, Policy, Welcome
from protocol.versions import OURS, Agreed
from runtime.log import Log
from runtime.memfd import memfd
from runtime.service_manager import ServiceManager, StoredFd

_NAME = "policy"  # what it alone was at first

# The largest there can be: 256 rules of 255 bytes.
_BYTES_MAX = 128 << 10


@dataclass(frozen=True, slots=True)
class Words:
    """What the coordinator said. ``priority_seed`` 0: none was said."""

    policy: Policy = NO_POLICY
    priority_seed: int = 0


NO_WORDS = Words()


class KeptWords:
    """The service manager's copy."""

    def __init__(self, manager: ServiceManager, log: Log) -> None:
        self._manager = manager
        self._log = log

    def recover(self, stored: Iterable[StoredFd]) -> tuple[Words, list[StoredFd]]:
        """The words among what the service manager kept, and the rest of that."""
        words = NO_WORDS
        others = []
        for item in stored:
            if item.name != _NAME:
                others.append(item)
                continue
            try:
                words = _decoded(os.pread(item.fd, _BYTES_MAX, 0))
            except (OSError, wire.WireError) as error:
                self._log.warning(
                    f"what the coordinator said before the restart: {error}; until the coordinator is heard,"
                    " this node's own configuration holds"
                )
            finally:
                os.close(item.fd)
        return words, others

    def keep(self, words: Words) -> None:
        """These from now on; killed in the middle of it, the daemon has none at its next start."""
        if not self._manager.is_there:
            return
        try:
            self._manager.remove(_NAME)
            if words != NO_WORDS:
                self._store(words)
        except OSError as error:
            self._log.warning(
                f"what the coordinator said cannot be kept over a restart: {error.strerror}"
            )

    def _store(self, words: Words) -> None:
        memory = memfd("backsight-policy")
        try:
            welcome = Welcome(0, Agreed(OURS.newest), words.priority_seed)
            os.write(memory, wire.encode_coordinator_batch([words.policy, welcome]))
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
            self._manager.store(_NAME, memory)
        finally:
            os.close(memory)


def _decoded(data: bytes) -> Words:
    match wire.decode_coordinator_batch(data):
        case [Policy() as policy]:  # a daemon of before wrote it
            return Words(policy)
        case [Policy() as policy, Welcome() as welcome]:
            return Words(policy, welcome.priority_seed)
        case other:
            raise wire.WireError("words", f"{len(other)} messages, or others")
