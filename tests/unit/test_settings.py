# SPDX-License-Identifier: Apache-2.0
"""What backsight-node and backsight-coordinator take for a configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.quotas import Quota
from appliance.settings import allowed, core_config, quotas
from runtime.schema import ConfigError, loads
from runtime.settings.coordinator import Settings as CoordinatorSettings
from runtime.settings.node import Settings
from runtime.unix_socket import Credentials

PERCENTAGES = [(0, 0), (50, 1 << 63), (100, (1 << 64) - 1)]


def test_a_node_needs_no_configuration() -> None:
    settings = loads("", Settings, "f")
    assert settings.coordinator is None
    assert allowed(settings).uids == {0, os.geteuid()}
    assert core_config(settings).node == settings.node
    assert settings.arena_bytes_or_default == settings.pool_bytes


def test_the_largest_pool_is_admitted() -> None:
    assert loads("pool_bytes: 512GiB", Settings, "f").pool_bytes == 512 << 30


@pytest.mark.parametrize(
    ("text", "per_user_max"),
    [
        ("", 192),
        ("clients_max: 1", 1),
        ("clients_max: 5", 4),
        ("clients_max: 5\nclients_per_user_max: 5", 5),
    ],
)
def test_a_quarter_of_the_clients_is_left_to_other_users(text: str, per_user_max: int) -> None:
    assert loads(text, Settings, "f").clients_per_user_max_or_default == per_user_max


@pytest.mark.parametrize(("percentage", "threshold"), PERCENTAGES)
def test_percentage_is_a_threshold_of_hashes(percentage: int, threshold: int) -> None:
    settings = loads(f"percentage: {percentage}", Settings, "f")
    assert settings.percentage_threshold == threshold


def test_quotas_are_of_users_and_groups_by_name_or_number() -> None:
    text = "quotas: {users: {root: 1MiB, 77: 64KiB}, groups: {5: 2MiB, root: 3MiB}}"
    found = quotas(loads(text, Settings, "f"))
    assert dict(found) == {
        0: Quota("user root", 1 << 20),
        77: Quota("user 77", 64 << 10),
        (1 << 32) + 5: Quota("group 5", 2 << 20),
        1 << 32: Quota("group root", 3 << 20),
    }


def test_ranges_of_users_and_groups_are_allowed_with_both_ends() -> None:
    found = allowed(loads("allow: {users: [5000-5002, 77], groups: [600-600]}", Settings, "f"))
    uids = [76, 77, 78, 4999, 5000, 5002, 5003]
    admitted = [uid for uid in uids if found.admits(Credentials(1, uid, frozenset({1})))]
    assert admitted == [77, 5000, 5002]
    gids = [599, 600, 601]
    assert [gid for gid in gids if found.admits(Credentials(1, 1, frozenset({1, gid})))] == [600]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "allow: {users: [-1]}",
            "allow.users: -1; allowed: a name, or a number from 0 to 4294967294",
        ),
        ("allow: {groups: [4294967295]}", "allow.groups: 4294967295; allowed: a name, or a number"),
        ("allow: {users: [6-5]}", "allow.users: 6-5; allowed: FIRST-LAST, with numbers from 0 to"),
        ("allow: {groups: [1-4294967295]}", "allow.groups: 1-4294967295; allowed: FIRST-LAST,"),
        # More digits than Python makes a number of.
        (f"allow: {{users: ['1-{'9' * 5000}']}}", "allow.users: there is no user '1-999"),
        ("allow: {users: [5-]}", "allow.users: there is no user '5-'"),
        ('allow: {users: ["a\\0"]}', "allow.users: there is no user 'a\\x00'"),
        # It would be that of group 0.
        ("quotas: {users: {4294967296: 1MiB}}", "quotas.users: 4294967296; allowed: a name, or"),
        ("quotas: {groups: {no-such: 1MiB}}", "quotas.groups: there is no group 'no-such'"),
    ],
)
def test_users_and_groups_are_names_or_numbers_that_there_can_be(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, Settings, "f")
    assert problem in str(caught.value)


def test_a_process_has_the_quota_of_its_user_else_of_a_group_else_none() -> None:
    text = "quotas: {users: {77: 1MiB}, groups: {5: 2MiB, 6: 2MiB}}"
    found = quotas(loads(text, Settings, "f"))
    assert found.tenant(77, {5}) == 77
    assert found.tenant(78, {6, 5}) == (1 << 32) + 5
    assert found.tenant(78, {6}) == found.tenant(79, {6, 7}) == (1 << 32) + 6
    assert found.tenant(78, {7}) == 78


def test_policies_reach_the_core() -> None:
    text = """
