# SPDX-License-Identifier: Apache-2.0
"""Services that handle requests, and the truth about what they wrote.

A request is a tree of calls. Each visit of a node writes what an instrumented
service writes: a hop in and backward breadcrumbs from the context that came
with the request, a span, a hop out for each call, a forward breadcrumb when
the response names the callee.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from formats.records import Body, Breadcrumb, Data, HopIn, HopOut, SpanEnd, SpanStart, Unanswered
from protocol.hashing import address_id, node_id
from protocol.messages import TraceId
from tests.simulation.network import MS, Scheduler
from tests.simulation.node import SimNode
from tests.simulation.pool import ClientModel, Handle

CALL_TIMEOUT_NS = 500 * MS
VISITED_MAX = 3
"""Nodes that a context names."""


@dataclass(slots=True)
class Call:
    """A node to visit, and what it calls in turn.

    ``concurrent``: all callees at once, else one after the other.
    ``answers``: the response names the callee (a forward breadcrumb).
    ``work_ns`` and ``payload_bytes`` are spent and written before the calls.
    """

    node: str
    calls: list[Call] = field(default_factory=list)
    concurrent: bool = True
    answers: bool = True
    refused_at: str = ""
    """Nobody listens at this IP address: the call is refused, and the caller says so."""
    unheard_at: str = ""
    """No answer comes from this IP address, and the caller says so: who has got the call, he cannot know."""
    arrives: bool = False
    """Of such a call, that the node gets it: the address is a virtual one, which nobody has."""
    work_ns: int = MS
    payload_bytes: int = 64
    then: Callable[[Visit], None] | None = None
    """Called when the visit has written all but its end."""


@dataclass(slots=True, eq=False)
class Written:
    """The truth about what one visit wrote."""

    node: str
    client: int
    handle: int
    bodies: list[Body] = field(default_factory=list)
    lost: int = 0
    ended: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """The truth about one request. ``unmet``: calls that reached nobody who records, or came from nobody who does."""

    trace: TraceId
    begun_ns: int
    visits: list[Written] = field(default_factory=list)
    crumbs: set[tuple[str, str]] = field(default_factory=set)
    unmet: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Who called an address from where no answer came, and which node has that."""
    responded: bool = False


@dataclass(slots=True, frozen=True)
class Context:
    """What travels with a call, whether or not who calls records the trace."""

    hop: HopOut
    visited: tuple[str, ...]
    is_recorded: bool


