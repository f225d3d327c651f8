# SPDX-License-Identifier: Apache-2.0
"""A daemon's account of itself, for Prometheus.

The account is a tree of names and figures, made of the dataclasses that count;
``backsightctl`` prints the same. A table of ``Metric`` says which of its paths is
exposed as what. The tree is read on the event loop, where all of it changes,
and served from another thread: a daemon whose loop hangs answers 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from runtime import VERSION, health
from runtime.asking import Hangs, Shared, ask_loop
from runtime.health import Health
from runtime.hosts import not_for_foreign_pages
from runtime.http import HttpServer
from runtime.log import Log

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Account: TypeAlias = Mapping[str, Any]
"""Names, and under each a number, a text, or more names."""

# For how long all are served the same. A scrape takes the event loop, and the interpreter, for some
# milliseconds, and anybody on the machine may scrape; Prometheus does so every 15 s or so.
_FRESH_S = 1.0

TAKEN_AT = "Backsight-Taken-At"
"""The header with when the figures were read, or a moment before: seconds since 1970."""

# Half of what Prometheus waits by default, so that it hears why.
_ANSWER_TIMEOUT_S = 5.0

_CONTENT_TYPE_TEXT = "text/plain; charset=utf-8"

# The two forms that there are, as a scraper asks for them.
_OPEN_METRICS = "application/openmetrics-text"
_PLAIN = "text/plain"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of samples, and where in the account they are.

    ``name`` lacks the daemon's prefix; what ends in ``_total`` only rises. ``at`` is a path,
    its steps joined by "/", or several, each with the labels of its sample. A step {label}
    stands for all names there are, and is a label too. ``scale`` makes base units of the
    account's. A ``histogram`` has a counting.histogram.Histogram there, as a tree.
    """

    name: str
    help: str
    at: str | Mapping[str, Mapping[str, str]]
    scale: float = 1
    histogram: bool = False

    @property
    def places(self) -> Mapping[str, Mapping[str, str]]:
        """All paths, each with the labels that are the same for all that is found there."""
        return {self.at: {}} if isinstance(self.at, str) else self.at

    @property
    def label_names(self) -> tuple[str, ...]:
        """Of all samples, in the order in which they are exposed."""
        path, labels = next(iter(self.places.items()))
        return (*(step[1:-1] for step in path.split("/") if step.startswith("{")), *labels)


@dataclass(frozen=True, slots=True)
class _Found:
    figure: Any
    labels: dict[str, str] = field(default_factory=dict)


def _find(account: Account, path: Sequence[str]) -> Iterator[_Found]:
    step, *rest = path
    if step.startswith("{"):
        for name in account:
            for found in _find(account, (name, *rest)):
                yield _Found(found.figure, {step[1:-1]: name} | found.labels)
    elif step in account:
        if rest:
            yield from _find(account[step], rest)
        else:
            yield _Found(account[step])


def _family(prefix: str, metric: Metric) -> Family:
    arguments = (f"{prefix}_{metric.name}", metric.help)
    if metric.histogram:
        return HistogramMetricFamily(*arguments, labels=metric.label_names)
    if metric.name.endswith("_total"):
        return CounterMetricFamily(*arguments, labels=metric.label_names)
    return GaugeMetricFamily(*arguments, labels=metric.label_names)


def _add(family: Any, labels: Sequence[str], figure: Any, scale: float) -> None:  # noqa: ANN401
    if isinstance(family, HistogramMetricFamily):
        bounds = (*(f"{bound:g}" for bound in figure["bounds"]), "+Inf")
        counts = accumulate(figure["counts"])
        family.add_metric(labels, list(zip(bounds, counts, strict=True)), figure["sum"])
    else:
        family.add_metric(labels, figure * scale)


