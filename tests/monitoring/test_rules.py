# SPDX-License-Identifier: Apache-2.0
"""The rules for alerts, and the example of how Prometheus finds the daemons, as promtool sees them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.metrics import KNOWN, OF_OTHERS, matchers_in, names_in

TESTS = Path(__file__).with_name("alerts.test.yml")


@pytest.fixture(scope="module")
def monitoring(repository: Path) -> Path:
    return repository / "packaging/monitoring"


@pytest.fixture(scope="module")
def rules(monitoring: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load((monitoring / "backsight.rules.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path) -> tuple[int, str]:
    """Its exit status, and what it said."""
    done = subprocess.run(
        ["promtool", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-kubernetes.yml"])
def test_examples_of_a_configuration_are_valid_and_name_the_jobs(
    monitoring: Path, rules: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    example = yaml.safe_load((monitoring / name).read_text("utf-8"))
    for scraped in example["scrape_configs"]:
        # Debian builds its Prometheus without; tests/packaging compares it with what is deployed.
        for found in scraped.pop("kubernetes_sd_configs", []):
            assert found.keys() == {"role", "namespaces"}
    (tmp_path / name).write_text(yaml.safe_dump(example))
    shutil.copy(monitoring / "backsight.rules.yml", tmp_path)
    # It checks the rules that this names, too.
    status, said = promtool("check", "config", tmp_path / name)
    assert status == 0, said
    assert "1 rule files found" in said
    asked = {job for rule in rules for job in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert asked == {scraped["job_name"] for scraped in example["scrape_configs"]}


def test_the_rules_have_no_fault_that_promtool_knows(
    monitoring: Path, rules: list[dict[str, Any]]
) -> None:
    rules_path = monitoring / "backsight.rules.yml"
    status, said = promtool("check", "rules", "--lint=all", "--lint-fatal", rules_path)
    assert status == 0, said
    assert f"SUCCESS: {len(rules)} rules found" in said


def test_each_alert_fires_where_it_must_and_is_silent_where_it_must_be() -> None:
    status, said = promtool("test", "rules", TESTS)
    assert status == 0, said


def test_promtool_would_complain(monitoring: Path, tmp_path: Path) -> None:
    """Of a horizon that may be shorter: the test has one that is just too short."""
    text = (monitoring / "backsight.rules.yml").read_text("utf-8")
    (tmp_path / "backsight.rules.yml").write_text(text.replace("> 0 < 60", "> 0 < 59"))
    tests = yaml.safe_load(TESTS.read_text("utf-8"))
    tests["rule_files"] = ["backsight.rules.yml"]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    status, said = promtool("test", "rules", tmp_path / "tests.yml")
    assert status != 0
    assert set(re.findall(r"alertname: (\w+)", said)) == {"BacksightHorizonShort"}


def test_no_alert_is_without_a_test(rules: list[dict[str, Any]]) -> None:
    fires: set[tuple[str, str]] = set()
    silent: set[str] = set()
    for test in yaml.safe_load(TESTS.read_text("utf-8"))["tests"]:
        for expected in test["alert_rule_test"]:
            name = expected["alertname"]
            if not expected["exp_alerts"]:
                silent.add(name)
            fires |= {(name, alert["exp_labels"]["severity"]) for alert in expected["exp_alerts"]}
    assert fires == {(rule["alert"], rule["labels"]["severity"]) for rule in rules}
    assert silent == {rule["alert"] for rule in rules}


def seconds(duration: str) -> int:
    """Of ``90s``, ``10m`` or ``1h``."""
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[-1]]


def test_what_happens_once_calls_nobody(rules: list[dict[str, Any]]) -> None:
    """A rate sees what happened for as long as it looks back: that must not be enough to fire."""
    rates = 0
    for rule in rules:
        if re.search(r"> 0(\s+and\b.*)?$", rule["expr"], re.DOTALL):
            windows = re.findall(r"\brate\([^()]*\[(\w+)\]\)", rule["expr"])
            assert all(seconds(window) <= seconds(rule["for"]) for window in windows), rule["alert"]
            rates += bool(windows)
    assert rates > 4


def test_each_alert_says_what_it_is_and_where_the_guide_has_it(
    rules: list[dict[str, Any]], repository: Path
) -> None:
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        annotations = rule["annotations"]
        assert sorted(annotations) == ["description", "runbook", "summary"]
        path, _, anchor = annotations["runbook"].partition("#")
        assert anchor == rule["alert"].lower()
        headings = re.findall(r"^### (.+)$", (repository / path).read_text("utf-8"), re.MULTILINE)
        assert rule["alert"] in headings, f"{path} has no section {rule['alert']}"


def test_all_that_rules_name_is_there(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert names_in(rule["expr"]) <= KNOWN.keys() | OF_OTHERS, rule["alert"]
        for matcher in matchers_in(rule["expr"]):
            if not matcher.is_of_prometheus:
                assert matcher.label in KNOWN[matcher.metric].label_names, rule["alert"]
                assert matcher.selects is not False, (rule["alert"], matcher)


def test_a_name_or_a_value_that_is_not_there_would_be_found() -> None:
    expression = 'backsight_node_nonsense_total{a="b"} + backsight_node_pick_up_seconds_bucket'
    assert names_in(expression) == {
        "backsight_node_nonsense_total",
        "backsight_node_pick_up_seconds",
    }
    wrong, right, regular = matchers_in(
        'backsight_node_groups_abandoned_total{by="this node"}'
        ' + backsight_node_groups_abandoned_total{by="this_node"}'
        ' + backsight_node_triggers_total{outcome=~"refused_.*"}'
    )
    assert (wrong.selects, right.selects, regular.selects) == (False, True, True)