class Traffic:
    """Runs requests on nodes and records the truth."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, nodes: dict[str, SimNode]) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.nodes = nodes
        self.requests: list[Request] = []
        self.by_trace: dict[TraceId, list[Request]] = {}
        self.latency_ns = MS // 2
        self._spans = 0
        self._traces = 0

    def new_trace(self) -> TraceId:
        self._traces += 1
        return TraceId(self.rng.getrandbits(96).to_bytes(12, "big") + self._traces.to_bytes(4))

    def next_span(self) -> int:
        self._spans += 1
        return self._spans

    def request(self, trace: TraceId, root: Call) -> Request:
        """Begin a request now."""
        request = Request(trace, self.scheduler.now_ns)
        self.requests.append(request)
        self.by_trace.setdefault(trace, []).append(request)

        def respond(answered: bool) -> None:
            request.responded = answered

        Visit(self, request, root, None, respond).arrive()
        return request

    def pick_client(self, node: SimNode) -> ClientModel:
        return node.clients[self.rng.randrange(len(node.clients))]


class Visit:
    """One request on one node, from arrival to response."""

    def __init__(
        self,
        traffic: Traffic,
        request: Request,
        call: Call,
        context: Context | None,
        respond: Callable[[bool], None],
    ) -> None:
        self.traffic = traffic
        self.request = request
        self.call = call
        self.context = context
        self.respond = respond
        self.node = traffic.nodes[call.node]
        self.span = traffic.next_span()
        self._left = len(call.calls)
        self._next = 0
        self._responded = False
        self.written: Written
        self.handle: Handle
        self._thread = 0
        self.is_recorded = True

    def arrive(self) -> None:
        if self.node.dead or not self.node.clients:
            # Who does not record the trace says of no call.
            if self.context is not None and self.context.is_recorded:
                self.request.unmet += 1
            return  # the caller waits for its timeout
        client = self.traffic.pick_client(self.node)
        self._thread = self.traffic.rng.randrange(2)
        self.handle = self.node.pool.open(client, self.request.trace)
        self.written = Written(self.node.name, client.number, self.handle.number)
        # What a handle records is settled when it begins.
        self.is_recorded = self.node.pool.state.is_recorded(self.request.trace)
        if self.is_recorded:
            self.request.visits.append(self.written)
        parent = 0
        visited: tuple[str, ...] = ()
        if self.context is not None:
            hop, visited = self.context.hop, self.context.visited
            parent = hop.span_id
            if self.context.is_recorded != self.is_recorded:
                self.request.unmet += 1
            self.write(HopIn(hop.node_id, hop.span_id, hop.hop, hop.handle))
            for name in visited:
                self.write(Breadcrumb(node_id(name), name))
                if self.is_recorded:
                    self.request.crumbs.add((self.node.name, name))
        self.visited = (self.node.name, *(v for v in visited if v != self.node.name))[:VISITED_MAX]
        self.write(SpanStart(self.span, parent, self.node.real_ns(), 2, self.node.name))
        if self.call.payload_bytes:
            self.write(Data(1, bytes(self.call.payload_bytes)))
        self.traffic.scheduler.after(self.call.work_ns, self._work_done)

    @property
    def alive(self) -> bool:
        return self.handle.client.live and not self.node.dead

    def write(self, body: Body) -> None:
        if not self.alive or not self.is_recorded:
            return
        if self.node.write(self.handle, self._thread, body):
            self.written.bodies.append(body)
        else:
            self.written.lost += 1

    def _work_done(self) -> None:
        if not self.alive:
            return
        if not self.call.calls:
            self._finish()
        elif self.call.concurrent:
            for callee in self.call.calls:
                self._call(callee)
        else:
            self._call_next()

    def _call_next(self) -> None:
        if self._next == len(self.call.calls):
            self._finish()
            return
        self._next += 1
        self._call(self.call.calls[self._next - 1])

    def _unanswered(self, callee: Call) -> None:
        """The client span of a call that nobody answers."""
        address, real_ns = callee.refused_at or callee.unheard_at, self.node.real_ns()
        span = self.traffic.next_span()
        at = next((n.name for n in self.traffic.nodes.values() if address in n.addresses), "")
        if self.is_recorded:
            self.request.refused.append((self.node.name, at))
        self.write(SpanStart(span, self.span, real_ns, 3, "call"))
        hop = HopOut(node_id(self.node.name), span, self.handle.next_hop, self.handle.number)
        self.write(hop)
        self.handle.next_hop += 1
        self.write(Breadcrumb(address_id(address), f"@{address}"))
        if callee.refused_at:
            self.write(Unanswered(span, address, "ConnectionRefusedError", unsent=True))
        else:
            self.write(Unanswered(span, address, "TimeoutError"))
        self.write(SpanEnd(span, real_ns, 2, "no answer", b""))
        if callee.refused_at:
            return
        if callee.arrives:
            context = Context(hop, self.visited, self.is_recorded)
            visit = Visit(self.traffic, self.request, callee, context, lambda _: None)
            self.traffic.scheduler.after(self.traffic.latency_ns, visit.arrive)
        elif self.is_recorded:
            self.request.unmet += 1

    def _call(self, callee: Call) -> None:
        if callee.refused_at or callee.unheard_at:
            self._unanswered(callee)
            self._left -= 1
            if not self.call.concurrent:
                self._call_next()
            elif self._left == 0:
                self._finish()
            return
        hop = HopOut(node_id(self.node.name), self.span, self.handle.next_hop, self.handle.number)
        self.handle.next_hop += 1
        self.write(hop)
        done = False

        def answer(answered: bool) -> None:
            nonlocal done
            if done or not self.alive:
                return
            done = True
            if answered and callee.answers and self.is_recorded:
                self.write(Breadcrumb(node_id(callee.node), callee.node))
                self.request.crumbs.add((self.node.name, callee.node))
            self._left -= 1
            if not self.call.concurrent:
                self._call_next()
            elif self._left == 0:
                self._finish()

        context = Context(hop, self.visited, self.is_recorded)
        visit = Visit(self.traffic, self.request, callee, context, answer)
        scheduler = self.traffic.scheduler
        scheduler.after(self.traffic.latency_ns, visit.arrive)
        scheduler.after(CALL_TIMEOUT_NS, lambda: answer(False))

    def _finish(self) -> None:
        if not self.alive:
            return
        if self.call.then is not None:
            self.call.then(self)
        self.write(SpanEnd(self.span, self.node.real_ns(), 1, "", b""))
        if self.is_recorded:
            self.node.close(self.handle, self._thread)
        self.written.ended = True
        latency_ns = self.traffic.latency_ns
        self.traffic.scheduler.after(latency_ns, lambda: self.respond(True))
