# SPDX-License-Identifier: Apache-2.0
"""Breadcrumbs to an address: a node that is there is asked, and nothing is missing if none is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.core.verdict import ReasonKind
from formats.records import Body, Breadcrumb
from protocol.hashing import address_id, node_id
from protocol.messages import Hello, SliceFlags
from protocol.verdicts import VerdictKind
from tests.unit.coordinator_harness import (
    Harness,
    S,
    crumb,
    hop_in,
    hop_out,
    preamble,
    run,
    span,
    trace_id,
    two_nodes,
)

T = trace_id("T")


def to_address(address: str) -> Breadcrumb:
    return Breadcrumb(address_id(address), f"@{address}")


def address_of(harness: Harness, name: str) -> str:
    return next(n.addresses[0] for n in harness.core.nodes(harness.now_ns) if n.node == name)


def test_an_address_is_no_name() -> None:
    assert address_id("10.0.0.1") == node_id("@10.0.0.1") != node_id("10.0.0.1")


def test_the_node_at_the_address_is_asked_before_any_response() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    address = address_of(harness, "n2")
    harness.fire("n1", T)
    harness.status("n1", T, 8, crumbs=[address_id(address)])
    assert harness.asked()["n2"] == [T]
    whole = {
        "n1": preamble() + run(*span(1), hop_out("n1", 1), to_address(address)),
        "n2": two_nodes()["n2"],
    }
    harness.deliver(T, whole)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None and verdict.kind is VerdictKind.COHERENT


def test_an_address_of_no_node_is_not_missing() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 0, crumbs=[address_id("192.0.2.7")], held=True)
    slices = {"n1": preamble() + run(*span(1), to_address("192.0.2.7"))}
    harness.deliver(T, slices)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None and verdict.kind is VerdictKind.COHERENT, verdict
    assert verdict.nodes == ("n1",)


def test_a_node_at_the_address_that_recorded_nothing_is_not_missing() -> None:
    """As the node of a database that is not instrumented."""
    harness = Harness()
    harness.cluster("n1", "n2")
    address = address_of(harness, "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": preamble() + run(*span(1), to_address(address))})
    harness.status("n2", T, 0, held=False)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None and verdict.kind is VerdictKind.COHERENT, verdict


def assert_n2_never_saw_it(harness: Harness) -> None:
    """And nothing else is the matter with T."""
    verdict = harness.verdict(T)
    assert verdict is not None
    assert [(reason.kind, reason.node) for reason in verdict.reasons] == [
        (ReasonKind.NEVER_SEEN, "n2")
    ]


def test_a_name_still_counts_where_an_address_came_first() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    address = address_of(harness, "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": preamble() + run(*span(1), to_address(address), crumb("n2"))})
    harness.status("n2", T, 0, held=False)
    harness.wait(S)
    assert_n2_never_saw_it(harness)


def test_a_request_that_nobody_took_is_still_missing() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    slices = {"n1": preamble() + run(*span(1), hop_out("n1", 1), to_address("192.0.2.7"))}
    harness.deliver(T, slices)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert [reason.kind for reason in verdict.reasons] == [ReasonKind.HOP_OUT_UNMET]


def test_all_nodes_at_a_shared_address_are_asked_and_a_moved_one_is_not() -> None:
    harness = Harness()
    for number, name in ((101, "n1"), (102, "n2"), (103, "n3"), (104, "n4")):
        shared = () if name == "n1" else ("10.9.9.9",)
        harness.sessions[name] = number
        harness._names[number] = name
        harness.core.on_node_connected(number, Hello(name, 1, shared), name, harness.now_ns)
    harness.fetch()
    harness.lose("n4")
    harness.sessions["n4"] = 105
    harness._names[105] = "n4"
    harness.core.on_node_connected(105, Hello("n4", 1, ("10.9.9.8",)), "n4", harness.now_ns)
    harness.fetch()
    harness.take_said()
    harness.fire("n1", T)
    harness.status("n1", T, 8, crumbs=[address_id("10.9.9.9")])
    asked = harness.asked()
    assert (asked.get("n2"), asked.get("n3"), asked.get("n4")) == ([T], [T], None)


def test_whoever_says_an_address_of_its_hash_a_node_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a hash of 64 bits that anybody can compute, somebody finds a text."""
    harness = Harness()
    harness.cluster("n1", "n2")
    monkeypatch.setattr("coordinator.core.nodes.address_id", lambda _: node_id("n2"))
    harness.cluster("liar")
    harness.fire("n1", T)
    harness.status("n1", T, 8, crumbs=["n2"])
    assert harness.asked()["n2"] == [T]


def test_no_breadcrumb_to_an_address_of_its_hash_takes_a_node_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.core.evidence.node_id", lambda _: node_id("n2"))
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    lie = Breadcrumb(node_id("n2"), "@192.0.2.7")
    harness.deliver(T, {"n1": preamble() + run(*span(1), lie)})
    harness.wait(S)
    harness.status("n2", T, 0, held=False)
    harness.wait(S)
    assert_n2_never_saw_it(harness)


