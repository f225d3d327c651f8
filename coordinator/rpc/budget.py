# SPDX-License-Identifier: Apache-2.0
"""What one peer may take of the coordinator, which is everybody's.

gRPC puts no bound to the messages that it gathers: whatever length a peer announces, it takes
in, and compares that with grpc.max_receive_message_length when all is there. Nor does it tell
what it has, or bound the connections. So they are looked at from outside: what the kernel has
received on a connection, and what of it came out as messages. While a connection has one call,
as with TLS and at the Unix socket, all that came since its last message is one that is not whole.
With several it is what is left when the messages of all are taken off, so a message that one of
them got says nothing of what the others have.

All of these together have a bound too. Beyond it who has the most gives way: an identity, or an
address where nobody is asked who it is. So whoever sends little, or slowly, loses nothing by others.

How many calls a connection may have gRPC says too, but holds only those to it who say that they
heard. It takes all calls of the others, in far less time than they can be refused one by one.
So of the calls that wait each connection may have as many as a node begins, and of what goes
beyond all together have a bound: then who has the most of it gives way, the fullest connection first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import unquote

from coordinator.counters import ServerCounters
from coordinator.rpc import channelz, streams
from coordinator.rpc.barred import Barred
from coordinator.rpc.connections import Connection
from coordinator.rpc.identity import Identity, Role
from coordinator.rpc.peers import address_of
from protocol import wire
from runtime.log import PeerLog
from runtime.memory import give_back, resident_bytes

# Of one identity. A node has a Control and a Slices stream, and each twice while it comes
# back before the old one is known to be gone; people call several things from a script.
_CALLS_MAX = {Role.NODE: 8, Role.OPERATOR: 32, Role.VIEWER: 32}

# On a connection, since its last whole message: twice the longest message, since the kernel
# has as much again. Where gRPC's windows are full, nothing comes beyond.
UNDELIVERED_BYTES_MAX = 2 * wire.MESSAGE_BYTES_MAX

# What one identity may have of messages that are not whole: a node comes to no more by its calls.
_OF_AN_IDENTITY_BYTES_MAX = _CALLS_MAX[Role.NODE] * UNDELIVERED_BYTES_MAX

# How long a message may be on its way: as long as one of ours (coordinator.rpc.streams). Nodes send
# a MiB at once, which is then 140 kbit/s.
UNFINISHED_S = streams.UNREAD_TIMEOUT_S

# What comes on a connection and is no message: gRPC's pings and their answers, within TLS some 40
# bytes each and three a minute, and now and then that there is room for more of ours.
_PINGS_BYTES_S = 16
_BESIDE_BYTES = 64 << 10

# What comes with a message: its head and its frame's, and that there is room for another answer. Of
# a long one a head for each frame of 16 KiB. Who saves some of it hides no more than that.
_WITH_A_MESSAGE_BYTES = 5 + 9 + 13
_WITH_ITS_BYTES_SHIFT = 10

# How long a peer may send on a call that ended, until it has heard so.
_UNHEARD_S = 1.0

# Connections of an address on which nobody calls, though they are there for so long: all nodes
# may come at once from behind one, when a coordinator begins.
IDLE_CONNECTIONS_MAX = 128
IDLE_S = 5.0

# Calls that gRPC has and nobody let in yet, beyond those of a node on each connection. Each has
# some 18 KiB there, so these are as much as one peer may have.
_CALLS_WAITING_MAX = UNDELIVERED_BYTES_MAX // (18 << 10)

# On one connection a node has two, and each once more while gRPC does not know that it is over. So
# a fleet may come at once, though all of it is behind one address.
_CALLS_OF_A_NODE = 4

# A look costs some 10 ms with 2,000 connections. So one is taken at once when memory has grown
# by what a peer may have, and else seldom.
_GLANCE_S = 0.1
_LOOK_EVERY_S = 10.0
_GROWN_BYTES = UNDELIVERED_BYTES_MAX

# A crowd keeps the loop from a glance for so long. A full machine does so, too: if there was none,
# nobody asks again before twice the time, unless memory grows.
_LATE_S = 1.0
_ASK_AGAIN_S = 1.0
_ASK_AGAIN_MAX_S = 64.0

# So long after a connection was ended, gRPC is through with it. What it had is free then, but stays
# with the process, and the next one would fill that unseen.
_GIVE_BACK_S = 1.0

# Of the loop, in which a message that gRPC has whole comes to who waits for it.
_TURNS = 3


@dataclass(slots=True)
class _Calling:
    """Of a peer: how many calls it has, who it is, and when one of several ended, if just now."""

    calls: int
    identity: Identity | None
    ended_s: float | None = None

    def take_ended(self, now_s: float) -> bool:
        """Whether one of several ended since the last look, or so shortly before that more of it came."""
        if self.ended_s is None:
            return False
        if now_s - self.ended_s >= _UNHEARD_S:
            self.ended_s = None
        return True


@dataclass(slots=True)
class _Seen:
    """Of a connection, as it was looked at.

    ``since_s``: when it was seen first. ``delivered``: messages until then. At ``begun_s`` none
    was under way, and the kernel had received ``received`` bytes, or as much of them as was no more
    under way at the last look, when ``whole`` bytes had come in messages of one of several calls.
    ``pending``: what came since then, without pings, at the last look; ``left`` of it may be of calls
    that ended meanwhile. Since ``much_since_s`` the rest is more than comes beside messages.
    """

    since_s: float
    begun_s: float
    received: int = 0
    delivered: int = 0
    whole: int = 0
    pending: int = 0
    left: int = 0
    much_since_s: float | None = None

    def begin(self, now_s: float, received: int, delivered: int) -> None:
        """Nothing is under way now."""
        self.begun_s, self.received, self.delivered = now_s, received, delivered
        self.pending, self.left, self.much_since_s = 0, 0, None

    def look(self, now_s: float, received: int, whole: int, *, has_ended: bool) -> None:
        """So much came until now, ``whole`` of it in messages of one of several calls.

        ``has_ended``: one of these. gRPC drops what it has of that one's message, so it is no part of
        one. But it counts: nobody knows how much it is, and the others could hide theirs by it. It has
        no time limit, not even a long one: a node whose stream was ended within a message looks the
        same for as long as both of its calls go on and say little.
        """
        came_whole = whole - self.whole
        # What they may have had with them, and had not, is not kept for later.
        self.received, self.whole = min(received, self.received + came_whole), whole
        if came_whole > self.pending:
            self.much_since_s = None  # it may be none of what was under way
        pings = int(_PINGS_BYTES_S * (now_s - self.begun_s))
        self.pending = max(0, received - self.received - pings)
        self.left = self.pending if has_ended else min(self.left, self.pending)
        if self.pending - self.left <= _BESIDE_BYTES:
            self.much_since_s = None
        elif self.much_since_s is None:
            self.much_since_s = now_s

    def why_not(self, now_s: float, received: int) -> str | None:
        """Why what is under way is too much, or has been for too long; None if it is not."""
        if received - self.received > UNDELIVERED_BYTES_MAX:
            of_what = (
                "messages that are not whole, or whose calls ended"
                if self.left
                else "a message that is not whole yet"
            )
            return (
                f"sent {received - self.received >> 20} MiB of {of_what}; messages have at most"
                f" {wire.MESSAGE_BYTES_MAX >> 20} MiB"
            )
        if self.much_since_s is not None and now_s - self.much_since_s >= UNFINISHED_S:
            return f"sent a part of a message, and in {UNFINISHED_S:g} s not the rest of it"
        return None


@dataclass(slots=True)
class _Asking:
    """When to ask gRPC for its calls: never by time alone, since each question leaks memory.

    Too many calls take memory, so they are asked for when it has grown. Those that find room which
    others have left keep the loop busy.
    """

    glanced_s: float
    asked_s: float
    again_s: float = _ASK_AGAIN_S
    # A question that came to nothing, since nothing could be opened: it is not asked at each glance.
    failed_s: float = -math.inf
    # Since the last question:
    was_late: bool = False
    bytes_least: float = math.inf
    has_grown: bool = False

    def is_due(self, now_s: float, bytes_now: int) -> bool:
        """Whether to ask now."""
        if now_s - self.glanced_s >= _LATE_S:
            self.was_late = True
        self.glanced_s = now_s
        self.bytes_least = min(self.bytes_least, bytes_now)
        self.has_grown = bytes_now - self.bytes_least >= _GROWN_BYTES
        is_due = self.has_grown or (self.was_late and now_s - self.asked_s >= self.again_s)
        if not is_due or now_s - self.failed_s < _ASK_AGAIN_S:
            return False
        self.failed_s = now_s  # until it is answered
        return True

    def asked(self, now_s: float, bytes_now: int, *, has_ended: bool) -> None:
        """It was asked. What that has leaked is in ``bytes_now``; what comes from now on has grown."""
        is_in_vain = not has_ended and not self.has_grown
        self.again_s = min(2 * self.again_s, _ASK_AGAIN_MAX_S) if is_in_vain else _ASK_AGAIN_S
        self.asked_s, self.was_late, self.bytes_least = now_s, False, bytes_now
        self.failed_s = -math.inf


_Holder: TypeAlias = Identity | str
"""Whose a connection is: an identity's, or an address's where nobody was asked who it is."""


class _Held:
    """What connections have of something, by whose they are."""

    def __init__(self, of_each: Mapping[str, int], holder_of: Callable[[str], _Holder]) -> None:
        """``of_each``: by peer."""
        self._of: Counter[_Holder] = Counter()
        self._parts: defaultdict[_Holder, list[tuple[int, str]]] = defaultdict(list)
        for peer, size in of_each.items():
            holder = holder_of(peer)
            self._of[holder] += size
            self._parts[holder].append((size, peer))
        for of_one in self._parts.values():
            of_one.sort()

    def identities(self) -> list[Identity]:
        """All that have some."""
        return [one for one in self._of if isinstance(one, Identity)]

    def of(self, holder: _Holder) -> int:
        """What one has."""
        return self._of[holder]

    def total(self) -> int:
        """What all have."""
        return self._of.total()

    def most(self) -> tuple[_Holder, int]:
        """Who has the most, and how much."""
        ((holder, size),) = self._of.most_common(1)
        return holder, size

    def give_up_largest(self, holder: _Holder) -> str:
        """Do without that connection of one which has the most."""
        size, peer = self._parts[holder].pop()
        self._of[holder] -= size
        return peer


class Budget:
    """Who has how many calls, and what is on its way in."""

    def __init__(
        self,
        counters: ServerCounters,
        log: PeerLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._log = log
        self._calls: Counter[Identity] = Counter()
        self._peers: dict[str, _Calling] = {}  # that call something now
        self._unread: Counter[str] = Counter()  # calls of which nothing is read now, by peer
        self._delivered: Counter[str] = Counter()  # messages, by peer as gRPC writes it
        self._whole: Counter[str] = Counter()  # bytes of those that came to one of several calls
        self._seen: dict[str, _Seen] = {}
        # Connections that are ended: there until gRPC closes them, when it gets to it.
        self._ended: set[str] = set()
        self.barred = Barred(counters, log, clock)
        self._give_back_s = math.inf

    # ------------------------------------------------------------------ calls

    def why_not(self, identity: Identity | None) -> str | None:
        """Why one more call is one too many of an identity; None if it is not."""
        if identity is None or self._calls[identity] < _CALLS_MAX[identity.role]:
            return None
        return (
            f"{identity} has {_CALLS_MAX[identity.role]} calls at once already; allowed are no more. Does"
            " somebody else use its certificate?"
        )

    @contextlib.contextmanager
    def call(self, peer: str, identity: Identity | None) -> Iterator[None]:
        """While a call goes on."""
        name = unquote(peer)  # gRPC writes the brackets of IPv6 so
        if identity is not None:
            self._calls[identity] += 1
        calling = self._peers.get(name)
        if calling is None:
            self._delivered[peer] += 1  # what came before is of no call
            calling = self._peers[name] = _Calling(0, identity)
        calling.calls += 1
        try:
            yield
        finally:
            calling.calls -= 1
            if calling.calls:
                calling.ended_s = self._clock()
            else:
                del self._peers[name]
                self._delivered[peer] += 1  # gRPC drops what else came
            if identity is not None:
                self._calls[identity] -= 1
                if not self._calls[identity]:
                    del self._calls[identity]

    @contextlib.contextmanager
    def unread(self, peer: str) -> Iterator[None]:
        """While nothing is read of a call: what comes fills gRPC's window, and is not the peer's fault."""
        peer = unquote(peer)
        self._unread[peer] += 1
        try:
            yield
        finally:
            self._unread[peer] -= 1
            if not self._unread[peer]:
                del self._unread[peer]

    def delivered(self, peer: str, size: int) -> None:
        """A message of that peer came out of gRPC whole."""
        name = unquote(peer)
        calling = self._peers.get(name)
        if calling is None or calling.calls == 1:
            self._delivered[peer] += 1
        else:
            self._whole[name] += size + (size >> _WITH_ITS_BYTES_SHIFT) + _WITH_A_MESSAGE_BYTES

    # ------------------------------------------------------------ connections

    async def watch(
        self,
        connections: Callable[[], Iterable[Connection]],
        bytes_max: Callable[[], int],
        keep_out: Callable[[Sequence[str]], None],
    ) -> None:
        """Look at the connections that there are, until cancelled.

        ``bytes_max``: for all messages that are not whole. ``keep_out``: take no connections from
        these addresses, and from all others.
        """
        kept_out: Sequence[str] = ()
        looked_s = self._clock()
        asking = _Asking(looked_s, looked_s)
        is_settled = True
        while True:
            await asyncio.sleep(_GLANCE_S)  # nothing tells
            now_s, is_due = self._clock(), False
            # Where all files are taken by connections nothing can be opened, until gRPC has
            # closed those that are idle.
            with contextlib.suppress(OSError):
                is_due = asking.is_due(now_s, resident_bytes())
                if is_due:
                    has_ended = self.end_crowds(connections)
                    asking.asked(now_s, resident_bytes(), has_ended=has_ended)
            if now_s >= self._give_back_s:
                self._give_back_s = math.inf
                give_back()
            with contextlib.suppress(OSError):
                if kept_out != (addresses := self.barred.addresses()):
                    keep_out(addresses)
                    kept_out = addresses
            with contextlib.suppress(OSError):
                if is_due or now_s - looked_s >= _LOOK_EVERY_S or not is_settled:
                    # Messages that are whole already are taken first.
                    for _ in range(_TURNS):
                        await asyncio.sleep(0)
                    is_settled = self.look(connections, bytes_max())
                    looked_s = self._clock()

    def end_crowds(self, connections: Callable[[], Iterable[Connection]]) -> bool:
        """End connections of who has the most calls that wait, if too many wait. Whether there are any."""
        of_all = channelz.calls() - sum(calling.calls for calling in self._peers.values())
        if of_all <= _CALLS_WAITING_MAX:
            return False
        # Each time, whatever was found before: that as many wait does not mean that the same do.
        # Not all that gRPC has: those of connections that are ended already go by themselves.
        here = {connection.peer for connection in connections()} - self._ended
        waiting = Counter({peer: n for peer, n in channelz.calls_by_peer() if peer in here})
        for peer in here & self._peers.keys():
            waiting[peer] -= self._peers[peer].calls
        beyond = {
            peer: calls - _CALLS_OF_A_NODE
            for peer, calls in waiting.items()
            if calls > _CALLS_OF_A_NODE
        }
        held = _Held(beyond, self._holder)
        crowds: dict[str, str] = {}
        while (total := held.total()) > _CALLS_WAITING_MAX:
            holder, most = held.most()
            peer = held.give_up_largest(holder)
            crowds[peer] = (
                f"began {waiting[peer]} calls at once; of all that are not let in yet {holder} has the"
                f" most, {most} beyond {_CALLS_OF_A_NODE} on each connection, and all together {total};"
                f" allowed are {_CALLS_WAITING_MAX}"
            )
        for connection in connections() if crowds else ():
            if connection.peer in crowds:
                self._counters.connections_ended_calls += 1
                self._end(connection, crowds[connection.peer])
                self.barred.add(connection.peer)
        return bool(crowds)

    def look(self, connections: Callable[[], Iterable[Connection]], bytes_max: int) -> bool:
        """End those of all connections that hold too much. False: look again soon."""
        now_s = self._clock()
        idle: Counter[str] = Counter()
        messages: Counter[str] = Counter()
        for peer, count in self._delivered.items():
            messages[unquote(peer)] += count
        seen: dict[str, _Seen] = {}
        lasting: dict[str, int] = {}
        ended_before, still = frozenset(self._ended), set[str]()
        for connection in connections():
            peer = connection.peer
            if peer in ended_before:
                still.add(peer)
                connection.shut()  # or one that comes from the same port would be let alone
                continue
            try:
                received = connection.bytes_received
            except OSError:
                continue  # it has ended
            one = seen[peer] = self._seen.get(peer) or _Seen(now_s, now_s)
            calling = self._peers.get(peer)
            is_unread = calling is not None and self._unread[peer] == calling.calls
            if messages[peer] != one.delivered or is_unread:
                one.begin(now_s, received, messages[peer])
            pending_before = one.pending
            has_ended = calling is not None and calling.take_ended(now_s)
            one.look(now_s, received, self._whole[peer], has_ended=has_ended)
            why = one.why_not(now_s, received)
            if why is not None:
                self._end_unfinished(connection, why)
                continue
            if calling is None and now_s - one.since_s >= IDLE_S:
                address = address_of(peer)
                idle[address] += 1
                if idle[address] > IDLE_CONNECTIONS_MAX:
                    self._counters.connections_ended_idle += 1
                    self._end(
                        connection,
                        f"its address has more than {IDLE_CONNECTIONS_MAX} connections on which it calls"
                        " nothing",
                    )
                    continue
            lasting[peer] = min(pending_before, one.pending)
        self._ended -= ended_before - still
        self._seen = seen
        here = seen.keys() | self._peers.keys()
        for peer in [peer for peer in self._delivered if unquote(peer) not in here]:
            del self._delivered[peer]
        for peer in self._whole.keys() - here:
            del self._whole[peer]
        bytes_max = max(bytes_max, _OF_AN_IDENTITY_BYTES_MAX)
        too_large = self._too_large(lasting, bytes_max)
        if too_large:
            for connection in connections():
                if connection.peer in too_large:
                    self._end_unfinished(connection, too_large[connection.peer])
        return sum(one.pending for one in seen.values()) <= bytes_max

    def _too_large(self, lasting: Mapping[str, int], bytes_max: int) -> dict[str, str]:
        """Of which connections the messages that are not whole are too much beside others', and why.

        ``lasting`` are bytes that were there at the last look already: what came since then may
        be of whole messages, which the loop was too busy to take.
        """
        ended: dict[str, str] = {}
        held = _Held(lasting, self._holder)
        for holder in held.identities():
            while (size := held.of(holder)) > _OF_AN_IDENTITY_BYTES_MAX:
                ended[held.give_up_largest(holder)] = (
                    f"{holder} has {size >> 20} MiB of messages that are not whole; allowed are"
                    f" {_OF_AN_IDENTITY_BYTES_MAX >> 20} MiB"
                )
        while (total := held.total()) > bytes_max:
            most, size = held.most()
            ended[held.give_up_largest(most)] = (
                f"all messages that are not whole have {total >> 20} MiB, of which {most} has the"
                f" most, {size >> 20} MiB; allowed are {bytes_max >> 20} MiB"
            )
        return ended

    def _holder(self, peer: str) -> _Holder:
        calling = self._peers.get(peer)
        identity = calling.identity if calling is not None else None
        return address_of(peer) if identity is None else identity

    def _end_unfinished(self, connection: Connection, why: str) -> None:
        self._counters.connections_ended_unfinished += 1
        self._end(connection, why)

    def _end(self, connection: Connection, why: str) -> None:
        connection.shut()
        self._ended.add(connection.peer)
        self._give_back_s = min(self._give_back_s, self._clock() + _GIVE_BACK_S)
        self._log.warning(
            address_of(connection.peer), f"{connection.peer}: its connection is ended: {why}"
        )
