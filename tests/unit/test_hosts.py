# SPDX-License-Identifier: Apache-2.0
"""What programs ask by any name is nothing for somebody else's page."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket

import pytest

from runtime.health import Health
from runtime.metrics import serving
from tests.unit.logs import SILENT

PROMETHEUS = {"User-Agent": "Prometheus/2.42.0", "Accept": "text/plain", "Accept-Encoding": "gzip"}
BROWSER = {
    "User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
    "Accept-Language": "en-US,en;q=0.5",
}


def asked(path: str, headers: dict[str, str]) -> tuple[int, str]:
    async def run() -> tuple[int, str]:
        with serving("127.0.0.1:0", "x", (), dict, Health({}), SILENT) as server:
            assert server is not None
            return await asyncio.to_thread(ask, server.port)

    def ask(port: int) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/metrics", "/readyz", "/nowhere"])
def test_a_page_whose_name_leads_here_reads_nothing(path: str) -> None:
    status, said = asked(path, BROWSER | {"Host": "evil.example.com:4772"})
    assert status == 421
    assert "a browser asks for this as evil.example.com" in said


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # What a page may do about it.
        ({"User-Agent": "curl/8", "Accept-Language": ""}, 421),
        ({"User-Agent": "Mozilla/5.0"}, 421),
        ({"Origin": "http://evil.example.com"}, 421),
        ({"Referer": "http://evil.example.com/"}, 421),
        ({"Sec-Fetch-Site": "same-origin"}, 421),
        # Who has no page.
        (PROMETHEUS, 200),
        ({"User-Agent": "kube-probe/1.29"}, 200),
        ({}, 200),
    ],
)
def test_by_a_name_that_is_not_known_programs_may_ask(headers: dict[str, str], status: int) -> None:
    assert asked("/metrics", {"Host": "evil.example.com:4772", **headers})[0] == status


@pytest.mark.parametrize(
    "host", ["127.0.0.1:4772", "[::1]:4772", "localhost:4772", "Hub", "hub.local."]
)
def test_a_person_may_look_at_it_where_it_is(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "hub.local")
    assert asked("/metrics", BROWSER | {"Host": host})[0] == 200