@pytest.mark.parametrize("has_come", ["answer", "bytes"])
def test_no_address_of_its_hash_takes_out_a_node_that_came_after_its_name(
    monkeypatch: pytest.MonkeyPatch, has_come: str
) -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    one = preamble() + run(*span(1))
    harness.status("n1", T, len(one), ["n2"])  # nobody knows it yet
    harness.cluster("n2")
    if has_come == "answer":
        harness.status("n2", T, 0, [], SliceFlags.EVICTED)
    else:
        harness.deliver(T, {"n2": preamble() + run(*span(2), hop_out("n2", 2))})
    monkeypatch.setattr("coordinator.core.nodes.address_id", lambda _: node_id("n2"))
    harness.cluster("liar")
    harness.send("n1", T, 0, one)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert {"n2"} <= {reason.node for reason in verdict.reasons}


def say_in_turn(harness: Harness, name: str, bodies: Sequence[Body], *crumbs: str) -> None:
    """A node delivers these, each from another handle and in bytes of its own; ``crumbs``: of its status."""
    pieces = [preamble(), *(run(body, handle=handle) for handle, body in enumerate(bodies, 1))]
    harness.status(name, T, len(b"".join(pieces)), crumbs, held=True)
    for number, piece in enumerate(pieces):
        harness.send(name, T, len(b"".join(pieces[:number])), piece)


@pytest.mark.parametrize("lie_is", ["first", "last"])
def test_no_breadcrumb_to_an_address_hides_a_node_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, lie_is: str
) -> None:
    real = node_id
    monkeypatch.setattr(
        "coordinator.core.evidence.node_id", lambda name: real(name.replace("@192.0.2.7", "beta"))
    )
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    crumbs = [Breadcrumb(node_id("beta"), "@192.0.2.7"), crumb("beta")]
    if lie_is == "last":
        crumbs.reverse()
    say_in_turn(harness, "n1", crumbs)
    harness.wait(S + harness.config.missing_linger_ns)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert [reason.kind for reason in verdict.reasons] == [ReasonKind.UNKNOWN_NODE]


GONE = "@192.0.2.7"
"""An address. Its id is also that of a node in what follows: to each id somebody finds such a text."""


@pytest.mark.parametrize("lie_is", ["first", "last"])
@pytest.mark.parametrize("text", [GONE, "@10.0.0.9%x"])
def test_no_breadcrumb_takes_out_whom_the_status_of_another_node_names(
    lie_is: str, text: str
) -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    gone = node_id(text)
    lie = run(Breadcrumb(gone, text), client=2, handle=7)
    slices = two_nodes()
    slices["n2"] += lie
    for name in ("n1", "n2") if lie_is == "last" else ("n2", "n1"):
        crumbs: list[str | int] = ["n2", gone] if name == "n1" else ["n1"]
        harness.status(name, T, len(slices[name]), crumbs, held=True)
        harness.send(name, T, 0, slices[name])
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert [reason.kind for reason in verdict.reasons] == [ReasonKind.UNKNOWN_NODE]


@pytest.mark.parametrize("lie_is", ["first", "last"])
@pytest.mark.parametrize("record", [Breadcrumb(node_id(GONE), ""), hop_in(GONE, 1)])
def test_no_breadcrumb_takes_out_whom_a_record_without_a_name_names(
    lie_is: str, record: Body
) -> None:
    """As every record of what came with a request is."""
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    bodies = [record, to_address(GONE[1:])]
    if lie_is == "first":
        bodies.reverse()
    say_in_turn(harness, "n1", bodies, GONE)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert ReasonKind.UNKNOWN_NODE in [reason.kind for reason in verdict.reasons]


def test_an_address_that_two_nodes_called_is_no_node_once_both_say_so() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    database = to_address("192.0.2.7")
    slices = {name: data + run(database, handle=2) for name, data in two_nodes().items()}
    for name in slices:
        harness.status(name, T, len(slices[name]), ["n1", "n2", database.node_id], held=True)
    for name, data in slices.items():
        harness.send(name, T, 0, data)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None and verdict.kind is VerdictKind.COHERENT, verdict


def test_a_text_that_is_no_address_is_none() -> None:
    """It names a node that nobody knows, as any other."""
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": preamble() + run(*span(1), to_address("10.0.0.9%x"))})
    harness.wait(S + harness.config.missing_linger_ns)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert [reason.kind for reason in verdict.reasons] == [ReasonKind.UNKNOWN_NODE]


def test_addresses_survive_a_restart() -> None:
    harness = Harness()
    harness.connect("n1")
    harness.connect("n2")
    address = address_of(harness, "n2")
    harness.save()
    harness.restart()
    harness.connect("n1", incarnation=1)
    harness.take_said()
    harness.fire("n1", T)
    harness.status("n1", T, 8, crumbs=[address_id(address)])
    harness.connect("n2")
    assert harness.asked()["n2"] == [T]