def families(prefix: str, table: Iterable[Metric], account: Account) -> Iterator[Family]:
    """All metrics of an account; what is not in it has no samples."""
    for metric in table:
        family = _family(prefix, metric)
        for path, labels in metric.places.items():
            for found in _find(account, path.split("/")):
                known = {**found.labels, **labels}
                values = [known[name] for name in metric.label_names]
                _add(family, values, found.figure, metric.scale)
        yield family


class _Daemon(Collector):
    """Collects one account, which was taken before."""

    def __init__(self, prefix: str, table: Iterable[Metric], account: Account) -> None:
        self._prefix = prefix
        self._table = table
        self._account = account

    def collect(self) -> Iterator[Family]:
        yield from families(self._prefix, self._table, self._account)
        build = {"version": VERSION, "python": platform.python_version()}
        # As a gauge, since a type of info exists in OpenMetrics only.
        family = GaugeMetricFamily(
            f"{self._prefix}_build_info", "Which Backsight this is; always 1.", labels=list(build)
        )
        family.add_metric(list(build.values()), 1)
        yield family


class _Snapshot:
    """An account as it was at one moment. For any thread; each form is made once, by one of them."""

    def __init__(
        self, prefix: str, table: Iterable[Metric], account: Account, taken_at_s: float
    ) -> None:
        self.taken_at_s = taken_at_s
        self._registry = CollectorRegistry()
        self._registry.register(_Daemon(prefix, table, account))
        ProcessCollector(registry=self._registry)
        self._lock = threading.Lock()
        self._texts: dict[str, tuple[str, bytes]] = {}

    def text(self, accept: str) -> tuple[str, bytes]:
        """In a form that a scraper takes, with the type of that."""
        # The library may answer with what was asked for, in as many forms as somebody can think of.
        form = _OPEN_METRICS if _OPEN_METRICS in accept else _PLAIN
        with self._lock:
            if form not in self._texts:
                encode, content_type = choose_encoder(form)
                self._texts[form] = content_type, encode(self._registry)
            return self._texts[form]


def application(
    prefix: str,
    table: Sequence[Metric],
    read: Callable[[], Account],
    loop: asyncio.AbstractEventLoop,
    timeout_s: float = _ANSWER_TIMEOUT_S,
    fresh_s: float = _FRESH_S,
) -> WSGIApplication:
    """Serves ``/metrics``; ``read`` is called on the loop, once for all who ask within ``fresh_s``."""

    async def account() -> Account:
        return read()

    def take() -> _Snapshot | Hangs:
        begun_s = time.time()
        try:
            return _Snapshot(prefix, table, ask_loop(loop, account, timeout_s), begun_s)
        except Hangs as hangs:
            return hangs

    shared = Shared(take, fresh_s)

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [("Content-Type", _CONTENT_TYPE_TEXT)])
            return [b"there is only /metrics, /healthz and /readyz\n"]
        snapshot = shared.get()
        if isinstance(snapshot, Hangs):
            start_response("503 Service Unavailable", [("Content-Type", _CONTENT_TYPE_TEXT)])
            return [f"{snapshot}\n".encode()]
        content_type, text = snapshot.text(environ.get("HTTP_ACCEPT", ""))
        taken = (TAKEN_AT, f"{snapshot.taken_at_s:.6f}")
        start_response("200 OK", [("Content-Type", content_type), taken])
        return [text]

    return serve


def serving(
    endpoint: str | None,
    prefix: str,
    table: Sequence[Metric],
    read: Callable[[], Account],
    asked: Health,
    log: Log,
) -> contextlib.AbstractContextManager[HttpServer | None]:
    """Serve metrics and health at HOST:PORT while entered, on the running loop; nowhere without an endpoint.

    OSError if nobody can listen there.
    """
    if not endpoint:
        return contextlib.nullcontext()
    try:
        loop = asyncio.get_running_loop()
        pages = health.application(asked, application(prefix, table, read, loop), loop)
        return HttpServer(endpoint, not_for_foreign_pages(pages), log)
    except OSError as error:
        raise OSError(
            f"metrics.listen: {error}; give it another endpoint, or null to have none"
        ) from error
