# SPDX-License-Identifier: Apache-2.0
"""Addresses from which a crowd of calls came, and nobody comes again for a while.

gRPC hands us each call that it has taken, also of a connection that was ended: one after the other,
before those that others began since. So whoever came back at once with the next crowd would take
more memory each time, and nobody else would get through.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from coordinator.counters import ServerCounters
from coordinator.rpc.peers import address_of
from coordinator.rpc.source_filter import ADDRESSES_MAX
from runtime.log import PeerLog

# The event loop is through with a crowd in some seconds: with 4,500 of such calls in each, or 1,000
# where others keep it busy.
BARRED_S = 30.0

# For the log: what else is said of an address must not leave this out.
_WHOSE = "barred"


@dataclass(slots=True)
class _Address:
    until_s: float
    peers: set[str] = field(default_factory=set)


class Barred:
    """Who is, with the connections that were ended."""

    def __init__(self, counters: ServerCounters, log: PeerLog, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._log = log
        self._clock = clock
        self._addresses: dict[str, _Address] = {}  # whose time is over first, first

    def add(self, peer: str) -> None:
        """Its connection was ended for its calls."""
        address = address_of(peer)
        if not _is_ip_address(address):
            return  # a user of this machine, who has no more than some connections
        one = self._addresses.pop(address, None)
        if one is None:
            self._counters.addresses_barred += 1
            self._log.warning(
                _WHOSE, f"{address}: for {BARRED_S:g} s no more connections are taken from there"
            )
            if len(self._addresses) == ADDRESSES_MAX:
                del self._addresses[next(iter(self._addresses))]
            one = _Address(0)
        one.until_s = self._clock() + BARRED_S
        one.peers.add(unquote(peer))
        self._addresses[address] = one

    def addresses(self) -> tuple[str, ...]:
        """All from which no connection is to be taken now."""
        now_s = self._clock()
        while self._addresses:
            address, one = next(iter(self._addresses.items()))
            if one.until_s > now_s:
                break
            del self._addresses[address]
        return tuple(self._addresses)

    def __contains__(self, peer: str) -> bool:
        """Whether a call is of a connection that was ended. No other one has its port meanwhile."""
        one = self._addresses.get(address_of(peer)) if self._addresses else None
        return one is not None and unquote(peer) in one.peers


def _is_ip_address(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
