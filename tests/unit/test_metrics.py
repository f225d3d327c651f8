# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads of a daemon is what the daemon counts, by the rules for names."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

import appliance.metrics
import coordinator.metrics
import runtime.metrics
from appliance.core.counters import TriggerCounters
from appliance.daemon import Daemon
from coordinator.core.figures import CoordinatorCounters
from coordinator.rpc import streams
from coordinator.server import CoordinatorServer
from counting.histogram import Histogram
from protocol import wire
from protocol.messages import Group, Hello, TraceId, TriggerFired
from runtime import VERSION
from runtime.health import Health
from runtime.http import HttpServer
from runtime.metrics import TAKEN_AT, Account, Metric, _Snapshot, application, serving
from runtime.service_manager import ServiceManager
from runtime.settings.coordinator import Settings, StoreSettings
from runtime.settings.node import CoordinatorSettings, MetricsSettings, QuotaSettings
from runtime.settings.node import Settings as NodeSettings
from tests.unit.attach_harness import another_turn
from tests.unit.logs import SILENT
from tests.unit.probes_harness import FIGURES, FakeProbes

TABLES = {
    "node": (appliance.metrics.PREFIX, appliance.metrics.METRICS, appliance.metrics.SUMS),
    "coordinator": (
        coordinator.metrics.PREFIX,
        coordinator.metrics.METRICS,
        coordinator.metrics.SUMS,
    ),
}


