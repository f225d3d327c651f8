# SPDX-License-Identifier: Apache-2.0
"""What the coordinator said last that nodes shall record, kept over restarts of the daemon.

In a sealed memfd with the service manager, beside the report store, and not on a disk: the
daemon needs no folder that it may write to, and after a reboot nothing is recorded yet, so that
its own configuration serves until the coordinator has been heard.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable

from protocol import wire
from protocol.messages import NO_POLICY, Policy
from runtime.log import Log
from runtime.memfd import memfd
from runtime.service_manager import ServiceManager, StoredFd

_NAME = "policy"

# The largest there can be: 256 rules of 255 bytes.
_BYTES_MAX = 128 << 10


class KeptPolicy:
    """The service manager's copy."""

    def __init__(self, manager: ServiceManager, log: Log) -> None:
        self._manager = manager
        self._log = log

    def recover(self, stored: Iterable[StoredFd]) -> tuple[Policy, list[StoredFd]]:
        """The policy among what the service manager kept, and the rest of that."""
        policy = NO_POLICY
        others = []
        for item in stored:
            if item.name != _NAME:
                others.append(item)
                continue
            try:
                policy = _decoded(os.pread(item.fd, _BYTES_MAX, 0))
            except (OSError, wire.WireError) as error:
                self._log.warning(
                    f"the policy of before the restart: {error}; until the coordinator is heard,"
                    " this node's own configuration holds"
                )
            finally:
                os.close(item.fd)
        return policy, others

    def keep(self, policy: Policy) -> None:
        """This one from now on; killed in the middle of it, the daemon has none at its next start."""
        if not self._manager.is_there:
            return
        try:
            self._manager.remove(_NAME)
            if policy != NO_POLICY:
                self._store(policy)
        except OSError as error:
            self._log.warning(
                f"the coordinator's policy cannot be kept over a restart: {error.strerror}"
            )

    def _store(self, policy: Policy) -> None:
        memory = memfd("backsight-policy")
        try:
            os.write(memory, wire.encode_coordinator_batch([policy]))
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
            self._manager.store(_NAME, memory)
        finally:
            os.close(memory)


def _decoded(data: bytes) -> Policy:
    match wire.decode_coordinator_batch(data):
        case [Policy() as policy]:
            return policy
        case other:
            raise wire.WireError("policy", f"{len(other)} messages, or another kind of one")
