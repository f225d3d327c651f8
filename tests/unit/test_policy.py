# SPDX-License-Identifier: Apache-2.0
"""What the coordinator wants recorded: who is told, what a node makes of it, and what it keeps."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.daemon import Daemon
from appliance.words import NO_WORDS, KeptWords, Words
from coordinator.core.coordinator import CoordinatorConfig, CoordinatorCore
from coordinator.core.policy import policy_of
from coordinator.seed import priority_seed
from coordinator.server import CoordinatorServer
from coordinator.settings import policy as policy_from
from protocol import wire
from protocol.hashing import RECORD_ALL, fnv1a64, percentage_of, percentage_threshold
from protocol.messages import NO_POLICY, Hello, Policy, PolicyRule
from protocol.versions import OURS, Feature, Versions
from runtime.log import Log
from runtime.schema import ConfigError, loads
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.coordinator import PolicySettings, Settings, StoreSettings
from runtime.settings.node import CoordinatorSettings as Uplinked
from runtime.settings.node import Settings as NodeSettings
from testbed.ports import free_port
from tests.unit.logs import SILENT, logs_to

TENTH = policy_of(percentage_threshold(10))


def test_a_number_stands_for_a_content() -> None:
    rule = PolicyRule("GET /", 1)
    policies = [
        policy_of(1),
        policy_of(2),
        policy_of(1, (rule,)),
        policy_of(1, (rule, rule)),
        policy_of(1, (PolicyRule("GET /", 2),)),
        policy_of(1, (PolicyRule("GET", 1),)),
    ]
    assert len({policy.number for policy in policies}) == len(policies)
    assert 0 not in {policy.number for policy in policies}
    # The same after a restart, on any machine.
    assert policy_of(RECORD_ALL).number == fnv1a64(b"[18446744073709551615, []]")


def ours_and(more: Feature) -> Versions:
    """Ours, with a feature more."""
    return dataclasses.replace(OURS, features=OURS.features | more)


def said_to(core: CoordinatorCore, session: int) -> list[Policy]:
    return [
        message
        for to, messages in core.take_control(0)
        for message in messages
        if to == session and isinstance(message, Policy)
    ]


def test_who_knows_what_a_policy_is_hears_it_at_each_welcome_and_when_it_changes() -> None:
    core = CoordinatorCore(CoordinatorConfig(), 7, (), (), 0, OURS, TENTH)
    old = Versions(OURS.oldest, OURS.newest, OURS.features & ~Feature.POLICY)
    core.on_node_connected(1, Hello("new", 1), "p", 0)
    assert said_to(core, 1) == [TENTH]
    core.on_node_connected(2, Hello("old", 1, (), old), "p", 0)
    assert said_to(core, 2) == []
    core.set_policy(TENTH)
    assert said_to(core, 1) == []
    core.set_policy(policy_of(5))
    assert core.take_control(0) == [(1, [policy_of(5)])]
    core.on_node_lost(1, 0)
    core.set_policy(NO_POLICY)
    assert core.take_control(0) == []
    # It may have kept one.
    core.on_node_connected(3, Hello("new", 1), "p", 0)
    assert said_to(core, 3) == [NO_POLICY]


def test_who_knows_no_rules_is_told_the_rest() -> None:
    rules = (PolicyRule("GET /", 1),)
    core = CoordinatorCore(
        CoordinatorConfig(), 7, (), (), 0, ours_and(Feature.POLICY_RULES), policy_of(5, rules)
    )
    core.on_node_connected(1, Hello("today's", 1), "p", 0)
    assert said_to(core, 1) == [policy_of(5)]
    later = ours_and(Feature.POLICY_RULES)
    core.on_node_connected(2, Hello("later", 1, (), later), "p", 0)
    assert said_to(core, 2) == [policy_of(5, rules)]
    core.set_policy(Policy(3, None, rules))
    assert core.take_control(0) == [(1, [NO_POLICY]), (2, [Policy(3, None, rules)])]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policy: {}", "policy.percentage: is missing, and has no default"),
        (
            "policy: {percentage: 100.1}",
            "policy.percentage: 100.1; allowed: a number from 0 to 100",
        ),
        ("policy: {percentage: 1, rules: []}", "policy.rules: unknown key; allowed: percentage"),
        ("policy: 10", "policy: 10; allowed: a section with percentage"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, Settings, "f")
    assert problem in str(caught.value)


def test_without_a_section_nodes_go_by_their_own_files() -> None:
    for text in ("", "policy:"):
        assert policy_from(loads(text, Settings, "f").policy) == NO_POLICY
    given = policy_from(loads("policy: {percentage: 100}", Settings, "f").policy)
    assert given.percentage_threshold == RECORD_ALL
    assert percentage_of(percentage_threshold(12.5)) == 12.5


class Manager:
    """A service manager that keeps fds as systemd does."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.bind(str(path))
        self._listener.setblocking(False)
        self.address = str(path)
        self._held: list[StoredFd] = []

    def held(self) -> list[StoredFd]:
        """What it keeps now; the fds are the caller's."""
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._listener, 4096, 16)
            except BlockingIOError:
                return [StoredFd(item.name, os.dup(item.fd)) for item in self._held]
            said = dict(line.split("=", 1) for line in message.decode().splitlines())
            if "FDSTOREREMOVE" in said:
                for item in [item for item in self._held if item.name == said["FDNAME"]]:
                    os.close(item.fd)
                    self._held.remove(item)
            self._held += [StoredFd(said["FDNAME"], fd) for fd in fds]

    def close(self) -> None:
        for item in self._held:
            os.close(item.fd)
        self._listener.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    here = Manager(tmp_path / "notify")
    yield here
    here.close()


