# SPDX-License-Identifier: Apache-2.0
"""What a node leaves with the service manager for its successor, and takes up from its predecessor."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from appliance.clients import Clients
from appliance.native import NativeDataPlane
from runtime.log import Log
from runtime.schema import format_size
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.node import Settings

_STORE, _KEEP = "store", "keep"

# Of a segment, of which a pool is made; a block of the store is smaller.
_ROUNDING_BYTES = 64 << 10


def recover(
    dataplane: NativeDataPlane,
    clients: Clients,
    settings: Settings,
    manager: ServiceManager,
    stored: Iterable[StoredFd],
    log: Log,
) -> None:
    """Take up what the service manager kept, and have it keep what is new."""
    _check_room(settings, manager, log)
    others = _recover_dataplane(dataplane, manager, stored, log)
    clients.adopt(others)
    if clients.live_applications:
        log.info(f"took up {clients.live_applications} clients of before the restart")
    _check_sizes(settings, dataplane, log)


def _check_room(settings: Settings, manager: ServiceManager, log: Log) -> None:
    room, needed = manager.stored_fds_max, settings.stored_fds_max
    if room is not None and room < needed:
        log.warning(
            f"the service manager keeps {room} file descriptors of this node, which may have"
            f" {needed}: what is over that is lost with a restart; set"
            f" FileDescriptorStoreMax={needed} in the unit, or lower `clients_max`"
        )


def _recover_dataplane(
    dataplane: NativeDataPlane, manager: ServiceManager, stored: Iterable[StoredFd], log: Log
) -> list[StoredFd]:
    """Take up the store and the keep arena; what else was kept."""
    others = []
    adopters = {_STORE: dataplane.adopt_store, _KEEP: dataplane.adopt_keep}
    found: set[str] = set()
    for item in stored:
        adopt = adopters.get(item.name)
        if adopt is None or item.name in found:
            others.append(item)
            continue
        try:
            adopt(item.fd)
            found.add(item.name)
        except OSError as error:
            # It may be whole, and the next start have what this one is short of.
            if error.errno != errno.EPROTO:
                raise
            log.warning(f"{error}; starting with an empty one")
            _forget(item.name, manager, log)
        finally:
            os.close(item.fd)
    if _STORE not in found:
        _keep(_STORE, dataplane.store_fd, manager, log)
    if _KEEP not in found:
        _keep(_KEEP, dataplane.keep_fd, manager, log)
    return others


def _keep(name: str, fd: int, manager: ServiceManager, log: Log) -> None:
    try:
        manager.store(name, fd)
    except OSError as error:
        log.warning(
            f"the service manager does not keep the {name}, so a restart of this daemon"
            f" begins with an empty one: {error.strerror}"
        )


def _forget(name: str, manager: ServiceManager, log: Log) -> None:
    try:
        manager.remove(name)
    except OSError as error:
        log.warning(f"the service manager still keeps the old {name}: {error.strerror}")


def _check_sizes(settings: Settings, dataplane: NativeDataPlane, log: Log) -> None:
    """What is taken up has room for four times of what it was made for, and no more."""
    figures = dataplane.metrics()
    for key, wanted in (
        ("pool_bytes", settings.pool_bytes),
        ("store_bytes", settings.store_bytes),
    ):
        if wanted - figures[key] >= _ROUNDING_BYTES:
            log.warning(
                f"{key} is {format_size(figures[key])} instead of {format_size(wanted)}: what was"
                " kept over the restart cannot grow further; to have it all, stop and start the"
                " node, which empties the pool (systemctl stop backsight-node.socket backsight-node)"
            )
