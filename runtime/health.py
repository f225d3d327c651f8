# SPDX-License-Identifier: Apache-2.0
"""Whether a daemon lives, and whether it is ready: for whoever asks, who learns nothing else.

    /healthz  200 while the event loop turns: else whoever watches it should start it anew
    /readyz   200 while it does what it is for; 503 with what keeps it from that, as JSON

Both are beside /metrics, so they are served once the daemon listens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from runtime.asking import Hangs, ask_loop
from runtime.watchdog import Ask, sign_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# A thread that does not move for so long keeps the daemon from its work. Less than who asks
# waits for the answer: Kubernetes 1 s, if it is told nothing else.
_SIGN_S = 0.8

# As long as Prometheus's.
_ANSWER_TIMEOUT_S = 5.0


class Health:
    """A daemon's, on its event loop.

    ``threads`` must move; ``waits`` says what else keeps it from its work: a word, and a sentence for each.
    """

    def __init__(
        self,
        threads: Mapping[str, Ask],
        waits: Callable[[], Mapping[str, str]] = dict,
        sign_s: float = _SIGN_S,
    ) -> None:
        self._threads = threads
        self._waits = waits
        self._sign_s = sign_s
        # One question to each at a time, however often others ask.
        self._asked: dict[str, asyncio.Future[None]] = {}

    async def alive(self) -> None:
        """Return at once: whoever can be answered lives."""

    async def why_not_ready(self) -> dict[str, str]:
        """What keeps it from its work; empty: nothing."""
        reasons = dict(self._waits())
        for name, ask in self._threads.items():
            if name not in self._asked or self._asked[name].done():
                self._asked[name] = asyncio.ensure_future(sign_of(ask))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._sign_s)
        for name, asked in self._asked.items():
            if not asked.done():
                reasons[f"{name} thread"] = f"did not move for {self._sign_s:g} s"
        return reasons


def application(
    health: Health,
    otherwise: WSGIApplication,
    loop: asyncio.AbstractEventLoop,
    timeout_s: float = _ANSWER_TIMEOUT_S,
) -> WSGIApplication:
    """Serves both pages, and all else by ``otherwise``."""

    def healthz() -> tuple[str, str]:
        try:
            ask_loop(loop, health.alive, timeout_s)
        except Hangs as hangs:
            return "503 Service Unavailable", f"{hangs}\n"
        return "200 OK", "ok\n"

    def readyz() -> tuple[str, str]:
        try:
            reasons = ask_loop(loop, health.why_not_ready, timeout_s)
        except Hangs as hangs:
            reasons = {"event loop": str(hangs)}
        status = "503 Service Unavailable" if reasons else "200 OK"
        return status, json.dumps({"ready": not reasons, "reasons": reasons}) + "\n"

    pages = {
        "/healthz": (healthz, "text/plain; charset=utf-8"),
        "/readyz": (readyz, "application/json"),
    }

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            return otherwise(environ, start_response)
        answer, content_type = page
        status, text = answer()
        headers = [("Content-Type", content_type), ("Cache-Control", "no-store")]
        start_response(status, headers)
        return [text.encode()]

    return serve
