# SPDX-License-Identifier: Apache-2.0
"""Who somebody is by its certificate, and what it may call."""

from __future__ import annotations

import backsight_pb2 as pb
import pytest

from coordinator.rpc.identity import (
    ALLOWED,
    DnsNames,
    Identity,
    Role,
    SpiffeNames,
    Unidentified,
    names_of,
    why_not,
)
from runtime.settings.tls import CoordinatorTlsSettings, DnsNameSettings

D = SpiffeNames("d")


@pytest.mark.parametrize(
    ("uri", "role", "name"),
    [
        ("spiffe://d/node/n1", Role.NODE, "n1"),
        ("spiffe://d/ns/shop/node/web-1.example.org", Role.NODE, "web-1.example.org"),
        ("spiffe://d/operator/ann", Role.OPERATOR, "ann"),
        ("spiffe://d/viewer/bob", Role.VIEWER, "bob"),
    ],
)
def test_a_spiffe_id_says_role_and_name(uri: str, role: Role, name: str) -> None:
    assert D.identity([uri], []) == Identity(role, name, uri)
    assert D.identity([uri, "https://x"], ["n9"]) == Identity(role, name, uri)


@pytest.mark.parametrize(
    ("uris", "problem"),
    [
        ([], "the certificate has no name; wanted: one URI spiffe://d/…/ROLE/NAME"),
        (["spiffe://d/node/a", "spiffe://d/node/b"], "has spiffe://d/node/a and spiffe://d/node/b"),
        (["spiffe://e/node/n1"], "is of spiffe://e/node/n1, which is of another trust domain"),
        (["spiffe://d.e/node/n1"], "another trust domain"),
        (["spiffe://d/coordinator"], "the certificate is of spiffe://d/coordinator; wanted:"),
        (["spiffe://d/n1"], "is of spiffe://d/n1; wanted"),
        (["spiffe://d/node/"], "is of spiffe://d/node/; wanted"),
        (["spiffe://d/NODE/n1"], "is of spiffe://d/NODE/n1; wanted"),
        (["spiffe://d/node/n1/x"], "is of spiffe://d/node/n1/x; wanted"),
        (["spiffe://d/node/n%31"], "is of spiffe://d/node/n%31; wanted"),
        (["spiffe://d/node/" + "n" * 64], "wanted"),
    ],
)
def test_another_id_is_nobodys(uris: list[str], problem: str) -> None:
    with pytest.raises(Unidentified) as caught:
        D.identity(uris, ["n1"])
    assert problem in str(caught.value).replace("n1; wanted: one", "no name; wanted: one")


NAMES = DnsNames(DnsNameSettings("*.nodes.example.org", "*.admin.example.org"))


def test_dns_names_say_role_and_name_by_patterns() -> None:
    for name, role in (
        ("Web-1.nodes.example.org", Role.NODE),
        ("ann.admin.example.org", "operator"),
    ):
        found = NAMES.identity([], ["localhost", name])
        assert (found.role, found.name) == (role, name.lower().split(".")[0])
    assert DnsNames(DnsNameSettings(node="*")).identity([], ["a.b"]).name == "a.b"


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["web-1.example.org"],
        [".nodes.example.org"],
        ["a.nodes.example.org", "b.nodes.example.org"],
        ["a.nodes.example.org", "a.admin.example.org"],
        ["a.nodesXexample.org"],
        ["*.nodes.example.org"],
    ],
)
def test_dns_names_that_say_nothing_or_two_things_are_nobodys(names: list[str]) -> None:
    with pytest.raises(Unidentified, match=r"wanted: one DNS name like \*\.nodes\.example\.org"):
        NAMES.identity(["spiffe://d/node/n1"], names)


def test_the_trust_domain_is_the_coordinators_own() -> None:
    files = ("ca", "crt", "key")
    own = ["https://x", "spiffe://mine/coordinator"]
    assert names_of(CoordinatorTlsSettings(*files), own) == SpiffeNames("mine")
    given = CoordinatorTlsSettings(*files, trust_domain="given")
    assert names_of(given, own) == SpiffeNames("given")
    patterns = DnsNameSettings("*")
    assert names_of(CoordinatorTlsSettings(*files, dns=patterns), own) == DnsNames(patterns)
    with pytest.raises(ValueError, match=r"^tls\.trust_domain: is not given"):
        names_of(CoordinatorTlsSettings(*files), ["https://x"])


METHODS = {method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods}


def test_every_method_is_somebodys() -> None:
    assert set(ALLOWED) == METHODS
    for method, roles in ALLOWED.items():
        for role in Role:
            reason = why_not(Identity(role, "x", "x"), method, Role.OPERATOR)
            assert (reason is None) == (role in roles)
        # Of whom nobody asks who he is: a node, and what the configuration says.
        assert (why_not(None, method, None) is None) == (Role.NODE in roles)
        for role in Role.VIEWER, Role.OPERATOR:
            reason = why_not(None, method, role)
            assert (reason is None) == bool(roles & {role, Role.NODE})
    assert why_not(Identity(Role.OPERATOR, "x", "x"), "Unknown", None) is not None
    assert why_not(None, "Unknown", Role.OPERATOR) is not None


def test_who_may_what() -> None:
    """The table once more, by what it is for."""
    may = {role: {method for method in METHODS if role in ALLOWED[method]} for role in Role}
    reads = {"ListTraces", "TailTraces", "GetTrace", "ListNodes", "GetCounters", "GetStatus"}
    assert may == {
        Role.NODE: {"Control", "Slices"},
        Role.VIEWER: reads,
        Role.OPERATOR: reads | {"TakeSnapshot", "ForgetNode", "PinTrace", "DeleteTrace"},
    }
