# SPDX-License-Identifier: Apache-2.0
"""A Prometheus that scrapes real daemons has what the rules and the dashboard ask for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.daemons import anywhere
from testbed.ports import free_port
from testbed.probes import Probes
from testbed.topology import PYTHON, Coordinator, Node
from tests.export.receivers import GrpcReceiver
from tests.monitoring.dashboard import panels_of, queries
from tests.monitoring.metrics import BUILD_INFO, KNOWN, OF_OTHERS, names_in
from tests.monitoring.prometheus import Prometheus

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(180)]

JOBS = {"backsight-node", "backsight-coordinator"}

# Often enough that two samples are soon there, of which a rate is made.
INTERVAL = "200ms"
RATE_INTERVAL = "1m"

# Nothing has this where all is as it should be.
WHERE_ALL_IS_WELL_EMPTY = {"backsight_node_probe_missing"}

_MAKES_IT_ALL = {
    "$__rate_interval": RATE_INTERVAL,
    "$__range": RATE_INTERVAL,
    "$node": ".*",
    "$coordinator": ".*",
}


def as_asked(expression: str) -> str:
    """A query of the dashboard as Grafana sends it."""
    for variable, value in _MAKES_IT_ALL.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


@dataclass(frozen=True, slots=True)
class Here:
    prometheus: Prometheus
    node: Node
    application: subprocess.Popen[bytes]
    ports: dict[str, int]

    def exposition(self, job: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[job]}/metrics") as answer:
            text: str = answer.read().decode()
            return text


def configuration(repository: Path, ports: dict[str, int]) -> dict[str, Any]:
    """The example, with these targets."""
    folder = repository / "packaging/monitoring"
    example: dict[str, Any] = yaml.safe_load((folder / "prometheus.yml").read_text("utf-8"))
    assert {scraped["job_name"] for scraped in example["scrape_configs"]} == JOBS
    example["global"] = dict.fromkeys(example["global"], INTERVAL)
    example["rule_files"] = [str(folder / name) for name in example["rule_files"]]
    for scraped in example["scrape_configs"]:
        (target,) = scraped["static_configs"]
        target["targets"] = [f"127.0.0.1:{ports[scraped['job_name']]}"]
    return example


@pytest.fixture(scope="module")
def here(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    directory = tmp_path_factory.mktemp("monitoring")
    ports = {job: free_port() for job in JOBS}
    endpoint = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        receiver = stack.enter_context(GrpcReceiver(free_port()))
        coordinator = Coordinator(
            anywhere(),
            directory,
            {
                "listen": endpoint,
                "metrics": {"listen": f"127.0.0.1:{ports['backsight-coordinator']}"},
                "query": {"listen": None},
                "export": {"endpoint": receiver.url},
                "linger_s": 0.1,
                "missing_linger_s": 0.1,
            },
        )
        coordinator.endpoint = endpoint
        stack.enter_context(coordinator)
        node = Node(
            anywhere(),
            "alpha",
            directory,
            coordinator,
            {
                "metrics": {"listen": f"127.0.0.1:{ports['backsight-node']}"},
                "pool_bytes": "4MiB",
                "quotas": {"users": {"root": "1MiB"}},
                "machine": {"look_every_s": 0.1},
            },
        )
        stack.enter_context(node)
        stack.enter_context(Probes(node))
        application = stack.enter_context(
            node.host.popen(
                [PYTHON, "-m", "tests.monitoring.application"],
                env=node.client_environment("shop"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        prometheus = Prometheus(directory, free_port(), configuration(repository, ports))
        stack.enter_context(prometheus)
        yield Here(prometheus, node, application, ports)
        assert application.poll() is None
        assert application.stdin is not None
        application.stdin.close()


def test_each_query_of_the_dashboard_finds_something(here: Here, build: Path) -> None:
    left = {
        where: as_asked(query)
        for where, query in queries(panels_of(build)).items()
        if not names_in(query) <= WHERE_ALL_IS_WELL_EMPTY
    }
    assert len(left) > 60
    # Until it is so, or the test takes too long: something happens now and then only.
    while left:
        left = {where: query for where, query in left.items() if not here.prometheus.query(query)}


def test_prometheus_evaluates_all_rules_and_finds_both_daemons(here: Here) -> None:
    while {scraped["metric"]["job"] for scraped in here.prometheus.query("up == 1")} != JOBS:
        pass

    def rules() -> list[dict[str, Any]]:
        (group,) = here.prometheus.ask("rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    while any(rule["health"] == "unknown" for rule in rules()):
        pass
    assert {rule["health"] for rule in rules()} == {"ok"}
    # They wait for minutes, so that nothing of a healthy start calls anybody.
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_real_daemons_export_what_the_tables_have_and_no_more(here: Here) -> None:
    exported = {
        name
        for job in JOBS
        for name in re.findall(r"^# TYPE (\w+) ", here.exposition(job), re.MULTILINE)
    }
    own = {name for name in exported if name.startswith("backsight_")}
    assert own == KNOWN.keys() | BUILD_INFO
    assert exported >= OF_OTHERS - {"up", "ALERTS"}


def test_who_loses_records_is_called_for_and_named(here: Here) -> None:
    assert here.node.control.status()["lossy"] == []
    pid = here.node.daemon_pid()
    # Nobody grants segments then, and soon there are none.
    os.kill(pid, signal.SIGSTOP)
    try:
        assert here.application.stdout is not None
        assert here.application.stdout.readline() == b"lost\n"
    finally:
        os.kill(pid, signal.SIGCONT)
    while not (lossy := here.node.control.status()["lossy"]):
        pass
    (one,) = lossy
    assert one.pop("records_lost") > 0
    assert one == {"pid": here.application.pid, "uid": os.getuid(), "service": "shop"}
    pending = 'ALERTS{alertname="BacksightRecordsLost", alertstate="pending"}'
    while not here.prometheus.query(pending):
        pass
