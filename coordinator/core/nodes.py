# SPDX-License-Identifier: Apache-2.0
"""The nodes that are known, and their Control streams.

A node is known by its name from its first Hello on, also when it is gone, so
that a breadcrumb to it can be told from one to nowhere. What a Hello leads to:

    the name's session  incarnation   what happens
    ------------------  -----------   ------------
    none                any           connected
    live                the same      connected; the old session is refused: it
                                      is a connection that died unnoticed
    live                another       refused, with both addresses: two nodes
                                      must not share a name

A name whose id another name already has is refused too, and so is a node with which no version
of the protocol is in common. A node that is gone for longer than ``node_expiry_ns`` is forgotten,
and for one name more than ``nodes_max`` the one that is gone for longest; none that is connected,
or has a part in a trace that is in memory. Where there is no other, the new one is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from coordinator.core.clock import ClockFilter
from counting.token_bucket import TokenBucket
from protocol.hashing import address_id, node_id
from protocol.messages import Hello, NodeId, Source
from protocol.versions import Agreed, Feature, Incompatible, Versions, agree


class FiringTokens:
    """What one node may begin by what fires there: a token a trace."""

    def __init__(self, rate_per_s: float, burst: float, now_ns: int) -> None:
        self._of_processes, self._of_operators, self._refused = (
            TokenBucket(rate_per_s, burst, now_ns) for _ in range(3)
        )

    def take(self, source: Source, traces: int, now_ns: int) -> bool:
        """Whether so many may be begun. A group is whole: what is more than is left is owed."""
        bucket = self._of_operators if source is Source.OPERATOR else self._of_processes
        if not bucket.take(now_ns):
            return False
        bucket.charge(traces - 1, now_ns)
        return True

    def take_refused(self, now_ns: int) -> bool:
        """Whether one more that is refused may take room in the store."""
        return self._refused.take(now_ns)


@dataclass(slots=True)
class Node:
    """A node, connected or not.

    ``crumbs``: what breadcrumbs to its addresses carry.
    ``incarnation`` is the last one that connected, ``stored_incarnation`` the one that the store has:
    the last of which it was asked, and has answered, all that it may not know of the one before.
    """

    name: str
    id: NodeId
    addresses: tuple[str, ...] = ()
    crumbs: tuple[NodeId, ...] = ()
    incarnation: int | None = None
    stored_incarnation: int | None = None
    session: int | None = None
    peer: str = ""
    identity: str = ""
    software: str = ""
    gone_ns: int = 0  # since when it is not connected
    agreed: Agreed | None = None  # while it is connected
    clock: ClockFilter = field(default_factory=ClockFilter)
    probes_left: int = 0  # of those sent one after the other at connect
    stream: int | None = None  # the youngest Slices stream
    previous_stream: int | None = None
    expected_bytes: int = 0
    """Of all its parts."""
    firing_tokens: FiringTokens | None = None
    """For the traces that its firings begin."""

    @property
    def takes_late_acks(self) -> bool:
        """Whether what it is told of its firings and bytes may wait."""
        return self.agreed is not None and Feature.LATE_ACKS in self.agreed.features


class Forgotten(enum.Enum):
    """What came of an operator's wish to forget a node."""

    DONE = "done"
    UNKNOWN = "unknown"
    CONNECTED = "connected"
    NEEDED = "needed"


class Reach(enum.Enum):
    """Whether a node can be asked how it is."""

    ASKED = "asked"
    UNKNOWN = "unknown"
    AWAY = "away"
    TOO_OLD = "too old"