def get(port: int, path: str = "/metrics", accept: str = "text/plain") -> tuple[int, str]:
    """Status and text, asked as a scraper does."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


async def node_account(directory: Path) -> dict[str, Any]:
    """The account of a node on which something was triggered, and that has a coordinator."""
    settings = NodeSettings(
        "alpha",
        str(directory / "node.sock"),
        CoordinatorSettings("127.0.0.1:9"),
        pool_bytes=4 << 20,
        quotas=QuotaSettings({"root": 1 << 20}),
        metrics=MetricsSettings(None),
    )
    with ServiceManager(None) as manager:
        async with Daemon(settings, 1, manager, (), SILENT) as node:
            node.trigger("by-hand", TraceId(bytes(15) + b"\1"), "for the test")
            probes = FakeProbes.of(settings.socket_path)
            probes.hello(node.context_bytes)
            probes.say({"figures": FIGURES})
            while not node.status()["probes"]:
                await another_turn()
            probes.close()
            return node.status()


async def coordinator_account(directory: Path) -> dict[str, Any]:
    """The account of a coordinator to which a trigger was reported."""

    async def said() -> AsyncIterator[bytes]:
        yield wire.encode_node_batch([Hello("alpha", 1)])
        trigger = TriggerFired(Group("by-hand", TraceId(bytes(15) + b"\1")))
        yield wire.encode_node_batch([trigger])

    settings = Settings("127.0.0.1:0", store=StoreSettings(str(directory / "t.sqlite")))
    async with CoordinatorServer(settings, 1, SILENT) as here:
        await here._nodes._hear(said(), 1, "peer", streams.Outgoing(), None)
        return here.status()


ACCOUNTS: dict[str, Callable[[Path], Any]] = {
    "node": node_account,
    "coordinator": coordinator_account,
}


@pytest.fixture(params=sorted(ACCOUNTS))
def daemon(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def account(daemon: str, tmp_path: Path) -> Account:
    read: Account = asyncio.run(ACCOUNTS[daemon](tmp_path))
    return read


def scraped(prefix: str, table: tuple[Metric, ...], account: Account, accept: str = "") -> str:
    """The account as it is served."""

    async def run() -> str:
        with serving("127.0.0.1:0", prefix, table, lambda: account, Health({}), SILENT) as server:
            assert server is not None
            status, text = await asyncio.to_thread(get, server.port, "/metrics", accept)
            assert status == 200
            return text

    return asyncio.run(run())


def figures(account: Account, path: str = "") -> Iterator[tuple[str, float]]:
    """All paths of an account with a number; a histogram is one."""
    for name, value in account.items():
        if isinstance(value, Mapping):
            if "bounds" in value:
                yield f"{path}{name}", value["sum"]
            else:
                yield from figures(value, f"{path}{name}/")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


def test_every_figure_is_a_metric(daemon: str, account: Account) -> None:
    _, table, sums = TABLES[daemon]
    told = [path for metric in table for path in metric.places]
    assert len(told) == len(set(told))
    patterns = [re.compile(re.sub(r"{\w+}", "[^/]+", path)) for path in (*told, *sums)]
    found = [path for path, _ in figures(account)]
    assert [path for path in found if not any(p.fullmatch(path) for p in patterns)] == []
    # And none names what is not there.
    assert [p.pattern for p in patterns if not any(p.fullmatch(path) for path in found)] == []


def test_all_samples_have_the_figures_of_the_account(daemon: str, account: Account) -> None:
    prefix, table, sums = TABLES[daemon]
    # Another number for each figure, so that none can stand in for another.
    numbers = iter(range(1000, 1_000_000))

    def numbered(tree: Account) -> dict[str, Any]:
        return {
            name: value
            if isinstance(value, Mapping) and "bounds" in value
            else numbered(value)
            if isinstance(value, Mapping)
            else next(numbers)
            if isinstance(value, int | float)
            else value
            for name, value in tree.items()
        }

    account = numbered(account)
    values = sorted(samples(scraped(prefix, table, account)).values())
    scales = {path: metric.scale for metric in table for path in metric.places}

    def is_at(place: str, path: str) -> bool:
        return re.fullmatch(re.sub(r"{\w+}", "[^/]+", place), path) is not None

    def scaled(path: str, figure: float) -> float:
        return figure * next((scales[place] for place in scales if is_at(place, path)), 1)

    expected = [
        scaled(path, value)
        for path, value in figures(account)
        if value and not any(is_at(place, path) for place in sums)
    ]
    assert len(expected) > 30
    assert [value for value in expected if value not in values] == []


def test_the_exposition_is_as_promtool_wants_it(daemon: str, account: Account) -> None:
    prefix, table, _ = TABLES[daemon]
    text = scraped(prefix, table, account)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_would_complain() -> None:
    bad = "# TYPE backsightMs counter\nbacksightMs 1\n"
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=bad, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "backsightMs" in done.stderr


def test_names_are_in_base_units_and_have_help(daemon: str, account: Account) -> None:
    prefix, table, _ = TABLES[daemon]
    families = list(parse(scraped(prefix, table, account)))  # type: ignore[no-untyped-call]
    own = [family for family in families if family.name.startswith(prefix)]
    assert len(own) == len(table) + 1  # and the build's
    for family in own:
        assert re.fullmatch(r"[a-z][a-z0-9_]+", family.name)
        assert family.documentation.endswith((".", "1."))
        assert not re.search(r"_(ns|us|ms|kib|mib|percent)(_|$)", family.name)
    assert {family.name for family in families} >= {"process_cpu_seconds", "process_open_fds"}
    build = next(family for family in own if family.name == f"{prefix}_build_info")
    assert build.samples[0].labels["version"] == VERSION


def test_openmetrics_is_served_to_who_asks_for_it(daemon: str, account: Account) -> None:
    prefix, table, _ = TABLES[daemon]
    text = scraped(prefix, table, account, "application/openmetrics-text")
    assert len(list(parse_openmetrics(text))) > len(table)  # type: ignore[no-untyped-call]


def test_no_label_has_a_trace_id(daemon: str, account: Account) -> None:
    prefix, table, _ = TABLES[daemon]
    text = scraped(prefix, table, account)
    assert 'trigger="by-hand"' in text
    assert not re.search(r'"[^"]*[0-9a-f]{16}[^"]*"', text)


def test_the_version_is_that_of_the_build(repository: Path) -> None:
    assert f"version: '{VERSION}'" in (repository / "meson.build").read_text()


def test_counters_that_were_never_used_are_zero() -> None:
    # What a rate is computed from must be there before it rises.
    assert set(CoordinatorCounters().verdicts.values()) == {0}
    assert set(dataclasses.asdict(TriggerCounters()).values()) == {0}


def test_a_histogram_counts_each_value_up_to_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 1, 1], 10.0)
    table = (Metric("age_seconds", "Age.", "age", histogram=True),)
    text = scraped("x", table, {"age": dataclasses.asdict(histogram)})
    found = samples(text)
    assert [found["x_age_seconds_bucket", (("le", le),)] for le in ("1", "2", "+Inf")] == [2, 3, 4]
    assert found["x_age_seconds_count", ()] == 4
    assert found["x_age_seconds_sum", ()] == 10


def test_a_daemon_whose_loop_hangs_answers_503_and_recovers() -> None:
    account = {"age": 7}
    table = (Metric("age", "Age.", "age"),)
    hanging, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        assert go_on.wait(60)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        app = application("x", table, lambda: account, loop, timeout_s=2, fresh_s=0)
        with HttpServer("127.0.0.1:0", app, SILENT) as server:
            assert (await asyncio.to_thread(get, server.port))[0] == 200
            answers: list[tuple[int, str]] = []

            def ask() -> None:
                hanging.wait()
                answers.append(get(server.port))
                go_on.set()

            asking = threading.Thread(target=ask)
            asking.start()
            loop.call_soon(hang)
            # The loop hangs here, until the other thread has its answer.
            await asyncio.to_thread(asking.join)
            ((status, text),) = answers
            assert status == 503 and "did not answer within 2 s" in text
            assert (await asyncio.to_thread(get, server.port))[0] == 200

    asyncio.run(run())


def test_who_asks_within_a_second_is_served_what_the_others_were() -> None:
    """Whoever may connect can ask as often as he likes."""
    read: list[int] = []

    def account() -> Account:
        read.append(1)
        return {"age": len(read)}

    async def run() -> None:
        table = (Metric("age", "Age.", "age"),)
        loop = asyncio.get_running_loop()
        app = application("x", table, account, loop, fresh_s=1e6)
        with HttpServer("127.0.0.1:0", app, SILENT) as server:
            texts = {(await asyncio.to_thread(get, server.port))[1] for _ in range(5)}
            assert len(texts) == 1  # with what it says of the process
            other = await asyncio.to_thread(
                get, server.port, "/metrics", "application/openmetrics-text"
            )
            assert "x_age 1.0" in other[1] and other[1] not in texts
        assert len(read) == 1
        app = application("x", table, account, loop, fresh_s=0)
        with HttpServer("127.0.0.1:0", app, SILENT) as server:
            for age in (2, 3):
                assert f"x_age {age}.0" in (await asyncio.to_thread(get, server.port))[1]

    asyncio.run(run())


def test_who_thinks_up_versions_is_served_what_the_others_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with the library's later versions, whose answer names the version that was asked for."""
    rendered: list[str] = []

    def encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
        rendered.append(accept)
        return choose_encoder(accept)[0], f"as asked for: {accept}"

    monkeypatch.setattr(runtime.metrics, "choose_encoder", encoder)
    snapshot = _Snapshot("x", (Metric("age", "Age.", "age"),), {"age": 1}, 0)
    for kind in ("application/openmetrics-text", "text/plain"):
        answers = {snapshot.text(f"{kind};version=1.0.{number};q=0.5,*/*") for number in range(9)}
        assert len(answers) == 1
    assert snapshot.text("") == snapshot.text("text/html")
    assert rendered == ["application/openmetrics-text", "text/plain"]