def test_the_last_policy_is_there_after_a_restart(manager: Manager) -> None:
    with ServiceManager(manager.address) as way:
        kept = KeptWords(way, SILENT)
        for words in (
            Words(TENTH),
            Words(Policy(3, None, (PolicyRule("GET *", 4),) * 256), 1),
            Words(priority_seed=(1 << 64) - 1),
        ):
            kept.keep(words)
            other = StoredFd("store", os.memfd_create("other"))
            assert kept.recover([other, *manager.held()]) == (words, [other])
            os.close(other.fd)
        kept.keep(NO_WORDS)
        assert manager.held() == []
        assert kept.recover([]) == (NO_WORDS, [])


def test_a_policy_that_an_earlier_daemon_kept_holds() -> None:
    fd = os.memfd_create("policy")
    os.write(fd, wire.encode_coordinator_batch([TENTH]))
    kept = KeptWords(ServiceManager(None), SILENT)
    assert kept.recover([StoredFd("policy", fd)]) == (Words(TENTH), [])


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"\x0a\x02\x1a\x00"])
def test_what_is_no_policy_is_told_and_passed_over(content: bytes) -> None:
    said: list[str] = []
    fd = os.memfd_create("spoilt")
    os.write(fd, content)
    kept = KeptWords(ServiceManager(None), Log(lambda entry: said.append(entry.message)))
    assert kept.recover([StoredFd("policy", fd)]) == (NO_WORDS, [])
    (line,) = said
    assert line.startswith("what the coordinator said before the restart: ")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def node_settings(directory: Path, endpoint: str | None) -> NodeSettings:
    return NodeSettings(
        node="n",
        socket=str(directory / "n.sock"),
        coordinator=Uplinked(endpoint) if endpoint is not None else None,
        pool_bytes=8 << 20,
        store_bytes=1 << 20,
        percentage=50.0,
    )


async def until(done: Callable[[], bool], said: asyncio.Queue[str]) -> None:
    while not done():
        await said.get()


def test_a_node_records_by_its_coordinators_policy_and_goes_on_with_it_alone(
    manager: Manager, tmp_path: Path
) -> None:
    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        said: asyncio.Queue[str] = asyncio.Queue()
        log = Log(lambda entry: said.put_nowait(entry.message))
        settings = Settings(
            endpoint,
            store=StoreSettings(str(tmp_path / "traces.sqlite")),
            policy=PolicySettings(10.0),
        )
        way = ServiceManager(manager.address)
        own = node_settings(tmp_path, endpoint)
        async with Daemon(own, 1, way, (), log) as node:
            assert (node.status()["percentage"], node.status()["policy"]) == (50.0, "")
            running = asyncio.ensure_future(node.run())
            async with CoordinatorServer(settings, 1, SILENT) as coordinator:
                await until(lambda: node.status()["policy"] == f"{TENTH.number:016x}", said)
                assert node.status()["percentage"] == pytest.approx(10.0)
                changed = dataclasses.replace(settings, policy=PolicySettings(0.0))
                coordinator.reconfigure(changed)
                await until(lambda: node.status()["percentage"] == 0.0, said)
            # Another file of its own changes nothing about that.
            while not said.empty():
                said.get_nowait()
            node.reconfigure(dataclasses.replace(own, percentage=70.0))
            assert node.status()["percentage"] == 0.0
            assert re.fullmatch(
                r"0 % of all traces are recorded from now on, by the coordinator's policy [0-9a-f]+",
                said.get_nowait(),
            )
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        kept = [item for item in manager.held() if item.name == "policy"]
        words, _ = KeptWords(way, SILENT).recover(
            StoredFd(item.name, os.dup(item.fd)) for item in kept
        )
        assert words.priority_seed == priority_seed(settings)
        async with Daemon(own, 2, way, kept, log) as node:
            assert node.status()["percentage"] == 0.0
            # It ranks traces as before, though it has heard nobody yet.
            assert node._core._holdings._seed == words.priority_seed
            running = asyncio.ensure_future(node.run())
            changed = dataclasses.replace(settings, policy=None)
            async with CoordinatorServer(changed, 2, SILENT):
                await until(lambda: node.status()["policy"] == "", said)
                assert node.status()["percentage"] == 50.0
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        # The seed is left of what that coordinator said.
        kept = [item for item in manager.held() if item.name == "policy"]
        left, _ = KeptWords(way, SILENT).recover(kept)
        assert left == Words(NO_POLICY, words.priority_seed)

    asyncio.run(run())


def test_how_much_is_recorded_after_a_reload_is_said(manager: Manager, tmp_path: Path) -> None:
    said: list[str] = []

    async def run() -> None:
        alone = node_settings(tmp_path, None)
        async with Daemon(alone, 1, ServiceManager(manager.address), (), logs_to(said)) as node:
            said.clear()
            node.reconfigure(dataclasses.replace(alone, percentage=20.0))
            node.reconfigure(dataclasses.replace(alone, percentage=20.0, trust_incoming=True))

    asyncio.run(run())
    (told,) = [text for text in said if "%" in text]
    assert told == (
        "20 % of all traces are recorded from now on, by this node's own configuration: the coordinator"
        " has no policy"
    )


def test_a_node_that_has_no_coordinator_any_more_forgets_the_policy(
    manager: Manager, tmp_path: Path
) -> None:
    async def run() -> None:
        way = ServiceManager(manager.address)
        KeptWords(way, SILENT).keep(Words(TENTH))
        alone = node_settings(tmp_path, None)
        async with Daemon(alone, 1, way, manager.held(), SILENT) as node:
            assert (node.status()["percentage"], node.status()["policy"]) == (50.0, "")
        assert "policy" not in [item.name for item in manager.held()]

    asyncio.run(run())