triggers:
  per_process_per_s: 7
  policies:
    latency: {weight: 3, report_bytes_per_s: 1MiB}
report: {bytes_per_s: 2MiB, chunk_bytes: 4KiB}
"""
    config = core_config(loads(text, Settings, "f"))
    assert config.limits.per_process_per_s == 7
    assert config.policy("latency").weight == 3
    assert config.policy("latency").report_bytes_per_s == 1 << 20
    assert config.policy("other").weight == 1
    assert (config.report_bytes_per_s, config.chunk_bytes) == (2 << 20, 4096)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("node: a b", "f:1: node: a b; allowed: 1 to 63 characters"),
        ("pool_bytes: 1MiB", "f:1: pool_bytes: 1MiB; allowed: 4MiB to 512GiB"),
        ("pool_bytes: 513GiB", "f:1: pool_bytes: 513GiB; allowed: 4MiB to 512GiB"),
        (
            "pool_bytes: 8MiB\narena_bytes: 16MiB",
            "f:2: arena_bytes: 16MiB; allowed: at most pool_bytes, which is 8MiB",
        ),
        ("arena_bytes: 65537", "f:1: arena_bytes: 65537; allowed: multiples of 65536"),
        ("clients_max: 2000", "f:1: clients_max: 2000; allowed: a whole number from 1 to 1024"),
        (
            "clients_max: 8\nclients_per_user_max: 9",
            "f:2: clients_per_user_max: 9; allowed: at most clients_max, which is 8",
        ),
        ("clients_per_user_max: 0", "f:1: clients_per_user_max: 0; allowed: a whole number from"),
        ("report: {bytes_per_s: 0}", " or with KiB, MiB, GiB or TiB; or null"),
        ("machine: {qdisc_drops: 0x10}", " from 1 to 1073741824, written plainly; or null"),
        ("probes: {crash: {fire_ms: -1}}", "-1; allowed: a number from 0 to 3600000; or null"),
        ("percentage: 101", "f:1: percentage: 101; allowed: a number from 0 to 100"),
        ("socket: /" + "x" * 103, "allowed: paths of at most 103 bytes"),
        (
            "coordinator: host:1",
            "f:1: coordinator: host:1; allowed: a section with endpoint, insecure, tls; or null",
        ),
        (
            "coordinator:\n  endpoint: 10.0.0.1:4770",
            "f:2: coordinator.endpoint: 10.0.0.1:4770 is not on this machine",
        ),
        ("coordinator: {endpoint: here}", "endpoint: here; allowed: HOST:PORT"),
        (
            "coordinator:\n  endpoint: 10.0.0.1:1\n  tls: {ca: a, key: c}",
            "f:3: coordinator.tls.certificate: is missing, and has no default",
        ),
        (
            "coordinator:\n  endpoint: 10.0.0.1:1\n  insecure: true\n  tls: {ca: a, certificate: b, key: c}",
            "f:3: coordinator.insecure: true, and there is a `tls` section",
        ),
        ("allow: {users: [nobody, no-such-user]}", "f:1: allow.users: there is no user 'no-such-"),
        ("allow: {groups: [no-such-group]}", "f:1: allow.groups: there is no group 'no-such-gro"),
        (
            "quotas: {users: {no-such-user: 1MiB}}",
            "f:1: quotas.users: there is no user 'no-such-us",
        ),
        ("quotas: {groups: {no-such-group: 1MiB}}", "f:1: quotas.groups: there is no group 'no-"),
        ("quotas:\n  users:\n    root: 1", "f:3: quotas.users.root: 1; allowed: 64KiB to 512GiB"),
        ("quotas:\n  users: {root: 1MiB, 0: 1MiB}", "f:2: quotas.users: root and 0 are the same"),
        ("quotas: {user: {}}", "f:1: quotas.user: unknown key; allowed: users, groups"),
        (
            "pool_bytes: 100MiB\nreclaim_percent: 50\nquotas: {users: {1: 30MiB, 2: 21MiB}}",
            "f:3: quotas: 51MiB together; allowed: at most what of pool_bytes is filled",
        ),
        ("triggers: {policies: {Slow: {}}}", "triggers.policies.Slow: Slow; allowed: 1 to 31"),
        ("triggers: {policies: {slow: {weight: 0}}}", "policies.slow.weight: 0; allowed: a num"),
        ("addresses: [somewhere]", "addresses[0]: somewhere; allowed: an IP address"),
    ],
)
def test_a_bad_node_configuration_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, Settings, "f")
    assert problem in str(caught.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "[::1]:1", "localhost:1", "127.9.9.9:80"])
def test_loopback_needs_no_insecure(endpoint: str) -> None:
    settings = loads(f"coordinator: {{endpoint: '{endpoint}'}}", Settings, "f")
    assert settings.coordinator is not None
    assert loads(f"listen: '{endpoint}'", CoordinatorSettings, "f").listen == endpoint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("listen: 0.0.0.0:4770", "f:1: listen: 0.0.0.0:4770 can be reached from other machines"),
        ("listen: '[::]:4770'", "f:1: listen: [::]:4770 can be reached from other machines"),
        ("store: {bytes_max: 1}", "f:1: store.bytes_max: 1; allowed: 16MiB to"),
        ("quiet: 1", "f:1: quiet: unknown key; allowed: "),
        (
            "insecure: true\ntls: {ca: a, certificate: b, key: c}",
            "f:1: insecure: true, and there is a `tls` section",
        ),
        (
            "tls: {ca: a, certificate: b, key: c, dns: {node: x}}",
            "allowed: a DNS name in lower case",
        ),
        ("memory_bytes: 1KiB", "f:1: memory_bytes: 1KiB; allowed: 1MiB to"),
        ("metrics: {listen: ''}", "f:1: metrics.listen: ''; allowed: HOST:PORT"),
    ],
)
def test_a_bad_coordinator_configuration_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, CoordinatorSettings, "f")
    assert problem in str(caught.value)


def test_with_tls_a_network_may_be_used() -> None:
    files = "{ca: a, certificate: b, key: c}"
    served = loads(f"listen: 0.0.0.0:4770\ntls: {files}", CoordinatorSettings, "f")
    assert served.tls is not None
    node = loads(f"coordinator: {{endpoint: 'h:1', tls: {files}}}", Settings, "f")
    assert node.coordinator is not None
    assert node.coordinator.tls is not None


def test_a_coordinator_may_serve_a_network_if_told_to() -> None:
    settings = loads("listen: 0.0.0.0:4770\ninsecure: true", CoordinatorSettings, "f")
    assert settings.listen == "0.0.0.0:4770"


@pytest.mark.parametrize("module", ["appliance", "coordinator"])
def test_a_daemon_does_not_start_with_a_bad_configuration(module: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("# a comment\nnope: 1\n")
    done = subprocess.run(
        [sys.executable, "-m", module, "--config", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{path}:2: nope: unknown key; allowed: ")
    path.write_text("")
    good = [sys.executable, "-m", module, "--config", str(path), "--check"]
    assert subprocess.run(good, check=False).returncode == 0