def test_when_the_figures_were_read_is_said() -> None:
    read_s: list[float] = []

    def account() -> Account:
        read_s.append(time.time())
        return {}

    async def run() -> None:
        app = application("x", (), account, asyncio.get_running_loop())
        with HttpServer("127.0.0.1:0", app, SILENT) as server:
            begun_s = time.time()
            got = await asyncio.to_thread(
                urllib.request.urlopen, f"http://127.0.0.1:{server.port}/metrics"
            )
            with got:
                # It has no more digits.
                assert begun_s - 1e-6 <= float(got.headers[TAKEN_AT]) <= read_s[0] + 1e-6

    asyncio.run(run())


def test_a_daemon_that_has_ended_answers_503() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with HttpServer("127.0.0.1:0", application("x", (), dict, loop), SILENT) as server:
        assert get(server.port) == (503, "the daemon ends\n")


def test_there_is_only_metrics() -> None:
    async def run() -> None:
        with serving("127.0.0.1:0", "x", (), dict, Health({}), SILENT) as server:
            assert server is not None
            assert (await asyncio.to_thread(get, server.port, "/"))[0] == 404

    asyncio.run(run())


@pytest.mark.parametrize("endpoint", ["", None])
def test_no_endpoint_no_server(endpoint: str | None) -> None:
    with serving(endpoint, "x", (), dict, Health({}), SILENT) as server:
        assert server is None


def test_a_port_in_use_says_which_key_names_it() -> None:
    async def run(port: int) -> None:
        with serving(f"127.0.0.1:{port}", "x", (), dict, Health({}), SILENT):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"metrics\.listen: cannot listen on 127\.0\.0\.1:{port}"
        ):
            asyncio.run(run(port))
