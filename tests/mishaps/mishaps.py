# SPDX-License-Identifier: Apache-2.0
"""What is broken, one after the other, each as it breaks in life."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from testbed.faults import dropping, slow_device
from testbed.shop import SERVICES
from testbed.topology import PYTHON
from tests.demo.shop import PORTS
from tests.mishaps.site import Site

_UNUSUAL = 10_000_000  # shop/trouble.py
_HOLDS_BOOK, _WANTS_BOOK, _WANTS_RECEIPT, _CRASHES = (_UNUSUAL + digit for digit in range(4))

_BURST = 200

# Each has 87 times the weight of a thread of a service.
_HOGS = 3

# At once: more than front has connections to orders for four that ask one after the other.
_VOLLEY = 6


@dataclass(frozen=True, slots=True)
class Struck:
    """Whom it strikes, and who else is to be named: see judge.Happened.

    ``at_ns``: just before the last step that breaks it: an order is sent, or a command begins
    that changes one thing. Nothing of it can be seen earlier.
    """

    at_ns: int
    victims: frozenset[str] | None = None
    laterals: frozenset[str] | None = None
    others: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Mishap:
    """``cause`` breaks it for as long as its block lasts; ``service``: on whose node it is seen.

    ``order_lateral``: some other order is to be named.
    """

    symptom: str
    what: str
    trigger: str
    service: str
    cause: Callable[[Site], AbstractContextManager[Struck]]
    order_lateral: bool = False

    @property
    def node(self) -> str:
        return SERVICES[self.service]


@contextlib.contextmanager
def _hog(site: Site, cpu: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A process that begins to compute when it is told to; its trace."""
    node = site.shop.nodes["stock"]
    with node.host.popen(
        [PYTHON, "-m", "tests.mishaps.hog", str(cpu)],
        env=node.client_environment("reports"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as hog:
        assert hog.stdin is not None
        assert hog.stdout is not None
        said = hog.stdin
        trace = hog.stdout.readline().decode().strip()

        def go() -> None:
            said.write(b"go\n")
            said.flush()

        try:
            yield trace, go
        finally:
            hog.terminate()


@contextlib.contextmanager
def _on_cpu(site: Site, cpu: int) -> Iterator[None]:
    """The stock's threads have this one alone."""
    before = {tid: os.sched_getaffinity(tid) for tid in site.threads_of("stock")}

    def allow(tid: int, cpus: set[int]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(tid, cpus)

    for tid in before:
        allow(tid, {cpu})
    try:
        yield
    finally:
        for tid, cpus in before.items():
            allow(tid, cpus)


@contextlib.contextmanager
def _cpu_hog(site: Site) -> Iterator[Struck]:
    cpu = site.hog_cpu
    with contextlib.ExitStack() as stack:
        hogs = [stack.enter_context(_hog(site, cpu)) for _ in range(_HOGS)]
        site.await_watched("stock")
        at_ns = time.time_ns()
        stack.enter_context(_on_cpu(site, cpu))
        for _, go in hogs:
            go()
        traces = frozenset(trace for trace, _ in hogs)
        yield Struck(at_ns, laterals=traces, others=traces)


@contextlib.contextmanager
def _lost_packets(site: Site) -> Iterator[Struck]:
    host = site.shop.nodes["orders"].host
    # A connection may be idle for long. Who wrote last into any of them shall be an order of now.
    site.await_over({site.order(order) for order in range(_VOLLEY)})
    at_ns = time.time_ns()
    with dropping(host, PORTS["orders"], "tcp flags & (syn | fin) == 0 numgen random mod 4 == 0"):
        yield Struck(at_ns)


@contextlib.contextmanager
def _slow_queue(site: Site) -> Iterator[Struck]:
    at_ns = time.time_ns()
    with slow_device(site.shop.nodes["front"].host, "64kbit", "3000"):
        yield Struck(at_ns)


@contextlib.contextmanager
def _full_listener(site: Site) -> Iterator[Struck]:
    at_ns = time.time_ns()
    site.burst(_BURST)
    yield Struck(at_ns)


@contextlib.contextmanager
def _slow_disk(site: Site) -> Iterator[Struck]:
    site.disk.group.take([site.shop.services["stock"].process.pid])
    yield Struck(time.time_ns(), victims=frozenset({site.order(_WANTS_RECEIPT)}))


@contextlib.contextmanager
def _held_lock(site: Site) -> Iterator[Struck]:
    holder = site.order(_HOLDS_BOOK)
    site.await_on_node(holder, "orders")
    at_ns = time.time_ns()
    yield Struck(at_ns, victims=frozenset({site.order(_WANTS_BOOK)}), laterals=frozenset({holder}))


@contextlib.contextmanager
def _unplugged(site: Site) -> Iterator[Struck]:
    # Not the stock's: gRPC writes on threads of its own, which show no trace, so that it is not
    # known there whose connections used the device, and whoever was at work is collected.
    at_ns = time.time_ns()
    with site.shop.network.unplugged(site.shop.nodes["orders"].host):
        yield Struck(at_ns)


@contextlib.contextmanager
def _crash(site: Site) -> Iterator[Struck]:
    yield Struck(time.time_ns(), victims=frozenset({site.order(_CRASHES)}))
    site.shop.services["stock"].process.wait()
    site.shop.start_service("stock")
    site.await_watched("stock")


MISHAPS = (
    Mishap("cpu_hog", f"{_HOGS} requests that compute on the CPU of the stock's threads",
           "kernel.run_queue", "stock", _cpu_hog),
    Mishap("lost_packets", "one packet in four from front to orders is lost",
           "kernel.tcp_retransmit", "front", _lost_packets, order_lateral=True),
    Mishap("slow_queue", "the network device of front's node sends 64 kbit/s",
           "kernel.qdisc_delay", "front", _slow_queue),
    Mishap("full_listener", f"{_BURST} connections at once to front, whose queue has room for 8",
           "machine.listen_overflow", "front", _full_listener),
    Mishap("slow_disk", "the stock writes a receipt to a disk of 2 MiB/s, and waits for it",
           "kernel.io_wait", "stock", _slow_disk),
    Mishap("held_lock", "an order holds a lock in orders that another one wants",
           "kernel.lock_wait", "orders", _held_lock),
    Mishap("unplugged", "the cable of orders' node is out",
           "machine.link_down", "orders", _unplugged),
    Mishap("crash", "the stock's process dies of an order by SIGSEGV",
           "kernel.crash", "stock", _crash),
)  # fmt: skip