class Nodes:
    """All known nodes, by name, id and session."""

    def __init__(self, limit: int, versions: Versions) -> None:
        self.limit = limit
        self.by_id: dict[NodeId, Node] = {}
        self._gone: dict[NodeId, None] = {}  # longest first
        self._by_session: dict[int, Node] = {}
        self._by_address: dict[NodeId, dict[NodeId, None]] = {}
        self._versions = versions

    def __iter__(self) -> Iterator[Node]:
        return iter(self.by_id.values())

    def remember(
        self, name: str, addresses: tuple[str, ...], incarnation: int | None, gone_ns: int = 0
    ) -> None:
        """A node of which the store knows. Those that are gone for longest come first."""
        identity = node_id(name)
        if identity not in self.by_id:
            node = self.by_id[identity] = Node(
                name, identity, stored_incarnation=incarnation, gone_ns=gone_ns
            )
            self._gone[identity] = None
            self.move(node, addresses)

    @property
    def has_too_many(self) -> bool:
        """Whether there are more than there may be, of late."""
        return len(self.by_id) > self.limit

    def is_full_for(self, name: str) -> bool:
        """Whether another one has to be forgotten for this name."""
        return node_id(name) not in self.by_id and len(self.by_id) >= self.limit

    def forget_one(
        self, is_needed: Callable[[NodeId], bool], gone_before_ns: int | None = None
    ) -> Node | None:
        """Forget the node that is gone for longest, since before then, and not needed."""
        for identity in self._gone:
            node = self.by_id[identity]
            if gone_before_ns is not None and node.gone_ns >= gone_before_ns:
                break
            if node.stream is None and not is_needed(identity):
                self.forget(node)
                return node
        return None

    def forget(self, node: Node) -> None:
        """Know nothing more of a node that is gone."""
        self.move(node, ())
        del self.by_id[node.id], self._gone[node.id]

    def move(self, node: Node, addresses: tuple[str, ...]) -> None:
        """These are the node's addresses from now on; several nodes may share one."""
        for crumb in node.crumbs:
            sharers = self._by_address[crumb]
            del sharers[node.id]
            if not sharers:
                del self._by_address[crumb]
        node.addresses = tuple(dict.fromkeys(addresses))
        node.crumbs = tuple(dict.fromkeys(address_id(address) for address in node.addresses))
        for crumb in node.crumbs:
            self._by_address.setdefault(crumb, {})[node.id] = None

    def at_address(self, crumb: NodeId) -> tuple[NodeId, ...]:
        """The nodes at the address that a crumb carries; none if it is none, or nobody's."""
        return tuple(self._by_address.get(crumb, ()))

    def named(self, name: str) -> Node | None:
        known = self.by_id.get(node_id(name))
        return known if known is not None and known.name == name else None

    def of_session(self, session: int) -> Node | None:
        return self._by_session.get(session)

    def connect(self, session: int, hello: Hello, peer: str, identity: str = "") -> Node | str:
        """The node that is connected now, or why it is refused.

        A node that tries again is told the same: without its port, which is another each time.
        The session that this one replaces, if any, stays known to
        ``of_session`` as nobody's.
        """
        number = node_id(hello.node)
        known = self.by_id.get(number)
        host = peer.rpartition(":")[0] or peer
        try:
            agreed = agree(hello.versions, self._versions)
        except Incompatible as error:
            return f"node {hello.node!r} at {host} is refused: {error}"
        if known is None:
            if len(self.by_id) >= self.limit:
                return (
                    f"node {hello.node!r} at {host} is one more than the {self.limit} names "
                    "that this coordinator remembers (nodes_max)"
                )
            known = self.by_id[number] = Node(hello.node, number)
        elif known.name != hello.node:
            return (
                f"node {hello.node!r} at {host} has the same id as node {known.name!r} "
                f"at {known.peer or 'an earlier time'}: give it another name"
            )
        elif known.session is not None and known.incarnation != hello.incarnation:
            return (
                f"node {hello.node!r} at {host} is refused: a node of that name is connected "
                f"from {known.peer}. Give one of them another name, or stop it"
            )
        if known.session is not None:
            del self._by_session[known.session]
        known.session = session
        self._gone.pop(number, None)
        known.peer, known.identity, known.software = peer, identity, hello.software
        known.agreed = agreed
        self._by_session[session] = known
        return known

    def disconnect(self, session: int, now_ns: int) -> Node | None:
        """The node whose session this was; None if it was nobody's any more."""
        known = self._by_session.pop(session, None)
        if known is not None:
            known.session = known.agreed = None
            known.gone_ns = now_ns
            self._gone[known.id] = None
        return known

    def name_of(self, identity: NodeId) -> str:
        """Its name, or ``#`` and its id in hex for one that never connected."""
        known = self.by_id.get(identity)
        return known.name if known is not None else f"#{identity:016x}"

    def is_known(self, identity: NodeId) -> bool:
        return identity in self.by_id

    def is_connected(self, identity: NodeId) -> bool:
        known = self.by_id.get(identity)
        return known is not None and known.session is not None


def identity_of(name: str) -> NodeId:
    """The id of what ``Nodes.name_of()`` gave."""
    return NodeId(int(name[1:], 16)) if name.startswith("#") else node_id(name)
